#include "shard/checkpoint/manifest.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <span>
#include <tuple>
#include <utility>

#include "engine/error.h"
#include "engine/io/json.h"
#include "engine/io/safetensors.h"
#include "engine/io/text.h"
#include "engine/io/xxh3.h"

namespace tessera::shard {

using engine::DType;
using engine::excerpt;
using engine::fail;
using engine::IoError;
using engine::json_literal;
using engine::require;
using nlohmann::json;

namespace {

constexpr std::string_view kFormat = "tessera checkpoint";
constexpr std::size_t kHexDigits = 16;
constexpr std::string_view kBeforeChecksum = "\"xxh3\": \"", kBehindChecksum = "\"\n}\n";
// With its length before it.
constexpr std::int64_t kMaxHeaderNbytes = 8 + engine::kMaxSafetensorsHeaderNbytes;
constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kI32, DType::kI64, DType::kU8};

std::uint64_t checksum_of(std::string_view text) {
  return engine::xxh3(std::as_bytes(std::span(text)));
}

// Writing
// -----------------------------------------------------------------------------------------

template <class T, class F>
std::string list(const std::vector<T>& items, std::string_view separator, F text_of) {
  std::string text;
  for (const T& item : items) {
    if (!text.empty()) text += separator;
    text += text_of(item);
  }
  return text;
}

std::string text_of(const CheckpointFile& f) {
  return fmt::format(
      R"({{"name": {}, "nbytes": {}, "header_nbytes": {}, "header_xxh3": "{:016x}", "xxh3": "{:016x}"}})",
      json_literal(f.name), f.nbytes, f.header_nbytes, f.header_xxh3, f.xxh3);
}

std::string text_of(const CheckpointRange& r) {
  const auto hex = [](std::uint64_t x) { return fmt::format("{:016x}", x); };
  return fmt::format(R"({{"file": {}, "offset": {}, "begin": {}, "numel": {}, "xxh3": "{}"}})",
                     r.file, r.offset, r.begin, r.numel, list(r.xxh3, "", hex));
}

std::string text_of(const CheckpointTensor& t) {
  const auto number = [](std::int64_t x) { return std::to_string(x); };
  const auto range = [](const CheckpointRange& r) { return text_of(r); };
  const std::string part =
      t.num_parts == 1 ? "" : fmt::format(R"("part": {}, "num_parts": {}, )", t.part, t.num_parts);
  return fmt::format(
      R"({{"kind": {}, "name": {}, {}"dtype": "{}", "shape": [{}], "ranges": [{}]}})",
      json_literal(t.kind), json_literal(t.name), part, engine::safetensors_dtype(t.dtype),
      list(t.shape, ", ", number), list(t.ranges, ", ", range));
}

std::string text_of(const CheckpointOptimizer& o) {
  const auto group = [](const CheckpointGroup& g) {
    return fmt::format(R"({{"name": {}, "lr_scale": {}, "weight_decay": {}}})",
                       json_literal(g.name), json_literal(g.lr_scale),
                       json_literal(g.weight_decay));
  };
  return fmt::format(R"({{"num_steps": {}, "groups": [{}]}})", o.num_steps,
                     list(o.groups, ", ", group));
}

// Reading
// -----------------------------------------------------------------------------------------

/// An object of the manifest, every key of which is asked for.
class Object {
 public:
  Object(const json& value, std::string where, std::string_view path)
      : value_(value), where_(std::move(where)), path_(path) {
    require<IoError>(value.is_object(), "[checkpoint] expected an object, got {} ({}, {})",
                     excerpt(value.dump(-1, ' ', false, json::error_handler_t::replace)), where_,
                     path_);
  }

