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

namespace detlogp::cuda {
namespace {

// This thread's columns; several loads are in flight at a time.
template <class T, class Acc>
__device__ __forceinline__ void write_columns(
    const T* x, int64_t x_stride, const T* u, int64_t u_stride, T* output, int64_t vocab,
    Acc row_max, Acc log_sum, Acc c, Acc mean) {
  constexpr int kUnroll = MeanPolicy::kUnroll;
  const int step = blockDim.x;
  const auto write = [=](int64_t column, Pair<T> pair) {
    const Acc p = exp_of((to_acc<Acc>(pair.x) - row_max) - log_sum);
    output[column] = from_acc<T>(second_order_element(c, p, to_acc<Acc>(pair.w), mean));
  };
  int64_t column = threadIdx.x;
  for (; column + (kUnroll - 1) * step < vocab; column += kUnroll * step) {
    Pair<T> loaded[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      loaded[i] = {x[(column + i * step) * x_stride], u[(column + i * step) * u_stride]};
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      write(column + i * step, loaded[i]);
    }
  }
  for (; column < vocab; column += blockDim.x) {
    write(column, {x[column * x_stride], u[column * u_stride]});
  }
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
  const Acc log_sum = per_row<Acc>(args.log_sum, row);
  const Acc c = per_row<Acc>(args.grad_lse, row) - per_row<Acc>(args.grad_logp, row);
  const Acc mean = mean_of_row<T, Acc>(rows, args.cotangent, row, row_max, log_sum, groups);
  const T* x = row_of<T>(rows, row);
  const T* u = row_of<T>(args.cotangent, row);
  const int64_t x_stride = rows.column_stride;
  const int64_t u_stride = args.cotangent.column_stride;
  if (x_stride == 1 && u_stride == 1) {
    write_columns<T, Acc>(x, 1, u, 1, output, rows.vocab, row_max, log_sum, c, mean);
  } else {
    write_columns<T, Acc>(x, x_stride, u, u_stride, output, rows.vocab, row_max, log_sum, c, mean);
  }
  if (threadIdx.x == 0) {
    grad_grad_logp[row] = to_acc<Acc>(u[rows.token_ids[row] * u_stride]) - mean;
    grad_grad_lse[row] = mean;
  }
}

template <class T, class Acc>
__global__ void __launch_bounds__(kMaxLanes)
    second_order_kernel(const __grid_constant__ SecondOrderArgs args) {
  for (int64_t row = blockIdx.x; row < args.rows.count; row += gridDim.x) {
    differentiate_row<T, Acc>(args, row);
  }
}

template <class Acc>
void launch_for_dtype(const SecondOrderArgs& args, cudaStream_t stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    const int lanes = lane_count(args.rows.vocab);
    second_order_kernel<T, Acc><<<block_count(args.rows.count), lanes, 0, stream>>>(args);
    check(cudaGetLastError(), "launch of second_order_kernel");
  });
}

}  // namespace

void launch_second_order(const SecondOrderArgs& args, bool double_arithmetic, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (double_arithmetic) {
    launch_for_dtype<double>(args, cuda_stream);
  } else {
    launch_for_dtype<float>(args, cuda_stream);
  }
}

}  // namespace detlogp::cuda
