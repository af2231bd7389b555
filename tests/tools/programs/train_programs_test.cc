// What the trainers compute, seen from outside: at a learning rate of 0 the loss of a step shows
// which samples it was given, and weights made by hand show how text is generated.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <nlohmann/json.hpp>
#include <numeric>
#include <regex>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "engine/tape.h"
#include "tests/testing/json.h"
#include "tests/testing/program.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/testing/tiny_images.h"
#include "tools/huggingface/gpt2_files.h"
#include "tools/models/gpt.h"
#include "tools/models/mlp.h"
#include "tools/train/text/training_text.h"

namespace tessera::tools {
namespace {

using engine::Tensor;
using nlohmann::json;
using testing::Flags;
using testing::Images;
using testing::Outcome;
using testing::run_program;
using testing::TempFolder;
using Losses = std::vector<double>;

/// The log of a run: a record a step, then what came out in the end.
struct Log {
  Losses loss;
  json final;
};

Log run(const std::string& program, Flags flags, const Flags& more) {
  const TempFolder folder;
  for (const auto& [name, value] : more) flags[name] = value;
  flags["out"] = folder.path();
  flags["device"] = "cpu";
  flags["log.every"] = "0";
  const Outcome outcome = run_program("tools/programs/" + program, flags);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  Log log;
  std::istringstream lines(folder.read("log.jsonl"));
  for (std::string line; std::getline(lines, line);) {
    const json record = testing::parse_json(line);
    if (record.contains("final")) {
      log.final = record.at("final");
    } else {
      log.loss.push_back(record.at("loss").get<double>());
    }
  }
  return log;
}

Losses part(const Losses& losses, std::ptrdiff_t first, std::ptrdiff_t count) {
  return {losses.begin() + first, losses.begin() + first + count};
}

double mean_of(const Losses& losses) {
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(losses.size());
}

/// Three epochs of `n` samples, one a step on one rank: all samples in each, in an order of its own
/// if shuffled.
void expect_epochs(const Losses& losses, std::ptrdiff_t n, bool shuffled) {
  ASSERT_EQ(std::ssize(losses), 3 * n);
  std::set<Losses> orders, contents;
  for (std::ptrdiff_t epoch = 0; epoch < 3; ++epoch) {
    Losses order = part(losses, epoch * n, n);
    orders.insert(order);
    std::ranges::sort(order);
    EXPECT_EQ(std::ranges::adjacent_find(order), order.end()) << "a sample twice";
    contents.insert(order);
  }
  EXPECT_EQ(orders.size(), shuffled ? 3u : 1u);
  EXPECT_EQ(contents.size(), 1u);
}

/// Every micro-batch of many is a part of what one process was given in one step each.
void expect_means(const Losses& many, const Losses& single) {
  const std::ptrdiff_t n = std::ssize(single) / std::ssize(many);
  for (std::ptrdiff_t step = 0; step < std::ssize(many); ++step) {
    EXPECT_NEAR(many[static_cast<std::size_t>(step)], mean_of(part(single, step * n, n)), 1e-5)
        << "step " << step;
  }
}

const std::vector<Flags> kSixParts = {
    {{"parallel.ranks", "2"}, {"train.accum", "3"}},
    {{"parallel.ranks", "3"}, {"train.batch", "2"}},
    {{"train.accum", "3"}, {"train.batch", "2"}},
};

// The transformer --------------------------------------------------------------------------------

class TrainTransformerData : public ::testing::Test {
 protected:
  TrainTransformerData() {
    std::string text;  // 12 sequences of 6 bytes
    for (int i = 0; i < 73; ++i) text += static_cast<char>('a' + i * i % 23);
    flags_ = {{"data.path", folder_.write("text.txt", text)},
              {"data.val_fraction", "0"},
              {"model.layers", "1"},
              {"model.heads", "2"},
              {"model.dim", "8"},
              {"model.seq", "6"},
              {"parallel.ranks", "1"},
              {"train.batch", "1"},
              {"train.steps", "36"},
              {"train.lr", "0"},
              {"log.peak_ms", "0"},
              {"sample.tokens", "0"}};
  }
  Log train(const Flags& more) const { return run("train_transformer", flags_, more); }

