#include "tools/tokenizer/pre_tokenizer.h"

#include <unicode/uchar.h>

#include <array>
#include <cstddef>
#include <utility>

#include "tools/tokenizer/normalizer.h"
#include "tools/tokenizer/split.h"
#include "tools/tokenizer/text/regex_syntax.h"
#include "tools/tokenizer/text/utf8.h"

namespace tessera::tools {
namespace {

// GPT-2's words: letters, digits or other marks, with the space before them, and the endings of
// English apart.
constexpr const char* kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

constexpr std::array<std::pair<std::string_view, SplitBehavior>, 5> kBehaviors = {
    {{"Removed", SplitBehavior::kRemoved},
     {"Isolated", SplitBehavior::kIsolated},
     {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
     {"MergedWithNext", SplitBehavior::kMergedWithNext},
     {"Contiguous", SplitBehavior::kContiguous}}};

SplitBehavior read_behavior(const JsonNode& node) {
  for (const auto& [name, behavior] : kBehaviors) {
    if (node.text("behavior") == name) return behavior;
  }
  node.refuse("behavior", "Removed, Isolated, MergedWithPrevious, MergedWithNext or Contiguous");
}

std::string_view part_of(std::string_view text, Regex::Range range) {
  return text.substr(range.begin, range.end - range.begin);
}

bool is_digit(char32_t character) {
  if (character < 128) return character >= '0' && character <= '9';
  return (U_GET_GC_MASK(static_cast<UChar32>(character)) & U_GC_N_MASK) != 0;
}

template <class Visit>
void visit_digits(std::string_view text, bool individual, const Visit& visit) {
  std::size_t begin = 0;
  bool was_digit = false;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t here = at;
    const bool is_one = is_digit(next_character(text, at));
    if (here > begin && (is_one != was_digit || (is_one && individual))) {
      visit(Regex::Range{begin, here});
      begin = here;
    }
    was_digit = is_one;
  }
  visit(Regex::Range{begin, text.size()});
}

template <class Visit>
void visit_parts(std::string_view text, const Regex& regex, SplitBehavior behavior, bool invert,
                 RegexScratch& scratch, const Visit& visit) {
  const bool is_simple =
      behavior == SplitBehavior::kIsolated || behavior == SplitBehavior::kRemoved;
  std::vector<Part> parts;
  // Each search is over before the next step, which has the same scratch, begins one.
  regex.visit_all(text, scratch, [&](Regex::Range range, bool is_match) {
    if (!is_simple) {
      parts.push_back({range, is_match != invert});
    } else if (is_match == invert || behavior == SplitBehavior::kIsolated) {
      visit(range);
    }
  });
  for (const Regex::Range& range : joined(parts, behavior)) visit(range);
}

}  // namespace

PreTokenizer::PreTokenizer(const JsonNode& node) {
  if (!node.value().is_null()) read(node);
}

PreTokenizer PreTokenizer::byte_level(bool add_prefix_space) {
  PreTokenizer made;
  made.steps_.emplace_back(ByteLevel{add_prefix_space, {Regex(kGpt2Pattern, "GPT-2's words")}});
  made.is_byte_level_ = true;
  return made;
}

void PreTokenizer::read(const JsonNode& node) {
  const std::string& type = node.type();
  node.require(!is_byte_level_, "nothing after ByteLevel");
  if (type != "Sequence") node.require_step(steps_.size());
  if (type == "Sequence") {
    node.require_keys({"pretokenizers"});
    for (const JsonNode& step : node.at("pretokenizers").items()) read(step);
  } else if (type == "ByteLevel") {
    node.require_keys({"add_prefix_space", "trim_offsets", "use_regex"});
    ByteLevel step{node.boolean("add_prefix_space", true), {}};
    if (node.boolean("use_regex", true)) step.regex.emplace_back(kGpt2Pattern, node.place());
    steps_.emplace_back(std::move(step));
    is_byte_level_ = true;
  } else if (type == "Split") {
    node.require_keys({"pattern", "behavior", "invert"});
    steps_.emplace_back(
        Split{read_pattern(node), read_behavior(node), node.boolean("invert", false)});
  } else if (type == "Digits") {
    node.require_keys({"individual_digits"});
    steps_.emplace_back(Digits{node.boolean("individual_digits", false)});
  } else if (type == "Metaspace") {
    read_metaspace(node);
  } else {
    node.refuse("type", "ByteLevel, Split, Digits, Metaspace or Sequence");
  }
}

void PreTokenizer::read_metaspace(const JsonNode& node) {
  using Prepend = Metaspace::Prepend;
  node.require_keys({"replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep"});
  Metaspace step{to_utf8(node.character("replacement")), Prepend::kAlways, {}};
  const bool adds = node.boolean("add_prefix_space", true);
  const std::string scheme = node.has("prepend_scheme") ? node.text("prepend_scheme")
                             : adds                     ? "always"
                                                        : "never";
  if (scheme == "first") {
    step.prepend = Prepend::kFirst;
  } else if (scheme == "never") {
    step.prepend = Prepend::kNever;
  } else if (scheme != "always") {
    node.refuse("prepend_scheme", "always, first or never");
  }
  node.require(adds || scheme == "never", "prepend_scheme never without add_prefix_space");
  if (node.boolean("split", true)) {
    step.regex.emplace_back(literal_pattern(step.replacement), node.place());
  }
  steps_.emplace_back(std::move(step));
}

void PreTokenizer::run(std::size_t step, std::string_view text, bool is_start,
                       RegexScratch& scratch, const Sink& sink) const {
  if (text.empty()) return;
  if (step == steps_.size()) return sink(text);
  const auto go_on = [&](std::string_view whole, Regex::Range range) {
    run(step + 1, part_of(whole, range), is_start && range.begin == 0, scratch, sink);
  };
  if (const auto* byte_level = std::get_if<ByteLevel>(&steps_[step])) {
    std::string with_space;
    if (byte_level->add_prefix_space && !text.starts_with(' ')) {
      text = with_space.append(" ").append(text);
    }
    if (byte_level->regex.empty()) return go_on(text, {0, text.size()});
    byte_level->regex[0].visit_all(text, scratch,
                                   [&](Regex::Range range, bool) { go_on(text, range); });
  } else if (const auto* split = std::get_if<Split>(&steps_[step])) {
    visit_parts(text, split->regex, split->behavior, split->invert, scratch,
                [&](Regex::Range range) { go_on(text, range); });
  } else if (const auto* digits = std::get_if<Digits>(&steps_[step])) {
    visit_digits(text, digits->individual, [&](Regex::Range range) { go_on(text, range); });
  } else if (const auto* metaspace = std::get_if<Metaspace>(&steps_[step])) {
    using Prepend = Metaspace::Prepend;
    const std::string& sign = metaspace->replacement;
    std::string replaced;
    for (const char c : text) {
      if (c == ' ') {
        replaced += sign;
      } else {
        replaced += c;
      }
    }
    const bool prepends = metaspace->prepend == Prepend::kAlways ||
                          (metaspace->prepend == Prepend::kFirst && is_start);
    if (prepends && !replaced.starts_with(sign)) replaced.insert(0, sign);
    if (metaspace->regex.empty()) return go_on(replaced, {0, replaced.size()});
    visit_parts(replaced, metaspace->regex[0], SplitBehavior::kMergedWithNext, false, scratch,
                [&](Regex::Range range) { go_on(replaced, range); });
  }
}

}  // namespace tessera::tools
