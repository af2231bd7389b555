#!/usr/bin/env python3
"""Makes muon.json: how PyTorch's Muon moves two matrices. Development only: no build or test runs this.

    python3 -m venv env && env/bin/pip install torch numpy
    env/bin/python tests/golden/make_muon_golden.py              # rewrites the file beside this script

The file in the tree was made with torch 2.15.0 on the CPU.

Gradients are random numbers, other ones in each step. The optimizer has its default momentum, Nesterov's, no weight decay, and
adjust_lr_fn="match_rms_adamw". It multiplies in bf16, which would hide differences of a percent; here it is told that bf16 is f32.
"""
import json
import sys
from pathlib import Path

import torch

SHAPES = {"wide": (6, 50), "tall": (50, 6)}
STEPS, LR = 3, 0.02


def numbers(values):
    """Nine digits give back every float32."""
    return [float("%.9g" % v) for v in values.detach().flatten().tolist()]


def main():
    generator = torch.Generator().manual_seed(11)
    parameters = {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}
    gradients = [{name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()} for _ in range(STEPS)]
    golden = {
        "versions": {"torch": torch.__version__, "python": sys.version.split()[0]}, "lr": LR,
        "start": {name: numbers(p) for name, p in parameters.items()},
        "gradients": [{name: numbers(g) for name, g in step.items()} for step in gradients]}
    optimizer = torch.optim.Muon(parameters.values(), lr=LR, weight_decay=0, adjust_lr_fn="match_rms_adamw")
    bfloat16, torch.bfloat16 = torch.bfloat16, torch.float32
    for step in gradients:
        for name, p in parameters.items():
            p.grad = step[name]
        optimizer.step()
    torch.bfloat16 = bfloat16
    golden["final"] = {name: numbers(p) for name, p in parameters.items()}
    with open(Path(__file__).resolve().parent / "muon.json", "w", encoding="utf-8") as file:
        json.dump(golden, file)
        file.write("\n")


if __name__ == "__main__":
    main()
