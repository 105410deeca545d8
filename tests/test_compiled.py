"""Compiled steps: what they give, what they allocate, when they give way to plain torch."""

from __future__ import annotations

import contextlib
import copy
import shutil

import pytest
import torch
import torch.nn.functional as F
from helpers import CONFIG, TOKENS, assert_close, needs, random_blocks
from torch import nn
from torch._inductor import metrics
from torch._subclasses.fake_tensor import FakeTensorMode

import llama2

pytestmark = needs("accelerate", "CompiledLayers")
COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.fixture
def uncompiled(monkeypatch):
    """Every function as it is: the tensors of a step without the seconds of a compiler."""
    monkeypatch.setattr(llama2, "compiled", lambda function, dynamic=None: function)


def pair(model):
    """A model, and a copy with compiled layers."""
    fast = copy.deepcopy(model)
    fast.layers = llama2.CompiledLayers(fast.layers)
    return model, fast


@pytest.mark.skipif(not COMPILER, reason="Inductor needs a C++ compiler")
@torch.no_grad()
def test_by_inductor():
    """The real compiler: float32 to 1e-5, one compilation for all blocks, windows and caches.

    A step goes once through the keys and values that it attends to, and copies none of them.
    """
    config = llama2.Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=50,
        max_position_embeddings=70000,
    )
    torch.manual_seed(0)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    metrics.reset()
    plain, fast = pair(llama2.Llama(config).requires_grad_(False))
    token = torch.zeros(1, 1, dtype=torch.int64)
    cache = llama2.Cache(config)
    cache.pos = 40000  # its window has 65,536 slots: 8.4 MB of keys and values a layer
    with contextlib.suppress(ValueError):  # an older torch
        torch._logging.set_logs(inductor_metrics=True)  # that is what counts
    try:
        fast(token, cache)
    finally:
        torch._logging.set_logs()
    # 0: Inductor's own cache has this very code, which was counted when it was compiled.
    assert metrics.num_bytes_accessed < 1.5 * 65536 * 2 * 16 * 4
    for size in (1100, 520):
        ours, theirs = (llama2.Cache(config, 1, size) for _ in range(2))
        fast(torch.arange(506)[None] % 50, ours), plain(torch.arange(506)[None] % 50, theirs)
        for _ in range(9):  # past 512, from one window to the next
            assert_close(fast(token, ours), plain(token, theirs), 1e-5)
        assert ours.pos == theirs.pos == 515
        assert_close(ours.k[:, :, :, :515], theirs.k[:, :, :, :515], 1e-5)
        assert not ours.k[:, :, :, 515:].any()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("padding", [None, [0, 3]])
@torch.no_grad()
def test_steps_equal_plain_ones(model, padding, monkeypatch):
    """Prompts between them, truncated caches, rows of different lengths, several caches in turn."""
    plain, fast = pair(model)
    made, create = [], llama2.CompiledStep.__init__
    monkeypatch.setattr(
        llama2.CompiledStep, "__init__", lambda *args: made.append(1) or create(*args)
    )

    def fresh():
        if padding is None:
            return llama2.Cache(CONFIG, 2)
        return llama2.PaddedCache(CONFIG, torch.tensor(padding))

    pairs = [(fresh(), fresh()) for _ in range(2)]
    for part in TOKENS[:2].split([20, 1, 1, 3, 1, 14], dim=1):
        for ours, theirs in pairs:
            assert_close(fast(part, ours), plain(part, theirs), 1e-5)
    for ours, theirs in pairs:
        assert ours.pos == theirs.pos == 40
        ours.truncate(30), theirs.truncate(30)
        assert_close(fast(TOKENS[:2, :1], ours), plain(TOKENS[:2, :1], theirs), 1e-5)
    assert len(made) == 2  # one for each cache


@pytest.mark.usefixtures("uncompiled")
def test_generation(model):
    """Every way to generate takes the steps, as it takes any layers."""
    results = []
    for each in pair(model):
        greedy, prompts = llama2.Sampling(temperature=0), [[1, 5, 9], [1, 7]]
        alone = [list(llama2.generate(each, ids, greedy, max_new_tokens=8)) for ids in prompts]
        together = list(llama2.generate_batch(each, prompts, greedy, max_new_tokens=8))
        results.append((alone, together))
    assert results[0] == results[1] and len(results[0][0][0]) == 8
    assert len(each.layers.memory[1]) <= 3  # steps go with their caches


def another_block(model):
    torch.manual_seed(3)
    model.layers[1] = llama2.Block(model.config, 1).requires_grad_(False)


def hook(model):
    model.layers[0].mlp.down_proj.register_forward_hook(lambda module, args, y: 2 * y)


CHANGES = {
    "another block": another_block,
    "a hook": hook,
    "a forward": lambda m: setattr(m.layers[0].mlp, "forward", lambda x: 0 * x),
    "a module": lambda m: setattr(m.layers[0], "mlp", nn.Identity()),
    "eps": lambda m: setattr(m.layers[0].input_layernorm, "eps", 3.0),
    "data": lambda m: setattr(m.layers[0].input_layernorm.weight, "data", torch.full((64,), 3.0)),
    "weights": lambda m: m.load_state_dict({k: 2 * t for k, t in m.state_dict().items()}),
    "fewer layers": lambda m: setattr(m, "layers", m.layers[:1]),
    "bfloat16": lambda m: m.bfloat16(),
}


