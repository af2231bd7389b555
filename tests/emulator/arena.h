// Device and page-locked memory of the emulation: where it is and what the host may touch.
// [Note: two addresses]
// Device memory has the address that cudaMalloc returns, in a range where every access faults, and
// its storage at the same offset of a second range, which only kernels and copies see (kernel
// arguments are translated). Allocations end at a guard page and never share a page; storage is
// filled with 0xFF (NaN in f32 and bf16), and unmapped when freed. Addresses are not used again
// until the range is exhausted, so use after free faults too. Page-locked memory has one range,
// readable by all, with the same guards.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "tests/emulator/internal.h"

namespace tessera::cuda_emulation {

struct Allocation {
  std::uintptr_t address = 0;
  std::size_t nbytes = 0;  ///< as asked for
  int device = 0;
  int number = 0;  ///< from 1, in order of allocation
  // Whole pages around it:
  std::uintptr_t begin = 0;
  std::size_t mapped_nbytes = 0;
};

/// A reservation of address space, one stripe for each device, and what is allocated in it.
class Arena {
 public:
  /// `hidden`: storage is apart, at storage_offset().
  explicit Arena(bool hidden);

  /// nullopt: the stripe is full.
  std::optional<Allocation> allocate(int device, std::size_t nbytes);
  /// The live allocation that begins at `address`, now removed and unmapped; nullopt if none.
  /// Ends the process if bytes around it were written.
  std::optional<Allocation> free(std::uintptr_t address);
  std::optional<Allocation> starting_at(std::uintptr_t address) const;
  /// The live allocation that contains all of [address, address + nbytes).
  std::optional<Allocation> containing(std::uintptr_t address, std::size_t nbytes) const;
  /// For messages, from a signal handler: the allocation nearest below `address`, live or freed.
  bool describe(std::uintptr_t address, Allocation& nearest, bool& live) const;

  bool contains(std::uintptr_t address) const { return address - base_ < kNumBytes; }
  bool stores(std::uintptr_t address) const { return address - storage_ < kNumBytes; }
  std::uintptr_t storage_offset() const { return storage_ - base_; }
  int device_of(std::uintptr_t address) const {
    return static_cast<int>((address - base_) / kStripe);
  }

  static constexpr std::size_t kStripe = std::size_t{16} << 30;
  static constexpr std::size_t kNumBytes = kStripe * kMaxDevices;

 private:
  std::uintptr_t place(int device, std::size_t nbytes);

  std::uintptr_t base_;
  std::uintptr_t storage_;
  mutable std::mutex mutex_;
  std::map<std::uintptr_t, Allocation> live_;   ///< by begin
  std::map<std::uintptr_t, Allocation> freed_;  ///< by begin
  std::array<std::uintptr_t, kMaxDevices> next_{};
  int num_allocated_ = 0;
};

Arena& device_arena();
Arena& pinned_arena();
/// From now on a fault in either says what was touched, and by whom, before the process dies.
void report_faults();

}  // namespace tessera::cuda_emulation
