#include "shard/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "comm/host_gather.h"
#include "engine/error.h"
#include "engine/philox.h"

namespace tessera::shard {

std::vector<std::string> describe(const FsdpOptions& options, int num_ranks) {
  const Precision& precision = options.precision;
  return {
      fmt::format("ranks {}", num_ranks),
      fmt::format("placement {}", to_string(options.placement)),
      fmt::format("shard_ranks {}", options.placement.shard_ranks_of(num_ranks)),
      fmt::format("prefetch {}{}", options.prefetch,
                  options.backward_prefetch == BackwardPrefetch::kPost ? ", post-backward" : ""),
      fmt::format("reductions_in_flight {}", options.reductions_in_flight),
      options.bucket_nbytes == 0
          ? "buckets off"
          : fmt::format("buckets of {} bytes, the first of {}", options.bucket_nbytes,
                        std::min(options.first_bucket_nbytes, options.bucket_nbytes)),
      fmt::format("broadcast_buffers {}", options.broadcast_buffers),
      fmt::format("precision param={} reduce={} accumulate={}", name_of(precision.param),
                  name_of(precision.reduce), name_of(precision.accumulate)),
      fmt::format("unused_parameters {}",
                  options.unused_parameters == UnusedParameters::kSkip ? "skipped" : "zero"),
      fmt::format("non_finite {}, check_gradients {}",
                  options.non_finite == NonFinite::kSkip ? "skipped" : "thrown",
                  options.check_gradients),
      fmt::format("offload parameters={} gradients={} optimizer={}", options.offload.parameters,
                  options.offload.gradients, options.offload.optimizer),
      fmt::format("mean over {} ranks", options.mean_ranks == 0 ? num_ranks : options.mean_ranks),
      fmt::format("reducer {}", !options.reducer               ? "of the strategy"
                                : options.reducer_text.empty() ? "own"
                                                               : options.reducer_text),
      fmt::format("seed {}", options.seed)};
}

std::vector<std::string> describe(const FsdpOptions& options, const Mesh& mesh,
                                  const std::vector<std::unique_ptr<Unit>>& units) {
  std::vector<std::string> lines = describe(options, mesh.world().size());
  lines.push_back(
      fmt::format("mesh {} replicas x {} shards", mesh.num_replicas(), mesh.shard_ranks()));
  for (const auto& unit : units) {
    for (const Flat& flat : unit->flats()) {
      lines.push_back(fmt::format("unit {}{} {}: {} parameters, {} elements in shards of {}",
                                  unit->name(), unit->is_root() ? " (root)" : "",
                                  flat.trainable ? "trainable" : "frozen", flat.parameters.size(),
                                  flat.layout.flat_numel(), flat.layout.shard_numel()));
      for (std::size_t i = 0; i < flat.parameters.size(); ++i) {
        const engine::Parameter& p = *flat.parameters[i];
        lines.push_back(fmt::format("  {} {} at {}, starts as {}", p.name, p.shape,
                                    flat.layout.offset(i), p.init.str()));
      }
    }
    for (const engine::Block* block : unit->blocks()) {
      for (const engine::Parameter* p : block->parameters) {
        if (options.ignores && options.ignores(*p)) {
          lines.push_back(fmt::format("  {} {} ignored", p->name, p->shape));
        }
      }
      if (!options.broadcast_buffers) continue;
      for (const engine::Tensor& buffer : block->buffers) {
        lines.push_back(fmt::format("  buffer {} of {}: {} {}", buffer.name(), block->name,
                                    buffer.shape(), name_of(buffer.dtype())));
      }
    }
  }
  return lines;
}

std::uint64_t hash(const std::vector<std::string>& lines) {
  std::uint64_t h = engine::fnv1a("");
  for (const std::string& line : lines) h = engine::fnv1a("\n", engine::fnv1a(line, h));
  return h;
}

void agree(comm::ProcessGroup& group, const engine::Memory& memory, const engine::Stream& stream,
           const std::vector<std::string>& lines) {
  if (stream.device().is_meta) {  // nobody is there to disagree
    const auto mine = engine::Tensor::empty(memory, {2}, engine::DType::kI64, "plan",
                                            engine::Category::kCommunication);
    comm::gather_values(group, mine, stream, "plan");
    return;
  }
  const auto num_ranks = static_cast<std::size_t>(group.size());
  const auto gather = [&]<class T>(const std::vector<T>& values) {
    return comm::gather_to_host<T>(group, values, memory, stream, "plan");
  };
  const auto mine = static_cast<std::int64_t>(hash(lines));
  const auto heads =
      gather(std::vector<std::int64_t>{mine, static_cast<std::int64_t>(lines.size())});
  engine::require<engine::CommError>(
      heads[2 * static_cast<std::size_t>(group.rank())] == mine,
      "[plan] expected the first gather to return what rank {} gave, got something else",
      group.rank());
  std::size_t num_lines = 0, other = 0;
  for (std::size_t r = 0; r < num_ranks; ++r) {
    num_lines = std::max(num_lines, static_cast<std::size_t>(heads[2 * r + 1]));
    if (other == 0 && heads[2 * r] != heads[0]) other = r;
  }
  if (other == 0) return;

  std::vector<std::int64_t> line_hashes(num_lines, 0);
  for (std::size_t i = 0; i < lines.size(); ++i) {
    line_hashes[i] = static_cast<std::int64_t>(engine::fnv1a(lines[i]));
  }
  const auto all = gather(line_hashes);
  std::size_t first = 0;
  while (first < num_lines && all[other * num_lines + first] == all[first]) ++first;

  constexpr std::size_t kMaxText = 200;
  std::string text = first < lines.size() ? lines[first] : "(no such line)";
  text.resize(kMaxText, '\0');
  const auto texts = gather(std::vector<std::uint8_t>(text.begin(), text.end()));
  const auto line_of = [&](std::size_t r) {
    const auto* begin = reinterpret_cast<const char*>(texts.data() + r * kMaxText);
    return std::string(begin, std::find(begin, begin + kMaxText, '\0'));
  };
  engine::fail(
      "[plan] expected the same plan on all ranks, got at line {}: rank 0 '{}', rank {} '{}'",
      first, line_of(0), other, line_of(other));
}

}  // namespace tessera::shard
