// The part of a row of [N, V] that a block writes, 16 bytes at a time, and the grid of such blocks.
#pragma once

#include "cuda/policy.h"
#include "cuda/vectors.h"

namespace detlogp::cuda {

// Its columns count from `begin`. Part 0 also takes the few before the output's first 16-byte boundary, so
// that every other part begins on one.
template <class T>
struct RowPart {
  static constexpr int kSize = Vector<T>::kSize;
  static constexpr int kThreads = BackwardPolicy::kThreads;
  static constexpr int kColumns = BackwardPolicy::kBytesPerBlock / sizeof(T);

  int64_t begin;
  int first;  // columns first <= v < last
  int body;   // the first on a boundary, of `count` vectors
  int last;
  int count;

  __device__ __forceinline__ RowPart(const T* output, int64_t part, int64_t vocab)
      : begin(part * kColumns), body(elements_to_boundary(output)) {
    first = part == 0 ? 0 : body;
    last = static_cast<int>(min(vocab - begin, static_cast<int64_t>(body + kColumns)));
    count = body < last ? (last - body) / kSize : 0;
  }

  // Where a column of the row lies; -1 where it is none of these.
  __device__ __forceinline__ int place_of(int64_t column) const {
    const int64_t place = column - begin;
    return place >= first && place < last ? static_cast<int>(place) : -1;
  }

  // f(column) for this thread's columns: all of them, or those beside the vectors.
  template <class F>
  __device__ __forceinline__ void for_each(const F& f) const {
    for_each(first, last, f);
  }
  template <class F>
  __device__ __forceinline__ void for_each_single(const F& f) const {
    for_each(first, min(body, last), f);
    for_each(body + count * kSize, last, f);
  }

  __device__ __forceinline__ void zero(T* output) const {
    for (int v = threadIdx.x; v < count; v += kThreads) {
      reinterpret_cast<uint4*>(output + body)[v] = make_uint4(0, 0, 0, 0);
    }
    for_each_single([&](int column) { output[column] = T{}; });
  }

 private:
  template <class F>
  __device__ __forceinline__ static void for_each(int from, int to, const F& f) {
    for (int v = from + static_cast<int>(threadIdx.x); v < to; v += kThreads) {
      f(v);
    }
  }
};

// f(row, part) for each that is this block's, from the last row, which is still in the cache.
template <class F>
__device__ __forceinline__ void for_each_part(int64_t rows, const F& f) {
  for (int64_t row = rows - 1 - blockIdx.y; row >= 0; row -= gridDim.y) {
    f(row, static_cast<int64_t>(gridDim.x - 1 - blockIdx.x));
  }
}

template <class T>
dim3 grid_of_parts(int64_t rows, int64_t vocab) {
  constexpr int64_t kMaxRows = 65535;  // of a grid
  constexpr int64_t kColumns = RowPart<T>::kColumns;
  return dim3(
      static_cast<unsigned>((vocab + kColumns - 1) / kColumns),
      static_cast<unsigned>(rows < kMaxRows ? rows : kMaxRows));
}

}  // namespace detlogp::cuda
