// Runs a kernel on the device of a tensor: rows over torch's threads on the CPU, or the current stream.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cfenv>

#include "cpu/kernels.h"
#include "cuda/kernels.h"
#include "tensors.h"

#if defined(DETLOGP_CUDA)
#define DETLOGP_LAUNCH(name) cuda::launch_##name
#else
#define DETLOGP_LAUNCH(name) nullptr
#endif

namespace detlogp {

// Rounding mode and subnormals as the standard has them, whatever this thread was set to: the bits
// must not depend on torch.set_flush_denormal, nor on which worker takes a row.
class DefaultFloatEnvironment {
 public:
  DefaultFloatEnvironment() {
    fegetenv(&saved_);
    fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatEnvironment() {
    fesetenv(&saved_);
  }
  DefaultFloatEnvironment(const DefaultFloatEnvironment&) = delete;
  DefaultFloatEnvironment& operator=(const DefaultFloatEnvironment&) = delete;

 private:
  fenv_t saved_;
};

// `count` rows of `columns` columns, on the device of `tensor`: `launch(stream)` on CUDA.
template <class Args, class Launch>
void run_where_it_is(
    const Tensor& tensor, const Args& args, int64_t count, int64_t columns,
    cpu::Kernel<Args> on_cpu, const Launch& launch) {
  if (count == 0 || columns == 0) {
    return;
  }
  if (tensor.is_cpu()) {
    constexpr int64_t kElementsPerTask = 32768;
    torch::stable::parallel_for(
        0, count, kElementsPerTask / columns + 1, [&](int64_t first, int64_t last) {
          const DefaultFloatEnvironment environment;
          on_cpu(args, first, last);
        });
    return;
  }
  on_cuda_stream(
      tensor, [](void* stream, void* launch) { (*static_cast<const Launch*>(launch))(stream); },
      const_cast<Launch*>(&launch));
}

// A launcher; null in a build without CUDA.
template <class Args>
struct Launcher {
  using Plain = void (*)(const Args& args, void* stream);
  using OfArithmetic = void (*)(const Args& args, Arithmetic arithmetic, void* stream);
};

// A kernel that each arithmetic has.
template <class Args>
void run(
    const Tensor& tensor, const Args& args, int64_t count, int64_t columns, Arithmetic arithmetic,
    const cpu::KernelSet<Args>& on_cpu, typename Launcher<Args>::OfArithmetic launch) {
  const auto kernel = on_cpu[static_cast<size_t>(arithmetic)];
  run_where_it_is(tensor, args, count, columns, kernel, [&](void* stream) {
    launch(args, arithmetic, stream);
  });
}

// A kernel of one arithmetic.
template <class Args>
void run(
    const Tensor& tensor, const Args& args, int64_t count, int64_t columns,
    cpu::Kernel<Args> on_cpu, typename Launcher<Args>::Plain launch) {
  run_where_it_is(
      tensor, args, count, columns, on_cpu, [&](void* stream) { launch(args, stream); });
}

}  // namespace detlogp
