#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "comm/bootstrap/internal.h"
#include "comm/bootstrap/private_file.h"
#include "comm/net/random.h"
#include "engine/error.h"

namespace tessera::comm::internal {
namespace {

using engine::CommError;
using engine::IoError;
using engine::require;

using Nonce = std::array<std::uint64_t, 2>;
using Bytes = std::vector<std::byte>;

Nonce draw() {
  Nonce nonce;
  net::draw(std::as_writable_bytes(std::span(nonce)));
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
