"""Tests of llama2.py: every layer and the whole model against independent implementations.

They run offline on the CPU, on tiny models that they make themselves. Where a test compares with an
oracle, that is transformers (skipped if it is not installed; frozen logits remain), gguf's reader and
dequantisers, SentencePiece, or a formula written out here. `pytest` runs them all in about a minute.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import gc
import importlib.machinery
import inspect
import io
import json
import math
import os
import pickle
import random
import re
import resource
import shlex
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import types
import weakref
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind

import bench_llama2 as bench
import llama2

torch.set_num_threads(1)  # more of them cost tiny models more than they give
SCRIPT = Path(llama2.__file__)
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,  # grouped in every test: equal counts hide a wrong one
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "rms_norm_eps": 2.0**-16,  # comes back from a file's float32 as it is
}
CONFIG = llama2.Config(**SHAPE)

# --------------------------------------------------------------------------------------------------
# Making models, vocabularies and files


def make_weights(config, seed=0):
    """Random weights by this file's names; RandomState gives the same numbers in every numpy."""
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in llama2.Llama(config).named_parameters()}
    random_state = np.random.RandomState(seed)
    weights = {}
    for name in sorted(shapes):
        noise = random_state.standard_normal(shapes[name]).astype(np.float32)
        weights[name] = 1 + 0.1 * noise if "norm" in name else 0.2 * noise
    return weights


def make_model(config=CONFIG, weights=None, cls=llama2.Llama):
    """A model that holds `weights`, without any loader."""
    weights = dict(make_weights(config) if weights is None else weights)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    model = cls(config)
    model.load_state_dict({name: torch.as_tensor(w) for name, w in weights.items()})
    return model.eval()


def make_hf(config, weights, **options):
    """transformers' model with the same weights: the rows of q and k go to Hugging Face's order."""
    transformers = pytest.importorskip("transformers")
    shape = {name: getattr(config, name) for name in (*SHAPE, "tie_word_embeddings")}
    options.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": config.rope_theta})
    hf_config = transformers.LlamaConfig(**shape, **options)
    state = {}
    for name, weight in weights.items():
        if "q_proj" in name or "k_proj" in name:
            pairs = weight.reshape(-1, config.head_dim // 2, 2, config.hidden_size)
            weight = pairs.swapaxes(1, 2).reshape(weight.shape)
        state[name if name == "lm_head.weight" else f"model.{name}"] = torch.as_tensor(weight)
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(hf_config)
    model.load_state_dict(state)
    return model.eval()


NAME_MAP = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 8)  # what llama.cpp's converter goes by


def gguf_name(name):
    """The name of a weight in a GGUF file."""
    prefix = "" if name == "lm_head.weight" else "model."
    return NAME_MAP.get_name(prefix + name, try_suffixes=(".weight",))


def vocabulary_keys(sp):
    """The metadata keys of a SentencePiece vocabulary, as converters write them."""
    n = sp.vocab_size()
    kinds = [
        3 if sp.is_control(i) else 2 if sp.is_unknown(i) else 6 if sp.is_byte(i) else 1
        for i in range(n)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [sp.id_to_piece(i) for i in range(n)],
        "tokenizer.ggml.scores": [sp.get_score(i) for i in range(n)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": sp.bos_id(),
        "tokenizer.ggml.eos_token_id": sp.eos_id(),
        "tokenizer.ggml.unknown_token_id": sp.unk_id(),
    }


def config_keys(config):
    """The metadata keys of an architecture, as converters write them."""
    return {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
    }


def write_gguf(path, keys, tensors, arch="llama", **options):
    """A GGUF file. Values of None are left out; a tensor may be (blocks, type) instead of floats."""
    writer = gguf.GGUFWriter(path, arch, **options)
    kinds = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING", list: "ARRAY"}
    for key, value in keys.items():
        if value is not None:
            writer.add_key_value(key, value, gguf.GGUFValueType[kinds[type(value)]])
    for name, tensor in tensors.items():
        blocks, kind = tensor if isinstance(tensor, tuple) else (tensor, None)
        if blocks is not None:
            writer.add_tensor(name, blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


TALE = """Once upon a time, there was a little fox. The fox lived in a small house near the forest,
and every day it ran to the river. "Where are you going?" asked the old bear. "I am going to the
river," said the fox, "to look for the moon in the water." The bear laughed and laughed: how could
anyone find the moon in the water? But at night they went there together, and they saw it shine.
Ein kleiner B\u00e4r; \u00fcber Stra\u00dfen; na\u00efve caf\u00e9 \u2013 \u65e5\u672c\u8a9e. 0123456789 (+-*/=) <s> [INST]
"""


@pytest.fixture(scope="session")
def vocabulary(tmp_path_factory):
    """A SentencePiece model of 320 pieces with byte fallback, trained on TALE: path and processor."""
    path = tmp_path_factory.mktemp("vocabulary") / "tokenizer.model"
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(TALE.splitlines() * 3),
            model_writer=file,
            model_type="bpe",
            vocab_size=SHAPE["vocab_size"],
            character_coverage=0.98,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            minloglevel=2,
        )
    return path, sentencepiece.SentencePieceProcessor(model_file=str(path))


@pytest.fixture(scope="session")
def keys(vocabulary):
    """All metadata keys of the tiny model."""
    return config_keys(CONFIG) | vocabulary_keys(vocabulary[1])


@pytest.fixture(scope="session")
def weights():
    """The tiny model's weights by this file's names."""
    return make_weights(CONFIG)


@pytest.fixture(scope="session")
def tensors(weights):
    """The tiny model's weights by GGUF's names."""
    return {gguf_name(name): weight for name, weight in weights.items()}


@pytest.fixture(scope="session")
def model_path(tmp_path_factory, keys, tensors):
    """The tiny model as a GGUF file."""
    return write_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf", keys, tensors)


@pytest.fixture(scope="session")
def model(weights):
    """The tiny model."""
    return make_model(CONFIG, weights)


@pytest.fixture(scope="session")
def tokenizer(vocabulary):
    """The tokenizer of the tiny model."""
    return llama2.Tokenizer.from_file(vocabulary[0])


TOKENS = torch.tensor(np.random.RandomState(1).randint(0, 320, (3, 40)))  # rows of any ids


def assert_close(found, wanted, tolerance=1e-4):
    """Equal to `tolerance` of the largest value wanted."""
    assert found.shape == wanted.shape
    worst, largest = (found - wanted).abs().max().item(), max(1, wanted.abs().max().item())
    assert worst <= tolerance * largest


# --------------------------------------------------------------------------------------------------
# Config


@pytest.mark.parametrize(
    "size, count", [("7b", 6_738_415_616), ("13b", 13_015_864_320), ("70b", 68_976_648_192)]
)
def test_presets_have_the_published_number_of_parameters(size, count):
    with torch.device("meta"):
        model = llama2.Llama(getattr(llama2.Config, f"llama2_{size}")())
    assert sum(p.numel() for p in model.parameters()) == count
    assert "layers.0.self_attn.q_proj.weight" in model.state_dict()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 65}, "hidden_size"),
        ({"hidden_size": 12}, "hidden_size 12"),  # heads of 3 have no pairs
        ({"num_key_value_heads": 3}, "num_key_value_heads 3"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"rope_scaling_factor": math.inf}, "rope_scaling_factor"),
        ({"rope_freq_factors": (1.0,)}, "rope_freq_factors"),
    ],
)
def test_config_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        llama2.Config(**SHAPE | change)


def test_config_is_frozen():
    with pytest.raises(AttributeError):
        CONFIG.hidden_size = 1


# --------------------------------------------------------------------------------------------------
# Layers


def test_rope_shape():
    x = torch.randn(3, 7, 4, CONFIG.head_dim)
    cos, sin = llama2.rope_tables(CONFIG, 7)
    assert cos.shape == sin.shape == (7, CONFIG.head_dim // 2)
    assert llama2.apply_rotary_emb(x, cos, sin).shape == x.shape
    assert llama2.apply_rotary_emb(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_rope_no_nan():
    x = torch.randn(1, 4096, 2, CONFIG.head_dim)
    assert llama2.apply_rotary_emb(x, *llama2.rope_tables(CONFIG, 4096)).isfinite().all()


def test_rope_turns_each_pair_as_a_complex_number():
    """Catches the other pairing (i with i + D/2), which is right for the first token only."""
    x = torch.randn(2, 9, 3, CONFIG.head_dim)
    i = torch.arange(CONFIG.head_dim // 2, dtype=torch.float64)
    angle = torch.outer(torch.arange(9), 10000.0 ** (-2 * i / CONFIG.head_dim))
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    turned = turned * torch.polar(torch.ones_like(angle), angle)[:, None]
    wanted = torch.view_as_real(turned).flatten(-2).float()
    assert_close(llama2.apply_rotary_emb(x, *llama2.rope_tables(CONFIG, 9)), wanted, 1e-6)


def test_rope_sees_distances_only():
    q, k = torch.randn(2, CONFIG.head_dim)
    cos, sin = llama2.rope_tables(CONFIG, 50)

    def place(x, p):
        return llama2.apply_rotary_emb(x.view(1, 1, 1, -1), cos[p][None], sin[p][None])

    scores = [(place(q, p + 5) * place(k, p)).sum() for p in (0, 3, 44)]
    assert max(scores) - min(scores) < 1e-4


def test_rope_tables_stay_exact_far_out():
    """Catches tables in 16 bits, in which neighbouring positions become the same."""
    cos, _ = llama2.rope_tables(CONFIG, 4096)
    assert cos.dtype == torch.float32
    wanted = math.cos(4095 * 10000 ** (-2 / CONFIG.head_dim))
    assert abs(cos[4095, 1].item() - wanted) < 1e-3


def test_rms_norm_shape():
    assert llama2.RMSNorm(64, 1e-5)(torch.randn(2, 5, 64)).shape == (2, 5, 64)


def test_rms_norm_no_nan():
    """Catches squares in float16, which overflow from 256 on, and a division by zero."""
    norm = llama2.RMSNorm(64, 1e-5).half()
    for x in (torch.full((1, 64), 300.0), torch.zeros(1, 64)):
        assert norm(x.half()).isfinite().all()


def test_rms_norm_is_the_formula():
    norm = llama2.RMSNorm(64, 0.5)  # an eps that shows
    norm.weight.data.normal_()
    x = torch.randn(2, 3, 64)
    wanted = F.rms_norm(x.double(), (64,), norm.weight.double(), 0.5).float()
    assert_close(norm(x), wanted, 1e-6)


def qkv(attention, x):
    """What the three projections of an attention layer give for x."""
    return [getattr(attention, f"{letter}_proj")(x) for letter in "qkv"]


def test_qkv_projection_shape(model):
    q, k, v = qkv(model.layers[0].self_attn, torch.randn(2, 5, 64))
    assert q.shape == (2, 5, 64)
    assert k.shape == v.shape == (2, 5, CONFIG.num_key_value_heads * CONFIG.head_dim)


def test_qkv_projection_no_nan(model):
    for projected in qkv(model.layers[0].self_attn, torch.randn(2, 5, 64)):
        assert projected.isfinite().all()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_the_formula(kv_heads):
    """Written out head by head. Catches a wrong scale, mask, or order of the grouped heads."""
    config = llama2.Config(**SHAPE | {"num_key_value_heads": kv_heads})
    attention, T, D = llama2.CausalSelfAttention(config, 0), 6, config.head_dim
    x = torch.randn(2, T, 64)
    cos, sin = llama2.rope_tables(config, T)
    q, k, v = (y.unflatten(-1, (-1, D)) for y in qkv(attention, x))
    q, k = (llama2.apply_rotary_emb(y, cos, sin) for y in (q, k))
    wanted = torch.zeros(2, T, 4, D)
    for b, t, h in np.ndindex(2, T, 4):
        g = h * kv_heads // 4
        scores = (k[b, : t + 1, g] @ q[b, t, h]) / math.sqrt(D)
        wanted[b, t, h] = scores.softmax(0) @ v[b, : t + 1, g]
    wanted = attention.o_proj(wanted.flatten(2))
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    assert_close(attention(x, cos, sin, mask, None), wanted, 1e-5)


def test_mlp_is_the_formula(model):
    """Catches gate and up exchanged."""
    mlp, x = model.layers[0].mlp, torch.randn(3, 64)
    gate = mlp.gate_proj(x)
    assert_close(mlp(x), mlp.down_proj(gate * torch.sigmoid(gate) * mlp.up_proj(x)), 1e-5)


# --------------------------------------------------------------------------------------------------
# Cache


def test_mask_values():
    """Lower right: catches is_causal=True, which is upper left, once something is stored."""
    cache = llama2.Cache(CONFIG)
    assert cache.mask(3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    cache.pos = 2
    assert cache.mask(3).int().tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert cache.mask(2).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert cache.mask(1) is None
    assert cache.mask(3).data_ptr() == cache.mask(3).data_ptr()  # built once


def test_mask_with_padding_hides_filler_and_never_hides_everything():
    cache = llama2.Cache(CONFIG, 2, padding=torch.tensor([0, 2]))
    mask = cache.mask(3).expand(2, 1, 3, 3)[:, 0]
    assert mask[0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert mask[1, 2].int().tolist() == [0, 0, 1]
    assert mask.any(-1).all()


def test_cache_errors_name_both_numbers(model):
    """Nothing is stored and the position stays when tokens do not fit."""
    cache = llama2.Cache(CONFIG, max_seq_len=8)
    model(TOKENS[:1, :6], cache)
    with pytest.raises(ValueError, match=r"8.*6.*3"):
        model(TOKENS[:1, :3], cache)
    assert cache.pos == 6
    model(TOKENS[:1, :2], cache)
    with pytest.raises(ValueError, match="8"):
        model(TOKENS[:1, :1], cache)
    with pytest.raises(ValueError, match=r"9.*8"):
        cache.truncate(9)
    with pytest.raises(ValueError, match="-1"):
        cache.truncate(-1)
    cache.reset()
    assert cache.pos == 0


def test_cache_for_another_batch_is_refused(model):
    with pytest.raises(ValueError, match="rows"):
        model(TOKENS[:2, :4], llama2.Cache(CONFIG, batch_size=3))
    with pytest.raises(ValueError, match=r"\(1, 0\)"):
        model(TOKENS[:1, :0])
    for wrong in ({"batch_size": 0}, {"max_seq_len": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            llama2.Cache(CONFIG, **wrong)


def test_cache_is_allocated_once_to_the_length_asked_for():
    assert llama2.Cache(CONFIG).max_seq_len == CONFIG.max_position_embeddings
    cache = llama2.Cache(CONFIG, 2, 8, torch.bfloat16)
    assert cache.k.shape == cache.v.shape == (2, 2, 2, 8, CONFIG.head_dim)
    assert cache.k.dtype == torch.bfloat16 and cache.cos.dtype == cache.sin.dtype == torch.float32
    place = cache.k.data_ptr()
    make_model().bfloat16()(TOKENS[:2, :4], cache)
    assert cache.k.data_ptr() == place


# --------------------------------------------------------------------------------------------------
# The whole model

# transformers 5.23, float32: logits of make_weights(CONFIG) for the first 32 of TOKENS[0].
GOLDEN = {
    0: [-2.55747, 0.89836, 2.23095, -0.22189, -1.81622, -2.10445, 0.41482, 0.89637],
    15: [-2.08948, 0.34709, -0.6463, -0.86681, 1.25555, 0.38074, 0.3405, 2.44079],
    31: [-0.77474, 2.95821, 0.36937, -2.59838, 2.61025, 0.30019, -0.98091, 1.49082],
}


def in_steps(model, tokens, steps, cache=None):
    """Logits of all positions, computed with a cache in calls of so many tokens."""
    cache = llama2.Cache(model.config, len(tokens)) if cache is None else cache
    parts = tokens.split(steps, dim=1)
    return torch.cat([model(part, cache, all_positions=True) for part in parts], dim=1)


@torch.no_grad()
def test_logits_equal_transformers(weights, model):
    hf = make_hf(CONFIG, weights)
    wanted = hf(TOKENS[:, :32]).logits
    assert wanted.std() > 0.5  # flat logits would prove nothing
    assert_close(model(TOKENS[:, :32]), wanted)
    assert_close(in_steps(model, TOKENS[:, :32], [1] * 32), wanted)


@torch.no_grad()
def test_logits_equal_frozen_ones(model):
    """The same without transformers, so that a run without it proves the pairing and the groups."""
    found = model(TOKENS[:1, :32])[0]
    for position, wanted in GOLDEN.items():
        assert_close(found[position, : len(wanted)], torch.tensor(wanted))


@pytest.mark.parametrize("steps", [[32], [31, 1], [1, 31], [5, 11, 16], [1] * 32])
@torch.no_grad()
def test_cache_in_any_steps_equals_one_pass(model, steps):
    """Catches positions that are off by one and masks that are wrong when something is stored."""
    tokens = TOKENS[:, :32]
    wanted = model(tokens)
    cache = llama2.Cache(CONFIG, len(tokens))
    assert_close(in_steps(model, tokens, steps, cache), wanted)
    assert cache.pos == 32
    cache.reset()
    for part in tokens.split(steps, dim=1):
        last = model(part, cache)
    assert_close(last, wanted[:, -1])


@pytest.mark.parametrize("kept", [0, 1, 10, 31])
@torch.no_grad()
def test_second_turn_after_truncate(model, kept):
    """What was cut off must leave no trace."""
    cache = llama2.Cache(CONFIG)
    model(TOKENS[:1, :32], cache)
    cache.truncate(kept)
    turn = torch.cat([TOKENS[:1, :kept], TOKENS[1:2, :20]], dim=1)
    assert_close(in_steps(model, turn[:, kept:], [7, 1, 12], cache), model(turn)[:, kept:])


@torch.no_grad()
def test_rows_of_a_batch_are_independent(model):
    found = model(TOKENS[:, :20])
    for row, tokens in enumerate(TOKENS[:, :20]):
        assert_close(found[row : row + 1], model(tokens[None]))


@torch.no_grad()
def test_padded_rows_equal_rows_alone(model):
    """Prompts of 20, 13 and 1 tokens, aligned at their ends: prefill in chunks, then single tokens."""
    lengths, new = [20, 13, 1], 6
    tokens = torch.zeros(3, 20 + new, dtype=torch.int64)
    for row, n in enumerate(lengths):
        tokens[row, 20 - n :] = TOKENS[row, : n + new]
    cache = llama2.Cache(CONFIG, 3, padding=torch.tensor([20 - n for n in lengths]))
    found = in_steps(model, tokens, [8, 12] + [1] * new, cache)
    for row, n in enumerate(lengths):
        assert_close(found[row, 20 - n :], model(TOKENS[row : row + 1, : n + new])[0])
    assert found.isfinite().all()  # filler too: a NaN would spread through 0 * NaN


@torch.no_grad()
def test_bfloat16_is_near_float32(model):
    wanted = model(TOKENS[:1, :32])
    low = make_model().bfloat16()
    cache = llama2.Cache(CONFIG, dtype=torch.bfloat16)
    found = in_steps(low, TOKENS[:1, :32], [20] + [1] * 12, cache)
    assert found.dtype == torch.float32
    assert (found - wanted).std() < 0.05 * wanted.std()


@pytest.mark.parametrize("tied", [False, True])
def test_autograd_reaches_every_parameter_and_training_lowers_the_loss(tied):
    torch.manual_seed(0)
    model = llama2.Llama(llama2.Config(**SHAPE | {"tie_word_embeddings": tied}))
    losses = []
    for _ in range(8):
        logits = model(TOKENS[:, :-1])
        assert logits.shape == (3, 39, 320)
        loss = F.cross_entropy(logits.flatten(0, 1), TOKENS[:, 1:].flatten())
        loss.backward()
        for name, p in model.named_parameters():
            assert p.grad.isfinite().all() and p.grad.any(), name
            p.data -= 1.0 * p.grad
            p.grad = None
        losses.append(loss.item())
    assert losses[0] < math.log(320) + 0.5  # a fresh model knows nothing, and does not pretend to
    assert losses[-1] < losses[0] - 0.1


def test_gradient_equals_the_slope():
    """The derivative of the loss along a random direction, from autograd and from two passes."""
    model = make_model().double()
    tokens, parameters = TOKENS[:1, :9], list(model.parameters())

    def loss():
        return model(tokens).double().logsumexp(-1).mean()

    gradients = torch.autograd.grad(loss(), parameters)
    torch.manual_seed(0)
    along, step = [torch.randn_like(p) for p in parameters], 1e-4
    wanted = sum((g * d).sum() for g, d in zip(gradients, along, strict=True)).item()
    ends = []
    with torch.no_grad():
        for sign in (1, -2):
            for p, d in zip(parameters, along, strict=True):
                p += sign * step * d
            ends.append(loss().item())
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx(wanted, rel=0.02)


def test_a_cache_takes_no_gradient(model):
    cache = llama2.Cache(CONFIG)
    assert not model(TOKENS[:1, :3], cache).requires_grad and not cache.k.requires_grad


# --------------------------------------------------------------------------------------------------
# The model half by itself


def model_half():
    """The text from Config to the end of the model, to be cut out as it stands."""
    lines = SCRIPT.read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("class Config")) - 1
    end = next(i for i, line in enumerate(lines) if line.startswith("# The end of the model"))
    assert lines[start].startswith("@dataclass")
    return lines[start : end - 1]


def test_model_half_is_pure():
    """It knows torch, math and dataclasses; no files, no printing, no formats of weights."""
    half = "\n".join(model_half())
    assert len(model_half()) < 400
    tree = ast.parse(half)
    assert not [n for n in ast.walk(tree) if isinstance(n, (ast.Import, ast.ImportFrom))]
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    modules = {name for name in names if inspect.ismodule(getattr(llama2, name, None))}
    assert modules == {"math", "torch", "F", "nn"}
    assert not names & {"print", "open", "os", "sys", "Path", "eval", "exec"}
    assert not [word for word in ("gguf", "ggml", "quant", "import ") if word in half.lower()]


@torch.no_grad()
def test_model_half_runs_cut_out(weights, model):
    header = (
        "from __future__ import annotations\nimport math, torch\nimport torch.nn.functional as F\n"
        "from dataclasses import dataclass, field, fields\nfrom torch import Tensor, nn\n"
    )
    cut = {"__name__": "cut"}
    sys.modules["cut"] = type(sys)("cut")  # dataclass looks its module up
    exec(compile(header + "\n".join(model_half()), "cut", "exec"), cut)  # noqa: S102
    copy = cut["Llama"](cut["Config"](**SHAPE)).eval()
    copy.load_state_dict(model.state_dict())
    assert_close(copy(TOKENS[:1, :9], cut["Cache"](copy.config)), model(TOKENS[:1, :9])[:, -1])


def test_written_names_exist():
    """The names that others rely on, with their parameters in this order."""
    signatures = {
        "Llama": "config",
        "Cache": "config batch_size max_seq_len dtype device",
        "load": "path device dtype",
        "encode_chat": "tokenizer messages",
        "sample": "logits temperature top_k top_p min_p generator",
        "generate": "model prompt max_new_tokens temperature top_k top_p min_p seed",
        "rope_tables": "config length device",
        "apply_rotary_emb": "x cos sin",
        "RMSNorm": "size eps",
        "CausalSelfAttention": "config layer",
        "MLP": "config",
        "Block": "config layer",
        "stream_text": "model tokenizer prompt first stop",
        "main": "argv",
    }
    for name, wanted in signatures.items():
        found = list(inspect.signature(getattr(llama2, name)).parameters)
        assert found[: len(wanted.split())] == wanted.split(), name
    assert list(inspect.signature(llama2.Llama.forward).parameters) == [
        *("self", "tokens", "cache", "all_positions")
    ]
    for name in ("from_gguf", "from_file", "encode", "decode"):
        assert callable(getattr(llama2.Tokenizer, name))
    for name in ("reset", "truncate", "mask", "update"):
        assert callable(getattr(llama2.Cache, name))
    for name in ("QuantizedLinear", "StreamDecoder", "Report", "Tokenizer"):
        assert inspect.isclass(getattr(llama2, name))


# --------------------------------------------------------------------------------------------------
# GGUF: the reader


def assert_same_as_gguf_reader(path):
    """All keys, and the type, shape and bytes of all tensors."""
    ours, theirs = llama2.GGUF(path), gguf.GGUFReader(path)
    wanted = {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(ours.metadata) == list(wanted)
    for key, value in wanted.items():
        assert ours.metadata[key] == value, key
    assert set(ours.tensors) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.ggml_type == tensor.tensor_type.name
        assert list(found.shape) == tensor.shape.tolist()[::-1]
        assert found.read().numpy().tobytes() == tensor.data.tobytes(), tensor.name
    return ours


def test_reader_equals_gguf_reader(model_path):
    assert_same_as_gguf_reader(model_path)


def test_reader_equals_gguf_reader_on_every_value_type(tmp_path):
    writer, types = gguf.GGUFWriter(tmp_path / "x.gguf", "llama"), gguf.GGUFValueType
    values = {
        "UINT8": 255,
        "INT8": -128,
        "UINT16": 65535,
        "INT16": -32768,
        "UINT32": 2**32 - 1,
        "INT32": -(2**31),
        "FLOAT32": 0.1,
        "BOOL": True,
        "STRING": "\u65e5\n\U0001f999",
        "UINT64": 2**64 - 1,
        "INT64": -(2**63),
        "FLOAT64": 0.1,
    }
    for name, value in values.items():
        writer.add_key_value(f"one.{name}", value, types[name])
        writer.add_key_value(f"many.{name}", [value] * 3, types.ARRAY, types[name])
    writer.add_key_value("false", False, types.BOOL)
    writer.add_custom_alignment(64)
    for i, dtype in enumerate(("float16", "float32")):
        writer.add_tensor(f"tensor.{i}", np.arange(24, dtype=dtype).reshape(2, 3, 4)[: i + 1])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = assert_same_as_gguf_reader(tmp_path / "x.gguf").metadata
    assert found["false"] is False and found["one.BOOL"] is True


def test_reader_equals_gguf_reader_on_a_large_vocabulary(tmp_path):
    """A header like that of a published 7B file, but a quarter of its tokens and merges."""
    n = 8000
    keys = config_keys(llama2.Config()) | {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [f"\u2581piece{i}" for i in range(n)],
        "tokenizer.ggml.scores": [float(-i) for i in range(n)],
        "tokenizer.ggml.token_type": [1 + i % 6 for i in range(n)],
        "tokenizer.ggml.merges": [f"\u2581a{i} b{i}" for i in range(2 * n)],
    }
    tensors = {f"tensor.{i}.weight": np.full((2, 32), i, np.float32) for i in range(291)}
    assert_same_as_gguf_reader(write_gguf(tmp_path / "large.gguf", keys, tensors))


@pytest.mark.parametrize("part", [0, 3, 11, 23, 24, 100, 1000, 9000, -70000, -1])
def test_truncated_files_are_refused(tmp_path, model_path, part):
    path = tmp_path / "cut.gguf"
    path.write_bytes(model_path.read_bytes()[:part])
    with pytest.raises(ValueError, match=r"cut\.gguf"):
        llama2.open_checkpoint(path)


@pytest.mark.parametrize(
    "start, message",
    [
        (b"GGML" + struct.pack("<I", 3), "GGML"),
        (b"GGUF" + struct.pack("<I", 1), "version 0x1"),
        (b"GGUF" + struct.pack(">I", 3), "little-endian"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 0), "bad.gguf"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**60), "bad.gguf"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**62), "beyond"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"k", 13), "type 13"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60), "array"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 5, 2**60), "array"),
        (b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1), "array"),
        (b"GGUF" + struct.pack("<IQQQ1s", 3, 0, 1, 1, b"\xff"), "UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 99, 0), "type 99"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 33, 2, 0), "33"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 2**63, 0, 0), "t of type"),
        (
            b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 0, 2**63),
            "t: offset|t ends",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_headers_are_refused(tmp_path, start, message):
    """Each is met before anything of the size it claims is allocated."""
    path = tmp_path / "bad.gguf"
    path.write_bytes(start + bytes(64))
    with pytest.raises(ValueError, match=message):
        llama2.GGUF(path)


def test_corrupted_headers_never_end_in_another_error(tmp_path, model_path):
    """Flips bytes of the header: the file is read or refused, never a KeyError or the like."""
    original, chance = model_path.read_bytes(), random.Random(0)
    path, header = tmp_path / "flipped.gguf", llama2.GGUF(model_path).offset
    refused = 0
    for _ in range(150):
        data = bytearray(original)
        for _ in range(chance.choice((1, 1, 1, 8))):
            data[chance.randrange(header)] = chance.choice((0, 1, 127, 128, 255))
        path.write_bytes(data)
        try:
            llama2.open_checkpoint(path).tokenizer()
        except (ValueError, OSError):
            refused += 1
    assert 20 < refused < 150


# --------------------------------------------------------------------------------------------------
# GGUF: from a file to a model


def logits_of(path, **options):
    """What the model in a file says to TOKENS."""
    model, _ = llama2.load(path, **options)
    with torch.no_grad():
        return model(TOKENS[:2, :24])


@torch.no_grad()
def test_gguf_equals_the_same_weights_without_a_file(model_path, model):
    loaded, tokenizer = llama2.load(model_path)
    assert loaded.config == model.config and tokenizer.vocab_size == 320
    assert_close(loaded(TOKENS[:2, :24]), model(TOKENS[:2, :24]), 1e-6)


def test_defaults_of_keys_that_may_be_absent(tmp_path, keys, tensors):
    """And the keys that llama.cpp ignores for this architecture are ignored."""
    optional = {
        "llama.rope.dimension_count": 16,
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.attention.head_count_kv": [2, 2],
        "llama.feed_forward_length": [96, 96],
        "llama.vocab_size": 31000,
        "llama.expert_count": 0,
        "llama.attention.sliding_window": 4,
        "llama.attention.scale": 3.0,
        "llama.logit_scale": 3.0,
        "general.type": "model",
        "general.alignment": 64,
        "general.file_type": 7,
        "tokenizer.ggml.merges": ["a b"],
    }
    path = write_gguf(tmp_path / "all.gguf", keys | optional, tensors)
    assert llama2.open_checkpoint(path).config == CONFIG
    tokenizer_ids = {f"tokenizer.ggml.{name}_token_id": None for name in ("bos", "eos", "unknown")}
    heads = llama2.Config(**SHAPE | {"num_key_value_heads": 4})
    weights = {gguf_name(n): w for n, w in make_weights(heads).items()}
    least = keys | tokenizer_ids | {"llama.attention.head_count_kv": None}
    found = llama2.open_checkpoint(write_gguf(tmp_path / "least.gguf", least, weights))
    assert found.config == heads  # with theta 10000, factor 1, BOS 1, EOS 2
    assert found.tokenizer().encode("fox")[0] == 1


def test_values_of_keys(tmp_path, keys, tensors):
    changed = {
        "llama.rope.freq_base": 1e6,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "llama.context_length": 48,
        "tokenizer.ggml.eos_token_id": 5,
    }
    config = llama2.open_checkpoint(write_gguf(tmp_path / "x.gguf", keys | changed, tensors)).config
    assert config.rope_theta == 1e6 and config.rms_norm_eps == pytest.approx(1e-6)
    assert config.max_position_embeddings == 48 and config.eos_token_id == 5


@pytest.mark.parametrize(
    "changed, factor",
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, 4),
        ({"llama.rope.scaling.factor": 4.0}, 4),  # active without a type
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, 1),
        ({"llama.rope.scale_linear": 4.0}, 4),  # the key of older files
        ({"llama.rope.scaling.factor": 0.0}, 1),
        ({"llama.rope.scaling.type": "linear"}, 1),
    ],
)
@torch.no_grad()
def test_linear_rope_scaling(tmp_path, keys, weights, tensors, changed, factor):
    found = logits_of(write_gguf(tmp_path / "x.gguf", keys | changed, tensors))
    scaled = llama2.Config(**SHAPE, rope_scaling_factor=float(factor))
    assert_close(found, make_model(scaled, weights)(TOKENS[:2, :24]), 1e-6)
    if changed.get("llama.rope.scaling.type") == "linear":
        options = {"rope_type": "linear", "factor": float(factor), "rope_theta": 10000.0}
        hf = make_hf(CONFIG, weights, rope_parameters=options)
        assert_close(found, hf(TOKENS[:2, :24]).logits)


