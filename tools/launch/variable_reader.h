// The variables of one launcher, and what is wrong with them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tools/machine/environment.h"

namespace tessera::tools {

/// "RANK=3". The value is escaped, and cut if it is long.
std::string variable_text(std::string_view name, std::string_view value);
/// The value of a variable; null if it is unset or empty.
const std::string* find_variable(const Environment& environment, std::string_view name);

/// A variable that has a number.
struct NumberVariable {
  std::string_view name;
  std::string text;  ///< its value
  int value = 0;
  std::string str() const { return variable_text(name, text); }
};

/// Each of its errors is an InvalidArgument that names variables, values and the launcher.
class VariableReader {
 public:
  /// `names` are those of which an error tells when one is missing.
  VariableReader(const Environment& environment, std::string_view launcher,
                 std::vector<std::string_view> names)
      : environment_(environment), launcher_(launcher), names_(std::move(names)) {}

  const std::string* find(std::string_view name) const { return find_variable(environment_, name); }
  /// Throws where it is missing, as the others of this class.
  const std::string& text(std::string_view name) const;
  /// Of processes or hosts.
  NumberVariable number(std::string_view name) const { return number(name, 0, 1 << 16); }
  int port(std::string_view name) const { return number(name, 1, 65535).value; }
  /// `host`, which was read from the variable `name`. Throws for what is no name or address.
  std::string host(std::string_view name, std::string_view host) const;
  /// Throws unless `index` is below `count`.
  void require_below(const NumberVariable& index, const NumberVariable& count) const;
  /// Throws if `part` is above `whole`.
  void require_within(const NumberVariable& part, const NumberVariable& whole) const;
  /// "[launcher] expected `wanted`, got `got` (torchrun)"
  [[noreturn]] void fail(std::string_view wanted, std::string_view got) const;

 private:
  NumberVariable number(std::string_view name, int min, int max) const;

  const Environment& environment_;
  std::string_view launcher_;
  std::vector<std::string_view> names_;
};

}  // namespace tessera::tools
