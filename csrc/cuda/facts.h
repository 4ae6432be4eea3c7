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

inline int current_device() {
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

}  // namespace detlogp::cuda
