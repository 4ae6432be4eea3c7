// exp for arguments that are not positive: the only ones that a softmax needs.
//
// Computes       exp(x) as scale * fraction, scale = 2^k, fraction in [0.70, 1.42]
// Order          k = round(x / log 2), r = x - k log 2 by two fused multiply-adds (Cody and Waite),
//                fraction = 1 + r (1 + r (c2 + r (c3 + ...))) by Horner; IEEE operations only
// Accuracy       float: at most 0.98 ulp on [-87.3, 0], measured over every float; double: at most
//                1 ulp on [-708.3, 0], by sampling (both in tests/test_accuracy.py). Results below
//                2^-126 (2^-1022) are rounded to a subnormal or to 0, an error of less than 2^-126.
// Special cases  exp(-inf) = 0, exp(NaN) = NaN, exp(0) = 1, exactly; 0 below -87.69 (-708.74)
// Source         coefficients: interpolation of (exp(r) - 1 - r) / r^2 at the Chebyshev nodes of
//                |r| <= log(2) / 2 in 60 digits, rounded to the type
#pragma once

#include "core/platform.h"

namespace detlogp {

template <class Real>
struct Exponential {
  Real scale;
  Real fraction;
};

// exp(r), |r| <= 0.351.
DETLOGP_FN float exp_polynomial(float r) {
  float poly = 0x1.6d110ap-10f;                        // 0.00139261840
  poly = fused_multiply_add(poly, r, 0x1.120b6ep-7f);  // 0.00836317893
  poly = fused_multiply_add(poly, r, 0x1.55551ap-5f);  // 0.0416665561
  poly = fused_multiply_add(poly, r, 0x1.5554dcp-3f);  // 0.166665763
  poly = fused_multiply_add(poly, r, 0.5f);
  poly = fused_multiply_add(poly, r, 1.0f);
  poly = fused_multiply_add(poly, r, 1.0f);
  return poly;
}

DETLOGP_FN Exponential<float> split_exp(float x) {
  // Clamping to -127 log 2 makes the exponent field 0, so that scale is 0. A NaN passes through.
  const float lowest = -0x1.601e68p+6f;  // -88.0297
  const float clamped = x < lowest ? lowest : x;
  // The last bits of `shifted` hold k + 127, the exponent field of 2^k.
  const float magic = 0x1.8p+23f + 127.0f;
  const float shifted = fused_multiply_add(clamped, 0x1.715476p+0f, magic);  // 1 / log 2
  const float k = shifted - magic;
  float r = fused_multiply_add(k, -0x1.62e430p-1f, clamped);  // log 2, high part: 0.693147182
  r = fused_multiply_add(k, 0x1.05c610p-29f, r);              // minus its low part: -1.9046542e-9
  const uint32_t exponent = bit_cast<uint32_t>(shifted) << 23;
  return {bit_cast<float>(exponent), exp_polynomial(r)};
}

DETLOGP_FN Exponential<double> split_exp(double x) {
  const double lowest = -0x1.628b76e3a7b61p+9;  // -709.0896: -1023 log 2
  const double clamped = x < lowest ? lowest : x;
  const double magic = 0x1.8p+52 + 1023.0;
  const double shifted = fused_multiply_add(clamped, 0x1.71547652b82fep+0, magic);
  const double k = shifted - magic;
  double r = fused_multiply_add(k, -0x1.62e42fefa39efp-1, clamped);  // 0.69314718055994529
  r = fused_multiply_add(k, -0x1.abc9e3b39803fp-56, r);              // 2.3190468138462996e-17
  double poly = 0x1.af38a9b0ec855p-26;                               // 2.5100385e-08
  poly = fused_multiply_add(poly, r, 0x1.289185613a3d6p-22);         // 2.7620088e-07
  poly = fused_multiply_add(poly, r, 0x1.71de0dae63bb3p-19);         // 2.7557268e-06
  poly = fused_multiply_add(poly, r, 0x1.a019b90d2ae7ap-16);         // 2.4801522e-05
  poly = fused_multiply_add(poly, r, 0x1.a01a01a7c41d5p-13);         // 1.9841270e-04
  poly = fused_multiply_add(poly, r, 0x1.6c16c1788bd90p-10);         // 1.3888889e-03
  poly = fused_multiply_add(poly, r, 0x1.11111111109b3p-7);          // 8.3333333e-03
  poly = fused_multiply_add(poly, r, 0x1.5555555553d63p-5);          // 4.1666667e-02
  poly = fused_multiply_add(poly, r, 0x1.5555555555556p-3);          // 1.6666667e-01
  poly = fused_multiply_add(poly, r, 0.5);
  poly = fused_multiply_add(poly, r, 1.0);
  poly = fused_multiply_add(poly, r, 1.0);
  const uint64_t exponent = bit_cast<uint64_t>(shifted) << 52;
  return {bit_cast<double>(exponent), poly};
}

template <class Real>
DETLOGP_FN Real exp_nonpositive(Real x) {
  const Exponential<Real> e = split_exp(x);
  return e.scale * e.fraction;
}

// sum + exp(x). The product is a scaling by a power of two, so fusing it changes no bit of the sum
// except below 2^-126 (2^-1022), where it saves one rounding.
template <class Real>
DETLOGP_FN Real add_exp(Real sum, Real x) {
  const Exponential<Real> e = split_exp(x);
  return fused_multiply_add(e.scale, e.fraction, sum);
}

}  // namespace detlogp
