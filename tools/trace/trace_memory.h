// Counters of memory by category: what has changed from one sample to the next.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/memory.h"

namespace tessera::tools {

class TraceMemory {
 public:
  /// Of every memory.
  using Sample = std::vector<engine::MemoryStats>;
  struct Change {
    std::string counter;  ///< "memory activation"
    std::int64_t nbytes;
  };

  void add(const std::string& name, const engine::Memory& memory);
  /// The books as they are now.
  Sample sample() const;
  /// What differs from the sample before; at first from no memory at all.
  std::vector<Change> changes(const Sample& sample);
  /// {"memory":{"activation":4096,...,"total":8192},...}: the peaks since the memory was made.
  std::string peaks(const Sample& sample) const;

 private:
  struct Counted {
    std::string name;
    engine::Memory memory;
    engine::MemoryStats last = {};
  };
  std::vector<Counted> counted_;
};

}  // namespace tessera::tools
