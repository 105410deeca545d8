"""What a caller may do to a model, its cache and its inputs: the kernels raise or are right, as torch.

Every case is done to a model of plain quantised layers and to an accelerated copy of it. Both must
raise the same error, or give the same numbers.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from test_kernels import model_of
from torch import nn

import llama2
from test_llama2 import assert_close, needs

pytestmark = [needs("accelerate"), pytest.mark.usefixtures("native")]
CHANGE = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
CONFIG = llama2.Config(**CHANGE)
TOKENS = torch.tensor([[1, 7, 99, 0, 42, 5, 3]])


@pytest.fixture(scope="module", params=["Q8_0", "F16"])
def models(request):
    """The plain model and its accelerated copy."""
    plain = model_of([request.param], **CHANGE)
    return plain, llama2.accelerate(copy.deepcopy(plain))


def outcome(act, *arguments):
    """What a call returns, or the type of the error that it raises."""
    try:
        return act(*arguments)
    except (ValueError, RuntimeError, IndexError, TypeError, NotImplementedError) as error:
        return type(error)


def agree(expected, found, tolerance=1e-5):
    """Both are the same error, or the same numbers."""
    if isinstance(expected, type) or isinstance(found, type):
        assert found == expected
    elif expected.is_meta:
        assert found.is_meta and found.shape == expected.shape
    else:
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.allclose(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.fixture
def blocks(monkeypatch):
    """A list that grows with every Block that runs as plain torch."""
    calls = []
    forward = llama2.Block.forward
    monkeypatch.setattr(
        llama2.Block, "forward", lambda *args: calls.append(args[0]) or forward(*args)
    )
    return calls


def other(**change):
    """A cache for another model."""
    return llama2.Cache(replace(CONFIG, **change))


def changed(**change):
    """A cache that somebody has changed."""
    cache = llama2.Cache(CONFIG)
    for name, value in change.items():
        setattr(cache, name, value)
    return cache


class Halved(llama2.Cache):
    """Keys are halved."""

    def update(self, layer, k, v):
        return super().update(layer, k / 2, v)


CACHES = {
    "of this model": lambda: llama2.Cache(CONFIG),
    "float16": lambda: llama2.Cache(CONFIG, dtype=torch.float16),
    "bfloat16": lambda: llama2.Cache(CONFIG, dtype=torch.bfloat16),
    "fewer layers": lambda: other(num_hidden_layers=2),
    "smaller heads": lambda: other(head_dim=8),
    "another batch": lambda: llama2.Cache(CONFIG, 2),
    "position at the end": lambda: changed(pos=62),
    "a subclass": lambda: Halved(CONFIG),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("length", [1, 7, 40])
def test_caches(models, blocks, name, length):
    tokens = torch.arange(length)[None]
    plain = outcome(models[0], tokens, CACHES[name]())
    blocks.clear()
    native = outcome(models[1], tokens, CACHES[name]())
    agree(plain, native, tolerance=2e-3 if "float16" in name else 1e-5)  # rounding ties
    if name in ("of this model", "float16"):
        assert not blocks


INPUTS = {
    "wider": torch.ones(2, 129),
    "no rows": torch.ones(0, 128),
    "integers": torch.ones(2, 128, dtype=torch.int64),
    "float64": torch.linspace(-1, 1, 256, dtype=torch.float64).view(2, 128),
    "transposed": torch.linspace(-1, 1, 384).view(128, 3).t(),
    "every second": torch.linspace(-1, 1, 768).view(3, 256)[:, ::2],
    "on meta": torch.ones(2, 128, device="meta"),
    "three dimensions": torch.linspace(-1, 1, 768).view(2, 3, 128),
    "one dimension": torch.linspace(-1, 1, 128),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_a_layer(models, name):
    agree(*(outcome(model.lm_head, INPUTS[name]) for model in models))


ANGLES = torch.linspace(-1, 1, 5 * 8).view(5, 8)
X = torch.linspace(-1, 1, 5 * 128).view(1, 5, 128)
SEEN = torch.ones(5, 5, dtype=torch.bool)
CALLS = {  # of a Block: what is other than the model would have it
    "nothing": {},
    "no mask": {"mask": None},
    "a mask that shows all": {"mask": SEEN},
    "a mask that shows one more": {"mask": SEEN.tril(1)},
    "numbers as a mask": {"mask": -SEEN.float().triu(1)},
    "a mask of one token": {"x": X[:, :1], "cos": ANGLES[:1], "sin": ANGLES[:1], "mask": SEEN[:1]},
    "angles of a sequence": {"cos": ANGLES[None], "sin": ANGLES[None]},
    "angles of one token": {"cos": ANGLES[:1], "sin": ANGLES[:1]},
    "bfloat16": {"x": X.bfloat16()},
    "wider": {"x": torch.ones(1, 5, 160)},
    "two dimensions": {"x": X[0]},
    "two sequences": {"x": X.repeat(2, 1, 1)},
    "a cache for two": {"cache": llama2.Cache(CONFIG, 2)},
    "a cache of wider heads": {"cache": other(head_dim=32, num_key_value_heads=2)},
    "a full cache": {"cache": changed(pos=60)},
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_inputs_of_a_block(models, name):
    results = []
    for model in models:
        call = {"x": X, "cos": ANGLES, "sin": ANGLES, "mask": SEEN.tril()}
        call |= {"cache": llama2.Cache(CONFIG)} | copy.deepcopy(CALLS[name])
        results.append(outcome(model.layers[1], *call.values()))
    agree(*results, tolerance=0.05 if name == "bfloat16" else 1e-5)


def set_norm(model, weight):
    model.layers[0].input_layernorm.weight = nn.Parameter(weight, requires_grad=False)


def swap(model):
    layers = model.layers
    layers[0], layers[1] = layers[1], layers[0]


def assign(model):
    state = model.state_dict()
    doubled = {k: w.clone() if w.dtype == torch.uint8 else 2 * w for k, w in state.items()}
    model.load_state_dict(doubled, assign=True)


def negated(module, arguments):
    return tuple(-argument for argument in arguments)


def twice(module, arguments, y):
    return 2 * y


def double_forward(module):
    forward = type(module).forward
    module.forward = lambda *arguments: 2 * forward(module, *arguments)


def gate_as_down(model):
    mlp = model.layers[0].mlp
    mlp.down_proj = mlp.gate_proj


def dense_layer(model):
    layer = nn.Linear(128, 128)
    nn.init.constant_(layer.weight, 0.01)
    nn.init.ones_(layer.bias)
    model.layers[0].self_attn.o_proj = layer


CHANGES = {  # a change, and how many of the three Blocks run as plain torch then
    "nothing": (lambda m: None, 0),
    "another norm": (lambda m: set_norm(m, torch.full((128,), 3.0)), 0),
    "an expanded norm": (lambda m: set_norm(m, torch.tensor([2.0]).expand(128)), 1),
    "one number as norm": (lambda m: set_norm(m, torch.tensor([2.0])), 1),
    "a norm in float64": (lambda m: set_norm(m, torch.linspace(1, 2, 128).double()), 3),
    "a norm in place": (lambda m: m.layers[1].input_layernorm.weight.mul_(3), 0),
    "eps": (lambda m: setattr(m.layers[0].input_layernorm, "eps", 10.0), 0),
    "blocks in place": (lambda m: m.layers[1].mlp.up_proj.blocks.fill_(0), 0),
    "blocks' data": (
        lambda m: setattr(m.layers[1].mlp.up_proj.blocks, "data", m.layers[1].mlp.gate_proj.blocks),
        0,
    ),
    "load_state_dict": (assign, 0),
    "swapped layers": (swap, 0),
    "a layer less": (lambda m: m.layers.pop(2), 0),
    "a hook": (lambda m: m.layers[0].mlp.register_forward_hook(twice), 1),
    "a hook before": (lambda m: m.layers[0].mlp.up_proj.register_forward_pre_hook(negated), 1),
    "a block's hook": (lambda m: m.layers[1].register_forward_hook(twice), 0),
    "a layer's forward": (lambda m: double_forward(m.layers[2].self_attn.k_proj), 1),
    "attention's forward": (lambda m: double_forward(m.layers[2].self_attn), 1),
    "a block's forward": (lambda m: setattr(m.layers[1], "forward", lambda x, *args: 2 * x), 0),
    "a module": (lambda m: setattr(m.layers[0], "mlp", nn.Identity()), 1),
    "a dense layer": (dense_layer, 1),
    "a layer of another shape": (gate_as_down, 1),
    "bfloat16": (lambda m: m.bfloat16(), 3),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_changed_models(models, blocks, name):
    """What stands in the model when it is called counts."""
    change, plain_blocks = CHANGES[name]
    results = []
    for model in models:
        model = copy.deepcopy(model)
        model(TOKENS, llama2.Cache(CONFIG))
        blocks.clear()
        change(model)
        results.append(outcome(model, TOKENS, llama2.Cache(CONFIG)))
    agree(*results, tolerance=0.05 if name == "bfloat16" else 1e-5)
    assert len(blocks) == plain_blocks
    if name not in (
        "nothing",
        "bfloat16",
        "a layer of another shape",
    ):  # the case does what it says
        assert (results[1] - models[0](TOKENS, llama2.Cache(CONFIG))).abs().max() > 1e-3


@torch.no_grad()
def test_hooks_are_called_on_every_path(models):
    """Each once a pass, with and without a cache; and those that are for all modules."""
    model = copy.deepcopy(models[1])
    parts = [*model.layers[1].modules(), model.lm_head]
    assert len(parts) == 13
    for part in parts:
        heard = []
        handles = [
            part.register_forward_hook(lambda *args, heard=heard: heard.append(1)),
            part.register_forward_pre_hook(lambda *args, heard=heard: heard.append(1)),
        ]
        cache = llama2.Cache(CONFIG)
        for tokens, held in ((TOKENS, cache), (TOKENS[:, :1], cache), (TOKENS, None)):
            model(tokens, held)
        assert len(heard) == 6, part
        for handle in handles:
            handle.remove()
    heard = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, *args: heard.append(m))
    model(TOKENS, llama2.Cache(CONFIG))
    handle.remove()
    assert {*model.modules()} - {*heard} == {model.layers}


def test_the_tree_of_modules_stays(models, blocks):
    """The same names and keys; a copy is accelerated, too, and holds no more bytes."""
    plain, native = models
    assert [*dict(native.named_modules())] == [*dict(plain.named_modules())]
    assert native.state_dict().keys() == plain.state_dict().keys()
    dumped = pickle.dumps(native)
    assert len(dumped) < 1.1 * len(pickle.dumps(plain))
    wanted = native(TOKENS, llama2.Cache(CONFIG))
    for model in (copy.deepcopy(native), pickle.loads(dumped), native.to("cpu")):
        assert torch.equal(model(TOKENS, llama2.Cache(CONFIG)), wanted)
    assert not blocks
    assert copy.deepcopy(native).to("meta")(TOKENS.to("meta")).is_meta


class Adapter(nn.Module):
    """y + B A x beside a frozen layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.a = nn.Parameter(torch.linspace(-0.1, 0.1, 128 * 4).view(4, 128))
        self.b = nn.Parameter(torch.linspace(-0.1, 0.1, 128 * 4).view(128, 4))

    def forward(self, x):
        return self.layer(x) + x @ self.a.T @ self.b.T


def test_adapters_around_the_kernels_learn(models):
    """Gradients pass frozen quantised layers."""
    gradients = []
    for model in models:
        model = copy.deepcopy(model)
        first = Adapter(model.layers[0].self_attn.q_proj)
        model.layers[0].self_attn.q_proj = first
        model(TOKENS).square().sum().backward()
        gradients.append(first.b.grad)
    assert_close(*gradients)
    assert gradients[0].abs().max() > 0


@pytest.mark.parametrize("models", ["Q8_0"], indirect=True)
@torch.no_grad()
def test_torch_compile_sees_plain_torch(models):
    torch.compiler.reset()
    plain, native = copy.deepcopy(models)
    for model in (plain, native):
        del model.layers[1:]
    compiled = torch.compile(native, backend="eager", fullgraph=True)
    agree(plain(TOKENS, llama2.Cache(CONFIG)), compiled(TOKENS, llama2.Cache(CONFIG)))
