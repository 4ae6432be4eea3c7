// The forward kernel for wide rows, which forward.cu prefers where it serves.
#pragma once

#include "core/args.h"

namespace detlogp::cuda {

constexpr int kMaxCluster = 8;
constexpr int kAnyCluster = 0;
constexpr int64_t kNarrowVocab = 4096;  // up to it, B is less than 512

// `cluster` blocks a row (1, 2, 4 or 8), or as many as suit. Returns false, and does nothing, where the
// kernel does not serve: other types, strided columns, narrow rows, rows beyond the ring, old devices.
bool launch_forward_ring(const ForwardArgs& args, void* stream, int cluster);
bool launch_exact_ring(const ForwardArgs& args, void* stream, int cluster);
bool launch_general_ring(const ForwardArgs& args, void* stream, int cluster);
bool launch_general_exact_ring(const ForwardArgs& args, void* stream, int cluster);

// 8 or 4 blocks a row, where the device takes all rows at a time, or `always`. Returns false, and does nothing, where
// the kernel does not serve: other types, strided columns, narrow rows and very wide ones, old devices.
bool launch_few_rows(const ForwardArgs& args, void* stream, bool always);

// A block a row, for temperatures and the entropy in the locked contract.
void launch_general_rows(const ForwardArgs& args, bool in_double, void* stream);

}  // namespace detlogp::cuda
