#include "tools/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "engine/error.h"

namespace tessera::tools {
namespace {

using engine::fail;
using engine::IoError;
using engine::require;

std::string reason(int error) { return std::generic_category().message(error); }

/// The folder that holds `path`.
std::string folder_of(const std::string& path) {
  const auto slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

/// A new file beside `path`; sets `temporary` to its name.
FileDescriptor create_beside(const std::string& path, std::string& temporary) {
  for (int i = 0;; ++i) {
    temporary = fmt::format("{}.tmp-{}-{}", path, ::getpid(), i);
    const int fd = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd >= 0) return FileDescriptor(fd);
    if (errno != EEXIST) {
      const int error = errno;
      temporary.clear();
      fail<IoError>("[file] expected to create a file, got {} ({})", reason(error), path);
    }
  }
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

InputFile::InputFile(std::string path)
    : path_(std::move(path)),
      // Without O_NONBLOCK, opening a pipe waits for a writer.
      file_(::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)) {
  require<IoError>(file_.is_open(), "[file] expected a readable file, got {} ({})", reason(errno),
                   path_);
  struct stat status {};
  require<IoError>(::fstat(file_.get(), &status) == 0,
                   "[file] expected a readable file, got {} ({})", reason(errno), path_);
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

AtomicFile::AtomicFile(std::string path) : path_(std::move(path)) {
  struct stat status {};
  const bool exists = ::stat(path_.c_str(), &status) == 0;
  require<IoError>(!exists || S_ISREG(status.st_mode),
                   "[file] expected a place for a regular file, got {} ({})",
                   S_ISDIR(status.st_mode) ? "a folder" : "a pipe or a device", path_);
  file_ = create_beside(path_, temporary_);
}

AtomicFile::~AtomicFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::write(std::span<const std::byte> bytes) { write_all(file_, path_, bytes); }

void AtomicFile::commit() {
  require(file_.is_open(), "[file] expected one commit, got a second ({})", path_);
  const int sync_error = ::fsync(file_.get()) == 0 ? 0 : errno;
  const int close_error = file_.close();
  const int error = sync_error != 0 ? sync_error : close_error;
  require<IoError>(error == 0, "[file] expected to flush the file, got {} ({})", reason(error),
                   path_);
  require<IoError>(::rename(temporary_.c_str(), path_.c_str()) == 0,
                   "[file] expected to rename {}, got {} ({})", temporary_, reason(errno), path_);
  temporary_.clear();
  // The new name lasts through a power cut only once its folder is flushed too.
  const FileDescriptor folder(::open(folder_of(path_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  require<IoError>(folder.is_open() && (::fsync(folder.get()) == 0 || errno == EINVAL),
                   "[file] expected to flush the folder of the file, got {} ({})", reason(errno),
                   path_);
}

}  // namespace tessera::tools
