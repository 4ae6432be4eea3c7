// The vjp of the first-order gradient on CUDA: a Hessian-vector product. One kernel sums, one writes.
//
// Computes       e[r] = sum_v p[r, v] u[r, v]; grad_logits = (grad_lse - grad_logp) p (u - e),
//                grad_grad_logp = u[r, t] - e, grad_grad_lse = e
// Order          core/lanes.h for e, each term by one fused multiply-add; the rest by element
// Accuracy       e: absolute, about u (V/B + 12) sum_v p |u|, u = 2^-24 (2^-53)
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         dp = p (dx - sum_v p dx), in grad_logp (onehot - p) + grad_lse p
#include "cuda/kernels.h"
#include "cuda/mean.h"
#include "cuda/row_part.h"

namespace detlogp::cuda {
namespace {

// e, and what follows from it: a block of B / 2 threads a row.
template <class T, class Acc>
__global__ void __launch_bounds__(kMaxMeanThreads)
    second_order_mean_kernel(const __grid_constant__ SecondOrderArgs args) {
  __shared__ Groups<Acc> groups;
  const Rows& rows = args.rows;
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    const bool is_scored = Rows::scored(rows, row);
    Acc mean = 0;
    if (is_scored && args.mean == nullptr) {
      const Acc row_max = per_row<Acc>(args.row_max, row);
      mean = mean_of_row<T, Acc>(
          rows, args.cotangent, row, row_max, log_sum_of<Acc>(args, row), groups);
    } else if (is_scored) {
      mean = per_row<Acc>(args.mean, row);
    }
    if (threadIdx.x == 0) {
      const int64_t column = is_scored ? Rows::target(rows, row) : -1;
      const T* u = row_of<T>(args.cotangent, row);
      const T target =
          Rows::has_column(rows, column) ? u[column * args.cotangent.column_stride] : T{};
      static_cast<Acc*>(args.grad_grad_logp)[row] = to_acc<Acc>(target) - mean;
      static_cast<Acc*>(args.grad_grad_lse)[row] = mean;
    }
  }
}

template <class Acc>
struct RowCurvature {
  Acc row_max;
  Acc log_sum;
  Acc c;
  Acc mean;

  __device__ __forceinline__ RowCurvature(const SecondOrderArgs& args, int64_t row)
      : row_max(per_row<Acc>(args.row_max, row)),
        log_sum(log_sum_of<Acc>(args, row)),
        c(per_row<Acc>(args.grad_lse, row) - per_row<Acc>(args.grad_logp, row)),
        mean(per_row<Acc>(args.grad_grad_lse, row)) {
  }
  __device__ __forceinline__ Acc element(Acc x, Acc u) const {
    return second_order_element(c, exp_of((x - row_max) - log_sum), u, mean);
  }
};

template <class T, class Acc>
__device__ __forceinline__ void differentiate_part(
    const SecondOrderArgs& args, int64_t row, int64_t part) {
  const Rows& rows = args.rows;
  T* output = static_cast<T*>(args.grad_logits) + row * rows.vocab;
  const RowPart<T> columns(output, part, rows.vocab);
  output += columns.begin;
  if (!Rows::scored(rows, row)) {
    columns.zero(output);
    return;
  }
  const int64_t x_stride = rows.column_stride;
  const int64_t u_stride = args.cotangent.column_stride;
  const T* x = row_of<T>(rows, row) + columns.begin * x_stride;
  const T* u = row_of<T>(args.cotangent, row) + columns.begin * u_stride;
  const RowCurvature<Acc> curvature(args, row);
  const auto differentiate = [&](int column) {
    const auto of_x = to_acc<Acc>(x[column * x_stride]);
    const auto of_u = to_acc<Acc>(u[column * u_stride]);
    output[column] = from_acc<T>(curvature.element(of_x, of_u));
  };
  if (x_stride != 1 || u_stride != 1 || !is_aligned(x + columns.body) ||
      !is_aligned(u + columns.body)) {
    columns.for_each(differentiate);
    return;
  }
  columns.for_each_single(differentiate);
  const auto* logits = reinterpret_cast<const Vector<T>*>(x + columns.body);
  const auto* cotangent = reinterpret_cast<const Vector<T>*>(u + columns.body);
  auto* destination = reinterpret_cast<Vector<T>*>(output + columns.body);
#pragma unroll 2
  for (int v = threadIdx.x; v < columns.count; v += columns.kThreads) {
    auto values = widened<Acc>(load_streaming(logits + v));
    const auto factors = widened<Acc>(load_streaming(cotangent + v));
#pragma unroll
    for (int e = 0; e < Vector<T>::kSize; ++e) {
      values.of[e] = curvature.element(values.of[e], factors.of[e]);
    }
    store_streaming(destination + v, narrowed<T>(values));
  }
}

template <class T, class Acc>
__global__ void __launch_bounds__(
    BackwardPolicy::kThreads, sizeof(Acc) == 8 ? 1 : BackwardPolicy::kGeneralBlocks)
    second_order_kernel(const __grid_constant__ SecondOrderArgs args) {
  for_each_part(args.rows.count, [&](int64_t row, int64_t part) {
    differentiate_part<T, Acc>(args, row, part);
  });
}

template <class Acc>
void launch_for_dtype(const SecondOrderArgs& args, cudaStream_t stream) {
  const Rows& rows = args.rows;
  visit_dtype(rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    const int threads = lane_count(rows.vocab) / 2;
    second_order_mean_kernel<T, Acc><<<block_count(rows.count), threads, 0, stream>>>(args);
    check(cudaGetLastError(), "launch of second_order_mean_kernel");
    const dim3 blocks = grid_of_parts<T>(rows.count, rows.vocab);
    second_order_kernel<T, Acc><<<blocks, BackwardPolicy::kThreads, 0, stream>>>(args);
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
