// Where processes of a job come in, and strangers do not.
#pragma once

#include <poll.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "comm/control/connection.h"
#include "comm/control/protocol.h"
#include "comm/net/socket.h"

namespace tessera::comm::control {

struct DoorOptions {
  int num_processes = 1;
  std::string job, secret;
  bool local_only = false;  ///< takes connections from this host alone
  std::chrono::milliseconds user_timeout{};
  std::function<void(const std::string& note)> on_refused;
};

/// A process that has proved itself.
struct Guest {
  int process = 0;
  std::string name;  ///< "process 1 (h1, pid 4711)"
  Connection connection;
  std::string failure = {};  ///< of the job, as this process will not join; empty: it does
};

class Door {
 public:
  /// `own`: process 0's, which alone may be process 0. Without a `listener` nobody else comes.
  Door(DoorOptions options, net::Socket listener, net::Socket own);

  /// Adds what hear() waits for.
  void poll_for(std::vector<pollfd>& polls) const;
  /// Hears those who have come. Returns the ones who have proved themselves.
  std::vector<Guest> hear();
  /// Sends away who has proved itself.
  void refuse(Guest& guest, const std::string& why);
  /// No more come.
  void close();
  /// The last that was refused; empty: none.
  const std::string& last_note() const { return last_note_; }

 private:
  struct Stranger {
    Connection connection;
    std::string from;
    bool is_own = false;
    net::Time since = std::chrono::steady_clock::now();
    std::optional<Hello> hello = {};
    Nonce nonce = {};
  };

  void accept_all();
  void drop_oldest(const std::string& why);
  // True once it is a stranger no more.
  bool hear(Stranger& stranger, std::vector<Guest>& guests);
  // What is wrong with what it says; nothing: it may go on.
  std::optional<std::string> answer(Stranger& stranger, const Frame& frame);
  void refuse(Connection& connection, const std::string& from, const std::string& why);
  void note(const std::string& from, const std::string& why);

  const DoorOptions options_;
  net::Socket listener_;
  std::vector<Stranger> strangers_;
  bool is_crowded_ = false;  // no descriptor is left for who waits
  int num_notes_ = 0;
  std::string last_note_;
};

}  // namespace tessera::comm::control
