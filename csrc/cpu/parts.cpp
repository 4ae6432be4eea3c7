// The exact contract in steps on the CPU, for rows whose columns come in parts.
//
// Computes       keys of the max and of the target, and the sum of quanta, of a part's logits; keys of
//                the extremes, and the sum in quanta, of its terms; and what is made of them
// Order          none: maxima of keys, sums of whole numbers (core/parts.h)
// Accuracy       core/exact.h, core/parts.h
// Special cases  a row that is not scored is not read, and its keys and sums stay
// Source         docs/exact.md
#include "core/parts.h"

#include "core/exp.h"
#include "cpu/exact_row.h"
#include "cpu/paths.h"

namespace detlogp::cpu::DETLOGP_CPU_PATH {
namespace {

void raise(int32_t& key, float value) {
  key = larger_key(key, to_key(value));
}

// Calls f(terms, count) for blocks of row `row`: the operand's elements, or p times them.
template <class F>
void for_each_terms(const PartArgs& args, int64_t row, const F& f) {
  const Rows& rows = args.rows;
  if (rows.logits == nullptr) {
    RowReader<float> reader;
    open_row(reader, args.operand, row);
    for_each_block(rows.vocab, [&](int64_t column, int count) {
      f(RowReader<float>::block(reader, column, count), count);
    });
    return;
  }
  const float row_max = per_row<float>(args.row_max, row);
  const float log_sum = static_cast<float>(per_row<double>(args.log_sum, row));
  visit_dtype(rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    RowReader<T> logits;
    RowReader<T> operand;
    open_row(logits, rows, row);
    open_row(operand, args.operand, row);
    float terms[kMaxLanes];
    for_each_block(rows.vocab, [&](int64_t column, int count) {
      const T* x = RowReader<T>::block(logits, column, count);
      const T* u = RowReader<T>::block(operand, column, count);
      for (int k = 0; k < count; ++k) {
        terms[k] = exp_nonpositive((to_float(x[k]) - row_max) - log_sum) * to_float(u[k]);
      }
      f(&terms[0], count);
    });
  });
}

// Every row where there are no logits: terms know nothing of ids.
bool counts(const PartArgs& args, int64_t row) {
  return args.rows.logits == nullptr || Rows::scored(args.rows, row);
}

}  // namespace

void exact_max(const PartArgs& args, int64_t first, int64_t last) {
  const Rows& rows = args.rows;
  visit_dtype(rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t row = first; row < last; ++row) {
      if (!Rows::scored(rows, row)) {
        continue;
      }
      RowReader<T> reader;
      open_row(reader, rows, row);
      raise(args.keys[row], find_max(reader, rows.vocab));
      const int64_t target = Rows::target(rows, row);
      if (Rows::has_column(rows, target)) {
        raise(args.keys[rows.count + row], to_float(reader.row[target * rows.column_stride]));
      }
    }
  });
}

void exact_sum(const PartArgs& args, int64_t first, int64_t last) {
  const Rows& rows = args.rows;
  visit_dtype(rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t row = first; row < last; ++row) {
      if (!Rows::scored(rows, row)) {
        continue;
      }
      RowReader<T> reader;
      open_row(reader, rows, row);
      args.sums[row] += sum_quanta(reader, rows.vocab, scale_of_part(args, row));
    }
  });
}

void exact_extremes(const PartArgs& args, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    if (!counts(args, row)) {
      continue;
    }
    int32_t largest[kMaxLanes] = {};
    int32_t negated[kMaxLanes] = {};
    for_each_terms(args, row, [&](const float* terms, int count) {
      for (int k = 0; k < count; ++k) {
        largest[k] = larger_key(largest[k], to_key(terms[k]));
        negated[k] = larger_key(negated[k], to_key(-terms[k]));
      }
    });
    for (int k = 0; k < kMaxLanes; ++k) {
      args.keys[row] = larger_key(args.keys[row], largest[k]);
      args.keys[args.rows.count + row] = larger_key(args.keys[args.rows.count + row], negated[k]);
    }
  }
}

void exact_row_sum(const PartArgs& args, int64_t first, int64_t last) {
  const Rows& rows = args.rows;
  for (int64_t row = first; row < last; ++row) {
    if (!counts(args, row)) {
      continue;
    }
    const float factor =
        power_of_two(term_scale(args.scale, rows.count, row, rows.whole_vocab).exponent);
    uint64_t lane[kMaxLanes] = {};
    for_each_terms(args, row, [&](const float* terms, int count) {
      for (int k = 0; k < count; ++k) {
        lane[k] += term_quanta(factor, terms[k]);
      }
    });
    for (const uint64_t part : lane) {
      args.sums[row] += part;
    }
  }
}

void exact_finish(const FinishArgs& args, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    finish_row(args, row);
  }
}

void exact_total(const TotalArgs& args, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    finish_total(args, row);
  }
}

}  // namespace detlogp::cpu::DETLOGP_CPU_PATH
