// The summing warps: the lanes of every row, in the locked order.
//
// Sets of warps take turns at the stages. A set makes exp(x - m) of its stage's columns as soon as the
// row's max is known; the sums of the lanes go round the sets, each adding its stage's terms in order:
//
//     set 0   make stage 0 | add 0 |     make stage 3       | add 3 |
//     set 1   make stage 1         | add 1 |     make stage 4       | add 4 |
//     set 2   make stage 2                 | add 2 |     make stage 5       | add 5 |
#pragma once

#include "cuda/exp.h"
#include "cuda/ring/near.h"
#include "cuda/ring/reader.h"

namespace detlogp::cuda::ring {

template <class S>
class Summer {
 public:
  __device__ __forceinline__ Summer(const Block<S>& block, int thread)
      : block_(block),
        reader_(block, thread),
        thread_(thread % S::kSetThreads),
        set_(thread / S::kSetThreads),
        next_set_(set_ + 1 == S::kSets ? 0 : set_ + 1) {
    const auto place_of = [&](int set) {
      return in_register(
          shared_address(block.shared.sums.on_their_way[set]) + thread_ * sizeof(float));
    };
    mine_ = place_of(set_);
    next_ = place_of(next_set_);
    // The first sums are zeros, and there.
    if (next_set_ == 0) {
      arrive_named(name_of(next_set_), kPassingThreads);
    }
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
      row_max_ = max_of_row(shared, row.slot);
      if constexpr (S::kIsGeneral) {
        row_max_ = max_of_quotients(row_max_, block_.divide.value);
      }
      if constexpr (S::kHasTerms) {
        using T = typename S::Logit;
        least_near_ = divides() ? least_near<T, true>(row_max_, block_.divide.value)
                                : least_near<T, false>(row_max_, 1.0f);
      }
      for (; stage < block_.stages_per_row; stage += S::kSets) {
        add_stage(stage, row.slot);
      }
      stage -= block_.stages_per_row;
      row.advance(S::kRowSlots);
    }
  }

 private:
  static constexpr int kThreadLanes = S::kThreadLanes;
  using Columns = typename StageReader<S>::Columns;
  using Term = std::conditional_t<S::kHasTerms, float, ExpParts>;
  using Terms = Term[S::kPeriods][kThreadLanes];
  static constexpr int kParts = S::kPeriods / kEntropyGroup;
  static_assert(S::kPeriods % kEntropyGroup == 0, "the entropy's fours lie in a stage");
  using Parts = float[kParts][kThreadLanes];  // of the terms' scale
  static constexpr float kScale = S::kHasTerms ? kTermScale : 1.0f;
  using Sums = float[S::kSums * kThreadLanes];  // the entropy's follow
  static constexpr int kSetWarps = S::kSetThreads / 32;
  static constexpr int kPassingThreads = 64;  // of the warp that passes its sums, and of the next
  static_assert(S::kSets * kSetWarps <= 16, "each summing warp has a named barrier");

