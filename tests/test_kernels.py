"""Tests of part III of llama2.py: the kernels in C++ and compiled steps, against plain torch."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import weakref
from types import SimpleNamespace

import gguf
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind

import llama2
from test_llama2 import (
    CONFIG,
    SCALES,
    TOKENS,
    WIDE,
    assert_close,
    assert_layers_equal,
    logits_of,
    make_model,
    needs,
    quantised,
    random_blocks,
)

pytestmark = needs("NativeLayers")


def compiled_kernels():
    """The library; where there is a compiler, it must come out."""
    if not any(map(shutil.which, ("g++", "clang++"))) and "CXX" not in os.environ:
        pytest.skip("no C++ compiler")
    return llama2.kernels()[0]


@pytest.mark.parametrize("kind", [kind for kind in SCALES if kind in llama2.GGML_TYPES])
@torch.no_grad()
def test_every_type_gives_the_logits_of_dequantised_weights(tmp_path, vocabulary, kind):
    """Blocks are random bytes: every bit of every field counts. Each linear layer, then the model."""
    compiled_kernels()
    path, weights = quantised(vocabulary, tmp_path / "x.gguf", [kind])
    loaded = llama2.build_model(llama2.open_checkpoint(path))
    layers = [m for m in loaded.modules() if isinstance(m, llama2.QuantizedLinear)]
    assert len(layers) == 8 and all(layer.native for layer in layers)
    assert_layers_equal(loaded, weights, (1,), (2, 1), (3,), (5,), (8,), (9,), (2, 24))


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
def test_few_rows_are_rounded_where_the_cpu_can(kind):
    """Dense types never are."""
    if kind not in llama2.DENSE and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("needs AVX-512")
    blocks, _ = wide_blocks(kind)
    fast = llama2.QuantizedLinear(blocks, kind, compiled_kernels(), activation_bits=16)
    exact = llama2.QuantizedLinear(blocks, kind, compiled_kernels())
    x = torch.randn(3, 512)
    assert torch.equal(fast(x), exact(x)) == (kind in llama2.DENSE)


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


@torch.no_grad()
def test_native_layers_that_round(tmp_path, vocabulary):
    """Prompts, too, where there are products for them: the same layers, in another order of sums."""
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["Q4_K", "Q5_1", "Q8_0", "Q6_K"])
    library = compiled_kernels()
    model = llama2.build_model(llama2.open_checkpoint(path), activation_bits=16)
    products = {"many"} if hasattr(library, "product16_Q4_0") else set()
    assert set(model.run_layers.packed) == {"few"} | products
    for T in (1, 9, 40, 130):
        ours, theirs = (llama2.Cache(WIDE, 1, 200) for _ in range(2))
        x = torch.randn(1, T, 256)
        rest = *theirs.rope(T), theirs.mask(T)
        wanted = llama2.Llama.run_layers(model, x, *rest, theirs)
        assert_close(model.run_layers(x, *rest, ours), wanted, 0.02)
        assert_close(ours.v, theirs.v, 0.02)


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


def test_without_a_compiler_a_warning_says_so(tmp_path, vocabulary, monkeypatch):
    """And the model runs all the same."""

    def fail():
        raise OSError("no C++ compiler")

    path, weights = quantised(vocabulary, tmp_path / "x.gguf", ["Q4_0"])
    monkeypatch.setattr(llama2, "kernels", fail)
    with pytest.warns(UserWarning, match="no C.. compiler"):
        found = logits_of(path)
    assert_close(found, make_model(WIDE, weights)(TOKENS[:2, :24]))


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


@pytest.mark.parametrize(
    "large, args, bits",
    [
        (True, (), 16),
        (True, ("--dtype", "float32"), 32),
        (False, (), 32),
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
