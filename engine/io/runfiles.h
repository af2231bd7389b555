// What Bazel lays beside the programs that it builds.
#pragma once

#include <filesystem>

namespace tessera::engine {

/// PROGRAM.runfiles/REPOSITORY/`file`, where Bazel built `program`, of whichever repository has it:
/// Tessera is the program's own, or one that it uses. Empty if there is none.
std::filesystem::path find_runfile(const std::filesystem::path& program,
                                   const std::filesystem::path& file);

}  // namespace tessera::engine
