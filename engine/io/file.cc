#include "engine/io/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::engine {
namespace {

std::string reason(int error) { return std::generic_category().message(error); }

/// The folder that holds `path`.
std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

// [Note: temporary files]
// PATH.tmp-PID-N is locked from its creation until it has its name or is removed. So one whose lock
// is free is of a process that has died, on whatever host and whoever has its number now, and the
// next AtomicFile of that path removes it. Between creation and lock another process may have done
// so: then the creator finds its file gone and takes the next name. Without locks nothing is
// removed.

/// Whether `text` is "PID-N".
bool is_process_and_number(std::string_view text) {
  return text.find_first_not_of("0123456789-") == text.npos && std::ranges::count(text, '-') == 1 &&
         text.front() != '-' && text.back() != '-';
}

/// Removes what processes that died have left beside `path`. What cannot be removed stays.
void remove_leftovers(const std::string& path) {
  const std::string folder = folder_of(path), prefix = path.substr(path.rfind('/') + 1) + ".tmp-";
  for (const std::string& name : names_in_folder(folder)) {
    if (!name.starts_with(prefix)) continue;
    if (!is_process_and_number(std::string_view(name).substr(prefix.size()))) continue;
    const std::string leftover = fmt::format("{}/{}", folder, name);
    const FileDescriptor file(
        ::open(leftover.c_str(), O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!file.is_open() || try_lock(file) != Lock::kTaken) continue;
    // The file may have got its name, and its old one be in use again, before it was locked here.
    struct stat locked {
    }, named{};
    if (::fstat(file.get(), &locked) == 0 && ::lstat(leftover.c_str(), &named) == 0 &&
        S_ISREG(locked.st_mode) && locked.st_dev == named.st_dev && locked.st_ino == named.st_ino) {
      ::unlink(leftover.c_str());
    }
  }
}

/// A new file beside `path`, locked; sets `temporary` to its name.
FileDescriptor create_beside(const std::string& path, std::string& temporary) {
  for (int i = 0;; ++i) {
    temporary = fmt::format("{}.tmp-{}-{}", path, ::getpid(), i);
    FileDescriptor file(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    const int error = file.is_open() ? 0 : errno;
    if (error == EEXIST) continue;
    if (error != 0) {
      temporary.clear();
      fail<IoError>("[file] expected to create a file, got {} ({})", reason(error), path);
    }
    struct stat status {};
    const bool is_ours = try_lock(file) != Lock::kHeldByAnother;
    if (is_ours && (::fstat(file.get(), &status) != 0 || status.st_nlink > 0)) return file;
  }
}

bool has_attribute(const std::string& path, std::uint64_t attribute) {
  struct statx status {};
  return ::statx(AT_FDCWD, path.c_str(), AT_SYMLINK_NOFOLLOW, 0, &status) == 0 &&
         (status.stx_attributes & attribute) != 0;
}

/// 0, or why no file could be renamed to `path`, where there is a regular file or nothing.
int error_of_renaming_to(const std::string& path) {
  if (has_attribute(path, STATX_ATTR_MOUNT_ROOT)) return EBUSY;
  if (has_attribute(folder_of(path), STATX_ATTR_APPEND)) return EPERM;
  // rmdir never removes a file, but it asks first what a rename asks, whether the name may go:
  // folder and mount writable, file not immutable, sticky folders. ENOTDIR says that it may.
  const int error = ::rmdir(path.c_str()) == 0 ? 0 : errno;
  return error == ENOTDIR || error == ENOENT ? 0 : error;
}

}  // namespace

FileDescriptor::~FileDescriptor() { close(); }

FileDescriptor::FileDescriptor(FileDescriptor&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)) {}

FileDescriptor& FileDescriptor::operator=(FileDescriptor&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

int FileDescriptor::close() {
  // EINTR closes the descriptor all the same on Linux.
  const int fd = std::exchange(fd_, -1);
  return fd < 0 || ::close(fd) == 0 || errno == EINTR ? 0 : errno;
}

Lock try_lock(const FileDescriptor& file) {
  if (::flock(file.get(), LOCK_EX | LOCK_NB) == 0) return Lock::kTaken;
  return errno == EWOULDBLOCK ? Lock::kHeldByAnother : Lock::kUnsupported;
}

void lock_for_run(const FileDescriptor& file, std::string_view path) {
  const Lock lock = try_lock(file);
  require<IoError>(lock != Lock::kHeldByAnother,
                   "[file] expected one run at a time, got another that is writing here ({})",
                   path);
  if (lock == Lock::kUnsupported) {
    std::fprintf(stderr, "warning: no locks on this file system; start no second run here (%s)\n",
                 escaped(path).c_str());
  }
}

void write_all(const FileDescriptor& file, std::string_view path,
               std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(file.get(), bytes.data(), bytes.size());
    if (written < 0) {
      if (errno == EINTR) continue;
      fail<IoError>("[file] expected to write {} bytes, got {} ({})", bytes.size(), reason(errno),
                    path);
    }
    bytes = bytes.subspan(static_cast<std::size_t>(written));
  }
}

int flush(const FileDescriptor& file) {
  while (::fsync(file.get()) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

InputFile::InputFile(std::string path) : path_(std::move(path)) {
  struct stat status {};
  int error = 0;
  // A network file system may still know a file that another host has replaced: once it has said
  // so (ESTALE), the next opening finds the new one.
  constexpr int kMaxTries = 20;
  for (int i = 0; i < kMaxTries && (i == 0 || error == ESTALE); ++i) {
    if (i > 1) std::this_thread::sleep_for(std::chrono::milliseconds(50));
    // Without O_NONBLOCK, opening a pipe waits for a writer.
    file_ = FileDescriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
    error = file_.is_open() && ::fstat(file_.get(), &status) == 0 ? 0 : errno;
  }
  require<IoError>(error == 0, "[file] expected a readable file, got {} ({})", reason(error),
                   path_);
  require<IoError>(S_ISREG(status.st_mode), "[file] expected a regular file, got {} ({})",
                   S_ISDIR(status.st_mode) ? "a folder" : "a pipe or a device", path_);
  nbytes_ = status.st_size;
}

void InputFile::read(std::int64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const ssize_t got = ::pread(file_.get(), out.data(), out.size(), offset);
    if (got < 0 && errno == EINTR) continue;
    require<IoError>(got >= 0, "[file] expected {} bytes at {}, got {} ({})", out.size(), offset,
                     reason(errno), path_);
    require<IoError>(got > 0, "[file] expected {} bytes at {}, got the end of the file ({})",
                     out.size(), offset, path_);
    out = out.subspan(static_cast<std::size_t>(got));
    offset += got;
  }
}

std::string read_text_file(const std::string& path, std::int64_t max_nbytes) {
  const InputFile file(path);
  require<IoError>(file.nbytes() <= max_nbytes, "[file] expected at most {} bytes, got {} ({})",
                   max_nbytes, file.nbytes(), path);
  std::string text(static_cast<std::size_t>(file.nbytes()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

bool holds_text(const std::string& path, std::string_view text) {
  struct stat status {};
  try {
    return ::stat(path.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
           status.st_size == std::ssize(text) && read_text_file(path, std::ssize(text)) == text;
  } catch (const IoError&) {  // who cannot read it does not know
    return false;
  }
}

std::vector<std::string> names_in_folder(const std::string& folder) {
  const std::unique_ptr<DIR, int (*)(DIR*)> stream(::opendir(folder.c_str()), ::closedir);
  std::vector<std::string> names;
  while (const dirent* entry = stream ? ::readdir(stream.get()) : nullptr) {
    names.emplace_back(entry->d_name);
  }
  return names;
}

void flush_folder_of(const std::string& path) {
  const FileDescriptor folder(::open(folder_of(path).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const int error = folder.is_open() ? engine::flush(folder) : errno;
  // EINVAL: nothing to flush, as this file system keeps names otherwise.
  require<IoError>(error == 0 || error == EINVAL,
                   "[file] expected to flush the folder of the file, got {} ({})", reason(error),
                   path);
}

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  struct stat status {};
  const bool exists = ::stat(path_.c_str(), &status) == 0;
  require<IoError>(!exists || S_ISREG(status.st_mode),
                   "[file] expected a place for a regular file, got {} ({})",
                   S_ISDIR(status.st_mode) ? "a folder" : "a pipe or a device", path_);
  const int error = error_of_renaming_to(path_);
  require<IoError>(error == 0, "[file] expected a place where a file can be replaced, got {} ({})",
                   reason(error), path_);
  remove_leftovers(path_);
  file_ = create_beside(path_, temporary_);
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) { write_all(file_, path_, bytes); }

void AtomicFile::flush() {
  require(file_.is_open(), "[file] expected one commit, got a second ({})", path_);
  lock_ = FileDescriptor(::fcntl(file_.get(), F_DUPFD_CLOEXEC, 0));
  int error = lock_.is_open() ? engine::flush(file_) : errno;
  const int close_error = file_.close();
  if (error == 0) error = close_error;
  require<IoError>(error == 0, "[file] expected to flush the file, got {} ({})", reason(error),
                   path_);
}

void AtomicFile::replace() {
  require(lock_.is_open(), "[file] expected a file that was flushed, got another ({})", path_);
  const int error = ::rename(temporary_.c_str(), path_.c_str()) == 0 ? 0 : errno;
  require<IoError>(error == 0, "[file] expected to rename {}, got {} ({})", temporary_,
                   reason(error), path_);
  temporary_.clear();
  lock_.close();
}

void AtomicFile::commit() {
  flush();
  replace();
  // The new name lasts through a power cut only once its folder is flushed too.
  flush_folder_of(path_);
}

}  // namespace tessera::engine
