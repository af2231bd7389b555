#include "tools/tokenizer/post_processor.h"

#include <fmt/core.h>

#include <string>

namespace tessera::tools {

PostProcessor::PostProcessor(const JsonNode& node, std::int64_t vocab_size) {
  if (!node.value().is_null()) read(node, vocab_size);
}

void PostProcessor::read(const JsonNode& node, std::int64_t vocab_size) {
  const std::string& type = node.type();
  if (type == "Sequence") {
    node.require_keys({"processors"});
    for (const JsonNode& step : node.at("processors").items()) read(step, vocab_size);
  } else if (type == "ByteLevel") {
    node.require_keys({"add_prefix_space", "trim_offsets", "use_regex"});
  } else if (type == "TemplateProcessing") {
    node.require_keys({"single", "pair", "special_tokens"});
    read_template(node, vocab_size);
  } else {
    node.refuse("type", "TemplateProcessing, ByteLevel or Sequence");
  }
}

void PostProcessor::read_template(const JsonNode& node, std::int64_t vocab_size) {
  std::vector<std::int32_t> before, after;
  bool has_text = false;
  for (const JsonNode& item : node.at("single").items()) {
    item.require_keys({"Sequence", "SpecialToken"});
    if (item.has("Sequence")) {
      const JsonNode sequence = item.at("Sequence");
      item.require(!item.has("SpecialToken"), "a Sequence or a SpecialToken");
      sequence.require(sequence.text("id") == "A" && !has_text, "the sequence A, once");
      has_text = true;
      continue;
    }
    const std::string& name = item.at("SpecialToken").text("id");
    for (const JsonNode& id : node.at("special_tokens").at(name.c_str()).at("ids").items()) {
      id.require(id.value().is_number_unsigned() &&
                     id.value().get<std::uint64_t>() < static_cast<std::uint64_t>(vocab_size),
                 fmt::format("ids below the {} tokens", vocab_size));
      (has_text ? after : before).push_back(id.value().get<std::int32_t>());
    }
  }
  node.at("single").require(has_text, "the sequence A, once");
  // Of several each is put around what the ones before have made.
  before_.insert(before_.begin(), before.begin(), before.end());
  after_.insert(after_.end(), after.begin(), after.end());
}

}  // namespace tessera::tools
