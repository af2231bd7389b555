#!/usr/bin/env bash
# Installs Tessera for programs that are built without Bazel:
#   ./bazelw run //tools:install -- PREFIX
# writes below PREFIX
#   include/tessera/       the public headers
#   lib/libtessera.a       all of the library; position independent
#   lib/libtessera_gloo.so the plug-in for Gloo, if that was there
#   lib/cmake/Tessera/     find_package(Tessera), target tessera::tessera
#   lib/pkgconfig/tessera.pc
#   share/doc/tessera/     the licence
# and replaces what an older installation left there. Everything is written beside its place first and then renamed; what
# fails or is interrupted puts the older installation back.
set -euo pipefail

die() { echo "install: $*" >&2; exit 1; }

(($# == 1)) && [[ $1 && $1 != -* ]] || die "expected one argument, the folder to install to, got '$*'"
here=tools/install
[[ -f $here/package.facts ]] || die "expected to run among its runfiles, got $PWD (use bazel run)"
# shellcheck disable=SC1091
source "$here/package.facts"

prefix=$(cd -- "${BUILD_WORKING_DIRECTORY:-.}" && realpath -m -- "$1")
stage=
{ mkdir -p -- "$prefix" && stage=$(mktemp -d -- "$prefix/.tessera-install.XXXXXX"); } 2>/dev/null ||
  die "expected a folder that can be written, got $prefix"

items=(include/tessera lib/libtessera.a lib/cmake/Tessera lib/pkgconfig/tessera.pc share/doc/tessera)
begun=() # the items that may have been moved

finish() {
  local item
  for item in "${begun[@]}"; do
    if [[ ! -e $stage/new/$item ]]; then rm -rf -- "${prefix:?}/$item"; fi # what stands there is the new one
    if [[ -e $stage/old/$item ]]; then mv -- "$stage/old/$item" "$prefix/$item"; fi
  done
  if [[ $stage ]]; then rm -rf -- "$stage"; fi
}
trap finish EXIT
trap 'exit 130' INT TERM HUP

# ---- headers: the public ones, and what they include

declare -A seen
mapfile -t queue <<<"$headers"
while ((${#queue[@]})); do
  header=${queue[0]}
  queue=("${queue[@]:1}")
  if [[ ${seen[$header]:-} || ! -f $header ]]; then continue; fi
  seen[$header]=1
  install -D -m 644 -- "$(readlink -f -- "$header")" "$stage/new/include/tessera/$header"
  mapfile -t -O "${#queue[@]}" queue < <(sed -n 's/^ *#include "\([^" ]*\)".*/\1/p' "$header")
done

# ---- the library

install -D -m 644 -- "$here/libtessera.a" "$stage/new/lib/libtessera.a"
gloo_plugin=
if [[ -f comm/libtessera_gloo.so ]]; then
  gloo_plugin=lib/libtessera_gloo.so
  install -D -m 755 -- comm/libtessera_gloo.so "$stage/new/$gloo_plugin"
  items+=("$gloo_plugin")
fi

# ---- packages

version=$(sed -n 's/^ *version = "\(.*\)",/\1/p' MODULE.bazel | head -1)
fmt_version=$(sed -n 's/^#define FMT_VERSION //p' ../fmt/include/fmt/core.h)
fmt_major=$((fmt_version / 10000))
cuda=OFF
if [[ $defines == *TESSERA_CUDA* ]]; then cuda=ON; fi
mapfile -t defines <<<"$defines"
mapfile -t device_flags <<<"$device_flags"
mapfile -t linkopts < <(grep -vxE -e '-l(fmt|pthread)' <<<"$linkopts" || true) # packages of their own

declare -A values=(
  [version]=$version
  [version_minor]=${version%.*}
  [fmt_major]=$fmt_major
  [fmt_next]=$((fmt_major + 1))
  [cuda]=$cuda
  [gloo_plugin]=${gloo_plugin:+'${_tessera_prefix}/'$gloo_plugin}
  [machine]=${machine:-no -march}
  [contraction]=$contraction
  [cmake_defines]=$(IFS=';' && echo "${defines[*]}")
  [cmake_linkopts]=$(IFS=';' && echo "${linkopts[*]}")
  [pc_defines]=${defines[0]:+${defines[*]/#/-D}}
  [pc_linkopts]="-lpthread ${linkopts[*]}"
  [cmake_device_flags]=$(IFS=';' && echo "${device_flags[*]}")
  [pc_device_flags]=${device_flags[*]}
)
# fill TEMPLATE FILE: with the names between @ replaced.
fill() {
  local text name
  text=$(<"$1")
  for name in "${!values[@]}"; do text=${text//"@$name@"/"${values[$name]}"}; done
  install -D -m 644 -- /dev/stdin "$2" <<<"$text"
}
fill "$here/TesseraConfig.cmake.in" "$stage/new/lib/cmake/Tessera/TesseraConfig.cmake"
fill "$here/TesseraConfigVersion.cmake.in" "$stage/new/lib/cmake/Tessera/TesseraConfigVersion.cmake"
fill "$here/tessera.pc.in" "$stage/new/lib/pkgconfig/tessera.pc"
install -D -m 644 -- LICENSE "$stage/new/share/doc/tessera/LICENSE"

# ---- to their places

for item in "${items[@]}"; do
  mkdir -p -- "$(dirname -- "$prefix/$item")" "$(dirname -- "$stage/old/$item")"
  begun+=("$item")
  if [[ -e $prefix/$item ]]; then mv -- "$prefix/$item" "$stage/old/$item"; fi
  mv -- "$stage/new/$item" "$prefix/$item"
done
begun=()
if [[ ! $gloo_plugin ]]; then rm -f -- "$prefix/lib/libtessera_gloo.so"; fi # the older installation's

echo "Tessera $version (CUDA $cuda, ${machine:-no -march}) in $prefix: ${#seen[@]} headers, $(
  du -h --apparent-size -- "$prefix/lib/libtessera.a" | cut -f1)iB of lib/libtessera.a, lib/cmake/Tessera, lib/pkgconfig/tessera.pc"
