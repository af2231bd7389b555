#include "tools/flight/flight_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/io/file.h"
#include "engine/io/json.h"
#include "engine/io/text.h"
#include "tools/io/file_kind.h"
#include "tools/io/jsonl.h"

namespace tessera::tools {
namespace {

using comm::FlightEntry;
using comm::FlightGroup;
using comm::FlightState;
using comm::RankFlight;
using engine::IoError;
using engine::require;
using nlohmann::json;

constexpr std::string_view kFormat = "tessera flight";
constexpr std::int64_t kVersion = 1;
constexpr std::int64_t kMaxFileNbytes = std::int64_t{1} << 30;
constexpr std::int64_t kMaxRanks = std::int64_t{1} << 20;
constexpr std::int64_t kMaxCount = std::int64_t{1} << 62;
constexpr std::size_t kMaxName = 200;

std::string json_of(const FlightEntry& e) {
  JsonRecord record;
  record.add("group", e.group).add("seq", e.sequence).add("op", e.op);
  if (!e.dtype.empty()) record.add("dtype", e.dtype).add("count", e.numel);
  if (e.onto_sum) record.add("onto_sum", true);
  if (e.root >= 0) record.add("root", e.root);
  record.add("label", e.label).add("state", name_of(e.state)).add("called_ns", e.called_ns);
  if (e.started_ns != 0) record.add("started_ns", e.started_ns);
  if (e.ended_ns != 0) record.add("ended_ns", e.ended_ns);
  return record.text();
}

template <class T, class F>
std::string array_of(const std::vector<T>& items, F literal) {
  std::vector<std::string> literals;
  for (const T& item : items) literals.push_back(literal(item));
  return fmt::format("[{}]", engine::join(literals, ",\n"));
}

// Fields of one JSON object, which `where` names in errors.
class Fields {
 public:
  Fields(const json& object, std::string where) : object_(object), where_(std::move(where)) {
    require<IoError>(object.is_object(), "[flight] expected an object, got {} ({})",
                     object.type_name(), where_);
  }
  const std::string& where() const { return where_; }
  bool has(const char* name) const { return object_.contains(name); }

  const json& array(const char* name) const {
    const json& field = at(name);
    check(field.is_array(), name, "a list", field);
    return field;
  }
  std::int64_t count(const char* name, std::int64_t max) const {
    return count_of(at(name), name, max);
  }
  std::int64_t count_or_0(const char* name, std::int64_t max) const {
    return has(name) ? count(name, max) : 0;
  }
  std::int64_t count_of(const json& field, const char* name, std::int64_t max) const {
    const bool is_count = field.is_number_unsigned() && field <= static_cast<std::uint64_t>(max);
    check(is_count, name, "a count in range", field);
    return field.get<std::int64_t>();
  }
  std::string text(const char* name, std::size_t max_nbytes) const {
    const json& field = at(name);
    check(field.is_string() && field.get_ref<const std::string&>().size() <= max_nbytes, name,
          "text of bounded length", field);
    return field.get<std::string>();
  }
  bool flag(const char* name) const {
    if (!has(name)) return false;
    check(at(name).is_boolean(), name, "true or false", at(name));
    return at(name).get<bool>();
  }
  void check(bool ok, const char* name, const char* expected, const json& got) const {
    require<IoError>(ok, "[flight] expected {} as {}, got {} ({})", expected, name,
                     engine::excerpt(got.dump(-1, ' ', false, json::error_handler_t::replace)),
                     where_);
  }

