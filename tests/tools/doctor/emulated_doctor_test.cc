// What the doctor learns of GPUs, on the emulated device.
#include <gtest/gtest.h>

#include <string>

#include "comm/process_group.h"
#include "engine/cuda.h"
#include "tests/emulator/control.h"
#include "tests/tools/doctor/wrong_bit.h"
#include "tools/doctor/gpu_checks.h"
#include "tools/doctor/self_test.h"

namespace tessera::tools {
namespace {

using engine::DType;

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

TEST(EmulatedDoctor, EachGpuMultipliesAsTheCpuDoes) {
  for (const GpuFigures& figures : {try_gpu(0), try_gpu(1)}) {
    EXPECT_EQ(figures.wrong, "");
    const GpuRates& r = figures.rates;
    for (const double rate : {r.f32_gflop_per_s, r.bf16_gflop_per_s, r.copy_gb_per_s,
                              r.add_gb_per_s, r.pinned_gb_per_s}) {
      EXPECT_GT(rate, 0);
    }
  }
}

TEST(EmulatedDoctor, AWrongProductIsNoticed) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string wrong = wrong_product(
        [&](engine::MatrixView<const float> a, engine::MatrixView<const float> b,
            engine::MatrixView<float> c) {
          gpu_product(0, dtype)(a, b, c);
          c.data[c.ld * 192 + 128] += 0.1f;  // the last one
        },
        dtype, 0x1p-22);
    EXPECT_NE(wrong.find("element (192, 128)"), std::string::npos) << wrong;
  }
  // Operands that were not rounded.
  EXPECT_NE(wrong_product(gpu_product(0, DType::kBF16), DType::kF32, 0x1p-22), "");
}

TEST(EmulatedDoctor, CollectivesOfGpusAreRightAndAWrongElementFails) {
  using Op = comm::Collective::Op;
  for (const Check& check : check_gpu_collectives(3, 1003)) {
    EXPECT_NE(check.verdict, Verdict::kFail) << check.found;
    EXPECT_NE(check.found.find("3 GPUs over NCCL: values right"), std::string::npos);
  }
  for (const Op op : {Op::kAllGather, Op::kReduceScatter}) {
    const Checks checks = check_gpu_collectives(2, 1003, with_wrong_bit(op));
    ASSERT_EQ(checks.size(), 2u);
    const bool gathers = op == Op::kAllGather;
    EXPECT_EQ(checks[gathers ? 0 : 1].verdict, Verdict::kFail);
    EXPECT_NE(checks[gathers ? 0 : 1].found.find("wrong values: element"), std::string::npos);
    EXPECT_NE(checks[gathers ? 1 : 0].verdict, Verdict::kFail);
  }
}

// A GPU whose kernels fail is told, and the others are tried.
TEST(EmulatedDoctor, AGpuThatFailsIsNamed) {
  cuda_emulation::fail_malloc(0, 1, 100);
  const Checks checks = gpu_self_test(2, /*has_nccl=*/false);
  cuda_emulation::reset();
  ASSERT_EQ(checks.size(), 2u);
  EXPECT_EQ(checks[0].name, "gpu 0");
  EXPECT_EQ(checks[0].verdict, Verdict::kFail);
  EXPECT_EQ(checks[1].name, "gpu 1");
  EXPECT_NE(checks[1].verdict, Verdict::kFail) << checks[1].found;
}

}  // namespace
}  // namespace tessera::tools
