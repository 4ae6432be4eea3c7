// The exact contract: a row's exponentials as whole numbers, whose sum has no order.
//
// Computes       q[v] = round(2^Q exp(y[v] - K log 2)), S = sum_v q[v] mod 2^64, log(s) = log(sum_v
//                exp(x[v] - m)) from S; and p[v] = exp((x[v] - m) - log(s)) for the gradient
// Order          none: integers. An element's steps, and a row's last ones, are IEEE additions,
//                products and fused multiply-adds in the order written here, so every machine agrees
// Accuracy       detlogp.testing.logp_error_bound, gradient_error_bound; proofs in docs/exact.md
// Special cases  a NaN or +inf in a row makes its max NaN or +inf, and its results NaN; a row of -inf
//                has the lse -inf and a NaN logp
// Source         docs/exact.md, from which these bits can be computed anew
#pragma once

#include "core/exp.h"
#include "core/log.h"
#include "core/row.h"

namespace detlogp {

// What a row's elements share. It depends on the row's max and on V alone.
struct ExactScale {
  float base;      // y = x - base: 0, or m where |m| is large, and then the subtraction is exact
  float magic;     // adding it leaves k + the exponent of the scale in the last bits of a float
  float lowest;    // y below it count as it, and give 0
  int maximum_k;   // K, the k of the max
  int log2_scale;  // the exponent of the scale: Q for the sum, 0 for p
};

// log2(vocab), rounded up.
DETLOGP_FN int log2_up(int64_t vocab) {
  int result = 0;
  while ((int64_t{1} << result) < vocab) {
    ++result;
  }
  return result;
}

// V 2^Q stays below 2^63, so that S, of terms below 1.5 2^Q, stays below 2^64.
DETLOGP_FN int log2_quanta(int64_t vocab) {
  const int log2_vocab = log2_up(vocab);
  return log2_vocab <= 20 ? 43 : 63 - log2_vocab;
}

constexpr float kRoundingMagic = 0x1.8p+23f;  // 12582912: the last bit of a float next to it is 1
constexpr float kLog2E = 0x1.715476p+0f;
// log 2, 1.9e-9 too large: a term that is 2^j below the max is 1.9e-9 j too large, relatively.
constexpr float kLog2 = 0x1.62e430p-1f;
constexpr float kLargeMax = 0x1p+18f;  // 262144

// `lowest_exponent` is the exponent of 2 at and below which a term may be taken for 0.
DETLOGP_FN ExactScale exact_scale(float row_max, int log2_scale, int lowest_exponent) {
  ExactScale scale;
  const float magnitude = row_max < 0 ? -row_max : row_max;
  scale.base = magnitude < kLargeMax ? 0.0f : row_max;
  const float y = row_max - scale.base;
  const float k = fused_multiply_add(y, kLog2E, kRoundingMagic) - kRoundingMagic;
  scale.maximum_k = magnitude < kLargeMax ? static_cast<int>(k) : 0;
  scale.log2_scale = log2_scale;
  scale.magic = kRoundingMagic + static_cast<float>(log2_scale - scale.maximum_k);
  scale.lowest = static_cast<float>(scale.maximum_k + lowest_exponent - log2_scale) * kLog2;
  return scale;
}

// A NaN counts as the lowest.
DETLOGP_FN float at_least(float x, float lowest) {
#if defined(__CUDA_ARCH__)
  return fmaxf(x, lowest);
#else
  return x > lowest ? x : lowest;
#endif
}

// 2^log2_scale exp(y - K log 2): a float from its fraction and its exponent.
DETLOGP_FN float exact_exp_of(const ExactScale& scale, float y) {
  y = at_least(y, scale.lowest);
  const float shifted = fused_multiply_add(y, kLog2E, scale.magic);
  const float k = shifted - scale.magic;
  const float r = fused_multiply_add(k, -kLog2, y);  // exact
  const uint32_t exponent = bit_cast<uint32_t>(shifted) << 23;
  return bit_cast<float>(bit_cast<uint32_t>(exp_polynomial(r)) + exponent);
}

DETLOGP_FN float exact_exp(const ExactScale& scale, float x) {
  return exact_exp_of(scale, x - scale.base);
}

// ---- the sum ----------------------------------------------------------------------------------

// Below 2^-2 a term rounds to 0. With the entropy, where terms are multiplied by a distance of up to 128, the
// lowest term is smaller; it rounds to 0 in both sums.
DETLOGP_FN ExactScale scale_of_sum(float row_max, int log2_quanta, bool with_entropy = false) {
  return exact_scale(row_max, log2_quanta, with_entropy ? -30 : -2);
}

// To the nearest whole number, ties to even. Below 2^51.
DETLOGP_FN uint64_t to_quanta(float term) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint64_t>(__float2ll_rn(term));
#else
  return bit_cast<uint64_t>(static_cast<double>(term) + 0x1.8p+52) - bit_cast<uint64_t>(0x1.8p+52);
#endif
}

