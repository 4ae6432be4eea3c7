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

struct ExactRowGradient {
  ExactProbability probability;
  float grad;
  float grad_lse;
  int64_t target;
  bool has_lse;

  // One thread does the arithmetic in double for its block.
  template <class T>
  __device__ __forceinline__ static ExactRowGradient load(
      const BackwardArgs& args, int64_t row, int64_t first, int64_t last) {
    __shared__ ExactProbability probability;
    const Rows& rows = args.rows;
    const int64_t target = target_of(rows, row);
    __syncthreads();
    if (threadIdx.x == 0 && target != kNoTarget) {
      const T* logits = row_of<T>(rows, row);
      const bool is_here = target >= first && target < last;
      const float x = is_here ? to_acc<float>(logits[target * rows.column_stride]) : 0.0f;
      probability = exact_probability(
          per_row<float>(args.row_max, row), log_sum_of<double>(args, row),
          args.temperature == 1 ? x : x / static_cast<float>(args.temperature));
    }
    __syncthreads();
    return {
        probability, per_row<float>(args.grad_logp, row), per_row<float>(args.grad_lse, row),
        target, args.grad_lse != nullptr};
  }

  template <class T>
  __device__ __forceinline__ T element(T x, bool is_target) const {
    return from_acc<T>(
        exact_gradient(probability, to_acc<float>(x), is_target, grad, grad_lse, has_lse));
  }
};

// Divides: there is a temperature.
template <bool Divides>
struct GeneralExactRowGradient {
  ExactRowGradient plain;
  float row_max;
  float gap;
  float grad_entropy;
  Divisor<float> divide;
  int64_t target;

  template <class T>
  __device__ __forceinline__ static GeneralExactRowGradient load(
      const BackwardArgs& args, int64_t row, int64_t first, int64_t last) {
    auto plain = ExactRowGradient::load<T>(args, row, first, last);
    if (Divides) {
      plain.grad = cotangent<float>(args, args.grad_logp, row);
      plain.grad_lse = cotangent<float>(args, args.grad_lse, row);
    }
    return {
        plain,
        per_row<float>(args.row_max, row),
        per_row<float>(args.gap, row),
        cotangent<float>(args, args.grad_entropy, row),
        Divisor<float>(args.temperature),
        plain.target};
  }

  template <class T>
  __device__ __forceinline__ T element(T logit, bool is_target) const {
    const float x = Divides ? divide(to_acc<float>(logit)) : to_acc<float>(logit);
    const float of_plain =
        exact_gradient(plain.probability, x, is_target, plain.grad, plain.grad_lse, plain.has_lse);
    const float p = is_target ? plain.probability.of_target : probability_of(plain.probability, x);
    const float distance = distance_below_max(row_max, x);
    return from_acc<T>(add_entropy_gradient(of_plain, p, distance, gap, grad_entropy));
  }
};

}  // namespace

void launch_exact_backward(const BackwardArgs& args, void* stream) {
  if (args.temperature != 1) {
    launch_backward_of<GeneralExactRowGradient<true>>(args, stream);
  } else if (args.grad_entropy != nullptr) {
    launch_backward_of<GeneralExactRowGradient<false>>(args, stream);
  } else {
    launch_backward_of<ExactRowGradient>(args, stream);
  }
}

}  // namespace detlogp::cuda
