// Tuning: how the work is laid out, never what is computed. Change a number here, and no bit moves.
#pragma once

#include <cstdint>

namespace detlogp::cuda {

struct ForwardPolicy {
  static constexpr int kMaxUnroll = 4;   // 16-byte loads of a thread in flight, for the max
  static constexpr int kSumUnroll = 16;  // columns of a lane in flight, for the sum
  static constexpr int kGeneralUnroll =
      4;  // the same with temperatures and the entropy, and in double
  // The ring kernel serves rows from here on; few rows, which fill the device in one wave, only if wide.
  static constexpr int64_t kRingVocab = 10240;
  static constexpr int64_t kRingVocabOfFewRows = 49152;
  static constexpr int64_t kFewRows = 128;
};

// Few wide rows: as many as the device takes at a time, by 8 blocks a row or by 4.
struct FewRowsPolicy {
  static constexpr int kThreads = 512;  // of a block, that make terms
  static constexpr int kPeriods = 320;  // of 512 columns, at most: V up to 163840
};

// The ring of the forward, by the size of a logit, the blocks of a row, the contract, and whether there are temperatures
// and the entropy, which need registers. Measured on 9.0; 10.0, which has the same shared memory, uses the same numbers.
template <int ElementBytes, int Blocks, bool IsExact, bool IsGeneral>
struct RingPolicy {
  static constexpr int kSharedBytes = 227 * 1024;  // of a block
  static constexpr int kStageBytes = 8192;         // of logits, at most
  // Terms of one number each (cuda/exp.h) leave registers for more warps. Few rows, whose first terms all wait for,
  // have those of two sooner.
  static constexpr bool kHasTerms = !IsExact && ElementBytes == 2 && Blocks <= 2;
  // 16 warps may have 128 registers a thread, 20 have 96, 24 have 80.
  static constexpr int kSumThreads =
      kHasTerms || (IsExact && (ElementBytes == 2 || !IsGeneral)) ? 512 : 384;
  static constexpr int kSetThreads = 128;  // of the summing threads, at most
  static constexpr int kTerms =            // of a thread and stage, at most
      ElementBytes == 2 && !(Blocks == 1 && IsExact && IsGeneral) ? 32 : 16;
  static constexpr int kCopyWarps =  // and as many for the max
      IsExact || (kHasTerms && (IsGeneral || Blocks == 1)) ? 3 : 2;
  static constexpr double kRoomyShare = 0.8;  // of the ring, for one row
  // Whether rows are scored is looked up for 32 times as many at a time.
  static constexpr int kLookedUp = IsExact ? 4 : Blocks > 2 ? 2 : Blocks == 2 || IsGeneral ? 6 : 4;
};

// The forward of the exact contract, where the ring does not serve.
struct ExactPolicy {
  static constexpr int kThreads = 256;
  static constexpr int kStagedBytes =
      32768;  // of a row: below it, a row is copied to shared memory
};

// The steps of the exact contract.
struct PartPolicy {
  static constexpr int kThreads = 256;
  static constexpr int kBytesPerBlock = 32768;  // of a row's logits or terms
};

struct BackwardPolicy {
  static constexpr int kThreads = 256;
  static constexpr int kBytesPerBlock = 32768;  // of a row's logits
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr int kBlocks = 6;  // of a multiprocessor, which holds 1536 threads
#else
  static constexpr int kBlocks = 8;  // of a multiprocessor, which holds 2048
#endif
  // The same where elements need more registers: the exact contract's of 4 bytes and more; those with a
  // temperature or the entropy, or of two inputs.
  static constexpr int kExactWideBlocks = 6;
  static constexpr int kGeneralBlocks = 5;
};

struct MeanPolicy {
  static constexpr int kUnroll = 8;  // columns of a lane in flight
};

}  // namespace detlogp::cuda
