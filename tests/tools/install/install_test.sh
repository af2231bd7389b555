#!/usr/bin/env bash
# What //tools:install writes can be compiled and linked, and an installation that fails leaves nothing behind.
set -euo pipefail

install=$PWD/tools/install/install
folder=$(mktemp -d "$TEST_TMPDIR/XXXXXX")
export BUILD_WORKING_DIRECTORY=$folder

fail() { echo "FAILED: $*" >&2; exit 1; }

# refuses TEXT ARGUMENT...: the program fails and says TEXT.
refuses() {
  local text=$1 said
  shift
  if said=$("$install" "$@" 2>&1); then fail "expected an error with '$*', got success"; fi
  [[ $said == *"$text"* ]] || fail "expected '$text' with '$*', got '$said'"
}

# Names and contents of everything below a folder.
contents() { (cd "$1" && find . -type f -exec sha256sum {} + | sort -k 2 && find . -type d | sort); }

# ---- what it refuses

refuses "expected one argument"
refuses "expected one argument" one two
refuses "expected one argument" --help
touch "$folder/file"
refuses "expected a folder that can be written, got $folder/file/prefix" file/prefix

# ---- a program built from what it wrote

"$install" prefix # below the folder that `bazel run` was called in
prefix=$folder/prefix
cd "$folder"

flags() { sed -n "s|^$1: ||p" "$prefix/lib/pkgconfig/tessera.pc" | sed "s|\${prefix}|$prefix|g"; }

cat >program.cc <<'CODE'
#include <cstdio>

#include "comm/threads.h"
#include "engine/tape.h"
#include "ops/linear.h"
#include "shard/fsdp.h"

using namespace tessera;

int main() {
  comm::run_ranks(2, {}, [](comm::ProcessGroup& world) {
    const engine::Memory memory;
    engine::Tape tape(memory, engine::Stream::inline_cpu("compute"));
    engine::Parameter weight{"weight", {3, 2}, engine::Init::normal(1)};
    engine::Block block{"block", {&weight}};
    shard::Fsdp fsdp(world, memory, tape.stream(), {&block}, nullptr, {.placement = shard::Placement::preset("zero3")});
    fsdp.begin_step();
    const engine::Tensor x = tape.empty({1, 3}, engine::DType::kF32, "x");
    for (int i = 0; i < 3; ++i) x.data<float>()[i] = 1;
    const engine::Tensor y = tape.region(block, [&] { return ops::linear(tape, x, weight, nullptr); });
    if (world.rank() == 0) std::printf("%g\n", y.data<float>()[0]);
  });
}
CODE
# shellcheck disable=SC2046
g++ $(flags Cflags) program.cc $(flags Libs) -lfmt -o program
[[ $(./program) =~ ^-?[0-9.]+$ ]] || fail "expected a number from the program, got '$(./program)'"
# In a shared library, too.
# shellcheck disable=SC2046
g++ $(flags Cflags) -shared -fPIC program.cc $(flags Libs) -lfmt -o program.so

# An op and an optimizer of one's own, without nvcc: they compute on CPUs, and a GPU, here one that is not there, is refused.
cat >own.cc <<'CODE'
#include <cstdio>
#include <functional>

#include "comm/meta.h"
#include "comm/threads.h"
#include "engine/meta.h"
#include "ops/pointwise_without_nvcc.h"
#include "ops/relu.h"
#include "shard/fsdp.h"
#include "shard/optimizer/adamw.h"
#include "shard/optimizer/rule_without_nvcc.h"

using namespace tessera;

struct Cube {
  static constexpr float value(float x) { return x * x * x; }
  static constexpr float slope(float x) { return 3 * x * x; }
};

struct Descent {
  static constexpr std::size_t kNumStates = 0;
  struct Step { float lr; };
  constexpr Step prepare(double lr, double /*weight_decay*/, std::int64_t /*num_steps*/) const { return {float(lr)}; }
  static constexpr void update(const Step& s, float grad, float& p, float* /*state*/) { p -= s.lr * grad; }
};

// 1, or 0 with what it says.
int works(const std::function<void()>& fn) {
  try {
    fn();
    return 1;
  } catch (const engine::DeviceError& error) {
    std::printf("%s\n", error.what());
    return 0;
  }
}

