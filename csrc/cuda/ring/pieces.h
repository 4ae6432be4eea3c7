// A row as the stages of a block hold it, in pieces of 16 bytes.
#pragma once

#include <utility>

#include "cuda/piece_max.h"
#include "cuda/ring/shape.h"

namespace detlogp::cuda::ring {

// How much further a piece lies, in the stage and in memory.
template <int Place, int Offset>
struct Step {
  static constexpr int kPlace = Place;
  static constexpr int kOffset = Offset;
};

// Where the first 16-byte piece of a lane lies, in a stage and in memory counted from the slice; and
// f(how much further) for each of its pieces.
template <class S>
struct Pieces {
  static constexpr int kPieces = S::kSliceBytes / 16;
  static constexpr int kPeriodBytes = kLanes * static_cast<int>(sizeof(typename S::Logit));

  int place;
  int offset;

  __device__ explicit Pieces(int lane)
      : place(lane / kPieces * S::kPitch + lane % kPieces * 16),
        offset(lane / kPieces * kPeriodBytes + lane % kPieces * 16) {
  }

  template <class F>
  __device__ __forceinline__ static void for_each(const F& f) {
    for_each(f, std::make_integer_sequence<int, S::kPeriods * kPieces / 32>());
  }
  // The piece more that a shifted slice has, for the lane's own period.
  __device__ __forceinline__ static bool has_last(int lane) {
    return S::kCluster == 1 ? lane == S::kPeriods - 1 : lane < S::kPeriods;
  }
  __device__ __forceinline__ static int last_place(int lane) {
    return lane * S::kPitch + S::kSliceBytes;
  }
  __device__ __forceinline__ static int last_offset(int lane) {
    return lane * kPeriodBytes + S::kSliceBytes;
  }

 private:
  template <class F, int... Index>
  __device__ __forceinline__ static void for_each(
      const F& f, std::integer_sequence<int, Index...>) {
    (f(Step<
         Index * 32 / kPieces * S::kPitch + Index * 32 % kPieces * 16,
         Index * 32 / kPieces * kPeriodBytes + Index * 32 % kPieces * 16>()),
     ...);
  }
};

// A piece of -inf; and one of which the bytes first <= b < last are kept.
template <class T>
struct Filler {
  static constexpr int kSize = sizeof(T);
  static constexpr uint32_t kMinusInfinity = minus_infinities<T>;

  __device__ __forceinline__ static void store(uint32_t to) {
    store_shared(to, {kMinusInfinity, kMinusInfinity, kMinusInfinity, kMinusInfinity});
  }

  __device__ __forceinline__ static void store_around(
      uint32_t to, const uint4& piece, int first, int last) {
    T element[16 / kSize];
    memcpy(element, &piece, sizeof(piece));
    const uint32_t minus_infinity = kMinusInfinity;
    T filler;
    memcpy(&filler, &minus_infinity, kSize);
#pragma unroll
    for (int e = 0; e < 16 / kSize; ++e) {
      element[e] = e * kSize >= first && e * kSize < last ? element[e] : filler;
    }
    uint32_t word[4];
    memcpy(word, element, sizeof(word));
    store_shared(to, word);
  }
};

// A row in memory, as this block's stages hold it.
template <class S>
struct Source {
  static constexpr int kElementBytes = sizeof(typename S::Logit);
  static constexpr int kStageInMemory = S::kStageColumns * kElementBytes;

  const char* slice;  // where period 0 of this block's slice begins, rounded down to 16 bytes
  bool is_shifted;    // by that
  // first_inner <= k < last_inner: stage k lies in the row, and so does the piece behind each of its slices.
  int first_inner;
  int last_inner;

  __device__ __forceinline__ Source(const Block<S>& block, const char* row) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16);
    slice = row - shift + block.rank * S::kSliceBytes;
    is_shifted = shift != 0;
    first_inner = is_shifted ? 1 : 0;
    last_inner = max(first_inner, (block.vocab - 16 / kElementBytes) / S::kStageColumns);
  }

  __device__ __forceinline__ bool is_inner(int stage) const {
    return stage >= first_inner && stage < last_inner;
  }
};

}  // namespace detlogp::cuda::ring
