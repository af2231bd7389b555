#include "comm/control/private_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <span>
#include <system_error>

#include "comm/net/random.h"
#include "comm/net/socket.h"
#include "engine/error.h"
#include "engine/io/file.h"

namespace tessera::comm::control {
namespace {

using engine::FileDescriptor;
using engine::IoError;
using engine::require;
using net::reason;

using Bytes = std::vector<std::byte>;

}  // namespace

Unlink::~Unlink() { (void)unlink(path_.c_str()); }

// By a link, which unlike a rename replaces nothing, on any file system.
void publish(const std::string& path, const Bytes& bytes) {
  std::uint64_t number = 0;
  net::draw(std::as_writable_bytes(std::span(&number, 1)));
  const std::string draft = fmt::format("{}.{:016x}.draft", path, number);
  const FileDescriptor file(
      open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  require<IoError>(file.is_open(), "[control] expected to create {}, got {}", draft, reason());
  const Unlink remove(draft);
  engine::write_all(file, draft, bytes);
  const int error = engine::flush(file);
  require<IoError>(error == 0, "[control] expected to write {}, got {}", draft,
                   std::generic_category().message(error));
  if (link(draft.c_str(), path.c_str()) == 0) return;
  require<IoError>(errno != EEXIST,
                   "[control] expected no file {}, got one that another job left or uses", path);
  engine::fail<IoError>("[control] expected to create {}, got {}", path, reason());
}

// Who may rename what lies in a folder decides what is found there. In a sticky one, as /tmp is,
// others may only add files of their own, which are refused below.
void check_folder(const std::string& path) {
  const auto slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  struct stat info {};
  const bool known = stat(folder.c_str(), &info) == 0;
  require<IoError>(known, "[control] expected a folder for {}, got {}", path, reason());
  require<IoError>(info.st_uid == geteuid() || info.st_uid == 0,
                   "[control] expected a folder of user {} or of root, got one of {} ({})",
                   geteuid(), info.st_uid, folder);
  require<IoError>((info.st_mode & (S_IWGRP | S_IWOTH)) == 0 || (info.st_mode & S_ISVTX) != 0,
                   "[control] expected a folder that nobody else may write to, or a sticky one, "
                   "got {:04o} ({})",
                   info.st_mode & 07777, folder);
}

std::optional<Bytes> read_private(const std::string& path, std::size_t max_nbytes) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  // ESTALE: another host has just replaced it, and the next opening finds the new one.
  if (!file.is_open() && (errno == ENOENT || errno == ESTALE)) return std::nullopt;
  require<IoError>(file.is_open(), "[control] expected to open {}, got {}", path, reason());
  struct stat info {};
  const bool known = fstat(file.get(), &info) == 0;
  require<IoError>(known, "[control] expected to open {}, got {}", path, reason());
  require<IoError>(S_ISREG(info.st_mode),
                   "[control] expected a plain file, got something else ({})", path);
  require<IoError>(info.st_uid == geteuid(),
                   "[control] expected a file of user {}, got one of {} ({})", geteuid(),
                   info.st_uid, path);
  require<IoError>((info.st_mode & 0777) == (S_IRUSR | S_IWUSR),
                   "[control] expected a private file (0600), got {:04o} ({})", info.st_mode & 0777,
                   path);
  require<IoError>(static_cast<std::size_t>(info.st_size) <= max_nbytes,
                   "[control] expected at most {} bytes, got {} ({})", max_nbytes, info.st_size,
                   path);
  Bytes bytes(static_cast<std::size_t>(info.st_size));
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t n = read(file.get(), bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    require<IoError>(n > 0, "[control] expected to read {}, got {}", path,
                     n == 0 ? std::string("its end") : reason());
    done += static_cast<std::size_t>(n);
  }
  return bytes;
}

}  // namespace tessera::comm::control
