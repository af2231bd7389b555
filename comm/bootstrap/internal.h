// The kinds of places. Private to comm.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::comm::internal {

/// A rank that takes part.
struct Participant {
  int rank = 0;
  int size = 0;
  std::chrono::milliseconds patience;
  std::chrono::steady_clock::time_point deadline;  ///< start + patience
};

/// What every rank begins with.
struct Handshake {
  std::array<char, 8> magic = {'T', 'S', 'R', 'B', 'O', 'O', 'T', '1'};
  std::int32_t size = 0;
  std::int32_t rank = 0;
};
/// Throws CommError unless `handshake` is from rank `rank` of a world of the same size.
void check_handshake(const Handshake& handshake, int rank, const Participant& self,
                     std::string_view place);
/// Throws CommError naming the ranks that are not `here`.
[[noreturn]] void fail_missing(const std::vector<bool>& here, const Participant& self,
                               std::string_view place);

inline constexpr std::size_t kMaxMessageNbytes = 4096;

std::vector<std::byte> broadcast_by_file(const std::string& path,
                                         std::span<const std::byte> message,
                                         const Participant& self);
std::vector<std::byte> broadcast_by_tcp(const std::string& host, int port,
                                        std::span<const std::byte> message,
                                        const Participant& self);

}  // namespace tessera::comm::internal
