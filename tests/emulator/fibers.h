// Fibers of one OS thread, and what the sanitizers must know of them. Private to the emulated
// device.
#pragma once

#include <boost/context/detail/fcontext.hpp>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

namespace tessera::cuda_emulation {

/// A stack with a guard page at its end.
class Stack {
 public:
  static constexpr std::size_t kNbytes = 64 << 10;

  Stack();
  ~Stack();
  Stack(Stack&& other) noexcept : bytes_(std::exchange(other.bytes_, nullptr)) {}
  Stack& operator=(Stack&&) = delete;

  std::byte* bottom() const;
  std::byte* top() const { return bottom() + kNbytes; }

 private:
  std::byte* bytes_ = nullptr;
};

/// Fibers that are kept for use again, and the OS thread's own stack, the host.
class FiberPool {
 public:
  static constexpr int kHost = -1;

  /// Each fiber runs `entry`, which does not return but jumps away.
  explicit FiberPool(void (*entry)()) : entry_(entry) {}

  int current() const { return current_; }
  /// A free fiber whose stack only `owner` uses.
  int take(unsigned owner) {
    if (owner >= free_.size() || free_[owner].empty()) add(owner);
    const int fiber = free_[owner].back();
    free_[owner].pop_back();
    return fiber;
  }
  /// Makes the current fiber free once it has jumped away.
  void release_current() {
    free_[fibers_[static_cast<std::size_t>(current_)].owner].push_back(current_);
  }
  /// Goes on where `fiber` jumped away; returns when something jumps back.
  void jump(int fiber);
  /// Frees all fibers, wherever they are: nothing on their stacks is destroyed.
  void reset();

 private:
  using Context = boost::context::detail::fcontext_t;
  struct Fiber {
    Stack stack;
    Context context = nullptr;  // where it jumped away
    unsigned owner = 0;
  };

  static void start(boost::context::detail::transfer_t from);
  void prepare(std::size_t fiber);
  void add(unsigned owner);

  void (*entry_)();
  std::vector<Fiber> fibers_;
  std::vector<std::vector<int>> free_;  // by owner
  int current_ = kHost;
  Context host_ = nullptr;
  Context* left_ = nullptr;  // receives the context that a jump leaves
  const void* host_bottom_ = nullptr;
  std::size_t host_nbytes_ = 0;
};

/// The threads of a kernel for ThreadSanitizer, so that nothing orders their accesses but what is
/// stated here. Does nothing in other builds.
class RaceThreads {
 public:
  /// Threads share so many at most.
  static constexpr unsigned kCount = 32;

  RaceThreads() = default;
  ~RaceThreads() { reset(); }
  RaceThreads(const RaceThreads&) = delete;
  RaceThreads& operator=(const RaceThreads&) = delete;

  static bool enabled();

  /// Called by the host before the first of a launch.
  void start(unsigned count);
  unsigned count() const { return count_; }
  /// Whose accesses follow, allocations of the emulation above all.
  void act_as(unsigned thread);
  void act_as_host();
  /// As act_as_host; the accesses in between race with none. Code that is not instrumented needs
  /// it too: memcpy, memcmp and memset are seen wherever they are called.
  void begin_unseen();
  void end_unseen();
  /// As act_as_host, ordered after what the calling thread did.
  void join_host();
  /// The host's accesses come before those of all threads from now on.
  void fork();
  /// The accesses of all threads until now come before the host's.
  void join();
  /// Orders those who released before those who acquire later.
  static void release(void* order);
  static void acquire(void* order);
  void reset();

 private:
  std::vector<void*> threads_;
  void* host_ = nullptr;
  unsigned count_ = 1;
  char order_ = 0;
};

}  // namespace tessera::cuda_emulation
