// A copy made while the next step runs holds what was there when it was begun.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <string>
#include <thread>
#include <vector>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "shard/checkpoint/pieces.h"

namespace tessera::shard {
namespace {

using engine::Category;
using engine::DType;
using engine::Memory;
using engine::Stream;
using engine::Tensor;

using Floats = std::vector<float>;

constexpr std::int64_t kLarge = std::int64_t{1} << 22;  // takes a while to copy

CheckpointPiece piece_of(const char* kind, const Tensor& values) {
  return {.kind = kind,
          .name = values.name(),
          .shape = {values.numel()},
          .values = SplitTensor(values)};
}

// Compute is held up until release().
class Held {
 public:
  Held() {
    compute.launch({.name = "hold"}, [may_go = go_.get_future().share()] { may_go.wait(); });
  }
  ~Held() { release(); }
  void release() {
    if (!std::exchange(is_released_, true)) go_.set_value();
  }

 private:
  std::promise<void> go_;
  bool is_released_ = false;

 public:
  const Stream compute = Stream::worker_cpu("compute");
};

Floats values_of(const CheckpointPiece& piece) {
  return engine::to_vector<float>(piece.values.device());
}

Tensor filled(const Memory& memory, std::int64_t numel, float value, const char* name) {
  return Tensor::from<float>(memory, {numel}, Floats(static_cast<std::size_t>(numel), value), name);
}

// Forward writes buffers, so they are copied before it, however long the rest takes.
TEST(Snapshot, HoldsBuffersOfTheStepBeforeTheNextForward) {
  const Memory memory;
  for (const bool is_inline : {true, false}) {
    const Stream compute =
        is_inline ? Stream::inline_cpu("compute") : Stream::worker_cpu("compute");
    const Tensor master = filled(memory, kLarge, 1, "master"), mean = filled(memory, 3, 2, "mean");
    std::vector<CheckpointPiece> pieces = {piece_of("parameter", master), piece_of("buffer", mean)};
    Snapshot snapshot(compute);
    snapshot.take(pieces);
    engine::launch_set(compute, mean, 7, "forward");
    snapshot.taken().wait();
    EXPECT_EQ(values_of(pieces[1]), Floats(3, 2)) << is_inline;
    EXPECT_EQ(values_of(pieces[0]).back(), 1);
  }
}

// What compute was told before is part of it.
TEST(Snapshot, ComesAfterWhatComputeWasTold) {
  const Memory memory;
  for (const char* kind : {"parameter", "buffer"}) {
    const Tensor values = filled(memory, 3, 1, "values");
    std::vector<CheckpointPiece> pieces = {piece_of(kind, values)};
    Held held;
    Snapshot snapshot(held.compute);
    engine::launch_set(held.compute, values, 5, "update");
    snapshot.take(pieces);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(snapshot.taken().reached());
    held.release();
    snapshot.taken().wait();
    EXPECT_EQ(values_of(pieces[0]), Floats(3, 5)) << kind;
  }
}

TEST(Snapshot, IsTakenOnceBuffersAreCopied) {
  const Memory memory;
  const Tensor buffer = filled(memory, kLarge, 3, "buffer");
  std::vector<CheckpointPiece> pieces = {piece_of("buffer", filled(memory, kLarge, 1, "first")),
                                         piece_of("buffer", buffer)};
  Held held;
  Snapshot snapshot(held.compute);
  snapshot.take(pieces);
  held.release();
  snapshot.taken().wait();
  EXPECT_EQ(values_of(pieces[1]).back(), 3);
}

// Pieces of any size and dtype lie apart, and their memory is used again.
TEST(Snapshot, KeepsItsMemoryForTheNext) {
  const Memory memory, host;
  const Stream compute = Stream::inline_cpu("compute");
  Snapshot snapshot(compute);
  std::int64_t nbytes = 0;
  for (const float start : {1.0f, 10.0f}) {
    SplitTensor split =
        SplitTensor::empty(memory, host, 300, 0.5, DType::kF32, "split", Category::kParameterShard);
    Floats values(300);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = start + static_cast<float>(i);
    copy_from_floats(split, values);
    const Tensor pair = Tensor::zeros(memory, {3}, DType::kBF16, "pair");
    engine::launch_set(compute, pair, start, "set");
    std::vector<CheckpointPiece> pieces = {
        piece_of("parameter", filled(memory, 1, start, "a")),
        piece_of("parameter", pair),
        {.kind = "optimizer.m", .name = "split", .shape = {300}, .values = split},
        piece_of("buffer", filled(memory, 65, -start, "b"))};
    snapshot.take(pieces);
    snapshot.taken().wait();
    copy_from_floats(split, Floats(300, -99));  // the copy is one
    if (nbytes == 0) nbytes = snapshot.nbytes();
    EXPECT_EQ(snapshot.nbytes(), nbytes) << "no more than the first time";
    EXPECT_EQ(nbytes, 256 + 256 + 1280 + 512);
    EXPECT_EQ(values_of(pieces[0]), Floats(1, start));
    EXPECT_EQ(pieces[1].values.dtype(), DType::kBF16);
    for (const engine::BFloat16 value :
         engine::to_vector<engine::BFloat16>(pieces[1].values.device())) {
      EXPECT_EQ(engine::to_f32(value), start);
    }
    EXPECT_EQ(values_of(pieces[2]), values);
    EXPECT_EQ(values_of(pieces[3]), Floats(65, -start));
  }
  std::vector<CheckpointPiece> more = {piece_of("parameter", filled(memory, 2000, 4, "more"))};
  snapshot.take(more);
  snapshot.taken().wait();
  EXPECT_EQ(snapshot.nbytes(), 8192) << "in the place of the smaller";
  EXPECT_EQ(values_of(more[0]), Floats(2000, 4));
}

}  // namespace
}  // namespace tessera::shard
