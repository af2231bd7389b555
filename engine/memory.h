// Memory of one rank: every byte the engine allocates passes here and is counted by category, so
// current and peak bytes are exact. A value handle; copies share the same books. Thread-safe.
//
// Freed blocks are kept for requests of about their size, as a step repeats its shapes: once each
// shape has been seen, nothing is asked of the system. Where shapes vary, what is held grows to
// kMaxReserved times the most that was ever in use at one time, and no further: a request that no
// kept block serves, and that would take it beyond, first gives kept blocks back, those first that
// have lain longest.
//
//   Memory memory;                                 // of the CPU
//   Memory memory(Stream::cuda("compute", 0));     // of a GPU; see [Note: memory of a stream]
//
// [Note: memory of a stream]
// A GPU works while the host goes on: when a buffer dies, kernels that use it may still be queued.
// So device memory belongs to a stream, its home. A freed block is handed out again at once, which
// is right for all later work of the home stream. Another stream that uses a block first waits for
// an event that the home stream recorded after the allocation, and the home stream waits for the
// other before the block is freed. Slots and staging that live as long as a model need no such care
// but their events.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "engine/device.h"
#include "engine/stream.h"

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

/// Where blocks come from if not from the system, e.g. a framework's own pool: memory of the device
/// that the Memory is of. A Memory calls them one at a time, from any thread. They must not throw,
/// and outlive every buffer.
struct Allocator {
  std::function<void*(std::int64_t nbytes)> allocate = {};  ///< 256-byte aligned; null: no memory
  std::function<void(void* data, std::int64_t nbytes)> free = {};
};

class LiveBuffers;
class MemoryListener;

struct MemoryOptions {
  bool cache = true;              ///< keep freed blocks for reuse
  bool poison = false;            ///< fill new and freed blocks with NaN bytes (tests)
  bool check_saved = false;       ///< a tape notices what writes what it saved: saved_values.h
  Allocator allocator = {};       ///< both functions, or none for the system's
  std::int64_t limit_nbytes = 0;  ///< that may be in use at one time; 0: no limit
  std::shared_ptr<MemoryListener> listener = nullptr;  ///< see memory_listener.h; null: nobody
};

struct MemoryStats {
  std::array<std::int64_t, kNumCategories> current_nbytes{};
  std::array<std::int64_t, kNumCategories> peak_nbytes{};  ///< each category's own peak
  std::int64_t total_nbytes = 0;
  std::int64_t peak_total_nbytes = 0;
  std::int64_t reserved_nbytes = 0;   ///< held from the system, blocks kept for reuse included
  std::int64_t num_reservations = 0;  ///< blocks asked of the system since creation

  friend bool operator==(const MemoryStats&, const MemoryStats&) = default;
};

/// The larger peaks of both, and the current values of `now`.
MemoryStats with_peaks_of(MemoryStats now, const MemoryStats& earlier);

class Memory {
 public:
  /// Times the most that was ever in use at one time: what is held from the system at most.
  static constexpr double kMaxReserved = 1.5;

  /// Memory of the CPU. Throws InvalidArgument for half an allocator.
  explicit Memory(MemoryOptions options = {});
  /// Memory of the stream's device.
  explicit Memory(const Stream& home, MemoryOptions options = {});
  /// Page-locked memory of the host, which a CUDA stream copies from and to without blocking. Its
  /// user knows by events when a block may be written again or freed; on a CPU stream plain memory.
  static Memory pinned(const Stream& stream, MemoryOptions options = {});

  Device device() const;
  /// Whether it is pinned() memory of a device, one that is not there included.
  bool is_pinned() const;
  /// The stream that device memory belongs to; empty for memory of the host.
  const std::optional<Stream>& home() const;

  /// Uninitialised block, 256-byte aligned (2 MiB and huge pages from 2 MiB on); never null.
  /// Throws DeviceError with the category and size when the system has no memory, and with `name`,
  /// whose memory it is, beyond MemoryOptions::limit_nbytes.
  std::byte* allocate(std::int64_t nbytes, Category category, std::string_view name = "");
  /// `nbytes` and `category` as given to allocate().
  void free(std::byte* data, std::int64_t nbytes, Category category) noexcept;

  // For cuda_graph.h. A block that is handed out between the first two calls belongs to the result:
  // it is nobody else's until that dies, and no part of the books after the second call. On a
  // thread that captures.

  class Owned;
  void begin_owning();
  std::shared_ptr<Owned> end_owning();
  /// Peaks are at least what they were between those calls, above what is in use now. Throws as
  /// allocate().
  void count_again(const Owned& owned);

  /// Reached when another stream may use what was allocated so far.
  Event allocated() const;

  /// Sets the bytes of a block: work of the home stream, or done on return.
  void fill(std::byte* data, int byte, std::int64_t nbytes) const;

  MemoryStats stats() const;
  /// Peaks start again from the current values.
  void reset_peaks();
  bool poisons() const;
  bool checks_saved() const;
  /// Where each buffer of this memory adds itself; null unless checks_saved().
  LiveBuffers* live_buffers() const;
  /// Null: nobody.
  MemoryListener* listener() const;
  /// A number no other buffer of this memory has.
  std::uint64_t next_serial();
  /// Tells memories apart.
  const void* id() const { return state_.get(); }

  friend bool operator==(const Memory&, const Memory&) = default;

 private:
  struct State;
  explicit Memory(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

/// What poisoned bytes are: NaN in f32 and bf16, -1 in integers.
inline constexpr int kPoison = 0xFF;

}  // namespace tessera::engine
