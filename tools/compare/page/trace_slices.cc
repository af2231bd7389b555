#include "tools/compare/page/trace_slices.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;
using nlohmann::json;
using nlohmann::ordered_json;

constexpr std::int64_t kMaxTraceNbytes = std::int64_t{1} << 28;
constexpr std::size_t kMaxNameNbytes = 60;
constexpr std::string_view kMemory = "memory ";  // what TraceRecorder calls its counters

struct Slice {
  std::int64_t thread = 0;
  double begin_us = 0, duration_us = 0;
  std::string name;
};

// From this moment on a counter has this value.
struct Count {
  double at_us = 0;
  std::string counter;
  std::int64_t nbytes = 0;
};

struct Process {
  std::vector<Slice> slices;
  std::vector<Count> counts;
  std::map<std::int64_t, std::string> threads;
  std::map<std::int64_t, std::int64_t> orders;  // in which threads are shown
};

std::int64_t id_of(const json& event, const char* field) {
  const auto found = event.find(field);
  return found != event.end() && found->is_number_integer() ? found->get<std::int64_t>() : 0;
}

std::string text_of(const json& object, const char* field) {
  const auto found = object.find(field);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

// What the format calls complete events, counters of memory, and names of threads.
std::map<std::int64_t, Process> read_processes(const json& events, const std::string& path) {
  require<IoError>(events.is_array(), "[trace] expected a list of events, got {} ({})",
                   events.type_name(), path);
  std::map<std::int64_t, Process> processes;
  for (const json& event : events) {
    require<IoError>(event.is_object(), "[trace] expected events, got {} ({})", event.type_name(),
                     path);
    const std::string phase = text_of(event, "ph"), name = text_of(event, "name");
    Process& process = processes[id_of(event, "pid")];
    const auto begin = event.find("ts"), duration = event.find("dur");
    if (phase == "M" && name == "thread_name" && event.contains("args")) {
      process.threads[id_of(event, "tid")] = text_of(event.at("args"), "name");
    } else if (phase == "M" && name == "thread_sort_index" && event.contains("args")) {
      process.orders[id_of(event, "tid")] = id_of(event.at("args"), "sort_index");
    } else if (phase == "X" && begin != event.end() && duration != event.end() &&
               begin->is_number() && duration->is_number()) {
      process.slices.push_back(
          {id_of(event, "tid"), begin->get<double>(), duration->get<double>(), name});
    } else if (phase == "C" && name.starts_with(kMemory) && begin != event.end() &&
               begin->is_number() && event.contains("args") && event.at("args").is_object()) {
      process.counts.push_back(
          {begin->get<double>(), name.substr(kMemory.size()), id_of(event.at("args"), "bytes")});
    }
  }
  return processes;
}

bool is_step(const Slice& slice) { return slice.name.starts_with("step"); }

std::string cut(std::string name) {
  if (name.size() <= kMaxNameNbytes) return name;
  std::size_t end = kMaxNameNbytes;
  while (end > 0 && (static_cast<unsigned char>(name[end]) & 0xC0) == 0x80) --end;
  return name.substr(0, end) + "...";
}

// To the nanosecond, in few digits.
double ms(double us) { return std::round(us * 1e3) * 1e-6; }

// Books of memory from a moment on.
struct Books {
  double at_ms = 0;
  std::map<std::string, std::int64_t> nbytes;
  std::int64_t total = 0;
};

// What counters show from `begin_us` to `end_us`.
std::vector<Books> books_of(std::vector<Count> counts, double begin_us, double end_us) {
  std::ranges::stable_sort(counts, std::less(), &Count::at_us);
  std::vector<Books> books(1);
  for (const Count& count : counts) {
    if (count.at_us > end_us) break;
    const double at_ms = std::max(0.0, ms(count.at_us - begin_us));
    if (at_ms > books.back().at_ms) {
      books.push_back(books.back());
      books.back().at_ms = at_ms;
    }
    if (count.counter == "total") {
      books.back().total = count.nbytes;
    } else {
      books.back().nbytes[count.counter] = count.nbytes;
    }
  }
  return books;
}

// Of each stretch of moments that with the most memory, and always the first and the last.
std::vector<Books> thinned(const std::vector<Books>& books, std::size_t max_points) {
  const std::size_t stride = (books.size() + max_points - 1) / max_points;
  if (stride <= 1) return books;
  std::vector<Books> result = {books.front()};
  for (std::size_t begin = 1; begin + 1 < books.size(); begin += stride) {
    const auto end = std::min(begin + stride, books.size() - 1);
    result.push_back(*std::ranges::max_element(books.begin() + std::ptrdiff_t(begin),
                                               books.begin() + std::ptrdiff_t(end), std::less(),
                                               &Books::total));
  }
  result.push_back(books.back());
  return result;
}

ordered_json memory_of(const std::vector<Count>& counts, double begin_us, double end_us,
                       std::size_t max_points) {
  if (counts.empty()) return nullptr;
  const std::vector<Books> books = thinned(books_of(counts, begin_us, end_us), max_points);
  ordered_json result = {{"ms", ordered_json::array()},
                         {"bytes", ordered_json::object()},
                         {"total", ordered_json::array()}};
  for (const auto& [category, nbytes] : books.back().nbytes) {
    ordered_json& values = result["bytes"][category] = ordered_json::array();
    for (const Books& b : books) {
      const auto found = b.nbytes.find(category);
      values.push_back(found == b.nbytes.end() ? 0 : found->second);
    }
  }
  for (const Books& b : books) {
    result["ms"].push_back(b.at_ms);
    result["total"].push_back(b.total);
  }
  return result;
}

}  // namespace

