// The copying warps: from memory into the ring, 16 bytes at a time. They take turns at the stages.
#pragma once

#include <type_traits>
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

// A piece of -inf; and one of which the bytes first <= b < last are kept.
template <class T>
struct Filler {
  static constexpr int kSize = sizeof(T);
  static constexpr uint32_t kMinusInfinity = std::is_same<T, Half>::value ? 0xfc00fc00u
                                             : kSize == 2                 ? 0xff80ff80u
                                                                          : 0xff800000u;

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

// A row in memory, as this block's stages hold it. What is not the row's becomes -inf there, so that only
// those who copy know where a row begins and ends.
template <class S>
class Source {
  using T = typename S::Logit;

 public:
  __device__ __forceinline__ Source(const Block<S>& block, const char* row)
      : begin_(row), end_(row + static_cast<int64_t>(block.vocab) * sizeof(T)) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16);
    past_ = static_cast<int>(reinterpret_cast<uintptr_t>(end_) % 16);
    slice_ = row - shift + block.rank * S::kSliceBytes;
    is_shifted_ = shift != 0;
    first_inner_ = is_shifted_ ? 1 : 0;
    last_inner_ = (block.vocab - (is_shifted_ ? 16 : 0)) / S::kStageColumns;
    // Asked for now, they are here when the first and the last stage need them.
    if (shift != 0) {
      head_ = *reinterpret_cast<const uint4*>(row - shift);
    }
    if (past_ != 0) {
      tail_ = *reinterpret_cast<const uint4*>(end_ - past_);
    }
  }

  __device__ __forceinline__ void copy(const Pieces<S>& pieces, int stage, uint32_t to) const {
    constexpr int kStageInMemory = S::kStageColumns * static_cast<int>(sizeof(T));
    const char* from = slice_ + static_cast<int64_t>(stage) * kStageInMemory;
    const uint32_t to_lane = to + pieces.place;
    const char* from_lane = from + pieces.offset;
    const int lane = threadIdx.x % 32;
    const bool has_last = is_shifted_ && lane < S::kPeriods;
    const uint32_t to_last = to + pieces.last_place(lane);
    const char* from_last = from + pieces.last_offset(lane);
    if (stage >= first_inner_ && stage < last_inner_) {
      pieces.for_each(
          [&](auto step) { copy_16_bytes<step.kPlace, step.kOffset>(to_lane, from_lane); });
      if (has_last) {
        copy_16_bytes<0, 0>(to_last, from_last);
      }
    } else {
      copy_edge(pieces, to_lane, from_lane);
      if (has_last) {
        const auto left = static_cast<int>(end_ - from_last);
        left >= 16 ? copy_16_bytes<0, 0>(to_last, from_last)
                   : Filler<T>::store_around(to_last, tail_, 0, left);
      }
    }
  }

 private:
  __device__ __forceinline__ void copy_edge(
      const Pieces<S>& pieces, uint32_t to_lane, const char* from_lane) const {
    const auto last = static_cast<int>(end_ - from_lane);
    const bool has_head = from_lane < begin_;  // it is the first of a lane's pieces
    uint32_t to_tail = 0;
    pieces.for_each([&](auto step) {
      const int left = last - step.kOffset;
      if (left <= 0) {
        Filler<T>::store(to_lane + step.kPlace);
      } else if (left < 16) {
        to_tail = to_lane + step.kPlace;
      } else if (step.kOffset > 0 || !has_head) {
        copy_16_bytes<step.kPlace, step.kOffset>(to_lane, from_lane);
      }
    });
    if (has_head) {
      Filler<T>::store_around(to_lane, head_, static_cast<int>(begin_ - from_lane), 16);
    }
    if (to_tail != 0) {
      Filler<T>::store_around(to_tail, tail_, 0, past_);
    }
  }

  const char* begin_;
  const char* end_;
  int past_;           // bytes of the row in its last piece, if not all 16
  const char* slice_;  // where period 0 of this block's slice begins, rounded down to 16 bytes
  bool is_shifted_;
  // first_inner_ <= k < last_inner_: stage k touches neither the first nor the last piece of the row.
  int first_inner_;
  int last_inner_;
  uint4 head_{};  // the first piece and the last, where they hold other bytes too
  uint4 tail_{};
};

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
    for (; stage < block.stages_per_row; stage += S::kCopyWarps) {
      wait(shared.empty[fill.slot], fill.parity);
      source.copy(pieces, stage, shared_address(block.stage(fill.slot)));
      arrive_when_copied(shared.arrived[fill.slot]);
      // For what was stored; the copies announce themselves.
      __syncwarp();
      if (lane == 0) {
        arrive(shared.arrived[fill.slot]);
      }
      fill.advance(S::kStages, S::kCopyWarps);
    }
    stage -= block.stages_per_row;
    row.advance(S::kRowSlots);
  }
}

}  // namespace detlogp::cuda::ring