// Of the op and of the optimizer, and of those of the library.
void use(comm::ProcessGroup& world, const engine::Stream& compute) {
  const engine::Memory memory(compute);
  engine::Tape tape(memory, compute);
  const engine::Tensor x = tape.empty({1}, engine::DType::kF32, "x");
  if (x.device().is_host()) x.data<float>()[0] = 2;
  engine::Tensor y;
  const int op = works([&] { y = ops::unary<Cube>(tape, x, "cube", {"cube.forward", 2}, {"cube.backward", 3}); });
  if (x.device().is_host()) std::printf("%g\n", y.item());
  const int relu = works([&] { ops::relu(tape, x); });
  engine::Parameter weight{"weight", {3}};
  engine::Block block{"block", {&weight}};
  shard::Fsdp fsdp(world, memory, compute, {&block}, nullptr, {});
  const int rule = works([&] { shard::RuleOptimizer<Descent>(fsdp, {}, {}, {{.name = "all"}}); });
  const int adamw = works([&] { shard::AdamW(fsdp, {}); });
  std::printf("%d %d %d %d\n", op, relu, rule, adamw);
}

int main() {
  comm::run_ranks(1, {}, [](comm::ProcessGroup& world) { use(world, engine::Stream::inline_cpu("compute")); });
  if constexpr (engine::kCudaBuilt) {
    const auto world = comm::make_meta_rank(0, 1);
    use(*world, engine::Stream::meta("compute", engine::DeviceKind::kCuda, {}));
  }
}
CODE
# shellcheck disable=SC2046
g++ $(flags Cflags) own.cc $(flags Libs) -lfmt -o own
./own >said
[[ $(head -2 said) == $'8\n1 1 1 1' ]] || fail "expected ops and optimizers on a CPU, got $(<said)"
if [[ $(flags Cflags) == *TESSERA_CUDA* ]]; then
  [[ $(tail -1 said) == "0 1 0 1" ]] || fail "expected what is built without nvcc to be refused on a GPU, and that alone, got $(<said)"
  [[ $(<said) == *"[pointwise] expected a kernel that nvcc compiled"*"(cube, meta cuda:0)"*"[optimizer] expected kernels that nvcc compiled"* ]] ||
    fail "expected errors that say what is missing, got $(<said)"
  # Without these headers the linker says what is missing.
  sed 's/_without_nvcc\.h/.h/; s|optimizer/rule\.h|optimizer/rule_optimizer.h|' own.cc >undefined.cc
  # shellcheck disable=SC2046
  if g++ $(flags Cflags) undefined.cc $(flags Libs) -lfmt -o undefined 2>errors; then fail "expected kernels to be missing"; fi
  [[ $(<errors) == *pointwise_cuda*Cube* && $(<errors) == *RuleKernels*Descent* ]] || fail "expected the linker to name kernels, got $(<errors)"
fi

# Every header finds what it includes.
(cd "$prefix/include/tessera" && find . -name '*.h' ! -name '*cuda*' -printf '#include "%P"\n') | sort >headers.cc
(($(wc -l <headers.cc) > 30)) || fail "expected all public headers, got $(<headers.cc)"
# shellcheck disable=SC2046
g++ $(flags Cflags) -fsyntax-only headers.cc

