// What a load takes from a checkpoint besides parameters and states, what it says of it, and what
// it refuses.
#include "shard/checkpoint/load.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "engine/error.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/checkpoint/manifest.h"
#include "shard/optimizer/adamw.h"
#include "tests/shard/toy_rank.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::InvalidArgument;
using engine::Memory;
using engine::Parameter;
using engine::Stream;
using engine::Tensor;
using testing::error_of;
using testing::has;
using testing::TempFolder;
using testing::ToyRank;

using Floats = std::vector<float>;
using Lines = std::vector<std::string>;

// The layers' weights, and with `rest` all else.
AdamWOptions groups_of(double weights_lr, double weights_decay, double rest_lr, double rest_decay) {
  return {.groups = {{.name = "weights",
                      .parameters = {"h.0.weight", "h.1.weight"},
                      .lr_scale = weights_lr,
                      .weight_decay = weights_decay},
                     {.name = "rest",
                      .parameters = {"h.0.bias", "h.1.bias", "scale"},
                      .lr_scale = rest_lr,
                      .weight_decay = rest_decay}}};
}

struct Rank : ToyRank {
  explicit Rank(ProcessGroup& world, AdamWOptions options = groups_of(0.5, 0.25, 2, 0))
      : ToyRank(world, {.placement = Placement::preset("zero3")},
                {.blocks = 2, .numel = 70, .poison = false}),
        optimizer(fsdp, std::move(options)) {}
  std::vector<CheckpointPart> parts() { return {{&fsdp, &optimizer}}; }
  const ParameterGroup& group(const char* name) { return optimizer.group(name); }

  AdamW optimizer;
};

void save(ProcessGroup& world, const std::vector<CheckpointPart>& parts,
          const std::string& folder) {
  Checkpointer checkpoints(world, parts, {.folder = folder});
  checkpoints.save(1, {});
  checkpoints.wait();
}

TEST(CheckpointLoad, GroupsComeBackWithAllTheirSettingsAndWhatTheyReplaceIsSaid) {
  const TempFolder folder;
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    save(world, Rank(world).parts(), folder / "c");
    const auto expect_saved = [](Rank& rank) {
      EXPECT_EQ(rank.group("weights").lr_scale, 0.5);
      EXPECT_EQ(rank.group("weights").weight_decay, 0.25);
      EXPECT_EQ(rank.group("rest").lr_scale, 2);
      EXPECT_EQ(rank.group("rest").weight_decay, 0);
    };
    const Lines expected = {
        "parameter group 'weights': weight_decay=0.25 of the checkpoint replaces 0.75",
        "parameter group 'rest': lr_scale=2 of the checkpoint replaces 1",
        "parameter group 'rest': weight_decay=0 of the checkpoint replaces 0.125"};
    const AdamWOptions others = groups_of(0.5, 0.75, 1, 0.125);
    Lines told;
    const auto tell = [&](std::string_view line) { told.emplace_back(line); };
    {
      Rank rank(world, others);
      EXPECT_EQ(load_checkpoint(world, rank.parts(), folder / "c/step_1").changed, expected);
      expect_saved(rank);
      // A second time nothing is replaced.
      EXPECT_EQ(load_checkpoint(world, rank.parts(), folder / "c/step_1").changed, Lines());
    }
    {
      Rank rank(world, others);
      EXPECT_EQ(load_newest_checkpoint(world, rank.parts(), folder / "c", {}, tell)->changed,
                expected);
      EXPECT_EQ(std::exchange(told, {}), expected);
      expect_saved(rank);
    }
    for (const bool newest : {true, false}) {
      Rank rank(world, others);
      Checkpointer checkpoints(world, rank.parts(), {.folder = folder / "c", .warn = tell});
      if (newest) {
        checkpoints.load_newest();
      } else {
        checkpoints.load(folder / "c/step_1");
      }
      EXPECT_EQ(std::exchange(told, {}), world.rank() == 0 ? expected : Lines()) << newest;
      expect_saved(rank);
    }
    // Those of the program stay if it says so.
    Rank rank(world, others);
    EXPECT_EQ(load_checkpoint(world, rank.parts(), folder / "c/step_1", {.groups = false}).changed,
              Lines());
    EXPECT_EQ(rank.group("weights").weight_decay, 0.75);
    EXPECT_EQ(rank.group("rest").lr_scale, 1);
  });
}

