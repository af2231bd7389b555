// The communication hooks that come with the engine, by name. A hook is a reducer that is handed in
// through FsdpOptions::reducer: see reducer.h, and docs/hooks.md.
//
//   options.reducer = make_hook({.kind = HookKind::kPowerSgd, .powersgd = {.start_step = 100}});
//   options.reducer_text = describe(...);     // what ranks must agree on
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "shard/hooks/powersgd.h"
#include "shard/hooks/wire.h"
#include "shard/options.h"

namespace tessera::shard {

enum class HookKind {
  kNone,  ///< the strategy's reducer
  kPowerSgd,
  kBatchedPowerSgd,  ///< one matrix a unit; see LowRankOptions::batched
  kNoop,             ///< sends nothing: for measuring alone
};

struct HookOptions {
  HookKind kind = HookKind::kNone;
  Wire wire = Wire::kF32;  ///< of all that the hook sends
  PowerSgdOptions powersgd = {};

  bool compresses() const {
    return kind == HookKind::kPowerSgd || kind == HookKind::kBatchedPowerSgd;
  }
};

/// "none", "bf16", "f16", "powersgd", "batched_powersgd", "noop", and a wire around a PowerSGD:
/// "bf16+powersgd".
std::vector<std::string> hook_names();
/// Sets kind and wire. Throws InvalidArgument naming those there are.
void set_hook(HookOptions& options, std::string_view name);
/// On one line, with all that changes results.
std::string describe(const HookOptions& options);

/// Empty for "none". May be shared by ranks: each Fsdp has reducers of its own.
ReducerFactory make_hook(const HookOptions& options);

}  // namespace tessera::shard
