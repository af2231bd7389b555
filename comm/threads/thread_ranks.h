// What backends share whose ranks are threads of one process.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "comm/process_group.h"
#include "comm/threads/rendezvous.h"

namespace tessera::comm {

/// What a rank says and gets in a split.
struct Split {
  int color = 0;
  int key = 0;
  std::shared_ptr<Rendezvous> group = nullptr;
  int rank = 0;
};
/// One chunk that makes the groups of all colors. The slots' `out` are Split.
Chunks split_chunks(const Rendezvous& parent);

/// The group of all ranks of a new world.
std::shared_ptr<Rendezvous> make_world(int size, std::chrono::milliseconds deadline,
                                       std::function<void(const std::string& message)> on_failure);

/// Runs `fn` on a thread a group, and ends as run_ranks() in threads.h says.
void run_on_threads(std::vector<std::unique_ptr<ProcessGroup>> groups, World& world,
                    const std::function<void(ProcessGroup&)>& fn);

}  // namespace tessera::comm
