#include "tools/compare/made_by.h"

#include <fmt/chrono.h>
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "engine/io/text.h"
#include "tools/machine/cpu_model.h"
#include "tools/machine/environment_variable.h"
#include "tools/machine/limits.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

bool is_plain(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) != 0 ||
         std::string_view("_-./:=,+@%").find(c) != std::string_view::npos;
}

std::string quoted(const std::string& word) {
  if (!word.empty() && std::ranges::all_of(word, is_plain)) return word;
  std::string text(1, '\'');
  for (const char c : word) {
    if (c == '\'') {
      text.append("'\\''");
    } else {
      text.push_back(c);
    }
  }
  text.push_back('\'');
  return text;
}

// What a command prints; nothing if it fails.
std::optional<std::string> output_of(const std::string& command) {
  std::string text;
  std::array<char, 4096> part;
  int status = 0;
  {
    const auto close = [&status](std::FILE* pipe) { status = ::pclose(pipe); };
    const std::unique_ptr<std::FILE, decltype(close)> pipe(::popen(command.c_str(), "r"), close);
    if (pipe == nullptr) return std::nullopt;
    while (const std::size_t n = std::fread(part.data(), 1, part.size(), pipe.get())) {
      text.append(part.data(), n);
    }
  }
  if (status != 0) return std::nullopt;
  return text;
}

std::string compiler() {
#if defined(__clang__)
  const std::string name = "Clang " __clang_version__;
#else
  const std::string name = "GCC " __VERSION__;
#endif
#if defined(__OPTIMIZE__)
  return name + ", optimised";
#else
  return name + ", not optimised";
#endif
}

ordered_json load_averages() {
  std::array<double, 3> loads = {};
  if (::getloadavg(loads.data(), int(loads.size())) != int(loads.size())) return nullptr;
  return loads;
}

template <class T>
ordered_json unless_zero(T value) {
  return value == 0 ? ordered_json(nullptr) : ordered_json(value);
}

}  // namespace

std::string command_text(std::span<const std::string> words) {
  std::vector<std::string> all;
  for (const std::string& word : words) all.push_back(quoted(word));
  return engine::join(all, " ");
}

ordered_json commit_of(const std::string& folder) {
  const std::string git = "git -C " + quoted(folder) + " --no-optional-locks ";
  const auto id = output_of(git + "rev-parse HEAD 2>/dev/null");
  const auto changes = output_of(git + "status --porcelain --untracked-files=no 2>/dev/null");
  if (!id || !changes || id->size() < 40) return nullptr;
  return {{"id", id->substr(0, 40)}, {"changed", !changes->empty()}};
}

ordered_json made_by(std::span<const char* const> argv) {
  // Bazel says where the checkout is that it has just built this program of.
  const auto checkout = environment_variable("BUILD_WORKSPACE_DIRECTORY");
  std::vector<std::string> words(argv.begin(), argv.end());
  std::string command = command_text(words);
  if (checkout && !words.empty()) {
    command = "bazel run //tools:compare -- " + command_text(std::span(words).subspan(1));
  }
  const MachineLimits machine = read_limits();
  const auto now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  return {{"begun", fmt::format("{:%Y-%m-%d %H:%M:%S} UTC", fmt::gmtime(now))},
          {"command", command},
          {"commit", checkout ? commit_of(*checkout) : ordered_json(nullptr)},
          {"cpu", cpu_model()},
          {"cores", unless_zero(machine.num_cores)},
          {"usable_cores", machine.usable_cores()},
          {"load", load_averages()},
          {"memory_bytes", unless_zero(machine.memory_nbytes)},
          {"compiler", compiler()}};
}

}  // namespace tessera::tools
