// The max of one row by a block, in the locked contract: a NaN is passed over.
#pragma once

#include "core/row.h"
#include "cuda/lanes.h"

namespace detlogp::cuda {

template <class T, class Acc>
__device__ Acc max_of_contiguous(const T* row, int64_t vocab, int threads) {
  Acc result = lowest<Acc>();
  const int64_t boundary = elements_to_boundary(row);
  const int64_t head = boundary < vocab ? boundary : vocab;
  const int64_t vectors = (vocab - head) / Vector<T>::kSize;
  const Vector<T>* body = reinterpret_cast<const Vector<T>*>(row + head);
  // Backwards, so that the columns which the sum reads first are the ones still in the cache.
#pragma unroll ForwardPolicy::kMaxUnroll
  for (int64_t v = vectors - 1 - static_cast<int64_t>(threadIdx.x); v >= 0; v -= threads) {
    const Vector<T> loaded = body[v];
#pragma unroll
    for (int e = 0; e < Vector<T>::kSize; ++e) {
      result = larger(result, to_acc<Acc>(loaded.element[e]));
    }
  }
  for (int64_t column = threadIdx.x; column < head; column += threads) {
    result = larger(result, to_acc<Acc>(row[column]));
  }
  const int64_t tail = head + vectors * Vector<T>::kSize;
  for (int64_t column = tail + threadIdx.x; column < vocab; column += threads) {
    result = larger(result, to_acc<Acc>(row[column]));
  }
  return result;
}

template <class T, class Acc>
__device__ Acc max_of_strided(const T* row, int64_t stride, int64_t vocab, int threads) {
  Acc result = lowest<Acc>();
  for (int64_t column = threadIdx.x; column < vocab; column += threads) {
    result = larger(result, to_acc<Acc>(row[column * stride]));
  }
  return result;
}

// Every thread of the block, of `threads`, gets it.
template <class T, class Acc>
__device__ __forceinline__ Acc
max_of_row(const T* row, int64_t stride, int64_t vocab, int threads, Groups<Acc>& groups) {
  const Acc row_max = stride == 1 ? max_of_contiguous<T, Acc>(row, vocab, threads)
                                  : max_of_strided<T, Acc>(row, stride, vocab, threads);
  return max_of_block(row_max, threads, groups);
}

}  // namespace detlogp::cuda