  const TempFolder folder_;
  Flags flags_;
};

TEST_F(TrainTransformerData, EpochsHoldEverySequenceOnceInTheOrderAskedFor) {
  const Losses sequential = train({{"data.order", "sequential"}}).loss;
  expect_epochs(sequential, 12, false);
  const Losses shuffled = train({}).loss;
  expect_epochs(shuffled, 12, true);
  Losses all = part(sequential, 0, 12), shown = part(shuffled, 0, 12);
  EXPECT_NE(all, shown);
  std::ranges::sort(all);
  std::ranges::sort(shown);
  EXPECT_EQ(all, shown);
  for (Flags flags : kSixParts) {
    flags["train.steps"] = "6";
    expect_means(train(flags).loss, shuffled);
  }
}

TEST_F(TrainTransformerData, ValidationIsTheMeanOverAllSequencesKeptForItWithoutDropout) {
  const Losses all = train({{"data.order", "sequential"}, {"train.steps", "12"}}).loss;
  for (const auto& [fraction, count] : {std::pair{"0.25", 3}, {"0.6", 7}, {"0.0001", 1}}) {
    const double expected = mean_of(part(all, 12 - count, count));
    for (const Flags& flags : {Flags{},
                               {{"train.batch", "2"}, {"parallel.ranks", "2"}},
                               {{"train.batch", "7"}, {"model.dropout", "0.5"}},
                               {{"parallel.ranks", "4"}, {"model.dropout", "0.5"}}}) {
      Flags more = flags;
      more["data.val_fraction"] = fraction;
      more["train.steps"] = "1";
      EXPECT_NEAR(train(more).final.at("val_loss").get<double>(), expected, 1e-5) << count;
    }
  }
}

TEST_F(TrainTransformerData, DropoutDiffersFromStepToStep) {
  std::string same;
  for (int i = 0; i < 73; ++i) same += "abcdef"[i % 6];
  flags_["data.path"] = folder_.write("same.txt", same);
  flags_["train.steps"] = "12";
  flags_["train.seed"] = "1";
  const auto num_losses = [&](const Flags& flags) {
    const Losses losses = train(flags).loss;
    return std::set(losses.begin(), losses.end()).size();
  };
  EXPECT_EQ(num_losses({}), 1u);
  EXPECT_EQ(num_losses({{"model.dropout", "0.5"}}), 12u);
}

TEST_F(TrainTransformerData, TheTerminalShowsTheStepsAskedForAndBitsOfBytes) {
  flags_["train.steps"] = "10";
  flags_["data.val_fraction"] = "0.25";
  flags_["out"] = folder_ / "out";
  flags_["device"] = "cpu";
  const auto lines_of = [&](const char* every, const std::string& pattern) {
    flags_["log.every"] = every;
    const std::string out = run_program("tools/programs/train_transformer", flags_).out;
    const std::regex line(pattern);
    std::vector<std::string> found;
    for (std::sregex_iterator i(out.begin(), out.end(), line), end; i != end; ++i) {
      found.push_back((*i)[1].str());
    }
    return found;
  };
  const std::string step = R"(step +(\d+)/10 \| loss )";
  EXPECT_EQ(lines_of("4", step), (std::vector<std::string>{"1", "4", "8", "10"}));
  EXPECT_EQ(lines_of("10", step), (std::vector<std::string>{"1", "10"}));
  EXPECT_EQ(lines_of("0", step).size(), 0u);
  const auto loss = lines_of("0", R"(val loss ([\d.]+) )");
  const auto bits = lines_of("0", R"(val loss [\d.]+ \(([\d.]+) bits per byte\))");
  ASSERT_TRUE(loss.size() == 1 && bits.size() == 1);
  EXPECT_NEAR(std::stod(bits[0]), std::stod(loss[0]) / std::log(2), 2e-3);
}

// Generation -------------------------------------------------------------------------------------

/// Element i of the parameter called `name`; all else is 0.
using Weights = std::function<float(const std::string& name, std::int64_t i)>;

class Generation : public ::testing::Test {
 protected:
  /// A folder with a model of these weights.
  std::string write_model(const GptConfig& config, const Weights& weights) const {
    std::string model = folder_ / "model";
    Gpt gpt(config);
    std::vector<engine::Parameter*> parameters = gpt.root()->parameters;
    for (const engine::Block* block : gpt.blocks()) {
      parameters.insert(parameters.end(), block->parameters.begin(), block->parameters.end());
    }
    std::vector<engine::TensorSpec> specs;
    for (const engine::Parameter* p : parameters) {
      const auto dims = p->shape.dims();
      specs.push_back({p->name, {dims.begin(), dims.end()}});
    }
    Gpt2Writer writer(model,
                      {.n_layer = config.layers,
                       .n_head = config.heads,
                       .n_embd = config.dim,
                       .n_positions = config.seq,
                       .vocab_size = config.vocab},
                      specs);
    for (const engine::Parameter* p : parameters) {
      std::vector<float> values;
      for (std::int64_t i = 0; i < p->shape.numel(); ++i) values.push_back(weights(p->name, i));
      writer.write(p->name, values);
    }
    writer.finish();
    return model;
  }

