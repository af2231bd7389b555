#include "tools/kernel_report/kernel_table.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "engine/device.h"
#include "engine/error.h"
#include "engine/io/file.h"
#include "tests/testing/errors.h"

namespace tessera::tools {
namespace {

using testing::error_of;

// As nvcc 13.0 says it, shortened: a function that is no kernel, and a kernel without shared
// memory.
constexpr const char* kSaid = R"(nvcc: NVIDIA (R) Cuda compiler driver
Cuda compilation tools, release 13.0, V13.0.88
file ops/b.cu
ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function '_ZN7tessera3ops37_GLOBAL__N__ec193aa5_4_xb_cu_9c9fef5d10foo_kernelIfLi4ELb1EEEvPT_' for 'sm_90'
ptxas info    : Function properties for _ZN7tessera3ops37_GLOBAL__N__ec193aa5_4_xb_cu_9c9fef5d10foo_kernelIfLi4ELb1EEEvPT_
    8 bytes stack frame, 12 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 8 bytes cumulative stack size, 4112 bytes smem, 400 bytes cmem[0]
ptxas info    : Function properties for __internal_trig_reduction_slowpath
    40 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compile time = 58.418 ms
file ops/a.cu
ptxas info    : Compiling entry function 'plain' for 'sm_90a'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 10 registers, used 0 barriers
)";

TEST(KernelTable, HoldsWhatTheCompilerSaid) {
  const KernelTable table = read_ptxas(kSaid);
  EXPECT_EQ(table.compiler, "nvcc 13.0, sm_90 and sm_90a");
  const std::vector<KernelUse> expected = {{.name = "plain", .source = "ops/a.cu", .registers = 10},
                                           {.name = "ops::foo_kernel<float, 4, true>",
                                            .source = "ops/b.cu",
                                            .registers = 40,
                                            .stack_nbytes = 8,
                                            .spill_store_nbytes = 12,
                                            .spill_load_nbytes = 16,
                                            .shared_nbytes = 4112}};
  EXPECT_EQ(table.kernels, expected);
}

TEST(KernelTable, RefusesProductsThatTheCompilerSerializes) {
  const std::string error = error_of<engine::InvalidArgument>([] {
    read_ptxas(std::string(kSaid) +
               "ptxas info    : (C7519) Potential Performance Loss: wgmma.mma_async instructions "
               "are serialized due to insufficient register resources\n");
  });
  EXPECT_NE(error.find("(C7519)"), std::string::npos) << error;
  EXPECT_NE(error.find("ops/a.cu"), std::string::npos) << error;
}

TEST(KernelTable, IsItsPageReadBack) {
  const KernelTable table = read_ptxas(kSaid);
  const KernelTable again = read_kernel_page(kernel_page(table));
  EXPECT_EQ(again.compiler, table.compiler);
  EXPECT_EQ(again.kernels, table.kernels);
  EXPECT_EQ(changes(table, again), std::vector<std::string>{});
}

TEST(KernelTable, SaysWhatChanged) {
  const KernelTable before = read_ptxas(kSaid);
  KernelTable after = before;
  after.compiler = "nvcc 13.1, sm_90";
  after.kernels[0].name = "plainer";
  after.kernels[1].spill_store_nbytes = 0;
  const std::vector<std::string> expected = {
      "compiler: nvcc 13.0, sm_90 and sm_90a -> nvcc 13.1, sm_90",
      "gone: plain (ops/a.cu): 10 registers, stack 0, spilled 0, loaded back 0, shared 0",
      "new: plainer (ops/a.cu): 10 registers, stack 0, spilled 0, loaded back 0, shared 0",
      "ops::foo_kernel<float, 4, true> (ops/b.cu): 40 registers, stack 8, spilled 12, loaded back "
      "16, shared 4112 -> 40 registers, stack 8, spilled 0, loaded back 16, shared 4112"};
  EXPECT_EQ(changes(before, after), expected);
}

TEST(KernelTable, RefusesWhatIsNone) {
  EXPECT_NE(error_of<engine::InvalidArgument>([] { read_ptxas(""); }).find("CUDA_HOME"),
            std::string::npos);
  const std::string cut =
      std::string(kSaid).substr(0, std::string(kSaid).find("ptxas info    : Used"));
  EXPECT_EQ(error_of<engine::InvalidArgument>([&] { read_ptxas(cut); }),
            "[kernel_report] expected the registers of a kernel, got none "
            "(ops::foo_kernel<float, 4, true>)");
  std::string page = kernel_page(read_ptxas(kSaid));
  page.replace(page.find("| 10 |"), 6, "| ten |");
  EXPECT_NE(error_of<engine::InvalidArgument>([&] { read_kernel_page(page); }).find("| ten |"),
            std::string::npos);
  error_of<engine::InvalidArgument>([] { read_kernel_page("# Another page\n"); });
}

// What the build itself hands to the program, of a few kernels.
TEST(KernelTable, IsMadeOfWhatTheBuildCompiles) {
  const std::string said =
      engine::read_text_file("tests/tools/kernel_report/core_kernels.txt", 1 << 20);
  if (!engine::kCudaBuilt) {
    EXPECT_EQ(said, "");
    return;
  }
  const KernelTable table = read_ptxas(said);
  EXPECT_TRUE(std::ranges::any_of(table.kernels, [](const KernelUse& k) {
    return k.source == "engine/elementwise.cu" && k.name.starts_with("engine::") && k.registers > 8;
  })) << kernel_page(table);
  EXPECT_FALSE(std::ranges::any_of(table.kernels, [](const KernelUse& k) {
    return k.name.find("_Z") != std::string::npos || k.name.find("anonymous") != std::string::npos;
  })) << kernel_page(table);
}

}  // namespace
}  // namespace tessera::tools
