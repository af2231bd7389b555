#include "comm/control/control.h"

#include <fmt/core.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "comm/control/beat.h"
#include "comm/control/client.h"
#include "comm/control/door.h"
#include "comm/control/handshake.h"
#include "comm/control/join.h"
#include "comm/control/place.h"
#include "comm/control/server.h"
#include "comm/world/world.h"
#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::comm {

using control::Client;
using control::Door;
using control::Joined;
using control::Place;
using control::Server;
using engine::require;

class Control::Impl {
 public:
  Impl(std::unique_ptr<Server> server, std::shared_ptr<Client> client)
      : server_(std::move(server)), client_(std::move(client)) {}
  ~Impl() { client_->leave(); }
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;

  const std::shared_ptr<Client>& client() const { return client_; }

 private:
  std::unique_ptr<Server> server_;  // of process 0
  std::shared_ptr<Client> client_;  // which pauses may keep
};

namespace {

constexpr int kMaxProcesses = 1 << 16;
constexpr std::size_t kMaxJobNbytes = 256;
constexpr std::size_t kMaxWhyNbytes = 3000;  // of a frame before a process is known
constexpr std::chrono::seconds kDeclining{2};

ControlOptions checked(ControlOptions options) {
  require(options.num_processes >= 1 && options.num_processes <= kMaxProcesses &&
              options.process >= 0 && options.process < options.num_processes,
          "[control] expected a process in [0, {}), got {}", options.num_processes,
          options.process);
  require(options.num_ranks >= 1, "[control] expected at least 1 rank, got {}", options.num_ranks);
  require(options.deadline.count() > 0, "[control] expected a deadline > 0 ms, got {}",
          options.deadline.count());
  require(options.job.size() <= kMaxJobNbytes,
          "[control] expected a job's name of at most {} bytes, got {}", kMaxJobNbytes,
          options.job.size());
  options.deadline = std::min<std::chrono::milliseconds>(options.deadline, std::chrono::years(100));
  return options;
}

// Where process 0 waits for the others.
struct Reception {
  /// `failure`: see ServerOptions.
  explicit Reception(const ControlOptions& options, std::string failure = "")
      : secret(options.secret) {
    net::Socket listener, served;
    std::string place;
    if (options.num_processes > 1) {
      const Place meeting(options.address, options.hand_out);
      place = meeting.str();
      listener = meeting.listen();
      if (meeting.draws_secret()) file = meeting.publish(listener, secret);
    }
    std::tie(own, served) = net::connected_pair();
    server =
        std::make_unique<Server>(control::ServerOptions{.num_processes = options.num_processes,
                                                        .deadline = options.deadline,
                                                        .place = std::move(place),
                                                        .on_waiting = options.on_waiting,
                                                        .failure = std::move(failure)},
                                 Door({.num_processes = options.num_processes,
                                       .job = options.job,
                                       .secret = secret,
                                       .local_only = secret.empty() && !options.insecure,
                                       .user_timeout = control::silence_limit(options.deadline),
                                       .on_refused = options.on_refused},
                                      std::move(listener), std::move(served)));
  }

  std::string secret;
  std::shared_ptr<const void> file;  // by which they find it
  net::Socket own;                   // process 0's connection
  std::unique_ptr<Server> server;
};

std::shared_ptr<Client> client_of(const ControlOptions& options, Joined joined) {
  return std::make_shared<Client>(options.process, options.num_ranks, options.deadline,
                                  std::move(joined.connection), std::move(joined.names));
}

}  // namespace

Control::Control(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Control::~Control() = default;

std::shared_ptr<Control> Control::join(const ControlOptions& unchecked) {
  const ControlOptions options = checked(unchecked);
  const auto made = [&](std::unique_ptr<Server> server, Joined joined) {
    return std::shared_ptr<Control>(new Control(
        std::make_unique<Impl>(std::move(server), client_of(options, std::move(joined)))));
  };
  if (options.process > 0) {
    Place place(options.address, options.hand_out);
    return made(nullptr, control::join_at(place, options));
  }

  Reception reception(options);
  return made(std::move(reception.server),
              control::join_here(std::move(reception.own), reception.secret, options));
}

void Control::decline(const ControlOptions& unchecked, std::string_view why) noexcept {
  try {
    ControlOptions options = checked(unchecked);
    if (options.num_processes == 1 || options.hand_out) return;
    const std::string cut(engine::without_cut_character(why.substr(0, kMaxWhyNbytes)));
    if (options.process == 0) {
      const Reception until_told(options, control::declined_text(control::hello_of(options), cut));
    } else {
      options.deadline = std::min<std::chrono::milliseconds>(options.deadline, kDeclining);
      options.on_waiting = nullptr;
      Place place(options.address);
      control::join_at(place, options, cut);
    }
  } catch (const std::exception&) {  // as when all know by now
  }
}

int Control::process() const { return impl_->client()->process(); }
int Control::num_processes() const { return impl_->client()->num_processes(); }
std::string Control::name(int process) const { return impl_->client()->name(process); }

std::vector<std::string> Control::all_gather(std::string_view label, std::string own) {
  return impl_->client()->all_gather(label, std::move(own));
}

std::optional<std::string> Control::failure_within(std::chrono::milliseconds time) const {
  return impl_->client()->failure_within(time);
}

bool Control::has_failed() const noexcept { return impl_->client()->has_failed(); }

void Control::run_together(const std::function<void()>& work) {
  const auto text = [&](const std::exception& error) {
    return World::text_of(
        [&] { return fmt::format("[join] process {}: {}", process(), error.what()); });
  };
  try {
    work();
  } catch (const engine::CommError& error) {
    std::optional<std::string> failure = failure_within(kPatience);
    if (!failure) {
      fail(text(error));
      failure = failure_within({});
    }
    // Where all find the same, each says what it found itself.
    if (failure && !failure->ends_with(error.what())) throw engine::CommError(*failure);
    throw;
  } catch (const std::exception& error) {
    fail(text(error));
    throw;
  }
}

void Control::fail(std::string message) noexcept { impl_->client()->fail(std::move(message)); }

bool Control::tells_of_loss(std::string_view message) {
  return message.starts_with("[control] ") && message.find(", lost process ") != message.npos;
}

void Control::listen(Events events) { impl_->client()->listen(std::move(events)); }

std::shared_ptr<const void> Control::pause() {
  const std::shared_ptr<Client>& client = impl_->client();
  client->change_pauses(1);
  return {client.get(), [client](Client* paused) { paused->change_pauses(-1); }};
}

void Control::say_call(std::string_view text, int rank) noexcept {
  impl_->client()->say_call(text, rank);
}
void Control::say_left(int rank) noexcept { impl_->client()->say_left(rank); }
bool Control::has_left(int process, int rank) const {
  return impl_->client()->has_left(process, rank);
}
std::string Control::last_call(int process, int rank) const {
  return impl_->client()->last_call(process, rank);
}

}  // namespace tessera::comm
