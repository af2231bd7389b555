// A strategy as a value: where parameters, gradients and optimizer state live between their uses.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::shard {

enum class Place { kReplicate, kShard };

/// Over the data-parallel axis. The named strategies are presets of this; see preset().
struct Placement {
  Place parameters = Place::kShard;
  Place gradients = Place::kShard;
  Place optimizer = Place::kShard;
  /// Sharded parameters only: give the gathered copy back between forward and backward.
  bool reshard_after_forward = true;

  friend bool operator==(const Placement&, const Placement&) = default;

  /// zero3 (= full_shard = fsdp), shard_grad_op, ddp.
  /// Throws InvalidArgument naming the choices for any other name.
  static Placement preset(std::string_view name);
  static const std::vector<std::string>& preset_names();
};

std::string to_string(const Placement& placement);

}  // namespace tessera::shard
