#include "logp.h"

#include <torch/csrc/stable/ops.h>

#include <cfenv>

#include "cpu/kernels.h"
#include "cuda/kernels.h"

namespace detlogp {
namespace {

// Rounding mode and subnormals as the standard has them, whatever this thread was set to: the bits
// must not depend on torch.set_flush_denormal, nor on which worker takes a row.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    fegetenv(&saved_);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() {
    fesetenv(&saved_);
  }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  fenv_t saved_;
};

template <class Args>
void run_on_cpu(void (*kernel)(const Args&, int64_t, int64_t), const Args& args) {
  constexpr int64_t kElementsPerTask = 32768;
  const int64_t rows_per_task = kElementsPerTask / args.rows.vocab + 1;
  torch::stable::parallel_for(0, args.rows.count, rows_per_task, [&](int64_t first, int64_t last) {
    const DefaultFloatEnvironment environment;
    kernel(args, first, last);
  });
}

template <class Args>
struct CudaCall {
  const Args& args;
  bool double_arithmetic;
};

void run_forward(const Tensor& logits, const ForwardArgs& args, bool double_arithmetic) {
  if (args.rows.count == 0) {
    return;
  }
  if (logits.is_cpu()) {
    const cpu::Kernels& kernels = cpu::kernels();
    run_on_cpu(double_arithmetic ? kernels.forward_double : kernels.forward_float, args);
    return;
  }
  CudaCall<ForwardArgs> call{args, double_arithmetic};
  on_cuda_stream(
      logits,
      [](void* stream, void* context) {
#if defined(DETLOGP_CUDA)
        const auto& call = *static_cast<CudaCall<ForwardArgs>*>(context);
        cuda::launch_forward(call.args, call.double_arithmetic, stream);
#endif
      },
      &call);
}

void run_backward(const Tensor& logits, const BackwardArgs& args, bool double_arithmetic) {
  if (args.rows.count == 0) {
    return;
  }
  if (logits.is_cpu()) {
    const cpu::Kernels& kernels = cpu::kernels();
    run_on_cpu(double_arithmetic ? kernels.backward_double : kernels.backward_float, args);
    return;
  }
  CudaCall<BackwardArgs> call{args, double_arithmetic};
  on_cuda_stream(
      logits,
      [](void* stream, void* context) {
#if defined(DETLOGP_CUDA)
        const auto& call = *static_cast<CudaCall<BackwardArgs>*>(context);
        cuda::launch_backward(call.args, call.double_arithmetic, stream);
#endif
      },
      &call);
}

bool is_double(ScalarType compute_dtype) {
  STD_TORCH_CHECK(
      compute_dtype == ScalarType::Float || compute_dtype == ScalarType::Double,
      "detlogp: compute_dtype must be float32 or float64, got ",
      torch::headeronly::toString(compute_dtype));
  return compute_dtype == ScalarType::Double;
}

ForwardArgs to_forward_args(
    const Tensor& logits, const Tensor& token_ids, const std::optional<Tensor>& mask,
    bool nan_for_invalid) {
  ForwardArgs args{};
  args.rows = to_rows(logits, token_ids, mask);
  args.nan_for_invalid = nan_for_invalid;
  return args;
}

Tensor empty_per_row(const Tensor& logits, ScalarType type) {
  return empty_on(logits, logits.sizes().data(), logits.dim() - 1, type);
}

struct Stats {
  Tensor lse;
  Tensor row_max;
  Tensor log_sum;
};

Stats allocate_stats(
    const Tensor& logits, ScalarType dtype, ScalarType compute_dtype, ForwardArgs& args) {
  args.lse_type = to_dtype(dtype, "dtype");
  Stats stats{
      empty_per_row(logits, dtype), empty_per_row(logits, compute_dtype),
      empty_per_row(logits, compute_dtype)};
  args.lse = stats.lse.data_ptr();
  args.row_max = stats.row_max.data_ptr();
  args.log_sum = stats.log_sum.data_ptr();
  return stats;
}

}  // namespace

Tensor logp(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, ScalarType dtype,
    ScalarType compute_dtype, bool nan_for_invalid) {
  const bool double_arithmetic = is_double(compute_dtype);
  ForwardArgs args = to_forward_args(logits, token_ids, mask, nan_for_invalid);
  args.logp_type = to_dtype(dtype, "dtype");
  Tensor result = empty_per_row(logits, dtype);
  args.logp = result.data_ptr();
  run_forward(logits, args, double_arithmetic);
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logp_with_stats(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, ScalarType dtype,
    ScalarType compute_dtype, bool nan_for_invalid) {
  const bool double_arithmetic = is_double(compute_dtype);
  ForwardArgs args = to_forward_args(logits, token_ids, mask, nan_for_invalid);
  args.logp_type = to_dtype(dtype, "dtype");
  Tensor result = empty_per_row(logits, dtype);
  args.logp = result.data_ptr();
  Stats stats = allocate_stats(logits, dtype, compute_dtype, args);
  run_forward(logits, args, double_arithmetic);
  return {result, stats.lse, stats.row_max, stats.log_sum};
}

std::tuple<Tensor, Tensor, Tensor> logp_out(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, ScalarType dtype,
    ScalarType compute_dtype, bool nan_for_invalid, Tensor out) {
  const bool double_arithmetic = is_double(compute_dtype);
  ForwardArgs args = to_forward_args(logits, token_ids, mask, nan_for_invalid);
  args.keep_unselected = true;
  args.logp_type = to_dtype(out.scalar_type(), "out");
  args.logp = per_row_data(out, out.scalar_type(), logits, "out");
  Stats stats = allocate_stats(logits, dtype, compute_dtype, args);
  run_forward(logits, args, double_arithmetic);
  return {stats.lse, stats.row_max, stats.log_sum};
}

Tensor logp_backward(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    std::optional<Tensor> grad_logp, std::optional<Tensor> grad_lse) {
  BackwardArgs args{};
  args.rows = to_rows(logits, token_ids, mask);
  const ScalarType compute_dtype = row_max.scalar_type();
  const bool double_arithmetic = is_double(compute_dtype);
  const auto data = [&](const Tensor& values, const char* name) {
    return per_row_data(values, compute_dtype, logits, name);
  };
  args.row_max = data(row_max, "row_max");
  args.log_sum = data(log_sum, "log_sum");
  args.grad_logp = grad_logp.has_value() ? data(*grad_logp, "grad_logp") : nullptr;
  args.grad_lse = grad_lse.has_value() ? data(*grad_lse, "grad_lse") : nullptr;
  Tensor result = empty_on(logits, logits.sizes().data(), logits.dim(), logits.scalar_type());
  args.grad_logits = result.data_ptr();
  run_backward(logits, args, double_arithmetic);
  return result;
}

std::string select_cpu_path(std::string name) {
  STD_TORCH_CHECK(
      cpu::select_path(name.c_str()),
      "detlogp: the CPU path must be one that this build and processor have, got ", name);
  return cpu::kernels().name;
}

std::string build_info() {
  std::string info = "compiler=" DETLOGP_COMPILER "\n";
  info += "torch=" DETLOGP_TORCH_VERSION "\n";
  info += "cpu_path=" + std::string(cpu::kernels().name) + "\n";
#if defined(DETLOGP_CUDA)
  info += "cuda=" + std::string(cuda::toolkit_version()) + "\n";
  info += "cuda_architectures=" + std::string(cuda::architectures()) + "\n";
#endif
  return info;
}

}  // namespace detlogp
