// The first-order gradient's walk over [N, V]. `G` is what a row's elements share:
//   kBlocks, how many blocks a multiprocessor should hold: it limits their registers
//   static G load(const BackwardArgs&, int64_t row), which reads no logits
//   Acc element(Acc x, bool is_target), Acc its accumulation type
#pragma once

#include "core/row.h"
#include "cuda/policy.h"
#include "cuda/vectors.h"

namespace detlogp::cuda {

// `target` counts from the vector's first element; almost always it lies outside.
template <class T, class G>
__device__ __forceinline__ Vector<T> differentiate_vector(
    const G& g, const Vector<T>& vector, int64_t target) {
  constexpr int kSize = Vector<T>::kSize;
  auto values = widened<typename G::Acc>(vector);
#pragma unroll
  for (int e = 0; e < kSize; ++e) {
    values.of[e] = g.element(values.of[e], false);
  }
  if (static_cast<uint64_t>(target) < kSize) {
    const auto x = widened<typename G::Acc>(vector);
#pragma unroll
    for (int e = 0; e < kSize; ++e) {
      if (e == target) {
        values.of[e] = g.element(x.of[e], true);
      }
    }
  }
  return narrowed<T>(values);
}

template <class T, class G>
__device__ __forceinline__ void differentiate_elements(
    const G& g, const T* input, int64_t stride, T* output, int64_t first, int64_t last,
    int64_t target) {
  for (int64_t v = first + threadIdx.x; v < last; v += BackwardPolicy::kThreads) {
    const auto x = to_acc<typename G::Acc>(input[v * stride]);
    output[v] = from_acc<T>(g.element(x, v == target));
  }
}

template <class T>
__device__ __forceinline__ void zero_elements(T* output, int64_t first, int64_t last) {
  constexpr int kThreads = BackwardPolicy::kThreads;
  const int64_t boundary = first + elements_to_boundary(output + first);
  const int64_t body = boundary < last ? boundary : last;
  const int64_t vectors = (last - body) / Vector<T>::kSize;
  for (int64_t v = threadIdx.x; v < vectors; v += kThreads) {
    *reinterpret_cast<uint4*>(output + body + v * Vector<T>::kSize) = make_uint4(0, 0, 0, 0);
  }
  for (int64_t v = first + threadIdx.x; v < body; v += kThreads) {
    output[v] = T{};
  }
  for (int64_t v = body + vectors * Vector<T>::kSize + threadIdx.x; v < last; v += kThreads) {
    output[v] = T{};
  }
}

// Part 0 also takes the few columns before the output row's first 16-byte boundary, so that every
// other part begins on one.
template <class T, class G>
__device__ __forceinline__ void differentiate_part(
    const BackwardArgs& args, int64_t row, int64_t part) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kThreads = BackwardPolicy::kThreads;
  constexpr int64_t kColumns = BackwardPolicy::kBytesPerBlock / sizeof(T);
  const Rows& rows = args.rows;
  T* output = static_cast<T*>(args.grad_logits) + RowLayout::offset(args.grad_layout, row);
  const int64_t head = elements_to_boundary(output);
  const int64_t body = head + part * kColumns;
  const int64_t first = part == 0 ? 0 : body;
  const int64_t last = min(body + kColumns, rows.vocab);
  if (!Rows::scored(rows, row)) {
    zero_elements(output, first, last);
    return;
  }
  const int64_t target = Rows::target(rows, row);
  const T* input = row_of<T>(rows, row);
  if (rows.column_stride != 1 || !is_aligned(input + head)) {
    const G g = G::load(args, row);
    differentiate_elements<T, G>(g, input, rows.column_stride, output, first, last, target);
    return;
  }
  const auto* source = reinterpret_cast<const Vector<T>*>(input + body);
  auto* destination = reinterpret_cast<Vector<T>*>(output + body);
  const int count = body < last ? static_cast<int>((last - body) / kSize) : 0;
  int v = threadIdx.x;
  // The first logits are asked for before what the elements share is waited for.
  Vector<T> vector;
  if (v < count) {
    vector = load_streaming(source + v);
  }
  const G g = G::load(args, row);
  while (v < count) {
    store_streaming(destination + v, differentiate_vector(g, vector, target - body - v * kSize));
    v += kThreads;
    if (v < count) {
      vector = load_streaming(source + v);
    }
  }
  const int64_t done = body + static_cast<int64_t>(count) * kSize;
  differentiate_elements<T, G>(g, input, 1, output, first, min(body, last), target);
  differentiate_elements<T, G>(g, input, 1, output, done, last, target);
}

// Block (part, row), from the last row, whose logits the forward has left in the cache.
template <class T, class G>
__global__ void __launch_bounds__(BackwardPolicy::kThreads, G::kBlocks)
    backward_kernel(const __grid_constant__ BackwardArgs args) {
  const int64_t part = gridDim.x - 1 - blockIdx.x;
  for (int64_t row = args.rows.count - 1 - blockIdx.y; row >= 0; row -= gridDim.y) {
    differentiate_part<T, G>(args, row, part);
  }
}

template <class G>
void launch_backward_of(const BackwardArgs& args, void* stream) {
  constexpr int64_t kMaxRows = 65535;  // of a grid
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kColumns = BackwardPolicy::kBytesPerBlock / sizeof(T);
    const dim3 blocks(
        static_cast<unsigned>((args.rows.vocab + kColumns - 1) / kColumns),
        static_cast<unsigned>(args.rows.count < kMaxRows ? args.rows.count : kMaxRows));
    backward_kernel<T, G>
        <<<blocks, BackwardPolicy::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    check(cudaGetLastError(), "launch of backward_kernel");
  });
}

}  // namespace detlogp::cuda
