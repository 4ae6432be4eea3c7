// First-order gradient on CUDA.
//
// Computes       grad_logits = grad_logp (onehot - p) + grad_lse p, p = exp((x - m) - log(s))
// Order          element by element: no sum
// Accuracy       |g| (2^-22 + p (V/B + 12) 2^-24) before the rounding to the logits' type
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         d logp = dx[t] - sum_v p[v] dx[v], d lse = sum_v p[v] dx[v]
#include "core/row.h"
#include "cuda/device.h"
#include "cuda/kernels.h"
#include "cuda/policy.h"

namespace detlogp::cuda {
namespace {

template <class Acc>
struct RowGradient {
  Acc row_max;
  Acc log_sum;
  Acc grad;
  Acc grad_lse;
  int64_t target;  // -1: the row is exactly zero
  bool has_lse;
};

template <class Acc>
__device__ RowGradient<Acc> load_row_gradient(const BackwardArgs& args, int64_t row) {
  const Rows& rows = args.rows;
  const auto value = [row](const void* data) {
    return data == nullptr ? Acc(0) : static_cast<const Acc*>(data)[row];
  };
  const bool scored = Rows::selected(rows, row) && Rows::valid(rows, row);
  return {value(args.row_max),
          value(args.log_sum),
          value(args.grad_logp),
          value(args.grad_lse),
          scored ? rows.token_ids[row] : -1,
          args.grad_lse != nullptr};
}

template <class T, class Acc>
__device__ __forceinline__ T element(const RowGradient<Acc>& g, T x, int64_t column) {
  const Acc p = exp_of((to_acc<Acc>(x) - g.row_max) - g.log_sum);
  return from_acc<T>(gradient(column == g.target, p, g.grad, g.grad_lse, g.has_lse));
}

// One tile of one row: kVectors 16-byte vectors a thread, or as many single elements.
template <class T, class Acc>
struct Tile {
  static constexpr int kThreads = BackwardPolicy::kThreads;
  static constexpr int kVectors = BackwardPolicy::kVectors;
  static constexpr int kColumns = kThreads * kVectors * Vector<T>::kSize;
};

template <class T, class Acc>
__device__ __forceinline__ void differentiate_vectors(
    const RowGradient<Acc>& g, const T* input, T* output, int64_t column) {
  constexpr int kVectors = Tile<T, Acc>::kVectors;
  Vector<T> loaded[kVectors];
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t first = column + (v * Tile<T, Acc>::kThreads + threadIdx.x) * Vector<T>::kSize;
    loaded[v] = *reinterpret_cast<const Vector<T>*>(input + first);
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t first = column + (v * Tile<T, Acc>::kThreads + threadIdx.x) * Vector<T>::kSize;
#pragma unroll
    for (int e = 0; e < Vector<T>::kSize; ++e) {
      loaded[v].element[e] = element(g, loaded[v].element[e], first + e);
    }
    *reinterpret_cast<Vector<T>*>(output + first) = loaded[v];
  }
}

template <class T, class Acc>
__device__ __forceinline__ void differentiate_elements(
    const RowGradient<Acc>& g, const T* input, int64_t stride, T* output, int64_t first,
    int64_t last) {
  for (int64_t column = first + threadIdx.x; column < last; column += Tile<T, Acc>::kThreads) {
    output[column] = element(g, input[column * stride], column);
  }
}

template <class T>
__device__ __forceinline__ void zero_elements(T* output, int64_t first, int64_t last, int threads) {
  const int64_t boundary = first + elements_to_boundary(output + first);
  const int64_t body = boundary < last ? boundary : last;
  const int64_t vectors = (last - body) / Vector<T>::kSize;
  const int64_t tail = body + vectors * Vector<T>::kSize;
  for (int64_t v = threadIdx.x; v < vectors; v += threads) {
    *reinterpret_cast<uint4*>(output + body + v * Vector<T>::kSize) = make_uint4(0, 0, 0, 0);
  }
  for (int64_t column = first + threadIdx.x; column < body; column += threads) {
    output[column] = T{};
  }
  for (int64_t column = tail + threadIdx.x; column < last; column += threads) {
    output[column] = T{};
  }
}

// Tile 0 also takes the few columns before the output row's first 16-byte boundary.
template <class T, class Acc>
__device__ void differentiate_tile(const BackwardArgs& args, int64_t row, int64_t tile) {
  const Rows& rows = args.rows;
  T* output = static_cast<T*>(args.grad_logits) + row * rows.vocab;
  const int64_t boundary = elements_to_boundary(output);
  const int64_t head = boundary < rows.vocab ? boundary : rows.vocab;
  const int64_t first = head + tile * Tile<T, Acc>::kColumns;
  const int64_t end = first + Tile<T, Acc>::kColumns;
  const int64_t last = end < rows.vocab ? end : rows.vocab;
  const RowGradient<Acc> g = load_row_gradient<Acc>(args, row);
  if (g.target < 0) {
    zero_elements(output, tile == 0 ? 0 : first, last, Tile<T, Acc>::kThreads);
    return;
  }
  const T* input = static_cast<const T*>(rows.logits) + RowLayout::offset(rows.layout, row);
  if (tile == 0) {
    differentiate_elements<T, Acc>(g, input, rows.column_stride, output, 0, head);
  }
  if (end <= rows.vocab && rows.column_stride == 1 && is_aligned(input + first)) {
    differentiate_vectors<T, Acc>(g, input, output, first);
  } else {
    differentiate_elements<T, Acc>(g, input, rows.column_stride, output, first, last);
  }
}

template <class T, class Acc>
__global__ void __launch_bounds__(BackwardPolicy::kThreads)
    backward_kernel(const __grid_constant__ BackwardArgs args, int64_t tiles_per_row) {
  const int64_t tiles = args.rows.count * tiles_per_row;
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    differentiate_tile<T, Acc>(args, tile / tiles_per_row, tile % tiles_per_row);
  }
}

template <class Acc>
void launch_for_dtype(const BackwardArgs& args, cudaStream_t stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kColumns = Tile<T, Acc>::kColumns;
    const int64_t tiles_per_row = (args.rows.vocab + kColumns - 1) / kColumns;
    const int64_t tiles = args.rows.count * tiles_per_row;
    const int64_t blocks = tiles < INT32_MAX ? tiles : INT32_MAX;
    backward_kernel<T, Acc><<<static_cast<unsigned>(blocks), BackwardPolicy::kThreads, 0, stream>>>(
        args, tiles_per_row);
    check(cudaGetLastError(), "launch of backward_kernel");
  });
}

}  // namespace

void launch_backward(const BackwardArgs& args, bool double_arithmetic, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (double_arithmetic) {
    launch_for_dtype<double>(args, cuda_stream);
  } else {
    launch_for_dtype<float>(args, cuda_stream);
  }
}

}  // namespace detlogp::cuda
