// The max warps: the max of every row, from the ring. They take turns at the stages.
#pragma once

#include "cuda/piece_max.h"
#include "cuda/ring/pieces.h"

namespace detlogp::cuda::ring {

template <class S>
using MaxOf = PieceMax<typename S::Logit, S::kIsExact>;

template <class S>
__device__ __forceinline__ void max_of_rows(const Block<S>& block, int warp) {
  Shared<S>& shared = block.shared;
  const int lane = threadIdx.x % 32;
  const Pieces<S> pieces(lane);
  const int place_of_max = block.rank * S::kMaxWarps + warp;
  MaxOf<S> max;
  Cursor row;
  Cursor take{warp, 0};
  int stage = warp;
  while (true) {
    wait(shared.listed[row.slot], row.parity);
    const RowInfo info = shared.info[row.slot];
    if (info.row < 0) {
      if (lane == 0) {
        arrive(shared.full[row.slot]);
      }
      return;
    }
    const bool has_last =
        Pieces<S>::has_last(lane) && reinterpret_cast<uintptr_t>(info.begin) % 16 != 0;
    max.reset();
    for (; stage < block.stages_per_row; stage += S::kMaxWarps) {
      wait(shared.arrived[take.slot], take.parity);
      const char* data = block.stage(take.slot);
      pieces.for_each([&](auto step) {
        max.take(*reinterpret_cast<const uint4*>(data + pieces.place + step.kPlace));
      });
      if (has_last) {
        max.take(*reinterpret_cast<const uint4*>(data + pieces.last_place(lane)));
      }
      take.advance(S::kStages, S::kMaxWarps);
    }
    stage -= block.stages_per_row;
    const float value = max_of_warp<S::kIsExact>(max.result());
    if (lane < S::kCluster) {
      send(&shared.max[row.slot][place_of_max], shared.full[row.slot], lane, value);
    }
    // This warp has seen its stages arrive; whoever waits for the max need not look again.
    if (lane == 0) {
      arrive(shared.full[row.slot]);
    }
    row.advance(S::kRowSlots);
  }
}

}  // namespace detlogp::cuda::ring
