#include "tools/tokenizer/tokenizer_file.h"

#include <algorithm>
#include <cstddef>
#include <nlohmann/json.hpp>
#include <string_view>
#include <unordered_set>
#include <utility>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/huggingface/model_folder.h"
#include "tools/tokenizer/json_node.h"
#include "tools/tokenizer/vocabulary.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;
using nlohmann::json;

constexpr const char* kEndOfText = "<|endoftext|>";  // of GPT-2

json read_json(const std::string& path) {
  const std::string text = engine::read_text_file(path, kMaxTokenizerNbytes);
  check_is_json(text, path);
  return engine::parse_json(text, path);
}

std::vector<AddedToken> read_added(const JsonNode& node, Vocabulary& vocabulary) {
  std::vector<AddedToken> added;
  if (!node.has("added_tokens")) return added;
  std::unordered_set<std::string_view> seen;
  for (const JsonNode& item : node.at("added_tokens").items()) {
    item.require_keys(
        {"id", "content", "single_word", "lstrip", "rstrip", "normalized", "special"});
    AddedToken token{.id = static_cast<std::int32_t>(item.integer("id", Vocabulary::kMaxId)),
                     .content = item.text("content")};
    token.single_word = item.boolean("single_word", false);
    token.lstrip = item.boolean("lstrip", false);
    token.rstrip = item.boolean("rstrip", false);
    token.special = item.boolean("special", false);
    token.normalized = item.boolean("normalized", !token.special);
    require<IoError>(seen.insert(item.text("content")).second,
                     "[tokenizer] expected added tokens that differ, got {} twice ({})",
                     engine::excerpt(token.content), item.place());
    vocabulary.add(token.content, token.id, item);
    added.push_back(std::move(token));
  }
  return added;
}

/// A merge is "a b", or a list of two.
std::pair<std::string_view, std::string_view> pair_of(const JsonNode& node) {
  if (node.value().is_array()) {
    const std::vector<JsonNode> both = node.items();
    node.require(both.size() == 2, "a merge of two tokens");
    return {both[0].text(), both[1].text()};
  }
  const std::string_view text = node.text();
  const std::size_t space = text.find(' ');
  node.require(
      space != std::string_view::npos && text.find(' ', space + 1) == std::string_view::npos,
      "a merge of two tokens with a space between them");
  return {text.substr(0, space), text.substr(space + 1)};
}

