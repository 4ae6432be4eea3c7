// The stages in which a row begins or ends: a warp copies them, 16 bytes at a time.
#pragma once

#include "cuda/ring/pieces.h"

namespace detlogp::cuda::ring {

// What is not the row's becomes -inf in the ring, so that only those who copy know where a row begins and ends.
template <class S>
class Edges {
  using T = typename S::Logit;

 public:
  __device__ __forceinline__ Edges(const Block<S>& block, const char* row, const Source<S>& source)
      : source_(source), begin_(row), end_(row + static_cast<int64_t>(block.vocab) * sizeof(T)) {
    past_ = static_cast<int>(reinterpret_cast<uintptr_t>(end_) % 16);
    // Asked for now, they are here when the first and the last stage need them.
    if (source.is_shifted) {
      head_ = *reinterpret_cast<const uint4*>(row - reinterpret_cast<uintptr_t>(row) % 16);
    }
    if (past_ != 0) {
      tail_ = *reinterpret_cast<const uint4*>(end_ - past_);
    }
  }

  __device__ __forceinline__ void copy(const Pieces<S>& pieces, int stage, uint32_t to) const {
    const char* from = source_.slice + static_cast<int64_t>(stage) * Source<S>::kStageInMemory;
    copy_pieces(pieces, to + pieces.place, from + pieces.offset);
    const int lane = threadIdx.x % 32;
    if (source_.is_shifted && pieces.has_last(lane)) {
      const uint32_t to_last = to + pieces.last_place(lane);
      const char* from_last = from + pieces.last_offset(lane);
      const auto left = static_cast<int>(end_ - from_last);
      left >= 16 ? copy_16_bytes<0, 0>(to_last, from_last)
                 : Filler<T>::store_around(to_last, tail_, 0, left);
    }
  }

 private:
  __device__ __forceinline__ void copy_pieces(
      const Pieces<S>& pieces, uint32_t to_lane, const char* from_lane) const {
    const auto last = static_cast<int>(end_ - from_lane);
    const bool has_head = from_lane < begin_;  // it is the first of a lane's pieces
    uint32_t to_tail = 0;
    pieces.for_each([&](auto step) {
      const int left = last - step.kOffset;
      if (left <= 0) {
        Filler<T>::store(to_lane + step.kPlace);
      } else if (left < 16) {
        to_tail = to_lane + step.kPlace;
      } else if (step.kOffset > 0 || !has_head) {
        copy_16_bytes<step.kPlace, step.kOffset>(to_lane, from_lane);
      }
    });
    if (has_head) {
      Filler<T>::store_around(to_lane, head_, static_cast<int>(begin_ - from_lane), 16);
    }
    if (to_tail != 0) {
      Filler<T>::store_around(to_tail, tail_, 0, past_);
    }
  }

  const Source<S>& source_;
  const char* begin_;
  const char* end_;
  int past_;      // bytes of the row in its last piece, if not all 16
  uint4 head_{};  // the first piece and the last, where they hold other bytes too
  uint4 tail_{};
};

}  // namespace detlogp::cuda::ring
