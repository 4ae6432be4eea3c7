// The vjp of the first-order gradient on CUDA: a Hessian-vector product in one kernel.
//
// Computes       e[r] = sum_v p[r, v] u[r, v]; grad_logits = (grad_lse - grad_logp) p (u - e),
//                grad_grad_logp = u[r, t] - e, grad_grad_lse = e
// Order          core/lanes.h for e, each term by one fused multiply-add; the rest by element
// Accuracy       e: absolute, about u (V/B + 12) sum_v p |u|, u = 2^-24 (2^-53)
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         dp = p (dx - sum_v p dx), in grad_logp (onehot - p) + grad_lse p
#include "cuda/kernels.h"
#include "cuda/mean.h"
#include "cuda/vectors.h"

namespace detlogp::cuda {
namespace {

template <class Acc>
struct RowCurvature {
  Acc row_max;
  Acc log_sum;
  Acc c;
  Acc mean;
};

template <class Acc>
__device__ __forceinline__ Acc element(const RowCurvature<Acc>& row, Acc x, Acc u) {
  const Acc p = exp_of((x - row.row_max) - row.log_sum);
  return second_order_element(row.c, p, u, row.mean);
}

// Columns first <= v < last, one at a time.
template <class T, class Acc>
__device__ __forceinline__ void write_elements(
    const RowCurvature<Acc>& row, const T* x, int64_t x_stride, const T* u, int64_t u_stride,
    T* output, int64_t first, int64_t last) {
  for (int64_t v = first + threadIdx.x; v < last; v += blockDim.x) {
    output[v] = from_acc<T>(
        element(row, to_acc<Acc>(x[v * x_stride]), to_acc<Acc>(u[v * u_stride])));
  }
}

// Columns first <= v < last, 16 bytes at a time; all three pointers are aligned at `first`. Returns
// the first column that is left.
template <class T, class Acc>
__device__ __forceinline__ int64_t write_vectors(
    const RowCurvature<Acc>& row, const T* x, const T* u, T* output, int64_t first, int64_t last) {
  constexpr int kSize = Vector<T>::kSize;
  const auto* logits = reinterpret_cast<const Vector<T>*>(x + first);
  const auto* cotangent = reinterpret_cast<const Vector<T>*>(u + first);
  auto* destination = reinterpret_cast<Vector<T>*>(output + first);
  const int count = static_cast<int>((last - first) / kSize);
#pragma unroll 2
  for (int v = threadIdx.x; v < count; v += blockDim.x) {
    auto values = widened<Acc>(logits[v]);
    const auto factors = widened<Acc>(cotangent[v]);
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      values.of[e] = element(row, values.of[e], factors.of[e]);
    }
    destination[v] = narrowed<T>(values);
  }
  return first + static_cast<int64_t>(count) * kSize;
}

template <class T, class Acc>
__device__ __forceinline__ void differentiate_row(const SecondOrderArgs& args, int64_t row) {
  __shared__ Groups<Acc> groups;
  const Rows& rows = args.rows;
  T* output = static_cast<T*>(args.grad_logits) + row * rows.vocab;
  auto* grad_grad_logp = static_cast<Acc*>(args.grad_grad_logp);
  auto* grad_grad_lse = static_cast<Acc*>(args.grad_grad_lse);
  if (!Rows::scored(rows, row)) {
    for (int64_t column = threadIdx.x; column < rows.vocab; column += blockDim.x) {
      output[column] = T{};
    }
    if (threadIdx.x == 0) {
      grad_grad_logp[row] = 0;
      grad_grad_lse[row] = 0;
    }
    return;
  }
  const Acc row_max = per_row<Acc>(args.row_max, row);
  const Acc log_sum = log_sum_of<Acc>(args, row);
  const Acc c = per_row<Acc>(args.grad_lse, row) - per_row<Acc>(args.grad_logp, row);
  const Acc mean = args.mean == nullptr
                       ? mean_of_row<T, Acc>(rows, args.cotangent, row, row_max, log_sum, groups)
                       : per_row<Acc>(args.mean, row);
  const RowCurvature<Acc> curvature{row_max, log_sum, c, mean};
  const T* x = row_of<T>(rows, row);
  const T* u = row_of<T>(args.cotangent, row);
  const int64_t x_stride = rows.column_stride;
  const int64_t u_stride = args.cotangent.column_stride;
  const int64_t head = elements_to_boundary(output);
  int64_t done = 0;
  if (x_stride == 1 && u_stride == 1 && head < rows.vocab && is_aligned(x + head) &&
      is_aligned(u + head)) {
    write_elements(curvature, x, 1, u, 1, output, 0, head);
    done = write_vectors(curvature, x, u, output, head, rows.vocab);
  }
  write_elements(curvature, x, x_stride, u, u_stride, output, done, rows.vocab);
  if (threadIdx.x == 0) {
    const int64_t column = Rows::target(rows, row);
    const T target = Rows::has_column(rows, column) ? u[column * u_stride] : T{};
    grad_grad_logp[row] = to_acc<Acc>(target) - mean;
    grad_grad_lse[row] = mean;
  }
}

template <class T, class Acc>
__global__ void __launch_bounds__(kMaxMeanThreads)
    second_order_kernel(const __grid_constant__ SecondOrderArgs args) {
  for (int64_t row = blockIdx.x; row < args.rows.count; row += gridDim.x) {
    differentiate_row<T, Acc>(args, row);
  }
}

template <class Acc>
void launch_for_dtype(const SecondOrderArgs& args, cudaStream_t stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    const int threads = lane_count(args.rows.vocab) / 2;
    second_order_kernel<T, Acc><<<block_count(args.rows.count), threads, 0, stream>>>(args);
    check(cudaGetLastError(), "launch of second_order_kernel");
  });
}

}  // namespace

void launch_second_order(const SecondOrderArgs& args, Arithmetic arithmetic, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (arithmetic == Arithmetic::float64) {
    launch_for_dtype<double>(args, cuda_stream);
  } else {
    launch_for_dtype<float>(args, cuda_stream);
  }
}

}  // namespace detlogp::cuda