# Those that ops and optimizers of one's own begin with compile alone, too. The others do in the library: each source begins with its header.
# shellcheck disable=SC2046
(cd "$prefix/include/tessera" && printf '%s\0' ops/{pointwise*,*norm}.h shard/optimizer/*rule*.h |
  xargs -0 -n 1 -P "$(nproc)" g++ $(flags Cflags) -fsyntax-only -w -x c++) ||
  fail "expected each header to find what it needs, see above"

# What says of itself that it is private is there only where a public header needs it.
declare -A needed=()
mapfile -t queue < <(cd "$prefix/include/tessera" && grep -rLE '^//.*\bPrivate to ' . | sed 's|^\./||')
(($(printf '%s\n' "${queue[@]}" | grep -c '^ops/') > 30)) || fail "expected public headers, got ${queue[*]}"
while ((${#queue[@]})); do
  header=${queue[0]}
  queue=("${queue[@]:1}")
  if [[ ${needed[$header]:-} ]]; then continue; fi
  needed[$header]=1
  mapfile -t -O "${#queue[@]}" queue < <(sed -n 's/^ *#include "\([^" ]*\)".*/\1/p' "$prefix/include/tessera/$header")
done
while IFS= read -r header; do
  [[ ${needed[$header]:-} ]] || fail "expected no private header that no public one includes, got $header"
done < <(cd "$prefix/include/tessera" && find . -name '*.h' -printf '%P\n' -o -name '*.cuh' -printf '%P\n')
[[ ${needed[ops/column_sums.h]:-} && ! -e $prefix/include/tessera/ops/attention_cuda.h ]] || fail "expected column_sums.h, and not attention_cuda.h"

# So does what kernels of one's own include, wherever nvcc is.
for header in ops/pointwise.cuh shard/optimizer/rule_kernels.cuh; do
  [[ -f $prefix/include/tessera/$header ]] || fail "expected $header in the installation"
done
while IFS= read -r header; do
  [[ -f $prefix/include/tessera/$header ]] || fail "expected $header in the installation, which its headers include"
done < <(grep -rhoP '^ *#include "\K[^" ]+(?=")' "$prefix/include/tessera" | sort -u)
[[ $(sed -n 's/^nvcc_cflags=//p' "$prefix/lib/pkgconfig/tessera.pc") == *--expt-relaxed-constexpr*-fmad=false*-DFMT_USE_CONSTEXPR=1*-Xcompiler=-ffp-contract=off* ]] ||
  fail "expected flags for nvcc in the package, got $(<"$prefix/lib/pkgconfig/tessera.pc")"

# An older standard is one error.
# shellcheck disable=SC2046
if g++ $(flags Cflags) -std=c++17 -fsyntax-only program.cc 2>errors; then fail "expected C++17 to be refused"; fi
[[ $(grep -c 'error:' errors) == 1 && $(<errors) == *"Tessera needs C++20"* ]] || fail "expected one error, got $(<errors)"

# ---- over an older installation

echo "// gone" >"$prefix/include/tessera/engine/gone.h"
touch "$prefix/include/other.h"
older=$(contents "$prefix")

# Whichever move fails, the older installation is there as it was.
mkdir shims
cat >shims/mv <<'CODE'
#!/usr/bin/env bash
echo >>"$MOVES"
if (($(wc -l <"$MOVES") == FAILING)); then exit 1; fi
exec /usr/bin/mv "$@"
CODE
chmod +x shims/mv
export MOVES=$folder/moves
cd - >/dev/null
export FAILING=0
: >"$MOVES"
PATH=$folder/shims:$PATH "$install" prefix
num_moves=$(wc -l <"$MOVES")
echo "// gone" >"$prefix/include/tessera/engine/gone.h"
for ((FAILING = 1; FAILING <= num_moves; ++FAILING)); do
  : >"$MOVES"
  if PATH=$folder/shims:$PATH "$install" prefix; then fail "expected an error when move $FAILING fails"; fi
  [[ $(contents "$prefix") == "$older" ]] || fail "expected the older installation after move $FAILING failed"
done

((num_moves >= 10)) || fail "expected five items to be moved away and five to their places, got $num_moves moves"

# Of an installation with Gloo over one without, and the other way round.
plugin=$prefix/lib/libtessera_gloo.so
if [[ -e comm/libtessera_gloo.so ]]; then rm "$plugin"; else touch "$plugin"; fi
"$install" prefix
[[ $(stat -c %s "$plugin" 2>/dev/null) == $(stat -Lc %s comm/libtessera_gloo.so 2>/dev/null) ]] || fail "expected the plug-in of this build in the installation, or none"
[[ ! -e $prefix/include/tessera/engine/gone.h ]] || fail "expected no header of the older installation"
[[ -e $prefix/include/other.h ]] || fail "expected what others installed to stay"
[[ -z $(find "$prefix" -name '.tessera-install*') ]] || fail "expected no temporary folder"

# A place that is taken by something else.
mkdir "$folder/taken"
touch "$folder/taken/lib"
before=$(contents "$folder/taken")
if "$install" taken; then fail "expected an error where lib is a file"; fi
[[ $(find "$folder/taken" -type f) == "$folder/taken/lib" ]] || fail "expected nothing in the folder, got $(contents "$folder/taken"), before $before"
echo passed
