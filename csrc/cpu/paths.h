// Declares the kernels of one path for each that this build has. CMake defines DETLOGP_CPU_X86 where
// the AVX2 and AVX-512 paths are built, and DETLOGP_CPU_PATH while it compiles one of them.
#pragma once

#include "core/args.h"

#define DETLOGP_DECLARE_PATH(path)                                      \
  namespace detlogp::cpu::path {                                        \
  template <class Acc>                                                  \
  void forward(const ForwardArgs& args, int64_t first, int64_t last);   \
  template <class Acc>                                                  \
  void backward(const BackwardArgs& args, int64_t first, int64_t last); \
  }

DETLOGP_DECLARE_PATH(portable)
#if defined(DETLOGP_CPU_X86)
DETLOGP_DECLARE_PATH(avx2)
DETLOGP_DECLARE_PATH(avx512)
#endif
