// One level of forward mode on CUDA.
//
// Computes       lse_tangent[r] = sum_v p[r, v] dx[r, v], logp_tangent[r] = dx[r, t] - lse_tangent[r]
// Order          core/lanes.h; each term enters its lane by one fused multiply-add
// Accuracy       absolute, about u (V/B + 12) sum_v p |dx|, u = 2^-24 (2^-53)
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         d lse = sum_v p dx
#include "cuda/kernels.h"
#include "cuda/mean.h"

namespace detlogp::cuda {
namespace {

template <class T, class Acc>
__device__ __forceinline__ void push_row(const TangentArgs& args, int64_t row) {
  __shared__ Groups<Acc> groups;
  const Rows& rows = args.rows;
  auto* logp_tangent = static_cast<Acc*>(args.logp_tangent);
  auto* lse_tangent = static_cast<Acc*>(args.lse_tangent);
  if (!Rows::scored(rows, row)) {
    if (threadIdx.x == 0) {
      logp_tangent[row] = 0;
      lse_tangent[row] = 0;
    }
    return;
  }
  const Acc row_max = per_row<Acc>(args.row_max, row);
  const Acc log_sum = log_sum_of<Acc>(args, row);
  const Acc mean = mean_of_row<T, Acc>(rows, args.tangent, row, row_max, log_sum, groups);
  if (threadIdx.x == 0) {
    const int64_t target = rows.token_ids[row] * args.tangent.column_stride;
    logp_tangent[row] = to_acc<Acc>(row_of<T>(args.tangent, row)[target]) - mean;
    lse_tangent[row] = mean;
  }
}

template <class T, class Acc>
__global__ void __launch_bounds__(kMaxMeanThreads)
    tangent_kernel(const __grid_constant__ TangentArgs args) {
  for (int64_t row = blockIdx.x; row < args.rows.count; row += gridDim.x) {
    push_row<T, Acc>(args, row);
  }
}

template <class Acc>
void launch_for_dtype(const TangentArgs& args, cudaStream_t stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    const int threads = lane_count(args.rows.vocab) / 2;
    tangent_kernel<T, Acc><<<block_count(args.rows.count), threads, 0, stream>>>(args);
    check(cudaGetLastError(), "launch of tangent_kernel");
  });
}

}  // namespace

void launch_tangent(const TangentArgs& args, Arithmetic arithmetic, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (arithmetic == Arithmetic::float64) {
    launch_for_dtype<double>(args, cuda_stream);
  } else {
    launch_for_dtype<float>(args, cuda_stream);
  }
}

}  // namespace detlogp::cuda
