#include "tools/machine/environment.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <system_error>

namespace tessera::tools {
namespace {

struct LaunchVariables {
  std::string_view size, rank;
};
// Of torchrun, Slurm, Open MPI, and MPICH with those that are built on it.
constexpr std::array kLaunchers = {LaunchVariables{"WORLD_SIZE", "RANK"},
                                   LaunchVariables{"SLURM_NTASKS", "SLURM_PROCID"},
                                   LaunchVariables{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"},
                                   LaunchVariables{"PMI_SIZE", "PMI_RANK"}};

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

std::vector<std::string> unread_variables(const Environment& environment) {
  std::vector<std::string> names;
  for (const auto& [name, value] : environment) {
    if (!name.starts_with("TESSERA_")) continue;
    if (std::ranges::find(kVariablesRead, name) == kVariablesRead.end()) names.push_back(name);
  }
  return names;
}

Launched launched(const Environment& environment) {
  Launched result;
  const auto add = [&](std::string_view name, int first_of_several) {
    const auto found = environment.find(std::string(name));
    if (found == environment.end() || count_of(found->second) < first_of_several) return;
    result.num_processes =
        std::max(result.num_processes, count_of(found->second) + 2 - first_of_several);
    result.variables += (result.variables.empty() ? "" : ", ") + found->first + "=" + found->second;
  };
  for (const LaunchVariables& launcher : kLaunchers) {
    add(launcher.size, 2);
    add(launcher.rank, 1);  // counts from 0
  }
  return result;
}

bool is_launch_size(std::string_view name) {
  return std::ranges::find(kLaunchers, name, &LaunchVariables::size) != kLaunchers.end();
}

int count_of(std::string_view text) {
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  return error == std::errc() && end == text.data() + text.size() ? std::max(count, 0) : 0;
}

}  // namespace tessera::tools
