// What a comparison found: every configuration's figures, parity, speed, and a verdict.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tools/compare/comparison/classes.h"
#include "tools/compare/comparison/parity.h"
#include "tools/compare/comparison/run_record.h"
#include "tools/compare/comparison/speed.h"
#include "tools/compare/request/request.h"

namespace tessera::tools {

/// What is known of one configuration.
struct Trained {
  std::vector<RunRecord> rounds = {};  ///< those that ran to their end
  std::string failure = {};            ///< why one did not; empty: none failed
  std::int64_t first_round = 0;        ///< the number of the first of `rounds`, from 1

  void add(RunRecord run, std::int64_t round) {
    if (rounds.empty()) first_round = round;
    rounds.push_back(std::move(run));
  }
};

/// The median step, taken apart by what each part takes of the time of all steps: they add up.
struct StepParts {
  std::optional<double> compute_ms = {}, exposed_comm_ms = {}, optimizer_ms = {}, data_ms = {};
  double other_ms = 0;  ///< the rest, and what is not known
};

struct Row {
  const Configuration* configuration = nullptr;
  Trained trained = {};
  const Configuration* same_plan_as = nullptr;  ///< which was trained instead; null: this one was
  bool complete = false;                        ///< all rounds are there, or need not be
  std::size_t class_index = 0;                  ///< of Comparison::classes
  Parity parity = {};  ///< with the first of its class, or of that with the class measured against
  std::map<std::string, Spread> metrics = {};  ///< over all rounds, without warm-up steps
  std::optional<StepParts> step_parts = {};    ///< over the same steps
  std::optional<double> last_loss = {};
  std::vector<double> speeds = {};  ///< median tokens/s of each round; empty: not known
  /// Of throughput against memory; none: not known, or too few rounds to say.
  std::optional<bool> is_on_front = {};

  std::optional<double> median(const std::string& metric) const;
  /// Of all categories together, on its device.
  std::optional<std::int64_t> peak_nbytes() const;
  std::optional<std::int64_t> planned_peak_nbytes() const;
};

struct Verdict {
  bool agrees = false;                  ///< nothing that was trained differs from what it should be
  bool failed = false;                  ///< a training did
  bool has_baseline = false;            ///< to agree with
  bool complete = false;                ///< everything was trained
  std::vector<std::string> lines = {};  ///< three at most

  bool passed() const { return agrees && !failed && has_baseline; }
};

struct Comparison {
  const Request* request = nullptr;
  std::vector<Row> rows = {};  ///< as in the request
  std::vector<ArithmeticClass> classes = {};
  Speeds speeds = {};  ///< of `rows`
  Verdict verdict = {};

  /// The first of a class that was trained; null: none.
  const Row* reference_of(const ArithmeticClass& c) const;
};

/// `trained` as request.configurations, which outlive what is returned.
Comparison summarise(const Request& request, std::vector<Trained> trained);

/// Of a comparison but for its verdict.
Verdict verdict_of(const Comparison& comparison);

/// What the page and other programs read. A figure that is not known is null.
nlohmann::ordered_json to_json(const Comparison& comparison);

/// The rows for a terminal: aligned, with units.
std::string table_text(const Comparison& comparison);

}  // namespace tessera::tools
