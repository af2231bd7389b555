// What processes and process 0 say to each other, as bytes.
//
// A frame is its length (4 bytes), its kind (1 byte) and its fields, one after the other: numbers
// in little-endian order, a text or a list after its length (4 bytes).
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace tessera::comm::control {

static_assert(std::endian::native == std::endian::little);

using Nonce = std::array<char, 32>;
using Proof = std::array<char, 32>;  ///< of knowing the secret: see handshake.h

// Each frame's each() calls a function with every field, in the order of the bytes.

/// The first that a process says. The last byte of the magic is the version.
struct Hello {
  static constexpr std::array<char, 8> kMagic = {'T', 'S', 'R', 'C', 'T', 'R', 'L', '3'};
  std::array<char, 8> magic = kMagic;
  std::string job, host;
  std::int32_t num_processes = 0, process = 0, pid = 0;
  Nonce nonce = {};
  void each(auto&& f) {
    (f(magic), f(job), f(host), f(num_processes), f(process), f(pid), f(nonce));
  }
};
struct Challenge {
  Nonce nonce = {};
  Proof proof = {};
  void each(auto&& f) { (f(nonce), f(proof)); }
};
struct Answer {
  Proof proof = {};
  std::string why_not;  ///< why it will not join; empty: it does
  void each(auto&& f) { (f(proof), f(why_not)); }
};
/// By either side: the connection ends, and why.
struct Refusal {
  std::string why;
  void each(auto&& f) { f(why); }
};
/// All are there. Their names.
struct Go {
  std::vector<std::string> names;
  void each(auto&& f) { f(names); }
};
/// What a rank called last, and whether it calls no more.
struct RankCall {
  std::string text;
  bool has_left = false;
  void each(auto&& f) { (f(text), f(has_left)); }
  friend bool operator==(const RankCall&, const RankCall&) = default;
};
/// A process's sign of life, with what each of its ranks called last; or process 0's before Go,
/// with who is missing.
struct Beat {
  std::string text;
  std::vector<RankCall> calls;
  void each(auto&& f) { (f(text), f(calls)); }
};
/// Process 0's sign of life, with what others called last, if that has changed.
struct Calls {
  struct Call {
    std::int32_t process = 0;
    std::vector<RankCall> calls;
    void each(auto&& f) { (f(process), f(calls)); }
  };
  std::vector<Call> calls;
  void each(auto&& f) { f(calls); }
};
struct Gather {
  std::uint64_t sequence = 0;
  std::string label, text;
  void each(auto&& f) { (f(sequence), f(label), f(text)); }
};
struct Gathered {
  std::uint64_t sequence = 0;
  std::vector<std::string> texts;
  void each(auto&& f) { (f(sequence), f(texts)); }
};
struct Failure {
  std::string message;
  void each(auto&& f) { f(message); }
};
struct Pause {
  bool paused = false;
  void each(auto&& f) { f(paused); }
};
struct Left {
  std::int32_t process = 0;
  void each(auto&& f) { f(process); }
};
/// What lies in the file of file:.
struct Meeting {
  Nonce secret = {};
  std::vector<std::string> hosts;
  std::int32_t port = 0;
  void each(auto&& f) { (f(secret), f(hosts), f(port)); }
};

/// The kind of a frame is its index here.
using Frame = std::variant<Hello, Challenge, Answer, Refusal, Go, Beat, Calls, Gather, Gathered,
                           Failure, Pause, Left, Meeting>;

/// Of a frame before a process has proved who it is, and after.
inline constexpr std::size_t kMaxFirstNbytes = 4096;
inline constexpr std::size_t kMaxFrameNbytes = std::size_t{65} << 20;
inline constexpr std::size_t kMaxMessageNbytes = std::size_t{16} << 10;  ///< of a Failure

std::string encode(Frame frame);

/// For messages: "its last call: barrier 'end'" of a process whose ranks called that, or "its last
/// calls: ..." where they differ, or that it has called nothing yet.
std::string last_call_text(const std::vector<RankCall>& calls);

/// Makes frames of bytes as they come.
class FrameReader {
 public:
  void feed(std::string_view bytes) { bytes_ += bytes; }
  /// The next, if all of it is there. Throws CommError if it is longer than `max_nbytes`, or is no
  /// frame; nothing follows then.
  std::optional<Frame> next(std::size_t max_nbytes);

 private:
  std::string bytes_;
};

}  // namespace tessera::comm::control