@torch.no_grad()
def test_rope_freqs_divide_the_frequencies(tmp_path, keys, weights, tensors):
    """The tensor that converters write for transformers' llama3 scaling; catches multiplying."""
    hf = make_hf(
        CONFIG,
        weights,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    )
    plain = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    divisors = plain / hf.model.rotary_emb.inv_freq
    assert divisors.max() > 4 and divisors.min() == pytest.approx(1)
    path = tmp_path / "x.gguf"
    write_gguf(path, keys, tensors | {"rope_freqs.weight": divisors.numpy()})
    assert_close(logits_of(path), hf(TOKENS[:2, :24]).logits)


@torch.no_grad()
def test_tied_embeddings(tmp_path, keys, weights, tensors):
    """Only the absence of the output matrix ties it."""
    path = write_gguf(tmp_path / "x.gguf", keys, tensors | {"output.weight": (None, None)})
    loaded, _ = llama2.load(path)
    assert loaded.config.tie_word_embeddings
    assert loaded.lm_head.weight is loaded.embed_tokens.weight
    wanted = dict(weights) | {"lm_head.weight": weights["embed_tokens.weight"]}
    assert_close(loaded(TOKENS[:2, :24]), make_model(CONFIG, wanted)(TOKENS[:2, :24]), 1e-6)


@pytest.fixture
def split_paths(tmp_path, keys, tensors):
    """The tiny model in several files."""
    write_gguf(tmp_path / "x.gguf", keys, tensors, split_max_tensors=8)
    paths = sorted(tmp_path.glob("x-*.gguf"))
    assert len(paths) == 3
    return paths


@torch.no_grad()
def test_split_files(split_paths, model):
    assert_close(logits_of(split_paths[0]), model(TOKENS[:2, :24]), 1e-6)
    with pytest.raises(ValueError, match="00001-of-00003"):
        llama2.open_checkpoint(split_paths[1])
    split_paths[2].unlink()
    with pytest.raises(FileNotFoundError, match="00003-of-00003"):
        llama2.open_checkpoint(split_paths[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16])
@torch.no_grad()
def test_files_of_16_bits(tmp_path, keys, weights, kind, dtype):
    """In float32 exact, in 16 bits near; norms stay in float32 in the file, as converters write."""
    rounded, stored = dict(weights), {}
    for name, weight in weights.items():
        blocks, as_kind = weight, None
        if "norm" not in name:
            blocks, as_kind = gguf.quants.quantize(weight, kind), kind
            rounded[name] = gguf.quants.dequantize(blocks, kind)
        stored[gguf_name(name)] = (blocks, as_kind)
    path = write_gguf(tmp_path / "x.gguf", keys, stored)
    wanted = make_model(CONFIG, rounded)(TOKENS[:2, :24])
    found = logits_of(path, dtype=dtype)
    assert found.dtype == torch.float32
    if dtype == torch.float32:
        assert_close(found, wanted, 1e-5)
    assert (found - wanted).std() < 0.05 * wanted.std()


REFUSED = {
    "architecture": ({}, {}, "falcon", "falcon"),
    "adapter": ({"general.type": "adapter"}, {}, "llama", "adapter"),
    "experts": ({"llama.expert_count": 8}, {}, "llama", "8 experts"),
    "llama 3": ({"tokenizer.ggml.model": "gpt2"}, {}, "llama", "gpt2"),
    "no vocabulary": ({"tokenizer.ggml.model": "no_vocab"}, {}, "llama", "no_vocab"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, {}, "llama", "yarn"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, {}, "llama", "longrope"),
    "head size": ({"llama.attention.key_length": 32}, {}, "llama", "key_length is 32"),
    "rope size": ({"llama.rope.dimension_count": 8}, {}, "llama", "dimension_count is 8"),
    "uneven heads": ({"llama.attention.head_count": [4, 2]}, {}, "llama", "head_count"),
    "alignment": ({"general.alignment": 33}, {}, "llama", "alignment is 33"),
    "a string": ({"llama.block_count": "2"}, {}, "llama", "block_count"),
    "layers": ({"llama.block_count": 2**31 - 1}, {}, "llama", "2147483647"),
    "no heads": ({"llama.attention.head_count": 0}, {}, "llama", "head"),
    "one layer too many": ({"llama.block_count": 3}, {}, "llama", r"missing.*blk\.2\."),
    "one layer too few": ({"llama.block_count": 1}, {}, "llama", r"unknown.*blk\.1\."),
    "kv heads": ({"llama.attention.head_count_kv": None}, {}, "llama", "attn_k.weight is .32, 64"),
    "bias": ({}, {"blk.0.attn_q.bias": np.ones(64, np.float32)}, "llama", r"blk\.0\.attn_q\.bias"),
    "fused": ({}, {"blk.0.attn_qkv.weight": np.ones((99, 64), np.float32)}, "llama", "qkv|attn_v"),
    "extra": ({}, {"extra.weight": np.ones(3, np.float32)}, "llama", "unknown.*extra.weight"),
    "missing": ({}, {"blk.1.ffn_up.weight": (None, None)}, "llama", r"missing.*blk\.1\.ffn_up"),
    "no embedding": ({}, {"token_embd.weight": (None, None)}, "llama", "token_embd"),
    "shape": ({}, {"output.weight": np.ones((320, 32), np.float32)}, "llama", "output.*320, 32"),
    "rows": ({}, {"token_embd.weight": np.ones((9, 64), np.float32)}, "llama", "9"),
    "divisors": ({}, {"rope_freqs.weight": np.zeros(8, np.float32)}, "llama", "rope_freq"),
    "scores": ({"tokenizer.ggml.scores": [0.0]}, {}, "llama", "scores.* 1 "),
    "eos": ({"tokenizer.ggml.eos_token_id": 320}, {}, "llama", "320"),
}
for name in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
    REFUSED[name] = ({f"llama.{name}": None}, {}, "llama", name)
for name in ("attention.head_count", "attention.layer_norm_rms_epsilon"):
    REFUSED[name] = ({f"llama.{name}": None}, {}, "llama", name)
for name in ("model", "tokens", "scores"):
    REFUSED[f"no {name}"] = ({f"tokenizer.ggml.{name}": None}, {}, "llama", f"ggml.{name}|0 {name}")


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_are_not_llama_2_are_refused_by_name(tmp_path, keys, tensors, case):
    """Silently ignored, each of them would give a model that writes something else."""
    changed, other, arch, message = REFUSED[case]
    path = write_gguf(tmp_path / "x.gguf", keys | changed, tensors | other, arch)
    with pytest.raises(ValueError, match=message):
        llama2.open_checkpoint(path).tokenizer()


def test_paths_that_are_no_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing"):
        llama2.load(tmp_path / "nothing.gguf")
    with pytest.raises(ValueError, match=tmp_path.name):
        llama2.load(tmp_path)
    (tmp_path / "text.gguf").write_text("not a model, but long enough to be one")
    with pytest.raises(ValueError, match="text.gguf"):
        llama2.load(tmp_path / "text.gguf")


# --------------------------------------------------------------------------------------------------
# Quantised weights

