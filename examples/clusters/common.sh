# What the scripts of this folder train; each of them reads this.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
program=$PWD/bazel-bin/tools/programs/train_transformer
[ -x "$program" ] || ./bazelw build //tools:train_transformer
out=${OUT:-$(mktemp -d)}
train=("$program" --device=cpu --data.path="$program.runfiles/tessera/third_party/data/kjv.txt"
  --model.layers="${LAYERS:-2}" --train.steps="${STEPS:-20}" --train.warmup=5 --log.every="${EVERY:-10}" --sample.tokens=0 --out="$out")
