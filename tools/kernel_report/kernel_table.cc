#include "tools/kernel_report/kernel_table.h"

#include <cxxabi.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <regex>
#include <set>
#include <sstream>
#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {

using engine::require;

namespace {

std::string demangled(const std::string& symbol) {
  if (!symbol.starts_with("_Z")) return symbol;  // else the name of a type
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(symbol.c_str(), nullptr, nullptr, &status), std::free);
  return status == 0 ? name.get() : symbol;
}

// "void tessera::ops::(anonymous namespace)::f<float, (int)4, true>(float*)" -> "ops::f<float, 4,
// true>"
std::string short_name(const std::string& symbol) {
  std::string name = demangled(symbol);
  static const std::pair<std::regex, const char*> kLeftOut[] = {
      {std::regex(R"(\(anonymous namespace\)::)"), ""},
      {std::regex(R"(\btessera::)"), ""},
      {std::regex(R"(\(bool\)0)"), "false"},
      {std::regex(R"(\(bool\)1)"), "true"},
      {std::regex(R"(\((unsigned )?(int|long|char|short)\)(-?\d))"), "$3"},
      {std::regex("^void "), ""},
  };
  for (const auto& [what, instead] : kLeftOut) name = std::regex_replace(name, what, instead);
  int depth = 0;  // the arguments begin outside of all <>
  for (std::size_t i = 0; i < name.size(); ++i) {
    depth += name[i] == '<' ? 1 : name[i] == '>' ? -1 : 0;
    if (name[i] == '(' && depth == 0) name.resize(i);
  }
  return name;
}

/// The numbers of `line` that `pattern` takes in brackets, in order; none if it is not there.
std::vector<std::int64_t> numbers_in(const std::string& line, const char* pattern) {
  std::smatch match;
  std::vector<std::int64_t> numbers;
  if (!std::regex_search(line, match, std::regex(pattern))) return numbers;
  for (std::size_t i = 1; i < match.size(); ++i) numbers.push_back(std::stoll(match[i]));
  return numbers;
}

void sort(KernelTable& table) {
  std::ranges::sort(table.kernels, {},
                    [](const KernelUse& k) { return std::pair(k.source, k.name); });
}

constexpr const char* kHead =
    "| kernel | source | registers | stack | spilled | loaded back | shared |";

std::string row(const KernelUse& k) {
  return fmt::format("| `{}` | {} | {} | {} | {} | {} | {} |", k.name, k.source, k.registers,
                     k.stack_nbytes, k.spill_store_nbytes, k.spill_load_nbytes, k.shared_nbytes);
}

std::string text_of(const KernelUse& k) {
  return fmt::format("{} registers, stack {}, spilled {}, loaded back {}, shared {}", k.registers,
                     k.stack_nbytes, k.spill_store_nbytes, k.spill_load_nbytes, k.shared_nbytes);
}

}  // namespace

KernelTable read_ptxas(std::string_view text) {
  KernelTable table;
  std::string release = "nvcc", source;
  std::set<std::string> archs;
  bool is_open = false;  // a kernel whose numbers are to come
  std::istringstream lines{std::string(text)};
  std::smatch match;
  static const std::regex kRelease("release ([0-9.]+)");
  static const std::regex kEntry("Compiling entry function '([^']+)' for '([^']+)'");
  static const std::regex kSerialized("\\(C75[0-9][0-9]\\)");
  for (std::string line; std::getline(lines, line);) {
    // A note, whatever the flags: products of warpgroups wait for each other.
    require(
        !std::regex_search(line, kSerialized),
        "[kernel_report] expected products of warpgroups that run as they are written, got '{}' "
        "({})",
        line, source);
    if (line.starts_with("file ")) {
      source = line.substr(5);
    } else if (std::regex_search(line, match, kRelease)) {
      release = fmt::format("nvcc {}", match[1].str());
    } else if (std::regex_search(line, match, kEntry)) {
      archs.insert(match[2]);
      table.kernels.push_back({.name = short_name(match[1]), .source = source});
      is_open = true;
    } else if (!is_open) {
      continue;  // functions that are no kernels, notes
    } else if (const auto spills = numbers_in(line,
                                              "([0-9]+) bytes stack frame, ([0-9]+) bytes spill "
                                              "stores, ([0-9]+) bytes spill loads");
               !spills.empty()) {
      KernelUse& kernel = table.kernels.back();
      kernel.stack_nbytes = spills[0];
      kernel.spill_store_nbytes = spills[1];
      kernel.spill_load_nbytes = spills[2];
    } else if (const auto used = numbers_in(line, "Used ([0-9]+) registers"); !used.empty()) {
      table.kernels.back().registers = used[0];
      const auto shared = numbers_in(line, "([0-9]+) bytes smem");
      if (!shared.empty()) table.kernels.back().shared_nbytes = shared[0];
      is_open = false;
    }
  }
  require(!table.kernels.empty(),
          "[kernel_report] expected kernels that nvcc compiled, got none: this build has no CUDA "
          "toolkit (see CUDA_HOME), or is one for the emulated device");
  for (const KernelUse& k : table.kernels) {
    require(k.registers > 0, "[kernel_report] expected the registers of a kernel, got none ({})",
            k.name);
  }
  table.compiler = fmt::format("{}, {}", release, fmt::join(archs, " and "));
  sort(table);
  return table;
}

