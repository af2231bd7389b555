// What must be equal, and what may differ: classes of equal arithmetic, and runs of them.
#include "tools/compare/comparison/classes.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "engine/error.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tests/tools/compare/comparison/made_runs.h"
#include "tests/tools/compare/request/compare_request.h"
#include "tests/tools/compare/smallest_budget.h"
#include "tools/compare/comparison/parity.h"
#include "tools/compare/equal_plans.h"

namespace tessera::tools {
namespace {

using testing::error_of;
using testing::has;
using testing::run_of;
using testing::TempFolder;
using Names = std::vector<std::string>;
using Members = std::vector<std::size_t>;

class CompareClasses : public ::testing::Test {
 protected:
  Request request(const Names& more) const { return testing::compare_request(folder_, 2, more); }
  std::vector<ArithmeticClass> classes(const Names& more) const {
    return classes_of(request(more).configurations);
  }
  /// Of each configuration the name of the one that is trained instead; empty: it is itself.
  Names trained_as(const Names& more) const {
    Request r = request(more);
    check_plans(r);
    Names names;
    for (const Configuration& c : r.configurations) {
      names.push_back(c.same_plan_as ? r.configurations[*c.same_plan_as].name : "");
    }
    return names;
  }

  const TempFolder folder_;
};

// Options
// ------------------------------------------------------------------------------------------

// A new option is named here: what it does to the numbers decides what is compared.
TEST_F(CompareClasses, EveryOptionHasAnEffectOfItsOwn) {
  const Names arithmetic = {
      "comm.hook",
      "cpu.gemm",
      "cpu.isa",
      "cpu.threads_per_rank",
      "cuda.attention",
      "cuda.gemm_algorithms",
      "cuda.graph",
      "cuda.tune_gemm",
      "device",
      "parallel.backend",
      "parallel.canonical",
      "parallel.ranks",
      "parallel.threads",
      "powersgd.across_replicas",
      "powersgd.error_dtype",
      "powersgd.error_feedback",
      "powersgd.min_compression_rate",
      "powersgd.orthogonalize_eps",
      "powersgd.rank",
      "powersgd.seed",
      "powersgd.start_step",
      "powersgd.warm_start",
      "precision.accumulate",
      "precision.param",
      "precision.reduce",
      "train.accum",
      "train.accum_comm",
  };
  const Names training = {
      "data.end",          "data.field",         "data.format",    "data.loss",
      "data.mix",          "data.order",         "data.packing",   "data.path",
      "data.prompt",       "data.special",       "data.template",  "data.tokenizer",
      "data.val_fraction", "init.from",          "lora.alpha",     "lora.dropout",
      "lora.from",         "lora.rank",          "lora.targets",   "model.dim",
      "model.dropout",     "model.heads",        "model.kv_heads", "model.layers",
      "model.mlp_dim",     "model.preset",       "model.seq",      "model.vocab",
      "train.batch",       "train.beta1",        "train.beta2",    "train.eps",
      "train.grad_clip",   "train.loss_mean",    "train.lr",       "train.momentum",
      "train.optimizer",   "train.schedule",     "train.seed",     "train.steps",
      "train.warmup",      "train.weight_decay",
  };
  const Names none = {
      "audit",
      "cpu.pin",
      "log.every",
      "log.flight",
      "log.jsonl",
      "log.peak_ms",
      "log.probe",
      "log.probe_steps",
      "log.probe_values",
      "log.tensorboard",
      "log.trace",
      "log.trace_steps",
      "log.val_every",
      "log.val_prompts",
      "memory_budget",
      "memory_check",
      "offload.gradients",
      "offload.optimizer",
      "offload.parameters",
      "offload.threads",
      "out",
      "parallel.address",
      "parallel.backward_prefetch",
      "parallel.bucket_mb",
      "parallel.deadline_s",
      "parallel.insecure",
      "parallel.interface",
      "parallel.launcher",
      "parallel.prefetch",
      "parallel.reductions_in_flight",
      "parallel.reshard_after_forward",
      "parallel.shard_ranks",
      "parallel.strategy",
      "parallel.transport",
      "parallel.unit_min_numel",
      "plan",
      "powersgd.offload_error",
      "sample.tokens",
      "save.final",
      "save.shard_gib",
      "train.check_gradients",
      "train.max_minutes",
      "train.max_skips",
      "train.spike_factor",
      "train.overlap_optimizer",
      "train.recompute",
      "train.verify_every",
  };
  const Request r = request({"--strategies=ddp"});
  for (const auto& option : r.configurations.front().options) {
    const std::string& key = option.first;
    const auto is_in = [&](const Names& names) { return std::ranges::count(names, key) > 0; };
    const OptionEffect effect = effect_of(key);
    EXPECT_EQ(effect == OptionEffect::kArithmetic, is_in(arithmetic)) << key;
    EXPECT_EQ(effect == OptionEffect::kTraining, is_in(training)) << key;
    EXPECT_EQ(effect == OptionEffect::kNone, is_in(none) || key.starts_with("rates.")) << key;
  }
}

TEST_F(CompareClasses, BitsMustBeEqualUnlessTheArithmeticIsAnother) {
  using Reasons = Names;
  const auto reasons = [&](const std::vector<std::string>& words) {
    const Request r = request(words);
    return arithmetic_differences(r.configurations.at(0), r.configurations.at(1));
  };
  EXPECT_EQ(reasons({"--strategies=ddp,hsdp"}), Reasons());
  EXPECT_EQ(reasons({"--strategies=zero3", "--sweep=parallel.prefetch=0,5"}), Reasons());
  EXPECT_EQ(reasons({"--strategies=zero3", "--sweep=train.recompute=true,false"}), Reasons());
  EXPECT_EQ(reasons({"--strategies=zero3", "--sweep=offload.gradients=0,1"}), Reasons());
  EXPECT_EQ(reasons({"--strategies=ddp", "--sweep=precision.param=f32,bf16"}),
            Reasons{"precision.param"});
  EXPECT_EQ(reasons({"--strategies=ddp", "--sweep=comm.hook=none,bf16"}), Reasons{"comm.hook"});
  for (const char* sweep :
       {"cpu.gemm=onednn,eigen", "data.order=shuffle,sequential", "model.dropout=0,0.1",
        "precision.accumulate=f32,bf16", "precision.reduce=f32,bf16", "train.accum_comm=every,last",
        "train.beta2=0.9,0.95", "train.eps=1e-8,1e-6", "train.grad_clip=0,1", "train.lr=1,2",
        "train.optimizer=adamw,sgd", "train.schedule=constant,linear", "train.seed=1,2",
        "train.warmup=1,2", "train.weight_decay=0,0.1"}) {
    const std::string text = sweep;
    EXPECT_EQ(reasons({"--strategies=ddp", "--sweep=" + text}),
              Reasons{text.substr(0, text.find('='))});
  }
  // Ranks and accumulation may deal equal micro-batches in another way, or make others of them.
  Request r = request({"--strategies=ddp", "--sweep=parallel.ranks=4,2 train.accum=1,2"});
  EXPECT_EQ(arithmetic_differences(r.configurations.at(0), r.configurations.at(3)), Reasons());
  EXPECT_EQ(arithmetic_differences(r.configurations.at(0), r.configurations.at(1)),
            Reasons{"train.accum"});
  r.configurations[3].sums_in_rank_order = false;
  EXPECT_EQ(arithmetic_differences(r.configurations.at(0), r.configurations.at(3)),
            Reasons{"parallel.ranks"});
  // What is compressed as one square depends on which blocks are one unit.
  for (const char* sweep : {"parallel.bucket_mb=0,4", "parallel.unit_min_numel=0,99"}) {
    const std::string text = sweep;
    EXPECT_EQ(reasons({"--strategies=ddp", "--sweep=" + text}), Reasons());
    EXPECT_EQ(reasons({"--strategies=ddp", "--comm.hook=batched_powersgd", "--sweep=" + text}),
              Reasons{text.substr(0, text.find('='))});
  }
  // The host updates as a GPU does.
  for (const char* sweep : {"offload.optimizer=0,1", "memory_budget=1GiB,2GiB"}) {
    Request on_gpus = request({"--strategies=zero3", std::string("--sweep=") + sweep});
    for (Configuration& c : on_gpus.configurations) c.on_gpu = true;
    EXPECT_EQ(arithmetic_differences(on_gpus.configurations.at(0), on_gpus.configurations.at(1)),
              Reasons());
  }
}

// A budget may be met by smaller micro-batches alone, of which some configurations have no need.
TEST_F(CompareClasses, MicroBatchesThatABudgetCutsAreAnotherArithmetic) {
  Request r = request({"--strategies=ddp,zero2,zero3", "--train.batch=4", "--memory_budget=1GiB",
                       "--sweep=train.lr=1e-3,2e-3"});
  check_plans(r);
  for (const Configuration& c : r.configurations) EXPECT_EQ(c.fitted.train.batch, 4) << c.name;
  EXPECT_EQ(classes_of(r.configurations).size(), 2u) << "two rates";
  for (const std::size_t cut : {0, 1}) {
    r.configurations[cut].fitted.train.batch = 2;
    r.configurations[cut].fitted.train.accum = 2;
  }
  const auto all = classes_of(r.configurations);
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[0].members, (Members{0}));
  EXPECT_EQ(all[2].members, (Members{2, 4})) << "of one rate, and of micro-batches as asked";
  EXPECT_EQ(all[2].measured_against, 0u) << "the same training";
  EXPECT_EQ(all[2].changes, Names{"memory_budget"});
  EXPECT_EQ(all[2].label, "train.accum=1 train.batch=4 train.lr=0.001");
  EXPECT_EQ(all[0].label, "train.accum=2 train.batch=2 train.lr=0.001");
}

TEST_F(CompareClasses, WhatABudgetMakesOfEachIsKept) {
  Names options = {"--strategies=ddp,zero3", "--train.batch=4", "--memory_budget=1kB"};
  const std::string refusal = error_of<engine::Error>([&] {
    Request r = request(options);
    check_plans(r);
  });
  options.back() = "--memory_budget=" + testing::smallest_budget(refusal);
  Request r = request(options);
  check_plans(r);
  const Configuration &ddp = r.configurations[0], &zero3 = r.configurations[1];
  EXPECT_EQ(ddp.config.train.batch, 4);
  EXPECT_LT(ddp.fitted.train.batch, 4);
  EXPECT_EQ(ddp.fitted.train.batch * ddp.fitted.train.accum, 4);
  EXPECT_EQ(zero3.fitted.train.batch, 4);
  EXPECT_EQ(arithmetic_differences(ddp, zero3), Names{"memory_budget"});
  EXPECT_EQ(training_differences(ddp, zero3), Names());
}

// Classes
// ------------------------------------------------------------------------------------------

TEST_F(CompareClasses, AreThoseOfEqualArithmetic) {
  const auto one = classes({"--strategies=ddp,zero2,zero3"});
  ASSERT_EQ(one.size(), 1u);
  EXPECT_EQ(one[0].members, (Members{0, 1, 2}));
  EXPECT_EQ(one[0].label, "");

  const auto two = classes({"--strategies=ddp,zero3", "--sweep=precision.param=f32,bf16"});
  ASSERT_EQ(two.size(), 2u);
  EXPECT_EQ(two[0].members, (Members{0, 2}));
  EXPECT_EQ(two[1].members, (Members{1, 3}));
  EXPECT_EQ(two[0].label, "precision.param=f32");
  EXPECT_EQ(two[1].label, "precision.param=bf16");
  EXPECT_EQ(two[0].measured_against, 0u);
  EXPECT_EQ(two[1].measured_against, 0u);
  EXPECT_EQ(two[0].changes, Names());
  EXPECT_EQ(two[1].changes, Names{"precision.param"});
}

// In NCCL's own order of sums each strategy has an arithmetic of its own.
TEST_F(CompareClasses, OfSumsInAnyOrderEachStrategyIsOne) {
  Request r = request({"--strategies=ddp,zero2", "--sweep=train.max_skips=0,3"});
  for (Configuration& c : r.configurations) c.sums_in_rank_order = false;
  const auto all = classes_of(r.configurations);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[1].members, (Members{2, 3}));
  EXPECT_EQ(all[1].changes, Names{"parallel.strategy"});
  EXPECT_EQ(all[1].label, "parallel.strategy=zero2");
}

