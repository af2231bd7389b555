// Values that are written between steps, by whatever writes them, are those that the next forward
// computes with.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "comm/threads.h"
#include "engine/copy.h"
#include "shard/checkpoint/checkpointer.h"
#include "shard/cut_values.h"
#include "shard/initialise.h"
#include "shard/optimizer/sgd.h"
#include "shard/raw.h"
#include "shard/summon.h"
#include "tests/shard/collective_log.h"
#include "tests/shard/toy_model.h"
#include "tests/shard/toy_rank.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"
#include "tests/testing/temp_folder.h"

namespace tessera::shard {
namespace {

using comm::ProcessGroup;
using engine::DType;
using engine::InvalidArgument;
using engine::Parameter;
using engine::Tensor;
using testing::affine;
using testing::CollectiveLog;
using testing::Elements;
using testing::error_of;
using testing::has;
using testing::LoggedGroup;
using testing::sum;
using testing::TempFolder;
using testing::ToyRank;

using Floats = std::vector<float>;

constexpr std::int64_t kNumel = 128;
constexpr int kRanks = 4;

// Of a forward of ones: each of two layers multiplies by its weight.
constexpr float loss_of(float weight) { return float{kNumel} * weight * weight; }
static_assert(loss_of(2) == 512);

float value_of(const Parameter& p, float weight) {
  return p.name == "scale" ? 1 : p.name.ends_with("weight") ? weight : 0;
}

Floats values_of(const Parameter& p, float weight) {
  return Floats(static_cast<std::size_t>(p.shape.numel()), value_of(p, weight));
}

FsdpOptions options_of(const std::string& strategy, DType dtype) {
  return {.placement = Placement::preset(strategy), .precision = {.param = dtype}};
}

struct Rank : ToyRank {
  Rank(ProcessGroup& world, const FsdpOptions& options)
      : ToyRank(world, options, {.blocks = 2, .numel = kNumel}), world(world) {}

  void load(float weight) {
    for (const Parameter* p : fsdp.parameters()) fsdp.load(*p, values_of(*p, weight));
  }
  float forward() {
    fsdp.begin_step();
    last = loss();
    return last.item();
  }
  void backward() {
    tape.backward(last);
    fsdp.finish_step();
  }
  // An update by nothing, which gathers ahead for the next forward.
  float step() {
    const float result = forward();
    backward();
    optimizer.step(0);
    return result;
  }
  // A forward without a tape.
  float raw() {
    Raw raw(fsdp);
    const auto what = Raw::For::kEvaluation;
    raw.gather(model.root, what);
    const float scale = Elements(model.scale.value).get(kNumel - 1);
    float product = scale * scale;
    for (const auto& layer : model.layers) {
      raw.gather(layer->block, what);
      product *= Elements(layer->weight.value).get(kNumel - 1);
      raw.release(layer->block);
    }
    raw.release(model.root);
    return float{kNumel} * product;
  }

