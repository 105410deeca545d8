"""What a caller may do to a model, its cache and its inputs: the kernels raise or are right, as torch.

Every case is done to a model of plain quantised layers and to an accelerated copy of it. Both must
raise the same error, or give the same numbers.
"""

import copy
import json
import pickle
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from recorded import graph  # noqa: F401
from test_kernels import model_of
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import llama2
from test_llama2 import arrange, in_steps, needs_kernels

pytestmark = [needs_kernels, pytest.mark.usefixtures("native", "no_grad")]
CHANGE = json.loads("""{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3,
"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 100, "max_position_embeddings": 64}""")
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
    except Exception as error:  # noqa: BLE001
        return type(error)


def agree(expected, actual, tolerance=1e-5):
    """Both are the same error, or the same numbers."""
    if isinstance(actual, type):
        assert actual == expected
    else:
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


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

    def update(self, k, v):
        return super().update(k / 2, v)


MIXED = llama2.Cache(CONFIG, dtype=torch.float16)
MIXED.v = MIXED.v.bfloat16()
ANGLES = torch.linspace(-1, 1, 40).view(5, 8)
X = torch.linspace(-1, 1, 640).view(1, 5, 128)
SEEN = torch.ones(5, 5, dtype=torch.bool)
CALLS = {  # which argument of a Block is other than the model would have it, and how
    "x wider": X.repeat(1, 1, 2),
    "x without tokens": X[:, :0],
    "x of 32-bit integers": (9 * X).int(),
    "x in float64": X.double(),
    "x in bfloat16": X.bfloat16(),
    "x transposed": X.mT.contiguous().mT,
    "x on meta": X.to("meta"),
    "x of two dimensions": X[0],
    "x of one token": X[:, :1],
    "cos of one token": ANGLES[:1],
    "sin of one token": ANGLES[:1],
    "mask missing": None,
    "mask that shows one more": SEEN.tril(1),
    "mask of numbers": -SEEN.float().triu(1),
    "mask of the causal one's numbers": SEEN.float().tril(),
    "cache of a subclass": Halved(CONFIG),
    "cache for two": llama2.Cache(CONFIG, 2),
    "cache of one layer": llama2.Cache(replace(CONFIG, num_hidden_layers=1)),
    "cache of wider heads": llama2.Cache(replace(CONFIG, head_dim=32, num_key_value_heads=2)),
    "cache too short": llama2.Cache(CONFIG, 1, 4),
    "cache in float64": llama2.Cache(CONFIG, dtype=torch.float64),
    "cache of two dtypes": MIXED,
}


@pytest.mark.parametrize("name", CALLS)
def test_inputs_of_a_layer_and_a_block(models, name):
    call = {"x": X, "cos": ANGLES, "sin": ANGLES, "mask": SEEN.tril()}
    call |= {"cache": llama2.Cache(CONFIG), name.split()[0]: CALLS[name]}
    tolerance = 0.05 if "bfloat16" in name else 1e-5
    agree(*(outcome(model.lm_head, call["x"]) for model in models), tolerance)
    results = [outcome(model.layers[1], *copy.deepcopy([*call.values()])) for model in models]
    agree(*results, tolerance)


