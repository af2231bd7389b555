// The account of waits: vector clocks over streams and host threads (see control.h).
#include <algorithm>
#include <map>
#include <mutex>
#include <tuple>

#include "tests/emulator/edges.h"
#include "tests/emulator/internal.h"

namespace tessera::cuda_emulation {
namespace {

struct Account {
  std::mutex mutex;
  std::vector<Wait> waits;
  int generation = -1;
  std::vector<std::string> streams;  ///< labels, by uid

  /// A wait that a later one of its stream may supersede.
  struct Open {
    std::size_t wait;  ///< index into waits
    Clock clock;       ///< of what it waits for
  };
  std::map<std::string, std::vector<Open>> open;  ///< by waiting stream
};

Account& account() {
  static Account* const instance = new Account;
  return *instance;
}

int task_of(const Clock& clock, std::size_t uid) { return uid < clock.size() ? clock[uid] : 0; }

void merge(Clock& into, const Clock& from) {
  if (into.size() < from.size()) into.resize(from.size(), 0);
  for (std::size_t uid = 0; uid < from.size(); ++uid) into[uid] = std::max(into[uid], from[uid]);
}

/// Sets the clocks of both to this generation, the host's knowledge passed on to the stream.
void enter(Stream& stream, HostThread& thread, int generation) {
  if (stream.clock_generation != generation) {
    stream.clock_generation = generation;
    stream.clock.clear();
  }
  merge(stream.clock, thread.clock);
}

/// The open waits of `stream` that one for `clock` supersedes; it is open itself from now on.
void supersede(Account& book, const std::string& stream, const Clock& clock) {
  std::vector<Account::Open>& open = book.open[stream];
  std::erase_if(open, [&](const Account::Open& earlier) {
    for (std::size_t uid = 0; uid < earlier.clock.size(); ++uid) {
      if (task_of(clock, uid) < earlier.clock[uid]) return false;
    }
    book.waits[earlier.wait].superseded = true;
    return true;
  });
  open.push_back({book.waits.size(), clock});
}

/// Under the account's lock; false: nothing to do.
bool begin(Account& book) {
  Runtime& machine = runtime();
  if (!machine.counting.load()) return false;
  if (const int generation = machine.generation.load(); book.generation != generation) {
    book.generation = generation;
    book.waits.clear();
    book.open.clear();
  }
  return true;
}

}  // namespace

void account_work(Stream& stream, int task) {
  if (!runtime().counting.load(std::memory_order_relaxed)) return;
  Account& book = account();
  HostThread& thread = named_host_thread();
  const std::lock_guard lock(book.mutex);
  if (!begin(book)) return;
  enter(stream, thread, book.generation);
  book.open.erase(stream.label);
  const auto uid = static_cast<std::size_t>(stream.uid);
  if (stream.clock.size() <= uid) stream.clock.resize(uid + 1, 0);
  stream.clock[uid] = task;
  if (book.streams.size() <= uid) book.streams.resize(uid + 1);
  book.streams[uid] = stream.label;
}

void account_record(Stream& stream, Record& record, int task) {
  if (!runtime().counting.load(std::memory_order_relaxed)) return;
  Account& book = account();
  HostThread& thread = named_host_thread();
  const std::lock_guard lock(book.mutex);
  if (!begin(book)) return;
  enter(stream, thread, book.generation);
  record.stream = stream.label;
  record.task = task;
  record.generation = book.generation;
  record.clock = stream.clock;
}

void account_reached(const Record& record) {
  if (!runtime().counting.load(std::memory_order_relaxed)) return;
  Account& book = account();
  HostThread& thread = named_host_thread();
  const std::lock_guard lock(book.mutex);
  if (begin(book) && record.generation == book.generation) merge(thread.clock, record.clock);
}

bool account_wait(WaitKind kind, Stream* stream, const Record* record) {
  Runtime& machine = runtime();
  HostThread& thread = named_host_thread();
  const int ordinal = ++thread.num_waits;
  if (Removal* removal = machine.removal.load();
      removal != nullptr && removal->thread == thread.label && removal->ordinal == ordinal) {
    machine.counters.removed_waits.fetch_add(1, std::memory_order_relaxed);
    if (stream != nullptr) {
      stream->overtake(*removal);
    } else {
      removal->overtaken.store(true);
    }
    return true;
  }
  if (!machine.counting.load(std::memory_order_relaxed)) return false;
  Account& book = account();
  const std::lock_guard lock(book.mutex);
  if (!begin(book)) return false;
  Wait wait{.thread = thread.label, .ordinal = ordinal, .kind = kind};
  wait.waiter = stream == nullptr ? thread.label : stream->label;
  if (stream != nullptr) enter(*stream, thread, book.generation);
  Clock& clock = stream == nullptr ? thread.clock : stream->clock;
  wait.redundant = record == nullptr;
  if (record != nullptr && record->generation == book.generation) {
    wait.recorded = record->stream;
    wait.task = record->task;
    for (std::size_t uid = 0; uid < record->clock.size(); ++uid) {
      const int reached = task_of(clock, uid);
      if (record->clock[uid] > reached) {
        wait.covered.push_back({.stream = book.streams[uid], .task = reached + 1});
      }
    }
    wait.redundant = wait.covered.empty();
    book.open.erase(record->stream);
    if (stream != nullptr) supersede(book, stream->label, record->clock);
    merge(clock, record->clock);
  }
  book.waits.push_back(std::move(wait));
  return false;
}

std::vector<Wait> waits() {
  const Unseen unseen;
  Account& book = account();
  const std::lock_guard lock(book.mutex);
  if (!begin(book)) return {};
  std::vector<Wait> sorted = book.waits;
  std::sort(sorted.begin(), sorted.end(), [](const Wait& a, const Wait& b) {
    return std::tie(a.thread, a.ordinal) < std::tie(b.thread, b.ordinal);
  });
  return sorted;
}

std::string Wait::text() const {
  std::string text = thread + "#" + std::to_string(ordinal);
  for (const Covered& work : covered) text += "/" + work.stream + "@" + std::to_string(work.task);
  return text;
}

}  // namespace tessera::cuda_emulation
