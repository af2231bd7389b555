// Ranks that are threads of this process, for the conformance suite.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "comm/process_group.h"

namespace tessera::comm {

/// What `fn` says on each rank. `run_threads` gives each its group.
inline std::vector<std::string> said_by_threads(
    int size, const std::function<std::string(ProcessGroup&)>& fn,
    const std::function<void(const std::function<void(ProcessGroup&)>&)>& run_threads) {
  std::vector<std::string> said(static_cast<std::size_t>(size));
  run_threads(
      [&](ProcessGroup& group) { said[static_cast<std::size_t>(group.rank())] = fn(group); });
  return said;
}

}  // namespace tessera::comm
