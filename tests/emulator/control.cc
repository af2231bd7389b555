#include "tests/emulator/control.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "tests/emulator/arena.h"
#include "tests/emulator/edges.h"
#include "tests/emulator/internal.h"

namespace tessera::cuda_emulation {
namespace {

[[noreturn]] void refuse(std::string_view what) {
  fprintf(stderr, "cuda_emulation: cannot read %.*s\n", static_cast<int>(what.size()), what.data());
  abort();
}

std::uint64_t parse_number(std::string_view text) {
  std::uint64_t value = 0;
  if (text.empty()) refuse("an empty number");
  for (const char digit : text) {
    if (digit < '0' || digit > '9') refuse(text);
    value = value * 10 + static_cast<std::uint64_t>(digit - '0');
  }
  return value;
}

/// "left<separator>right", at the last separator.
std::pair<std::string_view, std::string_view> cut(std::string_view text, char separator) {
  const std::size_t at = text.rfind(separator);
  if (at == std::string_view::npos) refuse(text);
  return {text.substr(0, at), text.substr(at + 1)};
}

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t at = std::min(text.find(separator), text.size());
    parts.push_back(text.substr(0, at));
    text.remove_prefix(std::min(at + 1, text.size()));
  }
  return parts;
}

/// What CUDA_EMULATION asks for.
struct Environment {
  Settings settings;
  std::string fail_malloc;
  std::string fail_launch;
  std::string remove;
  std::string waits;
};

Environment read_environment() {
  Environment asked;
  const char* variable = getenv("CUDA_EMULATION");
  for (const std::string_view item : split(variable == nullptr ? "" : variable, ',')) {
    const std::string_view name = item.substr(0, item.find('='));
    if (name.size() == item.size()) refuse(item);
    const std::string_view value = item.substr(name.size() + 1);
    if (name == "devices") {
      asked.settings.num_devices = static_cast<int>(parse_number(value));
    } else if (name == "host") {
      asked.settings.host = static_cast<int>(parse_number(value));
    } else if (name == "seed") {
      asked.settings.delay_seed = parse_number(value);
    } else if (name == "permutation") {
      asked.settings.permutation_seed = parse_number(value);
    } else if (name == "memory") {
      asked.settings.memory_nbytes = parse_number(value);
    } else if (name == "pinned") {
      asked.settings.pinned_nbytes = parse_number(value);
    } else if (name == "queue") {
      asked.settings.queue_size = static_cast<int>(parse_number(value));
    } else if (name == "capability") {
      asked.settings.compute_capability = static_cast<int>(parse_number(value));
    } else if (name == "fail_malloc") {
      asked.fail_malloc = value;
    } else if (name == "fail_launch") {
      asked.fail_launch = value;
    } else if (name == "remove") {
      asked.remove = value;
    } else if (name == "waits") {
      asked.waits = value;
    } else {
      refuse(item);
    }
  }
  return asked;
}

void apply(Runtime& machine, const Settings& settings) {
  if (settings.num_devices < 0 || settings.num_devices > kMaxDevices) refuse("number of devices");
  machine.num_devices.store(settings.num_devices);
  machine.host.store(settings.host);
  machine.delay_seed.store(settings.delay_seed);
  machine.permutation_seed.store(settings.permutation_seed);
  machine.memory_nbytes.store(settings.memory_nbytes);
  machine.pinned_nbytes.store(settings.pinned_nbytes);
  machine.queue_size.store(settings.queue_size);
  machine.compute_capability.store(settings.compute_capability);
}

void begin_generation(Runtime& machine, bool counting) {
  Counters& counters = machine.counters;
  for (auto* counter :
       {&counters.launches, &counters.copies, &counters.mallocs, &counters.set_devices,
        &counters.set_attributes, &counters.timed_events, &counters.timed_records,
        &counters.graph_launches, &counters.removed_waits}) {
    counter->store(0);
  }
  {
    const std::lock_guard lock(machine.mutex);
    machine.blocking.clear();
  }
  machine.counting.store(counting);
  machine.generation.fetch_add(1);
}

/// "device@nth", or nothing.
void plan_fault(Runtime& machine, std::string_view text, PlannedFaults Device::*faults) {
  if (text.empty()) return;
  const auto [device, nth] = cut(text, '@');
  const std::uint64_t number = parse_number(device);
  if (number >= kMaxDevices) refuse(text);
  (machine.devices[number].*faults).plan(static_cast<int>(parse_number(nth)), 1);
}

/// Wait::text().
void plan_removal(Runtime& machine, std::string_view text, double delay_ms) {
  const std::vector<std::string_view> parts = split(text, '/');
  if (parts.empty()) refuse("an empty wait");
  auto removal = std::make_unique<Removal>();
  const auto [thread, ordinal] = cut(parts[0], '#');
  removal->thread = thread;
  removal->ordinal = static_cast<int>(parse_number(ordinal));
  removal->delay_ms = delay_ms;
  for (std::size_t i = 1; i < parts.size(); ++i) {
    const auto [stream, task] = cut(parts[i], '@');
    removal->covered.emplace(stream, static_cast<int>(parse_number(task)));
  }
  const std::lock_guard lock(machine.mutex);
  machine.removal.store(removal.get());
  machine.removals.push_back(std::move(removal));
}

