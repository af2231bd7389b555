// What joins the processes of a launch.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/control/control.h"
#include "comm/flight_recorder.h"
#include "comm/process_group.h"
#include "comm/transport/transport.h"
#include "tools/config/train_config.h"
#include "tools/launch/launcher.h"

namespace tessera::tools {

/// What moves tensors between the processes of `launch`, whose ranks have a GPU each or none.
/// Throws InvalidArgument for MPI where the launcher starts none, for what needs other devices, and
/// for an interface of Gloo with another transport.
TransportChoice transport_of(const ParallelConfig& config, const Launch& launch, bool on_gpus);
/// "mpi", "gloo", "nccl"
std::string_view name_of(TransportChoice transport);

/// Runs `fn` on `num_threads` ranks of this process, of the world of all of them: each on one of
/// `gpus`, or on the CPU if there are none. `on_failure`, `flight`: as in comm/join.h. Collective.
/// Throws as comm::run_joined_ranks() and comm::run_joined_nccl_ranks(), and InvalidArgument where
/// nothing says how processes meet.
void run_processes(const TrainConfig& config, const Launch& launch, int num_threads,
                   const std::vector<int>& gpus,
                   std::function<void(const std::string& message)> on_failure,
                   std::shared_ptr<comm::FlightRecorder> flight,
                   const std::function<void(comm::ProcessGroup&)>& fn);

/// The processes' connections alone, without ranks: for who asks about them.
struct ProcessConnections {
  std::shared_ptr<comm::Control> control;  ///< null where MPI connects them and no address is known
  std::unique_ptr<comm::Transport> transport;
};
/// Collective. On CPUs. Throws as run_processes(); what fails in one is told to all.
ProcessConnections connect_processes(const TrainConfig& config, const Launch& launch);

/// By a process that will not join: tells the others why, if it can, and for two seconds at most.
void decline_processes(const TrainConfig& config, const Launch& launch,
                       const std::string& why) noexcept;

}  // namespace tessera::tools
