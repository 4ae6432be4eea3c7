// The four element types, and exact widening and correctly rounded narrowing between them.
#pragma once

#include "core/platform.h"

namespace detlogp {

enum class Dtype : int { float16, bfloat16, float32, float64 };

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// ---- widening: exact -------------------------------------------------------------------------

DETLOGP_FN float widen(BFloat16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

// Selects instead of branches, so that compilers vectorise it. No step meets a subnormal float.
DETLOGP_FN float widen(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;
  const uint32_t rebiased = magnitude + (112u << 23);
  const float subnormal = bit_cast<float>(magnitude + (113u << 23)) - 0x1p-14f;  // 6.1035e-05
  uint32_t bits = magnitude >= (0x7c00u << 13) ? rebiased + (112u << 23) : rebiased;
  bits = magnitude < (0x0400u << 13) ? bit_cast<uint32_t>(subnormal) : bits;
  return bit_cast<float>(bits | sign);
}

DETLOGP_FN float widen(float x) {
  return x;
}

DETLOGP_FN double widen(double x) {
  return x;
}

// ---- narrowing: one rounding, to nearest, ties to even ---------------------------------------

template <class To>
struct Narrow;

template <>
struct Narrow<double> {
  DETLOGP_FN double from(double x) {
    return x;
  }
};

template <>
struct Narrow<float> {
  DETLOGP_FN float from(float x) {
    return x;
  }
  DETLOGP_FN float from(double x) {
    return static_cast<float>(x);
  }
};

// A double rounded to odd in float: a second rounding, to 16 bits, then rounds as if it were the
// only one, because the sticky last bit keeps every tie apart (Boldo and Melquiond, 2008).
DETLOGP_FN float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double back = static_cast<double>(nearest);
  const bool exact = back == x || x != x;
  const bool away_from_zero = (x < 0 ? -back : back) > (x < 0 ? -x : x);
  const uint32_t toward_zero = bit_cast<uint32_t>(nearest) - (away_from_zero ? 1u : 0u);
  return exact ? nearest : bit_cast<float>(toward_zero | 1u);
}

template <>
struct Narrow<BFloat16> {
  DETLOGP_FN BFloat16 from(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
    return BFloat16{static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded)};
  }
  DETLOGP_FN BFloat16 from(double x) {
    return from(round_to_odd(x));
  }
};

template <>
struct Narrow<Half> {
  DETLOGP_FN Half from(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0x0fffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    // Adding 0.5, whose last place is 2^-24, rounds to the unit of a subnormal half.
    const float shifted = bit_cast<float>(magnitude) + 0.5f;
    const uint32_t subnormal = bit_cast<uint32_t>(shifted) - 0x3f000000u;
    uint32_t result = magnitude < 0x38800000u ? subnormal : normal;  // 2^-14
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;            // 65520: rounds to infinity
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return Half{static_cast<uint16_t>(result | sign)};
  }
  DETLOGP_FN Half from(double x) {
    return from(round_to_odd(x));
  }
};

// ---- one value behind an untyped pointer, for the few numbers that a row has ------------------

template <class Acc>
DETLOGP_FN void store_as(Dtype type, void* data, int64_t index, Acc value) {
  switch (type) {
    case Dtype::float16:
      static_cast<Half*>(data)[index] = Narrow<Half>::from(value);
      break;
    case Dtype::bfloat16:
      static_cast<BFloat16*>(data)[index] = Narrow<BFloat16>::from(value);
      break;
    case Dtype::float32:
      static_cast<float*>(data)[index] = Narrow<float>::from(value);
      break;
    case Dtype::float64:
      static_cast<double*>(data)[index] = static_cast<double>(value);
      break;
  }
}

// Calls f with a value of the element type, so that one template serves all four.
template <class F>
void visit_dtype(Dtype type, F&& f) {
  switch (type) {
    case Dtype::float16:
      return f(Half{});
    case Dtype::bfloat16:
      return f(BFloat16{});
    case Dtype::float32:
      return f(float{});
    case Dtype::float64:
      return f(double{});
  }
}

}  // namespace detlogp
