"""Tests of llama2.py: every layer and the whole model against independent implementations.

They run offline on the CPU, on tiny models that tests/helpers.py makes, and need that, this file
and llama2.py alone. Where a test compares with an oracle, that is transformers (skipped if it is not
installed; frozen logits remain), gguf's reader and dequantisers, SentencePiece, or a formula written
out here. The folder tests/ holds what is long or special.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import json
import math
import os
import pickle
import random
import re
import shutil
import struct
import symtable
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind

sys.path.insert(0, str(Path(__file__).with_name("tests")))
pytest.register_assert_rewrite("helpers")

from helpers import (
    CONFIG,
    FORMS,
    GREEDY,
    PROMPT,
    SCALES,
    SCRIPT,
    SHAPE,
    TALE,
    TOKENS,
    WIDE,
    assert_close,
    assert_layers_equal,
    config_keys,
    dialogue,
    gguf_name,
    in_steps,
    make_hf,
    make_model,
    make_weights,
    quantised,
    scripted,
    some_pieces,
    vocabulary_keys,
    write_gguf,
)

import llama2

pytest_plugins = ["helpers"]


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
    cache = llama2.PaddedCache(CONFIG, torch.tensor([0, 2]))
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
    with pytest.raises(ValueError, match=r"cache is \(2, 3, .* must be \(2, 2, "):
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
    cache = llama2.PaddedCache(CONFIG, torch.tensor([20 - n for n in lengths]))
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


def part_1():
    """Part I's text, from its heading to the next one: `sed -n '/^# Part I:/,/^# Part II:/p'`."""
    text = SCRIPT.read_text(encoding="utf-8")
    return text[text.index("# Part I: ") : text.index("# Part II: ")]


def test_part_1_is_pure():
    """It knows torch, math and dataclasses; no files, no printing, no formats of weights."""
    tree = ast.parse(part_1())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    modules = {getattr(node, "module", None) or node.names[0].name for node in imports}
    assert modules == {"math", "dataclasses", "torch", "torch.nn.functional"}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    assert not names & {"print", "open", "os", "sys", "Path", "eval", "exec"}
    assert not [word for word in ("gguf", "ggml", "quant", "file") if word in part_1().lower()]


@torch.no_grad()
def test_part_1_runs_cut_out(weights, model, monkeypatch):
    cut = type(sys)("cut")
    monkeypatch.setitem(sys.modules, "cut", cut)  # dataclass looks its module up
    exec(compile(part_1(), "cut", "exec", dont_inherit=True), vars(cut))  # noqa: S102
    assert cut.Config.llama2_70b().num_key_value_heads == 8
    alone = cut.Llama(cut.Config(**SHAPE)).eval()
    alone.load_state_dict(model.state_dict())
    assert_close(alone(TOKENS[:1, :9], cut.Cache(alone.config)), model(TOKENS[:1, :9])[:, -1])


