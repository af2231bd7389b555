// Queues and their workers.
#include <time.h>

#include <chrono>
#include <exception>
#include <thread>

#include "tests/emulator/capture.h"
#include "tests/emulator/edges.h"
#include "tests/emulator/internal.h"
#include "tests/emulator/runtime.h"

namespace tessera::cuda_emulation {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void sleep_ns(std::int64_t ns) {
  const timespec duration{.tv_sec = ns / 1'000'000'000, .tv_nsec = ns % 1'000'000'000};
  nanosleep(&duration, nullptr);
}

/// Until the waiter has overtaken, or it seems that it cannot; then for the delay asked for.
void hold(const Removal& removal) {
  const std::int64_t delay_ns = static_cast<std::int64_t>(removal.delay_ms * 1e6);
  const std::int64_t end = now_ns() + 10 * delay_ns;
  while (!removal.overtaken.load() && now_ns() < end) sleep_ns(100'000);
  sleep_ns(delay_ns);
}

}  // namespace

std::shared_ptr<Stream> Stream::start(int device, std::string label, int priority,
                                      bool is_accounted) {
  static std::atomic<int> num_streams{0};
  const int uid = num_streams.fetch_add(1, std::memory_order_relaxed);
  std::shared_ptr<Stream> stream(new Stream(uid, device, std::move(label), priority, is_accounted));
  std::thread([stream] {
    const Unseen unseen;
    stream->work();
  }).detach();
  return stream;
}

std::shared_ptr<Capture> Stream::capture() const {
  const std::lock_guard lock(mutex_);
  return capture_;
}

void Stream::set_capture(std::shared_ptr<Capture> capture) {
  const std::lock_guard lock(mutex_);
  capture_ = std::move(capture);
}

void Stream::push_work(std::string name, std::function<void()> fn) {
  if (const std::shared_ptr<Capture> capturing = capture()) {
    return capturing->add_work(*this, std::move(name), std::move(fn));
  }
  auto task = std::make_unique<Task>(Task{.name = std::move(name), .run = std::move(fn)});
  push(std::move(task));
}

void Stream::push_callback(std::function<void()> fn) {
  push(std::make_unique<Task>(Task{.name = "callback", .run = std::move(fn), .runs_always = true}));
}

void Stream::push(std::unique_ptr<Task> task) {
  release_edge(task.get());
  const Unseen unseen;
  Runtime& machine = runtime();
  std::unique_lock lock(mutex_);
  const auto has_room = [&] {
    return static_cast<int>(tasks_.size()) < machine.queue_size.load(std::memory_order_relaxed);
  };
  if (task->kind != Task::Kind::kQuit && !has_room()) {
    lock.unlock();
    const std::lock_guard context(machine.devices[device].context_lock);
    lock.lock();
    popped_.wait(lock, has_room);
  }
  if (const int generation = machine.generation.load(); generation_ != generation) {
    generation_ = generation;
    num_work_ = 0;
  }
  task->number = ++num_pushed_;
  if (task->kind == Task::Kind::kWork) {
    ++num_work_;
    if (Removal* removal = machine.removal.load()) {
      if (removal->covered.count({label, num_work_}) > 0) task->held_by = removal;
    }
    task->overtakes = std::exchange(overtakes_, nullptr);
    if (is_accounted) account_work(*this, num_work_);
  } else if (task->kind == Task::Kind::kRecord) {
    if (is_accounted) account_record(*this, *task->record, num_work_);
  }
  if (ended_) {  // destroyed while another thread waits for the device: all of it has run
    if (task->kind == Task::Kind::kRecord) {
      task->record->done.store(1);
      task->record->done.notify_all();
    }
    return;
  }
  tasks_.push_back(std::move(task));
  filled_.notify_one();
}

std::shared_ptr<Record> Stream::push_record() {
  auto record = std::make_shared<Record>();
  record->device = device;
  auto task = std::make_unique<Task>(Task{.kind = Task::Kind::kRecord, .record = record});
  push(std::move(task));
  return record;
}

void Stream::push_wait(std::shared_ptr<Record> record) {
  auto task = std::make_unique<Task>(Task{.kind = Task::Kind::kWait, .record = std::move(record)});
  push(std::move(task));
}

void Stream::quit() { push(std::make_unique<Task>(Task{.kind = Task::Kind::kQuit})); }

void Stream::overtake(Removal& removal) {
  const std::lock_guard lock(mutex_);
  overtakes_ = &removal;
}

bool Stream::idle() {
  {
    const std::lock_guard lock(mutex_);
    if (busy_ || !tasks_.empty()) return false;
  }
  acquire_edge(&done_edge_);
  return true;
}

void Stream::work() {
  bool quitting = false;
  for (;;) {
    std::unique_ptr<Task> task;
    {
      std::unique_lock lock(mutex_);
      busy_ = false;
      if (quitting && tasks_.empty()) {
        ended_ = true;
        return;
      }
      filled_.wait(lock, [&] { return !tasks_.empty(); });
      // Whoever waited for a record finds the stream idle.
      busy_ = tasks_.front()->kind != Task::Kind::kRecord;
      task = std::move(tasks_.front());
      tasks_.pop_front();
      popped_.notify_one();
    }
    acquire_edge(task.get());
    quitting = quitting || task->kind == Task::Kind::kQuit;
    run(*task);
    release_edge(&done_edge_);
  }
}

void Stream::run(Task& task) {
  Runtime& machine = runtime();
  switch (task.kind) {
    case Task::Kind::kRecord:
      release_edge(task.record.get());
      task.record->time_ns = now_ns();
      task.record->done.store(1);
      task.record->done.notify_all();
      return;
    case Task::Kind::kWait:
      task.record->block();
      acquire_edge(task.record.get());
      return;
    case Task::Kind::kQuit:
      return;
    case Task::Kind::kWork:
      break;
  }
  if (task.held_by != nullptr) hold(*task.held_by);
  if (const std::uint64_t seed = machine.delay_seed.load(std::memory_order_relaxed)) {
    const std::uint64_t random = mix(mix(seed, std::hash<std::string>()(label)), task.number);
    if (random % 2 == 0) sleep_ns(static_cast<std::int64_t>(random / 2 % 300'000));
  }
  current_work() = {.task = task.name.c_str(), .stream = label.c_str()};
  if (task.runs_always || machine.devices[device].sticky.load(std::memory_order_relaxed) == 0) {
    try {
      const Seen seen;
      task.run();
    } catch (const std::exception& error) {
      break_device(device, cudaErrorLaunchFailure, task.name + ": " + error.what());
    }
  }
  {
    const Seen seen;  // what the task owned is destroyed in stream order
    task.run = nullptr;
  }
  if (task.overtakes != nullptr) task.overtakes->overtaken.store(true);
  current_work() = {};
}

std::shared_ptr<Stream> find_stream(cudaStream_t handle) {
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  const auto found = machine.streams.find(handle);
  if (found != machine.streams.end()) return found->second;
  failed(cudaErrorInvalidResourceHandle);
  return nullptr;
}

std::shared_ptr<Stream> null_stream(int device) {
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  std::shared_ptr<Stream>& stream = machine.devices[device].null_stream;
  if (!stream) stream = Stream::start(device, "null" + std::to_string(device), 0);
  return stream;
}

std::vector<std::shared_ptr<Stream>> streams_of(int device) {
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  std::vector<std::shared_ptr<Stream>> streams;
  for (const auto& [handle, stream] : machine.streams) {
    if (stream->device == device) streams.push_back(stream);
  }
  if (machine.devices[device].null_stream) streams.push_back(machine.devices[device].null_stream);
  return streams;
}

void block_on(Stream& stream) {
  const std::shared_ptr<Record> record = stream.push_record();
  record->block();
  acquire_edge(record.get());
  account_reached(*record);
}

int device_of(cudaStream_t stream) {
  const Unseen unseen;
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  const auto found = machine.streams.find(stream);
  return found == machine.streams.end() ? -1 : found->second->device;
}

}  // namespace tessera::cuda_emulation
