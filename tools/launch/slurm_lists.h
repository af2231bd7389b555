// The short forms in which Slurm lists the hosts of a step and the tasks on each.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

/// The tasks on each host: {2, 2, 1} for "2(x2),1". Empty for what is no such list, and for one of
/// more than 65536 hosts or of a host with as many tasks.
std::vector<int> slurm_tasks(std::string_view list);

/// The first host: "rack1-03" of "rack[1-2]-[03-07,9],login". Empty for what is no such list.
std::string slurm_first_host(std::string_view list);

}  // namespace tessera::tools