  const json& at(const std::string& key) const {
    const auto found = value_.find(key);
    require<IoError>(found != value_.end(), "[checkpoint] expected the key {}, got none ({}, {})",
                     excerpt(key), where_, path_);
    return *found;
  }
  bool has(const std::string& key) const { return value_.contains(key); }
  std::string text(const std::string& key) const {
    const json& value = at(key);
    check(value.is_string(), "text", key);
    return value.get<std::string>();
  }
  std::int64_t integer(const std::string& key, std::int64_t min, std::int64_t max) const {
    const json& value = at(key);
    check(value.is_number_integer(), "an integer", key);
    const bool is_large =
        value.is_number_unsigned() && !std::in_range<std::int64_t>(value.get<std::uint64_t>());
    const std::int64_t number = is_large ? -1 : value.get<std::int64_t>();
    check(!is_large && number >= min && number <= max, fmt::format("{} to {}", min, max), key);
    return number;
  }
  std::int64_t size(const std::string& key) const {
    return integer(key, 0, std::numeric_limits<std::int64_t>::max() / 16);
  }
  double number(const std::string& key) const {
    const json& value = at(key);
    check(value.is_number(), "a number", key);
    return value.get<double>();
  }
  const json& array(const std::string& key) const {
    const json& value = at(key);
    check(value.is_array(), "a list", key);
    return value;
  }
  /// Checksums, one after the other.
  std::vector<std::uint64_t> checksums(const std::string& key) const {
    const std::string hex = text(key);
    check(hex.size() % kHexDigits == 0, "checksums of 16 hex digits", key);
    std::vector<std::uint64_t> values;
    for (std::size_t at = 0; at < hex.size(); at += kHexDigits) {
      const char* const first = hex.data() + at;
      const auto [end, error] =
          std::from_chars(first, first + kHexDigits, values.emplace_back(), 16);
      check(error == std::errc() && end == first + kHexDigits, "checksums of 16 hex digits", key);
    }
    return values;
  }
  std::uint64_t checksum(const std::string& key) const {
    const std::vector<std::uint64_t> values = checksums(key);
    check(values.size() == 1, "one checksum", key);
    return values.front();
  }

 private:
  void check(bool ok, std::string_view expected, const std::string& key) const {
    if (ok) return;
    fail<IoError>("[checkpoint] expected {} as {}, got {} ({}, {})", expected, excerpt(key),
                  excerpt(at(key).dump(-1, ' ', false, json::error_handler_t::replace)), where_,
                  path_);
  }

  const json& value_;
  std::string where_;
  std::string_view path_;
};

CheckpointFile read_file(const Object& o, std::string_view path) {
  CheckpointFile f{.name = o.text("name"),
                   .nbytes = o.size("nbytes"),
                   .header_nbytes = o.size("header_nbytes"),
                   .header_xxh3 = o.checksum("header_xxh3"),
                   .xxh3 = o.checksum("xxh3")};
  require<IoError>(!f.name.empty() && f.name.front() != '.' &&
                       f.name.find_first_of(std::string_view("/\0", 2)) == std::string::npos,
                   "[checkpoint] expected the name of a file in this folder, got {} ({})",
                   excerpt(f.name), path);
  const std::int64_t max = std::min(f.nbytes, kMaxHeaderNbytes);
  require<IoError>(f.header_nbytes <= max,
                   "[checkpoint] expected a header of at most {} bytes, got {} (file {}, {})", max,
                   f.header_nbytes, excerpt(f.name), path);
  return f;
}

CheckpointRange read_range(const Object& o, const CheckpointTensor& t, const Manifest& m,
                           const std::string& where, std::string_view path) {
  CheckpointRange r{.file = static_cast<std::size_t>(o.size("file")),
                    .offset = o.size("offset"),
                    .begin = o.size("begin"),
                    .numel = o.size("numel"),
                    .xxh3 = o.checksums("xxh3")};
  require<IoError>(r.begin <= t.numel() && r.numel <= t.numel() - r.begin,
                   "[checkpoint] expected elements of {}, got {} from {} on ({}, {})", t.numel(),
                   r.numel, r.begin, where, path);
  require<IoError>(r.file < m.files.size(),
                   "[checkpoint] expected one of {} files, got {} ({}, {})", m.files.size(), r.file,
                   where, path);
  const CheckpointFile& f = m.files[r.file];
  require<IoError>(r.offset >= f.header_nbytes && r.offset <= f.nbytes &&
                       r.numel <= (f.nbytes - r.offset) / size_of(t.dtype),
                   "[checkpoint] expected bytes inside {}, got {} elements at {} ({}, {})",
                   excerpt(f.name), r.numel, r.offset, where, path);
  const std::int64_t num_chunks = (r.numel + kChunkNumel - 1) / kChunkNumel;
  require<IoError>(std::ssize(r.xxh3) == num_chunks,
                   "[checkpoint] expected {} checksums, got {} ({}, {})", num_chunks, r.xxh3.size(),
                   where, path);
  return r;
}

CheckpointTensor read_tensor(const json& value, std::size_t number, const Manifest& m,
                             std::string_view path) {
  const Object o(value, fmt::format("tensor {}", number), path);
  CheckpointTensor t{.kind = o.text("kind"), .name = o.text("name"), .shape = {}, .ranges = {}};
  const std::string where = fmt::format("{} {}", excerpt(t.kind), excerpt(t.name));
  if (o.has("num_parts")) {
    t.num_parts = static_cast<int>(o.integer("num_parts", 1, 1 << 24));
    t.part = static_cast<int>(o.integer("part", 0, t.num_parts - 1));
  }
  const std::string dtype = o.text("dtype");
  const auto known = std::ranges::find(kDTypes, dtype, engine::safetensors_dtype);
  require<IoError>(known != std::end(kDTypes), "[checkpoint] expected a dtype, got {} ({}, {})",
                   excerpt(dtype), where, path);
  t.dtype = *known;
  std::int64_t numel = 1;
  for (const json& dim : o.array("shape")) {
    const bool fits = dim.is_number_unsigned() && dim.get<std::uint64_t>() < (1ull << 48) &&
                      !__builtin_mul_overflow(numel, dim.get<std::int64_t>(), &numel) &&
                      numel < (std::int64_t{1} << 56);
    require<IoError>(fits, "[checkpoint] expected a shape, got {} ({}, {})",
                     excerpt(o.at("shape").dump(-1, ' ', false, json::error_handler_t::replace)),
                     where, path);
    t.shape.push_back(dim.get<std::int64_t>());
  }
  for (const json& range : o.array("ranges")) {
    t.ranges.push_back(read_range(Object(range, where, path), t, m, where, path));
    if (t.ranges.back().numel == 0) t.ranges.pop_back();  // readers search by where ranges end
  }
  std::ranges::sort(t.ranges, {}, &CheckpointRange::begin);
  return t;
}

void check_checksum(std::string_view text, std::string_view path) {
  const std::size_t end_nbytes = kBeforeChecksum.size() + kHexDigits + kBehindChecksum.size();
  const std::size_t at = text.size() - std::min(text.size(), end_nbytes);
  const std::string expected =
      fmt::format("{}{:016x}{}", kBeforeChecksum, checksum_of(text.substr(0, at)), kBehindChecksum);
  require<IoError>(text.substr(at) == expected,
                   "[checkpoint] expected a manifest that ends in the checksum of what is before, "
                   "got one that was changed or cut short ({})",
                   path);
}

}  // namespace

