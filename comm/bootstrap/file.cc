#include <fcntl.h>
#include <fmt/format.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

#include "comm/bootstrap/internal.h"
#include "engine/error.h"

namespace tessera::comm::internal {
namespace {

using engine::CommError;
using engine::IoError;
using engine::require;

using Nonce = std::array<std::uint64_t, 2>;
using Bytes = std::vector<std::byte>;

std::string reason() { return std::strerror(errno); }

class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  ~File() {
    if (fd_ >= 0) (void)close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int get() const { return fd_; }

 private:
  const int fd_;
};

// Removes what this rank left, however the bootstrap ends.
class Unlink {
 public:
  explicit Unlink(std::string path) : path_(std::move(path)) {}
  ~Unlink() { (void)unlink(path_.c_str()); }
  Unlink(const Unlink&) = delete;
  Unlink& operator=(const Unlink&) = delete;

 private:
  const std::string path_;
};

Nonce draw() {
  Nonce nonce;
  // Named first, as below: arguments are evaluated in no order, and reason() is one of them.
  const bool drawn = getrandom(nonce.data(), sizeof(nonce), 0) == sizeof(nonce);
  require<IoError>(drawn, "[bootstrap] expected {} random bytes, got {}", sizeof(nonce), reason());
  return nonce;
}

template <class T>
void append(Bytes& bytes, const T& value) {
  const auto* p = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), p, p + sizeof(value));
}

template <class T>
T read_at(const Bytes& bytes, std::size_t offset, const std::string& path) {
  T value;
  require<IoError>(bytes.size() >= offset + sizeof(value),
                   "[bootstrap] expected {} bytes, got {} ({})", offset + sizeof(value),
                   bytes.size(), path);
  std::memcpy(&value, bytes.data() + offset, sizeof(value));
  return value;
}

void write_all(const File& file, const Bytes& bytes, const std::string& path) {
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t n = write(file.get(), bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    require<IoError>(n > 0, "[bootstrap] expected to write {}, got {}", path, reason());
    done += static_cast<std::size_t>(n);
  }
  const bool flushed = fsync(file.get()) == 0;
  require<IoError>(flushed, "[bootstrap] expected to write {}, got {}", path, reason());
}

// `path` appears with all its bytes, private, and only if nothing is there. By a link, which unlike
// a rename replaces nothing, on any file system.
void publish(const std::string& path, const Bytes& bytes, int rank) {
  const std::string draft = fmt::format("{}.{:016x}.draft", path, draw()[0]);
  const File file(
      open(draft.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, S_IRUSR | S_IWUSR));
  require<IoError>(file.get() >= 0, "[bootstrap] expected to create {}, got {} (rank {})", draft,
                   reason(), rank);
  const Unlink remove(draft);
  write_all(file, bytes, draft);
  if (link(draft.c_str(), path.c_str()) == 0) return;
  require<IoError>(
      errno != EEXIST,
      "[bootstrap] expected no file {}, got one that another run left or uses (rank {})", path,
      rank);
  engine::fail<IoError>("[bootstrap] expected to create {}, got {} (rank {})", path, reason(),
                        rank);
}

// Who may rename what lies in a folder decides what is found there. In a sticky one, as /tmp is,
// others may only add files of their own, which are refused below.
void check_folder(const std::string& path) {
  const auto slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);
  struct stat info {};
  const bool known = stat(folder.c_str(), &info) == 0;
  require<IoError>(known, "[bootstrap] expected a folder for {}, got {}", path, reason());
  require<IoError>(info.st_uid == geteuid() || info.st_uid == 0,
                   "[bootstrap] expected a folder of user {} or of root, got one of {} ({})",
                   geteuid(), info.st_uid, folder);
  require<IoError>((info.st_mode & (S_IWGRP | S_IWOTH)) == 0 || (info.st_mode & S_ISVTX) != 0,
                   "[bootstrap] expected a folder that nobody else may write to, or a sticky one, "
                   "got {:04o} ({})",
                   info.st_mode & 07777, folder);
}

