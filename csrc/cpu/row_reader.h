// Blocks of up to kMaxLanes consecutive columns of a row, contiguous in memory whatever the strides.
#pragma once

#include "core/args.h"
#include "core/lanes.h"

namespace detlogp::cpu {

template <class T>
struct RowReader {
  const T* row;
  int64_t column_stride;
  T staged[kMaxLanes];

  DETLOGP_FN const T* block(RowReader& reader, int64_t column, int count) {
    if (reader.column_stride == 1) {
      return reader.row + column;
    }
    for (int k = 0; k < count; ++k) {
      reader.staged[k] = reader.row[(column + k) * reader.column_stride];
    }
    return reader.staged;
  }
};

template <class T>
DETLOGP_FN const T* row_pointer(const Rows& rows, int64_t row) {
  return static_cast<const T*>(rows.logits) + RowLayout::offset(rows.layout, row);
}

}  // namespace detlogp::cpu
