// The conformance suite with ranks that are processes over MPI, or threads of several:
// mpi_group_process FAMILY ADDRESS SECRET, several times under the launcher of that MPI, openmpi or
// mpich. All run the same tests at the same time; those of a world of fewer processes than there
// are are the first ones. With a fourth word, "dies", process 1 dies while all of them sum, and the
// others say what they are told.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/control/control.h"
#include "comm/join.h"
#include "comm/mpi/mpi_transport.h"
#include "tests/comm/process_group_suite.h"
#include "tests/comm/said_by_threads.h"

namespace tessera::comm {
namespace {

using engine::DType;
using engine::Memory;

// MPI starts once in a process, so all worlds share it: this is the transport of one of them. It
// has tags of its own, for a world that fails leaves messages.
class SharedTransport final : public Transport {
 public:
  SharedTransport(Transport& shared, int num_processes, int world)
      : shared_(shared),
        num_processes_(num_processes),
        first_tag_(static_cast<std::uint32_t>(world) % (kNumTags / kNumOwnTags) * kNumOwnTags) {}

  std::string str() const override { return shared_.str(); }
  int process() const override { return shared_.process(); }
  int num_processes() const override { return num_processes_; }
  std::unique_ptr<Transfer> send(int process, std::uint32_t tag, std::span<const std::byte> bytes,
                                 std::shared_ptr<const void> owner) override {
    return shared_.send(process, shifted(tag), bytes, std::move(owner));
  }
  std::unique_ptr<Transfer> receive(int process, std::uint32_t tag, std::span<std::byte> bytes,
                                    std::shared_ptr<const void> owner) override {
    return shared_.receive(process, shifted(tag), bytes, std::move(owner));
  }
  void give_up() noexcept override { shared_.give_up(); }

 private:
  static constexpr std::uint32_t kNumOwnTags = 1U << 14;

  std::uint32_t shifted(std::uint32_t tag) const {
    engine::require(tag < kNumOwnTags, "expected a tag below {}, got {}", kNumOwnTags, tag);
    return first_tag_ + tag;
  }

  Transport& shared_;
  const int num_processes_;
  const std::uint32_t first_tag_;
};

// Of this process, from the start of main() to its end.
struct Job {
  MpiFamily family;
  std::string address, secret;
  std::shared_ptr<Transport> mpi = make_mpi_transport({.family = family});
  std::shared_ptr<Control> control = Control::join(options("all", mpi->num_processes()));
  int num_worlds = 0;

  ControlOptions options(std::string name, int num_processes) const {
    return {.process = mpi->process(),
            .num_processes = num_processes,
            .address = address,
            .secret = secret,
            .job = std::move(name),
            .deadline = kLong};
  }

  // Of the first `num_processes`, which are a world.
  JoinOptions world_of(int num_processes, int world, milliseconds deadline) const {
    return {.control = options("world " + std::to_string(world), num_processes),
            .transport =
                [this, num_processes, world](const AllGatherTexts&) {
                  return std::make_unique<SharedTransport>(*mpi, num_processes, world);
                },
            .deadline = deadline};
  }

  // What each of `size` ranks says, of which the first processes have `num_threads` each.
  std::vector<std::string> run(int size, int num_threads, milliseconds deadline,
                               const RankFunction& fn) {
    const int num_processes = size / num_threads, first = mpi->process() * num_threads;
    const JoinOptions world = world_of(num_processes, num_worlds++, deadline);
    std::vector<std::string> said(static_cast<std::size_t>(size));
    if (mpi->process() < num_processes) {
      try {
        said = said_by_threads(size, fn, [&](const std::function<void(ProcessGroup&)>& each) {
          if (num_threads == 1) return each(*join(world));
          run_joined_ranks(num_threads, world, each);
        });
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    }
    for (int t = 0; t < num_threads; ++t) {
      const auto rank = static_cast<std::size_t>(first + t);
      const auto of_all =
          control->all_gather("what each says", rank < said.size() ? said[rank] : "");
      for (int p = 0; p < num_processes; ++p) {
        said[static_cast<std::size_t>(p * num_threads + t)] = of_all[static_cast<std::size_t>(p)];
      }
    }
    return said;
  }
};

// A line of its own, whatever MPICH's launcher has passed on of another's before.
void say(const std::string& line) { std::cout << "\n" + line + "\n" << std::flush; }

int sum_until_one_dies(Job& job) {
  const int size = job.mpi->num_processes();
  try {
    const auto group = join(job.world_of(size, 0, kLong));
    const Stream stream = Stream::inline_cpu("comm");
    const Tensor sum = Tensor::zeros(Memory(), {1 << 20}, DType::kF32, "sum");
    for (int i = 0;; ++i) {
      if (i == 2 && group->rank() == 1) ::kill(::getpid(), SIGKILL);
      group->all_reduce(sum, sum, Accumulate::kNo, stream, "sum");
    }
  } catch (const CommError& error) {
    say("told " + std::string(error.what()));
  }
  return 0;
}

Job* job = nullptr;

std::vector<std::string> by_processes(int size, milliseconds deadline, const RankFunction& fn) {
  return job->run(size, 1, deadline, fn);
}

// Two ranks a process where their number is even.
std::vector<std::string> by_threads(int size, milliseconds deadline, const RankFunction& fn) {
  return job->run(size, size % 2 == 0 ? 2 : 1, deadline, fn);
}

auto backends() {
  return ::testing::Values(Backend{.name = "mpi",
                                   .run = by_processes,
                                   .num_large = 20011,
                                   .deadline = milliseconds(1000),
                                   .sizes = {1, 2, 3, 4}},
                           Backend{.name = "mpi_and_threads",
                                   .run = by_threads,
                                   .num_large = 70'001,
                                   .deadline = milliseconds(1000),
                                   .sizes = {2, 4}});
}
INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest, backends(), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, ComparedCallsTest, backends(), backend_name);

}  // namespace
}  // namespace tessera::comm

int main(int argc, char** argv) {
  using tessera::comm::job;
  ::testing::InitGoogleTest(&argc, argv);
  if (argc < 4) return 2;
  using tessera::comm::MpiFamily;
  const bool is_mpich = std::string(argv[1]) == "mpich";
  tessera::comm::Job own{.family = is_mpich ? MpiFamily::kMpich : MpiFamily::kOpenMpi,
                         .address = argv[2],
                         .secret = argv[3]};
  if (argc > 4) return tessera::comm::sum_until_one_dies(own);
  job = &own;
  const bool failed = RUN_ALL_TESTS() != 0;
  const int num_passed = ::testing::UnitTest::GetInstance()->successful_test_count();
  tessera::comm::say(failed ? "failed" : "passed " + std::to_string(num_passed));
  // Messages of worlds that failed keep MPI from ending, and its launcher then ends the others.
  // Open MPI 4.1.4's crashes or hangs if many end by themselves at that moment.
  own.control->all_gather("ended", "");
  if (own.mpi->process() != 0) std::this_thread::sleep_for(std::chrono::seconds(20));
  return failed ? 1 : 0;
}
