"""Tests of part III of llama2.py: the kernels in C++ and compiled steps, against plain torch."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
import shutil
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import gguf
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as Kind
from helpers import (
    SCALES,
    TOKENS,
    WIDE,
    assert_close,
    assert_layers_equal,
    make_model,
    needs,
    quantised,
    random_blocks,
)

import llama2

pytestmark = needs("accelerate")


@pytest.fixture(scope="module")
def native():
    """The kernels; where there are a compiler and a source file, they must come out."""
    if not any(map(shutil.which, ("g++", "clang++", "c++"))) and "CXX" not in os.environ:
        pytest.skip("no C++ compiler")
    if not llama2.kernel_builder():
        pytest.skip("no kernels/")
    found = llama2.kernels()
    assert found.library, found.problem
    return found


@pytest.fixture(params=[False, True], ids=["as it is", "as with AMX"])
def amx(request, native, monkeypatch):
    """Twice, the second time as on a CPU where torch's bfloat16 product is taken for many rows."""
    found = dataclasses.replace(native, amx=request.param)
    monkeypatch.setattr(llama2, "kernels", lambda: found)
    return request.param


@pytest.fixture
def without_kernels(monkeypatch):
    """As on a machine without a compiler."""
    found = llama2.Kernels(problem="no C++ compiler")
    monkeypatch.setattr(llama2, "kernels", lambda: found)


def pair(path, exact=True):
    """The model of a file as the reference has it, and accelerated."""
    checkpoint = llama2.open_checkpoint(path)
    fast = llama2.build_model(checkpoint)
    assert llama2.accelerate(fast, exact) is fast  # in place
    return llama2.build_model(checkpoint), fast


def wide_blocks(kind, rows=48, columns=512):
    """Blocks of a type that GGML_TYPES has, and what they mean."""
    if kind in llama2.DENSE:
        torch.manual_seed(0)
        stored = torch.randn(rows, columns).to(llama2.DENSE[kind])
        return stored.view(torch.uint8), stored.float()
    blocks = random_blocks(kind, rows, columns, seed=1)
    return torch.from_numpy(blocks), torch.from_numpy(gguf.quants.dequantize(blocks, Kind[kind]))


# --------------------------------------------------------------------------------------------------
# One matrix


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("kind", [kind for kind in SCALES if kind in llama2.GGML_TYPES])
@torch.no_grad()
def test_every_type_gives_the_logits_of_dequantised_weights(tmp_path, vocabulary, kind):
    """Blocks are random bytes: every bit of every field counts. Each linear layer, then the model."""
    path, weights = quantised(vocabulary, tmp_path / "x.gguf", [kind])
    _, fast = pair(path)
    layers = [m for m in fast.modules() if isinstance(m, llama2.NativeLinear)]
    assert len(layers) == 8 and isinstance(fast.layers, llama2.NativeLayers)
    assert_layers_equal(fast, weights, (1,), (2, 1), (3,), (5,), (8,), (9,), (2, 24))


@pytest.mark.parametrize("kind", llama2.GGML_TYPES)
@torch.no_grad()
def test_precision(kind, amx):
    """Exact: float32. Fast: 16-bit integers, with AMX and many rows bfloat16."""
    blocks, weight = wide_blocks(kind, rows=53)
    reference = llama2.QuantizedLinear(blocks, kind)
    exact, fast = (llama2.NativeLinear(reference, exact) for exact in (True, False))
    torch.manual_seed(2)
    for rows in (1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 17, 33, 49, 64, 65, 130):
        x = torch.randn(rows, 512) * torch.logspace(-3, 3, 512)  # large and small side by side
        wanted = F.linear(x, weight)
        assert_close(exact(x), wanted, 1e-5)
        assert_close(fast(x), wanted, 1e-2 if amx and rows > llama2.AMX_ROWS else 1e-4)
    assert exact(torch.randn(2, 12, 512)).shape == (2, 12, 53)
    for rows in (2, 40):
        x = torch.randn(rows, 512)
        x[1, 500] = math.nan
        for layer in (exact, fast):
            assert layer(x)[1].isnan().all() and layer(x)[0].isfinite().all()
            assert not layer(torch.zeros(rows, 512)).any()


