// JSON files, and the literals that we write.
#include "engine/io/json.h"

#include <nlohmann/json.hpp>

#include "engine/io/text.h"
#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const char* const kTarget = "json";

void consume(std::string_view input) {
  const nlohmann::json text = engine::parse_json(engine::json_literal(input), "literal");
  promise(text.is_string(), "expected a literal of text to be text");
  promise(!engine::is_utf8(input) || text == input, "expected a literal to be read back");
  const nlohmann::json parsed = engine::parse_json(input, "input");
  promise(engine::parse_json(parsed.dump(), "again") == parsed, "expected the same value again");
}

}  // namespace tessera::fuzz
