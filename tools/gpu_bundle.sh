#!/usr/bin/env bash
# Writes a folder that checks and times Tessera on another machine's GPU, with neither Bazel nor a compiler there:
#   ./bazelw run //tools:gpu_bundle -- DIR
# The folder is this program's runfiles (the programs and tests that its BUILD target names, and their data), stripped,
# with the libraries they need besides glibc, the driver and cublasLt. See gpu_check.sh in it.
set -Eeuo pipefail
trap 'echo "gpu_bundle: exit status $? of line $LINENO: $BASH_COMMAND" >&2' ERR

die() { echo "gpu_bundle: $*" >&2; exit 1; }

max_mib=40
strip=--strip-all
to=
for argument; do
  case $argument in
    --max_mib=*) max_mib=${argument#*=} ;;
    --symbols) strip=--strip-debug ;; # the emulated device finds kernels by them
    -*) die "expected a folder and perhaps --max_mib=N or --symbols, got $argument" ;;
    *) to=$argument ;;
  esac
done
[[ $to ]] || die "expected a folder to write to, got none"
to=$(cd -- "${BUILD_WORKING_DIRECTORY:-.}" && realpath -m -- "$to")
[[ -f tools/gpu_check.sh ]] || die "expected to run among its runfiles, got $PWD (use bazel run)"
mkdir -p -- "$to"
[[ -z $(ls -A -- "$to") ]] || die "expected an empty folder, got files in it ($to)"

# ---- programs, tests and data, where a program that runs in the folder finds them

find -L tests third_party tools -type f ! -name BUILD ! -name 'gpu_bundle*' ! -name 'gpu_*_test' -print0 |
  while IFS= read -r -d '' file; do
    install -D -m "$([[ -x $file ]] && echo 755 || echo 644)" -- "$(readlink -f -- "$file")" "$to/$file"
  done
mv -- "$to/tools/gpu_check.sh" "$to"

mapfile -t programs < <(find "$to" -type f -perm -u+x -exec sh -c '[ "$(head -c 4 "$1")" = "$(printf "\177ELF")" ]' _ {} \; -print)
strip $strip -- "${programs[@]}"

# ---- libraries

mkdir "$to/lib"
# By what the files say, and not by ldd, which runs the loader on each and can fail without a word.
needed_by() { objdump -p -- "$@" | awk '$1 == "NEEDED" { print $2 }'; }
left_out='^(ld-linux|lib(c|m|dl|rt|pthread|resolv|util|cuda|cublasLt|nccl)\.so)'
mapfile -t libraries < <(needed_by "${programs[@]}")
known=$(/sbin/ldconfig -p)
while ((${#libraries[@]})); do
  library=${libraries[0]}
  libraries=("${libraries[@]:1}")
  if [[ $library =~ $left_out || -e $to/lib/$library ]]; then continue; fi
  file=$(awk -v name="$library" '$1 == name { print $NF; exit }' <<<"$known")
  [[ $file ]] || die "expected $library among the libraries that ldconfig -p lists, got none"
  cp -L -- "$file" "$to/lib/$library"
  mapfile -t -O "${#libraries[@]}" libraries < <(needed_by "$file")
done
find "$to/lib" -type f -exec strip --strip-unneeded {} +
# The newest glibc that a symbol asks for. Of libraries alone: the file that is written may be there when a pattern of all files is
# expanded, and of an empty file objdump says nothing and ends with 1.
objdump -T -- "${programs[@]}" "$to"/lib/*.so* | grep -oE 'GLIBC_[0-9]+\.[0-9]+' | cut -d_ -f2 | sort -uV | tail -1 >"$to/lib/glibc_version"

# ---- the first images of Fashion-MNIST: all of them would be half of the folder

# Keeps the first $2 items of the gzipped IDX file $1, which has a header of $3 bytes and items of $4.
keep_first() {
  local plain=$1.plain
  gunzip -c -- "$1" >"$plain"
  {
    head -c 4 "$plain"
    # The count, big-endian, as the escapes of a second printf.
    # shellcheck disable=SC2059
    printf "$(printf '\\x%02x' $(($2 >> 24 & 255)) $(($2 >> 16 & 255)) $(($2 >> 8 & 255)) $(($2 & 255)))"
    head -c $(($3 + $2 * $4)) "$plain" | tail -c +9
  } | gzip -9n >"$1"
  rm -- "$plain"
}

images=$to/third_party/data/fashion_mnist
keep_first "$images/train-images-idx3-ubyte.gz" 2000 16 784
keep_first "$images/train-labels-idx1-ubyte.gz" 2000 8 1
keep_first "$images/t10k-images-idx3-ubyte.gz" 500 16 784
keep_first "$images/t10k-labels-idx1-ubyte.gz" 500 8 1
echo "The first 2,000 training and 500 test images of Fashion-MNIST (MIT licence), not the whole set." >"$images/SUBSET.txt"

nbytes=$(find "$to" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum }')
find "$to" -type f -printf '%s %P\n' | sort -rn | awk '{ printf "%8.2f MiB  %s\n", $1 / 1048576, $2 }'
# Programs have kernels and libraries in common, farther apart than gzip looks.
packed=$(tar -C "$to" -c . | xz --lzma2=preset=0,dict=64MiB | wc -c)
((packed <= max_mib << 20)) || die "expected at most $max_mib MiB as a .tar.xz, got $((packed >> 20)) ($to)"
awk -v n="$nbytes" -v packed="$packed" -v tests="$(find "$to/tests" -name '*_test' | wc -l)" -v to="$to" \
  'BEGIN { printf "%.1f MiB (%.1f as a .tar.xz), %d test programs in %s; there: ./gpu_check.sh\n", n / 1048576, packed / 1048576, tests, to }'
