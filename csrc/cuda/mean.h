// sum_v p[v] w[v] of one row, p = exp((x - m) - log(s)): what a tangent and a second order share.
#pragma once

#include "core/row.h"
#include "cuda/lanes.h"

namespace detlogp::cuda {

template <class T>
struct Pair {
  T x;
  T w;
};

// This thread's lane.
template <class T, class Acc>
__device__ __forceinline__ Acc mean_of_lane(
    const T* x, int64_t x_stride, const T* w, int64_t w_stride, int64_t vocab, Acc row_max,
    Acc log_sum) {
  const auto load = [=](int64_t column) {
    return Pair<T>{x[column * x_stride], w[column * w_stride]};
  };
  const auto add = [=](Acc sum, Pair<T> pair) {
    const Acc p = exp_of((to_acc<Acc>(pair.x) - row_max) - log_sum);
    return fused_multiply_add(p, to_acc<Acc>(pair.w), sum);
  };
  return sum_of_lane<Acc, MeanPolicy::kUnroll>(vocab, blockDim.x, load, add);
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
  const bool contiguous = x_stride == 1 && w_stride == 1;
  const Acc sum =
      contiguous ? mean_of_lane<T, Acc>(x, 1, w, 1, rows.vocab, row_max, log_sum)
                 : mean_of_lane<T, Acc>(x, x_stride, w, w_stride, rows.vocab, row_max, log_sum);
  return fold_block(sum, blockDim.x, groups);
}

}  // namespace detlogp::cuda
