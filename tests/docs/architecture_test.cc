// docs/architecture.md: its excerpts stand in the source, and its drawings are what Bazel's
// visibility allows.
#include <gtest/gtest.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <iterator>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "tests/docs/pages.h"

namespace tessera::testing {
namespace {

using Names = std::set<std::string>;

std::string without_spaces(std::string text) {
  std::erase_if(text, [](unsigned char c) { return std::isspace(c) != 0; });
  return text;
}

// Excerpts
// ------------------------------------------------------------------------------------------

// An excerpt begins with the name of its file; a line of ... stands for lines that are left out.
TEST(Architecture, ExcerptsStandInTheirFiles) {
  constexpr std::size_t kMaxLines = 12;
  int num_excerpts = 0;
  for (const std::string& page : pages()) {
    for (const Fenced& block : fenced_of(page)) {
      if (block.info != "cpp") continue;
      ++num_excerpts;
      ASSERT_TRUE(block.lines.front().starts_with("// ")) << page << ": " << block.lines.front();
      const std::string file = block.lines.front().substr(3);
      EXPECT_LE(block.lines.size(), kMaxLines + 1) << page << ": " << file;
      const std::string source = without_spaces(engine::read_text_file(file, 1 << 20));
      std::size_t from = 0;
      std::string part;
      const auto find = [&] {
        const std::size_t at = source.find(part, from);
        EXPECT_NE(at, std::string::npos) << page << ": not in " << file << ", or not in this order";
        if (at != std::string::npos) from = at + part.size();
        part.clear();
      };
      for (std::size_t i = 1; i < block.lines.size(); ++i) {
        if (block.lines[i] == "...") {
          find();
        } else {
          part += without_spaces(block.lines[i]);
        }
      }
      find();
    }
  }
  EXPECT_GE(num_excerpts, 20);
}

// Nobody needs more files than these to follow a parameter through a step.
TEST(Architecture, AParametersTripIsTwentyFiles) {
  bool is_trip = false;
  int num_files = 0;
  const std::regex link("\\]\\(\\.\\./[^)]*\\)");
  for (const std::string& line : lines_of("docs/architecture.md")) {
    if (line.starts_with("## ")) is_trip = line == "## One parameter's trip";
    if (!is_trip || !line.starts_with("| ")) continue;
    num_files += static_cast<int>(std::distance(
        std::sregex_iterator(line.begin(), line.end(), link), std::sregex_iterator()));
  }
  EXPECT_EQ(num_files, 20);
}

// Drawings
// ------------------------------------------------------------------------------------------

using Floor = std::vector<std::string>;

// From the top down; lines of boxes are no ASCII.
std::vector<Floor> drawing(const std::string& name) {
  for (const Fenced& block : fenced_of("docs/architecture.md")) {
    if (block.info != "drawing " + name) continue;
    std::vector<Floor> floors;
    for (std::string line : block.lines) {
      std::ranges::replace_if(
          line, [](char c) { return static_cast<unsigned char>(c) > 127; }, ' ');
      Floor floor;
      std::istringstream words(line);
      for (std::string word; words >> word;) floor.push_back(word);
      if (!floor.empty()) floors.push_back(floor);
    }
    return floors;
  }
  ADD_FAILURE() << "expected a drawing of the " << name;
  return {};
}

std::string build_file(const std::string& package) {
  const std::string path = package.empty() ? "BUILD" : package + "/BUILD";
  return std::regex_replace(engine::read_text_file(path, 1 << 20), std::regex("#[^\n]*"), "");
}

Names quoted_in(const std::string& text) {
  Names names;
  const std::regex quoted("\"([^\"]*)\"");
  for (std::sregex_iterator i(text.begin(), text.end(), quoted), end; i != end; ++i) {
    names.insert((*i)[1]);
  }
  return names;
}

// The strings of all lists `name = [...]` in `text`.
Names listed(const std::string& text, const std::string& name) {
  Names all;
  const std::regex list("\\b" + name + " = \\[([^\\]]*)\\]");
  for (std::sregex_iterator i(text.begin(), text.end(), list), end; i != end; ++i) {
    all.merge(quoted_in((*i)[1]));
  }
  return all;
}

// Package groups by label: the packages that they hold, those of included groups among them.
class Groups {
 public:
  void read(const std::string& package) {
    const std::string text = build_file(package);
    const std::regex group("package_group\\(([^)]*)\\)"), name("name = \"([^\"]*)\"");
    for (std::sregex_iterator i(text.begin(), text.end(), group), end; i != end; ++i) {
      const std::string body = (*i)[1];
      std::smatch found;
      ASSERT_TRUE(std::regex_search(body, found, name));
      const std::string at = "//" + package + ":";
      Group& made = groups_[at + found[1].str()];
      made.packages = listed(body, "packages");
      for (const std::string& other : listed(body, "includes")) {
        made.includes.insert(other.starts_with(":") ? "//" + package + other : other);
      }
    }
  }

  // The packages that a label in a visibility admits.
  Names admitted(const std::string& label) const {
    const std::string package = label.substr(0, label.rfind(':'));
    if (label.ends_with(":__pkg__")) return {package};
    if (label.ends_with(":__subpackages__")) return {package + (package == "//" ? "..." : "/...")};
    const auto found = groups_.find(label);
    if (found == groups_.end()) return {};
    Names packages = found->second.packages;
    for (const std::string& other : found->second.includes) packages.merge(admitted(other));
    return packages;
  }

