#include "tools/cli/toml_file.h"

#include <fmt/format.h>

#include <sstream>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/text.h"
#include "tools/cli/toml_limits.h"
#include "tools/io/file_kind.h"

namespace {

struct ParserAsserts {};

[[noreturn]] void throw_parser_asserts() { throw ParserAsserts(); }

}  // namespace

// toml++ 3.3 asserts what some files break, such as a digit after the T of a time, and with NDEBUG
// goes on without it: here it is an error of the file in every build. And it holds most letters
// beyond ASCII for impossible when it asks whether they are blanks: they are none.
#undef NDEBUG
#define TOML_FLOAT_CHARCONV 1  // numbers as flags read them: one too small for a double is none
#define TOML_ASSERT(expr)                \
  do {                                   \
    if (!(expr)) throw_parser_asserts(); \
  } while (false)
#include <toml++/impl/forward_declarations.h>
#undef TOML_UNREACHABLE
#define TOML_UNREACHABLE return false
#include <toml++/impl/unicode.h>
#undef TOML_UNREACHABLE
#define TOML_UNREACHABLE __builtin_unreachable()
#include <toml++/toml.h>

namespace tessera::tools {
namespace {

constexpr std::int64_t kMaxNbytes = 1 << 20;

std::string shown(const toml::node& node) {
  if (node.is_table()) return "a table";
  if (const toml::array* array = node.as_array()) {
    return array->is_array_of_tables() ? "an array of tables" : "an array";
  }
  if (const auto* string = node.as_string())
    return fmt::format("'{}'", engine::excerpt(string->get()));
  std::string text;
  node.visit([&](const auto& value) {
    if constexpr (toml::is_value<decltype(value)>) {
      text = (std::ostringstream() << value).str();
    }
  });
  return text;
}

TomlEntry entry_of(std::string name, unsigned line, const toml::node& node) {
  TomlEntry entry{.name = std::move(name),
                  .line = line,
                  .value = {},
                  .is_table = node.is_table(),
                  .shown = shown(node)};
  if (const auto* boolean = node.as_boolean()) entry.value = boolean->get();
  if (const auto* integer = node.as_integer()) entry.value = integer->get();
  if (const auto* number = node.as_floating_point()) entry.value = number->get();
  if (const auto* string = node.as_string()) entry.value = string->get();
  return entry;
}

// Empty tables too, since their names may be wrong.
void visit_table(const toml::table& table, const std::string& prefix,
                 const std::function<void(const TomlEntry&)>& visit) {
  for (const auto& [key, node] : table) {
    std::string name = prefix + std::string(key.str());
    const toml::table* inner = node.as_table();
    if (inner != nullptr && !inner->empty()) {
      visit_table(*inner, name + ".", visit);
    } else {
      visit(entry_of(std::move(name), key.source().begin.line, node));
    }
  }
}

}  // namespace

void visit_toml_file(const std::string& path, std::string_view where,
                     const std::function<void(const TomlEntry&)>& visit) {
  const std::string text = engine::read_text_file(path, kMaxNbytes);
  if (const FileKind* kind = file_kind(std::string_view(text).substr(0, kFileKindNbytes))) {
    engine::fail<engine::IoError>("[{}] expected TOML, got {}{} ({})", where, kind->name,
                                  kind->is_json ? ": the config.toml of a run shows how options "
                                                  "are written"
                                                : kind->to_unpack(),
                                  engine::escaped(path));
  }
  check_toml_limits(text, path);
  toml::table table;
  try {
    table = toml::parse(text, path);
  } catch (const toml::parse_error& error) {
    engine::fail<engine::IoError>("[{}] expected TOML, got: {} ({}:{})", where,
                                  engine::excerpt(error.description()), engine::escaped(path),
                                  error.source().begin.line);
  } catch (const ParserAsserts&) {
    engine::fail<engine::IoError>("[{}] expected TOML, got what its parser does not take ({})",
                                  where, engine::escaped(path));
  }
  visit_table(table, "", visit);
}

std::optional<TomlEntry> toml_number(std::string_view text) {
  constexpr std::string_view kLetters = "0123456789abcdefABCDEFxo_.+-";
  constexpr std::size_t kMaxSize = 400;  // more digits than a double's
  if (text.size() > kMaxSize || text.find_first_not_of(kLetters) != text.npos) return std::nullopt;
  try {
    const toml::table table = toml::parse(fmt::format("v = {}", text));
    TomlEntry entry = entry_of("v", 1, *table.get("v"));
    const bool is_number = std::holds_alternative<std::int64_t>(entry.value) ||
                           std::holds_alternative<double>(entry.value);
    if (is_number) return entry;
  } catch (const toml::parse_error&) {
  } catch (const ParserAsserts&) {
  }
  return std::nullopt;
}

}  // namespace tessera::tools
