// Every operator's schema, and its registration through PyTorch's stable ABI.
#include <torch/csrc/stable/library.h>

#include "derivatives.h"
#include "logp.h"
#include "parts.h"

STABLE_TORCH_LIBRARY(detlogp, m) {
  m.def(
      "logp(Tensor logits, Tensor token_ids, Tensor? mask=None, int dtype=2,"
      " int arithmetic=0, bool nan_for_invalid=False) -> Tensor");
  m.def(
      "logp_with_stats(Tensor logits, Tensor token_ids, Tensor? mask, int dtype,"
      " int lse_dtype, int arithmetic, bool nan_for_invalid)"
      " -> (Tensor logp, Tensor lse, Tensor row_max, Tensor log_sum)");
  m.def(
      "logp_with_entropy(Tensor logits, Tensor token_ids, Tensor? mask, int dtype, int lse_dtype,"
      " int arithmetic, bool nan_for_invalid, float temperature)"
      " -> (Tensor logp, Tensor lse, Tensor entropy, Tensor row_max, Tensor log_sum, Tensor gap)");
  m.def(
      "logp_out(Tensor logits, Tensor token_ids, Tensor? mask, int lse_dtype,"
      " int arithmetic, bool nan_for_invalid, Tensor(a!) out)"
      " -> (Tensor lse, Tensor row_max, Tensor log_sum)");
  m.def(
      "logp_backward(Tensor logits, Tensor token_ids, Tensor? mask, Tensor row_max, Tensor log_sum,"
      " Tensor? grad_logp, Tensor? grad_lse, int first_column=0, int? vocab_size=None,"
      " Tensor? gap=None, Tensor? grad_entropy=None, float temperature=1.0) -> Tensor");
  m.def(
      "logp_backward_inplace(Tensor(a!) logits, Tensor token_ids, Tensor? mask, Tensor row_max,"
      " Tensor log_sum, Tensor? grad_logp, Tensor? grad_lse, Tensor? gap=None,"
      " Tensor? grad_entropy=None, float temperature=1.0) -> ()");
  m.def(
      "logp_second_order(Tensor logits, Tensor token_ids, Tensor? mask, Tensor row_max,"
      " Tensor log_sum, Tensor? grad_logp, Tensor? grad_lse, Tensor cotangent, Tensor? mean=None,"
      " int first_column=0, int? vocab_size=None)"
      " -> (Tensor grad_logits, Tensor grad_grad_logp, Tensor grad_grad_lse)");
  m.def(
      "logp_tangent(Tensor logits, Tensor token_ids, Tensor? mask, Tensor row_max, Tensor log_sum,"
      " Tensor tangent) -> (Tensor logp_tangent, Tensor lse_tangent)");
  m.def(
      "probability(Tensor logits, Tensor token_ids, Tensor? mask, Tensor row_max, Tensor log_sum,"
      " int first_column=0, int? vocab_size=None) -> Tensor");
  m.def("row_sum(Tensor values) -> Tensor");
  m.def(
      "exact_max(Tensor logits, Tensor token_ids, Tensor? mask, int first_column, int vocab_size,"
      " Tensor(a!) keys) -> ()");
  m.def(
      "exact_sum(Tensor logits, Tensor token_ids, Tensor? mask, int first_column, int vocab_size,"
      " Tensor keys, Tensor(a!) sums) -> ()");
  m.def(
      "exact_finish(Tensor keys, Tensor sums, Tensor token_ids, Tensor? mask, int vocab_size,"
      " int dtype, int lse_dtype, bool nan_for_invalid)"
      " -> (Tensor logp, Tensor lse, Tensor row_max, Tensor log_sum)");
  m.def(
      "exact_extremes(Tensor operand, Tensor? logits, Tensor? token_ids, Tensor? mask,"
      " Tensor? row_max, Tensor? log_sum, int vocab_size, Tensor(a!) keys) -> ()");
  m.def(
      "exact_row_sum(Tensor operand, Tensor? logits, Tensor? token_ids, Tensor? mask,"
      " Tensor? row_max, Tensor? log_sum, int vocab_size, Tensor keys, Tensor(a!) sums) -> ()");
  m.def("exact_total(Tensor keys, Tensor sums, int vocab_size) -> Tensor");
  m.def("build_info() -> str");
  m.def("select_cpu_path(str name) -> str");
  m.def("select_cuda_layout(str name) -> str");
}

namespace {

// The same functions on every device: they look at the tensors.
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("logp", TORCH_BOX(&detlogp::logp));
  m.impl("logp_with_stats", TORCH_BOX(&detlogp::logp_with_stats));
  m.impl("logp_with_entropy", TORCH_BOX(&detlogp::logp_with_entropy));
  m.impl("logp_out", TORCH_BOX(&detlogp::logp_out));
  m.impl("logp_backward", TORCH_BOX(&detlogp::logp_backward));
  m.impl("logp_backward_inplace", TORCH_BOX(&detlogp::logp_backward_inplace));
  m.impl("logp_second_order", TORCH_BOX(&detlogp::logp_second_order));
  m.impl("logp_tangent", TORCH_BOX(&detlogp::logp_tangent));
  m.impl("probability", TORCH_BOX(&detlogp::probability));
  m.impl("row_sum", TORCH_BOX(&detlogp::row_sum));
  m.impl("exact_max", TORCH_BOX(&detlogp::exact_max));
  m.impl("exact_sum", TORCH_BOX(&detlogp::exact_sum));
  m.impl("exact_finish", TORCH_BOX(&detlogp::exact_finish));
  m.impl("exact_extremes", TORCH_BOX(&detlogp::exact_extremes));
  m.impl("exact_row_sum", TORCH_BOX(&detlogp::exact_row_sum));
  m.impl("exact_total", TORCH_BOX(&detlogp::exact_total));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(detlogp, CPU, m) {
  implement(m);
}

STABLE_TORCH_LIBRARY_IMPL(detlogp, CUDA, m) {
  implement(m);
}

STABLE_TORCH_LIBRARY_IMPL(detlogp, CompositeExplicitAutograd, m) {
  m.impl("build_info", TORCH_BOX(&detlogp::build_info));
  m.impl("select_cpu_path", TORCH_BOX(&detlogp::select_cpu_path));
  m.impl("select_cuda_layout", TORCH_BOX(&detlogp::select_cuda_layout));
}
