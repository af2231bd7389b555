// Compiled without ThreadSanitizer (see BUILD), which takes one stack for one thread.
#include "tests/emulator/fibers.h"

#include <sys/mman.h>

#include <new>

// Present in sanitized programs only.
extern "C" {
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_destroy_fiber(void* fiber);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* address);
[[gnu::weak]] void __tsan_release(void* address);
// NOLINTBEGIN(readability-identifier-naming)
[[gnu::weak]] void AnnotateIgnoreReadsBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreReadsEnd(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreWritesBegin(const char* file, int line);
[[gnu::weak]] void AnnotateIgnoreWritesEnd(const char* file, int line);
// NOLINTEND(readability-identifier-naming)
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack, const void* bottom,
                                                  std::size_t nbytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack, const void** bottom,
                                                   std::size_t* nbytes);
[[gnu::weak]] void __asan_unpoison_memory_region(const volatile void* address, std::size_t nbytes);
}

namespace tessera::cuda_emulation {
namespace {

namespace context = boost::context::detail;

constexpr std::size_t kGuardNbytes = 4 << 10;
constexpr unsigned kOrdersNothing = 1;  // __tsan_switch_to_fiber_no_sync

// The pool that is starting a fiber.
constinit thread_local FiberPool* starting = nullptr;

}  // namespace

Stack::Stack() {
  void* bytes = mmap(nullptr, kGuardNbytes + kNbytes, PROT_READ | PROT_WRITE,
                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (bytes == MAP_FAILED) throw std::bad_alloc();
  bytes_ = static_cast<std::byte*>(bytes);
  mprotect(bytes_, kGuardNbytes, PROT_NONE);
}

Stack::~Stack() {
  if (bytes_ != nullptr) munmap(bytes_, kGuardNbytes + kNbytes);
}

std::byte* Stack::bottom() const { return bytes_ + kGuardNbytes; }

void FiberPool::prepare(std::size_t fiber) {
  // Stacks that begin at different places of a page do not compete for the same cache lines.
  const std::size_t offset = fiber % 61 * 192;
  fibers_[fiber].context = context::make_fcontext(fibers_[fiber].stack.top() - offset,
                                                  Stack::kNbytes - offset, &FiberPool::start);
}

void FiberPool::add(unsigned owner) {
  if (owner >= free_.size()) free_.resize(owner + 1);
  fibers_.push_back({.stack = {}, .context = nullptr, .owner = owner});
  prepare(fibers_.size() - 1);
  free_[owner].push_back(static_cast<int>(fibers_.size() - 1));
  free_[owner].reserve(fibers_.size());
}

void FiberPool::jump(int fiber) {
  Fiber* const target = fiber == kHost ? nullptr : &fibers_[static_cast<std::size_t>(fiber)];
  left_ = current_ == kHost ? &host_ : &fibers_[static_cast<std::size_t>(current_)].context;
  current_ = fiber;
  starting = this;
  void* fake_stack = nullptr;
  if (__sanitizer_start_switch_fiber != nullptr) {
    __sanitizer_start_switch_fiber(&fake_stack,
                                   target != nullptr ? target->stack.bottom() : host_bottom_,
                                   target != nullptr ? Stack::kNbytes : host_nbytes_);
  }
  const context::transfer_t from =
      context::jump_fcontext(target != nullptr ? target->context : host_, nullptr);
  *left_ = from.fctx;
  if (__sanitizer_finish_switch_fiber != nullptr) {
    __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
  }
}

void FiberPool::start(context::transfer_t from) {
  FiberPool& pool = *starting;
  *pool.left_ = from.fctx;
  if (__sanitizer_finish_switch_fiber != nullptr) {
    const void* bottom = nullptr;
    std::size_t nbytes = 0;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &nbytes);
    if (pool.left_ == &pool.host_) {
      pool.host_bottom_ = bottom;
      pool.host_nbytes_ = nbytes;
    }
  }
  pool.entry_();
}

void FiberPool::reset() {
  for (std::vector<int>& free : free_) free.clear();
  for (std::size_t i = 0; i < fibers_.size(); ++i) {
    prepare(i);
    if (__asan_unpoison_memory_region != nullptr) {
      __asan_unpoison_memory_region(fibers_[i].stack.bottom(), Stack::kNbytes);
    }
    free_[fibers_[i].owner].push_back(static_cast<int>(i));
  }
}

bool RaceThreads::enabled() { return __tsan_create_fiber != nullptr; }

void RaceThreads::start(unsigned count) {
  if (!enabled()) return;
  host_ = __tsan_get_current_fiber();
  count_ = count;
  while (threads_.size() < count) threads_.push_back(__tsan_create_fiber(0));
}

void RaceThreads::act_as(unsigned thread) {
  if (enabled()) __tsan_switch_to_fiber(threads_[thread], kOrdersNothing);
}

void RaceThreads::act_as_host() {
  if (enabled()) __tsan_switch_to_fiber(host_, kOrdersNothing);
}

void RaceThreads::join_host() {
  release(&order_);
  act_as_host();
  acquire(&order_);
}

void RaceThreads::begin_unseen() {
  act_as_host();
  if (!enabled()) return;
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}

void RaceThreads::end_unseen() {
  if (!enabled()) return;
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
}

void RaceThreads::fork() {
  release(&order_);
  for (unsigned i = 0; enabled() && i < count_; ++i) {
    act_as(i);
    acquire(&order_);
  }
  act_as_host();
}

void RaceThreads::join() {
  for (unsigned i = 0; enabled() && i < count_; ++i) {
    act_as(i);
    release(&order_);
  }
  act_as_host();
  acquire(&order_);
}

void RaceThreads::release(void* order) {
  if (enabled()) __tsan_release(order);
}

void RaceThreads::acquire(void* order) {
  if (enabled()) __tsan_acquire(order);
}

void RaceThreads::reset() {
  for (void* thread : threads_) __tsan_destroy_fiber(thread);
  threads_.clear();
}

}  // namespace tessera::cuda_emulation
