// Trains a multi-layer perceptron on Fashion-MNIST, fully sharded over ranks: threads, processes,
// or threads of several processes.
#include <fmt/core.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/error.h"
#include "engine/io/text.h"
#include "ops/cross_entropy.h"
#include "tools/cli/main.h"
#include "tools/cli/run_files.h"
#include "tools/config/data/data_path.h"
#include "tools/config/data/default_data.h"
#include "tools/data/data_digest.h"
#include "tools/data/fashion_mnist.h"
#include "tools/data/permutation.h"
#include "tools/data/token_dataset.h"
#include "tools/io/jsonl.h"
#include "tools/models/mlp.h"
#include "tools/programs/run/run_task.h"
#include "tools/train/task.h"

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

  MlpConfig mlp(const FashionMnist& data) const {
    return {.inputs = data.train.num_pixels(), .hidden = hidden, .layers = layers};
  }
};

// Pixels scaled to mean 0 and deviation 1 of Fashion-MNIST.
template <class T>
void fill_image(const ImageSet& set, std::int64_t image, T* dst) {
  constexpr float kMean = 0.2860f, kDeviation = 0.3530f;
  const std::uint8_t* src = set.pixels.data() + image * set.num_pixels();
  for (std::int64_t i = 0; i < set.num_pixels(); ++i) {
    const float value = (static_cast<float>(src[i]) / 255.0f - kMean) / kDeviation;
    engine::cast(dst + i, &value, 1);
  }
}

// Images (N, pixels) f32 or bf16, to `host`.
void fill_images(const ImageSet& set, const std::vector<std::int64_t>& images, const Tensor& host) {
  engine::dispatch_float(host.dtype(), "fill_images", [&](auto zero) {
    auto* dst = host.data<decltype(zero)>();
    for (const std::int64_t image : images) {
      fill_image(set, image, dst);
      dst += set.num_pixels();
    }
  });
}

