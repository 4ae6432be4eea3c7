// Barriers in shared memory (mbarrier), clusters of blocks, and 16-byte copies from global to shared
// memory that no register waits for: the instructions of sm_90 that CUDA C++ has no plain word for.
// bulk.h has the copies of many bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace detlogp::cuda {

struct Barrier {
  uint64_t state;
};

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// The same variable in the shared memory of block `rank` of the cluster.
__device__ __forceinline__ uint32_t address_in_block(const void* pointer, int rank) {
  uint32_t result;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(result)
      : "r"(shared_address(pointer)), "r"(rank));
  return result;
}

__device__ __forceinline__ void init(Barrier& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)),
               "r"(arrivals)
               : "memory");
}

// What this thread has done before is seen by those of its block who wait for the phase.
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive(Barrier& barrier) {
  arrive(shared_address(&barrier));
}

// The same; the phase then also waits for so many bytes to be sent.
__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void arrive_and_expect(Barrier& barrier, int bytes) {
  arrive_and_expect(shared_address(&barrier), bytes);
}

// Stores into the shared memory of block `rank`, for whoever waits there for the phase of `barrier`.
__device__ __forceinline__ void send(float* to, Barrier& barrier, int rank, float value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   address_in_block(to, rank)),
               "f"(value), "r"(address_in_block(&barrier, rank))
               : "memory");
}

__device__ __forceinline__ void send(int* to, Barrier& barrier, int rank, int value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(
                   address_in_block(to, rank)),
               "r"(value), "r"(address_in_block(&barrier, rank))
               : "memory");
}

__device__ __forceinline__ void send(uint64_t* to, Barrier& barrier, int rank, uint64_t value) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(
                   address_in_block(to, rank)),
               "l"(value), "r"(address_in_block(&barrier, rank))
               : "memory");
}

// Until the phase of this parity is over.
__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  } while (done == 0);
}

__device__ __forceinline__ void wait(const Barrier& barrier, uint32_t parity) {
  wait(shared_address(&barrier), parity);
}

// The same, for what the blocks of a cluster of C have sent.
template <int C>
__device__ __forceinline__ void wait_for_cluster(const Barrier& barrier, uint32_t parity) {
  if constexpr (C == 1) {
    wait(barrier, parity);
  } else {
    uint32_t done;
    do {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}\n"
          : "=r"(done)
          : "r"(shared_address(&barrier)), "r"(parity)
          : "memory");
    } while (done == 0);
  }
}

// A block also has barriers of its own, with names from 0 to 15, for whole warps; 0 is that of __syncthreads. `threads`
// counts those who arrive and those who wait; these then see what those have stored.
__device__ __forceinline__ void arrive_named(int name, int threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ void wait_named(int name, int threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

__device__ __forceinline__ int rank_in_cluster() {
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}

// Every thread of every block of the cluster, in two steps; barriers that were initialised before the first are ready
// after the second.
__device__ __forceinline__ void arrive_at_cluster() {
  asm volatile(
      "fence.mbarrier_init.release.cluster;\n"
      "barrier.cluster.arrive.release.aligned;\n" ::
          : "memory");
}

__device__ __forceinline__ void wait_at_cluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ void sync_cluster() {
  arrive_at_cluster();
  wait_at_cluster();
}

// A kernel that was launched to begin early, before the one ahead of it in the stream has ended, waits here for that to
// end, and reads and writes nothing before. Then it lets the kernel behind it begin likewise.
__device__ __forceinline__ void wait_for_kernel_before() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_kernel_after_begin() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- shared memory by address: in a loop, addresses that are computed once -----------------------

// A value that the compiler keeps instead of computing it again.
__device__ __forceinline__ uint32_t in_register(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}

__device__ __forceinline__ uint32_t load_shared_16(uint32_t from) {
  uint16_t result;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(result) : "r"(from));
  return result;
}

__device__ __forceinline__ uint32_t load_shared_32(uint32_t from) {
  uint32_t result;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(result) : "r"(from));
  return result;
}

__device__ __forceinline__ void load_shared(uint32_t from, uint32_t (&word)[1]) {
  word[0] = load_shared_32(from);
}

__device__ __forceinline__ void load_shared(uint32_t from, uint32_t (&word)[2]) {
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "r"(from));
}

__device__ __forceinline__ void load_shared(uint32_t from, uint32_t (&word)[4]) {
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])
               : "r"(from));
}

// Word `w` of each thread is the one that it would load at its own 4-byte place, counted from what lanes 8 w
// to 8 w + 7 pass: each of them the address of 16 bytes.
__device__ __forceinline__ void load_matrices(
    uint32_t from, uint32_t& word0, uint32_t& word1, uint32_t& word2, uint32_t& word3) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(word0), "=r"(word1), "=r"(word2), "=r"(word3)
               : "r"(from));
}

__device__ __forceinline__ void store_shared_32(uint32_t to, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}

__device__ __forceinline__ void store_shared(uint32_t to, const uint32_t (&word)[4]) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word[0]), "r"(word[1]),
               "r"(word[2]), "r"(word[3])
               : "memory");
}

// ---- copies from global to shared memory that no register waits for --------------------------------

template <int To, int From>
__device__ __forceinline__ void copy_16_bytes(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0 + %2], [%1 + %3], 16;" ::"r"(to), "l"(from),
               "n"(To), "n"(From)
               : "memory");
}

// Until all copies that this thread has asked for are done.
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// The phase, whose last arrival is still to come, then also waits for all copies that this thread has asked for.
__device__ __forceinline__ void expect_copies(Barrier& barrier) {
  asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(shared_address(&barrier))
               : "memory");
}

}  // namespace detlogp::cuda
