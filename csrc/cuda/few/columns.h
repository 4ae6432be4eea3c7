// What a thread of few_rows.cu has of a row: pieces of 16 bytes, in registers.
#pragma once

#include "cuda/policy.h"
#include "cuda/ring/near.h"

namespace detlogp::cuda::few {

constexpr int kThreads = FewRowsPolicy::kThreads;  // of a block, that make terms

// C blocks a row of logits of type T. A period is 512 neighbouring columns, of which a block has its lanes.
template <class T, int C>
struct Shape {
  using Logit = T;
  static constexpr int kCluster = C;
  static constexpr int kLanes = kMaxLanes / C;
  static constexpr int kPieceSize = Vector<T>::kSize;
  static constexpr int kPieces = kLanes / kPieceSize;  // of a period
  static constexpr int kAtATime = kThreads / kPieces;  // periods: each thread reads a piece
  static constexpr int kSteps = FewRowsPolicy::kPeriods / kAtATime;
  static constexpr int kChunkSteps = kAtATime < 32 ? 2 : 1;
  static constexpr int kChunk = kChunkSteps * kAtATime;  // periods, told of at a time
  static constexpr size_t kTermBytes = sizeof(float) * kSteps * kAtATime * kLanes;
};

// The pieces that a thread reads, -inf where the row has ended.
template <class S>
struct Columns {
  using T = typename S::Logit;
  static constexpr int kWordSize = 4 / sizeof(T);
  static constexpr int kStepColumns = S::kAtATime * kMaxLanes;

  uint4 piece[S::kSteps];
  int vocab;
  int first;  // column of piece 0

  __device__ __forceinline__ Columns(const Rows& rows, int64_t row, int thread, int rank)
      : vocab(static_cast<int>(rows.vocab)),
        first(
            thread / S::kPieces * kMaxLanes + rank * S::kLanes +
            thread % S::kPieces * S::kPieceSize) {
    const T* from = row_of<T>(rows, row) + first;
    const bool aligned = is_aligned(from);
#pragma unroll
    for (int i = 0; i < S::kSteps; ++i) {
      const int column = i * kStepColumns;
      const int left = vocab - first - column;
      piece[i] = aligned && left >= S::kPieceSize ? *reinterpret_cast<const uint4*>(from + column)
                                                  : assemble(from + column, left);
    }
  }

  // Whether all threads' columns of step i are the row's; whether none of this thread's is.
  __device__ __forceinline__ bool is_whole(int i) const {
    return (i + 1) * kStepColumns <= vocab;
  }
  __device__ __forceinline__ bool is_empty(int i) const {
    return first + i * kStepColumns >= vocab;
  }

  __device__ __forceinline__ float max() const {
    PieceMax<T, false> result;
    result.reset();
#pragma unroll
    for (int i = 0; i < S::kSteps; ++i) {
      result.take(piece[i]);
    }
    return result.result();
  }

 private:
  __device__ __forceinline__ static uint4 assemble(const T* from, int left) {
    uint32_t word[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      T element[kWordSize];
      constexpr uint32_t kFiller = minus_infinities<T>;
      memcpy(element, &kFiller, sizeof(kFiller));
#pragma unroll
      for (int e = 0; e < kWordSize; ++e) {
        element[e] = w * kWordSize + e < left ? from[w * kWordSize + e] : element[e];
      }
      memcpy(&word[w], element, sizeof(kFiller));
    }
    return {word[0], word[1], word[2], word[3]};
  }
};

// Whether a warp's logits are near the max, so that their terms take fewer steps (cuda/exp.h): those of whole steps; in
// others there is filler.
template <class S>
struct Near {
  using Logits = Pair<typename S::Logit>;

  Logits least;

  __device__ __forceinline__ explicit Near(const Columns<S>& columns) {
    constexpr uint32_t kInfinities = minus_infinities<typename S::Logit> ^ 0x80008000u;
    memcpy(&least, &kInfinities, sizeof(least));
#pragma unroll
    for (int i = 0; i < S::kSteps; ++i) {
      Logits pair[4];
      memcpy(pair, &columns.piece[i], sizeof(pair));
      if (columns.is_whole(i)) {
        least = __hmin2_nan(
            least, __hmin2_nan(__hmin2_nan(pair[0], pair[1]), __hmin2_nan(pair[2], pair[3])));
      }
    }
  }

  __device__ __forceinline__ bool are_near(float row_max) const {
    const auto bound = ring::least_near<typename S::Logit, false>(row_max, 1);
    return __all_sync(0xffffffffu, __hbge2(least, bound));
  }
};

// float32 has no shorter way that pays.
template <int C>
struct Near<Shape<float, C>> {
  __device__ __forceinline__ explicit Near(const Columns<Shape<float, C>>&) {
  }
  __device__ __forceinline__ bool are_near(float) const {
    return false;
  }
};

}  // namespace detlogp::cuda::few
