#!/usr/bin/env python3
"""Reads the files of --log.tensorboard with TensorBoard itself and compares them with the run's log.jsonl.

`.ci/run tensorboard` does so; by hand:

    python3 -m venv /tmp/tb && /tmp/tb/bin/pip install tensorboard
    bazel run //tools:train_transformer -- --train.steps=20 --out=/tmp/run --log.tensorboard=/tmp/run/tb
    /tmp/tb/bin/python tests/golden/check_event_file.py /tmp/run/tb /tmp/run/log.jsonl

The build and the tests never need it: tests/tools/io/event_file_test.cc compares the bytes with event_file.tfevents, which this
program has read.
"""

import json
import struct
import sys

from tensorboard.backend.event_processing import event_accumulator


def f32(value):
    """As it is stored."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def main(folder, log):
    reader = event_accumulator.EventAccumulator(folder, size_guidance={event_accumulator.SCALARS: 0})
    reader.Reload()
    scalars = {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}
    with open(log, encoding="utf-8") as lines:
        steps = [json.loads(line) for line in lines]
    final = steps.pop()["final"] if steps and "final" in steps[-1] else {}
    validations = {line["step"]: f32(line["val_loss"]) for line in steps if "val_loss" in line}
    steps = [line for line in steps if "val_loss" not in line]
    assert steps, "the log has no steps"
    rate = next(name for name in steps[0] if name.endswith("_per_s"))
    tags = {"train/loss": "loss", "train/grad_norm": "grad_norm", "train/lr": "lr", "speed/" + rate: rate}
    tags["speed/peak_percent"] = "peak_percent"
    for name in ("step_ms", "exposed_comm_ms", "data_ms", "compute_ms", "optimizer_ms"):
        tags["time/" + name] = name
    for tag, name in tags.items():
        expected = {line["step"]: f32(line[name]) for line in steps if line.get(name) is not None}
        assert scalars.get(tag, {}) == expected, (tag, scalars.get(tag), expected)
    for category in steps[0]["peak_bytes"]:
        expected = {line["step"]: f32(line["peak_bytes"][category]) for line in steps}
        assert scalars["peak_bytes/" + category] == expected, category
    if final.get("val_loss") is not None:
        validations[final["steps"]] = f32(final["val_loss"])
    assert scalars.get("validation/val_loss", {}) == validations
    print(f"{folder}: {len(scalars)} tags of {len(steps)} steps are those of {log}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