namespace {

// A small file must not stand for large tensors.
void check_apart(const Manifest& m, std::string_view path) {
  std::vector<std::tuple<std::size_t, std::int64_t, std::int64_t>> all;  // file, begin, end
  for (const CheckpointTensor& t : m.tensors) {
    for (const CheckpointRange& r : t.ranges) {
      all.emplace_back(r.file, r.offset, r.offset + r.numel * size_of(t.dtype));
    }
  }
  std::ranges::sort(all);
  for (std::size_t i = 1; i < all.size(); ++i) {
    const auto& [file, begin, end] = all[i];
    require<IoError>(file != std::get<0>(all[i - 1]) || begin >= std::get<2>(all[i - 1]),
                     "[checkpoint] expected ranges of bytes of their own, got two that share byte "
                     "{} of {} ({})",
                     begin, excerpt(m.files[file].name), path);
  }
}

}  // namespace

std::int64_t CheckpointTensor::numel() const { return engine::numel(shape); }

void Manifest::add(Manifest part) {
  const std::size_t first_file = files.size();
  for (CheckpointFile& f : part.files) files.push_back(std::move(f));
  std::map<std::tuple<std::string, std::string, int>, std::size_t> known;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    known[{tensors[i].kind, tensors[i].name, tensors[i].part}] = i;
  }
  for (CheckpointTensor& t : part.tensors) {
    for (CheckpointRange& r : t.ranges) r.file += first_file;
    const auto [it, is_new] = known.try_emplace({t.kind, t.name, t.part}, tensors.size());
    if (is_new) {
      tensors.push_back(std::move(t));
      continue;
    }
    CheckpointTensor& mine = tensors[it->second];
    require<IoError>(mine.dtype == t.dtype && mine.shape == t.shape,
                     "[checkpoint] expected {} of one shape and dtype on all ranks, got {} and {} "
                     "({})",
                     t.kind, engine::to_string(mine.shape), engine::to_string(t.shape), t.name);
    for (CheckpointRange& r : t.ranges) {
      // Groups of ranks that each have all of a tensor.
      const auto same = std::ranges::find_if(mine.ranges, [&](const CheckpointRange& other) {
        return other.begin == r.begin && other.numel == r.numel;
      });
      if (same == mine.ranges.end()) {
        mine.ranges.push_back(std::move(r));
        continue;
      }
      require<IoError>(same->xxh3 == r.xxh3,
                       "[checkpoint] expected copies of the same values, got others (elements {} "
                       "to {} of {} {})",
                       r.begin, r.begin + r.numel, t.kind, t.name);
    }
    std::ranges::sort(mine.ranges, {}, &CheckpointRange::begin);
  }
}

