#include "shard/placement.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "engine/error.h"

namespace tessera::shard {
namespace {

constexpr Place W = Place::kWhole, S = Place::kShard, A = Place::kWorld;

struct Preset {
  std::string_view name;
  Placement placement;  // parameters, gradients, optimizer, reshard_after_forward
  bool is_hybrid = false;
};

constexpr Preset kPresets[] = {
    {"zero3", {S, S, S, true}},
    {"full_shard", {S, S, S, true}},
    {"fsdp", {S, S, S, true}},
    {"shard_grad_op", {S, S, S, false}},
    {"zero2", {W, S, S, false}},
    {"zero1", {W, W, S, false}},
    {"ddp", {W, W, W, false}},
    {"hsdp", {S, S, S, true}, true},
    {"hybrid_zero2", {W, S, S, false}, true},
    {"hfsdp", {S, S, A, true}, true},
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

bool is_hybrid(std::string_view preset) { return find(preset).is_hybrid; }

int default_shard_ranks(std::string_view preset, int world_size) {
  if (find(preset).placement.is_whole()) return 1;
  if (!is_hybrid(preset)) return world_size;
  int shard_ranks = std::max(world_size / 2, 1);
  while (world_size % shard_ranks != 0) --shard_ranks;
  return shard_ranks;
}

}  // namespace tessera::shard
