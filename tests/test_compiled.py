"""Compiled steps: what they give, what they read, when they give way to plain torch."""

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
from test_llama2 import (
    CONFIG,
    TOKENS,
    arrange,
    assert_close,
    in_steps,
    needs,
    random_blocks,
)

pytestmark = [needs("load_kernels", "CompiledBlock"), pytest.mark.usefixtures("no_grad")]


@pytest.fixture
def steps(monkeypatch):
    """Every function as it is, without the seconds of a compiler; a list that grows with calls."""
    calls = []

    def compiled(function):
        return lambda *arguments: calls.append(function) or function(*arguments)

    monkeypatch.setattr(llama2, "compiled", compiled)
    return calls


def pair(model):
    """Two copies of a model, the second with compiled Blocks."""
    plain, fast = copy.deepcopy(model), copy.deepcopy(model)
    llama2.change_classes(fast, {llama2.Block: llama2.CompiledBlock})
    return plain, fast


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="Inductor needs a C++ compiler"
)
def test_by_inductor():
    """The real compiler: float32 to 1e-5, one compilation for all Blocks, positions and caches.

    A step copies none of the keys and values that it attends to.
    """
    # The heads are together narrower than the residual stream.
    config = replace(CONFIG, head_dim=8, max_position_embeddings=70000)
    torch.manual_seed(0)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    metrics.reset()
    plain, fast = pair(llama2.Llama(config))
    cache = llama2.Cache(config)
    cache.pos = 40000
    with contextlib.suppress(ValueError, TypeError):  # an older torch
        torch._logging.set_logs(inductor_metrics=True)  # that is what counts
    fast(TOKENS[:1, :1], cache)
    torch._logging.set_logs()
    # 0: Inductor's own cache has this very code, which was counted when it was compiled.
    assert metrics.num_bytes_accessed < 40000 * 8 * 4
    for size in (30, 45):
        ours, theirs = (llama2.Cache(config, 1, size) for _ in range(2))
        for part in TOKENS[:1, :23].split([3] + [1] * 20, 1):
            assert_close(fast(part, ours), plain(part, theirs), 1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class OtherCache(llama2.Cache):
    """A subclass, whose methods may do anything."""


def test_steps_equal_plain_ones(model, steps):
    """Between prompts, too; none with a subclass of Cache."""
    plain, fast = pair(model)
    ours, theirs = (llama2.Cache(CONFIG, 2) for _ in range(2))
    for part in TOKENS[:2].split([20, 1, 1, 3, 1, 14], 1):
        assert_close(fast(part, ours), plain(part, theirs), 1e-5)
    fast(TOKENS[:1, :1], OtherCache(CONFIG))
    assert len(steps) == 3 * len(fast.layers)


@pytest.mark.parametrize("places", [[0, 1, 1, 0], [1], [0, None, 1]])
def test_layers_repeated_moved_and_removed(model, steps, places):
    fast = arrange(pair(model)[1], places)
    assert_close(
        in_steps(fast, TOKENS, [20, 1, 1, 3, 1, 14], fast.new_cache(batch_size=3)), fast(TOKENS)
    )
    assert len(steps) == 3 * sum(i is not None for i in places)


def test_what_was_changed_counts(model, monkeypatch):
    """After a step was compiled; one change after the other."""
    torch.compiler.reset()
    traced = torch.compile(llama2.Block.forward, backend="eager", dynamic=True)
    monkeypatch.setattr(llama2, "compiled", lambda function: traced)
    models = pair(model)
    before = torch.zeros(1, 1)
    for change in (
        nn.Module.eval,  # changes nothing
        lambda m: m.layers[0].mlp.register_forward_hook(lambda module, args, y: 2 * y),
        lambda m: setattr(m.layers[0], "mlp", nn.Identity()),
    ):
        for each in models:
            change(each)
        expected, actual = (each(TOKENS[:1, :1], llama2.Cache(CONFIG)) for each in models)
        assert_close(actual, expected, 1e-5)
        assert (expected - before).abs().max() > 1e-4  # the change does something
        before = expected


@pytest.mark.parametrize("ggml_type", sorted(llama2.GGML_TYPES.keys() - llama2.DENSE))
def test_products_compile_as_one_graph(ggml_type, steps):
    """What a GPU runs for one token, traced as a whole."""
    blocks = torch.from_numpy(random_blocks(ggml_type, 40, 256, seed=0))
    layer = llama2.CompiledLinear(blocks, ggml_type)
    torch.compiler.reset()  # the limit on recompilations is for all tests together
    traced = torch.compile(layer, backend="eager", fullgraph=True)
    weight = llama2.dequantize(blocks, ggml_type)
    for product, *shape in ((layer, 1, 1, 256), (layer, 256), (layer, 4, 256), (traced, 1, 256)):
        x = torch.randn(shape)
        assert_close(product(x), F.linear(x, weight), 1e-5)
        assert layer(x.bfloat16()).dtype == torch.bfloat16
    gradient = torch.func.grad(lambda x: layer(x).sum())(x[0])
    assert_close(gradient, weight.sum(0), 1e-5)


@pytest.mark.parametrize("triton", [True, False])
def test_accelerate_on_cuda(monkeypatch, triton):
    model = llama2.Llama(CONFIG)
    model.lm_head = llama2.QuantizedLinear(torch.empty(320, 68, dtype=torch.uint8), "Q8_0")
    with FakeTensorMode():
        model.norm.weight = nn.Parameter(torch.empty(64, device="cuda"))
    monkeypatch.setattr(llama2.importlib.util, "find_spec", lambda name: triton or None)
    modules = llama2.accelerate(model).modules()
    classes = llama2.CompiledBlock, llama2.CompiledLinear
    assert sum(isinstance(module, classes) for module in modules) == 3 * triton
