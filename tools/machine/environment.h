// What launchers and people leave in the environment of a program, and what of it nothing heeds.
#pragma once

#include <array>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::tools {

using Environment = std::map<std::string, std::string>;
/// Of this process.
Environment environment();

/// Those of TESSERA_* that something reads.
inline constexpr std::array<std::string_view, 3> kVariablesRead = {
    "TESSERA_CPU_GEMM", "TESSERA_CPU_ISA", "TESSERA_CPU_THREADS"};
/// The names that begin with TESSERA_ and that nothing reads, as of slips of the keyboard.
std::vector<std::string> unread_variables(const Environment& environment);

/// That a launcher has started this process as one of several.
struct Launched {
  int num_processes = 1;  ///< 1: nothing says so
  std::string variables;  ///< that say so: "WORLD_SIZE=4, RANK=1"
};
/// What WORLD_SIZE, SLURM_NTASKS, OMPI_COMM_WORLD_SIZE, PMI_SIZE and the variables with their ranks
/// say.
Launched launched(const Environment& environment);
/// Whether `name` is one of the sizes among them.
bool is_launch_size(std::string_view name);

/// A number from 0 on; 0 for anything else.
int count_of(std::string_view text);

}  // namespace tessera::tools
