// The books: the lister finds the rows that are scored, the finisher ends each with its result.
#pragma once

#include "cuda/lanes.h"
#include "cuda/ring/shape.h"

namespace detlogp::cuda::ring {

// The scored rows go round the clusters; every block of a cluster finds the same ones. Rows that are
// not scored are stored here, and never enter the ring.
template <class T, int C>
class Lister {
 public:
  using S = Shape<T, C>;

  __device__ __forceinline__ Lister(const Block<T, C>& block, const ForwardArgs& args)
      : block_(block),
        args_(args),
        lane_(threadIdx.x % 32),
        cluster_(blockIdx.x / C),
        clusters_(gridDim.x / C),
        wanted_(cluster_) {
    for (Candidate& candidate : ahead_) {
      candidate = ask();
    }
    look();
  }

  // Puts the next row of this cluster into its slot, or that there is none: then returns false.
  __device__ __forceinline__ bool list() {
    while (scored_before_ + __popc(scored_) <= wanted_ && first_ + 32 < args_.rows.count) {
      scored_before_ += __popc(scored_);
      look();
    }
    const int place = static_cast<int>(wanted_ - scored_before_);
    const bool is_scored = (scored_ >> lane_ & 1u) != 0;
    const bool is_wanted = is_scored && __popc(scored_ & ((1u << lane_) - 1u)) == place;
    const int found = __ffs(__ballot_sync(0xffffffffu, is_wanted)) - 1;
    RowInfo info{-1, 0, nullptr};
    if (found >= 0) {
      info.row = first_ + found;
      info.token_id = static_cast<int>(__shfl_sync(0xffffffffu, candidate_.id, found));
      info.begin = reinterpret_cast<const char*>(row_of<T>(args_.rows, info.row));
    }
    Shared<T, C>& shared = block_.shared;
    const int slot = slot_.slot;
    wait(shared.ended[slot], slot_.parity);
    if (lane_ == 0) {
      shared.info[slot] = info;
      if (found >= 0) {
        arrive_and_expect(shared.full[slot], sizeof(shared.max[0]));
        arrive_and_expect(shared.done[slot], sizeof(shared.group[0]));
      }
      arrive(shared.listed[slot]);
    }
    __syncwarp();
    slot_.advance(S::kRowSlots);
    wanted_ += clusters_;
    return found >= 0;
  }

 private:
  // What tells whether a row is scored.
  struct Candidate {
    int64_t id;
    bool selected;
  };

  __device__ __forceinline__ Candidate ask() {
    Candidate result{-1, false};
    const int64_t row = asked_ + lane_;
    if (row < args_.rows.count) {
      result.id = args_.rows.token_ids[row];
      result.selected = Rows::selected(args_.rows, row);
    }
    asked_ += 32;
    return result;
  }

  // Looks at the next 32 rows, whose candidates were asked for a few steps ago. The clusters take turns
  // in storing the results of those that are not scored.
  __device__ __forceinline__ void look() {
    candidate_ = ahead_[0];
#pragma unroll
    for (int i = 0; i + 1 < kAhead; ++i) {
      ahead_[i] = ahead_[i + 1];
    }
    ahead_[kAhead - 1] = ask();
    first_ = asked_ - 32 * (kAhead + 1);
    const auto id = static_cast<uint64_t>(candidate_.id);
    const bool scored = candidate_.selected && id < static_cast<uint64_t>(args_.rows.vocab);
    scored_ = __ballot_sync(0xffffffffu, scored);
    if (turn_ == cluster_ && block_.rank == 0 && !scored && first_ + lane_ < args_.rows.count) {
      store_skipped_row<float>(args_, first_ + lane_);
    }
    turn_ = turn_ + 1 == clusters_ ? 0 : turn_ + 1;
  }

  static constexpr int kAhead = 8;

  const Block<T, C>& block_;
  const ForwardArgs& args_;
  int lane_;
  int cluster_;
  int clusters_;
  int64_t asked_ = 0;          // rows asked for so far
  Candidate ahead_[kAhead];    // of the latest of them
  Candidate candidate_;        // of the 32 rows that were looked at
  int64_t first_ = 0;          // the first of these
  uint32_t scored_ = 0;        // a bit for each
  int64_t scored_before_ = 0;  // rows before them
  int64_t wanted_;             // the next row of this cluster, counted among the scored ones
  int turn_ = 0;
  Cursor slot_{0, 1};
};

template <class T, int C>
class Finisher {
 public:
  using S = Shape<T, C>;

  __device__ __forceinline__ Finisher(const Block<T, C>& block, const ForwardArgs& args)
      : block_(block), args_(args) {
  }

  // Ends the next row, once it is summed. Returns false when there is none.
  __device__ __forceinline__ bool finish() {
    Shared<T, C>& shared = block_.shared;
    const int slot = row_.slot;
    const int lane = threadIdx.x % 32;
    wait(shared.listed[slot], row_.parity);
    const RowInfo info = shared.info[slot];
    if (info.row < 0) {
      return false;
    }
    const T target = reinterpret_cast<const T*>(info.begin)[info.token_id];
    wait_for_cluster<C>(shared.done[slot], row_.parity);
    const float sum = fold_warp(lane < kGroups ? shared.group[slot][lane] : 0.0f);
    if (lane == 0) {
      if (storing_rank_ == block_.rank) {
        store_scored_row(args_, info.row, to_acc<float>(target), shared.row_max[slot], log_of(sum));
      }
      arrive(shared.ended[slot]);
    }
    storing_rank_ = storing_rank_ + 1 == C ? 0 : storing_rank_ + 1;
    row_.advance(S::kRowSlots);
    return true;
  }

 private:
  const Block<T, C>& block_;
  const ForwardArgs& args_;
  Cursor row_;
  int storing_rank_ = 0;  // the blocks of a cluster take turns
};

// Both in one warp: where rows are long, a second warp would cost the others registers.
template <class T, int C>
__device__ __forceinline__ void keep_books(Lister<T, C>& lister, Finisher<T, C>& finisher) {
  bool more = true;
  for (int ahead = 0; more || ahead > 0;) {
    if (more && ahead < Shape<T, C>::kRowSlots) {
      more = lister.list();
      ahead += more ? 1 : 0;
    } else {
      finisher.finish();
      --ahead;
    }
  }
}

}  // namespace detlogp::cuda::ring
