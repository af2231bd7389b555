#include "tools/report/run_folder.h"

#include <fmt/format.h>

#include <filesystem>
#include <set>
#include <string_view>
#include <system_error>
#include <vector>

#include "engine/error.h"
#include "tools/cli/toml_file.h"
#include "tools/report/flight_output.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;

bool has_content(const std::string& path) {
  std::error_code error;
  return fs::is_regular_file(path, error) && fs::file_size(path, error) > 0 && !error;
}

/// Whether FlagSet::to_toml() of a trainer wrote it: it names every option, of which these are in
/// every trainer. A person writes down fewer.
bool is_config_of_a_run(const std::string& path) {
  std::set<std::string, std::less<>> names;
  try {
    visit_toml_file(path, "config", [&](const TomlEntry& entry) { names.insert(entry.name); });
  } catch (const engine::IoError&) {
    return false;
  }
  for (const char* name : {"device", "out", "plan", "audit", "parallel.strategy", "parallel.ranks",
                           "train.steps", "train.seed", "train.beta2", "log.every"}) {
    if (!names.contains(name)) return false;
  }
  return true;
}

}  // namespace

void check_run_folder(const std::string& folder, bool writes_log) {
  const auto refuse = [](const std::string& path) {
    engine::fail(
        "[out] expected a folder of a run, or a new one, got one with a file that no run "
        "has written and this one would replace: give another --out ({})",
        path);
  };
  const std::string config = folder + "/config.toml";
  if (has_content(config)) {
    if (!is_config_of_a_run(config)) refuse(config);
    return;
  }
  std::error_code ignored;
  if (fs::exists(folder + "/.lock", ignored)) return;  // of a run that did not get to its config
  std::vector<std::string> names(kRunTexts.begin(), kRunTexts.end());
  names.emplace_back(FlightOutput::kName);
  if (writes_log) names.emplace_back("log.jsonl");
  for (const std::string& name : names) {
    const std::string path = fmt::format("{}/{}", folder, name);
    if (has_content(path)) refuse(path);
  }
}

}  // namespace tessera::tools
