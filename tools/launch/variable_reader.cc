#include "tools/launch/variable_reader.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <system_error>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {

std::string variable_text(std::string_view name, std::string_view value) {
  return fmt::format("{}={}", name, engine::excerpt(value, 60));
}

const std::string* find_variable(const Environment& environment, std::string_view name) {
  const auto found = environment.find(std::string(name));
  return found == environment.end() || found->second.empty() ? nullptr : &found->second;
}

void VariableReader::fail(std::string_view wanted, std::string_view got) const {
  engine::fail("[launcher] expected {}, got {} ({})", wanted, got, launcher_);
}

const std::string& VariableReader::text(std::string_view name) const {
  if (const std::string* const value = find(name)) return *value;
  std::string others;
  for (const std::string_view other : names_) {
    const std::string* const value = find(other);
    if (value == nullptr) continue;
    others += (others.empty() ? " with " : ", ") + variable_text(other, *value);
  }
  fail(fmt::format("{}{}", name, others), "none");
}

NumberVariable VariableReader::number(std::string_view name, int min, int max) const {
  NumberVariable number{name, text(name)};
  const char* const end = number.text.data() + number.text.size();
  const auto [read, error] = std::from_chars(number.text.data(), end, number.value);
  if (error != std::errc() || read != end || number.value < min || number.value > max) {
    fail(fmt::format("a whole number from {} to {}", min, max), number.str());
  }
  return number;
}

std::string VariableReader::host(std::string_view name, std::string_view host) const {
  constexpr std::string_view kAllowed =  // in names and in both kinds of addresses
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._:%";
  if (host.empty() || host.find_first_not_of(kAllowed) != std::string_view::npos) {
    fail(fmt::format("a host in {}", name), variable_text(name, text(name)));
  }
  return std::string(host);
}

void VariableReader::require_below(const NumberVariable& index, const NumberVariable& count) const {
  if (index.value < count.value) return;
  fail(fmt::format("{} below {}", index.name, count.name),
       fmt::format("{}, {}", index.str(), count.str()));
}

void VariableReader::require_within(const NumberVariable& part, const NumberVariable& whole) const {
  if (part.value <= whole.value) return;
  fail(fmt::format("{} of at most {}", part.name, whole.name),
       fmt::format("{}, {}", part.str(), whole.str()));
}

}  // namespace tessera::tools
