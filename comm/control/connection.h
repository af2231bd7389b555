// Frames over a socket, without waiting.
#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "comm/control/protocol.h"
#include "comm/net/socket.h"

namespace tessera::comm::control {

/// An encoded frame, which may be on its way to many.
using Bytes = std::shared_ptr<const std::string>;
inline Bytes bytes_of(Frame frame) {
  return std::make_shared<const std::string>(encode(std::move(frame)));
}

class Connection {
 public:
  explicit Connection(net::Socket socket) : socket_(std::move(socket)) {}

  const net::Socket& socket() const { return socket_; }
  /// What poll() should look for.
  short events() const;

  void queue(Bytes frame) { output_.push_back(std::move(frame)); }
  void queue(Frame frame) { queue(bytes_of(std::move(frame))); }
  /// Sends what can be sent; true if that was something. That the connection has ended is for
  /// receive() to say.
  bool flush();
  bool has_output() const { return !output_.empty(); }
  /// Whether the peer's system has all that was sent.
  bool has_arrived() const;

  /// Takes some of what is there; true if there was any.
  bool receive();
  /// The next frame. Throws as FrameReader::next().
  std::optional<Frame> next() { return input_.next(max_nbytes_); }
  /// Waits for the next frame, and sends meanwhile. Nothing at the end, or at `deadline`.
  std::optional<Frame> wait_for_next(net::Time deadline);
  /// The peer is known: it may send frames of full length.
  void trust() { max_nbytes_ = kMaxFrameNbytes; }

  /// Once nothing will come any more: 0 where the peer has closed, or an error number.
  std::optional<int> ended() const { return ended_; }
  /// How the connection of a process ended, as a message says it.
  std::string end_text() const;

 private:
  net::Socket socket_;
  FrameReader input_;
  std::size_t max_nbytes_ = kMaxFirstNbytes;
  std::deque<Bytes> output_;
  std::size_t sent_ = 0;  // of the first of output_
  std::optional<int> ended_;
};

}  // namespace tessera::comm::control