/// The state of a new process, of which the handles that exist are no part.
void begin(Runtime& machine, const Environment& asked) {
  apply(machine, asked.settings);
  for (Device& device : machine.devices) {
    device.sticky.store(0);
    device.has_context.store(false);
    for (PlannedFaults* faults : {&device.mallocs, &device.pinned_mallocs, &device.launches}) {
      faults->plan(0, 0);
    }
    const std::lock_guard lock(machine.mutex);
    device.fault.clear();
  }
  plan_fault(machine, asked.fail_malloc, &Device::mallocs);
  plan_fault(machine, asked.fail_launch, &Device::launches);
  machine.removal.store(nullptr);
  if (!asked.remove.empty()) plan_removal(machine, asked.remove, kRemovalDelayMs);
  begin_generation(machine, /*counting=*/!asked.waits.empty());
}

const Environment& environment() {
  static const Environment* const asked = new Environment(read_environment());
  return *asked;
}

void write_waits() {
  static constexpr const char* kKinds[] = {"StreamWaitEvent", "EventSynchronize",
                                           "StreamSynchronize"};
  FILE* file = fopen(environment().waits.c_str(), "w");
  if (file == nullptr) refuse(environment().waits);
  for (const Wait& wait : waits()) {
    fprintf(file, "%s\t%s\t%s\t%s\t%d\t%s\n", wait.text().c_str(),
            kKinds[static_cast<int>(wait.kind)], wait.waiter.c_str(), wait.recorded.c_str(),
            wait.task,
            wait.redundant    ? "redundant"
            : wait.superseded ? "superseded"
                              : "needed");
  }
  fclose(file);
}

}  // namespace

Runtime& runtime() {
  static Runtime* const machine = [] {
    const Unseen unseen;
    auto* made = new Runtime;
    begin(*made, environment());
    report_faults();
    if (!environment().waits.empty()) std::atexit(write_waits);
    return made;
  }();
  return *machine;
}

Settings settings() {
  const Unseen unseen;
  const Runtime& machine = runtime();
  return {.num_devices = machine.num_devices.load(),
          .host = machine.host.load(),
          .delay_seed = machine.delay_seed.load(),
          .permutation_seed = machine.permutation_seed.load(),
          .memory_nbytes = machine.memory_nbytes.load(),
          .pinned_nbytes = machine.pinned_nbytes.load(),
          .queue_size = machine.queue_size.load(),
          .compute_capability = machine.compute_capability.load()};
}

void configure(const Settings& settings) {
  const Unseen unseen;
  apply(runtime(), settings);
}

void reset() {
  const Unseen unseen;
  begin(runtime(), environment());
}

void fail_malloc(int device, int nth, int count) {
  const Unseen unseen;
  runtime().devices.at(static_cast<std::size_t>(device)).mallocs.plan(nth, count);
}

void fail_pinned(int device, int nth, int count) {
  const Unseen unseen;
  runtime().devices.at(static_cast<std::size_t>(device)).pinned_mallocs.plan(nth, count);
}

void fail_launch(int device, int nth) {
  const Unseen unseen;
  runtime().devices.at(static_cast<std::size_t>(device)).launches.plan(nth, 1);
}

Live live() {
  const Unseen unseen;
  const Counters& counters = runtime().counters;
  return {.allocations = counters.allocations.load(),
          .allocated_nbytes = counters.allocated_nbytes.load(),
          .pinned = counters.pinned.load(),
          .pinned_nbytes = counters.pinned_nbytes.load(),
          .streams = counters.streams.load(),
          .events = counters.events.load(),
          .graphs = counters.graphs.load()};
}

Calls calls() {
  const Unseen unseen;
  const Counters& counters = runtime().counters;
  std::int64_t blocking = 0;
  for (const auto& [thread, count] : blocking_calls()) blocking += count;
  return {.launches = counters.launches.load(),
          .copies = counters.copies.load(),
          .mallocs = counters.mallocs.load(),
          .blocking = blocking,
          .set_devices = counters.set_devices.load(),
          .set_attributes = counters.set_attributes.load(),
          .timed_events = counters.timed_events.load(),
          .timed_records = counters.timed_records.load(),
          .graph_launches = counters.graph_launches.load(),
          .removed_waits = counters.removed_waits.load()};
}

std::map<std::string, std::int64_t> blocking_calls() {
  const Unseen unseen;
  const std::lock_guard lock(runtime().mutex);
  return runtime().blocking;
}

std::vector<int> contexts() {
  const Unseen unseen;
  std::vector<int> devices;
  for (int i = 0; i < kMaxDevices; ++i)
    if (runtime().devices[static_cast<std::size_t>(i)].has_context.load()) devices.push_back(i);
  return devices;
}

void label_thread(const std::string& label) {
  const Unseen unseen;
  if (host_thread().label != label) host_thread().set_label(label);
}

void start_counting() {
  const Unseen unseen;
  runtime().removal.store(nullptr);
  begin_generation(runtime(), /*counting=*/true);
}

void remove_wait(const std::string& text, double delay_ms) {
  const Unseen unseen;
  plan_removal(runtime(), text, delay_ms);
  begin_generation(runtime(), /*counting=*/false);
}

void remove_wait(const Wait& wait, double delay_ms) { remove_wait(wait.text(), delay_ms); }

std::string fault(int device) {
  const Unseen unseen;
  Runtime& machine = runtime();
  const std::lock_guard lock(machine.mutex);
  return machine.devices.at(static_cast<std::size_t>(device)).fault;
}

}  // namespace tessera::cuda_emulation
