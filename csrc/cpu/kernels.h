// The CPU kernels, compiled once per instruction set from the same source: the same bits on each.
#pragma once

#include "core/args.h"

namespace detlogp::cpu {

// Handles the rows first <= r < last.
template <class Args>
using Kernel = void (*)(const Args&, int64_t first, int64_t last);

// The same kernel in float32 and in float64 arithmetic.
template <class Args>
struct KernelPair {
  Kernel<Args> in_float;
  Kernel<Args> in_double;
};

struct Kernels {
  const char* name;
  KernelPair<ForwardArgs> forward;
  KernelPair<BackwardArgs> backward;
  KernelPair<SecondOrderArgs> second_order;
  KernelPair<TangentArgs> tangent;
  KernelPair<ProbabilityArgs> probability;
  KernelPair<RowSumArgs> row_sum;
};

// The path in use; chosen once, at the first call, as the widest that the processor supports.
const Kernels& kernels();

// Selects a path by name ("avx512", "avx2", "portable"), or the widest for "auto". Returns false, and
// changes nothing, when this processor or this build lacks it. For tests and for comparisons.
bool select_path(const char* name);

}  // namespace detlogp::cpu
