// Rows to experts and back: where they go, and gradients.
#include "ops/dispatch.h"

#include <vector>

#include "engine/copy.h"
#include "tests/testing/errors.h"
#include "tests/testing/gradcheck.h"

namespace tessera::ops {
namespace {

using namespace tessera::testing;  // NOLINT: the harness
using engine::InvalidArgument;
using engine::Memory;
using engine::Stream;

// Four tokens, two choices each, three buffers of two rows: one choice has no place, row 1 of
// buffer 1 has no token.
const std::vector<std::int32_t> kSlots = {0, 4, 1, -1, 2, 5, -1, -1};

Tensor slots_in(const Memory& memory) {
  const Tensor slots = Tensor::empty(memory, {4, 2}, DType::kI32, "slots");
  slots.copy_from_host(kSlots.data(), 8);
  return slots;
}

TEST(Dispatch, PutsRowsWhereTheirSlotsAre) {
  const Memory memory({.poison = true});
  Tape tape(memory, Stream::inline_cpu("compute"));
  const Tensor x = Tensor::from<float>(memory, {4, 2}, std::vector<float>{1, 2, 3, 4, 5, 6, 7, 8});
  const std::vector<Tensor> buffers = dispatch(tape, x, slots_in(memory), 3, 2);
  ASSERT_EQ(buffers.size(), 3u);
  using Values = std::vector<float>;
  EXPECT_EQ(engine::to_vector<float>(buffers[0]), (Values{1, 2, 3, 4}));
  EXPECT_EQ(engine::to_vector<float>(buffers[1]), (Values{5, 6, 0, 0}));
  EXPECT_EQ(engine::to_vector<float>(buffers[2]), (Values{1, 2, 5, 6}));
  const Tensor gates =
      Tensor::from<float>(memory, {4, 2}, Values{0.5f, 0.25f, 2, 9, 1, 3, 9, 9}, "gates");
  const Tensor y = combine(tape, buffers, gates, slots_in(memory));
  EXPECT_EQ(engine::to_vector<float>(y), (Values{0.75f, 1.5f, 6, 8, 20, 24, 0, 0}));
  EXPECT_EQ(tape.num_entries(), 0u) << "no gradient is wanted of data";
}

OpCase dispatch_case(std::int64_t width, std::size_t kept) {
  return {.inputs = {{4, width}}, .build = [kept](Tape& tape, const auto& x, auto&) {
            // Buffers that are left out have no gradient.
            return dispatch(tape, x[0], slots_in(tape.memory()), 3, 2)[kept];
          }};
}

OpCase combine_case(std::int64_t width) {
  return {.inputs = {{2, width}, {2, width}, {2, width}},
          .parameters = {},
          .build = [](Tape& tape, const auto& x, auto&) {
            const Tensor gates = Tensor::from<float>(
                tape.memory(), {4, 2}, std::vector<float>{0.5f, 0.25f, 2, 9, 1, 3, 9, 9});
            return combine(tape, {x[0], x[1], x[2]}, gates, slots_in(tape.memory()));
          }};
}

// Gates are f32 whatever the buffers are.
OpCase gates_case(std::int64_t width) {
  return {.inputs = {{4, 2}, {2, width}, {2, width}, {2, width}},
          .build = [](Tape& tape, const auto& x, auto&) {
            return combine(tape, {x[1], x[2], x[3]}, x[0], slots_in(tape.memory()));
          }};
}

TEST(Dispatch, GradientsAreThoseOfDifferences) {
  for (const std::int64_t width : {1, 5}) {
    for (const std::size_t kept : {0, 1, 2}) {
      check_gradients(dispatch_case(width, kept));
      check_bf16(dispatch_case(width, kept));
    }
    check_gradients(combine_case(width));
    check_bf16(combine_case(width));
    check_gradients(gates_case(width));
  }
}

TEST(Dispatch, RefusesWhatDoesNotFit) {
  const Memory memory;
  Tape tape(memory, Stream::inline_cpu("compute"));
  const auto zeros = [&](const Shape& shape) {
    return Tensor::zeros(memory, shape, DType::kF32, "x");
  };
  const Tensor slots = slots_in(memory);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                    dispatch(tape, zeros({3, 2}), slots, 3, 2);
                  }),
                  {"[dispatch]", "(3, k)", "(4, 2)"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                    dispatch(tape, zeros({4, 2}), slots, 999, 2);
                  }),
                  {"1 to 128", "999"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                    combine(tape, {zeros({2, 2}), zeros({2, 3})}, zeros({4, 2}), slots);
                  }),
                  {"one shape", "(2, 3)"}));
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                    combine(tape, {zeros({2, 2})}, zeros({4, 1}), slots);
                  }),
                  {"gates (4, 2)", "(4, 1)"}));
  const Tensor twice = zeros({2, 2});
  EXPECT_NO_THROW(combine(tape, {twice, twice}, zeros({4, 2}), slots));  // without its gradient
  tape.watch(twice);
  EXPECT_TRUE(has(error_of<InvalidArgument>([&] {
                    combine(tape, {twice, zeros({2, 2}), twice}, zeros({4, 2}), slots);
                  }),
                  {"[combine]", "twice"}));
}

}  // namespace
}  // namespace tessera::ops
