"""A decode step as one CUDA graph: GraphLlama, and the Blocks in it, which Inductor compiles.

A decode step is some 1,000 operations, and a GPU would wait for Python to start each of them. A
graph starts them all at once. It repeats the same operations on the same memory: what differs from
step to step, the token and its position, is a tensor in it. Whatever else a step uses is compared
before each replay; if it changed, the step is captured anew.
"""

from __future__ import annotations

import functools
import math
import os
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental import _config as shapes

from .build import cache_folder
from .cpu import ATTENTION_MATRICES, MLP_MATRICES, Parts, find_parts
from .llama2 import (
    DENSE,
    GGML_TYPES,
    MLP,
    Block,
    Cache,
    CausalSelfAttention,
    Llama,
    QuantizedEmbedding,
    QuantizedLinear,
    RMSNorm,
    apply_rotary_emb,
)

try:
    from . import gpu
except ImportError:  # no Triton: steps are captured, of plain operations
    gpu = None

DEVICE = "cuda"  # the tests capture on a CPU
BUCKET = 256  # a graph serves so many positions; a mask hides the slots behind the token's own
LOCK = threading.Lock()  # one capture at a time


def alias(t: Tensor) -> Tensor:
    """The memory of `t` as a plain tensor, in whatever mode `t` was made."""
    plain = torch.empty(0, dtype=t.dtype, device=t.device)
    return plain.set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


class StepCache:
    """A Cache as a captured step sees it: its first S slots, and its position as a tensor."""

    layer = pos = 0  # Llama.forward() sets and asks them; replay() has looked at the position

    def __init__(self, cache: Any, S: int) -> None:
        self.k, self.v = alias(cache.k), alias(cache.v)
        self.cos, self.sin = alias(cache.cos), alias(cache.sin)
        self.slots = torch.arange(S, device=cache.k.device)
        self.position = self.slots[:1] + cache.pos  # (1,)
        self.tokens = self.slots[None, :1].clone()  # (1, 1)
        self.bias: Any = None

    def check(self, model: nn.Module, tokens: Tensor) -> None:
        """replay() has compared what is needed."""

    def rope(self, T: int) -> tuple[Tensor, Tensor]:
        """cos and sin for the token: (1, D/2)."""
        return self.cos[self.position], self.sin[self.position]

    def mask(self, T: int) -> Tensor:
        """Which slots the token sees: bool (1, S)."""
        return (self.slots <= self.position)[None]

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (1, G, 1, D) of the layer that runs; return those of all S slots."""
        S = len(self.slots)
        keys, values = self.k[self.layer, :, :, :S], self.v[self.layer, :, :, :S]  # (1, G, S, D)
        keys.index_copy_(2, self.position, k.type_as(keys))
        values.index_copy_(2, self.position, v.type_as(values))
        return keys.type_as(k), values.type_as(v)

    def advance(self, tokens: Tensor) -> None:
        """replay() counts the token."""


class GraphParts(Parts):
    """Parts, with all that a graph would not notice if it changed; and the steps of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.steps: Any = WeakKeyDictionary()  # cache -> its Step

    def read(self) -> list:
        """What stands there now."""
        tensors = self.tensors()
        readers = Tensor.data_ptr, Tensor.size, Tensor.stride, attrgetter("dtype")
        return super().read() + [[*map(read, tensors)] for read in readers]


class Step:
    """A decode step, captured for a cache and the bucket of its position."""

    def __init__(self, model: nn.Module, cache: Any, S: int, uses: Any) -> None:
        self.uses = uses
        self.left: Any = None  # the cache as the last replay left it
        self.replay: Callable[[], None] | None = None
        try:
            if unknown := {*map(type, [*model.modules()][1:])} - CLASSES:
                raise ValueError(f"there are modules of {', '.join(map(repr, unknown))}")
            with LOCK, torch.inference_mode(False), torch.no_grad():
                self.cache = StepCache(cache, S)
                forward = functools.partial(Llama.forward, model)
                run = functools.partial(forward, self.cache.tokens, self.cache)
                self.replay, self.logits = capture(run, cache.k.device)
        except Exception as error:  # noqa: BLE001
            text = " ".join(str(error).split())[:300]
            warnings.warn(
                f"decode steps are slow, because none can be captured: {text}", stacklevel=2
            )


@functools.cache
def pool(stream: int) -> Any:
    """The memory in which all graphs of a stream compute, one after the other."""
    return torch.cuda.graph_pool_handle()


