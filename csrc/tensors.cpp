#include "tensors.h"

#include <array>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(DETLOGP_CUDA)
#include <dlfcn.h>

#include "cuda/kernels.h"
#endif

namespace detlogp {

Dtype to_dtype(ScalarType type, const char* name) {
  switch (type) {
    case ScalarType::Half:
      return Dtype::float16;
    case ScalarType::BFloat16:
      return Dtype::bfloat16;
    case ScalarType::Float:
      return Dtype::float32;
    case ScalarType::Double:
      return Dtype::float64;
    default:
      STD_TORCH_CHECK(
          false, "detlogp: ", name, " must be float16, bfloat16, float32 or float64, got ",
          torch::headeronly::toString(type));
  }
}

Dtype checked_dtype(int64_t number, const char* name) {
  STD_TORCH_CHECK(
      number >= 0 && number <= static_cast<int>(Dtype::float64), "detlogp: ", name,
      " must be the number of a dtype, 0 to 3, got ", number);
  return static_cast<Dtype>(number);
}

ScalarType scalar_type(Dtype type) {
  constexpr ScalarType types[] = {
      ScalarType::Half, ScalarType::BFloat16, ScalarType::Float, ScalarType::Double};
  return types[static_cast<int>(type)];
}

Tensor empty_on(const Tensor& like, const int64_t* sizes, int64_t dims, ScalarType type) {
  constexpr int64_t kMaxDims = 64;
  STD_TORCH_CHECK(dims <= kMaxDims, "detlogp: at most 64 dimensions, got ", dims);
  std::array<int64_t, kMaxDims> strides;
  int64_t stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  }
  int32_t device_type;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const int32_t dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dims, sizes, strides.data(), dtype, device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

Tensor empty_matrix(const Tensor& logits, ScalarType type) {
  Tensor result = empty_on(logits, logits.sizes().data(), logits.dim(), type);
#if defined(__linux__)
  // Memory that the system has just given is mapped at the first touch, 4 KB at a time: that takes
  // longer than the arithmetic. Pages of 2 MB are wherever the system lets a program ask for them.
  constexpr uintptr_t kHugePage = 2 << 20;
  if (result.is_cpu()) {
    const uintptr_t begin = reinterpret_cast<uintptr_t>(result.data_ptr());
    const uintptr_t end = begin + static_cast<uintptr_t>(result.numel()) * result.element_size();
    const uintptr_t first = (begin + kHugePage - 1) & ~(kHugePage - 1);
    if (first + kHugePage <= end) {
      madvise(reinterpret_cast<void*>(first), (end - first) & ~(kHugePage - 1), MADV_HUGEPAGE);
    }
  }
#endif
  return result;
}

RowLayout row_layout(const Tensor& logits) {
  RowLayout layout{};
  const auto sizes = logits.sizes();
  const auto strides = logits.strides();
  for (size_t d = 0; d + 1 < sizes.size(); ++d) {
    if (sizes[d] == 1) {
      continue;
    }
    const int last = layout.dims - 1;
    if (layout.dims > 0 && layout.stride[last] == sizes[d] * strides[d]) {
      layout.size[last] *= sizes[d];
      layout.stride[last] = strides[d];
      continue;
    }
    STD_TORCH_CHECK(
        layout.dims < kMaxLeadingDims, "detlogp: logits may have at most ", kMaxLeadingDims,
        " leading dimensions that cannot be merged; call contiguous() on it");
    layout.size[layout.dims] = sizes[d];
    layout.stride[layout.dims] = strides[d];
    ++layout.dims;
  }
  return layout;
}

bool same_device(const Tensor& a, const Tensor& b) {
  int32_t type_of_a;
  int32_t type_of_b;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(a.get(), &type_of_a));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(b.get(), &type_of_b));
  return type_of_a == type_of_b && a.get_device_index() == b.get_device_index();
}

void* per_row_data(const Tensor& values, ScalarType type, const Tensor& logits, const char* name) {
  STD_TORCH_CHECK(
      values.scalar_type() == type, "detlogp: ", name, " must be ",
      torch::headeronly::toString(type), ", got ",
      torch::headeronly::toString(values.scalar_type()));
  const auto leading = logits.sizes();
  const auto sizes = values.sizes();
  bool fits = sizes.size() + 1 == leading.size();
  for (size_t d = 0; fits && d < sizes.size(); ++d) {
    fits = sizes[d] == leading[d];
  }
  STD_TORCH_CHECK(fits, "detlogp: ", name, " must have logits' leading shape");
  STD_TORCH_CHECK(values.is_contiguous(), "detlogp: ", name, " must be contiguous");
  STD_TORCH_CHECK(same_device(values, logits), "detlogp: ", name, " must be on logits' device");
  return values.data_ptr();
}

