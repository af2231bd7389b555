// Compiled without ThreadSanitizer (see BUILD): the exchange between lanes orders no memory.
#include "tests/emulator/wgmma.h"

#include "tests/emulator/block.h"

namespace tessera::cuda_emulation {
namespace {

// What a lane passes, and what all are told.
struct Call {
  const RegistersList* named = nullptr;
  const WarpgroupProduct* product = nullptr;
  int num_pending = 0;
  std::string* failure = nullptr;
};

const Call& call_of(void* lane) { return *static_cast<const Call*>(lane); }

template <class T>
Lanes<T> lanes_of(void* const (&lanes)[32], const T* Call::*member) {
  Lanes<T> all;
  for (unsigned lane = 0; lane < 32; ++lane) all[lane] = call_of(lanes[lane]).*member;
  return all;
}

// Tells all lanes what `fn(warpgroups, proxy, warp)` returns.
template <class F>
void tell(void* const (&lanes)[32], F&& fn) {
  Block& block = running_block();
  block.as_host([&] {
    const std::string failure = fn(block.warpgroups(), block.async_proxy(), current_thread / 32);
    if (failure.empty()) return;
    for (void* lane : lanes) *call_of(lane).failure = failure;
  });
}

void fence(void* const (&lanes)[32], std::uint32_t) {
  tell(lanes, [&](Warpgroups& warpgroups, const AsyncProxy&, unsigned warp) {
    return warpgroups.fence(warp, lanes_of(lanes, &Call::named));
  });
}

void issue(void* const (&lanes)[32], std::uint32_t) {
  tell(lanes, [&](Warpgroups& warpgroups, const AsyncProxy& proxy, unsigned warp) {
    return warpgroups.issue(warp, proxy, lanes_of(lanes, &Call::product));
  });
}

void commit(void* const (&)[32], std::uint32_t) {
  running_block().warpgroups().commit(current_thread / 32);
}

void wait(void* const (&lanes)[32], std::uint32_t) {
  tell(lanes, [&](Warpgroups& warpgroups, AsyncProxy& proxy, unsigned warp) {
    return warpgroups.wait(warp, proxy, call_of(lanes[0]).num_pending,
                           lanes_of(lanes, &Call::named));
  });
}

const Collective kFence{"wgmma.fence", true, false, fence};
const Collective kIssue{"wgmma.mma_async", true, false, issue};
const Collective kCommit{"wgmma.commit_group", true, false, commit};
const Collective kWait{"wgmma.wait_group", true, false, wait};

void call(const Collective& collective, Call mine, Place where) {
  std::string failure;
  mine.failure = &failure;
  meet(collective, ~0u, &mine, where);
  if (!failure.empty()) fail_launch(failure.c_str(), where);
}

}  // namespace

void wgmma_fence(RegistersList named, Place where) { call(kFence, {.named = &named}, where); }

void wgmma(const WarpgroupProduct& product, Place where) {
  call(kIssue, {.product = &product}, where);
}

void wgmma_commit(Place where) { call(kCommit, {}, where); }

void wgmma_wait(int num_pending, RegistersList named, Place where) {
  call(kWait, {.named = &named, .num_pending = num_pending}, where);
}

void fence_async_proxy() {
  Block& block = running_block();
  block.as_host([&] { block.async_proxy().fence(current_thread); });
}

std::uint32_t shared_address(const void* shared) {
  return running_block().async_proxy().window_address(shared);
}

void note_operand(const void* shared, std::size_t nbytes, Place where) {
  running_block().note_operand(shared, nbytes, where);
}

}  // namespace tessera::cuda_emulation
