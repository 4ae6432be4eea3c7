// What launches need to know of a device, asked for once.
#pragma once

#include <array>
#include <mutex>

#include "cuda/device.h"

namespace detlogp::cuda {

constexpr int kMaxDevices = 64;

struct DeviceFacts {
  int major;
  int multiprocessors;
  int shared_bytes;  // of a block, at most
};

inline int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// Whether this build has machine code or PTX of this major version. Without it, PTX of an older
// architecture runs, in which a kernel that needs clusters has no body.
constexpr bool is_built_for(int major) {
  for (const int architecture : {__CUDA_ARCH_LIST__}) {
    if (architecture / 100 == major) {
      return true;
    }
  }
  return false;
}

inline const DeviceFacts& facts_of(int device) {
  static std::array<std::once_flag, kMaxDevices> asked;
  static std::array<DeviceFacts, kMaxDevices> facts;
  std::call_once(asked.at(device), [&] {
    facts[device] = {
        attribute_of(device, cudaDevAttrComputeCapabilityMajor),
        attribute_of(device, cudaDevAttrMultiProcessorCount),
        attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin)};
  });
  return facts[device];
}

// Whether kernels that need clusters run there; their code is for 9.0 and 10.0.
inline bool has_clusters(const DeviceFacts& facts) {
  return facts.major >= 9 && facts.major < 12 && is_built_for(facts.major);
}

// Of a launch: so many blocks to a cluster.
inline cudaLaunchAttribute clusters_of(unsigned blocks) {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = blocks;
  attribute.val.clusterDim.y = 1;
  attribute.val.clusterDim.z = 1;
  return attribute;
}

// Of a launch: the kernel may begin before the one ahead of it in the stream has ended (barrier.h).
inline cudaLaunchAttribute begins_early() {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

inline int current_device() {
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

}  // namespace detlogp::cuda
