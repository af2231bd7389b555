// The conformance suite with ranks that are processes over MPI: mpi_group_process ADDRESS SECRET,
// several times under an MPI's launcher. All run the same tests at the same time; those of a world
// of fewer ranks than processes are the first ones. With a third word, "dies", process 1 dies while
// all of them sum, and the others say what they are told.
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
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
  std::string address, secret;
  std::shared_ptr<Transport> mpi = make_mpi_transport();
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

  // What each of the first `size` processes says.
  std::vector<std::string> run(int size, milliseconds deadline, const RankFunction& fn) {
    const int world = num_worlds++;
    std::string own;
    if (mpi->process() < size) {
      try {
        own = fn(*join({.control = options("world " + std::to_string(world), size),
                        .transport =
                            [&](const AllGatherTexts&) {
                              return std::make_unique<SharedTransport>(*mpi, size, world);
                            },
                        .deadline = deadline}));
      } catch (const std::exception& error) {
        ADD_FAILURE() << error.what();
      }
    }
    auto said = control->all_gather("what each says", std::move(own));
    said.resize(static_cast<std::size_t>(size));
    return said;
  }
};

int sum_until_one_dies(Job& job) {
  const int size = job.mpi->num_processes();
  try {
    const auto group = join({.control = job.options("sums", size),
                             .transport =
                                 [&](const AllGatherTexts&) {
                                   return std::make_unique<SharedTransport>(*job.mpi, size, 0);
                                 },
                             .deadline = kLong});
    const Stream stream = Stream::inline_cpu("comm");
    const Tensor sum = Tensor::zeros(Memory(), {1 << 20}, DType::kF32, "sum");
    for (int i = 0;; ++i) {
      if (i == 2 && group->rank() == 1) ::kill(::getpid(), SIGKILL);
      group->all_reduce(sum, sum, Accumulate::kNo, stream, "sum");
    }
  } catch (const CommError& error) {
    std::cout << "told " + std::string(error.what()) + "\n" << std::flush;
  }
  return 0;
}

Job* job = nullptr;

auto backends() {
  return ::testing::Values(
      Backend{.name = "mpi",
              .run = [](int size, milliseconds deadline,
                        const RankFunction& fn) { return job->run(size, deadline, fn); },
              .num_large = 20011,
              .deadline = milliseconds(1000),
              .sizes = {1, 2, 3, 4}});
}
INSTANTIATE_TEST_SUITE_P(Backends, ProcessGroupTest, backends(), backend_name);
INSTANTIATE_TEST_SUITE_P(Backends, ComparedCallsTest, backends(), backend_name);

}  // namespace
}  // namespace tessera::comm

int main(int argc, char** argv) {
  using tessera::comm::job;
  ::testing::InitGoogleTest(&argc, argv);
  if (argc < 3) return 2;
  tessera::comm::Job own{.address = argv[1], .secret = argv[2]};
  if (argc > 3) return tessera::comm::sum_until_one_dies(own);
  job = &own;
  const bool failed = RUN_ALL_TESTS() != 0;
  const int num_passed = ::testing::UnitTest::GetInstance()->successful_test_count();
  std::cout << (failed ? "failed\n" : "passed " + std::to_string(num_passed) + "\n") << std::flush;
  // Messages of worlds that failed keep MPI from ending, and its launcher then ends the others.
  // Open MPI 4.1.4's crashes or hangs if many end by themselves at that moment.
  own.control->all_gather("ended", "");
  if (own.mpi->process() != 0) std::this_thread::sleep_for(std::chrono::seconds(20));
  return failed ? 1 : 0;
}
