// The GPT against a plain reference in double that shares no code with the ops, but for the random
// numbers; and what dropout draws them from.
#include "tools/models/gpt.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <numbers>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "comm/threads.h"
#include "engine/error.h"
#include "engine/philox.h"
#include "shard/fsdp.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/huggingface/gpt2_files.h"
#include "tools/weights/model_files.h"

namespace tessera::tools {
namespace {

using engine::InvalidArgument;
using engine::Memory;
using engine::Parameter;
using engine::RandomStream;
using engine::Tape;
using engine::Tensor;
using testing::error_of;
using testing::has;
using testing::TempFolder;
using Values = std::vector<double>;
using Tokens = std::vector<std::int32_t>;

// Sizes that are all different, so that none can stand for another; an epsilon that matters.
constexpr GptConfig kModel = {
    .layers = 3, .heads = 2, .dim = 10, .seq = 7, .vocab = 23, .dropout = 0.25, .norm_eps = 0.03};
constexpr std::int64_t kT = 5;  // shorter than the model allows
constexpr std::uint64_t kSeed = 11;

/// A model whose parameters are all random, biases and norms included, and large enough to matter.
struct RandomModel {
  Memory memory;
  Tape tape{memory, engine::Stream::inline_cpu("compute")};
  Gpt gpt;
  std::map<std::string, Values> values;

  explicit RandomModel(const GptConfig& config = kModel) : gpt(config) {
    for (Parameter* p : parameters_of(gpt)) {
      const bool is_norm = p->init.kind == engine::Init::Kind::kOnes;
      const RandomStream random{5, engine::fnv1a(p->name)};
      std::vector<float> value(static_cast<std::size_t>(p->shape.numel()));
      for (std::size_t i = 0; i < value.size(); ++i) {
        value[i] = (is_norm ? 1.0f : 0.0f) + 0.4f * random.normal(i);
      }
      p->value = Tensor::from<float>(memory, p->shape, value, p->name);
      p->grad = Tensor::zeros(memory, p->shape, engine::DType::kF32, p->name);
      values[p->name] = Values(value.begin(), value.end());
    }
  }

  Tensor tensor(const Tokens& tokens, std::int64_t seq = kT) const {
    const std::int64_t batch = std::ssize(tokens) / seq;
    return Tensor::from<std::int32_t>(memory, {batch, seq}, tokens, "tokens");
  }
  double loss(const Tokens& tokens, const Tokens& targets, const Pass& pass) {
    const double loss = gpt.loss(tape, {tensor(tokens), tensor(targets)}, pass).item();
    tape.clear();
    return loss;
  }
};

// The reference ----------------------------------------------------------------------------------

/// One sequence, row by row: (T, C).
class Reference {
 public:
  Reference(const GptConfig& config, const std::map<std::string, Values>& values, const Pass& pass,
            std::int64_t sample)
      : c_(config), values_(values), pass_(pass), sample_(sample) {}

  /// (T, V)
  std::vector<Values> logits(std::span<const std::int32_t> tokens) const {
    std::vector<Values> x;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      x.push_back(row("wte.weight", static_cast<std::size_t>(tokens[t])));
      add(x[t], row("wpe.weight", t));
    }
    drop(x, "drop");
    for (std::int64_t i = 0; i < c_.layers; ++i) {
      const std::string h = "h." + std::to_string(i);
      branch(x, h + ".attn.drop", attention(norm(x, h + ".ln_1"), h + ".attn."));
      std::vector<Values> hidden = linear(norm(x, h + ".ln_2"), h + ".mlp.c_fc");
      for (Values& r : hidden) {
        for (double& v : r) {
          v = 0.5 * v *
              (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (v + 0.044715 * v * v * v)));
        }
      }
      branch(x, h + ".mlp.drop", linear(hidden, h + ".mlp.c_proj"));
    }
    std::vector<Values> logits;
    for (const Values& features : norm(x, "ln_f")) {
      Values& scores = logits.emplace_back();
      for (std::size_t v = 0; v < static_cast<std::size_t>(c_.vocab); ++v) {
        scores.push_back(dot(features, row("wte.weight", v)));
      }
    }
    return logits;
  }