TEST(CheckpointLoad, GroupsThatOnlyOneSideHasAreListed) {
  const TempFolder folder;
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    save(world, Rank(world).parts(), folder / "c");
    AdamWOptions options = groups_of(0.125, 0.5, 1, 0);
    options.groups[1].name = "other";
    Rank rank(world, options);
    const Lines expected = {"missing: parameter group other", "unexpected: parameter group rest"};
    const std::string error = error_of<InvalidArgument>(
        [&] { load_checkpoint(world, rank.parts(), folder / "c/step_1"); });
    EXPECT_TRUE(has(error, {expected[0], expected[1]})) << error;
    EXPECT_EQ(rank.group("weights").lr_scale, 0.125) << "nothing is loaded";
    const LoadedCheckpoint loaded =
        load_checkpoint(world, rank.parts(), folder / "c/step_1", {.strict = false});
    EXPECT_EQ(loaded.differences, expected);
    EXPECT_EQ(rank.group("weights").lr_scale, 0.5);
    EXPECT_EQ(rank.group("weights").weight_decay, 0.25);
    EXPECT_EQ(rank.group("other").lr_scale, 1) << "which nothing was saved of";
    EXPECT_EQ(loaded.changed.size(), 2u);
  });
}

// Each line of what is wrong, and that of the path, is one: none is shown as an escape.
TEST(CheckpointLoad, AnErrorIsALineAndIndentedOnes) {
  const TempFolder folder;
  comm::run_ranks(1, {}, [&](ProcessGroup& world) {
    save(world, Rank(world).parts(), folder / "c");
    AdamWOptions options = groups_of(1, 0, 1, 0);
    options.groups[0].name = "other";
    Rank rank(world, options);
    const std::string error = error_of<InvalidArgument>(
        [&] { load_checkpoint(world, rank.parts(), folder / "c/step_1"); });
    EXPECT_TRUE(has(error, {"\n  missing: parameter group other", "\n  (" + folder.path()}));
    for (std::size_t at = error.find('\n'); at != std::string::npos;
         at = error.find('\n', at + 1)) {
      EXPECT_EQ(error.substr(at, 3), "\n  ") << error;
    }
  });
}

// More elements than share a checksum, or are converted at a time.
TEST(CheckpointLoad, LargeTensorsComeBackWhateverTheirDtype) {
  constexpr std::int64_t kNumel = 2 * kChunkNumel + 300;  // of each of two ranks more than a chunk
  const auto value = [](std::int64_t i) { return static_cast<float>(i % 251 - 125); };
  const TempFolder folder;
  for (const bool trainable : {true, false}) {
    const std::string name = trainable ? "f32" : "bf16";
    for (const int ranks : {1, 2}) {
      comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
        const Memory memory;
        Parameter p{.name = "p", .shape = {kNumel}, .trainable = trainable};
        engine::Block block{"block", {&p}};
        Fsdp fsdp(world, memory, Stream::inline_cpu("compute"), {&block}, nullptr,
                  {.placement = Placement::preset("zero3"), .precision = {.param = DType::kBF16}});
        if (ranks == 1) {
          Floats values(std::size_t{kNumel});
          for (std::int64_t i = 0; i < kNumel; ++i) values[std::size_t(i)] = value(i);
          fsdp.load(p, values);
          return save(world, {{&fsdp}}, folder / name);
        }
        load_checkpoint(world, std::vector<CheckpointPart>{{&fsdp}}, folder / (name + "/step_1"));
        const Floats values = fsdp.full_parameter(p);
        for (std::int64_t i = 0; i < kNumel; ++i) {
          ASSERT_EQ(values[std::size_t(i)], value(i)) << name << " " << i;
        }
      });
    }
  }
}