  ProcessGroup& world;
  Sgd optimizer{fsdp, {}};
  Tensor last;  // loss
};

// What writes values, of which the weights are 2.
struct Way {
  const char* name;
  std::function<void(Rank&, const std::string& folder)> write;
};

const std::vector<Way> kWays = {
    {"load", [](Rank& rank, const std::string&) { rank.load(2); }},
    {"load of a master",
     [](Rank& rank, const std::string&) {
       for (const Parameter* p : rank.fsdp.parameters()) {
         const Location at = rank.fsdp.location_of(*p);
         CutValues(rank.fsdp).load(at, at.flat.master, values_of(*p, 2));
       }
     }},
    {"load_from",
     [](Rank& rank, const std::string&) {
       for (const Parameter* p : rank.fsdp.parameters()) {
         rank.fsdp.load_from(1, *p, rank.world.rank() == 1 ? values_of(*p, 2) : Floats());
       }
     }},
    {"summon",
     [](Rank& rank, const std::string&) {
       const std::vector<Parameter*> all = rank.fsdp.parameters();
       summon(rank.fsdp, {all.begin(), all.end()},
              [&](const std::vector<Tensor>& whole) {
                for (std::size_t i = 0; i < all.size(); ++i) {
                  for (float& value : whole[i].span<float>()) value = value_of(*all[i], 2);
                }
              },
              {.write_back = true});
     }},
    {"initialise",
     [](Rank& rank, const std::string&) {
       initialise(rank.fsdp, [](const Parameter& p, std::span<float> values) {
         for (float& value : values) value = value_of(p, 2);
       });
     }},
    {"checkpoint",
     [](Rank& rank, const std::string& folder) {
       load_checkpoint(rank.world, std::vector<CheckpointPart>{{&rank.fsdp, &rank.optimizer}},
                       folder + "/step_1");
     }},
    {"load_owned",
     [](Rank& rank, const std::string&) {
       for (const Parameter* p : rank.fsdp.parameters()) {
         rank.fsdp.load_owned(
             *p, [&](Range, std::span<float> out) { std::ranges::fill(out, value_of(*p, 2)); });
       }
     }},
    {"addresses", [](Rank& rank, const std::string&) {
       CutValues(rank.fsdp).settle();
       for (const auto& unit : rank.fsdp.units()) {
         for (const Flat& flat : unit->flats()) {
           for (const Segment& s : flat.segments) {
             const SplitTensor part = flat.master.slice(s.shard_begin, s.numel);
             const float value = value_of(*flat.parameters[s.parameter], 2);
             copy_from_floats(part, Floats(static_cast<std::size_t>(s.numel), value));
           }
         }
       }
       rank.fsdp.parameters_changed();
     }}};

struct Use {
  const char* name;
  float (Rank::*loss)();
};
constexpr Use kUses[] = {
    {"evaluation", &Rank::evaluate}, {"step", &Rank::step}, {"raw", &Rank::raw}};

void save_weights_of_two(const std::string& folder) {
  comm::run_ranks(1, {}, [&](ProcessGroup& world) {
    Rank rank(world, {});
    rank.load(2);
    Checkpointer checkpoints(world, {{&rank.fsdp, &rank.optimizer}}, {.folder = folder});
    checkpoints.save(1, {});
    checkpoints.wait();
  });
}

TEST(WrittenValues, AreThoseOfTheNextForward) {
  const TempFolder folder;
  save_weights_of_two(folder.path());
  std::size_t num_settings = 0;
  for (const std::string& strategy : Placement::preset_names()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const double offload : {0.0, 0.5}) {
        FsdpOptions options = options_of(strategy, dtype);
        options.offload = {.parameters = 0, .gradients = offload, .optimizer = offload};
        if (can_offload_parameters(options.placement, options.precision)) {
          options.offload.parameters = offload;
        }
        // Under sanitizers one use of each way, and another in the next setting.
        const std::size_t setting = num_settings++;
        comm::run_ranks(kRanks, {}, [&](ProcessGroup& world) {
          Rank rank(world, options);
          bool is_updated = false;
          for (std::size_t w = 0; w < std::size(kWays); ++w) {
            const Way& way = kWays[w];
            for (std::size_t u = 0; u < std::size(kUses); ++u) {
              if (testing::kIsSlow && u != (w + setting) % std::size(kUses)) continue;
              const Use& use = kUses[u];
              const std::string where = fmt::format("{} {} offload {}: {}, then {}", strategy,
                                                    name_of(dtype), offload, way.name, use.name);
              rank.load(3);
              ASSERT_EQ(rank.step(), loss_of(3)) << where;
              if (std::exchange(is_updated, !is_updated)) {  // in the place of an optimizer
                rank.forward();
                rank.backward();
              }
              way.write(rank, folder.path());
              ASSERT_EQ((rank.*use.loss)(), loss_of(2)) << where;
              ASSERT_EQ(rank.step(), loss_of(2)) << where;
            }
          }
        });
      }
    }
  }
}

TEST(WrittenValues, AreRefusedBetweenAForwardAndItsBackward) {
  const TempFolder folder;
  save_weights_of_two(folder.path());
  for (const std::string& strategy : Placement::preset_names()) {
    comm::run_ranks(kRanks, {}, [&](ProcessGroup& world) {
      Rank rank(world, options_of(strategy, DType::kF32));
      rank.load(3);
      for (const Way& way : kWays) {
        const auto error = [&] {
          return error_of<InvalidArgument>([&] { way.write(rank, folder.path()); });
        };
        rank.forward();
        EXPECT_TRUE(has(error(), {"expected finish_step() or cancel_step() before, got a step"}))
            << way.name;
        rank.backward();
        if (way.name == std::string("addresses")) continue;  // it wrote before it said so
        // d loss / d scale, of two uses: 2 * 1 * 3 * 3 for each element.
        EXPECT_EQ(rank.fsdp.full_gradient(rank.model.scale), Floats(kNumel, 18)) << way.name;
        EXPECT_EQ(rank.step(), loss_of(3)) << strategy << " " << way.name;
        auto& layer = *rank.model.layers[1];
        std::string inside;
        rank.tape.no_grad([&] {
          return rank.tape.region(layer.block, [&] {
            inside = error();
            return affine(rank.tape, rank.input(), layer.weight, &layer.bias);
          });
        });
        EXPECT_TRUE(has(inside, {"open region", "h.1"})) << way.name;
        EXPECT_EQ(rank.evaluate(), loss_of(3)) << strategy << " " << way.name;
      }
      // A step that is given up.
      rank.load(3);
      rank.forward();
      rank.tape.clear();
      rank.fsdp.cancel_step();
      rank.load(2);
      EXPECT_EQ(rank.step(), loss_of(2)) << strategy;
    });
  }
}