// The labels of images, (N) i32.
void fill_labels(const ImageSet& set, const std::vector<std::int64_t>& images, const Tensor& host) {
  std::int32_t* label = host.data<std::int32_t>();
  for (const std::int64_t image : images) *label++ = set.labels[static_cast<std::size_t>(image)];
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

class MlpRank : public TaskRank {
 public:
  MlpRank(const Config& config, const FashionMnist& data)
      : config_(config), data_(data), mlp_(config.mlp(data)) {}

  Model& model() override { return mlp_; }

  Trainer::Data data() override {
    const std::int64_t batch = config_.train.batch;
    return {{images(batch), labels(batch)}, [this](std::int64_t first, const Batch& host) {
              std::vector<std::int64_t> images(static_cast<std::size_t>(config_.train.batch));
              for (std::int64_t& image : images) image = training_image(first++);
              fill_images(data_.train, images, host[0]);
              fill_labels(data_.train, images, host[1]);
            }};
  }

  Trainer::Validate validation(Trainer& trainer) override {
    return [this, &trainer] { return validate(trainer); };
  }

  std::vector<UnrecordedPass> unrecorded_passes() override {
    const std::int64_t batch = validation_batch();
    std::vector<BatchTensor> tensors = {images(validation_piece()), labels(batch)};
    return {{"validation", std::move(tensors), [this, batch](engine::Tape& tape, const Batch& b) {
               const Tensor logits = logits_of(tape, batch, [&](std::int64_t, std::int64_t num) {
                 return b[0].slice(0, {num, data_.test.num_pixels()});
               });
               ops::cross_entropy(tape, logits, b[1]);
             }}};
  }

 private:
  BatchTensor images(std::int64_t batch) const {
    return {"images", {batch, data_.train.num_pixels()}, config_.precision.param};
  }
  static BatchTensor labels(std::int64_t batch) { return {"labels", {batch}, DType::kI32}; }

  // Whose mean a loss is, whatever the ranks and the batch of training.
  std::int64_t validation_batch() const { return largest_divisor(data_.test.num_images, 500); }
  // Of it at a time: within a budget of memory as many as a step has, or few.
  std::int64_t validation_piece() const {
    constexpr std::int64_t kFew = 16;  // one at a time would take long
    const std::int64_t batch = validation_batch();
    if (config_.memory_budget.empty()) return batch;
    return std::min(batch, std::max(config_.train.batch, kFew));
  }

  // Of `batch` images, of which `load(first, num)` brings as many as go through the model at once.
  template <class Load>
  Tensor logits_of(engine::Tape& tape, std::int64_t batch, Load load) {
    const std::int64_t piece = validation_piece();
    Tensor all;
    for (std::int64_t first = 0; first < batch; first += piece) {
      const std::int64_t num = std::min(piece, batch - first);
      const Tensor some = mlp_.logits(tape, load(first, num));
      if (num == batch) return some;
      const std::int64_t classes = some.dim(-1);
      if (!all.defined()) {
        all = Tensor::empty(tape.memory(), {batch, classes}, some.dtype(), "logits");
      }
      engine::copy(all.slice(first * classes, {num, classes}), some, tape.stream(), "logits");
    }
    return all;
  }

  // The image that is sample `n` of the endless training order.
  std::int64_t training_image(std::int64_t n) const {
    const std::int64_t num_images = data_.train.num_images;
    const std::int64_t epoch = n / num_images, index = n % num_images;
    if (config_.data_order == SampleOrder::kSequential) return index;
    return permuted(index, num_images, static_cast<std::uint64_t>(config_.train.seed),
                    static_cast<std::uint64_t>(epoch));
  }

  Trainer::Validation validate(Trainer& trainer) {
    const std::int64_t num_images = data_.test.num_images;
    const std::int64_t batch = validation_batch();
    const comm::ProcessGroup& world = trainer.world();
    engine::Tape& tape = trainer.tape();
    std::vector<char> is_counted(static_cast<std::size_t>(num_images / batch), 0);
    float num_correct = 0;
    const double loss = trainer.mean_loss(num_images / batch, [&](std::int64_t b) {
      const auto from = [&](std::int64_t first, std::int64_t num) {
        std::vector<std::int64_t> images(static_cast<std::size_t>(num));
        std::iota(images.begin(), images.end(), b * batch + first);
        return images;
      };
      const Tensor logits = logits_of(tape, batch, [&](std::int64_t first, std::int64_t num) {
        return load_batch(
                   tape.memory(), {images(num)},
                   [&](const Batch& host) { fill_images(data_.test, from(first, num), host[0]); })
            .front();
      });
      const Tensor targets = load_batch(tape.memory(), {labels(batch)}, [&](const Batch& host) {
                               fill_labels(data_.test, from(0, batch), host[0]);
                             }).front();
      // The last round repeats a batch on ranks that have none left.
      const bool is_mine = b % world.size() == world.rank() &&
                           std::exchange(is_counted[static_cast<std::size_t>(b)], 1) == 0;
      if (is_mine) num_correct += static_cast<float>(count_correct(logits, targets));
      return ops::cross_entropy(tape, logits, targets);
    });
    double correct = 0;
    for (const float n : trainer.gather({num_correct})) correct += n;
    const double accuracy = correct / static_cast<double>(num_images);
    const std::string text = fmt::format("test accuracy {:.2f} %", 100 * accuracy);
    return {loss, " | " + text, text, JsonRecord().add("test_accuracy", accuracy)};
  }

  const Config& config_;
  const FashionMnist& data_;
  Mlp mlp_;
};

class MlpTask : public Task {
 public:
  void add_to(FlagSet& flags) override { config_.add_to(flags); }
  const TrainConfig& config() const override { return config_; }
  TrainConfig& config() override { return config_; }

  void prepare(const FlagSet& flags, bool /*on_gpus*/) override {
    engine::require(config_.layers > 1 || !flags.is_given("model.hidden"),
                    "[config] expected model.hidden with model.layers above 1, got {} with 1, "
                    "which has no hidden layer",
                    config_.hidden);
    path_ = data_path(config_.data_path, kDefaultImages, kHowToGetImages);
    data_ = load_fashion_mnist(path_);
    constexpr std::string_view kImages[] = {"-ubyte", "-ubyte.gz"};
    config_.check_blocks(config_.mlp(data_).layers);
    RunLog::check_outputs(config_, flags, files_of("data.path", path_, kImages));
  }

  Items items() const override { return {"samples", 1, config_.mlp(data_).train_flops()}; }
  std::int64_t num_samples() const override { return data_.train.num_images; }
  std::string summary() const override {
    return fmt::format("data: {}, {} training and {} test images of {} x {}",
                       engine::escaped(path_), data_.train.num_images, data_.test.num_images,
                       data_.train.height, data_.train.width);
  }
  std::string model_text() const override {
    const MlpConfig mlp = config_.mlp(data_);
    return JsonRecord()
        .add("model", "mlp")
        .add("layers", mlp.layers)
        .add("inputs", mlp.inputs)
        .add("hidden", mlp.hidden)
        .add("classes", mlp.classes)
        .text();
  }
  std::string data_text() const override {
    return fmt::format("{} images of {} x {} from {}", data_.train.num_images, data_.train.height,
                       data_.train.width, path_);
  }
  std::string data_digest() const override { return digest_of(data_); }
  std::unique_ptr<TaskRank> rank() const override {
    return std::make_unique<MlpRank>(config_, data_);
  }

 private:
  Config config_;
  std::string path_;
  FashionMnist data_;
};

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  namespace tools = tessera::tools;
  return tools::run_main([&] {
    tools::MlpTask task;
    tools::run_task(argc, argv,
                    {"train_mlp",
                     "Trains a multi-layer perceptron on Fashion-MNIST, fully sharded over ranks: "
                     "threads, processes, or threads of several processes."},
                    task);
  });
}
