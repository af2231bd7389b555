// A tokenizer.json that is small enough to know its ids by heart.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tessera::testing {

/// Bytes that are letters a to d, and the space, which byte-level files write as U+0120. Merges, in
/// order: ab, abc (ab + c), cd, the space with ab.
inline nlohmann::json small_tokenizer() {
  return nlohmann::json::parse(R"({
    "version": "1.0", "truncation": null, "padding": null,
    "added_tokens": [{"id": 9, "content": "<e>", "single_word": false, "lstrip": false,
                      "rstrip": false, "normalized": false, "special": true}],
    "normalizer": null,
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                      "use_regex": true},
    "post_processor": null,
    "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                "use_regex": true},
    "model": {"type": "BPE", "dropout": null, "unk_token": null,
              "continuing_subword_prefix": "", "end_of_word_suffix": "", "fuse_unk": false,
              "byte_fallback": false, "ignore_merges": false,
              "vocab": {"a": 0, "b": 1, "c": 2, "d": 3, "Ġ": 4, "ab": 5, "abc": 6, "cd": 7,
                        "Ġab": 8},
              "merges": [["a", "b"], ["ab", "c"], ["c", "d"], ["Ġ", "ab"]]}})");
}

/// small_tokenizer() that puts <e> before each text, or after it.
inline nlohmann::json small_tokenizer_with_end(bool is_first) {
  nlohmann::json file = small_tokenizer(), end, text;
  end["SpecialToken"] = {{"id", "<e>"}, {"type_id", 0}};
  text["Sequence"] = {{"id", "A"}, {"type_id", 0}};
  file["post_processor"] = {
      {"type", "TemplateProcessing"},
      {"pair", nlohmann::json::array()},
      {"single",
       is_first ? nlohmann::json::array({end, text}) : nlohmann::json::array({text, end})},
      {"special_tokens", {{"<e>", {{"id", "<e>"}, {"ids", {9}}, {"tokens", {"<e>"}}}}}}};
  return file;
}

}  // namespace tessera::testing
