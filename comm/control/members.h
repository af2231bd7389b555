// The processes of a job as process 0 knows them: who is connected, and what each said last.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "comm/control/connection.h"
#include "comm/world/deadline_clock.h"

namespace tessera::comm::control {

struct Member {
  std::optional<Connection> connection = {};
  std::string name = {};
  std::vector<RankCall> calls = {};  ///< of its ranks, what each called last
  DeadlineClock::time_point heard = {};
  bool is_call_news = false, is_paused = false, has_left = false;
};

class Members {
 public:
  explicit Members(int num_processes) : members_(static_cast<std::size_t>(num_processes)) {}

  Member& operator[](int process) { return members_[static_cast<std::size_t>(process)]; }
  auto begin() { return members_.begin(); }
  auto end() { return members_.end(); }

  /// Whether nobody is connected.
  bool are_gone() const { return std::none_of(members_.begin(), members_.end(), is_connected); }
  /// Whether nobody but process 0 is connected.
  bool are_others_gone() const {
    return std::none_of(members_.begin() + 1, members_.end(), is_connected);
  }
  /// Whether each has been connected once.
  bool have_all_come() const {
    return std::none_of(members_.begin() + 1, members_.end(),
                        [](const Member& m) { return m.name.empty(); });
  }
  /// Whether one of them has yet to get what was sent to it.
  bool is_one_owed() const {
    return std::ranges::any_of(
        members_, [](const Member& m) { return m.connection && !m.connection->has_arrived(); });
  }
  bool is_one_paused() const { return std::ranges::any_of(members_, &Member::is_paused); }
  /// Who is not connected.
  std::vector<int> missing() const;
  /// What they called since this was asked last.
  Calls take_news();
  /// To all that are connected, `but` one.
  void tell_all(Frame frame, int but = -1);

 private:
  static bool is_connected(const Member& member) { return member.connection.has_value(); }

  std::vector<Member> members_;
};

}  // namespace tessera::comm::control
