// What several processes of a run write each for itself.
#pragma once

#include <filesystem>
#include <string>

namespace tessera::tools {

/// `path` for what a process writes of its own ranks, of which `first_rank` is the first: of rank
/// 0's as it is, of others with that number before the extension, "trace.rank2.json".
inline std::string process_file(const std::string& path, int first_rank) {
  if (first_rank == 0) return path;
  const std::filesystem::path whole(path);
  return (whole.parent_path() / (whole.stem().string() + ".rank" + std::to_string(first_rank) +
                                 whole.extension().string()))
      .string();
}

}  // namespace tessera::tools
