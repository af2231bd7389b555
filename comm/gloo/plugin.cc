// libtessera_gloo.so. Of Gloo it uses what lies under its collectives: a pair of sockets to each
// process, and unbound buffers.
//
// [Note: what Gloo needs to be kept from] An unbound buffer's own wait closes every connection when
// it times out; Buffer waits by itself. A message that is partly on its way is not told when its
// connection breaks; a watch of each connection is (Mesh::watches). A message longer than its
// receiver ends the process, and a shorter one is taken for right; here the length is part of the
// slot, so that such messages never meet, and Connections::crossed() sees that. A buffer that is
// destroyed while Gloo needs it blocks its connection for good: try_drop(). A write to a connection
// that broke raises SIGPIPE: WithoutSignals.
#include "comm/gloo/plugin.h"

#include <gloo/config.h>
#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>
#include <gloo/transport/tcp/unbound_buffer.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <ctime>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace tessera::comm::gloo_plugin {
namespace {

namespace tcp = ::gloo::transport::tcp;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::uint64_t kTagMask = (std::uint64_t{1} << kTagBits) - 1;
constexpr std::uint64_t kWatchSlot = ~std::uint64_t{0};  // no message is that long
// How often a wait looks at what it is not told of.
constexpr milliseconds kFirstLook{4}, kLongestLook{64};

std::uint64_t slot_of(std::uint32_t tag, std::size_t nbytes) { return nbytes << kTagBits | tag; }

// Blocks all signals of this thread, and of threads that it starts, for its lifetime, and discards
// a SIGPIPE that came in it.
class WithoutSignals {
 public:
  WithoutSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~WithoutSignals() {
    if (::sigismember(&before_, SIGPIPE) == 0) {
      sigset_t pipe;
      ::sigemptyset(&pipe);
      ::sigaddset(&pipe, SIGPIPE);
      const timespec now{};
      ::sigtimedwait(&pipe, nullptr, &now);
    }
    ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSignals(const WithoutSignals&) = delete;
  WithoutSignals& operator=(const WithoutSignals&) = delete;

 private:
  sigset_t before_;
};

// What Gloo says, without its own place in front: "[/build/.../pair.cc:12] text".
std::string text_of(const std::exception& error) {
  std::string text = error.what();
  if (const auto end = text.find("] "); text.starts_with('[') && end != std::string::npos) {
    text.erase(0, end + 2);
  }
  return text;
}

void write(ErrorText* error, const std::string& text) {
  error->text[text.copy(error->text, sizeof(error->text) - 1)] = '\0';
}

// `work()`, or `failed` with the text of what it threw.
template <class F, class R>
R guarded(const F& work, R failed, ErrorText* error) {
  try {
    return work();
  } catch (const std::exception& thrown) {
    write(error, text_of(thrown));
  } catch (...) {
    write(error, "an unknown error");
  }
  return failed;
}

class Buffer final : public tcp::UnboundBuffer {
 public:
  using tcp::UnboundBuffer::UnboundBuffer;

  bool done(milliseconds time = milliseconds(0)) {
    std::unique_lock lock(m_);
    const auto has_ended = [&] { return num_done() > 0 || ex_ != nullptr; };
    // Gloo signals one of the two.
    (receives ? recvCv_ : sendCv_).wait_for(lock, time, has_ended);
    return num_done() > 0;
  }

  /// Why it will never be done. Empty if it may.
  std::string error() {
    const std::lock_guard lock(m_);
    if (ex_ == nullptr) return {};
    try {
      std::rethrow_exception(ex_);
    } catch (const std::exception& error) {
      return text_of(error);
    }
  }

  bool receives = true;

 private:
  int num_done() const { return receives ? recvCompletions_ : sendCompletions_; }
};

class Connections final : public tcp::Context {
 public:
  using tcp::Context::Context;

  void close() { pairs_.clear(); }

