// The first-order gradient's walk over [N, V]. `G` is what a row's elements share:
//   static G load<T>(const BackwardArgs&, int64_t row, int64_t first, int64_t last), by all threads of a
//     block that has these columns; it may read no other logits, which may be overwritten already
//   int64_t target, from target_of
//   T element<T>(T x, bool is_target)
#pragma once

#include "core/row.h"
#include "cuda/device.h"
#include "cuda/policy.h"

namespace detlogp::cuda {

// The row's target, which may lie in another part of its columns; kNoTarget where the row is exactly zero.
constexpr int64_t kNoTarget = INT64_MIN;

__device__ __forceinline__ int64_t target_of(const Rows& rows, int64_t row) {
  return Rows::scored(rows, row) ? Rows::target(rows, row) : kNoTarget;
}

// `target` counts from the vector's first element; almost always it lies outside.
template <class T, class G>
__device__ __forceinline__ Vector<T> differentiate_vector(
    const G& g, const Vector<T>& x, int64_t target) {
  Vector<T> result;
#pragma unroll
  for (int e = 0; e < Vector<T>::kSize; ++e) {
    result.element[e] = g.template element<T>(x.element[e], false);
  }
  if (static_cast<uint64_t>(target) < Vector<T>::kSize) {
#pragma unroll
    for (int e = 0; e < Vector<T>::kSize; ++e) {
      if (e == target) {
        result.element[e] = g.template element<T>(x.element[e], true);
      }
    }
  }
  return result;
}

// Past the cache, where logits that are read next may still be.
template <class T>
__device__ __forceinline__ void store_streaming(Vector<T>* to, const Vector<T>& vector) {
  uint4 bits;
  memcpy(&bits, &vector, sizeof(bits));
  __stcs(reinterpret_cast<uint4*>(to), bits);
}

// Columns first <= v < last; both pointers are 16-byte aligned at `first`.
template <class T, class G>
__device__ __forceinline__ int64_t
differentiate_vectors(const G& g, const T* input, T* output, int64_t first, int64_t last) {
  constexpr int kSize = Vector<T>::kSize;
  constexpr int kUnroll = BackwardPolicy::kVectors;
  constexpr int kThreads = BackwardPolicy::kThreads;
  const auto* source = reinterpret_cast<const Vector<T>*>(input + first);
  auto* destination = reinterpret_cast<Vector<T>*>(output + first);
  const int count = static_cast<int>((last - first) / kSize);
  const int64_t target = g.target - first;
  int v = threadIdx.x;
  for (; v + kThreads * (kUnroll - 1) < count; v += kThreads * kUnroll) {
    Vector<T> loaded[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      loaded[u] = source[v + u * kThreads];
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int vector = v + u * kThreads;
      store_streaming(
          destination + vector, differentiate_vector(g, loaded[u], target - vector * kSize));
    }
  }
  for (; v < count; v += kThreads) {
    store_streaming(destination + v, differentiate_vector(g, source[v], target - v * kSize));
  }
  return first + static_cast<int64_t>(count) * kSize;
}

template <class T, class G>
__device__ __forceinline__ void differentiate_elements(
    const G& g, const T* input, int64_t stride, T* output, int64_t first, int64_t last) {
  for (int64_t v = first + threadIdx.x; v < last; v += BackwardPolicy::kThreads) {
    output[v] = g.template element<T>(input[v * stride], v == g.target);
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
  constexpr int64_t kColumns = BackwardPolicy::kBytesPerBlock / sizeof(T);
  const Rows& rows = args.rows;
  T* output = static_cast<T*>(args.grad_logits) + RowLayout::offset(args.grad_layout, row);
  const int64_t head = elements_to_boundary(output);
  const int64_t first = part == 0 ? 0 : head + part * kColumns;
  const int64_t end = head + (part + 1) * kColumns;
  const int64_t last = end < rows.vocab ? end : rows.vocab;
  const G g = G::template load<T>(args, row, first, last);
  if (g.target == kNoTarget) {
    zero_elements(output, first, last);
    return;
  }
  const T* input = row_of<T>(rows, row);
  int64_t done = first;
  if (rows.column_stride == 1 && head < last && is_aligned(input + head)) {
    const int64_t body = part == 0 ? head : first;
    differentiate_elements<T, G>(g, input, 1, output, first, body);
    done = differentiate_vectors(g, input, output, body, last);
  }
  differentiate_elements<T, G>(g, input, rows.column_stride, output, done, last);
}

template <class T, class G>
__global__ void __launch_bounds__(BackwardPolicy::kThreads)
    backward_kernel(const __grid_constant__ BackwardArgs args, int64_t parts_per_row) {
  const int64_t parts = args.rows.count * parts_per_row;
  for (int64_t part = blockIdx.x; part < parts; part += gridDim.x) {
    // From the last row, whose logits the forward has left in the cache.
    const int64_t from_end = parts - 1 - part;
    differentiate_part<T, G>(args, from_end / parts_per_row, from_end % parts_per_row);
  }
}

template <class G>
void launch_backward_of(const BackwardArgs& args, void* stream) {
  visit_dtype(args.rows.logits_type, [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kColumns = BackwardPolicy::kBytesPerBlock / sizeof(T);
    const int64_t parts_per_row = (args.rows.vocab + kColumns - 1) / kColumns;
    const int64_t parts = args.rows.count * parts_per_row;
    const auto blocks = static_cast<unsigned>(parts < INT32_MAX ? parts : INT32_MAX);
    backward_kernel<T, G>
        <<<blocks, BackwardPolicy::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
            args, parts_per_row);
    check(cudaGetLastError(), "launch of backward_kernel");
  });
}

}  // namespace detlogp::cuda
