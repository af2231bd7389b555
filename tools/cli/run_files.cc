#include "tools/cli/run_files.h"

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

/// Without links, of what is not there yet too; empty if nobody can tell.
fs::path canonical(const std::string& path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error);
  if (error) return {};
  const fs::path result = fs::weakly_canonical(absolute, error);
  return error ? fs::path() : result;
}

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
  const fs::path a_path = canonical(a);
  return !a_path.empty() && a_path == canonical(b);
}

/// Whether `path` is a name under which `output` may be written before it takes its place: what
/// lies there is taken for what a dead process left.
bool is_temporary_of(const std::string& output, const std::string& path) {
  const fs::path name = canonical(output);
  return !name.empty() && canonical(path).string().starts_with(name.string() + ".tmp-");
}

/// The files below `folder`, as far as they can be read.
std::vector<std::string> files_below(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, fs::directory_options::skip_permission_denied,
                                         error);
  for (const fs::recursive_directory_iterator end; !error && entry != end; entry.increment(error)) {
    paths.push_back(entry->path().string());
  }
  return paths;
}

}  // namespace

bool lies_in(const std::string& path, const std::string& folder) {
  const fs::path inner = canonical(path);
  fs::path outer = canonical(folder);
  if (!outer.has_filename()) outer = outer.parent_path();  // "folder/"
  return !outer.empty() && std::ranges::mismatch(outer, inner).in1 == outer.end();
}

void check_files_differ(std::span<const RunFile> written, std::span<const RunFile> others) {
  for (const RunFile& output : written) {
    for (const RunFile& other : others) {
      engine::require(!is_same_file(output.path, other.path),
                      "[config] expected {} and {} to name different files, got one, which would "
                      "be overwritten ({}, {})",
                      output.option, other.option, output.path, other.path);
      engine::require(!is_temporary_of(output.path, other.path),
                      "[config] expected a name for {} that is none of the temporary ones of {}, "
                      "got {} next to {}",
                      other.option, output.option, other.path, output.path);
    }
  }
}

void check_files_outside(std::span<const RunFile> files, const RunFile& folder) {
  const std::vector<std::string> there = files_below(folder.path);
  for (const RunFile& file : files) {
    const bool is_inside =
        lies_in(file.path, folder.path) || std::ranges::any_of(there, [&](const std::string& path) {
          std::error_code ignored;
          return is_same_file(path, file.path) ||
                 (fs::is_symlink(path, ignored) && lies_in(file.path, path));
        });
    engine::require(!is_inside,
                    "[config] expected {} to name no file of {}, got one, which would be lost "
                    "({}, {})",
                    file.option, folder.option, file.path, folder.path);
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
