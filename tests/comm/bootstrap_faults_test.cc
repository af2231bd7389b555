// What is said when a call of a bootstrap fails: its own reason, not that of an earlier call.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstddef>
#include <string>
#include <thread>
#include <vector>

#include "comm/bootstrap/bootstrap.h"
#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/faults.h"
#include "tests/testing/temp_folder.h"

namespace tessera::comm {
namespace {

using testing::FaultHere;
using testing::has;
using testing::TempFolder;

/// The error that a rank of `size` ends with, or "".
std::string error_of_rank(const std::string& address, int rank, int size) {
  const std::vector<std::byte> message(3);
  try {
    bootstrap(address, rank, size, message, std::chrono::milliseconds(500));
  } catch (const engine::Error& error) {
    return error.what();
  }
  return "";
}

TEST(BootstrapFaultsTest, AFileThatCannotBeFlushed) {
  const TempFolder folder;
  const FaultHere fault({"fsync", below(folder, "id"), 1, std::to_string(EIO)});
  errno = 0;
  EXPECT_TRUE(has(error_of_rank("file:" + (folder / "id"), 0, 1),
                  {"expected to write", "Input/output error"}));
  EXPECT_EQ(folder.num_entries(), 0);
}

TEST(BootstrapFaultsTest, AMessageThatCannotBeSent) {
  for (const int sender : {1, 0}) {  // the handshake of rank 1, then the answer of rank 0
    const FaultHere fault({"send", "socket", sender == 1 ? 1 : 2, std::to_string(ENOBUFS)});
    const std::string address = "tcp:127.0.0.1:" + std::to_string(23400 + ::getpid() % 9000);
    std::string errors[2];
    {
      std::jthread rank0([&] { errors[0] = error_of_rank(address, 0, 2); });
      std::jthread rank1([&] { errors[1] = error_of_rank(address, 1, 2); });
    }
    EXPECT_TRUE(has(errors[sender], {"expected to ", "No buffer space available"})) << sender;
  }
}

}  // namespace
}  // namespace tessera::comm
