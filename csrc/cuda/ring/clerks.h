// The books: the lister finds the rows that are scored, the finisher ends each with its result.
#pragma once

#include "core/exact.h"
#include "cuda/lanes.h"
#include "cuda/ring/shape.h"

namespace detlogp::cuda::ring {

// The scored rows go round the clusters; every block of a cluster finds the same ones. Rows that are
// not scored are stored here, and never enter the ring.
template <class S>
class Lister {
 public:
  __device__ __forceinline__ Lister(const Block<S>& block, const ForwardArgs& args)
      : block_(block),
        args_(args),
        lane_(threadIdx.x % 32),
        cluster_(blockIdx.x / S::kCluster),
        clusters_(gridDim.x / S::kCluster),
        wanted_(cluster_) {
    ask();
    look();
  }

  // Puts the next row of this cluster into its slot, or that there is none: then returns false.
  __device__ __forceinline__ bool list() {
    while (scored_before_ + count_ <= wanted_ && asked_ - kRows < args_.rows.count) {
      scored_before_ += count_;
      look();
    }
    RowInfo info{-1, 0, nullptr};
    int place = static_cast<int>(wanted_ - scored_before_);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t scored = scored_[w];
      const bool is_wanted =
          (scored >> lane_ & 1u) != 0 && __popc(scored & ((1u << lane_) - 1u)) == place;
      const int found = __ffs(__ballot_sync(0xffffffffu, is_wanted)) - 1;
      if (found >= 0) {
        info.row = first_ + 32 * w + found;
        info.token_id = __shfl_sync(0xffffffffu, token_id_[w], found);
      }
      place -= __popc(scored);
    }
    const bool has_row = info.row >= 0;
    if (has_row) {
      info.begin = reinterpret_cast<const char*>(row_of<typename S::Logit>(args_.rows, info.row));
    }
    Shared<S>& shared = block_.shared;
    const int slot = slot_.slot;
    wait(shared.ended[slot], slot_.parity);
    if (lane_ == 0) {
      shared.info[slot] = info;
      if (has_row) {
        arrive_and_expect(shared.full[slot], sizeof(shared.max[0]));
        arrive_and_expect(shared.done[slot], sizeof(shared.sums.of_row[0]));
      } else {
        arrive(shared.full[slot]);
      }
      arrive(shared.listed[slot]);
    }
    __syncwarp();
    slot_.advance(S::kRowSlots);
    wanted_ += clusters_;
    return has_row;
  }

 private:
  static constexpr int kWords = S::Policy::kLookedUp;
  static constexpr int kRows = 32 * kWords;

  // Asks for what tells whether the next rows are scored, one of each 32 a lane. No load waits for
  // another, and none is waited for here.
  __device__ __forceinline__ void ask() {
    const Rows& rows = args_.rows;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      asked_id_[w] = rows.token_ids[asked_row(w)];
      asked_selected_[w] = true;
    }
    if (rows.mask != nullptr) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        asked_selected_[w] = rows.mask[asked_row(w)];
      }
    }
    asked_ += kRows;
  }

  __device__ __forceinline__ int64_t asked_row(int word) const {
    const int64_t row = asked_ + 32 * word + lane_;
    const int64_t last = args_.rows.count - 1;
    return row < last ? row : last;
  }

  // Looks at the rows that were asked for, and asks for the next. The clusters take turns in storing
  // the results of those that are not scored.
  __device__ __forceinline__ void look() {
    first_ = asked_ - kRows;
    count_ = 0;
    uint32_t skipped = 0;  // a bit for each 32
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const auto id = static_cast<uint64_t>(asked_id_[w]);
      const bool is_row = first_ + 32 * w + lane_ < args_.rows.count;
      const bool is_scored = asked_selected_[w] && id < static_cast<uint64_t>(args_.rows.vocab);
      scored_[w] = __ballot_sync(0xffffffffu, is_row && is_scored);
      skipped |= (is_row && !is_scored ? 1u : 0u) << w;
      token_id_[w] = static_cast<int>(id);
      count_ += __popc(scored_[w]);
    }
    ask();
    if (turn_ == cluster_ && block_.rank == 0) {
      for (; skipped != 0; skipped &= skipped - 1) {
        store_skipped_row<float>(args_, first_ + 32 * (__ffs(skipped) - 1) + lane_);
      }
    }
    turn_ = turn_ + 1 == clusters_ ? 0 : turn_ + 1;
  }

  const Block<S>& block_;
  const ForwardArgs& args_;
  int lane_;
  int cluster_;
  int clusters_;
  int64_t asked_ = 0;         // rows asked for so far
  int64_t asked_id_[kWords];  // of the latest of them
  bool asked_selected_[kWords];
  int64_t first_ = 0;          // the first row that was looked at
  int token_id_[kWords];       // of these rows
  uint32_t scored_[kWords];    // a bit for each
  int count_ = 0;              // of these bits
  int64_t scored_before_ = 0;  // rows before them
  int64_t wanted_;             // the next row of this cluster, counted among the scored ones
  int turn_ = 0;
  Cursor slot_{0, 1};
};

