#include "tests/testing/json.h"

#include <nlohmann/json.hpp>
#include <ostream>

namespace nlohmann {

void PrintTo(const json& value, std::ostream* out) { *out << value; }
void PrintTo(const ordered_json& value, std::ostream* out) { *out << value; }

}  // namespace nlohmann

namespace tessera::testing {

using nlohmann::json;
using nlohmann::ordered_json;

json parse_json(std::string_view text) { return json::parse(text); }
ordered_json parse_ordered_json(std::string_view text) { return ordered_json::parse(text); }
bool is_json(std::string_view text) { return json::accept(text); }

std::string json_text(const json& value) { return value.dump(); }
std::string json_text(const ordered_json& value) { return value.dump(); }

}  // namespace tessera::testing