# Where the float16 scales are in a block; random bytes elsewhere are legal values.
SCALES = {
    **{name: (0,) for name in ("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS", "IQ1_S")},
    **{name: (0,) for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")},
    **{name: (0, 2) for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")},
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "MXFP4": (),
    "NVFP4": (),
    "IQ1_M": (),
}


def random_blocks(kind, rows, columns, seed):
    """Random blocks (rows, bytes) of a type, with weights of a sensible size."""
    state, (elements, size) = np.random.RandomState(seed), gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = state.randint(0, 256, (rows, columns // elements, size)).astype(np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] = 120 + blocks[..., 0] % 4  # an exponent
    elif kind == "NVFP4":
        blocks[..., :4] = 16 + blocks[..., :4] % 16
    elif kind == "IQ1_M":
        blocks[..., 55] = blocks[..., 55] % 16 + 16  # the top of a scattered float16
    scales = {o: state.uniform(0.5, 1.5, blocks.shape[:2]) for o in SCALES[kind]}
    for factor in (1.0, None):
        if factor is None:
            factor = 0.05 / gguf.quants.dequantize(blocks.reshape(rows, -1), Kind[kind]).std()
        for offset, scale in scales.items():
            half = (factor * scale).astype("<f2")[..., None]
            blocks[..., offset : offset + 2] = half.view(np.uint8)
    return blocks.reshape(rows, -1)


WIDE = llama2.Config(
    **SHAPE | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
)


def quantised(vocabulary, path, kinds, config=WIDE):
    """A file with blocks of these types in turn, and its weights as gguf dequantises them."""
    weights, stored = make_weights(config), {}
    for i, name in enumerate(sorted(weights)):
        blocks, kind = weights[name], None
        if "norm" not in name:
            kind = Kind[kinds[i % len(kinds)]]
            blocks = random_blocks(kind.name, *weights[name].shape, seed=i)
            weights[name] = gguf.quants.dequantize(blocks, kind)
            assert np.isfinite(weights[name]).all()
        stored[gguf_name(name)] = (blocks, kind)
    if config.tie_word_embeddings:
        assert "output.weight" not in stored
    write_gguf(path, config_keys(config) | vocabulary_keys(vocabulary[1]), stored)
    return path, weights


def compiled_kernels():
    """The library; where there is a compiler, it must come out."""
    if not any(map(shutil.which, ("g++", "clang++"))) and "CXX" not in os.environ:
        pytest.skip("no C++ compiler")
    return llama2.kernels()[0]


@pytest.mark.parametrize("native", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("kind", [name for name in SCALES if hasattr(Kind, name)])
@torch.no_grad()
def test_every_type_gives_the_logits_of_dequantised_weights(
    tmp_path, vocabulary, monkeypatch, kind, native
):
    """Blocks are random bytes: every bit of every field counts. Each linear layer, then the model."""
    if native and kind not in llama2.GGML_TYPES:
        return  # dense after loading, the same either way
    if native:
        compiled_kernels()
    path, weights = quantised(vocabulary, tmp_path / "x.gguf", [kind])
    loaded = llama2.build_model(llama2.open_checkpoint(path), compile=native)
    monkeypatch.setattr(llama2, "CHUNK", 2**14)  # several chunks in each matrix
    for name, module in loaded.named_modules():
        if name.endswith("_proj") or name == "lm_head":
            weight = torch.from_numpy(weights[f"{name}.weight"])
            torch.manual_seed(0)
            for rows in (
                ((1,), (2, 1), (3,), (5,), (8,), (9,), (2, 24)) if native else ((2, 1), (24,))
            ):
                x = torch.randn(*rows, weight.shape[1])
                assert_close(module(x), F.linear(x, weight), 1e-5)
            if isinstance(module, llama2.QuantizedLinear):
                assert bool(module.native) == native
                for dtype in (torch.bfloat16, torch.float16):
                    found = module(x.to(dtype))
                    assert found.dtype == dtype
                    assert_close(found.float(), F.linear(x, weight), 0.02)
    found = loaded.embed_tokens(TOKENS[:2, :24])
    assert_close(found, torch.from_numpy(weights["embed_tokens.weight"])[TOKENS[:2, :24]], 1e-6)
    wanted = make_model(WIDE, weights)(TOKENS[:2, :24])
    assert wanted.std() > 0.1
    assert_close(loaded(TOKENS[:2, :24]), wanted)
    assert_close(in_steps(loaded, TOKENS[:2, :24], [20, 1, 1, 1, 1]), wanted)


def wide_blocks(kind, rows=48, columns=512):
    """Blocks of a type that GGML_TYPES has, and what they mean."""
    if kind in llama2.DENSE:
        torch.manual_seed(0)
        stored = torch.randn(rows, columns).to(llama2.DENSE[kind])
        return stored.view(torch.uint8), stored.float()
    blocks = random_blocks(kind, rows, columns, seed=1)
    return torch.from_numpy(blocks), torch.from_numpy(gguf.quants.dequantize(blocks, Kind[kind]))


@pytest.mark.parametrize("kind", llama2.GGML_TYPES)
@torch.no_grad()
def test_fast_layers_round_what_enters_them(kind, monkeypatch):
    """To 16-bit integers up to 16 rows, to bfloat16 above; the errors are those that are told."""
    monkeypatch.setattr(llama2, "has_bfloat16", lambda: True)
    blocks, weight = wide_blocks(kind, rows=53)
    layer = llama2.QuantizedLinear(blocks, kind, compiled_kernels(), activation_bits=16)
    exact = llama2.QuantizedLinear(blocks, kind, compiled_kernels())
    torch.manual_seed(2)
    for rows in (1, 2, 3, 7, 16):
        x = torch.randn(rows, 512) * torch.logspace(-3, 3, 512)  # large and small side by side
        wanted = F.linear(x, weight)
        assert_close(layer(x), wanted, 1e-4)
        assert_close(exact(x), wanted, 1e-5)
        rounds = torch.backends.cpu.get_cpu_capability() == "AVX512" and kind not in llama2.DENSE
        assert torch.equal(layer(x), exact(x)) == (not rounds)
    x[1, 500] = math.nan
    assert layer(x)[1].isnan().all() and not layer(x)[0].isnan().any()
    assert not layer(torch.zeros(2, 512)).any()
    for shape in ((2, 12), (33,), (49,), (64,), (65,), (130,)):
        x = torch.randn(*shape, 512)
        assert_close(exact(x), F.linear(x, weight), 1e-5)
        for _ in range(2):  # with the kernel, if the processor has the instructions, and with torch
            assert_close(layer(x), F.linear(x.bfloat16(), weight.bfloat16()).float(), 1e-2)
            assert_close(layer(x), F.linear(x, weight), 1e-2)
            many, layer.native["many"] = layer.native.get("many"), None
        layer.native["many"] = many
    unpacked = torch.empty(53, 512, dtype=torch.bfloat16)
    count = unpacked.numel() // max(32, llama2.GGML_TYPES[kind][0])
    layer.native[torch.bfloat16](blocks.data_ptr(), unpacked.data_ptr(), count)
    # Rounded once: all but those in the middle of two numbers are the same.
    assert (unpacked == weight.bfloat16()).float().mean() > 0.999
    assert_close(unpacked.float(), weight, 2**-8)


@pytest.mark.parametrize("kind", llama2.GGML_TYPES)
@torch.no_grad()
def test_activations_of_8_bits(kind):
    """Each block of x is rounded to 127 steps up and down, where the CPU multiplies such integers."""
    blocks, weight = wide_blocks(kind, rows=53)
    library = compiled_kernels()
    layer = llama2.QuantizedLinear(blocks, kind, library, activation_bits=8)
    torch.manual_seed(2)
    for rows in (1, 2, 3, 7, 16, 17, 33, 64, 65, 130):
        x = torch.randn(rows, 512) * torch.logspace(-3, 3, 512)
        x[0, :256] = 0
        assert_close(layer(x), F.linear(x, weight), 4e-2)
        whole = x.view(rows, -1, llama2.GGML_TYPES[kind][0])
        step = (whole.abs().amax(2, keepdim=True) / 127).clamp(min=1e-30)
        rounded = ((whole / step).round() * step).view(rows, 512)
        as_16 = kind in llama2.DENSE or (kind == "Q8_0" and rows <= 16)
        if hasattr(library, "product8_Q4_0") and not as_16:
            assert_close(layer(x), F.linear(rounded, weight), 1e-4)
        x[0, 500] = math.nan
        assert layer(x)[0].isnan().all() and not layer(x)[1:].isnan().any()


def native_layers(vocabulary, path, kv_heads):
    """A quantised model and its NativeLayers, made able to take any number of tokens."""
    compiled_kernels()
    config = dataclasses.replace(
        WIDE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
    )
    path, _ = quantised(vocabulary, path, ["Q4_K", "Q5_1", "Q8_0", "Q6_K"], config)
    model = llama2.build_model(llama2.open_checkpoint(path))
    assert isinstance(model.run_layers, llama2.NativeLayers)
    for layer in model.layers.modules():
        if isinstance(layer, llama2.QuantizedLinear):
            layer.native["many"] = layer.native["few"]
    return config, model, llama2.NativeLayers(model, compiled_kernels())


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_native_layers_do_what_the_layers_do(tmp_path, vocabulary, kv_heads):
    """Chunk after chunk, in batches: its output, and what it stores."""
    config, model, native = native_layers(vocabulary, tmp_path / "x.gguf", kv_heads)
    torch.manual_seed(0)
    for B, chunks in ((1, (1, 5, 1, 64, 1)), (2, (3, 8, 1)), (1, (130, 17, 1)), (2, (65, 70))):
        ours, theirs = (llama2.Cache(config, B, 201) for _ in range(2))
        for T in chunks:
            x = torch.randn(B, T, 256)
            rest = *theirs.rope(T), theirs.mask(T)
            wanted, before = llama2.Llama.run_layers(model, x, *rest, theirs), x.clone()
            assert_close(native(x, *rest, ours), wanted, 1e-5)
            assert torch.equal(x, before)
            ours.advance(T), theirs.advance(T)
        for found, wanted in ((ours.k, theirs.k), (ours.v, theirs.v)):
            assert wanted[:, :, :, : ours.pos].any() and not found[:, :, :, ours.pos :].any()
            assert_close(found, wanted, 1e-5)
    x = torch.randn(1, 20, 256)
    x[0, 11, 5] = math.nan  # is not lost
    cache = llama2.Cache(config)
    assert native(x, *cache.rope(20), cache.mask(20), cache)[0, 11:].isnan().all()


@pytest.mark.parametrize("bits", [16, 8])
@torch.no_grad()
def test_native_layers_that_round(tmp_path, vocabulary, bits):
    """Prompts, too, where there are products for them: the same layers, in another order of sums."""
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["Q4_K", "Q5_1", "Q8_0", "Q6_K"])
    library = compiled_kernels()
    model = llama2.build_model(llama2.open_checkpoint(path), activation_bits=bits)
    products = {"many"} if hasattr(library, f"product{bits}_Q4_0") else set()
    assert set(model.run_layers.packed) == {"few"} | products
    for T in (1, 9, 40, 130):
        ours, theirs = (llama2.Cache(WIDE, 1, 200) for _ in range(2))
        x = torch.randn(1, T, 256)
        rest = *theirs.rope(T), theirs.mask(T)
        wanted = llama2.Llama.run_layers(model, x, *rest, theirs)
        assert_close(model.run_layers(x, *rest, ours), wanted, 0.05 if bits == 8 else 0.02)
        assert_close(ours.v, theirs.v, 0.05 if bits == 8 else 0.02)


@torch.no_grad()
def test_native_layers_leave_the_rest_to_the_layers(tmp_path, vocabulary, monkeypatch):
    """Padding, hooks, 16 bits, no cache, a step that is compiled."""
    config, model, native = native_layers(vocabulary, tmp_path / "x.gguf", 2)
    calls, run_layers, block = [], llama2.Llama.run_layers, model.layers[1]
    monkeypatch.setattr(
        llama2.Llama, "run_layers", lambda *args: calls.append(args) or run_layers(*args)
    )
    x, cache = torch.randn(2, 3, 256), llama2.Cache(config, 2)
    native(x, *cache.rope(3), cache.mask(3), cache)
    assert not calls
    padded = llama2.Cache(config, 2, padding=torch.tensor([0, 1]))
    step = llama2.StaticCache(cache, 8)
    for inputs, other in ((x, padded), (x[:, :1], step)):
        T = inputs.shape[1]
        native(inputs, *other.rope(T), other.mask(T), other)
    native(x, *cache.rope(3), None, None)
    seen = []
    for part in (block, block.mlp, block.self_attn, block.input_layernorm, block.mlp.down_proj):
        for register in (part.register_forward_hook, part.register_forward_pre_hook):
            hook = register(lambda *args: seen.append(args))
            native(x, *cache.rope(3), cache.mask(3), cache)
            hook.remove()
    assert len(calls) == 13 and len(seen) == 10
    calls.clear()
    mlp, block.mlp = block.mlp, torch.nn.Identity()  # what stands in the model counts
    assert_close(native(x, *cache.rope(3), cache.mask(3), cache), run_layers(*calls.pop()), 1e-6)
    block.mlp = mlp
    block.post_attention_layernorm.weight = torch.nn.Parameter(torch.full((256,), 3.0))
    wanted = run_layers(model, x, *cache.rope(3), cache.mask(3), cache)
    assert_close(native(x, *cache.rope(3), cache.mask(3), cache), wanted, 1e-5)
    last = model.layers.pop(-1)
    assert_close(native(x, *cache.rope(3), cache.mask(3), cache), run_layers(*calls.pop()), 1e-6)
    model.layers.append(last)
    native(x, *cache.rope(3), cache.mask(3), cache)
    assert not calls
    half = llama2.Cache(config, 2, dtype=torch.bfloat16)
    model.bfloat16()
    native(x.bfloat16(), *half.rope(3), half.mask(3), half)
    native(x, *cache.rope(3), cache.mask(3), cache)  # the norms are not what the kernels read
    assert len(calls) == 2
    alive = weakref.ref(model)
    calls.clear()
    del model
    assert alive() is None  # at once, with its weights


@pytest.mark.parametrize("kind", llama2.GGML_TYPES)
@torch.no_grad()
def test_fast_layers_without_a_compiler(kind, monkeypatch):
    """Torch's own products with 16-bit matrices and 4-bit integers, where memory is free."""
    blocks, weight = wide_blocks(kind)
    layer = llama2.QuantizedLinear(blocks, kind, activation_bits=16)
    assert (layer.packed is None) == (kind == "F32")
    assert llama2.QuantizedLinear(blocks, kind).packed is None
    torch.manual_seed(3)
    for rows in (1, 5, 16):
        x = torch.randn(rows, 1, 512)
        assert layer(x).dtype == torch.float32 and layer(x).shape == (rows, 1, 48)
        assert_close(layer(x), F.linear(x, weight), 1.5e-2)
    odd = llama2.QuantizedLinear(blocks[:40], kind, activation_bits=16)  # no multiple of 16 rows
    assert_close(odd(x), F.linear(x, weight[:40]), 1.5e-2)
    monkeypatch.setattr(llama2, "free_memory", lambda device: 2 * blocks.nbytes)
    scarce = llama2.QuantizedLinear(blocks, kind, activation_bits=16)
    assert (scarce.packed is None) == (kind not in ("F16", "BF16"))
    assert_close(scarce(x), F.linear(x, weight), 1.5e-2)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q2_K", "Q8_0", "Q3_K", "Q4_K", "Q6_K"])
@torch.no_grad()
def test_layers_compile_as_one_graph(kind):
    """What a GPU runs: traced whole, few rows as one fused sum, many as a product of matrices."""
    blocks = torch.from_numpy(random_blocks(kind, 40, 256, seed=0))
    layer = llama2.QuantizedLinear(blocks, kind)
    torch.compiler.reset()  # the limit on recompilations is for all tests together
    traced = torch.compile(layer, backend="eager", fullgraph=True)
    for rows in (1, 4, 40):
        x = torch.randn(rows, 256)
        assert_close(traced(x), F.linear(x, llama2.dequantize(blocks, kind)), 1e-5)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0])
@torch.no_grad()
def test_widths_that_are_no_multiple_of_the_kernels(tmp_path, vocabulary, kind):
    """Rows of 40 and 72 numbers: where a kernel reads 32 at a time, it would read the next row."""
    narrow = {"hidden_size": 40, "intermediate_size": 72, "num_attention_heads": 2}
    config = llama2.Config(**SHAPE | narrow | {"num_key_value_heads": 1})
    weights, stored = make_weights(config), {}
    for name, weight in weights.items():
        fits = "norm" not in name and weight.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0] == 0
        blocks = gguf.quants.quantize(weight, kind) if fits else weight
        weights[name] = gguf.quants.dequantize(blocks, kind) if fits else weight
        stored[gguf_name(name)] = (blocks, kind if fits else None)
    path = tmp_path / "x.gguf"
    write_gguf(path, config_keys(config) | vocabulary_keys(vocabulary[1]), stored)
    loaded, _ = llama2.load(path)
    wanted = make_model(config, weights)(TOKENS[:2, :24])
    assert_close(in_steps(loaded, TOKENS[:2, :24], [20, 1, 1, 2]), wanted)


def test_without_a_compiler_a_warning_says_so(tmp_path, vocabulary, monkeypatch):
    """And the model runs all the same."""

    def fail():
        raise OSError("no C++ compiler")

    path, weights = quantised(vocabulary, tmp_path / "x.gguf", ["Q4_0"])
    monkeypatch.setattr(llama2, "kernels", fail)
    with pytest.warns(UserWarning, match="no C.. compiler"):
        found = logits_of(path)
    assert_close(found, make_model(WIDE, weights)(TOKENS[:2, :24]))


@pytest.fixture
def three_threads():
    """For one test, more threads than the others have."""
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@torch.no_grad()
def test_types_are_read_per_tensor(tmp_path, vocabulary, three_threads):
    """A file called Q4_K_M holds several types, and its header's file_type names but one."""
    path, weights = quantised(vocabulary, tmp_path / "x.gguf", ["Q4_K", "Q6_K", "Q8_0", "IQ4_NL"])
    assert len({w.ggml_type for w in llama2.GGUF(path).tensors.values()}) == 5
    assert_close(logits_of(path), make_model(WIDE, weights)(TOKENS[:2, :24]))
    wanted = make_model(WIDE, weights)(TOKENS[:2, :24])
    found = logits_of(path, dtype=torch.bfloat16)
    assert (found - wanted).std() < 0.05 * wanted.std()


@pytest.mark.parametrize("kind", ["Q4_0", "Q6_K", "IQ4_NL"])
@torch.no_grad()
def test_tied_quantised_embeddings(tmp_path, vocabulary, kind):
    tied = llama2.Config(**{**vars(WIDE), "tie_word_embeddings": True})
    path, weights = quantised(vocabulary, tmp_path / "x.gguf", [kind], tied)
    assert_close(logits_of(path), make_model(tied, weights)(TOKENS[:2, :24]))


@pytest.mark.parametrize("kind", ["I8", "I32", "F64", "Q8_1", "Q8_K"])
def test_types_that_hold_no_weights_are_refused(tmp_path, vocabulary, kind):
    """gguf cannot dequantise them: known when the file is opened, not at the first token."""
    weights = {gguf_name(name): weight for name, weight in make_weights(WIDE).items()}
    elements, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    rows, columns = weights["output.weight"].shape
    blocks = np.zeros((rows, columns // elements * size), np.uint8)
    weights["output.weight"] = (blocks, Kind[kind])
    keys = config_keys(WIDE) | vocabulary_keys(vocabulary[1])
    path = write_gguf(tmp_path / "x.gguf", keys, weights)
    with pytest.raises(ValueError, match="x.gguf: output.weight.*type"):
        llama2.open_checkpoint(path)


# --------------------------------------------------------------------------------------------------
# Tokenizer


def random_texts(count, seed=0):
    """Strings of any code points but surrogates, with runs of spaces and pieces of TALE."""
    chance = random.Random(seed)
    some = [" ", "  ", "\n", "\t", "\u2581", "<s>", "</s>", "<0x0A>", "\U0001f469\u200d\U0001f680"]
    for _ in range(count):
        parts = []
        for _ in range(chance.randrange(12)):
            start = chance.randrange(len(TALE))
            point = chance.randrange(chance.choice((0x80, 0x800, 0xD800, 0x10F800)))
            any_character = chr(point + 0x800 * (point >= 0xD800))
            tale = TALE[start : start + chance.randrange(9)]
            parts.append(chance.choice((tale, chance.choice(some), any_character, any_character)))
        yield "".join(parts)


@pytest.fixture(scope="session")
def rebuilt(model_path):
    """The tokenizer that is rebuilt from a GGUF file."""
    return llama2.Tokenizer.from_gguf(model_path)


def test_tokenizer_from_gguf_equals_sentencepiece(vocabulary, tokenizer, rebuilt):
    """Catches every default of the model file that has to be written: prefix, spaces, type, bytes."""
    sp = vocabulary[1]
    assert (rebuilt.bos_id, rebuilt.eos_id, rebuilt.vocab_size) == (1, 2, 320)
    for text in ["", *TALE.splitlines(), *random_texts(1000)]:
        wanted = sp.encode(text)
        assert rebuilt.encode(text, bos=False) == tokenizer.encode(text, bos=False) == wanted
        assert rebuilt.encode(text) == [1, *wanted]
        assert rebuilt.decode(wanted) == sp.decode(wanted)
        if "\u2581" not in text:  # which is how SentencePiece writes a space
            assert rebuilt.decode(wanted) == text


def streamed(tokenizer, ids, first=True):
    """Ids through a StreamDecoder, joined."""
    decoder = llama2.StreamDecoder(tokenizer, first)
    return "".join([*map(decoder.decode, ids), decoder.flush()])


def test_stream_joins_to_decode(rebuilt):
    """Of real encodings and of ids in any order, with broken UTF-8 and control tokens."""
    chance = random.Random(0)
    for text in random_texts(300):
        ids = rebuilt.encode(text)
        assert streamed(rebuilt, ids) == rebuilt.decode(ids)
        ids = [chance.randrange(320) for _ in range(chance.randrange(20))]
        assert streamed(rebuilt, ids) == rebuilt.decode(ids)
        prompt = rebuilt.encode("fox")
        assert "fox" + streamed(rebuilt, ids, first=False) == rebuilt.decode(prompt + ids)


def test_stream_waits_for_whole_characters(rebuilt):
    """Catches decoding token by token, which shows U+FFFD for each byte of an emoji."""
    ids, decoder = rebuilt.encode("\U0001f999", bos=False), llama2.StreamDecoder(rebuilt)
    assert [decoder.decode(i) for i in ids[-4:]] == ["", "", "", "\U0001f999"]
    assert decoder.decode(ids[-4]) == "" and decoder.flush() == "\ufffd" and decoder.flush() == ""
    broken = [*ids[-4:-2], 2, *ids[-2:]]  # a control token within: its halves are no character
    assert streamed(rebuilt, broken) == rebuilt.decode(broken) == "\ufffd" * 4


def test_tokenizer_never_raises_on_text_and_names_wrong_ids(rebuilt):
    assert "\ufffd" in rebuilt.decode(rebuilt.encode("a\ud800b"))  # as in argv with broken bytes
    for call in (rebuilt.decode, lambda ids: streamed(rebuilt, ids)):
        for bad in (320, -1):
            with pytest.raises(ValueError, match=f"{bad}.*319"):
                call([5, bad])


@pytest.mark.parametrize("kind", [3, 4])
def test_unknown_piece_of_another_type(tmp_path, keys, kind, rebuilt):
    """Converters type <unk> as CONTROL, which SentencePiece refuses."""
    types = keys["tokenizer.ggml.token_type"]
    changed = keys | {"tokenizer.ggml.token_type": [kind, *types[1:]]}
    found = llama2.Tokenizer.from_gguf(write_gguf(tmp_path / "x.gguf", changed, {}))
    assert found.encode(TALE) == rebuilt.encode(TALE)


def test_flags_of_the_vocabulary(tmp_path, keys, rebuilt):
    changed = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    found = llama2.Tokenizer.from_gguf(write_gguf(tmp_path / "x.gguf", keys | changed, {}))
    assert not found.add_bos and rebuilt.add_bos
    assert found.encode(" fox", bos=False) == rebuilt.encode("fox", bos=False)


def test_file_that_is_no_sentencepiece_model(tmp_path):
    (tmp_path / "tokenizer.model").write_text("IQ== 0\nIg== 1\n")  # as Llama 3 has
    with pytest.raises(ValueError, match=r"tokenizer\.model"):
        llama2.Tokenizer.from_file(tmp_path / "tokenizer.model")


# The real Llama 2 vocabulary as far as the strings below can reach it: all its pieces that occur in
# them, with their ids. Merging any two neighbours asks for no other piece, so the ids are the real ones.
PIECES = """
259:▁▁ 260:▁t 263:▁a 265:on 267:es 269:▁s 272:or 274:▁c 281:▁w 289:▁b 295:el 298:▁h 302:▁n 318:▁u
321:▁e 326:im 345:ve 346:ce 353:▁= 379:▁H 417:lo 430:ld 438:▁O 514:ell 518:▁[ 529:▁< 562:ac 603:ime
645:ll 701:▁up 718:▁+ 778:ces 786:up 805:▁sp 815:ace 827:wo 829:</ 931:▁time 940:▁He 1004:me
1023:▁two 1028:sp 1055:▁na 1056:na 1112:pon 1113:ca 1129:po 1177:IN 1254:ST 1551:▁On 1577:▁?
1613:orld 1678:▁▁▁ 2034:ti 2096:rl 2142:af 2230:time 2501:▁upon 2913:▁space 2918:hi 2951:On 3059:NS
3156:ello 3186:▁world 3252:▁tw 3274:pa 3302:aces 3493:space 3532:▁<< 3535:pace 3868:He 5335:▁tim
5777:▁ca 6162:▁Hel 6365:▁wor 6778:>> 7251:▁hi 7516:tw 7658:Hel 8162:▁spaces 8879:▁wo 9038:▁Once
9314:<< 9346:tim 10184:two 10994:Hello 11526:world 13762:wor 14816:SY 15043:▁Hello 17608:nc
19339:▁Hell 19538:▁ti 21554:YS 22459:paces 22854:spaces 24566:>[ 25580:INST 26222:Once 26325:▁spac
28059:afé 29871:▁ 29872:e 29873:t 29874:a 29875:i 29876:n 29877:o 29878:r 29879:s 29880:l 29881:d
29882:h 29883:c 29884:u 29885:m 29886:p 29888:f 29889:. 29890:b 29892:, 29893:w 29894:v 29896:1
29902:I 29903:S 29906:2 29911:T 29914:/ 29916:x 29922:= 29929:9 29940:N 29941:3 29945:5 29946:4
29948:é 29949:O 29950:H 29958:> 29961:[ 29962:] 29966:< 29973:? 29974:+ 29979:Y 30085:ï 30103:́
30248:≤ 30293:Δ 30325:日 30346:本 30968:語
"""

# The ids that Meta's tokenizer.model gives, without BOS.
ENCODED = {
    "": [],
    "Hello world": [15043, 3186],
    " Hello": [29871, 15043],
    "  two  spaces ": [259, 1023, 29871, 8162, 29871],
    "a\n\nb\tc": [263, 13, 13, 29890, 12, 29883],
    "na\xefve caf\xe9": [1055, 30085, 345, 274, 28059],
    "\u65e5\u672c\u8a9e \U0001f999": [29871, 30325, 30346, 30968, 29871, 243, 162, 169, 156],
    "<s>[INST]</s>": [529, 29879, 24566, 25580, 29962, 829, 29879, 29958],
    "3.14159 + 2 = ?": [
        29871,
        29941,
        29889,
        29896,
        29946,
        29896,
        29945,
        29929,
        718,
        29871,
        29906,
        353,
        1577,
    ],
    "Once upon a time, \u0394x \u2264 1": [
        9038,
        2501,
        263,
        931,
        29892,
        29871,
        30293,
        29916,
        29871,
        30248,
        29871,
        29896,
    ],
    "[/INST] <<SYS>>": [518, 29914, 25580, 29962, 3532, 14816, 29903, 6778],
    "\u2581 e\u0301\x00": [259, 321, 30103, 3],
}

INST, END_INST = [518, 25580, 29962], [518, 29914, 25580, 29962]
SYS = [3532, 14816, 29903, 6778, 13, 29903, 13, 29966, 829, 14816, 29903, 6778, 13, 13]
# The ids that Meta's chat_completion makes of a dialogue: s is the system message, u a, u a, ..., u.
CHATS = [
    ("u:hi", [1, *INST, 7251, *END_INST]),
    ("s:S u:hi", [1, *INST, *SYS, 2918, *END_INST]),
    ("u:a a:_b_ u:c", [1, *INST, 263, *END_INST, 289, 29871, 2, 1, *INST, 274, *END_INST]),
    ("u:", [1, *INST, 29871, *END_INST]),
    ("s:S u:", [1, *INST, *SYS[:-2], *END_INST]),
    (
        "s:S u:hi a:a u:b a:c u:hi",
        [1, *INST, *SYS, 2918, *END_INST, 263, 29871, 2]
        + [1, *INST, 289, *END_INST, 274, 29871, 2, 1, *INST, 7251, *END_INST],
    ),
]


@pytest.fixture(scope="session")
def real(tmp_path_factory):
    """A tokenizer with Llama 2's own ids: PIECES in a vocabulary of 32000, the rest unused."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]
    pieces += [f"<unused {i}>" for i in range(len(pieces), 32000)]
    scores, types = [0.0] * 259, [2, 3, 3] + [6] * 256 + [5] * (32000 - 259)
    scores += [float(259 - i) for i in range(259, 32000)]
    for entry in PIECES.split():
        i, _, piece = entry.partition(":")
        pieces[int(i)], types[int(i)] = piece, 1
        if not piece.strip("\u2581"):
            scores[int(i)] = -1e9
    keys = {"model": "llama", "tokens": pieces, "scores": scores, "token_type": types}
    keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    path = tmp_path_factory.mktemp("real") / "vocabulary.gguf"
    return llama2.Tokenizer.from_gguf(write_gguf(path, keys, {}))


@pytest.mark.parametrize("text", ENCODED)
def test_ids_of_llama_2(real, text):
    assert real.encode(text, bos=False) == ENCODED[text]
    assert real.decode(ENCODED[text]) == text.replace("\u2581", " ")
    assert streamed(real, real.encode(text)) == real.decode(ENCODED[text])


# --------------------------------------------------------------------------------------------------
# Chat format


def dialogue(text):
    """'u:hi a:hello u:bye' as messages; _ is a space."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    parts = [part.replace("_", " ").partition(":") for part in text.split()]
    return [{"role": roles[role], "content": content} for role, _, content in parts]


@pytest.mark.parametrize("text, ids", CHATS, ids=[text for text, _ in CHATS])
def test_chat_ids(real, text, ids):
    """Meta's encoding, frozen. Catches BOS only once, joined strings, and a lost 29871 before EOS."""
    assert llama2.encode_chat(real, dialogue(text)) == ids


@pytest.mark.parametrize(
    "text", ["", "s:S", "a:b", "u:a u:b", "u:a a:b", "s:S s:S u:a", "u:a s:S u:b"]
)
def test_chat_refuses_other_orders_of_roles(real, text):
    with pytest.raises(ValueError, match="system|user|no message"):
        llama2.encode_chat(real, dialogue(text))
    with pytest.raises(ValueError, match="robot"):
        llama2.encode_chat(real, [{"role": "robot", "content": "hi"}])


@pytest.mark.parametrize("tag", ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"])
@pytest.mark.parametrize("text", ["u:{}", "s:{} u:a", "u:a a:x{}y u:b"])
def test_chat_refuses_reserved_tags(real, text, tag):
    """In any message: text that opens a turn of its own would speak for the system."""
    with pytest.raises(ValueError) as caught:
        llama2.encode_chat(real, dialogue(text.format(tag)))
    assert tag in str(caught.value)


def test_chat_text_never_becomes_control_ids(real):
    ids = llama2.encode_chat(real, dialogue("u:</s><s>"))
    assert ids.count(1) == 1 and ids.count(2) == 0


# --------------------------------------------------------------------------------------------------
# Sampling

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 1.0, 0.0, 1.9, -0.5])


def distribution(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """What may be drawn and how often, token by token as the papers and transformers have it."""
    weights = sorted(((math.exp(x / temperature), i) for i, x in enumerate(logits.tolist())))[::-1]
    weights = weights[: top_k or None]
    total, before, kept = sum(w for w, _ in weights), 0.0, {}
    for weight, i in weights:
        if (top_p == 1 or before < top_p * total) and weight >= min_p * weights[0][0]:
            kept[i] = weight
        before += weight
    return {i: weight / sum(kept.values()) for i, weight in kept.items()}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 1},
        {"top_k": 3},
        {"top_k": 99},
        {"top_p": 1e-9},
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"min_p": 0.3},
        {"min_p": 1.0},
        {"top_k": 4, "top_p": 0.8},  # top_p of what top_k left
        {"top_k": 6, "top_p": 0.95, "min_p": 0.2, "temperature": 1.5},
    ],
    ids=str,
)
def test_sampling_draws_from_the_right_distribution(options):
    """Exactly the tokens that may be drawn, as often as they should: chi-square at 1 in a million."""
    n, wanted = 20000, distribution(LOGITS, **options)
    defaults = {"temperature": 1.0, "top_p": 1.0}
    generator = torch.Generator().manual_seed(0)
    drawn = llama2.sample(LOGITS.expand(n, -1), **defaults | options, generator=generator)
    counts = drawn.bincount(minlength=len(LOGITS)).tolist()
    assert {i for i, count in enumerate(counts) if count} == set(wanted)
    chi_square = sum((counts[i] - n * p) ** 2 / (n * p) for i, p in wanted.items())
    assert chi_square < 42