NORM = "layers.0.input_layernorm"
CHANGES = {  # a change, or what becomes something else; how many of the three Blocks run as plain torch
    "another norm": (f"{NORM}.weight", nn.Parameter(torch.full((128,), 3.0)), 0),
    "a norm in float64": (f"{NORM}.weight", nn.Parameter(torch.linspace(1, 2, 128).double()), 3),
    "eps": (f"{NORM}.eps", 10.0, 0),
    "a layer's forward": ("layers.2.self_attn.k_proj.forward", lambda x: x[..., :64], 1),
    "a module": ("layers.0.mlp", nn.Identity(), 1),
    "a dense layer": ("layers.0.self_attn.o_proj", nn.Linear(128, 128), 1),
    "load_state_dict": (
        "",
        lambda m: m.load_state_dict(
            {name: t.flip(0) for name, t in m.state_dict().items()}, assign=True
        ),
        0,
    ),
    "swapped layers": ("", lambda m: m.layers.append(m.layers.pop(0)), 0),
    "a layer of another shape": (
        "",
        lambda m: setattr(m.layers[0].mlp, "down_proj", m.layers[0].mlp.gate_proj),
        1,
    ),
    "a buffer as norm": ("", lambda m: elsewhere(m.get_submodule(NORM), "register_buffer"), 1),
    "an attribute as norm": ("", lambda m: elsewhere(m.get_submodule(NORM), "__setattr__"), 1),
    "blocks that are an attribute": (
        "",
        lambda m: elsewhere(m.layers[0].mlp.up_proj, "__setattr__"),
        1,
    ),
    "a function as MLP": ("", lambda m: elsewhere(m.layers[0], "__setattr__", "mlp", torch.sin), 1),
    "bfloat16": ("", nn.Module.bfloat16, 3),
}


def elsewhere(module, register, name=None, new=None):
    """Make a parameter, buffer or module of a module another thing, which is called the same."""
    name = name or next(iter({**module._parameters, **module._buffers}))
    old = getattr(module, name)
    if new is None:
        old = old.detach()
        new = old.flip(0) if old.dtype == torch.uint8 else torch.linspace(1, 3, len(old))
    delattr(module, name)
    getattr(module, register)(name, new)


def change_model(model, path, change):
    """Do one of CHANGES; returns what it returns."""
    if not path:
        return change(model)
    parent, _, last = path.rpartition(".")
    return setattr(model.get_submodule(parent), last, change)


@pytest.mark.parametrize("name", CHANGES)
def test_changed_models(models, blocks, name):
    """What stands in the model when it is called counts."""
    results = []
    for model in models:
        model = copy.deepcopy(model)
        model(TOKENS, llama2.Cache(CONFIG))
        blocks.clear()
        change_model(model, *CHANGES[name][:2])
        results.append(outcome(model, TOKENS, llama2.Cache(CONFIG)))
    agree(*results, tolerance=0.05 if name == "bfloat16" else 1e-5)
    assert len(blocks) == CHANGES[name][2]
    if name not in ("bfloat16", "a layer of another shape"):  # the case does what it says
        assert (results[1] - models[0](TOKENS, llama2.Cache(CONFIG))).abs().max() > 1e-3


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("places", [[0, 1, 1, 2, 1], [2, 0, 1], [2], [0, None, 1, None]])
def test_layers_repeated_moved_and_removed(models, blocks, places, copied):
    """The kernels store keys and values where the layer stands in the list."""
    plain, native = (arrange(model, places, copied) for model in models)
    expected = plain(TOKENS)
    blocks.clear()
    for steps in ([7], [1] * 7, [4, 1, 2]):
        actual = in_steps(native, TOKENS, steps, native.new_cache())
        agree(expected, actual)
    assert not blocks  # none of them ran as plain torch


def test_hooks_are_called_on_every_path(models):
    """Each once a pass, with and without a cache; and hooks for all modules."""
    model = models[1]
    of_all, everywhere = nn.modules.module, {*model.modules()} - {model.layers}
    hooks = [
        (of_all.register_module_forward_hook, everywhere),
        (of_all.register_module_forward_pre_hook, everywhere),
    ]
    for part in (*model.layers[1].modules(), model.lm_head):
        hooks += [(part.register_forward_hook, {part}), (part.register_forward_pre_hook, {part})]
    heard = []
    for register, expected in hooks:
        handle = register(lambda module, *args: heard.append(module))
        cache = llama2.Cache(CONFIG)
        for tokens, held in ((TOKENS, cache), (TOKENS[:, :1], cache), (TOKENS, None)):
            model(tokens, held)
        handle.remove()
        assert Counter(heard) == dict.fromkeys(expected, 3)
        heard.clear()


