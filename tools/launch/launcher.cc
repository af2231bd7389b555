#include "tools/launch/launcher.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>

#include "engine/error.h"
#include "tools/launch/meeting_place.h"
#include "tools/launch/slurm_lists.h"
#include "tools/launch/variable_reader.h"

namespace tessera::tools {
namespace {

// Of several processes or hosts: the variable that says which one, and the one that says how many.
struct Names {
  std::string_view index, count;
};
// What a launcher sets.
struct Launcher {
  LauncherChoice by;
  std::array<std::string_view, 2> marks;  // if one of them is set, it has started this process
  Names world, local;
  Names hosts;               // empty: it does not number them
  std::string_view example;  // how it is used
};
// From the inside out: of two that have set something, the one that is later here started the
// other. So mpirun in a Slurm job leaves its processes SLURM_PROCID=0, which is its daemon's.
constexpr std::array kLaunchers = {
    Launcher{LauncherChoice::kTorchrun,
             {"TORCHELASTIC_RUN_ID"},
             {"RANK", "WORLD_SIZE"},
             {"LOCAL_RANK", "LOCAL_WORLD_SIZE"},
             {"GROUP_RANK", "GROUP_WORLD_SIZE"},
             "torchrun --no-python --nproc-per-node=4 PROGRAM"},
    Launcher{LauncherChoice::kOpenMpi,
             {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
             {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
             {"OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
             {},
             "mpirun -n 4 PROGRAM"},
    Launcher{LauncherChoice::kHydra,
             {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
             {"PMI_RANK", "PMI_SIZE"},
             {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
             {},
             "mpiexec -n 4 PROGRAM"},
    Launcher{LauncherChoice::kHydra,  // MVAPICH's other one
             {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
             {"MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"},
             {"MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"},
             {},
             "mpirun_rsh -np 4 HOSTS PROGRAM"},
    Launcher{LauncherChoice::kSlurm,
             {"SLURM_STEP_ID"},
             {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS"},
             {"SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"},
             {"SLURM_NODEID", "SLURM_STEP_NUM_NODES"},
             "srun --ntasks-per-node=4 PROGRAM"},
    Launcher{LauncherChoice::kHydra,  // by halves, as srun --mpi=pmi2 sets this half too
             {"PMI_RANK", "PMI_SIZE"},
             {"PMI_RANK", "PMI_SIZE"},
             {"MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
             {},
             "mpiexec -n 4 PROGRAM"},
    Launcher{LauncherChoice::kEnv,
             {"RANK", "WORLD_SIZE"},
             {"RANK", "WORLD_SIZE"},
             {"LOCAL_RANK", "LOCAL_WORLD_SIZE"},
             {},
             "RANK=0 WORLD_SIZE=4 MASTER_ADDR=HOST MASTER_PORT=29500 PROGRAM"},
};

// As PyTorch reads it: one, or several with commas between them.
constexpr std::string_view kInterface = "GLOO_SOCKET_IFNAME";

// Where a program is often meant to be started by a launcher.
struct Surroundings {
  std::string_view mark, name, launcher;
};
constexpr std::array kSurroundings = {Surroundings{"SLURM_JOB_ID", "a Slurm job", "srun"},
                                      Surroundings{"K_MPI_JOB_ROLE", "an MPIJob", "mpirun"},
                                      Surroundings{"PET_NNODES", "a PyTorchJob", "torchrun"}};

bool has_started(const Launcher& launcher, const Environment& environment) {
  return std::ranges::any_of(launcher.marks, [&](std::string_view mark) {
    const std::string* const text = find_variable(environment, mark);
    if (text == nullptr || launcher.by != LauncherChoice::kSlurm) return text != nullptr;
    // The highest numbers are of no step of srun: of a batch script, of the shell of salloc.
    std::uint32_t step = 0;
    std::from_chars(text->data(), text->data() + text->size(), step);
    return step < 0xfffffff0U;
  });
}

// The tasks on one host of a step, whose lists must be of `size` tasks on `num_hosts` hosts.
NumberVariable slurm_local_size(const VariableReader& reader, std::string_view name,
                                const NumberVariable& size, int host,
                                const NumberVariable& num_hosts) {
  NumberVariable local{name, reader.text(name)};
  const std::vector<int> tasks = slurm_tasks(local.text);
  if (std::cmp_not_equal(tasks.size(), num_hosts.value) ||
      std::accumulate(tasks.begin(), tasks.end(), std::int64_t{0}) != size.value) {
    reader.fail(fmt::format("{} of {} and {}", name, size.name, num_hosts.name),
                fmt::format("{}, {}, {}", local.str(), size.str(), num_hosts.str()));
  }
  local.value = tasks[static_cast<std::size_t>(host)];
  return local;
}

void read_numbers(const Launcher& launcher, const VariableReader& reader, Launch& launch) {
  const NumberVariable rank = reader.number(launcher.world.index),
                       size = reader.number(launcher.world.count);
  reader.require_below(rank, size);
  launch.process = rank.value;
  launch.num_processes = size.value;
  if (launcher.by == LauncherChoice::kEnv && reader.find(launcher.local.index) == nullptr &&
      reader.find(launcher.local.count) == nullptr) {  // one process a host
    launch.host = rank.value;
    launch.num_hosts = size.value;
    return;
  }
  NumberVariable local_size;
  if (launcher.hosts.index.empty()) {
    local_size = reader.number(launcher.local.count);
    if (local_size.value != size.value) launch.host = launch.num_hosts = std::nullopt;
  } else {
    const NumberVariable host = reader.number(launcher.hosts.index);
    const NumberVariable num_hosts = reader.number(launcher.hosts.count);
    reader.require_below(host, num_hosts);
    reader.require_within(num_hosts, size);
    launch.host = host.value;
    launch.num_hosts = num_hosts.value;
    local_size = launcher.by == LauncherChoice::kSlurm
                     ? slurm_local_size(reader, launcher.local.count, size, host.value, num_hosts)
                     : reader.number(launcher.local.count);
    if (num_hosts.value == 1 && local_size.value != size.value) {
      reader.fail(fmt::format("{} equal to {} on one host", local_size.name, size.name),
                  fmt::format("{}, {}, {}", local_size.str(), size.str(), num_hosts.str()));
    }
  }
  reader.require_within(local_size, size);
  const NumberVariable local_rank = reader.number(launcher.local.index);
  reader.require_below(local_rank, local_size);
  launch.local_process = local_rank.value;
  launch.num_local_processes = local_size.value;
}

Launch read(const Launcher& launcher, const Environment& environment) {
  const VariableReader reader(environment, name_of(launcher.by),
                              {launcher.world.index, launcher.world.count, launcher.local.index,
                               launcher.local.count, launcher.hosts.index, launcher.hosts.count});
  Launch launch{.by = launcher.by};
  read_numbers(launcher, reader, launch);
  if (launch.num_processes > 1) find_meeting_place(reader, launch);
  return launch;
}

// What several processes are numbered by, where nothing else says that a launcher started this one.
std::vector<std::string> unheeded_numbers(const Environment& environment) {
  std::vector<std::string> texts;
  const auto add = [&](std::string_view name) {
    const std::string* const value = find_variable(environment, name);
    if (value == nullptr) return;
    std::string text = variable_text(name, *value);
    if (std::ranges::find(texts, text) == texts.end()) texts.push_back(std::move(text));
  };
  for (const Launcher& launcher : kLaunchers) {
    for (const Names& names : {launcher.world, launcher.local, launcher.hosts}) {
      add(names.index);
      add(names.count);
    }
  }
  const std::string* const tasks = find_variable(environment, "SLURM_NTASKS");
  if (tasks != nullptr && *tasks != "1") add("SLURM_NTASKS");
  return texts;
}

}  // namespace

std::string Launch::str() const {
  std::string text = fmt::format("{}, process {} of {}", name_of(by), process, num_processes);
  if (num_processes == 1) return text;
  text += fmt::format(" ({} of {}", local_process, num_local_processes);
  return text + (host ? fmt::format(" on host {} of {})", *host, *num_hosts) : " on its host)");
}

std::string Launch::all_str(int num_threads) const {
  const auto count = [](int n, std::string_view what) {
    return fmt::format("{} {}{}", n, what, n == 1 ? "" : what.ends_with('s') ? "es" : "s");
  };
  const std::string processes =
      has_equal_hosts()
          ? count(*num_hosts, "host") + " x " + count(num_local_processes, "process")
          : count(num_processes, "process") + (num_hosts ? " on " + count(*num_hosts, "host") : "");
  return fmt::format("{}: {} x {}", name_of(by), processes, count(num_threads, "thread"));
}

Launch find_launch(const Environment& environment, LauncherChoice choice) {
  if (choice == LauncherChoice::kThreads) return {};
  const bool is_auto = choice == LauncherChoice::kAuto;
  for (const Launcher& launcher : kLaunchers) {
    if ((is_auto || launcher.by == choice) && has_started(launcher, environment)) {
      Launch launch = read(launcher, environment);
      if (const std::string* secret = find_variable(environment, "TESSERA_SECRET")) {
        launch.secret = *secret;
      }
      const std::string* const name = find_variable(environment, kInterface);
      if (name != nullptr && launch.num_processes > 1) {
        launch.interface = name->substr(0, name->find(','));
        if (launch.interface != *name) {
          launch.notes.push_back(fmt::format("of the interfaces in {} only the first is used: {}",
                                             variable_text(kInterface, *name), launch.interface));
        }
      }
      return launch;
    }
  }
  Launch alone;
  for (const Surroundings& around : kSurroundings) {
    if (const std::string* const value = find_variable(environment, around.mark)) {
      alone.notes.push_back(fmt::format("in {} ({}), but not started by {}: one process",
                                        around.name, variable_text(around.mark, *value),
                                        around.launcher));
    }
  }
  if (is_auto) {
    const std::vector<std::string> numbers = unheeded_numbers(environment);
    if (alone.notes.empty() && !numbers.empty()) {
      alone.notes.push_back(
          fmt::format("{} not heeded, as nothing else says that a launcher has started this "
                      "process: one process",
                      fmt::join(numbers, ", ")));
    }
    return alone;
  }
  const auto& wanted = *std::ranges::find(kLaunchers, choice, &Launcher::by);
  engine::fail(
      "[launcher] expected {} to have started this process, as in `{}`, got no {}{} "
      "(parallel.launcher)",
      name_of(choice), wanted.example, wanted.marks.front(),
      alone.notes.empty() ? "" : ": " + alone.notes.front());
}

bool is_launch_variable(std::string_view name) {
  if (name == "MASTER_ADDR" || name == "MASTER_PORT") return true;
  return std::ranges::any_of(kLaunchers, [&](const Launcher& launcher) {
    const auto names = {launcher.marks[0],    launcher.world.index, launcher.world.count,
                        launcher.local.index, launcher.local.count, launcher.hosts.index,
                        launcher.hosts.count};
    return std::ranges::find(names, name) != names.end();
  });
}

}  // namespace tessera::tools
