#include "tools/tokenizer/decoder.h"

#include <cstddef>
#include <optional>
#include <utility>

#include "engine/io/text.h"
#include "tools/tokenizer/normalizer.h"
#include "tools/tokenizer/text/utf8.h"

namespace tessera::tools {
namespace {

std::string concatenated(const std::vector<std::string>& tokens) {
  std::string text;
  for (const std::string& token : tokens) text += token;
  return text;
}

int digit_of(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

/// The byte that a token such as <0x0A> stands for.
std::optional<char> byte_of(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return std::nullopt;
  const int high = digit_of(token[3]), low = digit_of(token[4]);
  if (high < 0 || low < 0) return std::nullopt;
  return static_cast<char>(high * 16 + low);
}

}  // namespace

Decoder::Decoder(const JsonNode& node) {
  if (!node.value().is_null()) read(node);
}

Decoder Decoder::byte_level() {
  Decoder made;
  made.is_none_ = false;
  made.steps_.emplace_back(ByteLevel());
  return made;
}

void Decoder::read(const JsonNode& node) {
  constexpr std::int64_t kMaxStrip = 1 << 20;
  const std::string& type = node.type();
  if (type != "Sequence") node.require_step(steps_.size());
  is_none_ = false;
  if (type == "Sequence") {
    node.require_keys({"decoders"});
    for (const JsonNode& step : node.at("decoders").items()) read(step);
  } else if (type == "ByteLevel") {
    node.require_keys({"add_prefix_space", "trim_offsets", "use_regex"});
    steps_.emplace_back(ByteLevel());
  } else if (type == "Replace") {
    node.require_keys({"pattern", "content"});
    steps_.emplace_back(Replace{read_pattern(node), node.text("content")});
  } else if (type == "ByteFallback") {
    node.require_keys({});
    steps_.emplace_back(ByteFallback());
  } else if (type == "Fuse") {
    node.require_keys({});
    steps_.emplace_back(Fuse());
  } else if (type == "Strip") {
    node.require_keys({"content", "start", "stop"});
    steps_.emplace_back(Strip{node.character("content"), node.integer("start", kMaxStrip),
                              node.integer("stop", kMaxStrip)});
  } else if (type == "Metaspace") {
    node.require_keys({"replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"});
    const bool never = node.has("prepend_scheme") ? node.text("prepend_scheme") == "never"
                                                  : !node.boolean("add_prefix_space", true);
    steps_.emplace_back(Metaspace{node.character("replacement"), !never});
  } else {
    node.refuse("type", "ByteLevel, Replace, ByteFallback, Fuse, Strip, Metaspace or Sequence");
  }
}

std::string Decoder::text_of(std::vector<std::string> tokens) const {
  if (is_none_) return engine::join(tokens, " ");
  for (const Step& step : steps_) {
    tokens = std::visit([&](const auto& s) { return run(s, std::move(tokens)); }, step);
  }
  return concatenated(tokens);
}

Decoder::Tokens Decoder::run(const ByteLevel& step, Tokens tokens) {
  std::string bytes;
  for (const std::string& token : tokens) bytes += step.alphabet.bytes_of(token).value_or(token);
  std::string buffer;
  return {std::string(valid_utf8(bytes, buffer))};
}

Decoder::Tokens Decoder::run(const Replace& step, Tokens tokens) {
  RegexScratch scratch;
  std::size_t nbytes = 0;  // of all so far
  for (std::string& token : tokens) {
    token = replaced(token, step.regex, step.text, scratch, kMaxTextNbytes - nbytes);
    nbytes += token.size();
  }
  return tokens;
}

Decoder::Tokens Decoder::run(const ByteFallback&, const Tokens& tokens) {
  Tokens out;
  std::string bytes;  // of the tokens before
  const auto flush = [&] {
    if (bytes.empty()) return;
    if (engine::is_utf8(bytes)) {
      out.push_back(bytes);
    } else {
      out.insert(out.end(), bytes.size(), to_utf8(kReplacement));
    }
    bytes.clear();
  };
  for (const std::string& token : tokens) {
    if (const std::optional<char> byte = byte_of(token)) {
      bytes += *byte;
    } else {
      flush();
      out.push_back(token);
    }
  }
  flush();
  return out;
}

Decoder::Tokens Decoder::run(const Fuse&, const Tokens& tokens) { return {concatenated(tokens)}; }

Decoder::Tokens Decoder::run(const Strip& step, Tokens tokens) {
  const std::string sign = to_utf8(step.character);
  for (std::string& token : tokens) {
    std::string_view text = token;
    for (std::int64_t i = 0; i < step.start && text.starts_with(sign); ++i) {
      text.remove_prefix(sign.size());
    }
    for (std::int64_t i = 0; i < step.stop && text.ends_with(sign); ++i) {
      text.remove_suffix(sign.size());
    }
    token = std::string(text);
  }
  return tokens;
}

Decoder::Tokens Decoder::run(const Metaspace& step, Tokens tokens) {
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::string text;
    for (std::size_t at = 0; at < tokens[i].size();) {
      const char32_t character = next_character(tokens[i], at);
      if (character != step.replacement) {
        append_character(text, character);
      } else if (i > 0 || !step.prepends) {
        text += ' ';
      }
    }
    tokens[i] = std::move(text);
  }
  return tokens;
}

}  // namespace tessera::tools
