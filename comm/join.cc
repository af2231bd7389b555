#include "comm/join.h"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
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

// Between the failure of this process and that of the job. A thread carries what fails here:
// whoever fails a world holds its lock, which what comes from the other processes needs as well.
class Link {
 public:
  Link(std::shared_ptr<Control> control, std::shared_ptr<World> world)
      : control_(std::move(control)), world_(std::move(world)), carrier_([this] { carry(); }) {}
  ~Link() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
    carrier_.join();
  }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  void listen() {
    control_->listen(
        {.on_failure = [world = world_](const std::string& message) { world->abort(message); },
         .on_pause =
             [world = world_, held = std::shared_ptr<const void>()](bool paused) mutable {
               held = paused ? world->pause_deadline() : nullptr;
             }});
  }

  void fail(const std::string& message) {
    {
      const std::lock_guard lock(mutex_);
      if (failure_.empty()) failure_ = message;
    }
    changed_.notify_all();
  }

 private:
  void carry() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ || !failure_.empty(); });
    if (failure_.empty()) return;
    const std::string message = failure_;
    lock.unlock();
    control_->fail(message);
  }

  const std::shared_ptr<Control> control_;
  const std::shared_ptr<World> world_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string failure_;
  bool ended_ = false;
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

}  // namespace

std::unique_ptr<ProcessGroup> join(const JoinOptions& options) {
  ControlOptions self = options.control;
  if (self.num_processes == 1) {
    return std::move(make_threads_world(1, {.deadline = options.deadline,
                                            .on_failure = options.on_failure,
                                            .flight = options.flight})[0]);
  }
  const auto shared = std::make_shared<MessageWorld>();
  std::shared_ptr<Control> control;
  if (self.address.empty()) {
    shared->transport = options.transport([](std::string) -> std::vector<std::string> {
      engine::fail("[join] expected an address where processes meet, got none");
    });
    self.hand_out = [&transport = *shared->transport, deadline = self.deadline](std::string own) {
      return hand_out(transport, own, deadline);
    };
  } else {
    control = Control::join(self);
    shared->transport = options.transport(
        [&](std::string own) { return control->all_gather("transport", std::move(own)); });
  }
  const Transport& transport = *shared->transport;
  engine::require(
      transport.process() == self.process && transport.num_processes() == self.num_processes,
      "[join] expected process {} of {} over {}, got process {} of {}", self.process,
      self.num_processes, transport.str(), transport.process(), transport.num_processes());
  if (!control) control = Control::join(self);
  const auto link = std::make_shared<std::weak_ptr<Link>>();  // which there is once the world is
  shared->world = std::make_shared<World>(
      options.deadline,
      [link, on_failure = options.on_failure](const std::string& message) {
        if (on_failure) on_failure(message);
        if (const auto to = link->lock()) to->fail(message);
      },
      options.flight);
  auto linked = std::make_shared<Link>(control, shared->world);
  *link = linked;
  linked->listen();
  shared->has_left = [control](int rank) { return control->has_left(rank); };
  shared->say_call = [control](std::string_view call) { control->say_call(call); };
  shared->pause = [control, world = shared->world] {
    return std::make_shared<std::pair<std::shared_ptr<const void>, std::shared_ptr<const void>>>(
        world->pause_deadline(), control->pause());
  };
  shared->link = std::move(linked);
  return make_message_group(shared);
}

}  // namespace tessera::comm
