// libtessera_gloo.so. Of Gloo it uses what lies under its collectives: a pair of sockets to each
// process, and unbound buffers.
#include "comm/gloo/plugin.h"

#include <gloo/config.h>
#include <gloo/transport/tcp/device.h>
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

#include "comm/gloo/connections.h"

namespace tessera::comm::gloo_plugin {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// How often a wait looks at what it is not told of.
constexpr milliseconds kFirstLook{4}, kLongestLook{64};

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
    if (state.closed) throw std::runtime_error("this process has closed its connections");
    auto watch = std::make_unique<Buffer>(state.connections, nullptr, 0);
    watch->recv(process, kWatchSlot, 0, 0);
    state.watches[static_cast<std::size_t>(process)] = std::move(watch);
    return true;
  };
  return guarded(work, false, error);
}

void interrupt(Mesh* mesh) {
  mesh->state->closed = true;
  ErrorText error;  // of Gloo, which has then broken the connection by itself
  const auto work = [&] {
    mesh->state->connections->interrupt();
    return true;
  };
  (void)guarded(work, false, &error);
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
      if (message->state->connections->crossed(message->process, message->tag, buffer.size,
                                               buffer.receives, &other)) {
        write(error, (buffer.receives ? "" : "it expects ") + std::to_string(other) + " bytes");
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

extern "C" const Functions* tessera_gloo_plugin() {
  static const std::string version = std::to_string(GLOO_VERSION_MAJOR) + "." +
                                     std::to_string(GLOO_VERSION_MINOR) + "." +
                                     std::to_string(GLOO_VERSION_PATCH);
  static const Functions functions{
      .version = Functions::kVersion,
      .gloo_version = version.c_str(),
      .open = open,
      .addresses = addresses,
      .connect = connect,
      .interrupt = interrupt,
      .close = close,
      .send = send,
      .receive = receive,
      .wait = wait,
      .try_drop = try_drop,
  };
  return &functions;
}

}  // namespace tessera::comm::gloo_plugin
