#include "shard/joint_norm.h"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <iterator>
#include <string>
#include <vector>

#include "comm/host_gather.h"
#include "engine/error.h"
#include "shard/norm.h"

namespace tessera::shard {

namespace {

// Whether this rank is the one that counts what its optimizer owns: others have copies.
bool counts(const Fsdp& fsdp) {
  const Mesh& mesh = fsdp.mesh();
  switch (fsdp.options().placement.optimizer) {
    case Place::kWhole:
      return mesh.world().rank() == 0;
    case Place::kShard:
      return mesh.replica() == 0;
    case Place::kWorld:
      return true;
  }
  return true;
}

template <class F>
void for_each_segment(std::span<const NormPart> parts, F fn) {
  for (const NormPart& part : parts) {
    if (!counts(part.fsdp)) continue;
    for (const auto& unit : part.fsdp.units()) {
      const Flat* flat = unit->trainable();
      if (flat == nullptr) continue;
      for (const Segment& s : flat->segments) {
        const SplitTensor g = flat->grad_sum.slice(s.shard_begin, s.numel);
        if (g.device().defined()) fn(g.device());
        if (g.has_host()) fn(g.host());
      }
    }
  }
}

bool is_meta(const Fsdp& fsdp) { return fsdp.compute().device().is_meta; }

// On a meta device zeros: nobody answers.
std::vector<std::int64_t> gather(comm::ProcessGroup& world, const Fsdp& fsdp,
                                 std::span<const std::int64_t> values) {
  if (is_meta(fsdp)) {
    const auto n = static_cast<std::int64_t>(values.size());
    const auto in = engine::Tensor::from<std::int64_t>(fsdp.memory(), {n}, values, "joint norm",
                                                       engine::Category::kCommunication);
    const comm::HostGather sent(world, in, fsdp.compute(), engine::Memory::pinned(fsdp.compute()),
                                "joint norm");
    return std::vector<std::int64_t>(values.size() * static_cast<std::size_t>(world.size()));
  }
  return comm::gather_to_host<std::int64_t>(world, values, fsdp.memory(), fsdp.compute(),
                                            "joint norm");
}

// What ranks tell each other about their gradients, as bits of one word.
constexpr std::int64_t kFinite = 1, kSkips = 2;

std::int64_t flags_of(std::span<const NormPart> parts) {
  std::int64_t flags = kFinite | kSkips;
  for (const NormPart& part : parts) {
    if (!is_meta(part.fsdp) && !part.norm.unchecked_value()) flags &= ~kFinite;
    if (part.fsdp.options().non_finite != NonFinite::kSkip) flags &= ~kSkips;
  }
  return flags;
}

struct Result {
  std::int64_t flags;  // that all ranks have
  double norm;         // means nothing if not kFinite
};

Result exact(comm::ProcessGroup& world, std::span<const NormPart> parts) {
  const Fsdp& any = parts[0].fsdp;
  any.compute().synchronize();
  std::int64_t mine = 0, numel = 0;
  for_each_segment(parts, [&](const engine::Tensor& g) { mine += g.numel(); });
  for (const std::int64_t n : gather(world, any, {&mine, 1})) numel += n;
  SquareSum sum(numel), total(numel);
  std::vector<std::int64_t> own = {flags_of(parts)};
  for_each_segment(parts, [&](const engine::Tensor& g) {
    if (is_meta(any) || (own[0] & kFinite) == 0) return;
    if (!sum.try_add(g.span<float>())) own[0] &= ~kFinite;
  });
  const auto own_words = sum.words();
  own.insert(own.end(), own_words.begin(), own_words.end());
  const std::vector<std::int64_t> words = gather(world, any, own);
  Result result{.flags = own[0], .norm = 0};
  if (is_meta(any)) return result;
  for (std::size_t at = 0; at < words.size(); at += own.size()) result.flags &= words[at];
  if ((result.flags & kFinite) == 0) return result;
  for (std::size_t at = 0; at < words.size(); at += own.size()) {
    const auto rank = std::span(words).subspan(at + 1, SquareSum::kNumWords);
    total.add(SquareSum::from_words(rank, numel));
  }
  result.norm = std::sqrt(total.total()) * any.mean_scale();
  return result;
}

// Every rank of a part's group adds an equal share of it.
Result of_norms(comm::ProcessGroup& world, std::span<const NormPart> parts) {
  double mine = 0, total = 0;
  for (const NormPart& part : parts) {
    if (is_meta(part.fsdp)) break;
    const double norm{part.norm.unchecked_value().value_or(0)};
    mine += norm * norm / part.fsdp.mesh().world().size();
  }
  const std::int64_t own[] = {flags_of(parts), std::bit_cast<std::int64_t>(mine)};
  const std::vector<std::int64_t> words = gather(world, parts[0].fsdp, own);
  Result result{.flags = own[0], .norm = 0};
  if (is_meta(parts[0].fsdp)) return result;
  for (std::size_t at = 0; at < words.size(); at += std::size(own)) {
    result.flags &= words[at];
    total += std::bit_cast<double>(words[at + 1]);
  }
  result.norm = std::sqrt(total);
  return result;
}

// What the first rank that saw one says of it.
std::string find_fault(comm::ProcessGroup& world, std::span<const NormPart> parts) {
  std::string mine;
  for (const NormPart& part : parts) {
    if (mine.empty()) mine = part.norm.not_finite();
  }
  const Fsdp& any = parts[0].fsdp;
  const std::vector<std::string> all =
      comm::gather_texts(world, mine, any.memory(), any.compute(), "joint norm");
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) return fmt::format("{}, seen by rank {}", all[rank], rank);
  }
  return "a sum of gradients";
}

}  // namespace

float JointNorm::value() const {
  engine::require(not_finite_.empty(),
                  "[joint_norm] expected finite gradients, got NaN or infinity ({})", not_finite_);
  return value_;
}

JointNorm joint_norm(comm::ProcessGroup& world, std::span<const NormPart> parts) {
  engine::require(!parts.empty(), "[joint_norm] expected at least one part, got none");
  const Fsdp& first = parts[0].fsdp;
  for (const NormPart& part : parts) {
    engine::require(part.fsdp.mean_scale() == first.mean_scale(),
                    "[joint_norm] expected means over as many batches or terms, got gradients "
                    "times {:g} and {:g}",
                    first.mean_scale(), part.fsdp.mean_scale());
  }
  const bool is_cuda = first.compute().device().is_cuda();
  const auto [flags, norm] = is_cuda ? of_norms(world, parts) : exact(world, parts);
  // All ranks have the same flags, so all of them look for the fault.
  const std::string fault = (flags & kFinite) != 0 ? "" : find_fault(world, parts);
  const JointNorm joint(static_cast<float>(norm), fault);
  if ((flags & kSkips) == 0) static_cast<void>(joint.value());
  return joint;
}

}  // namespace tessera::shard
