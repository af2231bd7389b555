// XXH3 (github.com/Cyan4973/xxHash), 64 bits, fed piece by piece: finds damaged bytes at the speed
// of memory. No protection against who damages them on purpose.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tessera::engine {

class Xxh3 {
 public:
  Xxh3();
  ~Xxh3();
  void update(std::span<const std::byte> bytes);
  /// Of everything so far. More updates may follow.
  std::uint64_t value() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// The hash of `bytes`, all of them.
std::uint64_t xxh3(std::span<const std::byte> bytes);

}  // namespace tessera::engine