 private:
  Values row(const std::string& name, std::size_t i) const {
    const auto begin = values_.at(name).begin() + static_cast<std::ptrdiff_t>(i) * c_.dim;
    return {begin, begin + c_.dim};
  }
  static double dot(const Values& a, const Values& b) {
    double sum = 0;
    for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
  }
  static void add(Values& a, const Values& b) {
    for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  }

  // Element i of the sample is element sample * T * C + i of the mask that `name` picks.
  void drop(std::vector<Values>& x, const std::string& name) const {
    if (!pass_.training) return;
    const RandomStream random{pass_.seed, engine::fnv1a(name)};
    auto index = static_cast<std::uint64_t>(sample_ * std::ssize(x) * c_.dim);
    for (Values& r : x) {
      for (double& v : r) {
        v = random.uniform(index++) < static_cast<float>(c_.dropout) ? 0 : v / (1 - c_.dropout);
      }
    }
  }
  void branch(std::vector<Values>& x, const std::string& mask, std::vector<Values> h) const {
    drop(h, mask);
    for (std::size_t t = 0; t < x.size(); ++t) add(x[t], h[t]);
  }

  std::vector<Values> norm(const std::vector<Values>& x, const std::string& name) const {
    const Values &weight = values_.at(name + ".weight"), &bias = values_.at(name + ".bias");
    std::vector<Values> y = x;
    for (Values& r : y) {
      double mean = 0, variance = 0;
      for (const double v : r) mean += v / double(c_.dim);
      for (const double v : r) variance += (v - mean) * (v - mean) / double(c_.dim);
      for (std::size_t i = 0; i < r.size(); ++i) {
        r[i] = (r[i] - mean) / std::sqrt(variance + c_.norm_eps) * weight[i] + bias[i];
      }
    }
    return y;
  }

  std::vector<Values> linear(const std::vector<Values>& x, const std::string& name) const {
    const Values &weight = values_.at(name + ".weight"), &bias = values_.at(name + ".bias");
    std::vector<Values> y;
    for (const Values& r : x) {
      Values& out = y.emplace_back(bias);
      for (std::size_t i = 0; i < r.size(); ++i) {
        for (std::size_t o = 0; o < out.size(); ++o) out[o] += r[i] * weight[i * out.size() + o];
      }
    }
    return y;
  }

  std::vector<Values> attention(const std::vector<Values>& x, const std::string& name) const {
    const std::vector<Values> qkv = linear(x, name + "c_attn");
    const std::int64_t width = c_.dim / c_.heads;
    std::vector<Values> y(x.size());
    for (std::size_t t = 0; t < x.size(); ++t) {
      for (std::int64_t head = 0; head < c_.heads; ++head) {
        // q, k or v of this head.
        const auto part = [&](std::size_t token, std::int64_t which) {
          const auto begin = qkv[token].begin() + which * c_.dim + head * width;
          return Values(begin, begin + width);
        };
        Values sum(static_cast<std::size_t>(width));
        double total = 0;
        for (std::size_t s = 0; s <= t; ++s) {
          const double weight = std::exp(dot(part(t, 0), part(s, 1)) / std::sqrt(double(width)));
          total += weight;
          const Values v = part(s, 2);
          for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += weight * v[i];
        }
        for (const double v : sum) y[t].push_back(v / total);
      }
    }
    return linear(y, name + "c_proj");
  }

  const GptConfig& c_;
  const std::map<std::string, Values>& values_;
  const Pass& pass_;
  std::int64_t sample_;
};

