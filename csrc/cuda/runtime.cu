// The device scope, and what this build was made with.
#include "cuda/device.h"
#include "cuda/kernels.h"

namespace detlogp::cuda {

DeviceScope::DeviceScope(int device) : previous_(-1), changed_(false) {
  check(cudaGetDevice(&previous_), "cudaGetDevice");
  if (previous_ != device) {
    check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }
}

DeviceScope::~DeviceScope() {
  if (changed_) {
    cudaSetDevice(previous_);
  }
}

const char* architectures() {
  return DETLOGP_CUDA_ARCHITECTURES;
}

const char* toolkit_version() {
  return DETLOGP_CUDA_VERSION;
}

}  // namespace detlogp::cuda
