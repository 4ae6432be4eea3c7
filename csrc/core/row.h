// The end of every row's forward, written once: the semantics table of docs/semantics.md.
#pragma once

#include "core/args.h"

namespace detlogp {

// A max starts from the lowest finite number, so that a row of -inf gives exp(-inf) = 0 and not NaN.
DETLOGP_FN float lowest_of(float) {
  return -0x1.fffffep+127f;
}

DETLOGP_FN double lowest_of(double) {
  return -0x1.fffffffffffffp+1023;
}

template <class Acc>
DETLOGP_FN Acc lowest() {
  return lowest_of(Acc());
}

// The max of the quotients x / temperature: division by a positive number keeps the order. It starts from the
// lowest number, as that of the logits does.
template <class Acc>
DETLOGP_FN Acc max_of_quotients(Acc row_max, Acc temperature) {
  const Acc quotient = row_max / temperature;
  return quotient < lowest<Acc>() ? lowest<Acc>() : quotient;
}

// The part of the entropy log(s) + gap, gap = sum_v e (m - x) / s, that a column adds to the sum: e times this.
// Beyond `farthest` e is 0, and an infinite distance would make the product NaN.
template <class Acc>
DETLOGP_FN Acc distance_below_max(Acc row_max, Acc x) {
  const Acc farthest = sizeof(Acc) == 4 ? Acc(128) : Acc(1024);
  // Negated, because the exponential needs x - m.
  const Acc distance = -(x - row_max);
#if defined(__CUDA_ARCH__)
  return min(distance, farthest);  // of a NaN, the other: its exponential is NaN
#else
  return distance > farthest ? farthest : distance;
#endif
}

// Each lane takes its terms in fours, in their order: the first product rounded, then fused steps; the fours
// are added to the lane's sum in their order.
constexpr int kEntropyGroup = 4;

template <class Acc>
DETLOGP_FN void store_entropy(const ForwardArgs& args, int64_t row, double entropy, Acc gap) {
  if (args.entropy != nullptr) {
    store_as(args.lse_type, args.entropy, row, static_cast<Acc>(entropy));
    static_cast<Acc*>(args.gap)[row] = gap;
  }
}

// m and log(s), for the derivatives. m is stored as 0 where it is -0: where a row's largest are 0 and -0, the
// order in which its columns were compared must not show.
template <class Acc, class LogSum>
DETLOGP_FN void store_statistics(
    const ForwardArgs& args, int64_t row, Acc row_max, LogSum log_sum) {
  if (args.row_max != nullptr) {
    static_cast<Acc*>(args.row_max)[row] = row_max + Acc(0);
    static_cast<LogSum*>(args.log_sum)[row] = log_sum;
  }
}

template <class Acc>
DETLOGP_FN void store_scored_row(
    const ForwardArgs& args, int64_t row, Acc target, Acc row_max, Acc log_sum, Acc gap = Acc(0)) {
  store_as(args.logp_type, args.logp, row, target - row_max - log_sum);
  if (args.lse != nullptr) {
    store_as(args.lse_type, args.lse, row, row_max + log_sum);
  }
  store_statistics(args, row, row_max, log_sum);
  store_entropy(args, row, static_cast<double>(log_sum + gap), gap);
}

// A row that is not selected, or whose id is not one of its columns. Its logits do not matter.
template <class Acc>
DETLOGP_FN void store_skipped_row(const ForwardArgs& args, int64_t row) {
  const bool selected = Rows::selected(args.rows, row);
  const Acc infinity = static_cast<Acc>(bit_cast<float>(0x7f800000u));
  const Acc nan = static_cast<Acc>(bit_cast<float>(0x7fc00000u));
  if (selected || !args.keep_unselected) {
    const bool is_nan = selected && args.nan_for_invalid;
    store_as(args.logp_type, args.logp, row, is_nan ? nan : Acc(0));
  }
  if (args.lse != nullptr) {
    store_as(args.lse_type, args.lse, row, -infinity);
  }
  store_entropy<Acc>(args, row, 0.0, Acc(0));
  if (args.row_max != nullptr) {
    static_cast<Acc*>(args.row_max)[row] = -infinity;
    if (args.log_sum_is_double) {
      static_cast<double*>(args.log_sum)[row] = 0;
    } else {
      static_cast<Acc*>(args.log_sum)[row] = 0;
    }
  }
}

// The number of row `row` in a vector of the accumulation type; 0 where there is no vector.
template <class Acc>
DETLOGP_FN Acc per_row(const void* vector, int64_t row) {
  return vector == nullptr ? Acc(0) : static_cast<const Acc*>(vector)[row];
}

// log(s) of row `row`; the exact contract keeps it in double.
template <class Acc, class Args>
DETLOGP_FN Acc log_sum_of(const Args& args, int64_t row) {
  return args.log_sum_is_double ? static_cast<Acc>(per_row<double>(args.log_sum, row))
                                : per_row<Acc>(args.log_sum, row);
}

// grad (onehot - p) + grad_lse p, the product with grad rounded first, then one fused step.
template <class Acc>
DETLOGP_FN Acc gradient(bool is_target, Acc p, Acc grad, Acc grad_lse, bool has_lse) {
  const Acc score = (is_target ? Acc(1) : Acc(0)) - p;
  const Acc product = grad * score;
  return has_lse ? fused_multiply_add(grad_lse, p, product) : product;
}

// Where there is a temperature, a row's cotangents are divided by it, and not its gradient.
template <class Acc, class Args>
DETLOGP_FN Acc cotangent(const Args& args, const void* vector, int64_t row) {
  return per_row<Acc>(vector, row) / static_cast<Acc>(args.temperature);
}

// The entropy's part, -grad_entropy p (log p + H) = grad_entropy p ((m - x) - gap), is added to the others.
template <class Acc>
DETLOGP_FN Acc add_entropy_gradient(Acc others, Acc p, Acc distance, Acc gap, Acc grad_entropy) {
  return fused_multiply_add(grad_entropy, p * (distance - gap), others);
}

// c p (u - e), from left to right.
template <class Acc>
DETLOGP_FN Acc second_order_element(Acc c, Acc p, Acc u, Acc e) {
  return (c * p) * (u - e);
}

}  // namespace detlogp