def globals_of(table):
    """The module's names that a function or class refers to, those within it included."""
    names = {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    return names.union(*map(globals_of, table.get_children()))


def test_sections_refer_upwards():
    """What a reader meets is known already: defined in the same section or in one above."""
    text, section, home = SCRIPT.read_text(encoding="utf-8"), 0, {}
    sections = [int(number) for number in re.findall(r"(?m)^# (\d+)\. ", text)]
    assert sections == sorted(set(sections)) and len(sections) > 10
    for line in text.splitlines():
        if banner := re.match(r"# (\d+)\. ", line):
            section = int(banner[1])
        if name := re.match(r"(?:def |class )?(\w+)(?:\(|:| = |: .* = )", line):
            home.setdefault(name[1], section)
    downwards = set()
    for table in symtable.symtable(text, SCRIPT.name, "exec").get_children():
        user = table.get_name()
        below = [n for n in globals_of(table) if home.get(n, 0) > home.get(user, 99)]
        downwards |= {(user, name) for name in below}
    known = {  # a file's reader makes its tokenizer, a plan knows how many tokens come at once
        *((f"{name}_checkpoint", "Tokenizer") for name in ("gguf", "open")),
        ("memory_plan", "PREFILL_CHUNK"),
        ("accelerate", "CompiledLayers"),
        ("accelerate", "CompiledLinear"),
    }
    assert downwards <= known


def test_written_names_exist():
    """The names that others rely on, with their parameters in this order."""
    signatures = {
        "Llama": "config",
        "Cache": "config batch_size max_seq_len dtype device",
        "QuantizedLinear": "blocks ggml_type",
        "QuantizedEmbedding": "blocks ggml_type dtype",
        "build_model": "checkpoint device dtype progress",
        "load": "path device dtype accelerated exact trainable",
        "save_gguf": "model path ggml_type",
        "encode_chat": "tokenizer messages",
        "Sampling": "temperature top_k top_p min_p repetition_penalty presence_penalty"
        " frequency_penalty logit_bias seed logits_processor",
        "sample": "logits sampling ids generator",
        "generate": "model ids sampling max_new_tokens options",
        "generate_batch": "model prompts sampling max_new_tokens stop_ids",
        "score": "model ids",
        "rope_tables": "config length device",
        "apply_rotary_emb": "x cos sin",
        "RMSNorm": "size eps",
        "CausalSelfAttention": "config layer",
        "MLP": "config",
        "Block": "config layer",
        "stream_text": "model tokenizer ids stop",
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
    for name in ("StreamDecoder", "Report", "Tokenizer"):
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
    """A header like that of a published 7B file, but a sixteenth of its tokens and merges."""
    n = 2000
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
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 8, 2**60),
            "1152921504606846976 values.*at most",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 5, 2**60),
            "1152921504606846976 values.*at most",
        ),
        (
            b"GGUF" + struct.pack("<IQQQ1sIIQ", 3, 0, 1, 1, b"k", 9, 9, 1),
            "type 9, which is unknown",
        ),
        (b"GGUF" + struct.pack("<IQQQ1s", 3, 0, 1, 1, b"\xff"), "UTF-8"),
        (b"GGUF" + struct.pack("<IQQQ1sI", 3, 1, 0, 1, b"t", 9), "9 dimensions"),
        (b"GGUF" + struct.pack("<IQQQ1sIQIQ", 3, 1, 0, 1, b"t", 1, 32, 99, 0), "t: 99 is not"),
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
        "llama.vocab_size": 31000,
        "llama.expert_count": 0,
        "llama.attention.sliding_window": 4,
        "llama.attention.scale": 3.0,
        "llama.logit_scale": 3.0,
        "general.type": "model",
        "general.alignment": 32,
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
    "experts": ({"llama.expert_count": 8}, {}, "llama", "expert_count is 8"),
    "gpt-2": ({"tokenizer.ggml.model": "gpt2"}, {}, "llama", "tokenizer.ggml.pre is missing"),
    "no vocabulary": ({"tokenizer.ggml.model": "no_vocab"}, {}, "llama", "no_vocab"),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, {}, "llama", "yarn"),
    "longrope": ({"llama.rope.scaling.type": "longrope"}, {}, "llama", "longrope"),
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


@pytest.mark.parametrize("kind", [name for name in SCALES if hasattr(Kind, name)])
@torch.no_grad()
def test_every_type_gives_the_logits_of_dequantised_weights(
    tmp_path, vocabulary, monkeypatch, kind
):
    """Blocks are random bytes: every bit of every field counts. Each linear layer, then the model."""
    path, weights = quantised(vocabulary, tmp_path / "x.gguf", [kind])
    loaded = llama2.build_model(llama2.open_checkpoint(path))
    monkeypatch.setattr(llama2, "CHUNK", 2**14)  # several chunks in each matrix
    assert_layers_equal(loaded, weights, (2, 1), (24,))


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


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), torch.nn.Module.share_memory],
    ids=["deepcopy", "pickle", "share_memory"],
)
@torch.no_grad()
def test_loaded_models_can_be_copied(tmp_path, vocabulary, duplicate):
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["Q4_K", "Q8_0", "IQ4_NL", "F16"])
    loaded, _ = llama2.load(path)
    wanted = loaded(TOKENS[:2, :24])
    assert torch.equal(duplicate(loaded)(TOKENS[:2, :24]), wanted)


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
    with pytest.raises(ValueError, match=f"x.gguf: output.weight: .*{kind}"):
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


@pytest.mark.parametrize("text", ["<s>", "</s>", "<unk>", "[INST]", "<<SYS>>", "<0x0A>", "a</s>b"])
def test_text_like_special_tokens_is_text(rebuilt, text):
    """A typed control token is never that token."""
    ids = rebuilt.encode(text, bos=False)
    assert not {0, 1, 2} & set(ids) and rebuilt.decode(ids) == text


