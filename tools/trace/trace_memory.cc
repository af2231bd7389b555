#include "tools/trace/trace_memory.h"

#include "tools/io/jsonl.h"

namespace tessera::tools {

void TraceMemory::add(const std::string& name, const engine::Memory& memory) {
  counted_.push_back({name, memory});
}

TraceMemory::Sample TraceMemory::sample() const {
  Sample sample;
  for (const Counted& counted : counted_) sample.push_back(counted.memory.stats());
  return sample;
}

std::vector<TraceMemory::Change> TraceMemory::changes(const Sample& sample) {
  std::vector<Change> changes;
  for (std::size_t i = 0; i < sample.size(); ++i) {
    Counted& counted = counted_[i];
    for (std::size_t c = 0; c < sample[i].current_nbytes.size(); ++c) {
      const std::int64_t nbytes = sample[i].current_nbytes[c];
      if (nbytes == counted.last.current_nbytes[c]) continue;
      const auto category = static_cast<engine::Category>(c);
      changes.push_back({counted.name + " " + std::string(name_of(category)), nbytes});
    }
    if (sample[i].total_nbytes != counted.last.total_nbytes) {
      changes.push_back({counted.name + " total", sample[i].total_nbytes});
    }
    counted.last = sample[i];
  }
  return changes;
}

std::string TraceMemory::peaks(const Sample& sample) const {
  JsonRecord all;
  for (std::size_t i = 0; i < sample.size(); ++i) {
    JsonRecord peaks;
    for (std::size_t c = 0; c < sample[i].peak_nbytes.size(); ++c) {
      peaks.add(name_of(static_cast<engine::Category>(c)), sample[i].peak_nbytes[c]);
    }
    all.add_literal(counted_[i].name, peaks.add("total", sample[i].peak_total_nbytes).text());
  }
  return all.text();
}

}  // namespace tessera::tools