@pytest.mark.parametrize("fill", [0, 128, 255])
@pytest.mark.parametrize("kind", sorted(llama2.GGML_TYPES.keys() - llama2.DENSE))
@torch.no_grad()
def test_sums_of_the_largest_integers(kind, fill, native, monkeypatch):
    """All weights and scales at an end of their range, all of x alike: no sum leaves 32 bits."""
    monkeypatch.setattr(llama2, "kernels", lambda: dataclasses.replace(native, amx=False))
    block, size, *_ = llama2.GGML_TYPES[kind]
    blocks = torch.full((8, 512 // block, size), fill, dtype=torch.uint8)
    for at in SCALES[kind]:
        blocks[:, :, at : at + 2] = torch.tensor([0, 60])  # 1.0 in float16
    reference = llama2.QuantizedLinear(blocks.flatten(1), kind)
    for rows in (1, 4, 40):
        for x in (torch.full((rows, 512), 3.0), torch.full((rows, 512), -1e-3)):
            assert_close(llama2.NativeLinear(reference, exact=False)(x), reference(x), 1e-4)


@pytest.mark.parametrize("kind", llama2.GGML_TYPES)
@torch.no_grad()
def test_few_rows_are_rounded_if_allowed(kind, native):
    """Dense types never are."""
    blocks, _ = wide_blocks(kind)
    reference, x = llama2.QuantizedLinear(blocks, kind), torch.randn(3, 512)
    exact, fast = (llama2.NativeLinear(reference, exact)(x) for exact in (True, False))
    assert torch.equal(fast, exact) == (kind in llama2.DENSE)


@pytest.mark.parametrize("kind", llama2.GGML_TYPES)
def test_dequantised_by_kernels(kind, native):
    """To bfloat16, rounded once: all but those in the middle of two numbers are the same."""
    blocks, weight = wide_blocks(kind, rows=53)
    y = torch.empty(53, 512, dtype=torch.bfloat16)
    native.library.dequantize(int(Kind[kind]), blocks.data_ptr(), y.data_ptr(), y.numel())
    assert (y == weight.bfloat16()).float().mean() > 0.999
    assert_close(y.float(), weight, 2**-8)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@torch.no_grad()
def test_widths_that_are_no_multiple_of_the_kernels(kind, native, monkeypatch):
    """Where a kernel reads 32 or 256 at a time, it would read the next row, which is NaN."""
    monkeypatch.setattr(llama2, "kernels", lambda: dataclasses.replace(native, amx=False))
    for K in (40, 72, 32, 96, 288, 480):
        if K % llama2.GGML_TYPES[kind][0]:
            continue
        blocks = gguf.quants.quantize(torch.randn(11, K).numpy(), Kind[kind])
        w = torch.from_numpy(gguf.quants.dequantize(blocks, Kind[kind]))
        blocks = torch.from_numpy(blocks).view(torch.uint8).view(11, -1)
        reference = llama2.QuantizedLinear(blocks, kind)
        exact, fast = (llama2.NativeLinear(reference, exact) for exact in (True, False))
        for rows in (1, 3, 20):
            x = torch.randn(rows, K)
            wanted = F.linear(x, w)
            x[2:] = math.nan
            for layer, tolerance in ((exact, 1e-5), (fast, 1e-4)):
                assert_close(layer(x)[:2], wanted[:2], tolerance)


@torch.no_grad()
def test_callers_in_many_threads_do_not_share_memory(native, monkeypatch):
    """What a call leaves behind is taken by the next, whichever thread it comes from."""
    monkeypatch.setattr(llama2, "kernels", lambda: dataclasses.replace(native, amx=False))
    blocks, _ = wide_blocks("Q4_K", rows=53)
    layer = llama2.NativeLinear(llama2.QuantizedLinear(blocks, "Q4_K"), exact=False)
    inputs = [torch.randn(rows, 512) for rows in (1, 150, 3, 40, 16, 77)]
    wanted = [layer(x) for x in inputs]

    def work(first: int) -> bool:
        order = [(first + i) % len(inputs) for i in range(60)]
        return all(torch.equal(layer(inputs[i]), wanted[i]) for i in order)

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))