 private:
  const json& at(const char* name) const {
    const auto field = object_.find(name);
    require<IoError>(field != object_.end(), "[flight] expected {}, got none ({})", name, where_);
    return *field;
  }
  const json& object_;
  std::string where_;
};

FlightGroup group_of(const Fields& fields) {
  FlightGroup group{.name = fields.text("name", kMaxName), .members = {}};
  std::set<std::int64_t> seen;
  for (const json& member : fields.array("members")) {
    const std::int64_t rank = fields.count_of(member, "members", kMaxRanks);
    fields.check(seen.insert(rank).second, "members", "each rank once", member);
    group.members.push_back(static_cast<int>(rank));
  }
  return group;
}

FlightState state_of(const Fields& fields) {
  const std::string name = fields.text("state", kMaxName);
  for (const FlightState state : {FlightState::kCalled, FlightState::kStarted,
                                  FlightState::kFinished, FlightState::kFailed}) {
    if (name == name_of(state)) return state;
  }
  engine::fail<IoError>("[flight] expected a state, got {} ({})", engine::excerpt(name),
                        fields.where());
}

FlightEntry entry_of(const Fields& fields, const std::vector<FlightGroup>& groups) {
  const bool has_tensor = fields.has("dtype");
  const auto group = fields.count("group", std::ssize(groups) - 1);
  const std::int64_t num_members = std::ssize(groups[static_cast<std::size_t>(group)].members);
  return {.group = static_cast<int>(group),
          .sequence = fields.count("seq", kMaxCount),
          .op = fields.text("op", kMaxName),
          .dtype = has_tensor ? fields.text("dtype", kMaxName) : "",
          .label = fields.text("label", kMaxName),
          .numel = has_tensor ? fields.count("count", kMaxCount) : 0,
          .onto_sum = fields.flag("onto_sum"),
          .root = fields.has("root") ? static_cast<int>(fields.count("root", num_members - 1)) : -1,
          .state = state_of(fields),
          .called_ns = fields.count("called_ns", kMaxCount),
          .started_ns = fields.count_or_0("started_ns", kMaxCount),
          .ended_ns = fields.count_or_0("ended_ns", kMaxCount)};
}

RankFlight rank_of(const Fields& fields, const std::vector<FlightGroup>& groups) {
  RankFlight rank{.rank = static_cast<int>(fields.count("rank", kMaxRanks)),
                  .num_calls = fields.count("calls", kMaxCount),
                  .entries = {}};
  std::map<int, std::int64_t> last;  // sequence number by group
  for (const json& item : fields.array("entries")) {
    const Fields inner(item, fmt::format("{}, entry {}", fields.where(), rank.entries.size()));
    const FlightEntry& entry = rank.entries.emplace_back(entry_of(inner, groups));
    const std::vector<int>& members = groups[static_cast<std::size_t>(entry.group)].members;
    require<IoError>(std::ranges::find(members, rank.rank) != members.end(),
                     "[flight] expected a group of rank {}, got {} ({})", rank.rank, entry.group,
                     inner.where());
    const auto [previous, is_first] = last.emplace(entry.group, entry.sequence);
    require<IoError>(is_first || previous->second < entry.sequence,
                     "[flight] expected a sequence number above {}, got {} ({})", previous->second,
                     entry.sequence, inner.where());
    previous->second = entry.sequence;
  }
  require<IoError>(rank.num_calls >= std::ssize(rank.entries),
                   "[flight] expected at most {} entries, got {} ({})", rank.num_calls,
                   rank.entries.size(), fields.where());
  return rank;
}

// Whether it can be one at all: else the parser would say what no one understands.
void check_is_recording(std::string_view text, const std::string& path) {
  const FileKind* kind = file_kind(text.substr(0, kFileKindNbytes));
  if (kind != nullptr && kind->is_json) return;
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  const bool can_be_json = kind == nullptr && first != std::string_view::npos &&
                           (text[first] == '{' || text[first] == '[');
  require<IoError>(can_be_json,
                   "[flight] expected the flight.json that a run which failed leaves in its output "
                   "folder, got {} ({})",
                   kind != nullptr                   ? std::string(kind->name) + kind->to_unpack()
                   : first == std::string_view::npos ? "an empty file"
                                                     : "a file of another kind",
                   path);
}

}  // namespace

std::string flight_json(const comm::FlightRecording& recording, std::string_view error) {
  const auto group = [](const FlightGroup& g) {
    std::vector<std::string> members;
    for (const int member : g.members) members.push_back(engine::json_literal(member));
    return JsonRecord()
        .add("name", g.name)
        .add_literal("members", fmt::format("[{}]", engine::join(members, ",")))
        .text();
  };
  const auto rank = [](const RankFlight& r) {
    return JsonRecord()
        .add("rank", r.rank)
        .add("calls", r.num_calls)
        .add_literal("entries", array_of(r.entries, json_of))
        .text();
  };
  return JsonRecord()
      .add("format", kFormat)
      .add("version", kVersion)
      .add("error", error)
      .add("now_ns", recording.now_ns)
      .add("failed_ns", recording.failed_ns)
      .add_literal("groups", array_of(recording.groups, group))
      .add_literal("ranks", array_of(recording.ranks, rank))
      .line();
}

FlightFile read_flight(const std::string& path) {
  const std::string text = engine::read_text_file(path, kMaxFileNbytes);
  check_is_recording(text, path);
  const json whole = engine::parse_json(text, path);
  const Fields fields(whole, path);
  require<IoError>(fields.text("format", kMaxName) == kFormat,
                   "[flight] expected the format '{}', got another ({})", kFormat, path);
  const std::int64_t version = fields.count("version", kMaxCount);
  require<IoError>(version == kVersion, "[flight] expected version {} of the format, got {} ({})",
                   kVersion, version, path);
  FlightFile file{.path = path,
                  .error = fields.text("error", std::size_t{1} << 20),
                  .recording = {.now_ns = fields.count("now_ns", kMaxCount),
                                .failed_ns = fields.count("failed_ns", kMaxCount),
                                .groups = {},
                                .ranks = {}}};
  auto& [now_ns, failed_ns, groups, ranks] = file.recording;
  for (const json& item : fields.array("groups")) {
    groups.push_back(group_of(Fields(item, fmt::format("{}, group {}", path, groups.size()))));
  }
  std::set<int> seen;
  for (const json& item : fields.array("ranks")) {
    const Fields inner(item, fmt::format("{}, item {} of ranks", path, ranks.size()));
    const RankFlight& rank = ranks.emplace_back(rank_of(inner, groups));
    require<IoError>(seen.insert(rank.rank).second,
                     "[flight] expected each rank once, got {} twice ({})", rank.rank, path);
  }
  return file;
}

std::string text_of(const FlightEntry& e, const FlightGroup& group) {
  std::string text = e.op;
  if (!e.dtype.empty()) text += fmt::format(" {} x {}", e.dtype, e.numel);
  if (e.onto_sum) text += " onto a sum";
  if (e.root >= 0) {
    text += fmt::format(" from rank {}", group.members[static_cast<std::size_t>(e.root)]);
  }
  if (!e.label.empty()) text += fmt::format(" '{}'", e.label);
  return text;
}

}  // namespace tessera::tools
