#include "tools/compare/comparison/run_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;
using nlohmann::json;

constexpr const char* kOverlap = "overlap";
constexpr std::int64_t kMaxLogNbytes = std::int64_t{1} << 30;

// Fields of one JSON object, which `where` names in errors.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    require<IoError>(object.is_object(), "[log] expected an object, got {} ({})",
                     object.type_name(), where_);
  }

  const json* find(const std::string& name) const {
    const auto field = object_.find(name);
    return field == object_.end() ? nullptr : &*field;
  }
  // Absent, or null for a number that is not finite or not known.
  std::optional<double> number(const std::string& name) const {
    const json* field = find(name);
    if (field == nullptr || field->is_null()) return std::nullopt;
    check(field->is_number(), name, "a number", *field);
    return field->get<double>();
  }
  std::optional<std::int64_t> count(const std::string& name) const {
    const json* field = find(name);
    if (field == nullptr || field->is_null()) return std::nullopt;
    check(field->is_number_integer() && field->get<std::int64_t>() >= 0, name, "a count", *field);
    return field->get<std::int64_t>();
  }
  std::string text(const std::string& name) const {
    const json* field = find(name);
    if (field == nullptr) return "";
    check(field->is_string(), name, "text", *field);
    return field->get<std::string>();
  }
  BytesByCategory bytes(const std::string& name) const {
    BytesByCategory result;
    const json* field = find(name);
    if (field == nullptr) return result;
    const Fields inner(*field, where_ + ", " + name);
    for (const auto& item : field->items()) {
      const std::optional<std::int64_t> nbytes = inner.count(item.key());
      if (nbytes) result[item.key()] = *nbytes;
    }
    return result;
  }
  void check(bool ok, const std::string& name, const char* expected, const json& got) const {
    require<IoError>(ok, "[log] expected {} as {}, got {} ({})", expected, name,
                     engine::excerpt(got.dump()), where_);
  }

 private:
  const json& object_;
  std::string where_;
};

void read_step(const json& line, const std::string& where, RunRecord& run,
               std::set<std::string>& untold) {
  const Fields fields(line, where);
  const std::optional<std::int64_t> step = fields.count("step");
  const std::int64_t expected = std::ssize(run.loss) + 1;
  require<IoError>(step == expected, "[log] expected step {}, got {} ({})", expected,
                   step ? std::to_string(*step) : "none", where);
  require<IoError>(fields.find("loss") != nullptr, "[log] expected a loss, got none ({})", where);
  run.loss.push_back(fields.number("loss").value_or(std::numeric_limits<double>::quiet_NaN()));
  for (const std::string& name : metric_names()) {
    if (name == kOverlap) continue;  // of the last record
    const std::optional<double> value = fields.number(name);
    if (value) {
      run.metrics[name].push_back(*value);
    } else {
      untold.insert(name);
    }
  }
  run.peak_bytes = fields.bytes("peak_bytes");
  run.host_peak_bytes = fields.bytes("host_peak_bytes");
}

// The part of communication that was hidden, of the steps that were traced.
void read_overlap(const json& trace, const std::string& where, RunRecord& run) {
  const Fields fields(trace, where);
  const json* steps = fields.find("steps");
  require<IoError>(steps != nullptr && steps->is_array(),
                   "[log] expected steps of the trace, got none ({})", where);
  constexpr double kUnknown = std::numeric_limits<double>::quiet_NaN();
  std::vector<double> overlap(run.loss.size(), kUnknown);
  bool is_told = false;
  for (const json& item : *steps) {
    const Fields step(item, where);
    const auto number = step.count("step");
    const auto comm_ms = step.number("comm_ms"), hidden_ms = step.number("hidden_ms");
    require<IoError>(number && *number >= 1 && *number <= std::ssize(overlap),
                     "[log] expected a step of the run, got another ({})", where);
    if (!comm_ms || !hidden_ms || *comm_ms <= 0) continue;
    overlap[static_cast<std::size_t>(*number - 1)] = *hidden_ms / *comm_ms;
    is_told = true;
  }
  if (is_told) run.metrics[kOverlap] = std::move(overlap);
}

void read_end(const json& line, const std::string& where, RunRecord& run) {
  const Fields fields(line, where);
  run.params_sha256 = fields.text("params_sha256");
  require<IoError>(!run.params_sha256.empty(), "[log] expected params_sha256, got none ({})",
                   where);
  run.data_digest = fields.text("data_digest");
  run.stopped_by = fields.text("stopped_by");
  run.device = fields.text("device");
  run.cpu = fields.text("cpu");
  run.launch = fields.text("launch");
  const json* trace = fields.find("trace");
  if (trace != nullptr) read_overlap(*trace, where + ", trace", run);
  const json* planned = fields.find("planned");
  if (planned == nullptr || planned->is_null()) return;
  const Fields plan(*planned, where + ", planned");
  run.planned_peak_bytes = plan.bytes("peak_bytes");
  run.planned_sent_bytes = plan.count("sent_bytes");
  run.planned_num_collectives = plan.count("num_collectives");
}

double quantile(const std::vector<double>& sorted, double q) {
  const double at = q * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const std::size_t above = std::min(below + 1, sorted.size() - 1);
  return sorted[below] + (at - std::floor(at)) * (sorted[above] - sorted[below]);
}

}  // namespace

const std::vector<std::string>& metric_names() {
  static const std::vector<std::string> names = {
      "step_ms",      "exposed_comm_ms", "compute_ms", "optimizer_ms",   "data_ms",
      "tokens_per_s", "overlap",         "sent_bytes", "num_collectives"};
  return names;
}

std::span<const double> after_warmup(const std::vector<double>& values, std::int64_t warmup) {
  const auto skipped = std::min<std::int64_t>(warmup, std::ssize(values));
  return std::span(values).subspan(static_cast<std::size_t>(skipped));
}

RunRecord read_run_record(const std::string& path) {
  RunRecord run;
  std::set<std::string> untold;  // by some step
  bool has_ended = false;
  std::istringstream lines(engine::read_text_file(path, kMaxLogNbytes));
  int number = 0;
  for (std::string text; std::getline(lines, text);) {
    const std::string where = fmt::format("{}:{}", path, ++number);
    require<IoError>(!has_ended, "[log] expected nothing after the last record, got more ({})",
                     where);
    const json line = engine::parse_json(text, where);
    const Fields fields(line, where);
    if (const json* end = fields.find("final"); end != nullptr) {
      read_end(*end, where, run);
      has_ended = true;
    } else if (fields.find("val_loss") == nullptr) {
      read_step(line, where, run, untold);
    }
  }
  require<IoError>(has_ended, "[log] expected a last record, got {} steps and none ({})",
                   run.loss.size(), path);
  for (const std::string& name : untold) run.metrics.erase(name);
  return run;
}

std::optional<Spread> spread_of(std::vector<double> values) {
  if (values.empty()) return std::nullopt;
  std::ranges::sort(values);
  return Spread{quantile(values, 0.5), quantile(values, 0.25), quantile(values, 0.75)};
}

}  // namespace tessera::tools
