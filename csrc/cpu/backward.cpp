// First-order gradient on the CPU.
//
// Computes       grad_logits = grad_logp (onehot - p) + grad_lse p, p = exp((x - m) - log(s))
// Order          element by element: no sum
// Accuracy       detlogp.testing.gradient_error_bound; m and log(s) stay apart, so that a common
//                offset costs nothing
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         d logp = dx[t] - sum_v p[v] dx[v], d lse = sum_v p[v] dx[v]
#include "core/exp.h"
#include "core/row.h"
#include "cpu/paths.h"
#include "cpu/row_reader.h"

namespace detlogp::cpu::DETLOGP_CPU_PATH {
namespace {

template <class Acc>
struct RowGradient {
  Acc row_max;
  Acc log_sum;
  Acc grad;
  Acc grad_lse;
  bool has_lse;
};

template <class T, class Acc>
DETLOGP_FN T element(const RowGradient<Acc>& g, T x, bool is_target) {
  const Acc p = exp_nonpositive((static_cast<Acc>(widen(x)) - g.row_max) - g.log_sum);
  return Narrow<T>::from(gradient(is_target, p, g.grad, g.grad_lse, g.has_lse));
}

template <class T, class Acc>
void differentiate_row(const BackwardArgs& args, int64_t row) {
  const Rows& rows = args.rows;
  T* output = static_cast<T*>(args.grad_logits) + RowLayout::offset(args.grad_layout, row);
  if (!Rows::scored(rows, row)) {
    memset(output, 0, static_cast<size_t>(rows.vocab) * sizeof(T));
    return;
  }
  const RowGradient<Acc> g{
      per_row<Acc>(args.row_max, row), log_sum_of<Acc>(args, row),
      per_row<Acc>(args.grad_logp, row), per_row<Acc>(args.grad_lse, row),
      args.grad_lse != nullptr};
  RowReader<T> reader;
  open_row(reader, rows, row);
  const int64_t target = rows.token_ids[row];
  const T at_target = reader.row[target * rows.column_stride];
  for_each_block(rows.vocab, [&](int64_t column, int count) {
    const T* block = RowReader<T>::block(reader, column, count);
    // Where the output is the input, an element is read before it is written, and by nobody after.
#pragma GCC ivdep
    for (int k = 0; k < count; ++k) {
      output[column + k] = element<T, Acc>(g, block[k], false);
    }
  });
  // Written once more, so that the loop above has no comparison in it.
  output[target] = element<T, Acc>(g, at_target, true);
}

}  // namespace

template <class Acc>
void backward(const BackwardArgs& args, int64_t first, int64_t last) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    for (int64_t row = first; row < last; ++row) {
      differentiate_row<decltype(zero), Acc>(args, row);
    }
  });
}

template void backward<float>(const BackwardArgs&, int64_t, int64_t);
template void backward<double>(const BackwardArgs&, int64_t, int64_t);

}  // namespace detlogp::cpu::DETLOGP_CPU_PATH
