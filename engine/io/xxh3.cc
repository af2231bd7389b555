#include "engine/io/xxh3.h"

#define XXH_INLINE_ALL  // no library that must be there when a program runs
#include <xxhash.h>

namespace tessera::engine {

struct Xxh3::State {
  XXH3_state_t xxh;
};

Xxh3::Xxh3() : state_(std::make_unique<State>()) { XXH3_64bits_reset(&state_->xxh); }
Xxh3::~Xxh3() = default;

void Xxh3::update(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&state_->xxh, bytes.data(), bytes.size());
}

std::uint64_t Xxh3::value() const { return XXH3_64bits_digest(&state_->xxh); }

std::uint64_t xxh3(std::span<const std::byte> bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace tessera::engine
