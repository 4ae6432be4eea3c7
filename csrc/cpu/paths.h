// Declares the kernels of one path for each that this build has. CMake defines DETLOGP_CPU_X86 where
// the AVX2 and AVX-512 paths are built, and DETLOGP_CPU_PATH while it compiles one of them.
#pragma once

#include "core/args.h"

#define DETLOGP_DECLARE_KERNEL(name, Args) \
  template <class Acc>                     \
  void name(const Args& args, int64_t first, int64_t last);

#define DETLOGP_DECLARE_PATH(path)                             \
  namespace detlogp::cpu::path {                               \
  DETLOGP_DECLARE_KERNEL(forward, ForwardArgs)                 \
  DETLOGP_DECLARE_KERNEL(backward, BackwardArgs)               \
  DETLOGP_DECLARE_KERNEL(second_order, SecondOrderArgs)        \
  DETLOGP_DECLARE_KERNEL(tangent, TangentArgs)                 \
  DETLOGP_DECLARE_KERNEL(probability, ProbabilityArgs)         \
  DETLOGP_DECLARE_KERNEL(row_sum, RowSumArgs)                  \
  void exact_max(const PartArgs&, int64_t, int64_t);           \
  void exact_sum(const PartArgs&, int64_t, int64_t);           \
  void exact_extremes(const PartArgs&, int64_t, int64_t);      \
  void exact_row_sum(const PartArgs&, int64_t, int64_t);       \
  void exact_finish(const FinishArgs&, int64_t, int64_t);      \
  void exact_total(const TotalArgs&, int64_t, int64_t);        \
  template <>                                                  \
  void forward<Exact>(const ForwardArgs&, int64_t, int64_t);   \
  template <>                                                  \
  void backward<Exact>(const BackwardArgs&, int64_t, int64_t); \
  }

DETLOGP_DECLARE_PATH(portable)
#if defined(DETLOGP_CPU_X86)
DETLOGP_DECLARE_PATH(avx2)
DETLOGP_DECLARE_PATH(avx512)
#endif
