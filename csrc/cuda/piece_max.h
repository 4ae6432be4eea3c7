// The max of 16-byte pieces of a row, by one thread. A max has no order.
#pragma once

#include <type_traits>

#include "core/row.h"
#include "cuda/device.h"

namespace detlogp::cuda {

// Two logits of two bytes, on which instructions work at a time.
template <class T>
using Pair = std::conditional_t<std::is_same<T, Half>::value, __half2, __nv_bfloat162>;

// Four bytes of -inf: one float, or two halves.
template <class T>
constexpr uint32_t minus_infinities = std::is_same<T, Half>::value ? 0xfc00fc00u
                                      : sizeof(T) == 2             ? 0xff80ff80u
                                                                   : 0xff800000u;

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
    constexpr uint32_t kMinusInfinity = minus_infinities<T>;
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

}  // namespace detlogp::cuda
