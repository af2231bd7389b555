// Cutting a text at matches.
#pragma once

#include <algorithm>
#include <vector>

#include "tools/tokenizer/pre_tokenizer.h"
#include "tools/tokenizer/text/regex.h"

namespace tessera::tools {

/// A part of a text, between two matches or a match.
struct Part {
  Regex::Range range;
  bool is_match = false;
};

/// Joins parts as `behavior` says; those that it says nothing of stay, and kRemoved leaves out the
/// matches.
inline std::vector<Regex::Range> joined(const std::vector<Part>& parts, SplitBehavior behavior) {
  std::vector<Regex::Range> out;
  if (behavior == SplitBehavior::kMergedWithNext) {
    bool was_match = false;  // of the next one
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) {
      if (part->is_match && !was_match && !out.empty()) {
        out.back().begin = part->range.begin;
      } else {
        out.push_back(part->range);
      }
      was_match = part->is_match;
    }
    std::ranges::reverse(out);
    return out;
  }
  bool was_match = false;  // of the one before
  for (const Part& part : parts) {
    const bool joins = behavior == SplitBehavior::kContiguous ? part.is_match == was_match
                       : behavior == SplitBehavior::kMergedWithPrevious
                           ? part.is_match && !was_match
                           : false;
    was_match = part.is_match;
    if (joins && !out.empty()) {
      out.back().end = part.range.end;
    } else if (!part.is_match || behavior != SplitBehavior::kRemoved) {
      out.push_back(part.range);
    }
  }
  return out;
}

}  // namespace tessera::tools
