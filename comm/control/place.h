// Where the processes of a job meet.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "comm/control/protocol.h"
#include "comm/net/socket.h"

namespace tessera::comm::control {

/// An address as ControlOptions have it. Throws InvalidArgument if it is none.
class Place {
 public:
  explicit Place(std::string address);

  const std::string& str() const { return address_; }
  bool is_file() const { return !path_.empty(); }

  /// Process 0: the first port that is free, or any with file:. Throws IoError.
  net::Socket listen() const;
  /// Process 0, with file:: says in the file where it listens, and a secret that it draws, in
  /// `secret`. The file is there while the result lives. What an earlier job left is replaced.
  std::shared_ptr<const void> publish(const net::Socket& listener, std::string& secret) const;

  /// Where process 0 may listen at present, if anywhere.
  struct Candidates {
    std::vector<net::HostPort> places;
    std::string secret;  ///< of the file
  };
  Candidates candidates() const;
  /// Whether nobody but this job's process 0 is expected to listen there.
  bool is_one_port() const { return !is_file() && tcp_.num_more == 0; }

 private:
  const std::string address_;
  std::string path_;
  net::HostPort tcp_;
};

}  // namespace tessera::comm::control