double reference_loss(const RandomModel& model, const Tokens& tokens, const Tokens& targets,
                      const Pass& pass) {
  double sum = 0;
  for (std::size_t at = 0; at < tokens.size(); at += kT) {
    const std::int64_t sample = pass.first_sample + static_cast<std::int64_t>(at) / kT;
    const Reference reference(model.gpt.config(), model.values, pass, sample);
    const auto logits = reference.logits(std::span(tokens).subspan(at, kT));
    for (std::size_t t = 0; t < kT; ++t) {
      double total = 0;
      for (const double v : logits[t]) total += std::exp(v);
      sum += std::log(total) - logits[t][static_cast<std::size_t>(targets[at + t])];
    }
  }
  return sum / static_cast<double>(tokens.size());
}

const Tokens kTokens = {3, 22, 0, 7, 7, 1, 15, 9, 2, 20, 4, 4, 11, 19, 8};
const Tokens kTargets = {22, 0, 7, 7, 1, 15, 9, 2, 20, 4, 4, 11, 19, 8, 3};

Tokens first_sequence(const Tokens& tokens) { return {tokens.begin(), tokens.begin() + kT}; }

// ------------------------------------------------------------------------------------------------

TEST(Gpt, ComputesTheLossOfThreeSequences) {
  RandomModel model;
  const Pass pass{.training = false};
  const double expected = reference_loss(model, kTokens, kTargets, pass);
  EXPECT_GT(std::abs(expected - std::log(23)), 0.1);  // parameters matter
  EXPECT_NEAR(model.loss(kTokens, kTargets, pass), expected, 2e-6 * expected);
  EXPECT_NEAR(model.loss(kTokens, kTargets, {.recompute = true, .training = false}), expected,
              2e-6 * expected);
}

// The names of masks and the order of their elements are part of what a seed means.
TEST(Gpt, ComputesTheLossWithDropout) {
  RandomModel model;
  for (const std::int64_t first : {0, 4}) {
    const Pass pass{.seed = kSeed, .first_sample = first};
    const double expected = reference_loss(model, kTokens, kTargets, pass);
    EXPECT_NEAR(model.loss(kTokens, kTargets, pass), expected, 2e-6 * expected) << first;
  }
}

TEST(Gpt, DropsOtherElementsForEverySampleAndSeed) {
  RandomModel model;
  const Tokens tokens = first_sequence(kTokens), targets = first_sequence(kTargets);
  const auto loss = [&](std::uint64_t seed, std::int64_t sample) {
    return model.loss(tokens, targets, {.seed = seed, .first_sample = sample});
  };
  std::vector<double> losses;
  for (std::int64_t sample = 0; sample < 6; ++sample) losses.push_back(loss(kSeed, sample));
  losses.push_back(loss(kSeed + 1, 0));
  losses.push_back(model.loss(tokens, targets, {.training = false}));
  EXPECT_EQ(loss(kSeed, 2), losses[2]);
  // A sample has its masks wherever it stands in a batch.
  Tokens three, three_targets;
  for (int i = 0; i < 3; ++i) {
    three.insert(three.end(), tokens.begin(), tokens.end());
    three_targets.insert(three_targets.end(), targets.begin(), targets.end());
  }
  EXPECT_NEAR(model.loss(three, three_targets, {.seed = kSeed, .first_sample = 3}),
              (losses[3] + losses[4] + losses[5]) / 3, 1e-5);
  std::ranges::sort(losses);
  EXPECT_EQ(std::ranges::adjacent_find(losses), losses.end());
}

