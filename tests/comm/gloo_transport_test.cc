// The transport over Gloo, between real processes on this machine.
#include "comm/gloo/gloo_transport.h"

#include <fmt/core.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "tests/comm/forked_processes.h"
#include "tests/comm/transport_promises.h"
#include "tests/testing/errors.h"
#include "tests/testing/leftovers.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"
#include "tests/testing/thread_limit.h"

namespace tessera::comm {
namespace {

using engine::CommError;
using engine::DeviceError;
using engine::InvalidArgument;
using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::error_of;
using testing::has;

std::string plugin() { return find_gloo_plugin("/proc/self/exe"); }

// Of one process of `num_processes`.
GlooOptions options_of(int process, int num_processes, AllGatherTexts all_gather) {
  return {.process = process,
          .num_processes = num_processes,
          .all_gather = std::move(all_gather),
          .host = "127.0.0.1",
          .deadline = seconds(30),
          .plugin_path = plugin()};
}

// Each in a process of its own.
using Part = std::function<std::string(Transport&)>;
ForkedProcesses::Work over_gloo(int num_processes, const Part& part) {
  return [=](int process, const AllGatherTexts& all_gather) {
    const auto transport = make_gloo_transport(options_of(process, num_processes, all_gather));
    return part(*transport);
  };
}

// What `part` returns in each process.
std::vector<std::string> run(int num_processes, const Part& part) {
  ForkedProcesses processes(num_processes, over_gloo(num_processes, part));
  processes.gather();
  return processes.outcomes();
}

// Takes a while. ThreadSanitizer keeps count of each byte.
constexpr std::size_t kHuge = std::size_t{1} << (testing::kUnderTsan ? 28 : 30);

// For what comes at once.
constexpr seconds kPatience{testing::kUnderTsan ? 30 : 10};

// Zeros, which take memory only where they are written.
std::shared_ptr<std::byte[]> zeros(std::size_t nbytes) {
  return {static_cast<std::byte*>(std::calloc(nbytes + 1, 1)), std::free};
}

std::unique_ptr<Transfer> send(Transport& transport, int process, std::uint32_t tag,
                               std::size_t nbytes) {
  const auto bytes = zeros(nbytes);
  return transport.send(process, tag, {bytes.get(), nbytes}, bytes);
}

std::unique_ptr<Transfer> receive(Transport& transport, int process, std::uint32_t tag,
                                  std::size_t nbytes) {
  const auto bytes = zeros(nbytes);
  return transport.receive(process, tag, {bytes.get(), nbytes}, bytes);
}

// "done", "late", or an error.
std::string end_of(Transfer& transfer) {
  try {
    return transfer.wait_for(kPatience) ? "done" : "late";
  } catch (const CommError& error) {
    return error.what();
  }
}

// A message each way; false if one does not come.
bool exchange(Transport& transport, int process, std::uint32_t tag, std::size_t nbytes) {
  const auto out = send(transport, process, tag, nbytes);
  const auto in = receive(transport, process, tag, nbytes);
  return in->wait_for(seconds(30)) && out->wait_for(seconds(30));
}

TEST(GlooTransportTest, HoldsWhatEveryTransportPromises) {
  for (int num = 1; num <= (testing::kIsSlow ? 2 : 4); ++num) {
    const auto outcomes = run(num, [&](Transport& transport) {
      std::string all;
      for (const std::string& broken : broken_promises(transport)) all += broken + "\n";
      return all;
    });
    for (const std::string& outcome : outcomes) ASSERT_EQ(outcome, "") << num << " processes";
  }
}

// Whatever a message was doing: not begun, or partly here or there.
TEST(GlooTransportTest, AProcessThatIsKilledEndsEveryWaitForItAndNoOther) {
  const auto part = [](Transport& transport) -> std::string {
    if (transport.process() == 1) {
      for (const int other : {0, 2}) receive(transport, other, 1, 8)->wait_for(seconds(30));
      const auto in = receive(transport, 0, 2, kHuge), out = send(transport, 0, 3, kHuge);
      ::raise(SIGSTOP);  // killed here
      return "it lives";
    }
    std::vector<std::unique_ptr<Transfer>> huge, transfers;
    if (transport.process() == 0) {
      huge.push_back(send(transport, 1, 2, kHuge));
      huge.push_back(receive(transport, 1, 3, kHuge));
    }
    transfers.push_back(send(transport, 1, 4, 8));
    transfers.push_back(receive(transport, 1, 5, 8));
    send(transport, 1, 1, 8)->wait_for(seconds(30));
    std::string text;
    const auto fails = [&](const auto& fn) {
      const auto error = error_of<CommError>(fn);
      if (error.find("process 1, got") == std::string::npos) text += "'" + error + "' ";
    };
    for (const auto& transfer : huge) {
      const std::string end = end_of(*transfer);
      // On a busy machine it may be through before the process stops.
      if (end != "done" && end.find("process 1, got") == std::string::npos) text += end + " ";
    }
    for (const auto& transfer : transfers) fails([&] { transfer->wait_for(kPatience); });
    fails([&] { send(transport, 1, 6, 8); });
    fails([&] { receive(transport, 1, 6, 8); });
    return exchange(transport, 2 - transport.process(), 7, 8) ? text : text + "no more messages";
  };
  ForkedProcesses processes(3, over_gloo(3, part));
  processes.gather();
  processes.wait_until_stopped(1);
  std::this_thread::sleep_for(milliseconds(50));  // in which the others come to wait
  processes.kill(1);
  EXPECT_EQ(processes.outcome(0), "");
  EXPECT_EQ(processes.outcome(2), "");
}

TEST(GlooTransportTest, AWaitThatEndsTooEarlyBreaksNothing) {
  const auto outcomes = run(2, [](Transport& transport) -> std::string {
    const int other = 1 - transport.process();
    const auto late = receive(transport, other, 1, 8);
    for (const int ms : {0, 1, 60, 120}) {
      if (late->wait_for(milliseconds(ms))) return "it came before it was sent";
    }
    if (!exchange(transport, other, 2, 8)) return "no messages";
    const auto out = send(transport, other, 1, 8);
    return late->wait_for(seconds(30)) && out->wait_for(seconds(30)) ? "" : "it did not come";
  });
  EXPECT_EQ(outcomes, std::vector<std::string>(2));
}

TEST(GlooTransportTest, AMessageOfAnotherLengthSaysBoth) {
  const auto outcomes = run(2, [](Transport& transport) {
    const int other = 1 - transport.process();
    const auto out = send(transport, other, 1, transport.process() == 0 ? 8 : 16);
    const auto in = receive(transport, other, 1, transport.process() == 0 ? 24 : 4);
    auto text = error_of<CommError>([&] { in->wait_for(kPatience); }) + "; " +
                error_of<CommError>([&] { out->wait_for(kPatience); });
    exchange(transport, other, 2, 8);  // the connection is as it was
    return text;
  });
  EXPECT_EQ(outcomes[0],
            "[gloo] expected 24 bytes from process 1, got: 16 bytes (process 0, tag 1); "
            "[gloo] expected 8 bytes to process 1, got: it expects 4 bytes (process 0, tag 1)");
  EXPECT_EQ(outcomes[1],
            "[gloo] expected 4 bytes from process 0, got: 8 bytes (process 1, tag 1); "
            "[gloo] expected 16 bytes to process 0, got: it expects 24 bytes (process 1, tag 1)");
}

// It may be waited for or dropped when the transport is gone, and lets go of its bytes.
TEST(GlooTransportTest, MayEndBeforeItsMessages) {
  ForkedProcesses processes(2, [&](int process, const AllGatherTexts& all_gather) -> std::string {
    auto transport = make_gloo_transport(options_of(process, 2, all_gather));
    std::vector<std::weak_ptr<std::byte[]>> owners;
    std::vector<std::unique_ptr<Transfer>> kept;
    for (std::uint32_t tag = 1; tag <= 8; ++tag) {
      constexpr std::size_t kNbytes = 1 << 20;
      const auto bytes = zeros(kNbytes);
      owners.emplace_back(bytes);
      auto transfer = tag % 2 == 0
                          ? transport->send(1 - process, tag, {bytes.get(), kNbytes}, bytes)
                          : transport->receive(1 - process, tag, {bytes.get(), kNbytes}, bytes);
      if (tag > 4) kept.push_back(std::move(transfer));
    }
    exchange(*transport, 1 - process, 9, 8);
    transport.reset();
    std::string text = error_of<CommError>([&] { kept[0]->wait_for(seconds(30)); });
    kept.clear();
    for (const auto& owner : owners) text += owner.expired() ? "" : " kept";
    return text;
  });
  processes.gather();
  for (int p = 0; p < 2; ++p) {
    EXPECT_EQ(processes.outcome(p),
              fmt::format("[gloo] expected 1048576 bytes from process {}, got: this process has "
                          "closed the transport (process {}, tag 5)",
                          1 - p, p));
  }
}

TEST(GlooTransportTest, KeepsWhatIsDroppedWhereNoThreadStarts) {
  ForkedProcesses processes(2, [&](int process, const AllGatherTexts& all_gather) -> std::string {
    auto transport = make_gloo_transport(options_of(process, 2, all_gather));
    testing::allow_threads(0);
    auto bytes = zeros(8);
    const std::weak_ptr<std::byte[]> owner = bytes;
    for (const std::uint32_t tag : {1, 2}) {
      (void)transport->receive(1 - process, tag, {bytes.get(), 8}, bytes);
    }
    bytes.reset();
    std::string text = owner.expired() ? "freed early" : "kept";
    exchange(*transport, 1 - process, 9, 8);
    transport.reset();
    return text + (owner.expired() ? ", freed" : ", kept for good");
  });
  processes.gather();
  for (int p = 0; p < 2; ++p) EXPECT_EQ(processes.outcome(p), "kept, freed");
}

TEST(GlooTransportTest, LeavesNothing) {
  ForkedProcesses processes(2, [&](int process, const AllGatherTexts& all_gather) -> std::string {
    const auto alone = [](const std::string& own) { return std::vector{own}; };
    make_gloo_transport(options_of(0, 1, alone));  // what is loaded stays
    const auto before = testing::holdings();
    {
      const auto transport = make_gloo_transport(options_of(process, 2, all_gather));
      const auto one = testing::holdings();
      for (std::uint32_t round = 0; round < 300; ++round) {
        receive(*transport, 1 - process, 1 + round, 8);  // nobody waits for these two
        send(*transport, 1 - process, 1 + round, 8);
        if (!exchange(*transport, 1 - process, 0, 8 * round)) return "no messages";
      }
      const auto then = testing::holdings();
      if (then.num_open_files != one.num_open_files) return fmt::format("{}", then.num_open_files);
    }
    std::ostringstream left;
    if (const auto after = testing::holdings_settled(before); after != before) {
      left << before << " became " << after;
    }
    return left.str();
  });
  processes.gather();
  EXPECT_EQ(processes.outcomes(), std::vector<std::string>(2));
}

TEST(GlooTransportTest, AProcessThatDoesNotConnectIsNamed) {
  ForkedProcesses processes(2, [](int process, const AllGatherTexts& all_gather) -> std::string {
    auto options = options_of(process, 2, all_gather);
    options.deadline = milliseconds(500);
    if (process == 1) {
      options.all_gather = [&](const std::string& own) {
        auto texts = all_gather(own);
        std::this_thread::sleep_for(seconds(60));
        return texts;
      };
    }
    make_gloo_transport(options);
    return "connected";
  });
  processes.gather();
  // At the one side or the other, whichever has the higher address.
  EXPECT_TRUE(has(processes.outcome(0), {"process 1, got", "(process 0)"}));
}

TEST(GlooTransportTest, AnotherInTheProcessesPlaceIsRefused) {
  ForkedProcesses processes(2, [](int process, const AllGatherTexts& all_gather) -> std::string {
    auto options = options_of(process, 2, all_gather);
    options.all_gather = [&](const std::string& own) {
      auto texts = all_gather(own);
      texts[1][0] = texts[1][0] == '0' ? '1' : '0';  // of the number that process 1 drew
      return texts;
    };
    make_gloo_transport(options);
    return "connected";
  });
  processes.gather();
  EXPECT_EQ(processes.outcome(0), "[gloo] expected process 1, got somebody else (process 0)");
}

TEST(GlooTransportTest, ListensWhereItIsTold) {
  const auto where = [](const std::string& host) {
    auto options = options_of(0, 1, [](const std::string& own) { return std::vector{own}; });
    options.host = host;
    return make_gloo_transport(options)->str();
  };
  for (const char* host : {"127.0.0.1", "lo", "localhost"}) {
    EXPECT_TRUE(where(host).ends_with(" at 127.0.0.1") || where(host).ends_with(" at ::1")) << host;
  }
  EXPECT_TRUE(where("").starts_with("Gloo ")) << where("");
  for (const char* host : {"192.0.2.1", "no such host", "lo0"}) {
    const std::string error = error_of<InvalidArgument>([&] { where(host); });
    EXPECT_TRUE(
        testing::has(error, {"[gloo] expected an interface or an address of this machine, got " +
                                 std::string(host) + "; there are ",
                             "lo (127.0.0.1)"}));
  }
}

TEST(GlooPlugin, IsRefusedIfItIsNotOurs) {
  const auto error_with = [](const std::string& path) {
    return error_of<DeviceError>([&] { make_gloo_transport({.plugin_path = path}); });
  };
  EXPECT_NE(error_with("/no/such/plugin.so").find("got: /no/such/plugin.so: cannot open"),
            std::string::npos);
  EXPECT_EQ(
      error_with("libc.so.6"),
      "[gloo] expected libc.so.6 to be Tessera's plug-in for Gloo, got no tessera_gloo_plugin");
  const std::string older = "tests/comm/libolder_gloo_plugin.so";
  EXPECT_EQ(error_with(older),
            fmt::format("[gloo] expected a plug-in of version 2, got 0 ({}): it belongs to another "
                        "Tessera",
                        older));
}

TEST(GlooPlugin, IsFoundWhereProgramsAre) {
  const testing::TempFolder temporary;
  const auto folder = std::filesystem::canonical(temporary.path());
  const auto touch = [](const std::filesystem::path& path) {
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << "x";
    return path.string();
  };
  const std::string program = touch(folder / "bin/program");
  EXPECT_EQ(find_gloo_plugin(folder / "none"), "");
  EXPECT_EQ(find_gloo_plugin(program), "");
  const auto built = touch(program + ".runfiles/anything/comm/libtessera_gloo.so");
  EXPECT_EQ(find_gloo_plugin(program), built);
  const auto installed = touch(folder / "lib/libtessera_gloo.so");
  EXPECT_EQ(find_gloo_plugin(program), installed);
  std::filesystem::create_symlink(program, folder / "link");
  EXPECT_EQ(find_gloo_plugin(folder / "link"), installed);
  const auto beside = touch(folder / "bin/libtessera_gloo.so");
  EXPECT_EQ(find_gloo_plugin(program), beside);
}

}  // namespace
}  // namespace tessera::comm
