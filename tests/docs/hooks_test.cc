// docs/hooks.md: what it shows of C++ is this program.
#include <gtest/gtest.h>

#include "comm/threads.h"
#include "engine/tape.h"
#include "shard/fsdp.h"
#include "shard/hooks/hook.h"
#include "shard/hooks/hooks.h"
#include "tests/docs/shown.h"

namespace tessera {
namespace {

TEST(HooksPage, MakesAHook) {
  comm::run_ranks(2, {}, [](comm::ProcessGroup& world) {
    const auto compute = engine::Stream::inline_cpu("compute");
    const engine::Memory memory;
    engine::Parameter weight = {"w", {64, 64}, engine::Init::zeros()};
    engine::Block block = {"block", {&weight}};
    shard::FsdpOptions options{.placement = shard::Placement::preset("zero3")};
    // clang-format off
    options.reducer = shard::make_hook({.kind = shard::HookKind::kPowerSgd, .powersgd = {.start_step = 100}});
    // clang-format on
    const shard::HookOptions hook{.kind = shard::HookKind::kPowerSgd,
                                  .powersgd = {.start_step = 100}};
    options.reducer_text = describe(hook);
    const shard::Fsdp fsdp(world, memory, compute, {&block}, nullptr, options);
    EXPECT_NE(dynamic_cast<shard::HookReducer*>(fsdp.units().front()->reducer()), nullptr);
    EXPECT_NE(options.reducer_text.find("start_step 100"), std::string::npos);
  });
}

TEST(HooksPage, ShowsWhatIsHere) {
  testing::expect_shown("docs/hooks.md", "tests/docs/hooks_test.cc", 1);
}

}  // namespace
}  // namespace tessera