std::string kernel_page(const KernelTable& table) {
  std::string page = fmt::format(
      R"(# Kernels

What each CUDA kernel takes, as the compiler says it: {}. Registers, stack and what is spilled to it and loaded back (bytes)
are of a thread; shared memory (bytes) is of a block, and what a launch asks for itself comes on top. An SM has 65,536 registers.

    ./bazelw run //tools:kernel_report > docs/kernels.md                      # this page
    ./bazelw run //tools:kernel_report -- --compare=docs/kernels.md           # what a change made of it

{}
|---|---|---|---|---|---|---|
)",
      table.compiler, kHead);
  for (const KernelUse& k : table.kernels) page += row(k) + "\n";
  return page;
}

KernelTable read_kernel_page(std::string_view page) {
  KernelTable table;
  std::istringstream lines{std::string(page)};
  std::smatch match;
  static const std::regex kCompiler(
      "compiler says it: (nvcc [0-9.]+, sm_[0-9a-z]+( and sm_[0-9a-z]+)*)\\.");
  static const std::regex kRow(
      "\\| `([^`]+)` \\| ([^ ]+) \\| ([0-9]{1,9}) \\| ([0-9]{1,9}) \\| ([0-9]{1,9}) \\| "
      "([0-9]{1,9}) \\| ([0-9]{1,9}) \\|");
  for (std::string line; std::getline(lines, line);) {
    if (std::regex_search(line, match, kCompiler)) table.compiler = match[1];
    if (!line.starts_with("| ") || line == kHead) continue;
    require(std::regex_match(line, match, kRow),
            "[kernel_report] expected a row of the page of kernels, got '{}'",
            engine::excerpt(line));
    const auto number = [&match](int i) { return std::stoll(match[i]); };
    table.kernels.push_back({.name = match[1],
                             .source = match[2],
                             .registers = number(3),
                             .stack_nbytes = number(4),
                             .spill_store_nbytes = number(5),
                             .spill_load_nbytes = number(6),
                             .shared_nbytes = number(7)});
  }
  require(!table.compiler.empty() && !table.kernels.empty(),
          "[kernel_report] expected a page that kernel_report printed, got none of its rows");
  sort(table);
  return table;
}

std::vector<std::string> changes(const KernelTable& before, const KernelTable& after) {
  std::vector<std::string> lines;
  if (before.compiler != after.compiler) {
    lines.push_back(fmt::format("compiler: {} -> {}", before.compiler, after.compiler));
  }
  using Key = std::pair<std::string, std::string>;
  std::map<Key, std::pair<const KernelUse*, const KernelUse*>> both;
  for (const KernelUse& k : before.kernels) both[{k.source, k.name}].first = &k;
  for (const KernelUse& k : after.kernels) both[{k.source, k.name}].second = &k;
  for (const auto& [key, uses] : both) {
    const auto& [was, is] = uses;
    const std::string what = fmt::format("{} ({})", key.second, key.first);
    if (was == nullptr) {
      lines.push_back(fmt::format("new: {}: {}", what, text_of(*is)));
    } else if (is == nullptr) {
      lines.push_back(fmt::format("gone: {}: {}", what, text_of(*was)));
    } else if (!(*was == *is)) {
      lines.push_back(fmt::format("{}: {} -> {}", what, text_of(*was), text_of(*is)));
    }
  }
  return lines;
}

}  // namespace tessera::tools
