// The CPU kernels, compiled once per instruction set from the same source: the same bits on each.
#pragma once

#include "core/args.h"

namespace detlogp::cpu {

// Each function handles the rows first <= r < last.
struct Kernels {
  const char* name;
  void (*forward_float)(const ForwardArgs&, int64_t first, int64_t last);
  void (*forward_double)(const ForwardArgs&, int64_t first, int64_t last);
  void (*backward_float)(const BackwardArgs&, int64_t first, int64_t last);
  void (*backward_double)(const BackwardArgs&, int64_t first, int64_t last);
};

// Widest first. `supported` asks the processor.
struct Path {
  const Kernels* kernels;
  bool (*supported)();
};

// The path in use; chosen once, at the first call, as the widest that the processor supports.
const Kernels& kernels();

// Selects a path by name ("avx512", "avx2", "portable"), or the widest for "auto". Returns false, and
// changes nothing, when this processor or this build lacks it. For tests and for comparisons.
bool select_path(const char* name);

}  // namespace detlogp::cpu
