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

template <class Acc>
struct RowGradient {
  Acc row_max;
  Acc log_sum;
  Acc grad;
  Acc grad_lse;
  int64_t target;
  bool has_lse;

  template <class T>
  __device__ __forceinline__ static RowGradient load(
      const BackwardArgs& args, int64_t row, int64_t, int64_t) {
    const Rows& rows = args.rows;
    return {per_row<Acc>(args.row_max, row),
            log_sum_of<Acc>(args, row),
            per_row<Acc>(args.grad_logp, row),
            per_row<Acc>(args.grad_lse, row),
            target_of(rows, row),
            args.grad_lse != nullptr};
  }

  template <class T>
  __device__ __forceinline__ T element(T x, bool is_target) const {
    const Acc p = exp_of((to_acc<Acc>(x) - row_max) - log_sum);
    return from_acc<T>(gradient(is_target, p, grad, grad_lse, has_lse));
  }
};

// Divides: there is a temperature.
template <class Acc, bool Divides>
struct GeneralRowGradient {
  RowGradient<Acc> plain;
  Acc gap;
  Acc grad_entropy;
  Divisor<Acc> divide;
  int64_t target;

  template <class T>
  __device__ __forceinline__ static GeneralRowGradient load(
      const BackwardArgs& args, int64_t row, int64_t first, int64_t last) {
    auto plain = RowGradient<Acc>::template load<T>(args, row, first, last);
    if (Divides) {
      plain.grad = cotangent<Acc>(args, args.grad_logp, row);
      plain.grad_lse = cotangent<Acc>(args, args.grad_lse, row);
    }
    return {
        plain, per_row<Acc>(args.gap, row), cotangent<Acc>(args, args.grad_entropy, row),
        Divisor<Acc>(args.temperature), plain.target};
  }

  template <class T>
  __device__ __forceinline__ T element(T logit, bool is_target) const {
    const Acc x = Divides ? divide(to_acc<Acc>(logit)) : to_acc<Acc>(logit);
    const Acc p = exp_of((x - plain.row_max) - plain.log_sum);
    const Acc of_plain = gradient(is_target, p, plain.grad, plain.grad_lse, plain.has_lse);
    const Acc distance = distance_below_max(plain.row_max, x);
    return from_acc<T>(add_entropy_gradient(of_plain, p, distance, gap, grad_entropy));
  }
};

template <class Acc>
void launch_backward_in(const BackwardArgs& args, void* stream) {
  if (args.temperature != 1) {
    launch_backward_of<GeneralRowGradient<Acc, true>>(args, stream);
  } else if (args.grad_entropy != nullptr) {
    launch_backward_of<GeneralRowGradient<Acc, false>>(args, stream);
  } else {
    launch_backward_of<RowGradient<Acc>>(args, stream);
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
