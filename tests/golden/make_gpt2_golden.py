#!/usr/bin/env python3
"""Makes the golden files of the tiny GPT-2 training run. Development only: no build or test runs this.

    python3 -m venv env && env/bin/pip install torch transformers numpy safetensors
    env/bin/python tests/golden/make_gpt2_golden.py          # rewrites the files beside this script

The files in the tree were made with the versions recorded under "versions" in gpt2_tiny_sgd.json
(Python 3.11, torch 2.15.0 on one CPU thread, transformers 5.23.0). Other versions or another CPU give
the same numbers to within float32 rounding, not bit for bit.

What it writes:

    gpt2_tiny/                    the model before training, as `save_pretrained` lays it out
    gpt2_tiny_tokens.bin          nanoGPT token file: headerless little-endian uint16
    gpt2_tiny_sgd.json            loss and gradient norm of every step, for a run without and one with clipping, and
                                  for one in bfloat16 without
    gpt2_tiny_final.safetensors   the parameters after the run without clipping (float32, names as in gpt2_tiny/)

The run, in full:

    model      GPT2LMHeadModel, shape below, no dropout, tied embedding, tanh GELU, layer norm eps 1e-5.
               Linear weights are stored [in, out] (Conv1D), as in every GPT-2 checkpoint.
    batch      step s takes sequences 4s .. 4s+3. Sequence i reads tokens [i*32, i*32+32) and predicts
               [i*32+1, i*32+33). The loss is the mean cross-entropy over all 4*32 positions.
    grad_norm  L2 norm over all parameters (the tied one once), before clipping.
    clipping   every gradient times min(1, max_norm / (grad_norm + 1e-6)): torch.nn.utils.clip_grad_norm_.
    update     v = momentum * v + g;  p = p - lr * v;  v starts at 0. No weight decay, no dampening.

The loss of a step is taken before its update. "float64" in the JSON repeats the run in double precision
from the same float32 start: its distance from the float32 run is the rounding a tolerance must allow.
"""
import json
import platform
import shutil
import sys
from pathlib import Path

import numpy as np
import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

HERE = Path(__file__).resolve().parent
LAYERS, HEADS, DIM, VOCAB, SEQ = 2, 4, 52, 307, 32
STEPS, BATCH = 20, 4
LR, MOMENTUM, MAX_NORM = 0.1, 0.9, 2.0
SEED = 20240607


def config():
    return GPT2Config(
        vocab_size=VOCAB, n_positions=SEQ, n_embd=DIM, n_layer=LAYERS, n_head=HEADS,
        activation_function="gelu_new", layer_norm_epsilon=1e-5, tie_word_embeddings=True,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
        bos_token_id=0, eos_token_id=0, attn_implementation="eager")


def make_model():
    """Random weights in which every parameter matters: biases are not 0, gains are not 1."""
    model = GPT2LMHeadModel(config())
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, p in model.named_parameters():
            normal = torch.randn(p.shape, generator=generator)
            if "ln_" in name and name.endswith("weight"):
                p.copy_(1.0 + 0.1 * normal)
            elif name.endswith("c_attn.weight"):
                p.copy_(0.15 * normal)  # at 0.05 attention is close to uniform and hides mistakes
            else:
                p.copy_(0.05 * normal)
    return model


def make_tokens():
    """A skewed source that a few steps can learn: a Zipf draw, or a bigram rule a quarter of the time."""
    rng = np.random.default_rng(SEED)
    n = STEPS * BATCH * SEQ + 1
    weight = 1.0 / np.arange(1, VOCAB + 1) ** 1.5
    draw = rng.permutation(VOCAB)[rng.choice(VOCAB, size=n, p=weight / weight.sum())]
    follow = rng.random(n) < 0.25
    tokens = np.empty(n, np.uint16)
    tokens[0] = draw[0]
    for i in range(1, n):
        tokens[i] = (5 * int(tokens[i - 1]) + 17) % VOCAB if follow[i] else draw[i]
    return tokens


def round9(x):
    return float(f"{x.item() if torch.is_tensor(x) else x:.9g}")


def load(dtype):
    model = GPT2LMHeadModel.from_pretrained(HERE / "gpt2_tiny", dtype=dtype, attn_implementation="eager")
    return model.train()


def batch(stream, step):
    starts = [i * SEQ for i in range(BATCH * step, BATCH * (step + 1))]
    return torch.stack([stream[s:s + SEQ] for s in starts]), torch.stack([stream[s + 1:s + SEQ + 1] for s in starts])


