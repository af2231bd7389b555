#!/usr/bin/env python3
"""Makes the golden files of small models of Llama's kind and of GPT-NeoX. Development only: no build or test runs this.

    python3 -m venv env && env/bin/pip install torch transformers numpy safetensors
    env/bin/python tests/golden/make_llama_golden.py         # rewrites tests/golden/llama/ and tests/golden/gpt_neox/

The files in the tree were made with the versions under "versions" in sgd.json. Others give the same numbers to within rounding.

In each of the two folders, for each model NAME: NAME/config.json and NAME/model.safetensors, before training, as save_pretrained lays them out; and in
sgd.json what 20 steps of SGD with momentum on tokens.bin (uint16) make of it:

    batch       step s takes sequences 6s .. 6s+5; sequence i reads tokens [12i, 12i+12) and predicts the next ones
    loss        mean cross-entropy of a step, before its update;  grad_norm: L2 over all parameters, not clipped
    logits      of the token after the first sequence, before training
    final       of each tensor after training: its L2 norm, and its product with cos(0), cos(1), cos(2), ...

llama/documents.json has what training on documents makes of some of these models: token ids, of which the first ones are a prompt that is not learned. A
document is cut into sequences of at most 12, each by itself; those without a target that is learned are left out; step s takes sequences 6s .. 6s+5, and
loss and gradient are the mean over all their targets that are learned.
"""
import json
import platform
import shutil
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import (GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config,
                          Qwen3ForCausalLM)

HERE = Path(__file__).resolve().parent
STEPS, BATCH, SEQ, VOCAB = 20, 6, 12, 37
LR, MOMENTUM = 0.02, 0.9
COMMON = dict(vocab_size=VOCAB, num_hidden_layers=2, initializer_range=0.3, attn_implementation="eager", use_cache=False,
              bos_token_id=None, eos_token_id=None, pad_token_id=None)


def sizes(heads, kv_heads, head_dim, mlp, hidden=None, **more):
    hidden = hidden or heads * head_dim
    return dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, hidden_size=hidden, intermediate_size=mlp,
                max_position_embeddings=32, **COMMON, **more)


def without_head_dim(made):
    made.pop("head_dim")
    return made


LLAMA3 = dict(rope_type="llama3", rope_theta=100.0, factor=4.0, low_freq_factor=1.0, high_freq_factor=3.0,
              original_max_position_embeddings=16)
LINEAR = dict(rope_type="linear", rope_theta=500.0, factor=2.5)
LLAMAS = {
    "llama_grouped": (LlamaForCausalLM, LlamaConfig(**sizes(3, 1, 6, 22, rms_norm_eps=1e-5, tie_word_embeddings=True))),
    "llama_scaled": (LlamaForCausalLM, LlamaConfig(**sizes(4, 2, 8, 20, hidden=20, rope_parameters=LLAMA3))),
    "llama_biases": (LlamaForCausalLM, LlamaConfig(**sizes(2, 2, 8, 26, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR))),
    "mistral_grouped": (MistralForCausalLM, MistralConfig(**sizes(4, 2, 4, 20, sliding_window=None))),
    "mistral_head": (MistralForCausalLM, MistralConfig(**sizes(3, 3, 10, 18, hidden=14, sliding_window=64, tie_word_embeddings=True))),
    "mistral_window": (MistralForCausalLM, MistralConfig(**sizes(2, 1, 6, 16, sliding_window=20, rms_norm_eps=1e-3))),
    "qwen2_tied": (Qwen2ForCausalLM, Qwen2Config(**without_head_dim(sizes(4, 2, 4, 22, tie_word_embeddings=True)))),
    "qwen2_untied": (Qwen2ForCausalLM, Qwen2Config(**without_head_dim(sizes(3, 3, 6, 20, rope_parameters=dict(rope_type="default", rope_theta=1e6))))),
    "qwen2_scaled": (Qwen2ForCausalLM, Qwen2Config(**without_head_dim(sizes(6, 1, 2, 14, rope_parameters=LLAMA3)))),
    "qwen3_tied": (Qwen3ForCausalLM, Qwen3Config(**sizes(2, 1, 12, 20, hidden=16, tie_word_embeddings=True))),
    "qwen3_biases": (Qwen3ForCausalLM, Qwen3Config(**sizes(3, 1, 6, 24, attention_bias=True))),
    "qwen3_scaled": (Qwen3ForCausalLM, Qwen3Config(**sizes(4, 4, 4, 18, rope_parameters=LINEAR, rms_norm_eps=1e-4))),
}


def neox(heads, dim, mlp, **more):
    return GPTNeoXForCausalLM, GPTNeoXConfig(num_attention_heads=heads, hidden_size=dim, intermediate_size=mlp, max_position_embeddings=32,
                                             **COMMON, **more)


NEOXES = {
    "neox_quarter": neox(3, 24, 40),
    "neox_sequential": neox(2, 20, 34, use_parallel_residual=False, tie_word_embeddings=True, layer_norm_eps=1e-3, hidden_act="gelu_new",
                            rope_parameters=dict(LINEAR, partial_rotary_factor=0.25)),
    "neox_whole": neox(5, 30, 22, attention_bias=False, rotary_pct=1.0, rotary_emb_base=100),
    "neox_scaled": neox(1, 12, 18, tie_word_embeddings=True, rope_parameters=dict(LLAMA3, partial_rotary_factor=0.5)),
}


