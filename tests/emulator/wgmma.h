// Twins of the instructions behind ops/wgmma.cuh, after the PTX ISA, "Asynchronous Warpgroup Level
// Matrix Multiply-Accumulate Instructions".
//
// [Note: products under way] A product is computed when a warp issues it, and its registers hold
// NaNs until a wait names them. In between it is known what must not change, and what did fails the
// launch: registers named in a fence and then written, registers of a product under way, operands
// in shared memory. An operand must have been written by cp_async_16 or store_operand, its writer
// have called fence_async_proxy since, and the whole block have met in a barrier after that; and
// it must not be written again but after another barrier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "tests/emulator/grid.h"

namespace tessera::cuda_emulation {

/// Registers of the calling thread: an array of 32-bit words.
struct Registers {
  void* data;
  std::size_t nbytes;
};
using RegistersList = std::initializer_list<Registers>;

struct WarpgroupProduct {
  float* d;
  int num_d;                         ///< 64 columns for each 32
  const std::uint32_t* a = nullptr;  ///< four registers; null: in shared memory
  std::uint64_t descriptor_a = 0;
  std::uint64_t descriptor_b = 0;
  bool a_is_transposed = false, b_is_transposed = false;
  bool accumulate = true;
};

void wgmma_fence(RegistersList named, Place where = Place::here());
void wgmma(const WarpgroupProduct& product, Place where = Place::here());
void wgmma_commit(Place where = Place::here());
void wgmma_wait(int num_pending, RegistersList named, Place where = Place::here());

/// fence.proxy.async
void fence_async_proxy();
/// Address in the window of shared memory. Dynamic shared memory begins at a multiple of 32.
std::uint32_t shared_address(const void* shared);
void note_operand(const void* shared, std::size_t nbytes, Place where);
/// Writes one word of an operand.
template <class T>
void store_operand(T* shared, std::uint32_t word, Place where = Place::here()) {
  *reinterpret_cast<std::uint32_t*>(shared) = word;
  note_operand(shared, sizeof word, where);
}

}  // namespace tessera::cuda_emulation