def test_the_tree_of_modules_stays(models, blocks):
    """The same keys; a copy is accelerated, too, and holds no more bytes."""
    plain, native = models
    assert native.state_dict().keys() == plain.state_dict().keys()
    dumped = pickle.dumps(native)
    assert len(dumped) < 1.1 * len(pickle.dumps(plain))
    expected = native(TOKENS, llama2.Cache(CONFIG))
    for model in (copy.deepcopy(native), pickle.loads(dumped)):
        assert torch.equal(model(TOKENS, llama2.Cache(CONFIG)), expected)
    assert not blocks
    on_meta = TOKENS.to("meta")
    assert copy.deepcopy(native).to("meta")(on_meta).is_meta
    assert outcome(native, on_meta) == outcome(plain, on_meta)


def test_gradients_pass_frozen_layers(models):
    def loss(x, model):
        y = model.layers[1](x, ANGLES, ANGLES, SEEN.tril(), llama2.Cache(CONFIG))
        return y.square().sum()

    agree(*(torch.func.grad(loss)(X, model) for model in models), 1e-4)


def test_forward_mode_derivatives_pass_every_path(models):
    """A kernel would drop them; with and without a cache."""
    forward_ad = torch.autograd.forward_ad
    for model_part in (lambda m: m.lm_head, lambda m: m.layers[1]):
        results = []
        for model in models:
            for cache in (None, llama2.Cache(CONFIG)):
                part = model_part(model)
                rest = () if part is model.lm_head else (ANGLES, ANGLES, SEEN.tril(), cache)
                with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):  # flash has none
                    y = part(forward_ad.make_dual(X, X.cos()), *rest)
                    results.append(forward_ad.unpack_dual(y).tangent)
        for tangent in results[1:]:
            agree(results[0], tangent, 1e-4)


def test_torch_compile_sees_plain_torch():
    torch.compiler.reset()
    plain = model_of(["Q8_0", "F16"], **CHANGE | {"num_hidden_layers": 1})
    native = llama2.accelerate(copy.deepcopy(plain))
    compiled = torch.compile(native, backend="eager", fullgraph=True)
    agree(*(model(TOKENS, llama2.Cache(plain.config)) for model in (plain, compiled)))


def double(module, *arguments):
    return arguments[-1] * 2


def blocks_of(model):
    return model.layers[1].mlp.up_proj.blocks


MORE_CHANGES = {  # of a model, whatever was done to it before
    "a hook": lambda m: m.layers[1].self_attn.register_forward_hook(double),
    "a pre-hook": lambda m: m.layers[2].mlp.gate_proj.register_forward_pre_hook(double),
    "a hook of all": lambda m: nn.modules.module.register_module_forward_hook(double),
    "a pre-hook of all": lambda m: nn.modules.module.register_module_forward_pre_hook(double),
    "other blocks in place": lambda m: blocks_of(m).copy_(blocks_of(m).flip(0)),
    "other blocks": lambda m: setattr(blocks_of(m), "data", blocks_of(m).flip(0)),
    "fewer blocks": lambda m: setattr(blocks_of(m), "data", blocks_of(m)[:8]),
    "share_memory": nn.Module.share_memory,
    "a copy": copy.deepcopy,
    "a pickle": lambda m: pickle.loads(pickle.dumps(m)),
}
MORE_CHANGES |= {
    name: partial(change_model, path=path, change=change)
    for name, (path, change, _) in CHANGES.items()
    if name != "bfloat16"
}


# --------------------------------------------------------------------------------------------------
# Between steps: whatever changes, a graph would go on with what it was captured with


class HalfMLP(llama2.MLP):
    """Its own class is all that differs."""

    def forward(self, x):
        return super().forward(x) / 2


def overflow(model, cache, of_a_copy=False):
    """Two steps that leave NaN in the cache, of the model or of a copy, then back to where it was."""
    start = cache.pos
    model = copy.deepcopy(model) if of_a_copy else model
    weight = model.layers[1].input_layernorm.weight
    kept = weight.clone()
    weight.fill_(torch.nan)
    for _ in range(2):
        model(TOKENS[:, :1], cache)
    weight.copy_(kept)
    cache.truncate(start)


def as_integers(model, cache):
    """The same memory for the values, as another dtype."""
    cache.v.zero_()
    cache.v = cache.v.view(torch.int32)


