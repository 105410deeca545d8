"""What a caller may do to a model, its cache and its inputs: the kernels raise or are right, as torch.

Every case is done to a model of plain quantised layers and to an accelerated copy of it. Both must
raise the same error, or give the same numbers; the kernels must not see what they would misread.
"""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef

import llama2

gguf = pytest.importorskip("gguf")
if not hasattr(llama2, "accelerate"):
    pytest.skip("this copy of llama2.py has no part III", allow_module_level=True)

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
    torch.manual_seed(0)
    plain = llama2.Llama(CONFIG).eval().requires_grad_(False)
    kind = gguf.GGMLQuantizationType[request.param]
    for name, module in list(plain.named_modules()):
        if isinstance(module, nn.Linear):
            blocks = gguf.quants.quantize(module.weight.numpy(), kind).view("uint8")
            linear = llama2.QuantizedLinear(torch.from_numpy(blocks), request.param)
            plain.set_submodule(name, linear)
    native = llama2.accelerate(copy.deepcopy(plain.eval()))
    if not llama2.kernels().library:
        pytest.skip(f"no compiled kernels here: {llama2.kernels().problem}")
    assert isinstance(native.layers, llama2.NativeLayers)
    return plain, native


def outcome(act, *arguments):
    """What a call returns, or the type of the error that it raises."""
    try:
        return act(*arguments)
    except (ValueError, RuntimeError, IndexError, TypeError, NotImplementedError) as error:
        return type(error)


def agree(expected, found, tolerance=1e-5) -> None:
    """Both are the same error, or the same numbers."""
    if isinstance(expected, type) or isinstance(found, type):
        assert found == expected
    else:
        assert found.dtype == expected.dtype and found.shape == expected.shape
        assert torch.allclose(found.float(), expected.float(), atol=tolerance, rtol=tolerance)


# --------------------------------------------------------------------------------------------------
# Caches


def fresh(**change) -> llama2.Cache:
    """A cache for another model, or for this one."""
    return llama2.Cache(replace(CONFIG, **change))


def changed(**change) -> llama2.Cache:
    """A cache that somebody has changed."""
    cache = llama2.Cache(CONFIG)
    for name, value in change.items():
        setattr(cache, name, value)
    return cache


CACHES = {
    "of this model": fresh,
    "fewer layers": lambda: fresh(num_hidden_layers=2),
    "more layers": lambda: fresh(num_hidden_layers=4),
    "fewer heads": lambda: fresh(num_key_value_heads=2),
    "one head": lambda: fresh(num_key_value_heads=1),
    "smaller heads": lambda: fresh(num_attention_heads=16),
    "another batch": lambda: llama2.Cache(CONFIG, 2),
    "on meta": lambda: llama2.Cache(CONFIG, device="meta"),
    "float16": lambda: llama2.Cache(CONFIG, dtype=torch.float16),
    "bfloat16": lambda: llama2.Cache(CONFIG, dtype=torch.bfloat16),
    "short keys": lambda: changed(k=torch.zeros(3, 1, 4, 4, 16)),
    "short values": lambda: changed(v=torch.zeros(3, 1, 4, 4, 16)),
    "float16 keys": lambda: changed(k=torch.zeros(3, 1, 4, 64, 16).half()),
    "keys as a view": lambda: changed(k=torch.zeros(3, 1, 4, 64, 32)[..., ::2]),
    "expanded values": lambda: changed(v=torch.zeros(1, 1, 1, 1, 16).expand(3, 1, 4, 64, 16)),
    "negative position": lambda: changed(pos=-3),
    "position at the end": lambda: changed(pos=62),
    "longer than it is": lambda: changed(max_seq_len=1000, pos=100),
    "short tables": lambda: changed(cos=torch.ones(3, 8)),
    "padding": lambda: llama2.PaddedCache(CONFIG, torch.tensor([2])),
}


@pytest.mark.parametrize("name", CACHES)
@pytest.mark.parametrize("length", [1, 7, 40])
def test_caches(models, name, length):
    tokens = torch.arange(length)[None] % 100
    plain, native = (outcome(model, tokens, CACHES[name]()) for model in models)
    agree(plain, native, tolerance=2e-3 if "float16" in name else 1e-5)  # rounding ties
    if name == "of this model":
        assert isinstance(native, torch.Tensor)


def test_a_wrong_cache_is_named(models):
    for model in models:
        with pytest.raises(ValueError, match=r"\(2, 1, 4, 64, 16\).*must be \(3, 1, 4, 64, 16\)"):
            model(TOKENS, fresh(num_hidden_layers=2))
        with pytest.raises(ValueError, match="position is -3 of 64"):
            model(TOKENS, changed(pos=-3))


