// The exact contract on the CPU: forward, and first-order gradient.
//
// Computes       logp[r] = x[r, t] - m - log(s), lse[r] = m + log(s), and m, log(s) for the backward;
//                grad_logits = grad_logp (onehot - p) + grad_lse p
// Order          none: the terms are whole numbers (core/exact.h)
// Accuracy       detlogp.testing.logp_error_bound, gradient_error_bound
// Special cases  core/row.h
// Source         core/exact.h
#include "core/exact.h"
#include "cpu/gradient_rows.h"
#include "cpu/paths.h"

namespace detlogp::cpu::DETLOGP_CPU_PATH {
namespace {

template <class T>
DETLOGP_FN float to_float(T x) {
  return static_cast<float>(widen(x));
}

// NaN where the row holds one.
template <class T>
float find_max(RowReader<T>& reader, int64_t vocab) {
  const float minus_infinity = bit_cast<float>(0xff800000u);
  float lane[kMaxLanes];
  uint32_t is_nan[kMaxLanes] = {};
  for (float& value : lane) {
    value = minus_infinity;
  }
  for_each_block(vocab, [&](int64_t column, int count) {
    const T* block = RowReader<T>::block(reader, column, count);
    for (int k = 0; k < count; ++k) {
      const float x = to_float(block[k]);
      lane[k] = x > lane[k] ? x : lane[k];
      is_nan[k] |= x != x ? 1u : 0u;
    }
  });
  float result = minus_infinity;
  uint32_t any_nan = 0;
  for (int k = 0; k < kMaxLanes; ++k) {
    result = lane[k] > result ? lane[k] : result;
    any_nan |= is_nan[k];
  }
  return any_nan != 0 ? bit_cast<float>(0x7fc00000u) : result;
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
  const float row_max = find_max(reader, rows.vocab);
  const ExactScale scale = scale_of_sum(row_max, log2_quanta(rows.vocab));
  uint64_t lane[kMaxLanes] = {};
  for_each_block(rows.vocab, [&](int64_t column, int count) {
    const T* block = RowReader<T>::block(reader, column, count);
    for (int k = 0; k < count; ++k) {
      lane[k] += quanta(scale, to_float(block[k]));
    }
  });
  uint64_t sum = 0;
  for (const uint64_t part : lane) {
    sum += part;
  }
  const T target = reader.row[rows.token_ids[row] * rows.column_stride];
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
