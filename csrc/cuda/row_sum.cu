// The sum of each row on CUDA.
//
// Computes       sums[r] = sum_v values[r, v]
// Order          core/lanes.h, as the forward's
// Accuracy       at most (ceil(V/B) + 8) u sum_v |values[r, v]|, u = 2^-24 (2^-53)
// Special cases  as IEEE additions have them
// Source         core/lanes.h
#include "cuda/kernels.h"
#include "cuda/lanes.h"

namespace detlogp::cuda {
namespace {

template <class Acc>
__global__ void __launch_bounds__(kMaxLanes)
    row_sum_kernel(const __grid_constant__ RowSumArgs args) {
  __shared__ Groups<Acc> groups;
  for (int64_t row = blockIdx.x; row < args.count; row += gridDim.x) {
    const Acc* values = row_of<Acc>(args.values, row);
    const int64_t stride = args.values.column_stride;
    const auto load = [=](int64_t column) {
      return values[column * stride];
    };
    const auto add = [](Acc sum, Acc value) {
      return sum + value;
    };
    const Acc lane = sum_of_lane<Acc, MeanPolicy::kUnroll>(args.vocab, blockDim.x, load, add);
    const Acc sum = fold_block(lane, blockDim.x, groups);
    if (threadIdx.x == 0) {
      static_cast<Acc*>(args.sums)[row] = sum;
    }
  }
}

template <class Acc>
void launch(const RowSumArgs& args, cudaStream_t stream) {
  const int lanes = lane_count(args.vocab);
  row_sum_kernel<Acc><<<block_count(args.count), lanes, 0, stream>>>(args);
  check(cudaGetLastError(), "launch of row_sum_kernel");
}

}  // namespace

void launch_row_sum(const RowSumArgs& args, Arithmetic arithmetic, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (arithmetic == Arithmetic::float64) {
    launch<double>(args, cuda_stream);
  } else {
    launch<float>(args, cuda_stream);
  }
}

}  // namespace detlogp::cuda
