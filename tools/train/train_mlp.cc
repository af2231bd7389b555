// Trains a multi-layer perceptron on Fashion-MNIST, sharded over ranks that are threads.
#include <fmt/core.h>

#include <algorithm>
#include <iostream>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "ops/cross_entropy.h"
#include "tools/data/fashion_mnist.h"
#include "tools/data/permutation.h"
#include "tools/data/text_data.h"
#include "tools/io/text.h"
#include "tools/models/mlp.h"
#include "tools/train/main.h"
#include "tools/train/ranks.h"
#include "tools/train/run_files.h"
#include "tools/train/stop.h"
#include "tools/train/trainer.h"

namespace tessera::tools {
namespace {

using engine::DType;
using engine::Tensor;

struct Config : TrainConfig {
  std::int64_t hidden = 256, layers = 3;
  std::string data_path;
  SampleOrder data_order = SampleOrder::kShuffle;

  Config() {
    parallel.cpu_ranks = 2;
    train.steps = 2000;
    train.batch = 64;
    train.lr = 2e-3;
    train.warmup = 50;
    log.every = 200;
    out = "runs/train_mlp";
  }

  void add_to(FlagSet& flags) {
    flags.add("model.hidden", &hidden,
              {.help = "width of hidden layers", .min = 1, .max = 1 << 24});
    flags.add("model.layers", &layers, {.help = "linear layers", .min = 1, .max = 1000});
    flags.add("data.path", &data_path,
              {.help = "folder of IDX files as of MNIST, plain or .gz; empty: Fashion-MNIST"});
    flags.add("data.order", &data_order,
              EnumOption<SampleOrder>{
                  "of training images",
                  {{"shuffle", SampleOrder::kShuffle}, {"sequential", SampleOrder::kSequential}}});
    TrainConfig::add_to(flags);
  }
};

constexpr const char* kDefaultData = "third_party/data/fashion_mnist";
constexpr const char* kHowToGetData =
    "give --data.path=FOLDER: of IDX files, such as /usr/share/datasets/fashion-mnist of Debian's "
    "dataset-fashion-mnist";

// Pixels scaled to mean 0 and deviation 1 of Fashion-MNIST, in the parameter dtype.
void fill_image(const ImageSet& set, std::int64_t image, float* dst) {
  constexpr float kMean = 0.2860f, kDeviation = 0.3530f;
  const std::uint8_t* src = set.pixels.data() + image * set.num_pixels();
  for (std::int64_t i = 0; i < set.num_pixels(); ++i) {
    dst[i] = (static_cast<float>(src[i]) / 255.0f - kMean) / kDeviation;
  }
}

// Images (N, pixels) f32 and their labels (N) i32, to `host`.
void fill_batch(const ImageSet& set, const std::vector<std::int64_t>& images, const Batch& host) {
  for (std::size_t i = 0; i < images.size(); ++i) {
    fill_image(set, images[i], host[0].data<float>() + std::int64_t(i) * set.num_pixels());
    host[1].data<std::int32_t>()[i] = set.labels[static_cast<std::size_t>(images[i])];
  }
}

// `x` in `dtype`.
Tensor convert(const engine::Tape& tape, const Tensor& x, DType dtype) {
  if (x.dtype() == dtype) return x;
  const Tensor y = tape.empty(x.shape(), dtype, x.name());
  engine::launch_assign_or_add(tape.stream(), y, x, false, "convert_images");
  return y;
}

// Rows of logits (N, classes) whose largest entry is the target (N).
std::int64_t count_correct(const Tensor& logits, const Tensor& targets) {
  const std::vector<float> scores = to_floats(logits);
  const auto labels = engine::to_vector<std::int32_t>(targets);
  const std::int64_t classes = logits.dim(-1);
  std::int64_t num_correct = 0;
  for (std::size_t i = 0; i < labels.size(); ++i) {
    const float* row = scores.data() + std::int64_t(i) * classes;
    num_correct += std::max_element(row, row + classes) - row == labels[i];
  }
  return num_correct;
}

struct Result {
  std::string params_sha256;
  std::optional<double> val_loss;  // and accuracy, of the last validation, if there was one
  double accuracy = 0;
  JsonRecord end;
};

Result train_rank(comm::ProcessGroup& world, const Ranks& ranks, const Config& config,
                  const FashionMnist& data, RunLog* log) {
  Mlp mlp({.inputs = data.train.num_pixels(), .hidden = config.hidden, .layers = config.layers});
  Trainer trainer(world, ranks.compute(world.rank()), config, mlp.blocks(), nullptr, log);
  engine::Tape& tape = trainer.tape();
  const DType dtype = config.precision.param;
  const auto seed = static_cast<std::uint64_t>(config.train.seed);
  const auto fill = [&](std::int64_t first, const Batch& host) {
    std::vector<std::int64_t> images(static_cast<std::size_t>(config.train.batch));
    for (std::size_t i = 0; i < images.size(); ++i) {
      const std::int64_t n = first + static_cast<std::int64_t>(i);
      const std::int64_t epoch = n / data.train.num_images;
      const std::int64_t index = n % data.train.num_images;
      images[i] =
          config.data_order == SampleOrder::kSequential
              ? index
              : permuted(index, data.train.num_images, seed, static_cast<std::uint64_t>(epoch));
    }
    fill_batch(data.train, images, host);
  };
  const auto loss = [&](std::int64_t, const Batch& batch) {
    return mlp.loss(tape, convert(tape, batch[0], dtype), batch[1], config.train.recompute);
  };
  const auto batch_of = [&](std::int64_t n) -> std::vector<BatchTensor> {
    return {{"images", {n, data.train.num_pixels()}, DType::kF32}, {"labels", {n}, DType::kI32}};
  };
  Result result;
  const std::int64_t num_images = data.test.num_images;
  const std::int64_t test_batch = largest_divisor(num_images, 500);
  const auto validate = [&] {
    std::vector<char> is_counted(static_cast<std::size_t>(num_images / test_batch), 0);
    float num_correct = 0;
    const double test_loss = trainer.mean_loss(num_images / test_batch, [&](std::int64_t b) {
      std::vector<std::int64_t> images(static_cast<std::size_t>(test_batch));
      std::iota(images.begin(), images.end(), b * test_batch);
      const Batch batch = load_batch(tape.memory(), batch_of(test_batch), [&](const Batch& host) {
        fill_batch(data.test, images, host);
      });
      const Tensor logits = mlp.logits(tape, convert(tape, batch[0], dtype));
      // The last round repeats a batch on ranks that have none left.
      const bool is_mine = b % world.size() == world.rank() &&
                           std::exchange(is_counted[static_cast<std::size_t>(b)], 1) == 0;
      if (is_mine) num_correct += static_cast<float>(count_correct(logits, batch[1]));
      return ops::cross_entropy(tape, logits, batch[1]);
    });
    double correct = 0;
    for (const float n : trainer.gather({num_correct})) correct += n;
    result.accuracy = correct / static_cast<double>(num_images);
    return Trainer::Validation{test_loss,
                               fmt::format(" | test accuracy {:.2f} %", 100 * result.accuracy)};
  };
  world.barrier("wrapped");  // only now can no rank fail to start
  if (log != nullptr) {
    const auto pause = world.pause_deadline();
    log->begin();
  }
  trainer.run({batch_of(config.train.batch), fill}, loss, validate, 1);
  result.params_sha256 = trainer.params_sha256();
  result.val_loss = trainer.val_loss();
  result.end = trainer.end_record();
  return result;
}

void run(int argc, char** argv) {
  Config config;
  FlagSet flags("train_mlp", "Trains a multi-layer perceptron on Fashion-MNIST, sharded.");
  config.add_to(flags);
  if (!flags.parse(argc, argv, std::cout)) return;
  config.validate(flags);
  const Ranks ranks = Ranks::choose(config);
  const std::string path = data_path(config.data_path, kDefaultData, kHowToGetData);
  const FashionMnist data = load_fashion_mnist(path);
  constexpr std::string_view kImages[] = {"-ubyte", "-ubyte.gz"};
  RunLog::check_outputs(config, flags, files_of("data.path", path, kImages));
  std::optional<StopSignals> signals;  // from the start of the ranks to the very end
  RunLog log(config, "samples", flags.to_toml());
  log.say(fmt::format("data: {}, {} training and {} test images of {} x {}", escaped(path),
                      data.train.num_images, data.test.num_images, data.train.height,
                      data.train.width));
  log.say("device: " + ranks.str());
  Result result;
  signals.emplace();
  ranks.run(config, [&](comm::ProcessGroup& world) {
    const bool is_first = world.rank() == 0;
    const Result mine = train_rank(world, ranks, config, data, is_first ? &log : nullptr);
    if (is_first) result = mine;
  });
  JsonRecord end = ranks.record().add_all(result.end);
  if (result.val_loss) end.add("test_accuracy", result.accuracy);
  if (result.val_loss) log.say(fmt::format("test accuracy {:.2f} %", 100 * result.accuracy));
  log.say(fmt::format("parameters sha256 {}\nlog {}\nfiles in {}", result.params_sha256,
                      escaped(log.jsonl_path()), escaped(log.folder())));
  log.finish(result.params_sha256, result.val_loss, end);
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  return tessera::tools::run_main([&] { tessera::tools::run(argc, argv); });
}
