// Whose files of last calls a run leaves.
#include "tools/report/flight_output.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <set>
#include <string>

#include "tests/testing/temp_folder.h"
#include "tools/report/local_ranks.h"

namespace tessera::tools {
namespace {

using Names = std::set<std::string>;

Names names_in(const testing::TempFolder& folder) {
  Names names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    names.insert(entry.path().filename());
  }
  return names;
}

TEST(FlightOutput, OfAnEarlierRunNothingStaysAndOfThisOneAll) {
  const testing::TempFolder folder;
  for (const char* name : {"flight.json", "flight.rank1.json", "flight.rank2.json",
                           "flight.rank6.json", "flight.txt", "flight.rank3.json.txt"}) {
    folder.write(name, "of an earlier run");
  }
  const FlightOutput first(folder.path(), {.world_size = 4, .first = 0, .count = 2});
  FlightOutput second(folder.path(), {.world_size = 4, .first = 2, .count = 2});
  second.remove_earlier();
  EXPECT_FALSE(names_in(folder).contains("flight.rank2.json"));
  second.write("it fails at once");
  first.remove_earlier();
  EXPECT_EQ(names_in(folder), (Names{"flight.rank2.json", "flight.txt", "flight.rank3.json.txt"}));
}

}  // namespace
}  // namespace tessera::tools
