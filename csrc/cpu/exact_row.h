// What a row of the exact contract is read for: its max, and the sum of its quanta.
#pragma once

#include "core/exact.h"
#include "cpu/row_reader.h"

namespace detlogp::cpu {

template <class T>
DETLOGP_FN float to_float(T x) {
  return static_cast<float>(widen(x));
}

// NaN where the row holds one.
template <class T>
static float find_max(RowReader<T>& reader, int64_t vocab) {
  const float minus_infinity = bit_cast<float>(0xff800000u);
  float lane[kMaxLanes];
  uint32_t is_nan[kMaxLanes] = {};
  for (float& value : lane) {
    value = minus_infinity;
  }
  for_each_block(vocab, [&](int64_t column, int count) {
    const T* block = RowReader<T>::block(reader, column, count);
    for (int k = 0; k < count; ++k) {
      const float x = to_float(block[k]);
      lane[k] = x > lane[k] ? x : lane[k];
      is_nan[k] |= x != x ? 1u : 0u;
    }
  });
  float result = minus_infinity;
  uint32_t any_nan = 0;
  for (int k = 0; k < kMaxLanes; ++k) {
    result = lane[k] > result ? lane[k] : result;
    any_nan |= is_nan[k];
  }
  return any_nan != 0 ? bit_cast<float>(0x7fc00000u) : result;
}

template <class T>
static uint64_t sum_quanta(RowReader<T>& reader, int64_t vocab, const ExactScale& scale) {
  uint64_t lane[kMaxLanes] = {};
  for_each_block(vocab, [&](int64_t column, int count) {
    const T* block = RowReader<T>::block(reader, column, count);
    for (int k = 0; k < count; ++k) {
      lane[k] += quanta(scale, to_float(block[k]));
    }
  });
  uint64_t sum = 0;
  for (const uint64_t part : lane) {
    sum += part;
  }
  return sum;
}

}  // namespace detlogp::cpu