def train(tokens, dtype, max_norm):
    """Runs all steps from the stored weights; returns the record of the run and the trained model."""
    model = load(dtype)
    params = dict(model.named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=LR, momentum=MOMENTUM)
    stream = torch.from_numpy(tokens.astype(np.int64))
    record = {"loss": [], "grad_norm": []}
    for step in range(STEPS):
        x, y = batch(stream, step)
        logits = model(input_ids=x).logits
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            record["step0_grad_l2"] = {n: round9(p.grad.double().norm()) for n, p in params.items()}
            record["step0_logits_sum"] = round9(logits.double().sum())
            record["step0_logits_l2"] = round9(logits.double().norm())
        norm = torch.nn.utils.clip_grad_norm_(params.values(), max_norm if max_norm else float("inf"))
        record["loss"].append(round9(loss))
        record["grad_norm"].append(round9(norm))
        optimizer.step()
    record["final_l2"] = {n: round9(p.detach().double().norm()) for n, p in params.items()}
    return record, model


def train_bf16(tokens):
    """The run without clipping with parameters and compute in bfloat16, float32 masters and momentum."""
    masters = {n: p.detach().clone() for n, p in load(torch.float32).named_parameters()}
    velocity = {n: torch.zeros_like(p) for n, p in masters.items()}
    model = load(torch.bfloat16)
    stream = torch.from_numpy(tokens.astype(np.int64))
    record = {"loss": [], "grad_norm": []}
    for step in range(STEPS):
        x, y = batch(stream, step)
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(masters[n])
        model.zero_grad()
        loss = F.cross_entropy(model(input_ids=x).logits.float().flatten(0, 1), y.flatten())
        loss.backward()
        grads = {n: p.grad.float() for n, p in model.named_parameters()}
        record["loss"].append(round9(loss))
        record["grad_norm"].append(round9(torch.stack([g.double().norm() for g in grads.values()]).norm()))
        for n, p in masters.items():
            velocity[n] = MOMENTUM * velocity[n] + grads[n]
            p -= LR * velocity[n]
    record["final_l2"] = {n: round9(p.double().norm()) for n, p in masters.items()}
    return record


def relative(a, b):
    return max(abs(x - y) / abs(y) for x, y in zip(a, b))


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    folder = HERE / "gpt2_tiny"
    shutil.rmtree(folder, ignore_errors=True)
    make_model().save_pretrained(folder)
    tokens = make_tokens()
    tokens.astype("<u2").tofile(HERE / "gpt2_tiny_tokens.bin")

    runs, finals = {}, {}
    for name, max_norm in (("no_clip", None), ("clip", MAX_NORM)):
        record, model = train(tokens, torch.float32, max_norm)
        double, model64 = train(tokens, torch.float64, max_norm)
        difference = max(
            ((p.double() - q).abs().max() / q.abs().max()).item()
            for p, q in zip(model.parameters(), model64.parameters()))
        runs[name] = {
            "max_norm": max_norm, **record,
            "float64": {"loss": double["loss"], "grad_norm": double["grad_norm"]},
            "float32_from_float64": {
                "loss_max_relative": round9(relative(record["loss"], double["loss"])),
                "grad_norm_max_relative": round9(relative(record["grad_norm"], double["grad_norm"])),
                "final_max_abs_over_max_abs": round9(difference)},
        }
        finals[name] = model

    # The tied output matrix is the embedding: named_parameters() names it once.
    state = {n: p.detach().contiguous() for n, p in finals["no_clip"].named_parameters()}
    safetensors.torch.save_file(state, HERE / "gpt2_tiny_final.safetensors", metadata={"format": "pt"})
    for path in [*folder.iterdir(), HERE / "gpt2_tiny_final.safetensors"]:
        path.chmod(0o644)

    golden = {
        "about": "Tiny GPT-2 trained with SGD by transformers; see make_gpt2_golden.py.",
        "versions": {"python": platform.python_version(), "torch": torch.__version__.split("+")[0],
                     "transformers": transformers.__version__, "numpy": np.__version__,
                     "safetensors": safetensors.__version__},
        "model": {"layers": LAYERS, "heads": HEADS, "dim": DIM, "vocab": VOCAB, "seq": SEQ,
                  "parameters": sum(p.numel() for p in state.values())},
        "training": {"steps": STEPS, "batch": BATCH, "optimizer": "sgd", "lr": LR, "momentum": MOMENTUM,
                     "weight_decay": 0.0, "tokens": len(tokens)},
        "runs": runs,
        "bf16": train_bf16(tokens),
        "shapes": {n: list(p.shape) for n, p in state.items()},
    }
    (HERE / "gpt2_tiny_sgd.json").write_text(json.dumps(golden, indent=1) + "\n")

    for name, run in runs.items():
        print(f"{name}: max_norm {run['max_norm']}, float32 from float64 {run['float32_from_float64']}")
        for step, (loss, norm) in enumerate(zip(run["loss"], run["grad_norm"])):
            print(f"  step {step:2d}  loss {loss:.9g}  grad_norm {norm:.9g}")
    norms = runs["clip"]["grad_norm"]
    if not any(n > MAX_NORM for n in norms) or all(n > MAX_NORM for n in norms):
        sys.exit("max_norm should clip some steps and spare others: choose another")


if __name__ == "__main__":
    main()
