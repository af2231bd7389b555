// A named block of memory with two states: resident or released. Reading a released buffer throws
// with its name, so a tensor handle may be saved freely: what may go away is the storage behind it.
//
//   resident --release()--> released --acquire() or attach(slot)--> resident
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "engine/device.h"
#include "engine/memory.h"

namespace tessera::engine {

class Buffer {
 public:
  /// Resident, with memory of its own, uninitialised.
  static std::shared_ptr<Buffer> create(const Memory& memory, std::string name, std::int64_t nbytes,
                                        Category category);
  /// Released; becomes resident by acquire() or attach().
  static std::shared_ptr<Buffer> create_released(const Memory& memory, std::string name,
                                                 std::int64_t nbytes, Category category);
  /// A released buffer of the same name, size and serial, which keeps no memory.
  std::shared_ptr<Buffer> without_data() const;
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  /// Throws InvalidArgument naming the buffer when it is released.
  std::byte* data() const;
  bool resident() const { return data_ != nullptr; }
  /// Gives the memory back (or lets go of the slot). Idempotent.
  void release();
  /// Allocates memory of its own, uninitialised. Throws InvalidArgument if resident.
  void acquire();
  /// Becomes resident in the memory of `slot`, which must be at least as large and is kept alive;
  /// counted once, for the slot. Throws InvalidArgument if resident or if `slot` is too small.
  void attach(const std::shared_ptr<Buffer>& slot);
  /// What it is attached to; null: nothing.
  const std::shared_ptr<Buffer>& slot() const { return slot_; }

  const std::string& name() const { return name_; }
  std::int64_t nbytes() const { return nbytes_; }
  Category category() const { return category_; }
  Device device() const { return memory_.device(); }
  /// Unique among the buffers of one Memory, never reused.
  std::uint64_t serial() const { return serial_; }
  const Memory& memory() const { return memory_; }

 private:
  Buffer(Memory memory, std::string name, std::int64_t nbytes, Category category,
         std::uint64_t serial);

  Memory memory_;
  std::string name_;
  std::int64_t nbytes_;
  Category category_;
  std::uint64_t serial_;
  std::byte* data_ = nullptr;
  std::shared_ptr<Buffer> slot_;  // whose memory this is, if not our own
};

}  // namespace tessera::engine
