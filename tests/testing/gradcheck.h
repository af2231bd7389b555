// engine/gradcheck.h as the tests of ops use it.
#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <string_view>

#include "engine/copy.h"
#include "engine/elementwise.h"
#include "engine/gradcheck.h"

namespace tessera::testing {

using engine::DType;
using engine::Memory;
using engine::Parameter;
using engine::Shape;
using engine::Tape;
using engine::Tensor;
using engine::gradcheck::check_bf16;
using engine::gradcheck::check_gradients;
using engine::gradcheck::GradcheckOptions;
using engine::gradcheck::max_abs;
using engine::gradcheck::OpCase;
using engine::gradcheck::OpRun;
using engine::gradcheck::random_values;
using engine::gradcheck::run_op;
using engine::gradcheck::RunOptions;
using engine::gradcheck::to_tensor;
using engine::gradcheck::to_values;
using engine::gradcheck::Values;

/// What the last launch of each name stated.
struct LastWorks : engine::LaunchListener {
  std::map<std::string, engine::Work, std::less<>> works;

  void on_launch(const engine::LaunchRecord& record) noexcept override {
    works[std::string(record.work.name)] = record.work;
  }
  void expect(std::string_view name, double flops, std::int64_t nbytes_read,
              std::int64_t nbytes_written) const {
    const auto work = works.find(name);
    ASSERT_NE(work, works.end()) << name;
    EXPECT_EQ(work->second.flops, flops) << name;
    EXPECT_EQ(work->second.bytes_read, nbytes_read) << name;
    EXPECT_EQ(work->second.bytes_written, nbytes_written) << name;
  }
};

inline void expect_close(const Values& got, const Values& want, double tolerance,
                         std::string_view what) {
  try {
    engine::gradcheck::check_close(got, want, tolerance, what);
  } catch (const engine::Error& error) {
    ADD_FAILURE() << error.what();
  }
}

}  // namespace tessera::testing
