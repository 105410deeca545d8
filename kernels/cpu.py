"""Layers of a model on a CPU, whose forward() is one call of cpu.cpp.

accelerate() makes a QuantizedLinear a NativeLinear, an embedding a NativeEmbedding, a Block a
NativeBlock. Each computes what its base class does, and leaves it to the base class where the
kernels cannot: with gradients, hooks, modules that were replaced, on other devices.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, getitem, itemgetter
from types import SimpleNamespace
from typing import Any

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


def hooked(attributes: Iterable[dict]) -> bool:
    """Whether calling a module does more than the forward() of its class; takes modules' vars()."""
    # torch has no public names for these; the tests notice if one is gone.
    attributes = [*attributes]
    hooks = map(itemgetter("_forward_hooks", "_forward_pre_hooks"), attributes)
    if any(chain.from_iterable(hooks)) or any("forward" in own for own in attributes):
        return True
    of_all = nn.modules.module
    return bool(of_all._global_forward_hooks or of_all._global_forward_pre_hooks)


def by_torch() -> bool:
    """Whether torch must compute: it is compiling, takes forward-mode derivatives, or there are no
    kernels."""
    if torch.compiler.is_compiling() or not load_kernels():
        return True
    return torch.autograd.forward_ad._current_level >= 0  # this, too, has no public name


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

    # Where pickles look for it: see UNACCELERATED in llama2.py.
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
PARTS = itemgetter("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
ATTENTION_MATRICES = itemgetter("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MATRICES = itemgetter("gate_proj", "up_proj", "down_proj")
# The classes of PARTS and of both lists of matrices.
CLASSES = [CausalSelfAttention, MLP, RMSNorm, RMSNorm, *[NativeLinear] * 7]
# The structs of cpu.cpp.
PASS, LAYER, STORED = struct.Struct("9n"), struct.Struct("23n 2d"), struct.Struct("3n")


def each(name: str, objects: Iterable) -> list:
    """An attribute of each of the objects."""
    return [*map(attrgetter(name), objects)]


def run_blocks(
    blocks: Sequence[nn.Module],
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor | None,
    cache: Any,
) -> Tensor | None:
    """What Blocks make of x (B, T, C) one after the other, in one call; None if torch must compute.

    Everything is looked up at each call: what was kept from an earlier one might have changed. It
    is looked up column by column, one attribute of all layers, because Python takes longer than C.
    """
    # 1. Is there a plain Cache, or one with `sequences` that are? A subclass may store or mask in
    #    another way.
    caches = [cache] if type(cache) is Cache else getattr(cache, "sequences", [])
    if {*map(type, caches)} != {Cache} or torch.is_grad_enabled() or by_torch():
        return None

    # 2. Are all modules of the classes that the kernel stands for, without hooks?
    try:
        attention, mlp, *norms = zip(*map(PARTS, each("_modules", blocks)))
        matrices = [*zip(*map(ATTENTION_MATRICES, each("_modules", attention)))]
        matrices += zip(*map(MLP_MATRICES, each("_modules", mlp)))
        modules = [attention, mlp, *norms, *matrices]
        if [{*map(type, column)} for column in modules] != [{kind} for kind in CLASSES]:
            return None
        if (
            hooked(map(vars, chain.from_iterable(modules)))
            or len({*each("head_dim", attention)}) > 1
        ):
            return None
        types = [each("ggml_type", column) for column in matrices]
        tensors = [[p["weight"] for p in each("_parameters", column)] for column in norms]
        for column, names in zip(matrices, types):
            tensors.append([*map(getitem, each("_buffers", column), names)])
        columns = [each("_cdata", column) for column in tensors]
        columns += [each("number", map(GGML_TYPES.__getitem__, names)) for names in types]
        columns += [each("fast", column) for column in matrices]
        columns += [each("eps", column) for column in norms]
    except (KeyError, AttributeError):  # a weight or a module is not where Block put it
        return None

    # 3. Is the mask the causal one? Another tensor is compared by its elements.
    if type(cache) is Cache:
        causal = cache.mask(x.shape[1])  # made once for all layers of a pass
    else:  # one token for each cache
        pos = torch.tensor(each("pos", caches)).view(-1, 1, 1, 1)
        causal = torch.arange(int(pos.max()) + 1) <= pos  # (B, 1, 1, S)
    if mask is not causal and (
        mask is None or causal is None or mask.dtype != causal.dtype or not mask.equal(causal)
    ):
        return None

    # 4. The structs. The kernel reads the tensors itself, and refuses what it cannot compute.
    y = torch.empty_like(x)
    angles = (cos, sin) if type(cache) is Cache else (cos.squeeze(1), sin.squeeze(1))
    numbers = attention[0].head_dim, torch.get_num_threads(), len(blocks), cache.layer, len(caches)
    packed = PASS.pack(*each("_cdata", (x, *angles, y)), *numbers)
    layers = b"".join(map(LAYER.pack, *columns))
    stored = [STORED.pack(c.k._cdata, c.v._cdata, c.pos) for c in caches]
    if load_kernels().run_blocks(packed, layers, b"".join(stored)):
        return None
    return y


class NativeBlock(Block):
    """Block in one call of the kernels, as long as its modules are those that Block made."""

    __module__ = QuantizedLinear.__module__

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        y = run_blocks([self], x, cos, sin, mask, cache)
        return super().forward(x, cos, sin, mask, cache) if y is None else y


class AllBlocks(list):
    """A model's Blocks as Llama.forward() is to see them: as one, which is one call if it can be."""

    def __iter__(self) -> Iterator:
        yield self.run

    def run(self, x: Tensor, *others: Any) -> Tensor:
        """As Block.forward()."""
        blocks, cache = self[:], others[-1]
        y = None
        if {*map(type, blocks)} == {NativeBlock} and not hooked(map(vars, blocks)):
            y = run_blocks(blocks, x, *others)
        if y is not None:
            return y
        for cache.layer, block in enumerate(blocks):
            x = block(x, *others)
        return x


class NativeLlama(Llama):
    """Llama whose Blocks are one call of the kernels, if all of them are NativeBlocks."""

    __module__ = QuantizedLinear.__module__

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, all_positions: bool = False
    ) -> Tensor:
        """As Llama.forward()."""
        if cache is None or torch.compiler.is_compiling():
            return super().forward(tokens, cache, all_positions)
        parts = vars(self) | self._modules | {"layers": AllBlocks(self.layers)}
        seen: Any = SimpleNamespace(**parts, parameters=self.parameters)
        return Llama.forward(seen, tokens, cache, all_positions)
