// Forward of the exact contract on CUDA, where the ring does not serve.
//
// Computes       logp[r] = x[r, t] - m - log(s), lse[r] = m + log(s), and m, log(s) for the backward
// Order          none: the terms are whole numbers (core/exact.h)
// Accuracy       detlogp.testing.logp_error_bound
// Special cases  core/row.h
// Source         core/exact.h. Compiled without contraction (CMakeLists.txt): the CPU's bits.
//
// A block takes a row. Where the row fits, it is copied to shared memory, and read once.
#include <algorithm>

#include "core/exact.h"
#include "cuda/barrier.h"
#include "cuda/facts.h"
#include "cuda/forward.h"
#include "cuda/kernels.h"
#include "cuda/lanes.h"

namespace detlogp::cuda {
namespace {

constexpr int kThreads = ExactPolicy::kThreads;

// ---- a row's columns, each thread's own -------------------------------------------------------

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

// ---- the block's results, which every thread gets ---------------------------------------------

__device__ __forceinline__ float max_of_threads(float value, Groups<float>& groups) {
  value = max_of_warp<true>(value);
  if (threadIdx.x % 32 == 0) {
    groups.value[threadIdx.x / 32] = value;
  }
  __syncthreads();
  return max_of_warp<true>(groups.value[threadIdx.x % 32 % (blockDim.x / 32)]);
}

// ---- the kernel -------------------------------------------------------------------------------

template <class T, class Columns>
__device__ __forceinline__ void score_row(
    const ForwardArgs& args, int64_t row, const Columns& columns) {
  __shared__ Groups<float> maxima;
  __shared__ Groups<uint64_t> sums;
  float row_max = __uint_as_float(0xff800000u);
  columns.for_each([&](T x) { row_max = larger_of<true>(row_max, to_acc<float>(x)); });
  row_max = max_of_threads(row_max, maxima);
  const ExactScale scale = scale_of_sum(row_max, log2_quanta(args.rows.vocab));
  uint64_t sum = 0;
  columns.for_each([&](T x) { sum += quanta(scale, to_acc<float>(x)); });
  sum = fold_block(sum, blockDim.x, sums);
  if (threadIdx.x == 0) {
    const T* logits = row_of<T>(args.rows, row);
    const T target = logits[args.rows.token_ids[row] * args.rows.column_stride];
    store_exact_row(args, row, to_acc<float>(target), row_max, scale, sum);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    exact_forward_kernel(const __grid_constant__ ForwardArgs args, bool staged) {
  extern __shared__ __align__(16) char stage[];
  const Rows& rows = args.rows;
  for (int64_t row = blockIdx.x; row < rows.count; row += gridDim.x) {
    if (!Rows::scored(rows, row)) {
      if (threadIdx.x == 0) {
        store_skipped_row<float>(args, row);
      }
      continue;
    }
    const T* logits = row_of<T>(rows, row);
    if (rows.column_stride == 1) {
      Pieces<T> pieces(logits, rows.vocab);
      if (staged) {
        pieces.stage(reinterpret_cast<Vector<T>*>(stage));
      }
      score_row<T>(args, row, pieces);
    } else {
      score_row<T>(args, row, Strided<T>{logits, rows.column_stride, rows.vocab});
    }
  }
}

template <class T>
void launch(const ForwardArgs& args, cudaStream_t stream) {
  const Rows& rows = args.rows;
  // A row that begins between two pieces touches one more.
  const int64_t pieces = (rows.vocab * static_cast<int64_t>(sizeof(T)) + 15) / 16 + 1;
  const bool staged = rows.column_stride == 1 && 16 * pieces <= ExactPolicy::kStagedBytes;
  const int64_t threads = std::min<int64_t>((pieces + 31) / 32 * 32, kThreads);
  const size_t shared_bytes = staged ? static_cast<size_t>(16 * pieces) : 0;
  exact_forward_kernel<T>
      <<<block_count(rows.count), static_cast<unsigned>(threads), shared_bytes, stream>>>(
          args, staged);
  check(cudaGetLastError(), "launch of exact_forward_kernel");
}

}  // namespace

void launch_exact_rows(const ForwardArgs& args, void* stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    launch<decltype(zero)>(args, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace detlogp::cuda