@pytest.mark.usefixtures("native")
def test_what_kernels_cannot_do_is_left_to_the_reference():
    """Gradients, other dtypes and layouts, blocks that are no plain memory."""
    blocks, weight = wide_blocks("Q4_K")
    reference = llama2.QuantizedLinear(blocks, "Q4_K")
    layer, x = llama2.NativeLinear(reference, exact=True), torch.randn(5, 512)
    wanted = F.linear(x, weight)
    leaf = x.clone().requires_grad_()
    layer(leaf).sum().backward()
    assert_close(leaf.grad, weight.sum(0).expand(5, 512), 1e-5)
    with torch.no_grad():
        assert_close(layer(x.double()).float(), wanted, 1e-5)
        assert_close(layer(x.T.contiguous().T), wanted, 1e-5)
        assert_close(layer(torch.stack((x, x), 2)[..., 0]), wanted, 1e-5)
        assert layer(x[:0]).shape == (0, 48)
        layer.blocks = torch.cat((blocks, blocks), 1)[:, : blocks.shape[1]]  # rows apart
        assert_close(layer(x), wanted, 1e-5)
        with pytest.raises(RuntimeError):
            layer(x[:, :511])


# --------------------------------------------------------------------------------------------------
# Whole layers


KINDS = ["Q4_K", "Q5_1", "Q8_0", "Q6_K"]


def layered(vocabulary, path, kv_heads=2):
    """A file of two layers, and its Config."""
    config = dataclasses.replace(
        WIDE,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
    )
    return config, quantised(vocabulary, path, KINDS, config)[0]


def by_blocks(blocks, x, *rest):
    """What a list of Blocks makes of x."""
    for block in blocks:
        x = block(x, *rest)
    return x


def never(*args):
    """Stands for what must not be called."""
    raise AssertionError


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@torch.no_grad()
def test_native_layers_do_what_the_blocks_do(
    tmp_path, vocabulary, native, monkeypatch, kv_heads, dtype
):
    """Chunk after chunk, in batches: its output, and what it stores."""
    config, path = layered(vocabulary, tmp_path / "x.gguf", kv_heads)
    plain, fast = pair(path)
    layers = fast.layers
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3  # keys that round to another float16
    torch.manual_seed(0)
    for B, chunks in ((1, (1, 5, 1, 64, 1)), (2, (3, 8, 1)), (1, (130, 17, 1)), (2, (65, 70))):
        ours, theirs = (llama2.Cache(config, B, 201, dtype) for _ in range(2))
        for T in chunks:
            x = torch.randn(B, T, 256)
            rest = *theirs.rope(T), theirs.mask(T)
            wanted, before = by_blocks(plain.layers, x, *rest, theirs), x.clone()
            with monkeypatch.context() as patch:
                patch.setattr(llama2.Block, "forward", never)
                assert_close(layers(x, *rest, ours), wanted, tolerance)
            assert torch.equal(x, before)
            ours.advance(T), theirs.advance(T)
        for found, wanted in ((ours.k, theirs.k), (ours.v, theirs.v)):
            assert wanted[:, :, :, : ours.pos].any() and not found[:, :, :, ours.pos :].any()
            assert_close(found.float(), wanted.float(), tolerance)
    x = torch.randn(1, 20, 256)
    x[0, 11, 5] = math.nan  # is not lost
    cache = llama2.Cache(config)
    assert layers(x, *cache.rope(20), cache.mask(20), cache)[0, 11:].isnan().all()