  /// The tokens that a model of these weights writes after `first`, the first token of its data.
  std::vector<int> generate(const GptConfig& config, const Weights& weights, int num_tokens,
                            int first = 0, const Flags& more = {}) const {
    const std::string model = write_model(config, weights);
    // nanoGPT's tokens of 16 bits.
    std::string tokens(64, '\0');
    tokens[0] = static_cast<char>(first);
    Flags flags = {{"init.from", model},       {"data.path", folder_.write("tokens.bin", tokens)},
                   {"data.val_fraction", "0"}, {"parallel.ranks", "1"},
                   {"train.steps", "0"},       {"sample.tokens", std::to_string(num_tokens)},
                   {"out", folder_ / "out"},   {"device", "cpu"},
                   {"log.peak_ms", "0"}};
    for (const auto& [name, value] : more) flags[name] = value;
    const Outcome outcome = run_program("tools/programs/train_transformer", flags);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    const std::string text = folder_.read("out/sample.txt"), head = "token ids: ";
    EXPECT_TRUE(text.starts_with(head)) << text;
    std::istringstream numbers(text.substr(std::min(head.size(), text.size())));
    std::vector<int> sample;
    for (int token = 0; numbers >> token;) sample.push_back(token);
    EXPECT_EQ(std::ssize(sample), num_tokens + 1);
    return sample;
  }

  /// Logits do not depend on what came before: features are (1, 0), so logit v is element (v, 0) of
  /// the embedding.
  std::vector<int> draw(const std::vector<float>& logits, int num_tokens,
                        const Flags& more = {}) const {
    const GptConfig config = {
        .layers = 1, .heads = 1, .dim = 2, .seq = 1, .vocab = std::ssize(logits)};
    const auto weights = [&](const std::string& name, std::int64_t i) {
      if (name == "wte.weight" && i % 2 == 0) return logits[static_cast<std::size_t>(i / 2)];
      return name == "ln_f.bias" && i == 0 ? 1.0f : 0.0f;
    };
    std::vector<int> sample = generate(config, weights, num_tokens, 0, more);
    sample.erase(sample.begin());
    return sample;
  }

