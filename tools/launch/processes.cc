#include "tools/launch/processes.h"

#include <exception>
#include <new>
#include <string_view>
#include <utility>

#include "comm/gloo/gloo_transport.h"
#include "comm/hand_out.h"
#include "comm/join.h"
#include "comm/mpi/mpi_transport.h"
#include "comm/nccl.h"
#include "engine/cuda.h"
#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/cli/error_output.h"
#include "tools/cli/flags.h"

namespace tessera::tools {
namespace {

using engine::require;

std::unique_ptr<comm::Transport> make_mpi(const TrainConfig& config, const Launch& launch) {
  return comm::make_mpi_transport(
      {.family = launch.by == LauncherChoice::kOpenMpi ? comm::MpiFamily::kOpenMpi
                 : launch.by == LauncherChoice::kHydra ? comm::MpiFamily::kMpich
                 : launch.has_pmi                      ? comm::MpiFamily::kMpichFirst
                                                       : comm::MpiFamily::kAny,
       .deadline = config.deadline()});
}

std::unique_ptr<comm::Transport> make_gloo(const TrainConfig& config, const Launch& launch,
                                           const comm::AllGatherTexts& all_gather) {
  std::string host =
      config.parallel.interface.empty() ? launch.interface : config.parallel.interface;
  if (host.empty() && launch.num_hosts == 1) host = "127.0.0.1";
  return comm::make_gloo_transport({.process = launch.process,
                                    .num_processes = launch.num_processes,
                                    .all_gather = all_gather,
                                    .host = std::move(host),
                                    .deadline = config.deadline(),
                                    .plugin_path = comm::find_gloo_plugin("/proc/self/exe")});
}

// A path in it leads where the person who typed it stands, as in other options.
std::string typed_address(const std::string& address) {
  constexpr std::string_view kFile = "file:";
  if (!address.starts_with(kFile)) return address;
  return std::string(kFile) + resolve_user_path(std::string_view(address).substr(kFile.size()));
}

comm::ControlOptions control_options(const TrainConfig& config, const Launch& launch) {
  return {.process = launch.process,
          .num_processes = launch.num_processes,
          .address = config.parallel.address.empty() ? launch.address
                                                     : typed_address(config.parallel.address),
          .secret = launch.secret,
          .insecure = config.parallel.insecure,
          .job = launch.job,
          .deadline = config.deadline(),
          .on_refused =
              [](const std::string& note) {
                write_to_stderr({"warning: ", note, "\n"}, kWarningPatience);
              },
          .on_waiting =
              [](const std::string& note) {
                write_to_stderr({engine::escaped(note), "\n"}, kWarningPatience);
              }};
}

// Where nothing says an address, and MPI, if the launcher is one of MPI, does not move the tensors:
// it tells where the processes meet, and ends with that.
comm::ControlOptions meeting_options(const TrainConfig& config, const Launch& launch,
                                     TransportChoice transport) {
  comm::ControlOptions options = control_options(config, launch);
  if (!options.address.empty() || transport == TransportChoice::kMpi) return options;
  require(launch.has_mpi,
          "[launch] expected an address where the processes meet, got none of {} "
          "(parallel.address)",
          launch.str());
  options.hand_out = [&config, &launch, self = options](const std::string& own) {
    const auto mpi = make_mpi(config, launch);
    return comm::hand_out(*mpi, self, own);
  };
  return options;
}

}  // namespace

TransportChoice transport_of(const ParallelConfig& config, const Launch& launch, bool on_gpus) {
  const TransportChoice wish = config.transport;
  require(!on_gpus || wish == TransportChoice::kAuto || wish == TransportChoice::kNccl,
          "[launch] expected parallel.transport=nccl between GPUs, got {} (device=cpu keeps to the "
          "CPU; {})",
          name_of(wish), launch.str());
  require(on_gpus || wish != TransportChoice::kNccl,
          "[launch] expected parallel.transport=nccl between GPUs, got it on the CPU ({})",
          launch.str());
  require(wish != TransportChoice::kMpi || launch.has_mpi,
          "[launch] expected a launcher of MPI, got {} (parallel.transport=mpi)", launch.str());
  TransportChoice transport = wish;
  if (transport == TransportChoice::kAuto) {
    transport = on_gpus          ? TransportChoice::kNccl
                : launch.has_mpi ? TransportChoice::kMpi
                                 : TransportChoice::kGloo;
  }
  require(transport == TransportChoice::kGloo || config.interface.empty(),
          "[launch] expected parallel.interface with gloo alone, got it with {}, which has options "
          "of its own (parallel.interface={})",
          name_of(transport), config.interface);
  return transport;
}

std::string_view name_of(TransportChoice transport) {
  switch (transport) {
    case TransportChoice::kAuto:
      return "auto";
    case TransportChoice::kMpi:
      return "mpi";
    case TransportChoice::kGloo:
      return "gloo";
    case TransportChoice::kNccl:
      return "nccl";
  }
  return "";  // no other
}

void run_processes(const TrainConfig& config, const Launch& launch, int num_threads,
                   const std::vector<int>& gpus,
                   std::function<void(const std::string& message)> on_failure,
                   std::shared_ptr<comm::FlightRecorder> flight,
                   const std::function<void(comm::ProcessGroup&)>& fn) {
  const TransportChoice transport = transport_of(config.parallel, launch, !gpus.empty());
  const bool is_mpi = transport == TransportChoice::kMpi;
  const comm::ControlOptions control = meeting_options(config, launch, transport);
  if constexpr (engine::kCudaBuilt) {
    if (!gpus.empty()) {
      return comm::run_joined_nccl_ranks(control,
                                         {.deadline = config.deadline(),
                                          .on_failure = std::move(on_failure),
                                          .flight = std::move(flight),
                                          .canonical = config.parallel.canonical,
                                          .gpus = gpus},
                                         fn);
    }
  }
  const comm::JoinOptions options{.control = control,
                                  .transport =
                                      [&](const comm::AllGatherTexts& all_gather) {
                                        return is_mpi ? make_mpi(config, launch)
                                                      : make_gloo(config, launch, all_gather);
                                      },
                                  .transport_name = std::string(name_of(transport)),
                                  .deadline = config.deadline(),
                                  .on_failure = std::move(on_failure),
                                  .flight = std::move(flight)};
  comm::run_joined_ranks(num_threads, options, fn);
}

ProcessConnections connect_processes(const TrainConfig& config, const Launch& launch) {
  const TransportChoice transport = transport_of(config.parallel, launch, /*on_gpus=*/false);
  const bool is_mpi = transport == TransportChoice::kMpi;
  const comm::ControlOptions control = meeting_options(config, launch, transport);
  ProcessConnections made;
  if (!control.address.empty() || control.hand_out) made.control = comm::Control::join(control);
  const auto connect = [&] {
    made.transport =
        is_mpi ? make_mpi(config, launch)
               : make_gloo(config, launch,
                           {[&](std::string own) {
                              return made.control->all_gather("connections", std::move(own));
                            },
                            [&] { return made.control->has_failed(); }});
    require(made.transport->num_processes() == launch.num_processes,
            "[launch] expected {} processes over {}, got {} ({})", launch.num_processes,
            made.transport->str(), made.transport->num_processes(), launch.str());
  };
  if (made.control) {
    made.control->run_together(connect);
  } else {
    connect();
  }
  return made;
}

void decline_processes(const TrainConfig& config, const Launch& launch,
                       const std::string& why) noexcept {
  try {
    const comm::ControlOptions control = control_options(config, launch);
    // Otherwise they meet by MPI, whose launchers end the others.
    if (!control.address.empty()) comm::Control::decline(control, why);
  } catch (const std::bad_alloc&) {
  }
}

}  // namespace tessera::tools
