// The exact contract in steps on CUDA, for rows whose columns come in parts.
//
// Computes       keys of the max and of the target, and the sum of quanta, of a part's logits; keys of
//                the extremes, and the sum in quanta, of its terms; and what is made of them
// Order          none: blocks share a row by integer atomics, a max of keys or a sum (core/parts.h)
// Accuracy       core/exact.h, core/parts.h
// Special cases  a row that is not scored is not read, and its keys and sums stay
// Source         docs/exact.md. Compiled without contraction (CMakeLists.txt): the CPU's bits.
#include "core/parts.h"

#include "cuda/columns.h"
#include "cuda/kernels.h"

namespace detlogp::cuda {
namespace {

constexpr int kThreads = PartPolicy::kThreads;

__device__ __forceinline__ void raise(int32_t* key, float value) {
  atomicMax(key, to_key(value));
}

__device__ __forceinline__ void add(uint64_t* sum, uint64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(value));
}

// Columns first <= v < last of row `row`, which one block takes.
struct Stretch {
  int64_t row;
  int64_t first;
  int64_t last;
};

template <class T>
constexpr int64_t kStretchColumns = PartPolicy::kBytesPerBlock / sizeof(T);

template <class T>
__device__ __forceinline__ Stretch stretch_of(int64_t number, int64_t per_row, int64_t vocab) {
  const int64_t first = number % per_row * kStretchColumns<T>;
  const int64_t end = first + kStretchColumns<T>;
  return {number / per_row, first, end < vocab ? end : vocab};
}

template <class T, class F>
__device__ __forceinline__ void for_each_logit(
    const Rows& rows, const Stretch& stretch, const F& f) {
  const T* logits = row_of<T>(rows, stretch.row) + stretch.first * rows.column_stride;
  if (rows.column_stride == 1) {
    Pieces<T>(logits, stretch.last - stretch.first).for_each(f);
  } else {
    Strided<T>{logits, rows.column_stride, stretch.last - stretch.first}.for_each(f);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    exact_max_kernel(const __grid_constant__ PartArgs args, int64_t per_row) {
  __shared__ Groups<float> maxima;
  const Rows& rows = args.rows;
  for (int64_t number = blockIdx.x; number < rows.count * per_row; number += gridDim.x) {
    const Stretch stretch = stretch_of<T>(number, per_row, rows.vocab);
    if (!Rows::scored(rows, stretch.row)) {
      continue;
    }
    float row_max = __uint_as_float(0xff800000u);
    for_each_logit<T>(
        rows, stretch, [&](T x) { row_max = larger_of<true>(row_max, to_acc<float>(x)); });
    row_max = max_of_threads(row_max, maxima);
    if (threadIdx.x == 0) {
      raise(args.keys + stretch.row, row_max);
      const int64_t target = Rows::target(rows, stretch.row);
      if (target >= stretch.first && target < stretch.last) {
        const T x = row_of<T>(rows, stretch.row)[target * rows.column_stride];
        raise(args.keys + rows.count + stretch.row, to_acc<float>(x));
      }
    }
    __syncthreads();
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    exact_sum_kernel(const __grid_constant__ PartArgs args, int64_t per_row) {
  __shared__ Groups<uint64_t> sums;
  const Rows& rows = args.rows;
  for (int64_t number = blockIdx.x; number < rows.count * per_row; number += gridDim.x) {
    const Stretch stretch = stretch_of<T>(number, per_row, rows.vocab);
    if (!Rows::scored(rows, stretch.row)) {
      continue;
    }
    const ExactScale scale = scale_of_part(args, stretch.row);
    uint64_t sum = 0;
    for_each_logit<T>(rows, stretch, [&](T x) { sum += quanta(scale, to_acc<float>(x)); });
    sum = fold_block(sum, kThreads, sums);
    if (threadIdx.x == 0) {
      add(args.sums + stretch.row, sum);
    }
  }
}

// ---- terms ------------------------------------------------------------------------------------

// The operand's own elements.
struct OwnTerms {
  using Element = float;

  const float* operand;
  int64_t stride;

  __device__ __forceinline__ static bool counts(const PartArgs&, int64_t) {
    return true;
  }
  __device__ __forceinline__ OwnTerms(const PartArgs& args, int64_t row)
      : operand(row_of<float>(args.operand, row)), stride(args.operand.column_stride) {
  }
  __device__ __forceinline__ float at(int64_t column) const {
    return operand[column * stride];
  }
};

// p u, p = exp((x - m) - log(s)).
template <class T>
struct ProbabilityTerms {
  using Element = T;

  const T* logits;
  const T* operand;
  int64_t logits_stride;
  int64_t operand_stride;
  float row_max;
  float log_sum;

  __device__ __forceinline__ static bool counts(const PartArgs& args, int64_t row) {
    return Rows::scored(args.rows, row);
  }
  __device__ __forceinline__ ProbabilityTerms(const PartArgs& args, int64_t row)
      : logits(row_of<T>(args.rows, row)),
        operand(row_of<T>(args.operand, row)),
        logits_stride(args.rows.column_stride),
        operand_stride(args.operand.column_stride),
        row_max(per_row<float>(args.row_max, row)),
        log_sum(static_cast<float>(per_row<double>(args.log_sum, row))) {
  }
  __device__ __forceinline__ float at(int64_t column) const {
    const float x = to_acc<float>(logits[column * logits_stride]);
    return exp_of((x - row_max) - log_sum) * to_acc<float>(operand[column * operand_stride]);
  }
};

template <class Terms, class F>
__device__ __forceinline__ void for_each_term(
    const PartArgs& args, const Stretch& stretch, const F& f) {
  const Terms terms(args, stretch.row);
#pragma unroll 4
  for (int64_t column = stretch.first + threadIdx.x; column < stretch.last; column += kThreads) {
    f(terms.at(column));
  }
}

template <class Terms>
__global__ void __launch_bounds__(kThreads)
    exact_extremes_kernel(const __grid_constant__ PartArgs args, int64_t per_row) {
  __shared__ Groups<float> maxima;
  const int64_t count = args.rows.count;
  for (int64_t number = blockIdx.x; number < count * per_row; number += gridDim.x) {
    const Stretch stretch = stretch_of<typename Terms::Element>(number, per_row, args.rows.vocab);
    if (!Terms::counts(args, stretch.row)) {
      continue;
    }
    float largest = 0;
    float negated = 0;
    for_each_term<Terms>(args, stretch, [&](float term) {
      largest = larger_of<true>(largest, term);
      negated = larger_of<true>(negated, -term);
    });
    largest = max_of_threads(largest, maxima);
    __syncthreads();
    negated = max_of_threads(negated, maxima);
    if (threadIdx.x == 0) {
      raise(args.keys + stretch.row, largest);
      raise(args.keys + count + stretch.row, negated);
    }
    __syncthreads();
  }
}

template <class Terms>
__global__ void __launch_bounds__(kThreads)
    exact_row_sum_kernel(const __grid_constant__ PartArgs args, int64_t per_row) {
  __shared__ Groups<uint64_t> sums;
  const Rows& rows = args.rows;
  for (int64_t number = blockIdx.x; number < rows.count * per_row; number += gridDim.x) {
    const Stretch stretch = stretch_of<typename Terms::Element>(number, per_row, rows.vocab);
    if (!Terms::counts(args, stretch.row)) {
      continue;
    }
    const float factor =
        power_of_two(term_scale(args.scale, rows.count, stretch.row, rows.whole_vocab).exponent);
    uint64_t sum = 0;
    for_each_term<Terms>(args, stretch, [&](float term) { sum += term_quanta(factor, term); });
    sum = fold_block(sum, kThreads, sums);
    if (threadIdx.x == 0) {
      add(args.sums + stretch.row, sum);
    }
  }
}

// ---- the end of a row -------------------------------------------------------------------------

__global__ void __launch_bounds__(kThreads)
    exact_finish_kernel(const __grid_constant__ FinishArgs args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < args.forward.rows.count) {
    finish_row(args, row);
  }
}

__global__ void __launch_bounds__(kThreads)
    exact_total_kernel(const __grid_constant__ TotalArgs args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (row < args.count) {
    finish_total(args, row);
  }
}

// ---- launches ---------------------------------------------------------------------------------

template <class T>
void launch(
    void (*kernel)(const PartArgs, int64_t), const PartArgs& args, void* stream, const char* what) {
  const int64_t per_row = (args.rows.vocab + kStretchColumns<T> - 1) / kStretchColumns<T>;
  const unsigned blocks = block_count(args.rows.count * per_row);
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args, per_row);
  check(cudaGetLastError(), what);
}

template <class Args>
void launch_per_row(
    void (*kernel)(const Args), const Args& args, int64_t count, void* stream, const char* what) {
  const auto blocks = static_cast<unsigned>((count + kThreads - 1) / kThreads);
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
  check(cudaGetLastError(), what);
}

}  // namespace

void launch_exact_max(const PartArgs& args, void* stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    launch<T>(exact_max_kernel<T>, args, stream, "launch of exact_max_kernel");
  });
}

