// First-order gradient of the exact contract on CUDA.
//
// Computes       grad_logits = grad_logp (onehot - p) + grad_lse p, p = exp((x - m) - log(s)); where asked,
//                with the entropy's part, and of x / temperature
// Order          element by element: no sum
// Accuracy       detlogp.testing.gradient_error_bound
// Special cases  a row that is not selected, or whose id is bad, is exactly 0 and is not read
// Source         core/exact.h. Compiled without contraction (CMakeLists.txt): the CPU's bits.
#include "core/exact.h"
#include "cuda/backward.h"
#include "cuda/kernels.h"

namespace detlogp::cuda {
namespace {

__device__ __forceinline__ const ExactProbability& probability_of_row(
    const BackwardArgs& args, int64_t row) {
  return static_cast<const ExactProbability*>(args.probabilities)[row];
}

// What a row's elements share, in double: a thread each, in a kernel before the gradient's.
template <class T>
__global__ void __launch_bounds__(ExactPolicy::kThreads)
    exact_probability_kernel(const __grid_constant__ BackwardArgs args) {
  const Rows& rows = args.rows;
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row < rows.count && Rows::scored(rows, row)) {
    const int64_t target = Rows::target(rows, row);
    const bool is_here = Rows::has_column(rows, target);
    const T* logits = row_of<T>(rows, row);
    const float x = is_here ? to_acc<float>(logits[target * rows.column_stride]) : 0.0f;
    static_cast<ExactProbability*>(args.probabilities)[row] = exact_probability(
        per_row<float>(args.row_max, row), log_sum_of<double>(args, row),
        args.temperature == 1 ? x : x / static_cast<float>(args.temperature));
  }
}

void launch_probabilities(const BackwardArgs& args, void* stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int kThreads = ExactPolicy::kThreads;
    const auto blocks = static_cast<unsigned>((args.rows.count + kThreads - 1) / kThreads);
    exact_probability_kernel<T><<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    check(cudaGetLastError(), "launch of exact_probability_kernel");
  });
}

template <bool HasLse>
struct ExactRowGradient {
  using Acc = float;
  static constexpr int blocks(int element_bytes) {
    return element_bytes == 2 ? BackwardPolicy::kBlocks : BackwardPolicy::kExactWideBlocks;
  }

  ExactProbability probability;
  float grad;
  float grad_lse;

  __device__ __forceinline__ static ExactRowGradient load(const BackwardArgs& args, int64_t row) {
    return {
        probability_of_row(args, row), per_row<float>(args.grad_logp, row),
        per_row<float>(args.grad_lse, row)};
  }

  __device__ __forceinline__ float element(float x, bool is_target) const {
    return exact_gradient(probability, x, is_target, grad, grad_lse, HasLse);
  }
};

// Divides: there is a temperature.
template <bool Divides>
struct GeneralExactRowGradient {
  using Acc = float;
  static constexpr int blocks(int) {
    return BackwardPolicy::kGeneralBlocks;
  }

  ExactProbability probability;
  float grad;
  float grad_lse;
  bool has_lse;
  float row_max;
  float gap;
  float grad_entropy;
  Divisor<float> divide;

  __device__ __forceinline__ static GeneralExactRowGradient load(
      const BackwardArgs& args, int64_t row) {
    const auto of_row = [&](const void* vector) {
      return Divides ? cotangent<float>(args, vector, row) : per_row<float>(vector, row);
    };
    return {
        probability_of_row(args, row),
        of_row(args.grad_logp),
        of_row(args.grad_lse),
        args.grad_lse != nullptr,
        per_row<float>(args.row_max, row),
        per_row<float>(args.gap, row),
        of_row(args.grad_entropy),
        Divisor<float>(args.temperature)};
  }

  __device__ __forceinline__ float element(float logit, bool is_target) const {
    const float x = Divides ? divide(logit) : logit;
    const float of_plain = exact_gradient(probability, x, is_target, grad, grad_lse, has_lse);
    const float p = is_target ? probability.of_target : probability_of(probability, x);
    return add_entropy_gradient(of_plain, p, distance_below_max(row_max, x), gap, grad_entropy);
  }
};

}  // namespace

void launch_exact_backward(const BackwardArgs& args, void* stream) {
  launch_probabilities(args, stream);
  if (args.temperature != 1) {
    launch_backward_of<GeneralExactRowGradient<true>>(args, stream);
  } else if (args.grad_entropy != nullptr) {
    launch_backward_of<GeneralExactRowGradient<false>>(args, stream);
  } else if (args.grad_lse != nullptr) {
    launch_backward_of<ExactRowGradient<true>>(args, stream);
  } else {
    launch_backward_of<ExactRowGradient<false>>(args, stream);
  }
}

}  // namespace detlogp::cuda
