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

template <class Args>
struct CudaCall {
  using Launch = void (*)(const Args& args, Arithmetic arithmetic, void* stream);

  const Args& args;
  Arithmetic arithmetic;
  Launch launch;
};

// `count` rows of `vocab` columns. `launch` is null in a build without CUDA.
template <class Args>
void run(
    const Tensor& logits, const Args& args, int64_t count, int64_t vocab, Arithmetic arithmetic,
    const cpu::KernelSet<Args>& on_cpu, typename CudaCall<Args>::Launch launch) {
  if (count == 0) {
    return;
  }
  if (logits.is_cpu()) {
    constexpr int64_t kElementsPerTask = 32768;
    const auto kernel = on_cpu[static_cast<size_t>(arithmetic)];
    torch::stable::parallel_for(
        0, count, kElementsPerTask / vocab + 1, [&](int64_t first, int64_t last) {
          const DefaultFloatEnvironment environment;
          kernel(args, first, last);
        });
    return;
  }
  CudaCall<Args> call{args, arithmetic, launch};
  on_cuda_stream(
      logits,
      [](void* stream, void* context) {
        const auto& call = *static_cast<CudaCall<Args>*>(context);
        call.launch(call.args, call.arithmetic, stream);
      },
      &call);
}

}  // namespace detlogp
