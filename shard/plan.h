// What ranks must agree on before anything is trained: names, shapes, dtypes, units, placement.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "comm/process_group.h"
#include "shard/mesh.h"
#include "shard/options.h"
#include "shard/unit.h"

namespace tessera::shard {

/// One line for each fact about the options alone: what is agreed on before ranks are split.
std::vector<std::string> describe(const FsdpOptions& options, int num_ranks);
/// The facts of describe() above, with units and parameters. One line a fact; equal lines on all
/// ranks mean the same collectives on all ranks.
std::vector<std::string> describe(const FsdpOptions& options, const Mesh& mesh,
                                  const std::vector<std::unique_ptr<Unit>>& units);

/// FNV-1a over the lines.
std::uint64_t hash(const std::vector<std::string>& lines);

/// Collective. Throws InvalidArgument, on every rank alike, naming the first line that differs and
/// two ranks that disagree on it.
void agree(comm::ProcessGroup& group, const engine::Memory& memory, const engine::Stream& stream,
           const std::vector<std::string>& lines);

}  // namespace tessera::shard
