#include "comm/control/door.h"

#include <fmt/core.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <utility>

#include "comm/control/handshake.h"
#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::comm::control {
namespace {

// Connections that have not said who they are. More than these push out the oldest.
constexpr std::size_t kMaxStrangers = 64;
// In which one must say it.
constexpr std::chrono::seconds kPatience{2};
// Whoever knocks for ever fills no log.
constexpr int kMaxNotes = 100;

}  // namespace

Door::Door(DoorOptions options, net::Socket listener, net::Socket own)
    : options_(std::move(options)), listener_(std::move(listener)) {
  strangers_.push_back(
      {.connection = Connection(std::move(own)), .from = "this process", .is_own = true});
}

void Door::poll_for(std::vector<pollfd>& polls) const {
  if (listener_ && !is_crowded_) {
    polls.push_back({.fd = listener_.get(), .events = POLLIN, .revents = 0});
  }
  for (const Stranger& stranger : strangers_) {
    const Connection& connection = stranger.connection;
    polls.push_back({.fd = connection.socket().get(), .events = connection.events(), .revents = 0});
  }
}

std::vector<Guest> Door::hear() {
  std::vector<Guest> guests;
  const auto hear_all = [&] {
    std::erase_if(strangers_, [&](Stranger& stranger) { return hear(stranger, guests); });
  };
  hear_all();
  if (listener_) accept_all();
  hear_all();
  return guests;
}

// Where the process has no descriptor left, the oldest stranger makes room; without one, who waits
// is not looked at until the next call: it would wake poll() at once, for ever.
void Door::accept_all() {
  is_crowded_ = false;
  // Not all that ever come: others wait to be heard.
  for (std::size_t i = 0; i < kMaxStrangers && !is_crowded_; ++i) {
    net::Socket socket = net::accept_next(listener_);
    if (!socket && (errno == EMFILE || errno == ENFILE)) {
      const std::size_t before = strangers_.size();
      drop_oldest("a descriptor for it, got too many open files");
      is_crowded_ = strangers_.size() == before;
      continue;
    }
    if (!socket) return;
    net::set_for_messages(socket, options_.user_timeout);
    Stranger stranger{.connection = Connection(std::move(socket)), .from = ""};
    stranger.from = net::peer_text(stranger.connection.socket());
    if (options_.local_only && !net::is_local(stranger.connection.socket())) {
      refuse(stranger.connection, stranger.from,
             "a process of this host, as there is no secret, got one of another host");
      continue;
    }
    strangers_.push_back(std::move(stranger));
    if (strangers_.size() > kMaxStrangers) {
      drop_oldest(fmt::format("at most {} that do not say who they are", kMaxStrangers));
    }
  }
}

void Door::drop_oldest(const std::string& why) {
  const auto oldest = std::ranges::find(strangers_, false, &Stranger::is_own);
  if (oldest == strangers_.end()) return;
  note(oldest->from, why);
  strangers_.erase(oldest);
}

bool Door::hear(Stranger& stranger, std::vector<Guest>& guests) {
  Connection& connection = stranger.connection;
  connection.receive();
  try {
    while (const auto frame = connection.next()) {
      if (const auto* refusal = std::get_if<Refusal>(&*frame)) {
        note(stranger.from, "the secret of this job, got " + engine::excerpt(refusal->why));
        return true;
      }
      if (const auto wrong = answer(stranger, *frame)) {
        refuse(connection, stranger.from, *wrong);
        return true;
      }
      const auto* proved = std::get_if<Answer>(&*frame);
      if (proved == nullptr) continue;
      connection.trust();
      guests.push_back({.process = stranger.hello->process,
                        .name = name_of(*stranger.hello),
                        .connection = std::move(connection),
                        .failure = proved->why_not.empty()
                                       ? ""
                                       : declined_text(*stranger.hello, proved->why_not)});
      return true;
    }
  } catch (const engine::CommError&) {
    refuse(connection, stranger.from, "a process of a job, got something else");
    return true;
  }
  connection.flush();
  if (connection.ended()) {
    if (!stranger.hello) note(stranger.from, "a process of this job, got an end");
    return true;
  }
  // It is told nothing: a process of this job that was held up, as this one may be, comes again.
  if (!stranger.is_own && std::chrono::steady_clock::now() - stranger.since > kPatience) {
    note(stranger.from,
         fmt::format("to hear who it is within {} s, got too little", kPatience.count()));
    return true;
  }
  return false;
}

std::optional<std::string> Door::answer(Stranger& stranger, const Frame& frame) {
  if (const auto* hello = std::get_if<Hello>(&frame); hello != nullptr && !stranger.hello) {
    // A newer version may have other fields.
    if (hello->magic != Hello::kMagic) return "this version of Tessera, got another";
    stranger.from = fmt::format("{} at {}", name_of(*hello), stranger.from);
    if (hello->job != options_.job) {
      return fmt::format("one of job '{}', got one of job '{}'", options_.job,
                         engine::excerpt(hello->job));
    }
    stranger.hello = *hello;
    stranger.nonce = draw_nonce();
    stranger.connection.queue(Challenge{
        .nonce = stranger.nonce, .proof = server_proof(options_.secret, *hello, stranger.nonce)});
    return std::nullopt;
  }
  const auto* proved = std::get_if<Answer>(&frame);
  if (proved == nullptr || !stranger.hello) return "a process of a job, got something else";
  const Hello& hello = *stranger.hello;
  if (!are_equal(proved->proof, client_proof(options_.secret, hello, stranger.nonce))) {
    return "the secret of this job, got another";
  }
  if (hello.num_processes != options_.num_processes) {
    return fmt::format("one of {} processes, got one of {}", options_.num_processes,
                       hello.num_processes);
  }
  const bool may_be = stranger.is_own ? hello.process == 0
                                      : hello.process >= 1 && hello.process < hello.num_processes;
  if (!may_be) {
    return fmt::format("processes 1 to {}, got process {}", options_.num_processes - 1,
                       hello.process);
  }
  return std::nullopt;
}

void Door::refuse(Guest& guest, const std::string& why) {
  refuse(guest.connection, guest.name, why);
}

void Door::refuse(Connection& connection, const std::string& from, const std::string& why) {
  connection.queue(Refusal{.why = "expected " + why});
  connection.flush();
  note(from, why);
}

void Door::note(const std::string& from, const std::string& why) {
  last_note_ = fmt::format("refused {}: expected {}", from, why);
  if (++num_notes_ > kMaxNotes || !options_.on_refused) return;
  options_.on_refused("[control] " + last_note_ +
                      (num_notes_ == kMaxNotes ? "; more that are refused are not named" : ""));
}

void Door::close() {
  listener_ = net::Socket();
  strangers_.clear();
}

}  // namespace tessera::comm::control
