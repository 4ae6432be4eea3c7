// The CPU kernels, compiled once per instruction set from the same source: the same bits on each.
#pragma once

#include <array>

#include "core/args.h"

namespace detlogp::cpu {

// Handles the rows first <= r < last.
template <class Args>
using Kernel = void (*)(const Args&, int64_t first, int64_t last);

// The same kernel in each arithmetic, by its number.
template <class Args>
using KernelSet = std::array<Kernel<Args>, 3>;

struct Kernels {
  const char* name;
  KernelSet<ForwardArgs> forward;
  KernelSet<BackwardArgs> backward;
  KernelSet<SecondOrderArgs> second_order;
  KernelSet<TangentArgs> tangent;
  KernelSet<ProbabilityArgs> probability;
  KernelSet<RowSumArgs> row_sum;
  // Of the exact contract alone.
  Kernel<PartArgs> exact_max;
  Kernel<PartArgs> exact_sum;
  Kernel<PartArgs> exact_extremes;
  Kernel<PartArgs> exact_row_sum;
  Kernel<FinishArgs> exact_finish;
  Kernel<TotalArgs> exact_total;
};

// The path in use; chosen once, at the first call, as the widest that the processor supports.
const Kernels& kernels();

// Selects a path by name ("avx512", "avx2", "portable"), or the widest for "auto". Returns false, and
// changes nothing, when this processor or this build lacks it. For tests and for comparisons.
bool select_path(const char* name);

}  // namespace detlogp::cpu