 private:
  struct Group {
    Names packages, includes;
  };
  std::map<std::string, Group> groups_;
};

Groups all_groups() {
  Groups groups;
  groups.read("");
  groups.read("tools");
  return groups;
}

// "//ops/..." is of the folder ops.
std::string folder_of(const std::string& package) {
  return package.substr(2, package.find('/', 2) - 2);
}

// Whom the targets of `packages` admit, as folders of the top level.
Names folders_that_see(const Groups& groups, const std::vector<std::string>& packages) {
  Names folders;
  for (const std::string& package : packages) {
    for (const std::string& label : listed(build_file(package), "(?:default_)?visibility")) {
      for (const std::string& admitted : groups.admitted(label)) {
        folders.insert(folder_of(admitted));
      }
    }
  }
  folders.erase("");  // the umbrella, which nobody here can lean on
  folders.erase(packages.front().substr(0, packages.front().find('/')));
  return folders;
}

// "//tools/bench/gpu" is in the room bench.
std::string room_of(const std::string& package) {
  return package.substr(8, package.find('/', 8) - 8);
}

std::vector<std::string> rooms() {
  std::vector<std::string> rooms;
  for (const Floor& floor : drawing("rooms")) rooms.insert(rooms.end(), floor.begin(), floor.end());
  return rooms;
}

// Those inside of rooms, too.
std::vector<std::string> packages_of_tools() {
  std::vector<std::string> packages;
  for (const auto& entry : std::filesystem::recursive_directory_iterator("tools")) {
    if (entry.path().filename() == "BUILD") packages.push_back(entry.path().parent_path().string());
  }
  return packages;
}

TEST(Architecture, LayersAreWhatIsVisible) {
  const Groups groups = all_groups();
  std::map<std::string, Names> drawn;  // by folder: who leans on it
  Names above;
  for (const Floor& floor : drawing("layers")) {
    for (std::size_t i = 0; i < floor.size(); ++i) {
      if (floor[i] == "->") {
        drawn[floor[i + 1]].insert(floor[i - 1]);
      } else {
        drawn[floor[i]].insert(above.begin(), above.end());
      }
    }
    for (const std::string& folder : floor) {
      if (folder != "->") above.insert(folder);
    }
  }
  const std::map<std::string, std::vector<std::string>> packages = {
      {"engine", {"engine"}},
      {"ops", {"ops"}},
      {"comm", {"comm"}},
      {"shard", {"shard", "shard/checkpoint", "shard/hooks", "shard/optimizer"}},
      {"tools", packages_of_tools()}};
  for (const auto& [folder, its] : packages) {
    EXPECT_EQ(drawn[folder], folders_that_see(groups, its)) << folder;
    drawn.erase(folder);
  }
  const std::map<std::string, Names> nobody_leans_on = {{"tests", {}}};
  EXPECT_EQ(drawn, nobody_leans_on);
}

// A room is seen by all rooms above its floor, and unless everybody may see it by no others.
TEST(Architecture, RoomsSeeTheFloorsBelow) {
  const Groups groups = all_groups();
  const std::vector<std::string> all = rooms();
  Names above;
  for (const Floor& floor : drawing("rooms")) {
    for (const std::string& room : floor) {
      const Names labels = listed(build_file("tools/" + room), "default_visibility");
      Names seen_by;
      for (const std::string& label : labels) {
        for (const std::string& package : groups.admitted(label)) {
          for (const std::string& other : all) {
            const std::string its = "//tools/" + other;
            if (package == "//tools/..." || package == its || package == its + "/...") {
              seen_by.insert(other);
            }
          }
        }
      }
      if (labels.contains("//:top")) {
        EXPECT_TRUE(std::ranges::includes(seen_by, above)) << room;
      } else {
        EXPECT_EQ(seen_by, above) << room;
      }
    }
    above.insert(floor.begin(), floor.end());
  }
  EXPECT_EQ(above.size(), all.size()) << "each room once";
}

// Whatever a package inside of a room, or a single target, says for itself.
TEST(Architecture, NothingIsSeenFromItsFloorOrBelow) {
  const Groups groups = all_groups();
  std::map<std::string, std::size_t> floors;  // by room, from the top down
  for (const Floor& floor : drawing("rooms")) {
    const std::size_t above = floors.size();
    for (const std::string& room : floor) floors[room] = above;
  }
  int num_inside = 0;
  for (const std::string& package : packages_of_tools()) {
    if (package == "tools") continue;
    const std::string room = room_of("//" + package);
    if (package != "tools/" + room) ++num_inside;
    for (const std::string& label : listed(build_file(package), "(?:default_)?visibility")) {
      for (const std::string& admitted : groups.admitted(label)) {
        if (!admitted.starts_with("//tools/")) continue;
        for (const auto& [other, floor] : floors) {
          const bool sees = admitted == "//tools/..." || room_of(admitted) == other;
          EXPECT_TRUE(!sees || other == room || floor < floors.at(room))
              << package << " is seen by " << other << ": " << label;
        }
      }
    }
  }
  EXPECT_GE(num_inside, 7);
}

TEST(Architecture, EveryRoomIsDrawn) {
  Names there;
  for (const auto& entry : std::filesystem::directory_iterator("tools")) {
    if (exists(entry.path() / "BUILD")) there.insert(entry.path().filename().string());
  }
  for (const std::string& package : all_groups().admitted("//tools:above_ground")) {
    if (package.starts_with("//tools/")) there.insert(room_of(package));
  }
  const std::vector<std::string> all = rooms();
  EXPECT_EQ(there, Names(all.begin(), all.end()));
}

}  // namespace
}  // namespace tessera::testing
