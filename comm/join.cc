#include "comm/join.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/link.h"
#include "comm/messages/message_group.h"
#include "comm/messages/message_world.h"
#include "comm/threads.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

// Process 0's `own`, over `transport`, on every process.
std::string hand_out(Transport& transport, const std::string& own,
                     std::chrono::milliseconds deadline) {
  constexpr std::uint32_t kTag = Transport::kNumTags - 1;  // of no call: see MessageRank
  struct Packet {
    std::uint32_t nbytes = 0;
    std::array<char, 4096> bytes = {};
  };
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
        transfer->wait_for(deadline),
        "[join] expected process {} over {} within {} ms, got nothing of it (process {})", process,
        transport.str(), deadline.count(), transport.process());
  }
  return {packet->bytes.data(), std::min<std::size_t>(packet->nbytes, packet->bytes.size())};
}

// Throws InvalidArgument unless `transport` has the processes that `self` says.
void check_processes(const Transport& transport, const ControlOptions& self) {
  engine::require(
      transport.process() == self.process && transport.num_processes() == self.num_processes,
      "[join] expected process {} of {} over {}, got process {} of {}", self.process,
      self.num_processes, transport.str(), transport.process(), transport.num_processes());
}

std::unique_ptr<Transport> make_transport(const JoinOptions& options, Control& control) {
  const auto names = control.all_gather("name of the transport", options.transport_name);
  const auto other =
      std::ranges::find_if(names, [&](const auto& name) { return name != names[0]; });
  engine::require(other == names.end(),
                  "[join] expected the transport of process 0, {}, got {} (process {})", names[0],
                  other == names.end() ? "" : *other, other - names.begin());
  auto transport = options.transport(
      [&](std::string own) { return control.all_gather("transport", std::move(own)); });
  check_processes(*transport, options.control);
  return transport;
}

// `transport`: null where it is made only now.
std::shared_ptr<MessageWorld> connect(const JoinOptions& options,
                                      const std::shared_ptr<Control>& control,
                                      std::shared_ptr<Transport> transport) {
  const auto shared = std::make_shared<MessageWorld>();
  shared->transport = transport ? std::move(transport) : make_transport(options, *control);
  Link link = link_world(control, options.deadline, options.on_failure, options.flight);
  shared->world = std::move(link.world);
  static_cast<Peers&>(*shared) = std::move(link.peers);
  shared->link = std::move(link.carrier);
  return shared;
}

}  // namespace

std::unique_ptr<ProcessGroup> join(const JoinOptions& options) {
  ControlOptions self = options.control;
  if (self.num_processes == 1) {
    return std::move(make_threads_world(1, {.deadline = options.deadline,
                                            .on_failure = options.on_failure,
                                            .flight = options.flight})[0]);
  }
  std::shared_ptr<Transport> transport;
  if (self.address.empty()) {
    self.hand_out = [&](const std::string& own) {
      transport = options.transport([](const std::string&) -> std::vector<std::string> {
        engine::fail("[join] expected an address where processes meet, got none");
      });
      check_processes(*transport, self);
      return hand_out(*transport, own, self.deadline);
    };
  }
  return join_over(self, [&](const std::shared_ptr<Control>& control) {
    return make_message_group(connect(options, control, std::move(transport)));
  });
}

}  // namespace tessera::comm
