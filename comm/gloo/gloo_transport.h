// A transport over Gloo's TCP connections, for launchers that bring no MPI: torchrun, Kubernetes,
// srun. Gloo is in a plug-in, libtessera_gloo.so, which is built where Gloo's headers are and
// loaded when it is asked for: programs start, and do everything else, without either.
//
// Gloo neither encrypts nor authenticates. Each connection is checked once, when it is made, to
// lead to its process of this world; what comes afterwards is trusted: for networks in which
// everyone may.
#pragma once

#include <chrono>
#include <filesystem>
#include <memory>
#include <string>

#include "comm/transport/transport.h"

namespace tessera::comm {

struct GlooOptions {
  int process = 0, num_processes = 1;
  /// Tells all processes where this one is. Where it knows of a failure of the job, that ends the
  /// wait for connections, too.
  AllGatherTexts all_gather = {};
  /// Where others reach this process: an address, a name that stands for one, or a network
  /// interface. Empty: the address of the default route, else of the first interface that is up,
  /// else 127.0.0.1. Never what this machine's own name stands for: often that is 127.0.1.1.
  std::string host = {};
  /// For all processes to be connected.
  std::chrono::milliseconds deadline{60'000};
  /// Empty: libtessera_gloo.so as the loader finds it. See find_gloo_plugin().
  std::string plugin_path = {};
};

/// Collective. Throws DeviceError without the plug-in or Gloo, or with a plug-in of another
/// version; InvalidArgument for a host that is not this one; CommError that names the process that
/// could not be connected.
std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options);

/// The plug-in that came with a program: in its folder, in ../lib of an installation, or where
/// Bazel built it. Empty if there is none.
std::string find_gloo_plugin(const std::filesystem::path& program);

}  // namespace tessera::comm
