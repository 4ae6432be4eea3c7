// Forward on CUDA.
//
// Computes       logp[r] = x[r, t] - m - log(s), lse[r] = m + log(s), and m, log(s) for the backward;
//                where asked, of x / temperature, and the entropy log(s) + sum_v e (m - x) / s
// Order          core/lanes.h: thread k of a block of B is lane k; each warp folds its group of 32
//                lanes, then one warp folds the group results. The max has no order.
// Accuracy       detlogp.testing.logp_error_bound (expf: at most 1.94 ulp, measured over every float
//                in [-87.3, 0] on sm_90, CUDA 13.0; logf: 1 ulp, the CUDA guide's figure)
// Special cases  core/row.h
// Source         the order of RL-Kernel's public deterministic logp kernel, which defined it. The sum
//                is written as plain `+ expf`; nvcc's default contraction fuses expf's last product
//                (a power of two) with it, which is part of the contract.
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "core/row.h"
#include "cuda/exp.h"
#include "cuda/forward.h"
#include "cuda/kernels.h"
#include "cuda/lanes.h"

namespace detlogp::cuda {
namespace {

constexpr int kAutomatic = 0;
constexpr int kRows = -1;

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

template <class T, class Acc, int B>
__device__ __forceinline__ Acc sum_exp(const T* row, int64_t stride, int64_t vocab, Acc row_max) {
  const auto load = [=](int64_t column) {
    return row[column * stride];
  };
  const auto add = [=](Acc sum, T x) {
    return sum + exp_of(to_acc<Acc>(x) - row_max);
  };
  return sum_of_lane<Acc, ForwardPolicy::kSumUnroll>(vocab, B, load, add);
}

// A lane of the sum, and of the entropy's.
template <class Acc>
struct TwoLanes {
  Acc sum;
  Acc part;
  Acc total;
  int parts;

  __device__ __forceinline__ TwoLanes(int zero) : sum(zero), part(zero), total(zero), parts(zero) {
  }

  __device__ __forceinline__ void add(Acc row_max, Acc x) {
    part = fused_multiply_add(add_exp(x - row_max), distance_below_max(row_max, x), part);
    if (++parts == kEntropyGroup) {
      flush();
    }
  }
  __device__ __forceinline__ void flush() {
    total += part;
    part = 0;
    parts = 0;
  }

