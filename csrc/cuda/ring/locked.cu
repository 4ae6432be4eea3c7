// The ring in the locked contract.
#include "cuda/ring/kernel.h"

namespace detlogp::cuda {

bool launch_forward_ring(const ForwardArgs& args, void* stream, int cluster) {
  return ring::launch_ring<false, false>(args, stream, cluster);
}

}  // namespace detlogp::cuda
