#include "comm/link.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>

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
// processes needs as well. A world does not keep its Carrier: it may fail in a thread of the
// control plane, which is not to end that.
class Carrier {
 public:
  Carrier(std::shared_ptr<Control> control, std::shared_ptr<Failure> failure)
      : control_(std::move(control)), failure_(std::move(failure)), carrier_([this] {
          if (const std::string text = failure_->wait(); !text.empty()) control_->fail(text);
        }) {}
  ~Carrier() {
    failure_->end();
    carrier_.join();
  }
  Carrier(const Carrier&) = delete;
  Carrier& operator=(const Carrier&) = delete;

 private:
  const std::shared_ptr<Control> control_;
  const std::shared_ptr<Failure> failure_;
  std::thread carrier_;
};

}  // namespace

Link link_world(const std::shared_ptr<Control>& control, std::chrono::milliseconds deadline,
                std::function<void(const std::string& message)> on_failure,
                std::shared_ptr<FlightRecorder> flight) {
  const auto failure = std::make_shared<Failure>();
  const auto world = std::make_shared<World>(
      deadline,
      [failure, on_failure = std::move(on_failure)](const std::string& message) {
        if (on_failure) on_failure(message);
        failure->tell(message);
      },
      std::move(flight), Control::kPatience);
  auto carrier = std::make_shared<Carrier>(control, failure);
  control->listen({.on_failure = [world](const std::string& message) { world->abort(message); },
                   .on_pause =
                       [world, held = std::shared_ptr<const void>()](bool paused) mutable {
                         held = paused ? world->pause_deadline() : nullptr;
                       }});
  return {.world = world, .peers = peers_of(control, world, 1, 0), .carrier = std::move(carrier)};
}

Peers peers_of(const std::shared_ptr<Control>& control, const std::shared_ptr<World>& world,
               int num_each, int own) {
  using Held = std::shared_ptr<const void>;
  return {
      .has_left = [=](int rank) { return control->has_left(rank / num_each, rank % num_each); },
      .pause =
          [=] {
            return std::make_shared<std::pair<Held, Held>>(world->pause_deadline(),
                                                           control->pause());
          },
      .say_call = [=](std::string_view call) { control->say_call(call, own); },
      .say_left = [=] { control->say_left(own); },
      .last_call = [=](int rank) { return control->last_call(rank / num_each, rank % num_each); },
  };
}

void check_equal(Control& control, std::string_view what, std::string own) {
  const auto texts = control.all_gather(what, std::move(own));
  const auto other =
      std::ranges::find_if(texts, [&](const auto& text) { return text != texts[0]; });
  engine::require(other == texts.end(),
                  "[join] expected the {} of process 0, {}, got {} (process {})", what, texts[0],
                  other == texts.end() ? "" : *other, other - texts.begin());
}

void join_over(const ControlOptions& self,
               const std::function<void(const std::shared_ptr<Control>&)>& connect) try {
  const std::shared_ptr<Control> control = Control::join(self);
  control->run_together([&] {
    connect(control);
    control->all_gather("joined", "");  // so that what keeps one from joining keeps all
  });
} catch (const std::system_error& error) {
  if (error.code() != std::errc::resource_unavailable_try_again) throw;
  engine::fail<engine::DeviceError>("[join] expected to start a thread, got {} (process {})",
                                    error.what(), self.process);
}

}  // namespace tessera::comm
