// Forward on the CPU.
//
// Computes       logp[r] = x[r, t] - m - log(s), lse[r] = m + log(s), and m, log(s) for the backward
// Order          core/lanes.h: B lanes, each in column order, then a fixed tree; one thread a row
// Accuracy       detlogp.testing.logp_error_bound
// Special cases  core/row.h
// Source         core/exp.h, core/log.h; vectorised by the compiler, whose lanes are the contract's
#include "core/exp.h"
#include "core/log.h"
#include "core/row.h"
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
  int64_t column = 0;
  for (; column + kMaxLanes <= vocab; column += kMaxLanes) {
    const T* block = RowReader<T>::block(reader, column, kMaxLanes);
    for (int k = 0; k < kMaxLanes; ++k) {
      const Acc x = static_cast<Acc>(widen(block[k]));
      lane[k] = x > lane[k] ? x : lane[k];  // false for NaN
    }
  }
  const int rest = static_cast<int>(vocab - column);
  const T* block = RowReader<T>::block(reader, column, rest);
  for (int k = 0; k < rest; ++k) {
    const Acc x = static_cast<Acc>(widen(block[k]));
    lane[k] = x > lane[k] ? x : lane[k];
  }
  Acc result = lowest<Acc>();
  for (int k = 0; k < kMaxLanes; ++k) {
    result = lane[k] > result ? lane[k] : result;
  }
  return result;
}

template <class T, class Acc, int B>
DETLOGP_FN Acc sum_exp(RowReader<T>& reader, int64_t vocab, Acc row_max) {
  Acc lane[B] = {};
  int64_t column = 0;
  for (; column + B <= vocab; column += B) {
    const T* block = RowReader<T>::block(reader, column, B);
    for (int k = 0; k < B; ++k) {
      lane[k] = add_exp(lane[k], static_cast<Acc>(widen(block[k])) - row_max);
    }
  }
  const int rest = static_cast<int>(vocab - column);
  const T* block = RowReader<T>::block(reader, column, rest);
  for (int k = 0; k < rest; ++k) {
    lane[k] = add_exp(lane[k], static_cast<Acc>(widen(block[k])) - row_max);
  }
  return fold_lanes(lane, B);
}

template <class T, class Acc>
void score_row(const ForwardArgs& args, int64_t row) {
  const Rows& rows = args.rows;
  if (!Rows::selected(rows, row) || !Rows::valid(rows, row)) {
    store_skipped_row<Acc>(args, row);
    return;
  }
  RowReader<T> reader;
  reader.row = row_pointer<T>(rows, row);
  reader.column_stride = rows.column_stride;
  const Acc row_max = find_max<T, Acc>(reader, rows.vocab);
  const int lanes = lane_count(rows.vocab);
  const Acc sum = lanes == 128   ? sum_exp<T, Acc, 128>(reader, rows.vocab, row_max)
                  : lanes == 256 ? sum_exp<T, Acc, 256>(reader, rows.vocab, row_max)
                                 : sum_exp<T, Acc, 512>(reader, rows.vocab, row_max);
  const T target = reader.row[rows.token_ids[row] * rows.column_stride];
  store_scored_row(args, row, static_cast<Acc>(widen(target)), row_max, log_sum(sum));
}

}  // namespace

template <class Acc>
void forward(const ForwardArgs& args, int64_t first, int64_t last) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    for (int64_t row = first; row < last; ++row) {
      score_row<decltype(zero), Acc>(args, row);
    }
  });
}

template void forward<float>(const ForwardArgs&, int64_t, int64_t);
template void forward<double>(const ForwardArgs&, int64_t, int64_t);

}  // namespace detlogp::cpu::DETLOGP_CPU_PATH
