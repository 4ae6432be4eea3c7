// What the warps of a block share: the shape of the ring, its barriers, and the rows in it (kernel.h
// has the picture).
#pragma once

#include <type_traits>

#include "core/row.h"
#include "cuda/barrier.h"
#include "cuda/bulk.h"
#include "cuda/device.h"
#include "cuda/policy.h"

namespace detlogp::cuda::ring {

constexpr int kLanes = kMaxLanes;
constexpr int kGroups = kLanes / kGroup;

// What a block of a cluster of C holds of each period, and who works on it, for logits of type T.
template <class T, int C, bool IsExact, bool IsGeneral>
struct Shape {
  using Logit = T;
  using Policy = RingPolicy<sizeof(T), C, IsExact, IsGeneral>;

  static constexpr int kCluster = C;
  static constexpr bool kIsExact = IsExact;      // the contract
  static constexpr bool kIsGeneral = IsGeneral;  // temperatures and the entropy, a second sum
  static constexpr int kSums = IsGeneral ? 2 : 1;
  static constexpr bool kHasTerms = Policy::kHasTerms;

  static constexpr int kBlockLanes = kLanes / C;
  static constexpr int kSliceBytes = kBlockLanes * static_cast<int>(sizeof(T));
  // A slice that begins between two 16-byte boundaries touches one 16-byte piece more: the next slice's first
  // where a block has all lanes, else one of its own.
  static constexpr int kPitch = kSliceBytes + (C == 1 ? 0 : 16);

  // A set of summing warps has all of the block's lanes, a thread kThreadLanes neighbouring ones.
  static constexpr int kThreadLanes =
      kBlockLanes > Policy::kSetThreads ? kBlockLanes / Policy::kSetThreads : 1;
  static constexpr int kSetThreads = kBlockLanes / kThreadLanes;
  static constexpr int kSets = Policy::kSumThreads / kSetThreads;

  static constexpr int kTermPeriods = Policy::kTerms / kThreadLanes;
  static constexpr int kBytePeriods = Policy::kStageBytes / kSliceBytes;
  static constexpr int kPeriods = kTermPeriods < kBytePeriods ? kTermPeriods : kBytePeriods;
  static constexpr int kStageColumns = kPeriods * kLanes;
  static constexpr int kFilledBytes = kPeriods * kPitch + (C == 1 ? 16 : 0);  // of a stage
  static constexpr int kStageBytes = (kFilledBytes + 127) / 128 * 128;        // boxes lie on 128
  static constexpr int kRowSlots = C == 1 ? 8 : 4;
  static constexpr int kSumWarps = kSets * kSetThreads / 32;
  static constexpr int kCopyWarps = Policy::kCopyWarps;
  static constexpr int kMaxWarps = kCopyWarps;

  // What `Shared` takes beside the stages: of a row, its barriers, its info and its maxes; the sums; what
  // alignment takes; and the two barriers of each stage.
  static constexpr int kRowBytes = 4 * 8 + 24 + (C * kMaxWarps + 1) * 4;
  static constexpr int kSumBytes =
      IsExact ? kRowSlots * kSums * C * kSumWarps * 8
              : kSets * kSums * kBlockLanes * 4 + kRowSlots * kSums * kGroups * 4;
  static constexpr int kMost =
      (Policy::kSharedBytes - kRowSlots * kRowBytes - kSumBytes - 128) / (kStageBytes + 16);
  // A place of the ring has its copying warp and its max warp.
  static constexpr int kStages = kMost / kCopyWarps * kCopyWarps;

  static constexpr int kFirstCopyWarp = kSumWarps + kMaxWarps;
  static constexpr int kLister = kFirstCopyWarp + kCopyWarps;
  static constexpr int kFinisher = kLister + 1;
  static constexpr int kThreads = 32 * (kFinisher + 1);
};

struct RowInfo {
  int64_t row;  // -1: there are no more
  int token_id;
  const char* begin;
};

// Locked: the lane sums on their way to a set; of a row, the sums of its groups.
template <class S>
struct LockedSums {
  float on_their_way[S::kSets][S::kSums * S::kThreadLanes][S::kSetThreads];
  float of_row[S::kRowSlots][S::kSums * kGroups];
};

// Exact: of a row, the sums of all summing warps.
template <class S>
struct ExactSums {
  uint64_t of_row[S::kRowSlots][S::kSums * S::kCluster * S::kSumWarps];
};

template <class S>
struct Shared {
  Barrier listed[S::kRowSlots];
  Barrier full[S::kRowSlots];
  Barrier done[S::kRowSlots];
  Barrier ended[S::kRowSlots];
  Barrier arrived[S::kStages];
  Barrier empty[S::kStages];
  RowInfo info[S::kRowSlots];
  float max[S::kRowSlots][S::kCluster * S::kMaxWarps];
  float row_max[S::kRowSlots];
  std::conditional_t<S::kIsExact, ExactSums<S>, LockedSums<S>> sums;
};

// A position in a ring, and the parity of the barrier there in this round.
struct Cursor {
  int slot = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance(int size, int step = 1) {
    slot += step;
    if (slot >= size) {
      slot -= size;
      parity ^= 1;
    }
  }
};

template <class S>
struct Block {
  Shared<S>& shared;
  char* ring;
  int vocab;
  int rank;
  int stages_per_row;
  const MemoryMap& memory;
  Divisor<float> divide;  // by the temperature, where it is general

  __device__ __forceinline__ char* stage(int slot) const {
    return ring + slot * S::kStageBytes;
  }
};

}  // namespace detlogp::cuda::ring
