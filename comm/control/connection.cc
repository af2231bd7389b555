#include "comm/control/connection.h"

#include <fmt/core.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <span>
#include <string_view>

namespace tessera::comm::control {

short Connection::events() const {
  return static_cast<short>(POLLIN | (has_output() ? POLLOUT : 0));
}

bool Connection::flush() {
  bool some = false;
  while (!output_.empty()) {
    const std::span<const char> rest = std::span(*output_.front()).subspan(sent_);
    const auto n = net::send_now(socket_, std::as_bytes(rest));
    if (!n) {
      output_.clear();
      sent_ = 0;
    }
    if (!n || *n == 0) break;
    some = true;
    sent_ += *n;
    if (*n < rest.size()) break;
    output_.pop_front();
    sent_ = 0;
  }
  return some;
}

bool Connection::has_arrived() const {
  int num_unsent = 0;
  (void)::ioctl(socket_.get(), SIOCOUTQ, &num_unsent);
  return output_.empty() && num_unsent == 0;
}

bool Connection::receive() {
  constexpr int kMaxPieces = 16;  // then others have their turn
  std::array<char, 16384> piece;
  bool some = false;
  for (int i = 0; i < kMaxPieces && !ended_; ++i) {
    const auto n = net::receive_now(socket_, std::as_writable_bytes(std::span(piece)));
    if (!n) ended_ = errno;
    if (!n || *n == 0) break;
    input_.feed(std::string_view(piece.data(), *n));
    some = true;
  }
  return some;
}

std::string Connection::end_text() const {
  const int error = ended_.value_or(0);
  return error == 0 || error == ECONNRESET || error == EPIPE
             ? "which ended without a word"
             : fmt::format("which cannot be reached ({})", std::strerror(error));
}

std::optional<Frame> Connection::wait_for_next(net::Time deadline) {
  for (;;) {
    flush();
    if (auto frame = next()) return frame;
    if (ended_ || !net::wait_for(socket_, events(), deadline)) return std::nullopt;
    receive();
  }
}

}  // namespace tessera::comm::control
