// Forward on CUDA for wide rows of adjacent columns: every logit is read from memory once.
//
// Computes       what cuda/forward.cu does
// Order          core/lanes.h. A cluster of C blocks takes a row, block c the lanes c B/C and up. Every
//                lane's columns are added in their order; then each warp folds its groups of 32 lanes,
//                and one warp the group results. The max has no order.
// Accuracy       as cuda/forward.cu, whose bits these are
// Special cases  core/row.h
// Source         docs/contract.md; the layout is ours
//
// The sum of a row cannot begin before its max is known, and the rows in work do not fit into the
// cache; so they wait in shared memory, in a ring of stages. A stage holds a few periods of a row; a
// period is B neighbouring columns, of which a block holds its lanes.
//
//     lister --rows--> copying warps --columns--> ring of stages --+--> summing warps --sums--> finisher
//                                                                  |         ^                     |
//                                                                  +----> max warps           logp, lse
//
// While a row is summed, the next one fills the stages that come free. Barriers:
//
//     listed[row]     lister -> all but the summing warps         info[row] tells where the row lies
//     arrived[stage]  copying warps -> max warps                  the stage is here
//     empty[stage]    summing warps -> copying warps              the stage was read
//     full[row]       max warps of all blocks -> summing warps    every max is here, and every stage
//     named           a summing warp -> that of the next set      the sums of its lanes are here
//     done[row]       summing warps of all blocks -> finisher     the sums of the groups are here
//     ended[row]      finisher -> lister                          the slot is free
//
// A summing warp reads stages whose `arrived` it has not seen. A max warp has: it waits for a stage, and later
// arrives at its own block's full[row]. Both are release and acquire within the block, and so are cumulative:
// who has seen full[row] also sees what was copied.
//
// A barrier says no more than whether its phase is odd. So who waits for a phase has waited for the one before: each
// place of the ring always has the same copying warp and the same max warp (their numbers divide that of the stages).
//
// What belongs to row i lies in slot i mod kRowSlots. Once a block has ended row i, all blocks have
// summed it, so each max of it was read; no block can send for row i + kRowSlots before. Blocks send to
// one another by st.async, which completes the barrier that the reader waits on. Before they leave they
// wait for one another, so nobody sends to a block that is gone.
//
// Where temperatures or the entropy are asked for, the summing warps divide the logits, and keep a second sum
// beside the first, all the way (kIsGeneral).
//
// All this is the locked contract. In the exact one sums have no order: nothing passes from set to set, and
// every summing warp sends its own sum to the finishers (exact_sum.h).
#pragma once

#include "cuda/facts.h"
#include "cuda/forward.h"
#include "cuda/ring/clerks.h"
#include "cuda/ring/copy.h"
#include "cuda/ring/exact_sum.h"
#include "cuda/ring/max.h"
#include "cuda/ring/shape.h"
#include "cuda/ring/sum.h"

namespace detlogp::cuda::ring {

template <class S>
__device__ __forceinline__ void initialize(LockedSums<S>& sums) {
  for (int i = threadIdx.x; i < S::kSums * S::kBlockLanes; i += S::kThreads) {
    sums.on_their_way[0][i / S::kSetThreads][i % S::kSetThreads] = 0;
  }
}

template <class S>
__device__ __forceinline__ void initialize(ExactSums<S>&) {
}

template <class S>
__device__ __forceinline__ void initialize(Shared<S>& shared) {
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kRowSlots; ++i) {
      init(shared.listed[i], 1);
      init(shared.full[i], 1 + S::kMaxWarps);
      init(shared.done[i], 2);
      init(shared.ended[i], 1);
    }
    for (int i = 0; i < S::kStages; ++i) {
      init(shared.arrived[i], 1);
      init(shared.empty[i], S::kSetThreads / 32);
    }
  }
  initialize(shared.sums);
}

template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) forward_ring_kernel(
    const __grid_constant__ ForwardArgs args, const __grid_constant__ MemoryMap memory) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
  extern __shared__ __align__(128) char stages[];
  __shared__ Shared<S> shared;
  const int vocab = static_cast<int>(args.rows.vocab);
  const Block<S> block{
      shared,
      stages,
      vocab,
      S::kCluster > 1 ? rank_in_cluster() : 0,
      (vocab + S::kStageColumns - 1) / S::kStageColumns,
      memory,
      Divisor<float>(args.temperature)};
  initialize(shared);
  S::kCluster > 1 ? sync_cluster() : __syncthreads();
  wait_for_kernel_before();
  let_kernel_after_begin();
  const int warp = threadIdx.x / 32;
  if (warp < S::kSumWarps) {
    using Sum = std::conditional_t<S::kIsExact, ExactSummer<S>, Summer<S>>;
    Sum(block, threadIdx.x).run();
  } else if (warp < S::kFirstCopyWarp) {
    max_of_rows(block, warp - S::kSumWarps);
  } else if (warp < S::kLister) {
    copy_rows(block, warp - S::kFirstCopyWarp);
  } else if (warp == S::kLister) {
    Lister<S> lister(block, args);
    while (lister.list()) {
    }
  } else {
    Finisher<S> finisher(block, args);
    while (finisher.finish()) {
    }
  }
  __syncwarp();
  if (S::kCluster > 1) {
    sync_cluster();
  }
