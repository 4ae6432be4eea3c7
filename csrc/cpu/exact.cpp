// The exact contract on the CPU: forward, and first-order gradient.
//
// Computes       logp[r] = x[r, t] - m - log(s), lse[r] = m + log(s), and m, log(s) for the backward;
//                grad_logits = grad_logp (onehot - p) + grad_lse p
// Order          none: the terms are whole numbers (core/exact.h)
// Accuracy       detlogp.testing.logp_error_bound, gradient_error_bound
// Special cases  core/row.h
// Source         core/exact.h
#include "cpu/exact_row.h"
#include "cpu/gradient_rows.h"
#include "cpu/paths.h"

namespace detlogp::cpu::DETLOGP_CPU_PATH {
namespace {

template <class T>
void score_row(const ForwardArgs& args, int64_t row) {
  const Rows& rows = args.rows;
  if (!Rows::scored(rows, row)) {
    store_skipped_row<float>(args, row);
    return;
  }
  RowReader<T> reader;
  open_row(reader, rows, row);
  const float row_max = find_max(reader, rows.vocab);
  const ExactScale scale = scale_of_sum(row_max, log2_quanta(rows.vocab));
  const uint64_t sum = sum_quanta(reader, rows.vocab, scale);
  const T target = reader.row[Rows::target(rows, row) * rows.column_stride];
  store_exact_row(args, row, to_float(target), row_max, scale, sum);
}

struct RowGradient {
  ExactProbability probability;
  float grad;
  float grad_lse;
  bool has_lse;

  template <class T>
  DETLOGP_FN RowGradient load(const BackwardArgs& args, int64_t row, T at_target) {
    return {
        exact_probability(
            per_row<float>(args.row_max, row), log_sum_of<double>(args, row), to_float(at_target)),
        per_row<float>(args.grad_logp, row), per_row<float>(args.grad_lse, row),
        args.grad_lse != nullptr};
  }

  template <class T>
  DETLOGP_FN T element(const RowGradient& g, T x, bool is_target) {
    return Narrow<T>::from(
        exact_gradient(g.probability, to_float(x), is_target, g.grad, g.grad_lse, g.has_lse));
  }
};

}  // namespace

template <>
void forward<Exact>(const ForwardArgs& args, int64_t first, int64_t last) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    for (int64_t row = first; row < last; ++row) {
      score_row<decltype(zero)>(args, row);
    }
  });
}

template <>
void backward<Exact>(const BackwardArgs& args, int64_t first, int64_t last) {
  differentiate_rows<RowGradient>(args, first, last);
}

}  // namespace detlogp::cpu::DETLOGP_CPU_PATH
