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
#include "cuda/forward.h"
#include "cuda/kernels.h"
#include "cuda/row_max.h"

namespace detlogp::cuda {
namespace {

constexpr int kAutomatic = 0;
constexpr int kRows = -1;
constexpr int kFewRows = -2;

template <class T, class Acc, int B>
__device__ __forceinline__ Acc sum_exp(const T* row, int64_t stride, int64_t vocab, Acc row_max) {
  const auto load = [=](int64_t column) {
    return row[column * stride];
  };
  const auto add = [=](Acc sum, T x) {
    return sum + exp_of(to_acc<Acc>(x) - row_max);
  };
  // Double is bound by its arithmetic, whatever is in flight.
  constexpr int kUnroll =
      sizeof(Acc) == 8 ? ForwardPolicy::kGeneralUnroll : ForwardPolicy::kSumUnroll;
  return sum_of_lane<Acc, kUnroll>(vocab, B, load, add);
}

template <class T, class Acc, int B>
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
  const Acc row_max = max_of_row<T>(logits, stride, rows.vocab, B, groups);
  // The common stride has a copy of its own, in which every column's offset is a constant.
  Acc sum = stride == 1 ? sum_exp<T, Acc, B>(logits, 1, rows.vocab, row_max)
                        : sum_exp<T, Acc, B>(logits, stride, rows.vocab, row_max);
  sum = fold_block(sum, B, groups);
  if (threadIdx.x == 0) {
    const Acc target = to_acc<Acc>(logits[rows.token_ids[row] * stride]);
    store_scored_row(args, row, target, row_max, log_of(sum));
  }
}

template <class T, class Acc, int B>
__global__ void __launch_bounds__(B) forward_kernel(const __grid_constant__ ForwardArgs args) {
  for (int64_t row = blockIdx.x; row < args.rows.count; row += gridDim.x) {
    score_row<T, Acc, B>(args, row);
  }
}

template <class T, class Acc, int B>
void launch(const ForwardArgs& args, cudaStream_t stream) {
  forward_kernel<T, Acc, B><<<block_count(args.rows.count), B, 0, stream>>>(args);
  check(cudaGetLastError(), "launch of forward_kernel");
}

template <class Acc>
void launch_for_dtype(const ForwardArgs& args, cudaStream_t stream) {
  if (ForwardArgs::is_general(args)) {
    return launch_general_rows(args, sizeof(Acc) == sizeof(double), stream);
  }
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

// One of these, or a number of blocks a row in the ring kernel.
std::atomic<int> chosen_layout{kAutomatic};

template <class Launch>
bool launch_if_faster(const Launch& launch_ring, const ForwardArgs& args, void* stream) {
  const int layout = chosen_layout;
  const int64_t from = args.rows.count <= ForwardPolicy::kFewRows
                           ? ForwardPolicy::kRingVocabOfFewRows
                           : ForwardPolicy::kRingVocab;
  if (layout < kAutomatic || (layout == kAutomatic && args.rows.vocab < from)) {
    return false;
  }
  return launch_ring(args, stream, layout == kAutomatic ? kAnyCluster : layout);
}

bool launch_if_few(const ForwardArgs& args, void* stream) {
  const int layout = chosen_layout;
  const bool is_allowed = layout == kAutomatic || layout == kFewRows;
  return is_allowed && launch_few_rows(args, stream, layout == kFewRows);
}

}  // namespace

bool select_layout(const char* name) {
  constexpr std::array<std::pair<const char*, int>, 7> layouts = {
      {{"auto", kAutomatic},
       {"rows", kRows},
       {"few", kFewRows},
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
      if (!is_general && launch_if_few(args, stream)) {
        return;
      }
      if (!launch_if_faster(is_general ? launch_general_ring : launch_forward_ring, args, stream)) {
        launch_for_dtype<float>(args, cuda_stream);
      }
  }
}

}  // namespace detlogp::cuda
