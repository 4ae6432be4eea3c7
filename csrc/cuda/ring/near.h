// Whether a stage's logits are all near their row's max: then none of their exponentials is subnormal, and a term takes
// fewer steps (cuda/exp.h).
#pragma once

#include "cuda/exp.h"
#include "cuda/ring/logits.h"

namespace detlogp::cuda::ring {

__device__ __forceinline__ __half2 pair_from(Half, float x) {
  return __half2half2(__float2half_ru(x));
}

__device__ __forceinline__ __nv_bfloat162 pair_from(BFloat16, float x) {
  return __bfloat162bfloat162(__float2bfloat16_ru(x));
}

// The least logit that is near, twice, rounded up; NaN where none shall be. Quotients lie at most 1 further away, for
// their own rounding.
template <class T, bool Divides>
__device__ __forceinline__ Pair<T> least_near(float row_max, float divisor) {
  constexpr float kNear = 85;  // and exp(-87) is not subnormal
  const float magnitude = fabsf(row_max);
  const float largest = -lowest<float>();
  const bool is_served =
      Divides ? magnitude < 65536 && divisor <= largest
              : magnitude <= largest && (std::is_same<T, Half>::value || magnitude >= kLeastMax);
  const float least =
      Divides ? fmaxf((row_max - kNear) * divisor, lowest<float>()) : row_max - kNear;
  return pair_from(T(), is_served ? least : __uint_as_float(0x7fffffffu));
}

// Of all logits of the warp. A NaN is not near.
template <class T, int Lanes, int Periods>
__device__ __forceinline__ bool are_near(
    const Logits<T, Lanes> (&columns)[Periods], const Pair<T>& least) {
  constexpr int kWords = Logits<T, Lanes>::kWords;
  Pair<T> low[2] = {columns[0].pair(0), columns[0].pair(0)};
#pragma unroll
  for (int i = 1; i < Periods * kWords; ++i) {
    Pair<T>& pair = low[i / 2 % 2];
    pair = __hmin2_nan(pair, columns[i / kWords].pair(i % kWords));
  }
  return __all_sync(0xffffffffu, __hbge2(__hmin2_nan(low[0], low[1]), least));
}

// The term of a logit that is near: of its distance from the max, or of a quotient's.
template <class T, bool Divides>
__device__ __forceinline__ float make_near_term(float x) {
  if constexpr (!Divides && std::is_same<T, BFloat16>::value) {
    return near_bfloat16_term_of(x);
  } else {
    return near_term_of(x);
  }
}

}  // namespace detlogp::cuda::ring
