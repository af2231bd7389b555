#include "shard/flat.h"

namespace tessera::shard {

engine::Tensor make_segment_table(const engine::Memory& memory, std::span<const Segment> segments,
                                  const std::string& name) {
  std::vector<std::int64_t> table;
  for (const Segment& s : segments) {
    table.insert(table.end(), {s.shard_begin, s.numel, static_cast<std::int64_t>(s.parameter)});
  }
  return engine::Tensor::from<std::int64_t>(memory, {static_cast<std::int64_t>(segments.size()), 3},
                                            table, name, engine::Category::kParameterShard);
}

}  // namespace tessera::shard
