#include "tools/trace/trace_events.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>

#include "engine/io/json.h"

namespace tessera::tools {
namespace {

// Microseconds to the nanosecond, which is what the format counts in.
struct Micros {
  std::int64_t ns;
};

void append(std::string& text, const Micros& time) {
  const std::int64_t us = time.ns / 1000, rest = time.ns % 1000;
  // Before the start: -0.5 has no sign in either part.
  if (time.ns < 0) text += '-';
  fmt::format_to(std::back_inserter(text), "{}.{:03}", us < 0 ? -us : us, rest < 0 ? -rest : rest);
}

bool is_plain(std::string_view value) {
  return std::ranges::all_of(
      value, [](char c) { return c >= ' ' && c < '\x7F' && c != '"' && c != '\\'; });
}

}  // namespace

void append_literal(std::string& text, std::string_view value) {
  if (!is_plain(value)) {
    text += engine::json_literal(value);
    return;
  }
  text += '"';
  text += value;
  text += '"';
}

// {"ph":"X","name":"linear.forward","pid":1,"tid":2
void TraceEvents::begin(char phase, const TraceThread& at, std::string_view name) {
  if (!text_.empty()) text_ += ",\n";
  text_ += R"({"ph":")";
  text_ += phase;
  text_ += R"(","name":)";
  append_literal(text_, name);
  fmt::format_to(std::back_inserter(text_), R"(,"pid":{},"tid":{})", at.process, at.thread);
}

void TraceEvents::name_process(int process, std::string_view name, int order) {
  begin('M', {process, 0}, "process_name");
  text_ += fmt::format(R"(,"args":{{"name":{}}}}})", engine::json_literal(name));
  begin('M', {process, 0}, "process_sort_index");
  text_ += fmt::format(R"(,"args":{{"sort_index":{}}}}})", order);
}

void TraceEvents::name_thread(const TraceThread& at, std::string_view name, int order) {
  begin('M', at, "thread_name");
  text_ += fmt::format(R"(,"args":{{"name":{}}}}})", engine::json_literal(name));
  begin('M', at, "thread_sort_index");
  text_ += fmt::format(R"(,"args":{{"sort_index":{}}}}})", order);
}

void TraceEvents::slice(const TraceThread& at, std::string_view name, std::string_view category,
                        std::int64_t begin_ns, std::int64_t end_ns, std::string_view args) {
  begin('X', at, name);
  text_ += R"(,"cat":)";
  append_literal(text_, category);
  text_ += R"(,"ts":)";
  append(text_, Micros{begin_ns});
  text_ += R"(,"dur":)";
  append(text_, Micros{end_ns - begin_ns});
  text_ += R"(,"args":)";
  text_ += args;
  text_ += '}';
}

void TraceEvents::counter(int process, std::string_view name, std::int64_t ns,
                          std::int64_t nbytes) {
  begin('C', {process, 0}, name);
  text_ += R"(,"ts":)";
  append(text_, Micros{ns});
  fmt::format_to(std::back_inserter(text_), R"(,"args":{{"bytes":{}}}}})", nbytes);
}

void TraceEvents::arrow(std::string_view name, std::uint64_t id, const TraceThread& from,
                        std::int64_t from_ns, const TraceThread& to, std::int64_t to_ns) {
  begin('s', from, name);
  text_ += fmt::format(R"(,"cat":"flow","id":{},"ts":)", id);
  append(text_, Micros{from_ns});
  text_ += '}';
  begin('f', to, name);
  text_ += fmt::format(R"(,"cat":"flow","bp":"e","id":{},"ts":)", id);
  append(text_, Micros{to_ns});
  text_ += '}';
}

void TraceWriter::write(TraceEvents& events) {
  if (events.empty()) return;
  const std::string text = events.take();
  const std::lock_guard lock(mutex_);
  sink_((std::exchange(has_begun_, true) ? ",\n" : "[\n") + text);
}

void TraceWriter::close() {
  const std::lock_guard lock(mutex_);
  sink_(std::exchange(has_begun_, true) ? "\n]\n" : "[]\n");
}

}  // namespace tessera::tools
