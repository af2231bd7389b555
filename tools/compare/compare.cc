// Trains the transformer once for each configuration and says whether they agree and what each
// costs.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/cli/main.h"
#include "tools/cli/stop.h"
#include "tools/compare/comparison/comparison.h"
#include "tools/compare/comparison_folder.h"
#include "tools/compare/equal_plans.h"
#include "tools/compare/find_divergence.h"
#include "tools/compare/made_by.h"
#include "tools/compare/page/report_page.h"
#include "tools/compare/page/shown_steps.h"
#include "tools/compare/request/request.h"
#include "tools/compare/request/training_launch.h"
#include "tools/compare/request/training_process.h"
#include "tools/compare/training_identity.h"
#include "tools/launch/cpu_wishes.h"
#include "tools/planning/plan_table.h"

namespace tessera::tools {
namespace {

void say(const std::string& line) {
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

// Trains all that is missing, in turn, and collects what there is.
class Trainings {
 public:
  Trainings(const Request& request, const ComparisonFolder& folder)
      : request_(request), folder_(folder), trained_(request.configurations.size()) {}

  /// How many trainings of an earlier start were kept, once run() has returned.
  std::int64_t num_kept() const { return num_kept_; }
  /// How many that had run to their end before were made again, by the reason.
  const std::map<std::string, std::int64_t>& made_again() const { return made_again_; }

  std::vector<Trained> run() {
    const std::size_t num_all = trained_.size();
    const auto num_untrained = std::ranges::count_if(
        request_.configurations, [](const Configuration& c) { return c.same_plan_as.has_value(); });
    const std::int64_t total =
        request_.compare.rounds * (static_cast<std::int64_t>(num_all) - num_untrained);
    std::int64_t number = 0;
    for (std::int64_t round = 1; round <= request_.compare.rounds; ++round) {
      for (const std::size_t i : order_of_round(round, num_all)) {
        const Configuration& c = request_.configurations[i];
        if (c.same_plan_as) continue;
        ++number;
        const std::string what =
            fmt::format("[{}/{}] {}{}", number, total, engine::escaped(c.name),
                        request_.compare.rounds > 1 ? fmt::format(", round {}", round) : "");
        visit(i, round, what);
      }
    }
    return std::move(trained_);
  }

 private:
  void visit(std::size_t i, std::int64_t round, const std::string& what) {
    const Configuration& c = request_.configurations[i];
    Trained& trained = trained_[i];
    std::string why = folder_.outdated(c, round), detail;
    std::optional<RunRecord> run;
    try {
      if (why.empty()) run = folder_.finished(c, round);
    } catch (const engine::IoError& e) {  // as a host that has lost its power leaves it
      why = "its log cannot be read";
      detail = fmt::format(": {}", engine::escaped(e.what()));
    }
    if (run) {
      say(what + ": kept");
      ++num_kept_;
      trained.add(std::move(*run), round);
      return;
    }
    if (stop_requested() != 0) return;
    if (!why.empty()) {
      say(fmt::format("{}: made again: {}{}", what, why, detail));
      ++made_again_[why];
    }
    std::string failure;
    try {
      folder_.discard(c, round);
      failure = train(c, round, what, trained);
    } catch (const engine::IoError& e) {
      failure = e.what();
    }
    if (failure.empty()) return;
    say(fmt::format("{}: failed, {}", what, engine::escaped(failure)));
    if (trained.failure.empty()) trained.failure = std::move(failure);
  }

  // Why it failed; empty if it did not, or was interrupted.
  std::string train(const Configuration& c, std::int64_t round, const std::string& what,
                    Trained& trained) {
    const std::string out = folder_.round_path(c, round), console = out + "/console.txt";
    std::error_code ignored;  // without the folder the console cannot be written, which says why
    std::filesystem::create_directories(out, ignored);
    std::vector<std::string> arguments = {"--config=" + folder_.configuration_path(c),
                                          "--out=" + out};
    if (c.on_gpu && c.config.cuda.gemm_algorithms.empty()) {
      arguments.push_back("--cuda.gemm_algorithms=" + folder_.gemm_algorithms_path());
    }
    // Each has a trace of its own, where the page looks for it.
    for (std::string& argument : trace_arguments(c, out + "/trace.json")) {
      arguments.push_back(std::move(argument));
    }
    wait_for_folder(out);
    const auto begin = std::chrono::steady_clock::now();
    const ProcessEnd end =
        run_process(folder_.trainer(), arguments, console, request_.launcher_of(c));
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - begin;
    if (stop_requested() != 0) {
      say(what + ": interrupted");
      return "";
    }
    if (!end.ok()) return fmt::format("{}; see {}", end.str(), console);
    std::optional<RunRecord> run = folder_.finish(c, round);
    if (!run) return fmt::format("it ended before its last step; see {}", console);
    const auto times = run->metrics.find("step_ms");
    std::vector<double> step_ms;
    if (times != run->metrics.end()) {
      const auto measured = after_warmup(times->second, request_.compare.warmup_steps);
      step_ms.assign(measured.begin(), measured.end());
    }
    const std::optional<Spread> middle = spread_of(std::move(step_ms));
    say(fmt::format("{}: loss {:.4f}{}, {:.1f} s", what, run->loss.back(),
                    middle ? fmt::format(", {:.1f} ms a step", middle->median) : "",
                    elapsed.count()));
    trained.add(std::move(*run), round);
    return "";
  }

  const Request& request_;
  const ComparisonFolder& folder_;
  std::vector<Trained> trained_;
  std::int64_t num_kept_ = 0;
  std::map<std::string, std::int64_t> made_again_;
};

// A trace that cannot be read costs the page what it would show of it, and nothing else.
nlohmann::ordered_json steps(const Comparison& comparison,
                             const std::vector<std::string>& folders) {
  std::vector<std::string> warnings;
  nlohmann::ordered_json result = steps_to_show(comparison, folders, warnings);
  for (const std::string& warning : warnings) {
    fmt::print(stderr, "warning: {}; the page does not show it\n", engine::escaped(warning));
  }
  return result;
}

void write_results(const Comparison& comparison, const nlohmann::ordered_json& made_by,
                   const ComparisonFolder& folder) {
  std::vector<std::string> folders;
  for (const Row& row : comparison.rows) {
    const Trained& trained = row.trained;
    folders.push_back(
        trained.rounds.empty() ? "" : folder.round_path(*row.configuration, trained.first_round));
  }
  nlohmann::ordered_json json = to_json(comparison);
  json["made_by"] = made_by;
  const auto replace = nlohmann::ordered_json::error_handler_t::replace;
  write_file(folder.json_path(), json.dump(1, ' ', false, replace) + "\n");
  write_file(folder.report_path(), report_page(json, steps(comparison, folders)));
}

void tell_plans(const Request& request) {
  const std::vector<PlanRow> rows = plan_rows(request);
  for (const std::string& line : table_lines(rows)) say(line);
  engine::require(std::ranges::any_of(rows, &PlanRow::fits),
                  "[memory_budget] expected a configuration that fits, got none");
}

void tell_divergence(const Request& request) {
  const StopSignals signals;
  const DivergenceResult result = find_divergence(request);
  for (const std::string& line : lines_of(result)) say(line);
  for (const DivergenceRun* run : {&result.a, &result.b}) {
    engine::require(result.report.first || run->failure.empty(),
                    "[divergence] expected trainings that end well, got {}", run->failure);
  }
  engine::require(!result.report.first,
                  "[divergence] expected A and B to compute the same, got a difference; see above");
}

void compare(int argc, char** argv) {
  std::signal(SIGCHLD, SIG_DFL);  // where it is ignored, nobody learns how trainings end
  if (argc == 2 && argv[1] == kTellLaunch) return tell_launch();
  if (argc > 2 && argv[1] == kTellArithmetic) {
    return tell_arithmetic(std::span<const char* const>(argv, std::size_t(argc)).subspan(2));
  }
  Request request = read_request(argc, argv, std::cout);
  choose_cpu_by_environment();  // for plans: each training chooses for itself
  if (request.only_plans) return tell_plans(request);
  check_plans(request);
  if (request.finds_divergence()) return tell_divergence(request);
  if (request.configurations.empty()) return;
  const ComparisonFolder folder(request);
  const Configuration& baseline = request.configurations.front();
  std::vector<std::int64_t> steps;
  for (const Configuration& c : request.configurations) steps.push_back(c.config.train.steps);
  const auto [fewest, most] = std::ranges::minmax(steps);
  say(fmt::format("{} configuration{}, {} steps each; the baseline is {}",
                  request.configurations.size(), request.configurations.size() == 1 ? "" : "s",
                  fewest == most ? std::to_string(most) : fmt::format("{} to {}", fewest, most),
                  engine::escaped(baseline.name)));
  for (const Configuration& c : request.configurations) {
    if (!c.same_plan_as) continue;
    say(fmt::format("{} has the same plan as {} and is not trained", engine::escaped(c.name),
                    engine::escaped(request.configurations[*c.same_plan_as].name)));
  }
  const StopSignals signals;
  nlohmann::ordered_json made = made_by(std::span<const char* const>(argv, std::size_t(argc)));
  Trainings trainings(request, folder);
  const Comparison comparison = summarise(request, trainings.run());
  made["kept_trainings"] = trainings.num_kept();
  made["made_again"] = trainings.made_again();
  write_results(comparison, made, folder);
  say("\n" + table_text(comparison));
  for (const std::string& line : comparison.verdict.lines) say(engine::escaped(line));
  say(fmt::format("figures {}\nreport {}", engine::escaped(folder.json_path()),
                  engine::escaped(folder.report_path())));
  engine::require(comparison.verdict.agrees,
                  "[parity] expected every configuration to give the numbers that it should, "
                  "got one that does not; see above");
  engine::require(!comparison.verdict.failed,
                  "[compare] expected every training to end well, got one that failed; see above");
  engine::require(comparison.verdict.complete,
                  "[compare] expected all configurations to be trained, got some missing; --resume "
                  "goes on");
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::compare(argc, argv); });
}