TEST(Gpt, EveryLayerAndBranchHasAMaskOfItsOwn) {
  // Where all branches are zero but one, the loss shows the mask of that one alone. Layers are
  // alike but for their masks.
  const Tokens tokens = first_sequence(kTokens), targets = first_sequence(kTargets);
  std::vector<double> losses;
  for (int layer = 0; layer < 3; ++layer) {
    for (const std::string branch : {"attn", "mlp"}) {
      RandomModel model;
      for (Parameter* p : parameters_of(model.gpt)) {
        if (!p->name.starts_with("h.")) continue;
        const bool is_bias = p->name.ends_with(".c_proj.bias");
        const bool is_lit = p->name == fmt::format("h.{}.{}.c_proj.bias", layer, branch);
        std::vector<float> value(static_cast<std::size_t>(p->shape.numel()));
        for (std::size_t i = 0; i < value.size(); ++i) {
          value[i] = is_bias && is_lit ? 1.0f + static_cast<float>(i) : 0.0f;
        }
        p->value = Tensor::from<float>(model.memory, p->shape, value, p->name);
      }
      losses.push_back(model.loss(tokens, targets, {.seed = kSeed}));
    }
  }
  std::ranges::sort(losses);
  EXPECT_EQ(std::ranges::adjacent_find(losses), losses.end());
}

TEST(Gpt, RecomputeFindsTheSameMasksAndGradients) {
  std::vector<std::vector<std::vector<float>>> grads;
  std::vector<std::size_t> num_entries;  // a region that is run again is one
  for (const Recompute recompute : {Recompute(), Recompute::first(1), Recompute(true)}) {
    RandomModel model;
    const Pass pass{.recompute = recompute, .seed = kSeed, .first_sample = 3};
    const Tensor loss =
        model.gpt.loss(model.tape, {model.tensor(kTokens), model.tensor(kTargets)}, pass);
    num_entries.push_back(model.tape.num_entries());
    model.tape.backward(loss);
    auto& of_pass = grads.emplace_back();
    for (Parameter* p : parameters_of(model.gpt)) {
      const auto grad = p->grad.span<float>();
      EXPECT_GT(*std::ranges::max_element(grad), 0) << p->name;
      of_pass.emplace_back(grad.begin(), grad.end());
    }
  }
  EXPECT_EQ(grads[0], grads[1]);
  EXPECT_EQ(grads[0], grads[2]);
  const std::size_t of_one_block = num_entries[0] - num_entries[1];
  EXPECT_GT(of_one_block, 0u);
  EXPECT_EQ(num_entries[1] - num_entries[2], 2 * of_one_block);
}

TEST(Gpt, TheNextTokensLogitsAreThoseOfTheLastPosition) {
  RandomModel model;
  const Pass pass{.training = false};
  const Reference reference(model.gpt.config(), model.values, pass, 0);
  for (const std::int64_t length : {1, 4, 7}) {
    const Tokens tokens(kTokens.begin(), kTokens.begin() + length);
    const Tensor logits = model.gpt.next_token_logits(model.tape, model.tensor(tokens, length));
    const Values expected = reference.logits(tokens).back();
    ASSERT_EQ(logits.numel(), 23);
    for (std::size_t v = 0; v < 23; ++v) {
      EXPECT_NEAR(logits.span<float>()[v], expected[v], 1e-5) << length << ": " << v;
    }
    EXPECT_EQ(model.tape.num_entries(), 0u);
  }
  EXPECT_TRUE(has(error_of<InvalidArgument>(
                      [&] { model.gpt.next_token_logits(model.tape, model.tensor(Tokens(8), 8)); }),
                  {"at most 7", "(1, 8)"}));
}

TEST(Gpt, RefusesABatchThatIsNotItsOwn) {
  RandomModel model;
  EXPECT_TRUE(has(
      error_of<InvalidArgument>([&] { model.gpt.loss(model.tape, {model.tensor(kTokens)}, {}); }),
      {"[gpt]", "tokens, targets and, if at all, positions", "1 tensors"}));
}

