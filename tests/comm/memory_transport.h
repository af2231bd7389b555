// A transport between threads of one process, for tests of what lies above transports: each thread
// plays a process. A send is done only when it is received, as a large message is on others.
#pragma once

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "comm/transport/transport.h"
#include "engine/error.h"

namespace tessera::comm {

/// Messages on their way between all ends.
struct MemoryMailboxes {
  struct Message {
    std::span<const std::byte> from = {};  ///< what is sent
    std::span<std::byte> to = {};          ///< where it is received
    std::shared_ptr<const void> owner = {};
    bool done = false;
    std::string error = {};
  };
  struct Box {
    std::deque<std::shared_ptr<Message>> sent, wanted;  // one of the two is empty
  };

  std::mutex mutex;
  std::condition_variable ended;
  std::map<std::tuple<int, int, std::uint32_t>, Box> boxes;  // from, to, tag
};

class MemoryTransport : public Transport {
 public:
  /// One end for each process.
  static std::vector<std::unique_ptr<Transport>> make(int num_processes) {
    auto mailboxes = std::make_shared<MemoryMailboxes>();
    std::vector<std::unique_ptr<Transport>> ends;
    for (int p = 0; p < num_processes; ++p) {
      ends.push_back(std::make_unique<MemoryTransport>(mailboxes, p, num_processes));
    }
    return ends;
  }

  MemoryTransport(std::shared_ptr<MemoryMailboxes> mailboxes, int process, int num_processes)
      : mailboxes_(std::move(mailboxes)), process_(process), num_processes_(num_processes) {}

  std::string str() const override { return "memory"; }
  int process() const override { return process_; }
  int num_processes() const override { return num_processes_; }

  std::unique_ptr<Transfer> send(int process, std::uint32_t tag, std::span<const std::byte> bytes,
                                 std::shared_ptr<const void> owner) override {
    check(process, tag);
    auto message = std::make_shared<Message>(Message{.from = bytes, .owner = std::move(owner)});
    return post(&Box::sent, process_, process, tag, std::move(message));
  }

  std::unique_ptr<Transfer> receive(int process, std::uint32_t tag, std::span<std::byte> bytes,
                                    std::shared_ptr<const void> owner) override {
    check(process, tag);
    auto message = std::make_shared<Message>(Message{.to = bytes, .owner = std::move(owner)});
    return post(&Box::wanted, process, process_, tag, std::move(message));
  }

 private:
  using Message = MemoryMailboxes::Message;
  using Box = MemoryMailboxes::Box;

  class MemoryTransfer final : public Transfer {
   public:
    MemoryTransfer(std::shared_ptr<MemoryMailboxes> mailboxes, std::shared_ptr<Message> message)
        : mailboxes_(std::move(mailboxes)), message_(std::move(message)) {}

    bool wait_for(std::chrono::milliseconds time) override {
      std::unique_lock lock(mailboxes_->mutex);
      // By the system's clock: ThreadSanitizer of GCC 12 does not know waits by the steady one.
      const auto deadline = std::chrono::system_clock::now() + time;
      if (!mailboxes_->ended.wait_until(lock, deadline, [&] { return message_->done; })) {
        return false;
      }
      engine::require<engine::CommError>(message_->error.empty(), "{}", message_->error);
      return true;
    }

   private:
    std::shared_ptr<MemoryMailboxes> mailboxes_;
    std::shared_ptr<Message> message_;
  };

  void check(int process, std::uint32_t tag) const {
    engine::require(process >= 0 && process < num_processes_ && process != process_,
                    "[memory] expected another process of {}, got {} (process {})", num_processes_,
                    process, process_);
    engine::require(tag < kNumTags, "[memory] expected a tag below {}, got {}", kNumTags, tag);
  }

  // Carries the first message of a box when both its sides are there.
  std::unique_ptr<Transfer> post(std::deque<std::shared_ptr<Message>> Box::*side, int from, int to,
                                 std::uint32_t tag, std::shared_ptr<Message> message) {
    std::shared_ptr<const void> released[2];  // after the lock: an owner may do anything
    const std::lock_guard lock(mailboxes_->mutex);
    Box& box = mailboxes_->boxes[{from, to, tag}];
    (box.*side).push_back(message);
    if (!box.sent.empty() && !box.wanted.empty()) {
      Message &sent = *box.sent.front(), &wanted = *box.wanted.front();
      if (sent.from.size() != wanted.to.size()) {
        wanted.error =
            fmt::format("[memory] expected {} bytes from process {}, got {} (process {}, tag {})",
                        wanted.to.size(), from, sent.from.size(), to, tag);
      } else if (!sent.from.empty()) {
        std::memcpy(wanted.to.data(), sent.from.data(), sent.from.size());
      }
      sent.done = wanted.done = true;
      released[0] = std::move(sent.owner);
      released[1] = std::move(wanted.owner);
      box.sent.pop_front();
      box.wanted.pop_front();
      mailboxes_->ended.notify_all();
    }
    return std::make_unique<MemoryTransfer>(mailboxes_, std::move(message));
  }

  std::shared_ptr<MemoryMailboxes> mailboxes_;
  int process_, num_processes_;
};

}  // namespace tessera::comm