// Where units stay gathered, what is written in the loop is that of the loop's next forward, and
// after it of all others.
TEST(WrittenValues, AreThoseOfTheNextForwardInKeepGathered) {
  const TempFolder folder;
  save_weights_of_two(folder.path());
  for (const std::string& strategy : Placement::preset_names()) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      comm::run_ranks(kRanks, {}, [&](ProcessGroup& world) {
        Rank rank(world, options_of(strategy, dtype));
        for (const Way& way : kWays) {
          const auto where = fmt::format("{} {} {}", strategy, name_of(dtype), way.name);
          rank.load(3);
          rank.step();
          rank.fsdp.keep_gathered([&] {
            EXPECT_EQ(rank.evaluate(), loss_of(3)) << where;
            way.write(rank, folder.path());
            EXPECT_EQ(rank.evaluate(), loss_of(2)) << where;
            EXPECT_EQ(rank.raw(), loss_of(2)) << where;
            rank.load(3);
            EXPECT_EQ(rank.evaluate(), loss_of(3)) << where;
            way.write(rank, folder.path());
          });
          EXPECT_EQ(rank.evaluate(), loss_of(2)) << where;
          EXPECT_EQ(rank.step(), loss_of(2)) << where;
        }
      });
    }
  }
}

// Written once, renewed once: steps send what they sent before.
TEST(WrittenValues, AreSentOnce) {
  for (const auto& [strategy, num_updates] :
       {std::pair{"zero3", 0}, {"zero2", 1}, {"hfsdp", 1}, {"ddp", 0}}) {
    comm::run_ranks(kRanks, {}, [&, strategy = strategy, num = num_updates](ProcessGroup& ranks) {
      CollectiveLog log;
      LoggedGroup world(ranks, log);
      Rank rank(world, options_of(strategy, DType::kF32));
      const auto step = [&] {
        log.take();
        rank.step();
        return log.take();
      };
      step();
      const std::vector<std::string> before = step();
      rank.fsdp.load(rank.model.layers[1]->weight, Floats(kNumel, 2));
      rank.fsdp.load(rank.model.layers[1]->bias, Floats(kNumel, 2));
      const std::vector<std::string> written = step();
      EXPECT_EQ(std::ranges::count(written, "all_gather h.1 update") -
                    std::ranges::count(before, "all_gather h.1 update"),
                num)
          << strategy;
      EXPECT_EQ(written.size(), before.size() + static_cast<std::size_t>(num)) << strategy;
      EXPECT_EQ(step(), before) << strategy;
    });
  }
}

// With parameters that are whole, ranks may run units that others leave out.
TEST(WrittenValues, ReachUnitsThatOnlySomeRanksUse) {
  comm::run_ranks(2, {}, [](ProcessGroup& world) {
    FsdpOptions options{.placement = Placement::preset("zero2"),
                        .unused_parameters = UnusedParameters::kSkip};
    Rank rank(world, options);
    for (const float weight : {2.0f, 3.0f}) {
      rank.load(weight);
      rank.fsdp.begin_step();
      auto& layer = *rank.model.layers[static_cast<std::size_t>(world.rank())];
      const Tensor loss = rank.tape.region(layer.block, [&] {
        return sum(rank.tape, affine(rank.tape, rank.input(), layer.weight, &layer.bias));
      });
      EXPECT_EQ(loss.item(), float{kNumel} * weight);
      rank.tape.backward(loss);
      rank.fsdp.finish_step();
      rank.optimizer.step(0);
    }
  });
}

// Where nothing is gathered, the others would go on with values of their own.
TEST(WrittenValues, OfOneRankAloneAreAnErrorOfAll) {
  for (const char* strategy : {"ddp", "zero3", "zero2"}) {
    std::vector<std::string> errors(2);
    const std::string thrown = error_of<engine::CommError>([&] {
      comm::run_ranks(2, {}, [&](ProcessGroup& world) {
        Rank rank(world, {.placement = Placement::preset(strategy)});
        rank.step();
        if (world.rank() == 0) rank.load(2);
        auto& error = errors[static_cast<std::size_t>(world.rank())];
        error = error_of<engine::CommError>([&] {
          rank.step();
          rank.fsdp.synchronize();
        });
        engine::fail<engine::CommError>("{}", error);
      });
    });
    EXPECT_FALSE(thrown.empty());
    for (const std::string& error : errors) {
      EXPECT_TRUE(has(error, {"was written"})) << strategy << ": " << error;
    }
  }
}

// The weights are read before the damage is met.
TEST(WrittenValues, OfADamagedCheckpointAreWhatIsComputedWith) {
  const TempFolder folder;
  save_weights_of_two(folder.path());
  const std::string file = "step_1/model-00000-of-00001.safetensors";
  std::string bytes = folder.read(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 0x80);  // the sign of a scale
  folder.write(file, bytes);
  for (const char* strategy : {"ddp", "zero3", "zero2"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      comm::run_ranks(2, {}, [&](ProcessGroup& world) {
        Rank rank(world, {.placement = Placement::preset(strategy), .precision = {.param = dtype}});
        rank.load(3);
        rank.step();
        const std::string error =
            error_of<engine::IoError>([&] { kWays[5].write(rank, folder.path()); });
        EXPECT_TRUE(has(error, {"model-00000-of-00001", "scale"})) << error;
        const Parameter& weight = rank.model.layers[1]->weight;
        EXPECT_EQ(rank.fsdp.full_parameter(weight), Floats(kNumel, 2));
        EXPECT_EQ(rank.evaluate(), loss_of(2)) << strategy << " " << name_of(dtype);
      });
    }
  }
}

}  // namespace
}  // namespace tessera::shard
