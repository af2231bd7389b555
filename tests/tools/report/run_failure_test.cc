// What is said of a run that failed: whose the error is.
#include "tools/report/run_failure.h"
#include "tests/testing/json.h"

#include <gtest/gtest.h>

#include <barrier>
#include <functional>
#include <new>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "engine/out_of_memory.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/report/flight_output.h"
#include "tools/report/rank_errors.h"

namespace tessera::tools {
namespace {

class RunFailure : public ::testing::Test {
 protected:
  // The first line of what is said when four ranks run `fn`.
  std::string line_of(const std::function<void(int rank)>& fn, bool has_begun = true,
                      int num_ranks = 4) {
    FlightOutput flight(folder_.path());
    RankErrors errors({num_ranks});
    std::barrier<> all(num_ranks);  // no rank's error ends another one before its own
    try {
      try {
        comm::run_ranks(num_ranks, {}, [&](comm::ProcessGroup& world) {
          errors.watch(world.rank(), [&] {
            try {
              fn(world.rank());
            } catch (...) {
              all.arrive_and_wait();
              throw;
            }
            all.arrive_and_wait();
          });
        });
      } catch (...) {
        rethrow_failure(flight, errors, has_begun, [] { return std::vector<std::string>{}; });
      }
    } catch (const std::exception& e) {
      const std::string message = e.what();
      return message.substr(0, message.find('\n'));
    }
    return "no error";
  }

  const testing::TempFolder folder_;
};

TEST_F(RunFailure, NamesTheRankThatHadIt) {
  const auto error = [](int rank) {
    if (rank == 3) engine::fail("[data] expected a batch, got none");
  };
  EXPECT_EQ(line_of(error), "rank 3: [data] expected a batch, got none");
  EXPECT_EQ(testing::parse_json(folder_.read("flight.json")).at("error"),
            "rank 3: [data] expected a batch, got none");
}

TEST_F(RunFailure, NamesAllThatHadTheSame) {
  const auto without = [](int without) {
    return [without](int rank) {
      if (rank != without) engine::fail("[data] expected a batch, got none");
    };
  };
  EXPECT_EQ(line_of(without(-1)), "all 4 ranks: [data] expected a batch, got none");
  EXPECT_EQ(line_of(without(1)), "ranks 0, 2-3: [data] expected a batch, got none");
}

TEST_F(RunFailure, NamesTheRankWithoutMemory) {
  EXPECT_EQ(line_of([](int rank) {
              if (rank == 2) throw std::bad_alloc();
            }),
            "rank 2: [memory] expected memory from the system, got none");
  EXPECT_EQ(line_of([](int rank) {
              if (rank == 1) engine::fail<engine::OutOfMemory>("[memory] expected 4 bytes");
            }),
            "rank 1: [memory] expected 4 bytes");
}

TEST_F(RunFailure, RepeatsNoRankAndNamesNoOnlyOne) {
  const std::string message = "[fsdp] expected a finite gradient, got nan (h.0.w, rank 1)";
  const auto error = [&](int rank) {
    if (rank == 1) throw std::logic_error(message);
  };
  EXPECT_EQ(line_of(error), message);
  EXPECT_EQ(line_of([](int) { engine::fail("[data] expected a batch"); }, true, 1),
            "[data] expected a batch");
}

TEST_F(RunFailure, ARefusalBeforeTheFirstStepStaysAsItIs) {
  EXPECT_EQ(line_of([](int) { engine::fail("[config] expected a size"); }, /*has_begun=*/false),
            "[config] expected a size");
}

}  // namespace
}  // namespace tessera::tools
