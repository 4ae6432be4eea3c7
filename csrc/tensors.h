// From tensors of PyTorch's stable ABI to the plain arguments of a kernel, with every check.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>

#include "core/args.h"

namespace detlogp {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws unless the type is one of float16, bfloat16, float32 and float64; `name` is for the message.
Dtype to_dtype(ScalarType type, const char* name);

// The type of a number that an operator was given, and the type that PyTorch knows it by.
Dtype checked_dtype(int64_t number, const char* name);
ScalarType scalar_type(Dtype type);

// A new contiguous tensor on the device of `like`. Calls the allocator directly: torch::stable's own
// new_empty goes through the boxed dispatcher, which costs more than our kernels' launch.
Tensor empty_on(const Tensor& like, const int64_t* sizes, int64_t dims, ScalarType type);

// A new tensor of logits' shape.
Tensor empty_matrix(const Tensor& logits, ScalarType type);

// A new tensor of logits' leading shape.
Tensor empty_per_row(const Tensor& logits, ScalarType type);

// Whether the arithmetic's type is float64; throws unless it is float32 or float64.
bool is_double(ScalarType compute_dtype);

// A matrix of logits' shape, type and device.
Operand to_operand(const Tensor& matrix, const Tensor& logits, const char* name);

// Where the rows of [..., V] begin. Leading dimensions that step as one are merged; those of size 1
// vanish.
RowLayout row_layout(const Tensor& logits);

// The rows of `logits` [..., V] with `token_ids` and `mask`, both of its leading shape.
Rows to_rows(const Tensor& logits, const Tensor& token_ids, const std::optional<Tensor>& mask);

// The same where the logits are the columns from `first_column` of rows of `vocab_size`, where that is given;
// there may then be no columns.
Rows to_rows(
    const Tensor& logits, const Tensor& token_ids, const std::optional<Tensor>& mask,
    int64_t first_column, std::optional<int64_t> vocab_size);

// The product of logits' leading dimensions.
int64_t row_count(const Tensor& logits);

bool same_device(const Tensor& a, const Tensor& b);

// The data of a contiguous tensor of logits' leading shape and device, and of the given type.
void* per_row_data(const Tensor& values, ScalarType type, const Tensor& logits, const char* name);

// The same, or null where there is none; of `row_max`'s type.
const void* optional_per_row_data(
    const std::optional<Tensor>& values, const Tensor& row_max, const Tensor& logits,
    const char* name);

// The arithmetic that an operator was asked for by its number.
Arithmetic checked_arithmetic(int64_t number);

// m and log(s) of every row; their types tell the arithmetic that made them.
template <class Args>
Arithmetic set_statistics(
    Args& args, const Tensor& row_max, const Tensor& log_sum, const Tensor& logits) {
  const bool double_max = is_double(row_max.scalar_type());
  args.log_sum_is_double = double_max || log_sum.scalar_type() == ScalarType::Double;
  const ScalarType log_sum_type = args.log_sum_is_double ? ScalarType::Double : ScalarType::Float;
  args.row_max = per_row_data(row_max, row_max.scalar_type(), logits, "row_max");
  args.log_sum = per_row_data(log_sum, log_sum_type, logits, "log_sum");
  return double_max               ? Arithmetic::float64
         : args.log_sum_is_double ? Arithmetic::exact
                                  : Arithmetic::float32;
}

// Runs `launch` on the current stream of a CUDA tensor's device, made current for the call.
void on_cuda_stream(
    const Tensor& logits, void (*launch)(void* stream, void* context), void* context);

}  // namespace detlogp
