#include "tests/comm/transport_promises.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "engine/error.h"

namespace tessera::comm {
namespace {

using Bytes = std::vector<std::byte>;
using std::chrono::milliseconds;
using std::chrono::steady_clock;

constexpr std::size_t kLarge = std::size_t{4} << 20;  // more than any transport sends unasked

// What process `from` sends to `to`: other bytes for each pair, tag and length. Blocks that differ
// in their first word, for sanitizers make loops over all words slow.
Bytes message(int from, int to, std::uint32_t tag, std::size_t nbytes) {
  auto x = static_cast<std::uint32_t>(nbytes) + tag * 2654435761U;
  x ^= static_cast<std::uint32_t>(from * 64 + to) * 0x9e3779b9U;
  std::array<std::uint32_t, 256> block;
  for (std::uint32_t& word : block) word = x = x * 1664525 + 1013904223;
  Bytes bytes(nbytes);
  for (std::size_t i = 0; i < nbytes; i += sizeof(block)) {
    std::memcpy(&bytes[i], block.data(), std::min(sizeof(block), nbytes - i));
    block[0] = block[0] * 1664525 + 1013904223;
  }
  return bytes;
}

// The bytes of a message, overwritten when their last owner lets go of them: a transport that lets
// go too early sends others.
std::shared_ptr<Bytes> owned(Bytes bytes) {
  return {new Bytes(std::move(bytes)), [](Bytes* last) {
            if (!last->empty()) std::memset(last->data(), 0xdd, last->size());
            delete last;
          }};
}

bool equal(const Bytes& a, const Bytes& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

class Promises {
 public:
  explicit Promises(Transport& transport)
      : transport_(transport), own_(transport.process()), num_(transport.num_processes()) {
    for (int p = 0; p < num_; ++p) {
      if (p != own_) peers_.push_back(p);
    }
  }

  std::vector<std::string> broken() {
    for (const auto promise :
         {&Promises::refuses, &Promises::exchanges, &Promises::keeps_order_within_a_tag,
          &Promises::matches_tags, &Promises::takes_either_first, &Promises::serves_two_threads,
          &Promises::goes_on_without_transfers, &Promises::lets_go, &Promises::compares_lengths}) {
      if (auto broken = (this->*promise)(); !broken.empty()) return broken;
    }
    return {};
  }

 private:
  using Broken = std::vector<std::string>;

  // Messages of one promise.
  class Messages {
   public:
    Messages(Promises& promises, std::string promise)
        : p_(promises), promise_(std::move(promise)) {}

    void send(int to, std::uint32_t tag, std::size_t nbytes) {
      auto bytes = owned(message(p_.own_, to, tag, nbytes));
      auto transfer = p_.transport_.send(to, tag, *bytes, bytes);
      posts_.push_back({std::move(transfer), bytes, to, tag, false});
    }

    void receive(int from, std::uint32_t tag, std::size_t nbytes) {
      auto bytes = owned(Bytes(nbytes));
      auto transfer = p_.transport_.receive(from, tag, *bytes, bytes);
      posts_.push_back({std::move(transfer), bytes, from, tag, true});
    }

    // Waits for all.
    Broken finish() {
      Broken broken;
      for (Post& post : posts_) {
        const std::string name = fmt::format(
            "{}: {} bytes {} process {} (process {}, tag {})", promise_, post.bytes->size(),
            post.receives ? "from" : "to", post.peer, p_.own_, post.tag);
        try {
          if (!post.transfer->wait_for(p_.time_left())) {
            broken.push_back(name + " did not come");
          } else if (!post.transfer->wait_for(milliseconds(0))) {
            broken.push_back(name + " came, and then had not come");
          } else if (post.receives && !equal(*post.bytes, message(post.peer, p_.own_, post.tag,
                                                                  post.bytes->size()))) {
            broken.push_back(name + " are other bytes");
          }
        } catch (const engine::Error& error) {
          broken.push_back(name + " failed: " + error.what());
        }
      }
      posts_.clear();
      return broken;
    }

   private:
    struct Post {
      std::unique_ptr<Transfer> transfer;
      std::shared_ptr<Bytes> bytes;
      int peer;
      std::uint32_t tag;
      bool receives;
    };

    Promises& p_;
    std::string promise_;
    std::vector<Post> posts_;
  };

  milliseconds time_left() const {
    return std::max(milliseconds(0),
                    std::chrono::duration_cast<milliseconds>(deadline_ - steady_clock::now()));
  }

  // Whether `condition` comes true in time.
  template <class F>
  bool comes_true(const F& condition) const {
    while (!condition()) {
      if (time_left().count() == 0) return false;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return true;
  }

  // Returns when all processes have called it.
  Broken meet(std::uint32_t tag) {
    Messages messages(*this, "a barrier");
    for (const int peer : peers_) {
      messages.send(peer, tag, 0);
      messages.receive(peer, tag, 0);
    }
    return messages.finish();
  }

  Broken refuses() {
    Broken broken;
    const auto refused = [&](int process, std::uint32_t tag) {
      const auto bytes = std::make_shared<Bytes>(8);
      for (const bool receives : {false, true}) {
        try {
          auto transfer = receives ? transport_.receive(process, tag, *bytes, bytes)
                                   : transport_.send(process, tag, *bytes, bytes);
          broken.push_back(fmt::format("process {} and tag {} are not refused", process, tag));
        } catch (const engine::InvalidArgument&) {
        }
      }
    };
    for (const int process : {-1, own_, num_}) refused(process, 0);
    for (const int peer : peers_) refused(peer, Transport::kNumTags);
    return broken;
  }

  // Every pair and all sizes at once, with the first and the last tag.
  Broken exchanges() {
    Messages messages(*this, "every pair");
    for (const std::size_t nbytes : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, kLarge}) {
      for (const int peer : peers_) {
        const std::uint32_t tag = nbytes % 2 == 0 ? 0 : Transport::kNumTags - 1;
        messages.send(peer, tag, nbytes);
        messages.receive(peer, tag, nbytes);
      }
    }
    return messages.finish();
  }

  Broken keeps_order_within_a_tag() {
    Messages messages(*this, "the order within a tag");
    for (std::size_t i = 0; i < 40; ++i) {
      const std::size_t nbytes = i % 8 == 5 ? 300'000 + i : i % 8 == 2 ? 0 : i * 100;
      for (const int peer : peers_) {
        messages.send(peer, 1, nbytes);
        messages.receive(peer, 1, nbytes);
      }
    }
    return messages.finish();
  }

  // Posted in other orders on the two sides.
  Broken matches_tags() {
    Messages messages(*this, "many tags");
    constexpr std::uint32_t kTags = 64;
    const auto nbytes = [](std::uint32_t tag) { return tag % 16 == 3 ? 100'000 + tag : tag; };
    for (const int peer : peers_) {
      for (std::uint32_t i = 0; i < kTags; ++i) {
        const std::uint32_t tag = 100 + i * 37 % kTags;
        messages.send(peer, tag, nbytes(tag));
      }
      for (std::uint32_t i = 0; i < kTags; ++i) {
        const std::uint32_t tag = 100 + (kTags - 1 - i);
        messages.receive(peer, tag, nbytes(tag));
      }
    }
    return messages.finish();
  }

  // A receive that is posted before the send of its message, and one that is posted after it.
  Broken takes_either_first() {
    Broken broken;
    for (const std::size_t nbytes : {std::size_t{8}, kLarge}) {
      Messages messages(*this, "receives first");
      for (const int peer : peers_) messages.receive(peer, 200, nbytes);
      std::ranges::copy(meet(201), std::back_inserter(broken));  // every receive is posted
      for (const int peer : peers_) messages.send(peer, 200, nbytes);
      std::ranges::copy(messages.finish(), std::back_inserter(broken));
      Messages late(*this, "sends first");
      for (const int peer : peers_) late.send(peer, 202, nbytes);
      std::ranges::copy(meet(203), std::back_inserter(broken));  // every send is posted
      for (const int peer : peers_) late.receive(peer, 202, nbytes);
      std::ranges::copy(late.finish(), std::back_inserter(broken));
    }
    return broken;
  }

  Broken serves_two_threads() {
    Broken broken[2];
    const auto work = [&](std::uint32_t thread) {
      for (std::uint32_t round = 0; round < 10; ++round) {
        Messages messages(*this, fmt::format("thread {}", thread));
        for (const int peer : peers_) {
          messages.send(peer, 300 + thread, 1 + 15555 * round * (thread + 1));
          messages.receive(peer, 300 + thread, 1 + 15555 * round * (thread + 1));
        }
        std::ranges::copy(messages.finish(), std::back_inserter(broken[thread]));
      }
    };
    {
      const std::jthread second(work, 1);
      work(0);
    }
    std::ranges::copy(broken[1], std::back_inserter(broken[0]));
    return broken[0];
  }

  // Transfers and owners that nobody here keeps: the transport goes on with them.
  Broken goes_on_without_transfers() {
    const auto num_come = std::make_shared<std::atomic<int>>(0);
    const auto num_right = std::make_shared<std::atomic<int>>(0);
    std::vector<std::weak_ptr<Bytes>> kept;
    for (const int peer : peers_) {
      const std::shared_ptr<Bytes> bytes(
          new Bytes(kLarge), [=, expected = message(peer, own_, 400, kLarge)](Bytes* come) {
            if (equal(*come, expected)) ++*num_right;
            ++*num_come;
            delete come;
          });
      kept.push_back(bytes);
      auto transfer = transport_.receive(peer, 400, *bytes, bytes);
      if (transfer->wait_for(milliseconds(1))) return {"a message came that nobody has sent"};
    }
    for (const auto& bytes : kept) {
      if (bytes.expired()) return {"the owner of a pending receive is released"};
    }
    Broken broken = meet(401);
    for (const int peer : peers_) {
      const auto bytes = owned(message(own_, peer, 400, kLarge));
      transport_.send(peer, 400, *bytes, bytes);  // the transfer is dropped here
    }
    const auto num_peers = static_cast<int>(peers_.size());
    if (!comes_true([&] { return *num_come == num_peers; })) {
      broken.push_back("the owner of a receive that nobody waits for is never released");
    } else if (*num_right != num_peers) {
      broken.push_back("a receive that nobody waits for has other bytes when it is released");
    }
    for (const int peer : peers_) {
      const auto bytes = owned(message(own_, peer, 402, kLarge));
      transport_.send(peer, 402, *bytes, bytes);
    }
    std::ranges::copy(meet(403), std::back_inserter(broken));
    Messages messages(*this, "sends that nobody waits for");
    for (const int peer : peers_) messages.receive(peer, 402, kLarge);
    std::ranges::copy(messages.finish(), std::back_inserter(broken));
    return broken;
  }

  // Owners are released once their message is done, also while its transfer is kept.
  Broken lets_go() {
    struct Post {
      std::unique_ptr<Transfer> transfer;
      std::shared_ptr<Bytes> bytes;
    };
    std::vector<Post> posts;
    Broken broken;
    for (const std::size_t nbytes : {std::size_t{0}, std::size_t{10}, kLarge}) {
      for (const int peer : peers_) {
        auto from = owned(message(own_, peer, 500, nbytes)), to = owned(Bytes(nbytes));
        posts.push_back({transport_.send(peer, 500, *from, from), from});
        posts.push_back({transport_.receive(peer, 500, *to, to), to});
      }
    }
    for (const Post& post : posts) {
      if (!post.transfer->wait_for(time_left()) ||
          !comes_true([&] { return post.bytes.use_count() == 1; })) {
        broken.push_back("the owner of a message that is done is not released");
      }
    }
    return broken;
  }

  // A message of another length is an error that names who sent it, whichever is longer; nothing is
  // written past the end.
  Broken compares_lengths() {
    constexpr std::size_t kGuard = 64;
    struct Lengths {
      std::size_t sent, wanted;
    };
    Broken broken = meet(600);
    std::vector<std::unique_ptr<Transfer>> sends;
    std::uint32_t tag = 601;
    for (const auto [sent, wanted] :
         {Lengths{8, 16}, {16, 8}, {0, 8}, {8, 0}, {kLarge, kLarge - 8}, {kLarge - 8, kLarge}}) {
      for (const int peer : peers_) {
        const auto bytes = owned(message(own_, peer, tag, sent));
        try {
          sends.push_back(transport_.send(peer, tag, *bytes, bytes));
        } catch (const engine::CommError&) {  // it may have failed for good
        }
      }
      for (const int peer : peers_) {
        const auto bytes = owned(Bytes(wanted + kGuard, std::byte{0x5a}));
        const std::string name =
            fmt::format("{} bytes of process {} for {} bytes", sent, peer, wanted);
        try {
          auto transfer = transport_.receive(peer, tag, std::span(*bytes).first(wanted), bytes);
          const bool came = transfer->wait_for(time_left());
          broken.push_back(name + (came ? " are no error" : " are waited for"));
        } catch (const engine::CommError& error) {
          const std::string text = error.what();
          if (text.find(fmt::format("process {}", peer)) == std::string::npos) {
            broken.push_back(name + ": the error does not name the process: " + text);
          }
        }
        for (std::size_t i = wanted; i < bytes->size(); ++i) {
          if ((*bytes)[i] != std::byte{0x5a}) {
            broken.push_back(name + " are written past the end");
            break;
          }
        }
      }
      ++tag;
    }
    for (const auto& send : sends) {
      try {
        if (!send->wait_for(time_left())) {
          broken.push_back("a message of a wrong length does not end where it was sent");
        }
      } catch (const engine::CommError&) {
      }
    }
    return broken;
  }

  Transport& transport_;
  int own_, num_;
  std::vector<int> peers_;
  steady_clock::time_point deadline_ = steady_clock::now() + std::chrono::minutes(2);
};

}  // namespace

std::vector<std::string> broken_promises(Transport& transport) {
  return Promises(transport).broken();
}

}  // namespace tessera::comm
