// Twins of the tensor-core instructions of ops/mma.cuh, with the fragment layouts stated there.
#pragma once

#include <cstdint>
#include <cstring>

#include "tests/emulator/grid.h"

namespace tessera::cuda_emulation {

/// Products are exact; they are added in f32 in the order of k. On the device the order and the
/// rounding of the sum are its own.
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                  Place where = Place::here());

namespace internal {
struct alignas(16) Row {
  std::uint32_t words[4];
};
/// Stores in rows[i] this lane's row of matrix lane / 8, then exchanges the words.
void exchange_rows(std::uint32_t* r, unsigned num_matrices, const Row& row, bool transposed,
                   Place where);
}  // namespace internal

template <std::size_t kMatrices>
void ldmatrix(std::uint32_t (&r)[kMatrices], const void* shared_row, bool transposed,
              Place where = Place::here()) {
  if (reinterpret_cast<std::uintptr_t>(shared_row) % 16 != 0) {
    fail_launch("ldmatrix from an address that is not 16-byte aligned", where);
  }
  internal::Row row{};
  // Other lanes' rows are not read.
  if (current_lane() < 8 * kMatrices) std::memcpy(&row, shared_row, sizeof row);
  internal::exchange_rows(r, kMatrices, row, transposed, where);
}

/// The bytes are copied when the thread waits for them; until then the destination is poisoned.
inline void cp_async_16(void* shared, const void* global, bool valid, Place where = Place::here()) {
  if ((reinterpret_cast<std::uintptr_t>(shared) | reinterpret_cast<std::uintptr_t>(global)) % 16 !=
      0) {
    fail_launch("cp.async with an address that is not 16-byte aligned", where);
  }
  std::memset(shared, 0xFF, 16);
  issue_copy({shared, valid ? global : nullptr}, where);
}

inline void cp_async_commit() { commit_copies(); }

inline void cp_async_wait(int num_pending) {
  while (const auto copy = land_copy(num_pending)) {
    if (copy->global != nullptr) {
      std::memcpy(copy->shared, copy->global, 16);
    } else {
      std::memset(copy->shared, 0, 16);
    }
  }
}

inline void cp_async_wait_all() { cp_async_wait(kNoCopyPending); }

}  // namespace tessera::cuda_emulation
