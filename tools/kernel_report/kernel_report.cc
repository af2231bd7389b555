// What every CUDA kernel of the engine takes of a GPU, from the compiler. No GPU is needed.
#include <fmt/format.h>

#include <cstdint>
#include <iostream>
#include <string>
#include <vector>

#include "engine/io/file.h"
#include "tools/cli/flags.h"
#include "tools/cli/main.h"
#include "tools/kernel_report/kernel_table.h"

namespace tessera::tools {
namespace {

constexpr std::int64_t kMaxNbytes = std::int64_t{16} << 20;

// Returns the exit code.
int run(int argc, char** argv) {
  std::string compare, compiled = "tools/kernel_report/kernels.txt";
  FlagSet flags("kernel_report",
                "Prints the registers, the spills and the shared memory of every CUDA kernel, as a "
                "page of the docs. No GPU is needed.");
  flags.add("compare", &compare,
            {.help = "a page printed before: prints what changed instead; exit code 1 if any did"});
  flags.add("compiled", &compiled,
            {.help = "what the compiler said (third_party/cuda/defs.bzl: kernel_reports)"});
  if (!flags.parse(argc, argv, std::cout)) return 0;
  if (flags.is_given("compiled")) compiled = resolve_user_path(compiled);
  const KernelTable table = read_ptxas(engine::read_text_file(compiled, kMaxNbytes));
  if (compare.empty()) {
    fmt::print("{}", kernel_page(table));
    return 0;
  }
  const auto before =
      read_kernel_page(engine::read_text_file(resolve_user_path(compare), kMaxNbytes));
  const std::vector<std::string> lines = changes(before, table);
  for (const std::string& line : lines) fmt::print("{}\n", line);
  if (lines.empty()) fmt::print("{} kernels as before\n", table.kernels.size());
  return lines.empty() ? 0 : 1;
}

}  // namespace
}  // namespace tessera::tools

int main(int argc, char** argv) {
  int code = 0;
  const int error = tessera::tools::run_main([&] { code = tessera::tools::run(argc, argv); });
  return error != 0 ? error : code;
}
