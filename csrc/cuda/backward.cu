// First-order gradient on CUDA.
//
// Computes       grad_logits = grad_logp (onehot - p) + grad_lse p, p = exp((x - m) - log(s)); where asked,
//                with the entropy's part, and of x / temperature
// Order          element by element: no sum
// Accuracy       detlogp.testing.gradient_error_bound; m and log(s) stay apart, so that a common
//                offset costs nothing
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         d logp = dx[t] - sum_v p[v] dx[v], d lse = sum_v p[v] dx[v]
#include "cuda/backward.h"
#include "cuda/kernels.h"

namespace detlogp::cuda {
namespace {

template <class Real, bool HasLse>
struct RowGradient {
  using Acc = Real;
  static constexpr int blocks(int) {
    return sizeof(Acc) == 8 ? 1 : BackwardPolicy::kBlocks;
  }

  Acc row_max;
  Acc log_sum;
  Acc grad;
  Acc grad_lse;

  __device__ __forceinline__ static RowGradient load(const BackwardArgs& args, int64_t row) {
    return {
        per_row<Acc>(args.row_max, row), log_sum_of<Acc>(args, row),
        per_row<Acc>(args.grad_logp, row), per_row<Acc>(args.grad_lse, row)};
  }

  __device__ __forceinline__ Acc element(Acc x, bool is_target) const {
    const Acc p = exp_of((x - row_max) - log_sum);
    return gradient(is_target, p, grad, grad_lse, HasLse);
  }
};

// Divides: there is a temperature.
template <class Real, bool Divides>
struct GeneralRowGradient {
  using Acc = Real;
  static constexpr int blocks(int) {
    return sizeof(Acc) == 8 ? 1 : BackwardPolicy::kGeneralBlocks;
  }

  Acc row_max;
  Acc log_sum;
  Acc grad;
  Acc grad_lse;
  bool has_lse;
  Acc gap;
  Acc grad_entropy;
  Divisor<Acc> divide;

  __device__ __forceinline__ static GeneralRowGradient load(const BackwardArgs& args, int64_t row) {
    const auto of_row = [&](const void* vector) {
      return Divides ? cotangent<Acc>(args, vector, row) : per_row<Acc>(vector, row);
    };
    return {per_row<Acc>(args.row_max, row), log_sum_of<Acc>(args, row),
            of_row(args.grad_logp),          of_row(args.grad_lse),
            args.grad_lse != nullptr,        per_row<Acc>(args.gap, row),
            of_row(args.grad_entropy),       Divisor<Acc>(args.temperature)};
  }

  __device__ __forceinline__ Acc element(Acc logit, bool is_target) const {
    const Acc x = Divides ? divide(logit) : logit;
    const Acc p = exp_of((x - row_max) - log_sum);
    const Acc of_plain = gradient(is_target, p, grad, grad_lse, has_lse);
    return add_entropy_gradient(of_plain, p, distance_below_max(row_max, x), gap, grad_entropy);
  }
};

template <class Acc>
void launch_backward_in(const BackwardArgs& args, void* stream) {
  if (args.temperature != 1) {
    launch_backward_of<GeneralRowGradient<Acc, true>>(args, stream);
  } else if (args.grad_entropy != nullptr) {
    launch_backward_of<GeneralRowGradient<Acc, false>>(args, stream);
  } else if (args.grad_lse != nullptr) {
    launch_backward_of<RowGradient<Acc, true>>(args, stream);
  } else {
    launch_backward_of<RowGradient<Acc, false>>(args, stream);
  }
}

}  // namespace

void launch_backward(const BackwardArgs& args, Arithmetic arithmetic, void* stream) {
  switch (arithmetic) {
    case Arithmetic::exact:
      return launch_exact_backward(args, stream);
    case Arithmetic::float64:
      return launch_backward_in<double>(args, stream);
    case Arithmetic::float32:
      return launch_backward_in<float>(args, stream);
  }
}

}  // namespace detlogp::cuda
