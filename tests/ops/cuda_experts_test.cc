// Router, dispatch and combine on a GPU against the CPU.
#include "ops/add.h"
#include "ops/dispatch.h"
#include "ops/route.h"
#include "tests/testing/cuda_op.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness

// x (N, C) through num_experts experts that pass rows on as they are; logits (N, E) are a leaf.
OpCase experts_case(std::int64_t n, std::int64_t num_experts, std::int64_t width,
                    RouteOptions options) {
  return {.inputs = {{n, num_experts}, {n, width}}, .build = [=](Tape& tape, const auto& x, auto&) {
            const Routing r = route(tape, x[0], options);
            const auto rows = dispatch(tape, x[1], r.slots, num_experts, options.capacity);
            return combine(tape, rows, r.gates, r.slots);
          }};
}

// Two rows of each token are weighed with the same gates.
OpCase shared_gates_case(std::int64_t n, std::int64_t num_experts, std::int64_t width,
                         RouteOptions options) {
  return {.inputs = {{n, num_experts}, {n, width}}, .build = [=](Tape& tape, const auto& x, auto&) {
            const Routing r = route(tape, x[0], options);
            const auto rows = dispatch(tape, x[1], r.slots, num_experts, options.capacity);
            return add(tape, combine(tape, rows, r.gates, r.slots),
                       combine(tape, rows, r.gates, r.slots));
          }};
}

OpCase aux_case(std::int64_t n, std::int64_t num_experts, RouteOptions options) {
  return {.inputs = {{n, num_experts}}, .build = [=](Tape& tape, const auto& x, auto&) {
            return route(tape, x[0], options).aux;
          }};
}

TEST(CudaExperts, AreThoseOfTheCpu) {
  check_cuda(experts_case(1, 1, 1, {1, 1, false}), {0, 0});
  check_cuda(experts_case(37, 5, 33, {2, 9, false}), {0, 0});
  check_cuda(experts_case(300, 9, 8, {3, 120, true}), {0, 0});
  check_cuda(shared_gates_case(37, 5, 33, {2, 9, false}), {0, 0});
  check_cuda(aux_case(37, 5, {2, 9, true}), {0, 0});
  check_cuda(aux_case(5, 300, {1, 1, false}), {0, 0});  // more experts than a block has threads
}

}  // namespace
}  // namespace tessera::ops
