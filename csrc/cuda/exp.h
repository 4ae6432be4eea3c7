// expf as CUDA 13.0 computes it, in two parts: exp(x) = fraction * power, a product that the sum takes
// in one fused step. Written out, so that the parts of several columns can be ready before their lane's
// sum needs them; step for step what nvcc makes of `sum + expf(x)`.
//
// Where registers are short the product waits in one number, a term: 2^64 exp(x). The sum then has the same bits:
// a term of 2^-86 and more is exact, and a smaller one, exp(x) < 2^-150, changes no sum of floats, rounded or not.
#pragma once

#include <cuda_runtime.h>

namespace detlogp::cuda {

constexpr int kLog2TermScale = 64;
constexpr float kTermScale = 0x1p64f;

// Of exp(x), or of 2^Log2Scale exp(x).
struct ExpParts {
  float fraction;  // 2^f, 0 <= f < 1 for all but the smallest x
  float power;     // 2^k
};

constexpr float kMagic = 0x1.8p+23f;  // next to it the last bit of a float is 1

// `volatile` keeps the parts where they are made: compilers like to move them to where they are used.
template <int Log2Scale = 0>
__device__ __forceinline__ ExpParts exp_parts(float x) {
  ExpParts parts;
  asm volatile(
      "{\n"
      ".reg .f32 unit, shifted, k, f;\n"
      ".reg .b32 bits;\n"
      "fma.rn.sat.f32 unit, %2, 0f3BBB989D, 0f3F000000;\n"  // x log2(e) / 252 + 1/2
      "fma.rm.f32 shifted, unit, 0f437C0000, %3;\n"         // k + 127 in its last bits
      "sub.f32 k, shifted, %4;\n"
      "neg.f32 k, k;\n"
      "fma.rn.f32 f, %2, 0f3FB8AA3B, k;\n"  // x log2(e) - k, in two steps
      "fma.rn.f32 f, %2, 0f32A57060, f;\n"
      "ex2.approx.ftz.f32 %0, f;\n"
      "mov.b32 bits, shifted;\n"
      "shl.b32 bits, bits, 23;\n"
      "mov.b32 %1, bits;\n"
      "}\n"
      : "=f"(parts.fraction), "=f"(parts.power)
      : "f"(x), "f"(kMagic + (Log2Scale + 1)), "f"(kMagic + (Log2Scale + 127)));
  return parts;
}

// The term of any x.
__device__ __forceinline__ float term_of(float x) {
  const ExpParts parts = exp_parts<kLog2TermScale>(x);
  return __fmul_rn(parts.fraction, parts.power);
}

// The same for x > -87, where exp(x) is not subnormal: k is added to the exponent of 2^f. `shifted` holds k + 64
// in its last bits.
__device__ __forceinline__ float near_term_of(float x, float shifted) {
  float term;
  asm volatile(
      "{\n"
      ".reg .f32 k, f;\n"
      ".reg .b32 bits, fraction;\n"
      "sub.f32 k, %2, %3;\n"
      "neg.f32 k, k;\n"
      "fma.rn.f32 f, %1, 0f3FB8AA3B, k;\n"
      "fma.rn.f32 f, %1, 0f32A57060, f;\n"
      "ex2.approx.ftz.f32 f, f;\n"
      "mov.b32 fraction, f;\n"
      "mov.b32 bits, %2;\n"
      "mad.lo.u32 bits, bits, 8388608, fraction;\n"
      "mov.b32 %0, bits;\n"
      "}\n"
      : "=f"(term)
      : "f"(x), "f"(shifted), "f"(kMagic + kLog2TermScale));
  return term;
}

__device__ __forceinline__ float near_term_of(float x) {
  const float unit = __saturatef(__fmaf_rn(x, 0x1.77313ap-8f, 0.5f));
  return near_term_of(x, __fmaf_rd(unit, 252.0f, kMagic + (kLog2TermScale - 126)));
}

// The same again where x is the difference of a logit and its row's max, both bfloat16, and the max is at least
// kLeastMax in magnitude. k is there in one step in place of two; where it is another, 2^f makes up for it on 9.0:
// tests/test_term.py compares all pairs.
constexpr float kLeastMax = 0x1p-10f;

__device__ __forceinline__ float near_bfloat16_term_of(float x) {
#if __CUDA_ARCH__ == 900
  return near_term_of(x, __fmaf_rd(x, 0x1.715474p+0f, kMagic + kLog2TermScale));
#else
  return near_term_of(x);
#endif
}

}  // namespace detlogp::cuda
