// What the environment holds, and what of it is told because nothing heeds it.
#include "tools/machine/environment.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <optional>

#include "tools/machine/environment_variable.h"

namespace tessera::tools {
namespace {

TEST(Environment, IsReadAsItStands) {
  ::setenv("ENVIRONMENT_TEST", "a=b", 1);
  EXPECT_EQ(environment().at("ENVIRONMENT_TEST"), "a=b");
}

TEST(Environment, AVariableThatIsEmptyIsSet) {
  ::setenv("ENVIRONMENT_TEST", "", 1);
  EXPECT_EQ(environment_variable("ENVIRONMENT_TEST"), "");
  ::setenv("ENVIRONMENT_TEST", "a=b", 1);
  EXPECT_EQ(environment_variable("ENVIRONMENT_TEST"), "a=b");
  ::unsetenv("ENVIRONMENT_TEST");
  EXPECT_EQ(environment_variable("ENVIRONMENT_TEST"), std::nullopt);
}

TEST(Environment, WhatBeginsAsOursAndIsNotReadIsTold) {
  const Environment all = {
      {"TESSERA_CPU_GEMM", "eigen"}, {"TESSERA_CPU_ISA", "v3"}, {"TESSERA_CPU_THREADS", "2"},
      {"TESSERA_CPU_TREADS", "2"},   {"TESSERA_", ""},          {"TESSERACT", "1"},
      {"MY_TESSERA_X", "1"},         {"tessera_cpu_isa", "v3"}};
  EXPECT_EQ(unread_variables(all), (std::vector<std::string>{"TESSERA_", "TESSERA_CPU_TREADS"}));
  EXPECT_TRUE(unread_variables({}).empty());
}

TEST(Environment, CountsAreWholeNumbers) {
  EXPECT_EQ(count_of("12"), 12);
  for (const char* none : {"", "x", "1x", "-1", "1.5", "99999999999"}) EXPECT_EQ(count_of(none), 0);
}

}  // namespace
}  // namespace tessera::tools