def make(kind, config):
    model = kind(config).float()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("norm.weight"):
                p.copy_(1 + 0.2 * torch.randn_like(p))
            if name.endswith("bias"):
                p.copy_(0.2 * torch.randn_like(p))
    return model.train()


def train(model, tokens):
    loss, norms = [], []
    with torch.no_grad():
        logits = model(tokens[None, :SEQ]).logits[0, -1].tolist()
    velocity = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(STEPS):
        rows = torch.stack([tokens[SEQ * i:SEQ * i + SEQ + 1] for i in range(BATCH * step, BATCH * step + BATCH)])
        out = model(rows[:, :-1]).logits
        value = torch.nn.functional.cross_entropy(out.reshape(-1, VOCAB), rows[:, 1:].reshape(-1))
        model.zero_grad()
        value.backward()
        loss.append(value.item())
        norms.append(torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters())).item())
        with torch.no_grad():
            for name, p in model.named_parameters():
                velocity[name].mul_(MOMENTUM).add_(p.grad)
                p.sub_(LR * velocity[name])
    final = {}
    for name, p in model.named_parameters():
        values = p.detach().double().numpy().ravel()
        # As files call the head of a GPT-NeoX.
        saved = "embed_out.weight" if isinstance(model, GPTNeoXForCausalLM) and name == "lm_head.weight" else name
        final[saved] = [float(np.linalg.norm(values)), float(values @ np.cos(np.arange(values.size)))]
    return dict(loss=loss, grad_norm=norms, logits=logits, final=final)


def write(folder, models):
    torch.manual_seed(20261128)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    random = np.random.default_rng(5)
    # Each token is likelier after some than after others, so that there is something to learn.
    tokens = [0]
    while len(tokens) < STEPS * BATCH * SEQ + 1:
        tokens.append((tokens[-1] * 5 + int(random.integers(0, 4))) % VOCAB)
    np.array(tokens, "<u2").tofile(folder / "tokens.bin")
    runs = {}
    for name, (kind, config) in models.items():
        model = make(kind, config)
        model.save_pretrained(folder / name)
        (folder / name / "generation_config.json").unlink(missing_ok=True)
        runs[name] = train(model, torch.tensor(tokens))
        print(name, sum(p.numel() for p in model.parameters()), runs[name]["loss"][0], runs[name]["loss"][-1], runs[name]["grad_norm"][0])
    versions = dict(python=platform.python_version(), torch=torch.__version__, transformers=transformers.__version__)
    training = dict(steps=STEPS, batch=BATCH, seq=SEQ, lr=LR, momentum=MOMENTUM)
    (folder / "sgd.json").write_text(json.dumps(dict(versions=versions, training=training, runs=runs)) + "\n")


def sequences_of(documents):
    result = []
    for ids, num_prompt in documents:
        targets = [-100 if i < num_prompt else ids[i] for i in range(len(ids))]
        for first in range(0, len(ids) - 1, SEQ):
            tokens, wanted = ids[first:len(ids) - 1][:SEQ], targets[first + 1:][:SEQ]
            padding = SEQ - len(tokens)
            if any(t != -100 for t in wanted):
                result.append((tokens + [0] * padding, wanted + [-100] * padding))
    return result


def train_documents(model, documents, steps):
    sequences = sequences_of(documents)
    assert len(sequences) >= steps * BATCH, len(sequences)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    loss, norms = [], []
    for step in range(steps):
        tokens, targets = zip(*sequences[BATCH * step:BATCH * (step + 1)])
        logits = model(torch.tensor(tokens)).logits
        value = torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), torch.tensor(targets).reshape(-1), ignore_index=-100)
        optimizer.zero_grad()
        value.backward()
        loss.append(value.item())
        norms.append(torch.sqrt(sum((p.grad.double() ** 2).sum() for p in model.parameters())).item())
        optimizer.step()
    return dict(loss=loss, grad_norm=norms, num_sequences=len(sequences))


def write_documents(folder):
    random = np.random.default_rng(6)
    documents = [([1], 0), ([1, 2, 3], 3)]  # of which nothing is learned
    for _ in range(80):
        ids, numel = [int(random.integers(0, VOCAB))], int(random.integers(2, 30))
        while len(ids) < numel:
            ids.append((ids[-1] * 5 + int(random.integers(0, 4))) % VOCAB)
        documents.append((ids, int(random.integers(0, len(ids)))))
    steps = 15
    runs = {}
    for name in ("llama_grouped", "qwen2_tied"):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder / name, attn_implementation="eager").float().train()
        runs[name] = train_documents(model, documents, steps)
    (folder / "documents.json").write_text(json.dumps(dict(steps=steps, documents=documents, runs=runs)) + "\n")


def main():
    torch.set_num_threads(1)
    write(HERE / "llama", LLAMAS)
    write_documents(HERE / "llama")
    write(HERE / "gpt_neox", NEOXES)


if __name__ == "__main__":
    main()
