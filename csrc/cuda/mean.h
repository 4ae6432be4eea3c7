// sum_v p[v] w[v] of one row, p = exp((x - m) - log(s)): what a tangent and a second order share. A
// block of B / 2 threads takes a row: thread k has the lanes 2k and 2k + 1, whose columns are neighbours.
#pragma once

#include "core/row.h"
#include "cuda/lanes.h"

namespace detlogp::cuda {

constexpr int kMaxMeanThreads = kMaxLanes / 2;

template <class T>
struct alignas(2 * sizeof(T)) Two {
  T element[2];
};

// Columns v and v + 1 of the logits and of the other matrix.
template <class T>
struct TwoPairs {
  Two<T> x;
  Two<T> w;
};

template <class Acc>
struct TwoSums {
  Acc even;
  Acc odd;
};

// This thread's lanes. Several loads are in flight at a time; the additions keep their order.
template <class T, class Acc, class Load>
__device__ __forceinline__ TwoSums<Acc> mean_of_lanes(
    int64_t vocab, const Load& load, Acc row_max, Acc log_sum) {
  constexpr int kUnroll = MeanPolicy::kUnroll;
  const auto add = [=](Acc sum, T x, T w) {
    const Acc p = exp_of((to_acc<Acc>(x) - row_max) - log_sum);
    return fused_multiply_add(p, to_acc<Acc>(w), sum);
  };
  const int lanes = 2 * blockDim.x;
  TwoSums<Acc> sums{0, 0};
  int64_t column = 2 * threadIdx.x;
  for (; column + (kUnroll - 1) * lanes + 1 < vocab; column += kUnroll * lanes) {
    TwoPairs<T> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      loaded[u] = load(column + u * lanes, true);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      sums.even = add(sums.even, loaded[u].x.element[0], loaded[u].w.element[0]);
      sums.odd = add(sums.odd, loaded[u].x.element[1], loaded[u].w.element[1]);
    }
  }
  for (; column < vocab; column += lanes) {
    const bool has_odd = column + 1 < vocab;
    const TwoPairs<T> loaded = load(column, has_odd);
    sums.even = add(sums.even, loaded.x.element[0], loaded.w.element[0]);
    if (has_odd) {
      sums.odd = add(sums.odd, loaded.x.element[1], loaded.w.element[1]);
    }
  }
  return sums;
}

// The tree over the block's lanes; 16 threads have a group of 32. Every thread gets the result.
template <class Acc>
__device__ __forceinline__ Acc fold_lane_pairs(TwoSums<Acc> sums, Groups<Acc>& groups) {
  constexpr int kThreads = kGroup / 2;
  for (int offset = kThreads / 2; offset > 0; offset /= 2) {
    sums.even += __shfl_down_sync(0xffffffffu, sums.even, offset, kThreads);
    sums.odd += __shfl_down_sync(0xffffffffu, sums.odd, offset, kThreads);
  }
  if (threadIdx.x % kThreads == 0) {
    groups.value[threadIdx.x / kThreads] = sums.even + sums.odd;
  }
  __syncthreads();
  return fold_groups(blockDim.x / kThreads, groups);
}

// Every thread of the block gets the sum.
template <class T, class Acc>
__device__ __forceinline__ Acc mean_of_row(
    const Rows& rows, const Operand& operand, int64_t row, Acc row_max, Acc log_sum,
    Groups<Acc>& groups) {
  const T* x = row_of<T>(rows, row);
  const T* w = row_of<T>(operand, row);
  const int64_t x_stride = rows.column_stride;
  const int64_t w_stride = operand.column_stride;
  const auto is_aligned_to_two = [](const T* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % sizeof(Two<T>) == 0;
  };
  if (x_stride == 1 && w_stride == 1 && is_aligned_to_two(x) && is_aligned_to_two(w)) {
    const auto load = [=](int64_t column, bool has_odd) {
      if (has_odd) {
        return TwoPairs<T>{
            *reinterpret_cast<const Two<T>*>(x + column),
            *reinterpret_cast<const Two<T>*>(w + column)};
      }
      return TwoPairs<T>{{{x[column], T{}}}, {{w[column], T{}}}};
    };
    return fold_lane_pairs(mean_of_lanes<T, Acc>(rows.vocab, load, row_max, log_sum), groups);
  }
  const auto load = [=](int64_t column, bool has_odd) {
    const int64_t odd = has_odd ? column + 1 : column;
    return TwoPairs<T>{
        {{x[column * x_stride], x[odd * x_stride]}}, {{w[column * w_stride], w[odd * w_stride]}}};
  };
  return fold_lane_pairs(mean_of_lanes<T, Acc>(rows.vocab, load, row_max, log_sum), groups);
}

}  // namespace detlogp::cuda
