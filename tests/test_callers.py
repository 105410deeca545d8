"""What a caller may do to a model, its cache and its inputs: the kernels raise or are right, as torch.

Every case is done to a model of plain quantised layers and to an accelerated copy of it. Both must
raise the same error, or give the same numbers.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import gguf
import pytest
import torch
from torch import nn

import llama2
from test_llama2 import assert_close, needs

pytestmark = needs("accelerate")
CONFIG = llama2.Config(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=100,
    max_position_embeddings=64,
)
TOKENS = torch.tensor([[1, 7, 99, 0, 42, 5, 3]])


@pytest.fixture(scope="module", params=["Q8_0", "F16"])
def models(request):
    """The plain model and its accelerated copy."""
    if not llama2.load_kernels().library:
        pytest.skip(f"no compiled kernels here: {llama2.load_kernels().problem}")
    torch.manual_seed(0)
    plain = llama2.Llama(CONFIG).eval().requires_grad_(False)
    kind = gguf.GGMLQuantizationType[request.param]
    for name, module in list(plain.named_modules()):
        if isinstance(module, nn.Linear):
            blocks = gguf.quants.quantize(module.weight.numpy(), kind).view("uint8")
            linear = llama2.QuantizedLinear(torch.from_numpy(blocks), request.param)
            plain.set_submodule(name, linear)
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
    "smaller heads": lambda: other(num_attention_heads=16),
    "another batch": lambda: llama2.Cache(CONFIG, 2),
    "position at the end": lambda: changed(pos=62),
    "padding": lambda: llama2.PaddedCache(CONFIG, torch.tensor([2])),
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


CHANGES = {  # a change, and whether the kernels still run the layers
    "nothing": (lambda m: None, True),
    "another norm": (lambda m: set_norm(m, torch.full((128,), 3.0)), True),
    "an expanded norm": (lambda m: set_norm(m, torch.tensor([2.0]).expand(128)), False),
    "one number as norm": (lambda m: set_norm(m, torch.tensor([2.0])), False),
    "a norm in place": (lambda m: m.layers[1].input_layernorm.weight.mul_(3), True),
    "eps": (lambda m: setattr(m.layers[0].input_layernorm, "eps", 10.0), False),
    "blocks in place": (lambda m: m.layers[1].mlp.up_proj.blocks.fill_(0), True),
    "blocks' data": (
        lambda m: setattr(m.layers[1].mlp.up_proj.blocks, "data", m.layers[1].mlp.gate_proj.blocks),
        True,
    ),
    "load_state_dict": (assign, True),
    "swapped layers": (swap, False),
    "a hook": (lambda m: m.layers[0].mlp.register_forward_hook(twice), False),
    "a hook before": (
        lambda m: m.layers[0].mlp.up_proj.register_forward_pre_hook(negated),
        False,
    ),
    "a block's hook": (lambda m: m.layers[1].register_forward_hook(twice), False),
    "a module": (lambda m: setattr(m.layers[0], "mlp", nn.Identity()), False),
    "a layer less": (lambda m: m.layers.pop(2), False),
    "bfloat16": (lambda m: m.bfloat16(), False),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_changed_models(models, blocks, name):
    """What stands in the model when it is called counts."""
    change, native = CHANGES[name]
    results = []
    for model in models:
        model = copy.deepcopy(model)
        model(TOKENS, llama2.Cache(CONFIG))
        blocks.clear()
        change(model)
        results.append(outcome(model, TOKENS, llama2.Cache(CONFIG)))
    agree(*results, tolerance=0.05 if name == "bfloat16" else 1e-5)
    assert bool(blocks) != native
    if name not in ("nothing", "bfloat16"):  # the case does what it says
        assert (results[1] - models[0](TOKENS, llama2.Cache(CONFIG))).abs().max() > 1e-3


@torch.no_grad()
def test_hooks_are_called_on_every_path(models):
    """Each once a pass, with and without a cache."""
    model = copy.deepcopy(models[1])
    block = model.layers[1]
    for part in (block, block.input_layernorm, block.self_attn, block.mlp.down_proj, model.lm_head):
        heard = []
        handles = [
            part.register_forward_hook(lambda *args, heard=heard: heard.append(1)),
            part.register_forward_pre_hook(lambda *args, heard=heard: heard.append(1)),
        ]
        cache = llama2.Cache(CONFIG)
        for tokens, held in ((TOKENS, cache), (TOKENS[:, :1], cache), (TOKENS, None)):
            model(tokens, held)
        assert len(heard) == 6
        for handle in handles:
            handle.remove()


def test_the_tree_of_modules_stays(models):
    """The same names and keys; a copy is accelerated, too, and holds no more bytes."""
    plain, native = models
    assert [*dict(native.named_modules())] == [*dict(plain.named_modules())]
    assert native.state_dict().keys() == plain.state_dict().keys()
    dumped = pickle.dumps(native)
    assert len(dumped) < 1.1 * len(pickle.dumps(plain))
    wanted = native(TOKENS, llama2.Cache(CONFIG))
    for model in (copy.deepcopy(native), pickle.loads(dumped), native.to("cpu")):
        assert type(model) is llama2.NativeLlama and model.pack()
        assert torch.equal(model(TOKENS, llama2.Cache(CONFIG)), wanted)
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
    """Gradients pass frozen quantised layers, with respect to x once and twice."""
    gradients = []
    for model in models:
        model = copy.deepcopy(model)
        first = Adapter(model.layers[0].self_attn.q_proj)
        model.layers[0].self_attn.q_proj = first
        model(TOKENS).square().sum().backward()
        gradients.append(first.b.grad)
        x = torch.linspace(-1, 1, 256).view(2, 128).requires_grad_()
        (dx,) = torch.autograd.grad(model.lm_head(x).pow(3).sum(), x, create_graph=True)
        (ddx,) = torch.autograd.grad(dx.square().sum(), x)
        gradients.append(ddx)
    assert_close(gradients[2], gradients[0])
    assert_close(gradients[3], gradients[1])
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