DETLOGP_FN uint64_t quanta(const ExactScale& scale, float x) {
  return to_quanta(exact_exp(scale, x));
}

// Of the entropy's sum; `term` is exact_exp of x.
DETLOGP_FN uint64_t entropy_quanta(float term, float row_max, float x) {
  return to_quanta(term * distance_below_max(row_max, x));
}

DETLOGP_FN double value_of(const Exponential<double>& e) {
  return e.scale * e.fraction;
}

// The max's r, exact.
DETLOGP_FN double remainder_of_max(const ExactScale& scale, float row_max) {
  const double y = static_cast<double>(row_max - scale.base);
  return y - static_cast<double>(scale.maximum_k) * static_cast<double>(kLog2);
}

// s, in quanta, is of_max (1 + others). The max's own term is what it is in double, so that a token that is
// almost certain keeps its digits.
struct ExactSum {
  double of_max;
  double others;
};

DETLOGP_FN ExactSum exact_sum_of(const ExactScale& scale, float row_max, uint64_t sum) {
  const double e = value_of(split_exp(remainder_of_max(scale, row_max)));
  const double of_max = e * static_cast<double>(uint64_t{1} << scale.log2_scale);
  const double of_others = static_cast<double>(sum - quanta(scale, row_max));
  return {of_max, of_others / of_max};
}

DETLOGP_FN bool is_finite(float x) {
  return (bit_cast<uint32_t>(x) & 0x7f800000u) != 0x7f800000u;
}

// `row_max` is NaN where the row holds one.
DETLOGP_FN void store_exact_row(
    const ForwardArgs& args, int64_t row, float target, float row_max, const ExactScale& scale,
    uint64_t sum, uint64_t entropy_sum = 0) {
  const double nan = bit_cast<double>(0x7ff8000000000000ull);
  const bool is_empty = row_max == bit_cast<float>(0xff800000u);
  const ExactSum s = exact_sum_of(scale, row_max, sum);
  const double log_sum = is_finite(row_max) ? detlogp::log_sum(1.0 + s.others) : nan;
  const double m = static_cast<double>(row_max);
  const double logp = static_cast<double>(target) - m - log_sum;
  store_as(args.logp_type, args.logp, row, static_cast<float>(logp));
  if (args.lse != nullptr) {
    const double lse = is_empty ? m : m + log_sum;
    store_as(args.lse_type, args.lse, row, static_cast<float>(lse));
  }
  store_statistics(args, row, row_max, log_sum);
  const double gap = static_cast<double>(entropy_sum) / (s.of_max * (1.0 + s.others));
  store_entropy(args, row, log_sum + gap, static_cast<float>(gap));
}

// ---- the gradient -----------------------------------------------------------------------------

// p[v] = factor exact_exp(x[v]), or factor 0 where the exponential is below 2^-125. The target's own p, and
// what it lacks to 1, are taken in double: a token that is certain has the gradient 0.
struct ExactProbability {
  ExactScale scale;
  float factor;
  float of_target;
  float beside_target;  // 1 - p[t]
};

DETLOGP_FN ExactProbability exact_probability(float row_max, double log_sum, float target) {
  ExactProbability row;
  row.scale = exact_scale(row_max, 0, -125);
  const double r = remainder_of_max(row.scale, row_max);
  row.factor = static_cast<float>(value_of(split_exp(-(r + log_sum))));
  const double logp = static_cast<double>(target) - static_cast<double>(row_max) - log_sum;
  const double p = value_of(split_exp(logp));
  row.of_target = static_cast<float>(p);
  row.beside_target = static_cast<float>(1.0 - p);
  return row;
}

DETLOGP_FN float probability_of(const ExactProbability& row, float x) {
  const float y = x - row.scale.base;
  const float e = exact_exp(row.scale, x);
  return row.factor * (y > row.scale.lowest ? e : 0.0f);  // a NaN factor stays
}

// grad (onehot - p) + grad_lse p, as gradient() of core/row.h.
DETLOGP_FN float exact_gradient(
    const ExactProbability& row, float x, bool is_target, float grad, float grad_lse,
    bool has_lse) {
  const float p = is_target ? row.of_target : probability_of(row, x);
  const float product = grad * (is_target ? row.beside_target : 0.0f - p);
  return has_lse ? fused_multiply_add(grad_lse, p, product) : product;
}

}  // namespace detlogp