// A rate with bf16 is measured against that rate with f32, not against another one.
TEST_F(CompareClasses, AreMeasuredWithinOneTraining) {
  const auto all =
      classes({"--strategies=zero3,ddp", "--sweep=train.lr=1e-3,2e-3 precision.param=f32,bf16"});
  ASSERT_EQ(all.size(), 4u);
  EXPECT_EQ(all[2].members, (Members{2, 6}));
  EXPECT_EQ(all[2].label, "precision.param=f32 train.lr=0.002");
  EXPECT_EQ(all[1].measured_against, 0u);
  EXPECT_EQ(all[2].measured_against, 2u) << "another training";
  EXPECT_EQ(all[3].measured_against, 2u);
  EXPECT_EQ(all[1].changes, Names{"precision.param"});
  EXPECT_EQ(all[2].changes, Names{"train.lr"});
  EXPECT_EQ(all[3].changes, Names{"precision.param"});
}

TEST_F(CompareClasses, MoreSamplesAreAnotherTrainingAndTheSameInAnotherOrderAreNot) {
  const auto of = [&](const Names& words) {
    const Request r = request(words);
    return training_differences(r.configurations.front(), r.configurations.back());
  };
  EXPECT_EQ(of({"--strategies=ddp", "--sweep=train.accum=1,2"}), Names{"train.accum"});
  EXPECT_EQ(of({"--strategies=ddp", "--sweep=parallel.ranks=4,2"}), Names{"parallel.ranks"});
  EXPECT_EQ(of({"--strategies=ddp", "--sweep=parallel.ranks=4,2 train.accum=1,2"}), Names());
  EXPECT_EQ(
      of({"--strategies=ddp", "--comm.hook=bf16", "--sweep=parallel.ranks=4,2 train.accum=1,2"}),
      Names());
  EXPECT_EQ(of({"--strategies=ddp", "--sweep=precision.reduce=f32,bf16"}), Names());
}

