#include "shard/plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "engine/copy.h"
#include "engine/error.h"
#include "engine/philox.h"

namespace tessera::shard {

using engine::Category;
using engine::Tensor;

std::vector<std::string> describe(const FsdpOptions& options, int world_size,
                                  const std::vector<std::unique_ptr<Unit>>& units) {
  const Precision& precision = options.precision;
  std::vector<std::string> lines = {
      fmt::format("ranks {}", world_size),
      fmt::format("placement {}", to_string(options.placement)),
      fmt::format("prefetch {}", options.prefetch),
      fmt::format("precision param={} reduce={} accumulate={}", name_of(precision.param),
                  name_of(precision.reduce), name_of(precision.accumulate)),
      fmt::format("communicate {}",
                  options.communicate == Communicate::kEveryMicroStep ? "every" : "last"),
      fmt::format("seed {}", options.seed)};
  for (const auto& unit : units) {
    for (const Flat& flat : unit->flats()) {
      lines.push_back(fmt::format("unit {}{} {}: {} parameters, {} elements in shards of {}",
                                  unit->name(), unit->is_root() ? " (root)" : "",
                                  flat.trainable ? "trainable" : "frozen", flat.parameters.size(),
                                  flat.layout.flat_numel(), flat.layout.shard_numel()));
      for (std::size_t i = 0; i < flat.parameters.size(); ++i) {
        const engine::Parameter& p = *flat.parameters[i];
        lines.push_back(fmt::format("  {} {} at {}, starts as {}", p.name, p.shape.str(),
                                    flat.layout.offset(i), p.init.str()));
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

namespace {

// Every rank's `values`, rank by rank.
template <class T>
std::vector<T> gather(comm::ProcessGroup& group, const engine::Memory& memory,
                      const engine::Stream& stream, const std::vector<T>& values) {
  const auto n = static_cast<std::int64_t>(values.size());
  const Tensor in =
      Tensor::from<T>(memory, {n}, std::span<const T>(values), "plan", Category::kCommunication);
  const Tensor out = Tensor::empty(memory, {n * group.size()}, in.dtype(), "plan of all ranks",
                                   Category::kCommunication);
  stream.wait(memory.allocated());
  group.all_gather(in, out, stream, "plan");
  stream.record("gathered").wait();
  if (memory.device().is_cuda()) group.check();  // an aborted collective ends without an error
  return engine::to_vector<T>(out);
}

}  // namespace

void agree(comm::ProcessGroup& group, const engine::Memory& memory, const engine::Stream& stream,
           const std::vector<std::string>& lines) {
  const auto num_ranks = static_cast<std::size_t>(group.size());
  const auto mine = static_cast<std::int64_t>(hash(lines));
  const auto heads =
      gather<std::int64_t>(group, memory, stream, {mine, static_cast<std::int64_t>(lines.size())});
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
  const auto all = gather<std::int64_t>(group, memory, stream, line_hashes);
  std::size_t first = 0;
  while (first < num_lines && all[other * num_lines + first] == all[first]) ++first;

  constexpr std::size_t kMaxText = 200;
  std::string text = first < lines.size() ? lines[first] : "(no such line)";
  text.resize(kMaxText, '\0');
  const auto texts = gather<std::uint8_t>(group, memory, stream,
                                          std::vector<std::uint8_t>(text.begin(), text.end()));
  const auto line_of = [&](std::size_t r) {
    const auto* begin = reinterpret_cast<const char*>(texts.data() + r * kMaxText);
    return std::string(begin, std::find(begin, begin + kMaxText, '\0'));
  };
  engine::fail(
      "[plan] expected the same plan on all ranks, got at line {}: rank 0 '{}', rank {} '{}'",
      first, line_of(0), other, line_of(other));
}

}  // namespace tessera::shard
