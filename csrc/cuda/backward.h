// The first-order gradient's walk over [N, V]. `G` is what a row's elements share:
//   blocks(bytes of T), how many of them a multiprocessor should hold: it limits their registers
//   static G load(const BackwardArgs&, int64_t row), which reads no logits
//   Acc element(Acc x, bool is_target), Acc its accumulation type
#pragma once

#include "core/row.h"
#include "cuda/row_part.h"

namespace detlogp::cuda {

// `target` counts from the vector's first element; almost always it lies outside.
template <class T, class G>
__device__ __forceinline__ Vector<T> differentiate_vector(
    const G& g, const Vector<T>& vector, int target) {
  constexpr int kSize = Vector<T>::kSize;
  auto values = widened<typename G::Acc>(vector);
#pragma unroll
  for (int e = 0; e < kSize; ++e) {
    values.of[e] = g.element(values.of[e], false);
  }
  if (static_cast<unsigned>(target) < kSize) {
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
__device__ __forceinline__ void differentiate_part(
    const BackwardArgs& args, int64_t row, int64_t part) {
  const Rows& rows = args.rows;
  T* output = static_cast<T*>(args.grad_logits) + RowLayout::offset(args.grad_layout, row);
  const RowPart<T> columns(output, part, rows.vocab);
  output += columns.begin;
  if (!Rows::scored(rows, row)) {
    columns.zero(output);
    return;
  }
  const int target = columns.place_of(Rows::target(rows, row));
  const int64_t stride = rows.column_stride;
  const T* input = row_of<T>(rows, row) + columns.begin * stride;
  const auto differentiate = [&](const G& g, int column) {
    const auto x = to_acc<typename G::Acc>(input[column * stride]);
    output[column] = from_acc<T>(g.element(x, column == target));
  };
  if (stride != 1 || !is_aligned(input + columns.body)) {
    const G g = G::load(args, row);
    columns.for_each([&](int column) { differentiate(g, column); });
    return;
  }
  const auto* source = reinterpret_cast<const Vector<T>*>(input + columns.body);
  auto* destination = reinterpret_cast<Vector<T>*>(output + columns.body);
  int v = threadIdx.x;
  // The first logits are asked for before what the elements share is waited for.
  Vector<T> vector;
  if (v < columns.count) {
    vector = load_streaming(source + v);
  }
  const G g = G::load(args, row);
  columns.for_each_single([&](int column) { differentiate(g, column); });
  while (v < columns.count) {
    const int place = target - columns.body - v * Vector<T>::kSize;
    store_streaming(destination + v, differentiate_vector(g, vector, place));
    v += columns.kThreads;
    if (v < columns.count) {
      vector = load_streaming(source + v);
    }
  }
}

template <class T, class G>
__global__ void __launch_bounds__(BackwardPolicy::kThreads, G::blocks(sizeof(T)))
    backward_kernel(const __grid_constant__ BackwardArgs args) {
  for_each_part(args.rows.count, [&](int64_t row, int64_t part) {
    differentiate_part<T, G>(args, row, part);
  });
}

template <class G>
void launch_backward_of(const BackwardArgs& args, void* stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    const dim3 blocks = grid_of_parts<T>(args.rows.count, args.rows.vocab);
    backward_kernel<T, G>
        <<<blocks, BackwardPolicy::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(args);
    check(cudaGetLastError(), "launch of backward_kernel");
  });
}

}  // namespace detlogp::cuda