def test_top_p_is_the_fewest_that_reach_it():
    """Four of eight equal tokens reach 0.5; catches the one too many of `>` for `>=`."""
    drawn = llama2.sample(torch.zeros(5000, 8), 1.0, 0, 0.5, generator=torch.Generator())
    assert drawn.unique().numel() == 4


def test_temperature_zero_is_greedy_and_tiny_ones_nearly():
    for temperature in (0.0, 1e-3, 1e-30):
        assert llama2.sample(1e4 * LOGITS, temperature).item() == 1
    tie = torch.tensor([1.0, 3.0, 3.0])
    assert llama2.sample(tie, 0.0).item() == llama2.sample(tie, 0.0, top_k=1).item() == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_told(temperature, bad):
    logits = torch.stack([LOGITS, LOGITS])
    logits[1, 3] = bad
    first, second = llama2.sample(logits, temperature).tolist()
    assert first >= 0 and second == -1


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1.0},
        {"temperature": math.nan},
        {"temperature": math.inf},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
    ],
    ids=str,
)
def test_sampling_refuses(model, options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        llama2.sample(LOGITS, **options)
    with pytest.raises(ValueError, match=name):
        llama2.generate(model, [1, 5], **options)  # at once, not at the first token


def test_sampling_leaves_logits_and_global_state_alone():
    logits, state = LOGITS.clone(), torch.get_rng_state()
    llama2.sample(logits, 1.0, 3, 0.5, 0.1, torch.Generator())
    assert logits.equal(LOGITS) and torch.get_rng_state().equal(state)


# --------------------------------------------------------------------------------------------------
# Generation


class Scripted(llama2.Llama):
    """A model that says `script`, whatever it hears; with no script all tokens are equally likely."""

    script, start = (), 0

    def forward(self, tokens, cache=None, all_positions=False):
        cache.advance(tokens.shape[1])
        logits = torch.zeros(len(tokens), self.config.vocab_size)
        if self.script:
            logits[:, self.script[cache.pos - self.start]] = 9.0
        return logits


def scripted(script=(), start=0, **shape):
    """A Scripted model for prompts of `start` tokens."""
    model = Scripted(llama2.Config(**SHAPE | {"num_hidden_layers": 1} | shape))
    model.script, model.start = list(script), start
    return model


PROMPTS = [[1, 5, 9, 200, 31], [1, 7], [1, 300, 301, 302, 303, 304, 305, 306, 307]]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_argmax_of_the_whole_text_each_time(model, prompt):
    """Catches any mistake of positions or cache, since no cache is used for the wanted ids."""
    wanted = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            wanted.append(model(torch.tensor([wanted]))[0, -1].argmax().item())
    found = list(llama2.generate(model, prompt, max_new_tokens=12, stop_ids=()))
    assert found == wanted[len(prompt) :]


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.9, "top_p": 0.9}], ids=["greedy", "drawn"]
)
def test_batch_of_different_lengths_equals_rows_alone(model, options):
    """Row i draws from seed + i. A stop id ends one row and not the others, which stay as they are."""
    alone = [
        list(llama2.generate(model, p, 10, seed=7 + i, stop_ids=(), **options))
        for i, p in enumerate(PROMPTS)
    ]
    stop = alone[1][3]
    for stop_ids in ((), (stop,)):
        reports = [llama2.Report() for _ in range(4)]
        wanted = [
            list(llama2.generate(model, p, 10, seed=7 + i, stop_ids=stop_ids, report=r, **options))
            for i, (p, r) in enumerate(zip(PROMPTS, reports, strict=False))
        ]
        steps = list(
            llama2.generate(
                model, PROMPTS, 10, seed=7, stop_ids=stop_ids, report=reports[3], **options
            )
        )
        assert all(len(step) == 3 for step in steps)
        rows = [[i for i in row if i is not None] for row in zip(*steps, strict=True)]
        assert rows == wanted and reports[3].new_ids == wanted
        assert reports[3].stop_reasons == [r.stop_reasons[0] for r in reports[:3]]
    assert len(wanted[1]) <= 3 and reports[3].stop_reasons[1] == f"stop token {stop}"


def test_seeds():
    """The same seed, the same ids; another one or none, others. Equal prompts draw differently."""
    model = scripted()

    def draw(prompt=(1, 5), **options):
        return list(llama2.generate(model, list(prompt), 20, 1.0, stop_ids=(), **options))

    assert draw(seed=3) == draw(seed=3) != draw(seed=4)
    assert draw() != draw()
    first, second = zip(*draw(([1, 5], [1, 5]), seed=3), strict=True)
    assert list(first) == draw(seed=3) and list(second) == draw(seed=4)
    assert draw(seed=3, top_k=1) == draw(seed=4, top_k=1)


def test_stop_ids_and_report():
    report = llama2.Report()
    model = scripted([7, 8, 2, 9], start=2)
    assert list(llama2.generate(model, [1, 5], report=report)) == [7, 8]
    assert (report.prompt_tokens, report.new_tokens, report.new_ids) == (2, 2, [[7, 8]])
    assert report.stop_reasons == ["stop token 2"] and report.prompt_seconds > 0
    assert list(llama2.generate(model, [1, 5], 4, stop_ids=(), report=report)) == [7, 8, 2, 9]
    assert report.stop_reasons == ["max new tokens"] and report.new_seconds > 0
    assert list(llama2.generate(model, [1, 5], stop_ids={8, 9}, report=report)) == [7]
    assert list(llama2.generate(model, [1, 5], 0, report=report)) == []
    assert report.stop_reasons == ["max new tokens"] and report.new_ids == [[]]


def test_generation_ends_with_the_context(model):
    """64 positions: every one is used, none twice; a prompt that fills it all gets no answer."""
    report = llama2.Report()
    prompt = TOKENS[0].tolist()
    assert len(list(llama2.generate(model, prompt, 999, stop_ids=(), report=report))) == 24
    assert report.stop_reasons == ["context full"]
    assert list(llama2.generate(model, prompt + prompt[:24], 5, report=report)) == []
    assert report.stop_reasons == ["context full"]
    with pytest.raises(ValueError, match=r"65.*64"):
        llama2.generate(model, prompt + prompt[:25])


def test_generate_continues_a_cache(model):
    """Two turns with one cache equal one prompt that holds both."""
    cache = llama2.Cache(CONFIG, max_seq_len=30)
    first = list(llama2.generate(model, [1, 5, 9], 4, stop_ids=(), cache=cache))
    cache.truncate(3)
    turn = [*first, 17, 18]
    second = list(llama2.generate(model, turn, 5, stop_ids=(), cache=cache))
    assert second == list(llama2.generate(model, [1, 5, 9, *turn], 5, stop_ids=()))
    with pytest.raises(ValueError, match="30|holds"):
        llama2.generate(model, [5] * 30, cache=cache)


def test_generation_is_the_same_in_chunks(model, monkeypatch):
    wanted = list(llama2.generate(model, PROMPTS, 6, stop_ids=()))
    monkeypatch.setattr(llama2, "PREFILL_CHUNK", 4)
    assert list(llama2.generate(model, PROMPTS, 6, stop_ids=())) == wanted


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "empty"),
        ([[1], []], "empty"),
        ([1, 320], "320"),
        ([1, -1], "-1"),
        ([[1], [2**40]], str(2**40)),
    ],
)
def test_generate_refuses_prompts(model, prompt, message):
    with pytest.raises(ValueError, match=message):
        llama2.generate(model, prompt)
    with pytest.raises(ValueError, match="max_new_tokens"):
        llama2.generate(model, [1], -1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_in_weights_is_an_error(weights, temperature):
    """Not the text that argmax makes of it."""
    broken = make_model(CONFIG, weights)
    broken.norm.weight.data[3] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        list(llama2.generate(broken, [1, 5], temperature=temperature))


def test_generate_takes_no_gradient_and_leaves_the_prompt(model):
    prompt = [1, 5]
    next(llama2.generate(model, prompt))
    assert prompt == [1, 5] and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "stop, wanted",
    [
        ((), "the fox saw the moon and laughed"),
        (["moon and"], "the fox saw the "),  # a stop text of several tokens
        (["nothing"], "the fox saw the moon and laughed"),
        (["laughed!"], "the fox saw the moon and laughed"),  # held back, then shown
        (["zzz", " and", "moon"], "the fox saw the "),  # the one that comes first
        (["the fox"], ""),
        (["d"], "the fox saw the moon an"),
    ],
)
def test_stop_texts(tokenizer, stop, wanted):
    """What is shown never holds a part of the stop text, whichever way tokens cut it."""
    script = [*tokenizer.encode("the fox saw the moon and laughed", bos=False), 2]
    report = llama2.Report()
    pieces = list(
        llama2.stream_text(scripted(script, 2), tokenizer, [1, 5], stop=stop, report=report)
    )
    assert "".join(pieces) == wanted and "" not in pieces
    if wanted.endswith("laughed"):
        assert report.stop_reasons == ["stop token 2"] and (stop or len(pieces) > 5)
    else:
        assert report.stop_reasons[0].startswith("stop text")


def test_stream_text_flushes_a_broken_character(tokenizer):
    script = [*tokenizer.encode("fox\U0001f999", bos=False)[:-1], 2]
    text = "".join(llama2.stream_text(scripted(script, 1), tokenizer, [1]))
    assert text == "fox\ufffd\ufffd\ufffd"


# --------------------------------------------------------------------------------------------------
# Command line


@pytest.fixture(scope="session")
def cli_path(tmp_path_factory, keys, tensors):
    """The tiny model with room for a conversation."""
    path = tmp_path_factory.mktemp("cli") / "cli.gguf"
    return write_gguf(path, keys | {"llama.context_length": 400}, tensors)


@pytest.fixture(scope="session")
def cli_model(cli_path):
    """What the command line loads: model and tokenizer."""
    return llama2.load(cli_path)


@pytest.fixture
def cli(cli_path, capsys, monkeypatch):
    """Runs the command line: cli(arguments, standard input) -> status, stdout, stderr."""

    def run(*arguments, stdin=b"", model=cli_path):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        arguments = ["--model", str(model), "--temperature", "0", *map(str, arguments)]
        try:
            status = llama2.main(arguments)
        except SystemExit as error:
            status = error.code
        return status, *capsys.readouterr()

    return run


def continuation(cli_model, prompt, n):
    """What follows a prompt, from Python."""
    model, tokenizer = cli_model
    ids = tokenizer.encode(prompt)
    new = list(llama2.generate(model, ids, n))
    return tokenizer.decode(ids + new).removeprefix(tokenizer.decode(ids))


@pytest.mark.parametrize(
    "large, args, bits",
    [
        (True, (), 16),
        (True, ("--dtype", "float32"), 32),
        (False, (), 32),
        (False, ("--activation-bits", 8), 8),
        (True, ("--activation-bits", 32), 32),
        (False, ("--dtype", "bfloat16"), 16),
    ],
)
def test_large_models_are_rounded_unless_told_otherwise(
    cli, monkeypatch, tmp_path, vocabulary, large, args, bits
):
    """The command line only: a model built from Python is exact without a word."""
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["Q8_0"])
    built, build = [], llama2.build_model

    def note(*args):
        built.append(build(*args))
        return built[0]

    monkeypatch.setattr(llama2, "build_model", note)
    monkeypatch.setattr(llama2, "has_bfloat16", lambda: True)
    monkeypatch.setattr(llama2, "is_large", lambda checkpoint: large)
    status, out, _ = cli("--prompt", "The fox", "--max-new-tokens", 5, *args, model=path)
    layers = [m for m in built[0].modules() if isinstance(m, llama2.QuantizedLinear)]
    assert status == 0 and len(out) > len("The fox") and len(layers) > 3
    assert {layer.activation_bits for layer in layers} == {bits}
    assert {layer.rounds for layer in layers} == {bits < 32}


def test_only_large_files_are_worth_a_compiler(cli_path):
    checkpoint = llama2.open_checkpoint(cli_path)
    assert not llama2.is_large(checkpoint)
    weight = SimpleNamespace(nbytes=2**26)
    assert llama2.is_large(dataclasses.replace(checkpoint, weights={"a": weight, "b": weight}))


def test_text_goes_to_stdout_and_the_report_to_stderr(cli, cli_model):
    wanted = continuation(cli_model, "The fox", 20)
    status, out, err = cli("--prompt", "The fox", "--max-new-tokens", 20)
    assert (status, out) == (0, f"The fox{wanted}\n")
    for word in ("load", "prompt", "generated 20 tokens", "tokens/s", "GB/s", "memory", "max new"):
        assert word in err
    assert len(err.splitlines()) == 1
    status, out, err = cli("--prompt", "The fox", "--max-new-tokens", 20, "--quiet", "--no-echo")
    assert (status, out, err) == (0, f"{wanted}\n", "")


@pytest.mark.parametrize("prompt", ["The fox", "", " two\nlines ", "\u65e5\u672c \U0001f999"])
def test_prompt_from_argument_file_and_pipe_are_one(cli, cli_model, tmp_path, prompt):
    (tmp_path / "prompt.txt").write_bytes(prompt.encode())
    options = ("--quiet", "--max-new-tokens", 9)
    found = cli("--prompt", prompt, *options)
    assert found == cli("--prompt-file", tmp_path / "prompt.txt", *options)
    assert found == cli(*options, stdin=prompt.encode())
    assert found[0] == 0 and found[1].startswith(prompt)
    if prompt:
        assert found[1] == prompt + continuation(cli_model, prompt, 9) + "\n"


def test_seed_stop_and_sampling_options(cli):
    options = ("--prompt", "The fox", "--quiet", "--max-new-tokens", 30, "--temperature", 1)
    text = cli(*options, "--seed", 5)[1]
    assert text == cli(*options, "--seed", 5)[1] != cli(*options, "--seed", 6)[1]
    stop = text.rstrip("\n")[30:33]
    stopped = cli(*options, "--seed", 5, "--stop", "\x00\x01", "--stop", stop)[1]
    assert stopped == text[: text.index(stop, len("The fox"))] + "\n"
    greedy = cli(*options, "--temperature", 0)[1]
    for one in (("--top-k", 1), ("--top-p", 1e-9), ("--min-p", 1)):
        assert cli(*options, *one)[1] == greedy


def test_version_and_info(cli):
    status, out, err = cli("--version")
    assert status == 0 and llama2.VERSION in out and not err
    status, out, err = cli("--info", stdin=b"not read")
    assert status == 0 and not err
    for word in ("GGUF", "F32", "hidden_size", "320", "memory", "400"):
        assert word in out


@pytest.mark.parametrize("size", [1, 3])
def test_chat_keeps_its_cache_between_turns(cli, cli_model, monkeypatch, size):
    """Each answer is that of the whole conversation; only what is new is computed for it."""
    model, tokenizer = cli_model
    calls, forward = [], llama2.Llama.forward

    def counted(self, tokens, cache=None, all_positions=False):
        calls.append((cache.pos, tokens.shape[1]))
        return forward(self, tokens, cache, all_positions)

    questions, messages, stored = ["hi", "", "and you?", " so? "], [], []
    messages.append({"role": "system", "content": "Be brief"})
    wanted_text, wanted_calls = "", []
    for question in filter(None, questions):
        messages.append({"role": "user", "content": question})
        ids = llama2.encode_chat(tokenizer, messages)
        new = list(llama2.generate(model, ids, size))
        same = 0
        while same < min(len(stored), len(ids) - 1) and stored[same] == ids[same]:
            same += 1
        wanted_calls.append((same, len(ids) - same))
        stored = (ids + new)[: len(ids) + size - 1]
        messages.append({"role": "assistant", "content": tokenizer.decode(new).lstrip()})
        wanted_text += messages[-1]["content"] + "\n"
    monkeypatch.setattr(llama2.Llama, "forward", counted)
    stdin = "\n".join(questions[1:]).encode()
    options = ("--chat", "--system", "Be brief", "--max-new-tokens", size, "--prompt", "hi")
    status, out, err = cli(*options, "--quiet", stdin=stdin)
    assert (status, out, err) == (0, wanted_text, "")
    assert [call for call in calls if call[1] > 1] == wanted_calls
    assert wanted_calls[1][0] >= 10  # the first question at least is not computed again


def test_chat_says_what_is_wrong_and_goes_on(cli):
    stdin = b"[INST]\nhi\n" + b"long " * 400 + b"\nhi\n"
    status, out, err = cli("--chat", "--max-new-tokens", 3, stdin=stdin)
    assert status == 0 and len(out.splitlines()) >= 2
    assert "[INST]" in err and "context" in err and "chat" in err  # a note: not tuned for it
    status, out, err = cli("--chat", "--quiet")
    assert (status, out, err) == (0, "", "")


def test_chat_forgets_the_oldest_turns_when_the_context_is_full(cli):
    stdin = b"".join(b"question number %d\n" % i for i in range(20))
    status, out, err = cli("--chat", "--max-new-tokens", 4, stdin=stdin)
    assert status == 0 and "forgot" in err and len(out.splitlines()) >= 20


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--nonsense"], "--nonsense"),
        (["--prompt", "a", "--prompt-file", "b"], "--prompt-file"),
        (["--prompt", "a", "--system", "b"], "--system"),
        (["--prompt", "a", "--top-p", "2"], "top_p 2"),
        (["--prompt", "a", "--temperature", "-1"], "temperature -1"),
        (["--prompt", "a", "--max-new-tokens", "-1"], "max_new_tokens|max-new-tokens"),
        (["--prompt", "a", "--max-new-tokens", "x"], "max-new-tokens"),
        (["--prompt", "a", "--context", "401"], "401.*400"),
        (["--prompt", "a", "--context", "0"], "context 0"),
        (["--prompt", "a", "--threads", "0"], "threads 0"),
        (["--prompt", "a", "--dtype", "int8"], "int8"),
        (["--prompt", "fox " * 400], "tokens.*400"),
        (["--prompt-file", "/nothing/here"], "/nothing/here"),
        (["--model", "/nothing/here", "--prompt", "a"], "/nothing/here"),
        (["--model", str(SCRIPT), "--prompt", "a"], "llama2.py.*GGUF"),
        (["--model", str(SCRIPT.parent), "--prompt", "a"], "."),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line_and_status_2(cli, arguments, message):
    arguments = [a[:40] + a[40:] for a in arguments]
    status, out, err = cli(*arguments)
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1 and "Traceback" not in err
    assert re.search(message, err)


def test_device_that_is_not_there(cli):
    if not torch.cuda.is_available():
        status, _, err = cli("--prompt", "a", "--device", "cuda")
        assert status == 2 and "cpu" in err


@pytest.fixture(scope="session")
def endless_path(tmp_path_factory, keys, tensors):
    """The tiny model with room for a hundred thousand tokens, to be interrupted."""
    path = tmp_path_factory.mktemp("endless") / "endless.gguf"
    return write_gguf(path, keys | {"llama.context_length": 2**17}, tensors)


def start(path, *arguments, stdout=subprocess.PIPE):
    """llama2.py as a process of its own."""
    command = [sys.executable, str(SCRIPT), "--model", str(path), "--threads", "1", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=stdout, stderr=subprocess.PIPE)


