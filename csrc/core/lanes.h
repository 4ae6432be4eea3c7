// The locked order of additions: it depends on V alone.
//
//   V <= 128: B = 128      128 < V <= 4096: B = 256      V > 4096: B = 512
//
// Lane k takes columns k, k + B, k + 2B, ... one at a time, starting from zero. Then each group of 32
// lanes is folded (offset 16, 8, 4, 2, 1: lane i += lane i + offset), and the B / 32 group results,
// padded with zeros to 32, are folded the same way.
#pragma once

#include "core/platform.h"

namespace detlogp {

constexpr int kGroup = 32;
constexpr int kMaxLanes = 512;

DETLOGP_FN constexpr int lane_count(int64_t vocab) {
  return vocab <= 128 ? 128 : vocab <= 4096 ? 256 : kMaxLanes;
}

// Only lanes below `offset` still feed lane 0, so only those are computed.
template <class Acc>
DETLOGP_FN Acc fold_group(Acc* lane) {
  for (int offset = kGroup / 2; offset > 0; offset /= 2) {
    for (int i = 0; i < offset; ++i) {
      lane[i] += lane[i + offset];
    }
  }
  return lane[0];
}

template <class Acc>
DETLOGP_FN Acc fold_lanes(Acc* lane, int lanes) {
  Acc group[kGroup] = {};
  for (int g = 0; g < lanes / kGroup; ++g) {
    group[g] = fold_group(lane + g * kGroup);
  }
  return fold_group(group);
}

}  // namespace detlogp
