// The neighbouring logits of one thread, from shared memory, as they lie in memory.
#pragma once

#include "cuda/barrier.h"
#include "cuda/device.h"
#include "cuda/piece_max.h"

namespace detlogp::cuda::ring {

template <class T, int Lanes>
struct Logits {
  static constexpr int kBytes = Lanes * static_cast<int>(sizeof(T));
  static constexpr int kWords = (kBytes + 3) / 4;

  uint32_t word[kWords];

  // From an address that is aligned to all of them.
  __device__ __forceinline__ void load(uint32_t from) {
    if (kBytes == 2) {
      word[0] = load_shared_16(from);
    } else {
      load_shared(from, word);
    }
  }

  // From an address that is aligned to one: words, of which an odd address takes the halves.
  __device__ __forceinline__ void load_shifted(uint32_t from) {
    if (kBytes == 2 || sizeof(T) == 4) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        word[w] = kBytes == 2 ? load_shared_16(from) : load_shared_32(from + 4 * w);
      }
      return;
    }
    const uint32_t bits = from % 4 * 8;
    const uint32_t first = from & ~3u;
    uint32_t low = load_shared_32(first);
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const uint32_t high = load_shared_32(first + 4 * (w + 1));
      word[w] = __funnelshift_r(low, high, bits);
      low = high;
    }
  }

  __device__ __forceinline__ Pair<T> pair(int w) const {
    static_assert(sizeof(T) == 2 && Lanes % 2 == 0, "a word holds two logits");
    Pair<T> result;
    memcpy(&result, &word[w], sizeof(result));
    return result;
  }

  __device__ __forceinline__ float widened(int l) const {
    return widen_half(T(), word[l * sizeof(T) / 4], l % 2 != 0);
  }

 private:
  __device__ __forceinline__ static float widen_half(float, uint32_t bits, bool) {
    return __uint_as_float(bits);
  }
  __device__ __forceinline__ static float widen_half(BFloat16, uint32_t bits, bool is_upper) {
    return __uint_as_float(is_upper ? bits & 0xffff0000u : bits << 16);
  }
  __device__ __forceinline__ static float widen_half(Half, uint32_t bits, bool is_upper) {
    __half2 pair;
    memcpy(&pair, &bits, sizeof(pair));
    return is_upper ? __high2float(pair) : __low2float(pair);
  }
};

}  // namespace detlogp::cuda::ring
