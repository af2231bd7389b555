#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <filesystem>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/io/process_file.h"
#include "tools/probe/probe_record.h"

namespace tessera::tools {
namespace {

using engine::IoError;
using engine::require;
using nlohmann::json;

constexpr std::int64_t kMaxNumel = std::int64_t{1} << 48;
constexpr std::int64_t kMaxCount = std::int64_t{1} << 40;

// Fields of one line, which `where` names in errors.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    require<IoError>(object.is_object(), "[probe] expected an object, got {} ({})",
                     object.type_name(), where_);
  }
  const std::string& where() const { return where_; }
  bool has(const char* name) const { return object_.contains(name); }

  const json& at(const char* name) const {
    const auto field = object_.find(name);
    require<IoError>(field != object_.end(), "[probe] expected {}, got none ({})", name, where_);
    return *field;
  }
  std::int64_t count(const char* name, std::int64_t max) const {
    return count_of(at(name), name, max);
  }
  std::int64_t count_of(const json& field, const char* name, std::int64_t max) const {
    const bool is_count = field.is_number_unsigned() && field <= static_cast<std::uint64_t>(max);
    check(is_count, name, "a count", field);
    return field.get<std::int64_t>();
  }
  // Null and text for what JSON cannot say.
  double number(const char* name) const {
    const json& field = at(name);
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    if (field.is_null()) return std::numeric_limits<double>::quiet_NaN();
    if (field == "inf") return kInfinity;
    if (field == "-inf") return -kInfinity;
    check(field.is_number(), name, "a number", field);
    return field.get<double>();
  }
  std::string text(const char* name) const {
    const json& field = at(name);
    check(field.is_string(), name, "text", field);
    return field.get<std::string>();
  }
  // An object's values as JSON literals.
  std::map<std::string, std::string> literals(const char* name) const {
    const json& field = at(name);
    check(field.is_object(), name, "an object", field);
    std::map<std::string, std::string> result;
    for (const auto& [key, value] : field.items()) result[key] = value.dump();
    return result;
  }
  void check(bool ok, const char* name, const char* expected, const json& got) const {
    require<IoError>(ok, "[probe] expected {} as {}, got {} ({})", expected, name,
                     engine::excerpt(got.dump(-1, ' ', false, json::error_handler_t::replace)),
                     where_);
  }

 private:
  const json& object_;
  std::string where_;
};

template <class T>
std::optional<T> from_hex(std::string_view digits) {
  T value = 0;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
  if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
  return value;
}

ProbeHeader header_of(const Fields& line) {
  require<IoError>(line.has("probe"), "[probe] expected a record of --log.probe, got none ({})",
                   line.where());
  require<IoError>(line.count("probe", 1) == 1, "[probe] expected a record of version 1 ({})",
                   line.where());
  ProbeHeader header{.ranks = static_cast<int>(line.count("ranks", 1 << 20)),
                     .accum = line.count("accum", kMaxCount),
                     .batch = line.count("batch", kMaxCount),
                     .first_step = line.count("first_step", kMaxCount),
                     .reduces_last = line.text("accum_comm") == "last"};
  require<IoError>(header.ranks > 0 && header.accum > 0,
                   "[probe] expected ranks and accum of at least 1, got {} and {} ({})",
                   header.ranks, header.accum, line.where());
  header.local_ranks = header.ranks;
  if (line.has("first_rank")) {
    header.first_rank = static_cast<int>(line.count("first_rank", header.ranks - 1));
    header.local_ranks = static_cast<int>(line.count("local_ranks", header.ranks));
    header.run = line.text("run");
    require<IoError>(
        header.local_ranks > 0 && header.first_rank + header.local_ranks <= header.ranks,
        "[probe] expected some of {} ranks, got {} from {} on ({})", header.ranks,
        header.local_ranks, header.first_rank, line.where());
  }
  header.options = line.literals("options");
  if (line.has("data_digest")) header.data_digest = line.text("data_digest");
  if (line.has("arithmetic")) header.arithmetic = line.literals("arithmetic");
  return header;
}

ProbePhase phase_of(const Fields& line) {
  const std::string name = line.text("phase");
  for (int i = 0; i <= static_cast<int>(ProbePhase::kState); ++i) {
    const auto phase = static_cast<ProbePhase>(i);
    if (name_of(phase) == name) return phase;
  }
  engine::fail<IoError>("[probe] expected a phase, got {} ({})", engine::excerpt(name),
                        line.where());
}

ProbePart part_of(const Fields& line, const ProbeHeader& header) {
  ProbePart part{.key = {.step = line.count("step", kMaxCount),
                         .micro_batch = line.count("micro_batch", kMaxCount),
                         .phase = phase_of(line),
                         .tensor = line.text("tensor"),
                         .visit = line.count("visit", kMaxCount)},
                 .unit = line.text("unit"),
                 .rank = static_cast<int>(line.count("rank", header.ranks - 1)),
                 .order = line.count("order", kMaxCount),
                 .shape = {},
                 .begin = line.count("begin", kMaxNumel),
                 .dtype = line.text("dtype")};
  require<IoError>(
      part.rank >= header.first_rank && part.rank < header.first_rank + header.local_ranks,
      "[probe] expected a part of ranks {} to {}, got one of {} ({})", header.first_rank,
      header.first_rank + header.local_ranks - 1, part.rank, line.where());
  const json& shape = line.at("shape");
  line.check(shape.is_array() && shape.size() <= engine::Shape::kMaxRank, "shape", "dimensions",
             shape);
  std::int64_t numel = 1;
  for (const json& dim : shape) {
    part.shape.push_back(line.count_of(dim, "shape", kMaxNumel));
    const bool overflows = __builtin_mul_overflow(numel, part.shape.back(), &numel);
    line.check(!overflows && numel <= kMaxNumel, "shape", "dimensions", shape);
  }
  const std::string digits = line.text("hash");
  const auto hash = from_hex<std::uint64_t>(digits);
  line.check(hash && digits.size() == 16, "hash", "16 hex digits", digits);
  part.checksum = {.hash = *hash,
                   .numel = line.count("numel", numel),
                   .max_abs = line.number("max_abs"),
                   .sum = line.number("sum")};
  require<IoError>(part.begin + part.checksum.numel <= numel,
                   "[probe] expected a part of {} elements, got {} from {} on ({})", numel,
                   part.checksum.numel, part.begin, line.where());
  return part;
}