@torch.no_grad()
def test_native_layers_that_round(tmp_path, vocabulary, amx):
    """Prompts, too: near what the blocks give in float32."""
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", KINDS)
    plain, fast = pair(path, exact=False)
    for T in (1, 9, 40, 130):
        ours, theirs = (llama2.Cache(WIDE, 1, 200) for _ in range(2))
        x = torch.randn(1, T, 256)
        rest = *theirs.rope(T), theirs.mask(T)
        wanted = by_blocks(plain.layers, x, *rest, theirs)
        tolerance = 0.02 if amx and T > llama2.AMX_ROWS else 1e-3
        assert_close(fast.layers(x, *rest, ours), wanted, tolerance)
        assert_close(ours.v, theirs.v, tolerance)


@torch.no_grad()
def test_native_layers_leave_the_rest_to_the_blocks(tmp_path, vocabulary, native, monkeypatch):
    """Padding, hooks, 16 bits, no cache, a step that is compiled, modules that were replaced."""
    config, path = layered(vocabulary, tmp_path / "x.gguf")
    _, fast = pair(path)
    blocks, calls, forward = fast.layers, [], llama2.Block.forward
    block = blocks[1]
    monkeypatch.setattr(llama2.Block, "forward", lambda *args: calls.append(args) or forward(*args))

    def check(x, cache, fell_back=True, rest=True):
        """The layers give what the blocks give, by the kernels or not."""
        T = x.shape[1]
        inputs = *cache.rope(T), cache.mask(T), cache if rest else None
        found = fast.layers(x, *inputs)
        assert bool(calls) == fell_back
        assert_close(found.float(), by_blocks(blocks, x, *inputs).float(), 1e-5)
        calls.clear()

    x, cache = torch.randn(2, 3, 256), llama2.Cache(config, 2)
    check(x, cache, fell_back=False)
    check(x, llama2.PaddedCache(config, torch.tensor([0, 1])))
    check(x, cache, rest=False)
    check(x.mT.contiguous().mT, cache)
    seen = []
    for part in (block, block.mlp, block.self_attn, block.input_layernorm, block.mlp.down_proj):
        for register in (part.register_forward_hook, part.register_forward_pre_hook):
            hook = register(lambda *args: seen.append(args))
            check(x, cache)
            hook.remove()
    assert len(seen) == 20
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    check(x, cache)
    hook.remove()
    mlp, block.mlp = block.mlp, torch.nn.Identity()  # what stands in the model counts
    check(x, cache)
    block.mlp = mlp
    block.mlp.forward = lambda x: x
    check(x, cache)
    del block.mlp.forward
    block.post_attention_layernorm.weight = torch.nn.Parameter(torch.full((256,), 3.0))
    check(x, cache, fell_back=False)
    down = block.mlp.down_proj.blocks
    down.data = down.flip(0).contiguous()  # moved, and not what was packed
    check(x, cache, fell_back=False)
    last = blocks.pop(-1)  # the cache is of two layers
    check(x, cache)
    blocks.append(last)
    check(x, cache, fell_back=False)
    fast.bfloat16()
    check(x.bfloat16(), llama2.Cache(config, 2, dtype=torch.bfloat16))


@pytest.mark.usefixtures("native")
def test_accelerated_models_are_freed_at_once(tmp_path, vocabulary):
    """Nothing refers to them in a circle, so their weights do not wait for the collector."""
    _, path = layered(vocabulary, tmp_path / "x.gguf")
    fast, _ = llama2.load(path, accelerated=True)
    list(llama2.generate(fast, [1, 5], max_new_tokens=2))
    alive = weakref.ref(fast)
    del fast
    assert alive() is None