// Equal plans
// --------------------------------------------------------------------------------------

TEST_F(CompareClasses, WhatHasNothingToActOnHasTheSamePlan) {
  for (const char* strategy : {"ddp", "zero1", "zero2"}) {
    const std::string first = std::string(strategy) + " prefetch=0";
    EXPECT_EQ(
        trained_as({std::string("--strategies=") + strategy, "--sweep=parallel.prefetch=0,1,2"}),
        (Names{"", first, first}));
  }
  EXPECT_EQ(trained_as({"--strategies=zero3", "--sweep=parallel.prefetch=0,1,5,9"}),
            (Names{"", "", "", "zero3 prefetch=5"}))
      << "there are two blocks";
  EXPECT_EQ(trained_as({"--strategies=zero3", "--sweep=memory_budget=1GiB,2GiB"}),
            (Names{"", "zero3 memory_budget=1GiB"}));
  EXPECT_EQ(trained_as({"--strategies=zero3,fsdp,full_shard,shard_grad_op"}),
            (Names{"", "zero3", "zero3", ""}))
      << "two of them are other names of zero3";
  EXPECT_EQ(trained_as({"--strategies=ddp,zero1,zero2,zero3", "--parallel.ranks=1"}),
            (Names{"", "ddp", "ddp", ""}))
      << "one rank has nobody to share with, and yet zero3 copies what it would gather";
}

