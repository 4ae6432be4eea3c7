// The ring in the exact contract. Compiled without contraction (CMakeLists.txt).
#include "cuda/ring/kernel.h"

namespace detlogp::cuda {

bool launch_exact_ring(const ForwardArgs& args, void* stream, int cluster) {
  return ring::launch_ring<true, false>(args, stream, cluster);
}

}  // namespace detlogp::cuda
