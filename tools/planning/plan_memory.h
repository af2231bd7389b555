// Why a step needs the memory that it needs: the arithmetic behind the peak of each category, on
// the device and on the host.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "engine/memory.h"
#include "shard/fsdp.h"
#include "tools/planning/peak_blocks.h"

namespace tessera::tools {

/// A term of the arithmetic behind a number of bytes.
struct PlanTerm {
  std::string text;  ///< "2 states x 4 B x 1,024 / 4"
  std::int64_t nbytes;
};

struct PlannedMemory {
  engine::Category category;
  std::int64_t nbytes;          ///< peak of a step
  std::vector<PlanTerm> terms;  ///< add up to it
};

using TermsByCategory = std::map<engine::Category, std::vector<PlanTerm>>;
struct MemoryTerms {
  TermsByCategory device, host;
};

/// Of what `fsdp` and its optimizer, of `num_states` tensors for each parameter, hold from step to
/// step. What a model, a kernel or a communication hook takes is not among it.
MemoryTerms memory_terms(const shard::Fsdp& fsdp, int num_states);

/// Each category's peak with its terms. Where `terms` are not all that there was, the blocks that
/// there were when it was most stand for them: the largest first, alike ones of all units as one.
std::vector<PlannedMemory> planned_memory(const engine::MemoryStats& memory,
                                          const TermsByCategory& terms, const PeakBlocks& blocks,
                                          const shard::Fsdp& fsdp);

}  // namespace tessera::tools
