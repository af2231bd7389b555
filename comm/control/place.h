// Where the processes of a job meet.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "comm/control/protocol.h"
#include "comm/net/socket.h"

namespace tessera::comm::control {

/// An address as ControlOptions have it. Throws InvalidArgument if it is none.
class Place {
 public:
  /// `hand_out`: as ControlOptions have it; if it is not null, `address` is not looked at.
  explicit Place(std::string address, std::function<std::string(std::string own)> hand_out = {});

  const std::string& str() const { return address_; }
  /// Whether process 0 tells where it listens, and a secret that it draws.
  bool draws_secret() const { return !path_.empty() || hand_out_ != nullptr; }

  /// Process 0: the first port that is free, or any where it tells which. Throws IoError.
  net::Socket listen() const;
  /// Process 0: tells where it listens, and a secret that it draws, in `secret`. A file is there
  /// while the result lives. What an earlier job left is replaced.
  std::shared_ptr<const void> publish(const net::Socket& listener, std::string& secret) const;

  /// Where process 0 may listen at present, if anywhere.
  struct Candidates {
    std::vector<net::HostPort> places;
    std::string secret;  ///< that it told
  };
  Candidates candidates();
  /// Whether nobody but this job's process 0 is expected to listen there.
  bool is_one_port() const { return !draws_secret() && tcp_.num_more == 0; }

 private:
  /// What process 0 has told, if it has.
  std::optional<Meeting> meeting();

  const std::string address_;
  const std::function<std::string(std::string own)> hand_out_;
  std::optional<Meeting> handed_out_;
  std::string path_;
  net::HostPort tcp_;
};

}  // namespace tessera::comm::control