TEST_F(CompareClasses, WhatActsOrIsNoScheduleIsTrained) {
  EXPECT_EQ(trained_as({"--strategies=ddp,zero1,zero2,zero3"}), Names(4, ""));
  for (const char* sweep : {"train.recompute=false,true", "offload.optimizer=0,0.5",
                            "train.seed=1,2", "parallel.reductions_in_flight=0,1",
                            "parallel.unit_min_numel=0,900", "train.lr=1e-3,2e-3"}) {
    EXPECT_EQ(trained_as({"--strategies=zero3", std::string("--sweep=") + sweep}), Names(2, ""))
        << sweep;
  }
}

// Runs
// ---------------------------------------------------------------------------------------------

TEST(Parity, SeesEveryKindOfDifference) {
  const RunRecord base = run_of({3, 2, 1});
  const auto compare = [&](const RunRecord& run, const std::vector<std::string>& reasons = {}) {
    return compare_runs(base, std::vector<RunRecord>{base, run}, reasons, 0.5);
  };
  EXPECT_EQ(compare(base).kind, ParityKind::kEqualBits);
  const Parity loss = compare(run_of({3, std::nextafter(2, 3), 1.25}));
  EXPECT_EQ(loss.kind, ParityKind::kDiffers);
  EXPECT_EQ(loss.first_step, 2);
  EXPECT_EQ(loss.max_difference, 0.25);
  EXPECT_TRUE(has(loss.text, {"0.25, first in step 2"}));
  const Parity hash = compare(run_of({3, 2, 1}, "other"));
  EXPECT_EQ(hash.kind, ParityKind::kDiffers);
  EXPECT_TRUE(has(hash.text, {"other parameters"}));
  EXPECT_EQ(compare(run_of({3, 2})).kind, ParityKind::kDiffers);
  // With a reason it may be another number, up to the tolerance.
  EXPECT_EQ(compare(run_of({3, 2.5, 1}, "other"), {"train.lr"}).kind, ParityKind::kWithin);
  const Parity far = compare(run_of({3, 2.75, 1}, "other"), {"train.lr"});
  EXPECT_EQ(far.kind, ParityKind::kDiffers);
  EXPECT_TRUE(has(far.text, {"no more than 0.5 allowed, as train.lr changes the arithmetic"}));
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_EQ(compare(run_of({3, nan, 1}), {"train.lr"}).kind, ParityKind::kDiffers);
  EXPECT_EQ(compare_runs(base, {}, {}, 1).kind, ParityKind::kUnknown);
}

