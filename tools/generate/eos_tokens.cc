#include "tools/generate/eos_tokens.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/huggingface/config_file.h"
#include "tools/huggingface/model_folder.h"

namespace tessera::tools {

using nlohmann::json;

std::set<std::int32_t> read_eos_tokens(const std::string& folder, const Tokenizer& tokenizer) {
  std::set<std::int32_t> tokens;
  for (const char* name : {"/generation_config.json", "/config.json"}) {
    const std::string path = folder + name;
    if (is_missing(path)) continue;
    json all = engine::parse_json(engine::read_text_file(path, kMaxConfigNbytes), path);
    const engine::JsonEnd end(all);
    const auto found = all.is_object() ? all.find("eos_token_id") : all.end();
    if (found == all.end() || found->is_null()) continue;
    const auto add = [&](const json& id) {
      const bool is_id =
          id.is_number_integer() && id >= 0 && id <= std::numeric_limits<std::int32_t>::max();
      engine::require<engine::IoError>(
          is_id,
          "[generate] expected the id of a token, or a list of ids, got {} (eos_token_id, {})",
          engine::excerpt(id.dump(-1, ' ', true)), path);
      tokens.insert(id.get<std::int32_t>());
    };
    if (found->is_array()) {
      for (const json& id : *found) add(id);
    } else {
      add(*found);
    }
    return tokens;
  }
  if (const auto eos = tokenizer.eos()) tokens.insert(*eos);
  return tokens;
}

}  // namespace tessera::tools
