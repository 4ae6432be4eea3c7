// A summing thread's columns, stage by stage. Sets of warps take turns at the stages; a set has all lanes
// of the block, a thread a few neighbouring ones.
#pragma once

#include "cuda/ring/logits.h"
#include "cuda/ring/shape.h"

namespace detlogp::cuda::ring {

template <class S>
class StageReader {
 public:
  static constexpr int kThreadLanes = S::kThreadLanes;
  using Columns = Logits<typename S::Logit, kThreadLanes>[S::kPeriods];

  __device__ __forceinline__ StageReader(const Block<S>& block, int thread)
      : empty_(in_register(shared_address(block.shared.empty))),
        ring_(in_register(shared_address(block.ring) + thread % S::kSetThreads * kBytes)),
        to_matrices_(
            in_register(thread % 32 / 8 * S::kPitch + thread % 8 * 16 - thread % 32 * kBytes)),
        take_(thread / S::kSetThreads) {
  }

  __device__ __forceinline__ void begin(const RowInfo& info) {
    shift_ = static_cast<int>(reinterpret_cast<uintptr_t>(info.begin) % 16);
  }

  // Calls f(columns) with the next stage, in which the columns beyond the row are -inf. The stage, which is
  // there when its row's max is known, is free before that.
  template <class F>
  __device__ __forceinline__ void read(const F& f) {
    const uint32_t from = ring_ + shift_ + take_ * S::kStageBytes;
    Columns columns;
    if (shift_ % kAlignment == 0) {
      load(columns, from);
      release();
      f(columns);
    } else {
#pragma unroll
      for (int p = 0; p < S::kPeriods; ++p) {
        columns[p].load_shifted(from + p * S::kPitch);
      }
      release();
      f(columns);
    }
  }

 private:
  static constexpr int kBytes = kThreadLanes * static_cast<int>(sizeof(typename S::Logit));
  // Where a thread has one word of a period, a warp's eight pieces of 16 bytes are what ldmatrix calls a matrix.
  static constexpr bool kHasMatrices = kBytes == 4 && S::kPeriods % 4 == 0;
  static constexpr int kAlignment = kHasMatrices ? 16 : kBytes;

  __device__ __forceinline__ void load(Columns& columns, uint32_t from) const {
    if constexpr (kHasMatrices) {
#pragma unroll
      for (int p = 0; p < S::kPeriods; p += 4) {
        load_matrices(
            from + to_matrices_ + p * S::kPitch, columns[p].word[0], columns[p + 1].word[0],
            columns[p + 2].word[0], columns[p + 3].word[0]);
      }
    } else {
#pragma unroll
      for (int p = 0; p < S::kPeriods; ++p) {
        columns[p].load(from + p * S::kPitch);
      }
    }
  }

  __device__ __forceinline__ void release() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      arrive(empty_ + take_ * sizeof(Barrier));
    }
    take_ += S::kSets;
    take_ -= take_ >= S::kStages ? S::kStages : 0;
  }

  uint32_t empty_;  // addresses in shared memory
  uint32_t ring_;
  uint32_t to_matrices_;  // from a thread's own place to the piece whose address it gives
  int take_;              // the next stage's place
  int shift_ = 0;
};

// Of every block and max warp.
template <class S>
__device__ __forceinline__ float max_of_row(const Shared<S>& shared, int slot) {
  float result = shared.max[slot][0];
#pragma unroll
  for (int i = 1; i < S::kCluster * S::kMaxWarps; ++i) {
    result = larger_of<S::kIsExact>(result, shared.max[slot][i]);
  }
  return result;
}

}  // namespace detlogp::cuda::ring
