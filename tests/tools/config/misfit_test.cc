// What is said of a checkpoint that does not fit.
#include "tools/config/misfit.h"

#include <gtest/gtest.h>

#include <string>

namespace tessera::tools {
namespace {

TEST(Misfit, AFewTensorsOfEachKindStandAboveWhatHasChanged) {
  std::string error = "[checkpoint] expected the same tensors, got";
  for (int i = 0; i < 100; ++i) error += "\n  parameter h: expected shape (64), got (32)";
  for (int i = 0; i < 5; ++i) error += "\n  missing: optimizer.v h";
  const std::string place = "\n  (run/checkpoints/step_6) (rank 0, 1)";
  EXPECT_EQ(misfit_text(error + place, {"model.dim=64 (was 32)", "train.lr=2.0 (was 1.0)"}),
            "[checkpoint] expected the same tensors, got"
            "\n  parameter h: expected shape (64), got (32)"
            "\n  parameter h: expected shape (64), got (32)"
            "\n  parameter h: expected shape (64), got (32)"
            "\n  parameter h: expected shape (64), got (32)"
            "\n  missing: optimizer.v h"
            "\n  missing: optimizer.v h"
            "\n  missing: optimizer.v h"
            "\n  missing: optimizer.v h"
            "\n  97 more" +
                place +
                "\n  changed since it was saved: model.dim=64 (was 32)"
                "\n  changed since it was saved: train.lr=2.0 (was 1.0)");
}

// What may be missing goes on where it is asked to, and parameters may not.
TEST(Misfit, WhatWouldGoOnIsSaidWhereItDoes) {
  const std::string relaxed =
      "\n  --checkpoint.strict=false starts what is missing from nothing, and ignores what is over";
  const std::string states = "got\n  missing: optimizer.m a\n  unexpected: optimizer.v a\n  (x)";
  EXPECT_EQ(misfit_text(states, {}), states + relaxed);
  for (const char* fatal : {"missing: parameter a", "unexpected: parameter a", "missing: buffer a",
                            "optimizer.m a: expected shape (2), got (1)"}) {
    const std::string error = "got\n  missing: optimizer.m a\n  " + std::string(fatal) + "\n  (x)";
    EXPECT_EQ(misfit_text(error, {}), error) << fatal;
  }
}

TEST(Misfit, AnotherErrorStays) {
  EXPECT_EQ(misfit_text("[checkpoint] expected x, got y (z)", {"a=1 (was 2)"}),
            "[checkpoint] expected x, got y (z)");
}

}  // namespace
}  // namespace tessera::tools