TEST(Gpt, StartsAsGpt2Does) {
  // 0.02, and 0.02 / sqrt(2 x 3 layers) where a branch joins the residual stream.
  const GptConfig config{.layers = 3, .heads = 2, .dim = 64, .seq = 64, .vocab = 128};
  Gpt gpt(config);
  for (const Parameter* p : parameters_of(gpt)) {
    const std::string& name = p->name;
    std::vector<float> value(static_cast<std::size_t>(p->shape.numel()));
    p->init.write(value.data(), 0, p->shape.numel(), name, 1);
    double sum = 0, squares = 0;
    for (const double v : value) sum += v, squares += v * v;
    const double mean = sum / double(value.size());
    const double deviation = std::sqrt(squares / double(value.size()) - mean * mean);
    if (name.ends_with(".bias")) {
      EXPECT_TRUE(mean == 0 && deviation == 0) << name;
    } else if (name.find("ln_") != std::string::npos) {
      EXPECT_TRUE(mean == 1 && deviation == 0) << name;
    } else {
      const double expected = name.ends_with(".c_proj.weight") ? 0.02 / std::sqrt(6) : 0.02;
      EXPECT_NEAR(deviation, expected, 0.05 * expected) << name;
      EXPECT_NEAR(mean, 0, 0.001) << name;
    }
  }
}

