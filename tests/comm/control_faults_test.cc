// The control plane of a job some of whose processes die, stop or are not its own.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <atomic>
#include <string>
#include <vector>

#include "comm/control/control.h"
#include "engine/error.h"
#include "engine/sanitizers.h"
#include "tests/comm/control_processes.h"
#include "tests/testing/errors.h"

namespace tessera::comm {
namespace {

using testing::has;

/// Says "known" once process 0 knows what all call, and then how the job fails.
void say_failure(Control& control, const Child::Say& say) {
  FailureOf failure(control);
  const int p = control.process();
  control.say_call("step " + std::to_string(p));
  for (int other = 0; other < control.num_processes(); ++other) {
    wait_until([&] { return !control.last_call(other).empty(); });
  }
  control.all_gather("known", "");
  say("known");
  say(failure.get());
  // Process 0 has told all before it is told itself.
  if (p != 0) std::this_thread::sleep_for(std::chrono::hours(1));
}

/// A process that joins and says who joined, then leaves when all have.
Child joining(const ControlOptions& options) {
  return child_of(options, [](Control& control, const Child::Say& say) {
    std::string all;
    for (const std::string& text : control.all_gather("x", std::to_string(control.process()))) {
      all += text;
    }
    say(all);
  });
}

/// Hears notes of who was refused, and then that a process has joined and gathered `all`.
std::vector<std::string> notes_of(Child& child, const std::string& all) {
  std::vector<std::string> notes;
  for (;;) {
    std::string line = child.hear();
    if (line == "joined") break;
    notes.push_back(std::move(line));
    if (notes.back().front() == '(') break;
  }
  EXPECT_EQ(child.hear(), all) << ::testing::PrintToString(notes);
  return notes;
}

bool any_has(const std::vector<std::string>& notes, std::initializer_list<std::string_view> parts) {
  for (const std::string& note : notes) {
    if (has(note, parts)) return true;
  }
  ADD_FAILURE() << *parts.begin() << " not in " << ::testing::PrintToString(notes);
  return false;
}

// The silence that counts is 10 seconds here: it is the end of the connection that tells.
TEST(ControlFaultsTest, WhoIsKilledIsNamedWithItsLastCallToAllAtOnce) {
  const std::vector<int> victims = {0, 1, 3};
  std::vector<std::vector<Child>> jobs;
  for (std::size_t i = 0; i < victims.size(); ++i) jobs.push_back(job_of(4, tcp(), say_failure));
  for (std::size_t i = 0; i < victims.size(); ++i) {
    const int victim = victims[i];
    for (Child& child : jobs[i]) EXPECT_EQ(child.hear(), "known");
    jobs[i][victim].end();
    for (int p = 0; p < 4; ++p) {
      if (p == victim) continue;
      EXPECT_TRUE(
          has(jobs[i][p].hear(),
              {"[control] expected 4 processes, lost process " + std::to_string(victim) + " (",
               "), which ended without a word; its last call: step " + std::to_string(victim)}));
    }
  }
}

TEST(ControlFaultsTest, OfAProcessThatIsKilledEachRanksLastCallIsSaid) {
  const std::string address = tcp();
  std::vector<Child> job;
  for (int p = 0; p < 2; ++p) {
    ControlOptions options = options_of(address, p, 2);
    options.num_ranks = 3;
    job.push_back(child_of(options, [](Control& control, const Child::Say& say) {
      for (const int rank : {0, 1, 2}) control.say_call(rank == 1 ? "b" : "a", rank);
      say_failure(control, say);
    }));
  }
  for (Child& child : job) EXPECT_EQ(child.hear(), "joined");
  for (Child& child : job) EXPECT_EQ(child.hear(), "known");
  job[1].end();
  EXPECT_TRUE(has(job[0].hear(), {"lost process 1 (", "; its last calls: step 1; b; a"}));
}

TEST(ControlFaultsTest, AnExitWithoutLeavingIsNoLeaving) {
  auto job = job_of(3, tcp(), [](Control& control, const Child::Say& say) {
    if (control.process() == 2) ::_exit(0);
    say(FailureOf(control).get());
  });
  for (const int p : {0, 1}) {
    EXPECT_TRUE(has(job[p].hear(), {"lost process 2 (", "which ended without a word"}));
  }
}

// And hears it itself, if it goes on.
TEST(ControlFaultsTest, WhoIsStoppedForLongIsNamed) {
  std::vector<std::vector<Child>> jobs;
  for (int i = 0; i < 2; ++i) jobs.push_back(job_of(3, tcp(), say_failure, milliseconds(2000)));
  for (auto& job : jobs) {
    for (Child& child : job) EXPECT_EQ(child.hear(), "known");
  }
  jobs[0][0].signal(SIGSTOP);
  jobs[1][2].signal(SIGSTOP);
  for (const int victim : {0, 2}) {
    auto& job = jobs[victim / 2];
    std::string first;
    for (const int p : {1, 2 - victim}) {
      const std::string failure = job[p].hear();
      EXPECT_TRUE(has(failure, {"expected 3 processes, lost process " + std::to_string(victim),
                                "which does not answer (2000 ms without a word)",
                                "its last call: step " + std::to_string(victim)}));
      if (first.empty()) first = failure;
      EXPECT_EQ(failure, first);
    }
    job[victim].signal(SIGCONT);
    EXPECT_EQ(job[victim].hear(), first);
  }
}

TEST(ControlFaultsTest, WhoIsStoppedForAShortWhileIsNot) {
  auto job = job_of(
      3, tcp(),
      [](Control& control, const Child::Say& say) {
        control.all_gather("x", "");
        say("begun");
        std::this_thread::sleep_for(milliseconds(700));
        say(control.all_gather("x", std::to_string(control.process()))[2]);
      },
      std::chrono::minutes(1));
  for (Child& child : job) EXPECT_EQ(child.hear(), "begun");
  for (const int p : {0, 2}) job[p].signal(SIGSTOP);
  std::this_thread::sleep_for(milliseconds(500));
  for (const int p : {0, 2}) job[p].signal(SIGCONT);
  for (Child& child : job) EXPECT_EQ(child.hear(), "2");
}

TEST(ControlFaultsTest, AJobThatIsStoppedAsAWholeGoesOn) {
  auto job = job_of(
      3, tcp(),
      [](Control& control, const Child::Say& say) {
        control.all_gather("x", "");
        say("begun");
        // Longer than silence may be.
        for (int i = 0; i < 30; ++i) {
          std::this_thread::sleep_for(milliseconds(20));
          control.all_gather("x", "");
        }
        say("ended");
      },
      milliseconds(2000));
  for (Child& child : job) EXPECT_EQ(child.hear(), "begun");
  for (Child& child : job) child.signal(SIGSTOP);
  std::this_thread::sleep_for(milliseconds(2500));
  for (Child& child : job) child.signal(SIGCONT);
  for (Child& child : job) EXPECT_EQ(child.hear(), "ended");
}

TEST(ControlFaultsTest, StrangersAreRefusedAndNamedWhileOthersJoin) {
  const int port = free_port();
  ControlOptions options = options_of("tcp:127.0.0.1:" + std::to_string(port), 0, 3);
  options.secret = "open sesame";
  const auto with = [&](int p, auto change) {
    ControlOptions other = options;
    other.process = p;
    change(other);
    return joining(other);
  };
  Child zero = joining(options);
  std::vector<int> strangers;
  for (const std::string_view words :
       {std::string_view("GET / HTTP/1.1\r\n\r\n"), std::string_view(),
        std::string_view("\x05\0\0\0\x05\x01\0\0\0x", 10), std::string_view("\xff\xff\xff\x7f", 4),
        std::string_view("\0\0\0\0", 4)}) {
    strangers.push_back(connect_to(port));
    say_to(strangers.back(), words);
  }
  EXPECT_TRUE(has(with(1, [](auto& o) { o.secret = "guess"; }).hear(),
                  {"got a refusal: another secret (process 1)"}));
  EXPECT_TRUE(has(with(1, [](auto& o) { o.secret.clear(); }).hear(), {"another secret"}));
  EXPECT_TRUE(has(with(1, [](auto& o) { o.job = "k"; }).hear(),
                  {"expected one of job 'j', got one of job 'k'"}));
  EXPECT_TRUE(has(with(1, [](auto& o) { o.num_processes = 4; }).hear(),
                  {"expected one of 3 processes, got one of 4"}));
  Child two = with(2, [](auto&) {});
  Child also_two = with(2, [](auto&) {});
  // One of them is refused before the last comes.
  std::vector<std::string> notes;
  while (notes.empty() || !has(notes.back(), {"one process 2"})) {
    notes.push_back(zero.hear());
    ASSERT_NE(notes.back().front(), '(');
  }
  Child one = with(1, [](auto&) {});
  notes_of(zero, "012");
  EXPECT_TRUE(any_has(notes, {"refused 127.0.0.1:", "got something else"}));
  EXPECT_TRUE(any_has(notes, {"refused process 1 (", "expected the secret of this job"}));
  EXPECT_TRUE(any_has(notes, {"refused process 1 (", "got one of job 'k'"}));
  EXPECT_TRUE(any_has(notes, {"refused process 1 (", "expected one of 3 processes, got one of 4"}));
  EXPECT_TRUE(any_has(notes, {"expected one process 2, got two: process 2 ("}));
  EXPECT_EQ(one.hear(), "joined");
  std::string twos[] = {two.hear(), also_two.hear()};
  if (twos[0] != "joined") std::swap(twos[0], twos[1]);
  EXPECT_EQ(twos[0], "joined");
  EXPECT_TRUE(has(twos[1], {"got a refusal: expected one process 2, got two: process 2 ("}));
  for (const int fd : strangers) ::close(fd);
}

/// Carries bytes between `a` and `b` until one ends, and returns what `a` said.
std::string relay(int a, int b) {
  std::string said;
  for (;;) {
    pollfd polls[2] = {{a, POLLIN, 0}, {b, POLLIN, 0}};
    if (::poll(polls, 2, 300) <= 0) return said;
    for (const auto& [from, to] : {std::pair(0, b), {1, a}}) {
      if (polls[from].revents == 0) continue;
      std::array<char, 4096> piece;
      const ssize_t n = ::recv(polls[from].fd, piece.data(), piece.size(), 0);
      if (n <= 0) return said;
      if (from == 0) said.append(piece.data(), static_cast<std::size_t>(n));
      say_to(to, std::string_view(piece.data(), static_cast<std::size_t>(n)));
    }
  }
}

TEST(ControlFaultsTest, WhatAProcessSaidOnceOpensNothing) {
  const int port = free_port();
  ControlOptions options = options_of("tcp:127.0.0.1:" + std::to_string(port), 0, 3);
  options.secret = "open sesame";
  Child zero = joining(options);
  const auto [listener, relay_port] = listen_here();
  ControlOptions through = options;
  through.process = 1;
  through.address = "tcp:127.0.0.1:" + std::to_string(relay_port);
  Child one = joining(through);
  const int from_one = ::accept(listener, nullptr, nullptr), to_zero = connect_to(port);
  const std::string said = relay(from_one, to_zero);
  EXPECT_GT(said.size(), 64u);  // a hello and an answer
  one.end();
  for (const int fd : {from_one, to_zero, listener}) ::close(fd);

  const int replay = connect_to(port);
  say_to(replay, said);
  EXPECT_TRUE(has(zero.hear(), {"refused process 1 (", "expected the secret of this job"}));
  ::close(replay);
  options.process = 1;
  Child again = joining(options);
  options.process = 2;
  Child two = joining(options);
  for (Child* child : {&zero, &again, &two}) notes_of(*child, "012");
}

TEST(ControlFaultsTest, BytesThatComeSlowlyDelayNobodyAndAreNotWaitedForLong) {
  const int port = free_port();
  const std::string address = "tcp:127.0.0.1:" + std::to_string(port);
  Child zero = joining(options_of(address, 0, 3));
  int slow = connect_to(port);
  const auto say_slowly = [&](int num_bytes) {
    for (int i = 0; i < num_bytes; ++i) {
      say_to(slow, std::string_view("\x40\0\0\0\0TSRCTRL2\0\0\0\0\0\0\0", 20).substr(i % 20, 1));
      std::this_thread::sleep_for(milliseconds(40));
    }
  };
  say_slowly(5);
  Child one = joining(options_of(address, 1, 3));
  say_slowly(60);
  EXPECT_TRUE(has(zero.hear(), {"refused 127.0.0.1:", "who it is within 2 s, got too little"}));
  // It is told nothing: a process of the job that was held up would come again.
  char byte = 0;
  EXPECT_LE(::recv(slow, &byte, 1, 0), 0);
  ::close(slow);
  slow = connect_to(port);
  say_slowly(1);
  Child two = joining(options_of(address, 2, 3));
  for (Child* child : {&zero, &one, &two}) EXPECT_TRUE(notes_of(*child, "012").empty());
  ::close(slow);
}

TEST(ControlFaultsTest, TwoJobsShareAPortAndTheNext) {
  const std::string address = "tcp:127.0.0.1:" + std::to_string(free_port()) + "+5";
  std::vector<Child> jobs;
  for (const int p : {0, 1, 2}) {
    for (const std::string job : {"a", "b"}) {
      ControlOptions options = options_of(address, p, 3);
      options.job = job;
      options.secret = "of " + job;
      jobs.push_back(child_of(options, [job](Control& control, const Child::Say& say) {
        std::string all;
        for (const std::string& text : control.all_gather("x", job)) all += text;
        say(all);
      }));
    }
  }
  for (std::size_t i = 0; i < jobs.size(); ++i) notes_of(jobs[i], i % 2 == 0 ? "aaa" : "bbb");
}

TEST(ControlFaultsTest, APortThatIsTakenIsNamed) {
  const auto [listener, port] = listen_here();
  const std::string address = "tcp:127.0.0.1:" + std::to_string(port);
  EXPECT_TRUE(has(joining(options_of(address, 0, 2)).hear(),
                  {"expected to listen at " + address, "already in use (process 0)"}));
  ::close(listener);
}

TEST(ControlFaultsTest, WhoDiesBeforeAllAreThereMayComeAgain) {
  const std::string address = tcp();
  // Who waits for others says nothing.
  const auto join_and_die = [&](int p) {
    Child child = joining(options_of(address, p, 4));
    std::this_thread::sleep_for(milliseconds(150));
    child.end();
  };
  join_and_die(0);
  Child two = joining(options_of(address, 2, 4));
  join_and_die(0);
  Child zero = joining(options_of(address, 0, 4));
  join_and_die(1);
  join_and_die(1);
  Child one = joining(options_of(address, 1, 4)), three = joining(options_of(address, 3, 4));
  for (Child* child : {&zero, &one, &two, &three}) notes_of(*child, "0123");
}

// They hold all descriptors that process 0 has. UndefinedBehaviorSanitizer needs two of its own to
// look at an object's type, and reports one that is wrong where it gets none.
#if !defined(TESSERA_UBSAN)
TEST(ControlFaultsTest, ProcessesAreHeardWhenStrangersHoldAllDescriptors) {
  const int port = free_port();
  const std::string address = "tcp:127.0.0.1:" + std::to_string(port);
  Child zero([&](const Child::Say& say) {
    const int next = ::dup(0);  // the lowest that is free
    const rlimit few{.rlim_cur = static_cast<rlim_t>(next) + 8,
                     .rlim_max = static_cast<rlim_t>(next) + 8};
    ::close(next);
    if (::setrlimit(RLIMIT_NOFILE, &few) != 0) return;
    say("limited");
    const auto control = Control::join(options_of(address, 0, 2));
    say(control->all_gather("x", "")[1]);
  });
  EXPECT_EQ(zero.hear(), "limited");
  std::vector<int> strangers;
  while (strangers.size() < 30) strangers.push_back(connect_to(port));
  Child one = child_of(options_of(address, 1, 2),
                       [](Control& control, const Child::Say&) { control.all_gather("x", "1"); });
  EXPECT_EQ(one.hear(), "joined");
  EXPECT_EQ(zero.hear(), "1");
  for (const int fd : strangers) ::close(fd);
}
#endif

}  // namespace
}  // namespace tessera::comm
