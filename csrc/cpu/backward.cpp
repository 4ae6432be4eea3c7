// First-order gradient on the CPU.
//
// Computes       grad_logits = grad_logp (onehot - p) + grad_lse p, p = exp((x - m) - log(s)); where asked,
//                with the entropy's part, and of x / temperature
// Order          element by element: no sum
// Accuracy       detlogp.testing.gradient_error_bound; m and log(s) stay apart, so that a common
//                offset costs nothing
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         d logp = dx[t] - sum_v p[v] dx[v], d lse = sum_v p[v] dx[v]
#include "core/exp.h"
#include "cpu/gradient_rows.h"
#include "cpu/paths.h"

namespace detlogp::cpu::DETLOGP_CPU_PATH {
namespace {

template <class Acc>
struct RowGradient {
  Acc row_max;
  Acc log_sum;
  Acc grad;
  Acc grad_lse;
  bool has_lse;

  template <class T>
  DETLOGP_FN RowGradient load(const BackwardArgs& args, int64_t row, T) {
    return {
        per_row<Acc>(args.row_max, row), log_sum_of<Acc>(args, row),
        per_row<Acc>(args.grad_logp, row), per_row<Acc>(args.grad_lse, row),
        args.grad_lse != nullptr};
  }

  template <class T>
  DETLOGP_FN T element(const RowGradient& g, T x, bool is_target) {
    const Acc p = exp_nonpositive((static_cast<Acc>(widen(x)) - g.row_max) - g.log_sum);
    return Narrow<T>::from(gradient(is_target, p, g.grad, g.grad_lse, g.has_lse));
  }
};

template <class Acc>
struct GeneralRowGradient {
  RowGradient<Acc> plain;
  Acc gap;
  Acc grad_entropy;
  Acc temperature;

  template <class T>
  DETLOGP_FN GeneralRowGradient load(const BackwardArgs& args, int64_t row, T at_target) {
    RowGradient<Acc> plain = RowGradient<Acc>::load(args, row, at_target);
    plain.grad = cotangent<Acc>(args, args.grad_logp, row);
    plain.grad_lse = cotangent<Acc>(args, args.grad_lse, row);
    return {
        plain, per_row<Acc>(args.gap, row), cotangent<Acc>(args, args.grad_entropy, row),
        static_cast<Acc>(args.temperature)};
  }

  template <class T>
  DETLOGP_FN T element(const GeneralRowGradient& g, T logit, bool is_target) {
    const Acc x = static_cast<Acc>(widen(logit)) / g.temperature;
    const Acc p = exp_nonpositive((x - g.plain.row_max) - g.plain.log_sum);
    const Acc of_plain = gradient(is_target, p, g.plain.grad, g.plain.grad_lse, g.plain.has_lse);
    const Acc distance = distance_below_max(g.plain.row_max, x);
    return Narrow<T>::from(add_entropy_gradient(of_plain, p, distance, g.gap, g.grad_entropy));
  }
};

}  // namespace

template <class Acc>
void backward(const BackwardArgs& args, int64_t first, int64_t last) {
  if (BackwardArgs::is_general(args)) {
    differentiate_rows<GeneralRowGradient<Acc>>(args, first, last);
  } else {
    differentiate_rows<RowGradient<Acc>>(args, first, last);
  }
}

template void backward<float>(const BackwardArgs&, int64_t, int64_t);
template void backward<double>(const BackwardArgs&, int64_t, int64_t);

}  // namespace detlogp::cpu::DETLOGP_CPU_PATH
