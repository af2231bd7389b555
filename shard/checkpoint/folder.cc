#include "shard/checkpoint/folder.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"
#include "shard/checkpoint/manifest.h"
#include "shard/checkpoint/reader.h"

namespace tessera::shard {

using engine::fail;
using engine::IoError;
using engine::require;

namespace {

constexpr std::string_view kPrefix = "step_";

std::string reason(int error) { return std::generic_category().message(error); }

void rename_folder(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) == 0) return;  // needs no memory after it
  const int error = errno;
  fail<IoError>("[checkpoint] expected to rename {}, got {} ({})", engine::escaped(from),
                reason(error), to);
}

/// Throws IoError if there is a folder that cannot be read: it may hold checkpoints.
std::vector<std::string> names_in(const std::string& folder) {
  errno = 0;
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(folder.c_str()), ::closedir);
  int error = stream == nullptr ? errno : 0;
  std::vector<std::string> names;
  while (error == 0) {
    errno = 0;
    const dirent* const entry = ::readdir(stream.get());
    error = errno;
    if (entry == nullptr) break;
    names.emplace_back(entry->d_name);
  }
  require<IoError>(error == 0 || error == ENOENT,
                   "[checkpoint] expected a folder that can be read, got {} ({})", reason(error),
                   folder);
  return names;
}

/// create_directories(), the names of which last through a power cut.
void create_folders(const std::string& folder) {
  std::vector<std::string> made;
  std::error_code error;
  for (std::filesystem::path path = folder;
       !path.empty() && !std::filesystem::exists(path, error) && path != path.parent_path();
       path = path.parent_path()) {
    made.push_back(path.string());
  }
  std::filesystem::create_directories(folder, error);
  require<IoError>(!error, "[checkpoint] expected to make a folder, got {} ({})", error.message(),
                   folder);
  for (const std::string& path : made) engine::flush_folder_of(path);
}

/// Removes a folder of files, or a link. Returns the first error, 0 if none.
int remove_folder(const std::string& folder) {
  int first_error = 0;
  const auto keep_error = [&](int result) {
    if (result != 0 && first_error == 0) first_error = errno;
  };
  struct stat status {};
  if (::lstat(folder.c_str(), &status) == 0 && S_ISLNK(status.st_mode)) {
    keep_error(::unlink(folder.c_str()));  // what it leads to is not ours
    return first_error;
  }
  for (const std::string& name : engine::names_in_folder(folder)) {
    if (name == "." || name == "..") continue;
    keep_error(::unlink(fmt::format("{}/{}", folder, name).c_str()));
  }
  keep_error(::rmdir(folder.c_str()));
  return first_error;
}

}  // namespace

std::optional<std::int64_t> step_of_name(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  name.remove_prefix(kPrefix.size());
  std::int64_t step = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), step);
  const bool is_number = error == std::errc() && end == name.data() + name.size();
  return is_number && step >= 0 && std::to_string(step) == name ? std::optional(step)
                                                                : std::nullopt;
}

std::vector<std::int64_t> steps_in(const std::string& folder) {
  std::vector<std::int64_t> steps;
  for (const std::string& name : names_in(folder)) {
    if (const auto step = step_of_name(name)) steps.push_back(*step);
  }
  std::ranges::sort(steps, std::greater());
  return steps;
}

std::string checkpoint_path(const std::string& folder, std::int64_t step) {
  return fmt::format("{}/{}{}", folder, kPrefix, step);
}

std::optional<std::int64_t> misnamed_step(const std::string& folder, std::int64_t step) {
  const std::string path = fmt::format("{}/{}", checkpoint_path(folder, step), kManifestName);
  try {
    const Manifest manifest =
        parse_manifest(engine::read_text_file(path, kMaxManifestNbytes), path);
    return manifest.step == step ? std::nullopt : std::optional(manifest.step);
  } catch (const engine::Error&) {  // whoever loads it says why
    return std::nullopt;
  }
}

std::string misnamed_text(const std::string& path, std::int64_t step) {
  return fmt::format("{} is in fact the checkpoint of step {} ({})",
                     engine::excerpt(std::filesystem::path(path).filename().string()), step, path);
}

