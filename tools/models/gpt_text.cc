#include "tools/models/gpt_text.h"

#include <nlohmann/json.hpp>

#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/io/jsonl.h"

namespace tessera::tools {

using engine::IoError;
using engine::require;

std::string to_text(const GptConfig& c) {
  return JsonRecord()
      .add("model", "gpt2")
      .add("layers", c.layers)
      .add("heads", c.heads)
      .add("dim", c.dim)
      .add("seq", c.seq)
      .add("vocab", c.vocab)
      .add("norm_eps", c.norm_eps)
      .text();
}

GptConfig parse_gpt_text(std::string_view text, std::string_view path) {
  const nlohmann::json all = engine::parse_json(text, path);
  const auto kind = all.is_object() ? all.find("model") : all.end();
  require<IoError>(kind != all.end() && *kind == "gpt2",
                   "[gpt] expected a model of train_transformer, got {} ({})",
                   engine::excerpt(text), path);
  const auto check = [&](const char* key, bool is_good) {
    require<IoError>(is_good, "[gpt] expected a number as {}, got {} ({})", key,
                     engine::excerpt(text), path);
  };
  const auto size = [&](const char* key) {
    const auto found = all.find(key);
    check(key, found != all.end() && found->is_number_integer());
    return found->get<std::int64_t>();
  };
  const auto eps = all.find("norm_eps");
  check("norm_eps", eps != all.end() && eps->is_number());
  const GptConfig config{.layers = size("layers"),
                         .heads = size("heads"),
                         .dim = size("dim"),
                         .seq = size("seq"),
                         .vocab = size("vocab"),
                         .norm_eps = eps->get<double>()};
  try {
    config.validate();
  } catch (const engine::InvalidArgument& e) {
    engine::fail<IoError>("{} ({})", e.what(), path);
  }
  return config;
}

}  // namespace tessera::tools
