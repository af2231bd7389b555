#include "tools/doctor/launcher_checks.h"

#include <fmt/format.h>
#include <unistd.h>

#include <array>
#include <charconv>
#include <string_view>
#include <vector>

#include "engine/io/text.h"

namespace tessera::tools {
namespace {

struct Variable {
  std::string_view name;  // a star at the end: any that begin so
  bool is_heeded;
  std::string_view meaning;
};
constexpr std::array kVariables = {
    Variable{"TESSERA_CPU_ISA", true, "unless --cpu.isa is given"},
    Variable{"TESSERA_CPU_GEMM", true, "unless --cpu.gemm is given"},
    Variable{"TESSERA_CPU_THREADS", false,
             "trainers go by --cpu.threads_per_rank; programs of your "
             "own heed it"},
    Variable{"OMP_NUM_THREADS", false, "--cpu.threads_per_rank says how many threads a rank has"},
    Variable{"MKL_NUM_THREADS", false, "--cpu.threads_per_rank says how many threads a rank has"},
    Variable{"OMP_PROC_BIND", true,
             "by the OpenMP library, which may move threads of ranks to one "
             "core; prefer --cpu.pin"},
    Variable{"CUDA_VISIBLE_DEVICES", true, "by CUDA: the GPUs that there are, in this order"},
    Variable{"NVIDIA_VISIBLE_DEVICES", true, "by the container's runtime, when it was started"},
    Variable{"NCCL_*", true, "by NCCL itself"},
    Variable{"NO_COLOR", true, "no colours on a terminal"},
    Variable{"RANK", false, "ranks are threads of one process: --parallel.ranks"},
    Variable{"LOCAL_RANK", false, "ranks are threads of one process: --parallel.ranks"},
    Variable{"WORLD_SIZE", false, "ranks are threads of one process: --parallel.ranks"},
    Variable{"MASTER_ADDR", false, "trainers do not reach other machines"},
    Variable{"SLURM_NTASKS", false, "ranks are threads of one process: --parallel.ranks"},
    Variable{"SLURM_PROCID", false, "ranks are threads of one process: --parallel.ranks"},
    Variable{"SLURM_CPUS_PER_TASK", true, "by Slurm, which sets the affinity"},
    Variable{"SLURM_MEM_PER_NODE", true, "by Slurm, which sets the cgroup's limit"},
    Variable{"OMPI_COMM_WORLD_SIZE", false, "ranks are threads of one process: --parallel.ranks"},
    Variable{"PMI_SIZE", false, "ranks are threads of one process: --parallel.ranks"},
};
// How many copies of the program a launcher says it has started.
constexpr std::array<std::string_view, 4> kNumProcesses = {"WORLD_SIZE", "SLURM_NTASKS",
                                                           "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"};

bool matches(const Variable& variable, std::string_view name) {
  if (!variable.name.ends_with('*')) return name == variable.name;
  return name.starts_with(variable.name.substr(0, variable.name.size() - 1));
}

int count_of(std::string_view text) {
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  return error == std::errc() && end == text.data() + text.size() ? count : 0;
}

Check check_one(const Variable& variable, const std::string& name, const std::string& value) {
  Check check{.name = "variable"};
  check.found = fmt::format("{}={}: {} ({})", name, engine::excerpt(value, 60),
                            variable.is_heeded ? "heeded" : "not heeded", variable.meaning);
  check.facts.add("variable", name).add("value", value).add("heeded", variable.is_heeded);
  for (const std::string_view counter : kNumProcesses) {
    if (name != counter || count_of(value) < 2) continue;
    check.verdict = Verdict::kWarn;
    check.fix = fmt::format(
        "start one process a machine (srun --ntasks-per-node=1, no torchrun or mpirun) with "
        "--parallel.ranks={}: {} processes would each train a model of their own",
        count_of(value), count_of(value));
  }
  if (name == "OMP_NUM_THREADS" && count_of(value) > 1) {
    check.verdict = Verdict::kWarn;
    check.fix = fmt::format(
        "--cpu.threads_per_rank={} if that is meant; ranks have one thread each", count_of(value));
  }
  return check;
}

}  // namespace

Environment environment() {
  Environment all;
  for (char** entry = ::environ; entry != nullptr && *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const std::size_t equals = text.find('=');
    if (equals == std::string_view::npos) continue;
    all.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return all;
}

Checks check_launcher(const Environment& environment) {
  Checks checks;
  for (const auto& [name, value] : environment) {
    for (const Variable& variable : kVariables) {
      if (matches(variable, name)) checks.push_back(check_one(variable, name, value));
    }
  }
  if (checks.empty()) checks.push_back({.name = "variables", .found = "none of launchers are set"});
  return checks;
}

}  // namespace tessera::tools
