#!/usr/bin/env bash
# Checks Tessera on this machine's GPU in one call. Part of the folder that //tools:gpu_bundle writes; needs neither
# Bazel nor a compiler: a driver for CUDA 13, libcublasLt.so.13 and what every Linux has.
set -euo pipefail

usage() {
  cat <<'EOF'
usage: gpu_check.sh [option...] [folder for the results: ./gpu_check_out]

  --budget=SECONDS      for everything (540). What there is no time for is named as skipped
  --parts=LIST          of machine,gemm,ops,attention,tests,losses,profile,trace,kernels,sanitizer,steps (all); machine always runs
                        on a GPU, and the parts share the time, so that one alone has all of it
  --plan=1|2|3          everything, for a machine that is lent for ten minutes at a time, bare:
                        1  machine,gemm,ops,attention, and steps of 124M next to torch.compile
                        2  machine,tests,losses,profile,trace,kernels
                        3  machine,sanitizer, and steps of 350M, 1.5B, and 124M next to eager PyTorch
  --device=cuda|cpu     cpu: the losses alone, as a check of the golden ones
  --small               sizes of a moment, no figures: for the emulated device
  --write-golden=FILE   trains on the CPU and writes the losses that the GPU is compared with; nothing else

machine    what is here, and what the GPU reaches: bytes copied, matrix products
gemm       every matrix product of GPT-2 124M: by the first algorithm that cublasLt proposes, and by the fastest
ops        the GPU tests of ops, one program after the other
attention  a layer's attention by mma.sync and by wgmma, forward and backward
tests      all other GPU tests
losses     both trainers on the GPU: the loss of each step next to that on the CPU
profile    a step of GPT-2 124M by kernel and shape
trace      what it costs that a trace listens: steps of GPT-2 124M without one, with one that records no step, and every step
kernels    attention, cross-entropy and norms under Nsight Compute, if it is here
sanitizer  the tests of ops under compute-sanitizer, as far as the time goes
steps      whole steps of GPT-2, launch by launch and as CUDA graphs, next to PyTorch's if python3 has torch

Writes report.txt and results.jsonl (one JSON object a line) as it goes. A part that fails ends no other; without a GPU nothing
runs. Exit code 0 when nothing failed.
EOF
}

die() { echo "gpu_check: $*" >&2; exit 2; }

here=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd)
budget=540
all=machine,gemm,ops,attention,tests,losses,profile,trace,kernels,sanitizer,steps
parts=
# Of steps, a line each: models|batches|ways of PyTorch|kernels of attention, which are the GPU's best if none are named.
trainings="\
gpt2|16,64,max|eager,compile
gpt2|64||mma
gpt2-medium|16,max|eager,compile
gpt2-xl|8|compile"
device=cuda
small=
golden=
out=
for argument; do
  case $argument in
    --budget=*) budget=${argument#*=} ;;
    --parts=*) parts=${argument#*=} ;;
    --plan=1) parts=${parts:-machine,gemm,ops,attention,steps} trainings=$'gpt2|64,max|compile\ngpt2|64||mma' ;;
    --plan=2) parts=${parts:-machine,tests,losses,profile,trace,kernels} ;;
    --plan=3)
      parts=${parts:-machine,sanitizer,steps}
      trainings=$'gpt2-medium|16,max|compile\ngpt2-xl|8,max|compile\ngpt2-xl|8||mma\ngpt2|64|eager\ngpt2-medium|16|eager'
      ;;
    --device=cuda | --device=cpu) device=${argument#*=} ;;
    --small) small=1 ;;
    --write-golden=*) golden=$(realpath -m -- "${argument#*=}") ;;
    --help) usage; exit 0 ;;
    -*) usage >&2; die "expected an option from above, got $argument" ;;
    *) out=$argument ;;
  esac
