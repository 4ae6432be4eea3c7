// The locked sum of one row by a block of `lanes` threads: thread k is lane k (core/lanes.h).
#pragma once

#include "cuda/device.h"
#include "cuda/policy.h"

namespace detlogp::cuda {

// One number a group of 32 lanes.
template <class Acc>
struct Groups {
  Acc value[kGroup];
};

template <class Acc>
__device__ __forceinline__ Acc fold_warp(Acc value) {
  for (int offset = kGroup / 2; offset > 0; offset /= 2) {
    value += __shfl_down_sync(0xffffffffu, value, offset);
  }
  return value;
}

template <bool KeepsNan>
__device__ __forceinline__ float max_of_warp(float value) {
  for (int offset = kGroup / 2; offset > 0; offset /= 2) {
    value = larger_of<KeepsNan>(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

template <class Acc>
__device__ __forceinline__ Acc max_of_warp(Acc value) {
  for (int offset = kGroup / 2; offset > 0; offset /= 2) {
    value = larger(value, __shfl_xor_sync(0xffffffffu, value, offset));
  }
  return value;
}

// The tree over the groups' results, which all threads see. Every thread gets the result, and `groups`
// may be used again.
template <class Acc>
__device__ __forceinline__ Acc fold_groups(int count, const Groups<Acc>& groups) {
  const int lane = threadIdx.x % kGroup;
  Acc value = fold_warp(lane < count ? groups.value[lane] : Acc(0));
  value = __shfl_sync(0xffffffffu, value, 0);
  __syncthreads();
  return value;
}

// The tree over the block's lanes. Every thread gets the result, and `groups` may be used again.
template <class Acc>
__device__ __forceinline__ Acc fold_block(Acc value, int lanes, Groups<Acc>& groups) {
  const int lane = threadIdx.x % kGroup;
  value = fold_warp(value);
  if (lane == 0) {
    groups.value[threadIdx.x / kGroup] = value;
  }
  __syncthreads();
  return fold_groups(lanes / kGroup, groups);
}

template <class Acc>
__device__ __forceinline__ Acc max_of_block(Acc value, int lanes, Groups<Acc>& groups) {
  const int lane = threadIdx.x % kGroup;
  value = max_of_warp(value);
  if (lane == 0) {
    groups.value[threadIdx.x / kGroup] = value;
  }
  __syncthreads();
  value = max_of_warp(groups.value[lane % (lanes / kGroup)]);
  __syncthreads();
  return value;
}

// This thread's lane: sum = add(sum, load(column)) for its columns in order. Several loads are in
// flight at a time; the additions are not reordered.
template <class Acc, int Unroll, class Load, class Add>
__device__ __forceinline__ Acc
sum_of_lane(int64_t vocab, int lanes, const Load& load, const Add& add) {
  Acc sum = 0;
  int64_t column = threadIdx.x;
  for (; column + (Unroll - 1) * lanes < vocab; column += Unroll * lanes) {
    decltype(load(column)) loaded[Unroll];
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      loaded[u] = load(column + u * lanes);
    }
#pragma unroll
    for (int u = 0; u < Unroll; ++u) {
      sum = add(sum, loaded[u]);
    }
  }
  for (; column < vocab; column += lanes) {
    sum = add(sum, load(column));
  }
  return sum;
}

// A block a row.
inline unsigned block_count(int64_t rows) {
  return static_cast<unsigned>(rows < INT32_MAX ? rows : INT32_MAX);
}

}  // namespace detlogp::cuda
