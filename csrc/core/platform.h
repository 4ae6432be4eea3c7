// What g++ and nvcc need to compile the same numerics.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

// Every function of csrc/core is inlined with internal linkage: the CPU kernels are compiled once per
// instruction set, and the linker must never merge a copy that was compiled for a wider one.
#if defined(__CUDACC__)
#define DETLOGP_FN static __forceinline__ __host__ __device__
#else
#define DETLOGP_FN static inline __attribute__((always_inline))
#endif

namespace detlogp {

template <class To, class From>
DETLOGP_FN To bit_cast(From value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs two types of one size");
  To result;
  memcpy(&result, &value, sizeof(To));
  return result;
}

// One rounding, on every machine: contraction is off for C++ (see CMakeLists.txt), so a fused
// multiply-add happens where it is written and nowhere else.
DETLOGP_FN float fused_multiply_add(float a, float b, float c) {
  return ::fmaf(a, b, c);
}

DETLOGP_FN double fused_multiply_add(double a, double b, double c) {
  return ::fma(a, b, c);
}

}  // namespace detlogp
