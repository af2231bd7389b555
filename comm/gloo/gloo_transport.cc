#include "comm/gloo/gloo_transport.h"

#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <span>
#include <stop_token>
#include <thread>
#include <utility>
#include <vector>

#include "comm/gloo/dropped_messages.h"
#include "comm/gloo/library.h"
#include "comm/gloo/own_address.h"
#include "engine/error.h"

namespace tessera::comm {
namespace {

using engine::CommError;
using gloo_plugin::ErrorText;
using gloo_plugin::Functions;
using gloo_plugin::Mesh;
using gloo_plugin::Message;
using gloo_plugin::Outcome;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

// What all processes tell each other: a number that nobody else can know, and addresses.
struct Place {
  std::string number, addresses;

  std::string str() const { return number + " " + addresses; }
  static Place parse(const std::string& text) {
    const auto space = std::min(text.find(' '), text.size());
    return {text.substr(0, space), text.substr(std::min(space + 1, text.size()))};
  }
};

std::string random_number() {
  std::random_device random;
  std::string text;
  for (int i = 0; i < 4; ++i) text += fmt::format("{:08x}", random());
  return text;
}

// Which message, for errors.
struct Label {
  int own, process;
  std::uint32_t tag;
  std::size_t nbytes;
  bool receives;

  std::string expected() const {
    return fmt::format("expected {} bytes {} process {}", nbytes, receives ? "from" : "to",
                       process);
  }
  [[noreturn]] void fail(const ErrorText& error) const {
    engine::fail<CommError>("[gloo] {}, got: {} (process {}, tag {})", expected(), error.text, own,
                            tag);
  }
};

class GlooTransfer final : public Transfer {
 public:
  GlooTransfer(std::shared_ptr<DroppedMessages> dropped, PostedMessage message, Label label)
      : dropped_(std::move(dropped)), message_(std::move(message)), label_(label) {}
  ~GlooTransfer() override {
    if (message_.message != nullptr) dropped_->take(std::move(message_));
  }
  GlooTransfer(const GlooTransfer&) = delete;
  GlooTransfer& operator=(const GlooTransfer&) = delete;

  bool wait_for(milliseconds time) override {
    if (message_.message == nullptr) return true;
    ErrorText error;
    const auto outcome = dropped_->functions().wait(message_.message, time.count(), &error);
    if (outcome == Outcome::kFailed) label_.fail(error);
    if (outcome == Outcome::kPending) return false;
    dropped_->take(std::exchange(message_, {}));  // done, so it is freed at once
    return true;
  }

 private:
  std::shared_ptr<DroppedMessages> dropped_;
  PostedMessage message_;  // none once it is done
  Label label_;
};

// While it lives, `interrupt` is called if `has_failed`.
std::jthread watch(const std::function<bool()>& has_failed, std::function<void()> interrupt) {
  if (!has_failed) return {};
  return std::jthread([has_failed, interrupt = std::move(interrupt)](const std::stop_token& stop) {
    constexpr milliseconds kPause{20};
    std::mutex mutex;
    std::condition_variable_any stopped;
    std::unique_lock lock(mutex);
    while (!stop.stop_requested()) {
      if (has_failed()) return interrupt();
      stopped.wait_for(lock, stop, kPause, [] { return false; });
    }
  });
}

class GlooTransport final : public Transport {
 public:
  GlooTransport(const GlooOptions& options, const Functions& functions)
      : functions_(functions),
        address_(own_address(options.host, steady_clock::now() + options.deadline)),
        process_(options.process),
        num_processes_(options.num_processes) {
    const auto start = steady_clock::now();
    ErrorText error;
    mesh_ = functions_.open(address_.c_str(), process_, num_processes_, options.deadline.count(),
                            &error);
    engine::require<CommError>(mesh_ != nullptr,
                               "[gloo] expected to listen at {}, got: {} (process {})", address_,
                               error.text, process_);
    try {
      connect(options, start + options.deadline);
    } catch (...) {
      close();
      throw;
    }
  }
  ~GlooTransport() override { close(); }
  GlooTransport(const GlooTransport&) = delete;
  GlooTransport& operator=(const GlooTransport&) = delete;

  std::string str() const override {
    return fmt::format("Gloo {} at {}", functions_.gloo_version, address_);
  }
  int process() const override { return process_; }
  int num_processes() const override { return num_processes_; }

