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
#include "cuda/columns.h"
#include "cuda/facts.h"
#include "cuda/forward.h"
#include "cuda/kernels.h"
#include "cuda/lanes.h"

namespace detlogp::cuda {
namespace {

constexpr int kThreads = ExactPolicy::kThreads;

// General: logits divided by a temperature, and the entropy.
template <class T, bool IsGeneral, class Columns>
__device__ __forceinline__ void score_row(
    const ForwardArgs& args, int64_t row, const Columns& columns) {
  __shared__ Groups<float> maxima;
  __shared__ Groups<uint64_t> sums;
  const Divisor<float> divide(args.temperature);
  float row_max = __uint_as_float(0xff800000u);
  columns.for_each([&](T x) { row_max = larger_of<true>(row_max, to_acc<float>(x)); });
  // Division by a positive number keeps the order, so the max of the quotients is the max's quotient.
  row_max = max_of_threads(row_max, maxima);
  row_max = IsGeneral ? row_max / divide.value : row_max;
  const ExactScale scale = scale_of_sum(row_max, log2_quanta(args.rows.vocab), IsGeneral);
  uint64_t sum = 0;
  uint64_t entropy_sum = 0;
  columns.for_each([&](T logit) {
    const float x = IsGeneral ? divide(to_acc<float>(logit)) : to_acc<float>(logit);
    const float term = exact_exp(scale, x);
    sum += to_quanta(term);
    if (IsGeneral) {
      entropy_sum += entropy_quanta(term, row_max, x);
    }
  });
  sum = fold_block(sum, blockDim.x, sums);
  if (IsGeneral) {
    entropy_sum = fold_block(entropy_sum, blockDim.x, sums);
  }
  if (threadIdx.x == 0) {
    const T* logits = row_of<T>(args.rows, row);
    const auto logit = to_acc<float>(logits[args.rows.token_ids[row] * args.rows.column_stride]);
    const float target = IsGeneral ? logit / divide.value : logit;
    store_exact_row(args, row, target, row_max, scale, sum, entropy_sum);
  }
}

template <class T, bool IsGeneral>
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
      score_row<T, IsGeneral>(args, row, pieces);
    } else {
      score_row<T, IsGeneral>(args, row, Strided<T>{logits, rows.column_stride, rows.vocab});
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
  const auto kernel = ForwardArgs::is_general(args) ? exact_forward_kernel<T, true>
                                                    : exact_forward_kernel<T, false>;
  kernel<<<block_count(rows.count), static_cast<unsigned>(threads), shared_bytes, stream>>>(
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
