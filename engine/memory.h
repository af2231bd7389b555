// Memory of one rank: every byte the engine allocates passes here and is counted by category, so
// current and peak bytes are exact. Freed blocks are kept for reuse (a step repeats its shapes).
// A value handle; copies share the same books. Thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

namespace tessera::engine {

enum class Category {
  kParameterShard,     ///< the rank's own part of the parameters (f32 master, wire copy)
  kGatheredParameter,  ///< slots that gathers write
  kGradient,           ///< flat gradient slots and the sharded running sum
  kOptimizer,          ///< momentum, moments
  kActivation,         ///< op outputs, what backward saves, and their gradients
  kCommunication,      ///< staging of collectives
  kWorkspace,          ///< scratch of one kernel
};
inline constexpr int kNumCategories = 7;
std::string_view name_of(Category category);

struct MemoryOptions {
  bool cache = true;    ///< keep freed blocks for reuse
  bool poison = false;  ///< fill new and freed blocks with NaN bytes (tests)
};

struct MemoryStats {
  std::array<std::int64_t, kNumCategories> current_nbytes{};
  std::array<std::int64_t, kNumCategories> peak_nbytes{};  ///< each category's own peak
  std::int64_t total_nbytes = 0;
  std::int64_t peak_total_nbytes = 0;
  std::int64_t reserved_nbytes = 0;  ///< held from the system, blocks kept for reuse included
};

class Memory {
 public:
  explicit Memory(MemoryOptions options = {});

  /// Uninitialised block, 256-byte aligned (2 MiB and huge pages from 2 MiB on); never null.
  /// Throws DeviceError with the category and size when the system has no memory.
  std::byte* allocate(std::int64_t nbytes, Category category);
  /// `nbytes` and `category` as given to allocate().
  void free(std::byte* data, std::int64_t nbytes, Category category) noexcept;

  MemoryStats stats() const;
  /// Peaks start again from the current values.
  void reset_peaks();
  bool poisons() const;
  /// A number no other buffer of this memory has.
  std::uint64_t next_serial();
  /// Tells memories apart.
  const void* id() const { return state_.get(); }

  friend bool operator==(const Memory&, const Memory&) = default;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

/// Fills with 0xFF: NaN in f32 and bf16, -1 in integers.
void poison(std::byte* data, std::int64_t nbytes);

}  // namespace tessera::engine
