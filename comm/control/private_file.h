// Files by which processes of one user find each other: they appear whole, and nobody else may
// read or write them.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace tessera::comm::control {

/// Throws IoError unless nobody but this user and root may rename what lies in the folder of
/// `path`.
void check_folder(const std::string& path);

/// `path` appears with all its bytes, private, and only if nothing is there; else throws IoError.
void publish(const std::string& path, const std::vector<std::byte>& bytes);

/// Nothing if there is no such file. Throws IoError unless it is a plain file of this user, that
/// nobody else may touch, of at most `max_nbytes`.
std::optional<std::vector<std::byte>> read_private(const std::string& path, std::size_t max_nbytes);

/// Removes a file in the end.
class Unlink {
 public:
  explicit Unlink(std::string path) : path_(std::move(path)) {}
  ~Unlink();
  Unlink(const Unlink&) = delete;
  Unlink& operator=(const Unlink&) = delete;

 private:
  const std::string path_;
};

}  // namespace tessera::comm::control
