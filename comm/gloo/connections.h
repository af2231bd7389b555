// Gloo's classes with what Tessera needs besides, for plugin.cc alone.
//
// [Note: what Gloo needs to be kept from] An unbound buffer's own wait closes every connection when
// it times out; Buffer waits by itself. A message that is partly on its way is not told when its
// connection breaks; a watch of each connection is (State::watches). A message longer than its
// receiver ends the process, and a shorter one is taken for right; here the length is part of the
// slot, so that such messages never meet, and Connections::crossed() sees that. A buffer that is
// destroyed while Gloo needs it blocks its connection for good: try_drop(). A write to a connection
// that broke raises SIGPIPE: WithoutSignals.
#pragma once

#include <gloo/transport/tcp/context.h>
#include <gloo/transport/tcp/device.h>
#include <gloo/transport/tcp/pair.h>
#include <gloo/transport/tcp/unbound_buffer.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "comm/gloo/plugin.h"

namespace tessera::comm::gloo_plugin {

namespace tcp = ::gloo::transport::tcp;

inline constexpr std::uint64_t kTagMask = (std::uint64_t{1} << kTagBits) - 1;
inline constexpr std::uint64_t kWatchSlot = ~std::uint64_t{0};  // no message is that long

inline std::uint64_t slot_of(std::uint32_t tag, std::size_t nbytes) {
  return nbytes << kTagBits | tag;
}

// What Gloo says, without its own place in front: "[/build/.../pair.cc:12] text".
inline std::string text_of(const std::exception& error) {
  std::string text = error.what();
  if (const auto end = text.find("] "); text.starts_with('[') && end != std::string::npos) {
    text.erase(0, end + 2);
  }
  return text;
}

class Buffer final : public tcp::UnboundBuffer {
 public:
  using tcp::UnboundBuffer::UnboundBuffer;

  bool done(std::chrono::milliseconds time = {}) {
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

class Connection final : public tcp::Pair {
 public:
  using tcp::Pair::Pair;

  // Whether a send waits for its receive, and `condition` holds; neither changes in between.
  template <class F>
  bool has_waiting_send(std::uint64_t slot, const F& condition) {
    const std::lock_guard lock(m_);
    return localPendingSend_.contains(slot) && condition();
  }
};

class Connections final : public tcp::Context {
 public:
  using tcp::Context::Context;

  std::unique_ptr<::gloo::transport::Pair>& createPair(int process) override {
    auto& pair = pairs_[static_cast<std::size_t>(process)];
    pair = std::make_unique<Connection>(this, device_.get(), process, getTimeout());
    return pair;
  }

  // Closes them all; who waits for one of them to be made waits no longer.
  void interrupt() {
    const std::lock_guard lock(pairs_mutex_);
    for (const auto& pair : pairs_) {
      if (pair != nullptr) pair->close();
    }
  }

  void close() {
    const std::lock_guard lock(pairs_mutex_);
    pairs_.clear();
  }

  // Messages of one tag come in the order of the receives, so either sends wait for receives or
  // receives for sends. Where both wait they have other lengths: `other` is that of the other side.
  bool crossed(int process, std::uint32_t tag, std::size_t nbytes, bool receives,
               std::size_t* other) {
    const std::uint64_t slot = slot_of(tag, nbytes);
    if (receives) {
      const std::lock_guard lock(mutex_);
      const auto waits = [&](const Tally& t) {
        return t.slot == slot && has(t.getSendList(), process);
      };
      return std::any_of(expectedNotifications_.begin(), expectedNotifications_.end(), waits) &&
             is_there(process, tag, &Tally::getSendList, other);
    }
    const std::lock_guard lock(pairs_mutex_);
    if (pairs_.empty()) return false;
    auto& pair = static_cast<Connection&>(*pairs_[static_cast<std::size_t>(process)]);
    return pair.has_waiting_send(slot, [&] {
      const std::lock_guard tallies(mutex_);
      return is_there(process, tag, &Tally::getRecvList, other);
    });
  }

 private:
  static bool has(const std::vector<int>& processes, int process) {
    return std::find(processes.begin(), processes.end(), process) != processes.end();
  }

  // Whether `process` has announced a message of `tag` that nothing here matches.
  bool is_there(int process, std::uint32_t tag, const std::vector<int>& (Tally::*list)() const,
                std::size_t* other) const {
    for (const Tally& tally : pendingOperations_) {
      if ((tally.slot & kTagMask) == tag && has((tally.*list)(), process)) {
        *other = tally.slot >> kTagBits;
        return true;
      }
    }
    return false;
  }

  std::mutex pairs_mutex_;  // against close()
};

}  // namespace tessera::comm::gloo_plugin
