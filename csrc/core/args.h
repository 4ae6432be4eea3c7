// What a kernel is told: plain pointers and numbers, the same for the CPU and for CUDA.
#pragma once

#include "core/dtype.h"

namespace detlogp {

constexpr int kMaxLeadingDims = 12;

// Where row r of a tensor [..., V] begins. Leading dimensions that can be merged have been merged, so
// a contiguous tensor has one dimension, and an expanded operand a stride of 0.
struct RowLayout {
  int dims;
  int64_t size[kMaxLeadingDims];
  int64_t stride[kMaxLeadingDims];  // elements

  DETLOGP_FN int64_t offset(const RowLayout& rows, int64_t row) {
    int64_t result = 0;
    for (int d = rows.dims - 1; d > 0; --d) {
      result += (row % rows.size[d]) * rows.stride[d];
      row /= rows.size[d];
    }
    return result + row * rows.stride[0];
  }
};

// N rows of V logits, the ids that they are scored at, and which rows count.
struct Rows {
  const void* logits;
  Dtype logits_type;
  RowLayout layout;
  int64_t column_stride;     // elements
  int64_t count;             // N
  int64_t vocab;             // V
  const int64_t* token_ids;  // [N]
  const bool* mask;          // [N], or null: every row is selected

  DETLOGP_FN bool selected(const Rows& rows, int64_t row) {
    return rows.mask == nullptr || rows.mask[row];
  }
  DETLOGP_FN bool valid(const Rows& rows, int64_t row) {
    return static_cast<uint64_t>(rows.token_ids[row]) < static_cast<uint64_t>(rows.vocab);
  }
};

struct ForwardArgs {
  Rows rows;
  void* logp;  // [N]
  Dtype logp_type;
  void* lse;  // [N], or null
  Dtype lse_type;
  void* row_max;         // [N] of the accumulation type, or null together with log_sum
  void* log_sum;         // [N] of the accumulation type
  bool keep_unselected;  // logp of an unselected row keeps its value
  bool nan_for_invalid;  // logp of a bad id is NaN instead of 0
};

struct BackwardArgs {
  Rows rows;
  const void* row_max;    // [N] of the accumulation type
  const void* log_sum;    // [N] of the accumulation type
  const void* grad_logp;  // [N] of the accumulation type, or null
  const void* grad_lse;   // [N] of the accumulation type, or null
  void* grad_logits;      // [N, V], contiguous, of the logits' type
};

}  // namespace detlogp
