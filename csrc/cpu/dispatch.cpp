// Chooses the instruction set at run time.
#include <atomic>
#include <cstring>

#include "cpu/kernels.h"
#include "cpu/paths.h"

namespace detlogp::cpu {
namespace {

// The higher derivatives of the exact contract are those of float32, with sums of its own.
#define DETLOGP_SET(name, Exact)             \
  {                                          \
    {                                        \
      name<float>, name<double>, name<Exact> \
    }                                        \
  }
#define DETLOGP_KERNELS(path)              \
  {#path,                                  \
   DETLOGP_SET(path::forward, Exact),      \
   DETLOGP_SET(path::backward, Exact),     \
   DETLOGP_SET(path::second_order, float), \
   DETLOGP_SET(path::tangent, float),      \
   DETLOGP_SET(path::probability, float),  \
   DETLOGP_SET(path::row_sum, float),      \
   path::exact_max,                        \
   path::exact_sum,                        \
   path::exact_extremes,                   \
   path::exact_row_sum,                    \
   path::exact_finish,                     \
   path::exact_total}

// Widest first.
struct Path {
  const Kernels* kernels;
  bool (*supported)();
};

const Kernels portable_kernels = DETLOGP_KERNELS(portable);
#if defined(DETLOGP_CPU_X86)
const Kernels avx2_kernels = DETLOGP_KERNELS(avx2);
const Kernels avx512_kernels = DETLOGP_KERNELS(avx512);
#endif

const Path paths[] = {
#if defined(DETLOGP_CPU_X86)
    {&avx512_kernels,
     [] {
       return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("fma");
     }},
    {&avx2_kernels, [] { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }},
#endif
    {&portable_kernels, [] { return true; }},
};

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

bool select_path(const char* name) {
  for (const Path& path : paths) {
    const bool wanted = strcmp(name, "auto") == 0 || strcmp(name, path.kernels->name) == 0;
    if (wanted && path.supported()) {
      chosen = path.kernels;
      return true;
    }
  }
  return false;
}

const Kernels& kernels() {
  if (chosen.load() == nullptr) {
    select_path("auto");
  }
  return *chosen.load();
}

}  // namespace detlogp::cpu
