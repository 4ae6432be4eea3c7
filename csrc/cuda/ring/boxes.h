// The warp that asks for the stages inside a row: one copy of many bytes each, a box.
#pragma once

#include "cuda/ring/pieces.h"

namespace detlogp::cuda::ring {

template <class S>
__device__ __forceinline__ void copy_boxes(const Block<S>& block) {
  Shared<S>& shared = block.shared;
  const uint32_t arrived = in_register(shared_address(shared.arrived));
  const uint32_t empty = in_register(shared_address(shared.empty));
  const uint32_t ring = in_register(shared_address(block.ring));
  Cursor row;
  Cursor fill{0, 1};
  while (true) {
    wait(shared.listed[row.slot], row.parity);
    const RowInfo info = shared.info[row.slot];
    if (info.row < 0) {
      return;
    }
    const Source<S> source(block, info.begin);
    const auto address = reinterpret_cast<uintptr_t>(source.slice);
    const int element = MemoryMap::element_of(address);
    const int memory_block = MemoryMap::block_of(address);
    fill.advance(S::kStages, source.first_inner);
    for (int stage = source.first_inner; stage < source.last_inner; ++stage) {
      wait(empty + fill.slot * sizeof(Barrier), fill.parity);
      if (is_elected()) {
        const uint32_t to = ring + fill.slot * S::kStageBytes;
        const uint32_t barrier = arrived + fill.slot * sizeof(Barrier);
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
      __syncwarp();
      fill.advance(S::kStages);
    }
    fill.advance(S::kStages, block.stages_per_row - source.last_inner);
    row.advance(S::kRowSlots);
  }
}

}  // namespace detlogp::cuda::ring
