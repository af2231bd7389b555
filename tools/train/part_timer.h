// Times a part of a step by the thread that runs it, without what it waits for on the way.
#pragma once

#include <chrono>

#include "engine/stream.h"

namespace tessera::tools {

/// Calls `fn` and adds the time that it takes to `total_ms`, less the time in which `compute` was
/// held up meanwhile, which counts elsewhere. Only calls it on a GPU, where the host's time says
/// nothing of the work that it launches.
template <class F>
void time_part(const engine::Stream& compute, double& total_ms, F fn) {
  if (!compute.device().is_host()) return fn();
  using Clock = std::chrono::steady_clock;
  const auto blocked_ns = compute.blocked_ns();
  const Clock::time_point begin = Clock::now();
  fn();
  const std::chrono::duration<double, std::milli> elapsed = Clock::now() - begin;
  total_ms += elapsed.count() - static_cast<double>(compute.blocked_ns() - blocked_ns) * 1e-6;
}

}  // namespace tessera::tools
