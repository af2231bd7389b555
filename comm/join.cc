#include "comm/join.h"

#include <fmt/core.h>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
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

std::unique_ptr<Transport> make_transport(const JoinOptions& options, Control& control) {
  const auto names = control.all_gather("name of the transport", options.transport_name);
  const auto other =
      std::ranges::find_if(names, [&](const auto& name) { return name != names[0]; });
  engine::require(other == names.end(),
                  "[join] expected the transport of process 0, {}, got {} (process {})", names[0],
                  other == names.end() ? "" : *other, other - names.begin());
  auto transport = options.transport(
      [&](std::string own) { return control.all_gather("transport", std::move(own)); });
  engine::require(transport->process() == control.process() &&
                      transport->num_processes() == control.num_processes(),
                  "[join] expected process {} of {} over {}, got process {} of {}",
                  control.process(), control.num_processes(), transport->str(),
                  transport->process(), transport->num_processes());
  return transport;
}

std::shared_ptr<MessageWorld> connect(const JoinOptions& options,
                                      const std::shared_ptr<Control>& control) {
  const auto shared = std::make_shared<MessageWorld>();
  shared->transport = make_transport(options, *control);
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
  return shared;
}

}  // namespace

std::unique_ptr<ProcessGroup> join(const JoinOptions& options) try {
  const ControlOptions& self = options.control;
  if (self.num_processes == 1) {
    return std::move(make_threads_world(1, {.deadline = options.deadline,
                                            .on_failure = options.on_failure,
                                            .flight = options.flight})[0]);
  }
  const std::shared_ptr<Control> control = Control::join(self);
  try {
    auto world = connect(options, control);
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