template <class S>
class Finisher {
 public:
  __device__ __forceinline__ Finisher(const Block<S>& block, const ForwardArgs& args)
      : block_(block), args_(args) {
  }

  // Ends the next row, once it is summed. Returns false when there is none.
  __device__ __forceinline__ bool finish() {
    using T = typename S::Logit;
    Shared<S>& shared = block_.shared;
    const int slot = row_.slot;
    wait(shared.listed[slot], row_.parity);
    const RowInfo info = shared.info[slot];
    if (info.row < 0) {
      return false;
    }
    const T target = reinterpret_cast<const T*>(info.begin)[info.token_id];
    wait_for_cluster<S::kCluster>(shared.done[slot], row_.parity);
    const auto& sums = shared.sums.of_row[slot];
    const auto sum = sum_of_row(sums, 0);
    const auto entropy_sum = S::kIsGeneral ? sum_of_row(sums, 1) : sum;
    if (threadIdx.x % 32 == 0) {
      if (storing_rank_ == block_.rank) {
        const float logit = to_acc<float>(target);
        const float x = S::kIsGeneral ? logit / block_.divide.value : logit;
        store(info.row, x, shared.row_max[slot], sum, entropy_sum);
      }
      arrive(shared.ended[slot]);
    }
    storing_rank_ = storing_rank_ + 1 == S::kCluster ? 0 : storing_rank_ + 1;
    row_.advance(S::kRowSlots);
    return true;
  }

 private:
  // `which`: 0 for the sum, 1 for the entropy's.
  __device__ __forceinline__ static float sum_of_row(const float* groups, int which) {
    const int lane = threadIdx.x % 32;
    return fold_warp(lane < kGroups ? groups[which * kGroups + lane] : 0.0f);
  }

  __device__ __forceinline__ static uint64_t sum_of_row(const uint64_t* parts, int which) {
    constexpr int kCount = S::kCluster * S::kSumWarps;
    uint64_t sum = 0;
    for (int i = threadIdx.x % 32; i < kCount; i += 32) {
      sum += parts[which * kCount + i];
    }
    return fold_warp(sum);
  }

  __device__ __forceinline__ void store(
      int64_t row, float target, float row_max, float sum, float entropy_sum) const {
    const float gap = S::kIsGeneral ? entropy_sum / sum : 0.0f;
    store_scored_row(args_, row, target, row_max, log_of(sum), gap);
  }

  __device__ __forceinline__ void store(
      int64_t row, float target, float row_max, uint64_t sum, uint64_t entropy_sum) const {
    const ExactScale scale = scale_of_sum(row_max, log2_quanta(args_.rows.vocab), S::kIsGeneral);
    store_exact_row(args_, row, target, row_max, scale, sum, entropy_sum);
  }

  const Block<S>& block_;
  const ForwardArgs& args_;
  Cursor row_;
  int storing_rank_ = 0;  // the blocks of a cluster take turns
};

}  // namespace detlogp::cuda::ring
