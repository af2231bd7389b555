#include "comm/control/members.h"

#include <utility>

namespace tessera::comm::control {

std::vector<int> Members::missing() const {
  std::vector<int> missing;
  for (std::size_t p = 0; p < members_.size(); ++p) {
    if (!is_connected(members_[p])) missing.push_back(static_cast<int>(p));
  }
  return missing;
}

Calls Members::take_news() {
  Calls calls;
  for (std::size_t p = 0; p < members_.size(); ++p) {
    if (!std::exchange(members_[p].is_call_news, false)) continue;
    calls.calls.push_back({.process = static_cast<int>(p), .calls = members_[p].calls});
  }
  return calls;
}

void Members::tell_all(Frame frame, int but) {
  const Bytes bytes = bytes_of(std::move(frame));
  for (std::size_t p = 0; p < members_.size(); ++p) {
    if (is_connected(members_[p]) && static_cast<int>(p) != but) {
      members_[p].connection->queue(bytes);
    }
  }
}

}  // namespace tessera::comm::control