@pytest.mark.parametrize("kind", [3, 4])
def test_unknown_piece_of_another_type(tmp_path, keys, kind, rebuilt):
    """Converters type <unk> as CONTROL, which SentencePiece refuses."""
    types = keys["tokenizer.ggml.token_type"]
    changed = keys | {"tokenizer.ggml.token_type": [kind, *types[1:]]}
    found = llama2.Tokenizer.from_gguf(write_gguf(tmp_path / "x.gguf", changed))
    assert found.encode(TALE) == rebuilt.encode(TALE)


def test_flags_of_the_vocabulary(tmp_path, keys, rebuilt):
    changed = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    found = llama2.Tokenizer.from_gguf(write_gguf(tmp_path / "x.gguf", keys | changed))
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
    ("u:a a:~b~ u:c", [1, *INST, 263, *END_INST, 289, 29871, 2, 1, *INST, 274, *END_INST]),
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
    """A tokenizer with Llama 2's own ids."""
    path = tmp_path_factory.mktemp("real") / "vocabulary.gguf"
    return llama2.Tokenizer.from_gguf(write_gguf(path, some_pieces(PIECES)))


@pytest.mark.parametrize("text", ENCODED)
def test_ids_of_llama_2(real, text):
    assert real.encode(text, bos=False) == ENCODED[text]
    assert real.decode(ENCODED[text]) == text.replace("\u2581", " ")
    assert streamed(real, real.encode(text)) == real.decode(ENCODED[text])


# --------------------------------------------------------------------------------------------------
# Chat format


@pytest.mark.parametrize("text, ids", CHATS, ids=[text for text, _ in CHATS])
def test_chat_ids(real, text, ids):
    """Meta's encoding, frozen. Catches BOS only once, joined strings, and a lost 29871 before EOS."""
    assert llama2.encode_chat(real, dialogue(text), "llama-2") == ids


@pytest.mark.parametrize(
    "text", ["", "s:S", "a:b", "u:a u:b", "u:a a:b", "s:S s:S u:a", "u:a s:S u:b"]
)
def test_chat_refuses_other_orders_of_roles(real, text):
    with pytest.raises(ValueError, match="system|user|no message"):
        llama2.encode_chat(real, dialogue(text), "llama-2")
    with pytest.raises(ValueError, match="robot"):
        llama2.encode_chat(real, [{"role": "robot", "content": "hi"}], "llama-2")


@pytest.mark.parametrize("tag", ["[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"])
@pytest.mark.parametrize("text", ["u:{}", "s:{} u:a", "u:a a:x{}y u:b"])
def test_chat_refuses_reserved_tags(real, text, tag):
    """In any message: text that opens a turn of its own would speak for the system."""
    with pytest.raises(ValueError) as caught:
        llama2.encode_chat(real, dialogue(text.format(tag)), "llama-2")
    assert tag in str(caught.value)


def test_chat_text_never_becomes_control_ids(real):
    ids = llama2.encode_chat(real, dialogue("u:</s><s>"), "llama-2")
    assert ids.count(1) == 1 and ids.count(2) == 0


# --------------------------------------------------------------------------------------------------
# Generation


PROMPTS = [[1, 5, 9, 200, 31], [1, 7], [1, 300, 301, 302, 303, 304, 305, 306, 307]]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_equals_argmax_of_the_whole_text_each_time(model, prompt):
    """Catches any mistake of positions or cache, since no cache is used for the wanted ids."""
    wanted = list(prompt)
    with torch.no_grad():
        for _ in range(12):
            wanted.append(model(torch.tensor([wanted]))[0, -1].argmax().item())
    found = list(llama2.generate(model, prompt, GREEDY, 12, stop_ids=()))
    assert found == wanted[len(prompt) :]


@pytest.mark.parametrize(
    "options", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.9}], ids=["greedy", "drawn"]
)
def test_batch_of_different_lengths_equals_rows_alone(model, options):
    """Row i draws from seed + i. A stop id ends one row and not the others, which stay as they are."""
    draws = [llama2.Sampling(**options, seed=7 + i) for i in range(3)]
    options, pairs = {"max_new_tokens": 10}, [*zip(PROMPTS, draws, strict=True)]
    alone = [list(llama2.generate(model, *pair, stop_ids=(), **options)) for pair in pairs]
    stop = alone[1][3]
    for stop_ids in ((), (stop,)):
        options["stop_ids"] = stop_ids
        each = [llama2.generate(model, *pair, **options) for pair in pairs]
        wanted = [list(ids) for ids in each]
        batch = llama2.generate_batch(model, PROMPTS, draws[0], **options)
        steps = list(batch)
        assert all(len(step) == 3 for step in steps)
        rows = [[i for i in row if i is not None] for row in zip(*steps, strict=True)]
        assert rows == wanted and batch.report.new_ids == wanted
        assert batch.report.stop_reasons == [ids.report.stop_reasons[0] for ids in each]
    assert len(wanted[1]) <= 3 and batch.report.stop_reasons[1] == f"stop token {stop}"


