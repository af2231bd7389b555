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

# Every header finds what it includes.
(cd "$prefix/include/tessera" && find . -name '*.h' ! -name '*cuda*' -printf '#include "%P"\n') | sort >headers.cc
(($(wc -l <headers.cc) > 30)) || fail "expected all public headers, got $(<headers.cc)"
# shellcheck disable=SC2046
g++ $(flags Cflags) -fsyntax-only headers.cc

# Those that ops and optimizers of one's own begin with compile alone, too.
# shellcheck disable=SC2046
(cd "$prefix/include/tessera" && find ops shard/optimizer -name '*.h' -print0 | xargs -0 -n 1 -P "$(nproc)" g++ $(flags Cflags) -fsyntax-only -w -x c++) ||
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
