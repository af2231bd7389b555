// How processes get their first bytes: who gets the message, and what is refused.
#include "comm/bootstrap/bootstrap.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "engine/error.h"

namespace tessera::comm {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr milliseconds kLong = std::chrono::hours(1);  // a test that waits for it fails

std::vector<std::byte> bytes(const std::string& text) {
  const auto* p = reinterpret_cast<const std::byte*>(text.data());
  return {p, p + text.size()};
}

// What each rank gets, or the error it ends with. `message`: of all; empty: each says its number.
std::vector<std::string> results_of(const std::string& address, int size,
                                    const std::vector<int>& ranks, milliseconds deadline = kLong,
                                    const std::string& message = "") {
  std::vector<std::string> results(ranks.size());
  std::vector<std::jthread> threads;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    threads.emplace_back([&, i] {
      try {
        const std::string own = message.empty() ? "from " + std::to_string(ranks[i]) : message;
        const auto got = bootstrap(address, ranks[i], size, bytes(own), deadline);
        results[i].assign(reinterpret_cast<const char*>(got.data()), got.size());
      } catch (const engine::Error& error) {
        results[i] = error.what();
      }
    });
  }
  threads.clear();
  return results;
}

int free_port() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length), 0);
  close(fd);
  return ntohs(address.sin_port);
}

class BootstrapTest : public ::testing::Test {
 protected:
  void SetUp() override {
    fs::create_directories(folder_);
    fs::permissions(folder_, fs::perms::owner_all);  // whatever the umask
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::string path() const { return (folder_ / "id").string(); }
  std::string file() const { return "file:" + path(); }
  std::vector<std::string> left() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_)) names.push_back(entry.path());
    return names;
  }
  void write(const std::string& name, const std::string& text, mode_t mode = 0600) const {
    std::ofstream(name) << text;
    ASSERT_EQ(chmod(name.c_str(), mode), 0);
  }

 private:
  const fs::path folder_ = fs::path(::testing::TempDir()) /
                           ("bootstrap_" + std::to_string(getpid()) + "_" +
                            ::testing::UnitTest::GetInstance()->current_test_info()->name());
};

TEST_F(BootstrapTest, EveryRankGetsTheMessageOfRank0AndNothingIsLeft) {
  for (const int size : {1, 2, 5}) {
    std::vector<int> ranks;
    for (int r = size - 1; r >= 0; --r) ranks.push_back(r);
    EXPECT_THAT(results_of(file(), size, ranks), Each("from 0"));
    EXPECT_TRUE(left().empty());
    EXPECT_THAT(results_of("tcp:127.0.0.1:" + std::to_string(free_port()), size, ranks),
                Each("from 0"));
  }
}

TEST_F(BootstrapTest, TheLongestMessageIsOf4096Bytes) {
  std::string text(4096, 'x');
  text.back() = 'y';
  for (const std::string& place : {file(), "tcp:127.0.0.1:" + std::to_string(free_port())}) {
    EXPECT_THAT(results_of(place, 2, {0, 1}, milliseconds(5000), text), Each(text));
    EXPECT_THAT(results_of(place, 2, {0}, milliseconds(5000), text + "z"),
                Each(HasSubstr("expected at most 4096 bytes, got 4097")));
  }
}

TEST_F(BootstrapTest, OneAfterTheOtherAtTheSamePlace) {
  for (int i = 0; i < 5; ++i) EXPECT_THAT(results_of(file(), 3, {0, 1, 2}), Each("from 0"));
}

TEST_F(BootstrapTest, Rank0NamesWhoIsMissing) {
  for (const std::string& place : {file(), "tcp:localhost:" + std::to_string(free_port())}) {
    const auto results = results_of(place, 4, {0, 2}, milliseconds(150));
    EXPECT_THAT(results[0], AllOf(HasSubstr("expected 4 ranks"), HasSubstr("within 150 ms"),
                                  HasSubstr("got 2: missing 1, 3")));
    EXPECT_THAT(results[1], AllOf(HasSubstr("rank 0"), HasSubstr("(rank 2)")));
  }
  EXPECT_TRUE(left().empty());
}

TEST_F(BootstrapTest, RanksWithoutRank0EndAtTheDeadline) {
  for (const std::string& place : {file(), "tcp:localhost:" + std::to_string(free_port())}) {
    EXPECT_THAT(results_of(place, 3, {1, 2}, milliseconds(100)),
                Each(AllOf(HasSubstr("expected rank 0"), HasSubstr("within 100 ms"))));
  }
  EXPECT_TRUE(left().empty());
}

