// Batches come in order, whole, and with the errors of whoever fills them.
#include "tools/train/batch_loader.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <thread>

#include "engine/copy.h"
#include "engine/error.h"
#include "tests/testing/errors.h"

namespace tessera::tools {
namespace {

using engine::DType;
using engine::InvalidArgument;
using engine::IoError;
using engine::Memory;
using engine::Stream;
using testing::error_of;
using testing::has;

const std::vector<BatchTensor> kTensors = {{"tokens", {2, 3}, DType::kI32},
                                           {"scale", {1}, DType::kF32}};

void fill(std::int64_t n, const Batch& host) {
  std::ranges::fill(host[0].span<std::int32_t>(), static_cast<std::int32_t>(n));
  host[1].span<float>()[0] = 0.5f * static_cast<float>(n);
}

void expect_batch(const Batch& batch, std::int64_t n) {
  ASSERT_EQ(batch.size(), 2u);
  EXPECT_EQ(batch[0].shape(), (engine::Shape{2, 3}));
  EXPECT_EQ(engine::to_vector<std::int32_t>(batch[0]),
            std::vector<std::int32_t>(6, static_cast<std::int32_t>(n)));
  EXPECT_EQ(batch[1].item(), 0.5f * static_cast<float>(n));
}

TEST(BatchLoader, BatchesComeInOrder) {
  const Memory memory;
  BatchLoader loader(memory, Stream::inline_cpu("compute"), kTensors, 20, fill);
  for (std::int64_t n = 0; n < 20; ++n) expect_batch(loader.next(), n);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] { loader.next(); }), {"at most 20 batches"}));
}

TEST(BatchLoader, ABatchStaysWhileTheNextIsFilled) {
  const Memory memory;
  std::atomic<std::int64_t> num_filled = 0;
  BatchLoader loader(memory, Stream::inline_cpu("compute"), kTensors, 9,
                     [&](std::int64_t n, const Batch& host) {
                       fill(n, host);
                       num_filled = n + 1;
                     });
  for (std::int64_t n = 0; n < 8; ++n) {
    const Batch& batch = loader.next();
    // The next one is filled without being asked for; the one after that has no room.
    while (num_filled < n + 2) std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    EXPECT_EQ(num_filled, n + 2);
    expect_batch(batch, n);
  }
}

// In the place of the last one, whatever is filled meanwhile.
TEST(BatchLoader, BatchesAreReadAgain) {
  const Memory memory;
  BatchLoader loader(memory, Stream::inline_cpu("compute"), kTensors, 9, fill);
  const std::int64_t nbytes = memory.stats().total_nbytes;
  EXPECT_THROW(loader.again(0), InvalidArgument);
  for (std::int64_t n = 0; n < 9; ++n) {
    expect_batch(loader.next(), n);
    for (std::int64_t before = 0; before <= n; ++before) expect_batch(loader.again(before), before);
    EXPECT_TRUE(has(error_of<InvalidArgument>([&] { loader.again(n + 1); }),
                    {fmt::format("one of the {} batches", n + 1)}));
  }
  EXPECT_EQ(memory.stats().peak_total_nbytes, nbytes);
}

TEST(BatchLoader, ErrorsComeWithTheirBatchAndTheirText) {
  const Memory memory;
  BatchLoader loader(memory, Stream::inline_cpu("compute"), kTensors, 20,
                     [](std::int64_t n, const Batch& host) {
                       if (n == 3) engine::fail<IoError>("[file] expected batch {}", n);
                       fill(n, host);
                     });
  for (std::int64_t n = 0; n < 3; ++n) expect_batch(loader.next(), n);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(error_of<IoError>([&] { loader.next(); }), "[file] expected batch 3");
  }
}

TEST(BatchLoader, FillsEachBatchOnceAndNoneThatNobodyMayTake) {
  const Memory memory;
  for (const std::int64_t num_batches : {0, 1, 2, 3, 7}) {
    std::vector<std::int64_t> filled;
    {
      BatchLoader loader(memory, Stream::inline_cpu("compute"), kTensors, num_batches,
                         [&](std::int64_t n, const Batch& host) {
                           filled.push_back(n);
                           fill(n, host);
                         });
      for (std::int64_t n = 0; n < num_batches; ++n) expect_batch(loader.next(), n);
      EXPECT_THROW(loader.next(), InvalidArgument);
    }
    std::vector<std::int64_t> expected(static_cast<std::size_t>(num_batches));
    std::iota(expected.begin(), expected.end(), 0);
    EXPECT_EQ(filled, expected);
  }
}

TEST(BatchLoader, EndsBeforeItsBatches) {
  const Memory memory;
  for (const int num_taken : {0, 1, 3}) {
    BatchLoader loader(memory, Stream::inline_cpu("compute"), kTensors, 1'000'000, fill);
    for (int n = 0; n < num_taken; ++n) expect_batch(loader.next(), n);
  }
  EXPECT_EQ(memory.stats().total_nbytes, 0);
}

TEST(BatchLoader, OneBatchAtOnce) {
  const Memory memory;
  expect_batch(load_batch(memory, kTensors, [](const Batch& host) { fill(7, host); }), 7);
}

}  // namespace
}  // namespace tessera::tools
