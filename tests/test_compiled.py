"""Compiled steps: what they give, what they read, when they give way to plain torch."""

from __future__ import annotations

import contextlib
import copy
import shutil
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor import metrics
from torch._subclasses.fake_tensor import FakeTensorMode

import llama2
from test_llama2 import CONFIG, TOKENS, assert_close, needs, random_blocks

pytestmark = needs("accelerate", "CompiledBlock")
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.fixture
def steps(monkeypatch):
    """Every function as it is, without the seconds of a compiler; a list that grows with calls."""
    calls = []

    def compiled(function):
        return lambda *arguments: calls.append(function) or function(*arguments)

    monkeypatch.setattr(llama2, "compiled", compiled)
    return calls


def pair(model):
    """A model, and a copy with compiled Blocks."""
    fast = copy.deepcopy(model)
    llama2.change_classes(fast, {llama2.Block: llama2.CompiledBlock})
    return model, fast


@pytest.mark.skipif(not COMPILER, reason="Inductor needs a C++ compiler")
@torch.no_grad()
def test_by_inductor():
    """The real compiler: float32 to 1e-5, few compilations for all Blocks, positions and caches.

    A step copies none of the keys and values that it attends to.
    """
    # The heads are together narrower than the residual stream.
    config = replace(CONFIG, num_hidden_layers=3, head_dim=8, max_position_embeddings=70000)
    torch.manual_seed(0)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    metrics.reset()
    plain, fast = pair(llama2.Llama(config).requires_grad_(False))
    token = torch.zeros(1, 1, dtype=torch.int64)
    cache = llama2.Cache(config)
    cache.pos = 40000
    with contextlib.suppress(ValueError, TypeError):  # an older torch
        torch._logging.set_logs(inductor_metrics=True)  # that is what counts
    try:
        fast(token, cache)
    finally:
        torch._logging.set_logs()
    # 0: Inductor's own cache has this very code, which was counted when it was compiled.
    assert metrics.num_bytes_accessed < 40000 * 8 * 4
    for size in (30, 45):
        ours, theirs = (llama2.Cache(config, 1, size) for _ in range(2))
        prompt = torch.tensor([[1, 7, 9]])
        assert_close(fast(prompt, ours), plain(prompt, theirs), 1e-5)
        for _ in range(20):
            assert_close(fast(token, ours), plain(token, theirs), 1e-5)
        assert ours.pos == theirs.pos == 23
        assert_close(ours.k, theirs.k, 1e-5)
        assert_close(ours.v, theirs.v, 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class OtherCache(llama2.Cache):
    """A subclass, whose methods may do anything."""


@torch.no_grad()
def test_steps_equal_plain_ones(model, steps):
    """Prompts between them, truncated caches, several caches in turn; none with a subclass."""
    plain, fast = pair(model)
    pairs = [(llama2.Cache(CONFIG, 2), llama2.Cache(CONFIG, 2)) for _ in range(2)]
    for part in TOKENS[:2].split([20, 1, 1, 3, 1, 14], dim=1):
        for ours, theirs in pairs:
            assert_close(fast(part, ours), plain(part, theirs), 1e-5)
    for ours, theirs in pairs:
        ours.truncate(30)
        theirs.truncate(30)
        assert_close(fast(TOKENS[:2, :1], ours), plain(TOKENS[:2, :1], theirs), 1e-5)
    fast(TOKENS[:1, :1], OtherCache(CONFIG))
    assert len(steps) == 2 * 4 * len(fast.layers)


@torch.no_grad()
def test_what_was_changed_counts(model, monkeypatch):
    """After a step was compiled; one change after the other."""
    torch.compiler.reset()
    traced = torch.compile(llama2.Block.forward, backend="eager", dynamic=True)
    monkeypatch.setattr(llama2, "compiled", lambda function: traced)
    plain, fast = pair(copy.deepcopy(model))
    before = torch.zeros(1, 1)
    for change in (
        lambda m: None,
        lambda m: m.layers[0].mlp.register_forward_hook(lambda module, args, y: 2 * y),
        lambda m: setattr(m.layers[0], "mlp", nn.Identity()),
    ):
        change(plain)
        change(fast)
        expected = plain(TOKENS[:1, :1], llama2.Cache(CONFIG))
        assert_close(fast(TOKENS[:1, :1], llama2.Cache(CONFIG)), expected, 1e-5)
        assert (expected - before).abs().max() > 1e-4
        before = expected


@pytest.mark.parametrize("ggml_type", sorted(llama2.GGML_TYPES.keys() - llama2.DENSE))
@torch.no_grad()
def test_products_compile_as_one_graph(ggml_type, steps):
    """What a GPU runs for one token, traced as a whole."""
    blocks = torch.from_numpy(random_blocks(ggml_type, 40, 256, seed=0))
    layer = llama2.CompiledLinear(blocks, ggml_type)
    torch.compiler.reset()  # the limit on recompilations is for all tests together
    traced = torch.compile(layer, backend="eager", fullgraph=True)
    expected = llama2.dequantize(blocks, ggml_type)
    for shape in ((1, 1, 256), (256,), (4, 256)):
        x = torch.randn(shape)
        assert_close(layer(x), F.linear(x, expected), 1e-5)
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert_close(traced(x[:1]), F.linear(x[:1], expected), 1e-5)
    x.requires_grad_()
    with torch.enable_grad():
        layer(x[:1]).sum().backward()
    assert_close(x.grad[:1], expected.sum(0, keepdim=True), 1e-5)


@pytest.mark.parametrize("triton", [True, False])
def test_accelerate_on_cuda(model, monkeypatch, triton):
    model = copy.deepcopy(model)
    blocks = torch.from_numpy(random_blocks("Q8_0", 320, 64, seed=0))
    model.lm_head = llama2.QuantizedLinear(blocks, "Q8_0")
    with FakeTensorMode():
        model.norm.weight = nn.Parameter(torch.empty(64, device="cuda"), requires_grad=False)
    monkeypatch.setattr(llama2.importlib.util, "find_spec", lambda name: triton or None)
    assert llama2.accelerate(model) is model
    assert isinstance(model.layers[0], llama2.CompiledBlock) == triton
    assert isinstance(model.lm_head, llama2.CompiledLinear) == triton
