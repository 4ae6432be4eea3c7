#include "derivatives.h"

#include "run.h"

namespace detlogp {

Tensor probability(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    int64_t first_column, std::optional<int64_t> vocab_size) {
  const ScalarType compute_dtype = row_max.scalar_type();
  ProbabilityArgs args{};
  args.rows = to_rows(logits, token_ids, mask, first_column, vocab_size);
  const Arithmetic arithmetic = set_statistics(args, row_max, log_sum, logits);
  Tensor result = empty_matrix(logits, compute_dtype);
  args.probability = result.data_ptr();
  run(logits, args, args.rows.count, args.rows.vocab, arithmetic, cpu::kernels().probability,
      DETLOGP_LAUNCH(probability));
  return result;
}

Tensor row_sum(Tensor values) {
  const Arithmetic arithmetic =
      is_double(values.scalar_type()) ? Arithmetic::float64 : Arithmetic::float32;
  const int64_t dims = values.dim();
  STD_TORCH_CHECK(dims >= 1, "detlogp: values must have at least one dimension, got 0");
  RowSumArgs args{};
  args.vocab = values.size(dims - 1);
  STD_TORCH_CHECK(args.vocab >= 1, "detlogp: values must have at least one column, got 0");
  args.count = values.numel() / args.vocab;
  args.values = to_operand(values, values, "values");
  Tensor result = empty_per_row(values, values.scalar_type());
  args.sums = result.data_ptr();
  run(values, args, args.count, args.vocab, arithmetic, cpu::kernels().row_sum,
      DETLOGP_LAUNCH(row_sum));
  return result;
}

std::tuple<Tensor, Tensor> logp_tangent(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    Tensor tangent) {
  const ScalarType compute_dtype = row_max.scalar_type();
  TangentArgs args{};
  args.rows = to_rows(logits, token_ids, mask);
  const Arithmetic arithmetic = set_statistics(args, row_max, log_sum, logits);
  STD_TORCH_CHECK(
      arithmetic != Arithmetic::exact,
      "detlogp: the tangent of the exact contract is made of exact_row_sum");
  args.tangent = to_operand(tangent, logits, "tangent");
  Tensor of_logp = empty_per_row(logits, compute_dtype);
  Tensor of_lse = empty_per_row(logits, compute_dtype);
  args.logp_tangent = of_logp.data_ptr();
  args.lse_tangent = of_lse.data_ptr();
  run(logits, args, args.rows.count, args.rows.vocab, arithmetic, cpu::kernels().tangent,
      DETLOGP_LAUNCH(tangent));
  return {of_logp, of_lse};
}

std::tuple<Tensor, Tensor, Tensor> logp_second_order(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    std::optional<Tensor> grad_logp, std::optional<Tensor> grad_lse, Tensor cotangent,
    std::optional<Tensor> mean, int64_t first_column, std::optional<int64_t> vocab_size) {
  const ScalarType compute_dtype = row_max.scalar_type();
  SecondOrderArgs args{};
  args.rows = to_rows(logits, token_ids, mask, first_column, vocab_size);
  const Arithmetic arithmetic = set_statistics(args, row_max, log_sum, logits);
  STD_TORCH_CHECK(
      mean.has_value() == (arithmetic == Arithmetic::exact),
      "detlogp: mean must be given where the statistics are the exact contract's, and only there");
  args.mean = optional_per_row_data(mean, row_max, logits, "mean");
  args.grad_logp = optional_per_row_data(grad_logp, row_max, logits, "grad_logp");
  args.grad_lse = optional_per_row_data(grad_lse, row_max, logits, "grad_lse");
  args.cotangent = to_operand(cotangent, logits, "cotangent");
  Tensor grad_logits = empty_matrix(logits, logits.scalar_type());
  Tensor grad_grad_logp = empty_per_row(logits, compute_dtype);
  Tensor grad_grad_lse = empty_per_row(logits, compute_dtype);
  args.grad_logits = grad_logits.data_ptr();
  args.grad_grad_logp = grad_grad_logp.data_ptr();
  args.grad_grad_lse = grad_grad_lse.data_ptr();
  run(logits, args, args.rows.count, args.rows.vocab, arithmetic, cpu::kernels().second_order,
      DETLOGP_LAUNCH(second_order));
  return {grad_logits, grad_grad_logp, grad_grad_lse};
}

}  // namespace detlogp
