#include "tests/emulator/arena.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace tessera::cuda_emulation {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kAlignment = 256;  // all that cudaMalloc promises
constexpr int kPoison = 0xFF;

std::size_t round_up(std::size_t value, std::size_t unit) {
  return (value + unit - 1) / unit * unit;
}

/// Address space only. The system call itself, so that a sanitizer does not shadow all of it.
std::uintptr_t reserve(std::size_t nbytes) {
  const long address = syscall(SYS_mmap, nullptr, nbytes, PROT_NONE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0L);
  if (address == -1) {
    perror("cuda_emulation: mmap");
    abort();
  }
  return static_cast<std::uintptr_t>(address);
}

void map(std::uintptr_t begin, std::size_t nbytes, int protection) {
  void* mapped = mmap(reinterpret_cast<void*>(begin), nbytes, protection,
                      MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) {
    perror("cuda_emulation: mmap");
    abort();
  }
}

struct sigaction previous_action;

void print_allocation(const char* what, std::uintptr_t address, const Arena& arena) {
  char place[160] = "";
  Allocation nearest;
  bool live = false;
  if (arena.describe(address, nearest, live)) {
    snprintf(place, sizeof place, ": byte %lld of %sallocation %d (%zu bytes, device %d)",
             static_cast<long long>(address - nearest.address), live ? "" : "freed ",
             nearest.number, nearest.nbytes, nearest.device);
  }
  char who[200] = "the host";
  if (current_work().task != nullptr) {
    snprintf(who, sizeof who, "%.120s on stream %.60s", current_work().task, current_work().stream);
  }
  char text[512];
  const int length =
      snprintf(text, sizeof text, "cuda_emulation: %s touched %s%s\n", who, what, place);
  if (write(STDERR_FILENO, text, static_cast<std::size_t>(length)) < 0) abort();
}

/// Names the fault if it is ours, then lets it happen again under the previous handler.
void on_fault(int signal, siginfo_t* info, void*) {
  const auto address = reinterpret_cast<std::uintptr_t>(info->si_addr);
  if (device_arena().contains(address)) {
    print_allocation(current_work().task != nullptr
                         ? "device memory by an address that was no kernel argument"
                         : "device memory",
                     address, device_arena());
  } else if (device_arena().stores(address)) {
    print_allocation("device memory that is not allocated",
                     address - device_arena().storage_offset(), device_arena());
  } else if (pinned_arena().contains(address)) {
    print_allocation("page-locked memory that is not allocated", address, pinned_arena());
  }
  sigaction(signal, &previous_action, nullptr);
}

/// The emulation never writes around an allocation; whoever did is past its bounds.
void require_untouched(const Allocation& allocation, std::uintptr_t storage_offset) {
  const auto* page = reinterpret_cast<const unsigned char*>(allocation.begin + storage_offset);
  const std::size_t first = allocation.address - allocation.begin;
  for (std::size_t i = 0; i < allocation.mapped_nbytes; ++i) {
    if (i == first) i += allocation.nbytes;
    if (i < allocation.mapped_nbytes && page[i] != kPoison) {
      fprintf(
          stderr,
          "cuda_emulation: byte %lld of allocation %d (%zu bytes, device %d) was written, out of "
          "bounds\n",
          static_cast<long long>(i - first), allocation.number, allocation.nbytes,
          allocation.device);
      abort();
    }
  }
}

}  // namespace

Arena::Arena(bool hidden)
    : base_(reserve(kNumBytes)), storage_(hidden ? reserve(kNumBytes) : base_) {}

std::uintptr_t Arena::place(int device, std::size_t nbytes) {
  const std::uintptr_t first = base_ + static_cast<std::size_t>(device) * kStripe + kPage;
  const std::uintptr_t end = first - kPage + kStripe;
  std::uintptr_t begin = std::max(first, next_[static_cast<std::size_t>(device)]);
  if (begin + nbytes > end) {  // exhausted: the first gap
    begin = first;
    for (auto at = live_.lower_bound(first); at != live_.end() && at->first < end; ++at) {
      if (at->first >= begin + nbytes + kPage) break;
      begin = at->second.begin + at->second.mapped_nbytes + kPage;
    }
    if (begin + nbytes > end) return 0;
  }
  next_[static_cast<std::size_t>(device)] = begin + nbytes + kPage;
  return begin;
}

std::optional<Allocation> Arena::allocate(int device, std::size_t nbytes) {
  const std::lock_guard lock(mutex_);
  Allocation made{.nbytes = nbytes, .device = device, .number = ++num_allocated_};
  if (nbytes > kStripe) return std::nullopt;
  made.mapped_nbytes = round_up(nbytes, kPage);
  made.begin = place(device, made.mapped_nbytes);
  if (made.begin == 0) return std::nullopt;
  made.address =
      made.begin + made.mapped_nbytes - round_up(nbytes, kAlignment);  // ends at the guard
  map(made.begin + storage_offset(), made.mapped_nbytes, PROT_READ | PROT_WRITE);
  std::memset(reinterpret_cast<void*>(made.begin + storage_offset()), kPoison, made.mapped_nbytes);
  freed_.erase(freed_.lower_bound(made.begin), freed_.lower_bound(made.begin + made.mapped_nbytes));
  live_.emplace(made.begin, made);
  return made;
}

std::optional<Allocation> Arena::starting_at(std::uintptr_t address) const {
  const std::optional<Allocation> found = containing(address, 0);
  return found && found->address == address ? found : std::nullopt;
}

std::optional<Allocation> Arena::free(std::uintptr_t address) {
  const std::optional<Allocation> found = starting_at(address);
  if (!found) return std::nullopt;
  const std::lock_guard lock(mutex_);
  require_untouched(*found, storage_offset());
  map(found->begin + storage_offset(), found->mapped_nbytes, PROT_NONE);
  live_.erase(found->begin);
  freed_.emplace(found->begin, *found);
  return found;
}

std::optional<Allocation> Arena::containing(std::uintptr_t address, std::size_t nbytes) const {
  const std::lock_guard lock(mutex_);
  auto above = live_.upper_bound(address);
  if (above == live_.begin()) return std::nullopt;
  const Allocation& found = std::prev(above)->second;
  const bool inside = address >= found.address && address - found.address <= found.nbytes &&
                      nbytes <= found.nbytes - (address - found.address);
  return inside ? std::optional(found) : std::nullopt;
}

bool Arena::describe(std::uintptr_t address, Allocation& nearest, bool& live) const {
  if (!mutex_.try_lock()) return false;
  bool known = false;
  for (const auto* allocations : {&freed_, &live_}) {
    const auto above = allocations->upper_bound(address);
    if (above == allocations->begin()) continue;
    const Allocation& candidate = std::prev(above)->second;
    if (known && candidate.begin < nearest.begin) continue;
    known = true;
    nearest = candidate;
    live = allocations == &live_;
  }
  mutex_.unlock();
  return known;
}

Arena& device_arena() {
  static Arena* const arena = new Arena(/*hidden=*/true);
  return *arena;
}

Arena& pinned_arena() {
  static Arena* const arena = new Arena(/*hidden=*/false);
  return *arena;
}

void report_faults() {
  device_arena();
  pinned_arena();
  struct sigaction action = {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &previous_action);
}

}  // namespace tessera::cuda_emulation