def hold(model, name, change):
    """Change where the data of a norm lies, how it is arranged, or what it is, and nothing else."""
    weight = model.get_submodule(name).weight
    weight.data = change(weight.data)


FIRST, LAST = "layers.0.input_layernorm", "layers.2.post_attention_layernorm"
BETWEEN_STEPS = {  # what is done to a model and its cache; most change one thing that is compared
    "nothing": lambda m, c: None,
    "address of a weight": lambda m, c: hold(m, FIRST, lambda t: t.flip(0)),
    "shape of a weight": lambda m, c: hold(m, FIRST, lambda t: t[:1]),
    "strides of a weight": lambda m, c: hold(m, FIRST, lambda t: t.as_strided((128,), (0,))),
    "dtype of a weight": lambda m, c: hold(m, LAST, lambda t: t.view(torch.bfloat16)[:128]),
    "a class": lambda m, c: setattr(m.layers[1].mlp, "__class__", HalfMLP),
    "keys": lambda m, c: setattr(c, "k", c.k * 2),
    "values": lambda m, c: setattr(c, "v", c.v.flip(3)),
    "dtype of values": as_integers,
    "shape of cos": lambda m, c: setattr(c, "cos", c.cos[:, :1]),
    "strides of cos": lambda m, c: setattr(c, "cos", c.cos.as_strided(c.cos.shape, (0, 1))),
    "sin": lambda m, c: setattr(c, "sin", -c.sin),
    "NaN in keys": lambda m, c: c.k[:, :, :, c.pos + 1 :].fill_(torch.nan),
    "NaN in values": lambda m, c: c.v[:, :, :, c.pos + 1 :].fill_(torch.nan),
    "overflow": overflow,
    "overflow of another model": partial(overflow, of_a_copy=True),
    "truncate": lambda m, c: c.truncate(c.pos // 2),
    "reset": lambda m, c: c.reset(),
    "a prompt": lambda m, c: m(TOKENS, c),
}
BETWEEN_STEPS |= {
    name: lambda m, c, change=change: copy.deepcopy(change)(m)
    for name, change in MORE_CHANGES.items()
}


@pytest.mark.filterwarnings("ignore:decode steps are slow")
@pytest.mark.parametrize("captured", [False, True], ids=["kernels", "captured"])
@pytest.mark.parametrize("name", BETWEEN_STEPS)
def test_changes_between_steps(graph, name, captured):  # noqa: F811
    """One change, then two others: all logits are those of a plain model, and stay what they are."""
    r = random.Random(name)
    heads, kv_heads, head_dim = r.choice([(8, 4, 16), (8, 8, 8), (32, 8, 20), (16, 16, 36)])
    heads = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    plain = model_of(r.choices(["Q8_0", "Q4_0", "Q5_1", "F16"], k=3), **CHANGE | heads)
    plain.get_submodule(FIRST).weight.data = torch.linspace(0.5, 2, 128)
    dtype = r.choice([torch.half, torch.float])
    models = [copy.deepcopy(plain), copy.deepcopy(plain)]
    graph.accelerate(models[1], False) if captured else llama2.accelerate(models[1])
    caches = [llama2.Cache(plain.config, 1, 60, dtype) for _ in models]
    kept, hooks = [], []
    try:
        for change in ("a prompt", name, *r.sample([*BETWEEN_STEPS], 2)):
            results = [outcome(BETWEEN_STEPS[change], *p) for p in zip(models, caches)]
            if isinstance(results[0], llama2.Llama):
                models = results
            if hasattr(results[0], "remove"):
                hooks += results
            for count in (1, 1, 1, r.choice([1, 2, 9])):
                tokens = torch.tensor([r.choices(range(100), k=count)])
                results = [outcome(*call) for call in zip(models, [tokens] * 2, caches)]
                agree(*results, 0.01)
                kept.append((results[1], copy.deepcopy(results[1])))
    finally:
        for hook in hooks:
            hook.remove()
    for logits, as_they_were in kept:
        agree(as_they_were, logits, 0)
