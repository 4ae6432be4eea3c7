// Loads, conversions and reductions that the CUDA kernels share.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "core/args.h"
#include "core/lanes.h"
#include "core/row.h"

namespace detlogp::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    cudaGetLastError();  // or the next launch would be blamed for it
    throw std::runtime_error(std::string("detlogp: ") + what + ": " + cudaGetErrorString(error));
  }
}

template <class T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T element[kSize];
};

template <class T>
__device__ __forceinline__ bool is_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector<T>) == 0;
}

// Elements before the first 16-byte boundary at or after `pointer`.
template <class T>
__device__ __forceinline__ int elements_to_boundary(const T* pointer) {
  const uintptr_t past = reinterpret_cast<uintptr_t>(pointer) % sizeof(Vector<T>);
  return static_cast<int>((sizeof(Vector<T>) - past) % sizeof(Vector<T>) / sizeof(T));
}

// Exact, as core/dtype.h widens; the hardware's conversion where it has one.
template <class Acc, class T>
__device__ __forceinline__ Acc to_acc(T x) {
  return static_cast<Acc>(widen(x));
}

template <>
__device__ __forceinline__ float to_acc<float, Half>(Half x) {
  return __half2float(__ushort_as_half(x.bits));
}

template <>
__device__ __forceinline__ double to_acc<double, Half>(Half x) {
  return static_cast<double>(to_acc<float, Half>(x));
}

template <class T, class Acc>
__device__ __forceinline__ T from_acc(Acc x) {
  return Narrow<T>::from(x);
}

template <>
__device__ __forceinline__ Half from_acc<Half, float>(float x) {
  return Half{__half_as_ushort(__float2half_rn(x))};
}

template <>
__device__ __forceinline__ BFloat16 from_acc<BFloat16, float>(float x) {
  return BFloat16{__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}

__device__ __forceinline__ float larger(float a, float b) {
  return fmaxf(a, b);
}

__device__ __forceinline__ double larger(double a, double b) {
  return fmax(a, b);
}

template <bool KeepsNan>
__device__ __forceinline__ float larger_of(float a, float b) {
  if (!KeepsNan) {
    return fmaxf(a, b);
  }
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ __forceinline__ float exp_of(float x) {
  return expf(x);
}

__device__ __forceinline__ double exp_of(double x) {
  return exp(x);
}

__device__ __forceinline__ float log_of(float x) {
  return logf(x);
}

__device__ __forceinline__ double log_of(double x) {
  return log(x);
}

// Division by one number, with the bits of x / value.
template <class Acc>
struct Divisor {
  Acc value;

  __device__ __forceinline__ explicit Divisor(double number) : value(static_cast<Acc>(number)) {
  }
  __device__ __forceinline__ bool is_one() const {
    return value == Acc(1);
  }
  __device__ __forceinline__ Acc operator()(Acc x) const {
    return x / value;
  }
};

// By the reciprocal and two corrections: the first leaves a neighbour of the quotient at most, the second
// then rounds it as division does (Markstein). A product of -inf is kept finite, or its remainder would be NaN;
// a zero keeps its sign. Not so: dividends below 2^-102 and quotients below 2^-100 may be off in their last
// bit, and a quotient of the largest float may be infinite.
template <>
struct Divisor<float> {
  float value;
  float reciprocal;

  __device__ __forceinline__ explicit Divisor(double number)
      : value(static_cast<float>(number)), reciprocal(1.0f / value) {
    asm volatile("" : "+f"(reciprocal));  // or compilers short of registers compute it at every use
  }
  __device__ __forceinline__ bool is_one() const {
    return value == 1.0f;
  }
  __device__ __forceinline__ float operator()(float x) const {
    const float quotient = corrected(__fmul_rn(x, reciprocal), x);
    return corrected(quotient, x);
  }

 private:
  __device__ __forceinline__ float corrected(float quotient, float x) const {
    quotient = fmaxf(quotient, lowest<float>());
    const float excess = __fmaf_rn(quotient, value, -x);
    return __fmaf_rn(-excess, reciprocal, quotient);
  }
};

template <class T>
__device__ __forceinline__ const T* row_of(const Rows& rows, int64_t row) {
  return static_cast<const T*>(rows.logits) + RowLayout::offset(rows.layout, row);
}

template <class T>
__device__ __forceinline__ const T* row_of(const Operand& operand, int64_t row) {
  return static_cast<const T*>(operand.data) + RowLayout::offset(operand.layout, row);
}

}  // namespace detlogp::cuda
