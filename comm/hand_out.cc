#include "comm/hand_out.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "engine/error.h"

namespace tessera::comm {

void check_processes(const Transport& transport, const ControlOptions& self) {
  engine::require(
      transport.process() == self.process && transport.num_processes() == self.num_processes,
      "[join] expected process {} of {} over {}, got process {} of {}", self.process,
      self.num_processes, transport.str(), transport.process(), transport.num_processes());
}

std::string hand_out(Transport& transport, const ControlOptions& self, const std::string& own) {
  constexpr std::uint32_t kTag = Transport::kNumTags - 1;  // of no call: see MessageRank
  struct Packet {
    std::uint32_t nbytes = 0;
    std::array<char, 4096> bytes = {};
  };
  check_processes(transport, self);
  const auto packet = std::make_shared<Packet>();
  std::vector<std::pair<int, std::unique_ptr<Transfer>>> transfers;
  const auto all = std::as_writable_bytes(std::span(packet.get(), 1));
  if (transport.process() == 0) {
    engine::require(own.size() <= packet->bytes.size(), "[join] expected at most {} bytes, got {}",
                    packet->bytes.size(), own.size());
    packet->nbytes = static_cast<std::uint32_t>(own.size());
    std::ranges::copy(own, packet->bytes.begin());
    for (int p = 1; p < transport.num_processes(); ++p) {
      transfers.emplace_back(p, transport.send(p, kTag, all, packet));
    }
  } else {
    transfers.emplace_back(0, transport.receive(0, kTag, all, packet));
  }
  for (const auto& [process, transfer] : transfers) {
    engine::require<engine::CommError>(
        transfer->wait_for(self.deadline),
        "[join] expected process {} over {} within {} ms, got nothing of it (process {})", process,
        transport.str(), self.deadline.count(), transport.process());
  }
  return {packet->bytes.data(), std::min<std::size_t>(packet->nbytes, packet->bytes.size())};
}

}  // namespace tessera::comm
