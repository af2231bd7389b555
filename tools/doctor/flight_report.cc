#include "tools/doctor/flight_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/cli/flags.h"
#include "tools/io/jsonl.h"

namespace tessera::tools {
namespace {

constexpr char kSeparator = '\n';

std::string_view name_of(FlightFinding finding) {
  switch (finding) {
    case FlightFinding::kDiffer:
      return "ranks differ";
    case FlightFinding::kLate:
      return "a rank was late";
    case FlightFinding::kUnfinished:
      return "unfinished";
    case FlightFinding::kFinished:
      return "all finished";
  }
  return "";
}

std::vector<FlightFile> read_all(std::string_view paths) {
  std::vector<FlightFile> files;
  while (!paths.empty()) {
    const std::size_t end = std::min(paths.find(kSeparator), paths.size());
    if (end > 0) files.push_back(read_flight(resolve_user_path(paths.substr(0, end))));
    paths.remove_prefix(std::min(end + 1, paths.size()));
  }
  return files;
}

// The first line: those below it are what the run said to explain it.
std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

}  // namespace

std::vector<std::string> join_flight_files(std::span<const char* const> arguments) {
  constexpr std::string_view kOption = "--flight", kWithValue = "--flight=";
  std::vector<std::string> result;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string_view argument = arguments[i];
    const bool has_value = argument.starts_with(kWithValue);
    if (argument != kOption && !has_value) {
      result.emplace_back(argument);
      continue;
    }
    std::string files(has_value ? argument.substr(kWithValue.size()) : "");
    while (i + 1 < arguments.size() && !std::string_view(arguments[i + 1]).starts_with("--")) {
      files += kSeparator;
      files += arguments[++i];
    }
    engine::require(!files.empty(), "[flight] expected files, as --flight FILE..., got none");
    result.push_back(fmt::format("{}{}", kWithValue, files));
  }
  return result;
}

FlightReport report_flight(const std::string& files, bool json) {
  const std::vector<FlightFile> read = read_all(files);
  const FlightVerdict verdict = judge(read);
  FlightReport report{.finding = verdict.finding, .text = ""};
  if (json) {
    std::vector<std::string> lines, errors;
    for (const std::string& line : verdict.lines) lines.push_back(engine::json_literal(line));
    for (const FlightFile& file : read) errors.push_back(engine::json_literal(file.error));
    report.text = JsonRecord()
                      .add("finding", name_of(verdict.finding))
                      .add_literal("lines", fmt::format("[{}]", engine::join(lines, ",")))
                      .add_literal("errors", fmt::format("[{}]", engine::join(errors, ",")))
                      .line();
    return report;
  }
  for (const std::string& line : verdict.lines)
    report.text += fmt::format("{}\n", engine::escaped(line));
  for (const FlightFile& file : read) {
    report.text += fmt::format("{} ended with: {}\n", engine::escaped(file.path),
                               engine::escaped(first_line(file.error)));
  }
  return report;
}

}  // namespace tessera::tools
