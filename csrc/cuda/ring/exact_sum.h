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
      wait_for_cluster<S::kCluster>(shared.full[row.slot], row.parity);
      const RowInfo info = shared.info[row.slot];
      if (info.row < 0) {
        return;
      }
      reader_.begin(info);
      const float largest = max_of_row(shared, row.slot);
      const float row_max = S::kIsGeneral ? largest / block_.divide.value : largest;
      const ExactScale scale = scale_of_sum(row_max, log2_scale_, S::kIsGeneral);
      // Almost no row has a base; the others save its subtraction.
      const Sums sums = S::kIsGeneral && !block_.divide.is_one()
                            ? sum_of_stages<true, true>(stage, scale, row_max)
                        : scale.base == 0 ? sum_of_stages<false, false>(stage, scale, row_max)
                                          : sum_of_stages<true, false>(stage, scale, row_max);
      publish(sums, row_max, row.slot);
      row.advance(S::kRowSlots);
    }
  }

 private:
  struct Sums {
    uint64_t of[S::kSums];  // the entropy's follows
  };

  template <bool HasBase, bool Divides>
  __device__ __forceinline__ Sums
  sum_of_stages(int& stage, const ExactScale& scale, float row_max) {
    Sums sums{};
    const float largest = HasBase ? row_max - scale.base : row_max;
    const auto add = [&](float logit) {
      const float x = Divides ? block_.divide(logit) : logit;
      const float y = at_least(HasBase ? x - scale.base : x, scale.lowest);
      const float term = exact_exp_of(scale, y);
      sums.of[0] += to_quanta(term);
      if constexpr (S::kIsGeneral) {
        // entropy_quanta's bits: the lowest y has no quantum at any distance up to 128.
        sums.of[1] += to_quanta(term * (largest - y));
      }
    };
    for (; stage < block_.stages_per_row; stage += S::kSets) {
      reader_.read([&](const auto& columns) {
#pragma unroll
        for (int l = 0; l < S::kThreadLanes; ++l) {
#pragma unroll
          for (int p = 0; p < S::kPeriods; ++p) {
            add(columns[p].widened(l));
          }
        }
      });
    }
    stage -= block_.stages_per_row;
    return sums;
  }

  __device__ __forceinline__ void publish(const Sums& sums, float row_max, int slot) {
    Shared<S>& shared = block_.shared;
    const int lane = threadIdx.x % 32;
    const int place = block_.rank * S::kSumWarps + warp_;
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) {
      const uint64_t sum = __shfl_sync(0xffffffffu, fold_warp(sums.of[i]), 0);
      if (lane < S::kCluster) {
        uint64_t* to = &shared.sums.of_row[slot][i * S::kCluster * S::kSumWarps + place];
        send(to, shared.done[slot], lane, sum);
      }
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
