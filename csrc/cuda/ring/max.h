// The max warps: the max of every row, from the ring. They take turns at the stages.
#pragma once

#include "cuda/ring/logits.h"
#include "cuda/ring/pieces.h"

namespace detlogp::cuda::ring {

// The max of 16-byte pieces. Locked: from the lowest finite number, and a NaN is passed over; exact: from
// -inf, and a NaN stays.
template <class T, bool KeepsNan>
struct PieceMax;

template <bool KeepsNan>
__device__ __forceinline__ float start_of_max() {
  return KeepsNan ? __uint_as_float(0xff800000u) : lowest<float>();
}

template <bool KeepsNan>
struct PieceMax<float, KeepsNan> {
  float value[4];

  __device__ __forceinline__ void reset() {
    value[0] = value[1] = value[2] = value[3] = start_of_max<KeepsNan>();
  }
  __device__ __forceinline__ void take(uint4 piece) {
    value[0] = larger_of<KeepsNan>(value[0], __uint_as_float(piece.x));
    value[1] = larger_of<KeepsNan>(value[1], __uint_as_float(piece.y));
    value[2] = larger_of<KeepsNan>(value[2], __uint_as_float(piece.z));
    value[3] = larger_of<KeepsNan>(value[3], __uint_as_float(piece.w));
  }
  __device__ __forceinline__ float result() const {
    return larger_of<KeepsNan>(
        larger_of<KeepsNan>(value[0], value[1]), larger_of<KeepsNan>(value[2], value[3]));
  }
};

// Two elements at a time.
template <class T, bool KeepsNan>
struct PackedMax {
  Pair<T> value[4];

  __device__ __forceinline__ void reset() {
    constexpr uint32_t kMinusInfinity = Filler<T>::kMinusInfinity;  // of both
    for (Pair<T>& v : value) {
      memcpy(&v, &kMinusInfinity, sizeof(v));
    }
  }
  __device__ __forceinline__ void take(uint4 piece) {
    Pair<T> pair[4];
    memcpy(pair, &piece, sizeof(piece));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      value[i] = larger_pair(value[i], pair[i]);
    }
  }
  __device__ __forceinline__ float result() const {
    const Pair<T> pair =
        larger_pair(larger_pair(value[0], value[1]), larger_pair(value[2], value[3]));
    T element[2];
    memcpy(element, &pair, sizeof(pair));
    return larger_of<KeepsNan>(
        start_of_max<KeepsNan>(),
        larger_of<KeepsNan>(to_acc<float>(element[0]), to_acc<float>(element[1])));
  }

 private:
  __device__ __forceinline__ static Pair<T> larger_pair(Pair<T> a, Pair<T> b) {
    return KeepsNan ? __hmax2_nan(a, b) : __hmax2(a, b);
  }
};

template <bool KeepsNan>
struct PieceMax<Half, KeepsNan> : PackedMax<Half, KeepsNan> {};

template <bool KeepsNan>
struct PieceMax<BFloat16, KeepsNan> : PackedMax<BFloat16, KeepsNan> {};

template <class S>
using MaxOf = PieceMax<typename S::Logit, S::kIsExact>;

template <class S>
__device__ __forceinline__ void max_of_rows(const Block<S>& block, int warp) {
  Shared<S>& shared = block.shared;
  const int lane = threadIdx.x % 32;
  const Pieces<S> pieces(lane);
  const int place_of_max = block.rank * S::kMaxWarps + warp;
  MaxOf<S> max;
  Cursor row;
  Cursor take{warp, 0};
  int stage = warp;
  while (true) {
    wait(shared.listed[row.slot], row.parity);
    const RowInfo info = shared.info[row.slot];
    if (info.row < 0) {
      if (lane == 0) {
        arrive(shared.full[row.slot]);
      }
      return;
    }
    const bool has_last =
        Pieces<S>::has_last(lane) && reinterpret_cast<uintptr_t>(info.begin) % 16 != 0;
    max.reset();
    for (; stage < block.stages_per_row; stage += S::kMaxWarps) {
      wait(shared.arrived[take.slot], take.parity);
      const char* data = block.stage(take.slot);
      pieces.for_each([&](auto step) {
        max.take(*reinterpret_cast<const uint4*>(data + pieces.place + step.kPlace));
      });
      if (has_last) {
        max.take(*reinterpret_cast<const uint4*>(data + pieces.last_place(lane)));
      }
      take.advance(S::kStages, S::kMaxWarps);
    }
    stage -= block.stages_per_row;
    const float value = max_of_warp<S::kIsExact>(max.result());
    if (lane < S::kCluster) {
      send(&shared.max[row.slot][place_of_max], shared.full[row.slot], lane, value);
    }
    // This warp has seen its stages arrive; whoever waits for the max need not look again.
    if (lane == 0) {
      arrive(shared.full[row.slot]);
    }
    row.advance(S::kRowSlots);
  }
}

}  // namespace detlogp::cuda::ring