const void* optional_per_row_data(
    const std::optional<Tensor>& values, const Tensor& row_max, const Tensor& logits,
    const char* name) {
  return values.has_value() ? per_row_data(*values, row_max.scalar_type(), logits, name) : nullptr;
}

Arithmetic checked_arithmetic(int64_t number) {
  STD_TORCH_CHECK(
      number >= 0 && number <= 2, "detlogp: arithmetic must be 0, 1 or 2, got ", number);
  return static_cast<Arithmetic>(number);
}

Tensor empty_per_row(const Tensor& logits, ScalarType type) {
  return empty_on(logits, logits.sizes().data(), logits.dim() - 1, type);
}

bool is_double(ScalarType compute_dtype) {
  STD_TORCH_CHECK(
      compute_dtype == ScalarType::Float || compute_dtype == ScalarType::Double,
      "detlogp: compute_dtype must be float32 or float64, got ",
      torch::headeronly::toString(compute_dtype));
  return compute_dtype == ScalarType::Double;
}

Operand to_operand(const Tensor& matrix, const Tensor& logits, const char* name) {
  STD_TORCH_CHECK(
      matrix.scalar_type() == logits.scalar_type(), "detlogp: ", name, " must have logits' dtype");
  STD_TORCH_CHECK(same_device(matrix, logits), "detlogp: ", name, " must be on logits' device");
  const auto sizes = matrix.sizes();
  const auto expected = logits.sizes();
  bool fits = sizes.size() == expected.size();
  for (size_t d = 0; fits && d < sizes.size(); ++d) {
    fits = sizes[d] == expected[d];
  }
  STD_TORCH_CHECK(fits, "detlogp: ", name, " must have logits' shape");
  return {matrix.const_data_ptr(), row_layout(matrix), matrix.stride(matrix.dim() - 1)};
}

int64_t row_count(const Tensor& logits) {
  const auto sizes = logits.sizes();
  int64_t count = 1;
  for (size_t d = 0; d + 1 < sizes.size(); ++d) {
    count *= sizes[d];
  }
  return count;
}

Rows to_rows(
    const Tensor& logits, const Tensor& token_ids, const std::optional<Tensor>& mask,
    int64_t first_column, std::optional<int64_t> vocab_size) {
  const int64_t dims = logits.dim();
  STD_TORCH_CHECK(dims >= 1, "detlogp: logits must have at least one dimension, got 0");
  Rows rows{};
  rows.logits_type = to_dtype(logits.scalar_type(), "logits");
  rows.vocab = logits.size(dims - 1);
  rows.first_column = first_column;
  rows.whole_vocab = vocab_size.value_or(rows.vocab);
  STD_TORCH_CHECK(
      vocab_size.has_value() || rows.vocab >= 1,
      "detlogp: logits must have at least one column, got 0");
  STD_TORCH_CHECK(
      first_column >= 0 && rows.whole_vocab >= 1 && rows.vocab <= rows.whole_vocab - first_column,
      "detlogp: columns from ", first_column, " must lie in rows of ", rows.whole_vocab, ", got ",
      rows.vocab, " of them");
  rows.count = row_count(logits);
  rows.layout = row_layout(logits);
  rows.column_stride = logits.stride(dims - 1);
  rows.logits = logits.const_data_ptr();
  rows.token_ids =
      static_cast<const int64_t*>(per_row_data(token_ids, ScalarType::Long, logits, "token_ids"));
  if (mask.has_value()) {
    rows.mask = static_cast<const bool*>(per_row_data(*mask, ScalarType::Bool, logits, "mask"));
  }
  return rows;
}

Rows to_rows(const Tensor& logits, const Tensor& token_ids, const std::optional<Tensor>& mask) {
  return to_rows(logits, token_ids, mask, 0, std::nullopt);
}

#if defined(DETLOGP_CUDA)
namespace {

using GetStream = AOTITorchError (*)(int32_t device_index, void** stream);

// In libtorch_cuda alone, so it cannot be linked: the library must load where there is none.
GetStream find_get_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
  void* symbol = library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr;
  STD_TORCH_CHECK(symbol, "detlogp: logits are on CUDA, but libtorch_cuda.so is not loaded");
  return reinterpret_cast<GetStream>(symbol);
}

}  // namespace

void on_cuda_stream(
    const Tensor& logits, void (*launch)(void* stream, void* context), void* context) {
  static const GetStream get_stream = find_get_stream();
  const int32_t device = logits.get_device_index();
  void* stream;
  STABLE_TORCH_ERROR_CODE_CHECK(get_stream(device, &stream));
  const cuda::DeviceScope scope(device);
  launch(stream, context);
}
#else
void on_cuda_stream(const Tensor&, void (*)(void*, void*), void*) {
  STD_TORCH_CHECK(
      false,
      "detlogp: logits are on CUDA, but this build has no CUDA kernels (nvcc was not found, "
      "or the build was configured with DETLOGP_CUDA=OFF)");
}
#endif

}  // namespace detlogp