# --------------------------------------------------------------------------------------------------
# Inputs

INPUTS = {
    "wider": torch.ones(2, 129),
    "narrower": torch.ones(2, 127),
    "a number": torch.tensor(1.0),
    "no rows": torch.ones(0, 128),
    "integers": torch.ones(2, 128, dtype=torch.int64),
    "bool": torch.ones(2, 128, dtype=torch.bool),
    "float64": torch.linspace(-1, 1, 256, dtype=torch.float64).view(2, 128),
    "expanded": torch.linspace(-1, 1, 128).expand(3, 128),
    "transposed": torch.linspace(-1, 1, 384).view(128, 3).t(),
    "every second": torch.linspace(-1, 1, 768).view(3, 256)[:, ::2],
    "negated lazily": torch._neg_view(torch.linspace(-1, 1, 256).view(2, 128)),
    "sparse": torch.eye(3, 128).to_sparse(),
    "on meta": torch.ones(2, 128, device="meta"),
    "three dimensions": torch.linspace(-1, 1, 768).view(2, 3, 128),
    "one dimension": torch.linspace(-1, 1, 128),
}


@pytest.mark.parametrize("name", INPUTS)
def test_inputs_of_a_layer(models, name):
    plain, native = (outcome(model.lm_head, INPUTS[name]) for model in models)
    if name == "on meta":
        assert plain.is_meta and native.is_meta and plain.shape == native.shape
    else:
        agree(plain, native)


IDS = {
    "negative": torch.tensor([[-1]]),
    "beyond the vocabulary": torch.tensor([[100]]),
    "bool": torch.tensor([[True]]),
    "int32": torch.tensor([[1]], dtype=torch.int32),
    "float": torch.tensor([[1.0]]),
    "one dimension": torch.tensor([1]),
    "none": torch.zeros(1, 0, dtype=torch.int64),
}


@pytest.mark.parametrize("name", IDS)
def test_ids(models, name):
    for model in models:
        with pytest.raises((ValueError, IndexError)):
            model(IDS[name], llama2.Cache(CONFIG))


@pytest.mark.parametrize("ids", [[-1], [100], [True]])
def test_ids_of_a_quantised_embedding(ids):
    blocks = torch.zeros(100, 68, dtype=torch.uint8)
    embedding = llama2.QuantizedEmbedding(blocks, "Q8_0", torch.float32)
    with pytest.raises((IndexError, RuntimeError)):
        embedding(torch.tensor(ids))


# --------------------------------------------------------------------------------------------------
# Models


def set_blocks(change):
    """Replace the first layer's q_proj blocks."""

    def act(model):
        linear = model.layers[0].self_attn.q_proj
        linear.blocks = change(linear.blocks)

    return act


def set_norm(change):
    """Replace the first layer's norm weight."""

    def act(model):
        norm = model.layers[0].input_layernorm
        norm.weight = nn.Parameter(change(norm.weight.detach()), requires_grad=False)

    return act


def swap(model):
    layers = model.layers
    layers[0], layers[1] = layers[1], layers[0]


def assign(model):
    state = {
        key: copy.deepcopy(t) if key.endswith(("blocks", "_extra_state")) else 2 * t
        for key, t in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)


def seeded_block():
    """A block of plain nn.Linears."""
    torch.manual_seed(5)
    return llama2.Block(CONFIG, 0).requires_grad_(False)


def pre_hook(module, arguments):
    return tuple(-argument for argument in arguments)


