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


def agree(expected, actual, tolerance=1e-5):
    """Both are the same error, or the same numbers."""
    if isinstance(expected, type) or isinstance(actual, type):
        assert actual == expected
    elif expected.is_meta:
        assert actual.is_meta and actual.shape == expected.shape
    else:
        assert actual.dtype == expected.dtype and actual.shape == expected.shape
        assert torch.allclose(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.fixture
def blocks(monkeypatch):
    """A list that grows with every Block that runs as plain torch."""
    calls = []
    forward = llama2.Block.forward
    monkeypatch.setattr(
        llama2.Block, "forward", lambda *args: calls.append(args[0]) or forward(*args)
    )
    return calls


class Halved(llama2.Cache):
    """Keys are halved."""

    def update(self, layer, k, v):
        return super().update(layer, k / 2, v)


INPUTS = {
    "wider": torch.ones(2, 129),
    "no rows": torch.ones(0, 128),
    "integers": torch.ones(2, 128, dtype=torch.int64),
    "float64": torch.linspace(-1, 1, 256, dtype=torch.float64).view(2, 128),
    "bfloat16": torch.zeros(2, 128, dtype=torch.bfloat16),
    "transposed": torch.linspace(-1, 1, 384).view(128, 3).t(),
    "on meta": torch.ones(2, 128, device="meta"),
    "one dimension": torch.linspace(-1, 1, 128),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_a_layer(models, name):
    agree(*(outcome(model.lm_head, INPUTS[name]) for model in models))


MIXED = llama2.Cache(CONFIG, dtype=torch.float16)
MIXED.v = MIXED.v.bfloat16()
ANGLES = torch.linspace(-1, 1, 5 * 8).view(5, 8)
X = torch.linspace(-1, 1, 5 * 128).view(1, 5, 128)
SEEN = torch.ones(5, 5, dtype=torch.bool)
CALLS = {  # of a Block: what is other than the model would have it
    "no mask": {"mask": None},
    "a mask that shows one more": {"mask": SEEN.tril(1)},
    "numbers as a mask": {"mask": -SEEN.float().triu(1)},
    "a mask of one token": {"x": X[:, :1], "cos": ANGLES[:1], "sin": ANGLES[:1], "mask": SEEN[:1]},
    "angles of one token": {"cos": ANGLES[:1], "sin": ANGLES[:1]},
    "bfloat16": {"x": X.bfloat16()},
    "transposed": {"x": X.mT.contiguous().mT},
    "wider": {"x": torch.ones(1, 5, 160)},
    "two dimensions": {"x": X[0]},
    "a subclass of Cache": {"cache": Halved(CONFIG)},
    "a cache for two": {"cache": llama2.Cache(CONFIG, 2)},
    "a cache of one layer": {"cache": llama2.Cache(replace(CONFIG, num_hidden_layers=1))},
    "a cache of wider heads": {
        "cache": llama2.Cache(replace(CONFIG, head_dim=32, num_key_value_heads=2))
    },
    "a full cache": {"cache": llama2.Cache(CONFIG, 1, 4)},
    "a cache of float64": {"cache": llama2.Cache(CONFIG, dtype=torch.float64)},
    "a cache of two dtypes": {"cache": MIXED},
}


@pytest.mark.parametrize("name", CALLS)
@torch.no_grad()
def test_inputs_of_a_block(models, name):
    call = {"x": X, "cos": ANGLES, "sin": ANGLES, "mask": SEEN.tril()}
    call |= {"cache": llama2.Cache(CONFIG)} | CALLS[name]
    results = [outcome(model.layers[1], *copy.deepcopy([*call.values()])) for model in models]
    agree(*results, tolerance=0.05 if name == "bfloat16" else 1e-5)


def frozen(weight):
    return nn.Parameter(weight, requires_grad=False)


def flipped(model):
    """The sequences of the batch in another order."""
    state = {name: t.flip(0) for name, t in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def other_shape(model):
    model.layers[0].mlp.down_proj = model.layers[0].mlp.gate_proj


NORM = "layers.0.input_layernorm"
CHANGES = {  # a change, or what becomes something else; how many of the three Blocks run as plain torch
    "another norm": (f"{NORM}.weight", frozen(torch.full((128,), 3.0)), 0),
    "an expanded norm": (f"{NORM}.weight", frozen(torch.tensor([2.0]).expand(128)), 1),
    "one number as norm": (f"{NORM}.weight", frozen(torch.tensor([2.0])), 1),
    "a norm in float64": (f"{NORM}.weight", frozen(torch.linspace(1, 2, 128).double()), 3),
    "eps": (f"{NORM}.eps", 10.0, 0),
    "a layer's forward": ("layers.2.self_attn.k_proj.forward", lambda x: x[..., :64], 1),
    "a module": ("layers.0.mlp", nn.Identity(), 1),
    "a dense layer": ("layers.0.self_attn.o_proj", nn.Linear(128, 128), 1),
    "load_state_dict": ("", flipped, 0),
    "swapped layers": ("", lambda m: m.layers.append(m.layers.pop(0)), 0),
    "a layer of another shape": ("", other_shape, 1),
    "bfloat16": ("", nn.Module.bfloat16, 3),
}


@pytest.mark.parametrize("name", CHANGES)
@torch.no_grad()
def test_changed_models(models, blocks, name):
    """What stands in the model when it is called counts."""
    path, change, plain_blocks = CHANGES[name]
    parent, _, last = path.rpartition(".")
    results = []
    for model in models:
        model = copy.deepcopy(model)
        model(TOKENS, llama2.Cache(CONFIG))
        blocks.clear()
        if path:
            setattr(model.get_submodule(parent), last, change)
        else:
            change(model)
        results.append(outcome(model, TOKENS, llama2.Cache(CONFIG)))
    agree(*results, tolerance=0.05 if name == "bfloat16" else 1e-5)
    assert len(blocks) == plain_blocks
    if name not in ("bfloat16", "a layer of another shape"):  # the case does what it says
        assert (results[1] - models[0](TOKENS, llama2.Cache(CONFIG))).abs().max() > 1e-3


@torch.no_grad()
def test_hooks_are_called_on_every_path(models):
    """Each once a pass, with and without a cache; and hooks for all modules."""
    model = copy.deepcopy(models[1])

    def heard_by(register):
        heard = []
        handle = register(lambda module, *args: heard.append(module))
        cache = llama2.Cache(CONFIG)
        for tokens, held in ((TOKENS, cache), (TOKENS[:, :1], cache), (TOKENS, None)):
            model(tokens, held)
        handle.remove()
        return heard

    parts = [*model.layers[1].modules(), model.lm_head]
    assert len(parts) == 13
    for part in parts:
        for register in (part.register_forward_hook, part.register_forward_pre_hook):
            assert heard_by(register) == 3 * [part]
    heard = heard_by(nn.modules.module.register_module_forward_hook)
    assert all(heard.count(module) == 3 for module in {*model.modules()} - {model.layers})


def test_the_tree_of_modules_stays(models, blocks):
    """The same names and keys; a copy is accelerated, too, and holds no more bytes."""
    plain, native = models
    assert [*dict(native.named_modules())] == [*dict(plain.named_modules())]
    assert native.state_dict().keys() == plain.state_dict().keys()
    dumped = pickle.dumps(native)
    assert len(dumped) < 1.1 * len(pickle.dumps(plain))
    expected = native(TOKENS, llama2.Cache(CONFIG))
    for model in (copy.deepcopy(native), pickle.loads(dumped)):
        assert torch.equal(model(TOKENS, llama2.Cache(CONFIG)), expected)
    assert not blocks
    assert copy.deepcopy(native).to("meta")(TOKENS.to("meta")).is_meta


def test_gradients_pass_frozen_layers(models):
    gradients = []
    for model in models:
        x = X.clone().requires_grad_()
        y = model.layers[1](x, ANGLES, ANGLES, SEEN.tril(), llama2.Cache(CONFIG))
        y.square().sum().backward()
        gradients.append(x.grad)
    assert_close(*gradients)


@torch.no_grad()
def test_torch_compile_sees_plain_torch(models):
    torch.compiler.reset()
    plain, native = copy.deepcopy(models)
    for model in (plain, native):
        del model.layers[1:]
    compiled = torch.compile(native, backend="eager", fullgraph=True)
    agree(plain(TOKENS, llama2.Cache(CONFIG)), compiled(TOKENS, llama2.Cache(CONFIG)))
