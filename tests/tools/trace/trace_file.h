// A Chrome trace as tests read it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/testing/json.h"

namespace tessera::testing {

struct TraceSlice {
  int process = 0, thread = 0;
  std::string name, category;
  std::int64_t begin_ns = 0, end_ns = 0;
  nlohmann::json args;

  std::string arg(const char* key) const { return args.value(key, ""); }
};

class TraceFile {
 public:
  struct Counter {
    int process;
    std::string name;
    std::int64_t ns, nbytes;
  };
  struct Arrow {
    std::string name;
    const TraceSlice *from, *to;  // inside which it begins and ends; null: inside none
  };

  /// Fails the test where the text is not a Chrome trace in the JSON array format; throws as
  /// parse_json() does. `slack_ns`: by which clocks of streams may differ.
  explicit TraceFile(const std::string& text, std::int64_t slack_ns = 0) : slack_ns_(slack_ns) {
    const nlohmann::json all = parse_json(text);
    EXPECT_TRUE(all.is_array()) << text.substr(0, 200);
    if (!all.is_array()) return;
    for (const nlohmann::json& e : all) read(e);
    for (auto& [id, ends] : ends_) {
      EXPECT_TRUE(ends.first && ends.second) << "an arrow with one end: " << id;
    }
    for (const TraceSlice& slice : slices) {
      EXPECT_TRUE(threads.contains(slice.thread)) << "a thread without a name: " << slice.name;
      EXPECT_TRUE(processes.contains(slice.process)) << "a process without a name: " << slice.name;
    }
    for (const auto& [id, ends] : ends_) arrows.push_back(arrow_of(ends));
  }

  std::vector<TraceSlice> of_thread(const std::string& name, int process) const {
    std::vector<TraceSlice> found;
    for (const TraceSlice& s : slices) {
      if (s.process == process && threads.at(s.thread) == name) found.push_back(s);
    }
    return found;
  }
  std::vector<TraceSlice> of_category(const std::string& category) const {
    std::vector<TraceSlice> found;
    std::ranges::copy_if(slices, std::back_inserter(found),
                         [&](const TraceSlice& s) { return s.category == category; });
    return found;
  }

  /// Slices of one thread do not overlap.
  void expect_threads_in_turn() const {
    std::map<int, std::vector<const TraceSlice*>> by_thread;
    for (const TraceSlice& s : slices) by_thread[s.thread].push_back(&s);
    for (auto& [thread, of_one] : by_thread) {
      std::ranges::sort(of_one, {},
                        [](const TraceSlice* s) { return std::pair(s->begin_ns, s->end_ns); });
      for (std::size_t i = 1; i < of_one.size(); ++i) {
        EXPECT_LE(of_one[i - 1]->end_ns, of_one[i]->begin_ns)
            << of_one[i - 1]->name << " and " << of_one[i]->name << " on " << threads.at(thread);
      }
    }
  }

  /// Whatever was gathered and is computed with later has an arrow to the first launch of its unit
  /// that computes after it. Returns how many have.
  int expect_gathers_lead_to_uses() const {
    int count = 0;
    for (const TraceSlice& gather : slices) {
      if (gather.arg("op") != "all_gather" || gather.category != "parameters") continue;
      const TraceSlice* first = nullptr;
      for (const TraceSlice& s : slices) {
        if (s.process != gather.process || s.category != "compute" || s.arg("phase").empty() ||
            s.arg("unit") != gather.arg("unit") || s.begin_ns + slack_ns_ < gather.end_ns) {
          continue;
        }
        if (first == nullptr || s.begin_ns < first->begin_ns) first = &s;
      }
      if (first == nullptr) continue;
      const auto arrow = std::ranges::find_if(
          arrows, [&](const Arrow& a) { return a.name == "gathered" && a.from == &gather; });
      EXPECT_NE(arrow, arrows.end()) << "nobody uses " << gather.name;
      if (arrow == arrows.end()) continue;
      EXPECT_EQ(arrow->to, first) << gather.name;
      ++count;
    }
    return count;
  }

  std::vector<TraceSlice> slices;
  std::vector<Counter> counters;
  std::vector<Arrow> arrows;
  std::map<int, std::string> processes, threads;

 private:
  struct End {
    std::string name;
    int thread;
    std::int64_t ns;
  };
  struct Ends {
    std::optional<End> first, second;
  };

  static std::int64_t ns_of(const nlohmann::json& us) {
    EXPECT_TRUE(us.is_number());
    return std::llround(us.get<double>() * 1e3);
  }

  void read(const nlohmann::json& e) {
    const std::string phase = e.at("ph").get<std::string>(), name = e.at("name").get<std::string>();
    const int process = e.at("pid").get<int>(), thread = e.at("tid").get<int>();
    EXPECT_GT(process, 0);
    if (phase == "M") {
      if (name == "process_name") {
        EXPECT_TRUE(processes.emplace(process, e.at("args").at("name")).second) << "named twice";
      } else if (name == "thread_name") {
        EXPECT_TRUE(threads.emplace(thread, e.at("args").at("name")).second) << "named twice";
      } else {
        EXPECT_TRUE(e.at("args").at("sort_index").is_number_integer()) << e;
      }
    } else if (phase == "X") {
      const std::int64_t begin = ns_of(e.at("ts")), duration = ns_of(e.at("dur"));
      EXPECT_GE(duration, 0) << e;
      slices.push_back({process, thread, name, e.at("cat"), begin, begin + duration, e.at("args")});
      EXPECT_TRUE(slices.back().args.is_object()) << e;
    } else if (phase == "C") {
      counters.push_back({process, name, ns_of(e.at("ts")), e.at("args").at("bytes")});
    } else if (phase == "s" || phase == "f") {
      Ends& ends = ends_[e.at("id").get<std::uint64_t>()];
      std::optional<End>& end = phase == "s" ? ends.first : ends.second;
      EXPECT_FALSE(end) << "an end twice: " << e;
      end = End{name, thread, ns_of(e.at("ts"))};
      EXPECT_EQ(e.value("bp", ""), phase == "f" ? "e" : "");
    } else {
      ADD_FAILURE() << "another kind of event: " << e;
    }
  }

  const TraceSlice* slice_at(const End& end) const {
    const auto it = std::ranges::find_if(slices, [&](const TraceSlice& s) {
      return s.thread == end.thread && s.begin_ns <= end.ns && end.ns < s.end_ns;
    });
    return it == slices.end() ? nullptr : &*it;
  }
  Arrow arrow_of(const Ends& ends) const {
    if (!ends.first || !ends.second) return {"", nullptr, nullptr};
    EXPECT_LE(ends.first->ns, ends.second->ns + slack_ns_) << ends.first->name;
    EXPECT_EQ(ends.first->name, ends.second->name);
    return {ends.first->name, slice_at(*ends.first), slice_at(*ends.second)};
  }

  std::int64_t slack_ns_;
  std::map<std::uint64_t, Ends> ends_;
};

}  // namespace tessera::testing
