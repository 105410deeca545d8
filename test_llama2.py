"""Tests of llama2.py: every layer and the whole model against independent implementations.

They run offline on the CPU, on tiny models that they make themselves. Where a test compares with an
oracle, that is transformers (skipped if it is not installed; frozen logits remain), gguf's reader and
dequantisers, SentencePiece, or a formula written out here. `pytest` runs them all in about a minute.
"""

from __future__ import annotations

import ast
import inspect
import io
import math
import os
import random
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind

import llama2

SCRIPT = Path(llama2.__file__)
SHAPE = dict(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,  # grouped in every test: equal counts hide a wrong one
    vocab_size=320,
    max_position_embeddings=64,
)
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
    names = [name for name in SHAPE if name != "max_position_embeddings"]
    shape = {name: getattr(config, name) for name in (*names, "tie_word_embeddings")}
    options.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": config.rope_theta})
    eps, context = config.rms_norm_eps, config.max_position_embeddings
    hf_config = transformers.LlamaConfig(
        rms_norm_eps=eps, max_position_embeddings=context, **shape, **options
    )
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


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "layers.": "blk.",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name):
    """The name of a weight in a GGUF file."""
    if name == "norm.weight":
        return "output_norm.weight"
    for ours, theirs in GGUF_NAMES.items():
        name = name.replace(ours, theirs)
    return name


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
            character_coverage=0.97,
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
    q, k = torch.randn(2, CONFIG.head_dim).double().float()
    cos, sin = llama2.rope_tables(CONFIG, 50)
    place = lambda x, p: llama2.apply_rotary_emb(x.view(1, 1, 1, -1), cos[p][None], sin[p][None])  # noqa: E731
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
    0: [-2.55746, 0.89859, 2.23093, -0.222, -1.81616, -2.1045, 0.41476, 0.89619],
    15: [-2.08989, 0.34633, -0.64564, -0.86584, 1.25461, 0.38053, 0.34072, 2.44131],
    31: [-0.7747, 2.95837, 0.36966, -2.59819, 2.61012, 0.30026, -0.98085, 1.49069],
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
    loss = lambda: model(tokens).double().logsumexp(-1).mean()  # noqa: E731
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
    end = next(i for i, line in enumerate(lines) if line.startswith("# End of the model"))
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
    exec(compile(header + "\n".join(model_half()), "cut", "exec"), cut)
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
    for name in ("QuantizedLinear", "StreamDecoder", "Report"):
        assert inspect.isclass(getattr(llama2, name))
