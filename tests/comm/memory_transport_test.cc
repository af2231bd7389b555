// The transport between threads keeps what every transport promises.
#include "tests/comm/memory_transport.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/comm/transport_promises.h"

namespace tessera::comm {
namespace {

class MemoryTransportTest : public ::testing::TestWithParam<int> {};

TEST_P(MemoryTransportTest, KeepsItsPromises) {
  const auto ends = MemoryTransport::make(GetParam());
  std::vector<std::vector<std::string>> broken(ends.size());
  {
    std::vector<std::jthread> processes;
    for (std::size_t p = 0; p < ends.size(); ++p) {
      processes.emplace_back([&, p] { broken[p] = broken_promises(*ends[p]); });
    }
  }
  EXPECT_EQ(broken, std::vector<std::vector<std::string>>(ends.size()));
}

INSTANTIATE_TEST_SUITE_P(Sizes, MemoryTransportTest, ::testing::Range(1, 5));

}  // namespace
}  // namespace tessera::comm