 private:
  // Returns the exponential, with the sum's own bits: its last product is fused (cuda/exp.h).
  __device__ __forceinline__ float add_exp(float x) {
    const ExpParts parts = exp_parts(x);
    sum = __fmaf_rn(parts.fraction, parts.power, sum);
    return __fmul_rn(parts.fraction, parts.power);
  }
  __device__ __forceinline__ double add_exp(double x) {
    const double e = exp_of(x);
    sum += e;
    return e;
  }
};

// A row of which more is asked for: logits divided by a temperature, or the entropy.
template <class T, class Acc, int B>
__device__ __forceinline__ void score_general_row(
    const ForwardArgs& args, int64_t row, Acc largest, Groups<Acc>& groups) {
  const Rows& rows = args.rows;
  const T* logits = row_of<T>(rows, row);
  const int64_t stride = rows.column_stride;
  const Divisor<Acc> divide(args.temperature);
  const Acc row_max = max_of_quotients(largest, divide.value);
  const auto load = [=](int64_t column) {
    return logits[column * stride];
  };
  const auto add = [=](TwoLanes<Acc> lanes, T x) {
    lanes.add(row_max, divide(to_acc<Acc>(x)));
    return lanes;
  };
  TwoLanes<Acc> lanes =
      sum_of_lane<TwoLanes<Acc>, ForwardPolicy::kGeneralUnroll>(rows.vocab, B, load, add);
  lanes.flush();
  const Acc sum = fold_block(lanes.sum, B, groups);
  const Acc entropy = fold_block(lanes.total, B, groups);
  if (threadIdx.x == 0) {
    const Acc target = divide(to_acc<Acc>(logits[rows.token_ids[row] * stride]));
    store_scored_row(args, row, target, row_max, log_of(sum), entropy / sum);
  }
}

template <class T, class Acc, int B, bool IsGeneral>
__device__ __forceinline__ void score_row(const ForwardArgs& args, int64_t row) {
  __shared__ Groups<Acc> groups;
  const Rows& rows = args.rows;
  if (!Rows::scored(rows, row)) {
    if (threadIdx.x == 0) {
      store_skipped_row<Acc>(args, row);
    }
    return;
  }
  const T* logits = row_of<T>(rows, row);
  const int64_t stride = rows.column_stride;
  Acc row_max = stride == 1 ? max_of_contiguous<T, Acc>(logits, rows.vocab, B)
                            : max_of_strided<T, Acc>(logits, stride, rows.vocab, B);
  row_max = max_of_block(row_max, B, groups);
  if constexpr (IsGeneral) {
    score_general_row<T, Acc, B>(args, row, row_max, groups);
    return;
  }
  // The common stride has a copy of its own, in which every column's offset is a constant.
  Acc sum = stride == 1 ? sum_exp<T, Acc, B>(logits, 1, rows.vocab, row_max)
                        : sum_exp<T, Acc, B>(logits, stride, rows.vocab, row_max);
  sum = fold_block(sum, B, groups);
  if (threadIdx.x == 0) {
    const Acc target = to_acc<Acc>(logits[rows.token_ids[row] * stride]);
    store_scored_row(args, row, target, row_max, log_of(sum));
  }
}

template <class T, class Acc, int B, bool IsGeneral>
__global__ void __launch_bounds__(B) forward_kernel(const __grid_constant__ ForwardArgs args) {
  for (int64_t row = blockIdx.x; row < args.rows.count; row += gridDim.x) {
    score_row<T, Acc, B, IsGeneral>(args, row);
  }
}

template <class T, class Acc, int B>
void launch(const ForwardArgs& args, cudaStream_t stream) {
  const auto kernel = ForwardArgs::is_general(args) ? forward_kernel<T, Acc, B, true>
                                                    : forward_kernel<T, Acc, B, false>;
  kernel<<<block_count(args.rows.count), B, 0, stream>>>(args);
  check(cudaGetLastError(), "launch of forward_kernel");
}

template <class Acc>
void launch_for_dtype(const ForwardArgs& args, cudaStream_t stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    switch (lane_count(args.rows.vocab)) {
      case 128:
        return launch<T, Acc, 128>(args, stream);
      case 256:
        return launch<T, Acc, 256>(args, stream);
      default:
        return launch<T, Acc, 512>(args, stream);
    }
  });
}

// kAutomatic, kRows, or a number of blocks a row in the ring kernel.
std::atomic<int> chosen_layout{kAutomatic};

template <class Launch>
bool launch_if_faster(const Launch& launch_ring, const ForwardArgs& args, void* stream) {
  const int layout = chosen_layout;
  const int64_t from = args.rows.count <= ForwardPolicy::kFewRows
                           ? ForwardPolicy::kRingVocabOfFewRows
                           : ForwardPolicy::kRingVocab;
  if (layout == kRows || (layout == kAutomatic && args.rows.vocab < from)) {
    return false;
  }
  return launch_ring(args, stream, layout == kAutomatic ? kAnyCluster : layout);
}

}  // namespace

bool select_layout(const char* name) {
  constexpr std::array<std::pair<const char*, int>, 6> layouts = {
      {{"auto", kAutomatic},
       {"rows", kRows},
       {"ring1", 1},
       {"ring2", 2},
       {"ring4", 4},
       {"ring8", 8}}};
  for (const auto& [known, layout] : layouts) {
    if (std::strcmp(name, known) == 0) {
      chosen_layout = layout;
      return true;
    }
  }
  return false;
}

void launch_forward(const ForwardArgs& args, Arithmetic arithmetic, void* stream) {
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  const bool is_general = ForwardArgs::is_general(args);
  switch (arithmetic) {
    case Arithmetic::float64:
      return launch_for_dtype<double>(args, cuda_stream);
    case Arithmetic::exact:
      if (!launch_if_faster(
              is_general ? launch_general_exact_ring : launch_exact_ring, args, stream)) {
        launch_exact_rows(args, stream);
      }
      return;
    case Arithmetic::float32:
      if (!launch_if_faster(is_general ? launch_general_ring : launch_forward_ring, args, stream)) {
        launch_for_dtype<float>(args, cuda_stream);
      }
  }
}

}  // namespace detlogp::cuda
