// Files of chosen algorithms of matrix products.
#include "engine/gemm/gemm_algorithms.h"

#include "tests/fuzz/target.h"

namespace tessera::fuzz {

const char* const kTarget = "gemm_algorithms";

void consume(std::string_view input) {
  engine::GemmAlgorithms algorithms, again;
  algorithms.load(input, "input");
  again.load(algorithms.text(), "again");
  promise(again.text() == algorithms.text(), "expected the same algorithms again");
}

}  // namespace tessera::fuzz
