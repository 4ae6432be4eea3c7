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
//                                                                  +--> max warps             logp, lse
//
// While a row is summed, the next one fills the stages that come free. Barriers:
//
//     listed[row]     lister -> all others of its block           info[row] tells where the row lies
//     arrived[stage]  copying warps -> max and summing warps      the stage is here
//     empty[stage]    summing warps -> copying warps              the stage was read
//     full[row]       max warps of all blocks -> summing warps    every max is here
//     passed          set of summing warps -> the next set        the sums of the lanes are here
//     done[row]       summing warps of all blocks -> finisher     the sums of the groups are here
//     ended[row]      finisher -> lister                          the slot is free
//
// What belongs to row i lies in slot i mod kRowSlots. Once a block has ended row i, all blocks have
// summed it, so each max of it was read; no block can send for row i + kRowSlots before. Blocks send to
// one another by st.async, which completes the barrier that the reader waits on. Before they leave they
// wait for one another, so nobody sends to a block that is gone.
#include <array>
#include <atomic>
#include <mutex>

#include "cuda/forward.h"
#include "cuda/ring/clerks.h"
#include "cuda/ring/copy.h"
#include "cuda/ring/max.h"
#include "cuda/ring/shape.h"
#include "cuda/ring/sum.h"

namespace detlogp::cuda {
namespace ring {
namespace {

template <class T, int C>
__device__ __forceinline__ void initialize(Shared<T, C>& shared) {
  using S = Shape<T, C>;
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::kRowSlots; ++i) {
      init(shared.listed[i], 1);
      init(shared.full[i], 1);
      init(shared.done[i], 2);
      init(shared.ended[i], 1);
    }
    for (int i = 0; i < S::kStages; ++i) {
      init(shared.arrived[i], 32);
      init(shared.empty[i], S::kSetThreads / 32);
    }
    for (auto& turn : shared.turn) {
      for (Barrier& passed : turn.passed) {
        init(passed, 1);
      }
    }
  }
  for (int i = threadIdx.x; i < S::kBlockLanes; i += S::kThreads) {
    shared.turn[0].sum[0][i] = 0;
  }
}

template <class T, int C>
__global__ void __launch_bounds__(Shape<T, C>::kThreads, 1)
    forward_ring_kernel(const __grid_constant__ ForwardArgs args) {
#if __CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200
  using S = Shape<T, C>;
  extern __shared__ __align__(16) char stages[];
  __shared__ Shared<T, C> shared;
  const int vocab = static_cast<int>(args.rows.vocab);
  const Block<T, C> block{
      shared, stages, vocab, C > 1 ? rank_in_cluster() : 0,
      (vocab + S::kStageColumns - 1) / S::kStageColumns};
  initialize(shared);
  C > 1 ? sync_cluster() : __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < S::kSumWarps) {
    Summer<T, C>(block, threadIdx.x).run();
  } else if (warp < S::kFirstCopyWarp) {
    max_of_rows(block, warp - S::kSumWarps);
  } else if (warp < S::kLister) {
    copy_rows(block, warp - S::kFirstCopyWarp);
  } else if (S::kClerks == 1) {
    Lister<T, C> lister(block, args);
    Finisher<T, C> finisher(block, args);
    keep_books(lister, finisher);
  } else if (warp == S::kLister) {
    Lister<T, C> lister(block, args);
    while (lister.list()) {
    }
  } else {
    Finisher<T, C> finisher(block, args);
    while (finisher.finish()) {
    }
  }
  __syncwarp();
  if (C > 1) {
    sync_cluster();
  }
#else
  __trap();
#endif
}

template <class T, int C>
cudaLaunchConfig_t launch_config(int clusters, void* stream, cudaLaunchAttribute* attribute) {
  using S = Shape<T, C>;
  attribute->id = cudaLaunchAttributeClusterDimension;
  attribute->val.clusterDim.x = C;
  attribute->val.clusterDim.y = 1;
  attribute->val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(clusters * C);
  config.blockDim = dim3(S::kThreads);
  config.dynamicSmemBytes = S::kStages * S::kStageBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attribute;
  config.numAttrs = 1;
  return config;
}

constexpr int kMaxDevices = 64;

