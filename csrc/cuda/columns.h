// A block's way over columns whose order does not matter: each thread has its own.
#pragma once

#include "cuda/barrier.h"
#include "cuda/lanes.h"

namespace detlogp::cuda {

// Adjacent columns, by the 16-byte pieces that hold them; the first and the last may hold more.
template <class T>
struct Pieces {
  static constexpr int kSize = Vector<T>::kSize;

  const Vector<T>* data;  // in global or in shared memory
  int64_t count;
  int64_t before;  // elements of piece 0 that are not the row's
  int64_t vocab;

  __device__ __forceinline__ Pieces(const T* row, int64_t vocab) : vocab(vocab) {
    const auto address = reinterpret_cast<uintptr_t>(row);
    data = reinterpret_cast<const Vector<T>*>(address / 16 * 16);
    before = static_cast<int64_t>(address % 16 / sizeof(T));
    count = (before + vocab + kSize - 1) / kSize;
  }

  // Each thread copies the pieces that it reads afterwards, so nobody waits for another's.
  __device__ __forceinline__ void stage(Vector<T>* to) {
    for (int64_t p = threadIdx.x; p < count; p += blockDim.x) {
      copy_16_bytes<0, 0>(shared_address(to + p), data + p);
    }
    wait_for_copies();
    data = to;
  }

  template <class F>
  __device__ __forceinline__ void for_each(const F& f) const {
    for (int64_t p = threadIdx.x; p < count; p += blockDim.x) {
      const Vector<T> v = data[p];
      const int64_t column = p * kSize - before;
      if (column >= 0 && column + kSize <= vocab) {
#pragma unroll
        for (int e = 0; e < kSize; ++e) {
          f(v.element[e]);
        }
      } else {
#pragma unroll 1
        for (int e = 0; e < kSize; ++e) {
          if (column + e >= 0 && column + e < vocab) {
            f(reinterpret_cast<const T*>(data + p)[e]);
          }
        }
      }
    }
  }
};

template <class T>
struct Strided {
  const T* row;
  int64_t stride;
  int64_t vocab;

  template <class F>
  __device__ __forceinline__ void for_each(const F& f) const {
    for (int64_t column = threadIdx.x; column < vocab; column += blockDim.x) {
      f(row[column * stride]);
    }
  }
};

// The largest of the block's values, NaN where there is one. Every thread gets it; a barrier must follow
// before `groups` is used again.
__device__ __forceinline__ float max_of_threads(float value, Groups<float>& groups) {
  value = max_of_warp<true>(value);
  if (threadIdx.x % 32 == 0) {
    groups.value[threadIdx.x / 32] = value;
  }
  __syncthreads();
  return max_of_warp<true>(groups.value[threadIdx.x % 32 % (blockDim.x / 32)]);
}

}  // namespace detlogp::cuda
