#!/usr/bin/env python3
"""Compares our programs with transformers on SmolLM2-135M-Instruct, a model that people use. Development only: no build or test runs this.

    python3 -m venv env && env/bin/pip install torch transformers numpy safetensors
    ./bazelw build //tools/programs:train_transformer //tools:generate //tools:tokenize //third_party/data:kjv
    env/bin/python tests/golden/check_smollm2.py MODEL_DIR bazel-bin/third_party/data/kjv.txt bazel-bin

MODEL_DIR is the model's folder (config.json, model.safetensors, tokenizer.json). What is compared, each side on one thread, and what may differ:

    ids       of the first 30,000 characters of the text, equal
    loss      of the 952 tokens of its first 4,000 characters: to 1e-4, and both of 1.2975 to 1e-4, which transformers 5.24 gave for the King James Bible
    text      200 greedy tokens after PROMPT, by the ids: equal. Each side ends at its eos
    training  10 steps of AdamW on the text, 2 sequences of 64 tokens each: the loss of every step to 1e-3, and in bf16 to 2e-2
    time      CPU time of a token of that text, with its keys and values kept, reading the model left out: ours at most theirs

Both train with a constant learning rate, betas 0.9 and 0.99, eps 1e-8, a decay of 0.1 of what has two or more dimensions, gradients clipped at a norm
of 1, and no dropout; the loss is the mean over the tokens of a step, before its update. f32 is f32 all through. bf16 means masters, their updates and the
cross entropy in f32, and the rest computed in bf16: ours with --precision.param=bf16, theirs with f32 parameters under torch.autocast, which leaves norms
and sums of residuals in f32, where ours are rounded to bf16. Their products of matrices of bf16 are computed in f32 and then rounded, as instructions for
bf16 do it: PyTorch's own take minutes on a CPU without these. Written for torch 2.15 and transformers 5.24. Prints a line for each check, and ends with 1
if one failed.
"""
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

PROMPT = "In the beginning God created the heaven and the earth. And the earth was"
REFERENCE_LOSS = 1.2975
STEPS, BATCH, SEQ, LR, DECAY, BETAS, EPS, CLIP = 10, 2, 64, 1e-4, 0.1, (0.9, 0.99), 1e-8, 1.0
FEW, MANY = 40, 200  # tokens, of which the difference is timed

if len(sys.argv) != 4:
    sys.exit(__doc__)
model_dir, text_file, programs = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name)
failures = []


def check(name, passed, what):
    print(f"{'ok    ' if passed else 'FAILED'} {name}: {what}", flush=True)
    if not passed:
        failures.append(name)


def ours(program, *flags):
    """What it prints, and the seconds of CPU it takes."""
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    done = subprocess.run([programs / "tools" / program, *flags], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout, sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before


def our_losses(tokens, steps, batch, seq, *flags):
    """Sample i reads tokens [seq i, seq i + seq) of the file and predicts the next ones."""
    ours("programs/train_transformer", f"--init.from={model_dir}", f"--data.path={tokens}", "--data.order=sequential", "--data.val_fraction=0",
         f"--model.seq={seq}", f"--train.steps={steps}", f"--train.batch={batch}", "--train.schedule=constant", "--train.warmup=0",
         f"--train.weight_decay={DECAY}", f"--train.beta1={BETAS[0]}", f"--train.beta2={BETAS[1]}", f"--train.eps={EPS}", f"--train.grad_clip={CLIP}",
         "--parallel.ranks=1", "--device=cpu", "--cpu.threads_per_rank=1", "--log.peak_ms=0", "--sample.tokens=0", f"--out={folder}/run", *flags)
    return [record["loss"] for record in map(json.loads, open(folder / "run/log.jsonl")) if "loss" in record]


def load():
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="sdpa").eval()


def their_loss(model, rows):
    return torch.nn.functional.cross_entropy(model(rows[:, :-1]).logits.float().flatten(0, 1), rows[:, 1:].flatten())


class Bf16ProductsInF32(TorchDispatchMode):
    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default) and args[0].dtype == torch.bfloat16:
            return op(*(a.float() for a in args)).bfloat16()
        return op(*args, **(kwargs or {}))


def their_losses(ids, is_bf16):
    model = load().train()  # its config.json has no dropout
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": DECAY},
                                   {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}], lr=LR, betas=BETAS, eps=EPS)
    losses = []
    for step in range(STEPS):
        rows = torch.stack([ids[SEQ * i:SEQ * i + SEQ + 1] for i in range(BATCH * step, BATCH * step + BATCH)])
        optimizer.zero_grad()
        with Bf16ProductsInF32():
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                loss = their_loss(model, rows)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


def their_text(model, prompt, numel):
    start = time.process_time()
    with torch.no_grad():
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=numel, do_sample=False)
    return ids[0, prompt.shape[1]:].tolist(), time.process_time() - start


def our_text(numel):
    out, seconds = ours("generate/generate", f"--from={model_dir}", f"--prompt={PROMPT}", f"--tokens={numel}", "--json")
    return json.loads(out)["tokens"], seconds


torch.set_num_threads(1)
logging.disable_progress_bar()
tokenizer = AutoTokenizer.from_pretrained(model_dir)
characters = text_file.read_text()[:30000]
(folder / "text.txt").write_text(characters)
ours("tokenize/tokenize", f"--tokenizer={model_dir}", f"--out={folder}/text.bin", folder / "text.txt")
mine = np.fromfile(folder / "text.bin", "<u2")[512:].astype(np.int64)  # after a header of 1024 bytes
ids = torch.tensor(tokenizer(characters).input_ids)
check("ids", mine.tolist() == ids.tolist(), f"{len(mine)} ours, {len(ids)} theirs")

first = torch.tensor(tokenizer(characters[:4000]).input_ids)
first.numpy().astype("<u2").tofile(folder / "first.bin")
model = load()
with torch.no_grad():
    theirs = their_loss(model, first[None]).item()
mine = our_losses(folder / "first.bin", 1, 1, len(first) - 1, "--train.lr=0")[0]
check("loss", abs(mine - theirs) <= 1e-4 and max(abs(mine - REFERENCE_LOSS), abs(theirs - REFERENCE_LOSS)) <= 1e-4,
      f"{mine:.6f} ours, {theirs:.6f} theirs, {REFERENCE_LOSS} before, of {len(first)} tokens")

prompt = tokenizer(PROMPT, return_tensors="pt").input_ids
(mine, our_many), (theirs, their_many) = our_text(MANY), their_text(model, prompt, MANY)
check("text", mine == theirs and len(mine) == MANY, f"{len(mine)} tokens ours, {len(theirs)} theirs: {tokenizer.decode(mine[:12])!r}...")
(_, our_few), (_, their_few) = our_text(FEW), their_text(model, prompt, FEW)
mine, theirs = [1000 * seconds / (MANY - FEW) for seconds in (our_many - our_few, their_many - their_few)]
check("time", mine <= theirs, f"{mine:.0f} ms of CPU a token ours, {theirs:.0f} theirs")
del model
for name, bound in (("f32", 1e-3), ("bf16", 2e-2)):
    mine = our_losses(folder / "text.bin", STEPS, BATCH, SEQ, f"--train.lr={LR}", f"--precision.param={name}")
    theirs = their_losses(ids, name == "bf16")
    worst = np.abs(np.subtract(mine, theirs)).max()
    check(f"training in {name}", worst <= bound, f"at most {worst:.1e} apart in {len(mine)} steps, {mine[0]:.4f} to {mine[-1]:.4f}")
sys.exit(1 if failures else 0)
