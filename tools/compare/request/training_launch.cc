#include "tools/compare/request/training_launch.h"

#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <system_error>
#include <utility>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/text.h"
#include "tools/cli/flags.h"
#include "tools/machine/environment.h"

namespace tessera::tools {
namespace {

namespace fs = std::filesystem;
using engine::IoError;
using engine::require;
using nlohmann::json;

// Launchers may write the name of a process before its line.
constexpr std::string_view kBegin = "tessera-launch ";

// A folder that goes with all that is in it.
class PrivateFolder {
 public:
  PrivateFolder() : path_((fs::temp_directory_path() / "compare.XXXXXX").string()) {
    require<IoError>(::mkdtemp(path_.data()) != nullptr,
                     "[launch] expected a temporary folder, got none ({})", path_);
  }
  ~PrivateFolder() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

bool can_run(const std::string& path) {
  std::error_code ignored;
  return fs::is_regular_file(path, ignored) && ::access(path.c_str(), X_OK) == 0;
}

// Where a command lies, as a shell finds it.
std::string command_path(const std::string& word) {
  if (word.find('/') != std::string::npos) {
    std::string path = fs::absolute(resolve_user_path(word)).string();
    require<IoError>(can_run(path), "[launch] expected a program that can be run, got none ({})",
                     path);
    return path;
  }
  const Environment all = environment();
  const auto found = all.find("PATH");
  const std::string_view folders = found == all.end() ? "" : std::string_view(found->second);
  for (std::size_t begin = 0; begin < folders.size();) {
    const std::size_t end = std::min(folders.find(':', begin), folders.size());
    std::string path = fmt::format("{}/{}", folders.substr(begin, end - begin), word);
    if (end > begin && can_run(path)) return path;
    begin = end + 1;
  }
  engine::fail<IoError>("[launch] expected a command that is in PATH, got {} (--launch)",
                        engine::excerpt(word));
}

// The last that was said, for the end of a message.
std::string last_lines(const std::string& text) {
  constexpr std::ptrdiff_t kMost = 10;
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back("\n  " + engine::excerpt(line));
  if (lines.empty()) return "; it said nothing";
  lines.erase(lines.begin(), lines.end() - std::min(std::ssize(lines), kMost));
  return "; it said:" + engine::join(lines, "");
}

// What first processes have told, among all that was printed.
std::vector<Launch> told_in(const std::string& text) try {
  std::vector<Launch> launches;
  for (std::size_t at = 0; (at = text.find(kBegin, at)) != std::string::npos;) {
    at += kBegin.size();
    const json told = json::parse(text.substr(at, text.find('\n', at) - at));
    Launch& launch = launches.emplace_back();
    const std::string by = told.at("by");
    for (const auto& [name, choice] : kLauncherChoices) {
      if (name == by) launch.by = choice;
    }
    launch.num_processes = told.at("processes");
    launch.num_local_processes = told.at("local_processes");
    launch.has_mpi = told.at("has_mpi");
    const json& hosts = told.at("hosts");
    if (hosts.is_null()) launch.host = std::nullopt;
    launch.num_hosts = hosts.is_null() ? std::nullopt : std::optional(hosts.get<int>());
  }
  return launches;
} catch (const json::exception&) {
  engine::fail<IoError>(
      "[launch] expected a launcher that passes on lines as they are, got parts of one{}",
      last_lines(text));
}

}  // namespace

std::vector<std::string> words_of(std::string_view text) {
  std::vector<std::string> words;
  bool in_word = false;
  char quote = 0;
  for (const char c : text) {
    if (quote != 0 && c == quote) {
      quote = 0;
    } else if (quote == 0 && (c == ' ' || c == '\t' || c == '\n')) {
      in_word = false;
    } else {
      if (!std::exchange(in_word, true)) words.emplace_back();
      const bool begins = quote == 0 && (c == '\'' || c == '"');
      if (begins) {
        quote = c;
      } else {
        words.back() += c;
      }
    }
  }
  require(quote == 0, "[launch] expected the other {} of a word, got none in {} (--launch)", quote,
          engine::excerpt(text));
  require(!words.empty() && !words.front().empty(),
          "[launch] expected a command such as 'mpirun -n 4', got {} (--launch)",
          engine::excerpt(text));
  return words;
}

TrainingLaunch ask_launcher(std::string_view text) {
  if (text.empty()) return {};
  check_started_alone(LauncherChoice::kAuto);
  TrainingLaunch result;
  result.words.words = words_of(text);
  result.words.path = command_path(result.words.words.front());
  const PrivateFolder folder;
  const std::string console = folder.path() + "/console.txt";
  std::error_code error;
  const std::string self = fs::read_symlink("/proc/self/exe", error).string();
  require<IoError>(!error, "[launch] expected the path of this program, got {}", error.message());
  fmt::print(stderr, "compare: asking {} how many processes it starts\n", engine::excerpt(text));
  const ProcessEnd end = run_process(self, {std::string(kTellLaunch)}, console, result.words);
  constexpr std::int64_t kMaxNbytes = 1 << 24;
  const std::string said = engine::read_text_file(console, kMaxNbytes);
  require(end.ok(), "[launch] expected {} to start a program that ends well, got {}{}",
          engine::excerpt(text), end.str(), last_lines(said));
  const std::vector<Launch> told = told_in(said);
  require(told.size() == 1,
          "[launch] expected {} to start processes of which one is the first, as mpirun, srun and "
          "torchrun do, got {} of these{}",
          engine::excerpt(text), told.size(), last_lines(said));
  result.launch = told.front();
  return result;
}

void tell_launch() {
  const Launch launch = find_launch(environment(), LauncherChoice::kAuto);
  if (launch.by == LauncherChoice::kThreads || launch.process != 0) return;
  const json told = {{"by", name_of(launch.by)},
                     {"processes", launch.num_processes},
                     {"local_processes", launch.num_local_processes},
                     {"hosts", launch.num_hosts ? json(*launch.num_hosts) : json(nullptr)},
                     {"has_mpi", launch.has_mpi}};
  fmt::print("{}{}\n", kBegin, told.dump());
}

void check_started_alone(LauncherChoice choice) {
  const Launch launch = find_launch(environment(), choice);
  require(launch.num_processes == 1,
          "[compare] expected to be started once, got {}: give the launcher's words to --launch, "
          "which starts each training by them, as --launch='mpirun -n 4'; or "
          "--parallel.launcher=threads, which takes no notice of who started it",
          launch.str());
}

}  // namespace tessera::tools
