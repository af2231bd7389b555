#include "comm/join.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <mutex>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "comm/messages/message_group.h"
#include "comm/messages/message_world.h"
#include "comm/threads.h"
#include "comm/world/world.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

// What this process failed with, on its way to the others.
struct Failure {
  void tell(const std::string& message) {
    {
      const std::lock_guard lock(mutex);
      if (text.empty()) text = message;
    }
    changed.notify_all();
  }
  void end() {
    {
      const std::lock_guard lock(mutex);
      ended = true;
    }
    changed.notify_all();
  }
  // Empty at the end.
  std::string wait() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this] { return ended || !text.empty(); });
    return text;
  }

  std::mutex mutex;
  std::condition_variable changed;
  std::string text;
  bool ended = false;
};

// Carries it, by a thread: whoever fails a world holds its lock, which what comes from the other
// processes needs as well. A world does not keep its Link: it may fail in a thread of the control
// plane, which is not to end that.
class Link {
 public:
  Link(std::shared_ptr<Control> control, std::shared_ptr<Failure> failure)
      : control_(std::move(control)), failure_(std::move(failure)), carrier_([this] {
          if (const std::string text = failure_->wait(); !text.empty()) control_->fail(text);
        }) {}
  ~Link() {
    failure_->end();
    carrier_.join();
  }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

 private:
  const std::shared_ptr<Control> control_;
  const std::shared_ptr<Failure> failure_;
  std::thread carrier_;
};

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
  const auto failure = std::make_shared<Failure>();
  shared->world = std::make_shared<World>(
      options.deadline,
      [failure, on_failure = options.on_failure](const std::string& message) {
        if (on_failure) on_failure(message);
        failure->tell(message);
      },
      options.flight);
  shared->link = std::make_shared<Link>(control, failure);
  control->listen(
      {.on_failure = [world = shared->world](const std::string& message) { world->abort(message); },
       .on_pause =
           [world = shared->world, held = std::shared_ptr<const void>()](bool paused) mutable {
             held = paused ? world->pause_deadline() : nullptr;
           }});
  shared->has_left = [control](int rank) { return control->has_left(rank); };
  shared->say_call = [control](std::string_view call) { control->say_call(call); };
  shared->pause = [control, world = shared->world] {
    return std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
        world->pause_deadline(), control->pause());
  };
  return shared;
}

}  // namespace

std::unique_ptr<ProcessGroup> join(const JoinOptions& options) try {
  ControlOptions self = options.control;
  if (self.num_processes == 1) {
    return std::move(make_threads_world(1, {.deadline = options.deadline,
                                            .on_failure = options.on_failure,
                                            .flight = options.flight})[0]);
  }
  std::shared_ptr<Transport> transport;
  if (self.address.empty()) {
    transport = options.transport([](const std::string&) -> std::vector<std::string> {
      engine::fail("[join] expected an address where processes meet, got none");
    });
    check_processes(*transport, self);
    self.hand_out = [&transport = *transport, deadline = self.deadline](const std::string& own) {
      return hand_out(transport, own, deadline);
    };
  }
  const std::shared_ptr<Control> control = Control::join(self);
  try {
    auto world = connect(options, control, std::move(transport));
    control->all_gather("joined", "");  // so that what keeps one from joining keeps all
    return make_message_group(std::move(world));
  } catch (const std::exception& error) {
    control->fail(World::text_of(
        [&] { return fmt::format("[join] process {}: {}", self.process, error.what()); }));
    throw;
  }
} catch (const std::system_error& error) {
  if (error.code() != std::errc::resource_unavailable_try_again) throw;
  engine::fail<engine::DeviceError>("[join] expected to start a thread, got {} (process {})",
                                    error.what(), options.control.process);
}

}  // namespace tessera::comm