ordered_json step_of_trace(const json& trace, const std::string& where, const std::string& name,
                           const StepDetail& detail) {
  const bool has_events = trace.is_object() && trace.contains("traceEvents");
  std::map<std::int64_t, Process> processes =
      read_processes(has_events ? trace.at("traceEvents") : trace, where);
  std::erase_if(processes, [](const auto& process) { return process.second.slices.empty(); });
  require<IoError>(!processes.empty(), "[trace] expected slices, got none ({})", where);
  Process& process = processes.begin()->second;
  std::vector<Slice>& slices = process.slices;
  std::optional<Slice> step;
  for (const Slice& slice : slices) {
    if (is_step(slice) && (!step || slice.begin_us > step->begin_us)) step = slice;
  }
  double begin = 0, end = 0;
  if (step) {
    begin = step->begin_us;
    end = begin + step->duration_us;
    // What is between two steps, such as the gathers that the second one begins with, is its own.
    std::optional<double> before;
    for (const Slice& slice : slices) {
      const double slice_end = slice.begin_us + slice.duration_us;
      if (is_step(slice) && slice_end <= begin) before = std::max(before.value_or(0), slice_end);
    }
    begin = before.value_or(begin);
    std::erase_if(slices, [&](const Slice& slice) {
      return is_step(slice) || slice.begin_us + slice.duration_us <= begin || slice.begin_us >= end;
    });
    for (Slice& slice : slices) {  // what reaches into the step from outside is cut
      const double slice_end = std::min(slice.begin_us + slice.duration_us, end);
      slice.begin_us = std::max(slice.begin_us, begin);
      slice.duration_us = slice_end - slice.begin_us;
    }
  }
  std::ranges::stable_sort(slices, std::greater(), &Slice::duration_us);
  const std::size_t left_out = slices.size() - std::min(slices.size(), detail.max_slices);
  slices.resize(slices.size() - left_out);
  std::ranges::stable_sort(slices, std::less(), &Slice::begin_us);
  if (!step && !slices.empty()) begin = end = slices.front().begin_us;
  std::map<std::pair<std::int64_t, std::int64_t>, ordered_json> threads;  // by order and id
  std::map<std::string, std::size_t> numbers;  // of names, which many slices share
  ordered_json names = ordered_json::array();
  for (const Slice& slice : slices) {
    end = std::max(end, slice.begin_us + slice.duration_us);
    const auto order = process.orders.find(slice.thread);
    auto [thread, is_new] = threads.try_emplace(
        {order == process.orders.end() ? 0 : order->second, slice.thread}, ordered_json::array());
    const auto [number, is_new_name] = numbers.try_emplace(cut(slice.name), names.size());
    if (is_new_name) names.push_back(number->first);
    thread->second.push_back({ms(slice.begin_us - begin), ms(slice.duration_us), number->second});
  }
  ordered_json result = {{"name", name},
                         {"duration_ms", ms(end - begin)},
                         {"left_out", left_out},
                         {"slices", std::move(names)},
                         {"threads", ordered_json::array()},
                         {"memory", memory_of(process.counts, begin, end, detail.max_points)}};
  for (auto& [key, of_thread] : threads) {
    const std::int64_t id = key.second;
    const auto called = process.threads.find(id);
    const std::string thread =
        called == process.threads.end() ? "thread " + std::to_string(id) : cut(called->second);
    result["threads"].push_back({{"name", thread}, {"slices", std::move(of_thread)}});
  }
  return result;
}

ordered_json step_of_trace_file(const std::string& path, const std::string& name,
                                const StepDetail& detail) {
  return step_of_trace(engine::parse_json(engine::read_text_file(path, kMaxTraceNbytes), path),
                       path, name, detail);
}

}  // namespace tessera::tools
