// log of a row's sum: 0, NaN, or at least 1.
//
// Computes       log(x) = k log 2 + log(f), x = 2^k f, f in [sqrt(1/2), sqrt(2))
// Order          s = (f - 1) / (f + 1); log(f) = (f - 1) - (h - s (h + R)), h = (f - 1)^2 / 2,
//                R a polynomial in s^2; IEEE operations only
// Accuracy       double: at most 1 ulp; float: computed in double and rounded once, 0.5001 ulp
// Special cases  log(0) = -inf, log(+inf) = +inf, log(NaN) = NaN, log(1) = 0 exactly
// Source         the reduction is that of FreeBSD's e_log.c; coefficients: interpolation of
//                (2 atanh(s) - 2 s) / s^3 at Chebyshev nodes in 60 digits
#pragma once

#include "core/platform.h"

namespace detlogp {

DETLOGP_FN double log_sum(double x) {
  const uint64_t bits = bit_cast<uint64_t>(x);
  if (x == 0.0) {
    return bit_cast<double>(0xfff0000000000000ull);
  }
  if (!(x < bit_cast<double>(0x7ff0000000000000ull))) {
    return x;
  }
  // Adding the distance from sqrt(1/2) to 1 carries into the exponent exactly when f >= sqrt(2).
  const uint64_t offset = 0x3ff0000000000000ull - 0x3fe6a09e667f3bcdull;
  const int64_t k = static_cast<int64_t>((bits + offset) >> 52) - 1023;
  const double f = bit_cast<double>(bits - (static_cast<uint64_t>(k) << 52)) - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double poly = 0x1.2b59b713616c9p-3;                        // 0.14616721
  poly = fused_multiply_add(poly, z, 0x1.39fe42e9740a7p-3);  // 0.15331700
  poly = fused_multiply_add(poly, z, 0x1.7462b58e46ebep-3);  // 0.18182890
  poly = fused_multiply_add(poly, z, 0x1.c71c62e26208bp-3);  // 0.22222211
  poly = fused_multiply_add(poly, z, 0x1.2492492df3ba9p-2);  // 0.28571429
  poly = fused_multiply_add(poly, z, 0x1.99999999952ccp-2);  // 0.40000000
  poly = fused_multiply_add(poly, z, 0x1.5555555555558p-1);  // 0.66666667
  const double remainder = z * poly;
  const double half_square = 0.5 * f * f;
  const double dk = static_cast<double>(k);
  const double low = fused_multiply_add(dk, 0x1.a39ef35793c76p-33, s * (half_square + remainder));
  // 0x1.62e42feep-1 is log 2 with 21 zero bits at the end, so dk times it is exact.
  return dk * 0x1.62e42fee00000p-1 - ((half_square - low) - f);
}

DETLOGP_FN float log_sum(float x) {
  return static_cast<float>(log_sum(static_cast<double>(x)));
}

}  // namespace detlogp