def test_seeds():
    """The same seed, the same ids; another one or none, others. Equal prompts draw differently."""
    model = scripted()

    options = {"max_new_tokens": 20, "stop_ids": ()}

    def draw(**other):
        return list(llama2.generate(model, [1, 5], llama2.Sampling(1, **other), **options))

    assert draw(seed=3) == draw(seed=3) != draw(seed=4)
    assert draw() != draw()
    both = llama2.generate_batch(model, [[1, 5]] * 2, llama2.Sampling(1, seed=3), **options)
    first, second = zip(*both, strict=True)
    assert list(first) == draw(seed=3) and list(second) == draw(seed=4)
    assert draw(seed=3, top_k=1) == draw(seed=4, top_k=1)


def told(model, prompt, **options):
    """What generate() yields, and its report."""
    stream = llama2.generate(model, prompt, GREEDY, **options)
    return list(stream), stream.report


def test_stop_ids_and_report():
    model = scripted([7, 8, 2, 9], start=2)
    ids, report = told(model, [1, 5])
    assert ids == [7, 8]
    assert (report.prompt_tokens, report.new_ids, report.texts) == (2, [[7, 8]], [[1, 5, 7, 8, 2]])
    assert report.stop_reasons == ["stop token 2"] and len(report.seconds) == 3
    ids, report = told(model, [1, 5], max_new_tokens=4, stop_ids=())
    assert ids == [7, 8, 2, 9]
    assert report.stop_reasons == ["max new tokens"] and len(report.seconds) == 4
    assert told(model, [1, 5], stop_ids={8, 9})[0] == [7]
    ids, report = told(model, [1, 5], max_new_tokens=0)
    assert ids == [] and report.new_ids == [[]]
    assert report.stop_reasons == ["max new tokens"]


def test_more_ids_that_end_a_text():
    model = scripted([7, 8, 9, 2], start=2, stop_token_ids=(9, 11))
    ids, report = told(model, [1, 5])
    assert ids == [7, 8] and report.stop_reasons == ["stop token 9"]


def test_generation_ends_with_the_context(model):
    """64 positions: every one is used, none twice; a prompt that fills it all gets no answer."""
    prompt = TOKENS[0].tolist()
    ids, report = told(model, prompt, max_new_tokens=999, stop_ids=())
    assert len(ids) == 24 and report.stop_reasons == ["context full"]
    ids, report = told(model, prompt + prompt[:24], max_new_tokens=5)
    assert ids == [] and report.stop_reasons == ["context full"]
    with pytest.raises(ValueError, match=r"65.*64"):
        llama2.generate(model, prompt + prompt[:25])


def test_generate_continues_a_cache(model):
    """A second turn with one cache is that of the whole text, of which what is new is read."""
    cache = llama2.Cache(CONFIG, max_seq_len=30)
    first = list(llama2.generate(model, [1, 5, 9], GREEDY, 4, stop_ids=(), cache=cache))
    turn = [1, 5, 9, *first, 17, 18]
    second = llama2.generate(model, turn, GREEDY, 5, stop_ids=(), cache=cache)
    assert list(second) == list(llama2.generate(model, turn, GREEDY, 5, stop_ids=()))
    assert second.report.prompt_tokens == 3  # the last of the first is not in the cache, either
    with pytest.raises(ValueError, match="31.*30"):
        llama2.generate(model, [5] * 31, cache=cache)


def test_generation_is_the_same_in_chunks(model, monkeypatch):
    wanted = list(llama2.generate_batch(model, PROMPTS, GREEDY, 6, stop_ids=()))
    monkeypatch.setattr(llama2, "PREFILL_CHUNK", 4)
    assert list(llama2.generate_batch(model, PROMPTS, GREEDY, 6, stop_ids=())) == wanted


@pytest.mark.parametrize(
    "prompt, message", [([], "empty"), ([1, 320], "320"), ([1, -1], "-1"), ([2**40], str(2**40))]
)
def test_generate_refuses_prompts(model, prompt, message):
    with pytest.raises(ValueError, match=message):
        llama2.generate(model, prompt)
    with pytest.raises(ValueError, match=message):
        llama2.generate_batch(model, [[1], prompt])
    with pytest.raises(ValueError, match=message):
        llama2.score(model, prompt)
    with pytest.raises(ValueError, match="max_new_tokens"):
        llama2.generate(model, [1], max_new_tokens=-1)
    with pytest.raises(ValueError, match="no prompts"):
        llama2.generate_batch(model, [])


