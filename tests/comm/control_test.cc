// The control plane of a job whose processes are all well.
#include "comm/control/control.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "engine/error.h"
#include "tests/comm/control_processes.h"
#include "tests/testing/errors.h"
#include "tests/testing/leftovers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::comm {
namespace {

using testing::error_of;
using testing::has;
using testing::TempFolder;

TEST(ControlTest, GathersWhatAllSayProcessByProcess) {
  for (const int n : {1, 2, 3, 8}) {
    const auto gather = [](Control& control, const Child::Say& say) {
      const int p = control.process();
      // Nothing, little, and more than fits into a socket.
      for (const std::size_t size : {0, 1, 400'000}) {
        const auto all = control.all_gather("texts", std::string(size * (p + 1), char('a' + p)));
        std::string text;
        for (const std::string& one : all) {
          const auto same = one.find_first_not_of(one.empty() ? 'x' : one[0]) == one.npos;
          text += std::to_string(one.size()) + (one.empty() ? '-' : one[0]) + (same ? "" : "!");
        }
        say(text);
      }
      say(control.name(control.num_processes() - 1));
    };
    std::vector<Child> job = job_of(n, n == 1 ? "" : tcp(), gather);
    std::string expected[3];
    for (int p = 0; p < n; ++p) {
      const std::string letter(1, char('a' + p));
      expected[0] += "0-";
      expected[1] += std::to_string(p + 1) + letter;
      expected[2] += std::to_string(400'000 * (p + 1)) + letter;
    }
    for (Child& child : job) {
      for (const std::string& text : expected) EXPECT_EQ(child.hear(), text);
      EXPECT_TRUE(has(child.hear(), {"process " + std::to_string(n - 1) + " (",
                                     ", pid " + std::to_string(job.back().pid()) + ")"}));
    }
  }
}

TEST(ControlTest, CallsThatDifferAreNamedOnAll) {
  auto job = job_of(3, tcp(), [](Control& control, const Child::Say&) {
    control.all_gather(control.process() == 2 ? "plan" : "build", "");
    control.all_gather("never", "");
  });
  std::string first;
  for (Child& child : job) {
    const std::string error = child.hear();
    EXPECT_TRUE(has(error, {"one all_gather of all processes", "'plan' of process 2 (",
                            "'build' of process "}));
    if (first.empty()) first = error;
    EXPECT_EQ(error, first);
  }
}

TEST(ControlTest, WhoeverIsLateIsWaitedFor) {
  for (const bool is_file : {false, true}) {
    const TempFolder folder;
    const std::string address = is_file ? "file:" + (folder / "meet") : tcp();
    for (const int late : {0, 1}) {
      const auto join = [&](int p) {
        return child_of(options_of(address, p, 3), [](Control& control, const Child::Say& say) {
          say(control.all_gather("x", std::to_string(control.process()))[1]);
        });
      };
      Child early = join(1 - late), also_early = join(2);
      std::this_thread::sleep_for(milliseconds(100));
      Child last = join(late);
      for (Child* child : {&early, &also_early, &last}) {
        EXPECT_EQ(child->hear(), "joined");
        EXPECT_EQ(child->hear(), "1");
      }
    }
    EXPECT_EQ(folder.num_entries(), 0);
  }
}

TEST(ControlTest, WhoIsMissingIsNamedAtTheDeadline) {
  const std::string address = tcp();
  const auto join = [&](int p) {
    return child_of(options_of(address, p, 4, milliseconds(700)), [](Control&, const auto&) {});
  };
  Child zero = join(0), two = join(2);
  EXPECT_TRUE(has(zero.hear(), {"expected 4 processes at " + address + " within 700 ms",
                                "got 2: missing processes 1, 3"}));
  EXPECT_TRUE(has(two.hear(), {"got 2: missing processes 1, 3"}));
  EXPECT_TRUE(has(join(3).hear(), {"expected process 0 of job 'j' at " + address,
                                   "within 700 ms, got Connection refused (process 3)"}));
}

TEST(ControlTest, AFileThatAnEarlierJobLeftIsReplacedAndNoOther) {
  const TempFolder folder;
  const std::string path = folder / "meet", address = "file:" + path;
  const auto join = [&](int p) {
    return child_of(options_of(address, p, 2), [](Control& control, const Child::Say& say) {
      say(control.all_gather("x", std::to_string(control.process()))[1]);
    });
  };
  Child killed = join(0);
  struct stat info {};
  wait_until([&] { return ::stat(path.c_str(), &info) == 0 && folder.num_entries() == 1; });
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  killed.end();
  EXPECT_EQ(folder.num_entries(), 1);
  Child one = join(1);  // finds nobody there yet
  std::this_thread::sleep_for(milliseconds(50));
  Child zero = join(0);
  for (Child* child : {&zero, &one}) {
    EXPECT_EQ(child->hear(), "joined");
    EXPECT_EQ(child->hear(), "1");
  }
  EXPECT_EQ(folder.num_entries(), 0);

  folder.write("meet", "notes of a person");
  EXPECT_EQ(::chmod(path.c_str(), 0600), 0);
  for (const int p : {0, 1}) {
    EXPECT_TRUE(has(join(p).hear(), {"expected a file that process 0 of a job has left", path}));
  }
  EXPECT_EQ(folder.read("meet"), "notes of a person");
}

TEST(ControlTest, WhileOnePausesNoDeadlineRunsAnywhere) {
  const auto pause = [](Control& control, const Child::Say& say) {
    const auto told = std::make_shared<std::atomic<int>>(0);
    control.listen({.on_failure = {}, .on_pause = [=](bool paused) {
                      EXPECT_EQ(paused, *told % 2 == 0);
                      ++*told;
                    }});
    if (control.process() != 1) {
      say("gathered " + control.all_gather("x", "")[1]);
    } else {
      auto paused = control.pause();
      const auto again = control.pause();
      std::this_thread::sleep_for(milliseconds(700));
      paused.reset();
      std::this_thread::sleep_for(milliseconds(700));
      control.all_gather("x", "late");
    }
    wait_until([&] { return *told == 2; });
    say("told");
    // Nobody pauses any more.
    if (control.process() == 1) std::this_thread::sleep_for(std::chrono::hours(1));
    control.all_gather("y", "");
  };
  auto job = job_of(3, tcp(), pause, milliseconds(800));
  for (const int p : {0, 2}) EXPECT_EQ(job[p].hear(), "gathered late");
  for (Child& child : job) EXPECT_EQ(child.hear(), "told");
  for (const int p : {0, 2}) {
    EXPECT_TRUE(has(job[p].hear(), {"expected all_gather 'y' of 3 processes within 800 ms",
                                    "got none of process 1 ("}));
  }
}

TEST(ControlTest, WhoHasLeftIsNoFailureUntilItIsWaitedFor) {
  for (const int leaver : {1, 0}) {
    auto job = job_of(3, tcp(), [leaver](Control& control, const Child::Say& say) {
      const int p = control.process();
      control.say_call("step 7");
      if (p == leaver) return;
      FailureOf failure(control);
      wait_until([&] { return control.has_left(leaver); });
      say(control.has_left(2) || control.has_left(1 - leaver)
              ? "who?"
              : "left after " + control.last_call(leaver));
      control.all_gather("x", "");
    });
    for (const int p : {1 - leaver, 2}) {
      EXPECT_EQ(job[p].hear(), "left after step 7");
      EXPECT_TRUE(
          has(job[p].hear(), {"expected all_gather 'x' of 3 processes, got none of process " +
                                  std::to_string(leaver) + " (",
                              "which has left", leaver == 1 ? "its last call: step 7" : ""}));
    }
  }
}

// Though that is stopped meanwhile, and process 0 has nothing else to do.
TEST(ControlTest, ProcessZeroLeavesWhenOthersHaveWhatWasGathered) {
  constexpr std::size_t kNbytes = 6'000'000;  // more than sockets hold, where one holds little
  int go_on[2];
  ASSERT_EQ(::pipe(go_on), 0);
  auto job = job_of(2, tcp(), [&](Control& control, const Child::Say& say) {
    if (control.process() == 0) {
      char byte = 0;
      EXPECT_EQ(::read(go_on[0], &byte, 1), 1);
    }
    if (control.process() == 1) {
      const int little = 65536;
      for (int fd = 3; fd < 100; ++fd) {
        (void)::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &little, sizeof(little));
      }
      say("asks");
    }
    const auto all =
        control.all_gather("x", std::string(control.process() == 0 ? kNbytes : 0, 'x'));
    say(std::to_string(all[0].size()));
  });
  EXPECT_EQ(job[1].hear(), "asks");
  std::this_thread::sleep_for(milliseconds(1000));  // it has sent its part
  job[1].signal(SIGSTOP);
  EXPECT_EQ(::write(go_on[1], "x", 1), 1);
  EXPECT_EQ(job[0].hear(), std::to_string(kNbytes));
  std::this_thread::sleep_for(milliseconds(1500));
  job[1].signal(SIGCONT);
  EXPECT_EQ(job[1].hear(), std::to_string(kNbytes));
  for (const int end : go_on) ::close(end);
}

TEST(ControlTest, TheFirstReasonWinsEverywhere) {
  auto job = job_of(4, tcp(), [](Control& control, const Child::Say& say) {
    control.all_gather("together", "");
    control.fail(std::string(100'000, char('a' + control.process())));
    try {
      control.all_gather("x", "");
    } catch (const engine::CommError& error) {
      // Told at once, although it listens late.
      const std::string told = FailureOf(control).get();
      say(told == error.what() ? told : "not what was told");
    }
  });
  const std::string first = job[0].hear();
  EXPECT_EQ(first, std::string(16384, first[0]));
  for (std::size_t p = 1; p < job.size(); ++p) EXPECT_EQ(job[p].hear(), first);
}

TEST(ControlTest, TooMuchIsRefused) {
  auto job = job_of(2, tcp(), [](Control& control, const Child::Say& say) {
    say(error_of<engine::InvalidArgument>(
        [&] { control.all_gather("x", std::string(Control::kMaxGatherNbytes + 1, 'x')); }));
    control.all_gather("large",
                       std::string(Control::kMaxGatherNbytes / 2 + control.process(), 'x'));
  });
  for (Child& child : job) {
    EXPECT_TRUE(has(child.hear(), {"expected at most 67108864 bytes to gather, got 67108865"}));
    EXPECT_TRUE(has(child.hear(), {"at most 67108864 bytes of all in all_gather 'large'"}));
  }
}

TEST(ControlTest, LastCallsAreKnownAndShort) {
  auto job = job_of(2, tcp(), [](Control& control, const Child::Say& say) {
    control.say_call(std::string(500, char('a' + control.process())));
    const int other = 1 - control.process();
    wait_until([&] { return !control.last_call(other).empty(); });
    say(control.last_call(other));
    control.all_gather("end", "");
  });
  EXPECT_EQ(job[0].hear(), std::string(200, 'b'));
  EXPECT_EQ(job[1].hear(), std::string(200, 'a'));
}

TEST(ControlTest, EachRankOfAProcessSaysWhatItCallsAndWhenItLeaves) {
  const std::string address = tcp();
  std::vector<Child> job;
  for (int p = 0; p < 2; ++p) {
    ControlOptions options = options_of(address, p, 2);
    options.num_ranks = 2;
    job.push_back(child_of(options, [](Control& control, const Child::Say& say) {
      const int own = control.process(), other = 1 - own;
      control.say_call("a" + std::to_string(own));
      control.say_call("b\n" + std::to_string(own), 1);
      control.say_left(1);
      wait_until([&] { return control.has_left(other, 1); });
      // Of its own ranks a process knows what the others know.
      for (const int p : {other, own}) {
        say(control.last_call(p) + " " + control.last_call(p, 1) + " " + control.last_call(p, 2));
        say(control.has_left(p) || control.has_left(p, 2) || !control.has_left(p, 1) ? "who?" : "");
      }
      control.all_gather("end", "");
    }));
  }
  for (int p = 0; p < 2; ++p) {
    EXPECT_EQ(job[std::size_t(p)].hear(), "joined");
    for (const std::string& of : {std::to_string(1 - p), std::to_string(p)}) {
      EXPECT_EQ(job[std::size_t(p)].hear(), "a" + of + " b\\n" + of + " ");
      EXPECT_EQ(job[std::size_t(p)].hear(), "");
    }
  }
}

TEST(ControlTest, NonsenseIsRefused) {
  for (const std::string address :
       {"", "h:1", "tcp:", "tcp:h", "tcp::1", "tcp:h:0", "tcp:h:65536", "tcp:h:1+", "tcp:h:1+x",
        "tcp:h:65535+1", "tcp:h:1+2+3", "tcp:h:1+-1", "file:", "tcp:[]:1"}) {
    for (const int p : {0, 1}) {
      EXPECT_THROW(Control::join(options_of(address, p, 2)), engine::InvalidArgument) << address;
    }
  }
  for (const auto& [p, n] : {std::pair(2, 2), {-1, 2}, {0, 0}, {0, 100'000}}) {
    EXPECT_THROW(Control::join(options_of(tcp(), p, n)), engine::InvalidArgument);
  }
  EXPECT_THROW(Control::join(options_of(tcp(), 0, 1, milliseconds(0))), engine::InvalidArgument);
  ControlOptions long_name = options_of(tcp(), 0, 1);
  long_name.job = std::string(257, 'x');
  EXPECT_THROW(Control::join(long_name), engine::InvalidArgument);
  // In a process of its own, for the name may be looked for a while longer.
  Child lost = child_of(options_of("tcp:no-such-host.invalid:1", 1, 2, milliseconds(100)),
                        [](Control&, const auto&) {});
  EXPECT_TRUE(
      has(lost.hear(), {"expected process 0 of job 'j'", "got no a", "no-such-host.invalid"}));
}

// Three processes of a job within this one.
TEST(ControlTest, LeavesNothing) {
  const std::string address = tcp();
  const auto run = [&] {
    std::vector<std::jthread> threads;
    for (int p = 0; p < 3; ++p) {
      threads.emplace_back([&, p] {
        const auto control = Control::join(options_of(address, p, 3));
        const auto pause = control->pause();
        EXPECT_EQ(control->all_gather("x", std::string(p, 'x')),
                  (std::vector<std::string>{"", "x", "xx"}));
        if (p == 2) control->fail("enough");
        EXPECT_EQ(FailureOf(*control).get(), "enough");
      });
    }
  };
  run();
  const auto before = testing::holdings();
  run();
  EXPECT_EQ(testing::holdings_settled(before), before);
}

}  // namespace
}  // namespace tessera::comm
