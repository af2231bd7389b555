// What each thread of the program is to the emulation.
#include <mutex>
#include <string>

#include "tests/emulator/edges.h"
#include "tests/emulator/internal.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {

HostThread& host_thread() {
  thread_local HostThread thread;
  return thread;
}

HostThread& named_host_thread() {
  HostThread& thread = host_thread();
  Runtime& machine = runtime();
  if (thread.label.empty()) {
    int number = 0;
    {
      const std::lock_guard lock(machine.mutex);
      number = ++machine.num_unlabelled;
    }
    thread.set_label("thread" + std::to_string(number));
  }
  if (const int generation = machine.generation.load(); thread.generation != generation) {
    thread.generation = generation;
    thread.num_waits = 0;
    thread.num_streams = 0;
    thread.clock.clear();
  }
  return thread;
}

void count_blocking() {
  const std::string& label = host_thread().label;
  const std::lock_guard lock(runtime().mutex);
  ++runtime().blocking[label];
}

void HostThread::set_label(const std::string& wanted) {
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  machine.labels.erase(label);
  label = wanted;
  for (int copy = 2; !machine.labels.insert(label).second; ++copy) {
    label = wanted + "-" + std::to_string(copy);
  }
  generation = -1;
}

HostThread::~HostThread() {
  const Unseen unseen;
  if (label.empty()) return;
  const std::lock_guard lock(runtime().mutex);
  runtime().labels.erase(label);
}

LibraryThread::LibraryThread(int device)
    : device_(host_thread().device), has_context_(host_thread().has_context) {
  host_thread().device = device;
}

LibraryThread::~LibraryThread() {
  host_thread().device = device_;
  host_thread().has_context = has_context_;
}

Work& current_work() {
  thread_local Work work;
  return work;
}

std::uint64_t mix(std::uint64_t seed, std::uint64_t value) {
  // splitmix64
  std::uint64_t z = (seed ^ (value * 0xD6E8FEB86659FD93)) + 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

}  // namespace tessera::cuda_emulation