// A buffer of another shape, dtype or name, and other numbers of parts.
TEST(CheckpointLoad, WhatBuffersAndPartsDifferInIsNamed) {
  const TempFolder folder;
  struct Model {
    explicit Model(ProcessGroup& world, const std::vector<Tensor>& buffers) {
      block.buffers = buffers;
      fsdp = std::make_unique<Fsdp>(world, memory, Stream::inline_cpu("compute"),
                                    std::vector{&block}, nullptr, FsdpOptions{});
    }
    Memory memory;
    Parameter p{.name = "p", .shape = {8}};
    engine::Block block{"block", {&p}};
    std::unique_ptr<Fsdp> fsdp;
  };
  comm::run_ranks(2, {}, [&](ProcessGroup& world) {
    const Memory memory;
    const auto buffer = [&](engine::Shape shape, DType dtype, const char* name) {
      return Tensor::zeros(memory, shape, dtype, name);
    };
    Model saved(world, {buffer({3}, DType::kF32, "mean")});
    save(world, {{saved.fsdp.get()}}, folder / "c");
    const auto error = [&](const std::vector<Tensor>& buffers, int num_parts = 1) {
      Model model(world, buffers);
      const std::vector<CheckpointPart> parts(static_cast<std::size_t>(num_parts),
                                              {model.fsdp.get()});
      return error_of<InvalidArgument>(
          [&] { load_checkpoint(world, parts, folder / "c/step_1", {.strict = false}); });
    };
    EXPECT_TRUE(has(error({buffer({4}, DType::kF32, "mean")}),
                    {"buffer mean: expected shape (4), got (3)"}));
    EXPECT_TRUE(
        has(error({buffer({3}, DType::kI32, "mean")}), {"buffer mean: expected I32, got F32"}));
    EXPECT_TRUE(has(error({buffer({3}, DType::kF32, "other")}), {"missing: buffer other"}));
    EXPECT_TRUE(
        has(error({buffer({3}, DType::kF32, "mean")}, 2), {"optimizers: expected 2, got 1"}));
    Model same(world, {buffer({3}, DType::kF32, "mean")});
    load_checkpoint(world, std::vector<CheckpointPart>{{same.fsdp.get()}}, folder / "c/step_1");
    Model twice(world, {buffer({3}, DType::kF32, "mean"), buffer({3}, DType::kF32, "mean")});
    EXPECT_TRUE(
        has(error_of<InvalidArgument>([&] { save(world, {{twice.fsdp.get()}}, folder / "twice"); }),
            {"buffers of different names, got two", "mean"}));
  });
}

// Each rank checks the headers of some files, so that together they check all.
TEST(CheckpointLoad, DamageOfAnyHeaderIsFound) {
  const TempFolder folder;
  comm::run_ranks(3, {},
                  [&](ProcessGroup& world) { save(world, Rank(world).parts(), folder / "c"); });
  const Manifest manifest = parse_manifest(folder.read("c/step_1/manifest.json"), "manifest.json");
  ASSERT_GE(manifest.files.size(), 4u);
  for (const CheckpointFile& file : manifest.files) {
    const std::string path = "c/step_1/" + file.name, bytes = folder.read(path);
    std::string damaged = bytes;
    damaged[static_cast<std::size_t>(file.header_nbytes) - 1] ^= 1;  // padding
    folder.write(path, damaged);
    for (const int ranks : {1, 2}) {
      comm::run_ranks(ranks, {}, [&](ProcessGroup& world) {
        Rank rank(world);
        const std::string error = error_of<engine::IoError>(
            [&] { load_checkpoint(world, rank.parts(), folder / "c/step_1"); });
        EXPECT_TRUE(has(error, {"expected the header that was written", file.name})) << error;
      });
    }
    folder.write(path, bytes);
  }
}

}  // namespace
}  // namespace tessera::shard
