// What a process sends of a call ahead of its data.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <type_traits>

#include "comm/world/call.h"
#include "engine/philox.h"

namespace tessera::comm {

struct Fingerprint {
  Fingerprint() = default;
  explicit Fingerprint(const Call& call) : hash(engine::fnv1a(call.text)), sequence(call.sequence) {
    call.text.copy(text.data(), text.size());
  }

  bool is_same_call(const Fingerprint& other) const {
    return hash == other.hash && sequence == other.sequence;
  }
  std::string_view what() const {
    return {text.data(), static_cast<std::size_t>(std::ranges::find(text, '\0') - text.begin())};
  }
  /// "#3 all_gather f32 x 4 'h'"
  std::string str() const { return fmt::format("#{} {}", sequence, what()); }

  std::uint64_t hash = 0;  ///< of all that must agree
  std::int64_t sequence = 0;
  std::int32_t last_rank = -1;      ///< of the world: which one of the process came last; -1: any
  std::array<char, 236> text = {};  ///< what must agree, cut; a 0 after it if it is shorter
};
static_assert(std::is_trivially_copyable_v<Fingerprint> && sizeof(Fingerprint) == 256);

}  // namespace tessera::comm
