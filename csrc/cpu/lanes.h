// The locked sum of one row. `add_block(lane, column, count)` adds columns [column, column + count) to
// the first `count` lanes, one column to each.
#pragma once

#include "core/lanes.h"

namespace detlogp::cpu {

template <class Acc, int B, class AddBlock>
DETLOGP_FN Acc sum_in_lanes_of(int64_t vocab, const AddBlock& add_block) {
  Acc lane[B] = {};
  int64_t column = 0;
  for (; column + B <= vocab; column += B) {
    add_block(lane, column, B);
  }
  add_block(lane, column, static_cast<int>(vocab - column));
  return fold_lanes(lane, B);
}

template <class Acc, class AddBlock>
DETLOGP_FN Acc sum_in_lanes(int64_t vocab, const AddBlock& add_block) {
  switch (lane_count(vocab)) {
    case 128:
      return sum_in_lanes_of<Acc, 128>(vocab, add_block);
    case 256:
      return sum_in_lanes_of<Acc, 256>(vocab, add_block);
    default:
      return sum_in_lanes_of<Acc, 512>(vocab, add_block);
  }
}

}  // namespace detlogp::cpu
