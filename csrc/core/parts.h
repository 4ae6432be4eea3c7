// The exact contract in steps, so that each process can have a part of a row's columns.
//
// Computes       the max of logits, and the sum of their quanta (core/exact.h); the extremes of terms of
//                either sign, and their sum in quanta of 2^(E - R), E the exponent of the largest magnitude
// Order          none: maxima of keys, sums of whole numbers
// Accuracy       a row sum: V 2^-(R + 1) of the largest magnitude, R = 42 for V <= 2^19, and one rounding
// Special cases  a NaN or infinity among the terms gives what IEEE additions of the terms would
// Source         docs/exact.md
#pragma once

#include "core/exact.h"

namespace detlogp {

// ---- keys: floats as integers of the same order -----------------------------------------------

// Every NaN is one number, above all others.
DETLOGP_FN int32_t to_key(float x) {
  const int32_t bits = bit_cast<int32_t>(x);
  return x != x ? 0x7fc00000 : bits < 0 ? bits ^ 0x7fffffff : bits;
}

DETLOGP_FN float from_key(int32_t key) {
  return bit_cast<float>(key < 0 ? key ^ 0x7fffffff : key);
}

DETLOGP_FN int32_t larger_key(int32_t a, int32_t b) {
  return a > b ? a : b;
}

// ---- the logits -------------------------------------------------------------------------------

// keys[0, r] is that of the row's max, keys[1, r] that of its target.
DETLOGP_FN ExactScale scale_of_part(const PartArgs& args, int64_t row) {
  return scale_of_sum(from_key(args.scale[row]), log2_quanta(args.rows.whole_vocab));
}

DETLOGP_FN void finish_row(const FinishArgs& args, int64_t row) {
  const Rows& rows = args.forward.rows;
  if (!Rows::scored(rows, row)) {
    store_skipped_row<float>(args.forward, row);
    return;
  }
  const float row_max = from_key(args.keys[row]);
  const ExactScale scale = scale_of_sum(row_max, log2_quanta(rows.whole_vocab));
  const float target = from_key(args.keys[rows.count + row]);
  store_exact_row(args.forward, row, target, row_max, scale, args.sums[row]);
}

// ---- sums of terms of either sign -------------------------------------------------------------

// keys[0, r] is that of the largest term, or of 0; keys[1, r] that of the largest negated one.
struct TermScale {
  float largest;
  float lowest;
  int exponent;  // of a term's quanta: term 2^exponent
};

DETLOGP_FN float power_of_two(int exponent) {
  return bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

DETLOGP_FN TermScale term_scale(const int32_t* keys, int64_t count, int64_t row, int64_t vocab) {
  const int log2_vocab = log2_up(vocab);
  TermScale scale;
  const int32_t largest = keys[row];
  const int32_t negated = keys[count + row];
  scale.largest = from_key(largest);
  scale.lowest = -from_key(negated);
  // A positive key is a float's bits. From 2^-80 down quanta are as at 2^-80: their scale is a float.
  const int exponent = (larger_key(largest, negated) >> 23) - 127;
  const int of_quanta = log2_vocab <= 19 ? 42 : 61 - log2_vocab;
  scale.exponent = of_quanta - (exponent < -80 ? -80 : exponent);
  return scale;
}

// The product is exact, but where it rounds to 0 quanta.
DETLOGP_FN uint64_t term_quanta(float factor, float term) {
  return to_quanta(term * factor);
}

DETLOGP_FN void finish_total(const TotalArgs& args, int64_t row) {
  const TermScale scale = term_scale(args.keys, args.count, row, args.vocab);
  const double sum = static_cast<double>(static_cast<int64_t>(args.sums[row]));
  const double unit = static_cast<double>(power_of_two(-scale.exponent));
  const bool finite = is_finite(scale.largest) && is_finite(scale.lowest);
  args.totals[row] = finite ? static_cast<float>(sum * unit) : scale.largest + scale.lowest;
}

}  // namespace detlogp