CHANGES = {
    "nothing": lambda model: None,
    "expanded blocks": set_blocks(lambda b: b[:1].expand(b.shape)),
    "strided blocks": set_blocks(lambda b: torch.cat((b, b), 1)[:, : b.shape[1]]),
    "fewer blocks": set_blocks(lambda b: b[:10].clone()),
    "narrower blocks": set_blocks(lambda b: b[:, : b.shape[1] // 2].clone()),
    "signed blocks": set_blocks(lambda b: b.view(torch.int8)),
    "expanded norm": set_norm(lambda w: torch.full((1,), 2.0).expand(128)),
    "one number as norm": set_norm(lambda w: torch.full((1,), 2.0)),
    "short norm": set_norm(lambda w: w[:7].clone()),
    "bfloat16 norm": set_norm(lambda w: w.bfloat16()),
    "another norm": set_norm(lambda w: 3 * w),
    "norm changed in place": lambda model: model.layers[1].input_layernorm.weight.mul_(3),
    "norm's data": lambda m: setattr(
        m.layers[1].input_layernorm.weight, "data", torch.ones(128) / 2
    ),
    "another block": lambda m: m.layers.__setitem__(0, seeded_block()),
    "another order of parts": lambda m: m.layers[0]._modules.update(
        mlp=m.layers[0]._modules.pop("mlp")
    ),
    "one projection twice": lambda m: setattr(
        m.layers[1].mlp, "up_proj", m.layers[1].mlp.gate_proj
    ),
    "a projection's forward": lambda m: setattr(
        m.layers[1].mlp.up_proj, "forward", lambda x: 2 * torch.cat((x, x), -1)
    ),
    "blocks in place": lambda m: m.layers[1].mlp.up_proj.blocks.fill_(0),
    "blocks' data": lambda m: setattr(
        m.layers[1].mlp.up_proj.blocks, "data", m.layers[1].mlp.gate_proj.blocks.clone()
    ),
    "another eps": lambda model: setattr(model.layers[0].input_layernorm, "eps", 10.0),
    "hook": lambda m: m.layers[0].mlp.register_forward_hook(lambda module, x, y: 2 * y),
    "hook on a projection": lambda m: m.layers[2].mlp.up_proj.register_forward_pre_hook(pre_hook),
    "hook on a block": lambda m: m.layers[1].register_forward_hook(lambda module, x, y: 2 * y),
    "replaced forward": lambda model: setattr(model.layers[0].mlp, "forward", lambda x: 0 * x),
    "replaced module": lambda model: setattr(model.layers[0], "mlp", nn.Identity()),
    "swapped layers": swap,
    "a layer less": lambda model: model.layers.pop(2),
    "load_state_dict": assign,
    "share_memory": lambda model: model.share_memory(),
    "bfloat16": lambda model: model.bfloat16(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changed_models(models, name):
    results = []
    for model in models:
        model = copy.deepcopy(model)
        with torch.no_grad():
            CHANGES[name](model)
        results.append(outcome(model, TOKENS, llama2.Cache(CONFIG)))
    agree(*results, tolerance=0.05 if name == "bfloat16" else 1e-5)
    unchanged = models[0](TOKENS, llama2.Cache(CONFIG))
    harmless = (
        "nothing",
        "another order of parts",
        "strided blocks",
        "signed blocks",
        "share_memory",
        "bfloat16 norm",
        "bfloat16",
    )
    if not isinstance(results[0], type) and name not in harmless:  # the case does what it says
        assert (results[1] - unchanged).abs().max() > 1e-3


@torch.no_grad()
def test_models_of_one_checkpoint_share_no_norms(model_path):
    checkpoint = llama2.open_checkpoint(model_path)
    first, _ = llama2.load(checkpoint)
    before = first.norm.weight.clone()
    first.norm.weight.mul_(3)
    assert torch.equal(llama2.load(checkpoint)[0].norm.weight, before)


def test_global_hooks_are_heard(models):
    def double(module, arguments, y):
        return 2 * y if isinstance(module, llama2.MLP) else None

    before = models[1](TOKENS, llama2.Cache(CONFIG))
    handle = nn.modules.module.register_module_forward_hook(double)
    try:
        plain, native = (model(TOKENS, llama2.Cache(CONFIG)) for model in models)
    finally:
        handle.remove()
    agree(plain, native)
    assert (native - before).abs().max() > 1e-3


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, torch.device("meta")], ids=str)
def test_defaults_of_torch_reach_no_pointer(models, default):
    """What the kernels write to is float32 on the CPU, whatever new tensors otherwise are."""
    linear = next(m for m in models[1].modules() if isinstance(m, llama2.NativeLinear))
    x, cache = torch.randn(3, linear.in_features), llama2.Cache(CONFIG)
    expected = linear(x), models[1](TOKENS, llama2.Cache(CONFIG))
    with contextlib.ExitStack() as stack:
        if isinstance(default, torch.device):
            stack.enter_context(default)
        else:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(default)
        found = linear(x), models[1](TOKENS, cache)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other) and one.device == other.device and one.dtype == other.dtype


def parts(model: llama2.Llama) -> list[nn.Module]:
    """A block, a norm and projections."""
    block = model.layers[1]
    norms = block.input_layernorm, block.post_attention_layernorm, model.norm
    return [block, *norms, block.self_attn, block.mlp.down_proj, block.self_attn.q_proj]


@pytest.mark.parametrize("when", ["before accelerate", "after it"])
@pytest.mark.parametrize("amx", [False, True], ids=["as it is", "as with AMX"])
def test_hooks_are_called_on_every_path(models, when, amx, monkeypatch):
    """Each once a pass, with and without a cache, and what they return counts."""
    found = replace(llama2.kernels(), amx=amx)
    monkeypatch.setattr(llama2, "kernels", lambda: found)
    model = copy.deepcopy(models[0])
    if when == "after it":
        llama2.accelerate(model, exact=False)
    called, packed, pack = [], [], llama2.NativeLayers.pack
    monkeypatch.setattr(
        llama2.NativeLayers, "pack", lambda layers: packed.append(1) or pack(layers)
    )
    handles = [part.register_forward_hook(lambda *args: called.append(1)) for part in parts(model)]
    handles += [
        part.register_forward_pre_hook(lambda *a: called.append(1)) for part in parts(model)
    ]
    if when != "after it":
        llama2.accelerate(model, exact=False)
    cache = llama2.Cache(CONFIG)
    with torch.no_grad():
        for length in (1, 1, 9, 40):
            model(torch.ones(1, length, dtype=torch.int64), cache)
            assert len(called) == 14
            called.clear()
        model(TOKENS)
        assert len(called) == 14
        for handle in handles:
            handle.remove()
        model(TOKENS)
    assert len(called) == 14 and len(packed) <= 1


def test_the_tree_of_modules_stays(models):
    """As many layers, the same names and keys; slices, copies and a second accelerate() are alike."""
    plain, native = models
    again = llama2.accelerate(copy.deepcopy(native), exact=False)
    for model in (native, again):
        assert len(model.layers) == 3 and [*model.layers] == [model.layers[i] for i in range(3)]
        names, keys = (
            ([*dict(m.named_modules())] for m in (plain, model)),
            model.state_dict().keys(),
        )
        assert len(set(map(tuple, names))) == 1 and keys == plain.state_dict().keys()
        assert "layers.2.self_attn.q_proj.blocks" in keys
        assert {part.training for part in model.modules()} == {False}
        part = model.layers[1:]
        assert type(part) is type(model.layers) and [*part] == [model.layers[1], model.layers[2]]
    assert isinstance(native.layers, llama2.Layers)
    shorter = copy.deepcopy(plain), copy.deepcopy(native)
    for model in shorter:
        model.config = replace(CONFIG, num_hidden_layers=2)
        model.layers = model.layers[:2]
    agree(*(model(TOKENS, fresh(num_hidden_layers=2)) for model in shorter))


def ramp(*size: int) -> torch.Tensor:
    """Numbers that are neither all alike nor random."""
    return torch.linspace(-1, 1, torch.Size(size).numel()).view(size)


def masks(T: int, pos: int) -> dict[str, torch.Tensor | None]:
    """Masks of T new tokens behind pos others, of which the first is the cache's own."""
    causal = torch.ones(T, pos + T, dtype=torch.bool).tril(pos)
    window = causal.triu(pos - 1)
    additive = torch.zeros(T, pos + T).masked_fill(~causal, -3.0)
    return {"own": causal, "everything": torch.ones_like(causal), "window": window, "none": None,
            "additive": additive, "of four dimensions": causal[None, None]}  # fmt: skip


@pytest.mark.parametrize("name", masks(1, 1))
@pytest.mark.parametrize("T", [1, 5])
@torch.no_grad()
def test_masks_of_the_callers_own(models, name, T):
    results = []
    for model in models:
        cache = llama2.Cache(CONFIG)
        model(TOKENS, cache)
        mask = masks(T, 7)[name]
        results.append(model.layers(ramp(1, T, 128), *cache.rope(T), mask, cache))
    agree(*results)


class Sinks(llama2.Cache):
    """Keys are halved."""

    def update(self, layer, k, v):
        return super().update(layer, k / 2, v)


def patched(name, change):
    """A cache with a method of its own."""
    cache = llama2.Cache(CONFIG)
    setattr(cache, name, partial(change, cache))
    return cache


def twice(cache, layer, k, v):
    """An update that doubles values."""
    return llama2.Cache.update(cache, layer, k, 2 * v)


OTHER_CACHES = {
    "a subclass": lambda: Sinks(CONFIG),
    "its update": lambda: patched("update", twice),
    "its mask": lambda: patched("mask", lambda c, T: torch.ones(T, c.pos + T, dtype=torch.bool)),
}


@pytest.mark.parametrize("name", OTHER_CACHES)
@torch.no_grad()
def test_other_caches_are_obeyed(models, name):
    results = []
    for model in models:
        cache = OTHER_CACHES[name]()
        model(TOKENS, cache)
        results.append(model(TOKENS[:, :3], cache))
    agree(*results)
    assert (results[0] - models[0](TOKENS, llama2.Cache(CONFIG))).abs().max() > 1e-3


def layers_alone(model, cached):
    """All layers as a function of x, with or without a cache."""

    def function(x):
        cache = llama2.Cache(CONFIG)
        T = x.shape[1]
        return model.layers(x, *cache.rope(T), cache.mask(T), cache if cached else None)

    return function


def transformed(way, function):
    """What torch makes of a function by transforms that look inside."""
    x, tangent = ramp(1, 5, 128), ramp(1, 5, 128).flip(-1)
    if way == "jvp":
        return torch.func.jvp(function, (x,), (tangent,))[1]
    if way == "dual numbers":
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(function(forward_ad.make_dual(x, tangent))).tangent
    if way == "vmap":
        return torch.func.vmap(function)(torch.stack((x, tangent)))
    if way == "grad":
        return torch.func.grad(lambda x: function(x).square().sum())(x)
    if way == "make_fx":
        return make_fx(function)(x)(tangent)
    if way == "jit.trace":
        return torch.jit.trace(function, x, check_trace=False)(tangent)
    return torch.fx.symbolic_trace(function)(x)


@pytest.mark.parametrize(
    "way", ["jvp", "dual numbers", "vmap", "grad", "make_fx", "jit.trace", "fx"]
)
@pytest.mark.filterwarnings("ignore")
def test_transforms_of_torch(models, way):
    """Forward-mode gradients and traces see what plain torch does."""
    heads = [model.lm_head for model in models]
    results = [outcome(transformed, way, head) for head in heads]
    agree(*results)
    assert way == "jit.trace" or isinstance(results[0], torch.Tensor)  # it knows no view(dtype)
    if way not in ("make_fx", "fx"):  # slow, impossible
        for cached in (False, True):
            layers = [layers_alone(model, cached) for model in models]
            with torch.set_grad_enabled(not cached):
                agree(*(outcome(transformed, way, f) for f in layers), tolerance=1e-4)


@torch.no_grad()
def test_a_call_holds_the_weights_it_reads(models, monkeypatch):
    """Another thread may replace them meanwhile."""
    model, found, expired = copy.deepcopy(models[1]), llama2.kernels(), []

    def replaced_meanwhile(name):
        def call(*arguments):
            linears = [m for m in model.modules() if isinstance(m, llama2.NativeLinear)]
            stored = [StorageWeakRef(linear.blocks.untyped_storage()) for linear in linears]
            for linear in linears:
                linear.blocks = linear.blocks.clone()
            expired.append([one.expired() for one in stored])
            return getattr(found.library, name)(*arguments)

        return call

    names = "linear", "run_layers", "dequantize"
    library = SimpleNamespace(**{name: replaced_meanwhile(name) for name in names})
    wanted = model(TOKENS, llama2.Cache(CONFIG))
    monkeypatch.setattr(llama2, "kernels", lambda: replace(found, library=library))
    agree(wanted, model(TOKENS, llama2.Cache(CONFIG)))
    in_layers, in_head = expired
    assert not any(in_layers[:-1]) and in_layers[-1]  # all but the head's
    assert not in_head[-1]


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_of_a_model(models, way):
    for model in models:
        if way == "deepcopy":
            other = copy.deepcopy(model)
        elif way == "pickle":
            other = pickle.loads(pickle.dumps(model))
        else:
            file = io.BytesIO()
            torch.save(model, file)
            file.seek(0)
            other = torch.load(file, weights_only=False)
        assert torch.equal(other(TOKENS, llama2.Cache(CONFIG)), model(TOKENS, llama2.Cache(CONFIG)))


def test_gradients_pass_the_kernels(models):
    """Without a cache a pass is differentiable, also where a dense part wants a gradient."""
    norms = []
    for model in models:
        model = copy.deepcopy(model)
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        model(TOKENS).square().sum().backward()
        norms.append(model.embed_tokens.weight.grad.norm())
    assert norms[0] > 0 and torch.isclose(*norms, rtol=1e-4)


@pytest.mark.parametrize(
    "shape, dtype", [((4, 33), torch.uint8), ((4, 34), torch.int8), ((68,), torch.uint8)]
)
def test_blocks_of_another_shape_are_refused(shape, dtype):
    with pytest.raises(ValueError, match="Q8_0 needs"):
        llama2.QuantizedLinear(torch.zeros(shape, dtype=dtype), "Q8_0")
