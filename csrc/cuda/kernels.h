// The CUDA kernels' launchers. `stream` is a cudaStream_t; the caller has made the device current.
#pragma once

#include "core/args.h"

namespace detlogp::cuda {

void launch_forward(const ForwardArgs& args, Arithmetic arithmetic, void* stream);
void launch_backward(const BackwardArgs& args, Arithmetic arithmetic, void* stream);
void launch_second_order(const SecondOrderArgs& args, Arithmetic arithmetic, void* stream);
void launch_tangent(const TangentArgs& args, Arithmetic arithmetic, void* stream);
void launch_probability(const ProbabilityArgs& args, Arithmetic arithmetic, void* stream);
void launch_row_sum(const RowSumArgs& args, Arithmetic arithmetic, void* stream);

// The exact contract's, which launch_forward and launch_backward call.
void launch_exact_rows(const ForwardArgs& args, void* stream);
void launch_exact_backward(const BackwardArgs& args, void* stream);

// Its steps, for rows whose columns come in parts.
void launch_exact_max(const PartArgs& args, void* stream);
void launch_exact_sum(const PartArgs& args, void* stream);
void launch_exact_extremes(const PartArgs& args, void* stream);
void launch_exact_row_sum(const PartArgs& args, void* stream);
void launch_exact_finish(const FinishArgs& args, void* stream);
void launch_exact_total(const TotalArgs& args, void* stream);

// How the forward lays its work out: "auto", "rows" (a block a row), or, where that serves, "few" (8 or 4 blocks a row,
// its logits in registers), "ring1", "ring2", "ring4", "ring8" (so many blocks a row). Returns false for another name.
// For tests.
bool select_layout(const char* name);

// Makes a device current for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int previous_;
  bool changed_;
};

// "9.0" and so on, of every architecture whose machine code is in this build, and its toolkit.
const char* architectures();
const char* toolkit_version();

}  // namespace detlogp::cuda