TEST_F(BootstrapTest, WorldsOfDifferentSizeDoNotMix) {
  for (const std::string& place : {file(), "tcp:127.0.0.1:" + std::to_string(free_port())}) {
    std::string other;
    std::jthread stranger([&] { other = results_of(place, 3, {1}, milliseconds(200))[0]; });
    EXPECT_THAT(results_of(place, 2, {0}, milliseconds(5000))[0],
                HasSubstr("expected rank 1 of 2 at"));
  }
}

TEST_F(BootstrapTest, FilesArePrivate) {
  std::jthread waiting([&] { results_of(file(), 2, {1}, milliseconds(200)); });
  struct stat info {};
  while (stat((path() + ".1").c_str(), &info) != 0) std::this_thread::yield();
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(info.st_uid, geteuid());
}

TEST_F(BootstrapTest, WhatAnotherRunLeftIsRefused) {
  write(path(), "stale");
  EXPECT_THAT(results_of(file(), 2, {0})[0],
              AllOf(HasSubstr("expected no file"), HasSubstr(path())));
  fs::remove(path());
  write(path() + ".1", "stale");
  EXPECT_THAT(results_of(file(), 2, {1})[0],
              AllOf(HasSubstr("expected no file"), HasSubstr(path())));
}

TEST_F(BootstrapTest, AnAnswerToAnotherRunIsNotTaken) {
  // An answer with the right form and other numbers: that of a run that was killed.
  std::string answer = "TSRBOOT1";
  const std::int32_t header[] = {2, 0};
  answer.append(reinterpret_cast<const char*>(header), sizeof(header));
  answer.append(32, '\x55');
  answer += "the id of another world";
  write(path(), answer);
  EXPECT_THAT(results_of(file(), 2, {1}, milliseconds(100))[0],
              HasSubstr("got that of another run"));
}

TEST_F(BootstrapTest, FilesOfOthersAreRefused) {
  write(path() + ".1", "x", 0644);
  EXPECT_THAT(results_of(file(), 2, {0})[0], HasSubstr("expected a private file (0600), got 0644"));
  fs::remove(path() + ".1");

  fs::create_symlink("/etc/passwd", path() + ".1");
  EXPECT_THAT(results_of(file(), 2, {0})[0], HasSubstr("expected to open"));
  fs::remove(path() + ".1");

  fs::create_directory(path() + ".1");
  EXPECT_THAT(results_of(file(), 2, {0})[0], HasSubstr("expected a plain file"));
  fs::remove(path() + ".1");

  ASSERT_EQ(mkfifo((path() + ".1").c_str(), 0600), 0);
  EXPECT_THAT(results_of(file(), 2, {0})[0], HasSubstr("expected a plain file"));
  fs::remove(path() + ".1");

  if (geteuid() == 0) {
    write(path() + ".1", "x");
    ASSERT_EQ(chown((path() + ".1").c_str(), 12345, -1), 0);
    EXPECT_THAT(results_of(file(), 2, {0})[0], HasSubstr("got one of 12345"));
    fs::remove(path() + ".1");
  }

  write(path() + ".1", std::string(100000, 'x'));
  EXPECT_THAT(results_of(file(), 2, {0})[0], HasSubstr("expected at most"));
  fs::remove(path() + ".1");

  write(path() + ".1", "too short");
  EXPECT_THAT(results_of(file(), 2, {0})[0], HasSubstr("bytes, got 9"));
}

