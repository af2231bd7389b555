#include "tools/train/run_files.h"

#include <sys/stat.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <system_error>

#include "engine/error.h"
#include "engine/io/file.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

/// Whether `a` and `b` are one regular file, or one name at which there is none yet.
bool is_same_file(const std::string& a, const std::string& b) {
  struct stat a_status {
  }, b_status{};
  const bool a_exists = ::stat(a.c_str(), &a_status) == 0;
  const bool b_exists = ::stat(b.c_str(), &b_status) == 0;
  if (a_exists != b_exists) return false;
  if (a_exists) {
    return S_ISREG(a_status.st_mode) && a_status.st_dev == b_status.st_dev &&
           a_status.st_ino == b_status.st_ino;
  }
  std::error_code a_error, b_error;
  const fs::path a_path = fs::weakly_canonical(a, a_error);
  const fs::path b_path = fs::weakly_canonical(b, b_error);
  return !a_error && !b_error && a_path == b_path;
}

/// Whether `path` is a name under which `output` may be written before it takes its place: what
/// lies there is taken for what a dead process left.
bool is_temporary_of(const std::string& output, const std::string& path) {
  std::error_code output_error, path_error;
  const std::string name = fs::weakly_canonical(output, output_error).string() + ".tmp-";
  return fs::weakly_canonical(path, path_error).string().starts_with(name) && !output_error &&
         !path_error;
}

}  // namespace

void check_files_differ(std::span<const RunFile> written, std::span<const RunFile> others) {
  for (const RunFile& output : written) {
    for (const RunFile& other : others) {
      engine::require(!is_same_file(output.path, other.path),
                      "[config] expected {} and {} to name different files, got one, which would "
                      "be overwritten ({}, {})",
                      output.option, other.option, output.path, other.path);
      engine::require(!is_temporary_of(output.path, other.path),
                      "[config] expected a name for {} that is none of the temporary ones of {}, "
                      "got {} beside {}",
                      other.option, output.option, other.path, output.path);
    }
  }
}

std::vector<RunFile> files_of(const std::string& option, const std::string& folder,
                              std::span<const std::string_view> endings) {
  std::vector<RunFile> files;
  for (const std::string& name : engine::names_in_folder(folder)) {
    const std::string path = fmt::format("{}/{}", folder, name);
    if (std::ranges::any_of(endings, [&](std::string_view e) { return path.ends_with(e); })) {
      files.push_back({option, path});
    }
  }
  return files;
}

}  // namespace tessera::tools