done
[[ $budget =~ ^[0-9]+$ ]] || die "expected whole seconds, got --budget=$budget"
parts=${parts:-$all}
for part in ${parts//,/ }; do
  [[ ,$all, == *,$part,* ]] || die "expected parts from --help, got $part"
done
out=$(realpath -m -- "${out:-gpu_check_out}")

work=$(mktemp -d)
torch_pid=
trap 'if [[ $torch_pid ]]; then kill "$torch_pid" 2>/dev/null || true; fi; rm -rf -- "$work"' EXIT
passed=0
failed=0
skipped=0
say() { echo "$*" | tee -a "$report"; }
section() { say; say "== $* ($SECONDS s)"; }
# One line of the results; the arguments are "name": value pairs of JSON, as text.
record() { echo "{$*}" >>"$results"; }
# A text as a JSON string.
quote() {
  local text
  text=$(printf '%s' "$1" | LC_ALL=C tr -c '[:print:]' ' ')
  text=${text//\\/\\\\}
  printf '"%s"' "${text//\"/\\\"}"
}
skip() { say "skipped: $*"; record "\"part\":\"skipped\",\"what\":$(quote "$*")"; skipped=$((skipped + 1)); }
left() { echo $((budget - SECONDS)); }
wants() { [[ ,$parts, == *,$1,* ]]; }
# Seconds that part $1 may take: its part of what is left, which it shares with those after it.
declare -A weights=([machine]=4 [gemm]=12 [ops]=20 [attention]=6 [tests]=30 [losses]=6 [profile]=8 [trace]=8 [kernels]=8 [sanitizer]=30 [steps]=50)
share() {
  local part sum=0 later=
  for part in ${all//,/ }; do
    if [[ $part == "$1" ]]; then later=1; fi
    if [[ $later ]] && wants "$part"; then sum=$((sum + weights[$part])); fi
  done
  echo $(($(left) * weights[$1] / sum))
}

# ---- what this machine has

# The folder that holds library $1, or nothing.
library_folder() {
  local folder file
  for folder in ${LD_LIBRARY_PATH//:/ } /usr/local/cuda/lib64 /usr/local/cuda*/lib64 /usr/local/cuda*/targets/*-linux/lib; do
    if [[ -e $folder/$1 ]]; then echo "$folder"; return; fi
  done
  file=$({ ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null | awk -v name="$1" '$1 == name { print $NF; exit }')
  if [[ -e $file ]]; then dirname -- "$file"; return; fi
  command -v python3 >/dev/null || return 0
  python3 - "$1" <<'EOF' 2>/dev/null || true
import glob, os, site, sys
for folder in sys.path + site.getsitepackages():
    found = sorted(glob.glob(os.path.join(folder or ".", "nvidia", "*", "lib", sys.argv[1])))
    if found:
        print(os.path.dirname(found[-1]))
        break
EOF
}

# Sets LD_LIBRARY_PATH for our programs, or ends with what is missing.
find_libraries() {
  local program name folder needed have absent
  grep -qw avx2 /proc/cpuinfo || die "expected a CPU with AVX2, got one without"
  needed=$(cat lib/glibc_version)
  have=$(getconf GNU_LIBC_VERSION | awk '{ print $2 }')
  [[ $(printf '%s\n' "$needed" "$have" | sort -V | head -1) == "$needed" ]] ||
    die "expected glibc $needed or later, got $have"
  program=tools/bench/gpu/bench_gpu
  python_libraries=${LD_LIBRARY_PATH:-}  # of PyTorch, which wants none of ours
  LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  for name in libcublasLt.so.13 libnccl.so.2; do
    folder=$(library_folder "$name")
    if [[ $folder ]]; then LD_LIBRARY_PATH+=:$folder; fi
  done
  LD_LIBRARY_PATH+=:/usr/local/nvidia/lib64:/usr/local/nvidia/lib
  export LD_LIBRARY_PATH
  absent=$(ldd "$program" | awk '/not found/ { print $1 }')
  [[ -z $absent ]] || die "expected $absent in LD_LIBRARY_PATH, /usr/local/cuda*/lib64, the ldconfig cache or python3's" \
    "site-packages (nvidia/*/lib), got none"
}

# Begins to look for torch, which takes a minute to load for the first time.
start_torch() {
  command -v python3 >/dev/null || return 0
  printf '#!/bin/sh\nLD_LIBRARY_PATH=%q exec python3 "$@"\n' "$python_libraries" >"$work/python"
  chmod +x "$work/python"
  timeout 240 "$work/python" -c 'import torch
assert torch.cuda.is_available()
print(torch.__version__)' >"$work/torch" 2>/dev/null &
  torch_pid=$!
}

# Sets `python` to a program that runs python3 without our libraries, if torch is there and sees the GPU.
find_torch() {
  python=
  if [[ ! $torch_pid ]] || ! wait "$torch_pid"; then
    torch_pid=
    return 0
  fi
  torch_pid=
  python=$work/python
  say "torch $(<"$work/torch")"
  record "\"part\":\"torch\",\"version\":$(quote "$(<"$work/torch")")"
}

# Runs bench_gpu with these flags into the report and the results, line by line; $1 is the limit in seconds.
bench_gpu() {
  local limit=$1 status=0
  shift
  timeout -k 10 "$limit" tools/bench/gpu/bench_gpu --bench.jsonl=>(cat >>"$results") --bench.samples=5 \
    ${small:+--bench.side=64} "$@" > >(tee -a "$report") 2>&1 || status=$?
  wait $! # for tee
  return $status
}
# The model and batches $1 and $2, or those of a moment.
sizes() {
  if [[ $small ]]; then echo "--bench.models=small --bench.batches=1"; else echo "--bench.models=$1 --bench.batches=$2"; fi
}
# Counts a run of bench_gpu as part $1, in $2 seconds.
run_bench() {
  local name=$1 limit=$2
  shift 2
  if ((limit < 10 && !${small:-0})); then skip "$name"; return; fi
  if bench_gpu "$limit" "$@"; then
    passed=$((passed + 1))
  else
    failed=$((failed + 1))
    say "failed: $name"
    record "\"part\":\"failed\",\"what\":$(quote "$name")"
  fi
}

run_machine() {
  section "machine"
  say "$(date -u +%Y-%m-%dT%H:%M:%SZ), kernel $(uname -r), glibc $(getconf GNU_LIBC_VERSION | awk '{ print $2 }')"
  if command -v nvidia-smi >/dev/null; then
    nvidia-smi --query-gpu=index,name,driver_version,memory.total,memory.free,clocks.max.sm,power.limit --format=csv 2>&1 |
      tee -a "$report" || true
  fi
  local gpu
  gpu=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader -i 0 2>/dev/null || true)
  record "\"part\":\"gpu\",\"name\":$(quote "$gpu"),\"date\":\"$(date -u +%F)\""
  say "libraries: $LD_LIBRARY_PATH"
  # Without a GPU all else is pointless.
  if ! timeout -k 10 120 tools/programs/train_mlp --device=cuda --plan >"$work/log" 2>&1 && grep -q '\[device\]' "$work/log"; then
    cat "$work/log" >&2
    die "expected a GPU with a driver for CUDA 13, got the error above"
  fi
  run_bench machine 200 --bench.parts=device # a cold cublasLt has half a gigabyte
}

run_gemm() {
  section "gemm"
  # shellcheck disable=SC2046 # words on purpose
  run_bench gemm "$1" --bench.parts=gemm --bench.limit_s=$(($1 - 5)) $(sizes gpt2 64)
}

run_attention() {
  section "attention"
  # shellcheck disable=SC2046 # words on purpose
  run_bench attention "$1" --bench.parts=attention --bench.limit_s=$(($1 - 5)) $(sizes gpt2 64)
}

# ---- tests

# Runs a command with a limit of $1 seconds; its output is in $work/log. Sets `status`.
limited() {
  local limit=$1
  shift
  status=0
  timeout -k 10 "$limit" "$@" >"$work/log" 2>&1 </dev/null || status=$?
}
count() { grep -cE "$1" "$work/log" || true; }
show_end() { tail -c 6000 "$work/log" | sed 's/^/    /' | tee -a "$report"; }

# Counts what the GoogleTest program $1 said, begun at $2.
judge_test() {
  local name=$1 begin=$2 ok bad skipped what=ok
  ok=$(count '^\[       OK \]')
  skipped=$(count '^\[  SKIPPED \] .* \([0-9]+ ms\)$')
  bad=$(count '^\[  FAILED  \] .* \([0-9]+ ms\)$')
  # A crash, the limit, or a program that ran nothing.
  if ((bad == 0 && (status != 0 || ok == 0))); then bad=1; fi
  if ((status == 124 || status == 137)); then what=timeout; elif ((bad)); then what=failed; fi
  passed=$((passed + ok))
  failed=$((failed + bad))
  say "$(printf '%-40s %-8s %4d passed %4d failed %5d s' "$name" "$what" "$ok" "$bad" $((SECONDS - begin)))"
  if ((skipped)); then say "    $skipped more did not run"; fi
  record "\"part\":\"test\",\"name\":$(quote "$name"),\"status\":\"$what\",\"passed\":$ok,\"failed\":$bad,\"s\":$((SECONDS - begin))"
  if ((bad)); then show_end; fi
}

# The tests of the layers from $2 on, for $1 seconds.
run_tests() {
  local end=$((SECONDS + $1)) test begin limit filter filters
  shift
  section "tests: $*"
  while read -r test; do
    limit=$((end - SECONDS))
    if ((limit < 5)); then skip "$test"; continue; fi
    # What fails in kernels that no GPU has run spoils its process, and nothing else.
    filters=('*')
    if [[ $test == */cuda_attention_test ]]; then filters=('-*Wgmma*' '*WgmmaProducts*' '*Wgmma*-*WgmmaProducts*'); fi
    for filter in "${filters[@]}"; do
      begin=$SECONDS
      limited $((limit < 100 || small ? limit : 100)) "$test" --gtest_filter="$filter"
      judge_test "$test${filter#\*}" "$begin"
    done
  done < <(for layer; do
    if [[ -d tests/$layer ]]; then find "tests/$layer" -type f -perm -u+x -name '*_test' | sort; fi
  done)
}

# ---- losses

# name|program|flags: tolerances are relative. In f32 a GPU differs by the order of its sums; in bf16 by roundings that
# those turn, which a higher learning rate makes much of.
transformer="--model.layers=2 --model.heads=2 --model.dim=128 --model.seq=64 --train.batch=2 --train.lr=0.0003 --data.val_fraction=0 --sample.tokens=0"
mlp=--data.order=sequential
runs="\
transformer f32|train_transformer|0.0001|$transformer --precision.param=f32
transformer bf16|train_transformer|0.002|$transformer --precision.param=bf16
mlp f32|train_mlp|0.0001|$mlp --precision.param=f32
mlp bf16|train_mlp|0.02|$mlp --precision.param=bf16"

# Trains on device $1 as program $2 with the words of $3; the losses, with commas between.
train() {
  local limit
  limit=$(left)
  # shellcheck disable=SC2086 # words on purpose
  timeout -k 10 $((limit > 1 ? limit : 1)) "tools/programs/$2" --device="$1" --parallel.ranks=1 --train.steps=10 --train.warmup=2 \
    --log.every=0 --out="$work/run" $3 >"$work/log" 2>&1 &&
    sed -n 's/^{"step":[0-9]*,"loss":\([^,]*\),.*/\1/p' "$work/run/log.jsonl" | paste -sd,
}

write_golden() {
  local name program tolerance flags losses
  : >"$work/golden"
  while IFS='|' read -r name program tolerance flags; do
    losses=$(train cpu "$program" "$flags") || { cat "$work/log" >&2; die "training on the CPU failed ($name)"; }
    echo "{\"run\":\"$name\",\"tolerance\":$tolerance,\"loss\":[$losses]}" >>"$work/golden"
  done <<<"$runs"
  cp -- "$work/golden" "$golden"
}

run_losses() {
  local name program tolerance flags losses want worst verdict
  section "losses of both trainers, $device, next to the CPU's"
  while IFS='|' read -r name program tolerance flags; do
    if (($(left) < 5)); then skip "losses of $name"; continue; fi
    want=$(sed -n "s/^{\"run\":\"$name\",.*\"loss\":\[\(.*\)\]}\$/\1/p" tests/golden/gpu_check_losses.jsonl)
    losses=$(train "$device" "$program" "$flags") || losses=
    # The largest relative difference, or nothing if the lists do not match.
    worst=$(awk -v got="$losses" -v want="$want" 'BEGIN {
      n = split(got, a, ","); m = split(want, b, ",")
      if (n == 0 || n != m) exit
      for (i = 1; i <= n; ++i) {
        if (a[i] !~ /^[0-9.e+-]+$/) exit
        d = (a[i] - b[i]) / b[i]; if (d < 0) d = -d
        if (d > worst) worst = d
      }
      printf "%.3g\n", worst }')
    verdict=failed
    if [[ $worst ]] && awk -v d="$worst" -v t="$tolerance" 'BEGIN { exit !(d <= t) }'; then verdict=ok; fi
    if [[ $verdict == ok ]]; then passed=$((passed + 1)); else failed=$((failed + 1)); fi
    say "$(printf '%-40s %-8s off by %s, at most %s' "$name" $verdict "${worst:-?}" "$tolerance")"
    record "\"part\":\"losses\",\"run\":\"$name\",\"status\":\"$verdict\",\"off_by\":${worst:-null},\"tolerance\":$tolerance,\"loss\":[$losses]"
    if [[ -z $losses ]]; then show_end; fi
  done <<<"$runs"
}

# ---- compute-sanitizer

# What cublasLt's kernels do is judged by memcheck alone. Racecheck may take their asynchronous copies for races, so it looks
# at kernels of ours, whose mangled names say so. Initcheck sees no store through a tensor map (a known limitation), as
# kernels of sm_90 make them, and would take results of products for memory that nobody wrote: there tests that multiply
# stay out.
run_sanitizer() {
  local end=$((SECONDS + $1)) sanitizer tool test begin limit ok bad what tests_left options left_out
  section "compute-sanitizer"
  sanitizer=$(command -v compute-sanitizer ||
    find /usr/local/cuda*/bin /usr/local/cuda*/compute-sanitizer /opt/nvidia -maxdepth 4 -name compute-sanitizer \
      -type f -perm -u+x 2>/dev/null | head -1) || true
  if [[ -z $sanitizer ]]; then skip "compute-sanitizer: not found in PATH, /usr/local/cuda*, /opt/nvidia"; return; fi
  mapfile -t tests < <(find tests/ops -type f -perm -u+x -name '*_test' | sort)
  for tool in memcheck racecheck initcheck; do
    tests_left=${#tests[@]}
    options=()
    left_out='*Many*:*MoreRows*:*Refuses*'  # many sizes are for speed's sake in the tests, and here they are slow
    case $tool in
      racecheck) options=(--kernel-name kns=tessera) ;;
      initcheck) left_out+=':*Linear*:*Fused*:*AllIgnored*:*BadTargets*:*Experts*' ;;
    esac
    for test in "${tests[@]}"; do
      # All of what is left for the first tool, the rest for the next.
      limit=$(((end - SECONDS) / tests_left))
      if ((limit > 60)); then limit=60; fi
      tests_left=$((tests_left - 1))
      if ((limit < 3)); then skip "$tool of $test"; continue; fi
      begin=$SECONDS
      limited "$limit" "$sanitizer" --tool "$tool" "${options[@]}" --report-api-errors no --error-exitcode 99 "$test" \
        "--gtest_filter=-$left_out"
      if grep -q '^=========.*not supported' "$work/log"; then
        skip "$tool: $(grep '^=========.*not supported' "$work/log" | head -1)"
        show_end
        break
      fi
      ok=$(count '^\[       OK \]')
      bad=$(count '^========= (Invalid|Uninitialized|Error: Race|Warning: Race|Error: Potential|Misaligned|Barrier error)')
      if ((status == 99 && bad == 0)); then bad=1; fi
      what=clean
      if ((bad)); then
        what=failed
        failed=$((failed + 1))
      elif ((ok == 0)); then
        skip "$tool of $test: nothing finished in $limit s"
        continue
      else
        passed=$((passed + 1))
        if ((status == 124 || status == 137)); then what="clean so far"; fi
      fi
      say "$(printf '%-10s %-40s %-12s %3d tests %4d s' "$tool" "$test" "$what" "$ok" $((SECONDS - begin)))"
      record "\"part\":\"sanitizer\",\"tool\":\"$tool\",\"name\":$(quote "$test"),\"status\":\"$what\",\"tests\":$ok,\"errors\":$bad"
      if ((bad)); then show_end; fi
    done
  done
}

# ---- kernels and steps

run_profile() {
  section "profile"
  # shellcheck disable=SC2046 # words on purpose
  run_bench profile "$1" --bench.parts=profile --bench.steps=5 $(sizes gpt2 64)
}

# Three rounds in turn, each training 30 steps of which the first 10 do not count, as far as the time goes.
run_trace() {
  local end=$((SECONDS + $1)) steps=30 warmup=10 way flags limit median none=
  local model="--model.preset=gpt2 --train.batch=16 --precision.param=bf16 --data.val_fraction=0 --sample.tokens=0"
  section "trace"
  if [[ $small ]]; then
    steps=4
    warmup=1
    model=$transformer
  fi
  rm -f -- "$work"/*.step_ms
  for _ in 1 2 3; do
    for way in none idle every; do
      limit=$((end - SECONDS))
      if ((limit < 5)); then break 2; fi
      flags=
      if [[ $way == idle ]]; then flags="--log.trace=$work/run.trace.json --log.trace_steps=1:1"; fi
      if [[ $way == every ]]; then flags="--log.trace=$work/run.trace.json --log.trace_steps=1:$steps"; fi
      # shellcheck disable=SC2086 # words on purpose
      limited "$limit" tools/programs/train_transformer --device="$device" --parallel.ranks=1 --train.steps=$steps --train.warmup=2 \
        --log.every=0 --out="$work/run" $model $flags
      if ((status)); then
        failed=$((failed + 1))
        say "failed: a training with trace=$way"
        show_end
        return
      fi
      sed -n 's/^{"step":[0-9]*,.*"step_ms":\([^,}]*\).*/\1/p' "$work/run/log.jsonl" | tail -n +$((warmup + 1)) >>"$work/$way.step_ms"
    done
    if [[ $small ]]; then break; fi
  done
  if [[ ! -s $work/every.step_ms ]]; then skip "trace"; return; fi
  for way in none idle every; do
    median=$(sort -g "$work/$way.step_ms" | awk '{ a[NR] = $1 } END { printf "%.4f", (a[int((NR + 1) / 2)] + a[int(NR / 2) + 1]) / 2 }')
    none=${none:-$median}
    say "$(printf 'trace %-8s median of %3d steps %10s ms, %s of that without' $way "$(wc -l <"$work/$way.step_ms")" "$median" \
      "$(awk -v a="$median" -v b="$none" 'BEGIN { printf "%.3f", a / b }')")"
    record "\"part\":\"trace\",\"way\":\"$way\",\"step_ms\":$median,\"ratio\":$(awk -v a="$median" -v b="$none" 'BEGIN { printf "%.4f", a / b }')"
  done
  passed=$((passed + 1))
}

has_wgmma() { [[ $(nvidia-smi --query-gpu=compute_cap --format=csv,noheader -i 0 2>/dev/null) == 9.* ]]; }

run_kernels() {
  local ncu
  section "kernels"
  ncu=$(command -v ncu || find /usr/local/cuda*/bin /opt/nvidia -maxdepth 4 -name ncu -type f -perm -u+x 2>/dev/null | head -1) || true
  if [[ -z $ncu ]]; then skip "Nsight Compute: no ncu in PATH, /usr/local/cuda*, /opt/nvidia"; return; fi
  # One at a time: a count of launches for all would go to those that come first.
  local end=$((SECONDS + $1)) kernel limit attention
  for kernel in 'flash::forward' 'flash::backward' 'RowArguments' 'ForwardArgs' 'BackwardArgs' 'add_squares' \
    'flash_wgmma::forward' 'flash_wgmma::backward'; do
    attention=mma
    if [[ $kernel == flash_wgmma* ]]; then attention=wgmma; fi
    if [[ $attention == wgmma ]] && ! has_wgmma; then skip "Nsight Compute of $kernel: the GPU has no wgmma"; continue; fi
    limit=$((end - SECONDS))
    if ((limit < 10)); then skip "Nsight Compute of $kernel"; continue; fi
    # shellcheck disable=SC2046 # words on purpose
    limited "$limit" "$ncu" --clock-control none --kernel-name-base demangled --kernel-name "regex:$kernel" --launch-count 1 \
      --section SpeedOfLight --section Occupancy --section MemoryWorkloadAnalysis --section WarpStateStats \
      tools/bench/gpu/bench_gpu --bench.parts=profile --bench.steps=1 --bench.side=256 --bench.attention=$attention $(sizes gpt2 16)
    # What ncu says, and not what the program under it does.
    sed -n '/^==PROF== Disconnected/,$p' "$work/log" >>"$report"
    if ((status)); then
      skip "Nsight Compute of $kernel: $(grep -m1 -E '==ERROR==|error' "$work/log" || echo "exit code $status")"
    else
      passed=$((passed + 1))
    fi
  done
}

run_steps() {
  local models batches peers attention free
  section "steps"
  find_torch
  if [[ -z $python ]]; then skip "PyTorch: no python3 with torch that sees the GPU"; fi
  free=$(nvidia-smi --query-gpu=memory.free --format=csv,noheader,nounits -i 0 2>/dev/null || echo 0)
  [[ $free =~ ^[0-9]+$ ]] || free=0
  while IFS='|' read -r models batches peers attention; do
    if [[ $attention ]] && ! has_wgmma; then skip "attention by $attention: the GPU has one kind alone"; continue; fi
    # shellcheck disable=SC2046 # words on purpose
    run_bench "steps of $models" "$(left)" --bench.parts=steps --bench.steps=10 --bench.graph=true --bench.memory_mib="$free" \
      --bench.attention="${attention:-auto}" \
      --bench.python="$python" --bench.peers="$peers" --bench.limit_s=$(($(left) > 20 ? $(left) - 15 : 5)) $(sizes "$models" "$batches")
    if [[ $small ]]; then break; fi
  done <<<"$trainings"
}

# ---- all of it

cd -- "$here"
unset BUILD_WORKING_DIRECTORY
if [[ $golden ]]; then
  export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  write_golden
  exit
fi
mkdir -p -- "$out"
report=$out/report.txt
results=$out/results.jsonl
: >"$report"
: >"$results"
if [[ $device == cpu ]]; then
  export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
  parts=losses
else
  find_libraries
  if wants steps; then start_torch; fi
  run_machine
fi
# What a part leaves over is the next ones'.
if wants gemm; then run_gemm "$(share gemm)"; fi
if wants ops; then run_tests "$(share ops)" ops; fi
if wants attention; then run_attention "$(share attention)"; fi
if wants tests; then run_tests "$(share tests)" engine shard tools comm; fi
if wants losses; then run_losses; fi
if wants profile; then run_profile "$(share profile)"; fi
if wants trace; then run_trace "$(share trace)"; fi
if wants kernels; then run_kernels "$(share kernels)"; fi
if wants sanitizer; then run_sanitizer "$(share sanitizer)"; fi
if wants steps; then run_steps; fi
section "done"
say "$skipped skipped; results in $out"
record "\"part\":\"summary\",\"passed\":$passed,\"failed\":$failed,\"skipped\":$skipped,\"s\":$SECONDS"
say "$passed passed, $failed failed"
((failed == 0))
