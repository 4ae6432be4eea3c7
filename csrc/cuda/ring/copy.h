// The copying warps: from memory into the ring. They take turns at the stages, so that each place of the ring
// has its own warp. Of a stage inside a row one thread asks for all bytes, a box; the others lie at a row's edges.
#pragma once

#include "cuda/ring/edges.h"

namespace detlogp::cuda::ring {

template <class S>
__device__ __forceinline__ void copy_rows(const Block<S>& block, int warp) {
  Shared<S>& shared = block.shared;
  const int lane = threadIdx.x % 32;
  const Pieces<S> pieces(lane);
  Cursor row;
  Cursor fill{warp, 1};
  int stage = warp;
  while (true) {
    wait(shared.listed[row.slot], row.parity);
    const RowInfo info = shared.info[row.slot];
    if (info.row < 0) {
      return;
    }
    const Source<S> source(block, info.begin);
    const Edges<S> edges(block, info.begin, source);
    const auto address = reinterpret_cast<uintptr_t>(source.slice);
    const int element = MemoryMap::element_of(address);
    const int memory_block = MemoryMap::block_of(address);
    for (; stage < block.stages_per_row; stage += S::kCopyWarps) {
      wait(shared.empty[fill.slot], fill.parity);
      Barrier& arrived = shared.arrived[fill.slot];
      const uint32_t to = shared_address(block.stage(fill.slot));
      if (source.is_inner(stage)) {
        if (is_elected()) {
          const uint32_t barrier = shared_address(&arrived);
          order_copies();
          arrive_and_expect(barrier, S::kFilledBytes);
          if (S::kCluster == 1) {
            copy_bytes(
                to, source.slice + static_cast<int64_t>(stage) * Source<S>::kStageInMemory,
                S::kFilledBytes, barrier);
          } else {
            copy_box(to, block.memory, element, stage * S::kPeriods, memory_block, barrier);
          }
        }
      } else {
        edges.copy(pieces, stage, to);
        expect_copies(arrived);
        __syncwarp();
        if (lane == 0) {
          arrive(arrived);
        }
      }
      __syncwarp();
      fill.advance(S::kStages, S::kCopyWarps);
    }
    stage -= block.stages_per_row;
    row.advance(S::kRowSlots);
  }
}

}  // namespace detlogp::cuda::ring
