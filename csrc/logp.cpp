#include "logp.h"

#include "core/exact.h"
#include "run.h"

namespace detlogp {
namespace {

ForwardArgs to_forward_args(
    const Tensor& logits, const Tensor& token_ids, const std::optional<Tensor>& mask,
    bool nan_for_invalid) {
  ForwardArgs args{};
  args.rows = to_rows(logits, token_ids, mask);
  args.nan_for_invalid = nan_for_invalid;
  return args;
}

double checked_temperature(double temperature) {
  STD_TORCH_CHECK(temperature > 0, "detlogp: temperature must be positive, got ", temperature);
  return temperature;
}

struct Stats {
  Tensor lse;
  Tensor row_max;
  Tensor log_sum;
};

Stats allocate_stats(
    const Tensor& logits, int64_t lse_dtype, Arithmetic arithmetic, ForwardArgs& args) {
  args.lse_type = checked_dtype(lse_dtype, "lse_dtype");
  args.log_sum_is_double = arithmetic != Arithmetic::float32;
  const auto type = [](bool is_double) {
    return is_double ? ScalarType::Double : ScalarType::Float;
  };
  Stats stats{
      empty_per_row(logits, scalar_type(args.lse_type)),
      empty_per_row(logits, type(arithmetic == Arithmetic::float64)),
      empty_per_row(logits, type(args.log_sum_is_double))};
  args.lse = stats.lse.data_ptr();
  args.row_max = stats.row_max.data_ptr();
  args.log_sum = stats.log_sum.data_ptr();
  return stats;
}

void run_forward(const Tensor& logits, const ForwardArgs& args, Arithmetic arithmetic) {
  run(logits, args, args.rows.count, args.rows.vocab, arithmetic, cpu::kernels().forward,
      DETLOGP_LAUNCH(forward));
}

}  // namespace

Tensor logp(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t dtype, int64_t arithmetic,
    bool nan_for_invalid) {
  ForwardArgs args = to_forward_args(logits, token_ids, mask, nan_for_invalid);
  args.logp_type = checked_dtype(dtype, "dtype");
  Tensor result = empty_per_row(logits, scalar_type(args.logp_type));
  args.logp = result.data_ptr();
  run_forward(logits, args, checked_arithmetic(arithmetic));
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> logp_with_stats(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t dtype, int64_t lse_dtype,
    int64_t arithmetic, bool nan_for_invalid) {
  ForwardArgs args = to_forward_args(logits, token_ids, mask, nan_for_invalid);
  args.logp_type = checked_dtype(dtype, "dtype");
  Tensor result = empty_per_row(logits, scalar_type(args.logp_type));
  args.logp = result.data_ptr();
  const Arithmetic chosen = checked_arithmetic(arithmetic);
  Stats stats = allocate_stats(logits, lse_dtype, chosen, args);
  run_forward(logits, args, chosen);
  return {result, stats.lse, stats.row_max, stats.log_sum};
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> logp_with_entropy(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t dtype, int64_t lse_dtype,
    int64_t arithmetic, bool nan_for_invalid, double temperature) {
  ForwardArgs args = to_forward_args(logits, token_ids, mask, nan_for_invalid);
  args.temperature = checked_temperature(temperature);
  args.logp_type = checked_dtype(dtype, "dtype");
  Tensor result = empty_per_row(logits, scalar_type(args.logp_type));
  args.logp = result.data_ptr();
  const Arithmetic chosen = checked_arithmetic(arithmetic);
  Stats stats = allocate_stats(logits, lse_dtype, chosen, args);
  Tensor entropy = empty_per_row(logits, scalar_type(args.lse_type));
  Tensor gap = empty_per_row(logits, stats.row_max.scalar_type());
  args.entropy = entropy.data_ptr();
  args.gap = gap.data_ptr();
  run_forward(logits, args, chosen);
  return {result, stats.lse, entropy, stats.row_max, stats.log_sum, gap};
}

std::tuple<Tensor, Tensor, Tensor> logp_out(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t lse_dtype,
    int64_t arithmetic, bool nan_for_invalid, Tensor out) {
  ForwardArgs args = to_forward_args(logits, token_ids, mask, nan_for_invalid);
  args.keep_unselected = true;
  args.logp_type = to_dtype(out.scalar_type(), "out");
  args.logp = per_row_data(out, out.scalar_type(), logits, "out");
  const Arithmetic chosen = checked_arithmetic(arithmetic);
  Stats stats = allocate_stats(logits, lse_dtype, chosen, args);
  run_forward(logits, args, chosen);
  return {stats.lse, stats.row_max, stats.log_sum};
}

namespace {

struct BackwardCall {
  BackwardArgs args;
  Arithmetic arithmetic;
};

BackwardCall to_backward_call(
    const Tensor& logits, const Tensor& token_ids, const std::optional<Tensor>& mask,
    const Tensor& row_max, const Tensor& log_sum, const std::optional<Tensor>& grad_logp,
    const std::optional<Tensor>& grad_lse, int64_t first_column, std::optional<int64_t> vocab_size,
    const std::optional<Tensor>& gap, const std::optional<Tensor>& grad_entropy,
    double temperature) {
  BackwardCall call{};
  BackwardArgs& args = call.args;
  args.rows = to_rows(logits, token_ids, mask, first_column, vocab_size);
  call.arithmetic = set_statistics(args, row_max, log_sum, logits);
  args.grad_logp = optional_per_row_data(grad_logp, row_max, logits, "grad_logp");
  args.grad_lse = optional_per_row_data(grad_lse, row_max, logits, "grad_lse");
  args.gap = optional_per_row_data(gap, row_max, logits, "gap");
  args.grad_entropy = optional_per_row_data(grad_entropy, row_max, logits, "grad_entropy");
  args.temperature = checked_temperature(temperature);
  STD_TORCH_CHECK(
      args.grad_entropy == nullptr || gap.has_value(), "detlogp: gap must come with grad_entropy");
  return call;
}

void run_backward(const Tensor& logits, BackwardCall& call) {
  std::optional<Tensor> probabilities;
  if (call.arithmetic == Arithmetic::exact && !logits.is_cpu()) {
    const auto bytes = static_cast<int64_t>(call.args.rows.count * sizeof(ExactProbability));
    probabilities = empty_on(logits, &bytes, 1, ScalarType::Byte);
    call.args.probabilities = probabilities->data_ptr();
  }
  run(logits, call.args, call.args.rows.count, call.args.rows.vocab, call.arithmetic,
      cpu::kernels().backward, DETLOGP_LAUNCH(backward));
}

}  // namespace

Tensor logp_backward(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    std::optional<Tensor> grad_logp, std::optional<Tensor> grad_lse, int64_t first_column,
    std::optional<int64_t> vocab_size, std::optional<Tensor> gap,
    std::optional<Tensor> grad_entropy, double temperature) {
  BackwardCall call = to_backward_call(
      logits, token_ids, mask, row_max, log_sum, grad_logp, grad_lse, first_column, vocab_size, gap,
      grad_entropy, temperature);
  Tensor result = empty_matrix(logits, logits.scalar_type());
  call.args.grad_logits = result.data_ptr();
  call.args.grad_layout = row_layout(result);
  run_backward(logits, call);
  return result;
}

void logp_backward_inplace(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    std::optional<Tensor> grad_logp, std::optional<Tensor> grad_lse, std::optional<Tensor> gap,
    std::optional<Tensor> grad_entropy, double temperature) {
  BackwardCall call = to_backward_call(
      logits, token_ids, mask, row_max, log_sum, grad_logp, grad_lse, 0, std::nullopt, gap,
      grad_entropy, temperature);
  STD_TORCH_CHECK(
      call.args.rows.column_stride == 1 || call.args.rows.vocab == 1,
      "detlogp: logits must have adjacent columns, got a stride of ", call.args.rows.column_stride);
  call.args.grad_logits = logits.data_ptr();
  call.args.grad_layout = call.args.rows.layout;
  run_backward(logits, call);
}

std::string select_cpu_path(std::string name) {
  STD_TORCH_CHECK(
      cpu::select_path(name.c_str()),
      "detlogp: the CPU path must be one that this build and processor have, got ", name);
  return cpu::kernels().name;
}

std::string select_cuda_layout(std::string name) {
#if defined(DETLOGP_CUDA)
  const bool is_known = cuda::select_layout(name.c_str());
#else
  const bool is_known = false;
#endif
  STD_TORCH_CHECK(
      is_known,
      "detlogp: the CUDA layout must be auto, rows, few, ring1, ring2, ring4 or ring8, in a build "
      "with CUDA, got ",
      name);
  return name;
}

std::string build_info() {
  std::string info = "compiler=" DETLOGP_COMPILER "\n";
  info += "torch=" DETLOGP_TORCH_VERSION "\n";
  info += "commit=" DETLOGP_COMMIT "\n";
  info += "cpu_path=" + std::string(cpu::kernels().name) + "\n";
#if defined(DETLOGP_CUDA)
  info += "cuda=" + std::string(cuda::toolkit_version()) + "\n";
  info += "cuda_architectures=" + std::string(cuda::architectures()) + "\n";
#endif
  return info;
}

}  // namespace detlogp