def capture(run: Callable[[], Tensor], device: torch.device) -> tuple[Callable[[], None], Tensor]:
    """Capture a function as a CUDA graph: what replays it, and the tensor that gets its result."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    current = torch.cuda.current_stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()  # what is compiled or loaded at a first call must not be captured
    with torch.cuda.graph(graph, pool(current.cuda_stream), stream, "thread_local"):
        result = run()
    current.wait_stream(stream)
    return graph.replay, result


def use_of(cache: Any) -> Any:
    """The position, and how often torch has written to the cache; None: not counted."""
    tensors = cache.k, cache.v, cache.tokens
    if any(map(Tensor.is_inference, tensors)):
        return None
    return [cache.pos, *[t._version for t in tensors]]


def replay(model: nn.Module, cache: Any, tokens: Tensor) -> Tensor | None:
    """The logits (1, V) of a decode step, which the cache counts; None: Llama.forward() must run."""
    device = tokens.device
    if device.type != DEVICE or torch.is_autocast_enabled(DEVICE) or cache.max_seq_len == 1:
        return None
    if cache.pos >= (model.config.sliding_window or math.inf):  # which forward() refuses
        return None
    parts = find_parts(GraphParts, model)
    if parts.hooked():
        return None
    S = min(cache.max_seq_len, (cache.pos // BUCKET + 1) * BUCKET)
    tensors = cache.k, cache.v, cache.cos, cache.sin
    uses = [S, *[(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]]
    if device.type == "cuda":
        uses.append(torch.cuda.current_stream(device))
    step = parts.steps.get(cache)
    if step is None or step.uses != uses:
        step = parts.steps[cache] = Step(model, cache, S, uses)
    if step.replay is None:
        return None
    step.cache.tokens.copy_(tokens)
    step.cache.position.fill_(cache.pos)
    used = use_of(cache)
    if used is None or used != step.left:
        # Masked slots are read, too: NaN that another text left in them would spread.
        step.cache.k[:, :, :, cache.pos : S].zero_()
        step.cache.v[:, :, :, cache.pos : S].zero_()
    step.replay()
    logits = step.logits.clone()  # the graph's own is written anew at the next replay
    cache.advance(tokens)
    step.left = use_of(cache)
    return logits


# --------------------------------------------------------------------------------------------------
# A Block, compiled by Inductor. Products and attention are operations that Inductor calls: so one
# compilation serves all sizes of models and all types of matrices.


@torch.library.custom_op("llama2::attend", mutates_args=("keys", "values"))
def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, at: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Store k, v (G * D) in slot `at` of keys, values (1, G, slots, D); attention of q: (H * D)."""
    shape, S = (1, keys.shape[1], -1, keys.shape[3]), bias.shape[1]
    keys.index_copy_(2, at, k.view(shape).type_as(keys))
    values.index_copy_(2, at, v.view(shape).type_as(values))
    keys, values = keys[:, :, :S].type_as(q), values[:, :, :S].type_as(q)
    return F.scaled_dot_product_attention(q.view(shape), keys, values, attn_mask=bias).reshape(-1)


@attend.register_fake
def _(q: Tensor, *others: Tensor) -> Tensor:
    return torch.empty_like(q)


class Norm(NamedTuple):
    """What RMSNorm.forward() reads."""

    weight: Tensor
    eps: Tensor


def block(
    x: Tensor, cos: Tensor, sin: Tensor, bias: Tensor, at: Tensor, keys: Tensor, values: Tensor,
    norms: list[Norm], matrices: list[Tensor], codes: list[Tensor],
) -> Tensor:  # fmt: skip
    """Block.forward() for one token: x (C) -> (C)."""
    multiply, normalize = torch.ops.llama2.multiply, RMSNorm.forward
    h = multiply(normalize(norms[0], x), matrices[:3], codes[0])
    q, k, v = h.split([matrix.shape[0] for matrix in matrices[:3]])
    q, k = (
        apply_rotary_emb(t.view(1, 1, -1, 2 * cos.shape[1]), cos, sin).flatten() for t in (q, k)
    )
    x = x + multiply(attend(q, k, v, bias, at, keys, values), matrices[3:4], codes[1])
    h = multiply(normalize(norms[1], x), matrices[4:6], codes[2])
    gate, up = h.split([matrix.shape[0] for matrix in matrices[4:6]])
    return x + multiply(F.silu(gate) * up, matrices[6:], codes[3])


@functools.cache
def compiled() -> Callable:
    """block(), compiled. The first call takes seconds; Inductor keeps what it made in a cache."""
    with suppress(OSError, RuntimeError):
        folder = cache_folder() / "inductor"
        if not os.path.exists(os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))):
            warnings.warn("compiling for the GPU: about 12 s, once on a machine", stacklevel=2)
    return torch.compile(
        block, dynamic=True, fullgraph=True, options={"coordinate_descent_tuning": True}
    )