void require_bpe(const JsonNode& model) {
  if (model.has("type") && model.type() != "BPE") model.refuse("type", "BPE");
  model.require_keys({"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                      "fuse_unk", "byte_fallback", "ignore_merges", "vocab", "merges"});
  if (model.has("dropout") && model.at("dropout").value() != json(0.0)) {
    model.refuse("dropout", "none");
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (model.has(key) && !model.text(key).empty()) model.refuse(key, "none");
  }
}

BpeOptions read_options(const JsonNode& model, const Vocabulary& vocabulary) {
  BpeOptions options;
  options.ignore_merges = model.boolean("ignore_merges", false);
  options.byte_fallback = model.boolean("byte_fallback", false);
  options.fuse_unknown = model.boolean("fuse_unk", false);
  if (model.has("unk_token")) {
    options.unknown = vocabulary.find(model.text("unk_token"));
    model.at("unk_token").require(options.unknown.has_value(), "a token of the vocabulary");
  }
  return options;
}

std::vector<Merge> read_merges(const JsonNode& model, const Vocabulary& vocabulary) {
  std::vector<Merge> merges;
  for (const JsonNode& node : model.at("merges").items()) {
    const auto [left, right] = pair_of(node);
    merges.push_back(vocabulary.merge(left, right, node));
  }
  return merges;
}

}  // namespace

TokenizerParts read_tokenizer_json(const std::string& path) {
  json all = read_json(path);
  const engine::JsonEnd end(all);
  const JsonNode file(all, path);
  file.require_keys({"version", "truncation", "padding", "added_tokens", "normalizer",
                     "pre_tokenizer", "post_processor", "decoder", "model"});
  if (file.has("version") && file.text("version") != "1.0") file.refuse("version", "1.0");
  for (const char* key : {"truncation", "padding"}) {
    if (file.has(key)) file.refuse(key, "null, as no text is cut or filled up,");
  }
  const JsonNode model = file.at("model");
  require_bpe(model);
  const auto part = [&](const char* key) {
    static const json null;
    return file.has(key) ? file.at(key) : JsonNode(null, path);
  };
  Vocabulary vocabulary(model.at("vocab"));
  const std::vector<Merge> merges = read_merges(model, vocabulary);
  BpeOptions options = read_options(model, vocabulary);
  PreTokenizer pre_tokenizer(part("pre_tokenizer"));
  options.is_byte_level = pre_tokenizer.is_byte_level();
  Bpe bpe(vocabulary.ids(), merges, options);
  std::vector<AddedToken> added = read_added(file, vocabulary);
  std::vector<std::string> tokens = vocabulary.by_id(path);
  const auto num_tokens = std::ssize(tokens);
  Normalizer normalizer(part("normalizer"));
  AddedTokens finder(std::move(added), normalizer, path + ": added_tokens");
  return {.tokens = std::move(tokens),
          .normalizer = std::move(normalizer),
          .pre_tokenizer = std::move(pre_tokenizer),
          .added = std::move(finder),
          .bpe = std::move(bpe),
          .post_processor = PostProcessor(part("post_processor"), num_tokens),
          .decoder = Decoder(part("decoder"))};
}

TokenizerParts read_gpt2_tokenizer(const std::string& folder) {
  const std::string more = folder + "/added_tokens.json";
  require<IoError>(is_missing(more),
                   "[tokenizer] expected no added_tokens.json beside vocab.json, got one: save the "
                   "tokenizer as tokenizer.json ({})",
                   more);
  json all = read_json(folder + "/vocab.json");
  const engine::JsonEnd end(all);
  const Vocabulary vocabulary(JsonNode(all, folder + "/vocab.json"));
  const std::string path = folder + "/merges.txt";
  const std::string text = engine::read_text_file(path, kMaxTokenizerNbytes);
  std::vector<Merge> merges;
  std::int64_t number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t stop = std::min(text.find('\n', begin), text.size());
    std::string_view line = std::string_view(text).substr(begin, stop - begin);
    begin = stop + 1;
    ++number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty() || line.starts_with("#version")) continue;
    const json merge = std::string(line);
    const JsonNode node(merge, fmt::format("{}:{}", path, number));
    const auto [left, right] = pair_of(node);
    merges.push_back(vocabulary.merge(left, right, node));
  }
  std::vector<AddedToken> added;
  const std::optional<std::int32_t> id = vocabulary.find(kEndOfText);
  if (id) added.push_back({.id = *id, .content = kEndOfText, .special = true});
  Normalizer none;
  AddedTokens finder(std::move(added), none, folder + "/vocab.json");
  return {.tokens = vocabulary.by_id(folder + "/vocab.json"),
          .pre_tokenizer = PreTokenizer::byte_level(/*add_prefix_space=*/false),
          .added = std::move(finder),
          .bpe = Bpe(vocabulary.ids(), merges, {.is_byte_level = true}),
          .decoder = Decoder::byte_level(),
          .bos = id,
          .eos = id};
}

namespace {

// Calls `read` with tokenizer_config.json, if it is there.
template <class Read>
void with_config(const std::string& folder, const Read& read) {
  const std::string path = folder + "/tokenizer_config.json";
  if (is_missing(path)) return;
  json all = read_json(path);
  const engine::JsonEnd end(all);
  read(JsonNode(all, path));
}

void read_bos_and_eos(const JsonNode& file, TokenizerParts& parts) {
  const auto read = [&](const char* key, std::optional<std::int32_t>& id) {
    file.require_object();
    if (file.value().contains(key)) id.reset();  // null: none, also of GPT-2's
    if (!file.has(key)) return;
    const JsonNode node = file.at(key);
    const std::string& text = node.value().is_object() ? node.text("content") : node.text();
    const auto found = std::ranges::find(parts.tokens, text);
    node.require(found != parts.tokens.end(), "a token of the tokenizer");
    id = static_cast<std::int32_t>(found - parts.tokens.begin());
  };
  read("bos_token", parts.bos);
  read("eos_token", parts.eos);
}

}  // namespace

void read_bos_and_eos(const std::string& folder, TokenizerParts& parts) {
  with_config(folder, [&](const JsonNode& file) { read_bos_and_eos(file, parts); });
}

void read_gpt2_tokenizer_config(const std::string& folder, TokenizerParts& parts) {
  with_config(folder, [&](const JsonNode& file) {
    read_bos_and_eos(file, parts);
    parts.pre_tokenizer = PreTokenizer::byte_level(file.boolean("add_prefix_space", false));
    const auto around = [&](const char* key, std::optional<std::int32_t> id) {
      return file.boolean(key, false) ? id : std::nullopt;
    };
    parts.post_processor =
        PostProcessor(around("add_bos_token", parts.bos), around("add_eos_token", parts.eos));
  });
}

}  // namespace tessera::tools
