#include "shard/joint_norm.h"

#include <bit>
#include <cmath>
#include <limits>
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
      for (const Flat& flat : unit->flats()) {
        if (!flat.trainable) continue;
        for (const Segment& s : flat.segments) {
          const SplitTensor g = flat.grad_sum.slice(s.shard_begin, s.numel);
          if (g.device().defined()) fn(g.device());
          if (g.has_host()) fn(g.host());
        }
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

void check_finite(bool is_finite, std::size_t rank) {
  engine::require(is_finite,
                  "[joint_norm] expected finite gradients, got NaN or infinity (rank {})", rank);
}

double exact(comm::ProcessGroup& world, std::span<const NormPart> parts) {
  const Fsdp& any = parts[0].fsdp;
  any.compute().synchronize();
  std::int64_t mine = 0, numel = 0;
  for_each_segment(parts, [&](const engine::Tensor& g) { mine += g.numel(); });
  for (const std::int64_t n : gather(world, any, {&mine, 1})) numel += n;
  SquareSum sum(numel), total(numel);
  bool is_finite = true;
  for_each_segment(parts, [&](const engine::Tensor& g) {
    if (is_meta(any)) return;
    is_finite = is_finite && sum.try_add(g.span<float>());
  });
  // All ranks learn of it before any throws.
  std::vector<std::int64_t> own = {is_finite ? 1 : 0};
  const auto own_words = sum.words();
  own.insert(own.end(), own_words.begin(), own_words.end());
  const std::vector<std::int64_t> words = gather(world, any, own);
  if (is_meta(any)) return 0;
  for (std::size_t at = 0; at < words.size(); at += own.size()) {
    check_finite(words[at] != 0, at / own.size());
    const auto rank = std::span(words).subspan(at + 1, SquareSum::kNumWords);
    total.add(SquareSum::from_words(rank, numel));
  }
  return std::sqrt(total.total()) * any.mean_scale();
}

// Every rank of a part's group adds an equal share of it.
double of_norms(comm::ProcessGroup& world, std::span<const NormPart> parts) {
  double mine = 0, total = 0;
  for (const NormPart& part : parts) {
    if (is_meta(part.fsdp)) break;
    const double norm{
        part.norm.unchecked_value().value_or(std::numeric_limits<float>::quiet_NaN())};
    mine += norm * norm / part.fsdp.mesh().world().size();
  }
  const auto bits = std::bit_cast<std::int64_t>(mine);
  std::size_t rank = 0;
  const std::vector<std::int64_t> all = gather(world, parts[0].fsdp, {&bits, 1});
  if (is_meta(parts[0].fsdp)) return 0;
  for (const std::int64_t bits_of_rank : all) {
    const auto share = std::bit_cast<double>(bits_of_rank);
    check_finite(std::isfinite(share), rank++);
    total += share;
  }
  return std::sqrt(total);
}

}  // namespace

float joint_norm(comm::ProcessGroup& world, std::span<const NormPart> parts) {
  engine::require(!parts.empty(), "[joint_norm] expected at least one part, got none");
  const Fsdp& first = parts[0].fsdp;
  for (const NormPart& part : parts) {
    engine::require(part.fsdp.mean_scale() == first.mean_scale(),
                    "[joint_norm] expected means over as many batches, got {} and {}",
                    std::lround(1 / first.mean_scale()), std::lround(1 / part.fsdp.mean_scale()));
  }
  const bool is_cuda = first.compute().device().is_cuda();
  return static_cast<float>(is_cuda ? of_norms(world, parts) : exact(world, parts));
}

}  // namespace tessera::shard