std::string temporary_path(const std::string& folder, std::int64_t step, std::uint64_t nonce) {
  return fmt::format("{}.tmp-{:016x}", checkpoint_path(folder, step), nonce);
}

CheckpointFolder::CheckpointFolder(std::string folder) : folder_(std::move(folder)) {
  while (folder_.size() > 1 && folder_.ends_with('/')) folder_.pop_back();
  create_folders(folder_);
  const std::string lock = folder_ + "/.lock";
  lock_ =
      engine::FileDescriptor(::open(lock.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666));
  require<IoError>(lock_.is_open(), "[checkpoint] expected to write here, got {} ({})",
                   reason(errno), lock);
  engine::lock_for_run(lock_, folder_);
  // step_N.tmp-NONCE of a save, step_N.removed-NONCE of prune(): nobody else is at work here.
  for (const std::string& name : engine::names_in_folder(folder_)) {
    const auto dot = name.find('.');
    if (dot == std::string::npos || !step_of_name(std::string_view(name).substr(0, dot))) continue;
    const std::string_view ending = std::string_view(name).substr(dot);
    if (!ending.starts_with(".tmp-") && !ending.starts_with(".removed-")) continue;
    remove(fmt::format("{}/{}", folder_, name));
  }
}

void CheckpointFolder::publish(const std::string& temporary, std::int64_t step,
                               std::string_view manifest) {
  const std::string path = fmt::format("{}/{}", temporary, kManifestName);
  engine::FileDescriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  require<IoError>(file.is_open(), "[checkpoint] expected to create a file, got {} ({})",
                   reason(errno), path);
  engine::write_all(file, path, std::as_bytes(std::span(manifest)));
  int error = engine::flush(file);
  const int close_error = file.close();
  if (error == 0) error = close_error;
  require<IoError>(error == 0, "[checkpoint] expected to flush the file, got {} ({})",
                   reason(error), path);
  engine::flush_folder_of(path);
  const std::string whole = checkpoint_path(folder_, step);
  // rename() would replace an empty folder.
  require<IoError>(::access(whole.c_str(), F_OK) != 0,
                   "[checkpoint] expected no checkpoint of step {} yet, got one ({})", step, whole);
  rename_folder(temporary, whole);
  try {
    engine::flush_folder_of(whole);
  } catch (...) {  // no memory either
    ::rename(whole.c_str(), temporary.c_str());
    throw;
  }
}

std::string CheckpointFolder::set_latest(std::int64_t step) {
  try {
    engine::AtomicFile latest(folder_ + "/latest");
    const std::string text = fmt::format("{}{}\n", kPrefix, step);
    latest.write(std::as_bytes(std::span(text)));
    latest.commit();
  } catch (const IoError& e) {
    return e.what();
  }
  return "";
}

void CheckpointFolder::remove(const std::string& temporary) noexcept {
  try {
    remove_folder(temporary);
  } catch (...) {  // no memory: the next run removes it
  }
}

std::vector<std::string> CheckpointFolder::prune(int keep, const std::set<std::int64_t>& rejected) {
  std::vector<std::string> errors;
  std::vector<std::int64_t> steps = steps_in(folder_);
  std::erase_if(steps, [&](std::int64_t step) { return rejected.contains(step); });
  while (keep > 0 && std::ssize(steps) > keep) {
    // Under another name first: what is half removed must not look like a checkpoint.
    const std::string path = checkpoint_path(folder_, steps.back());
    const std::string removed = path + ".removed-0";
    int error = ::rename(path.c_str(), removed.c_str()) == 0 ? 0 : errno;
    if (error == 0) error = remove_folder(removed);
    if (error != 0) {
      errors.push_back(fmt::format("[checkpoint] expected to remove an old one, got {} ({})",
                                   reason(error), path));
    }
    steps.pop_back();
  }
  return errors;
}

void CheckpointFolder::set_aside(std::int64_t step) {
  const std::string path = checkpoint_path(folder_, step);
  for (int i = 0;; ++i) {
    const std::string damaged = fmt::format("{}.damaged-{}", path, i);
    if (::access(damaged.c_str(), F_OK) == 0) continue;
    rename_folder(path, damaged);
    return engine::flush_folder_of(path);
  }
}

}  // namespace tessera::shard
