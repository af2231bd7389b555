// What processes of a job say and are told while not all of them are there.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <netdb.h>

#include <chrono>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "comm/control/control.h"
#include "tests/comm/control_processes.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

// Of a name server that never answers for one name, and is asked for no number.
extern "C" int getaddrinfo(const char* host, const char* port, const addrinfo* hints,
                           addrinfo** found) {
  const bool asks_server = hints == nullptr || (hints->ai_flags & AI_NUMERICHOST) == 0;
  if (asks_server &&
      (std::string_view(host) == "silent.invalid" || host == std::string_view("127.0.0.1")))
    std::this_thread::sleep_for(std::chrono::hours(1));
  static const auto real =
      reinterpret_cast<decltype(&getaddrinfo)>(dlsym(RTLD_NEXT, "getaddrinfo"));
  return real(host, port, hints, found);
}

namespace tessera::comm {
namespace {

using testing::has;

/// A process that says what it is told while it joins, and "joined".
Child joining(ControlOptions options) {
  return Child([options](const Child::Say& say) mutable {
    options.on_waiting = options.on_refused = say;
    const auto control = Control::join(options);
    say("joined");
    control->all_gather("all", "");
  });
}

/// A process that will not join.
Child declining(const ControlOptions& options, const std::string& why) {
  return Child([=](const Child::Say& say) {
    Control::decline(options, why);
    say("declined");
  });
}

TEST(ControlWaitingTest, ProcessZeroSaysWhoIsMissingAndTheOthersThatItIs) {
  const std::string address = tcp();
  const auto options = [&](int p) { return options_of(address, p, 4, std::chrono::seconds(10)); };
  Child two = joining(options(2));
  EXPECT_EQ(two.hear(), "waiting for process 0 of job 'j' at " + address +
                            ", got Connection refused (process 2)");
  Child zero = joining(options(0));
  EXPECT_EQ(zero.hear(), "waiting for 2 of 4 processes at " + address + ": processes 1, 3");
  Child three = joining(options(3)), one = joining(options(1));
  for (Child* child : {&zero, &one, &two, &three}) {
    std::string line = child->hear();
    while (line.starts_with("waiting for ")) line = child->hear();
    EXPECT_EQ(line, "joined");
  }
}

TEST(ControlWaitingTest, WhatIsWaitedForIsSaidEverMoreSeldom) {
  Child zero = joining(options_of(tcp(), 0, 2, milliseconds(2000)));
  int num_notes = 0;
  std::string line;
  while ((line = zero.hear()).starts_with("waiting for 1 of 2 processes at ")) ++num_notes;
  EXPECT_TRUE(has(line, {"expected 2 processes at ", "got 1: missing process 1"}));
  // After 0.2, 0.4, 0.8 and 1.6 seconds; a busy machine may miss some.
  EXPECT_GE(num_notes, 1);
  EXPECT_LE(num_notes, 4);
}

TEST(ControlWaitingTest, ANameServerThatDoesNotAnswerIsNotWaitedForForLong) {
  Child one = joining(options_of("tcp:silent.invalid:29500", 1, 2, milliseconds(500)));
  EXPECT_EQ(one.hear(),
            "[control] expected process 0 of job 'j' at tcp:silent.invalid:29500 within 500 ms, "
            "got no answer of a name server for silent.invalid (process 1)");
}

TEST(ControlWaitingTest, WhoDeclinesEndsTheOthersWithItsReason) {
  for (const int decliner : {0, 2}) {
    const testing::TempFolder folder;
    for (const std::string& address : {tcp(), tcp() + "+5", "file:" + (folder / "meet")}) {
      std::vector<Child> others;
      for (const int p : {0, 1, 2}) {
        if (p != decliner) others.push_back(joining(options_of(address, p, 3)));
      }
      Child declines = declining(options_of(address, decliner, 3), "no data");
      std::string first;
      for (Child& other : others) {
        const std::string error = other.hear();
        EXPECT_TRUE(has(error, {"[control] expected 3 processes to join, got an error of process " +
                                    std::to_string(decliner) + " (",
                                ", pid " + std::to_string(declines.pid()) + "): no data"}));
        if (first.empty()) first = error;
        EXPECT_EQ(error, first);
        EXPECT_EQ(other.hear(), "(the end)");
      }
      EXPECT_EQ(declines.hear(), "declined");
    }
    EXPECT_EQ(folder.num_entries(), 0);
  }
}

TEST(ControlWaitingTest, WhoDeclinesGivesUpWhereNobodyIs) {
  for (const int p : {0, 1}) {
    Child alone = declining(options_of(tcp(), p, 2), std::string(100'000, 'x'));
    EXPECT_EQ(alone.hear(), "declined");
  }
}

TEST(ControlWaitingTest, AStrangerCannotDeclineForAProcess) {
  ControlOptions options = options_of(tcp(), 0, 2);
  options.secret = "open sesame";
  Child zero = joining(options);
  options.process = 1;
  ControlOptions other = options;
  other.secret = "guess";
  Child stranger = declining(other, "no data");
  EXPECT_TRUE(has(zero.hear(), {"refused process 1 (", "expected the secret of this job"}));
  EXPECT_EQ(stranger.hear(), "declined");
  Child one = joining(options);
  for (Child* child : {&zero, &one}) {
    std::string line = child->hear();
    while (line.starts_with("waiting for ")) line = child->hear();
    EXPECT_EQ(line, "joined");
  }
}

}  // namespace
}  // namespace tessera::comm
