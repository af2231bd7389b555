#include "tools/flight/flight_verdict.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "engine/error.h"

namespace tessera::tools {
namespace {

using comm::FlightEntry;
using comm::FlightGroup;
using comm::FlightState;
using comm::RankFlight;
using engine::IoError;
using engine::require;

constexpr std::size_t kMaxCauses = 8;

// "rank 1", "ranks 0, 2-3".
std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  for (std::size_t i = 0; i < ranks.size();) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += fmt::format("{} {}", i == 0 ? "" : ",", ranks[i]);
    if (last > i) text += fmt::format("-{}", ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string seconds_text(std::int64_t ns) {
  return fmt::format("{:.{}f} s", static_cast<double>(ns) * 1e-9, ns < 100'000'000 ? 3 : 1);
}

// A call as one rank made it.
struct Made {
  const FlightFile* file;
  const FlightEntry* entry;

  const FlightGroup& group() const {
    return file->recording.groups[static_cast<std::size_t>(entry->group)];
  }
  std::string text() const { return text_of(*entry, group()); }
  // When its ranks were stopped, or asked.
  std::int64_t end_ns() const {
    const auto& r = file->recording;
    return r.failed_ns != 0 ? r.failed_ns : r.now_ns;
  }
  // It came to the call, and had not gone on when the world failed.
  bool waited() const {
    return entry->state != FlightState::kFinished && entry->started_ns != 0 &&
           entry->started_ns < end_ns() && !failed_alone();
  }
  bool called_too_late() const { return entry->called_ns >= end_ns(); }
  bool had_not_come() const {
    return entry->state == FlightState::kCalled || entry->started_ns >= end_ns();
  }
  // Before the world did: the failure is this rank's own.
  bool failed_alone() const {
    const std::int64_t failed_ns = file->recording.failed_ns;
    return entry->state == FlightState::kFailed && (failed_ns == 0 || entry->ended_ns < failed_ns);
  }
  std::int64_t waited_ns() const { return end_ns() - entry->started_ns; }
};

// Groups of one name and members are told apart by the order in which they were made, which is the
// same in all files.
using GroupKey = std::tuple<std::string, std::vector<int>, int>;

struct Meeting {
  GroupKey group;
  std::int64_t sequence;
  std::map<int, Made> made;  // by rank

  std::string where() const {
    const auto& [name, members, number] = group;
    return fmt::format("call {} of {}", sequence,
                       name == "world" ? name : fmt::format("{}, {}", name, ranks_text(members)));
  }
  bool is_waited_for() const {
    return std::ranges::any_of(made, [](const auto& m) { return m.second.waited(); });
  }
  std::vector<int> ranks_that(const auto& condition) const {
    std::vector<int> ranks;
    for (const auto& [rank, m] : made) {
      if (condition(m)) ranks.push_back(rank);
    }
    return ranks;
  }
};

class Judge {
 public:
  explicit Judge(std::span<const FlightFile> files) {
    for (const FlightFile& file : files) add(file);
    for (auto& [key, meeting] : by_place_) {
      for (const auto& [rank, m] : meeting.made) {
        if (m.waited()) waits_in_.emplace(rank, &meeting);
      }
    }
  }

  FlightVerdict verdict() const {
    FlightVerdict verdict;
    if (differ(verdict.lines)) {
      verdict.finding = FlightFinding::kDiffer;
    } else if (late(verdict.lines)) {
      verdict.finding = FlightFinding::kLate;
    } else if (unfinished(verdict.lines)) {
      verdict.finding = FlightFinding::kUnfinished;
    } else {
      finished(verdict.lines);
    }
    return verdict;
  }

 private:
  void add(const FlightFile& file) {
    const auto& groups = file.recording.groups;
    if (groups.empty()) return;  // it failed before there was a world
    const std::size_t world_size = groups[0].members.size();
    if (world_size_ == 0) world_size_ = world_size;
    require<IoError>(world_size == world_size_,
                     "[flight] expected files of one world, got one of {} ranks and one of {} ({})",
                     world_size_, world_size, file.path);
    std::vector<GroupKey> keys;
    std::map<std::pair<std::string, std::vector<int>>, int> num_alike;
    for (const FlightGroup& g : groups) {
      keys.emplace_back(g.name, g.members, num_alike[{g.name, g.members}]++);
    }
    for (const RankFlight& rank : file.recording.ranks) {
      const auto [other, is_new] = ranks_.emplace(rank.rank, &rank);
      require<IoError>(is_new, "[flight] expected each rank in one file, got rank {} again ({})",
                       rank.rank, file.path);
      for (const FlightEntry& entry : rank.entries) {
        const GroupKey& key = keys[static_cast<std::size_t>(entry.group)];
        Meeting& meeting = by_place_[{key, entry.sequence}];
        meeting.group = key;
        meeting.sequence = entry.sequence;
        meeting.made.emplace(rank.rank, Made{&file, &entry});
        last_.insert_or_assign(rank.rank, &meeting);
        first_kept_.emplace(std::pair(rank.rank, key), entry.sequence);
      }
    }
  }

  bool differ(std::vector<std::string>& lines) const {
    std::set<GroupKey> told;  // what follows a difference differs as well
    for (const auto& [place, meeting] : by_place_) {
      std::vector<std::pair<std::string, std::vector<int>>> by_text;  // in the order of ranks
      for (const auto& [rank, m] : meeting.made) {
        auto same = std::ranges::find(by_text, m.text(), [](const auto& b) { return b.first; });
        if (same == by_text.end()) same = by_text.insert(same, {m.text(), {}});
        same->second.push_back(rank);
      }
      if (by_text.size() < 2 || !told.insert(meeting.group).second) continue;
      std::string sides;
      for (const auto& [text, ranks] : by_text) {
        sides += fmt::format("{} {}: {}", sides.empty() ? "" : ";", ranks_text(ranks), text);
      }
      lines.push_back(fmt::format("ranks differ first at {}:{}", meeting.where(), sides));
    }
    return !lines.empty();
  }

  // Who is not in a call that others wait in, by why.
  struct Absent {
    std::vector<int> never, too_late, not_there, failed, unknown;
    bool none() const {
      return never.empty() && too_late.empty() && not_there.empty() && failed.empty() &&
             unknown.empty();
    }
  };
  Absent absent_from(const Meeting& meeting) const {
    Absent absent;
    for (const int rank : std::get<1>(meeting.group)) {
      const auto m = meeting.made.find(rank);
      if (m != meeting.made.end()) {
        const Made& made = m->second;
        if (made.called_too_late()) {
          absent.too_late.push_back(rank);
        } else if (made.had_not_come()) {
          absent.not_there.push_back(rank);
        } else if (made.failed_alone()) {
          absent.failed.push_back(rank);
        }
        continue;
      }
      const auto kept = ranks_.find(rank);
      const auto first = first_kept_.find({rank, meeting.group});
      const bool has_passed = first != first_kept_.end() && first->second > meeting.sequence;
      if (kept == ranks_.end()) {
        absent.unknown.push_back(rank);
      } else if (!has_passed) {
        absent.never.push_back(rank);
      }
    }
    return absent;
  }

  bool late(std::vector<std::string>& lines) const {
    std::vector<std::pair<const Meeting*, Absent>> causes, effects;
    for (const auto& [place, meeting] : by_place_) {
      if (!meeting.is_waited_for()) continue;
      Absent absent = absent_from(meeting);
      if (absent.none()) continue;
      // Of ranks that wait for each other in a chain, the one that waits for nobody is the cause.
      const auto waits = [&](int rank) { return waits_in_.contains(rank); };
      const bool is_effect = absent.unknown.empty() && absent.failed.empty() &&
                             absent.too_late.empty() && std::ranges::all_of(absent.never, waits) &&
                             std::ranges::all_of(absent.not_there, waits);
      (is_effect ? effects : causes).emplace_back(&meeting, std::move(absent));
    }
    causes.insert(causes.end(), effects.begin(), effects.end());
    for (std::size_t i = 0; i < causes.size() && i < kMaxCauses; ++i) {
      tell_late(*causes[i].first, causes[i].second, lines);
    }
    if (causes.size() > kMaxCauses) {
      lines.push_back(
          fmt::format("and {} more calls that ranks wait in", causes.size() - kMaxCauses));
    }
    return !causes.empty();
  }

  void tell_late(const Meeting& meeting, const Absent& absent,
                 std::vector<std::string>& lines) const {
    const std::vector<int> waiting = meeting.ranks_that([](const Made& m) { return m.waited(); });
    std::int64_t longest_ns = 0;
    for (const int rank : waiting) {
      longest_ns = std::max(longest_ns, meeting.made.at(rank).waited_ns());
    }
    const std::string since = fmt::format("{} wait{} for since {}", ranks_text(waiting),
                                          waiting.size() == 1 ? "s" : "", seconds_text(longest_ns));
    const std::string what =
        fmt::format("{} ({})", meeting.made.begin()->second.text(), meeting.where());
    if (!absent.never.empty()) {
      lines.push_back(
          fmt::format("{} never called {}, which {}", ranks_text(absent.never), what, since));
    }
    for (const int rank : absent.too_late) {
      const Made& m = meeting.made.at(rank);
      lines.push_back(fmt::format("rank {} called {} {} after the ranks had failed, and {}", rank,
                                  what, seconds_text(m.entry->called_ns - m.end_ns()), since));
    }
    if (!absent.not_there.empty()) {
      lines.push_back(fmt::format("{} called {}, but had other work before it, and {}",
                                  ranks_text(absent.not_there), what, since));
    }
    if (!absent.failed.empty()) {
      lines.push_back(
          fmt::format("{} failed in {}, which {}", ranks_text(absent.failed), what, since));
    }
    if (!absent.unknown.empty()) {
      lines.push_back(fmt::format("{} may be late for {}, which {}: the files do not tell",
                                  ranks_text(absent.unknown), what, since));
    }
    for (const auto* ranks : {&absent.never, &absent.not_there}) {
      for (std::size_t i = 0; i < ranks->size() && i < kMaxCauses; ++i) {
        lines.push_back("  " + whereabouts((*ranks)[i]));
      }
    }
  }

  // Where a rank is that others wait for.
  std::string whereabouts(int rank) const {
    const auto waits = waits_in_.find(rank);
    if (waits != waits_in_.end()) {
      return fmt::format("rank {} waits in {} ({})", rank, waits->second->made.at(rank).text(),
                         waits->second->where());
    }
    const auto last = last_.find(rank);
    if (last == last_.end()) return fmt::format("rank {} called nothing at all", rank);
    const Made& m = last->second->made.at(rank);
    const bool has_ended = m.entry->state == FlightState::kFinished;
    return fmt::format(
        "rank {} called last {} ({}), which it {}", rank, m.text(), last->second->where(),
        has_ended ? fmt::format("finished {} before", seconds_text(std::max<std::int64_t>(
                                                          0, m.end_ns() - m.entry->ended_ns)))
                  : "did not finish");
  }

  bool unfinished(std::vector<std::string>& lines) const {
    for (const auto& [place, meeting] : by_place_) {
      if (!meeting.is_waited_for()) continue;
      const auto open = meeting.ranks_that(
          [](const Made& m) { return m.entry->state != FlightState::kFinished; });
      lines.push_back(fmt::format("all have come to {} ({}), and {} did not finish it",
                                  meeting.made.begin()->second.text(), meeting.where(),
                                  ranks_text(open)));
      if (lines.size() == kMaxCauses) break;
    }
    return !lines.empty();
  }

  void finished(std::vector<std::string>& lines) const {
    if (last_.empty()) {
      lines.emplace_back("no rank has called anything");
      return;
    }
    lines.emplace_back(
        "no rank waited for another: what ended the run lies outside of collectives");
    std::size_t num_told = 0;
    for (const auto& [rank, meeting] : last_) {
      if (++num_told > kMaxCauses) break;
      lines.push_back("  " + whereabouts(rank));
    }
  }

  std::size_t world_size_ = 0;
  std::map<int, const RankFlight*> ranks_;
  std::map<std::pair<GroupKey, std::int64_t>, Meeting> by_place_;
  std::map<int, const Meeting*> last_;  // by rank: what it called last
  std::map<std::pair<int, GroupKey>, std::int64_t> first_kept_;
  std::map<int, const Meeting*> waits_in_;  // by rank
};

}  // namespace

FlightVerdict judge(std::span<const FlightFile> files) { return Judge(files).verdict(); }

}  // namespace tessera::tools
