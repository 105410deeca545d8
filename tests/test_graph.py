"""Captured decode steps, by a stand-in for CUDA graphs; Blocks that Inductor compiles, on a CPU."""

import copy
import gc
import json
import os
import pickle
import shutil
import timeit
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from recorded import capture, graph  # noqa: F401
from test_kernels import model_of
from torch import nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode

import llama2
from test_llama2 import (
    CONFIG,
    TOKENS,
    assert_close,
    in_steps,
    json_cases,
    kernels_file,
    needs_kernels,
    quantised,
    table,
)

pytestmark = [needs_kernels, pytest.mark.usefixtures("no_grad")]


@pytest.fixture
def pair(graph, model):  # noqa: F811
    """A model, and a copy of it with captured steps."""
    plain, fast = copy.deepcopy(model), copy.deepcopy(model)
    graph.accelerate(fast, False)
    return plain, fast


def steps_of(graph, model):  # noqa: F811
    """The steps that are captured of a model."""
    return [*graph.find_parts(graph.GraphParts, model).steps.values()]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_steps_equal_plain_ones(graph, pair, dtype):  # noqa: F811
    """Across buckets, between prompts, behind truncate() and reset(), in a cache of any dtype."""
    plain, fast = pair
    dtype = getattr(torch, dtype)
    ours, theirs = (llama2.Cache(CONFIG, 1, 27, dtype) for _ in range(2))
    for length in (27, 9, 0, 17):
        results = []
        for model, cache in ((fast, ours), (plain, theirs)):
            cache.truncate(min(length, cache.pos))
            tokens = TOKENS[:1, cache.pos : 27]
            results.append(in_steps(model, tokens, [3] + [1] * (24 - cache.pos), cache))
        # A last bit of float32 decides which way a number of the cache is rounded.
        assert_close(*results, max(1e-5, torch.finfo(dtype).eps))
        assert torch.equal(ours.tokens, theirs.tokens) and ours.pos == theirs.pos
        with pytest.raises(ValueError, match="the cache holds 27 tokens"):
            fast(TOKENS[:1, :1], ours)
    [step] = steps_of(graph, fast)
    assert step.uses[0] == 27 and step.replay


def test_other_passes_are_plain(graph, pair):  # noqa: F811
    """Batches, prompts, other caches, one slot; gradients pass where there is no cache."""
    plain, fast = pair

    class Other(llama2.Cache):
        pass

    for B, T, make in ((2, 1, llama2.Cache), (1, 2, llama2.Cache), (1, 1, Other)):
        results = [m(TOKENS[:B, :T], make(CONFIG, B)) for m in pair]
        assert_close(results[1], results[0], 1e-5)
    for cache in (None, llama2.Cache(CONFIG, 1, 1)):
        logits = fast(TOKENS[:1, :1], cache).flatten()
        assert_close(logits, plain(TOKENS[:1, :1]).flatten(), 1e-5)
    assert not steps_of(graph, fast)
    for wrong in (TOKENS[:1, :1].int(), TOKENS[:1, 0], TOKENS[:1, :1] + 320):
        with pytest.raises((ValueError, IndexError)):
            fast(wrong, llama2.Cache(CONFIG))
    with torch.enable_grad():
        fast(TOKENS[:1, :3]).sum().backward()
        assert not fast(TOKENS[:1, :1], llama2.Cache(CONFIG)).requires_grad
    assert fast.norm.weight.grad is not None


def test_steps_within_a_sliding_window(graph, pair):  # noqa: F811
    """They are captured; the token that would go beyond the window is refused, as without a graph."""
    plain, fast = pair
    fast.config = llama2.replace(CONFIG, sliding_window=9)
    ours, tokens = llama2.Cache(CONFIG), TOKENS[:1, :9]
    assert_close(in_steps(fast, tokens, 1, ours), plain(tokens), 1e-5)
    assert [step.replay is not None for step in steps_of(graph, fast)] == [True]
    with pytest.raises(ValueError, match="sliding window has, 9"):
        fast(TOKENS[:1, :1], ours)


