// A block's part of a row, from the max to the sums of its groups of lanes: terms by all threads, additions by one warp
// for each group.
#pragma once

#include "core/parts.h"
#include "cuda/barrier.h"
#include "cuda/few/columns.h"
#include "cuda/lanes.h"
#include "cuda/vectors.h"

namespace detlogp::cuda::few {

enum NamedBarrier { kMaxima = 1, kFirstChunk };

template <class S>
struct Shared {
  Barrier maxima_are_here;
  Barrier sums_are_here;
  int max_of_warp[kThreads / 32];  // as keys
  int max_of_block[S::kCluster];
  float sum_of_group[kMaxLanes / kGroup];
};

// The row's max, once every block has sent its own.
template <class S>
__device__ __forceinline__ float wait_for_max(const Shared<S>& shared) {
  constexpr int C = S::kCluster;
  wait_for_cluster<C>(shared.maxima_are_here, 0);
  return from_key(__reduce_max_sync(0xffffffffu, shared.max_of_block[threadIdx.x % C]));
}

// Where a term of the block lies, counted by periods and lanes. Of two-byte logits a thread has 8 neighbours: halves of
// them change places, so that a warp stores to all banks.
template <class T>
__device__ __forceinline__ int place_of_term(int index) {
  return sizeof(T) == 2 ? index ^ (index / 32 % 2 * 4) : index;
}

enum class Kind { empty, near, any };

template <class S, Kind K>
__device__ __forceinline__ void store_terms(
    const uint4& words, float row_max, float* const (&place)[S::kPieceSize / 4], int offset) {
  using T = typename S::Logit;
  Vector<T> piece;
  memcpy(&piece, &words, sizeof(piece));
  const auto x = widened<float>(piece);
  const auto term = [&](int e) {
    const float below = x.of[e] - row_max;
    return K == Kind::empty  ? 0.0f
           : K == Kind::near ? ring::make_near_term<T, false>(below)
                             : term_of(below);
  };
#pragma unroll
  for (int half = 0; half < S::kPieceSize / 4; ++half) {
    const int e = 4 * half;
    *reinterpret_cast<float4*>(place[half] + offset) = {
        term(e), term(e + 1), term(e + 2), term(e + 3)};
  }
}

// 2^64 exp(x - m) of every column (cuda/exp.h).
template <class S>
__device__ __forceinline__ void make_terms(
    Shared<S>& shared, const Columns<S>& columns, float* terms, int periods, int rank) {
  using T = typename S::Logit;
  const int thread = threadIdx.x;
  const int lane = thread % 32;
  shared.max_of_warp[thread / 32] = __reduce_max_sync(0xffffffffu, to_key(columns.max()));
  const Near<S> near(columns);
  wait_named(kMaxima, kThreads);
  if (thread < 32) {
    const int key = __reduce_max_sync(0xffffffffu, shared.max_of_warp[lane % (kThreads / 32)]);
    if (lane < S::kCluster) {
      send(&shared.max_of_block[rank], shared.maxima_are_here, lane, key);
    }
  }
  const float row_max = wait_for_max(shared);
  const bool are_near = near.are_near(row_max);
  float* place[S::kPieceSize / 4];
#pragma unroll
  for (int half = 0; half < S::kPieceSize / 4; ++half) {
    place[half] = terms + place_of_term<T>(thread * S::kPieceSize + 4 * half);
  }
#pragma unroll
  for (int i = 0; i < S::kSteps; ++i) {
    if (i % S::kChunkSteps == 0 && i * S::kAtATime >= periods) {
      break;
    }
    constexpr int kStepTerms = kThreads * S::kPieceSize;
    if (are_near && columns.is_whole(i)) {
      store_terms<S, Kind::near>(columns.piece[i], row_max, place, i * kStepTerms);
    } else if (columns.is_empty(i)) {
      store_terms<S, Kind::empty>(columns.piece[i], row_max, place, i * kStepTerms);
    } else {
      store_terms<S, Kind::any>(columns.piece[i], row_max, place, i * kStepTerms);
    }
    if (i % S::kChunkSteps == S::kChunkSteps - 1) {
      arrive_named(kFirstChunk + i / S::kChunkSteps, kThreads + S::kLanes);
    }
  }
}

// The sum of one lane of the block. Terms behind the row's last period are 0.
template <class S>
__device__ __forceinline__ float add_terms(const float* terms, int periods, int lane) {
  constexpr int kAhead = 16;  // loads in flight
  const float* from = terms + place_of_term<typename S::Logit>(lane);
  float sum = 0;
#pragma unroll
  for (int chunk = 0; chunk < S::kSteps / S::kChunkSteps; ++chunk) {
    const int begin = chunk * S::kChunk;
    if (begin >= periods) {
      break;
    }
    wait_named(kFirstChunk + chunk, kThreads + S::kLanes);
    float term[kAhead];
#pragma unroll
    for (int i = 0; i < S::kChunk + kAhead; ++i) {
      if (i >= kAhead) {
        sum = __fmaf_rn(term[i % kAhead], 1 / kTermScale, sum);
      }
      if (i < S::kChunk) {
        term[i % kAhead] = from[(begin + i) * S::kLanes];
      }
    }
  }
  return sum;
}

}  // namespace detlogp::cuda::few
