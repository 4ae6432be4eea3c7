// One level of forward mode on the CPU.
//
// Computes       lse_tangent[r] = sum_v p[r, v] dx[r, v], logp_tangent[r] = dx[r, t] - lse_tangent[r]
// Order          core/lanes.h; each term enters its lane by one fused multiply-add
// Accuracy       absolute, about u (V/B + 12) sum_v p |dx|, u = 2^-24 (2^-53)
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         d lse = sum_v p dx
#include "core/exp.h"
#include "core/row.h"
#include "cpu/lanes.h"
#include "cpu/paths.h"
#include "cpu/row_reader.h"

namespace detlogp::cpu::DETLOGP_CPU_PATH {
namespace {

template <class T, class Acc>
void push_row(const TangentArgs& args, int64_t row) {
  const Rows& rows = args.rows;
  auto* logp_tangent = static_cast<Acc*>(args.logp_tangent);
  auto* lse_tangent = static_cast<Acc*>(args.lse_tangent);
  if (!Rows::scored(rows, row)) {
    logp_tangent[row] = 0;
    lse_tangent[row] = 0;
    return;
  }
  const Acc row_max = per_row<Acc>(args.row_max, row);
  const Acc log_sum = log_sum_of<Acc>(args, row);
  RowReader<T> logits;
  RowReader<T> tangent;
  open_row(logits, rows, row);
  open_row(tangent, args.tangent, row);
  const Acc mean = sum_in_lanes<Acc>(rows.vocab, [&](Acc* lane, int64_t column, int count) {
    const T* x = RowReader<T>::block(logits, column, count);
    const T* dx = RowReader<T>::block(tangent, column, count);
    for (int k = 0; k < count; ++k) {
      const Acc p = exp_nonpositive((static_cast<Acc>(widen(x[k])) - row_max) - log_sum);
      lane[k] = fused_multiply_add(p, static_cast<Acc>(widen(dx[k])), lane[k]);
    }
  });
  const T target = tangent.row[rows.token_ids[row] * tangent.column_stride];
  logp_tangent[row] = static_cast<Acc>(widen(target)) - mean;
  lse_tangent[row] = mean;
}

}  // namespace

template <class Acc>
void tangent(const TangentArgs& args, int64_t first, int64_t last) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    for (int64_t row = first; row < last; ++row) {
      push_row<decltype(zero), Acc>(args, row);
    }
  });
}

template void tangent<float>(const TangentArgs&, int64_t, int64_t);
template void tangent<double>(const TangentArgs&, int64_t, int64_t);

}  // namespace detlogp::cpu::DETLOGP_CPU_PATH