@pytest.mark.usefixtures("native")
@torch.no_grad()
def test_accelerating_twice_changes_the_precision(tmp_path, vocabulary):
    _, path = layered(vocabulary, tmp_path / "x.gguf")
    plain, fast = pair(path, exact=False)
    wanted, rounded = plain(TOKENS[:1, :5]), fast(TOKENS[:1, :5])
    exact = llama2.accelerate(fast, exact=True)(TOKENS[:1, :5])
    assert_close(exact, wanted, 1e-5)
    assert len(fast.layers) == 2 and not torch.equal(exact, rounded)


# --------------------------------------------------------------------------------------------------
# Without kernels


@pytest.mark.skipif(
    not hasattr(torch, "_convert_weight_to_int4pack_for_cpu"), reason="needs torch's int4 product"
)
@pytest.mark.parametrize("kind", llama2.GGML_TYPES)
@torch.no_grad()
def test_fast_layers_without_a_compiler(kind, monkeypatch):
    """Torch's own products with 16-bit matrices and 4-bit integers, where memory is free."""
    blocks, weight = wide_blocks(kind)
    layer = llama2.PackedLinear(llama2.QuantizedLinear(blocks, kind))
    assert bool(layer.group) == (kind not in llama2.DENSE)
    torch.manual_seed(3)
    for rows in (1, 5, 16, 17):
        x = torch.randn(rows, 1, 512)
        assert layer(x).dtype == torch.float32 and layer(x).shape == (rows, 1, 48)
        assert_close(layer(x), F.linear(x, weight), 1.5e-2)
    odd = llama2.PackedLinear(llama2.QuantizedLinear(blocks[:40], kind))  # no multiple of 16 rows
    assert not odd.group
    assert_close(odd(x), F.linear(x, weight[:40]), 1.5e-2)
    monkeypatch.setattr(llama2, "free_memory", lambda device: 2 * blocks.nbytes)
    scarce = llama2.PackedLinear(llama2.QuantizedLinear(blocks, kind))
    assert not scarce.group
    assert_close(scarce(x), F.linear(x, weight), 1.5e-2)


@pytest.mark.skipif(
    not hasattr(torch, "_convert_weight_to_int4pack_for_cpu"), reason="needs torch's int4 product"
)
@torch.no_grad()
def test_packed_layers_follow_their_blocks():
    """Blocks changed in place, loaded, replaced or copied; what is packed is no part of the state."""
    blocks, _ = wide_blocks("Q4_0")
    other, weight = blocks.flip(0), wide_blocks("Q4_0")[1].flip(0)
    x = torch.randn(2, 512)
    for change in (
        lambda layer: layer.blocks.copy_(other),
        lambda layer: layer.load_state_dict({**layer.state_dict(), "blocks": other}),
        lambda layer: setattr(layer, "blocks", other.clone()),
        lambda layer: setattr(layer.blocks, "data", other.clone()),
    ):
        layer = llama2.PackedLinear(llama2.QuantizedLinear(blocks.clone(), "Q4_0"))
        assert not torch.allclose(layer(x), F.linear(x, weight), atol=1)
        change(layer)
        assert_close(layer(x), F.linear(x, weight), 1.5e-2)
        assert torch.equal(copy.deepcopy(layer)(x), layer(x))
        keys = llama2.QuantizedLinear(blocks, "Q4_0").state_dict().keys()
        assert layer.group and layer.state_dict().keys() == keys


@pytest.mark.usefixtures("without_kernels")
@pytest.mark.parametrize("exact", [True, False])
@torch.no_grad()
def test_without_a_compiler_a_warning_says_so(tmp_path, vocabulary, exact):
    """And the model runs all the same."""
    path, weights = quantised(vocabulary, tmp_path / "x.gguf", ["Q4_0"])
    with pytest.warns(UserWarning, match="will be slow: no C.. compiler") as found:
        loaded, _ = llama2.load(path, accelerated=True, exact=exact)
    assert ("exact=False" in str(found[0].message)) == exact  # what makes it faster
    packed = [m for m in loaded.modules() if isinstance(m, llama2.PackedLinear)]
    assert bool(packed) != exact
    wanted = make_model(WIDE, weights)(TOKENS[:2, :7])
    assert_close(loaded(TOKENS[:2, :7]), wanted, 1e-4 if exact else 0.05)


