// Forward on CUDA where more is asked for: logits divided by a temperature, or the entropy.
//
// Computes       what cuda/forward.cu does, of x / temperature; and the entropy log(s) + sum_v e (m - x) / s
// Order          core/lanes.h, the entropy's in fours (core/row.h): thread k of a block of B is lane k
// Accuracy       detlogp.testing.logp_error_bound, entropy_error_bound
// Special cases  core/row.h
// Source         docs/contract.md; the exponentials are those of cuda/forward.cu, written out
#include "cuda/exp.h"
#include "cuda/forward.h"
#include "cuda/row_max.h"

namespace detlogp::cuda {
namespace {

// A lane of the sum, and of the entropy's.
template <class Acc>
struct TwoLanes {
  Acc sum;
  Acc part;
  Acc total;
  int parts;

  __device__ __forceinline__ TwoLanes(int zero) : sum(zero), part(zero), total(zero), parts(zero) {
  }

  __device__ __forceinline__ void add(Acc row_max, Acc x) {
    part = fused_multiply_add(add_exp(x - row_max), distance_below_max(row_max, x), part);
    if (++parts == kEntropyGroup) {
      flush();
    }
  }
  __device__ __forceinline__ void flush() {
    total += part;
    part = 0;
    parts = 0;
  }

 private:
  // Returns the exponential, with the sum's own bits: its last product is fused (cuda/exp.h).
  __device__ __forceinline__ float add_exp(float x) {
    const ExpParts parts = exp_parts(x);
    sum = __fmaf_rn(parts.fraction, parts.power, sum);
    return __fmul_rn(parts.fraction, parts.power);
  }
  __device__ __forceinline__ double add_exp(double x) {
    const double e = exp_of(x);
    sum += e;
    return e;
  }
};

template <class T, class Acc>
__device__ __forceinline__ void score_row(const ForwardArgs& args, int64_t row) {
  __shared__ Groups<Acc> groups;
  const Rows& rows = args.rows;
  if (!Rows::scored(rows, row)) {
    if (threadIdx.x == 0) {
      store_skipped_row<Acc>(args, row);
    }
    return;
  }
  const int threads = blockDim.x;
  const T* logits = row_of<T>(rows, row);
  const int64_t stride = rows.column_stride;
  const Divisor<Acc> divide(args.temperature);
  const Acc largest = max_of_row<T>(logits, stride, rows.vocab, threads, groups);
  const Acc row_max = max_of_quotients(largest, divide.value);
  const auto load = [=](int64_t column) {
    return logits[column * stride];
  };
  const auto add = [=](TwoLanes<Acc> lanes, T x) {
    lanes.add(row_max, divide(to_acc<Acc>(x)));
    return lanes;
  };
  TwoLanes<Acc> lanes =
      sum_of_lane<TwoLanes<Acc>, ForwardPolicy::kGeneralUnroll>(rows.vocab, threads, load, add);
  lanes.flush();
  const Acc sum = fold_block(lanes.sum, threads, groups);
  const Acc entropy = fold_block(lanes.total, threads, groups);
  if (threadIdx.x == 0) {
    const Acc target = to_acc<Acc>(logits[rows.token_ids[row] * stride]) / divide.value;
    store_scored_row(args, row, target, row_max, log_of(sum), entropy / sum);
  }
}

template <class T, class Acc>
__global__ void __launch_bounds__(kMaxLanes)
    general_forward_kernel(const __grid_constant__ ForwardArgs args) {
  for (int64_t row = blockIdx.x; row < args.rows.count; row += gridDim.x) {
    score_row<T, Acc>(args, row);
  }
}

template <class Acc>
void launch_for_dtype(const ForwardArgs& args, cudaStream_t stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    const int lanes = lane_count(args.rows.vocab);
    general_forward_kernel<T, Acc><<<block_count(args.rows.count), lanes, 0, stream>>>(args);
    check(cudaGetLastError(), "launch of general_forward_kernel");
  });
}

}  // namespace

void launch_general_rows(const ForwardArgs& args, bool in_double, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  if (in_double) {
    launch_for_dtype<double>(args, cuda_stream);
  } else {
    launch_for_dtype<float>(args, cuda_stream);
  }
}

}  // namespace detlogp::cuda
