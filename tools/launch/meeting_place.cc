#include "tools/launch/meeting_place.h"

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "engine/philox.h"
#include "tools/launch/slurm_lists.h"
#include "tools/machine/environment.h"

namespace tessera::tools {
namespace {

// Of the user, so that two who begin at one time do not meet.
std::string user(const VariableReader& reader) {
  for (const char* name : {"USER", "LOGNAME"}) {
    if (const std::string* const user = reader.find(name)) return *user;
  }
  return "";
}

// Where processes that know the same job find each other on `host`: on ports that the system hands
// out to nobody, and that are not torchrun's MASTER_PORT, where its agent listens.
std::string meeting_place(std::string_view host, std::string_view job) {
  return fmt::format("tcp:{}:{}+15", host, 20000 + engine::fnv1a(job) % 12000);
}
constexpr std::string_view kThisHost = "127.0.0.1";  // where it is the only one

void meet_by_torchrun(const VariableReader& reader, Launch& launch) {
  const std::string host = reader.host("MASTER_ADDR", reader.text("MASTER_ADDR"));
  launch.job = fmt::format("torchrun:{}:{}:{}", reader.text("TORCHELASTIC_RUN_ID"),
                           reader.port("MASTER_PORT"), user(reader));
  launch.address = meeting_place(launch.num_hosts == 1 ? kThisHost : host, launch.job);
}

void meet_by_slurm(const VariableReader& reader, Launch& launch) {
  constexpr std::string_view kNodes = "SLURM_STEP_NODELIST";
  const std::string& nodes = reader.text(kNodes);
  const std::string first = reader.host(kNodes, slurm_first_host(nodes));
  launch.job =
      fmt::format("slurm:{}.{}", reader.text("SLURM_JOB_ID"), reader.text("SLURM_STEP_ID"));
  launch.address = meeting_place(launch.num_hosts == 1 ? kThisHost : first, launch.job);
  // These may be another launcher's, outside of this step.
  const auto is_ours = [&](const char* name) {
    const std::string* const rank = reader.find(name);
    return rank != nullptr && *rank == std::to_string(launch.process);
  };
  const bool has_pmix = is_ours("PMIX_RANK");
  launch.has_pmi = !has_pmix && is_ours("PMI_RANK");
  launch.has_mpi = has_pmix || launch.has_pmi;
  if (launch.process == 0 && launch.host != 0) {
    launch.notes.push_back(fmt::format(
        "process 0 is not on the first host of {}, where the others look for it: give its address",
        variable_text(kNodes, nodes)));
  }
}

void meet_by_env(const VariableReader& reader, Launch& launch) {
  // A PyTorchJob numbers its pods and counts the processes that torchrun would start in them.
  const std::string* const per_pod = reader.find("PET_NPROC_PER_NODE");
  if (per_pod != nullptr && count_of(*per_pod) > 1 && launch.num_local_processes == 1) {
    reader.fail(
        "torchrun to start several processes in a pod, as in `torchrun --no-python PROGRAM`",
        variable_text("PET_NPROC_PER_NODE", *per_pod) + " without it");
  }
  const int port = reader.port("MASTER_PORT");
  launch.job = fmt::format("env:{}:{}", port, user(reader));
  launch.address =
      fmt::format("tcp:{}:{}", reader.host("MASTER_ADDR", reader.text("MASTER_ADDR")), port);
}

void meet_by_mpi(const VariableReader& reader, Launch& launch) {
  launch.has_mpi = true;
  const std::string* const job = reader.find("PMIX_NAMESPACE");
  if (launch.by != LauncherChoice::kOpenMpi || job == nullptr) return;
  launch.job = "openmpi:" + *job;
  if (launch.num_hosts == 1) launch.address = meeting_place(kThisHost, launch.job);
}

}  // namespace

void find_meeting_place(const VariableReader& reader, Launch& launch) {
  switch (launch.by) {
    case LauncherChoice::kTorchrun:
      meet_by_torchrun(reader, launch);
      break;
    case LauncherChoice::kSlurm:
      meet_by_slurm(reader, launch);
      break;
    case LauncherChoice::kEnv:
      meet_by_env(reader, launch);
      break;
    default:
      meet_by_mpi(reader, launch);
  }
}

}  // namespace tessera::tools
