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
DETLOGP_FN void open_row(RowReader<T>& reader, const Rows& rows, int64_t row) {
  reader.row = static_cast<const T*>(rows.logits) + RowLayout::offset(rows.layout, row);
  reader.column_stride = rows.column_stride;
}

template <class T>
DETLOGP_FN void open_row(RowReader<T>& reader, const Operand& operand, int64_t row) {
  reader.row = static_cast<const T*>(operand.data) + RowLayout::offset(operand.layout, row);
  reader.column_stride = operand.column_stride;
}

// The columns of the row that comes next, or nothing. Asked for while the exponentials of this row are
// computed, so that the next row's max, which does little but read, finds them in the cache.
template <class T>
struct NextRow {
  const T* row;  // null where there is none, or where its columns are strided

  DETLOGP_FN void prefetch(const NextRow& next, int64_t column, int count) {
    constexpr int kPerLine = 64 / sizeof(T);
    if (next.row != nullptr) {
      for (int k = 0; k < count; k += kPerLine) {
        __builtin_prefetch(next.row + column + k, 0, 2);
      }
    }
  }
};

// Calls f(column, count) for consecutive blocks of at most kMaxLanes columns.
template <class F>
DETLOGP_FN void for_each_block(int64_t vocab, const F& f) {
  int64_t column = 0;
  for (; column + kMaxLanes <= vocab; column += kMaxLanes) {
    f(column, kMaxLanes);
  }
  if (column < vocab) {
    f(column, static_cast<int>(vocab - column));
  }
}

}  // namespace detlogp::cpu
