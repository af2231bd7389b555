// Errors that all ranks learn of together.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "comm/process_group.h"
#include "engine/memory.h"
#include "engine/stream.h"

namespace tessera::shard {

/// The ranks that meet, and through what.
struct Meeting {
  comm::ProcessGroup& world;
  engine::Memory memory;  ///< of the device of `stream`
  engine::Stream stream;
};

/// What one rank has to say, or why it failed.
struct Report {
  enum class Kind : char { kText = '+', kInvalidArgument = 'i', kDevice = 'd', kIo = 'e' };

  Kind kind = Kind::kText;
  std::string text = {};  ///< of what is no text the error's; empty: there was no memory
};

/// Of the exception that is being handled; needs no memory.
Report report_of_error() noexcept;
/// What `fn` returns, or its error.
template <class F>
Report report_of(const F& fn) noexcept {
  try {
    return {Report::Kind::kText, fn()};
  } catch (...) {
    return report_of_error();
  }
}
/// Collective: the texts of all ranks. If some failed, throws on every rank which and why:
/// DeviceError if memory or a device was missing, else InvalidArgument if that is what all threw,
/// else IoError. A rank that has no memory for this itself throws bad_alloc, alone.
std::vector<std::string> exchange(const Meeting& meeting, const Report& mine,
                                  std::string_view label);

/// Collective: steps_in(folder), as rank 0 sees them.
std::vector<std::int64_t> agreed_steps(const Meeting& meeting, const std::string& folder);

}  // namespace tessera::shard