  // Messages of one tag come in the order of the receives, so either sends wait for receives or
  // receives for sends. Where both wait they have other lengths: that of the send.
  bool crossed(int process, std::uint32_t tag, std::size_t nbytes, std::size_t* other) {
    const std::lock_guard lock(mutex_);
    const auto waits = [&](const Tally& tally) {
      const auto& processes = tally.getSendList();
      return std::find(processes.begin(), processes.end(), process) != processes.end();
    };
    if (std::none_of(expectedNotifications_.begin(), expectedNotifications_.end(),
                     [&](const Tally& t) { return t.slot == slot_of(tag, nbytes) && waits(t); })) {
      return false;  // its message is announced
    }
    for (const Tally& tally : pendingOperations_) {
      if ((tally.slot & kTagMask) == tag && waits(tally)) {
        *other = tally.slot >> kTagBits;
        return true;
      }
    }
    return false;
  }
};

struct State {
  std::shared_ptr<Connections> connections;
  // Of each process: a receive of what nobody sends, which fails when the connection does.
  std::vector<std::unique_ptr<Buffer>> watches;
  std::string addresses;
  int process = 0;
  std::atomic<bool> closed = false;

  // Why nothing will come from `process` or reach it. Empty if it may.
  std::string broken(int other) {
    if (closed) return "this process has closed the transport";
    return watches[static_cast<std::size_t>(other)]->error();
  }
};

std::string hex(const std::vector<char>& bytes) {
  std::string text;
  for (const char byte : bytes) {
    for (const int shift : {4, 0}) text += "0123456789abcdef"[byte >> shift & 15];
  }
  return text;
}

std::vector<char> from_hex(const std::string& text) {
  const auto digit = [](char c) {
    const auto value = std::string("0123456789abcdef").find(c);
    if (value == std::string::npos) throw std::invalid_argument("its address is no address");
    return static_cast<int>(value);
  };
  std::vector<char> bytes(text.size() / 2);
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<char>(digit(text[2 * i]) << 4 | digit(text[2 * i + 1]));
  }
  return bytes;
}

}  // namespace

struct Mesh {
  std::shared_ptr<State> state;
};

struct Message {
  Message(std::shared_ptr<State> its_state, int its_process, std::uint32_t its_tag,
          const void* bytes, std::size_t nbytes, bool receives)
      : state(std::move(its_state)),
        process(its_process),
        tag(its_tag),
        buffer(state->connections, const_cast<void*>(bytes), nbytes) {
    buffer.receives = receives;
  }

  std::shared_ptr<State> state;
  int process;
  std::uint32_t tag;
  Buffer buffer;
};