TEST(GptConfig, CountsItsParameters) {
  EXPECT_EQ(preset_config("gpt2").num_parameters(), 124'439'808);
  EXPECT_EQ(preset_config("gpt2-medium").num_parameters(), 354'823'168);
  EXPECT_EQ(preset_config("gpt2-large").num_parameters(), 774'030'080);
  EXPECT_EQ(preset_config("gpt2-xl").num_parameters(), 1'557'611'200);
  for (const std::string& name : gpt_preset_names()) EXPECT_NO_THROW(gpt_preset(name).validate());
  EXPECT_TRUE(has(error_of<InvalidArgument>([] { gpt_preset("gpt3"); }), {"gpt2-xl", "'gpt3'"}));
}

TEST(GptConfig, RefusesSizesOutOfRangeNamingThem) {
  const std::pair<const char*, GptConfig> cases[] = {
      {"model.layers in [1, 10000], got 0", {.layers = 0}},
      {"model.layers in [1, 10000], got 10001", {.layers = 10'001}},
      {"model.heads", {.heads = 0}},
      {"model.dim", {.dim = -4}},
      {"model.seq", {.seq = 0}},
      {"model.vocab", {.vocab = 0}},
      {"multiple of model.heads (3), got 128", {.heads = 3}},
      {"model.dropout in [0, 1), got 1", {.dropout = 1}},
      {"model.dropout", {.dropout = -0.1}},
      {"norm_eps in [1e-30, 1), got 1", {.norm_eps = 1}},
      {"norm_eps", {.norm_eps = -1e-5}},
  };
  for (const auto& [what, config] : cases) {
    EXPECT_TRUE(has(error_of<InvalidArgument>([&c = config] { Gpt{c}; }), {what}));
  }
  EXPECT_NO_THROW(Gpt({.layers = 1, .heads = 1, .dim = 1, .seq = 1, .vocab = 1, .dropout = 0.99}));
}

TEST(GptCheckpoint, ReadsEverySizeFromItsOwnKey) {
  const TempFolder folder;
  const Gpt2FileConfig file{.n_layer = 3,
                            .n_head = 5,
                            .n_embd = 10,
                            .n_positions = 7,
                            .vocab_size = 23,
                            .layer_norm_epsilon = 0.25};
  Gpt2Writer writer(folder.path(), file, {});
  writer.finish();
  const ModelConfig config = read_model_config(folder.path());
  EXPECT_EQ(config.layers, 3);
  EXPECT_EQ(config.heads, 5);
  EXPECT_EQ(config.dim, 10);
  EXPECT_EQ(config.seq, 7);
  EXPECT_EQ(config.vocab, 23);
  EXPECT_EQ(config.numbers.at("norm_eps"), 0.25);
  EXPECT_EQ(config.dropout, 0);  // a choice of the training, not of the file
}

/// A model that calls its final norm's parameters otherwise in files.
class RenamedGpt : public Gpt {
 public:
  using Gpt::Gpt;
  std::vector<engine::TensorSpec> file_tensors(const Parameter& p) const override {
    auto tensors = Gpt::file_tensors(p);
    if (p.name == "ln_f.weight") tensors.front().name = "ln_f.bias";
    if (p.name == "ln_f.bias") tensors.front().name = "ln_f.weight";
    return tensors;
  }
};

// Attention has no dropout here, so a saved model must not get any where it is trained on.
TEST(GptCheckpoint, SaysEverySizeUnderItsOwnKey) {
  const TempFolder folder;
  folder.write("config.json", Gpt(kModel).config_text());
  EXPECT_EQ(read_gpt2_config(folder.path()), (Gpt2FileConfig{.n_layer = 3,
                                                             .n_head = 2,
                                                             .n_embd = 10,
                                                             .n_positions = 7,
                                                             .vocab_size = 23,
                                                             .layer_norm_epsilon = 0.03,
                                                             .resid_pdrop = 0.25,
                                                             .embd_pdrop = 0.25,
                                                             .attn_pdrop = 0}));
}

TEST(GptCheckpoint, CallsParametersAsTheModelSays) {
  const TempFolder folder;
  const auto ln_f = [&](Gpt& gpt, bool saves) {
    std::vector<float> values;
    comm::run_ranks(1, {}, [&](comm::ProcessGroup& world) {
      const engine::Stream compute = engine::Stream::inline_cpu("compute");
      shard::Fsdp fsdp(world, Memory(compute), compute, gpt.blocks(), gpt.root(), {});
      if (!saves) load_model(fsdp, gpt, folder.path());
      for (const Parameter* p : fsdp.parameters()) {
        if (p->name.starts_with("ln_f")) values.push_back(fsdp.full_parameter(*p).front());
      }
      if (saves) save_model(fsdp, gpt, folder.path(), world);
    });
    return values;  // bias, weight
  };
  Gpt gpt(kModel), plain(kModel);
  RenamedGpt renamed(kModel), same(kModel);
  using Values = std::vector<float>;
  EXPECT_EQ(ln_f(gpt, true), (Values{0, 1}));
  EXPECT_EQ(ln_f(plain, false), (Values{0, 1}));
  EXPECT_EQ(ln_f(renamed, false), (Values{1, 0}));
  EXPECT_EQ(ln_f(same, true), (Values{0, 1}));
  EXPECT_EQ(ln_f(same, false), (Values{0, 1}));
  EXPECT_EQ(ln_f(plain, false), (Values{1, 0}));
}

TEST(Gpt, CountsTheOperationsOfItsProducts) {
  const GptConfig small{.layers = 2, .heads = 1, .dim = 3, .seq = 9, .vocab = 7};
  // Of 5 tokens: 2 layers of 24 x 5 x 9 and, for 15 pairs, 4 x 3 x 15; a head of 2 x 5 x 3 x 7.
  EXPECT_EQ(Gpt(small).train_flops(5), 3 * (2 * (1080 + 180) + 210));

  struct Listener : engine::LaunchListener {
    double flops = 0;
    void on_launch(const engine::LaunchRecord& record) noexcept override {
      const std::string_view name = record.work.name;
      if (name.starts_with("linear") || name.starts_with("attention")) flops += record.work.flops;
    }
  } listener;
  const GptConfig config{.layers = 2, .heads = 1, .dim = 64, .seq = 32, .vocab = 96};
  const Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute", {.listener = &listener}));
  Gpt gpt(config);
  for (Parameter* p : parameters_of(gpt)) {
    p->value = Tensor::zeros(memory, p->shape, engine::DType::kF32, p->name);
    p->grad = Tensor::zeros(memory, p->shape, engine::DType::kF32, p->name);
  }
  const Tensor tokens = Tensor::zeros(memory, {1, 32}, engine::DType::kI32, "tokens");
  tape.backward(gpt.loss(tape, {tokens, tokens}, {}));
  // What is launched adds exponentials, biases, and scores that backward computes again.
  EXPECT_GT(listener.flops, gpt.train_flops(32));
  EXPECT_LT(listener.flops, 1.15 * gpt.train_flops(32));
}

}  // namespace
}  // namespace tessera::tools
