// Worlds whose ranks are processes, as far as the control plane makes them one.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "comm/control/control.h"
#include "comm/flight_recorder.h"
#include "comm/world/peers.h"
#include "comm/world/world.h"

namespace tessera::comm {

/// One process's part of such a world. What fails in it fails the job, and the other way round.
struct Link {
  std::shared_ptr<World> world;
  Peers peers;                          ///< which are processes
  std::shared_ptr<const void> carrier;  ///< of failures, while it lives
};

/// `on_failure`, `flight`: as in ThreadsOptions. The process leaves once nothing of the result
/// lives.
Link link_world(const std::shared_ptr<Control>& control, std::chrono::milliseconds deadline,
                std::function<void(const std::string& message)> on_failure,
                std::shared_ptr<FlightRecorder> flight);

/// What rank `own` of this process, of `num_each` that each has, knows of all ranks: rank r is in
/// process r / num_each. `control` was told how many this process has.
Peers peers_of(const std::shared_ptr<Control>& control, const std::shared_ptr<World>& world,
               int num_each, int own);

/// Throws InvalidArgument unless all processes have the same `own`, which is `what`. Collective.
void check_equal(Control& control, std::string_view what, std::string own);

/// Joins the control plane, and returns once all processes have done `connect` with it. Collective.
/// What one of them throws all others are told; of no thread left: as DeviceError. A CommError is
/// replaced by the failure of the job where another process has failed, or is lost.
void join_over(const ControlOptions& self,
               const std::function<void(const std::shared_ptr<Control>&)>& connect);

}  // namespace tessera::comm