# --------------------------------------------------------------------------------------------------
# When it is used


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize(
    "large, args, exact",
    [
        (True, (), False),
        (True, ("--dtype", "float32"), True),
        (True, ("--no-compile",), None),
        (False, (), None),
        (False, ("--compile",), True),
        (False, ("--dtype", "bfloat16", "--compile"), True),
    ],
)
def test_large_models_are_accelerated_and_rounded_unless_told_otherwise(
    cli, monkeypatch, tmp_path, vocabulary, large, args, exact
):
    """`exact` is how precise the kernels are; None: without them."""
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["Q8_0"])
    built, build = [], llama2.build_model
    monkeypatch.setattr(
        llama2, "build_model", lambda *a, **k: built.append(build(*a, **k)) or built[-1]
    )
    monkeypatch.setattr(llama2, "is_large", lambda checkpoint: large)
    status, out, _ = cli("--prompt", "The fox", "--max-new-tokens", 5, *args, model=path)
    assert status == 0 and len(out) > len("The fox")
    (model,) = built
    layers = [m for m in model.modules() if isinstance(m, llama2.QuantizedLinear)]
    assert len(layers) == 8
    expected = llama2.NativeLinear if exact is not None else llama2.QuantizedLinear
    if args == ("--no-compile",):
        expected = llama2.PackedLinear
    assert {type(layer) for layer in layers} == {expected}
    if exact is not None:
        assert {layer.exact for layer in layers} == {exact}
        assert isinstance(model.layers, llama2.NativeLayers)
    for choice in (True, False, None):  # from Python exact, without a word
        loaded, _ = llama2.load(path, accelerated=choice)
        found = {m.exact for m in loaded.modules() if isinstance(m, llama2.NativeLinear)}
        assert found == ({True} if choice or (choice is None and large) else set())


@pytest.mark.parametrize(
    "kinds, change, cache",
    [
        (["Q8_0"], {}, torch.float16),
        (["F16"], {}, torch.float16),
        (["Q8_0", "F32"], {}, torch.float32),
        (["Q8_0"], {"compile": False}, torch.float32),
        (["Q8_0"], {"kernels": False}, torch.float32),
        (["Q8_0"], {"name": "float32"}, torch.float32),
        (["Q8_0"], {"name": "bfloat16"}, torch.bfloat16),
        (["Q8_0"], {"device": "cuda"}, torch.bfloat16),
        (["F16"], {"device": "cuda"}, torch.float16),
        (["BF16"], {"device": "cuda"}, torch.bfloat16),
        (["F16", "Q8_0"], {"device": "cuda"}, torch.bfloat16),
    ],
)
def test_caches_of_16_bits_are_for_kernels(monkeypatch, cli_path, kinds, change, cache):
    """Torch would convert all of it for every token."""
    checkpoint = llama2.open_checkpoint(cli_path)
    monkeypatch.setattr(llama2, "is_large", lambda checkpoint: True)
    monkeypatch.setattr(llama2, "have_kernels", lambda: change.get("kernels", True))
    for (name, weight), kind in zip(checkpoint.weights.items(), itertools.cycle(kinds)):
        if len(weight.shape) == 2:
            checkpoint.weights[name] = dataclasses.replace(weight, ggml_type=kind)
    device = torch.device(change.get("device", "cpu"))
    compile = change.get("compile", True)
    found = llama2.choose_dtypes(change.get("name", "auto"), device, checkpoint, compile)
    assert found[1] == cache and found[2] == ("name" in change)


def test_only_large_files_are_worth_a_compiler(cli_path):
    checkpoint = llama2.open_checkpoint(cli_path)
    assert not llama2.is_large(checkpoint)
    weight = SimpleNamespace(nbytes=2**26)
    assert llama2.is_large(dataclasses.replace(checkpoint, weights={"a": weight, "b": weight}))
