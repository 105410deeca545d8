"""Layers of a model on a CPU, whose forward() is one call of cpu.cpp.

accelerate() makes a QuantizedLinear a NativeLinear, an embedding a NativeEmbedding, a Block a
NativeBlock. Each computes what its base class does, and leaves it to the base class where the
kernels cannot: with gradients, hooks, modules that were replaced, on other devices.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
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
    }
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))
        if type(module) is NativeLinear:
            module.fast = fast


def hooked(attributes: Iterable[dict]) -> bool:
    """Whether calling a module does more than the forward() of its class; takes the modules' vars()."""
    # torch has no public names for these; the tests notice if one is gone.
    for own in attributes:  # a module's own hooks, and a forward() that was set on it
        if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
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

    __module__ = (
        QuantizedLinear.__module__
    )  # where pickles look for it: see UNACCELERATED in llama2.py
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


ATTENTION_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MATRICES = ("gate_proj", "up_proj", "down_proj")
# Of the modules of a NativeBlock, in the order in which pack() lists them.
BLOCK_CLASSES = [CausalSelfAttention, MLP, RMSNorm, RMSNorm, *[NativeLinear] * 7]
LAYER = struct.Struct("15n 7n 7n 4n 2d")  # struct Layer of cpu.cpp


class NativeBlock(Block):
    """Block in one call of the kernels, as long as its modules are those that Block made."""

    __module__ = QuantizedLinear.__module__

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        # A subclass of Cache may store or mask in another way.
        if type(cache) is Cache and not torch.is_grad_enabled() and not by_torch():
            y = torch.empty_like(x)
            try:
                layer = self.pack(x, cos, sin, mask, cache, y)
            except KeyError:  # a weight or a module is not where Block put it
                layer = b""
            if layer and not load_kernels().run_block(layer):
                cache.layer += 1  # as Cache.update() does
                return y
        return super().forward(x, cos, sin, mask, cache)

    def pack(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache, y: Tensor
    ) -> bytes:
        """The struct Layer of cpu.cpp; empty if the kernel cannot replace forward().

        Everything is looked up at each call: what was kept from an earlier one might have changed.
        nn.Module's attributes are avoided, because each takes 0.5 us: together 5 % of the time of a
        small model.
        """
        # 1. Are all modules of the classes that the kernel stands for, without hooks?
        children: Any = self._modules
        attention, mlp = children["self_attn"], children["mlp"]
        norms = [children["input_layernorm"], children["post_attention_layernorm"]]
        matrices = [*map(attention._modules.get, ATTENTION_MATRICES)]
        matrices += map(mlp._modules.get, MLP_MATRICES)
        modules = [attention, mlp, *norms, *matrices]
        if [*map(type, modules)] != BLOCK_CLASSES or hooked(map(vars, modules)):
            return b""

        # 2. Is the mask the causal one? The kernel knows no other. The cache makes it once for all
        #    layers of a pass; another tensor is compared by its elements.
        causal = cache.mask(x.shape[1])
        if mask is not causal and (
            mask is None or causal is None or mask.dtype != causal.dtype or not mask.equal(causal)
        ):
            return b""

        # 3. The fields of the struct, in its order. The kernel reads the tensors itself, and refuses
        #    what it cannot compute.
        weights = [matrix._buffers[matrix.ggml_type] for matrix in matrices]
        scales = [norm._parameters["weight"] for norm in norms]
        tensors = [x, cos, sin, cache.k, cache.v, *scales, *weights, y]
        return LAYER.pack(
            *[t._cdata for t in tensors],
            *[GGML_TYPES[matrix.ggml_type].number for matrix in matrices],
            *[matrix.fast for matrix in matrices],
            attention.head_dim,
            cache.pos,
            cache.layer,
            torch.get_num_threads(),
            *[norm.eps for norm in norms],
        )
