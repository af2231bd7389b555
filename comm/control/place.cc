#include "comm/control/place.h"

#include <unistd.h>

#include <cerrno>
#include <optional>
#include <span>
#include <utility>

#include "comm/control/handshake.h"
#include "comm/control/private_file.h"
#include "engine/error.h"

namespace tessera::comm::control {
namespace {

using engine::IoError;
using engine::require;

constexpr std::string_view kFile = "file:", kTcp = "tcp:";

// Nothing if `text` is something else.
std::optional<Meeting> meeting_of(std::string_view text) {
  FrameReader reader;
  reader.feed(text);
  std::optional<Frame> frame;
  try {
    frame = reader.next(kMaxFirstNbytes);
  } catch (const engine::CommError&) {
  }
  const auto* meeting = frame ? std::get_if<Meeting>(&*frame) : nullptr;
  return meeting != nullptr ? std::optional(*meeting) : std::nullopt;
}

std::optional<Meeting> read_meeting(const std::string& path) {
  const auto bytes = read_private(path, kMaxFirstNbytes);
  if (!bytes) return std::nullopt;
  auto meeting = meeting_of({reinterpret_cast<const char*>(bytes->data()), bytes->size()});
  require<IoError>(meeting.has_value(),
                   "[control] expected a file that process 0 of a job has left, got another ({})",
                   path);
  return meeting;
}

std::string text_of(const Nonce& secret) { return {secret.data(), secret.size()}; }

}  // namespace

Place::Place(std::string address, std::function<std::string(std::string own)> hand_out)
    : address_(hand_out ? "the place that process 0 tells" : std::move(address)),
      hand_out_(std::move(hand_out)) {
  if (hand_out_) return;
  const std::string_view text = address_;
  if (text.starts_with(kFile)) {
    path_ = text.substr(kFile.size());
    require(!path_.empty() && path_.find('\0') == std::string::npos,
            "[control] expected file:PATH, got '{}'", address_);
    return;
  }
  const auto tcp =
      net::parse_host_port(text.starts_with(kTcp) ? text.substr(kTcp.size()) : std::string_view());
  require(tcp.has_value(),
          "[control] expected tcp:HOST:PORT, tcp:HOST:PORT+N or file:PATH, got '{}'", address_);
  tcp_ = *tcp;
}

net::Socket Place::listen() const {
  std::string why;
  for (int k = 0; k <= tcp_.num_more; ++k) {
    if (net::Socket socket = net::listen_anywhere(tcp_.port + k)) return socket;
    why = net::reason();
  }
  engine::fail<IoError>("[control] expected to listen at {}, got {} (process 0)", address_, why);
}

std::shared_ptr<const void> Place::publish(const net::Socket& listener, std::string& secret) const {
  const Meeting meeting{
      .secret = draw_nonce(), .hosts = net::own_addresses(), .port = net::port_of(listener)};
  secret = text_of(meeting.secret);
  if (hand_out_) {
    (void)hand_out_(encode(meeting));
    return nullptr;
  }
  check_folder(path_);
  // Nothing but what an earlier job left is removed.
  if (read_meeting(path_)) (void)::unlink(path_.c_str());
  const std::string text = encode(meeting);
  const auto bytes = std::as_bytes(std::span(text));
  control::publish(path_, {bytes.begin(), bytes.end()});
  return std::make_shared<const Unlink>(path_);
}

std::optional<Meeting> Place::meeting() {
  if (!hand_out_) {
    check_folder(path_);
    return read_meeting(path_);
  }
  if (!handed_out_) {
    handed_out_ = meeting_of(hand_out_(""));
    require<engine::CommError>(handed_out_.has_value(),
                               "[control] expected process 0 to tell where it listens, got "
                               "something else");
  }
  return handed_out_;
}

Place::Candidates Place::candidates() {
  if (!draws_secret()) return {.places = {tcp_}, .secret = {}};
  const auto meeting = this->meeting();
  if (!meeting) return {};
  Candidates candidates{.places = {}, .secret = text_of(meeting->secret)};
  for (const std::string& host : meeting->hosts) {
    candidates.places.push_back({.host = host, .port = meeting->port});
  }
  return candidates;
}

}  // namespace tessera::comm::control
