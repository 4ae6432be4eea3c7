#include "parts.h"

#include "run.h"

namespace detlogp {
namespace {

// `like` is a vector of the rows, [...], or a matrix, [..., V], of which the last dimension is left out.
int32_t* keys_data(const Tensor& keys, const Tensor& like, int64_t leading_dims) {
  bool fits = keys.dim() == leading_dims + 1 && keys.size(0) == 2;
  for (int64_t d = 0; fits && d < leading_dims; ++d) {
    fits = keys.size(d + 1) == like.size(d);
  }
  STD_TORCH_CHECK(fits, "detlogp: keys must have the shape [2, ...] of the rows");
  STD_TORCH_CHECK(
      keys.scalar_type() == ScalarType::Int && keys.is_contiguous(),
      "detlogp: keys must be contiguous, and Int, got ",
      torch::headeronly::toString(keys.scalar_type()));
  STD_TORCH_CHECK(same_device(keys, like), "detlogp: keys must be on the rows' device");
  return static_cast<int32_t*>(keys.data_ptr());
}

uint64_t* sums_data(const Tensor& sums, const Tensor& keys) {
  bool fits = sums.dim() + 1 == keys.dim();
  for (int64_t d = 0; fits && d < sums.dim(); ++d) {
    fits = sums.size(d) == keys.size(d + 1);
  }
  STD_TORCH_CHECK(fits, "detlogp: sums must have the rows' shape");
  STD_TORCH_CHECK(
      sums.scalar_type() == ScalarType::Long && sums.is_contiguous(),
      "detlogp: sums must be contiguous, and Long, got ",
      torch::headeronly::toString(sums.scalar_type()));
  STD_TORCH_CHECK(same_device(sums, keys), "detlogp: sums must be on keys' device");
  return static_cast<uint64_t*>(sums.data_ptr());
}

void run_part(
    const Tensor& matrix, const PartArgs& args, cpu::Kernel<PartArgs> on_cpu,
    void (*launch)(const PartArgs&, void* stream)) {
  run(matrix, args, args.rows.count, args.rows.vocab, on_cpu, launch);
}

// Terms: everything but the keys and sums.
PartArgs to_terms(
    const Tensor& operand, const std::optional<Tensor>& logits,
    const std::optional<Tensor>& token_ids, const std::optional<Tensor>& mask,
    const std::optional<Tensor>& row_max, const std::optional<Tensor>& log_sum,
    int64_t vocab_size) {
  PartArgs args{};
  if (logits.has_value()) {
    STD_TORCH_CHECK(
        token_ids.has_value() && row_max.has_value() && log_sum.has_value(),
        "detlogp: token_ids, row_max and log_sum must come with logits");
    args.rows = to_rows(*logits, *token_ids, mask, 0, vocab_size);
    args.row_max = per_row_data(*row_max, ScalarType::Float, *logits, "row_max");
    args.log_sum = per_row_data(*log_sum, ScalarType::Double, *logits, "log_sum");
    args.operand = to_operand(operand, *logits, "operand");
    return args;
  }
  STD_TORCH_CHECK(
      operand.dim() >= 1 && operand.scalar_type() == ScalarType::Float,
      "detlogp: operand must be Float, [..., V], got ",
      torch::headeronly::toString(operand.scalar_type()));
  args.rows.count = row_count(operand);
  args.rows.vocab = operand.size(operand.dim() - 1);
  args.rows.whole_vocab = vocab_size;
  STD_TORCH_CHECK(
      args.rows.vocab <= vocab_size, "detlogp: operand must have at most ", vocab_size,
      " columns, got ", args.rows.vocab);
  args.operand = to_operand(operand, operand, "operand");
  return args;
}

}  // namespace

void exact_max(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t first_column,
    int64_t vocab_size, Tensor keys) {
  PartArgs args{};
  args.rows = to_rows(logits, token_ids, mask, first_column, vocab_size);
  args.keys = keys_data(keys, logits, logits.dim() - 1);
  run_part(logits, args, cpu::kernels().exact_max, DETLOGP_LAUNCH(exact_max));
}

void exact_sum(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t first_column,
    int64_t vocab_size, Tensor keys, Tensor sums) {
  PartArgs args{};
  args.rows = to_rows(logits, token_ids, mask, first_column, vocab_size);
  args.scale = keys_data(keys, logits, logits.dim() - 1);
  args.sums = sums_data(sums, keys);
  run_part(logits, args, cpu::kernels().exact_sum, DETLOGP_LAUNCH(exact_sum));
}

std::tuple<Tensor, Tensor, Tensor, Tensor> exact_finish(
    Tensor keys, Tensor sums, Tensor token_ids, std::optional<Tensor> mask, int64_t vocab_size,
    int64_t dtype, int64_t lse_dtype, bool nan_for_invalid) {
  FinishArgs args{};
  args.keys = keys_data(keys, token_ids, token_ids.dim());
  args.sums = sums_data(sums, keys);
  ForwardArgs& forward = args.forward;
  Rows& rows = forward.rows;
  rows.count = token_ids.numel();
  rows.whole_vocab = vocab_size;
  STD_TORCH_CHECK(
      token_ids.scalar_type() == ScalarType::Long && token_ids.is_contiguous(),
      "detlogp: token_ids must be contiguous, and Long");
  rows.token_ids = static_cast<const int64_t*>(token_ids.data_ptr());
  if (mask.has_value()) {
    STD_TORCH_CHECK(
        mask->scalar_type() == ScalarType::Bool && mask->is_contiguous() &&
            mask->numel() == rows.count && same_device(*mask, token_ids),
        "detlogp: mask must be contiguous, and Bool, of token_ids' shape and device");
    rows.mask = static_cast<const bool*>(mask->data_ptr());
  }
  forward.nan_for_invalid = nan_for_invalid;
  forward.logp_type = checked_dtype(dtype, "dtype");
  forward.lse_type = checked_dtype(lse_dtype, "lse_dtype");
  forward.log_sum_is_double = true;
  const auto vector = [&](ScalarType type) {
    return empty_on(token_ids, token_ids.sizes().data(), token_ids.dim(), type);
  };
  Tensor logp = vector(scalar_type(forward.logp_type));
  Tensor lse = vector(scalar_type(forward.lse_type));
  Tensor row_max = vector(ScalarType::Float);
  Tensor log_sum = vector(ScalarType::Double);
  forward.logp = logp.data_ptr();
  forward.lse = lse.data_ptr();
  forward.row_max = row_max.data_ptr();
  forward.log_sum = log_sum.data_ptr();
  run(keys, args, rows.count, 1, cpu::kernels().exact_finish, DETLOGP_LAUNCH(exact_finish));
  return {logp, lse, row_max, log_sum};
}

void exact_extremes(
    Tensor operand, std::optional<Tensor> logits, std::optional<Tensor> token_ids,
    std::optional<Tensor> mask, std::optional<Tensor> row_max, std::optional<Tensor> log_sum,
    int64_t vocab_size, Tensor keys) {
  PartArgs args = to_terms(operand, logits, token_ids, mask, row_max, log_sum, vocab_size);
  args.keys = keys_data(keys, operand, operand.dim() - 1);
  run_part(operand, args, cpu::kernels().exact_extremes, DETLOGP_LAUNCH(exact_extremes));
}

void exact_row_sum(
    Tensor operand, std::optional<Tensor> logits, std::optional<Tensor> token_ids,
    std::optional<Tensor> mask, std::optional<Tensor> row_max, std::optional<Tensor> log_sum,
    int64_t vocab_size, Tensor keys, Tensor sums) {
  PartArgs args = to_terms(operand, logits, token_ids, mask, row_max, log_sum, vocab_size);
  args.scale = keys_data(keys, operand, operand.dim() - 1);
  args.sums = sums_data(sums, keys);
  run_part(operand, args, cpu::kernels().exact_row_sum, DETLOGP_LAUNCH(exact_row_sum));
}

Tensor exact_total(Tensor keys, Tensor sums, int64_t vocab_size) {
  TotalArgs args{};
  args.keys = keys_data(keys, sums, sums.dim());
  args.sums = sums_data(sums, keys);
  args.count = sums.numel();
  args.vocab = vocab_size;
  Tensor totals = empty_on(sums, sums.sizes().data(), sums.dim(), ScalarType::Float);
  args.totals = static_cast<float*>(totals.data_ptr());
  run(sums, args, args.count, 1, cpu::kernels().exact_total, DETLOGP_LAUNCH(exact_total));
  return totals;
}

}  // namespace detlogp
