#include "comm/control/join.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "comm/control/beat.h"
#include "comm/control/handshake.h"
#include "comm/control/reminder.h"
#include "comm/net/addresses.h"
#include "engine/error.h"
#include "engine/io/host.h"

namespace tessera::comm::control {
namespace {

using engine::CommError;
using engine::IoError;
using engine::require;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::chrono::seconds kMaxSilence{5};  // of process 0, which beats more often

// Nothing if process 0 is gone. `waiting`: the last that it said of who is missing.
std::optional<Joined> wait_for_go(Connection connection, const ControlOptions& options,
                                  std::string& waiting) {
  // Without a deadline: process 0 has one, and knows who is missing.
  for (;;) {
    const auto frame = connection.wait_for_next(steady_clock::now() + kMaxSilence);
    if (!frame) return std::nullopt;
    if (const auto* go = std::get_if<Go>(&*frame)) {
      require<CommError>(go->names.size() == static_cast<std::size_t>(options.num_processes),
                         "[control] expected {} names, got {}", options.num_processes,
                         go->names.size());
      return Joined{std::move(connection), go->names};
    }
    if (const auto* refusal = std::get_if<Refusal>(&*frame)) {
      engine::fail<CommError>(
          "[control] expected to join job '{}' at {}, got a refusal: {} "
          "(process {})",
          options.job, options.address, refusal->why, options.process);
    }
    if (const auto* failure = std::get_if<Failure>(&*frame)) throw CommError(failure->message);
    if (const auto* beat = std::get_if<Beat>(&*frame)) waiting = beat->text;
  }
}

class Joining {
 public:
  Joining(Place& place, const ControlOptions& options, std::string_view why_not)
      : place_(place),
        options_(options),
        why_not_(why_not),
        deadline_(steady_clock::now() + options.deadline),
        reminder_(options.deadline) {}

  Joined join() {
    for (milliseconds pause{10};; pause = std::min(2 * pause, milliseconds(200))) {
      const Place::Candidates candidates = place_.candidates();
      if (candidates.places.empty()) why_ = "no file";
      for (const net::HostPort& at : candidates.places) {
        if (auto joined = join(at, candidates.secret)) return std::move(*joined);
      }
      if (net::ms_until(deadline_) == 0) fail();
      if (options_.on_waiting && reminder_.is_due()) {
        options_.on_waiting(
            fmt::format("waiting for process 0 of job '{}' at {}, got {} (process {})",
                        options_.job, place_.str(), got(), options_.process));
      }
      std::this_thread::sleep_for(std::min(pause, milliseconds(net::ms_until(deadline_))));
      patience_ = std::min<milliseconds>(2 * patience_, kMaxSilence);
    }
  }

 private:
  // Nothing: elsewhere, or later.
  std::optional<Joined> join(const net::HostPort& at, const std::string& secret) {
    if (!lookup_ || lookup_->host() != at.host) lookup_.emplace(at.host, at.port);
    const std::shared_ptr<net::Addresses> addresses = lookup_->wait(limit());
    if (addresses == nullptr) {
      why_ = fmt::format("no answer of a name server for {}", at.host);
      return std::nullopt;
    }
    lookup_.reset();  // another time it is asked again
    const int error = addresses->error();
    if (error != 0) {
      // A name may take a while to be known.
      require<IoError>(error == EAI_AGAIN || error == EAI_NONAME || error == EAI_NODATA,
                       "[control] expected the address of {}, got {} (process {})", at.host,
                       gai_strerror(error), options_.process);
      why_ = fmt::format("no address of {} ({})", at.host, gai_strerror(error));
      return std::nullopt;
    }
    for (int k = 0; k <= at.num_more; ++k) {
      addresses->set_port(at.port + k);
      for (const addrinfo* a = addresses->first(); a != nullptr; a = a->ai_next) {
        if (auto joined = join(*a, secret)) return joined;
      }
    }
    return std::nullopt;
  }

  std::optional<Joined> join(const addrinfo& at, const std::string& file_secret) {
    net::Socket socket = net::connect_to(at, limit());
    if (!socket) {
      why_ = net::reason();
      return std::nullopt;
    }
    const std::string& secret = place_.draws_secret() ? file_secret : options_.secret;
    require(!secret.empty() || options_.insecure || net::is_local(socket),
            "[control] expected a secret, or leave to do without, to join another host at {}, got "
            "none (process {})",
            place_.str(), options_.process);
    net::set_for_messages(socket, silence_limit(options_.deadline));
    Connection connection(std::move(socket));
    if (const auto other = introduce(connection, hello_of(options_), secret, limit(), why_not_)) {
      require<CommError>(
          !other->is_refusal || !place_.is_one_port(),
          "[control] expected to join job '{}' at {}, got a refusal: {} (process {})", options_.job,
          place_.str(), other->why, options_.process);
      if (other->is_refusal) refusal_ = "a refusal: " + other->why;
      why_ = other->why;
      return std::nullopt;
    }
    connection.trust();
    why_ = "an end";
    return wait_for_go(std::move(connection), options_, waiting_);
  }

  net::Time limit() const { return std::min(deadline_, steady_clock::now() + patience_); }
  const std::string& got() const { return refusal_.empty() ? why_ : refusal_; }

  [[noreturn]] void fail() const {
    require<CommError>(waiting_.empty(),
                       "[control] expected {} processes at {} within {} ms, got {} (process {})",
                       options_.num_processes, place_.str(), options_.deadline.count(), waiting_,
                       options_.process);
    engine::fail<CommError>(
        "[control] expected process 0 of job '{}' at {} within {} ms, got {} (process {})",
        options_.job, place_.str(), options_.deadline.count(), got(), options_.process);
  }

  Place& place_;
  const ControlOptions& options_;
  const std::string_view why_not_;
  const net::Time deadline_;
  Reminder reminder_;
  std::optional<net::Lookup> lookup_;  // that has not been answered
  milliseconds patience_{1000};        // with one candidate; grows
  std::string why_ = "no answer", refusal_, waiting_;
};

}  // namespace

Hello hello_of(const ControlOptions& options) {
  return {.job = options.job,
          .host = engine::host_name(),
          .num_processes = options.num_processes,
          .process = options.process,
          .pid = ::getpid(),
          .nonce = draw_nonce()};
}

Joined join_at(Place& place, const ControlOptions& options, std::string_view why_not) {
  return Joining(place, options, why_not).join();
}

Joined join_here(net::Socket socket, const std::string& secret, const ControlOptions& options) {
  Connection connection(std::move(socket));
  const auto other =
      introduce(connection, hello_of(options), secret, steady_clock::now() + options.deadline);
  require<CommError>(!other, "[control] expected process 0 to answer itself, got {}",
                     other ? other->why : "");
  connection.trust();
  std::string waiting;
  auto joined = wait_for_go(std::move(connection), options, waiting);
  require<CommError>(joined.has_value(), "[control] expected process 0 to answer itself, got {}",
                     "an end");
  return std::move(*joined);
}

}  // namespace tessera::comm::control
