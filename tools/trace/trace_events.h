// Events of the Chrome trace format (JSON array) as text, and the file they make. Perfetto opens
// it.
//
// https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

namespace tessera::tools {

/// Appends the JSON literal of a text: json_literal(), and fast for the texts that are usual.
void append_literal(std::string& text, std::string_view value);

/// Where an event stands: a process and one of its threads, as the viewer calls them.
struct TraceThread {
  int process = 0;
  int thread = 0;
};

/// Gathers events. Times are nanoseconds from the start of the trace. Names may be any text; `args`
/// is a JSON object.
class TraceEvents {
 public:
  /// `order`: threads of a process are shown by it, processes too.
  void name_process(int process, std::string_view name, int order);
  void name_thread(const TraceThread& at, std::string_view name, int order);
  void slice(const TraceThread& at, std::string_view name, std::string_view category,
             std::int64_t begin_ns, std::int64_t end_ns, std::string_view args);
  /// From here on the counter of the process has this value.
  void counter(int process, std::string_view name, std::int64_t ns, std::int64_t nbytes);
  /// An arrow between two slices, from a moment inside the one to a moment inside the other. `id`:
  /// no other arrow's in the file.
  void arrow(std::string_view name, std::uint64_t id, const TraceThread& from, std::int64_t from_ns,
             const TraceThread& to, std::int64_t to_ns);

  bool empty() const { return text_.empty(); }
  /// What was gathered, and begins again.
  std::string take() { return std::exchange(text_, {}); }

 private:
  void begin(char phase, const TraceThread& at, std::string_view name);

  std::string text_;
};

/// Puts events of several threads together. Thread-safe.
class TraceWriter {
 public:
  /// Takes what comes next in the file: whole events. Called by one thread at a time.
  using Sink = std::function<void(std::string text)>;
  explicit TraceWriter(Sink sink) : sink_(std::move(sink)) {}

  void write(TraceEvents& events);
  /// The end of the file. Call once. A file without it, as that of a run which was killed, can be
  /// opened all the same.
  void close();

 private:
  std::mutex mutex_;
  Sink sink_;
  bool has_begun_ = false;
};

}  // namespace tessera::tools
