// The softmax of each row on the CPU.
//
// Computes       p[r, v] = exp((x - m) - log(s)), m and log(s) given
// Order          element by element: no sum
// Accuracy       relative u (2 log(1/p) + H + V/B + 12) against the exact softmax, u = 2^-24 (2^-53)
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         docs/contract.md
#include "core/exp.h"
#include "core/row.h"
#include "cpu/paths.h"
#include "cpu/row_reader.h"

namespace detlogp::cpu::DETLOGP_CPU_PATH {
namespace {

template <class T, class Acc>
void normalize_row(const ProbabilityArgs& args, int64_t row) {
  const Rows& rows = args.rows;
  Acc* output = static_cast<Acc*>(args.probability) + row * rows.vocab;
  if (!Rows::scored(rows, row)) {
    memset(output, 0, static_cast<size_t>(rows.vocab) * sizeof(Acc));
    return;
  }
  const Acc row_max = per_row<Acc>(args.row_max, row);
  const Acc log_sum = log_sum_of<Acc>(args, row);
  RowReader<T> reader;
  open_row(reader, rows, row);
  for_each_block(rows.vocab, [&](int64_t column, int count) {
    const T* block = RowReader<T>::block(reader, column, count);
    for (int k = 0; k < count; ++k) {
      const Acc x = static_cast<Acc>(widen(block[k]));
      output[column + k] = exp_nonpositive((x - row_max) - log_sum);
    }
  });
}

}  // namespace

template <class Acc>
void probability(const ProbabilityArgs& args, int64_t first, int64_t last) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    for (int64_t row = first; row < last; ++row) {
      normalize_row<decltype(zero), Acc>(args, row);
    }
  });
}

template void probability<float>(const ProbabilityArgs&, int64_t, int64_t);
template void probability<double>(const ProbabilityArgs&, int64_t, int64_t);

}  // namespace detlogp::cpu::DETLOGP_CPU_PATH