@pytest.mark.parametrize("chunk", [128, 7])
@torch.no_grad()
def test_score_is_the_log_softmax_of_one_pass(model, monkeypatch, chunk):
    monkeypatch.setattr(llama2, "SCORE_CHUNK", chunk)
    ids = TOKENS[0]
    wanted = model(ids[None])[0, :-1].log_softmax(-1)
    assert_close(llama2.score(model, ids.tolist()), wanted[range(39), ids[1:]])
    assert llama2.score(model, [5]).shape == (0,)


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
    stream = llama2.stream_text(scripted(script, 1), tokenizer, [1], stop=stop, sampling=GREEDY)
    pieces = list(stream)
    assert "".join(pieces) == wanted and "" not in pieces
    if wanted.endswith("laughed"):
        assert stream.report.stop_reasons == ["stop token 2"] and (stop or len(pieces) > 5)
    else:
        assert stream.report.stop_reasons[0].startswith("stop text")


def test_stream_text_flushes_a_broken_character(tokenizer):
    script = [*tokenizer.encode("fox\U0001f999", bos=False)[:-1], 2]
    text = "".join(llama2.stream_text(scripted(script, 1), tokenizer, [1], sampling=GREEDY))
    assert text == "fox\ufffd\ufffd\ufffd"


# --------------------------------------------------------------------------------------------------
# Command line


def continuation(cli_model, prompt, n):
    """What follows a prompt, from Python."""
    model, tokenizer = cli_model
    ids = tokenizer.encode(prompt)
    new = list(llama2.generate(model, ids, GREEDY, n))
    return tokenizer.decode(ids + new).removeprefix(tokenizer.decode(ids))


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


def test_version_and_info(cli, tmp_path, keys, tensors):
    status, out, err = cli("--version")
    assert status == 0 and llama2.__version__ in out and not err
    keys = keys | {"llama.context_length": 400, "llama.attention.layer_norm_rms_epsilon": 1e-5}
    path = write_gguf(tmp_path / "x.gguf", keys, tensors)
    status, out, err = cli("--info", stdin=b"not read", model=path)
    assert status == 0 and not err
    for word in ("GGUF", "F32", "hidden_size", "320", "memory", "400", " 1e-05\n"):
        assert word in out
    assert re.search(r"parameters +[\d,]+\n", out)
    assert re.search(r"[\d.]+ MB", out) and not re.search(r" 0\.0\d* GB", out)


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
        ids = llama2.encode_chat(tokenizer, messages, "llama-2")
        new = list(llama2.generate(model, ids, GREEDY, size))
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


DEVICES = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}