@pytest.mark.usefixtures("uncompiled")
@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_what_was_changed_counts(model, name):
    """After a step was captured."""
    results = []
    for each in pair(model):
        each, cache = copy.deepcopy(each), llama2.Cache(CONFIG)
        before = [each(TOKENS[:1, i : i + 1], cache) for i in range(2)]
        CHANGES[name](each)
        if name == "fewer layers":
            each.config = llama2.replace(CONFIG, num_hidden_layers=1)
            cache.k, cache.v = cache.k[:1], cache.v[:1]
        results.append(each(TOKENS[:1, 2:3], cache))
    assert_close(results[1], results[0], 1e-2 if name == "bfloat16" else 1e-5)
    assert before and (results[0] - model(TOKENS[:1, :3])[:, -1]).abs().max() > 1e-4


@pytest.mark.usefixtures("uncompiled")
@torch.no_grad()
def test_other_tensors_in_a_cache_count(model):
    """cache.k, cache.v = saved: the step is made anew, and writes to these."""
    plain, fast = pair(model)
    ours, theirs = llama2.Cache(CONFIG), llama2.Cache(CONFIG)
    for i in range(3):
        fast(TOKENS[:1, i : i + 1], ours), plain(TOKENS[:1, i : i + 1], theirs)
    saved = [t.clone() for t in (ours.k, ours.v)]
    for i in range(3, 6):
        fast(TOKENS[:1, i : i + 1], ours)
    ours.k, ours.v = saved
    ours.truncate(3)
    for i in (9, 10):
        step = TOKENS[:1, i : i + 1]
        assert_close(fast(step, ours), plain(step, theirs), 1e-5)
    assert_close(ours.k, theirs.k, 1e-5)


@pytest.mark.usefixtures("uncompiled")
@torch.no_grad()
def test_masks_and_caches_of_the_callers_own(model):
    """A mask is obeyed by the step; another update goes to the blocks."""
    results = []
    for each in pair(model):
        cache = llama2.Cache(CONFIG)
        each(TOKENS[:1, :7], cache)
        mask = torch.arange(8)[None] > 3
        x = torch.linspace(-1, 1, 64).view(1, 1, 64)
        masked = each.layers(x, *cache.rope(1), mask, cache)
        cache.update = lambda layer, k, v, c=cache: llama2.Cache.update(c, layer, k, 2 * v)
        results.append((masked, each(TOKENS[:1, 7:8], cache)))
    for found, wanted in zip(results[1], results[0], strict=True):
        assert_close(found, wanted, 1e-5)


@torch.no_grad()
def test_copies_of_a_compiled_model(model, monkeypatch):
    monkeypatch.setattr(llama2, "compiled", lambda function, dynamic=None: function)
    _, fast = pair(model)
    cache = llama2.Cache(CONFIG)
    first = fast(TOKENS[:1, :1], cache)
    other = copy.deepcopy(fast)
    assert fast.layers.memory and not other.layers.memory
    assert type(other.layers[1:]) is llama2.CompiledLayers
    assert torch.equal(other(TOKENS[:1, :1], llama2.Cache(CONFIG)), first)


@pytest.mark.parametrize("kind", sorted(llama2.GGML_TYPES.keys() - llama2.DENSE))
@torch.no_grad()
def test_products_compile_as_one_graph(kind, monkeypatch):
    """What a GPU runs: traced whole, one row as a sum, more as a product of matrices."""
    blocks = torch.from_numpy(random_blocks(kind, 40, 256, seed=0))
    monkeypatch.setattr(llama2, "compiled", lambda function, dynamic=None: function)
    layer = llama2.CompiledLinear(blocks, kind)
    torch.compiler.reset()  # the limit on recompilations is for all tests together
    traced = torch.compile(layer, backend="eager", fullgraph=True)
    wanted = llama2.dequantize(blocks, kind)
    for shape in ((1, 256), (1, 1, 256), (256,), (4, 256), (2, 3, 256)):
        x = torch.randn(shape)
        calls = (layer, traced) if shape in ((1, 256), (4, 256)) else (layer,)
        for found in (call(x) for call in calls):
            assert found.shape == (*shape[:-1], 40)
            assert_close(found, F.linear(x, wanted), 1e-5)
        assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_gradients_pass_a_compiled_product(monkeypatch):
    blocks = torch.from_numpy(random_blocks("Q8_0", 40, 256, seed=0))
    monkeypatch.setattr(llama2, "compiled", lambda function, dynamic=None: function)
    x = torch.randn(1, 256, requires_grad=True)
    llama2.CompiledLinear(blocks, "Q8_0")(x).sum().backward()
    assert_close(x.grad, llama2.dequantize(blocks, "Q8_0").sum(0, keepdim=True), 1e-5)


@pytest.mark.parametrize("triton", [True, False])
def test_accelerate_on_cuda(model, monkeypatch, triton):
    """Every caller gets compiled layers from here: load(), the command line, the server."""
    model = copy.deepcopy(model)
    blocks = torch.from_numpy(random_blocks("Q8_0", 320, 64, seed=0))
    model.lm_head = llama2.QuantizedLinear(blocks, "Q8_0")
    with FakeTensorMode():
        model.norm.weight = nn.Parameter(torch.empty(64, device="cuda"), requires_grad=False)
    monkeypatch.setattr(llama2.importlib.util, "find_spec", lambda name: triton or None)
    with pytest.warns(UserWarning, match="waits for torch.compile" if triton else "triton"):
        assert llama2.accelerate(model) is model
    assert isinstance(model.layers, llama2.CompiledLayers) == triton
    assert isinstance(model.lm_head, llama2.CompiledLinear) == triton
