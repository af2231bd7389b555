// Matrix products where there is no memory for what the library writes.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "engine/cpu_choice.h"
#include "engine/gemm/gemm.h"
#include "engine/out_of_memory.h"
#include "tests/testing/errors.h"
#include "tests/testing/sanitizers.h"

namespace tessera::engine {
namespace {

// With less address space left than the library's kernels might need; then with enough.
[[noreturn]] void multiply_without_memory() {
  testing::say_and_exit([] {
    choose_cpu({.gemm = CpuGemm::kOneDnn, .threads_per_product = 1});
    std::vector<float> a(64 * 64, 1), b(64 * 64, 1), c(64 * 64, 0);
    const auto multiply = [&] {
      gemm({a.data(), 64, 64, 64}, {b.data(), 64, 64, 64}, {c.data(), 64, 64, 64}, false);
    };
    rlimit before{}, limit{};
    getrlimit(RLIMIT_AS, &before);
    limit = before;
    std::int64_t num_pages = 0;
    std::ifstream("/proc/self/statm") >> num_pages;
    limit.rlim_cur = static_cast<rlim_t>(num_pages * ::getpagesize() + (16 << 20));
    setrlimit(RLIMIT_AS, &limit);
    const std::string error = testing::error_of<OutOfMemory>(multiply);
    setrlimit(RLIMIT_AS, &before);
    multiply();
    return error + "; then " + std::to_string(static_cast<int>(c[0]));
  });
}

TEST(GemmMemoryDeathTest, NoMemoryForKernelsIsAnErrorAndNoCrash) {
  if (testing::kIsSlow) return;  // a sanitizer needs address space of its own
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  EXPECT_EXIT(
      multiply_without_memory(), ::testing::ExitedWithCode(0),
      "\\[\\[onednn\\] expected [0-9]+ bytes for the kernels of dnnl_sgemm, got none from the "
      "system; then 64\\]|expected libdnnl.so.2, got none");
}

}  // namespace
}  // namespace tessera::engine