#else
  __trap();
#endif
}

template <class S>
cudaLaunchConfig_t launch_config(int clusters, void* stream, cudaLaunchAttribute (&attributes)[2]) {
  attributes[0] = clusters_of(S::kCluster);
  attributes[1] = begins_early();
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * S::kCluster);
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kStages * S::kStageBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  config.numAttrs = 2;
  return config;
}

// How many clusters a device runs at a time; 0: it lacks what the kernel is built for.
template <class S>
int count_clusters(int device) {
  static_assert(
      sizeof(Shared<S>) + S::kStages * S::kStageBytes <= S::Policy::kSharedBytes,
      "the ring leaves room for the barriers");
  const DeviceFacts& facts = facts_of(device);
  if (!has_clusters(facts) || facts.shared_bytes < S::Policy::kSharedBytes) {
    return 0;
  }
  const auto kernel = forward_ring_kernel<S>;
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = launch_config<S>(1, nullptr, attributes);
  config.numAttrs = 1;
  const auto bytes = static_cast<int>(config.dynamicSmemBytes);
  check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      "cudaFuncSetAttribute");
  int clusters = 0;
  check(
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "cudaOccupancyMaxActiveClusters");
  return clusters;
}

template <class S>
int clusters_at_a_time(int device) {
  static std::array<std::once_flag, kMaxDevices> counted;
  static std::array<int, kMaxDevices> clusters;
  std::call_once(counted[device], [&] { clusters[device] = count_clusters<S>(device); });
  return clusters[device];
}

// The slices of a block in a period, as many as a stage holds. Where a block has all lanes they are one piece,
// and need no map.
template <class S>
const MemoryMap& slices_in_memory() {
  static const MemoryMap map =
      S::kCluster == 1
          ? MemoryMap{}
          : MemoryMap::of_slices(S::kPitch, kLanes * sizeof(typename S::Logit), S::kPeriods);
  return map;
}

// A row must fit into the ring of its cluster, or its max would never be known.
template <class S>
bool fits(int64_t vocab, double share) {
  return vocab <= static_cast<int64_t>(share * S::kStages) * S::kStageColumns;
}

// Launches with the fewest blocks a row that leave the ring room for the next row; with more where all
// rows then still run at a time. Returns false, and does nothing, where no C serves.
template <class S>
bool launch(const ForwardArgs& args, void* stream, int device, int wanted) {
  const int64_t count = args.rows.count;
  constexpr int C = S::kCluster;
  if constexpr (C < kMaxCluster) {
    using More = Shape<typename S::Logit, 2 * C, S::kIsExact, S::kIsGeneral>;
    const bool is_roomy = fits<S>(args.rows.vocab, S::Policy::kRoomyShare);
    const bool prefers_more = !is_roomy || (2 * C * count <= facts_of(device).multiprocessors &&
                                            count <= clusters_at_a_time<More>(device));
    const bool goes_on = wanted == kAnyCluster ? prefers_more : C < wanted;
    if (goes_on && launch<More>(args, stream, device, wanted)) {
      return true;
    }
  }
  const int at_a_time = clusters_at_a_time<S>(device);
  const bool is_allowed = wanted == kAnyCluster || wanted == C;
  if (!is_allowed || at_a_time == 0 || !fits<S>(args.rows.vocab, 1.0)) {
    return false;
  }
  const int clusters = count < at_a_time ? static_cast<int>(count) : at_a_time;
  // A copying warp without a stage in a row is not waited for when that row's slot is used again; nor,
  // locked, a set of warps.
  constexpr int kTurns = !S::kIsExact && S::kSets > S::kCopyWarps ? S::kSets : S::kCopyWarps;
  const bool all_work = args.rows.vocab > (kTurns - 1) * int64_t{S::kStageColumns};
  if (!all_work && count > (S::kRowSlots - 1) * int64_t{clusters}) {
    return false;
  }
  cudaLaunchAttribute attributes[2];
  const cudaLaunchConfig_t config = launch_config<S>(clusters, stream, attributes);
  check(
      cudaLaunchKernelEx(&config, forward_ring_kernel<S>, args, slices_in_memory<S>()),
      "launch of forward_ring_kernel");
  return true;
}

// Returns false, and does nothing, where the ring does not serve.
template <bool IsExact, bool IsGeneral>
bool launch_ring(const ForwardArgs& args, void* stream, int cluster) {
  if (args.rows.column_stride != 1 || args.rows.vocab <= kNarrowVocab) {
    return false;
  }
  const int device = current_device();
  if (device >= kMaxDevices) {
    return false;
  }
  switch (args.rows.logits_type) {
    case Dtype::float16:
      return launch<Shape<Half, 1, IsExact, IsGeneral>>(args, stream, device, cluster);
    case Dtype::bfloat16:
      return launch<Shape<BFloat16, 1, IsExact, IsGeneral>>(args, stream, device, cluster);
    case Dtype::float32:
      return launch<Shape<float, 1, IsExact, IsGeneral>>(args, stream, device, cluster);
    default:
      return false;
  }
}

}  // namespace detlogp::cuda::ring
