// What a kernel is told: plain pointers and numbers, the same for the CPU and for CUDA.
#pragma once

#include "core/dtype.h"

namespace detlogp {

// What a call computes with. `exact` is the exact contract, in float32 but for the last steps of a row.
enum class Arithmetic : int { float32, float64, exact };

// Names the exact contract where a kernel is named by its arithmetic's type.
struct Exact {};

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

// N rows of V logits, the ids that they are scored at, and which rows count. Where the logits are a part
// of the rows' columns (a shard of the vocabulary), V is the part's, and ids count in whole rows.
struct Rows {
  const void* logits;
  Dtype logits_type;
  RowLayout layout;
  int64_t column_stride;     // elements
  int64_t count;             // N
  int64_t vocab;             // V
  int64_t first_column;      // where the part begins; 0 for whole rows
  int64_t whole_vocab;       // the columns of whole rows
  const int64_t* token_ids;  // [N]
  const bool* mask;          // [N], or null: every row is selected

  DETLOGP_FN bool selected(const Rows& rows, int64_t row) {
    return rows.mask == nullptr || rows.mask[row];
  }
  // Selected, and its id is a column. Nothing depends on the logits of any other row; those of a row that is not
  // selected are not read, and those of a bad id only where waiting for it would take longer (cuda/few).
  DETLOGP_FN bool scored(const Rows& rows, int64_t row) {
    const auto id = static_cast<uint64_t>(rows.token_ids[row]);
    return selected(rows, row) && id < static_cast<uint64_t>(rows.whole_vocab);
  }
  // The column of a scored row's target; outside [0, V) where another part has it.
  DETLOGP_FN int64_t target(const Rows& rows, int64_t row) {
    return rows.token_ids[row] - rows.first_column;
  }
  DETLOGP_FN bool has_column(const Rows& rows, int64_t column) {
    return static_cast<uint64_t>(column) < static_cast<uint64_t>(rows.vocab);
  }
};

struct ForwardArgs {
  Rows rows;
  void* logp;  // [N]
  Dtype logp_type;
  void* lse;  // [N], or null
  Dtype lse_type;
  void* row_max;  // [N] of the accumulation type, or null together with log_sum
  void* log_sum;  // [N] of the accumulation type, or double
  bool log_sum_is_double;
  bool keep_unselected;      // logp of an unselected row keeps its value
  bool nan_for_invalid;      // logp of a bad id is NaN instead of 0
  double temperature = 1.0;  // x / temperature stands for x everywhere
  void* entropy;             // [N] of lse_type, or null together with gap
  void* gap;                 // [N] of the accumulation type: sum_v p (m - x)

  // Whether more is asked for than the kernels of plain rows compute.
  DETLOGP_FN bool is_general(const ForwardArgs& args) {
    return args.temperature != 1.0 || args.entropy != nullptr;
  }
};

struct BackwardArgs {
  Rows rows;
  const void* row_max;  // [N] of the accumulation type
  const void* log_sum;  // [N] of the accumulation type, or double
  bool log_sum_is_double;
  const void* grad_logp;     // [N] of the accumulation type, or null
  const void* grad_lse;      // [N] of the accumulation type, or null
  const void* grad_entropy;  // [N] of the accumulation type, or null
  const void* gap;           // [N] of the accumulation type, where grad_entropy is
  double temperature = 1.0;  // the statistics are those of x / temperature
  // [N, V] of the logits' type, rows of adjacent columns; it may be the logits themselves.
  void* grad_logits;
  RowLayout grad_layout;
  void* probabilities;  // [N] of ExactProbability to work with: the exact contract on CUDA

  DETLOGP_FN bool is_general(const BackwardArgs& args) {
    return args.temperature != 1.0 || args.grad_entropy != nullptr;
  }
};

// A second [N, V] matrix of the logits' type: a tangent or a cotangent.
struct Operand {
  const void* data;
  RowLayout layout;
  int64_t column_stride;  // elements
};

// p[r, v] = exp((x - m) - log(s)); 0 in the rows that are not scored.
struct ProbabilityArgs {
  Rows rows;
  const void* row_max;  // [N] of the accumulation type
  const void* log_sum;  // [N] of the accumulation type, or double
  bool log_sum_is_double;
  void* probability;  // [N, V], contiguous, of the accumulation type
};

// sums[r] = sum_v values[r, v]
struct RowSumArgs {
  Operand values;  // [N, V] of the accumulation type
  int64_t count;
  int64_t vocab;
  void* sums;  // [N] of the accumulation type
};

// A step of the exact contract, whose rows may come in parts (core/parts.h): a max, or a sum of quanta.
struct PartArgs {
  Rows rows;             // no logits: the terms are the operand's own
  const void* row_max;   // [N], float32, for the terms p u, as log_sum
  const void* log_sum;   // [N], double
  Operand operand;       // u, of the logits' type; or the terms, float32
  const int32_t* scale;  // [2, N], the keys that a sum is scaled by
  int32_t* keys;         // [2, N], raised to what this part has
  uint64_t* sums;        // [N], to which this part is added
};

// The end of the exact contract's rows: `forward.rows` has no logits, and the columns of whole rows.
struct FinishArgs {
  ForwardArgs forward;
  const int32_t* keys;   // [2, N]
  const uint64_t* sums;  // [N]
};

// The end of a row sum in whole numbers.
struct TotalArgs {
  int64_t count;
  int64_t vocab;         // of whole rows
  const int32_t* keys;   // [2, N]
  const uint64_t* sums;  // [N]
  float* totals;         // [N]
};

// lse_tangent[r] = sum_v p[r, v] dx[r, v], logp_tangent[r] = dx[r, t] - lse_tangent[r]
struct TangentArgs {
  Rows rows;
  const void* row_max;  // [N] of the accumulation type, as every vector here
  const void* log_sum;  // or double
  bool log_sum_is_double;
  Operand tangent;
  void* logp_tangent;
  void* lse_tangent;
};

// The vjp of BackwardArgs' gradient at the cotangent u: with e[r] = sum_v p[r, v] u[r, v],
//   grad_logits = (grad_lse - grad_logp) p (u - e), grad_grad_logp = u[r, t] - e, grad_grad_lse = e
struct SecondOrderArgs {
  Rows rows;
  const void* row_max;  // [N] of the accumulation type, as every vector here
  const void* log_sum;  // or double
  bool log_sum_is_double;
  const void* grad_logp;  // or null, as grad_lse
  const void* grad_lse;
  const void* mean;  // e, or null: it is computed here, in the locked order
  Operand cotangent;
  void* grad_logits;  // [N, V], contiguous, of the logits' type
  void* grad_grad_logp;
  void* grad_grad_lse;
};

}  // namespace detlogp
