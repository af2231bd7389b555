// Who multiplies, and where, in words that two runs are told apart by.
#include "tools/launch/arithmetic.h"

#include <gnu/libc-version.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "engine/gemm/gemm.h"
#include "engine/io/json.h"
#include "engine/isa.h"
#include "tests/testing/errors.h"
#include "tests/testing/temp_folder.h"
#include "tools/machine/cpu_model.h"

namespace tessera::tools {
namespace {

using testing::has;

TEST(Arithmetic, OnACpuHasItsModelAndAllElseThatRoundsSums) {
  const std::string text = arithmetic_text(Ranks(), "", nullptr);
  for (const std::string& line :
       {"cpu = " + engine::json_literal(cpu_model()),
        "cpu.isa = " + engine::json_literal(name_of(engine::isa())),
        "cpu.gemm = " + engine::json_literal(engine::gemm_library()),
        "cpu.threads_per_rank = " + std::to_string(engine::threads_per_product()),
        "libc = " + engine::json_literal(gnu_get_libc_version()),
        std::string("device = \"cpu\"")}) {
    EXPECT_TRUE(has("\n" + text, {"\n" + line + "\n"})) << text;
  }
}

TEST(CpuModel, IsTheNameThatTheSystemGives) {
  std::ifstream info("/proc/cpuinfo");
  const std::string all{std::istreambuf_iterator<char>(info), {}};
  EXPECT_EQ(cpu_model() != "unknown processor", has(all, {"model name\t: "}));
  EXPECT_NE(cpu_model(), "");
  const testing::TempFolder folder;
  std::filesystem::create_directory(folder / "proc");
  folder.write("proc/cpuinfo", "processor\t: 0\nmodel name\t: A \"fast\" one\nstepping\t: 1\n");
  EXPECT_EQ(cpu_model(folder.path()), "A \"fast\" one");
  folder.write("proc/cpuinfo", "processor\t: 0\n");
  EXPECT_EQ(cpu_model(folder.path()), "unknown processor");
}

}  // namespace
}  // namespace tessera::tools
