"""The kernels in C++ against plain torch, and when they are used."""

import copy
import itertools
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import gguf
import pytest
import torch
import torch.nn.functional as F
from gguf import GGMLQuantizationType as GGMLType

import llama2
import test_llama2
from test_llama2 import (
    SCALES,
    TOKENS,
    assert_close,
    json_cases,
    needs_kernels,
    quantised,
    random_blocks,
)

pytestmark = [needs_kernels, pytest.mark.usefixtures("native", "no_grad")]
every_type = pytest.mark.parametrize("ggml_type", llama2.GGML_TYPES)
KINDS = ["Q4_K", "Q6_K", "Q8_0", "Q5_1"]
SHAPE = test_llama2.SHAPE | {
    "hidden_size": 256,
    "intermediate_size": 512,
    "vocab_size": 64,
    "max_position_embeddings": 256,
}


def layer_of(blocks, ggml_type, fast=False):
    """A linear layer with the kernels."""
    layer = llama2.NativeLinear(blocks, ggml_type)
    layer.fast = fast
    return layer


def model_of(ggml_types, **change):
    """A model whose matrices have random blocks of these types in turn, by plain torch."""
    torch.manual_seed(0)
    model = llama2.Llama(llama2.Config(**SHAPE | change)).requires_grad_(False)
    modules = model.named_modules()
    linears = [(n, m.weight.shape) for n, m in modules if isinstance(m, torch.nn.Linear)]
    for i, (name, shape) in enumerate(linears):
        ggml_type = ggml_types[i % len(ggml_types)]
        blocks, _ = wide_blocks(ggml_type, *shape, i)
        model.set_submodule(name, llama2.QuantizedLinear(blocks, ggml_type))
    return model


def wide_blocks(ggml_type, rows=48, columns=512, seed=1):
    """Blocks of a type that GGML_TYPES has, and what they mean."""
    if ggml_type in llama2.DENSE:
        torch.manual_seed(seed)
        dense = 0.05 * torch.randn(rows, columns)
        blocks = gguf.quants.quantize(dense.numpy(), GGMLType[ggml_type]).view("uint8")
    else:
        blocks = random_blocks(ggml_type, rows, columns, seed)
    return torch.from_numpy(blocks), torch.from_numpy(
        gguf.quants.dequantize(blocks, GGMLType[ggml_type])
    )


# --------------------------------------------------------------------------------------------------
# One matrix


LARGEST = {"Q4_K": 15 * 63, "Q5_K": 31 * 63, "Q6_K": 32 * 128}  # integers of W, where they matter