@pytest.mark.parametrize(
    "argv, said",
    [
        ("--prompt-file x.txt", "--prompt-file"),  # beside --prompt
        ("--temperature -1", "temperature is -1"),
        ("--temperature nan", "temperature is nan"),
        ("--temperature inf", "temperature is inf"),
        ("--top-k -1", "top_k is -1"),
        ("--top-p -0.1", "top_p is -0.1"),
        ("--top-p 1.01", "top_p is 1.01"),
        ("--min-p -0.5", "min_p is -0.5"),
        ("--seed -2", "seed is -2"),
        ("--seed 9223372036854775808", "seed is 9223372036854775808"),
        ("--max-new-tokens -1", "--max-new-tokens -1"),
        ("--max-new-tokens many", "--max-new-tokens"),
        ("--context 0", "--context 0"),
        ("--context 401", "401; expected 1 to 400"),
        ("--context 2", "the context holds 2"),
        ("--threads 0", "--threads 0"),
        ("--threads 100000", "--threads 100000"),
        ("--device tpu", "tpu"),
        ("--dtype float8", "float8"),
        ("--stop=", "--stop"),
        ("--system x", "--chat"),
        ("--model absent.gguf", "absent.gguf"),
        ("--model {dir}", "{dir}"),
        (f"--model {os.devnull}", os.devnull),
        (f"--model {SCRIPT}", "llama2.py: starts with b'\"\"\"L', not with b'GGUF'"),
        ("--unheard-of", "--unheard-of"),
        *[(f"--device {name}", name) for name in sorted(DEVICES) if not DEVICES[name]],
    ],
)
def test_one_line_and_status_2(cli, tmp_path, argv, said):
    """A wrong argument is told in one line that names it; nothing is written to stdout."""
    argv = argv.format(dir=tmp_path).split()
    status, out, err = cli("--prompt", "ab", *argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("llama2.py: error: ") and said.format(dir=tmp_path) in err


def test_threads_reach_torch(cli, monkeypatch):
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    assert cli("--prompt", "ab", "--max-new-tokens", 1, "--threads", 1)[0] == 0 and chosen == [1]


def test_prompts_that_cannot_be_are_told(cli):
    """A file that is not there, and more tokens than the context: no silent cut."""
    for argv, said in (
        (["--prompt-file", "absent.txt"], "absent.txt"),
        (["--prompt", "fox " * 400], "tokens, the context holds 400"),
    ):
        status, out, err = cli(*argv)
        assert (status, out, err.count("\n")) == (2, "", 1) and said in err


# --------------------------------------------------------------------------------------------------
# Checkpoints of other forms

DIRECTORIES = ["gguf.gguf", "meta1", "meta2", "meta4", "hf", "hf_index", "bin", "bin_index"]


@pytest.fixture(scope="session")
def hf_model(forms):
    """transformers' model of the same weights."""
    return make_hf(FORMS, forms[1])


def greedy(model, tokenizer, n=12):
    """The ids that follow PROMPT."""
    return list(llama2.generate(model, tokenizer.encode(PROMPT), GREEDY, n))


@pytest.mark.parametrize("form", DIRECTORIES)
@torch.no_grad()
def test_every_form_gives_the_logits_of_transformers(forms, hf_model, form):
    root, tokens = forms[0], TOKENS[:2, :9]
    model, tokenizer = llama2.load(root / form)
    torch.testing.assert_close(model(tokens), hf_model(tokens).logits, atol=1e-5, rtol=1e-5)
    reference = llama2.load(root / "gguf.gguf")
    assert greedy(model, tokenizer) == greedy(*reference)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_directories_that_transformers_wrote(forms, hf_model, tmp_path, vocabulary, tied):
    """One file or several with an index; only the absence of an output matrix ties it."""
    if tied:
        hf_model = make_hf(dataclasses.replace(FORMS, tie_word_embeddings=True), forms[1])
    for folder, size in (("one", "1GB"), ("several", "300KB")):
        hf_model.save_pretrained(tmp_path / folder, max_shard_size=size)
        shutil.copy(vocabulary[0], tmp_path / folder)
        ours, _ = llama2.load(tmp_path / folder)
        assert ours.config.tie_word_embeddings == tied
        wanted = hf_model(TOKENS[:2, :9]).logits
        torch.testing.assert_close(ours(TOKENS[:2, :9]), wanted, atol=1e-5, rtol=1e-5)
    assert (tmp_path / "several" / "model.safetensors.index.json").exists()
    if tied:
        llama2.save_gguf(llama2.open_checkpoint(tmp_path / "one"), tmp_path / "tied.gguf", "Q8_0")
        assert llama2.load(tmp_path / "tied.gguf")[0].config.tie_word_embeddings


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
    assert "21 F32" in out
    assert "MB" in out


@pytest.mark.parametrize("kind", [None, *llama2.SAVE_TYPES])
@torch.no_grad()
def test_save_round_trip(forms, tmp_path, kind):
    checkpoint = llama2.open_checkpoint(forms[0] / "hf_index")
    llama2.save_gguf(checkpoint, tmp_path / "out.gguf", kind)
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    saved = llama2.open_checkpoint(tmp_path / "out.gguf")
    assert saved.config == dataclasses.replace(
        checkpoint.config, rms_norm_eps=saved.config.rms_norm_eps
    )
    raw, rounded = gguf.GGMLQuantizationType[kind or "F32"], {}
    for name, weight in saved.weights.items():
        values = checkpoint.weights[name].dense(torch.float32)
        if len(weight.shape) > 1:
            assert weight.ggml_type == (kind or "F32")
            rows = gguf.quants.quantize(values.numpy(), raw)
            values = torch.from_numpy(gguf.quants.dequantize(rows, raw))
        assert torch.equal(weight.dense(torch.float32), values), name
        rounded[name] = values
    wanted = make_model(FORMS, rounded)(TOKENS[:2, :9])
    assert_close(llama2.build_model(saved)(TOKENS[:2, :9]), wanted, 1e-5)
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
    assert vocabulary["tokenizer.ggml.tokens"][-2:] == ["[PAD320]", "[PAD321]"]
    assert vocabulary["tokenizer.ggml.token_type"][-3:] == [1, 5, 5]
    with pytest.raises(ValueError, match="320 pieces; the model has 319"):
        llama2.Tokenizer.from_file(forms[0] / "tokenizer.model", llama2.Config(vocab_size=319))


def changed(source, target, **changes):
    """A copy of a form's directory with changes to its settings (None: left out)."""
    shutil.copytree(source, target)
    for file in (target / "config.json", target / "params.json"):
        if file.exists():
            file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    if not (target / "tokenizer.model").exists():
        shutil.copy(source.parent / "tokenizer.model", target)
    return target


REFUSED_DIRECTORIES = [
    ("hf", {"model_type": "falcon"}, "model_type is 'falcon'; expected llama or mistral"),
    ("hf", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config is .*gptq"),
    ("hf", {"attention_bias": True}, "attention_bias is True; expected False"),
    ("hf", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected silu"),
    ("hf", {"head_dim": 32}, "head_dim is 32; expected 16"),
    ("hf", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'"),
    ("bin", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
    ("hf", {"hidden_size": "128"}, "hidden_size is '128'; expected int"),
    ("hf", {"num_hidden_layers": None}, "num_hidden_layers is missing"),
    ("hf", {"intermediate_size": 96}, r"gate_proj.weight is \[160, 128\]; expected \[96, 128\]"),
    ("hf", {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
    ("hf", {"vocab_size": 319}, "embed_tokens.weight is"),
    ("meta1", {"use_scaled_rope": True}, "unknown key use_scaled_rope"),
    ("meta1", {"dim": 512}, "are shards missing"),
    ("meta1", {"n_heads": 0}, "num_attention_heads is 0"),
]


@pytest.mark.parametrize(("form", "change", "message"), REFUSED_DIRECTORIES)
def test_what_cannot_be_run_is_refused_by_name(forms, tmp_path, form, change, message):
    directory = changed(forms[0] / form, tmp_path / "copy", **change)
    with pytest.raises(ValueError, match=message):
        llama2.open_checkpoint(directory)


def test_linear_rope_scaling_old_and_new(forms, tmp_path):
    new = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}
    old = {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 500.0}
    for form, change in (("hf", new), ("bin", old)):
        config = llama2.open_checkpoint(changed(forms[0] / form, tmp_path / form, **change)).config
        assert (config.rope_scaling_factor, config.rope_theta) == (4.0, 500.0)


def test_missing_files_are_named(forms, tmp_path):
    directory = changed(forms[0] / "hf", tmp_path / "a")
    (directory / "tokenizer.model").unlink()
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        llama2.open_checkpoint(directory).tokenizer()
    directory = changed(forms[0] / "hf_index", tmp_path / "b")
    first = min(directory.glob("model-*"))
    first.unlink()
    with pytest.raises(FileNotFoundError, match=first.name):
        llama2.open_checkpoint(directory)
    directory = changed(forms[0] / "meta4", tmp_path / "c")
    (directory / "consolidated.01.pth").unlink()
    with pytest.raises(ValueError, match="shards"):
        llama2.open_checkpoint(directory)
    (directory / "consolidated.02.pth").rename(directory / "consolidated.01.pth")
    (directory / "consolidated.03.pth").unlink()
    with pytest.raises(ValueError, match="2 shards have 64 columns .* are shards missing"):
        llama2.open_checkpoint(directory)
    (tmp_path / "d").mkdir()
    with pytest.raises(ValueError, match=r"found nothing; expected a \.gguf file, or"):
        llama2.open_checkpoint(tmp_path / "d")
    with pytest.raises(ValueError, match="one file of a directory"):
        llama2.open_checkpoint(forms[0] / "meta1" / "consolidated.00.pth")


def test_a_directory_of_both_forms_is_read_as_the_one_whose_weights_are_there(forms, tmp_path):
    directory = changed(forms[0] / "meta4", tmp_path / "both")
    (directory / "config.json").write_text("{}")
    assert llama2.open_checkpoint(directory).format.startswith("Meta")


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "long header", "no json", "offset", "dtype", "shape"]
)
def test_damaged_safetensors(forms, tmp_path, damage):
    directory = changed(forms[0] / "hf", tmp_path / "copy")
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
    file.write_bytes(data)
    with pytest.raises(ValueError, match=r"model\.safetensors: damaged"):
        llama2.open_checkpoint(directory)


@pytest.mark.parametrize(
    "damage", ["cut", "empty", "list", "int", "int key", "expanded", "float64"]
)
def test_damaged_pth(forms, tmp_path, damage):
    directory = changed(forms[0] / "meta1", tmp_path / "copy")
    file = directory / "consolidated.00.pth"
    data = file.read_bytes()
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


def test_memory_plan_and_refusal():
    config = llama2.Config.llama2_7b()
    with torch.device("meta"):
        parameters = dict(llama2.Llama(config).named_parameters())
    weights = {name: llama2.Weight("F16", tuple(p.shape), []) for name, p in parameters.items()}
    model = llama2.Checkpoint("", config, weights, None)
    plan = llama2.memory_plan(model, 4096, torch.float16, torch.float16)
    assert plan["weights"] == 2 * 6_738_415_616
    layer = llama2.Cache(dataclasses.replace(config, num_hidden_layers=1), 1, 64, torch.float16)
    assert plan["cache"] == 2**31 == (layer.k.nbytes + layer.v.nbytes) * 32 * 64
    assert 0 < plan["overhead"] < 1e9
    need, cpu = sum(plan.values()), torch.device("cpu")
    llama2.check_memory(plan, 4096, cpu, need)
    llama2.check_memory(plan, 4096, cpu, float("inf"))  # unknown
    for free, message in (
        (need - 1, r"needs weights 13\.5 .* GB free; try --context 4095"),
        (10e9, r"10 GB free.* fewer bits per weight \(--save .* or more devices"),
    ):
        with pytest.raises(ValueError, match=message):
            llama2.check_memory(plan, 4096, cpu, free)


def test_memory_that_is_free(tmp_path, monkeypatch):
    """What Linux says is available, within the limit of a container, shared by torchrun's ranks."""
    cpu, group = torch.device("cpu"), tmp_path / "sys" / "fs" / "cgroup"
    assert llama2.free_memory(cpu) > 0
    for folder in (tmp_path / "proc", group):
        folder.mkdir(parents=True)
    monkeypatch.setattr(llama2, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:   3000 kB\n")
    assert llama2.free_memory(cpu) == 3000 * 1024
    (group / "memory.stat").write_text("anon 1000\nfile 300000\n")
    (group / "memory.current").write_text("1500000\n")
    for limit, free in (("2000000", 800000), ("max", 3000 * 1024), ("9999999", 3000 * 1024)):
        (group / "memory.max").write_text(limit + "\n")
        assert llama2.free_memory(cpu) == free
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert llama2.free_memory(cpu) == 1500 * 1024


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
    if not llama2.DEFAULT_MODEL.exists():
        pytest.skip("the bundled model is not here")
    return llama2.load(llama2.DEFAULT_MODEL)


@torch.no_grad()
def test_bundled_model_on_a_new_tale(bundled):
    """Its bits per byte on a tale that it cannot know are those of its card, within 1 %."""
    model, tokenizer = bundled
    card = (llama2.DEFAULT_MODEL.parent / "README.md").read_text("utf-8")
    told = float(re.search(r"the tests carry, this model has ([\d.]+) bits", card)[1])
    ids = torch.tensor(tokenizer.encode(NEW_TALE))
    nats = F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="sum").item()
    assert nats / math.log(2) / len(NEW_TALE.encode()) == pytest.approx(told, rel=0.01)


def test_bundled_model_writes_its_golden_text(bundled):
    """Greedy, by the kernels and by torch alone: the prompt is one without near-ties."""
    prompt = "The princess opened the door and"
    golden = (
        ' said, "I have not done it, but I will not do it." Then the prince went to the prince, and'
        ' said, "I will go and see if I'
    )
    model, tokenizer = bundled
    fast, _ = llama2.load(llama2.DEFAULT_MODEL, accelerated=True)
    for variant in (model, fast):
        options = {"sampling": GREEDY, "max_new_tokens": 35}
        ids = tokenizer.encode(prompt)
        pieces = llama2.stream_text(variant, tokenizer, ids, **options)
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


@pytest.mark.usefixtures("bundled")
def test_python_in_the_readme_runs(tmp_path, monkeypatch, capsys):
    readme = SCRIPT.with_name("README.md")
    if not readme.exists():
        pytest.skip("README.md is not here")
    monkeypatch.chdir(tmp_path)  # it saves models
    Path("models").mkdir()
    shutil.copy(llama2.DEFAULT_MODEL, "models")
    blocks = re.findall(r"```python\n(.*?)```", readme.read_text("utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})  # noqa: S102
        assert capsys.readouterr().out.strip()
