"""Layers of a model on a CPU, whose forward() is one call of cpu.cpp.

accelerate() makes a QuantizedLinear a NativeLinear, an embedding a NativeEmbedding, a Block a
NativeBlock. Each computes what its base class does, and leaves it to the base class where the
kernels cannot: with gradients, hooks, modules that were replaced, on other devices.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import chain
from operator import itemgetter
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from .build import load_kernels
from .llama2 import (
    DENSE_NAMES,
    GGML_TYPES,
    MLP,
    Block,
    Cache,
    CausalSelfAttention,
    Llama,
    Quantized,
    QuantizedEmbedding,
    QuantizedLinear,
    RMSNorm,
)


def accelerate(model: nn.Module, fast: bool) -> None:
    """Replace the classes of a model's modules by those below; weights, hooks and names stay."""
    classes = {
        QuantizedLinear: NativeLinear,
        QuantizedEmbedding: NativeEmbedding,
        Block: NativeBlock,
        Llama: NativeLlama,
    }
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))
        if type(module) is NativeLinear:
            module.fast = fast


class Parts:
    """The modules in a model or a Block, and what a pass uses of them: listed once, because that
    takes a while. At each call, what was listed is compared with what stands there then."""

    def __init__(self, owner: nn.Module) -> None:
        _, *self.modules = owner.modules()  # not the owner, which would never be freed
        self.own = [*map(vars, self.modules)]
        self.trees = [own["_modules"] for own in (vars(owner), *self.own) if own["_modules"]]
        self.weights = [own[name] for name in ("_parameters", "_buffers") for own in self.own]
        self.numbers = [(own, name) for own in self.own for name in NUMBERS if name in own]
        # torch has no public names for these; the tests notice if one is gone.
        hooks = "_forward_hooks", "_forward_pre_hooks"
        self.hooks = [own[name] for name in hooks for own in self.own]
        self.state = self.read()

    def read(self) -> list:
        """What stands there now."""
        return [
            [*map(type, self.modules)],
            [*chain.from_iterable(map(dict.values, self.trees))],
            [own[name] for own, name in self.numbers],
            [t._cdata for t in self.tensors()],
        ]

    def tensors(self) -> list[Tensor]:
        """All weights."""
        values = chain.from_iterable(map(dict.values, self.weights))
        return [t for t in values if t is not None]

    def hooked(self) -> bool:
        """Whether calling a module does more than the forward() of its class."""
        of_all = nn.modules.module
        hooks = *self.hooks, of_all._global_forward_hooks, of_all._global_forward_pre_hooks
        return any(hooks) or any("forward" in own for own in self.own)


LISTED: Any = WeakKeyDictionary()  # model or Block -> its Parts: no copy of a model has them
NUMBERS = "eps", "head_dim", "dtype", "ggml_type", "fast"  # attributes that a pass depends on


def find_parts(kind: Any, owner: nn.Module) -> Any:
    """The Parts, of this kind, of a model or a Block; listed anew if anything changed."""
    parts = LISTED.get(owner)
    if parts is None or parts.read() != parts.state:
        parts = LISTED[owner] = kind(owner)
    return parts


def by_torch() -> bool:
    """Whether torch must compute: it is compiling, takes forward-mode derivatives, or there are no
    kernels."""
    compiling = torch.compiler.is_compiling()
    # This, too, has no public name.
    return compiling or not load_kernels() or torch.autograd.forward_ad._current_level >= 0


def run_kernel(
    name: str, matrix: Quantized, x: Tensor, shape: Sequence[int], *sizes: int
) -> Tensor | None:
    """What a kernel computes from a matrix and x: float32 of this shape; None if it cannot."""
    y = torch.empty(shape, dtype=torch.float32, device=x.device)
    tensors = matrix.blocks, x, y
    on_cpu = all(t.device.type == "cpu" for t in tensors)
    if by_torch() or not on_cpu or not all(map(Tensor.is_contiguous, tensors)):
        return None
    numbers = torch.get_num_threads(), GGML_TYPES[matrix.ggml_type].number, matrix.blocks.nbytes
    kernel = getattr(load_kernels(), name)
    failed = kernel(*map(Tensor.data_ptr, tensors), *numbers, *sizes)
    return None if failed else y


