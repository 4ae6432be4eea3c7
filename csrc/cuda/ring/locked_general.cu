// The ring for temperatures and the entropy in the locked contract.
#include "cuda/ring/kernel.h"

namespace detlogp::cuda {

bool launch_general_ring(const ForwardArgs& args, void* stream, int cluster) {
  return ring::launch_ring<false, true>(args, stream, cluster);
}

}  // namespace detlogp::cuda
