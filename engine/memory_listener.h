// Who is told of the blocks of a Memory: for what asks which tensors memory holds, and not only how
// many bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "engine/memory.h"

namespace tessera::engine {

class Shape;
enum class DType : std::uint8_t;

/// Called by the thread that asks for the block or gives it back; calls must not throw. It may be
/// asked from several threads, and must not call the Memory, which is locked but for on_tensor().
class MemoryListener {
 public:
  virtual ~MemoryListener() = default;
  /// A block is in use from now on. `name`: whose memory it is.
  virtual void on_allocate(const std::byte* data, std::int64_t nbytes, Category category,
                           std::string_view name) = 0;
  /// The block that was handed out last at `data` is a tensor of `shape`.
  virtual void on_tensor(const std::byte* data, const Shape& shape, DType dtype) = 0;
  virtual void on_free(const std::byte* data) = 0;
};

}  // namespace tessera::engine