void add_values(const Fields& line, ProbePart& part) {
  const std::string digits = line.text("values");
  const std::string_view view = digits;
  line.check(digits.size() % 8 == 0, "values", "8 hex digits an element", digits);
  for (std::size_t i = 0; i < digits.size(); i += 8) {
    const auto bits = from_hex<std::uint32_t>(view.substr(i, 8));
    if (!bits) line.check(false, "values", "8 hex digits an element", digits);
    part.values.push_back(std::bit_cast<float>(*bits));
  }
  require<IoError>(std::ssize(part.values) <= part.checksum.numel,
                   "[probe] expected {} values, got more ({})", part.checksum.numel, line.where());
}

// What no run can have left.
void check(const ProbeRun& run, std::int64_t num_parts) {
  require<IoError>(std::ssize(run.parts) == num_parts,
                   "[probe] expected the {} parts that the last line counts, got {} ({})",
                   num_parts, run.parts.size(), run.path);
  std::set<std::tuple<ProbeKey, int, std::int64_t>> seen;
  for (const ProbePart& part : run.parts) {
    const bool is_new = seen.emplace(part.key, part.rank, part.begin).second;
    require<IoError>(is_new, "[probe] expected each part once, got {} of rank {} twice ({})",
                     engine::excerpt(target_text(part.key)), part.rank, run.path);
    require<IoError>(part.values.empty() || std::ssize(part.values) == part.checksum.numel,
                     "[probe] expected {} values of {}, got {} ({})", part.checksum.numel,
                     engine::excerpt(part.key.tensor), part.values.size(), run.path);
  }
}

// One file. Its last step is the last that its ranks ended, and parts may be of later ones.
ProbeRun read_file(const std::string& path) {
  ProbeRun run;
  run.path = path;
  const std::string text = engine::read_text_file(path, kMaxProbeNbytes);
  std::optional<std::int64_t> num_parts;
  int number = 0;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = text.find('\n', begin);
    const std::string where = fmt::format("{}:{}", path, ++number);
    require<IoError>(end != std::string::npos && !num_parts,
                     "[probe] expected a record that ends with its last line, got {} ({})",
                     num_parts ? "more" : "half a line", where);
    const json object =
        engine::parse_json(std::string_view(text).substr(begin, end - begin), where);
    begin = end + 1;
    const Fields line(object, where);
    if (number == 1) {
      run.header = header_of(line);
    } else if (line.has("end")) {
      run.last_step = line.count("last_step", kMaxCount);
      num_parts = line.count("num_parts", kMaxCount);
      if (line.has("unfinished_step")) {
        require<IoError>(line.count("unfinished_step", kMaxCount) == run.last_step + 1,
                         "[probe] expected step {} as the unfinished one, got another ({})",
                         run.last_step + 1, where);
        run.is_unfinished = true;
      }
    } else if (line.has("values")) {
      require<IoError>(!run.parts.empty(), "[probe] expected values after a part ({})", where);
      add_values(line, run.parts.back());
    } else {
      run.parts.push_back(part_of(line, run.header));
    }
  }
  require<IoError>(num_parts.has_value(),
                   "[probe] expected a record with a last line, got one cut short, or none ({})",
                   path);
  check(run, *num_parts);
  return run;
}

// Adds the record of another process of the same run.
void add(ProbeRun& run, const std::string& path) {
  std::error_code ignored;
  const int next = run.header.local_ranks;
  require<IoError>(std::filesystem::exists(path, ignored),
                   "[probe] expected the records of all {} ranks in one folder, got none of rank "
                   "{}: its process has left none, or it lies elsewhere ({})",
                   run.header.ranks, next, path);
  ProbeRun other = read_file(path);
  const bool is_of_run = other.header.run == run.header.run &&
                         other.header.ranks == run.header.ranks && other.header.first_rank == next;
  require<IoError>(is_of_run,
                   "[probe] expected the record of rank {} in the run of {}, got another ({})",
                   next, run.path, path);
  run.header.local_ranks += other.header.local_ranks;
  run.is_unfinished |= other.is_unfinished || other.last_step != run.last_step;
  run.last_step = std::min(run.last_step, other.last_step);
  std::ranges::move(other.parts, std::back_inserter(run.parts));
}

}  // namespace

ProbeRun read_probe_run(const std::string& path) {
  ProbeRun run = read_file(path);
  require<IoError>(run.header.first_rank == 0,
                   "[probe] expected the record of rank 0's process, next to which those of the "
                   "others are found, got that of rank {} ({})",
                   run.header.first_rank, path);
  while (run.header.local_ranks < run.header.ranks) {
    add(run, process_file(path, run.header.local_ranks));
  }
  if (run.is_unfinished) ++run.last_step;
  // Some ranks may have been ahead when the run ended in an error.
  std::erase_if(run.parts, [&](const ProbePart& p) { return p.key.step > run.last_step; });
  return run;
}

}  // namespace tessera::tools