void Manifest::check_complete(std::string_view path) const {
  std::map<std::tuple<std::string_view, std::string_view, int>, int> seen;
  std::map<std::tuple<std::string_view, std::string_view, int>, int> num_parts;  // that are there
  for (const CheckpointTensor& t : tensors) {
    require<IoError>(++seen[{t.kind, t.name, t.part}] == 1,
                     "[checkpoint] expected each tensor once, got two ({} {}, {})", excerpt(t.kind),
                     excerpt(t.name), path);
    std::int64_t next = 0;
    for (const CheckpointRange& r : t.ranges) {
      if (r.numel == 0) continue;
      require<IoError>(r.begin == next,
                       "[checkpoint] expected every element once, got element {} {} ({} {}, {})",
                       std::min(r.begin, next), r.begin > next ? "nowhere" : "twice",
                       excerpt(t.kind), excerpt(t.name), path);
      next = r.begin + r.numel;
    }
    require<IoError>(next == t.numel(), "[checkpoint] expected {} elements, got {} ({} {}, {})",
                     t.numel(), next, excerpt(t.kind), excerpt(t.name), path);
  }
  for (const CheckpointTensor& t : tensors) ++num_parts[{t.kind, t.name, t.num_parts}];
  for (const auto& [tensor, count] : num_parts) {
    const auto& [kind, name, expected] = tensor;
    require<IoError>(count == expected, "[checkpoint] expected {} parts, got {} ({} {}, {})",
                     expected, count, excerpt(kind), excerpt(name), path);
  }
  check_apart(*this, path);
}

std::string to_text(const Manifest& m) {
  std::vector<std::pair<std::string, std::string>> values(m.values.begin(), m.values.end());
  const auto value = [](const auto& v) {
    return fmt::format("{}: {}", json_literal(v.first), json_literal(v.second));
  };
  const auto text = [](const auto& item) { return text_of(item); };
  std::string all = fmt::format(
      "{{\n\"format\": {},\n\"version\": {},\n\"step\": {},\n\"run\": {},\n\"ranks\": {},\n"
      "\"plan\": {},\n\"values\": {{{}}},\n\"optimizers\": [{}],\n\"files\": [\n{}\n],\n"
      "\"tensors\": [\n{}\n],\n",
      json_literal(kFormat), kCheckpointVersion, m.step, json_literal(m.run), m.ranks,
      json_literal(m.plan), list(values, ", ", value), list(m.optimizers, ", ", text),
      list(m.files, ",\n", text), list(m.tensors, ",\n", text));
  all += fmt::format("{}{:016x}{}", kBeforeChecksum, checksum_of(all), kBehindChecksum);
  return all;
}

Manifest parse_manifest(std::string_view text, std::string_view path) {
  // First, as what is damaged may be a bit of the version: every version ends in its checksum.
  check_checksum(text, path);
  json all = engine::parse_json(text, path);
  const engine::JsonEnd end(all);
  const Object o(all, "the whole", path);
  require<IoError>(o.text("format") == kFormat, "[checkpoint] expected format {}, got {} ({})",
                   kFormat, excerpt(o.text("format")), path);
  const std::int64_t version = o.integer("version", 1, std::numeric_limits<std::int32_t>::max());
  require(version <= kCheckpointVersion,
          "[checkpoint] expected format version 1 to {}, got {}: written by a newer Tessera ({})",
          kCheckpointVersion, version, path);
  Manifest m{.step = o.size("step"),
             .run = o.text("run"),
             .ranks = static_cast<int>(o.integer("ranks", 1, 1 << 24)),
             .plan = o.text("plan"),
             .values = {},
             .optimizers = {},
             .files = {},
             .tensors = {}};
  require<IoError>(o.at("values").is_object(), "[checkpoint] expected an object as values ({})",
                   path);
  for (const auto& [key, value] : o.at("values").items()) {
    require<IoError>(value.is_string(), "[checkpoint] expected text as value of {} ({})",
                     excerpt(key), path);
    m.values.emplace(key, value.get<std::string>());
  }
  for (const json& value : o.array("optimizers")) {
    const Object optimizer(value, "an optimizer", path);
    CheckpointOptimizer& mine = m.optimizers.emplace_back();
    mine.num_steps = optimizer.integer("num_steps", 0, std::numeric_limits<std::int32_t>::max());
    for (const json& group : optimizer.array("groups")) {
      const Object g(group, "a parameter group", path);
      mine.groups.push_back({g.text("name"), g.number("lr_scale"), g.number("weight_decay")});
    }
  }
  for (const json& value : o.array("files")) {
    m.files.push_back(read_file(Object(value, fmt::format("file {}", m.files.size()), path), path));
  }
  for (const json& value : o.array("tensors")) {
    m.tensors.push_back(read_tensor(value, m.tensors.size(), m, path));
  }
  return m;
}

}  // namespace tessera::shard
