// Tuning: how the work is laid out, never what is computed. Change a number here, and no bit moves.
#pragma once

namespace detlogp::cuda {

struct ForwardPolicy {
  static constexpr int kMaxUnroll =
      4;  // 16-byte loads in flight per thread while looking for the max
  static constexpr int kSumUnroll = 16;  // columns of a lane in flight while summing
};

struct BackwardPolicy {
  static constexpr int kThreads = 256;
  static constexpr int kVectors = 2;            // 16-byte loads in flight per thread
  static constexpr int kBytesPerBlock = 65536;  // of a row's logits
};

struct MeanPolicy {
  static constexpr int kUnroll = 8;  // columns of a lane in flight
};

}  // namespace detlogp::cuda