void launch_exact_sum(const PartArgs& args, void* stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    launch<T>(exact_sum_kernel<T>, args, stream, "launch of exact_sum_kernel");
  });
}

void launch_exact_extremes(const PartArgs& args, void* stream) {
  constexpr const char* kWhat = "launch of exact_extremes_kernel";
  if (args.rows.logits == nullptr) {
    return launch<float>(exact_extremes_kernel<OwnTerms>, args, stream, kWhat);
  }
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    launch<T>(exact_extremes_kernel<ProbabilityTerms<T>>, args, stream, kWhat);
  });
}

void launch_exact_row_sum(const PartArgs& args, void* stream) {
  constexpr const char* kWhat = "launch of exact_row_sum_kernel";
  if (args.rows.logits == nullptr) {
    return launch<float>(exact_row_sum_kernel<OwnTerms>, args, stream, kWhat);
  }
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    launch<T>(exact_row_sum_kernel<ProbabilityTerms<T>>, args, stream, kWhat);
  });
}

void launch_exact_finish(const FinishArgs& args, void* stream) {
  launch_per_row(
      exact_finish_kernel, args, args.forward.rows.count, stream, "launch of exact_finish_kernel");
}

void launch_exact_total(const TotalArgs& args, void* stream) {
  launch_per_row(exact_total_kernel, args, args.count, stream, "launch of exact_total_kernel");
}

}  // namespace detlogp::cuda
