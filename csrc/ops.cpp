// Every operator's schema, and its registration through PyTorch's stable ABI.
#include <torch/csrc/stable/library.h>

#include "derivatives.h"
#include "logp.h"

STABLE_TORCH_LIBRARY(detlogp, m) {
  m.def(
      "logp(Tensor logits, Tensor token_ids, Tensor? mask=None, int dtype=2,"
      " int arithmetic=0, bool nan_for_invalid=False) -> Tensor");
  m.def(
      "logp_with_stats(Tensor logits, Tensor token_ids, Tensor? mask, int dtype,"
      " int lse_dtype, int arithmetic, bool nan_for_invalid)"
      " -> (Tensor logp, Tensor lse, Tensor row_max, Tensor log_sum)");
  m.def(
      "logp_out(Tensor logits, Tensor token_ids, Tensor? mask, int lse_dtype,"
      " int arithmetic, bool nan_for_invalid, Tensor(a!) out)"
      " -> (Tensor lse, Tensor row_max, Tensor log_sum)");
  m.def(
      "logp_backward(Tensor logits, Tensor token_ids, Tensor? mask, Tensor row_max, Tensor log_sum,"
      " Tensor? grad_logp, Tensor? grad_lse) -> Tensor");
  m.def(
      "logp_backward_inplace(Tensor(a!) logits, Tensor token_ids, Tensor? mask, Tensor row_max,"
      " Tensor log_sum, Tensor? grad_logp, Tensor? grad_lse) -> ()");
  m.def(
      "logp_second_order(Tensor logits, Tensor token_ids, Tensor? mask, Tensor row_max,"
      " Tensor log_sum, Tensor? grad_logp, Tensor? grad_lse, Tensor cotangent)"
      " -> (Tensor grad_logits, Tensor grad_grad_logp, Tensor grad_grad_lse)");
  m.def(
      "logp_tangent(Tensor logits, Tensor token_ids, Tensor? mask, Tensor row_max, Tensor log_sum,"
      " Tensor tangent) -> (Tensor logp_tangent, Tensor lse_tangent)");
  m.def(
      "probability(Tensor logits, Tensor token_ids, Tensor? mask, Tensor row_max, Tensor log_sum)"
      " -> Tensor");
  m.def("row_sum(Tensor values) -> Tensor");
  m.def("build_info() -> str");
  m.def("select_cpu_path(str name) -> str");
  m.def("select_cuda_layout(str name) -> str");
}

namespace {

// The same functions on every device: they look at the tensors.
void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("logp", TORCH_BOX(&detlogp::logp));
  m.impl("logp_with_stats", TORCH_BOX(&detlogp::logp_with_stats));
  m.impl("logp_out", TORCH_BOX(&detlogp::logp_out));
  m.impl("logp_backward", TORCH_BOX(&detlogp::logp_backward));
  m.impl("logp_backward_inplace", TORCH_BOX(&detlogp::logp_backward_inplace));
  m.impl("logp_second_order", TORCH_BOX(&detlogp::logp_second_order));
  m.impl("logp_tangent", TORCH_BOX(&detlogp::logp_tangent));
  m.impl("probability", TORCH_BOX(&detlogp::probability));
  m.impl("row_sum", TORCH_BOX(&detlogp::row_sum));
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
