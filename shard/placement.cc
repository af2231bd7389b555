#include "shard/placement.h"

#include <fmt/format.h>

#include "engine/error.h"

namespace tessera::shard {
namespace {

constexpr Placement kZero3{};
constexpr Placement kShardGradOp{.reshard_after_forward = false};
constexpr Placement kDdp{Place::kReplicate, Place::kReplicate, Place::kReplicate, false};

}  // namespace

Placement Placement::preset(std::string_view name) {
  if (name == "zero3" || name == "full_shard" || name == "fsdp") return kZero3;
  if (name == "shard_grad_op") return kShardGradOp;
  if (name == "ddp") return kDdp;
  engine::fail("[strategy] expected one of {}, got '{}'", fmt::join(preset_names(), ", "), name);
}

const std::vector<std::string>& Placement::preset_names() {
  static const std::vector<std::string> kNames = {"zero3", "full_shard", "fsdp", "shard_grad_op",
                                                  "ddp"};
  return kNames;
}

std::string to_string(const Placement& placement) {
  const auto word = [](Place place) { return place == Place::kShard ? "shard" : "replicate"; };
  return fmt::format("parameters={} gradients={} optimizer={} reshard_after_forward={}",
                     word(placement.parameters), word(placement.gradients),
                     word(placement.optimizer), placement.reshard_after_forward);
}

}  // namespace tessera::shard
