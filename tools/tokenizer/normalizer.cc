#include "tools/tokenizer/normalizer.h"

#include <utility>

#include "engine/error.h"
#include "engine/io/text.h"
#include "tools/tokenizer/text/regex_syntax.h"
#include "tools/tokenizer/text/utf8.h"

namespace tessera::tools {

using engine::require;

Regex read_pattern(const JsonNode& node) {
  const JsonNode pattern = node.at("pattern");
  pattern.require_keys({"String", "Regex"});
  pattern.require(pattern.has("String") != pattern.has("Regex"), "a String or a Regex");
  const bool is_regex = pattern.has("Regex");
  const JsonNode text = pattern.at(is_regex ? "Regex" : "String");
  text.require(!text.text().empty(), "a pattern that is not empty");
  return {is_regex ? text.text() : literal_pattern(text.text()), text.place()};
}

std::string replaced(std::string_view text, const Regex& regex, std::string_view with,
                     RegexScratch& scratch, std::size_t max_nbytes) {
  std::string out;
  regex.visit_all(text, scratch, [&](Regex::Range range, bool is_match) {
    const std::string_view part =
        is_match ? with : text.substr(range.begin, range.end - range.begin);
    require<engine::IoError>(part.size() <= max_nbytes - out.size(),
                             "[tokenizer] expected a text of at most {} bytes after a Replace, got "
                             "more: give it in parts ({})",
                             max_nbytes, regex.place());
    out += part;
  });
  return out;
}

Normalizer::Normalizer(const JsonNode& node) {
  if (!node.value().is_null()) read(node);
}

void Normalizer::read(const JsonNode& node) {
  const std::string& type = node.type();
  if (type != "Sequence") node.require_step(steps_.size());
  if (NormalForm::is_known(type)) {
    node.require_keys({});
    steps_.emplace_back(NormalForm(type));
  } else if (type == "Sequence") {
    node.require_keys({"normalizers"});
    for (const JsonNode& step : node.at("normalizers").items()) read(step);
  } else if (type == "Prepend") {
    node.require_keys({"prepend"});
    steps_.emplace_back(Prepend{node.text("prepend")});
  } else if (type == "Replace") {
    node.require_keys({"pattern", "content"});
    steps_.emplace_back(Replace{read_pattern(node), node.text("content")});
  } else {
    node.refuse("type", "NFC, NFD, NFKC, NFKD, Prepend, Replace or Sequence");
  }
}

std::string Normalizer::run(const Step& step, std::string_view text, RegexScratch& scratch) {
  if (const auto* prepend = std::get_if<Prepend>(&step)) {
    return (text.empty() ? "" : prepend->text) + std::string(text);
  }
  if (const auto* replace = std::get_if<Replace>(&step)) {
    return replaced(text, replace->regex, replace->text, scratch);
  }
  return std::get<NormalForm>(step).normalized(text);
}

std::string_view Normalizer::normalized(std::string_view text, RegexScratch& scratch,
                                        std::string& buffer) const {
  for (const Step& step : steps_) {
    if (std::holds_alternative<NormalForm>(step) && is_ascii(text)) continue;
    buffer = run(step, text, scratch);
    text = buffer;
    require<engine::IoError>(text.size() <= kMaxTextNbytes,
                             "[tokenizer] expected a text of at most {} bytes when normalized, got "
                             "{}: encode it in parts",
                             kMaxTextNbytes, text.size());
  }
  return text;
}

}  // namespace tessera::tools
