// The operators' functions: check, allocate, run the kernel of the tensors' device. A dtype comes as
// the number of core/dtype.h, which PyTorch's dispatcher passes in a fraction of a ScalarType's time.
#pragma once

#include <optional>
#include <string>
#include <tuple>

#include "tensors.h"

namespace detlogp {

// logp alone, [...], of type `dtype`.
Tensor logp(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t dtype, int64_t arithmetic,
    bool nan_for_invalid);

// logp, lse, row_max and log_sum: for the backward, and for those who asked for the lse.
std::tuple<Tensor, Tensor, Tensor, Tensor> logp_with_stats(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t dtype, int64_t lse_dtype,
    int64_t arithmetic, bool nan_for_invalid);

// The same, of logits / temperature, with the entropy, and gap = sum_v p (m - x) for its backward.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> logp_with_entropy(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t dtype, int64_t lse_dtype,
    int64_t arithmetic, bool nan_for_invalid, double temperature);

// logp_with_stats with logp in `out`, whose unselected rows keep their values; with its dtype.
std::tuple<Tensor, Tensor, Tensor> logp_out(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, int64_t lse_dtype,
    int64_t arithmetic, bool nan_for_invalid, Tensor out);

// Where `vocab_size` is given, the logits are the columns from `first_column` of rows of that size. The gap is
// needed with grad_entropy; the statistics are those of logits / temperature.
Tensor logp_backward(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    std::optional<Tensor> grad_logp, std::optional<Tensor> grad_lse, int64_t first_column,
    std::optional<int64_t> vocab_size, std::optional<Tensor> gap,
    std::optional<Tensor> grad_entropy, double temperature);

// The same into the logits' own storage, of which no two elements may share memory.
void logp_backward_inplace(
    Tensor logits, Tensor token_ids, std::optional<Tensor> mask, Tensor row_max, Tensor log_sum,
    std::optional<Tensor> grad_logp, std::optional<Tensor> grad_lse, std::optional<Tensor> gap,
    std::optional<Tensor> grad_entropy, double temperature);

// Properties of the build and of this process, one "key=value" a line.
std::string build_info();

// Selects the CPU code path by name, "auto" for the widest; returns the name of the path in use.
std::string select_cpu_path(std::string name);

// Selects how the CUDA forward lays out its work (cuda/kernels.h); returns the name.
std::string select_cuda_layout(std::string name);

}  // namespace detlogp
