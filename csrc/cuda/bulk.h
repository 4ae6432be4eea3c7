// Copies from global to shared memory that one thread asks for and the copy engine of sm_90 (TMA) does: as
// many bytes as a stage holds, in one instruction. They write by the asynchronous proxy, so a thread orders
// them after the ordinary writes to that place that it has seen: order_copies() first.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.h"

namespace detlogp::cuda {

// One of the warp's threads, the same each time.
__device__ __forceinline__ bool is_elected() {
  uint32_t result;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(result));
  return result != 0;
}

__device__ __forceinline__ void order_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// So many neighbouring bytes; `barrier` learns of them. Addresses and count are multiples of 16.
__device__ __forceinline__ void copy_bytes(
    uint32_t to, const void* from, int bytes, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// A map of all memory: from any multiple of 16, slices of so many bytes, `stride` bytes apart. It needs no
// pointer and no shape, so it is made once, not for each call.
struct MemoryMap {
  CUtensorMap map;

  // The coordinates of an address: of 2^33 bytes, which 8-byte element; then slices; then which 2^33 bytes.
  static constexpr int kLog2Block = 33;

  __device__ __forceinline__ static int element_of(uintptr_t address) {
    return static_cast<int>(address % (uintptr_t{1} << kLog2Block) / 8);
  }
  __device__ __forceinline__ static int block_of(uintptr_t address) {
    return static_cast<int>(address >> kLog2Block);
  }

  // Throws where the driver has no such maps.
  static MemoryMap of_slices(int bytes, int stride, int slices_of_a_box) {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    check(
        cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &encode, 12000, cudaEnableDefault, &found),
        "cudaGetDriverEntryPointByVersion");
    if (found != cudaDriverEntryPointSuccess) {
      throw std::runtime_error("detlogp: the driver has no cuTensorMapEncodeTiled");
    }
    constexpr cuuint64_t kMost = cuuint64_t{1} << 31;
    const cuuint64_t size[] = {kMost, kMost, cuuint64_t{1} << 24};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(stride), cuuint64_t{1} << kLog2Block};
    const auto elements = static_cast<cuuint32_t>(bytes / 8);
    const cuuint32_t box[] = {elements, static_cast<cuuint32_t>(slices_of_a_box), 1};
    const cuuint32_t every[] = {1, 1, 1};
    MemoryMap result;
    const CUresult error = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
        &result.map, CU_TENSOR_MAP_DATA_TYPE_FLOAT64, 3, nullptr, size, strides, box, every,
        CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (error != CUDA_SUCCESS) {
      throw std::runtime_error("detlogp: cuTensorMapEncodeTiled failed: " + std::to_string(error));
    }
    return result;
  }
};

// The slices `first` and up, counted from the address with these coordinates.
__device__ __forceinline__ void copy_box(
    uint32_t to, const MemoryMap& map, int element, int first, int block, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map.map), "r"(element), "r"(first), "r"(block), "r"(barrier)
      : "memory");
}

}  // namespace detlogp::cuda
