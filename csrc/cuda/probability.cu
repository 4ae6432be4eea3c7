// The softmax of each row on CUDA.
//
// Computes       p[r, v] = exp((x - m) - log(s)), m and log(s) given
// Order          element by element: no sum
// Accuracy       relative u (2 log(1/p) + H + V/B + 16) against the exact softmax, u = 2^-24 (2^-53)
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         docs/contract.md
#include "core/row.h"
#include "cuda/kernels.h"
#include "cuda/lanes.h"

namespace detlogp::cuda {
namespace {

template <class T, class Acc>
__global__ void __launch_bounds__(kMaxLanes)
    probability_kernel(const __grid_constant__ ProbabilityArgs args) {
  const Rows& rows = args.rows;
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    Acc* output = static_cast<Acc*>(args.probability) + row * rows.vocab;
    const bool scored = Rows::scored(rows, row);
    const T* x = row_of<T>(rows, row);
    const Acc row_max = per_row<Acc>(args.row_max, row);
    const Acc log_sum = log_sum_of<Acc>(args, row);
#pragma unroll 8
    for (int64_t column = threadIdx.x; column < rows.vocab; column += blockDim.x) {
      output[column] =
          scored ? exp_of((to_acc<Acc>(x[column * rows.column_stride]) - row_max) - log_sum)
                 : Acc(0);
    }
  }
}

template <class Acc>
void launch_for_dtype(const ProbabilityArgs& args, cudaStream_t stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    const int lanes = lane_count(args.rows.vocab);
    probability_kernel<T, Acc><<<block_count(args.rows.count), lanes, 0, stream>>>(args);
    check(cudaGetLastError(), "launch of probability_kernel");
  });
}

}  // namespace

void launch_probability(const ProbabilityArgs& args, Arithmetic arithmetic, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (arithmetic == Arithmetic::float64) {
    launch_for_dtype<double>(args, cuda_stream);
  } else {
    launch_for_dtype<float>(args, cuda_stream);
  }
}

}  // namespace detlogp::cuda
