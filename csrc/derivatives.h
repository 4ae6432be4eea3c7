// The operators that derivatives are made of. Vectors are [...], of the arithmetic's type, contiguous.
#pragma once

#include <optional>
#include <tuple>

#include "tensors.h"

namespace detlogp {

// Where `vocab_size` is given, the logits are the columns from `first_column` of rows of that size.
Tensor probability(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    int64_t first_column, std::optional<int64_t> vocab_size);

// values: [..., V], float32 or float64.
Tensor row_sum(Tensor values);

// (logp_tangent, lse_tangent) of a tangent [..., V] of logits' type.
std::tuple<Tensor, Tensor> logp_tangent(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    Tensor tangent);

// (grad_logits, grad_grad_logp, grad_grad_lse): the vjp of logp_backward at a cotangent [..., V]. `mean`, sum_v
// p u, is given in the exact contract, whose rows may come in parts; grad_grad_logp then lacks u[t] where the
// target is not here.
std::tuple<Tensor, Tensor, Tensor> logp_second_order(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    std::optional<Tensor> grad_logp, std::optional<Tensor> grad_lse, Tensor cotangent,
    std::optional<Tensor> mean, int64_t first_column, std::optional<int64_t> vocab_size);

}  // namespace detlogp
