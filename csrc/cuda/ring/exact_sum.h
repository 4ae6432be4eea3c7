// The summing warps of the exact contract: whole numbers, so every warp adds its stages' terms by itself,
// and tells the finishers what they come to.
#pragma once

#include "core/exact.h"
#include "cuda/lanes.h"
#include "cuda/ring/reader.h"

namespace detlogp::cuda::ring {

template <class S>
class ExactSummer {
 public:
  __device__ __forceinline__ ExactSummer(const Block<S>& block, int thread)
      : block_(block),
        reader_(block, thread),
        warp_(thread / 32),
        set_(thread / S::kSetThreads),
        log2_scale_(log2_quanta(block.vocab)) {
  }

  __device__ __forceinline__ void run() {
    Shared<S>& shared = block_.shared;
    Cursor row;
    int stage = set_;
    while (true) {
      wait(shared.listed[row.slot], row.parity);
      const RowInfo info = shared.info[row.slot];
      if (info.row < 0) {
        return;
      }
      reader_.begin(info);
      wait_for_cluster<S::kCluster>(shared.full[row.slot], row.parity);
      const float row_max = max_of_row(shared, row.slot);
      const ExactScale scale = scale_of_sum(row_max, log2_scale_);
      // Almost no row has a base; the others save its subtraction.
      const uint64_t sum =
          scale.base == 0 ? sum_of_stages<false>(stage, scale) : sum_of_stages<true>(stage, scale);
      publish(sum, row_max, row.slot);
      row.advance(S::kRowSlots);
    }
  }

 private:
  template <bool HasBase>
  __device__ __forceinline__ uint64_t sum_of_stages(int& stage, const ExactScale& scale) {
    uint64_t sum = 0;
    const auto term = [&](float x) {
      return to_quanta(exact_exp_of(scale, HasBase ? x - scale.base : x));
    };
    for (; stage < block_.stages_per_row; stage += S::kSets) {
      reader_.read(stage, [&](const auto& columns) {
#pragma unroll
        for (int l = 0; l < S::kThreadLanes; ++l) {
#pragma unroll
          for (int p = 0; p < S::kPeriods; ++p) {
            sum += term(columns[p].widened(l));
          }
        }
      });
    }
    stage -= block_.stages_per_row;
    return sum;
  }

  __device__ __forceinline__ void publish(uint64_t sum, float row_max, int slot) {
    sum = __shfl_sync(0xffffffffu, fold_warp(sum), 0);
    Shared<S>& shared = block_.shared;
    const int lane = threadIdx.x % 32;
    if (lane < S::kCluster) {
      const int place = block_.rank * S::kSumWarps + warp_;
      send(&shared.sums.of_row[slot][place], shared.done[slot], lane, sum);
    }
    if (warp_ == 0 && lane == 0) {
      shared.row_max[slot] = row_max;
      arrive(shared.done[slot]);
    }
  }

  const Block<S>& block_;
  StageReader<S> reader_;
  int warp_;
  int set_;
  int log2_scale_;
};

}  // namespace detlogp::cuda::ring
