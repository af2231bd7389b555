// Every wait of a training step is needed: one after the other is taken away, and the result is
// wrong, or the run fails, or it touches memory that is gone. Those that are redundant are counted.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/testing/program.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::cuda_emulation {
namespace {

constexpr const char* kProgram = "tests/cuda_emulation/toy_steps";

// With `removed`, a wait and how late to make what it covers, taken away. Accounts for all waits in
// the file `waits`, if given.
testing::Outcome train(const std::string& strategy, const std::vector<std::string>& removed = {},
                       const std::string& waits = "") {
  std::vector<std::string> arguments = {strategy};
  arguments.insert(arguments.end(), removed.begin(), removed.end());
  std::map<std::string, std::string> environment;
  if (!waits.empty()) environment["CUDA_EMULATION"] = "waits=" + waits;
  return testing::run_program(kProgram, arguments, environment);
}

// A wait that is not redundant: "thread#ordinal", and the tasks of a stream that it is the first to
// cover. Each of them in turn is made late: a late poisoning would hide that what follows is read
// too soon.
struct Wait {
  std::string name, stream;
  int first_task = 0, last_task = 0;
};

struct Waits {
  std::vector<Wait> needed;
  int num_redundant = 0, num_superseded = 0, num_for_peers = 0, num_of_copies = 0;
};

// [Note: waits not taken away]
// For peers: before a collective a rank's stream waits until its peers have what they bring, and
// after it until they have read what it brought. What Fsdp brings is a shard, which only an
// optimizer step changes, or a gradient slot, which comes around after further collectives: mostly
// one of these waits stands in for another, and nothing shows. That each is needed is for
// tests/comm/cuda_threads_test.cc to show, where inputs change at once.
// Waits of copies: a copy to pageable memory blocks the host by itself. Tensor::copy_to_host()
// waits all the same, since its caller's memory may be page-locked.
Waits waits_of(const std::string& strategy) {
  const testing::TempFolder folder;
  EXPECT_EQ(train(strategy, {}, folder / "waits").exit_code, 0);
  std::istringstream lines(folder.read("waits"));
  Waits waits;
  // thread#ordinal/stream@task/... kind waiter recorded last task, verdict
  std::string text, kind, waiter, recorded, last_task, verdict;
  while (lines >> text >> kind >> waiter >> recorded >> last_task >> verdict) {
    if (!text.starts_with("rank0#")) continue;
    const std::string prefix = "/" + recorded + "@";
    const std::size_t covered = text.find(prefix);
    if (verdict == "redundant") {
      ++waits.num_redundant;
    } else if (verdict == "superseded") {
      ++waits.num_superseded;
    } else if (recorded.starts_with("rank1.") ||
               (covered == std::string::npos && kind == "StreamWaitEvent")) {
      ++waits.num_for_peers;  // the second: of its own streams it covers nothing new
    } else if (kind == "StreamSynchronize") {
      ++waits.num_of_copies;
    } else if (covered == std::string::npos) {
      ADD_FAILURE() << "covers nothing of the stream it waits for: " << text;
    } else {
      waits.needed.push_back({.name = text.substr(0, text.find('/')),
                              .stream = recorded,
                              .first_task = std::stoi(text.substr(covered + prefix.size())),
                              .last_task = std::stoi(last_task)});
    }
  }
  return waits;
}

// [Note: masked by a second gather]
// A unit is gathered again for backward, and by the next micro-step, mostly into the slot where it
// was: with the same parameters. Work that reads the slot too early or too late, past a poisoning,
// may find the right numbers there by luck of timing. So up to `num_masked` waits for a gather, or
// of a poisoning for the slot's last use, may go unnoticed here; they are printed. So may the two
// that the gathers after the last update make, for a forward that never comes. ThreadSanitizer
// needs no luck: with --config=tsan each of them is a race. How many are masked depends on the
// machine, so the bounds leave room: 10 and 7 were seen.
void expect_all_needed(const std::string& strategy, int num_masked) {
  const std::string expected = train(strategy).out;
  ASSERT_FALSE(expected.empty());
  const Waits waits = waits_of(strategy);
  EXPECT_GT(waits.needed.size(), 20u);
  std::string unnoticed;
  int num_unnoticed = 0;
  for (const Wait& wait : waits.needed) {
    // Far more than the host needs to go on; and little, since a slot that was poisoned too early
    // may be gathered again, with the same parameters, before late work reads it.
    bool is_noticed = false;
    for (const char* delay_ms : {"100", "1", "4"}) {
      for (int task = wait.last_task; task >= wait.first_task && !is_noticed; --task) {
        const std::string removed = fmt::format("{}/{}@{}", wait.name, wait.stream, task);
        const testing::Outcome outcome = train(strategy, {removed, delay_ms});
        EXPECT_EQ(outcome.err.find("cannot read"), std::string::npos) << outcome.err;
        EXPECT_NE(outcome.exit_code, 2) << "not how toy_steps is used";
        is_noticed = outcome.exit_code != 0 || outcome.out != expected;
      }
    }
    if (is_noticed) continue;
    ++num_unnoticed;
    unnoticed += fmt::format("\n  {} for tasks {} to {} of {}", wait.name, wait.first_task,
                             wait.last_task, wait.stream);
  }
  EXPECT_LE(num_unnoticed, testing::kUnderTsan ? 0 : num_masked)
      << "not noticed when removed:" << unnoticed;
  fmt::print(
      "{}: of rank 0's waits {} are needed, {} redundant, {} superseded, {} for peers, {} of "
      "copies; "
      "masked:{}\n",
      strategy, waits.needed.size(), waits.num_redundant, waits.num_superseded, waits.num_for_peers,
      waits.num_of_copies, unnoticed);
}

TEST(Waits, EachOfZero3IsNeeded) { expect_all_needed("zero3", 14); }
TEST(Waits, EachOfShardGradOpIsNeeded) { expect_all_needed("shard_grad_op", 10); }
TEST(Waits, EachOfDdpIsNeeded) { expect_all_needed("ddp", 0); }

}  // namespace
}  // namespace tessera::cuda_emulation
