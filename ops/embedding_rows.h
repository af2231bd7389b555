// Rows of a table that are looked up by number, and their gradients: of a parameter
// (ops/embedding.h) and of an activation (ops/index/gather.h). Private to ops.
#pragma once

#include <string>
#include <string_view>

#include "engine/tape.h"

namespace tessera::ops {

/// What an op is called in works and errors; static storage.
struct RowLookup {
  std::string_view op;      ///< "embedding"
  std::string_view number;  ///< what its errors call a number: "a token"
  std::string_view forward, backward;
};

/// Throws InvalidArgument for a number outside [0, count), naming it and its position. `numbers`
/// are i32 in memory of the CPU.
void check_numbers(const RowLookup& op, const engine::Tensor& numbers, std::int64_t count);

/// y[.., :] = table[numbers[..], :], plus positions[t, :] if `positions` is defined, with t the
/// last index of numbers (.., T). Table and positions, of one dtype and width, have two dimensions.
/// On a GPU a number outside the table gives a row of NaN.
engine::Tensor look_up_rows(engine::Tape& tape, const RowLookup& op, const engine::Tensor& numbers,
                            const engine::Tensor& table, const engine::Tensor& positions = {});

/// Adds row i of dy to row numbers[i] of `grad`, in the order of i, in f32 with one rounding per
/// element; other rows are 0 or, with grad.accumulate, what they were. On a GPU numbers outside the
/// table are left out. `detail` is that of the work.
void launch_row_scatter(const engine::Tape& tape, const RowLookup& op,
                        const engine::GradTarget& grad, const engine::Tensor& dy,
                        const engine::Tensor& numbers, const std::string& detail = {});

/// launch_row_scatter() of positions: row i of dy goes to row i % num_tokens.
void launch_position_scatter(const engine::Tape& tape, const RowLookup& op,
                             const engine::GradTarget& grad, const engine::Tensor& dy,
                             std::int64_t num_tokens, const std::string& detail = {});

}  // namespace tessera::ops
