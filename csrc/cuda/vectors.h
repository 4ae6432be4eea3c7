// 16 bytes of neighbouring elements: to the accumulation type and back, two at a time where the hardware
// converts pairs. The bits of to_acc and from_acc.
#pragma once

#include <type_traits>

#include "cuda/device.h"

namespace detlogp::cuda {

template <class Acc, int Size>
struct Values {
  Acc of[Size];
};

template <class Acc, class T>
__device__ __forceinline__ Values<Acc, Vector<T>::kSize> widened(const Vector<T>& vector) {
  Values<Acc, Vector<T>::kSize> result;
#pragma unroll
  for (int e = 0; e < Vector<T>::kSize; ++e) {
    result.of[e] = to_acc<Acc>(vector.element[e]);
  }
  return result;
}

template <>
__device__ __forceinline__ Values<float, 8> widened<float, BFloat16>(
    const Vector<BFloat16>& vector) {
  uint32_t pair[4];
  memcpy(pair, &vector, sizeof(pair));
  Values<float, 8> result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    result.of[2 * i] = __uint_as_float(pair[i] << 16);
    result.of[2 * i + 1] = __uint_as_float(pair[i] & 0xffff0000u);
  }
  return result;
}

template <class T, class Acc, int Size>
__device__ __forceinline__ Vector<T> narrowed(const Values<Acc, Size>& values) {
  Vector<T> result;
  if constexpr (sizeof(T) == 2 && sizeof(Acc) == 4) {
    using Pair = std::conditional_t<std::is_same<T, Half>::value, __half2, __nv_bfloat162>;
    Pair pair[Size / 2];
#pragma unroll
    for (int i = 0; i < Size / 2; ++i) {
      if constexpr (std::is_same<T, Half>::value) {
        pair[i] = __floats2half2_rn(values.of[2 * i], values.of[2 * i + 1]);
      } else {
        pair[i] = __floats2bfloat162_rn(values.of[2 * i], values.of[2 * i + 1]);
      }
    }
    memcpy(&result, pair, sizeof(result));
  } else {
#pragma unroll
    for (int e = 0; e < Size; ++e) {
      result.element[e] = from_acc<T>(values.of[e]);
    }
  }
  return result;
}

// Past the cache: the one reads what nobody reads again, the other spares what is there.
template <class T>
__device__ __forceinline__ Vector<T> load_streaming(const Vector<T>* from) {
  const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(from));
  Vector<T> vector;
  memcpy(&vector, &bits, sizeof(bits));
  return vector;
}

template <class T>
__device__ __forceinline__ void store_streaming(Vector<T>* to, const Vector<T>& vector) {
  uint4 bits;
  memcpy(&bits, &vector, sizeof(bits));
  __stcs(reinterpret_cast<uint4*>(to), bits);
}

}  // namespace detlogp::cuda