def test_processes(cli_path, endless_path):
    """Ctrl-C, `| head` and a pipe of words: a status, and never a traceback."""
    endless = ("--prompt", "fox", "--max-new-tokens", "100000")
    interrupted, closed = start(endless_path, *endless), start(endless_path, *endless)
    piped = start(cli_path, "--temperature", "0", "--max-new-tokens", "5", "--quiet")
    out, err = piped.communicate(b"fox \xff\xf0\x9f", timeout=100)
    assert (piped.returncode, err) == (0, b"") and out.startswith(b"fox \xef\xbf\xbd")
    assert interrupted.stdout.read(4)
    interrupted.send_signal(signal.SIGINT)
    _, err = interrupted.communicate(timeout=100)
    assert interrupted.returncode == 130 and b"Traceback" not in err
    assert closed.stdout.read(4)
    closed.stdout.close()
    err = closed.stderr.read()
    assert closed.wait(timeout=100) in (0, 141) and b"Traceback" not in err
    assert b"Exception" not in err and b"BrokenPipe" not in err


def test_import_is_quick():
    """`import llama2` pulls in neither gguf, sentencepiece nor transformers; torch is enough."""
    code = "import sys, llama2; print(*(m for m in ('gguf', 'sentencepiece') if m in sys.modules))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=SCRIPT.parent, capture_output=True, check=True
    )
    assert found.stdout.strip() == b""


# --------------------------------------------------------------------------------------------------
# Compiled steps


@pytest.mark.parametrize("padding", [None, [0, 3]])
@torch.no_grad()
def test_compiled_steps_equal_plain_ones(model, padding):
    """One window after another, with the eager backend: the tensors of a step, not the compiler."""
    padding = padding and torch.tensor(padding)
    caches = [llama2.Cache(CONFIG, 2, padding=padding) for _ in range(2)]
    torch.compiler.reset()
    compiled = llama2.CompiledStep(model, caches[1], backend="eager", fullgraph=True)
    for part in TOKENS[:2].split([20, 1, 1, 3, 1, 14], dim=1):
        assert_close(compiled(part, caches[1]), model(part, caches[0]), 1e-5)
    assert caches[0].pos == caches[1].pos == 40
    caches[1].truncate(30)
    caches[0].truncate(30)
    assert_close(compiled(TOKENS[:2, :1], caches[1]), model(TOKENS[:2, :1], caches[0]), 1e-5)


# --------------------------------------------------------------------------------------------------
# Checkpoints of other forms, tensor parallelism, memory

H, G, D, C, FF, L = (
    8,
    4,
    16,
    128,
    160,
    2,
)  # FF is five blocks of 32: two and four ranks share unevenly
PROMPT = "the king and the"


def heads_to_meta(w, heads):
    """Rows in Hugging Face's order -> Meta's, written out."""
    half = len(w) // heads // 2
    order = [h * 2 * half + j + k * half for h in range(heads) for j in range(half) for k in (0, 1)]
    return w[order]


META = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "post_attention_layernorm": "ffn_norm",
    "input_layernorm": "attention_norm",
}
GGUF_NAMES = {
    "tok_embeddings": "token_embd",
    "attention.w": "attn_",
    "attn_o": "attn_output",
    "attention_norm": "attn_norm",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w2": "ffn_down",
    "feed_forward.w3": "ffn_up",
    "layers.": "blk.",
}
META_AXIS = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "output": 0}
META_AXIS |= {"wo": 1, "w2": 1, "tok_embeddings": 1}
PARAMS = {"dim": C, "n_layers": L, "n_heads": H, "n_kv_heads": G, "norm_eps": 1e-5}
PARAMS |= {"vocab_size": -1, "multiple_of": 32, "ffn_dim_multiplier": 0.4}


def replace_all(name, table):
    for old, new in table.items():
        name = name.replace(old, new)
    return name