def test_modes_of_torch(graph, pair):  # noqa: F811
    """Caches made and steps run in and out of inference mode; autocast, which rounds."""
    plain, fast = pair
    caches = [llama2.Cache(CONFIG), llama2.Cache(CONFIG)]
    with torch.inference_mode():
        caches += [llama2.Cache(CONFIG), llama2.Cache(CONFIG)]
    for ours, theirs in zip(caches[::2], caches[1::2]):
        for i, mode in enumerate((torch.no_grad, torch.inference_mode, torch.no_grad) * 2):
            if mode is torch.no_grad and theirs.k.is_inference():
                mode = torch.inference_mode  # else torch refuses to write to it
            with mode():
                expected = plain(TOKENS[:1, i : i + 1], theirs)
                assert_close(fast(TOKENS[:1, i : i + 1], ours), expected, 1e-5)
    assert len(steps_of(graph, fast)) == 2
    with torch.autocast("cpu", torch.bfloat16):
        results = [m(TOKENS[:1, :1], llama2.Cache(CONFIG)) for m in pair]
    assert torch.equal(*results) and not torch.equal(results[0], plain(TOKENS[:1, :1])[:, 0])


def test_copies_hold_no_graph(graph, pair):  # noqa: F811
    plain, fast = pair
    cache = llama2.Cache(CONFIG)
    size = len(pickle.dumps(fast))
    in_steps(fast, TOKENS[:1, :3], 1, cache)
    assert len(pickle.dumps(fast)) == size
    copies = [copy.deepcopy((fast, cache)), pickle.loads(pickle.dumps((fast, cache)))]
    copies += [(fast, copy.deepcopy(cache)), (fast, cache)]
    expected = plain(TOKENS[:1, :4])[:, -1]
    for model, held in copies:
        assert_close(model(TOKENS[:1, 3:4], held), expected, 1e-5)
        held.truncate(3)
    # Nothing of a model outlives it because of its graphs, though its cache goes on; nor of a cache.
    model, dead = copies[0][0], weakref.ref(copies[0][0].norm.weight)
    gone = weakref.ref(held)
    del model, copies, held, fast, pair, cache
    gc.collect()
    assert dead() is None and gone() is None


def test_threads_with_a_cache_each(pair):
    plain, fast = pair

    @torch.no_grad()
    def run(row):
        return in_steps(fast, row[None], 1)[0]

    with ThreadPoolExecutor(3) as pool:
        assert_close(torch.stack([*pool.map(run, TOKENS)]), plain(TOKENS))


def test_what_cannot_be_captured_runs_by_torch_with_one_line(graph, pair, monkeypatch):  # noqa: F811
    plain, fast = pair
    expected = plain(TOKENS[:1, :3])

    class Own(nn.Linear):
        pass

    def no_capture(run, device):
        raise RuntimeError("CUDA error: no\nkernel image")

    for problem in ("kernel image", "Own"):
        if problem == "Own":
            fast.layers[1].mlp.up_proj.__class__ = Own
        else:
            monkeypatch.setattr(graph, "capture", no_capture)
        with pytest.warns(UserWarning, match=problem) as warned:
            logits = in_steps(fast, TOKENS[:1, :3], 1)
        assert len(warned) == 1 and "\n" not in str(warned[0].message)
        assert_close(logits, expected, 1e-5)


def test_comparing_is_quick(graph):  # noqa: F811
    """A model with Llama 2 7B's number of modules: 0.1 ms; the limit is for busy machines."""
    model = llama2.Llama(llama2.Config(64, 64, 32, 4, 4, vocab_size=32))
    parts = graph.GraphParts(model)
    assert parts.read() == parts.state

    def compare():
        return parts.read() == parts.state and parts.hooked()

    assert not compare()
    assert min(timeit.repeat(compare, number=1, repeat=50)) < 1e-3


# --------------------------------------------------------------------------------------------------
# Loading


@pytest.mark.parametrize("compile", [False, True])
def test_accelerate_on_cuda(monkeypatch, compile):
    """The classes of a dense and of a quantised model; the bits of one stay."""
    pytest.importorskip("triton")
    graph = kernels_file("graph")  # noqa: F811
    model = model_of(["Q4_K", "F16"])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with FakeTensorMode():
        model.norm.weight = nn.Parameter(torch.empty(256, device="cuda"))
    warmed = []
    monkeypatch.setattr(llama2.Llama, "new_cache", lambda self, n: llama2.Cache(self.config, 1, n))
    monkeypatch.setattr(llama2.GraphLlama, "__call__", lambda *args: warmed.append(args))
    assert llama2.accelerate(model, compile=compile) is model
    assert type(model) is llama2.GraphLlama and len(warmed) == compile
    counted = [type(m) for m in model.modules()]
    assert counted.count(llama2.PlanesLinear) == 8 * compile
    assert counted.count(llama2.GraphBlock) == 2 * compile
    after = model.state_dict()
    del before["norm.weight"], after["norm.weight"]
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], t) for name, t in before.items())
    assert graph.DEVICE == "cuda"


