// The first-order gradient's walk over the rows, for both contracts. `G` is what a row's elements share:
//   static G load(const BackwardArgs&, int64_t row, T at_target)
//   static T element(const G&, T x, bool is_target)
#pragma once

#include "core/row.h"
#include "cpu/row_reader.h"

namespace detlogp::cpu {

template <class G, class T>
static void differentiate_row(const BackwardArgs& args, int64_t row) {
  const Rows& rows = args.rows;
  T* output = static_cast<T*>(args.grad_logits) + RowLayout::offset(args.grad_layout, row);
  if (!Rows::scored(rows, row)) {
    memset(output, 0, static_cast<size_t>(rows.vocab) * sizeof(T));
    return;
  }
  RowReader<T> reader;
  open_row(reader, rows, row);
  const int64_t target = Rows::target(rows, row);
  const bool is_here = Rows::has_column(rows, target);
  const T at_target = is_here ? reader.row[target * rows.column_stride] : T{};
  const G g = G::load(args, row, at_target);
  for_each_block(rows.vocab, [&](int64_t column, int count) {
    const T* block = RowReader<T>::block(reader, column, count);
    // Where the output is the input, an element is read before it is written, and by nobody after.
#pragma GCC ivdep
    for (int k = 0; k < count; ++k) {
      output[column + k] = G::element(g, block[k], false);
    }
  });
  // Written once more, so that the loop above has no comparison in it.
  if (is_here) {
    output[target] = G::element(g, at_target, true);
  }
}

template <class G>
static void differentiate_rows(const BackwardArgs& args, int64_t first, int64_t last) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    for (int64_t row = first; row < last; ++row) {
      differentiate_row<G, decltype(zero)>(args, row);
    }
  });
}

}  // namespace detlogp::cpu
