#include "engine/buffer.h"

#include <utility>

#include "engine/error.h"
#include "engine/live_buffers.h"

namespace tessera::engine {

Buffer::Buffer(Memory memory, std::string name, std::int64_t nbytes, Category category,
               std::uint64_t serial)
    : memory_(std::move(memory)),
      name_(std::move(name)),
      nbytes_(nbytes),
      category_(category),
      serial_(serial) {}

std::shared_ptr<Buffer> Buffer::create(const Memory& memory, std::string name, std::int64_t nbytes,
                                       Category category) {
  auto buffer = create_released(memory, std::move(name), nbytes, category);
  buffer->acquire();
  return buffer;
}

std::shared_ptr<Buffer> Buffer::create_released(const Memory& memory, std::string name,
                                                std::int64_t nbytes, Category category) {
  require(nbytes >= 0, "[buffer] expected a size of at least 0 bytes, got {} ({})", nbytes, name);
  Memory books = memory;
  const std::uint64_t serial = books.next_serial();
  std::shared_ptr<Buffer> buffer(
      new Buffer(std::move(books), std::move(name), nbytes, category, serial));
  if (LiveBuffers* all = memory.live_buffers()) all->add(buffer);
  return buffer;
}

std::shared_ptr<Buffer> Buffer::without_data() const {
  return std::shared_ptr<Buffer>(new Buffer(memory_, name_, nbytes_, category_, serial_));
}

Buffer::~Buffer() { release(); }

std::byte* Buffer::data() const {
  require(data_ != nullptr, "[buffer] expected a resident buffer, got a read while released ({})",
          name_);
  return data_;
}

void Buffer::release() {
  if (data_ != nullptr && !slot_) memory_.free(data_, nbytes_, category_);
  data_ = nullptr;
  slot_.reset();
}

void Buffer::acquire() {
  require(!resident(), "[buffer] expected a released buffer to acquire ({})", name_);
  data_ = memory_.allocate(nbytes_, category_, name_);
}

void Buffer::attach(const std::shared_ptr<Buffer>& slot) {
  require(!resident(), "[buffer] expected a released buffer to attach ({})", name_);
  require(slot->nbytes() >= nbytes_, "[buffer] expected a slot of {} bytes, got {} ({} in {})",
          nbytes_, slot->nbytes(), name_, slot->name());
  data_ = slot->data();
  slot_ = slot;
}

}  // namespace tessera::engine