  std::unique_ptr<Transfer> send(int process, std::uint32_t tag, std::span<const std::byte> bytes,
                                 std::shared_ptr<const void> owner) override {
    const Label label = checked({process_, process, tag, bytes.size(), false});
    ErrorText error;
    Message* message = functions_.send(mesh_, process, tag, bytes.data(), bytes.size(), &error);
    return transfer({message, std::move(owner)}, label, error);
  }

  std::unique_ptr<Transfer> receive(int process, std::uint32_t tag, std::span<std::byte> bytes,
                                    std::shared_ptr<const void> owner) override {
    const Label label = checked({process_, process, tag, bytes.size(), true});
    ErrorText error;
    Message* message = functions_.receive(mesh_, process, tag, bytes.data(), bytes.size(), &error);
    return transfer({message, std::move(owner)}, label, error);
  }

 private:
  Label checked(const Label& label) const {
    engine::require(
        label.process >= 0 && label.process < num_processes_ && label.process != process_,
        "[gloo] expected another process of {}, got {} (process {})", num_processes_, label.process,
        process_);
    engine::require(label.tag < kNumTags, "[gloo] expected a tag below {}, got {}", kNumTags,
                    label.tag);
    engine::require(label.nbytes <= gloo_plugin::kMaxMessageNbytes,
                    "[gloo] expected at most {} bytes, got {}", gloo_plugin::kMaxMessageNbytes,
                    label.nbytes);
    return label;
  }

  std::unique_ptr<Transfer> transfer(PostedMessage message, const Label& label,
                                     const ErrorText& error) const {
    if (message.message == nullptr) label.fail(error);
    return std::make_unique<GlooTransfer>(dropped_, std::move(message), label);
  }

  void connect(const GlooOptions& options, steady_clock::time_point deadline) {
    struct Peer {
      int process;
      Place place;
      std::shared_ptr<std::string> shown = {};
      std::unique_ptr<Transfer> in = {}, out = {};
    };
    const Place own{random_number(), functions_.addresses(mesh_)};
    const std::vector<std::string> texts = options.all_gather(own.str());
    engine::require<CommError>(texts.size() == static_cast<std::size_t>(num_processes_),
                               "[gloo] expected the places of {} processes, got {} (process {})",
                               num_processes_, texts.size(), process_);
    const std::jthread watching =
        watch(options.all_gather.has_failed(), [this] { functions_.interrupt(mesh_); });
    std::vector<Peer> peers;
    for (int p = 0; p < num_processes_; ++p) {
      if (p != process_) peers.push_back({p, Place::parse(texts[static_cast<std::size_t>(p)])});
    }
    for (const Peer& peer : peers) {
      ErrorText error;
      if (functions_.connect(mesh_, peer.process, peer.place.addresses.c_str(), &error)) continue;
      engine::fail<CommError>("[gloo] expected to connect to process {}, got: {} (process {})",
                              peer.process, error.text, process_);
    }
    // Each side shows that it is who the other was told of.
    const auto number = std::make_shared<const std::string>(own.number);
    for (Peer& peer : peers) {
      peer.shown = std::make_shared<std::string>(peer.place.number.size(), ' ');
      peer.in =
          receive(peer.process, 0, std::as_writable_bytes(std::span(*peer.shown)), peer.shown);
      peer.out = send(peer.process, 0, std::as_bytes(std::span(*number)), number);
    }
    for (const Peer& peer : peers) {
      const auto is_done = [&](Transfer& transfer) {
        const auto left = deadline - steady_clock::now();
        return transfer.wait_for(
            std::max(milliseconds(0), std::chrono::duration_cast<milliseconds>(left)));
      };
      engine::require<CommError>(is_done(*peer.in) && is_done(*peer.out),
                                 "[gloo] expected process {}, got a connection to somebody else, "
                                 "or none (process {})",
                                 peer.process, process_);
      engine::require<CommError>(*peer.shown == peer.place.number,
                                 "[gloo] expected process {}, got somebody else (process {})",
                                 peer.process, process_);
    }
  }

  void close() {
    functions_.close(mesh_);
    dropped_->close();
  }

  const Functions& functions_;
  std::shared_ptr<DroppedMessages> dropped_ = std::make_shared<DroppedMessages>(functions_);
  std::string address_;
  int process_, num_processes_;
  Mesh* mesh_ = nullptr;
};

}  // namespace

std::unique_ptr<Transport> make_gloo_transport(const GlooOptions& options) {
  engine::require(options.process >= 0 && options.process < options.num_processes,
                  "[gloo] expected a process below {}, got {}", options.num_processes,
                  options.process);
  return std::make_unique<GlooTransport>(options, load_gloo_plugin(options.plugin_path));
}

}  // namespace tessera::comm
