#include "tools/doctor/launcher_checks.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/cli/option_names.h"
#include "tools/launch/launcher.h"

namespace tessera::tools {
namespace {

struct Variable {
  std::string_view name;  // a star at the end: any others that begin so
  bool is_heeded;
  std::string_view meaning;
};
constexpr std::array kVariables = {
    Variable{"TESSERA_CPU_ISA", true, "unless --cpu.isa is given"},
    Variable{"TESSERA_CPU_GEMM", true, "unless --cpu.gemm is given"},
    Variable{"TESSERA_CPU_THREADS", false,
             "trainers go by --cpu.threads_per_rank; bench and doctor heed it"},
    Variable{"OMP_NUM_THREADS", false, "--cpu.threads_per_rank says how many threads a rank has"},
    Variable{"MKL_NUM_THREADS", false, "--cpu.threads_per_rank says how many threads a rank has"},
    Variable{"OMP_PROC_BIND", true,
             "by the OpenMP library, which may move threads of ranks to one core; prefer "
             "--cpu.pin=true"},
    Variable{"CUDA_VISIBLE_DEVICES", true, "by CUDA: the GPUs to use, in this order"},
    Variable{"NVIDIA_VISIBLE_DEVICES", true, "by the container's runtime, when it was started"},
    Variable{"NCCL_COMM_ID", false,
             "trainers over NCCL refuse it: it gives all of a run's communicators one meeting "
             "place"},
    Variable{"NCCL_*", true, "by NCCL itself"},
    Variable{"GLOO_SOCKET_IFNAME", true,
             "by trainers over gloo, unless --parallel.interface is given"},
    Variable{"NO_COLOR", true, "no colours on a terminal"},
    Variable{"SLURM_NTASKS", false, "srun says how many tasks a step has"},
    Variable{"SLURM_CPUS_PER_TASK", true, "by Slurm, which sets the affinity"},
    Variable{"SLURM_MEM_PER_NODE", true, "by Slurm, which sets the cgroup's limit"},
};
// What find_launch() reads.
constexpr Variable kOfLaunchers{"", true, "by trainers, whose ranks are a launcher's processes"};
constexpr Variable kOfNoLauncher{"", false, "no launcher has started this process"};

bool matches(const Variable& variable, std::string_view name) {
  if (!variable.name.ends_with('*')) return name == variable.name;
  return name.starts_with(variable.name.substr(0, variable.name.size() - 1));
}

Check check_one(const Variable& variable, const std::string& name, const std::string& value) {
  Check check{.name = "variable"};
  check.found = fmt::format("{}={}: {} ({})", name, engine::excerpt(value, 60),
                            variable.is_heeded ? "heeded" : "not heeded", variable.meaning);
  check.facts.add("variable", name).add("value", value).add("heeded", variable.is_heeded);
  if (name == "OMP_NUM_THREADS" && count_of(value) > 1) {
    check.verdict = Verdict::kWarn;
    check.fix = fmt::format(
        "unset OMP_NUM_THREADS, or give trainers --cpu.threads_per_rank={}: a rank has one thread "
        "unless that says more",
        count_of(value));
  }
  if (name == "NCCL_COMM_ID") {
    check.verdict = Verdict::kWarn;
    check.fix = "unset NCCL_COMM_ID";
  }
  return check;
}

// Who has started this process, and with how many others. `is_alone`: whether no launcher has.
Checks check_launch(const Environment& environment, LauncherChoice choice, bool& is_alone) {
  Checks checks;
  is_alone = false;  // where what launchers set is wrong, it is read
  try {
    const Launch launch = find_launch(environment, choice);
    is_alone = launch.by == LauncherChoice::kThreads;
    if (!is_alone) {
      Check check{.name = "launcher", .found = launch.str()};
      check.facts.add("launcher", name_of(launch.by))
          .add("process", launch.process)
          .add("num_processes", launch.num_processes);
      checks.push_back(std::move(check));
    }
    for (const std::string& note : launch.notes) {
      checks.push_back({.name = "launcher", .found = note});
    }
  } catch (const engine::InvalidArgument& error) {
    checks.push_back({.name = "launcher",
                      .verdict = Verdict::kWarn,
                      .found = error.what(),
                      .fix = "unset these variables, or set all that the launcher sets"});
  }
  return checks;
}

Check check_unread(const std::string& name) {
  Check check{.name = "variable", .verdict = Verdict::kWarn};
  check.found = name + " is set, and nothing reads it";
  const std::string_view meant = nearest_name(name, {kVariablesRead.begin(), kVariablesRead.end()});
  check.fix = "unset " + name;
  if (!meant.empty()) check.fix += fmt::format("; did you mean {}?", meant);
  check.facts.add("variable", name).add("heeded", false);
  return check;
}

}  // namespace

Checks check_launcher(const Environment& environment, LauncherChoice choice) {
  bool is_alone = false;
  Checks checks = check_launch(environment, choice, is_alone);
  const Variable& of_launchers = is_alone ? kOfNoLauncher : kOfLaunchers;
  for (const auto& [name, value] : environment) {
    if (is_launch_variable(name)) checks.push_back(check_one(of_launchers, name, value));
    const auto* const known = std::ranges::find_if(
        kVariables, [&name = name](const Variable& variable) { return matches(variable, name); });
    if (known != kVariables.end()) checks.push_back(check_one(*known, name, value));
  }
  for (const std::string& name : unread_variables(environment)) {
    checks.push_back(check_unread(name));
  }
  if (checks.empty()) {
    checks.push_back({.name = "variables",
                      .found = "no launcher has set any: ranks are threads (several processes: "
                               "docs/clusters.md)"});
  }
  return checks;
}

}  // namespace tessera::tools