class NativeLinear(QuantizedLinear):
    """QuantizedLinear by the kernels. With gradients or on other devices, torch computes it."""

    # Where pickles look for it: see Unaccelerated in llama2.py.
    __module__ = QuantizedLinear.__module__
    fast = False  # whether x is rounded to 16-bit integers; accelerate() decides

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out) of x's dtype."""
        N, K = self.out_features, self.in_features
        needs_grad = torch.is_grad_enabled() and x.requires_grad
        if not needs_grad and x.dtype in DENSE_NAMES and x.shape[-1:] == (K,):
            x32 = x.float().contiguous()
            shape = *x.shape[:-1], N
            y = run_kernel("linear", self, x32, shape, x.numel() // K, N, K, self.fast)
            if y is not None:
                return y.to(x.dtype)
        return super().forward(x)


class NativeEmbedding(QuantizedEmbedding):
    """QuantizedEmbedding by the kernels, which dequantise the rows in one call."""

    __module__ = QuantizedLinear.__module__

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (...) -> (..., C)."""
        if tokens.dtype == torch.int64:
            shape = *tokens.shape, self.in_features
            ids = tokens.contiguous()
            y = run_kernel("embed", self, ids, shape, tokens.numel(), self.in_features)
            if y is not None:
                return y.to(self.dtype)
        return super().forward(tokens)


# What a Block and its modules hold, by the names that Block gave them.
CHILDREN = itemgetter("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
ATTENTION_MATRICES = itemgetter("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MATRICES = itemgetter("gate_proj", "up_proj", "down_proj")
# The classes of CHILDREN and of both lists of matrices.
CLASSES = [CausalSelfAttention, MLP, RMSNorm, RMSNorm, *[NativeLinear] * 7]
# The structs of cpu.cpp.
PASS, LAYER, STORED = struct.Struct("8n"), struct.Struct("24n 2d"), struct.Struct("3n")


class NativeParts(Parts):
    """Parts, and the layers' structs, one after the other; none if the kernel cannot stand for one."""

    def __init__(self, owner: nn.Module) -> None:
        super().__init__(owner)
        self.layers = b""
        blocks: Any = owner._modules.get("layers", [owner])
        with suppress(KeyError, AttributeError):  # something is not where Block put it
            if {*map(type, blocks)} <= {NativeBlock, type(owner)}:
                self.layers = b"".join(map(pack_layer, blocks))


def pack_layer(block: nn.Module) -> bytes:
    """The struct of a Block's modules; KeyError if they are of other classes."""
    attention, mlp, *norms = CHILDREN(block._modules)
    matrices = ATTENTION_MATRICES(attention._modules) + MLP_MATRICES(mlp._modules)
    if [*map(type, (attention, mlp, *norms, *matrices))] != CLASSES:
        raise KeyError
    tensors = [norm._parameters["weight"] for norm in norms]
    tensors += [matrix._buffers[matrix.ggml_type] for matrix in matrices]
    return LAYER.pack(
        *[t._cdata for t in tensors],
        *[GGML_TYPES[matrix.ggml_type].number for matrix in matrices],
        *[matrix.fast for matrix in matrices],
        attention.head_dim,
        *[norm.eps for norm in norms],
    )


def run_blocks(
    owner: nn.Module, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any
) -> Tensor | None:
    """What a Block, or all Blocks of a model, make of x (B, T, C), in one call; None if torch must
    compute."""
    # 1. Is there a plain Cache, or one with `sequences` that are? A subclass may store or mask in
    #    another way.
    plain = type(cache) is Cache
    caches = [cache] if plain else getattr(cache, "sequences", [])
    if {*map(type, caches)} != {Cache} or torch.is_grad_enabled() or by_torch():
        return None

    # 2. Are all modules of the classes that the kernel stands for, without hooks?
    parts = find_parts(NativeParts, owner)
    if not parts.layers or parts.hooked():
        return None

    # 3. Is the mask the causal one? Another tensor is compared by its elements.
    if plain:
        causal = cache.mask(x.shape[1])  # made once for all layers of a pass
    else:  # one token for each cache
        pos = torch.tensor([c.pos for c in caches]).view(-1, 1, 1, 1)
        causal = torch.arange(int(pos.max()) + 1) <= pos  # (B, 1, 1, S)
    if mask is not causal and (
        mask is None or causal is None or mask.dtype != causal.dtype or not mask.equal(causal)
    ):
        return None

    # 4. The other structs. The kernel reads the tensors itself, and refuses what it cannot compute.
    y = torch.empty_like(x)
    angles = (cos, sin) if plain else (cos.squeeze(1), sin.squeeze(1))
    numbers = torch.get_num_threads(), len(parts.layers) // LAYER.size, cache.layer, len(caches)
    packed = PASS.pack(*[t._cdata for t in (x, *angles, y)], *numbers)
    stored = b"".join(STORED.pack(c.k._cdata, c.v._cdata, c.pos) for c in caches)
    failed = load_kernels().run_blocks(packed, parts.layers, stored)
    return None if failed else y


class NativeBlock(Block):
    """Block in one call of the kernels, as long as its modules are those that Block made."""

    __module__ = QuantizedLinear.__module__

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        y = run_blocks(self, x, cos, sin, mask, cache)
        return super().forward(x, cos, sin, mask, cache) if y is None else y


class AllBlocks:
    """A model's Blocks as Llama.forward() is to see them: as one, which is one call if it can be."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __len__(self) -> int:
        return len(self.model.layers)

    def __iter__(self) -> Iterator:
        yield self.run

    def run(self, x: Tensor, *others: Any) -> Tensor:
        """As Block.forward()."""
        y = run_blocks(self.model, x, *others)
        if y is None:
            y, cache = x, others[-1]
            for cache.layer, block in enumerate(self.model.layers):
                y = block(y, *others)
        return y


class NativeLlama(Llama):
    """Llama whose Blocks are one call of the kernels, if all of them are NativeBlocks."""

    __module__ = QuantizedLinear.__module__

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, all_positions: bool = False
    ) -> Tensor:
        """As Llama.forward()."""
        if cache is None or torch.compiler.is_compiling():
            return super().forward(tokens, cache, all_positions)
        parts = vars(self) | self._modules | {"layers": AllBlocks(self)}
        seen: Any = SimpleNamespace(**parts, parameters=self.parameters)
        return Llama.forward(seen, tokens, cache, all_positions)
