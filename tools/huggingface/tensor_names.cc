#include "tools/huggingface/tensor_names.h"

#include <algorithm>
#include <cstddef>
#include <map>
#include <set>
#include <string_view>
#include <tuple>

#include "engine/error.h"
#include "engine/io/text.h"

namespace tessera::tools {
namespace {

using engine::TensorSpec;

constexpr std::size_t kMostLines = 8;
constexpr std::size_t kMostCompared = 512;  // each with each: a hostile file must not cost hours

std::string shown(const TensorSpec& tensor) {
  return fmt::format("{} {}", engine::shown_name(tensor.name), engine::to_string(tensor.shape));
}

/// What most of `unexpected` have before a name of `missing`, up to a dot; empty: nothing.
std::string common_prefix(std::span<const TensorSpec> missing,
                          std::span<const TensorSpec> unexpected) {
  std::set<std::string_view> names;
  for (const TensorSpec& tensor : missing) names.insert(tensor.name);
  std::map<std::string_view, std::size_t> counts;
  for (const TensorSpec& tensor : unexpected) {
    const std::string_view name = tensor.name;
    for (std::size_t dot = name.find('.'); dot != name.npos; dot = name.find('.', dot + 1)) {
      if (names.contains(name.substr(dot + 1))) ++counts[name.substr(0, dot + 1)];
    }
  }
  const auto most = std::ranges::max_element(counts, {}, [](const auto& c) { return c.second; });
  const bool is_common = most != counts.end() && most->second >= 2 &&
                         2 * most->second >= std::min(missing.size(), unexpected.size());
  return is_common ? std::string(most->first) : "";
}

struct Pair {
  std::size_t distance;
  bool other_shape;
  std::size_t missing, unexpected;  // which
};

/// Each name at most once, the nearest first, where `prefix` of unexpected ones does not count;
/// farther than a third of its length is another name.
std::vector<Pair> nearest_pairs(std::span<const TensorSpec> missing,
                                std::span<const TensorSpec> unexpected, std::string_view prefix) {
  std::vector<Pair> pairs;
  for (std::size_t m = 0; m < std::min(missing.size(), kMostCompared); ++m) {
    for (std::size_t u = 0; u < std::min(unexpected.size(), kMostCompared); ++u) {
      std::string_view a = missing[m].name, b = unexpected[u].name;
      if (b.starts_with(prefix)) b.remove_prefix(prefix.size());
      const std::size_t limit = std::max(a.size(), std::size_t{3}) / 3 + 1;
      const std::size_t distance = engine::edit_distance(a, b, limit);
      if (distance < limit)
        pairs.push_back({distance, missing[m].shape != unexpected[u].shape, m, u});
    }
  }
  std::ranges::sort(pairs, {}, [](const Pair& p) {
    return std::tuple(p.distance, p.other_shape, p.missing, p.unexpected);
  });
  std::set<std::size_t> used_missing, used_unexpected;
  std::erase_if(pairs, [&](const Pair& p) {
    if (used_missing.contains(p.missing) || used_unexpected.contains(p.unexpected)) return true;
    used_missing.insert(p.missing);
    used_unexpected.insert(p.unexpected);
    return false;
  });
  return pairs;
}

}  // namespace

std::vector<std::string> name_differences(std::span<const TensorSpec> missing,
                                          std::span<const TensorSpec> unexpected,
                                          std::string_view own) {
  std::vector<TensorSpec> wanted(missing.begin(), missing.end());
  std::vector<TensorSpec> there(unexpected.begin(), unexpected.end());
  std::vector<std::string> lines;
  const std::string prefix = common_prefix(missing, unexpected);
  if (!prefix.empty()) {
    // `own` may stay: files have it or not, and a head has only what is before it.
    std::string_view rest = prefix;
    if (rest.ends_with(own)) rest.remove_suffix(own.size());
    std::set<std::string> names, found;  // in the file
    for (const TensorSpec& tensor : there) names.insert(tensor.name);
    const std::size_t num_wanted = wanted.size();
    const auto example = std::ranges::find_if(
        wanted, [&](const TensorSpec& t) { return names.contains(prefix + t.name); });
    lines.push_back(fmt::format("{} is there as {}", engine::shown_name(example->name),
                                engine::shown_name(prefix + example->name)));
    std::erase_if(wanted, [&](const TensorSpec& t) {
      for (const std::string& name : {prefix + t.name, std::string(rest) + t.name}) {
        if (names.contains(name) && found.insert(name).second) return true;
      }
      return false;
    });
    std::erase_if(there, [&](const TensorSpec& t) { return found.contains(t.name); });
    lines.back() += fmt::format(
        ", and so {} {} in all: save the model without that prefix, for one as "
        "{{name.removeprefix('{}'): t for name, t in state_dict.items()}}",
        num_wanted - wanted.size() == 1 ? "is" : "are", num_wanted - wanted.size(),
        engine::escaped(rest));
  }
  std::set<std::size_t> paired_wanted, paired_there;
  for (const Pair& pair : nearest_pairs(wanted, there, prefix)) {
    lines.push_back(fmt::format("{} is missing; there is {}", shown(wanted[pair.missing]),
                                shown(there[pair.unexpected])));
    paired_wanted.insert(pair.missing);
    paired_there.insert(pair.unexpected);
  }
  // In turn, so that both kinds are seen in a short list.
  for (std::size_t i = 0; i < std::max(wanted.size(), there.size()); ++i) {
    if (i < wanted.size() && !paired_wanted.contains(i)) {
      lines.push_back(shown(wanted[i]) + " is missing");
    }
    if (i < there.size() && !paired_there.contains(i)) {
      lines.push_back(shown(there[i]) + " is unexpected");
    }
  }
  if (lines.size() > kMostLines) {
    const std::size_t num_more = lines.size() - kMostLines;
    lines.resize(kMostLines);
    lines.push_back(fmt::format("and {} more", num_more));
  }
  return lines;
}

}  // namespace tessera::tools