  // All terms of a stage are made before the sums that they are added to are waited for. The reader's
  // two ways to make them meet before that wait, so that compilers cannot move their making behind it.
  __device__ __forceinline__ void add_stage(int stage, int row_slot) {
    Terms terms;
    Parts parts;
    reader_.read([&](const auto& columns) {
      divides() ? make<true>(terms, parts, columns) : make<false>(terms, parts, columns);
    });
    Sums sum;
    receive(sum);
#pragma unroll
    for (int p = 0; p < S::kPeriods; ++p) {
#pragma unroll
      for (int l = 0; l < kThreadLanes; ++l) {
        sum[l] = add(sum[l], terms[p][l]);
      }
    }
    if constexpr (S::kIsGeneral) {
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
#pragma unroll
        for (int l = 0; l < kThreadLanes; ++l) {
          sum[kThreadLanes + l] = __fmaf_rn(parts[i][l], 1 / kScale, sum[kThreadLanes + l]);
        }
      }
    }
    if (stage + 1 == block_.stages_per_row) {
      const Sums zero = {};  // for the next row
      pass_on(zero);
      publish(sum, row_slot);
    } else {
      pass_on(sum);
    }
  }

  __device__ __forceinline__ bool divides() const {
    return S::kIsGeneral && !block_.divide.is_one();
  }

  __device__ __forceinline__ static float add(float sum, const ExpParts& term) {
    return __fmaf_rn(term.fraction, term.power, sum);
  }
  __device__ __forceinline__ static float add(float sum, float term) {
    return __fmaf_rn(term, 1 / kScale, sum);
  }

  template <bool Divides>
  __device__ __forceinline__ void make(Terms& terms, Parts& parts, const Columns& columns) const {
    if constexpr (S::kHasTerms) {
      if (are_near(columns, least_near_)) {
        make<Divides, true>(terms, parts, columns);
        return;
      }
    }
    make<Divides, false>(terms, parts, columns);
  }

  template <bool Divides, bool IsNear>
  __device__ __forceinline__ void make(Terms& terms, Parts& parts, const Columns& columns) const {
#pragma unroll
    for (int p = 0; p < S::kPeriods; ++p) {
#pragma unroll
      for (int l = 0; l < kThreadLanes; ++l) {
        const float logit = columns[p].widened(l);
        const float x = Divides ? block_.divide(logit) : logit;
        const float below = x - row_max_;
        terms[p][l] = make_term<Divides, IsNear>(below);
        if constexpr (S::kIsGeneral) {
          float& part = parts[p / kEntropyGroup][l];
          const float e = exponential<IsNear>(terms[p][l]);
          const float distance = IsNear ? -below : distance_below_max(row_max_, x);
          part = p % kEntropyGroup == 0 ? __fmul_rn(e, distance) : __fmaf_rn(e, distance, part);
          if (!IsNear && p % kEntropyGroup == kEntropyGroup - 1) {
            part *= kScale;
          }
        }
      }
    }
  }

  // exp(x); of a near x, at the terms' scale.
  template <bool IsNear>
  __device__ __forceinline__ static float exponential(const Term& term) {
    if constexpr (IsNear) {
      return term;
    } else {
      return add(0.0f, term);
    }
  }

  template <bool Divides, bool IsNear>
  __device__ __forceinline__ static Term make_term(float x) {
    if constexpr (!S::kHasTerms) {
      return exp_parts(x);
    } else if constexpr (!IsNear) {
      return term_of(x);
    } else {
      return make_near_term<typename S::Logit, Divides>(x);
    }
  }

  // The sums of a lane go from set to set, as the stages do, also from row to row: so a set's place
  // for them is free when it is written again.
  __device__ __forceinline__ void receive(Sums& sum) const {
    wait_named(name_of(set_), kPassingThreads);
#pragma unroll
    for (int l = 0; l < S::kSums * kThreadLanes; ++l) {
      sum[l] = __uint_as_float(load_shared_32(mine_ + place_of_sum(l)));
    }
  }

  __device__ __forceinline__ void pass_on(const Sums& sum) const {
#pragma unroll
    for (int l = 0; l < S::kSums * kThreadLanes; ++l) {
      store_shared_32(next_ + place_of_sum(l), __float_as_uint(sum[l]));
    }
    arrive_named(name_of(next_set_), kPassingThreads);
  }

  // The barrier at which this warp's lanes in that set wait for their sums. The first is that of __syncthreads, which
  // nobody calls any more (where launches have no clusters, sync_cluster would; those of the ring have).
  __device__ __forceinline__ int name_of(int set) const {
    return set * kSetWarps + thread_ / 32;
  }

  __device__ __forceinline__ static constexpr uint32_t place_of_sum(int l) {
    return l * S::kSetThreads * sizeof(float);
  }

  // The tree over a group of 32 lanes, whose sums are `sum`; the group's first thread has the result.
  __device__ __forceinline__ static float fold_group(float* sum) {
    constexpr int kThreads = kGroup / kThreadLanes;
#pragma unroll
    for (int offset = kThreads / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int l = 0; l < kThreadLanes; ++l) {
        sum[l] += __shfl_down_sync(0xffffffffu, sum[l], offset, kThreads);
      }
    }
#pragma unroll
    for (int offset = kThreadLanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int l = 0; l < offset; ++l) {
        sum[l] += sum[l + offset];
      }
    }
    return __shfl_sync(0xffffffffu, sum[0], 0, kThreads);
  }

  __device__ __forceinline__ void publish(Sums& sum, int slot) {
    Shared<S>& shared = block_.shared;
    const int rank = thread_ % (kGroup / kThreadLanes);
    const int index = (block_.rank * S::kBlockLanes + kThreadLanes * thread_) / kGroup;
#pragma unroll
    for (int i = 0; i < S::kSums; ++i) {
      const float group = fold_group(sum + i * kThreadLanes);
      if (rank < S::kCluster) {
        send(&shared.sums.of_row[slot][i * kGroups + index], shared.done[slot], rank, group);
      }
    }
    if (thread_ == 0) {
      shared.row_max[slot] = row_max_;
      arrive(shared.done[slot]);
    }
  }

  const Block<S>& block_;
  StageReader<S> reader_;
  int thread_;
  int set_;
  int next_set_;
  uint32_t mine_;  // addresses in shared memory
  uint32_t next_;
  float row_max_ = 0;
  std::conditional_t<S::kHasTerms, Pair<typename S::Logit>, int> least_near_{};
};

}  // namespace detlogp::cuda::ring
