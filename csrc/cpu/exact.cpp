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

struct RowSums {
  uint64_t sum;
  uint64_t of_entropy;
};

// Where more is asked for: logits divided by a temperature, or the entropy.
template <class T>
RowSums general_sums(
    RowReader<T>& reader, int64_t vocab, float row_max, float temperature,
    const ExactScale& scale) {
  uint64_t lane[kMaxLanes] = {};
  uint64_t of_entropy[kMaxLanes] = {};
  for_each_block(vocab, [&](int64_t column, int count) {
    const T* block = RowReader<T>::block(reader, column, count);
    for (int k = 0; k < count; ++k) {
      const float x = to_float(block[k]) / temperature;
      const float term = exact_exp(scale, x);
      lane[k] += to_quanta(term);
      of_entropy[k] += entropy_quanta(term, row_max, x);
    }
  });
  RowSums sums{};
  for (int k = 0; k < kMaxLanes; ++k) {
    sums.sum += lane[k];
    sums.of_entropy += of_entropy[k];
  }
  return sums;
}

template <class T>
void score_row(const ForwardArgs& args, int64_t row) {
  const Rows& rows = args.rows;
  if (!Rows::scored(rows, row)) {
    store_skipped_row<float>(args, row);
    return;
  }
  RowReader<T> reader;
  open_row(reader, rows, row);
  const bool is_general = ForwardArgs::is_general(args);
  const float temperature = static_cast<float>(args.temperature);  // 1 for plain rows
  // Division by a positive number keeps the order, so the max of the quotients is the max's quotient.
  const float row_max = find_max(reader, rows.vocab) / temperature;
  const ExactScale scale = scale_of_sum(row_max, log2_quanta(rows.vocab), is_general);
  const RowSums sums = is_general ? general_sums(reader, rows.vocab, row_max, temperature, scale)
                                  : RowSums{sum_quanta(reader, rows.vocab, scale), 0};
  const float x = to_float(reader.row[Rows::target(rows, row) * rows.column_stride]) / temperature;
  store_exact_row(args, row, x, row_max, scale, sums.sum, sums.of_entropy);
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

struct GeneralRowGradient {
  RowGradient plain;
  float row_max;
  float gap;
  float grad_entropy;
  float temperature;

  template <class T>
  DETLOGP_FN GeneralRowGradient load(const BackwardArgs& args, int64_t row, T at_target) {
    const float temperature = static_cast<float>(args.temperature);
    RowGradient plain = RowGradient::load(args, row, to_float(at_target) / temperature);
    plain.grad = cotangent<float>(args, args.grad_logp, row);
    plain.grad_lse = cotangent<float>(args, args.grad_lse, row);
    return {
        plain, per_row<float>(args.row_max, row), per_row<float>(args.gap, row),
        cotangent<float>(args, args.grad_entropy, row), temperature};
  }

  template <class T>
  DETLOGP_FN T element(const GeneralRowGradient& g, T logit, bool is_target) {
    const RowGradient& plain = g.plain;
    const float x = to_float(logit) / g.temperature;
    const float of_plain =
        exact_gradient(plain.probability, x, is_target, plain.grad, plain.grad_lse, plain.has_lse);
    const float p = is_target ? plain.probability.of_target : probability_of(plain.probability, x);
    const float distance = distance_below_max(g.row_max, x);
    return Narrow<T>::from(add_entropy_gradient(of_plain, p, distance, g.gap, g.grad_entropy));
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
  if (BackwardArgs::is_general(args)) {
    differentiate_rows<GeneralRowGradient>(args, first, last);
  } else {
    differentiate_rows<RowGradient>(args, first, last);
  }
}

}  // namespace detlogp::cpu::DETLOGP_CPU_PATH
