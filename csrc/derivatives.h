// The operators that derivatives are made of. Vectors are [...], of the arithmetic's type, contiguous.
#pragma once

#include <optional>
#include <tuple>

#include "tensors.h"

namespace detlogp {

Tensor probability(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum);

// values: [..., V], float32 or float64.
Tensor row_sum(Tensor values);

// (logp_tangent, lse_tangent) of a tangent [..., V] of logits' type.
std::tuple<Tensor, Tensor> logp_tangent(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    Tensor tangent);

// (grad_logits, grad_grad_logp, grad_grad_lse): the vjp of logp_backward at a cotangent [..., V].
std::tuple<Tensor, Tensor, Tensor> logp_second_order(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    std::optional<Tensor> grad_logp, std::optional<Tensor> grad_lse, Tensor cotangent);

}  // namespace detlogp