TEST(Parity, LossesThatAreNotFiniteAgreeWithEachOtherAlone) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const RunRecord base = run_of({3, nan, 1});
  const auto compare = [&](const RunRecord& run, const std::vector<std::string>& reasons = {}) {
    return compare_runs(base, std::vector<RunRecord>{run}, reasons, 0.5);
  };
  const Parity same = compare(base);
  EXPECT_EQ(same.kind, ParityKind::kEqualBits);
  EXPECT_FALSE(same.first_step.has_value());
  EXPECT_EQ(same.max_difference, 0);
  // Of these the parameters decide, as of other losses.
  EXPECT_TRUE(has(compare(run_of({3, nan, 1}, "other")).text, {"other parameters"}));
  const Parity beside = compare(run_of({3, 2, 1}));
  EXPECT_EQ(beside.kind, ParityKind::kDiffers);
  EXPECT_EQ(beside.first_step, 2);
  EXPECT_EQ(beside.text, "loss differs by what is not finite, first in step 2");
  // With a reason the rest is measured all the same.
  const Parity near = compare(run_of({3.25, nan, 1}, "other"), {"train.lr"});
  EXPECT_EQ(near.kind, ParityKind::kWithin);
  EXPECT_EQ(near.max_difference, 0.25);
}

TEST(Parity, DistancesAreShortAndRead) {
  EXPECT_EQ(distance_text(0), "0");
  EXPECT_EQ(distance_text(1.82e-3), "1.8e-3");
  EXPECT_EQ(distance_text(9.96e-4), "1.0e-3");
  EXPECT_EQ(distance_text(0.0099), "9.9e-3");
  EXPECT_EQ(distance_text(2.01 - 2), "0.01");
  EXPECT_EQ(distance_text(0.25), "0.25");
  EXPECT_EQ(distance_text(123.4), "123");
  EXPECT_EQ(distance_text(2.5e-13), "2.5e-13");
}

}  // namespace
}  // namespace tessera::tools