@functools.cache
def constant(value: float, device: torch.device) -> Tensor:
    """A number as a tensor, so that Inductor does not compile anew for each; made outside a graph."""
    return torch.tensor(value, device=device)


@functools.cache
def code_tensors(*codes: int) -> list[Tensor]:
    """The codes of q, k and v; of o; of gate and up; of down. On the CPU: they choose kernels."""
    return [torch.tensor(codes[a:b]) for a, b in ((0, 3), (3, 4), (4, 6), (6, 7))]


def run_block(layer: Any, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: Any) -> Any:
    """A Block in a captured step, compiled: x (1, 1, C) -> (1, 1, C); None if block() is another."""
    modules = ATTENTION_MATRICES(layer.self_attn._modules) + MLP_MATRICES(layer.mlp._modules)
    matrices, codes = [], []
    codes_of_dense = {dtype: code for code, dtype in gpu.DENSE.items()}
    for module in modules:
        ggml_type = getattr(module, "ggml_type", None)
        if type(module) is gpu.PlanesLinear:
            matrix, code = module.planes, gpu.code_of(GGML_TYPES[ggml_type])
        elif type(module) is QuantizedLinear and ggml_type in DENSE:
            matrix, code = module.blocks, codes_of_dense[DENSE[ggml_type]]
        elif type(module) is nn.Linear and module.bias is None and module.weight.dtype == x.dtype:
            matrix, code = module.weight, codes_of_dense.get(x.dtype)
        else:
            return None
        if code is None or not matrix.is_contiguous():
            return None
        matrices.append(alias(matrix).view(torch.uint8))
        codes.append(code)
    if cache.layer == 0:
        cache.bias = torch.zeros_like(mask, dtype=x.dtype).masked_fill(~mask, -torch.inf)
    norms = [
        Norm(alias(norm.weight), constant(norm.eps, x.device))
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    ]
    place = cache.bias, cache.position, cache.k[cache.layer], cache.v[cache.layer]
    tensors = map(alias, (x.flatten(), cos, sin, *place))  # views would be told apart
    # Sizes that happen to be equal in one model may differ in the next.
    with shapes.patch(use_duck_shape=False):
        y = compiled()(*tensors, norms, matrices, code_tensors(*codes))
    return y.view_as(x)


# --------------------------------------------------------------------------------------------------
# Modules


class GraphBlock(Block):
    """Block that Inductor compiles for captured steps."""

    __module__ = Block.__module__  # where pickles look for it: see Unaccelerated in llama2.py

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        if gpu and type(cache) is StepCache:
            y = run_block(self, x, cos, sin, mask, cache)
            if y is not None:
                return y
        return super().forward(x, cos, sin, mask, cache)


class GraphLlama(Llama):
    """Llama whose decode steps, of one token with a plain Cache, are replays of a CUDA graph."""

    __module__ = Llama.__module__

    def forward(self, tokens: Tensor, cache: Any = None, all_positions: bool = False) -> Tensor:
        """As Llama.forward()."""
        is_step = type(cache) is Cache and tokens.shape == (1, 1) and tokens.dtype == torch.int64
        if is_step and not torch.compiler.is_compiling():
            cache.check(self, tokens)
            cache.slots(1)
            logits = replay(self, cache, tokens)
            if logits is not None:
                return logits[:, None] if all_positions else logits
        return super().forward(tokens, cache, all_positions)


# A step can be captured of a model that consists of these, whose inputs it can compare.
CLASSES = {CausalSelfAttention, MLP, RMSNorm, nn.Linear, nn.Embedding, nn.ModuleList}
CLASSES |= {Block, QuantizedLinear, QuantizedEmbedding, GraphBlock}
if gpu:
    CLASSES |= {gpu.PlanesLinear, gpu.PlanesEmbedding}


@torch.no_grad()
def accelerate(model: Any, compile: bool) -> None:
    """Make decode steps graphs; with `compile`, pack quantised matrices and compile the Blocks."""
    planes: dict = {}
    packed: dict = {}
    classes: dict = {Llama: GraphLlama}
    if compile:
        classes[Block] = GraphBlock
        planes = {QuantizedLinear: gpu.PlanesLinear, QuantizedEmbedding: gpu.PlanesEmbedding}
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))
        if type(module) in planes and module.ggml_type not in DENSE:
            module.__class__ = planes[type(module)]
            module.pack(packed)
    if compile:  # now, not in the midst of the first answer
        cache = model.new_cache(2)
        model(cache.tokens[:, :1], cache)