  const TempFolder folder_;
};

TEST_F(Generation, DrawsFromTheFortyLikeliestTokens) {
  // 50 tokens nearly alike, the likeliest in the middle and last.
  std::vector<float> logits(50);
  std::set<int> likeliest;
  for (int v = 0; v < 50; ++v) {
    const bool is_likely = v >= 10 && v < 50 && v != 49;
    logits[static_cast<std::size_t>(v)] = is_likely || v == 3 ? 0.001f * float(v) : -0.001f;
    if (is_likely || v == 3) likeliest.insert(v);
  }
  ASSERT_EQ(likeliest.size(), 40u);
  const std::vector<int> sample = draw(logits, 4000);
  EXPECT_EQ(std::set(sample.begin(), sample.end()), likeliest);
  // The first of equals.
  const std::vector<int> ties = draw(std::vector<float>(45, 0.5f), 4000);
  std::set<int> first;
  for (int v = 0; v < 40; ++v) first.insert(v);
  EXPECT_EQ(std::set(ties.begin(), ties.end()), first);
}

TEST_F(Generation, TextIsOfBytesThoughTheModelHasMoreTokens) {
  // The likeliest token is no byte, and by far the likeliest of those that are is A.
  const GptConfig config = {.layers = 1, .heads = 1, .dim = 2, .seq = 1, .vocab = 300};
  const std::string model = write_model(config, [](const std::string& name, std::int64_t i) {
    if (name == "wte.weight" && i % 2 == 0) return i / 2 >= 256 ? 60.0f : i / 2 == 'A' ? 30.0f : 0;
    return name == "ln_f.bias" && i == 0 ? 1.0f : 0.0f;
  });
  const Outcome outcome =
      run_program("tools/programs/train_transformer",
                  Flags{{"init.from", model},
                        {"data.path", folder_.write("text.txt", "Beside the sea")},
                        {"data.val_fraction", "0"},
                        {"data.format", "bytes"},
                        {"parallel.ranks", "1"},
                        {"train.steps", "0"},
                        {"sample.tokens", "7"},
                        {"out", folder_ / "out"},
                        {"log.peak_ms", "0"},
                        {"device", "cpu"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_EQ(folder_.read("out/sample.txt"), "BAAAAAAA\n");
}

TEST_F(Generation, PromptsGoOnWithTheLikeliestToken) {
  // The likeliest token is no byte, and by far the likeliest of those that are is A.
  const GptConfig config = {.layers = 1, .heads = 1, .dim = 2, .seq = 6, .vocab = 300};
  const std::string model = write_model(config, [](const std::string& name, std::int64_t i) {
    if (name == "wte.weight" && i % 2 == 0) return i / 2 >= 256 ? 60.0f : i / 2 == 'A' ? 30.0f : 0;
    return name == "ln_f.bias" && i == 0 ? 1.0f : 0.0f;
  });
  const Outcome outcome = run_program(
      "tools/programs/train_transformer",
      Flags{{"init.from", model},
            {"data.path", folder_.write("text.txt", "Beside the sea, and beneath it as well")},
            {"data.val_fraction", "0.3"},
            {"data.format", "bytes"},
            {"parallel.ranks", "1"},
            {"train.steps", "0"},
            {"sample.tokens", "3"},
            {"log.val_prompts", folder_.write("prompts.txt", "The\ta\nB\nso far\n")},
            {"out", folder_ / "out"},
            {"log.peak_ms", "0"},
            {"device", "cpu"}});
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  EXPECT_NE(outcome.out.find("  The\\ta => AA\n  B => AAA\n  so far => A\n"), std::string::npos)
      << outcome.out;
}

TEST_F(Generation, DrawsInProportionAtATemperatureOfEightTenths) {
  // Shares of 1, 3 and 4 eighths.
  const auto logit = [](double share) { return static_cast<float>(5 + 0.8 * std::log(share)); };
  const std::vector<float> logits = {logit(3), logit(1), logit(4)};
  const std::vector<int> sample = draw(logits, 8000);
  const double expected[] = {3000, 1000, 4000};
  double chi_squared = 0;
  for (int v = 0; v < 3; ++v) {
    const auto count = static_cast<double>(std::ranges::count(sample, v));
    chi_squared += (count - expected[v]) * (count - expected[v]) / expected[v];
  }
  // Two degrees of freedom: above that in one of 10,000 cases.
  EXPECT_LT(chi_squared, 18.4);
  // The next draw does not depend on the one before: 1/8 x 1/8 of all pairs are (1, 1).
  int num_pairs = 0;
  for (std::size_t i = 1; i < sample.size(); ++i) num_pairs += sample[i] == 1 && sample[i - 1] == 1;
  EXPECT_NEAR(num_pairs, 125, 55);
  EXPECT_EQ(draw(logits, 100), (std::vector(sample.begin(), sample.begin() + 100)));
  EXPECT_NE(draw(logits, 100, {{"train.seed", "5"}}),
            (std::vector(sample.begin(), sample.begin() + 100)));
}

TEST_F(Generation, SeesAsManyTokensAsTheModelHasPositions) {
  // Each position has a token of its own, whatever the tokens are.
  const GptConfig config = {.layers = 1, .heads = 1, .dim = 8, .seq = 4, .vocab = 8};
  constexpr std::int64_t kNext[] = {5, 2, 7, 6};
  const auto weights = [&](const std::string& name, std::int64_t i) {
    if (name == "wte.weight") return i / 8 == i % 8 ? 1.0f : 0.0f;
    if (name == "wpe.weight") return kNext[i / 8] == i % 8 ? 100.0f : 0.0f;
    return name == "ln_f.weight" ? 100.0f : 0.0f;
  };
  EXPECT_EQ(generate(config, weights, 7, 3), (std::vector{3, 5, 2, 7, 6, 6, 6, 6}));
}

TEST_F(Generation, EachTokenFollowsFromTheOneBefore) {
  // The hidden layer sees which token it is and names the one after it.
  const GptConfig config = {.layers = 1, .heads = 2, .dim = 8, .seq = 3, .vocab = 8};
  const auto weights = [](const std::string& name, std::int64_t i) {
    if (name == "wte.weight") return i / 8 == i % 8 ? 1.0f : 0.0f;
    if (name == "h.0.ln_2.weight" || name == "ln_f.weight") return 100.0f;
    if (name == "h.0.mlp.c_fc.weight") return i / 32 == i % 32 ? 1.0f : 0.0f;
    const bool is_next = i / 8 < 8 && (i / 8 + 1) % 8 == i % 8;
    return name == "h.0.mlp.c_proj.weight" && is_next ? 1.0f : 0.0f;
  };
  for (const char* ranks : {"1", "3"}) {
    EXPECT_EQ(generate(config, weights, 10, 4, {{"parallel.ranks", ranks}}),
              (std::vector{4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6}));
  }
}

TEST(Printable, IsWhatCommandsNoTerminal) {
  EXPECT_EQ(printable("H\n\t\x1b\x1f ~\x7f\x80\x9b\xff"), "H\n\t\\x1b\\x1f ~\\x7f\\x80\\x9b\\xff");
  EXPECT_EQ(printable("a\rb\xC2\x9B[2J\xE2\x80\xAE"), "a\\rb\\u009b[2J\\u202e");
}

TEST(Printable, IsTextOfEveryLanguageAsItIs) {
  for (const std::string text :
       {"Stra\xC3\x9F"
        "e\n\tzur\xC3\xBC"
        "ck",
        "\xE4\xBD\xA0\xE5\xA5\xBD, \xD0\x9C\xD0\xB8\xD1\x80", "\xF0\x9F\x99\x82\n\n", ""}) {
    EXPECT_EQ(printable(text), text);
  }
  EXPECT_EQ(printable("\xC3\xA9\xC3(\xA9"), "\xC3\xA9\\xc3(\\xa9");  // é, and two halves
}

TEST(Printable, ACharacterThatTheEndCutsIsLeftOut) {
  const std::string smile = "\xF0\x9F\x99\x82";
  for (std::size_t n = 0; n < smile.size(); ++n) {
    EXPECT_EQ(printable("a" + smile.substr(0, n)), "a") << n;
  }
  EXPECT_EQ(printable("\xE4\xBD"), "");
  EXPECT_EQ(printable("\xC3"), "");
  EXPECT_EQ(printable("a\x99\x82"), "a\\x99\\x82");  // of no character's head
  EXPECT_EQ(printable("a\xFF"), "a\\xff");
}

// The multi-layer perceptron ---------------------------------------------------------------------

class TrainMlpData : public ::testing::Test {
 protected:
  TrainMlpData() {
    flags_ = {{"data.path", folder_.path()}, {"model.hidden", "8"}, {"parallel.ranks", "1"},
              {"train.batch", "1"},          {"train.lr", "0"},     {"train.warmup", "0"},
              {"log.peak_ms", "0"}};
  }
  Log train(const Images& training, const Images& test, const Flags& more) const {
    training.write(folder_, "train");
    test.write(folder_, "t10k");
    return run("train_mlp", flags_, more);
  }

  const TempFolder folder_;
  Flags flags_;
};

TEST_F(TrainMlpData, EpochsHoldEveryImageOnceInTheOrderAskedFor) {
  Images images;
  for (int i = 0; i < 12; ++i) images.add(static_cast<std::uint8_t>(20 * i), i % 10);
  const Losses sequential =
      train(images, images, {{"train.steps", "36"}, {"data.order", "sequential"}}).loss;
  expect_epochs(sequential, 12, false);
  const Losses shuffled = train(images, images, {{"train.steps", "36"}}).loss;
  expect_epochs(shuffled, 12, true);
  Losses all = part(sequential, 0, 12), shown = part(shuffled, 0, 12);
  EXPECT_NE(all, shown);
  std::ranges::sort(all);
  std::ranges::sort(shown);
  EXPECT_EQ(all, shown);
  for (Flags flags : kSixParts) {
    flags["train.steps"] = "6";
    expect_means(train(images, images, flags).loss, shuffled);
  }
}

TEST_F(TrainMlpData, TheLossIsThatOfScaledPixelsAndTheTestImages) {
  Images training, test;
  training.add(9, 0);
  for (const int pixel : {0, 100, 255}) test.add(static_cast<std::uint8_t>(pixel), pixel % 9);
  const json final = train(training, test, {{"train.steps", "1"}, {"train.seed", "3"}}).final;

  engine::Memory memory;
  engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
  Mlp mlp({.inputs = 4, .hidden = 8, .layers = 3});
  for (const engine::Block* block : mlp.blocks()) {
    engine::materialize(block->parameters, memory, 3);
  }
  std::vector<float> pixels;
  for (const char c : test.pixels) {
    const double share = static_cast<unsigned char>(c) / 255.0;
    pixels.push_back(static_cast<float>((share - 0.2860) / 0.3530));
  }
  const std::vector<std::int32_t> labels(test.labels.begin(), test.labels.end());
  const auto x = Tensor::from<float>(memory, {3, 4}, pixels, "x");
  const auto targets = Tensor::from<std::int32_t>(memory, {3}, labels, "targets");
  EXPECT_NEAR(final.at("val_loss").get<double>(), tape.no_grad([&] {
    return mlp.loss(tape, {x, targets}, {}).item();
  }),
              1e-5);
}

TEST_F(TrainMlpData, DoesWhatItPlans) {
  Images images;
  for (int i = 0; i < 12; ++i) images.add(static_cast<std::uint8_t>(20 * i), i % 10);
  flags_["parallel.ranks"] = "3";
  flags_["train.steps"] = "4";
  const json planned = train(images, images, {{"audit", "true"}}).final.at("planned");
  flags_["device"] = "cpu";
  flags_["plan"] = "true";
  flags_["out"] = folder_ / "unused";
  const Outcome plan = run_program("tools/programs/train_mlp", flags_);
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_EQ(plan.out.find("plan " + planned.at("hash").get<std::string>() + ", 3 ranks on CPUs\n"),
            0u)
      << plan.out;
  // Nothing is computed when the first unit is gathered.
  const std::size_t first = plan.out.find("all_gather ");
  ASSERT_NE(first, std::string::npos);
  EXPECT_NE(plan.out.find("compute waits", first), std::string::npos) << plan.out;
  double exposed_ms = 0;
  for (const json& c : planned.at("collectives")) exposed_ms += c.at("exposed_ms").get<double>();
  EXPECT_GT(exposed_ms, 0);
  EXPECT_FALSE(std::filesystem::exists(folder_ / "unused"));
}

TEST_F(TrainMlpData, AccuracyCountsEveryTestImageOnceWhateverTheNumberOfRanks) {
  // Bright images are 1 and dark ones 0, which it learns. Of the test images, evaluated 500 at a
  // time, the first third is right, the second wrong, and of the last one a fifth is wrong.
  Images training, test;
  for (int i = 0; i < 64; ++i) training.add(i % 2 == 0 ? 0 : 250, i % 2);
  for (int i = 0; i < 1500; ++i) {
    const bool is_right = i < 500 || (i >= 1000 && i % 5 != 0);
    test.add(i % 2 == 0 ? 0 : 250, is_right ? i % 2 : 1 - i % 2);
  }
  std::set<double> losses;
  for (const char* ranks : {"1", "2", "3", "4"}) {
    const json final = train(training, test,
                             {{"train.steps", "24"},
                              {"train.lr", "0.05"},
                              {"train.batch", "12"},
                              {"data.order", "sequential"},
                              {"parallel.ranks", ranks}})
                           .final;
    EXPECT_DOUBLE_EQ(final.at("test_accuracy").get<double>(), 900.0 / 1500) << ranks;
  }
  for (const char* ranks : {"1", "2", "3", "4"}) {
    losses.insert(train(training, test, {{"train.steps", "0"}, {"parallel.ranks", ranks}})
                      .final.at("val_loss")
                      .get<double>());
  }
  EXPECT_EQ(losses.size(), 1u);
}

}  // namespace
}  // namespace tessera::tools
