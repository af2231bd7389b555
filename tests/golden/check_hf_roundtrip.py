#!/usr/bin/env python3
"""Checks that transformers accepts a GPT-2 folder that we exported. Development only.

    env/bin/python tests/golden/check_hf_roundtrip.py DIR [--reference DIR2] [--tolerance 0]

DIR and DIR2 hold config.json and model.safetensors. Make the environment as make_gpt2_golden.py says;
written for torch 2.15.0 and transformers 5.23.0.

Loads DIR with GPT2LMHeadModel.from_pretrained, refuses missing, unexpected or mismatched keys, and prints
the sum of the logits and the loss on a fixed token sequence. With --reference, compares every parameter
and fails when the largest difference of a tensor, relative to its largest value, is above --tolerance.
DIR2 may also be a .safetensors file that has the names of a GPT2LMHeadModel, such as
gpt2_tiny_final.safetensors.
"""
import argparse
import sys
from pathlib import Path

import safetensors.torch
import torch
import torch.nn.functional as F
from transformers import GPT2LMHeadModel


def load(folder):
    model, info = GPT2LMHeadModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    # The output matrix is tied to the embedding and is never stored.
    missing = [k for k in info["missing_keys"] if k != "lm_head.weight"]
    bad = {"missing": missing, "unexpected": list(info["unexpected_keys"]),
           "mismatched": list(info["mismatched_keys"])}
    if any(bad.values()):
        sys.exit(f"[check_hf_roundtrip] {folder}: {({k: v for k, v in bad.items() if v})}")
    if model.lm_head.weight.data_ptr() != model.transformer.wte.weight.data_ptr():
        sys.exit(f"[check_hf_roundtrip] {folder}: the output matrix is not tied to the embedding")
    return model.eval()


def parameters(path):
    if Path(path).suffix == ".safetensors":
        return {n: p.float() for n, p in safetensors.torch.load_file(path).items()}
    return {n: p.detach() for n, p in load(path).named_parameters()}


def main():
    cli = argparse.ArgumentParser()
    cli.add_argument("folder", metavar="DIR")
    cli.add_argument("--reference", metavar="DIR2")
    cli.add_argument("--tolerance", type=float, default=0.0)
    args = cli.parse_args()
    torch.set_num_threads(1)

    model = load(args.folder)
    config = model.config
    count = sum(p.numel() for p in model.parameters())
    print(f"loaded {args.folder}: {config.n_layer} layers, {config.n_head} heads, dim {config.n_embd}, "
          f"vocab {config.vocab_size}, positions {config.n_positions}, {count} parameters")

    length = min(config.n_positions, 64)
    tokens = torch.tensor([(7 * i * i + 3 * i + 1) % config.vocab_size for i in range(length + 1)])
    with torch.no_grad():
        logits = model(input_ids=tokens[None, :-1]).logits[0]
        loss = F.cross_entropy(logits, tokens[1:])
    print(f"logits_sum {logits.double().sum().item():.9g}")
    print(f"loss {loss.item():.9g}")
    if not torch.isfinite(logits).all():
        sys.exit("[check_hf_roundtrip] the logits are not finite")

    if args.reference:
        ours, theirs = dict(model.named_parameters()), parameters(args.reference)
        if ours.keys() != theirs.keys():
            sys.exit(f"[check_hf_roundtrip] names differ: {sorted(ours.keys() ^ theirs.keys())}")
        worst, where = 0.0, "-"
        for name, p in ours.items():
            q = theirs[name].double()
            if p.shape != q.shape:
                sys.exit(f"[check_hf_roundtrip] {name}: expected {tuple(q.shape)}, got {tuple(p.shape)}")
            # Relative to the largest value of the tensor, since single values may be close to zero.
            difference = ((p.detach().double() - q).abs().max() / q.abs().max().clamp_min(1e-30)).item()
            # `not <=` so that a NaN counts as the worst difference instead of being passed over.
            if not difference <= worst:
                worst, where = difference, name
        print(f"max_relative_difference {worst:.3g} ({where})")
        if not worst <= args.tolerance:
            sys.exit(f"[check_hf_roundtrip] expected at most {args.tolerance:g}, got {worst:.3g}")
    print("ok")


if __name__ == "__main__":
    main()
