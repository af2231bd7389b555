// Tokens to the experts that were chosen for them, and what those made of them back to the tokens.
//
//   Routing r = route(tape, linear(tape, x, w_router, nullptr), {.k = 2, .capacity = c});
//   std::vector<Tensor> rows = dispatch(tape, x, r.slots, num_experts, c);
//   for (...) rows[e] = expert(e, rows[e]);
//   y = combine(tape, rows, r.gates, r.slots);
#pragma once

#include <cstdint>
#include <vector>

#include "engine/tape.h"

namespace tessera::ops {

/// As many buffers as dispatch() and combine() take.
inline constexpr int kMaxExpertBuffers = 128;

/// Row slots[n, j] of `num_buffers` buffers of `rows` rows one after the other becomes x[n]; rows
/// that no token has a place in are zero, and a token without a place (-1) goes nowhere.
///   x (N, C) f32 or bf16, slots (N, k) i32 of route() -> num_buffers times (rows, C). Saves slots.
///   Throws InvalidArgument if shapes do not fit, and on the CPU for a slot that no buffer has (on
///   a GPU such a token goes nowhere).
std::vector<engine::Tensor> dispatch(engine::Tape& tape, const engine::Tensor& x,
                                     const engine::Tensor& slots, std::int64_t num_buffers,
                                     std::int64_t rows);

/// y[n] = sum_j gates[n, j] row(slots[n, j]), in f32 with one rounding; no place: no summand.
///   buffers of dispatch()'s shapes, gates (N, k) f32, slots (N, k) i32 -> (N, C). Saves slots; the
///   gates if somebody wants the gradient of a buffer, and the buffers if somebody wants that of
///   the gates. Throws InvalidArgument if shapes do not fit, or for one buffer twice where somebody
///   wants its gradient.
engine::Tensor combine(engine::Tape& tape, const std::vector<engine::Tensor>& buffers,
                       const engine::Tensor& gates, const engine::Tensor& slots);

}  // namespace tessera::ops