int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Whether this build has the kernel's body for devices of this major version. Without it, PTX of an
// older architecture would run in its place, and do nothing.
constexpr bool is_built_for(int major) {
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture / 100 == major) {
      return true;
    }
  }
  return false;
}

// How many clusters a device runs at a time; 0: it lacks what the kernel is built for.
template <class T, int C>
int count_clusters(int device) {
  using S = Shape<T, C>;
  static_assert(sizeof(Shared<T, C>) <= S::kOtherBytes, "the ring leaves room for the barriers");
  const int major = attribute_of(device, cudaDevAttrComputeCapabilityMajor);
  if (major < 9 || major >= 12 || !is_built_for(major) ||
      attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin) < S::Policy::kSharedBytes) {
    return 0;
  }
  const auto kernel = forward_ring_kernel<T, C>;
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = launch_config<T, C>(1, nullptr, &attribute);
  const auto bytes = static_cast<int>(config.dynamicSmemBytes);
  check(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
      "cudaFuncSetAttribute");
  int clusters = 0;
  check(
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config), "cudaOccupancyMaxActiveClusters");
  return clusters;
}

template <class T, int C>
int clusters_at_a_time(int device) {
  static std::array<std::once_flag, kMaxDevices> counted;
  static std::array<int, kMaxDevices> clusters;
  std::call_once(counted[device], [&] { clusters[device] = count_clusters<T, C>(device); });
  return clusters[device];
}

int multiprocessors(int device) {
  static std::atomic<int> counted[kMaxDevices];
  int count = counted[device];
  if (count == 0) {
    count = attribute_of(device, cudaDevAttrMultiProcessorCount);
    counted[device] = count;
  }
  return count;
}

// A row must fit into the ring of its cluster, or its max would never be known.
template <class T, int C>
bool fits(int64_t vocab, double share) {
  using S = Shape<T, C>;
  return vocab <= static_cast<int64_t>(share * S::kStages) * S::kStageColumns;
}

// Launches with the fewest blocks a row that leave the ring room for the next row; with more where all
// rows then still run at a time. Returns false, and does nothing, where no C serves.
template <class T, int C>
bool launch(const ForwardArgs& args, void* stream, int device, int wanted) {
  using S = Shape<T, C>;
  const int64_t count = args.rows.count;
  if constexpr (C < kMaxCluster) {
    const bool is_roomy = fits<T, C>(args.rows.vocab, S::Policy::kRoomyShare);
    const bool prefers_more = !is_roomy || 2 * C * count <= multiprocessors(device);
    const bool goes_on = wanted == kAnyCluster ? prefers_more : C < wanted;
    if (goes_on && launch<T, 2 * C>(args, stream, device, wanted)) {
      return true;
    }
  }
  const int at_a_time = clusters_at_a_time<T, C>(device);
  const bool is_allowed = wanted == kAnyCluster || wanted == C;
  if (!is_allowed || at_a_time == 0 || !fits<T, C>(args.rows.vocab, 1.0)) {
    return false;
  }
  const int clusters = count < at_a_time ? static_cast<int>(count) : at_a_time;
  // A set of warps without a stage in a row is not waited for when that row's slot is used again.
  const bool all_sets_work = args.rows.vocab > (S::kSets - 1) * int64_t{S::kStageColumns};
  if (!all_sets_work && count >= int64_t{S::kRowSlots} * clusters) {
    return false;
  }
  cudaLaunchAttribute attribute;
  const cudaLaunchConfig_t config = launch_config<T, C>(clusters, stream, &attribute);
  check(
      cudaLaunchKernelEx(&config, forward_ring_kernel<T, C>, args),
      "launch of forward_ring_kernel");
  return true;
}

}  // namespace
}  // namespace ring

bool launch_forward_ring(const ForwardArgs& args, void* stream, int cluster) {
  if (args.rows.column_stride != 1 || args.rows.vocab <= kNarrowVocab) {
    return false;
  }
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  if (device >= ring::kMaxDevices) {
    return false;
  }
  switch (args.rows.logits_type) {
    case Dtype::float16:
      return ring::launch<Half, 1>(args, stream, device, cluster);
    case Dtype::bfloat16:
      return ring::launch<BFloat16, 1>(args, stream, device, cluster);
    case Dtype::float32:
      return ring::launch<float, 1>(args, stream, device, cluster);
    default:
      return false;
  }
}

}  // namespace detlogp::cuda
