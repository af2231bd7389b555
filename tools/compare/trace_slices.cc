#include "tools/compare/trace_slices.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
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
constexpr std::size_t kMaxSlices = 3000;
constexpr std::size_t kMaxNameNbytes = 60;

struct Slice {
  std::int64_t thread = 0;
  double begin_us = 0, duration_us = 0;
  std::string name;
};

struct Process {
  std::vector<Slice> slices;
  std::map<std::int64_t, std::string> threads;
};

std::int64_t id_of(const json& event, const char* field) {
  const auto found = event.find(field);
  return found != event.end() && found->is_number_integer() ? found->get<std::int64_t>() : 0;
}

std::string text_of(const json& object, const char* field) {
  const auto found = object.find(field);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

// What the format calls complete events, and names of threads.
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
    } else if (phase == "X" && begin != event.end() && duration != event.end() &&
               begin->is_number() && duration->is_number()) {
      process.slices.push_back(
          {id_of(event, "tid"), begin->get<double>(), duration->get<double>(), name});
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

bool has_trace(const std::string& folder) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(folder + "/trace.json", ignored);
}

// Its options without how far gathers run ahead.
std::map<std::string, std::string> other_options(const Configuration& c) {
  std::map<std::string, std::string> options = c.options;
  options.erase("parallel.prefetch");
  return options;
}

std::vector<std::size_t> chosen(const Comparison& comparison,
                                std::span<const std::string> folders) {
  std::vector<std::size_t> traced;
  for (std::size_t i = 0; i < folders.size(); ++i) {
    if (!folders[i].empty() && has_trace(folders[i])) traced.push_back(i);
  }
  for (const std::size_t off : traced) {
    const Configuration& without = *comparison.rows[off].configuration;
    if (without.config.parallel.prefetch != 0 || without.config.parallel.strategy == "ddp")
      continue;
    for (const std::size_t on : traced) {
      const Configuration& with = *comparison.rows[on].configuration;
      const bool gathers = with.config.parallel.prefetch > 0;
      if (gathers && other_options(with) == other_options(without)) return {on, off};
    }
  }
  traced.resize(std::min<std::size_t>(traced.size(), 2));
  return traced;
}

}  // namespace

ordered_json trace_slices(const std::string& path, const std::string& name) {
  const json trace = engine::parse_json(engine::read_text_file(path, kMaxTraceNbytes), path);
  const bool has_events = trace.is_object() && trace.contains("traceEvents");
  std::map<std::int64_t, Process> processes =
      read_processes(has_events ? trace.at("traceEvents") : trace, path);
  std::erase_if(processes, [](const auto& process) { return process.second.slices.empty(); });
  require<IoError>(!processes.empty(), "[trace] expected slices, got none ({})", path);
  Process& process = processes.begin()->second;
  std::vector<Slice>& slices = process.slices;
  std::optional<Slice> step;
  for (const Slice& slice : slices) {
    if (is_step(slice) && (!step || slice.begin_us > step->begin_us)) step = slice;
  }
  if (step) {
    const double end = step->begin_us + step->duration_us;
    std::erase_if(slices, [&](const Slice& slice) {
      return is_step(slice) || slice.begin_us < step->begin_us || slice.begin_us >= end;
    });
  }
  std::ranges::stable_sort(slices, std::greater(), &Slice::duration_us);
  const std::size_t left_out = slices.size() - std::min(slices.size(), kMaxSlices);
  slices.resize(slices.size() - left_out);
  std::ranges::stable_sort(slices, std::less(), &Slice::begin_us);
  const double begin = step ? step->begin_us : slices.empty() ? 0 : slices.front().begin_us;
  double end = step ? begin + step->duration_us : begin;
  std::map<std::int64_t, ordered_json> threads;
  for (const Slice& slice : slices) {
    end = std::max(end, slice.begin_us + slice.duration_us);
    auto [thread, is_new] = threads.try_emplace(slice.thread, ordered_json::array());
    thread->second.push_back(
        {(slice.begin_us - begin) * 1e-3, slice.duration_us * 1e-3, cut(slice.name)});
  }
  ordered_json result = {{"name", name},
                         {"duration_ms", (end - begin) * 1e-3},
                         {"left_out", left_out},
                         {"threads", ordered_json::array()}};
  for (auto& [id, of_thread] : threads) {
    const auto called = process.threads.find(id);
    const std::string thread =
        called == process.threads.end() ? "thread " + std::to_string(id) : cut(called->second);
    result["threads"].push_back({{"name", thread}, {"slices", std::move(of_thread)}});
  }
  return result;
}

ordered_json traces_to_show(const Comparison& comparison, std::span<const std::string> folders) {
  ordered_json traces = ordered_json::array();
  for (const std::size_t i : chosen(comparison, folders)) {
    traces.push_back(
        trace_slices(folders[i] + "/trace.json", comparison.rows[i].configuration->name));
  }
  return traces;
}

}  // namespace tessera::tools
