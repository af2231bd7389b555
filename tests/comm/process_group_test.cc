// The conformance suite on CPU ranks.
#include "comm/threads.h"
#include "tests/comm/process_group_faults.h"
#include "tests/comm/process_group_suite.h"

namespace tessera::comm {
namespace {

INSTANTIATE_TEST_SUITE_P(
    Backends, ProcessGroupTest,
    ::testing::Values(Backend{
        .name = "threads",
        .run =
            [](int size, milliseconds deadline, const RankFunction& fn) {
              return said_by_threads(size, fn, [&](const auto& each) {
                run_ranks(size, {.deadline = deadline}, each);
              });
            },
        .here = [](int, std::string name,
                   auto options) { return Stream::inline_cpu(std::move(name), options); },
        .beside = [](int, std::string name,
                     auto options) { return Stream::worker_cpu(std::move(name), options); }}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace tessera::comm