def rounded(x, ggml_type):
    """x (tokens, K) as fast products round it: to integers of 16 bits, with a scale for each span."""
    few = len(x) <= llama2.load_kernels().gemv_tokens
    parts = x.unflatten(1, (-1, 256 if few else 128))
    sizes = parts.abs()
    scale = sizes.amax(2, True) / 32639
    if ggml_type in LARGEST and not few:  # sums of products stay within 32 bits
        scale = scale.maximum(sizes.sum(2, True) / (0x7FFF0000 // LARGEST[ggml_type] - 64))
    return ((parts.double() * (1 / scale)).round() * scale).flatten(1).float()


@every_type
def test_precision(ggml_type):
    """Exact: float32. Fast: the same with x rounded to 16-bit integers, but for dense types.

    The largest number of each 128 is 32639 times a power of two, and sums of the others are exact.
    So scales have the same bits here and there, no number rounds to another integer, and only sums
    in float32 differ: by 1e-6. Rounding itself changes y by 7e-6 to 1e-4, with 15 bits by twice that.
    """
    blocks, weight = wide_blocks(ggml_type, rows=53)
    exact = layer_of(blocks, ggml_type)
    fast = layer_of(blocks, ggml_type, fast=True)
    torch.manual_seed(2)
    for tokens in (*range(1, 18), 33, 49, 64, 65, 130):
        x = 4.0 * torch.randint(-130_000, 130_000, (tokens, 4, 128))
        x[:, :, 0] = 16 * 32639
        x = (x * 2.0 ** torch.randint(-9, 9, (tokens, 4, 1))).flatten(1)  # large beside small
        assert_close(exact(x), F.linear(x, weight), 3e-6)
        if torch.equal(exact(x), fast(x)):  # gemm has no such integers for some types
            assert tokens > 4 or ggml_type in llama2.DENSE
        else:
            assert_close(fast(x), F.linear(rounded(x, ggml_type), weight), 3e-6)
        x[-1, 500] = math.nan
        for layer in (exact, fast):
            assert layer(x)[-1].isnan().all() and layer(x)[:-1].isfinite().all()
            assert not layer(torch.zeros(2, tokens, 512)).any()


@pytest.mark.parametrize("fill", [0, 128, 255])
@pytest.mark.parametrize("ggml_type", sorted(llama2.GGML_TYPES.keys() - llama2.DENSE))
def test_sums_of_the_largest_integers(ggml_type, fill):
    """All weights and scales at an end of their range, all of x alike: no sum leaves 32 bits."""
    block = llama2.GGML_TYPES[ggml_type]
    blocks = torch.full((8, 512 // block.count, block.nbytes), fill, dtype=torch.uint8)
    for at in SCALES[ggml_type]:
        blocks[:, :, at : at + 2] = torch.tensor([0, 60])  # 1.0 in float16
    blocks = blocks.flatten(1)
    for tokens, value in itertools.product((1, 4, 40), (3.0, -1e-3)):
        x = torch.full((tokens, 512), value)
        expected = llama2.QuantizedLinear(blocks, ggml_type)(x)
        assert_close(layer_of(blocks, ggml_type, fast=True)(x), expected, 1e-4)


@every_type
def test_widths(ggml_type, monkeypatch):
    """Where a kernel reads 32 or 256 at a time, it would read the next row of x, which is NaN.

    Embeddings are by the kernel alone, but for rows below 256 and ids that torch refuses.
    """
    monkeypatch.delattr(llama2.QuantizedEmbedding, "forward")
    for K in (40, 32, 96, 288, 300, 480, 512):
        if K % llama2.GGML_TYPES[ggml_type].count:
            continue
        blocks, weight = wide_blocks(ggml_type, 11, K)
        for tokens in (1, 3, 20):
            x = torch.randn(tokens, K)
            expected = F.linear(x, weight)
            x[2:] = math.nan
            for fast, tolerance in ((False, 1e-5), (True, 1e-4)):
                assert_close(layer_of(blocks, ggml_type, fast)(x)[:2], expected[:2], tolerance)
        embedding = llama2.NativeEmbedding(blocks, ggml_type, torch.float32)
        for bad in (-1, 11) if K > 255 else (0,):
            with pytest.raises(NotImplementedError):
                embedding(torch.tensor([bad]))
        ids = torch.tensor([[0, 10, 3], [5, 5, 1]])
        with pytest.raises(NotImplementedError):
            embedding(ids.to("meta"))
        for tokens in (ids, ids.T) if K > 255 else ():
            assert_close(embedding(tokens), weight[tokens], 1e-6)


def test_callers_in_many_threads_do_not_share_memory(monkeypatch):
    """What a call leaves behind is taken by the next, whichever thread it comes from.

    Each caller has a number of threads of its own.
    """
    layer = layer_of(wide_blocks("Q4_K", rows=1031)[0], "Q4_K", fast=True)
    pairs = [(x, layer(x)) for x in map(torch.randn, (1, 150, 3, 40, 16, 77), [512] * 6)]
    local = threading.local()
    monkeypatch.setattr(torch, "get_num_threads", lambda: local.threads)

    def work(first):
        local.threads = (1, 2, 8)[first % 3]
        return all(torch.equal(layer(x), y) for x, y in (10 * pairs)[first:])

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(work, range(6)))


# --------------------------------------------------------------------------------------------------
# Whole layers


# The third are together wider than the residual stream, the last are parts of vectors.
HEADS = """
{"num_key_value_heads": 4}
{"head_dim": 32}
{"num_attention_heads": 8, "head_dim": 64}
{"num_attention_heads": 64, "num_key_value_heads": 16, "head_dim": 28}
{"num_attention_heads": 64, "num_key_value_heads": 32, "head_dim": 4}
"""


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@json_cases("heads", HEADS)
def test_blocks_equal_plain_ones(monkeypatch, heads, dtype, fast):
    """Chunk after chunk, in batches: their output, and what they store."""
    plain = model_of(KINDS, **heads)
    plain.embed_tokens.weight.normal_()
    native = llama2.accelerate(copy.deepcopy(plain), fast)
    for model in (plain, native):
        model.norm = model.lm_head = torch.nn.Identity()
    tolerance = 3e-3 if fast else 2e-3 if dtype == torch.half else 1e-5  # a key may round otherwise
    torch.manual_seed(0)
    for B, chunks in ((1, (1, 5, 1, 64, 1)), (2, (3, 8, 1)), (1, (130, 17, 1)), (2, (65, 70))):
        ours, theirs = (llama2.Cache(plain.config, B, 201, dtype) for _ in range(2))
        for T in chunks:
            tokens = torch.randint(64, (B, T))
            expected = plain(tokens, theirs, all_positions=True)
            with monkeypatch.context() as patch:
                patch.delattr(llama2.Block, "forward")
                assert_close(native(tokens, ours, all_positions=True), expected, tolerance)
        assert_close(ours.k, theirs.k, tolerance)
        assert_close(ours.v, theirs.v, tolerance)
    native.embed_tokens.weight[7] = math.nan  # is not lost
    cache = llama2.Cache(plain.config)
    assert native(torch.arange(20)[None], cache, all_positions=True)[0, 7:].isnan().all()


def test_precision_is_each_layers_own():
    """Accelerating again changes it; one layer may have another than its neighbours."""
    model = llama2.accelerate(model_of(["Q4_K"]))

    def logits():
        return model(TOKENS[:1, :5] % 64, model.new_cache(), all_positions=True)

    exact = logits()
    assert llama2.accelerate(model, fast=True) is model  # in place
    rounded = logits()
    model.layers[0].self_attn.v_proj.fast = False
    assert not torch.equal(exact, rounded) and not torch.equal(logits(), rounded)
    llama2.accelerate(model)
    assert torch.equal(logits(), exact)


# --------------------------------------------------------------------------------------------------
# When they are used


LARGE = """
[1, {}, [false], "float32"]
[1, {"dtype": "auto"}, [true], "float16"]
[1, {"dtype": "auto", "compile": false}, [], "bfloat16"]
[1e9, {"dtype": "auto"}, [], "float32"]
[1e9, {"dtype": "auto", "compile": true}, [false], "float32"]
[1e9, {"dtype": "bfloat16", "compile": true}, [false], "bfloat16"]
"""


@json_cases("case", LARGE)
def test_large_models_are_accelerated_and_rounded_if_told(monkeypatch, tmp_path, case):
    """What is large; options; whether the kernels round, if they are used; the cache's dtype."""
    large, options, fast, cache_dtype = case
    monkeypatch.setattr(llama2, "LARGE", large)
    path, _ = quantised(tmp_path / "x.gguf", "Q8_0")
    model, _ = llama2.load(path, **options)
    assert [m.fast for m in model.modules() if isinstance(m, llama2.NativeLinear)] == 8 * fast
    assert model.new_cache().k.dtype == getattr(torch, cache_dtype)
