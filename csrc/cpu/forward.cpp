// Forward on the CPU.
//
// Computes       logp[r] = x[r, t] - m - log(s), lse[r] = m + log(s), and m, log(s) for the backward;
//                where asked, of x / temperature, and the entropy log(s) + sum_v e (m - x) / s
// Order          core/lanes.h: B lanes, each in column order, then a fixed tree; one thread a row
// Accuracy       detlogp.testing.logp_error_bound
// Special cases  core/row.h
// Source         core/exp.h, core/log.h; vectorised by the compiler, whose lanes are the contract's
#include "core/exp.h"
#include "core/log.h"
#include "core/row.h"
#include "cpu/lanes.h"
#include "cpu/paths.h"
#include "cpu/row_reader.h"

namespace detlogp::cpu::DETLOGP_CPU_PATH {
namespace {

// A max has no order, so kMaxLanes independent ones are as good as any.
template <class T, class Acc>
DETLOGP_FN Acc find_max(RowReader<T>& reader, int64_t vocab) {
  Acc lane[kMaxLanes];
  for (int k = 0; k < kMaxLanes; ++k) {
    lane[k] = lowest<Acc>();
  }
  for_each_block(vocab, [&](int64_t column, int count) {
    const T* block = RowReader<T>::block(reader, column, count);
    for (int k = 0; k < count; ++k) {
      const Acc x = static_cast<Acc>(widen(block[k]));
      lane[k] = x > lane[k] ? x : lane[k];  // false for NaN
    }
  });
  Acc result = lowest<Acc>();
  for (int k = 0; k < kMaxLanes; ++k) {
    result = lane[k] > result ? lane[k] : result;
  }
  return result;
}

template <class T>
NextRow<T> next_row(const Rows& rows, int64_t row, int64_t last) {
  if (row + 1 >= last || rows.column_stride != 1 || !Rows::scored(rows, row + 1)) {
    return {nullptr};
  }
  return {static_cast<const T*>(rows.logits) + RowLayout::offset(rows.layout, row + 1)};
}

// The entropy's lanes beside those of the sum (core/row.h has the order).
template <class Acc>
struct EntropyLanes {
  Acc part[kMaxLanes] = {};
  Acc total[kMaxLanes] = {};
  int parts = 0;

  // `term(k)` is e, `distance(k)` m - x, of the next column of lane k < count.
  template <class Term, class Distance>
  DETLOGP_FN void add(EntropyLanes& lanes, int count, const Term& term, const Distance& distance) {
    for (int k = 0; k < count; ++k) {
      lanes.part[k] = fused_multiply_add(term(k), distance(k), lanes.part[k]);
    }
    if (++lanes.parts == kEntropyGroup) {
      flush(lanes);
    }
  }

  DETLOGP_FN void flush(EntropyLanes& lanes) {
    for (int k = 0; k < kMaxLanes; ++k) {
      lanes.total[k] += lanes.part[k];
      lanes.part[k] = 0;
    }
    lanes.parts = 0;
  }
};

template <class Acc>
struct RowSums {
  Acc sum;
  Acc gap;  // sum_v e (m - x) / sum
};

// Where more is asked for: logits divided by a temperature, or the entropy.
template <class T, class Acc>
RowSums<Acc> general_sums(RowReader<T>& reader, int64_t vocab, Acc row_max, Acc temperature) {
  EntropyLanes<Acc> entropy;
  const Acc sum = sum_in_lanes<Acc>(vocab, [&](Acc* lane, int64_t column, int count) {
    const T* block = RowReader<T>::block(reader, column, count);
    Acc x[kMaxLanes];
    Acc e[kMaxLanes];
    for (int k = 0; k < count; ++k) {
      x[k] = static_cast<Acc>(widen(block[k])) / temperature;
      const Exponential<Acc> parts = split_exp(x[k] - row_max);
      lane[k] = fused_multiply_add(parts.scale, parts.fraction, lane[k]);
      e[k] = parts.scale * parts.fraction;
    }
    EntropyLanes<Acc>::add(
        entropy, count, [&](int k) { return e[k]; },
        [&](int k) { return distance_below_max(row_max, x[k]); });
  });
  EntropyLanes<Acc>::flush(entropy);
  return {sum, fold_lanes(entropy.total, lane_count(vocab)) / sum};
}

template <class T, class Acc>
RowSums<Acc> plain_sums(RowReader<T>& reader, int64_t vocab, Acc row_max, const NextRow<T>& next) {
  const Acc sum = sum_in_lanes<Acc>(vocab, [&](Acc* lane, int64_t column, int count) {
    const T* block = RowReader<T>::block(reader, column, count);
    NextRow<T>::prefetch(next, column, count);
    for (int k = 0; k < count; ++k) {
      lane[k] = add_exp(lane[k], static_cast<Acc>(widen(block[k])) - row_max);
    }
  });
  return {sum, 0};
}

template <class T, class Acc>
void score_row(const ForwardArgs& args, int64_t row, const NextRow<T>& next) {
  const Rows& rows = args.rows;
  if (!Rows::scored(rows, row)) {
    store_skipped_row<Acc>(args, row);
    return;
  }
  RowReader<T> reader;
  open_row(reader, rows, row);
  const Acc temperature =
      static_cast<Acc>(args.temperature);  // 1 for plain rows, and changes no bit
  const Acc row_max = max_of_quotients(find_max<T, Acc>(reader, rows.vocab), temperature);
  const RowSums<Acc> sums = ForwardArgs::is_general(args)
                                ? general_sums<T, Acc>(reader, rows.vocab, row_max, temperature)
                                : plain_sums<T, Acc>(reader, rows.vocab, row_max, next);
  const T target = reader.row[rows.token_ids[row] * rows.column_stride];
  const Acc x = static_cast<Acc>(widen(target)) / temperature;
  store_scored_row(args, row, x, row_max, log_sum(sums.sum), sums.gap);
}

}  // namespace

template <class Acc>
void forward(const ForwardArgs& args, int64_t first, int64_t last) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    for (int64_t row = first; row < last; ++row) {
      score_row<T, Acc>(args, row, next_row<T>(args.rows, row, last));
    }
  });
}

template void forward<float>(const ForwardArgs&, int64_t, int64_t);
template void forward<double>(const ForwardArgs&, int64_t, int64_t);

}  // namespace detlogp::cpu::DETLOGP_CPU_PATH