// Nothing if there is no such file. Throws IoError unless it is a plain file of this user, that
// nobody else may touch.
std::optional<Bytes> read_private(const std::string& path, std::size_t max_nbytes) {
  const File file(open(path.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
  if (file.get() < 0 && errno == ENOENT) return std::nullopt;
  require<IoError>(file.get() >= 0, "[bootstrap] expected to open {}, got {}", path, reason());
  struct stat info {};
  const bool known = fstat(file.get(), &info) == 0;
  require<IoError>(known, "[bootstrap] expected to open {}, got {}", path, reason());
  require<IoError>(S_ISREG(info.st_mode),
                   "[bootstrap] expected a plain file, got something else ({})", path);
  require<IoError>(info.st_uid == geteuid(),
                   "[bootstrap] expected a file of user {}, got one of {} ({})", geteuid(),
                   info.st_uid, path);
  require<IoError>((info.st_mode & 0777) == (S_IRUSR | S_IWUSR),
                   "[bootstrap] expected a private file (0600), got {:04o} ({})",
                   info.st_mode & 0777, path);
  require<IoError>(static_cast<std::size_t>(info.st_size) <= max_nbytes,
                   "[bootstrap] expected at most {} bytes, got {} ({})", max_nbytes, info.st_size,
                   path);
  Bytes bytes(static_cast<std::size_t>(info.st_size));
  for (std::size_t done = 0; done < bytes.size();) {
    const ssize_t n = read(file.get(), bytes.data() + done, bytes.size() - done);
    if (n < 0 && errno == EINTR) continue;
    require<IoError>(n > 0, "[bootstrap] expected to read {}, got {}", path,
                     n == 0 ? std::string("its end") : reason());
    done += static_cast<std::size_t>(n);
  }
  return bytes;
}

// False at the deadline.
bool pause(const Participant& self) {
  if (std::chrono::steady_clock::now() >= self.deadline) return false;
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return true;
}

std::string path_of(const std::string& path, int rank) { return fmt::format("{}.{}", path, rank); }

Bytes answer(const std::string& path, std::span<const std::byte> message, const Participant& self) {
  const auto size = static_cast<std::size_t>(self.size);
  std::vector<bool> here(size);
  std::vector<Nonce> nonces(size);
  here[0] = true;
  for (;;) {
    for (int r = 1; r < self.size; ++r) {
      const std::string name = path_of(path, r);
      const auto i = static_cast<std::size_t>(r);
      if (here[i]) continue;
      const auto bytes = read_private(name, sizeof(Handshake) + sizeof(Nonce));
      if (!bytes) continue;
      check_handshake(read_at<Handshake>(*bytes, 0, name), r, self, name);
      nonces[i] = read_at<Nonce>(*bytes, sizeof(Handshake), name);
      here[i] = true;
    }
    if (std::ranges::find(here, false) == here.end()) break;
    if (!pause(self)) fail_missing(here, self, path);
  }
  Bytes bytes;
  append(bytes, Handshake{.size = self.size, .rank = 0});
  for (const Nonce& nonce : nonces) append(bytes, nonce);
  bytes.insert(bytes.end(), message.begin(), message.end());
  publish(path, bytes, self.rank);
  const Unlink remove(path);
  // Each rank removes its file once it has read the answer.
  for (;;) {
    for (int r = 1; r < self.size; ++r) {
      here[static_cast<std::size_t>(r)] =
          faccessat(AT_FDCWD, path_of(path, r).c_str(), F_OK, AT_SYMLINK_NOFOLLOW) != 0;
    }
    if (std::ranges::find(here, false) == here.end()) return {message.begin(), message.end()};
    if (!pause(self)) fail_missing(here, self, path);
  }
}

Bytes ask(const std::string& path, const Participant& self) {
  const Nonce nonce = draw();
  const auto rank = static_cast<std::size_t>(self.rank);
  const std::size_t begin = sizeof(Handshake) + static_cast<std::size_t>(self.size) * sizeof(Nonce);
  Bytes handshake;
  append(handshake, Handshake{.size = self.size, .rank = self.rank});
  append(handshake, nonce);
  publish(path_of(path, self.rank), handshake, self.rank);
  const Unlink remove(path_of(path, self.rank));
  bool stale = false;
  for (;;) {
    if (const auto bytes = read_private(path, begin + kMaxMessageNbytes)) {
      check_handshake(read_at<Handshake>(*bytes, 0, path), 0, self, path);
      if (read_at<Nonce>(*bytes, sizeof(Handshake) + rank * sizeof(Nonce), path) == nonce) {
        return {bytes->begin() + static_cast<std::ptrdiff_t>(begin), bytes->end()};
      }
      stale = true;
    }
    if (pause(self)) continue;
    engine::fail<CommError>(
        "[bootstrap] expected rank 0's answer at {} within {} ms, got {} (rank {})", path,
        self.patience.count(), stale ? "that of another run" : "none", self.rank);
  }
}

}  // namespace

std::vector<std::byte> broadcast_by_file(const std::string& path,
                                         std::span<const std::byte> message,
                                         const Participant& self) {
  check_folder(path);
  if (self.rank != 0) return ask(path, self);
  // Before anybody is waited for.
  require<IoError>(
      faccessat(AT_FDCWD, path.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) != 0,
      "[bootstrap] expected no file {}, got one that another run left or uses (rank 0)", path);
  return answer(path, message, self);
}

}  // namespace tessera::comm::internal
