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
      : block_(block),
        arrived_(in_register(shared_address(block.shared.arrived))),
        ring_(in_register(shared_address(block.ring) + thread % S::kSetThreads * kBytes)),
        take_{thread / S::kSetThreads, 0} {
  }

  __device__ __forceinline__ void begin(const RowInfo& info) {
    shift_ = static_cast<int>(reinterpret_cast<uintptr_t>(info.begin) % 16);
  }

  // Waits for a stage, calls f(columns), in which the columns beyond the row are -inf. The stage is
  // free before that.
  template <class F>
  __device__ __forceinline__ void read(const F& f) {
    const uint32_t barrier = arrived_ + take_.slot * sizeof(Barrier);
    wait(barrier, take_.parity);
    const uint32_t from = ring_ + shift_ + take_.slot * S::kStageBytes;
    Columns columns;
    if (shift_ % kBytes == 0) {
#pragma unroll
      for (int p = 0; p < S::kPeriods; ++p) {
        columns[p].load(from + p * S::kPitch);
      }
      release(barrier);
      f(columns);
    } else {
#pragma unroll
      for (int p = 0; p < S::kPeriods; ++p) {
        columns[p].load_shifted(from + p * S::kPitch);
      }
      release(barrier);
      f(columns);
    }
  }

 private:
  static constexpr int kBytes = kThreadLanes * static_cast<int>(sizeof(typename S::Logit));

  __device__ __forceinline__ void release(uint32_t arrived_barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      arrive(arrived_barrier + sizeof(Barrier) * S::kStages);  // the stage's `empty`
    }
    take_.advance(S::kStages, S::kSets);
  }

  const Block<S>& block_;
  uint32_t arrived_;  // addresses in shared memory
  uint32_t ring_;
  Cursor take_;
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
