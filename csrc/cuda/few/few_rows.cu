// Forward on CUDA for few wide rows, which take as long as one: every logit is read once, into a register.
//
// Computes       what cuda/forward.cu does
// Order          core/lanes.h. A cluster takes a row, and each block of it some of the groups of 32 lanes.
//                Its threads make the terms of all their columns; an adding warp for each group then adds
//                them, thread k those of lane k in the order of columns, and folds the group; the first
//                block folds the groups. The max has no order.
// Accuracy       as cuda/forward.cu, whose bits these are
// Special cases  core/row.h
// Source         docs/contract.md; the layout is ours
//
//     pieces in registers --> their max --> that of all blocks --> terms, in chunks --> adding warps --> first block
//
// terms.h has what a block does, columns.h what a thread has. Blocks send to one another by st.async, which completes
// the barrier that the reader waits on: each block waits for all maxima, and the first for all sums, so nobody sends to
// a block that is gone. The bits are those of any number of blocks, whose lanes are the same.
#include <array>
#include <mutex>

#include "cuda/facts.h"
#include "cuda/few/terms.h"
#include "cuda/forward.h"

namespace detlogp::cuda {
namespace few {
namespace {

template <class S>
__global__ void __launch_bounds__(kThreads + S::kLanes)
    few_rows_kernel(const __grid_constant__ ForwardArgs args) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
  using T = typename S::Logit;
  constexpr int C = S::kCluster;
  extern __shared__ __align__(16) float terms[];
  __shared__ Shared<S> shared;
  const Rows& rows = args.rows;
  const int64_t row = blockIdx.x / C;
  const int rank = rank_in_cluster();
  const int thread = threadIdx.x;
  const auto periods = static_cast<int>((rows.vocab + kMaxLanes - 1) / kMaxLanes);
  if (thread == 0) {
    init(shared.maxima_are_here, 1);
    init(shared.sums_are_here, 1);
    arrive_and_expect(shared.maxima_are_here, sizeof(shared.max_of_block));
    arrive_and_expect(shared.sums_are_here, sizeof(shared.sum_of_group));
  }
  arrive_at_cluster();
  wait_for_kernel_before();
  let_kernel_after_begin();
  if (thread < kThreads) {
    // A bad id is not waited for: the logits are then read for nothing.
    if (!Rows::selected(rows, row)) {
      wait_at_cluster();
      return;
    }
    const Columns<S> columns(rows, row, thread, rank);
    const bool is_scored = Rows::scored(rows, row);
    wait_at_cluster();
    if (is_scored) {
      make_terms(shared, columns, terms, periods, rank);
    }
    return;
  }
  const int lane = thread - kThreads;  // of the block
  const bool ends_row = rank == 0 && lane < kGroup;
  const bool is_scored = Rows::scored(rows, row);
  T target{};
  if (ends_row && is_scored) {
    target = row_of<T>(rows, row)[rows.token_ids[row]];
  }
  wait_at_cluster();
  if (!is_scored) {
    if (ends_row && lane == 0) {
      store_skipped_row<float>(args, row);
    }
    return;
  }
  const float row_max = wait_for_max(shared);
  const float of_group = fold_warp(add_terms<S>(terms, periods, lane));
  if (lane % kGroup == 0) {
    const int group = (rank * S::kLanes + lane) / kGroup;
    send(&shared.sum_of_group[group], shared.sums_are_here, 0, of_group);
  }
  if (ends_row) {
    wait_for_cluster<C>(shared.sums_are_here, 0);
    const float sum = fold_warp(lane < kMaxLanes / kGroup ? shared.sum_of_group[lane] : 0.0f);
    if (lane == 0) {
      store_scored_row(args, row, to_acc<float>(target), row_max, log_of(sum));
    }
  }
#else
  __trap();
#endif
}

template <class S>
cudaLaunchConfig_t launch_config(
    int64_t rows, size_t shared_bytes, cudaStream_t stream, cudaLaunchAttribute (&attributes)[2]) {
  attributes[0] = clusters_of(S::kCluster);
  attributes[1] = begins_early();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(rows * S::kCluster));
  config.blockDim = dim3(kThreads + S::kLanes);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 2;
  return config;
}

// How many rows a device takes at a time where no two blocks share a multiprocessor.
template <class S>
int count_rows(int device) {
  const DeviceFacts& facts = facts_of(device);
  if (!has_clusters(facts)) {
    return 0;
  }
  const auto kernel = few_rows_kernel<S>;
  const int most = facts.shared_bytes - 1024;  // which leaves room for Shared
  check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
      "cudaFuncSetAttribute");
  cudaLaunchAttribute attributes[2];
  auto config = launch_config<S>(1, static_cast<size_t>(most), nullptr, attributes);
  config.numAttrs = 1;
  int clusters = 0;
  check(
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "cudaOccupancyMaxActiveClusters");
  return clusters;
}

template <class S>
bool launch(const ForwardArgs& args, cudaStream_t stream, bool always) {
  static std::array<std::once_flag, kMaxDevices> counted;
  static std::array<int, kMaxDevices> at_a_time;
  const int device = current_device();
  std::call_once(counted.at(device), [&] { at_a_time[device] = count_rows<S>(device); });
  const int64_t count = args.rows.count;
  const bool serves = at_a_time[device] > 0 && (always || count <= at_a_time[device]);
  if (!serves) {
    return false;
  }
  cudaLaunchAttribute attributes[2];
  const auto config = launch_config<S>(count, S::kTermBytes, stream, attributes);
  check(cudaLaunchKernelEx(&config, few_rows_kernel<S>, args), "launch of few_rows_kernel");
  return true;
}

template <class T>
bool launch_any(const ForwardArgs& args, cudaStream_t stream, bool always) {
  return launch<Shape<T, 8>>(args, stream, false) || launch<Shape<T, 4>>(args, stream, always);
}

}  // namespace
}  // namespace few

bool launch_few_rows(const ForwardArgs& args, void* stream, bool always) {
  const Rows& rows = args.rows;
  if (rows.column_stride != 1 || rows.vocab <= kNarrowVocab ||
      rows.vocab > FewRowsPolicy::kPeriods * kMaxLanes || rows.count > INT32_MAX / 4) {
    return false;
  }
  const auto cuda_stream = static_cast<cudaStream_t>(stream);
  switch (rows.logits_type) {
    case Dtype::float16:
      return few::launch_any<Half>(args, cuda_stream, always);
    case Dtype::bfloat16:
      return few::launch_any<BFloat16>(args, cuda_stream, always);
    case Dtype::float32:
      return few::launch_any<float>(args, cuda_stream, always);
    default:
      return false;
  }
}

}  // namespace detlogp::cuda
