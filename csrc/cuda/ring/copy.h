// The copying warps: from memory into the ring, 16 bytes at a time. They take turns at the stages.
#pragma once

#include <utility>

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

// A row in memory, as this block's stages hold it.
template <class S>
struct Source {
  const char* begin;
  const char* end;
  const char* slice;  // where period 0 of this block's slice begins, rounded down to 16 bytes
  bool is_shifted;
  // first_inner <= k < last_inner: stage k touches neither the first nor the last piece of the row.
  int first_inner;
  int last_inner;

  __device__ __forceinline__ Source(const Block<S>& block, const char* row)
      : begin(row), end(row + static_cast<int64_t>(block.vocab) * sizeof(typename S::Logit)) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16);
    slice = row - shift + block.rank * S::kSliceBytes;
    is_shifted = shift != 0;
    first_inner = is_shifted ? 1 : 0;
    last_inner = (block.vocab - (is_shifted ? 16 : 0)) / S::kStageColumns;
  }
  __device__ __forceinline__ const char* of_stage(int stage) const {
    return slice + static_cast<int64_t>(stage) *
                       (S::kStageColumns * static_cast<int>(sizeof(typename S::Logit)));
  }
  __device__ __forceinline__ bool is_inner(int stage) const {
    return stage >= first_inner && stage < last_inner;
  }
};

template <class S>
__device__ __forceinline__ void copy_rows(const Block<S>& block, int warp) {
  Shared<S>& shared = block.shared;
  const int lane = threadIdx.x % 32;
  const Pieces<S> pieces(lane);
  const bool has_last = lane < S::kPeriods;
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
    for (; stage < block.stages_per_row; stage += S::kCopyWarps) {
      wait(shared.empty[fill.slot], fill.parity);
      const char* from = source.of_stage(stage);
      const uint32_t to = shared_address(block.stage(fill.slot));
      const uint32_t to_lane = to + pieces.place;
      const char* from_lane = from + pieces.offset;
      if (source.is_inner(stage)) {
        pieces.for_each(
            [&](auto step) { copy_16_bytes<step.kPlace, step.kOffset>(to_lane, from_lane); });
        if (source.is_shifted && has_last) {
          copy_16_bytes<0, 0>(to + pieces.last_place(lane), from + pieces.last_offset(lane));
        }
      } else {
        const auto copy = [&](uint32_t place, const char* piece) {
          const int64_t left = source.end - piece;
          if (left > 0) {
            copy_up_to_16_bytes(place, piece, left < 16 ? static_cast<int>(left) : 16);
          }
        };
        pieces.for_each([&](auto step) { copy(to_lane + step.kPlace, from_lane + step.kOffset); });
        if (source.is_shifted && has_last) {
          copy(to + pieces.last_place(lane), from + pieces.last_offset(lane));
        }
      }
      arrive_when_copied(shared.arrived[fill.slot]);
      fill.advance(S::kStages, S::kCopyWarps);
    }
    stage -= block.stages_per_row;
    row.advance(S::kRowSlots);
  }
}

}  // namespace detlogp::cuda::ring
