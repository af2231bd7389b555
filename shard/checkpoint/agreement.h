// Errors that all ranks learn of together.
#pragma once

#include <cstdint>
#include <functional>
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
  std::string text;
  std::string error;
  bool is_invalid_argument = false;  ///< the error is; otherwise it becomes an IoError
};

/// Runs `fn`; its exceptions become the error.
Report report_of(const std::function<std::string()>& fn) noexcept;
/// Collective: the texts of all ranks. If some failed, throws on every rank an InvalidArgument or
/// IoError that says which and why.
std::vector<std::string> exchange(const Meeting& meeting, const Report& mine,
                                  std::string_view label);

/// Collective: steps_in(folder), as rank 0 sees them.
std::vector<std::int64_t> agreed_steps(const Meeting& meeting, const std::string& folder);

}  // namespace tessera::shard
