// The sum of each row on the CPU.
//
// Computes       sums[r] = sum_v values[r, v]
// Order          core/lanes.h, as the forward's
// Accuracy       at most (ceil(V/B) + 8) u sum_v |values[r, v]|, u = 2^-24 (2^-53)
// Special cases  as IEEE additions have them
// Source         core/lanes.h
#include "cpu/lanes.h"
#include "cpu/paths.h"
#include "cpu/row_reader.h"

namespace detlogp::cpu::DETLOGP_CPU_PATH {

template <class Acc>
void row_sum(const RowSumArgs& args, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    RowReader<Acc> reader;
    open_row(reader, args.values, row);
    const auto add_block = [&](Acc* lane, int64_t column, int count) {
      const Acc* block = RowReader<Acc>::block(reader, column, count);
      for (int k = 0; k < count; ++k) {
        lane[k] += block[k];
      }
    };
    static_cast<Acc*>(args.sums)[row] = sum_in_lanes<Acc>(args.vocab, add_block);
  }
}

template void row_sum<float>(const RowSumArgs&, int64_t, int64_t);
template void row_sum<double>(const RowSumArgs&, int64_t, int64_t);

}  // namespace detlogp::cpu::DETLOGP_CPU_PATH
