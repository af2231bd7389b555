// The kinds of meeting places. Private to comm.
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

/// A rank's part in a meeting.
struct Meeter {
  int rank = 0;
  int size = 0;
  std::chrono::milliseconds patience;
  std::chrono::steady_clock::time_point deadline;  ///< start + patience
};

/// What every rank begins with.
struct Hello {
  std::array<char, 8> magic = {'T', 'S', 'R', 'M', 'E', 'E', 'T', '1'};
  std::int32_t size = 0;
  std::int32_t rank = 0;
};
/// Throws CommError unless `hello` is from rank `rank` of a world of the same size.
void check_hello(const Hello& hello, int rank, const Meeter& meeter, std::string_view place);
/// Throws CommError naming the ranks that are not `here`.
[[noreturn]] void fail_missing(const std::vector<bool>& here, const Meeter& meeter,
                               std::string_view place);

inline constexpr std::size_t kMaxMessageNbytes = 4096;

std::vector<std::byte> meet_at_file(const std::string& path, std::span<const std::byte> message,
                                    const Meeter& meeter);
std::vector<std::byte> meet_at_tcp(const std::string& host, int port,
                                   std::span<const std::byte> message, const Meeter& meeter);

}  // namespace tessera::comm::internal
