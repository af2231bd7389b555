// What of the environment is told because nothing heeds it.
#include "tools/machine/environment.h"

#include <gtest/gtest.h>
#include <stdlib.h>

namespace tessera::tools {
namespace {

TEST(Environment, IsReadAsItStands) {
  ::setenv("ENVIRONMENT_TEST", "a=b", 1);
  EXPECT_EQ(environment().at("ENVIRONMENT_TEST"), "a=b");
}

TEST(Environment, WhatBeginsAsOursAndIsNotReadIsTold) {
  const Environment all = {
      {"TESSERA_CPU_GEMM", "eigen"}, {"TESSERA_CPU_ISA", "v3"}, {"TESSERA_CPU_THREADS", "2"},
      {"TESSERA_CPU_TREADS", "2"},   {"TESSERA_", ""},          {"TESSERACT", "1"},
      {"MY_TESSERA_X", "1"},         {"tessera_cpu_isa", "v3"}};
  EXPECT_EQ(unread_variables(all), (std::vector<std::string>{"TESSERA_", "TESSERA_CPU_TREADS"}));
  EXPECT_TRUE(unread_variables({}).empty());
}

TEST(Environment, ALauncherIsOneFromTwoProcessesOn) {
  const auto num = [](const Environment& environment) {
    return launched(environment).num_processes;
  };
  for (const char* size : {"WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    EXPECT_TRUE(is_launch_size(size));
    EXPECT_EQ(num({{size, "2"}}), 2) << size;
    EXPECT_EQ(num({{size, "64"}}), 64) << size;
    EXPECT_EQ(launched({{size, "2"}}).variables, std::string(size) + "=2");
    for (const char* none : {"1", "0", "", "-3", "2(x2)", "many"}) {
      EXPECT_EQ(num({{size, none}}), 1) << size << none;
      EXPECT_EQ(launched({{size, none}}).variables, "");
    }
  }
  for (const char* rank : {"RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"}) {
    EXPECT_FALSE(is_launch_size(rank));
    EXPECT_EQ(num({{rank, "0"}}), 1) << rank;
    EXPECT_EQ(num({{rank, "1"}}), 2) << rank;
  }
  const Launched both = launched({{"RANK", "3"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}});
  EXPECT_EQ(both.num_processes, 8);
  EXPECT_EQ(both.variables, "WORLD_SIZE=8, RANK=3");
}

TEST(Environment, CountsAreWholeNumbers) {
  EXPECT_EQ(count_of("12"), 12);
  for (const char* none : {"", "x", "1x", "-1", "1.5", "99999999999"}) EXPECT_EQ(count_of(none), 0);
}

}  // namespace
}  // namespace tessera::tools
