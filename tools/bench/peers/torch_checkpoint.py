"""Times torch.save and torch.distributed.checkpoint of GPT-2 124M's parameters and AdamW's moments, in f32.

    python torch_checkpoint.py FOLDER        prints one JSON object

Saved bytes are flushed to the disk in both cases, since ours are: neither does so by itself. Loads come from the page cache.
"""

import json
import os
import pathlib
import shutil
import statistics
import sys
import time

import torch
import torch.distributed.checkpoint as dcp

NUM_PARAMETERS, ROUNDS = 124_439_808, 3


def flush(path):
    for file in [path] if path.is_file() else path.iterdir():
        with open(file, "rb") as f:
            os.fsync(f.fileno())


def timed(fn):
    begin = time.monotonic()
    fn()
    return time.monotonic() - begin


def main():
    folder = pathlib.Path(sys.argv[1])
    # As many tensors as the model has, of its sizes on average.
    state = {
        f"{kind}.{i}": torch.randn(NUM_PARAMETERS // 148)
        for kind in ("parameter", "m", "v")
        for i in range(148)
    }
    file, tree = folder / "torch.pt", folder / "dcp"
    times = {"torch.save": ([], []), "dcp": ([], [])}
    for _ in range(ROUNDS + 1):
        shutil.rmtree(tree, ignore_errors=True)

        def save():
            torch.save(state, file)
            flush(file)

        def save_dcp():
            dcp.save(state, checkpoint_id=str(tree), no_dist=True)
            flush(tree)

        times["torch.save"][0].append(timed(save))
        times["torch.save"][1].append(timed(lambda: torch.load(file)))
        times["dcp"][0].append(timed(save_dcp))
        times["dcp"][1].append(timed(lambda: dcp.load(state, checkpoint_id=str(tree), no_dist=True)))
    record = {"torch": torch.__version__, "nbytes": 4 * sum(t.numel() for t in state.values())}
    for kind, (save_s, load_s) in times.items():
        record[kind] = {"save_s": statistics.median(save_s[1:]), "load_s": statistics.median(load_s[1:])}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