namespace {

Mesh* open(const char* address, int process, int num_processes, std::int64_t connect_ms,
           ErrorText* error) {
  const auto work = [&] {
    const WithoutSignals without;
    tcp::attr attr;
    attr.hostname = address;
    auto device = std::make_shared<tcp::Device>(tcp::CreateDeviceAttr(attr));
    auto state = std::make_shared<State>();
    state->process = process;
    state->connections = std::make_shared<Connections>(device, process, num_processes);
    state->watches.resize(static_cast<std::size_t>(num_processes));
    // Gloo takes five times this long to connect; 0 is for ever.
    state->connections->setTimeout(milliseconds(std::max<std::int64_t>(1, connect_ms / 5)));
    for (int p = 0; p < num_processes; ++p) {
      if (p > 0) state->addresses += ' ';
      state->addresses +=
          p == process ? "-" : hex(state->connections->createPair(p)->address().bytes());
    }
    return new Mesh{std::move(state)};
  };
  return guarded(work, static_cast<Mesh*>(nullptr), error);
}

const char* addresses(Mesh* mesh) { return mesh->state->addresses.c_str(); }

bool connect(Mesh* mesh, int process, const char* theirs, ErrorText* error) {
  const auto work = [&] {
    const WithoutSignals without;
    State& state = *mesh->state;
    std::string address = theirs;
    for (int p = 0; p < state.process; ++p) address.erase(0, address.find(' ') + 1);
    address.erase(std::min(address.find(' '), address.size()));
    const auto bytes = from_hex(address);
    const auto& pair = state.connections->getPair(process);
    if (bytes.size() != pair->address().bytes().size()) {
      throw std::invalid_argument("its address is no address");
    }
    pair->connect(bytes);
    auto watch = std::make_unique<Buffer>(state.connections, nullptr, 0);
    watch->recv(process, kWatchSlot, 0, 0);
    state.watches[static_cast<std::size_t>(process)] = std::move(watch);
    return true;
  };
  return guarded(work, false, error);
}

void close(Mesh* mesh) {
  mesh->state->closed = true;
  mesh->state->connections->close();
  delete mesh;
}

Message* post(Mesh* mesh, int process, std::uint32_t tag, const void* bytes, std::size_t nbytes,
              bool receives, ErrorText* error) {
  const auto work = [&] {
    const WithoutSignals without;
    auto message = std::make_unique<Message>(mesh->state, process, tag, bytes, nbytes, receives);
    if (receives) {
      message->buffer.recv(process, slot_of(tag, nbytes), 0, nbytes);
    } else {
      message->buffer.send(process, slot_of(tag, nbytes), 0, nbytes);
    }
    return message.release();
  };
  return guarded(work, static_cast<Message*>(nullptr), error);
}

Message* send(Mesh* mesh, int process, std::uint32_t tag, const void* bytes, std::size_t nbytes,
              ErrorText* error) {
  return post(mesh, process, tag, bytes, nbytes, false, error);
}

Message* receive(Mesh* mesh, int process, std::uint32_t tag, void* bytes, std::size_t nbytes,
                 ErrorText* error) {
  return post(mesh, process, tag, bytes, nbytes, true, error);
}

Outcome wait(Message* message, std::int64_t ms, ErrorText* error) {
  const auto work = [&] {
    Buffer& buffer = message->buffer;
    const auto start = steady_clock::now();
    for (milliseconds look = kFirstLook;; look = std::min(2 * look, kLongestLook)) {
      const auto passed = std::chrono::duration_cast<milliseconds>(steady_clock::now() - start);
      const milliseconds left(std::max<std::int64_t>(0, ms - passed.count()));
      if (buffer.done(std::min(left, look))) return Outcome::kDone;
      if (const auto text = message->state->broken(message->process); !text.empty()) {
        if (buffer.done()) return Outcome::kDone;  // just before
        write(error, text);
        return Outcome::kFailed;
      }
      std::size_t other = 0;
      if (buffer.receives && message->state->connections->crossed(message->process, message->tag,
                                                                  buffer.size, &other)) {
        write(error, std::to_string(other) + " bytes");
        return Outcome::kFailed;
      }
      if (left.count() == 0) return Outcome::kPending;
    }
  };
  return guarded(work, Outcome::kFailed, error);
}

bool try_drop(Message* message) {
  if (!message->buffer.done() && message->state->broken(message->process).empty()) return false;
  delete message;
  return true;
}

}  // namespace
}  // namespace tessera::comm::gloo_plugin

extern "C" const tessera::comm::gloo_plugin::Functions* tessera_gloo_plugin() {
  using namespace tessera::comm::gloo_plugin;
  static const std::string version = std::to_string(GLOO_VERSION_MAJOR) + "." +
                                     std::to_string(GLOO_VERSION_MINOR) + "." +
                                     std::to_string(GLOO_VERSION_PATCH);
  static const Functions functions{
      .version = Functions::kVersion,
      .gloo_version = version.c_str(),
      .open = open,
      .addresses = addresses,
      .connect = connect,
      .close = close,
      .send = send,
      .receive = receive,
      .wait = wait,
      .try_drop = try_drop,
  };
  return &functions;
}
