// Models of every family learn from documents that share a row as from each in a row of its own.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/error.h"
#include "engine/philox.h"
#include "engine/tape.h"
#include "tests/testing/errors.h"
#include "tools/models/family.h"
#include "tools/models/language_model.h"

namespace tessera::tools {
namespace {

using engine::Parameter;
using engine::Tape;
using engine::Tensor;
using testing::error_of;
using testing::has;
using Ids = std::vector<std::int32_t>;

/// Documents of a row, with a target for each token but their last ones.
struct Row {
  Ids tokens, targets, positions;

  explicit Row(const std::vector<Ids>& documents) {
    for (const Ids& document : documents) {
      for (std::size_t t = 0; t < document.size(); ++t) {
        tokens.push_back(document[t]);
        targets.push_back(t + 1 < document.size() ? document[t + 1] : -100);
        positions.push_back(static_cast<std::int32_t>(t));
      }
    }
  }
};

class Documents : public ::testing::TestWithParam<std::string> {
 protected:
  struct Learned {
    double loss = 0;
    std::vector<float> gradients;  // of all parameters
  };

  /// The sum of the losses of rows, and its gradients, of a model whose parameters are all random.
  static Learned learn(const std::vector<Row>& rows, const Pass& pass, bool with_positions) {
    const engine::Memory memory({.poison = true});
    Tape tape(memory, engine::Stream::inline_cpu("compute"));
    const auto model = read_model_config("tests/golden/" + GetParam()).make();
    const std::vector<Parameter*> parameters = parameters_of(*model);
    for (Parameter* p : parameters) {
      const bool is_norm = p->init.kind == engine::Init::Kind::kOnes;
      const engine::RandomStream random{5, engine::fnv1a(p->name)};
      std::vector<float> values(static_cast<std::size_t>(p->shape.numel()));
      for (std::size_t i = 0; i < values.size(); ++i) {
        values[i] = (is_norm ? 1.0f : 0.0f) + 0.2f * random.normal(i);
      }
      p->value = Tensor::from<float>(memory, p->shape, values, p->name);
      p->grad = Tensor::zeros(memory, p->shape, engine::DType::kF32, p->name);
    }
    Learned learned;
    for (const Row& row : rows) {
      std::vector<Tensor> batch;
      for (const Ids* ids : {&row.tokens, &row.targets, &row.positions}) {
        if (ids == &row.positions && !with_positions) break;
        batch.push_back(Tensor::from<std::int32_t>(memory, {1, std::ssize(*ids)}, *ids, "batch"));
      }
      const Tensor loss = model->loss(tape, batch, pass);
      learned.loss += loss.item();
      tape.backward(loss);
    }
    for (const Parameter* p : parameters) {
      const auto of_one = p->grad.span<float>();
      learned.gradients.insert(learned.gradients.end(), of_one.begin(), of_one.end());
    }
    return learned;
  }
};

TEST_P(Documents, ThatShareARowAreLearnedAsAlone) {
  const std::vector<Ids> documents = {{3, 9, 30, 4, 8}, {7}, {21, 2, 2, 5, 11, 36}, {1, 0}};
  std::vector<Row> alone;
  for (const Ids& document : documents) alone.emplace_back(std::vector<Ids>{document});
  const Learned want = learn(alone, {.is_sum = true}, false);
  for (const bool recompute : {false, true}) {
    const Learned got = learn({Row(documents)}, {.recompute = recompute, .is_sum = true}, true);
    EXPECT_NEAR(got.loss, want.loss, 1e-6 * want.loss);
    ASSERT_EQ(got.gradients.size(), want.gradients.size());
    const float largest = std::abs(*std::ranges::max_element(
        want.gradients, {}, [](float gradient) { return std::abs(gradient); }));
    for (std::size_t i = 0; i < got.gradients.size(); ++i) {
      ASSERT_NEAR(got.gradients[i], want.gradients[i], 1e-5 * largest) << i;
    }
  }
  // And not so without positions.
  const Learned other = learn({Row(documents)}, {.is_sum = true}, false);
  EXPECT_GT(std::abs(other.loss - want.loss), 1e-3 * want.loss);
}

INSTANTIATE_TEST_SUITE_P(Families, Documents,
                         ::testing::Values("gpt2_tiny", "llama/llama_scaled",
                                           "llama/mistral_grouped", "llama/qwen2_tied",
                                           "llama/qwen3_biases", "gpt_neox/neox_quarter",
                                           "gpt_neox/neox_sequential"),
                         [](const auto& param) {
                           std::string name = param.param;
                           std::ranges::replace(name, '/', '_');
                           return name;
                         });

TEST(DocumentsOfAModel, RefuseABatchOfMore) {
  const engine::Memory memory;
  Tape tape(memory, engine::Stream::inline_cpu("compute"));
  const auto model = read_model_config("tests/golden/gpt2_tiny").make();
  const Tensor ids = Tensor::zeros(memory, {1, 3}, engine::DType::kI32);
  EXPECT_TRUE(has(error_of<engine::InvalidArgument>([&] {
                    model->loss(tape, {ids, ids, ids, ids}, {});
                  }),
                  {"tokens, targets and, if at all, positions", "4 tensors"}));
}

}  // namespace
}  // namespace tessera::tools