def save_gguf_by_hand(path, meta, pieces):
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(4096)
    writer.add_embedding_length(C)
    writer.add_feed_forward_length(FF)
    writer.add_block_count(L)
    writer.add_head_count(H)
    writer.add_head_count_kv(G)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([pieces.id_to_piece(i) for i in range(pieces.vocab_size())])
    writer.add_token_scores([pieces.get_score(i) for i in range(pieces.vocab_size())])
    kinds = [2, 3, 3] + [6 if pieces.is_byte(i) else 1 for i in range(3, pieces.vocab_size())]
    writer.add_token_types(kinds)
    for name, tensor in meta.items():
        name = "output_norm.weight" if name == "norm.weight" else replace_all(name, GGUF_NAMES)
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def save_meta(path, meta, shards, legacy=False):
    path.mkdir()
    (path / "params.json").write_text(json.dumps(PARAMS))
    for i in range(shards):
        part = {"rope.freqs": torch.ones(D // 2)}
        for name, tensor in meta.items():
            axis = META_AXIS.get(name.split(".")[-2])
            part[name] = tensor if axis is None else tensor.chunk(shards, axis)[i].clone()
        torch.save(
            part, path / f"consolidated.{i:02}.pth", _use_new_zipfile_serialization=not legacy
        )


@pytest.fixture(scope="module")
def forms(tmp_path_factory):
    """The same model in every form, the one of Hugging Face written by transformers itself."""
    transformers = pytest.importorskip("transformers")
    root = tmp_path_factory.mktemp("forms")
    text = "once upon a time the king and the queen lived in a castle by the sea with the bear"
    (root / "text").write_text("\n".join([text, *text.split()] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=root / "text", model_prefix=root / "tokenizer", model_type="bpe", vocab_size=300,
        byte_fallback=True, normalization_rule_name="identity", hard_vocab_limit=False,
        remove_extra_whitespaces=False, minloglevel=2, num_threads=1,
    )  # fmt: skip
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(root / "tokenizer.model"))
    config = transformers.LlamaConfig(
        hidden_size=C, intermediate_size=FF, num_hidden_layers=L, num_attention_heads=H,
        num_key_value_heads=G, vocab_size=pieces.vocab_size(), max_position_embeddings=4096,
        rms_norm_eps=1e-5, initializer_range=0.15,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    meta = {}
    for name, tensor in state.items():
        if "q_proj" in name or "k_proj" in name:
            tensor = heads_to_meta(tensor, H if "q_proj" in name else G)
        meta[replace_all(name, META | {"model.layers": "layers"})] = tensor.contiguous()
    save_gguf_by_hand(root / "gguf.gguf", meta, pieces)
    save_meta(root / "meta1", meta, 1)
    save_meta(root / "meta4", meta, 4)
    save_meta(root / "legacy", meta, 2, legacy=True)
    model.save_pretrained(root / "hf")
    model.save_pretrained(root / "hf_index", max_shard_size="300KB")
    assert (root / "hf_index" / "model.safetensors.index.json").exists()
    config_json = json.loads((root / "hf" / "config.json").read_text())
    config_json |= {"rope_theta": 10000.0, "rope_scaling": None}
    del config_json["rope_parameters"]
    for form, halves in (("bin", 1), ("bin_index", 2)):
        (root / form).mkdir()
        (root / form / "config.json").write_text(json.dumps(config_json))
        names = list(state)
        files = {}
        for i in range(halves):
            suffix = "" if halves == 1 else f"-{i + 1:05}-of-{halves:05}"
            part = {name: state[name] for name in names[i::halves]}
            part |= (
                {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)} if i == 0 else {}
            )
            torch.save(part, root / form / f"pytorch_model{suffix}.bin")
            files |= {name: f"pytorch_model{suffix}.bin" for name in part}
        if halves > 1:
            index = {"metadata": {}, "weight_map": files}
            (root / form / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for form in ("hf", "hf_index", "bin", "bin_index"):  # Meta's is in the parent, as published
        (root / form / "tokenizer.model").write_bytes((root / "tokenizer.model").read_bytes())
    tokens = torch.randint(3, pieces.vocab_size(), (2, 9))
    with torch.no_grad():
        logits = model(tokens).logits
    return root, tokens, logits


def greedy(model, tokenizer, n=12):
    return list(llama2.generate(model, tokenizer.encode(PROMPT), n))


# --------------------------------------------------------------------------------------------------
# Checkpoints of other forms

DIRECTORIES = ["gguf.gguf", "meta1", "meta4", "legacy", "hf", "hf_index", "bin", "bin_index"]


@pytest.mark.parametrize("form", DIRECTORIES)
def test_every_form_gives_the_logits_of_transformers(forms, form):
    root, tokens, logits = forms
    model, tokenizer = llama2.load(root / form)
    torch.testing.assert_close(model(tokens), logits, atol=1e-5, rtol=1e-5)
    reference = llama2.load(root / "gguf.gguf")
    assert greedy(model, tokenizer) == greedy(*reference)


def test_every_form_from_the_command_line(forms, capsys):
    texts = set()
    for form in ("gguf.gguf", "meta4", "hf_index", "bin"):
        args = ["--prompt", PROMPT, "--temperature", "0", "--max-new-tokens", "12", "--quiet"]
        assert llama2.main(["--model", str(forms[0] / form), *args]) == 0
        text, errors = capsys.readouterr()
        assert errors == ""
        texts.add(text)
    assert len(texts) == 1
    assert texts.pop().startswith(PROMPT)


@pytest.mark.parametrize(
    ("form", "name"),
    [("gguf.gguf", "GGUF version 3"), ("meta4", "Meta"), ("hf_index", "Hugging Face")],
)
def test_info_names_the_form(forms, form, name, capsys):
    assert llama2.main(["--model", str(forms[0] / form), "--info"]) == 0
    out = capsys.readouterr().out
    assert name in out
    assert "15 F32" in out or "21 F32" in out
    assert "GB" in out


@pytest.mark.parametrize("kind", [None, *llama2.SAVE_TYPES])
def test_save_round_trip(forms, tmp_path, kind):
    root, tokens, logits = forms
    checkpoint = llama2.open_checkpoint(root / "hf_index")
    llama2.save_gguf(checkpoint, tmp_path / "out.gguf", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    saved = llama2.open_checkpoint(tmp_path / "out.gguf")
    assert saved.config == dataclasses.replace(
        checkpoint.config, rms_norm_eps=saved.config.rms_norm_eps
    )
    raw = gguf.GGMLQuantizationType[kind or "F32"]
    for name, weight in saved.weights.items():
        values = checkpoint.weights[name].dense(torch.float32)
        if len(weight.shape) > 1:
            assert weight.ggml_type == (kind or "F32")
            rows = gguf.quants.quantize(values.numpy(), raw)
            values = torch.from_numpy(gguf.quants.dequantize(rows, raw))
        assert torch.equal(weight.dense(torch.float32), values), name
    model = llama2.build_model(saved)
    tolerance = {None: 1e-5, "F32": 1e-5, "F16": 0.05, "BF16": 0.3, "Q8_0": 1, "Q4_0": 9}[kind]
    torch.testing.assert_close(model(tokens), logits, atol=tolerance, rtol=0)
    ours, theirs = saved.tokenizer(), checkpoint.tokenizer()
    for text in (PROMPT, "  a b ", "\u00e9\u4e16\n", ""):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_save_copies_quantised_blocks_and_vocabulary(forms, tmp_path):
    root = forms[0]
    llama2.save_gguf(llama2.open_checkpoint(root / "meta4"), tmp_path / "a.gguf", "Q4_0")
    first = llama2.GGUF(tmp_path / "a.gguf")
    args = ["--model", str(tmp_path / "a.gguf"), "--save", str(tmp_path / "b.gguf")]
    assert llama2.main(args) == 0
    second = llama2.GGUF(tmp_path / "b.gguf")
    assert first.metadata == second.metadata
    for name, weight in first.tensors.items():
        assert torch.equal(weight.read(), second.tensors[name].read()), name


def test_vocabulary_smaller_than_the_embedding(forms):
    tokenizer = llama2.Tokenizer.from_file(forms[0] / "tokenizer.model")
    vocabulary = tokenizer.vocabulary(tokenizer.vocab_size + 2)
    assert vocabulary["tokenizer.ggml.tokens"][-2:] == ["[PAD300]", "[PAD301]"]
    assert vocabulary["tokenizer.ggml.token_type"][-3:] == [1, 5, 5]
    with pytest.raises(ValueError, match="300 pieces; the model has 299"):
        llama2.Tokenizer.from_file(forms[0] / "tokenizer.model", 299)


def test_a_hostile_pickle_is_refused_and_not_executed(forms, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path}/executed",)

    for legacy in (False, True):
        directory = tmp_path / f"{legacy}"
        directory.mkdir()
        (directory / "params.json").write_text(json.dumps(PARAMS))
        file = directory / "consolidated.00.pth"
        torch.save({"norm.weight": Bomb()}, file, _use_new_zipfile_serialization=not legacy)
        with pytest.raises(ValueError, match=r"consolidated\.00\.pth: damaged, or not a file of"):
            llama2.open_checkpoint(directory)
        file.write_bytes(pickle.dumps(Bomb(), protocol=2))
        with pytest.raises(ValueError, match=r"consolidated\.00\.pth"):
            llama2.open_checkpoint(directory)
    assert not (tmp_path / "executed").exists()


def copy(source, target, **changes):
    """A directory of links to a form's files, with changes to its settings (None: left out)."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if file.suffix == ".json" and file.name in ("config.json", "params.json"):
            settings = json.loads(file.read_text()) | changes
            (target / file.name).write_text(json.dumps(settings))
        else:
            (target / file.name).symlink_to(file)
    if not (target / "tokenizer.model").exists():
        (target / "tokenizer.model").symlink_to(source.parent / "tokenizer.model")
    return target


REFUSED_DIRECTORIES = [
    ("hf", {"model_type": "falcon"}, "model_type is falcon; accepted are llama and mistral"),
    ("hf", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq"),
    ("hf", {"attention_bias": True}, "attention_bias is True; accepted is False"),
    ("hf", {"hidden_act": "gelu"}, "hidden_act is gelu; accepted is silu"),
    ("hf", {"head_dim": 32}, "head_dim is 32; accepted is 16"),
    ("hf", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is yarn"),
    ("bin", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is dynamic"),
    ("hf", {"hidden_size": "128"}, "hidden_size is '128', not int"),
    ("hf", {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ("hf", {"intermediate_size": 96}, r"gate_proj.weight is \[160, 128\]; needed is \[96, 128\]"),
    ("hf", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ("hf", {"vocab_size": 299}, "embed_tokens.weight is"),
    ("meta1", {"use_scaled_rope": True}, "use_scaled_rope is not of Llama 2"),
    ("meta1", {"ffn_dim_multiplier": 1.3}, "rows of w1 follow"),
    ("meta1", {"dim": 512}, "are shards missing"),
    ("meta1", {"n_heads": 0}, "num_attention_heads is 0"),
]


@pytest.mark.parametrize(("form", "change", "message"), REFUSED_DIRECTORIES)
def test_what_cannot_be_run_is_refused_by_name(forms, tmp_path, form, change, message):
    directory = copy(forms[0] / form, tmp_path / "copy", **change)
    with pytest.raises(ValueError, match=message):
        llama2.open_checkpoint(directory)


def test_linear_rope_scaling_old_and_new(forms, tmp_path):
    new = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
    old = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0}
    for form, change in (("hf", new), ("bin", old)):
        config = llama2.open_checkpoint(copy(forms[0] / form, tmp_path / form, **change)).config
        assert (config.rope_scaling_factor, config.rope_theta) == (4.0, 500.0)


def test_tied_embeddings_of_a_directory(forms, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.from_pretrained(forms[0] / "hf")
    config.tie_word_embeddings = True
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "tied")
    tied = tmp_path / "tied"
    (tied / "tokenizer.model").write_bytes((forms[0] / "tokenizer.model").read_bytes())
    ours, _ = llama2.load(tied)
    assert ours.config.tie_word_embeddings
    with torch.no_grad():
        torch.testing.assert_close(ours(forms[1]), model(forms[1]).logits, atol=1e-5, rtol=1e-5)
    llama2.save_gguf(llama2.open_checkpoint(tied), tmp_path / "tied.gguf", "Q8_0")
    assert llama2.load(tmp_path / "tied.gguf")[0].config.tie_word_embeddings


def test_missing_files_are_named(forms, tmp_path):
    directory = copy(forms[0] / "hf", tmp_path / "a")
    (directory / "tokenizer.model").unlink()
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.model .* is missing"):
        llama2.open_checkpoint(directory)
    directory = copy(forms[0] / "hf_index", tmp_path / "b")
    first = min(directory.glob("model-*"))
    first.unlink()
    with pytest.raises(FileNotFoundError, match=first.name):
        llama2.open_checkpoint(directory)
    directory = copy(forms[0] / "meta4", tmp_path / "c")
    (directory / "consolidated.01.pth").unlink()
    with pytest.raises(ValueError, match="shards"):
        llama2.open_checkpoint(directory)
    (directory / "consolidated.02.pth").rename(directory / "consolidated.01.pth")
    (directory / "consolidated.03.pth").unlink()
    with pytest.raises(ValueError, match="2 shards have 64 columns .* are shards missing"):
        llama2.open_checkpoint(directory)
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match=r"found nothing; accepted is a \.gguf file, or"):
        llama2.open_checkpoint(tmp_path / "d")
    with pytest.raises(ValueError, match="one file of a directory"):
        llama2.open_checkpoint(forms[0] / "meta1" / "consolidated.00.pth")


def test_a_directory_of_both_forms_is_read_as_the_one_whose_weights_are_there(forms, tmp_path):
    directory = copy(forms[0] / "meta4", tmp_path / "both")
    (directory / "config.json").write_text("{}")
    assert llama2.open_checkpoint(directory).format.startswith("Meta")


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "long header", "no json", "offset", "dtype", "shape"]
)
def test_damaged_safetensors(forms, tmp_path, damage):
    directory = copy(forms[0] / "hf", tmp_path / "copy")
    file = directory / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    entry = header["lm_head.weight"]
    if damage == "offset":
        entry["data_offsets"] = [2**62, 2**62 + 4]
    elif damage == "dtype":
        entry["dtype"] = "I64"
    elif damage == "shape":
        entry["shape"] = [2**40, 2**40]
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + data[8 + size :]
    if damage == "cut":
        data = data[: len(data) // 2]
    elif damage == "empty":
        data = b""
    elif damage == "long header":
        data = (2**60).to_bytes(8, "little") + data[8:]
    elif damage == "no json":
        data = data[:8] + b"x" + data[9:]
    file.unlink()
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
        llama2.open_checkpoint(directory)


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "list", "int", "int key", "expanded", "float64"]
)
def test_damaged_pth(forms, tmp_path, damage):
    directory = copy(forms[0] / "meta1", tmp_path / "copy")
    file = directory / "consolidated.00.pth"
    data = file.read_bytes()
    file.unlink()
    content = {
        "list": [torch.ones(2)],
        "int": {"norm.weight": 3},
        "int key": {1: torch.ones(2), 2: torch.ones(2)},
        "expanded": {"norm.weight": torch.ones(1).expand(10**9)},
        "float64": {"norm.weight": torch.ones(2, dtype=torch.float64)},
    }
    if damage in content:
        torch.save(content[damage], file)
    else:
        file.write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    with pytest.raises(ValueError, match=r"copy.*: "):
        llama2.open_checkpoint(directory)


def test_memory_plan_and_refusal(monkeypatch):
    config = llama2.Config.llama2_7b()
    with torch.device("meta"):
        parameters = dict(llama2.Llama(config).named_parameters())
    weights = {name: llama2.Weight("F16", tuple(p.shape), []) for name, p in parameters.items()}
    model = llama2.Checkpoint("", config, weights, None)
    plan = llama2.memory_plan(model, 4096, torch.float16)
    assert plan["weights"] == 2 * 6_738_415_616
    layer = llama2.Cache(dataclasses.replace(config, num_hidden_layers=1), 1, 64, torch.float16)
    assert plan["cache"] == 2**31 == (layer.k.nbytes + layer.v.nbytes) * 32 * 64
    assert 0 < plan["overhead"] < 1e9
    options = (model, 4096, torch.float16, torch.device("cpu"))
    for free, message in (
        (sum(plan.values()) - 1, "--context 4095, type Q8_0 .* type Q4_0"),
        (10e9, r"10\.0 GB are free on cpu; what would fit: type Q8_0 \(9\.4 GB.*, type Q4_0"),
        (1e9, "more devices, with torchrun"),
    ):
        monkeypatch.setattr(llama2, "free_memory", lambda device, free=free: int(free))
        with pytest.raises(ValueError, match=message):
            llama2.check_memory(*options)
    monkeypatch.setattr(llama2, "free_memory", lambda device: sum(plan.values()))
    llama2.check_memory(*options)


def test_memory_that_is_free():
    assert 2**20 < llama2.free_memory(torch.device("cpu")) < 2**50


# --------------------------------------------------------------------------------------------------
# Tensor parallelism

RANK_FORMS = {2: ("hf_index", "q4.gguf", "tied.gguf"), 4: ("meta4", "q4.gguf")}


def run_rank(rank, ranks, port, root, tokens, out):
    """One process of torchrun's: what it computes and how many bytes of weights it holds."""
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    assert llama2.start_ranks() == rank
    found = {}
    for form in RANK_FORMS[ranks]:
        part = llama2.rank_part(llama2.open_checkpoint(root / form), rank, ranks)
        model = llama2.build_model(part)
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        llama2.connect_ranks(model)
        texts = [list(llama2.generate(model, tokens[0].tolist(), 6, t, seed=3)) for t in (0, 1)]
        found[form] = (model(tokens), *texts, held)
    torch.save(found, out / str(rank))


@pytest.fixture(scope="module")
def processes():
    """A server that has imported torch once and forks the processes of all ranks."""
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_process(forms, processes, tmp_path, ranks):
    root, tokens, _ = forms
    llama2.save_gguf(llama2.open_checkpoint(root / "hf"), root / "q4.gguf", "Q4_0")
    tied = llama2.open_checkpoint(root / "hf")
    del tied.weights["lm_head.weight"]
    tied.config = dataclasses.replace(tied.config, tie_word_embeddings=True)
    llama2.save_gguf(tied, root / "tied.gguf", "Q8_0")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    started = [
        processes.Process(target=run_rank, args=(rank, ranks, port, root, tokens, tmp_path))
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(60)
    assert [process.exitcode for process in started] == [0] * ranks
    found = [torch.load(tmp_path / str(rank)) for rank in range(ranks)]
    for form in RANK_FORMS[ranks]:
        model, _ = llama2.load(root / form)
        ids = list(llama2.generate(model, tokens[0].tolist(), 6))
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        if form == "tied.gguf":  # the embedding and the head are cut along different axes
            held += model.embed_tokens.blocks.nbytes
        for rank in range(ranks):
            logits, rank_ids, drawn, rank_held = found[rank][form]
            torch.testing.assert_close(logits, model(tokens), atol=1e-4, rtol=1e-4)
            assert torch.equal(logits, found[0][form][0])
            assert rank_ids == ids
            assert drawn == found[0][form][2]
            assert rank_held / held < 1.3 / ranks, (form, rank)


def test_ranks_from_the_command_line(forms, capsys):
    args = ["--model", str(forms[0] / "hf_index"), "--temperature", "0", "--max-new-tokens", "12"]
    assert llama2.main([*args, "--prompt", PROMPT]) == 0
    alone = capsys.readouterr().out
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, llama2.__file__, *args],
        input=PROMPT.encode(), capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    errors = done.stderr.decode()
    assert (done.returncode, done.stdout.decode()) == (0, alone), errors  # rank 0 alone reads, ...
    assert errors.count("generated 12 tokens") == 1  # ... and prints


def test_too_many_ranks(forms):
    checkpoint = llama2.open_checkpoint(forms[0] / "hf")
    with pytest.raises(
        ValueError, match=r"8 ranks for 4 key/value heads; accepted are \[1, 2, 4\]"
    ):
        llama2.rank_part(checkpoint, 0, 8)
    checkpoint.weights["layers.0.mlp.down_proj.weight"].kind = "Q4_K"  # blocks of 256
    with pytest.raises(ValueError, match="160 cannot be divided by 2 ranks into runs of 256"):
        llama2.rank_part(checkpoint, 0, 2)


def test_the_parts_of_all_ranks_are_the_whole(forms):
    for form in ("meta4", "hf", "gguf.gguf"):
        whole = llama2.open_checkpoint(forms[0] / form)
        for ranks in (2, 4):
            parts = [llama2.rank_part(whole, rank, ranks).weights for rank in range(ranks)]
            for name, weight in whole.weights.items():
                pieces = [part[name].dense(torch.float32) for part in parts]
                axis = 0 if pieces[0].shape[0] != weight.shape[0] else pieces[0].dim() - 1
                if pieces[0].dim() == 1:
                    pieces = pieces[:1]
                assert torch.equal(torch.cat(pieces, axis), weight.dense(torch.float32)), name


# --------------------------------------------------------------------------------------------------
# Nothing that a file or a user does breaks it

LLAMA2 = Path(llama2.__file__)
DEVICES = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, CONTEXT = 32, 64, 2, 4, 2, 64
SMALL_PIECES = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
SMALL_PIECES += [(f"<0x{i:02X}>", 6) for i in range(256)]
SMALL_PIECES += [(piece, 1) for piece in ("\u2581a", "ab", "\u2581", *"abcdefgh")]

# --------------------------------------------------------------------------------------------------
# A tiny valid GGUF file as lists that a test may change, and its bytes with every boundary known

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LETTERS = dict(enumerate("BbHhIif?--Qqd"))


def tiny_keys():
    """The metadata of the tiny model: [name, type, value]; an array's value is (type, values)."""
    n = len(SMALL_PIECES)
    llama = {"context_length": CONTEXT, "embedding_length": HIDDEN, "block_count": LAYERS}
    llama |= {"feed_forward_length": FFN, "attention.head_count": HEADS}
    llama |= {"attention.head_count_kv": KV_HEADS, "rope.dimension_count": HIDDEN // HEADS}
    return [
        ["general.architecture", STRING, "llama"],
        ["general.alignment", U32, 32],
        *[[f"llama.{name}", U32, value] for name, value in llama.items()],
        ["llama.attention.layer_norm_rms_epsilon", F32, 1e-5],
        ["llama.rope.freq_base", F32, 10000.0],
        ["llama.rope.scaling.factor", F32, 1.0],
        ["tokenizer.ggml.model", STRING, "llama"],
        ["tokenizer.ggml.tokens", ARRAY, (STRING, [piece for piece, _ in SMALL_PIECES])],
        ["tokenizer.ggml.scores", ARRAY, (F32, [-float(i) for i in range(n)])],
        ["tokenizer.ggml.token_type", ARRAY, (I32, [kind for _, kind in SMALL_PIECES])],
        ["tokenizer.ggml.bos_token_id", U32, 1],
        ["tokenizer.ggml.eos_token_id", U32, 2],
        ["tokenizer.ggml.unknown_token_id", U32, 0],
        ["tokenizer.ggml.add_bos_token", BOOL, True],
    ]


def tiny_tensors(hidden=HIDDEN, ffn=FFN, kinds=("Q4_0", "Q8_0", "F16", "BF16", "Q5_1")):
    """The tensors of the tiny model: [name, dims (fastest first), type, offset or None, bytes]."""
    kv, rng, tensors = hidden * KV_HEADS // HEADS, np.random.RandomState(0), []
    shapes = {"attn_q": (hidden, hidden), "attn_k": (hidden, kv), "attn_v": (hidden, kv)}
    shapes |= {"attn_output": (hidden, hidden), "ffn_gate": (hidden, ffn), "ffn_up": (hidden, ffn)}
    shapes |= {"ffn_down": (ffn, hidden), "attn_norm": (hidden,), "ffn_norm": (hidden,)}
    shapes = {f"blk.{i}.{name}": dims for i in range(LAYERS) for name, dims in shapes.items()}
    vocabulary = (hidden, len(SMALL_PIECES))
    shapes |= {"token_embd": vocabulary, "output": vocabulary, "output_norm": (hidden,)}
    for i, (name, dims) in enumerate(shapes.items()):
        kind = gguf.GGMLQuantizationType[kinds[i % len(kinds)] if len(dims) == 2 else "F32"]
        weight = (rng.standard_normal(dims[::-1]) * 0.2 + (len(dims) == 1)).astype(np.float32)
        try:
            data = gguf.quants.quantize(weight, kind).tobytes()
        except NotImplementedError:  # K-quants: any bytes are valid; their scales stay small
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data = rng.randint(0, 24, (weight.size // block, size)).astype(np.uint8).tobytes()
        tensors.append([name + ".weight", list(dims), int(kind), None, data])
    return tensors


def number_bytes(kind, number):
    """A number of one GGUF type; integers that do not fit lose their high bits."""
    letter = LETTERS.get(kind, "I").replace("-", "I")
    if letter in "BbHhIiQq":
        size = struct.calcsize(letter)
        return (int(number) % 256**size).to_bytes(size, "little")
    return struct.pack("<" + letter, number)


class Writer:
    """GGUF bytes; `spans` tells where each structural field begins and how long it is."""

    def __init__(self):
        self.data, self.spans = bytearray(), []

    def put(self, data):
        self.spans.append((len(self.data), len(data)))
        self.data += data

    def string(self, text):
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        self.put(struct.pack("<Q", len(data)))
        self.put(data)

    def value(self, kind, value):
        if kind == STRING:
            self.string(value)
        elif kind == ARRAY:
            inner, values = value
            self.put(struct.pack("<I", inner))
            self.put(struct.pack("<Q", len(values)))
            if LETTERS.get(inner, "-") != "-":
                self.put(b"".join(number_bytes(inner, item) for item in values))
            else:
                for i, item in enumerate(values):
                    spans = list(self.spans)
                    self.value(inner, item)
                    self.spans = spans if i > 2 else self.spans  # a few boundaries of many
        else:
            self.put(number_bytes(kind, value))


def gguf_file(keys, tensors, align=32, version=3):
    """-> the file's bytes, its structural fields as (offset, size), where its data begins."""
    writer = Writer()
    for data in (b"GGUF", struct.pack("<I", version)):
        writer.put(data)
    for count in (len(tensors), len(keys)):
        writer.put(struct.pack("<Q", count))
    for name, kind, value in keys:
        writer.string(name)
        writer.put(struct.pack("<I", kind))
        writer.value(kind, value)
    body = bytearray()
    for name, dims, kind, offset, data in tensors:
        body += bytes(-len(body) % align)
        writer.string(name)
        writer.put(struct.pack("<I", len(dims)))
        for n in dims:
            writer.put(struct.pack("<Q", n))
        writer.put(struct.pack("<I", kind))
        writer.put(struct.pack("<Q", len(body) if offset is None else offset))
        body += data
    start = len(writer.data) + -len(writer.data) % align
    return bytes(writer.data).ljust(start, b"\0") + body, writer.spans, start


def tiny_model(path, keys=None, tensors=None):
    """Write the tiny model, with other keys or tensors if given."""
    path.write_bytes(gguf_file(keys or tiny_keys(), tensors or tiny_tensors())[0])
    return path


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny model as it should be, loaded once: what is compiled or imported then is not timed."""
    path = tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    llama2.load(path)
    return path


# --------------------------------------------------------------------------------------------------
# Mutations

COUNTS = (0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = (0, 1, -1, 3, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, math.nan, math.inf, -math.inf, 1e-45, 1e38, 1e308)
TEXTS = ("", "\0", "\ud800", b"\xff\xfe", b"\xf0\x9f", "x" * 5000, "llama", "gpt2", "none", "yarn")
NAMES = ("rope_freqs.weight", "blk.0.attn_qkv.weight", "blk.0.attn_q.bias", "blk.1.attn_q.weight")
EXTRA_KEYS = (
    ("llama.expert_count", U32, 8),
    ("llama.rope.scaling.type", STRING, "none"),
    ("llama.attention.key_length", U64, 2**63),
    ("split.count", U16, 3),
    ("general.type", STRING, "adapter"),
    ("tokenizer.ggml.add_space_prefix", BOOL, False),
    ("tokenizer.chat_template", U32, 1),
)


def mutate_value(rng, entry):
    """Another value or another type for one metadata key."""
    _, kind, value = entry
    choice = rng.randrange(4)
    if kind == ARRAY and choice and value[1]:
        inner, values = value[0], list(value[1])
        where = rng.randrange(len(values))
        if choice == 1:
            pool = {STRING: TEXTS + tuple(values[:5]), F32: FLOATS[:7], ARRAY: [(U8, [1, 2])]}
            pool = pool.get(inner, NUMBERS)
            for _ in range(rng.choice((1, 3, 50))):
                values[rng.randrange(len(values))] = rng.choice(pool)
        elif choice == 2:
            values = rng.choice((values[:where], values * 2, [], values[::-1]))
        else:
            other = rng.choice((U8, I64, F64, BOOL, STRING, ARRAY))
            sample = {STRING: "a", ARRAY: (U8, [1, 2])}.get(other, 1)
            inner, values = other, [sample] * len(values)
        entry[2] = (inner, values)
        return
    pools = {STRING: TEXTS, F32: FLOATS[:7], F64: FLOATS, BOOL: (0, 1), I64: NUMBERS}
    pools[ARRAY] = ((U32, [2, 2]), (ARRAY, [(U32, [1]), (U32, [1])]), (STRING, []), (U8, [1] * 999))
    if choice == 0:
        entry[1] = kind = rng.choice((STRING, F32, F64, BOOL, I64, U64, ARRAY))
    entry[2] = rng.choice(pools.get(kind, tuple(n for n in COUNTS if n < 2**32)))


def fit_data(tensor):
    """Give a tensor data of the size that its type and dims ask for, if that is small."""
    with contextlib.suppress(ValueError):
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor[2])]
        needed = math.prod(tensor[1]) // block * size
        if 0 < needed < 2**18:
            tensor[4] = (tensor[4] * (needed // len(tensor[4]) + 1))[:needed]


def mutate_structure(rng, keys, tensors):
    """One change to what the file says: keys, types, shapes, names, offsets, data."""
    key, tensor, other = rng.choice(keys), rng.choice(tensors), rng.choice(tensors)
    choice = rng.randrange(14)
    if choice < 4:
        mutate_value(rng, key)
    elif choice == 4:
        keys.remove(key)
    elif choice == 5:
        keys.insert(rng.randrange(len(keys)), list(rng.choice((key, *EXTRA_KEYS))))
    elif choice == 6:
        tensors.remove(tensor)
    elif choice == 7:
        tensor[0] = rng.choice((other[0], *NAMES, "x.weight", "", b"\xff", "blk.2.ffn_up.weight"))
    elif choice == 8:
        tensor[1] = rng.choice((tensor[1][::-1], tensor[1] + [1], tensor[1][:1], [1, *tensor[1]]))
    elif choice == 9:
        where = rng.randrange(len(tensor[1]))
        tensor[1][where] = rng.choice((*COUNTS, tensor[1][where] * 2, tensor[1][where] + 1))
    elif choice == 10:
        tensor[2] = rng.choice((*range(45), 2**31))
    elif choice == 11:
        tensor[3] = rng.choice((0, 1, 32, 33, 64, 2**20, *COUNTS))
    elif choice == 12:
        dtype, bad = rng.choice((("<f4", math.nan), ("<f4", math.inf), ("<f2", math.nan)))
        data = np.frombuffer(tensor[4].ljust(4)[: len(tensor[4]) & -4 or 4], dtype).copy()
        data[rng.randrange(len(data)) :: rng.choice((1, 7, 10**9))] = bad
        tensor[4] = data.tobytes()
    else:
        tensor[4] = tensor[4][: len(tensor[4]) // rng.choice((2, 3, 100)) + 1]
    if choice in (8, 9, 10) and rng.randrange(3):
        fit_data(tensor)


def mutation(seed):
    """The bytes of the tiny model after one to three changes, decided by the seed."""
    rng = random.Random(seed)
    keys, tensors = tiny_keys(), tiny_tensors()
    way = rng.randrange(10)
    if way < 5:
        for _ in range(rng.choice((1, 1, 2, 3))):
            mutate_structure(rng, keys, tensors)
    data, spans, start = gguf_file(keys, tensors)
    data = bytearray(data)
    if way == 5:  # cut off: at a boundary, or anywhere
        del data[rng.choice((rng.choice(spans)[0], rng.randrange(len(data)), start)) :]
    elif way in (6, 7):  # a length, a count, a dimension, an offset: any field of 4 or 8 bytes
        place, size = rng.choice([span for span in spans if span[1] in (4, 8)])
        number = rng.choice((*COUNTS, len(data), int.from_bytes(data[place : place + size]) + 1))
        data[place : place + size] = (number % 256**size).to_bytes(size, "little")
    elif way > 7:  # bits and bytes, in the header or anywhere
        for _ in range(rng.choice((1, 2, 8))):
            place = rng.randrange(rng.choice((64, start, len(data))))
            data[place] = rng.choice((data[place] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(data)


# The same model as directories: Hugging Face's (one file, two with an index, .bin) and Meta's.

HOSTILE_FORMS = ("hf", "hf index", "bin", "meta")


def safetensors_file(tensors):
    """Named tensors as safetensors' bytes, in float32."""
    header, body = {}, b""
    for name, t in tensors.items():
        data = t.numpy().tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def saved(content, **options):
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


@functools.cache
def directory(form):
    """{file name: bytes} of the tiny model."""
    config = llama2.Config(HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, len(SMALL_PIECES), CONTEXT)
    state = {n: t.detach() for n, t in llama2.Llama(config).named_parameters()}
    values = {key: value[1] if kind == ARRAY else value for key, kind, value in tiny_keys()}
    vocabulary = SimpleNamespace(
        path="", get=lambda key, kind, default=None: values.get(key, default)
    )
    files = {"tokenizer.model": llama2.sentencepiece_model(vocabulary)}
    if form == "meta":
        params = {"dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS}
        params |= {"norm_eps": 1e-5, "vocab_size": -1, "multiple_of": 32, "ffn_dim_multiplier": 0.7}
        files["params.json"] = json.dumps(params).encode()
        shards = [{"rope.freqs": torch.ones(4)}, {"rope.freqs": torch.ones(4)}]
        for ours, theirs in llama2.name_map(2, config):
            axis = {row[2].split(".")[-1]: row[3] for row in llama2.NAMES}[theirs.split(".")[-2]]
            t = state[ours]
            for shard, part in zip(
                shards, [t, t] if axis is None else t.chunk(2, axis), strict=True
            ):
                shard[theirs] = part.clone()
        return files | {f"consolidated.{i:02}.pth": saved(shard) for i, shard in enumerate(shards)}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    settings = {name: getattr(config, name) for name in names}
    settings |= {"model_type": "llama", "tie_word_embeddings": False, "hidden_act": "silu"}
    settings |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    files["config.json"] = json.dumps(settings).encode()
    state = {name if name == "lm_head.weight" else f"model.{name}": t for name, t in state.items()}
    if form == "hf":
        return files | {"model.safetensors": safetensors_file(state)}
    if form == "bin":
        return files | {"pytorch_model.bin": saved(state)}
    halves = [dict(list(state.items())[i::2]) for i in (0, 1)]
    shards = {f"model-0000{i}-of-00002.safetensors": half for i, half in enumerate(halves, 1)}
    index = {"weight_map": {name: file for file, half in shards.items() for name in half}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    return files | {name: safetensors_file(half) for name, half in shards.items()}


class Bomb:
    """Unpickled by a careless reader, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


ODD_VALUES = (0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -1e-5, 1e308, math.nan, math.inf, "", "x")
ODD_VALUES += (
    None,
    True,
    False,
    [],
    {},
    [1],
    {"a": 1},
    "\ud800",
    "model.safetensors",
    "../x",
    "F16",
)
ODD_TENSORS = (
    7,
    [1, 2],
    {1: torch.ones(2)},
    {"x": 1},
    {"x": torch.tensor(1.0)},
    {"x": torch.ones(2, 2, 2)},
    {"x": torch.ones(3, 2).t()},
    {"x": torch.ones(1).expand(2**20, 2**15)},
    {"x": torch.ones(0, 3)},
    {"x": torch.ones(2, 2).to_sparse()},
    {"x": torch.ones(2, 2, device="meta")},
    {"x": torch.ones(2, 2, dtype=torch.complex64)},
    {"model": {"x": torch.ones(2, 2)}},
)


def mutate_json(rng, content):
    """Change one value, anywhere in it; return it as bytes."""
    spots = [content]
    for spot in spots:
        children = spot.values() if isinstance(spot, dict) else spot
        spots += [child for child in children if isinstance(child, (dict, list)) and child]
    spot = rng.choice((content, rng.choice(spots)))
    key = rng.choice(list(spot) if isinstance(spot, dict) else range(len(spot)))
    choice = rng.randrange(8)
    if choice == 0:
        del spot[key]
    elif choice == 1:
        spot[key] = rng.choice(list(spot.values() if isinstance(spot, dict) else spot))
    elif choice == 2 and isinstance(spot, dict):
        spot[rng.choice(("x", "", "head_dim", "rope_scaling", "moe"))] = spot[key]
    else:
        spot[key] = rng.choice(ODD_VALUES)
    if choice == 7:
        return rng.choice((b"[" * 10**5, b"[]", b"", b"null", b'{"a":' * 10**4, b"\xff\xfe{}"))
    return json.dumps(content).encode()


def mutate_file(rng, name, data):
    """One change to one file of a directory."""
    way = rng.randrange(6)
    if way == 0:
        return data[: rng.randrange(len(data) + 1)]
    if way == 1 or name == "tokenizer.model":
        data = bytearray(data)
        for _ in range(rng.choice((1, 2, 10))):
            place = rng.randrange(rng.choice((min(300, len(data)), len(data))))
            data[place] = rng.choice((data[place] ^ 1 << rng.randrange(8), rng.randrange(256)))
        return bytes(data)
    if name.endswith(".json"):
        return mutate_json(rng, json.loads(data))
    if name.endswith(".safetensors"):
        size = int.from_bytes(data[:8], "little")
        if way == 2:
            return struct.pack("<Q", rng.choice(COUNTS)) + data[8:]
        text = mutate_json(rng, json.loads(data[8 : 8 + size]))
        return struct.pack("<Q", len(text)) + text + data[8 + size :]
    if way == 2:
        content = rng.choice(ODD_TENSORS)
        return saved(content, _use_new_zipfile_serialization=rng.random() < 0.7)
    content = torch.load(io.BytesIO(data), weights_only=True)
    key = rng.choice(list(content))
    if way == 3:
        content[key] = rng.choice(ODD_TENSORS)
    elif way == 4:
        content[rng.choice((*content, "x", 3, ""))] = content.pop(key)
    else:
        content[key].view(-1)[:: rng.choice((1, 9))] = rng.choice((math.nan, math.inf, 1e38))
    return saved(content, _use_new_zipfile_serialization=rng.random() < 0.7)


def mutated_directory(seed, path):
    """Write the tiny model's directory with one or two files changed or missing."""
    rng = random.Random(seed)
    files = dict(directory(rng.choice(HOSTILE_FORMS)))
    for name in rng.sample(list(files), rng.choice((1, 1, 1, 2))):
        if rng.randrange(20):
            files[name] = mutate_file(rng, name, files[name])
        else:
            del files[name]
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


@contextlib.contextmanager
def at_most(megabytes):
    """Let this process take so much more memory; beyond it, allocations fail."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def outcome(path):
    """Load a file and generate two tokens: "runs", or what the ValueError or OSError said."""
    try:
        model, tokenizer = llama2.load(path)
    except (ValueError, OSError) as error:
        assert path.name in str(error), f"does not name the file: {error}"
        assert len(str(error)) < 500, "an error should fit in a line or two"
        return str(error)
    try:
        ids = tokenizer.encode("ab \u00e9\U0001f600", bos=tokenizer.add_bos)
        new = list(llama2.generate(model, ids, max_new_tokens=2, temperature=0.8, stop_ids=()))
        assert all(0 <= token_id < model.config.vocab_size for token_id in new)
        tokenizer.decode(new)
        return "runs"
    except ValueError as error:
        return str(error)


def bounded_outcome(path):
    """outcome() within 5 seconds and 300 MB."""
    start = time.perf_counter()
    with at_most(300):
        said = outcome(path)
    assert time.perf_counter() - start < 5
    return said


def test_tiny_model_runs(tiny):
    """The file that all mutations start from is valid."""
    assert outcome(tiny) == "runs"


@pytest.mark.parametrize("start", range(0, 320, 40))
def test_mutated_files(tiny, tmp_path, start):
    """Forty mutations: an error that names the file, or a model that runs, in bounded time and memory."""
    said = []
    for seed in range(start, start + 40):
        path = tmp_path / f"{seed}.gguf"
        path.write_bytes(mutation(seed))
        said.append(bounded_outcome(path))
    assert 1 <= said.count("runs") <= 30  # neither all valid nor all refused at the first byte


def test_mutated_files_by_hypothesis(tiny, tmp_path):
    """The same, with mutations that hypothesis looks for and shrinks."""
    hypothesis = pytest.importorskip("hypothesis")
    data, spans, _ = gguf_file(tiny_keys(), tiny_tensors())
    places = hypothesis.strategies.sampled_from(spans)
    pieces = hypothesis.strategies.one_of(
        hypothesis.strategies.binary(max_size=24),
        hypothesis.strategies.integers(0, 2**64 - 1).map(lambda n: n.to_bytes(8, "little")),
    )
    path = tmp_path / "m.gguf"

    @hypothesis.settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @hypothesis.given(hypothesis.strategies.lists(hypothesis.strategies.tuples(places, pieces)))
    def check(changes):
        changed = bytearray(data)
        for (place, size), piece in changes[:5]:
            changed[place : place + size] = piece
        path.write_bytes(changed)
        bounded_outcome(path)

    check()


@pytest.mark.parametrize("form", HOSTILE_FORMS)
def test_tiny_directories_run(tmp_path, form):
    """The directories that mutations start from are valid."""
    for name, data in directory(form).items():
        (tmp_path / name).write_bytes(data)
    assert outcome(tmp_path) == "runs"


@pytest.mark.parametrize("start", range(0, 200, 40))
def test_mutated_directories(tmp_path, start):
    """params.json, config.json, index, safetensors, .pth, .bin and tokenizer.model: forty mutations."""
    seeds = range(start, start + 40)
    said = [bounded_outcome(mutated_directory(seed, tmp_path / f"{seed}")) for seed in seeds]
    assert 1 <= said.count("runs") <= 30


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["consolidated.00.pth", "pytorch_model.bin"])
def test_pickles_run_nothing(tmp_path, name, zipped):
    """A pickle that would run code is refused before it does."""
    for file, data in directory("meta" if "consolidated" in name else "bin").items():
        (tmp_path / file).write_bytes(data)
    content = {"x": torch.ones(2, 2), "bomb": Bomb(tmp_path / "exploded")}
    (tmp_path / name).write_bytes(saved(content, _use_new_zipfile_serialization=zipped))
    with pytest.raises(ValueError, match=f"{name}: damaged, or not a file of tensors alone"):
        llama2.load(tmp_path)
    assert not (tmp_path / "exploded").exists()
    torch.load(tmp_path / name, weights_only=False)
    assert (tmp_path / "exploded").exists()  # it would have


def test_compressed_pickles_are_refused(tmp_path):
    """torch.save never compresses: a megabyte that swells to a gigabyte is not read."""
    files = directory("bin")
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    packed = zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(io.BytesIO(files["pytorch_model.bin"])) as original, packed:
        for entry in original.infolist():
            packed.writestr(entry.filename, original.read(entry))
    assert "compressed" in bounded_outcome(tmp_path)


def test_index_stays_in_its_directory(tmp_path):
    """A weight_map that points elsewhere reads nothing there."""
    for file, data in directory("hf index").items():
        (tmp_path / file).write_bytes(data)
    path = tmp_path / "model.safetensors.index.json"
    for name in ("../../etc/passwd", "/etc/passwd", "..", "", "a\0b"):
        path.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert "passwd: " not in bounded_outcome(tmp_path).replace(f"{tmp_path}/passwd", "")


@pytest.mark.parametrize(
    "key, number, said",
    [
        ("llama.block_count", 2**31, "num_hidden_layers"),
        ("llama.block_count", 2**28, "layers"),
        ("llama.block_count", 20, "missing"),
        ("llama.context_length", 2**28, "runs"),
        ("llama.context_length", 2**31, "max_position_embeddings"),
        ("llama.embedding_length", 2**27, "head size"),
        ("llama.feed_forward_length", 2**28, "needed is"),
        ("llama.attention.head_count", 2**28, "head size"),
        ("llama.attention.head_count_kv", 3, "multiple"),
        ("llama.attention.head_count_kv", 0, "num_key_value_heads"),
        ("split.count", 65535, "65535"),
        ("general.alignment", 2**31, "alignment"),
        ("general.alignment", 1, "alignment"),  # float32 could not be read in place
    ],
)
def test_absurd_counts_do_not_allocate(tmp_path, key, number, said):
    """A count is believed only as far as the file or the request bears it out."""
    keys = [entry for entry in tiny_keys() if entry[0] != key] + [[key, U32, number]]
    assert said in bounded_outcome(tiny_model(tmp_path / "absurd.gguf", keys))


N = len(SMALL_PIECES)


@pytest.mark.parametrize(
    "name, kind, value, said",
    [
        ("tokens", ARRAY, (STRING, [f"t{i}" for i in range(N - 1)]), f"{N - 1} tokens"),
        ("tokens", ARRAY, (STRING, []), "0 tokens"),
        ("tokens", ARRAY, (STRING, ["same"] * N), "already defined"),
        ("tokens", ARRAY, (STRING, ["<unk>", "<s>", "</s>"] + [""] * (N - 3)), "SentencePiece"),
        ("tokens", ARRAY, (STRING, [p for p, _ in SMALL_PIECES[:-1]] + ["\0x"]), "null"),
        ("tokens", ARRAY, (STRING, [p for p, _ in SMALL_PIECES[:-1]] + ["x" * 10**6]), "too long"),
        ("tokens", ARRAY, (U32, list(range(N))), "values for"),
        ("tokens", U32, 5, "not list"),
        ("scores", ARRAY, (F32, [math.nan] * N), "nan"),
        ("scores", ARRAY, (F64, [-1e300] * N), "scores"),
        ("scores", ARRAY, (STRING, ["1"] * N), "scores"),
        ("scores", ARRAY, (F32, [0.0]), "1 values"),
        ("token_type", ARRAY, (I32, [9] * N), "token_type"),
        ("token_type", ARRAY, (I32, [-(2**31)] * N), "token_type"),
        ("token_type", ARRAY, (F32, [1.0] * N), "token_type"),
        ("token_type", ARRAY, (I32, [6] * N), "byte piece"),
        ("token_type", ARRAY, (I32, [4] * N), "runs"),
        ("token_type", ARRAY, (I32, [3] * N), "runs"),
        ("bos_token_id", U32, N, "BOS"),
        ("eos_token_id", U32, 2**32 - 1, "EOS"),
        ("unknown_token_id", U32, N, "unknown"),
        ("bos_token_id", U32, 0, "no BOS"),
        ("bos_token_id", STRING, "1", "not int"),
    ],
)
def test_hostile_vocabularies(tmp_path, name, kind, value, said):
    """SentencePiece is C++: what it would choke on is refused before, or by it, as ValueError."""
    name = f"tokenizer.ggml.{name}"
    keys = [entry for entry in tiny_keys() if entry[0] != name] + [[name, kind, value]]
    assert said in bounded_outcome(tiny_model(tmp_path / "vocabulary.gguf", keys))


def test_chains_of_merges_end(tmp_path):
    """Merges nested 19 deep and a text of a million equal letters: linear, not quadratic."""
    pieces = [(piece, kind) for piece, kind in SMALL_PIECES if len(piece) == 1 or kind != 1]
    pieces += [("a" * 2**i, 1) for i in range(1, 10)]
    for kind in (1, 4, 5):  # normal, user-defined, unused
        rows = {"tokens": (STRING, [p for p, _ in pieces])}
        rows["scores"] = (F32, [-float(i) for i in range(len(pieces))])
        rows["token_type"] = (I32, [k if len(p) < 2 or k != 1 else kind for p, k in pieces])
        keys = [entry for entry in tiny_keys() if entry[0].split(".")[-1] not in rows]
        keys += [[f"tokenizer.ggml.{name}", ARRAY, value] for name, value in rows.items()]
        path = tmp_path / f"{kind}.gguf"
        path.write_bytes(gguf_file(keys, [])[0])
        tokenizer, start = llama2.Tokenizer.from_gguf(path), time.perf_counter()
        assert len(tokenizer.encode("a" * 10**6)) > 1000
        assert time.perf_counter() - start < 5


# --------------------------------------------------------------------------------------------------
# Bad numbers

QUANTS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "F16", "BF16", "F32"]
QUANTS += [f"Q{bits}_K" for bits in (2, 3, 4, 5, 6)]


@pytest.mark.parametrize("kind", QUANTS)
def test_bytes_of_no_sense_in_weights(tmp_path, kind):
    """Every scale NaN or infinity: told at the logits; random bytes: told or run, never a crash."""
    keys, n = tiny_keys(), 256
    for entry in keys:
        entry[2] = {"llama.embedding_length": n, "llama.feed_forward_length": n}.get(
            entry[0], n // HEADS if entry[0] == "llama.rope.dimension_count" else entry[2]
        )
    good = tiny_tensors(n, n, (kind,))
    for data in (b"\xff", b"\x7c\x7c", bytes(random.Random(0).randbytes(997))):
        tensors = [list(tensor) for tensor in good]
        for tensor in tensors:
            if tensor[0] in ("blk.1.ffn_up.weight", "output.weight"):
                size = len(tensor[4])
                tensor[4] = (data * (size // len(data) + 1))[:size]
        said = bounded_outcome(tiny_model(tmp_path / "bad.gguf", keys, tensors))
        assert "not finite" in said or (said == "runs" and data != b"\xff")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["output_norm", "blk.0.attn_norm", "blk.1.ffn_norm"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_norms_that_are_not_finite(tmp_path, name, bad, temperature):
    """One bad number in a norm ends in an error, in no row of a batch in a sampled token."""
    tensors = tiny_tensors()
    for tensor in tensors:
        if tensor[0] == name + ".weight":
            tensor[4] = struct.pack("<f", bad) + tensor[4][4:]
    model, _ = llama2.load(tiny_model(tmp_path / "bad.gguf", None, tensors))
    for prompt in ([1, 268], [[1, 268], [1, 265, 266]]):
        with pytest.raises(ValueError, match="not finite"):
            list(llama2.generate(model, prompt, 4, temperature))


# --------------------------------------------------------------------------------------------------
# Prompts


class Stdin(io.TextIOWrapper):
    """Bytes on standard input."""

    def __init__(self, data):
        super().__init__(io.BytesIO(data))


@pytest.fixture
def run_script(tiny, capsys, monkeypatch):
    """Run the command line in this process: -> exit status, stdout, stderr."""

    def run(*argv, stdin=b"", model=tiny):
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        try:
            status = llama2.main(["--model", str(model), *map(str, argv)])
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err and "\x1b" not in err and "\r" not in err
        return status, out, err

    return run


TEXTS_TO_CONTINUE = {
    "empty": "",
    "spaces": "   ",
    "newlines": "\n\t\r\n",
    "NUL": "a\0b",
    "controls": "".join(map(chr, range(1, 32))) + "\x7f\x80\x9f",
    "right to left": "\u202e\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "joined emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467\ufe0f",
    "noncharacters": "\ufffe\uffff\U0010ffff\u2581\ufeff",
    "combining": "e\u0301\u0300" * 4,
    "control tokens": "<s></s><unk><0x0A>",
}


@pytest.mark.parametrize("text", TEXTS_TO_CONTINUE.values(), ids=TEXTS_TO_CONTINUE.keys())
@pytest.mark.parametrize("way", ["argument", "file", "stdin"])
def test_prompts(run_script, tmp_path, text, way):
    """Any text is continued, whichever way it comes, and comes out as it went in."""
    (tmp_path / "prompt").write_bytes(text.encode())
    ways = {"argument": ["--prompt", text], "file": ["--prompt-file", tmp_path / "prompt"]}
    argv, stdin = ways.get(way, []), text.encode() * (way == "stdin")
    status, out, err = run_script(*argv, "--max-new-tokens", 2, stdin=stdin)
    assert (status, err.count("\n")) == (0, 1)
    assert out.replace("\r\n", "\n").startswith(text.replace("\r\n", "\n"))


@pytest.mark.parametrize("text", ["<s>", "</s>", "<unk>", "[INST]", "<<SYS>>", "<0x0A>", "a</s>b"])
def test_text_like_special_tokens_is_text(tiny, text):
    """A typed control token is never that token."""
    tokenizer = llama2.Tokenizer.from_gguf(tiny)
    ids = tokenizer.encode(text, bos=False)
    assert not {0, 1, 2} & set(ids) and tokenizer.decode(ids) == text


def test_any_bytes_on_stdin(run_script):
    """Bytes that are not UTF-8 become U+FFFD; nothing raises."""
    rng = random.Random(0)
    samples = [bytes([i]) for i in (0, 0x80, 0xC3, 0xE2, 0xED, 0xF4, 0xFF)] + [b"\xed\xa0\x80"]
    for data in samples + [rng.randbytes(rng.randrange(1, 15)) for _ in range(12)]:
        status, out, _ = run_script("--max-new-tokens", 1, "--quiet", stdin=data)
        assert status == 0 and out.startswith(io.StringIO(data.decode("utf-8", "replace")).read())


SURROGATES = [(0xDCFF,), (0xDCC3, 0xDCA9), (0xD800,), (0xDFFF, 0xD800)]


@pytest.mark.parametrize("text", ["".join(map(chr, codes)) for codes in SURROGATES], ids=ascii)
def test_lone_surrogates(run_script, tiny, text):
    """Arguments of bytes that are not UTF-8 arrive as lone surrogates."""
    ids = llama2.Tokenizer.from_gguf(tiny).encode(text)
    assert ids[0] == 1
    status, out, err = run_script("--prompt", text, "--max-new-tokens", 1)
    assert status in (0, 2) and err.count("\n") == 1
    assert status or out.startswith(
        text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    )


def test_prompt_beyond_the_context(run_script):
    """A megabyte of text: an error with both numbers before anything is written, no silent cut."""
    status, out, err = run_script(stdin=b"ab cd" * 200_000)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"the context holds {CONTEXT}" in err and "tokens" in err


# --------------------------------------------------------------------------------------------------
# Command line


@pytest.mark.parametrize(
    "argv, said",
    [
        ("--temperature -1", "temperature -1"),
        ("--temperature nan", "temperature nan"),
        ("--temperature inf", "temperature inf"),
        ("--top-k -1", "top_k -1"),
        ("--top-p 0", "top_p 0"),
        ("--top-p 1.01", "top_p 1.01"),
        ("--min-p -0.5", "min_p -0.5"),
        ("--seed -2", "seed is -2"),
        ("--seed 9223372036854775808", "seed is 9223372036854775808"),
        ("--max-new-tokens -1", "max_new_tokens is -1"),
        ("--max-new-tokens many", "--max-new-tokens"),
        ("--context 0", "--context 0"),
        ("--context 65", "--context 65"),
        ("--context 2", "the context holds 2"),
        ("--threads 0", "--threads 0"),
        ("--threads 100000", "--threads 100000"),
        ("--device tpu", "tpu"),
        ("--dtype float8", "float8"),
        ("--stop=", "--stop"),
        ("--system x", "--chat"),
        ("--prompt-file absent.txt", "absent.txt"),
        ("--model absent.gguf", "absent.gguf"),
        ("--model {dir}", "{dir}"),
        ("--model /dev/null", "/dev/null"),
        ("--unheard-of", "--unheard-of"),
        *[(f"--device {name}", name) for name in ("cuda", "mps") if not DEVICES[name]],
    ],
)
def test_one_line_and_status_2(run_script, tmp_path, argv, said):
    """A wrong argument is told in one line that names it; nothing is written to stdout."""
    argv = argv.format(dir=tmp_path).split()
    prompt = [] if "--prompt-file" in argv else ["--prompt", "ab"]
    status, out, err = run_script(*prompt, *argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("llama2.py: error: ") and said.format(dir=tmp_path) in err


@pytest.mark.parametrize(
    "argv",
    [
        "--max-new-tokens 0",
        "--temperature 1e-300",
        "--temperature 1e300",
        "--top-k 99999999999999999999",
        "--top-p 1e-300",
        "--seed -1",
        "--context 3",
        "--threads 1",
        "--dtype float16",
        "--dtype bfloat16",
        "--max-new-tokens 99999999999999999999",
    ],
)
def test_extremes_that_are_fine(run_script, argv):
    """What is unusual and means something works."""
    status, out, err = run_script("--prompt", "ab", *argv.split(), "--stop", "never seen")
    assert status == 0 and out.startswith("ab") and err.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(run_script, tmp_path):
    path = tiny_model(tmp_path / "secret.gguf")
    path.chmod(0)
    status, out, err = run_script("--prompt", "ab", model=path)
    assert (status, out, err.count("\n")) == (2, "", 1) and "secret.gguf" in err


def test_names_from_files_reach_no_terminal(run_script, tmp_path):
    """Control characters in a tensor's name are not passed on: they would steer the terminal."""
    tensors = tiny_tensors()
    tensors[3][0] = "\x1b[31mred\x9b\0.weight"
    status, _, err = run_script(
        "--prompt", "ab", model=tiny_model(tmp_path / "red.gguf", None, tensors)
    )
    assert status == 2 and err.count("\n") == 1
    assert err.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error:\nout of memory"), MemoryError()], ids=["torch", "python"]
)
def test_what_torch_cannot_do_is_one_line(run_script, monkeypatch, error):
    """Out of memory, a kernel that the device lacks: torch raises RuntimeError."""

    def refuse(*args):
        raise error

    monkeypatch.setattr(llama2.Llama, "forward", refuse)
    status, _, err = run_script("--prompt", "ab")
    assert (status, err.count("\n")) == (2, 1) and err.startswith("llama2.py: error: ")


# --------------------------------------------------------------------------------------------------
# Streams and signals

LAUNCH = f"{shlex.quote(sys.executable)} {shlex.quote(str(LLAMA2))} --model $MODEL --threads 1 "
LAUNCH += "--temperature 0 --prompt 'ab \u00e9' --max-new-tokens 30"
SHELL = {  # -> exit status, a part of stdout, lines on stderr
    "head": (f"{LAUNCH} | head -c 2", 0, b"ab", None),
    "stdout full": (f"{LAUNCH} > /dev/full", 2, b"", 1),
    "stdout closed": (f"{LAUNCH} >&-", 0, b"", 1),
    "stderr full": (f"{LAUNCH} 2> /dev/full", 0, b"ab", 0),
    "all closed": (f"{LAUNCH} <&- >&- 2>&-", 0, b"", 0),
    "help, full": (f"{LAUNCH} --help > /dev/full", 0, b"", 0),
    "ascii": (f"PYTHONIOENCODING=ascii {LAUNCH}", 0, rb"ab \xe9", 1),
    "C locale": (f"LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {LAUNCH}", 0, rb"ab \xe9", 1),
}


@pytest.fixture(scope="module")
def started(tiny):
    """The commands of SHELL, started side by side: each spends its time on importing torch."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    environment = os.environ | {"MODEL": str(tiny), "LC_ALL": "C.UTF-8"}
    environment.pop("PYTHONIOENCODING", None)
    shell = ["bash", "-o", "pipefail", "-c"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return {
        name: subprocess.Popen([*shell, command], env=environment, **pipes)
        for name, (command, *_) in SHELL.items()
    }


@pytest.mark.parametrize("name", SHELL)
def test_streams(started, name):
    """A reader that leaves, a full disk, closed streams, other encodings: no traceback, no status 120."""
    _, status, text, lines = SHELL[name]
    out, err = started[name].communicate(timeout=120)
    assert b"Traceback" not in err and b"Exception" not in err and b"\x1b" not in err
    assert started[name].returncode == status and text in out
    assert lines is None or err.count(b"\n") == lines


def test_interrupt_while_torch_is_imported(tiny):
    """Ctrl-C in the seconds before main() ends quietly."""
    command = [sys.executable, str(LLAMA2), "--model", str(tiny), "--prompt", "ab"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    maps = Path(f"/proc/{process.pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    while "libtorch" not in maps.read_text() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (out, err) == (b"", b"") and process.returncode in (-signal.SIGINT, 130)


@pytest.mark.parametrize(
    "owner, name, calls, written, reported",
    [
        (llama2, "open_checkpoint", 1, "", False),
        (llama2, "build_model", 1, "", False),
        (llama2.Llama, "forward", 1, "ab", True),
        (llama2.Llama, "forward", 5, "ab", True),
        (llama2.StreamDecoder, "decode", 3, "ab", True),
    ],
    ids=["opening", "loading", "prefill", "generating", "decoding"],
)
def test_interrupt(run_script, monkeypatch, owner, name, calls, written, reported):
    """Ctrl-C at any moment: status 130, what was written stays, the report tells it."""
    interrupt_call(monkeypatch, owner, name, calls)
    status, out, err = run_script("--prompt", "ab", "--max-new-tokens", 20)
    assert status == 130 and out.startswith(written) and ("interrupted" in err) == reported


def interrupt_call(monkeypatch, owner, name, calls):
    """Press Ctrl-C in the given call of a function."""
    original, count = getattr(owner, name), iter(range(1, 10**6))

    def function(*args, **options):
        if next(count) == calls:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, function)


# --------------------------------------------------------------------------------------------------
# Chat


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """The tiny model with room for a conversation: its vocabulary spends a token on most letters."""
    keys = [entry for entry in tiny_keys() if entry[0] != "llama.context_length"]
    path = tmp_path_factory.mktemp("talker") / "talker.gguf"
    dense = tiny_tensors(kinds=("F32",))  # many steps: nothing to dequantise in each
    return tiny_model(path, [*keys, ["llama.context_length", U32, 320]], dense)


@pytest.fixture
def heard(monkeypatch):
    """What each turn of a chat fed to the model, as the ids that its cache then stood for."""
    turns, content, wanted = [], [], []
    forward, encode, sample = llama2.Llama.forward, llama2.encode_chat, llama2.sample

    def spy_forward(model, tokens, cache, *args):
        content[cache.pos :] = tokens[0].tolist()
        return forward(model, tokens, cache, *args)

    def spy_encode(tokenizer, messages):
        wanted[:] = encode(tokenizer, messages)
        return list(wanted)

    def spy_sample(logits, *args, **options):
        if wanted and logits.numel() > 1:  # the first token of an answer
            assert content == wanted
            turns.append(list(content))
            wanted.clear()
        return sample(logits, *args, **options)

    monkeypatch.setattr(llama2.Llama, "forward", spy_forward)
    monkeypatch.setattr(llama2, "encode_chat", spy_encode)
    monkeypatch.setattr(llama2, "sample", spy_sample)
    return turns


def test_chat_that_fills_its_context(run_script, talker, heard):
    """Says so, drops the oldest turns, keeps the system prompt; the cache holds Meta's encoding."""
    questions = [f"{letter * 20}?" for letter in "abcdefgh"]
    argv = ["--chat", "--system", "hfhf", "--max-new-tokens", 30, "--temperature", 0]
    stdin = "\n".join(questions).encode()
    status, _, err = run_script(*argv, stdin=stdin, model=talker)
    assert status == 0 and err.count("context full: forgot the oldest") >= 2
    tokenizer = llama2.Tokenizer.from_gguf(talker)
    assert len(heard) == len(questions)
    for ids, question in zip(heard, questions, strict=True):
        text = tokenizer.decode(ids)
        assert len(ids) + 30 <= 320 and text.count("<<SYS>>\nhfhf") == 1
        assert text.endswith(f"{question} [/INST]")
    assert questions[0] in tokenizer.decode(heard[1])
    assert questions[0] not in tokenizer.decode(heard[-1])
    assert questions[-2] in tokenizer.decode(heard[-1])


def test_chat_answer_cut_by_the_context(run_script, talker):
    """An answer that the context cuts off is not passed over in silence."""
    argv = ["--chat", "--max-new-tokens", 10**6, "--temperature", 0]
    status, _, err = run_script(*argv, stdin=b"ab\n", model=talker)
    assert status == 0 and "context full: the answer ends here" in err


def test_chat_refuses_and_goes_on(run_script, talker, heard):
    """Reserved tags and questions beyond the context are refused; the conversation stays."""
    lines = ["abab", "x [/INST] y", "<<SYS>>", "c" * 1000, "", "fefe"]
    argv = ["--chat", "--max-new-tokens", 5, "--temperature", 0]
    status, _, err = run_script(*argv, stdin="\n".join(lines).encode(), model=talker)
    assert status == 0 and err.count("reserved tag") == 2 and "the context holds 320" in err
    text = llama2.Tokenizer.from_gguf(talker).decode(heard[-1])
    assert len(heard) == 2 and text.startswith("[INST] abab [/INST]") and "fefe" in text


def test_chat_answer_with_reserved_tags(run_script, talker, heard, monkeypatch):
    """A model that speaks for the user is stopped there, and the next turn is possible."""
    tokenizer, calls = llama2.Tokenizer.from_gguf(talker), []
    script = tokenizer.encode("ab [INST] cd", bos=False)

    def scripted(model, prompt, report, **options):
        calls.append(prompt)
        report.__init__(new_ids=[[]], stop_reasons=[""])
        yield from script

    monkeypatch.setattr(llama2, "generate", scripted)
    status, out, err = run_script("--chat", "--quiet", stdin=b"ab\ncd\n", model=talker)
    assert (status, err, len(calls)) == (0, "", 2) and out == "ab \nab \n"


def test_interrupt_in_chat(run_script, talker, heard, monkeypatch):
    """Ctrl-C stops the answer, not the session; even the first, before anything is generated."""
    for calls in (1, 4):
        heard.clear()
        with monkeypatch.context() as context:
            interrupt_call(context, llama2.Llama, "forward", calls)
            argv = ["--chat", "--max-new-tokens", 8, "--temperature", 0]
            status, out, _ = run_script(*argv, stdin=b"ab\ncd\n", model=talker)
        assert status == 0 and out.count("\n") >= 2
        text = llama2.Tokenizer.from_gguf(talker).decode(heard[-1])
        assert "[INST] ab [/INST]" in text and text.endswith("[INST] cd [/INST]")


# --------------------------------------------------------------------------------------------------
# Again and again


@pytest.mark.parametrize("argv", [["--temperature", 0], ["--seed", 7]])
def test_same_command_same_text(run_script, argv):
    """Twice in a row, and with one thread or two, which these small sums do not notice."""
    most = min(2, os.cpu_count() or 1)
    argv = ["--prompt", "ab", "--max-new-tokens", 16, *argv]
    runs = {run_script(*argv, "--threads", n)[1] for n in (1, 1, most, most)}
    assert len(runs) == 1


def test_seeds_do_not_know_their_neighbours(tiny):
    """Row i of a batch draws what it would draw alone with seed + i."""
    model, _ = llama2.load(tiny)
    prompts = [[1, 260 + i] * (i + 1) for i in range(4)]
    options = {"max_new_tokens": 12, "temperature": 1.5, "stop_ids": ()}
    rows = list(zip(*llama2.generate(model, prompts, seed=5, **options), strict=True))
    for i, row in enumerate(rows):
        assert list(row) == list(llama2.generate(model, prompts[i], seed=5 + i, **options))


def test_memory_stays_flat(tmp_path):
    """Twenty generations to the end of the context leave nothing behind."""
    keys = [entry for entry in tiny_keys() if entry[0] != "llama.context_length"]
    path, dense = tmp_path / "m.gguf", tiny_tensors(kinds=("F32",))
    model, _ = llama2.load(tiny_model(path, [*keys, ["llama.context_length", U32, 24]], dense))

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    for i in range(20):
        assert len(list(llama2.generate(model, [1], 10**6, 0.8, stop_ids=()))) == 23
        if i == 4:
            warm = resident()
    assert resident() - warm < 8 * 2**20


# --------------------------------------------------------------------------------------------------
# bench_llama2.py: every mode runs, and its arithmetic is right

STORY = (
    "Once upon a time there was a king who had three sons, and the youngest was the wisest. " * 12
)


@pytest.fixture
def quick(monkeypatch, tmp_path):
    """Few rounds, little memory, nothing compiled, baselines in a folder of the test's own."""
    interleave = bench.interleave
    monkeypatch.setattr(bench, "interleave", lambda ways, rounds=1: interleave(ways, 2))
    monkeypatch.setattr(bench, "bandwidth", lambda device: 1e10)
    monkeypatch.setattr(bench, "BASELINES", tmp_path / ".benchmarks")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def bench_json(tmp_path, *argv):
    """Run the command line; what it wrote as JSON."""
    file = tmp_path / "result.json"
    assert bench.main([*map(str, argv), "--json", str(file)]) == 0
    return json.loads(file.read_text())


# --------------------------------------------------------------------------------------------------
# Arithmetic on made-up numbers


@pytest.mark.usefixtures("quick")
def test_shares_sum_to_one_and_name_the_remainder():
    found = bench.shares({"qkv": 2.0, "MLP": 5.0}, whole=10.0)
    assert found["qkv"] == 0.2
    assert found["head"] == 0.0
    assert list(found.values())[-1] == pytest.approx(0.3)
    assert sum(found.values()) == pytest.approx(1.0)


@pytest.mark.usefixtures("quick")
def test_ratio_is_the_median_of_the_rounds():
    # The machine was ten times slower in the second round: the rounds still agree.
    assert bench.ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0


@pytest.mark.usefixtures("quick")
def test_iqr():
    assert bench.iqr([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert bench.iqr([7.0]) == 0.0


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("cases", "low", "high", "word"),
    [
        ({"a": 2.5, "b": 2.0}, 2, 3, "confirmed"),
        ({"a": 1.9, "b": 3.1}, 2, 3, "refuted"),
        ({"a": 1.9, "b": 2.1}, 2, 3, "depends"),
        ({"a": 100.0}, 1.05, math.inf, "confirmed"),
        ({"a": 1.04}, 1.05, math.inf, "refuted"),
    ],
)
def test_verdicts(cases, low, high, word):
    assert bench.judge(cases, low, high) == word


@pytest.mark.usefixtures("quick")
def test_verdicts_show_their_figures():
    assert bench.listed({"at 128": 0.0512}, ".2%") == "5.12% at 128"
    assert bench.listed({"eager": 1.234}) == "1.23x eager"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("new", "old", "word"),
    [
        ((1.2, 0.0), (1.0, 0.0), "regressed"),
        ((0.8, 0.0), (1.0, 0.0), "improved"),
        ((1.02, 0.0), (1.0, 0.0), "within noise"),  # below 3 % nothing is believed
        ((1.2, 0.3), (1.0, 0.0), "within noise"),
        ((1.2, 0.0), (1.0, 0.3), "within noise"),
    ],
)
def test_change_against_a_baseline(new, old, word):
    new, old = ({"median": m, "iqr": r} for m, r in (new, old))
    part, noise, found = bench.change(new, old)
    assert found == word
    assert part == pytest.approx(new["median"] / old["median"] - 1)
    assert noise >= 0.03


@pytest.mark.usefixtures("quick")
def test_compare_gives_rates_and_their_ratio():
    ours, theirs = {"pp8": [2.0, 4.0, 2.0]}, {"pp8": [1.0, 2.0, 1.0]}
    assert bench.compare(ours, theirs, {"pp8": 8}) == {
        "pp8": {"ours": 4.0, "theirs": 8.0, "ratio": 0.5}
    }


@pytest.mark.usefixtures("quick")
def test_engines_take_turns():
    log = []

    def engine(name):
        def run(prompts, new, depth):
            log.append(name)
            return {"tg": float(len(log))}

        return run

    found = bench.take_turns({"A": engine("A"), "B": engine("B")}, (8,), 1, 8, rounds=2)
    assert log == ["A", "B"] * 3
    assert found == {"A": {"tg": [3.0, 5.0]}, "B": {"tg": [4.0, 6.0]}}  # without the warm-up


@pytest.mark.usefixtures("quick")
def test_bandwidth(monkeypatch):
    monkeypatch.undo()
    assert bench.bandwidth(torch.device("cpu"), 2**16) > 0


@pytest.mark.usefixtures("quick")
def test_show():
    found = [bench.show(value) for value in (2.0, 0.0125, 62.6e-6, 5e-9)]
    assert found == ["2 s", "12.5 ms", "62.6 us", "5 ns"]


# --------------------------------------------------------------------------------------------------
# Models without a file, naive variants


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kind", [*bench.DENSE, *bench.SCALES])
def test_random_weights_are_finite(kind):
    weight = bench.RandomWeight(kind, (300, 512), [])
    assert weight.read().nbytes == weight.nbytes
    dense = weight.dense(torch.float32)
    assert dense.isfinite().all()
    assert dense.std() > 0


@pytest.mark.usefixtures("quick")
def test_types_of_mixed_files():
    config = llama2.Config(256, 512, 8, 4, 2, vocab_size=64)
    kinds = {name: w.kind for name, w in bench.random_weights(config, "Q4_K_M").items()}
    assert kinds["lm_head.weight"] == "Q6_K"
    assert kinds["norm.weight"] == "F32"
    assert kinds["embed_tokens.weight"] == kinds["layers.0.self_attn.q_proj.weight"] == "Q4_K"
    better = [i for i in range(8) if kinds[f"layers.{i}.mlp.down_proj.weight"] == "Q6_K"]
    assert better == [0, 3, 6, 7]  # the first and the last eighth, every third between
    kinds = {w.kind for w in bench.random_weights(config, "Q8_0").values()}
    assert kinds == {"Q8_0", "F32"}


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_naive_variants_equal_the_reference(kv_heads):
    config = llama2.Config(64, 96, 2, 4, kv_heads, vocab_size=50, max_position_embeddings=64)
    torch.manual_seed(0)
    model = llama2.Llama(config).eval()
    s = bench.Setting(bench.parse_args([]), torch.device("cpu"), torch.float32)
    ids = s.tokens(config, 1, 12)[0]
    with torch.no_grad():
        want = bench.step_through(s, model, ids, 5)
        for without in (*((part,) for part in bench.NAIVE), tuple(bench.NAIVE)):
            found = bench.step_through(s, model, ids, 5, without)
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
        a, b = s.cache(config, 12), s.cache(config, 12)
        inlined = bench.inline(model)
        for chunk in ids[None].split(7, 1):
            torch.testing.assert_close(inlined(chunk, a), model(chunk, b), rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("quick")
def test_a_wrong_variant_is_not_timed():
    with pytest.raises(ValueError, match="differs from the reference"):
        bench.check_same("it", torch.ones(3), torch.zeros(3) + 2)
    with pytest.raises(ValueError, match="differs from the reference"):
        bench.check_same("it", torch.full((3,), math.nan), torch.ones(3))


# --------------------------------------------------------------------------------------------------
# Modes


@pytest.mark.usefixtures("quick")
def test_suite_and_baselines(tmp_path, monkeypatch, capsys):
    tiny = ("--suite", "--config", "tiny", "--seconds", "0.01")
    found = bench_json(tmp_path, *tiny, "--save-baseline", "a")["suite"]
    names = {f"{name}/{T}" for name, (sizes, _) in bench.SUITE.items() for T in sizes}
    assert found.keys() == names
    assert all(row["samples"] >= 3 for row in found.values())
    again = bench_json(tmp_path, *tiny, "--baseline", "a", "--filter", "rope_forward/8")
    assert list(again["baseline"]) == ["rope_forward/8"]
    monkeypatch.setattr(bench, "change", lambda new, old: (0.5, 0.03, "regressed"))
    saved = json.loads((bench.BASELINES / "a.json").read_text())
    saved["machine"]["threads"] = 64
    (bench.BASELINES / "a.json").write_text(json.dumps(saved))
    argv = [*tiny, "--baseline", "a", "--filter", "rms_norm/1"]
    assert bench.main(argv) == 0
    assert bench.main([*argv, "--fail-on-regression"]) == 1
    out = capsys.readouterr().out
    assert "regressed" in out
    assert "the baseline was taken with threads 64" in out


@pytest.mark.usefixtures("quick")
def test_claims(tmp_path, capsys):
    found = bench_json(tmp_path, "--claims", "--config", "tiny")["claims"]
    words = {"confirmed", "refuted", "depends", "not measured"}
    assert len(found) == 5
    assert all(row["verdict"] in words and row["because"] for row in found.values())
    assert capsys.readouterr().out.count("(e)") >= 2


@pytest.mark.usefixtures("quick")
def test_breakdown(tmp_path):
    found = bench_json(tmp_path, "--breakdown", "--config", "tiny")["breakdown"]
    assert list(found) == ["decode", "128 tokens", "512 tokens"]
    for phase in found.values():
        assert sum(phase["shares"].values()) == pytest.approx(1.0)
        assert all(share > 0 for share in phase["shares"].values())
    assert "call" not in llama2.apply_rotary_emb.__qualname__  # the ranges are taken away again
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


@pytest.mark.usefixtures("quick")
def test_profile(tmp_path):
    trace = tmp_path / "trace.json"
    argv = ("--profile", trace, "--config", "tiny", "--prompt-tokens", 8, "--gen-tokens", 2)
    assert len(bench_json(tmp_path, *argv)["profile"]) == 10
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "options",
    [
        ("--config", "tiny", "--type", "Q4_0", "--context-sweep", 16, 64),
        ("--config", "tiny", "--dtype", "bfloat16", "--batch", 3, "--layers", 1),
        ("--config", "tiny", "--type", "Q8_0", "--compile"),
        ("--model", llama2.DEFAULT_MODEL),
    ],
)
def test_whole_model(tmp_path, options):
    short = ("--prompt-tokens", 8, "--gen-tokens", 2, "--rounds", 2)
    found = bench_json(tmp_path, *options, *short)["whole"]
    assert found["weights read per token"] > 0
    assert found["tokens/s"] > 0
    assert ("context" in found) == ("--context-sweep" in options)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "other", ["transformers", "transformers-bfloat16", "transformers-compiled"]
)
def test_compare_with_transformers(tmp_path, other):
    pytest.importorskip("transformers")
    short = ("--prompt-tokens", 8, "--gen-tokens", 2, "--rounds", 2)
    found = bench_json(tmp_path, "--config", "tiny", "--compare", other, *short)["whole"]
    assert found[other]["tg"].keys() == {"ours", "theirs", "ratio"}


@pytest.fixture
def llama_bench(tmp_path, monkeypatch):
    """A llama-bench that answers at once."""
    tests = [{"n_prompt": n, "n_gen": 0, "avg_ts": 100.0} for n in (8, 16)]
    tests.append({"n_prompt": 0, "n_gen": 2, "avg_ts": 10.0})
    program = tmp_path / "bin" / "llama-bench"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{json.dumps(tests)}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


@pytest.mark.usefixtures("quick")
def test_compare_with_llama_bench(tmp_path, llama_bench, capsys):
    argv = ("--model", llama2.DEFAULT_MODEL, "--compare", "llama.cpp", "--rounds", 2)
    short = ("--prompt-tokens", 8, "--gen-tokens", 2)
    found = bench_json(tmp_path, *argv, *short)["whole"]["llama.cpp"]
    assert found["pp8"]["theirs"] == pytest.approx(100.0)
    assert found["tg"]["theirs"] == pytest.approx(10.0)
    llama_bench.write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    assert bench.main([*map(str, argv)]) == 2
    assert "llama-bench failed: no such model" in capsys.readouterr().err


@pytest.mark.usefixtures("quick")
def test_table(tmp_path, llama_bench):
    path = llama2.DEFAULT_MODEL
    argv = ("--table", path, "--table-prompts", 8, 16, "--rounds", 1)
    found = bench_json(tmp_path, *argv)["table"][path.name]
    assert found.keys() == {"pp8", "pp16", "tg", "bandwidth", "fraction"}
    assert found["pp16"]["theirs"] == pytest.approx(100.0)
    assert found["fraction"] > 0


@pytest.mark.usefixtures("quick")
def test_llama_cpp_python_is_the_second_choice(tmp_path, monkeypatch):
    calls = []

    class Llama:
        def __init__(self, path, **options):
            assert options["n_ctx"] == 10

        def reset(self):
            calls.append("reset")

        def eval(self, tokens):
            calls.append(len(tokens))

    module = types.ModuleType("llama_cpp")
    module.Llama, module.__spec__ = Llama, importlib.machinery.ModuleSpec("llama_cpp", None)
    monkeypatch.setitem(__import__("sys").modules, "llama_cpp", module)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = bench.llama_cpp_engine(llama2.DEFAULT_MODEL, room=10)((8,), 2, 8)
    assert calls == ["reset", 8, "reset", 8, 1, 1]
    assert found.keys() == {"pp8", "tg"}


# --------------------------------------------------------------------------------------------------
# Perplexity


@pytest.mark.usefixtures("quick")
def test_windows_are_those_of_llama_perplexity():
    cut = list(bench.windows(range(100, 111), context=5, bos=1))
    assert [window.tolist() for window, _ in cut] == [
        [1, 101, 102, 103, 104],
        [1, 106, 107, 108, 109],
    ]
    assert [target.tolist() for _, target in cut] == [[103, 104], [108, 109]]


@pytest.mark.usefixtures("quick")
def test_perplexity_of_made_up_losses():
    value, error = bench.perplexity(torch.full((4,), math.log(7.0)))
    assert value == pytest.approx(7.0)
    assert error == pytest.approx(0.0, abs=1e-5)
    value, error = bench.perplexity(torch.tensor([0.0, 2.0]))
    assert value == pytest.approx(math.e)
    assert error == pytest.approx(math.e * 1.0)  # standard deviation sqrt(2), of two


@pytest.mark.usefixtures("quick")
def test_perplexity_equals_a_direct_computation(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(STORY)
    found = bench_json(tmp_path, "--perplexity", text, "--context", 32)["perplexity"]
    model, tokenizer = llama2.load(llama2.DEFAULT_MODEL)
    ids, losses = tokenizer.encode(STORY), []
    for start in range(0, len(ids) // 32 * 32, 32):
        window = torch.tensor([tokenizer.bos_id, *ids[start + 1 : start + 32]])
        with torch.no_grad():
            logits = model(window[None])[0]
        losses += F.cross_entropy(logits[16:-1], window[17:], reduction="none").tolist()
    assert found["tokens"] == len(losses)
    want = math.exp(sum(losses) / len(losses))
    assert found["files"][0]["perplexity"] == pytest.approx(want, rel=1e-4)


@pytest.mark.usefixtures("quick")
def test_perplexity_of_rounded_activations(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(STORY)
    argv = ("--perplexity", text, "--context", 128)
    found = {}
    for bits in (32, 16, 8):
        out = bench_json(tmp_path, *argv, "--activation-bits", bits)["perplexity"]
        found[bits] = out["files"][0]["perplexity"]
    assert found[16] == pytest.approx(found[32], rel=5e-3)
    assert found[8] == pytest.approx(found[32], rel=2e-2)


@pytest.mark.usefixtures("quick")
def test_divergence():
    a, b = torch.randn(2, 5, 30)
    want = F.kl_div(b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="none")
    torch.testing.assert_close(bench.divergence(a, b).float(), want.sum(-1))


@pytest.mark.usefixtures("quick")
def test_a_model_does_not_diverge_from_itself(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(STORY)
    path = llama2.DEFAULT_MODEL
    argv = ("--perplexity", text, "--context", 32, "--compare-types", path, path)
    found = bench_json(tmp_path, *argv)["perplexity"]
    assert found["kl"] == {"mean": 0.0, "p99": 0.0, "same_top": 1.0}
    assert found["files"][0] == found["files"][1]


# --------------------------------------------------------------------------------------------------
# Wrong command lines


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--compare-types", "a", "b"), "--compare-types needs --perplexity"),
        (("--model", "a", "--config", "7b"), "exclude each other"),
        (("--rounds", "0"), "'0' is not a whole number above 0"),
        (("--seconds", "0"), "accepted is above 0"),
        (("--no-such-option",), "unrecognized arguments"),
        (("--config", "8b"), "invalid choice: '8b'"),
        (("--model", "missing.gguf"), "missing.gguf: no such file"),
        (("--suite", "--config", "tiny", "--filter", "none"), "matches no benchmark"),
        (("--config", "tiny", "--gen-tokens", "2000"), "more tokens than the context of 1024"),
        (("--config", "tiny", "--compare", "llama.cpp"), "needs --model FILE"),
        (("--config", "tiny", "--suite", "--baseline", "b", "--filter", "rms"), "saved are: none"),
        (("--perplexity", "missing.txt"), "missing.txt"),
    ],
)
def test_wrong_use_is_one_line(argv, message, capsys):
    try:
        status = bench.main(argv)
    except SystemExit as leave:
        status = leave.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1
    assert error.startswith("bench_llama2.py: error:")
    assert message in error


@pytest.mark.usefixtures("quick")
def test_a_text_that_is_too_short(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    assert bench.main(["--perplexity", str(text), "--context", "32"]) == 2
    assert "needed are two windows" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# The bundled model

NEW_TALE = """\
There was once an old miller who had nothing left in the world but a blind mare and a lantern of \
green glass. One winter evening, as the snow fell thick upon the roof, somebody knocked at the \
door, and there stood a little man no taller than a boot. "Give me your lantern," said he, "and I \
will give you my whistle." The miller thought, "A lantern is of small use to a blind mare," and so \
he made the bargain.
In the morning he blew upon the whistle, and at once the wheel began to turn, though the brook was \
frozen hard, and the flour that ran out was as white as milk. Then the people came from far and \
near, and the miller became rich. But he kept the mare in his own kitchen, and when she died he \
broke the whistle in two and laid half of it in her grave."""


@pytest.fixture(scope="module")
def bundled():
    """The model that the README's first command runs."""
    return llama2.load(llama2.DEFAULT_MODEL)


@torch.no_grad()
def test_bundled_model_on_a_new_tale(bundled):
    """Its bits per byte on a tale that it cannot know are those of its card, within 1 %."""
    model, tokenizer = bundled
    card = (llama2.DEFAULT_MODEL.parent / "README.md").read_text("utf-8")
    told = float(re.search(r"155 words carried by\s+the tests, it is ([\d.]+) bits", card)[1])
    ids = torch.tensor(tokenizer.encode(NEW_TALE))
    nats = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="sum").item()
    assert nats / math.log(2) / len(NEW_TALE.encode()) == pytest.approx(told, rel=0.01)


def test_bundled_model_writes_its_golden_text(bundled):
    """Greedy, by the kernels and by torch alone: the prompt is one without near-ties."""
    prompt = "In the middle of the forest"
    golden = (
        ", there was a great many years old, and the other two children were sitting in the middle"
        " of the tree, and the children were sitting in the middle of the tree"
    )
    model, tokenizer = bundled
    plain = llama2.build_model(llama2.open_checkpoint(llama2.DEFAULT_MODEL), compile=False)
    for variant in (model, plain):
        pieces = llama2.stream_text(
            variant, tokenizer, tokenizer.encode(prompt), first=False, max_new_tokens=35
        )
        assert "".join(pieces).startswith(golden)


def test_bundled_model_is_a_small_grouped_llama_2(bundled):
    """At most 8 MB, grouped heads, context of 512 or more, SentencePiece with all bytes."""
    model, tokenizer = bundled
    config = model.config
    assert llama2.DEFAULT_MODEL.stat().st_size <= 8e6
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.max_position_embeddings >= 512
    text = "A fairy \u2603 \U0001f409\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_missing_bundled_model_is_told(tmp_path, capsys, monkeypatch):
    """Copied without it, llama2.py says to pass --model."""
    monkeypatch.setattr(llama2, "DEFAULT_MODEL", tmp_path / "models" / "fairytales.gguf")
    assert llama2.main(["--prompt", "x"]) == 2
    assert "pass --model PATH" in capsys.readouterr().err