LOADED = """
[{}, "Q8_0", 1, [true, false]]
[{"compile": false}, "Q8_0", 1, [false, true]]
[{"compile": true}, "F32", 1e9, [true, false]]
[{}, "F32", 1, [true, false]]
[{}, "F32", 1e9, [false, false]]
[{"trainable": true, "dtype": "float32"}, "F32", 1, [false, true]]
"""


@json_cases("case", LOADED)
def test_how_models_are_loaded_on_cuda(monkeypatch, tmp_path, case):
    """Options, type, what is large; whether kernels/ compiles, and whether matrices are unpacked."""
    options, ggml_type, large, expected = case
    monkeypatch.setattr(llama2, "LARGE", large)
    monkeypatch.setattr(llama2.open_kernels(), "can_accelerate", lambda device: True)
    monkeypatch.setattr(llama2, "free_memory", lambda device: 1e12)
    path, _ = quantised(tmp_path / "x.gguf", ggml_type)
    checkpoint = llama2.open_checkpoint(path)
    device = mock.Mock(device=torch.device("cuda"))
    with mock.patch.object(torch, "empty", return_value=device):
        plan = llama2.plan_loading(checkpoint, "cuda", options.pop("dtype", "auto"), **options)
    assert [plan.kernels, plan.unpack] == expected


# --------------------------------------------------------------------------------------------------
# Blocks that are compiled


class Products:
    """The kernel of multiply() in kernels/gpu.py, by torch."""

    def __init__(self, gpu):
        self.kinds = {gpu.code_of(k): (n, k) for n, k in llama2.GGML_TYPES.items() if k.low}
        self.gpu = gpu

    def __getitem__(self, grid):
        return self

    def __call__(self, x, xt, y, a, b, c, na, nb, nc, K, code_a, code_b, code_c, size, **options):
        parts = []
        for matrix, rows, code in ((a, na, code_a), (b, nb, code_b), (c, nc, code_c)):
            if code in self.kinds:
                name, kind = self.kinds[code]
                matrix = llama2.dequantize(self.gpu.rearrange(matrix, kind, False), name)
            if code:
                assert len(matrix) == rows and matrix.shape[1] == K
                parts.append(matrix.to(x.dtype) @ x)
        y.copy_(torch.cat(parts))


# Sizes that are equal in one model differ in another.
MODELS = """
Q8_0 | {"num_key_value_heads": 4}
Q4_K Q6_K Q5_1 | {"num_attention_heads": 8, "head_dim": 64}
F16 Q4_0 | {"num_attention_heads": 16, "num_key_value_heads": 2, "rms_norm_eps": 1e-6}
F16 | {"num_hidden_layers": 3}
"""


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="Inductor needs a C++ compiler"
)
def test_one_compilation_serves_all(graph, monkeypatch):  # noqa: F811
    """Models, types, buckets, odd contexts, float32 to 1e-5; made before the first answer."""
    gpu = pytest.importorskip("triton") and kernels_file("gpu")
    monkeypatch.setattr(gpu, "multiply_kernel", Products(gpu))

    def rerun(run, device):  # torch.compile does not go with a mode that records
        result = run()
        return lambda: result.copy_(run()), result

    monkeypatch.setattr(graph, "capture", rerun)
    torch.compiler.reset()
    counters.clear()
    for i, (types, change) in enumerate(table(MODELS)):
        plain = model_of(types.split(), **json.loads(change))
        if types == "F16":  # dense
            plain = llama2.Llama(plain.config).requires_grad_(False)
        fast = copy.deepcopy(plain)
        graph.accelerate(fast, True)
        assert counters["stats"]["unique_graphs"] == 1
        for size in (21, 16, 9 + i):
            ours, theirs = (llama2.Cache(plain.config, 1, size) for _ in range(2))
            tokens, steps = TOKENS[:1, : size - 1] % 64, [3] + [1] * (size - 4)
            expected = in_steps(plain, tokens, steps, theirs)
            assert_close(in_steps(fast, tokens, steps, ours), expected, 1e-5)
        assert all(step.replay for step in steps_of(graph, fast))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"] and not counters["recompiles"]


def test_what_inductor_makes_lies_in_our_own_folder(graph, monkeypatch, tmp_path):  # noqa: F811
    """Said in one line when there is none yet; a folder that is named by the user stays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = str(tmp_path / "llama2.py" / "inductor")
    other = str(tmp_path / "other")
    for named, expected in (("", folder), (other, other)):
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        if named:
            monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", named)
        with pytest.warns(
            UserWarning, match="compiling for the GPU: about 12 s, once on a machine"
        ):
            graph.compiled.__wrapped__()
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == expected