sockaddr_in address_of(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

TEST_F(BootstrapTest, APortThatIsTakenIsNamedAtOnceAndItsOwnerGoesOn) {
  const int port = free_port();
  const std::string place = "tcp:127.0.0.1:" + std::to_string(port);
  std::vector<std::string> first;
  std::jthread world([&] { first = results_of(place, 2, {0}); });
  const int stranger = socket(AF_INET, SOCK_STREAM, 0);
  const sockaddr_in address = address_of(port);
  while (connect(stranger, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    std::this_thread::sleep_for(milliseconds(1));  // until the first listens
  }
  close(stranger);
  EXPECT_THAT(results_of(place, 2, {0})[0],
              AllOf(HasSubstr("expected to listen at " + place), HasSubstr("already in use"),
                    HasSubstr("(rank 0)")));
  EXPECT_THAT(results_of(place, 2, {1}), Each("from 0"));
  world.join();
  EXPECT_THAT(first, Each("from 0"));
}

// What a rank makes of a rank 0 that sends `text` in pieces of `step` bytes, then closes or waits.
std::string answered_with(const std::string& text, std::size_t step, bool closes) {
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = address_of(0);
  socklen_t length = sizeof(address);
  EXPECT_EQ(bind(listener, reinterpret_cast<sockaddr*>(&address), length), 0);
  EXPECT_EQ(listen(listener, 1), 0);
  EXPECT_EQ(getsockname(listener, reinterpret_cast<sockaddr*>(&address), &length), 0);
  std::atomic<bool> ended = false;
  std::jthread rank0([&] {
    const int fd = accept(listener, nullptr, nullptr);
    char handshake[64];
    EXPECT_GT(recv(fd, handshake, sizeof(handshake), 0), 0);
    for (std::size_t at = 0; at < text.size(); at += step) {
      if (send(fd, text.data() + at, std::min(step, text.size() - at), MSG_NOSIGNAL) < 0) break;
      std::this_thread::sleep_for(milliseconds(1));
    }
    while (!closes && !ended) std::this_thread::sleep_for(milliseconds(1));
    close(fd);
  });
  const std::string result = results_of("tcp:127.0.0.1:" + std::to_string(ntohs(address.sin_port)),
                                        2, {1}, closes ? kLong : milliseconds(200))[0];
  ended = true;
  rank0.join();
  close(listener);
  return result;
}

TEST_F(BootstrapTest, AnAnswerThatIsCutShortOrNeverComesIsAnError) {
  const std::string answer("\x05\0\0\0hello", 9);
  EXPECT_EQ(answered_with(answer, 1, true), "hello");  // byte by byte
  for (std::size_t n = 0; n < answer.size(); ++n) {
    EXPECT_THAT(answered_with(answer.substr(0, n), 9, true), HasSubstr("got an end (rank 1)")) << n;
  }
  for (const std::size_t n : {0, 3, 4, 8}) {
    EXPECT_THAT(answered_with(answer.substr(0, n), 9, false),
                AllOf(HasSubstr("answer"), HasSubstr("within 200 ms, got none (rank 1)")))
        << n;
  }
  EXPECT_THAT(answered_with("\xff\xff\xff\x7f", 4, true), HasSubstr("expected at most 4096 bytes"));
}

// Connections that say nothing, before the ranks and while they join.
TEST_F(BootstrapTest, AThousandSilentConnectionsDoNotStopIt) {
  const int port = free_port();
  const std::string place = "tcp:127.0.0.1:" + std::to_string(port);
  std::atomic<int> num_tried = 0;
  std::jthread scan([&](const std::stop_token& stop) {
    std::vector<int> open;
    for (; num_tried < 1000 && !stop.stop_requested(); ++num_tried) {
      open.push_back(socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0));
      const sockaddr_in address = address_of(port);
      (void)connect(open.back(), reinterpret_cast<const sockaddr*>(&address), sizeof(address));
      if (num_tried % 50 == 0) std::this_thread::sleep_for(milliseconds(1));
      if (open.size() < 200) continue;
      close(open.front());
      open.erase(open.begin());
    }
    for (const int fd : open) close(fd);
  });
  std::vector<std::string> results;
  {
    std::jthread world([&] { results = results_of(place, 3, {0}, std::chrono::seconds(20)); });
    while (num_tried < 150) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_THAT(results_of(place, 3, {1, 2}, std::chrono::seconds(20)), Each("from 0"));
  }
  scan.request_stop();
  EXPECT_THAT(results, Each("from 0"));
}

// They hold all descriptors that rank 0 has.
TEST_F(BootstrapTest, RanksAreHeardWhenStrangersHoldAllDescriptors) {
  const int port = free_port();
  const std::string place = "tcp:127.0.0.1:" + std::to_string(port);
  const pid_t rank0 = fork();
  if (rank0 == 0) {
    const int next = dup(0);  // the lowest that is free
    const rlimit few{.rlim_cur = static_cast<rlim_t>(next) + 8,
                     .rlim_max = static_cast<rlim_t>(next) + 8};
    close(next);
    if (setrlimit(RLIMIT_NOFILE, &few) != 0) _exit(2);
    _exit(results_of(place, 2, {0}, std::chrono::seconds(10))[0] == "from 0" ? 0 : 1);
  }
  const sockaddr_in address = address_of(port);
  std::vector<int> strangers;
  while (strangers.size() < 30) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      strangers.push_back(fd);
    } else {
      close(fd);
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  EXPECT_THAT(results_of(place, 2, {1}, std::chrono::seconds(10)), Each("from 0"));
  int status = 0;
  EXPECT_EQ(waitpid(rank0, &status, 0), rank0);
  EXPECT_EQ(status, 0);
  for (const int fd : strangers) close(fd);
}

TEST_F(BootstrapTest, WithoutADescriptorThereIsAnErrorAtOnce) {
  rlimit limit{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  const std::string place = "tcp:127.0.0.1:" + std::to_string(free_port());
  const rlimit none{.rlim_cur = 0, .rlim_max = limit.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto by_tcp = results_of(place, 2, {0}), by_file = results_of(file(), 2, {0});
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_THAT(by_tcp, Each(HasSubstr("Too many open files")));
  EXPECT_THAT(by_file, Each(HasSubstr("Too many open files")));
}

TEST_F(BootstrapTest, FoldersOfOthersAreRefused) {
  const fs::path folder = fs::path(path()).parent_path();
  for (const mode_t mode : {0777, 0707, 0770}) {
    ASSERT_EQ(chmod(folder.c_str(), mode), 0);
    EXPECT_THAT(results_of(file(), 2, {0, 1}),
                Each(AllOf(HasSubstr("nobody else may write to"), HasSubstr("got 07"))));
  }
  ASSERT_EQ(chmod(folder.c_str(), 01777), 0);  // sticky
  EXPECT_THAT(results_of(file(), 2, {0, 1}), Each("from 0"));
  ASSERT_EQ(chmod(folder.c_str(), 0755), 0);
  EXPECT_THAT(results_of(file(), 2, {0, 1}), Each("from 0"));
  if (geteuid() == 0) {
    ASSERT_EQ(chown(folder.c_str(), 12345, -1), 0);
    EXPECT_THAT(results_of(file(), 2, {0, 1}), Each(HasSubstr("got one of 12345")));
    ASSERT_EQ(chown(folder.c_str(), 0, -1), 0);
  }
  EXPECT_TRUE(left().empty());
}

TEST_F(BootstrapTest, StrangersOnTheSocketDoNotStopIt) {
  const int port = free_port();
  const std::string place = "tcp:127.0.0.1:" + std::to_string(port);
  std::vector<std::string> results;
  std::jthread world([&] { results = results_of(place, 3, {0}); });
  const auto connect_and_say = [&](const std::string& text) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    while (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
      std::this_thread::sleep_for(milliseconds(1));
    }
    EXPECT_EQ(send(fd, text.data(), text.size(), MSG_NOSIGNAL), ssize_t(text.size()));
    return fd;
  };
  std::vector<int> strangers;
  for (int i = 0; i < 100; ++i) {
    strangers.push_back(connect_and_say(i % 3 == 0   ? ""
                                        : i % 3 == 1 ? "GET / HTTP/1.1\r\n\r\n"
                                                     : "TSR"));
  }
  EXPECT_THAT(results_of(place, 3, {1, 2}), Each("from 0"));
  world.join();
  EXPECT_THAT(results, Each("from 0"));
  for (const int fd : strangers) close(fd);
}

TEST_F(BootstrapTest, TheSameRankTwiceIsRefused) {
  const std::string place = "tcp:127.0.0.1:" + std::to_string(free_port());
  EXPECT_THAT(results_of(place, 3, {0, 1, 1}, milliseconds(2000))[0],
              HasSubstr("expected one rank 1 at " + place + ", got two"));
}

TEST_F(BootstrapTest, NonsenseIsRefused) {
  for (const std::string address :
       {"", "id", "file:", "tcp:", "tcp:host", "tcp::80", "tcp:host:", "tcp:host:0",
        "tcp:host:65536", "tcp:host:80x", "tcp:host:-1", "http://host:80"}) {
    EXPECT_THROW(bootstrap(address, 0, 1, {}, kLong), engine::InvalidArgument) << address;
  }
  EXPECT_THROW(bootstrap(file(), 2, 2, {}, kLong), engine::InvalidArgument);
  EXPECT_THROW(bootstrap(file(), -1, 2, {}, kLong), engine::InvalidArgument);
  EXPECT_THROW(bootstrap(file(), 0, 1, std::vector<std::byte>(5000), kLong),
               engine::InvalidArgument);
  EXPECT_THROW(bootstrap("file:/nonexistent/id", 0, 1, {}, kLong), engine::IoError);
}

}  // namespace
}  // namespace tessera::comm
