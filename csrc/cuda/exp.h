// expf as CUDA 13.0 computes it, in two parts: exp(x) = fraction * power, a product that the sum takes
// in one fused step. Written out, so that the parts of several columns can be ready before their lane's
// sum needs them; step for step what nvcc makes of `sum + expf(x)`.
#pragma once

#include <cuda_runtime.h>

namespace detlogp::cuda {

struct ExpParts {
  float fraction;  // 2^f, 0 <= f < 1 for all but the smallest x
  float power;     // 2^k
};

// `volatile` keeps the parts where they are made: compilers like to move them to where they are used.
__device__ __forceinline__ ExpParts exp_parts(float x) {
  ExpParts parts;
  asm volatile(
      "{\n"
      ".reg .f32 unit, shifted, k, f;\n"
      ".reg .b32 bits;\n"
      "fma.rn.sat.f32 unit, %2, 0f3BBB989D, 0f3F000000;\n"   // x log2(e) / 252 + 1/2
      "fma.rm.f32 shifted, unit, 0f437C0000, 0f4B400001;\n"  // k + 127 in its last bits
      "add.f32 k, shifted, 0fCB40007F;\n"
      "neg.f32 k, k;\n"
      "fma.rn.f32 f, %2, 0f3FB8AA3B, k;\n"  // x log2(e) - k, in two steps
      "fma.rn.f32 f, %2, 0f32A57060, f;\n"
      "ex2.approx.ftz.f32 %0, f;\n"
      "mov.b32 bits, shifted;\n"
      "shl.b32 bits, bits, 23;\n"
      "mov.b32 %1, bits;\n"
      "}\n"
      : "=f"(parts.fraction), "=f"(parts.power)
      : "f"(x));
  return parts;
}

}  // namespace detlogp::cuda
