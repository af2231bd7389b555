#include "shard/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/error.h"

namespace tessera::shard {
namespace {

constexpr Place W = Place::kWhole, S = Place::kShard, A = Place::kWorld;
constexpr int kHalf = Placement::kHalfOfRanks;

struct Preset {
  std::string_view name;
  Placement placement;
};

// Of parameters, gradients and the optimizer; reshard_after_forward, reshard_ranks, shard_ranks.
constexpr Preset kPresets[] = {
    {"zero3", {S, S, S, true}},
    {"full_shard", {S, S, S, true}},
    {"fsdp", {S, S, S, true}},
    {"shard_grad_op", {S, S, S, false}},
    {"zero2", {W, S, S, false}},
    {"zero1", {W, W, S, false}},
    {"ddp", {W, W, W, false}},
    {"hsdp", {S, S, S, true, 0, kHalf}},
    {"hybrid_zero2", {W, S, S, false, 0, kHalf}},
    {"hfsdp", {S, S, A, true, 0, kHalf}},
};

const Preset& find(std::string_view name) {
  const auto* it = std::ranges::find(kPresets, name, &Preset::name);
  engine::require(it != std::end(kPresets), "[strategy] expected one of {}, got '{}'",
                  fmt::join(Placement::preset_names(), ", "), name);
  return *it;
}

std::string_view word(Place place) {
  switch (place) {
    case Place::kWhole:
      return "whole";
    case Place::kShard:
      return "shard";
    case Place::kWorld:
      return "world";
  }
  return "?";
}

}  // namespace

bool Placement::is_whole() const { return optimizer == Place::kWhole; }

void Placement::validate() const {
  engine::require(parameters <= gradients && gradients <= optimizer,
                  "[placement] expected gradients cut at least as finely as parameters, and the "
                  "optimizer at least as finely as gradients, got {}",
                  to_string(*this));
  engine::require(gradients != Place::kWorld,
                  "[placement] expected parameters and gradients cut over the shard axis at most, "
                  "got {}",
                  to_string(*this));
  engine::require(parameters != Place::kWhole || !reshard_after_forward,
                  "[placement] expected no reshard_after_forward for parameters that are whole on "
                  "every rank, got {}",
                  to_string(*this));
  engine::require(reshard_ranks >= 0 && (reshard_ranks == 0 || reshard_after_forward),
                  "[placement] expected reshard_ranks with reshard_after_forward, got {} ({})",
                  reshard_ranks, to_string(*this));
  engine::require(shard_ranks >= kHalfOfRanks,
                  "[placement] expected shard_ranks of at least 1, kAllRanks or kHalfOfRanks, got "
                  "{} ({})",
                  shard_ranks, to_string(*this));
  engine::require(!is_whole() || shard_ranks <= 1,
                  "[placement] expected no shard_ranks where nothing is sharded, got {} ({})",
                  shard_ranks, to_string(*this));
}

int Placement::shard_ranks_of(int num_ranks) const {
  if (is_whole()) return 1;
  if (shard_ranks == kAllRanks) return num_ranks;
  if (shard_ranks != kHalfOfRanks) return shard_ranks;
  int half = std::max(num_ranks / 2, 1);
  while (num_ranks % half != 0) --half;
  return half;
}

Placement Placement::preset(std::string_view name) { return find(name).placement; }

const std::vector<std::string>& Placement::preset_names() {
  static const std::vector<std::string> kNames = [] {
    std::vector<std::string> names;
    for (const Preset& preset : kPresets) names.emplace_back(preset.name);
    return names;
  }();
  return kNames;
}

std::string to_string(const Placement& placement) {
  return fmt::format("parameters={} gradients={} optimizer={} reshard_after_forward={}",
                     word(placement.parameters), word(placement.gradients),
                     word(placement.optimizer),
                     placement.reshard_ranks > 0       ? std::to_string(placement.reshard_ranks)
                     : placement.reshard_after_forward ? "true"
                                                       : "false");
}

}  // namespace tessera::shard
