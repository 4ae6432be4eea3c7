// The operators of the exact contract in steps: processes that have parts of a row's columns take the
// largest of the keys, and the sum of the sums, between them. `keys` [2, ...] is int32, `sums` [...] int64.
#pragma once

#include <optional>
#include <tuple>

#include "tensors.h"

namespace detlogp {

// Raises keys[0] to the key of the part's max, and keys[1] to that of the target, if it is here.
void exact_max(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t first_column,
    int64_t vocab_size, Tensor keys);

// Adds the part's quanta to the sums.
void exact_sum(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t first_column,
    int64_t vocab_size, Tensor keys, Tensor sums);

// logp, lse, row_max and log_sum from the keys and sums of whole rows.
std::tuple<Tensor, Tensor, Tensor, Tensor> exact_finish(
    Tensor keys, Tensor sums, Tensor token_ids, std::optional<Tensor> mask, int64_t vocab_size,
    int64_t dtype, int64_t lse_dtype, bool nan_for_invalid);

// Raises keys[0] to that of the largest term, keys[1] to that of the largest negated term. The terms are the
// operand's elements, float32; or p times them, of logits' type, where the logits are given with all the rest.
void exact_extremes(
    Tensor operand, std::optional<Tensor> logits, std::optional<Tensor> token_ids,
    std::optional<Tensor> mask, std::optional<Tensor> row_max, std::optional<Tensor> log_sum,
    int64_t vocab_size, Tensor keys);

// Adds the terms' quanta to the sums.
void exact_row_sum(
    Tensor operand, std::optional<Tensor> logits, std::optional<Tensor> token_ids,
    std::optional<Tensor> mask, std::optional<Tensor> row_max, std::optional<Tensor> log_sum,
    int64_t vocab_size, Tensor keys, Tensor sums);

// The row sums, float32, from the keys and sums of whole rows.
Tensor exact_total(Tensor keys, Tensor sums, int64_t vocab_size);

}  // namespace detlogp
