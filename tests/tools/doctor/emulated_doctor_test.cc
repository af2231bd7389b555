// What the doctor learns of GPUs, on the emulated device.
#include <gtest/gtest.h>

#include "engine/cuda.h"
#include "tools/doctor/gpu_checks.h"

namespace tessera::tools {
namespace {

TEST(EmulatedDoctor, NamesEveryGpu) {
  const GpuFacts facts = cuda_facts();
  ASSERT_EQ(static_cast<int>(facts.gpus.size()), engine::cuda::num_devices());
  ASSERT_FALSE(facts.gpus.empty());
  for (const Gpu& gpu : facts.gpus) {
    EXPECT_NE(gpu.name, "");
    EXPECT_GT(gpu.memory_nbytes, 0);
    EXPECT_GE(gpu.major, 8);
  }
  EXPECT_GT(facts.driver_version, 0);
  EXPECT_GT(facts.runtime_version, 0);
  const Devices devices = check_devices();
  EXPECT_EQ(devices.num_gpus, facts.gpus.size());
  ASSERT_EQ(devices.checks.size(), 2u);
  EXPECT_EQ(devices.checks[0].verdict, Verdict::kOk) << devices.checks[0].found;
  EXPECT_NE(devices.checks[0].found.find(facts.gpus[0].name), std::string::npos);
}

}  // namespace
}  // namespace tessera::tools
