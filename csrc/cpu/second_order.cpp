// The vjp of the first-order gradient on the CPU: a Hessian-vector product in one kernel.
//
// Computes       e[r] = sum_v p[r, v] u[r, v]; grad_logits = (grad_lse - grad_logp) p (u - e),
//                grad_grad_logp = u[r, t] - e, grad_grad_lse = e
// Order          core/lanes.h for e, each term by one fused multiply-add; the rest by element
// Accuracy       e: absolute, about u (V/B + 12) sum_v p |u|, u = 2^-24 (2^-53)
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         dp = p (dx - sum_v p dx), in grad_logp (onehot - p) + grad_lse p
#include "core/exp.h"
#include "core/row.h"
#include "cpu/lanes.h"
#include "cpu/paths.h"
#include "cpu/row_reader.h"

namespace detlogp::cpu::DETLOGP_CPU_PATH {
namespace {

template <class T, class Acc>
void differentiate_row(const SecondOrderArgs& args, int64_t row) {
  const Rows& rows = args.rows;
  T* output = static_cast<T*>(args.grad_logits) + row * rows.vocab;
  auto* grad_grad_logp = static_cast<Acc*>(args.grad_grad_logp);
  auto* grad_grad_lse = static_cast<Acc*>(args.grad_grad_lse);
  if (!Rows::scored(rows, row)) {
    memset(output, 0, static_cast<size_t>(rows.vocab) * sizeof(T));
    grad_grad_logp[row] = 0;
    grad_grad_lse[row] = 0;
    return;
  }
  const Acc row_max = per_row<Acc>(args.row_max, row);
  const Acc log_sum = log_sum_of<Acc>(args, row);
  const Acc c = per_row<Acc>(args.grad_lse, row) - per_row<Acc>(args.grad_logp, row);
  RowReader<T> logits;
  RowReader<T> cotangent;
  open_row(logits, rows, row);
  open_row(cotangent, args.cotangent, row);
  const auto add_block = [&](Acc* lane, int64_t column, int count) {
    const T* x = RowReader<T>::block(logits, column, count);
    const T* u = RowReader<T>::block(cotangent, column, count);
    for (int k = 0; k < count; ++k) {
      const Acc p = exp_nonpositive((static_cast<Acc>(widen(x[k])) - row_max) - log_sum);
      lane[k] = fused_multiply_add(p, static_cast<Acc>(widen(u[k])), lane[k]);
    }
  };
  const Acc mean = args.mean == nullptr ? sum_in_lanes<Acc>(rows.vocab, add_block)
                                        : per_row<Acc>(args.mean, row);
  for_each_block(rows.vocab, [&](int64_t column, int count) {
    const T* x = RowReader<T>::block(logits, column, count);
    const T* u = RowReader<T>::block(cotangent, column, count);
    for (int k = 0; k < count; ++k) {
      const Acc p = exp_nonpositive((static_cast<Acc>(widen(x[k])) - row_max) - log_sum);
      output[column + k] =
          Narrow<T>::from(second_order_element(c, p, static_cast<Acc>(widen(u[k])), mean));
    }
  });
  const int64_t column = Rows::target(rows, row);
  const bool is_here = Rows::has_column(rows, column);
  const T target = is_here ? cotangent.row[column * cotangent.column_stride] : T{};
  grad_grad_logp[row] = static_cast<Acc>(widen(target)) - mean;
  grad_grad_lse[row] = mean;
}

}  // namespace

template <class Acc>
void second_order(const SecondOrderArgs& args, int64_t first, int64_t last) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    for (int64_t row = first; row < last; ++row) {
      differentiate_row<decltype(zero), Acc>(args, row);
    }
  });
}

template void second_order<float>(const SecondOrderArgs&, int64_t, int64_t);
template void second_order<double>(const SecondOrderArgs&, int64_t, int64_t);

}  // namespace detlogp::cpu::DETLOGP_CPU_PATH
