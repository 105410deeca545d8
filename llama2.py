"""Llama 2 in one file of PyTorch: run it, read it beside the paper, copy the part you need.

It is the whole path from a file of weights to text: model, cache, quantised weights, checkpoints,
tokenizer, chat format, sampling, command line. It is not a training framework, a server or a zoo.

    python llama2.py --prompt "Once upon a time"               # the small bundled model
    python llama2.py --model llama-2-7b-chat.Q4_0.gguf --chat  # the real thing
    model, tokenizer = llama2.load("llama-2-7b.Q4_0.gguf")     # or a Meta or Hugging Face folder
    for token_id in llama2.generate(model, tokenizer.encode("Hello")): ...
    logits = model(tokens, llama2.Cache(model.config))         # (B, T) int64 -> (B, V) float32

One letter per dimension, in every shape comment:

    B  batch             H  query heads            D  head size, C / H
    T  new tokens        G  key/value heads        C  hidden size
    S  visible tokens    L  layers                 V  vocabulary

The way of the data, with the section that holds each step:

    text --Tokenizer--> ids (B, T) --embed_tokens--> x (B, T, C)
      L times, Block:   x = x + CausalSelfAttention(RMSNorm(x))       reads and extends the Cache
                        x = x + MLP(RMSNorm(x))
    x --RMSNorm, lm_head--> logits (B, V) --sample--> next id --StreamDecoder--> text

Papers: Llama 2 (Touvron et al. 2023, arXiv:2307.09288), LLaMA (arXiv:2302.13971), RoPE (Su et al.
2021, arXiv:2104.09864), RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), SwiGLU (Shazeer 2020,
arXiv:2002.05202), grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).
"""

from __future__ import annotations

import argparse
import codecs
import ctypes
import datetime
import functools
import hashlib
import io
import json
import math
import mmap
import os
import pickletools
import re
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import unicodedata
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Ctrl-C while torch is imported, which takes seconds: no traceback
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, nn

# --------------------------------------------------------------------------------------------------
# 1. Config


@dataclass(frozen=True)
class Config:
    """The architecture, named as in Hugging Face's config.json. ValueError on wrong values."""

    hidden_size: int = 4096  # C, the width of the residual stream
    intermediate_size: int = 11008  # the width inside the MLP
    num_hidden_layers: int = 32  # L
    num_attention_heads: int = 32  # H
    num_key_value_heads: int = 32  # G; fewer than H is grouped-query attention
    vocab_size: int = 32000  # V
    max_position_embeddings: int = 4096  # the context that the model was trained for
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling_factor: float = 1.0  # linear position interpolation: position / factor
    rope_freq_factors: tuple[float, ...] | None = None  # D / 2 divisors of the rotary frequencies
    tie_word_embeddings: bool = False  # the output matrix is the embedding matrix
    bos_token_id: int = 1
    eos_token_id: int = 2

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            count = isinstance(value, int) and 0 < value <= 2**28  # no product of two overflows
            if item.type == "int" and not count and not item.name.endswith("_token_id"):
                raise ValueError(f"{item.name} is {value!r}; accepted is 1 to 2**28")
            number = isinstance(value, (int, float)) and 0 < value < math.inf
            if item.type == "float" and not number:
                raise ValueError(f"{item.name} is {value!r}; accepted is a positive number")
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if self.hidden_size % heads or self.hidden_size // heads % 2:
            raise ValueError(
                f"hidden_size {self.hidden_size} must be num_attention_heads {heads} x an even size"
            )
        if heads % kv_heads:
            raise ValueError(
                f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}"
            )
        factors = self.rope_freq_factors
        if factors is not None and (
            len(factors) != self.head_dim // 2 or not all(0 < f < math.inf for f in factors)
        ):
            needed = f"needed are {self.head_dim // 2} positive numbers"
            raise ValueError(f"rope_freq_factors has {len(factors)} values; {needed}")

    @property
    def head_dim(self) -> int:
        """D, the size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def llama2_7b(cls) -> Config:
        """Llama 2 7B (paper, table 1)."""
        return cls()

    @classmethod
    def llama2_13b(cls) -> Config:
        """Llama 2 13B (paper, table 1)."""
        return cls(
            hidden_size=5120,
            intermediate_size=13824,
            num_hidden_layers=40,
            num_attention_heads=40,
            num_key_value_heads=40,
        )

    @classmethod
    def llama2_70b(cls) -> Config:
        """Llama 2 70B (paper, table 1): eight key/value heads serve 64 query heads."""
        return cls(
            hidden_size=8192,
            intermediate_size=28672,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
        )


# --------------------------------------------------------------------------------------------------
# 2. Rotary embeddings


def rope_tables(
    config: Config, length: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/D), each (length, D/2) (RoPE paper, section 3.2.2)."""
    # float32 island 1 of 4: in 16 bits, neighbouring positions become the same after a few hundred.
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequency = config.rope_theta ** (-pair / config.head_dim)  # (D/2,)
    if config.rope_freq_factors is not None:
        frequency = frequency / torch.tensor(
            config.rope_freq_factors, dtype=torch.float32, device=device
        )
    position = torch.arange(length, dtype=torch.float32, device=device) / config.rope_scaling_factor
    angle = torch.outer(position, frequency)  # (length, D/2)
    return angle.cos(), angle.sin()


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (2i, 2i+1) of x (B, T, heads, D) by its angle; cos, sin: ([B,] T, D/2).

    This is the order of Meta's weights. Hugging Face pairs i with i + D/2 and stores the
    rows of q_proj and k_proj in another order to match: rotated here, those would write gibberish.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (B, T, heads, D/2)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same angle for all heads
    return (
        torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).type_as(x)
    )


# --------------------------------------------------------------------------------------------------
# 3. Cache


class Cache:
    """What one pass hands to the next: keys, values, RoPE tables, causal masks, the position.

    It is allocated once for `max_seq_len` tokens (default: the model's context) and owns the
    position, so that no caller can be off by one. `padding` (B,) says how many tokens at the left
    of each row are filler: prompts of different lengths are aligned at their ends. A full cache
    raises ValueError.
    """

    def __init__(
        self,
        config: Config,
        batch_size: int = 1,
        max_seq_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        padding: Tensor | None = None,
    ) -> None:
        self.max_seq_len = config.max_position_embeddings if max_seq_len is None else max_seq_len
        if batch_size < 1 or self.max_seq_len < 1:
            raise ValueError(
                f"batch_size {batch_size} and max_seq_len {self.max_seq_len} must be at least 1"
            )
        shape = (
            config.num_hidden_layers,
            batch_size,
            config.num_key_value_heads,
            self.max_seq_len,
            config.head_dim,
        )
        self.k = torch.zeros(shape, dtype=dtype, device=device)  # (L, B, G, max_seq_len, D)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.cos, self.sin = rope_tables(
            config, self.max_seq_len, device
        )  # (max_seq_len, D/2) float32
        self.padding = None if padding is None else padding.to(device)
        self.band = torch.ones(0, self.max_seq_len, dtype=torch.bool, device=device)  # see mask()
        self.pos = 0  # how many tokens are stored; the next one gets this position

    @property
    def batch_size(self) -> int:
        """B, the number of rows that the cache was made for."""
        return self.k.shape[1]

    def slots(self, T: int) -> slice:
        """Where the next T tokens are stored. Raises ValueError when they do not fit."""
        if self.pos + T > self.max_seq_len:
            raise ValueError(
                f"the cache holds {self.max_seq_len} tokens: {self.pos} are stored, {T} more came"
            )
        return slice(self.pos, self.pos + T)

    def rope(self, T: int) -> tuple[Tensor, Tensor]:
        """cos and sin for the next T tokens: (T, D/2), with padding (B, T, D/2)."""
        where = self.slots(T)
        if self.padding is not None:  # a row's first real token is at position 0
            slot = torch.arange(where.start, where.stop, device=self.cos.device)
            where = (slot - self.padding[:, None]).clamp(min=0)
        return self.cos[where], self.sin[where]

    def mask(self, T: int) -> Tensor | None:
        """Which of the S = pos + T tokens a new one sees: bool (T, S), with padding (B, 1, T, S).

        Aligned at the lower right, a new token sees the past and itself: for pos = 2 and T = 3,

            1 1 1 . .
            1 1 1 1 .
            1 1 1 1 1

        (is_causal=True of scaled_dot_product_attention aligns at the upper left: wrong here.) Every
        such mask is the lower right corner of one band (T, max_seq_len), which is kept for the
        largest T that was asked for. A single token sees everything: None.
        """
        S = self.slots(T).stop
        if T == 1 and self.padding is None:
            return None
        if T > len(self.band):
            ones = torch.ones(T, self.max_seq_len, dtype=torch.bool, device=self.band.device)
            self.band = ones.tril(self.max_seq_len - T)
        mask = self.band[len(self.band) - T :, self.max_seq_len - S :]  # (T, S)
        if self.padding is None:
            return mask
        slot = torch.arange(S, device=mask.device)
        real = slot >= self.padding[:, None, None, None]  # (B, 1, 1, S)
        return mask & (
            real | (slot == slot[S - T :, None])
        )  # filler sees itself: softmax over nothing is NaN

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, G, T, D) of one layer; return all that is visible, views (B, G, S, D)."""
        where = self.slots(k.shape[2])
        self.k[layer, :, :, where] = k
        self.v[layer, :, :, where] = v
        return self.k[layer, :, :, : where.stop], self.v[layer, :, :, : where.stop]

    def advance(self, T: int) -> None:
        """Count T tokens as stored: called once per forward pass, after the last layer."""
        self.pos = self.slots(T).stop

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens. Raises ValueError when fewer are stored."""
        if not 0 <= length <= self.pos:
            raise ValueError(f"cannot truncate to {length} tokens: {self.pos} are stored")
        self.pos = length

    def reset(self) -> None:
        """Forget everything; the memory is kept."""
        self.truncate(0)


# --------------------------------------------------------------------------------------------------
# 4. RMSNorm


class RMSNorm(nn.Module):
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension (RMSNorm paper, equation 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        # float32 island 2 of 4: the square of 300 overflows float16. Cast back first, as Meta does.
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return x32.type_as(x) * self.weight


# --------------------------------------------------------------------------------------------------
# 5. CausalSelfAttention


class CausalSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v per head; H/G heads share one key/value head (GQA paper, 2.2)."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.layer = layer  # which part of the cache is ours
        self.head_dim = config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, G, D)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = apply_rotary_emb(q, cos, sin).transpose(1, 2)  # (B, H, T, D)
        k = apply_rotary_emb(k, cos, sin).transpose(1, 2)  # (B, G, T, D)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)  # (B, G, S, D)

        # Query head h reads key/value head h // (H/G). The H/G heads of a group become rows of one
        # attention, so that keys and values are read once and never repeated in memory.
        H, G = q.shape[1], k.shape[1]
        q = q.reshape(B, G, H // G * T, self.head_dim)
        if mask is not None and H != G:
            mask = mask.repeat(*[1] * (mask.dim() - 2), H // G, 1)  # (..., H/G * T, S)
        # float32 island 3 of 4, inside: the fused kernels keep scores and softmax in float32.
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, G, H/G * T, D)
        y = y.reshape(B, H, T, self.head_dim).transpose(1, 2).flatten(2)  # (B, T, H * D)
        return self.o_proj(y)


# --------------------------------------------------------------------------------------------------
# 6. MLP


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU paper, section 2). Meta calls the three w2, w1 and w3."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# --------------------------------------------------------------------------------------------------
# 7. Block


class Block(nn.Module):
    """One layer: attention, then MLP, each behind its norm and beside a residual connection."""

    def __init__(self, config: Config, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = CausalSelfAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


# --------------------------------------------------------------------------------------------------
# 8. Llama


class Llama(nn.Module):
    """The whole model. state_dict() has Hugging Face's keys less the leading "model.".

    The rows of q_proj and k_proj are in Meta's order (see apply_rotary_emb): a Hugging Face state
    dict must come through load(), which permutes them; load_state_dict() takes it and is wrong.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        # As small as nn.Linear's: the N(0, 1) of nn.Embedding makes tied logits sqrt(C) too large.
        rows = torch.empty(config.vocab_size, config.hidden_size)
        rows.uniform_(-(config.hidden_size**-0.5), config.hidden_size**-0.5)
        self.embed_tokens = nn.Embedding.from_pretrained(rows, freeze=False)
        self.layers = nn.ModuleList(
            Block(config, layer) for layer in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, all_positions: bool = False
    ) -> Tensor:
        """tokens (B, T) int64 -> logits float32: (B, V) of the last position, or (B, T, V) of all.

        With a cache the tokens continue what it holds. Without one they stand alone: one causal
        pass, all positions, differentiable. ValueError if the cache is full or for another batch.
        """
        B, T = tokens.shape
        if T == 0 or (cache is not None and cache.batch_size != B):
            rows = "" if cache is None else f" and a cache for {cache.batch_size} rows"
            raise ValueError(
                f"tokens of shape ({B}, {T}){rows}; needed is one token or more, and equal rows"
            )
        if cache is None:
            cos, sin = rope_tables(self.config, T, tokens.device)
            mask = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
            all_positions = True
        else:
            (cos, sin), mask = cache.rope(T), cache.mask(T)

        with torch.set_grad_enabled(
            cache is None and torch.is_grad_enabled()
        ):  # no gradient through a cache
            x = self.embed_tokens(tokens)  # (B, T, C)
            x = self.run_layers(x, cos, sin, mask, cache)
            if not all_positions:
                x = x[:, -1]  # (B, C): the rest of the largest matrix product would be thrown away
            logits = self.lm_head(
                self.norm(x)
            ).float()  # float32 island 4 of 4: what is sampled from

        if cache is not None:
            cache.advance(T)
        return logits

    def run_layers(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """All layers, one after the other: x (B, T, C) -> (B, T, C)."""
        for layer in self.layers:
            x = layer(x, cos, sin, mask, cache)
        return x


# ==================================================================================================
# The end of the model. Above: torch and math only, to be read beside the paper and cut out whole.
# Below: what it takes to run it on real files, for real users.
# ==================================================================================================


# --------------------------------------------------------------------------------------------------
# 9. Quantised weights
#
# A block is a run of 32 or 256 weights of a row: integers q of 2 to 8 bits, and for every 16 or 32
# of them a scale s and, in some types, a minimum m; a weight is s * q - m. What follows is the
# reference, bit for bit equal to the gguf package; the C++ below does the same many times faster.


def half(b: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block: (n, bytes) -> (n, 1)."""
    return b[:, at : at + 2].view(torch.float16).float()


# The types that are no blocks, as GGUF and safetensors name them.
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def bits(b: Tensor, width: int, n: int) -> Tensor:
    """Unpack n-bit integers: the lowest n bits of `width` bytes come first, then the next n."""
    b = b.contiguous().view(len(b), -1, width)
    return torch.stack([b >> shift & (1 << n) - 1 for shift in range(0, 8, n)], 2).flatten(1)


def minus(q: Tensor, offset: int) -> Tensor:
    """Unsigned integers, made signed."""
    return q.view(torch.int8) - offset


Parts = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]  # q (n, block), s, m (n, groups)


def scales_k4(b: Tensor) -> tuple[Tensor, Tensor]:
    """8 scales, 8 minima of Q4_K and Q5_K, 6 bits each; the last four's top bits are elsewhere."""
    packed = b[:, 4:16].T.contiguous()  # (12, n): blocks side by side, which is faster
    low, top = torch.cat((packed[8:] & 15, packed[8:] >> 4)), packed[:8] >> 6 << 4  # (8, n)
    scale = torch.cat((packed[:4] & 63, low[:4] | top[:4]))
    minimum = torch.cat((packed[4:8] & 63, low[4:] | top[4:]))
    return half(b, 0) * scale.T, half(b, 2) * minimum.T


def q2_k(b: Tensor) -> Parts:
    """Q2_K: 16 scales and 16 minima of 4 bits."""
    scale, minimum = half(b, 80) * (b[:, :16] & 15), half(b, 82) * (b[:, :16] >> 4)
    return bits(b[:, 16:80], 32, 2), scale, minimum


def q3_k(b: Tensor) -> Parts:
    """Q3_K: the third bits apart, 16 scales of 6 bits."""
    scale = minus(bits(b[:, 96:104], 8, 4) | bits(b[:, 104:108], 4, 2) << 4, 32)
    q = bits(b[:, 32:96], 32, 2) | bits(b[:, :32], 32, 1) << 2
    return minus(q, 4), half(b, 108) * scale


def q6_k(b: Tensor) -> Parts:
    """Q6_K: the upper two bits apart, 16 scales of 8 bits."""
    q = bits(b[:, :128], 64, 4) | bits(b[:, 128:192], 32, 2) << 4
    return minus(q, 32), half(b, 208) * b[:, 192:208].view(torch.int8)


def fifth(b: Tensor, width: int) -> Tensor:
    """One bit per weight, the fifth of each."""
    return bits(b, width, 1) << 4


GGML_TYPES: dict[str, tuple[int, int, Callable[[Tensor], Parts | tuple[Tensor]]]] = {
    # weights and bytes per block, uint8 (n, bytes) -> parts of n blocks, or weights as they are
    "F32": (1, 4, lambda b: (b.view(torch.float32),)),
    "F16": (1, 2, lambda b: (b.view(torch.float16),)),
    "BF16": (1, 2, lambda b: (b.view(torch.bfloat16),)),
    "Q4_0": (32, 18, lambda b: (minus(bits(b[:, 2:], 16, 4), 8), half(b, 0))),
    "Q4_1": (32, 20, lambda b: (bits(b[:, 4:], 16, 4), half(b, 0), -half(b, 2))),
    "Q5_0": (
        32,
        22,
        lambda b: (minus(bits(b[:, 6:], 16, 4) | fifth(b[:, 2:6], 1), 16), half(b, 0)),
    ),
    "Q5_1": (
        32,
        24,
        lambda b: (bits(b[:, 8:], 16, 4) | fifth(b[:, 4:8], 1), half(b, 0), -half(b, 2)),
    ),
    "Q8_0": (32, 34, lambda b: (b[:, 2:].view(torch.int8), half(b, 0))),
    "Q2_K": (256, 84, q2_k),
    "Q3_K": (256, 110, q3_k),
    "Q4_K": (256, 144, lambda b: (bits(b[:, 16:], 32, 4), *scales_k4(b))),
    "Q5_K": (
        256,
        176,
        lambda b: (bits(b[:, 48:], 32, 4) | fifth(b[:, 16:48], 32), *scales_k4(b)),
    ),
    "Q6_K": (256, 210, q6_k),
}


def dequantize(blocks: Tensor, kind: str) -> Tensor:
    """uint8 blocks (rows, bytes) of a ggml type -> float32 (rows, weights); rare types by gguf."""
    if kind in GGML_TYPES:
        _, size, function = GGML_TYPES[kind]
        q, *scales = function(blocks.reshape(-1, size))
        w = q.float()
        if scales:  # (n, groups, weights of a group)
            w = w.view(len(w), scales[0].shape[1], -1).mul_(scales[0][..., None])
        if len(scales) == 2:
            w.sub_(scales[1][..., None])
        return w.view(len(blocks), -1)
    import gguf
    import numpy

    with numpy.errstate(all="ignore"):  # what is not finite is found at the logits
        array = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(array)


# The same in C++. linear_TYPE: rows of blocks times rows of float32, nothing unpacked to memory;
# linear16 and linear8: those rows as integers of 16 or 8 bits, a scale for each group of weights;
# product16 and product8: for many rows, as bfloat16 or such integers; dequantize and bfloat16;
# run_layers: all between embedding and head. F32, F16 and BF16 are handled as blocks of 32, too.
KERNELS = r"""
// Weights are multiplied as they lie in the file. GNU vector types compile to what the machine has
// (AVX-512, AVX2, NEON); some intrinsics help where GCC does not see the one instruction for it.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>
#ifdef __AVX2__
#include <immintrin.h>
#endif
#define ALWAYS inline __attribute__((always_inline))
#define INLINE static ALWAYS
typedef const uint8_t *Bytes;
typedef float Floats __attribute__((vector_size(64)));  // 16 weights are handled at a time
typedef int32_t Ints __attribute__((vector_size(64)));
typedef int16_t Shorts __attribute__((vector_size(64)));  // or 32, as integers
typedef int16_t Half __attribute__((vector_size(32)));
typedef uint8_t Small __attribute__((vector_size(32)));  // or 32, as bytes
typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t Words __attribute__((vector_size(16)));
static const Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
static const uint32_t LOW2 = 0x03030303, LOW4 = 0x0f0f0f0f, LOW6 = 0x3f3f3f3f;

template <class V> INLINE V load(const void *p) { V v; memcpy(&v, p, sizeof v); return v; }
INLINE void store(float *to, Floats f) { memcpy(to, &f, sizeof f); }
INLINE void store(uint16_t *to, Floats f) {  // as bfloat16, rounded to the nearest
#ifdef __AVX512BF16__
  auto v = _mm512_cvtneps_pbh((__m512)f);
#else
  typedef uint32_t Bits __attribute__((vector_size(64)));
  typedef uint16_t Words __attribute__((vector_size(32)));
  auto v = __builtin_convertvector(((Bits)f + 0x7fff + ((Bits)f >> 16 & 1)) >> 16, Words);
#endif
  memcpy(to, &v, 32);
}
static const struct Halves {  // float16 -> float by table: converting one number is slow on x86
  float f[65536];
  Halves() { for (int i = 0; i < 65536; i++) { uint16_t h = i; f[i] = load<_Float16>(&h); } }
} halves;
INLINE float half(Bytes p) { return halves.f[load<uint16_t>(p)]; }
INLINE Floats floats(Ints v) { return __builtin_convertvector(v, Floats); }

template <class To, class From> INLINE To widen(Bytes p) {  // numbers of one type to another
  To v;
  for (int i = 0; i < sizeof(v) / sizeof(v[0]); i++) v[i] = load<From>(p + i * sizeof(From));
  return v;
}
template <class To, class From> INLINE To join(From low, From high) {
#ifdef __AVX512F__
  typedef int64_t Quads __attribute__((vector_size(32)));
  return (To)__builtin_shufflevector((Quads)low, (Quads)high, 0, 1, 2, 3, 4, 5, 6, 7);
#else
  To v;
  memcpy(&v, &low, 32), memcpy((char *)&v + 32, &high, 32);
  return v;
#endif
}
INLINE Floats all(float f) {
#ifdef __AVX512F__
  return f - Floats{};
#else
  return join<Floats>(f - Eight{}, f - Eight{});  // GCC goes number by number with 16
#endif
}
#define WIDEN(To, From) template <> ALWAYS To widen<To, From>(Bytes p)
#if defined(__AVX512F__)
WIDEN(Ints, uint8_t) { return (Ints)_mm512_cvtepu8_epi32(load<__m128i>(p)); }
WIDEN(Ints, int8_t) { return (Ints)_mm512_cvtepi8_epi32(load<__m128i>(p)); }
WIDEN(Ints, uint16_t) { return (Ints)_mm512_cvtepu16_epi32(load<__m256i>(p)); }
WIDEN(Floats, _Float16) { return (Floats)_mm512_cvtph_ps(load<__m256i>(p)); }
#elif defined(__AVX2__)
INLINE __m128i eight(Bytes p) { return _mm_loadl_epi64((const __m128i *)p); }
WIDEN(Ints, uint8_t) {
  return join<Ints>(_mm256_cvtepu8_epi32(eight(p)), _mm256_cvtepu8_epi32(eight(p + 8)));
}
WIDEN(Ints, int8_t) {
  return join<Ints>(_mm256_cvtepi8_epi32(eight(p)), _mm256_cvtepi8_epi32(eight(p + 8)));
}
WIDEN(Floats, _Float16) {
  return join<Floats>(_mm256_cvtph_ps(load<__m128i>(p)), _mm256_cvtph_ps(load<__m128i>(p + 16)));
}
#endif
template <class To, class From> INLINE To widen(Bytes line, int i) {  // 16 of 32 halves
#ifdef __AVX512F__  // a line of memory is asked for at once, not half by half: up to 9 % faster
  auto v = load<__m512i>(line);
  auto half = i ? _mm512_extracti64x4_epi64(v, 1) : _mm512_castsi512_si256(v);
  return widen<To, From>((Bytes)&half);
#endif
  return widen<To, From>(line + 32 * i);
}
#ifdef __AVX512BW__
WIDEN(Half, uint8_t) { return (Half)_mm256_cvtepu8_epi16(load<__m128i>(p)); }
WIDEN(Shorts, uint8_t) { return (Shorts)_mm512_cvtepu8_epi16(load<__m256i>(p)); }
WIDEN(Shorts, int8_t) { return (Shorts)_mm512_cvtepi8_epi16(load<__m256i>(p)); }
INLINE Floats spread(Floats v, Ints lanes) {
  return (Floats)_mm512_permutexvar_ps((__m512i)lanes, (__m512)v);
}
INLINE Ints pairs(Shorts a, Shorts b) {  // a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
  return (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
}
typedef int16_t Rounded;
#else
typedef float Rounded;  // which is faster here
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define QUADS
WIDEN(Small, uint8_t) { return load<Small>(p); }
INLINE Eight quads(Small a, Small b) {  // of unsigned by signed bytes: 4 products each, added up
  return (Eight)_mm256_cvtepi32_ps(_mm256_dpbusd_epi32(__m256i{}, (__m256i)a, (__m256i)b));
}
typedef int8_t Tiny;
#else
typedef Rounded Tiny;
#endif

// The integers of a block, 16 Ints or 32 Shorts. Bits `mask` << from of each byte, moved to `to`:
template <class V> INLINE V bits(Bytes p, int from, int mask, int to = 0) {
  V v = widen<V, uint8_t>(p);
  auto shift = v[0], kept = v[0];
  shift = from > to ? from - to : to - from, kept = mask << to;
  v = from > to ? v >> shift : v << shift;
  return to == 0 && 255 >> from <= mask ? v : v & kept;
}
// 16 bytes of which the lower four bits are the first 16 of 32 integers
template <class V> ALWAYS V nibbles(Bytes p, int i) { return bits<V>(p, 4 * i, 15); }
// 32 bits, each the fifth of an integer
template <class V> ALWAYS V fifth(Bytes p, int i) {
  return (load<int32_t>(p) >> (LANE + 16 * i) & 1) << 4;
}
#ifdef __AVX512BW__
template <> ALWAYS Shorts nibbles(Bytes p, int) {
  Half v = widen<Half, uint8_t>(p);
  return join<Shorts>(v & 15, v >> 4);
}
template <> ALWAYS Shorts fifth(Bytes p, int) {
  return (Shorts)_mm512_maskz_set1_epi16(load<uint32_t>(p), 16);
}
template <> ALWAYS Small nibbles(Bytes p, int) {
  __m128i v = load<__m128i>(p);
  return (Small)_mm256_set_m128i(_mm_srli_epi16(v, 4), v) & 15;
}
template <> ALWAYS Small fifth(Bytes p, int) {
  return (Small)_mm256_maskz_set1_epi8(load<uint32_t>(p), 16);
}
#endif

INLINE void scales_k4(Bytes b, Floats &s, Floats &m) {  // 8 scales, 8 minima: 6 bits, 12 bytes
  Words v = load<Words>(b), low = {LOW6, LOW4, LOW6, LOW4}, top = {0, LOW6 - LOW4, 0, LOW6 - LOW4};
  v = (__builtin_shufflevector(v, v, 1, 3, 2, 3) >> (Words){0, 0, 0, 4} & low) |
      (__builtin_shufflevector(v, v, 1, 1, 2, 2) >> (Words){0, 2, 0, 2} & top);
  Floats f = floats(widen<Ints, uint8_t>((Bytes)&v)), none = {};
  s = f * half(b);
  m = half(b + 2) * __builtin_shufflevector(f, none, 8, 9, 10, 11, 12, 13, 14, 15, 16, 16, 16, 16,
                                            16, 16, 16, 16);
}
INLINE Floats scales_k3(Bytes b) {  // 16 scales of 6 bits in 12 bytes
  Words v = {load<uint32_t>(b + 96), load<uint32_t>(b + 100), load<uint32_t>(b + 104)};
  v = (__builtin_shufflevector(v, v, 0, 1, 0, 1) >> (Words){0, 0, 4, 4} & LOW4) |
      (__builtin_shufflevector(v, v, 2, 2, 2, 2) >> (Words){0, 2, 4, 6} & LOW2) << 4;
  return (floats(widen<Ints, uint8_t>((Bytes)&v)) - 32.f) * half(b + 108);
}

// The i-th 16 weights of a block, not yet scaled
template <class T> INLINE Floats unscaled(Bytes b, int i) {
  auto q = T::template values<Ints>(b, i);
  if constexpr (T::BITS >= 16) return (Floats)q;
#ifdef __AVX512F__
  // 4 bits: one instruction looks up 16 numbers among the 16 there are
  else if constexpr (T::BITS == 4)
    return (Floats)_mm512_permutexvar_ps((__m512i)q, (__m512)floats(LANE - (int)T::ZERO));
#endif
  else return floats(q - (int)T::ZERO);
}
INLINE float sum(Floats v) {
#ifdef __AVX512F__
  return _mm512_reduce_add_ps((__m512)v);
#endif
#pragma GCC unroll 4
  for (int n = 8; n; n /= 2)
#pragma GCC unroll 8
    for (int i = 0; i < n; i++) v[i] += v[i + n];
  return v[0];
}
// Rows to be multiplied, float32 or integers with a step for each group, and the sums of the groups
template <class X> struct Rows { const X *x; const float *steps, *sums; };

// y[r] = (row w) . x[r] for R rows of x: of each group of weights s * (q . x) - m * sum(x); bytes
// must be unsigned, for them m takes the place of the zero point
template <class T, int R, class X>
INLINE void dot(Bytes w, Rows<X> rows, float *y, long N, long K) {
  const bool exact = std::is_same<X, float>::value, bytes = sizeof(X) == 1;
  const bool shifted = T::MINIMUM || (bytes && T::ZERO);
  typename std::conditional<bytes, Eight, Floats>::type total[R][2] = {};
  Floats lanes[R] = {}, scales[R];
  float low[R] = {};
  alignas(64) float scale[R][16];
  for (long k = 0; k < K; k += T::BLOCK, w += T::SIZE) {
    for (int j = 0; j < T::SIZE && T::BITS < 16; j += 64)  // dense rows are 20 % faster without
      __builtin_prefetch(w + 1024 * T::BITS + j, 0, 2);
    typename T::Scales s, m;  // one number or one for each group
    T::scales(w, s, m);
    for (int r = 0; r < R && T::BITS < 16; r++) {
      long group = (r * K + k) / T::GROUP;
      typename T::Scales step, sums;
      if constexpr (T::BLOCK == 32) step = exact ? 1 : rows.steps[group], sums = rows.sums[group];
      else {
        sums = load<Floats>(rows.sums + group);
        if constexpr (exact) step = all(1);  // which costs nothing
        else if (bytes) step = all(rows.steps[(r * K + k) / T::BLOCK]);
        else step = load<Floats>(rows.steps + group);
      }
      auto scaled = s * step, shift = (T::MINIMUM ? m * step : scaled) * sums;
      if constexpr (T::BLOCK == 32) {
        scale[r][0] = scaled;
        if (shifted) low[r] += shift;
      } else {
        store(scale[r], scales[r] = scaled);
        if (shifted) lanes[r] += shift;
      }
    }
    if (T::BLOCK == 256) asm volatile("" : : "r"(scale) : "memory");  // scales from memory: free
#pragma GCC unroll 8
    for (int i = 0; i < T::BLOCK / 32; i++) {
      const X *x = rows.x + k + 32 * i;
      if constexpr (exact) {
        Floats q = unscaled<T>(w, 2 * i), p = unscaled<T>(w, 2 * i + 1);
        for (int r = 0; r < R; r++, x += K) {
          Floats a = load<Floats>(x), b = load<Floats>(x + 16);
          if (T::BITS >= 16) total[r][0] += q * a, total[r][1] += p * b;
          else if (T::GROUP == 32) total[r][i & 1] += (q * a + p * b) * all(scale[r][i]);
          else {
            total[r][0] += q * a * all(scale[r][2 * i]);
            total[r][1] += p * b * all(scale[r][2 * i + 1]);
          }
        }
#ifdef QUADS
      } else if constexpr (bytes) {
        Small q = T::template values<Small>(w, 2 * i);
        for (int r = 0; r < R; r++, x += K) {
          Eight t = quads(q, load<Small>(x));
          if (T::GROUP == 32) total[r][i & 1] += t * scale[r][i];
          else {
            __m512 s = (__m512)spread(scales[r], LANE / 4 + 2 * i);
            total[r][i & 1] += t * (Eight)_mm512_castps512_ps256(s);
          }
        }
#endif
      } else {
        Shorts q = T::template values<Shorts>(w, 2 * i) - (int16_t)T::ZERO;
        for (int r = 0; r < R; r++, x += K) {
          Floats t = floats(pairs(q, load<Shorts>(x)));
          if (T::GROUP == 32) total[r][i & 1] += t * all(scale[r][i]);
          else total[r][i & 1] += t * spread(scales[r], LANE / 8 + 2 * i);
        }
      }
    }
  }
  for (int r = 0; r < R; r++) {
    Floats all;
    if constexpr (bytes) all = join<Floats>(total[r][0], total[r][1]);
    else all = total[r][0] + total[r][1];
    y[r * N] = sum(all - lanes[r]) - low[r];
  }
}
struct Free { void operator()(void *p) const { operator delete[](p, std::align_val_t(64)); } };
template <class X> using Aligned = std::unique_ptr<X[], Free>;
template <class X> INLINE Aligned<X> array(long n) {  // lines of memory, without zeros in them
  return Aligned<X>(new (std::align_val_t(64)) X[n]);
}
typedef Aligned<float> Array;

// RUN numbers as integers, the step between them, and the sums of their groups in steps
template <int RUN, int GROUP, class X>
INLINE void split(const float *x, X *q, float *step, float *sums, long apart = 1) {
  const float limit = sizeof(X) == 1 ? 127 : 32767;
  Floats most = {}, whole = {}, total = {};
  for (int i = 0; i < RUN; i += 16) {
    Floats f = load<Floats>(x + i), size = f < 0 ? -f : f;
    whole += f, most = size > most ? size : most;
  }
  float top = 0;
  for (int i = 0; i < 16; i++) top = most[i] > top ? most[i] : top;
  float inverse = top > 1e-30f ? limit / top : 0;
  *step = top / limit + 0 * sum(whole);  // NaN if an x is
  for (int i = 0; i < RUN; i += 16) {
    typedef X Integers __attribute__((vector_size(16 * sizeof(X))));
    Floats near = load<Floats>(x + i) * inverse + 0x1.8p23f - 0x1.8p23f;
    Integers v = __builtin_convertvector(__builtin_convertvector(near, Ints), Integers);
    memcpy(q + i, &v, sizeof v), total += near;
    if ((i + 16) % GROUP == 0) sums[i / GROUP * apart] = sum(total), total = Floats{};
  }
}
// (rows, K) float32 x, (N, K) weights -> (rows, N) float32 y; X an integer: x is rounded to it
template <class T, class X>
void linear(Bytes w, const float *x, float *y, long rows, long N, long K) {
  const bool exact = std::is_same<X, float>::value;
  const int RUN = sizeof(X) == 1 ? T::BLOCK : T::GROUP;  // numbers that share a step
  long groups = rows * K / T::GROUP;
  std::vector<float> sums(groups + 16), steps(exact ? 0 : groups + 16);
  auto q = array<X>(exact ? 0 : rows * K);
  for (long i = 0; i < rows * K; i += RUN) {
    float *to = &sums[i / T::GROUP];
    if constexpr (!exact) split<RUN, T::GROUP>(x + i, &q[i], &steps[i / RUN], to);
    else if (T::MINIMUM)
      for (int j = 0; j < RUN; j += 16) *to += sum(load<Floats>(x + i + j));
  }
  if (sizeof(X) == 1 && T::ZERO)
    for (float &sum : sums) sum *= T::ZERO;
  auto from = [&](long r) {
    const void *start = exact ? (const void *)(x + r * K) : &q[r * K];
    return Rows<X>{(const X *)start, &steps[r * K / RUN], &sums[r * K / T::GROUP]};
  };
#pragma omp parallel for schedule(guided, 16) if (N * K > 1 << 16)  // long runs of memory
  for (long n = 0; n < N; n++) {
    Bytes b = w + n * (K / T::BLOCK * T::SIZE);
    long r = 0;
    for (; r + 4 <= rows; r += 4) dot<T, 4>(b, from(r), y + r * N + n, N, K);
    if (rows - r >= 2) dot<T, 2>(b, from(r), y + r * N + n, N, K), r += 2;
    if (rows - r >= 1) dot<T, 1>(b, from(r), y + r * N + n, N, K);
  }
}
template <class T, class Float> INLINE void unpack(Bytes w, Float *y) {  // a block
  typename T::Scales s, m;
  T::scales(w, s, m);
#pragma GCC unroll 16
  for (int i = 0; i < T::BLOCK / 16; i++) {
    Floats q = unscaled<T>(w, i);
    int g = 16 * i / T::GROUP;
    if (T::BITS < 16) q *= ((float *)&s)[g];
    if (T::MINIMUM) q -= ((float *)&m)[g];
    store(y + 16 * i, q);
  }
}
template <class T, class Float> void dequantize(Bytes w, Float *y, long blocks) {
#pragma omp parallel for if (blocks * T::BLOCK > 1 << 16)
  for (long n = 0; n < blocks; n++) unpack<T>(w + n * T::SIZE, y + n * T::BLOCK);
}

// Many rows of x lie in panels of 64, side by side: 16 V of them are multiplied by TALL rows of w,
// which are `down` apart and their numbers `right`, and the sums stay in registers.
enum { PANEL = 64, TALL = 6 };
INLINE Floats add(Floats total, Floats x, float w) { return total + x * w; }
#ifdef __AVX512BF16__  // or pairs of bfloat16 in place of a float
INLINE Floats add(Floats total, Floats x, uint32_t w) {
  return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)x, (__m512bh)_mm512_set1_epi32(w));
}
#endif
template <int V, class E>  // of the TALL only `columns` are there
INLINE void tile(Floats (&total)[TALL][V], const E *w, long down, long right, int columns,
                 const E *x, long K) {
  const E *row[TALL];
  memset(total, 0, sizeof total);
  for (int n = 0; n < TALL; n++) row[n] = w + (n < columns ? n * down : 0);
  for (long k = 0; k < K; k++, x += PANEL) {
    Floats v[V];
#pragma GCC unroll 4
    for (int i = 0; i < V; i++) v[i] = load<Floats>(x + 16 * i);
#pragma GCC unroll 6
    for (int n = 0; n < TALL; n++) {
      E one = row[n][k * right];
#pragma GCC unroll 4
      for (int i = 0; i < V; i++) total[n][i] = add(total[n][i], v[i], one);
    }
  }
}

#if defined(QUADS) && !defined(__AMX_BF16__)  // with AMX torch is faster
enum { STRIP = 24, SHORT = 3 };  // rows of w that are unpacked at a time; TALL, with bytes
INLINE void scatter(const void *sums, float *y, long N, int width, int rows, int columns) {
  for (int r = 0; r < rows; r++)
    for (int n = 0; n < columns; n++) y[r * N + n] = ((const float *)sums)[n * width + r];
}
// A strip of w and a panel of x, two bfloat16 or four bytes to a word. With bytes, what belongs to
// their groups: `start` makes up for the 128 that are added to x, which must be unsigned
struct Strip { uint32_t *words; int32_t *start; float *scale, *low; };
struct Panel { uint32_t *words; float *steps, *sums; };

#ifdef __AVX512BF16__
template <int V, int, int, bool>
void multiply(uint16_t, Strip w, Panel x, float *y, long N, long K, int rows, int columns) {
  Floats total[TALL][V];
  tile(total, w.words, K / 2, 1L, columns, x.words, K / 2);
  scatter(total, y, N, 16 * V, rows, columns);
}
#endif
template <int V, int BLOCK, int GROUP, bool MINIMUM>
void multiply(int8_t, Strip w, Panel x, float *y, long N, long K, int rows, int columns) {
  Floats total[SHORT][V] = {};
  for (long b = 0; b < K / BLOCK; b++, x.steps += PANEL) {
    Floats block[SHORT][V] = {};
    for (long g = b * (BLOCK / GROUP); g < (b + 1) * (BLOCK / GROUP); g++, x.sums += PANEL) {
      __m512i part[SHORT][V];
      for (int n = 0; n < SHORT; n++)
        for (int i = 0; i < V; i++) part[n][i] = _mm512_set1_epi32(w.start[n * (K / GROUP) + g]);
#pragma GCC unroll 8
      for (int k = 0; k < GROUP / 4; k++, x.words += PANEL) {
        __m512i v[V];
#pragma GCC unroll 4
        for (int i = 0; i < V; i++) {
          v[i] = load<__m512i>(x.words + 16 * i);
          asm("" : "+v"(v[i]));  // stays in its register: GCC would load it three times
        }
#pragma GCC unroll 3
        for (int n = 0; n < SHORT; n++) {
          __m512i quad = _mm512_set1_epi32(w.words[n * (K / 4) + g * (GROUP / 4) + k]);
#pragma GCC unroll 4
          for (int i = 0; i < V; i++) part[n][i] = _mm512_dpbusd_epi32(part[n][i], v[i], quad);
        }
      }
      for (int n = 0; n < SHORT; n++)
        for (int i = 0; i < V; i++) {
          long at = n * (K / GROUP) + g;
          block[n][i] += floats((Ints)part[n][i]) * all(w.scale[at]);
          if (MINIMUM) block[n][i] -= load<Floats>(x.sums + 16 * i) * all(w.low[at]);
        }
    }
    for (int n = 0; n < SHORT; n++)
      for (int i = 0; i < V; i++) total[n][i] += block[n][i] * load<Floats>(x.steps + 16 * i);
  }
  scatter(total, y, N, 16 * V, rows, columns);
}
template <class T>
INLINE void unpack(Bytes w, int8_t *q, int32_t *start, float *scale, float *low) {
  typename T::Scales s, m;
  T::scales(w, s, m);
  for (int i = 0; i < T::BLOCK / 32; i++) {
    Shorts v = T::template values<Shorts>(w, 2 * i) - (int16_t)T::ZERO;
    __m256i bytes = _mm512_cvtepi16_epi8((__m512i)v);
    memcpy(q + 32 * i, &bytes, 32);
    Ints sums = pairs(v, Shorts{} - 128);
    for (int g = 0; g < 32 / T::GROUP; g++)
      start[32 / T::GROUP * i + g] =
          _mm512_mask_reduce_add_epi32(T::GROUP == 32 ? 0xffff : 0xff << 8 * g, (__m512i)sums);
  }
  memcpy(scale, &s, T::BLOCK / T::GROUP * 4);
  if (T::MINIMUM) memcpy(low, &m, T::BLOCK / T::GROUP * 4);
}
template <class T, class X>
void product(Bytes w, const float *x, float *y, long rows, long N, long K) {
  const bool bytes = sizeof(X) == 1;
  const int PER = 4 / sizeof(X), EACH = bytes ? SHORT : TALL, GROUP = T::GROUP, BLOCK = T::BLOCK;
  long words = K / PER, padded = (rows + PANEL - 1) / PANEL * PANEL;
  long groups = bytes ? K / GROUP : 0, blocks = K / BLOCK;
  auto packed = array<uint32_t>(padded * words);
  auto steps = array<float>(padded * blocks), sums = array<float>(padded * groups);
#pragma omp parallel
  {
#pragma omp for
    for (long from = 0; from < padded; from += 16)
      for (long k = 0; k < K; k += BLOCK)
        for (long r = from; r < from + 16; r++) {
          X some[BLOCK] = {};
          const float *f = x + r * K + k;
          long panel = r / PANEL * PANEL, lane = r % PANEL;
          float *step = &steps[panel * blocks + k / BLOCK * PANEL + lane];
          float *sum = &sums[panel * groups + k / GROUP * PANEL + lane];
          if constexpr (bytes) {
            if (r < rows) split<BLOCK, GROUP>(f, some, step, sum, PANEL);
          } else
            for (int i = 0; r < rows && i < BLOCK; i += 16) store(some + i, load<Floats>(f + i));
          uint32_t *to = &packed[panel * words + k / PER * PANEL + lane];
          for (int i = 0; i < BLOCK / PER; i++)
            to[i * PANEL] = load<uint32_t>(some + i * PER) ^ (bytes ? 0x80808080 : 0);
        }
    auto strip = array<uint32_t>(STRIP * words);
    auto start = array<int32_t>(STRIP * groups);
    auto scale = array<float>(STRIP * groups), low = array<float>(STRIP * groups);
#pragma omp for schedule(dynamic)
    for (long n = 0; n < N; n += STRIP) {
      long high = N - n < STRIP ? N - n : STRIP;
      for (long b = 0; b < high * blocks; b++) {
        Bytes block = w + (n * blocks + b) * T::SIZE;
        X *to = (X *)strip.get() + b * BLOCK;
        long g = b * (BLOCK / GROUP);
        if constexpr (bytes) unpack<T>(block, to, &start[g], &scale[g], &low[g]);
        else unpack<T>(block, to);
      }
      for (long r = 0; r < rows; r += PANEL)
        for (long i = 0; i < high; i += EACH) {
          long wide = rows - r < PANEL ? rows - r : PANEL;
          long columns = high - i < EACH ? high - i : EACH;
          Strip a = {&strip[i * words], &start[i * groups], &scale[i * groups], &low[i * groups]};
          Panel b = {&packed[r * words], &steps[r * blocks], &sums[r * groups]};
          auto to = y + r * N + n + i;
          if (wide > 32) multiply<4, BLOCK, GROUP, T::MINIMUM>(X(), a, b, to, N, K, wide, columns);
          else multiply<2, BLOCK, GROUP, T::MINIMUM>(X(), a, b, to, N, K, wide, columns);
        }
    }
  }
}
#endif

#define ROWS(function, name, ...)                                                              \
  extern "C" void function##_##name(Bytes w, const float *x, float *y, long n, long N, long K) { \
    __VA_ARGS__(w, x, y, n, N, K);                                                             \
  }
#define BLOCKS(function, name, Float)                                   \
  extern "C" void function##_##name(Bytes w, Float *y, long blocks) {    \
    dequantize<name>(w, y, blocks);                                      \
  }
#define PRODUCT8(name)
#define PRODUCT16(name)
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
#undef PRODUCT16
#define PRODUCT16(name) ROWS(product16, name, product<name, uint16_t>)
#endif
#define TYPE(name, block, size, group, bits_, zero, get_scales, get_values)                 \
  struct name {                                                                             \
    enum { BLOCK = block, SIZE = size, GROUP = group, BITS = bits_, ZERO = zero };          \
    enum { MINIMUM = BITS < 8 && ZERO == 0 };                                               \
    typedef std::conditional<BLOCK == 32, float, Floats>::type Scales;                      \
    typedef std::conditional<(BITS < 16), Rounded, float>::type X16;                        \
    typedef std::conditional<(BITS < 8), Tiny, X16>::type X8;                               \
    INLINE void scales(Bytes b, Scales &s, Scales &m) { get_scales; }                       \
    template <class V> INLINE auto values(Bytes b, int i) { return get_values; }            \
  };                                                                                        \
  ROWS(linear, name, linear<name, float>)                                                   \
  ROWS(linear16, name, linear<name, name::X16>)                                             \
  ROWS(linear8, name, linear<name, name::X8>)                                               \
  PRODUCT16(name)                                                                           \
  PRODUCT8(name)                                                                            \
  BLOCKS(dequantize, name, float)                                                           \
  BLOCKS(bfloat16, name, uint16_t)
#define RUN(n) (i / n * 32 + i % 2 * 16)  // where 16 weights lie that share n / 2 bit positions

// type, weights and bytes per block, weights per scale, bits, zero point, scales (and minima if the
// zero point is 0), the integers from 16 i on
TYPE(F32, 32, 128, 32, 32, 0, , load<Floats>(b + 64 * i))
TYPE(F16, 32, 64, 32, 16, 0, , (widen<Floats, _Float16>(b, i)))
TYPE(BF16, 32, 64, 32, 16, 0, , (widen<Ints, uint16_t>(b, i)) << 16)
#if defined(QUADS) && !defined(__AMX_BF16__)  // of the types that follow
#undef PRODUCT8
#define PRODUCT8(name) ROWS(product8, name, product<name, int8_t>)
#endif
TYPE(Q4_0, 32, 18, 32, 4, 8, s = half(b), nibbles<V>(b + 2, i))
TYPE(Q4_1, 32, 20, 32, 4, 0, (s = half(b), m = -half(b + 2)), nibbles<V>(b + 4, i))
TYPE(Q5_0, 32, 22, 32, 5, 16, s = half(b), nibbles<V>(b + 6, i) | fifth<V>(b + 2, i))
TYPE(Q5_1, 32, 24, 32, 5, 0, (s = half(b), m = -half(b + 2)),
     nibbles<V>(b + 8, i) | fifth<V>(b + 4, i))
TYPE(Q8_0, 32, 34, 32, 8, 0, s = half(b), (widen<V, int8_t>(b + 2 + 16 * i)))
TYPE(Q2_K, 256, 84, 16, 2, 0,
     (s = floats(bits<Ints>(b, 0, 15)) * half(b + 80),
      m = floats(bits<Ints>(b, 4, 15)) * half(b + 82)),
     bits<V>(b + 16 + RUN(8), i / 2 % 4 * 2, 3))
TYPE(Q3_K, 256, 110, 16, 3, 4, s = scales_k3(b),
     bits<V>(b + 32 + RUN(8), i / 2 % 4 * 2, 3) | bits<V>(b + RUN(16), i / 2, 1, 2))
TYPE(Q4_K, 256, 144, 32, 4, 0, scales_k4(b, s, m), bits<V>(b + 16 + RUN(4), i / 2 % 2 * 4, 15))
TYPE(Q5_K, 256, 176, 32, 5, 0, scales_k4(b, s, m),
     bits<V>(b + 48 + RUN(4), i / 2 % 2 * 4, 15) | bits<V>(b + 16 + RUN(16), i / 2, 1, 4))
TYPE(Q6_K, 256, 210, 16, 6, 32, s = floats(widen<Ints, int8_t>(b + 192)) * half(b + 208),
     bits<V>(b + i / 8 * 64 + i % 4 * 16, i / 4 % 2 * 4, 15) |
         bits<V>(b + 128 + RUN(8), i / 2 % 4 * 2, 3, 4))

// Whole layers: what Llama.run_layers does, 60 operations of torch for each, in one call.
INLINE Floats exp(Floats x) {  // 2e-7 relative: 2^n e^r
  x = x < -87 ? all(-87) : x > 88 ? all(88) : x;
  Floats n = x * 1.44269504f + 0x1.8p23f - 0x1.8p23f, r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Floats p = all(1.f / 720);
  for (float c : {1.f / 120, 1.f / 24, 1.f / 6, .5f, 1.f, 1.f}) p = p * r + c;
  return p * (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
}
struct Linear {  // this and Layer: as Python packs them
  Bytes w;
  void (*multiply)(Bytes w, const float *x, float *y, long rows, long N, long K);
  long N, K;
  Array operator()(const Array &x, long rows) const {
    Array y = array<float>(rows * N);
    multiply(w, x.get(), y.get(), rows, N, K);
    return y;
  }
};
struct Layer {
  Linear q, k, v, o, gate, up, down;
  double eps;
  long size;  // of a head
};
static Array norm(const float *x, const float *w, double eps, long rows, long C) {
  Array y = array<float>(rows * C);
#pragma omp parallel for if (rows > 16)
  for (long r = 0; r < rows; r++) {
    const float *from = x + r * C;
    Floats squares = {};
    for (long i = 0; i < C; i += 16) squares += load<Floats>(from + i) * load<Floats>(from + i);
    float scale = 1 / std::sqrt(sum(squares) / C + (float)eps);
    for (long i = 0; i < C; i += 16)
      store(&y[r * C + i], load<Floats>(from + i) * scale * load<Floats>(w + i));
  }
  return y;
}
static void rotate(const float *from, float *to, const float *cos, const float *sin, long D) {
  for (long i = 0; i < D / 2; i++) {
    float even = from[2 * i], odd = from[2 * i + 1];
    to[2 * i] = even * cos[i] - odd * sin[i], to[2 * i + 1] = even * sin[i] + odd * cos[i];
  }
}
// One token of J heads that share `length` keys and values
template <int J>
void attend(const float *q, const float *k, const float *v, float *y, long length, long D) {
  long room = (length + 15) / 16 * 16;
  std::vector<float> p(J * room, -INFINITY);
  float most[J], inverse[J], scale = 1 / std::sqrt((float)D);
  for (float &score : most) score = -INFINITY;
  for (long s = 0; s < length; s++) {
    Floats dot[J] = {};
    for (long d = 0; d < D; d += 16)
#pragma GCC unroll 4
      for (int j = 0; j < J; j++)
        dot[j] += load<Floats>(q + j * D + d) * load<Floats>(k + s * D + d);
    for (int j = 0; j < J; j++) {
      float score = p[j * room + s] = sum(dot[j]) * scale;
      most[j] = score > most[j] ? score : most[j];
    }
  }
  for (int j = 0; j < J; j++) {
    Floats total = {};
    for (long s = j * room; s < (j + 1) * room; s += 16) {
      Floats e = exp(load<Floats>(&p[s]) - most[j]);
      store(&p[s], e), total += e;
    }
    inverse[j] = 1 / sum(total);
  }
  for (long from = 0; from < D; from += 64) {
    Floats mix[J][4] = {};
    for (long s = 0; s < length; s++)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++)
        if (from + 16 * i < D)
#pragma GCC unroll 4
          for (int j = 0; j < J; j++)
            mix[j][i] += p[j * room + s] * load<Floats>(v + s * D + from + 16 * i);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
      if (from + 16 * i < D)
        for (int j = 0; j < J; j++) store(y + j * D + from + 16 * i, mix[j][i] * inverse[j]);
  }
}
// The same for up to PANEL tokens, `row` apart: the i-th sees `length` + i keys
static void attend(const float *q, const float *k, const float *v, float *y, long length, long D,
                   int tokens, long row) {
  enum { V = PANEL / 16 };
  long keys = length + tokens - 1;
  Array queries = array<float>(D * PANEL);
  auto p = array<Floats[V]>(keys);
  Floats most[V], sums[V] = {}, total[TALL][V];
  float scale = 1 / std::sqrt((float)D);
  for (long d = 0; d < D; d++)
    for (int i = 0; i < PANEL; i++)
      queries[d * PANEL + i] = i < tokens ? q[i * row + d] * scale : 0;
  for (int i = 0; i < V; i++) most[i] = all(-INFINITY);
  for (long s = 0; s < keys; s += TALL) {
    int columns = keys - s < TALL ? keys - s : TALL;
    tile(total, k + s * D, D, 1L, columns, (const float *)queries.get(), D);
    for (int n = 0; n < columns; n++)
      for (int i = 0; i < V; i++) {
        Floats score = LANE + 16 * i + (int)length > (int)s + n ? total[n][i] : all(-INFINITY);
        p[s + n][i] = score, most[i] = score > most[i] ? score : most[i];
      }
  }
  for (long s = 0; s < keys; s++)
    for (int i = 0; i < V; i++) sums[i] += p[s][i] = exp(p[s][i] - most[i]);
  for (int i = 0; i < V; i++) sums[i] = 1 / sums[i];
  for (long d = 0; d < D; d += TALL) {
    int columns = D - d < TALL ? D - d : TALL;
    tile(total, v + d, 1L, D, columns, (const float *)p.get(), keys);
    for (int n = 0; n < columns; n++)
      for (int i = 0; i < tokens; i++)
        y[i * row + d + n] = ((float *)total[n])[i] * ((float *)sums)[i];
  }
}
static void add(float *x, const Array &h, long n) {
#pragma omp parallel for if (n > 1 << 16)
  for (long i = 0; i < n; i += 16) store(x + i, load<Floats>(x + i) + load<Floats>(&h[i]));
}
// x (B, T, C) += the two halves of a layer, whose cache (B, G, room, D) holds `pos` tokens
static void run_layer(const Layer *l, float *x, const float *norm1, const float *norm2,
                      const float *cos, const float *sin, float *keys, float *values, long B,
                      long T, long pos, long room) {
  long D = l->size, C = l->q.K, H = l->q.N / D, G = l->k.N / D, rows = B * T, wide = l->gate.N;
  Array h = norm(x, norm1, l->eps, rows, C);
  Array q = l->q(h, rows), k = l->k(h, rows), v = l->v(h, rows), y = array<float>(rows * H * D);
#pragma omp parallel for if (rows > 16)
  for (long i = 0; i < rows; i++) {
    const float *c = cos + i % T * (D / 2), *s = sin + i % T * (D / 2);
    for (long j = 0; j < H; j++) rotate(&q[(i * H + j) * D], &q[(i * H + j) * D], c, s, D);
    for (long j = 0; j < G; j++) {
      long at = ((i / T * G + j) * room + pos + i % T) * D;
      rotate(&k[(i * G + j) * D], keys + at, c, s, D);
      memcpy(values + at, &v[(i * G + j) * D], D * sizeof(float));
    }
  }
  long step = T > 16 ? PANEL : 1, steps = (T + step - 1) / step;
  long some = step == 1 && H / G % 4 == 0 ? 4 : 1;  // heads that are handled together
#pragma omp parallel for schedule(dynamic)
  for (long i = 0; i < B * H / some * steps; i++) {
    long b = i / steps / (H / some), j = i / steps % (H / some) * some, t = i % steps * step;
    long at = (b * G + j / (H / G)) * room * D, from = ((b * T + t) * H + j) * D;
    int tokens = T - t < step ? T - t : step;
    auto one = some == 4 ? attend<4> : attend<1>;
    if (step == 1) one(&q[from], keys + at, values + at, &y[from], pos + t + 1, D);
    else attend(&q[from], keys + at, values + at, &y[from], pos + t + 1, D, tokens, H * D);
  }
  h = l->o(y, rows);
  add(x, h, rows * C);
  h = norm(x, norm2, l->eps, rows, C);
  Array gate = l->gate(h, rows), up = l->up(h, rows);
#pragma omp parallel for if (rows > 16)
  for (long i = 0; i < rows * wide; i += 16) {
    Floats g = load<Floats>(&gate[i]);
    store(&gate[i], g / (1 + exp(-g)) * load<Floats>(&up[i]));
  }
  h = l->down(gate, rows);
  add(x, h, rows * C);
}
extern "C" void run_layers(const Layer *l, const float *const *norms, long first, long last,
                           float *x, const float *cos, const float *sin, float *keys,
                           float *values, long B, long T, long pos, long room) {
  for (long i = first; i < last; i++) {
    float *k = keys + i * B * l->k.N * room, *v = values + i * B * l->k.N * room;
    run_layer(l + i, x, norms[2 * i], norms[2 * i + 1], cos, sin, k, v, B, T, pos, room);
  }
}
"""


@functools.cache
def kernels() -> tuple[ctypes.CDLL, float]:
    """KERNELS, compiled once per machine and then found in the cache, and the seconds that took.

    They run on torch's own threads. Raises OSError where there is no compiler, or none that can.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise OSError("no C++ compiler (g++, clang++ or the one that $CXX names)")
    start = time.perf_counter()

    def run(*arguments: str) -> str:
        done = subprocess.run([compiler, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"{compiler} failed: {done.stderr.strip()[:200]}")
        return done.stdout

    # The predefined macros name the compiler's version and the processor's instruction sets.
    macros = run("-march=native", "-dM", "-E", "-x", "c++", os.devnull)
    key = hashlib.sha256((KERNELS + macros).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "llama2.py")
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    if hasattr(os, "getuid") and cache.stat().st_uid != os.getuid():
        raise OSError(f"{cache} belongs to another user")
    library = cache / f"kernels-{key}.so"
    if not library.exists():
        with tempfile.TemporaryDirectory(dir=cache) as build:
            source, new = Path(build, "kernels.cpp"), Path(build, library.name)
            source.write_text(KERNELS)
            flags = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-w", "-shared", "-fPIC")
            run(*flags, str(source), "-o", str(new))
            new.replace(library)  # at once: two processes may do this at the same time
    return ctypes.CDLL(str(library)), time.perf_counter() - start


FEW_ROWS = 16  # up to here multiply block by block, above dequantise and use a matrix product
CHUNK = 2**22  # bytes of weights dequantised at a time: they stay in the processor's cache


def packed_linear(blocks: Tensor, kind: str) -> Callable[[Tensor], Tensor] | None:
    """What multiplies few rows, (n, in) -> float32 (n, out), without a compiler; None if nothing.

    Torch has products with 16-bit matrices and with integers of 4 bits; those of more bits are two
    such digits, multiplied by x and 16 x. x and scales are rounded to 16 bits: 4e-3 relative.
    """
    pack = getattr(torch, "_convert_weight_to_int4pack_for_cpu", None)
    if kind in ("F16", "BF16"):
        w = blocks.view(DENSE[kind])
        return lambda x: F.linear(x.to(w.dtype), w).float()
    if (
        kind == "F32"
        or not pack
        or len(blocks) % 16
        or free_memory(blocks.device) < 4 * blocks.nbytes
    ):
        return None
    packed, scales, one = [], [], kind in ("Q4_0", "Q4_1", "Q4_K")
    for some in blocks.split(256):
        q, s, *m = GGML_TYPES[kind][2](some.reshape(-1, GGML_TYPES[kind][1]))
        width = q.shape[1] // s.shape[1]
        low = -m[0] if m else 0 * s
        # The product is with (digit - 8) * s + zero.
        if one:
            digits, zero = (q + 8, low) if kind == "Q4_0" else (q, low + 8 * s)
        else:
            q = q.view(len(s), -1, 1, width)
            digits, zero = torch.cat((q & 15, (q >> 4) + 8), 2), (low + 8 * s) / 17
        packed.append(pack(digits.reshape(len(some), -1).int(), 1))
        s, zero = (part.reshape(len(some), -1).T for part in (s, zero))
        scales.append(torch.stack((s, zero), -1).bfloat16())
    w, sz = torch.cat(packed), torch.cat(scales, 1)  # sz (groups, out, 2)
    if one:
        return lambda x: torch._weight_int4pack_mm_for_cpu(x.bfloat16(), w, width, sz).float()
    places = torch.tensor([[1], [16]], dtype=torch.bfloat16)

    def multiply(x: Tensor) -> Tensor:
        x = (x.bfloat16().view(len(x), -1, 1, width) * places).flatten(1)
        return torch._weight_int4pack_mm_for_cpu(x, w, 2 * width, sz).float()

    return multiply


@functools.cache
def has_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16; torch before 2.11 cannot tell."""
    can = getattr(torch.cpu, "get_capabilities", dict)()
    return any(can.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16"))


class QuantizedLinear(nn.Module):
    """y = x W^T with W kept as the file's blocks, uint8 (out, bytes per row), most often mapped.

    The result is that of F.linear(x, dequantize(W)) in float32, but for the order of summation
    (1e-6 relative). `library`: the compiled kernels, for the CPU; without them torch does it all.
    `unpack`: dequantize, or what torch.compile makes of it. `activation_bits`: 32; with 16 a
    CPU may round x, up to 16 rows to 16-bit integers (3e-5 relative; needs AVX-512), more to
    bfloat16 (4e-3; needs instructions for it); with 8 to 8-bit integers, as llama.cpp does (8e-3;
    needs VNNI). ValueError for others.
    """

    def __init__(
        self,
        blocks: Tensor,
        kind: str,
        library: ctypes.CDLL | None = None,
        unpack: Callable[[Tensor, str], Tensor] = dequantize,
        activation_bits: int = 32,
    ) -> None:
        super().__init__()
        if activation_bits not in (32, 16, 8):
            raise ValueError(f"activation_bits is {activation_bits!r}; accepted are 32, 16 and 8")
        rounds = activation_bits < 32 and blocks.device.type == "cpu"
        self.kind, self.unpack, self.activation_bits = kind, unpack, activation_bits
        self.rounds = rounds and has_bfloat16()
        self.register_buffer("blocks", blocks)
        block, size, _ = GGML_TYPES[kind]
        self.out_features, self.in_features = len(blocks), blocks.shape[1] // size * block
        if self.in_features % 32:  # rows of F16 that the kernels cannot read
            library = None
        self.native: dict[Any, Callable] = {}
        bits = max(activation_bits, 16) if kind in DENSE else activation_bits
        for key, name, arguments in (
            ("few", f"linear{bits}" if rounds else "linear", 6),
            ("many", f"product{bits}", 6),
            (torch.float32, "dequantize", 3),
            (torch.bfloat16, "bfloat16", 3),
        ):
            if library and (function := getattr(library, f"{name}_{kind}", None)):
                self.native[key] = function
                function.argtypes = [ctypes.c_ssize_t] * arguments  # pointers and sizes
        self.packed = packed_linear(blocks, kind) if rounds and not library else None

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{self.in_features}, {self.out_features}, {self.kind}"

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out) of x's dtype."""
        N, K = self.out_features, self.in_features
        few = x.numel() <= FEW_ROWS * K
        kernel = x.is_cpu and self.native.get("few" if few else "many")
        if few and torch.compiler.is_compiling():  # one fused loop: W is never unpacked to memory
            w = dequantize(self.blocks, self.kind)
            y = (w * x.float()[..., None, :]).sum(-1)
        elif kernel:
            x32 = x.float().contiguous()
            y = x32.new_empty(*x.shape[:-1], N)
            pointers = self.blocks.data_ptr(), x32.data_ptr(), y.data_ptr()
            kernel(*pointers, x.numel() // K, N, K)
        elif few and self.packed:
            y = self.packed(x.reshape(-1, K)).view(*x.shape[:-1], N)
        else:
            y = self.matmul(x.reshape(-1, K)).reshape(*x.shape[:-1], N)
        return y.to(x.dtype)

    def matmul(self, x: Tensor) -> Tensor:
        """Dequantise some rows of W, multiply, go on with the next: (n, in) -> (n, out)."""
        if self.rounds:
            x = x.bfloat16()
        row = self.in_features * x.element_size()
        step = max(1, CHUNK // row) if x.device.type == "cpu" else self.out_features
        y = x.new_empty(self.out_features, len(x))  # transposed: each product writes one run
        dtype = x.dtype if x.dtype in self.native else torch.float32
        native = self.native and x.is_cpu
        buffer = torch.empty(step, self.in_features, dtype=dtype) if native else None
        for start in range(0, self.out_features, step):
            blocks = self.blocks[start : start + step]
            if buffer is None:
                w = self.unpack(blocks, self.kind)
            else:
                w = buffer[: len(blocks)]
                count = w.numel() // max(GGML_TYPES[self.kind][0], 32)
                self.native[dtype](blocks.data_ptr(), w.data_ptr(), count)
            torch.mm(w.to(x.dtype), x.T, out=y[start : start + step])
        return y.T


class NativeLayers:
    """What Llama.run_layers does, in one call of the kernels: the same but for 1e-6 relative.

    Put in its place as `model.run_layers`; leaves to it what it cannot do: padding, hooks, 16 bits,
    modules that have been replaced. (A call for each layer would cost 2 to 4 ms a token: weights
    have passed through the processor's caches, and Python begins each time with none of its own.)
    """

    def __init__(self, model: Llama, library: ctypes.CDLL) -> None:
        self.layers = model.layers  # not the model, which could not be freed: it refers to us
        self.parents = [module for module in model.layers.modules() if module._modules]
        self.parts = self.modules()
        self.norms = [part for part in self.parts if isinstance(part, RMSNorm)]  # two per layer
        linears = [part for part in self.parts if isinstance(part, QuantizedLinear)]
        self.blocks = [linear.blocks for linear in linears]  # stay in memory
        self.run = library.run_layers
        self.run.argtypes = [ctypes.c_char_p] * 2 + [ctypes.c_ssize_t] * 11
        self.packed: dict[str, bytes] = {}  # struct Layer of each, for few and for many tokens
        for key in ("few", "many"):
            packed = [self.pack(block, key) for block in self.layers]
            if all(packed):
                self.packed[key] = b"".join(packed)

    def modules(self) -> list[nn.Module]:
        """What the layers are made of now."""
        return [child for parent in self.parents for child in parent._modules.values()]

    def pack(self, block: Block, key: str) -> bytes:
        """struct Layer, which names the kernels for `key`; empty if there are not all."""
        attention, mlp, numbers = block.self_attn, block.mlp, []
        for linear in (
            *(attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj),
            *(mlp.gate_proj, mlp.up_proj, mlp.down_proj),
        ):
            function = getattr(linear, "native", {}).get(key)
            if not function or attention.head_dim % 16:
                return b""
            address = ctypes.cast(function, ctypes.c_void_p).value
            numbers += linear.blocks.data_ptr(), address, linear.out_features, linear.in_features
        return struct.pack("28qdq", *numbers, block.input_layernorm.eps, attention.head_dim)

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        (B, T, _), L = x.shape, len(self.layers)
        few = B * T <= FEW_ROWS
        packed = self.packed.get("few" if few else "many")
        weights = [norm.weight for norm in self.norms]
        if (
            not packed
            or not x.is_cpu
            or type(cache) is not Cache
            or cache.padding is not None
            or any(t.dtype != torch.float32 for t in (x, cache.k, *weights))
            or self.modules() != self.parts
            or any(part._forward_hooks or part._forward_pre_hooks for part in self.parts)
        ):
            return Llama.run_layers(self, x, cos, sin, mask, cache)
        y = x.clone(memory_format=torch.contiguous_format)
        norms = struct.pack(f"{len(weights)}q", *(weight.data_ptr() for weight in weights))
        pointers = [tensor.data_ptr() for tensor in (y, cos, sin, cache.k, cache.v)]
        sizes = B, T, cache.slots(T).start, cache.max_seq_len
        step = L if few else 1  # a prompt takes seconds: Ctrl-C is heard between calls
        for first in range(0, L, step):
            self.run(packed, norms, first, first + step, *pointers, *sizes)
        return y


class QuantizedEmbedding(nn.Module):
    """Rows of W, dequantised when looked up; W is the file's blocks as in QuantizedLinear."""

    def __init__(self, blocks: Tensor, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        self.register_buffer("blocks", blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (...) -> (..., C)."""
        rows = self.blocks[tokens.flatten()]
        return dequantize(rows, self.kind).view(*tokens.shape, -1).to(self.dtype)


# --------------------------------------------------------------------------------------------------
# 10. Checkpoints

# The one name table, and the reader's dictionary. Every name ends in ".weight". The axis is the one
# along which Meta's shards and our ranks divide a matrix: 0 by its outputs, 1 by its inputs.
NAMES = (  # this file and Hugging Face (there behind "model."), GGUF, Meta, axis
    ("embed_tokens", "token_embd", "tok_embeddings", 1),
    ("layers.{}.input_layernorm", "blk.{}.attn_norm", "layers.{}.attention_norm", None),
    ("layers.{}.self_attn.q_proj", "blk.{}.attn_q", "layers.{}.attention.wq", 0),
    ("layers.{}.self_attn.k_proj", "blk.{}.attn_k", "layers.{}.attention.wk", 0),
    ("layers.{}.self_attn.v_proj", "blk.{}.attn_v", "layers.{}.attention.wv", 0),
    ("layers.{}.self_attn.o_proj", "blk.{}.attn_output", "layers.{}.attention.wo", 1),
    ("layers.{}.post_attention_layernorm", "blk.{}.ffn_norm", "layers.{}.ffn_norm", None),
    ("layers.{}.mlp.gate_proj", "blk.{}.ffn_gate", "layers.{}.feed_forward.w1", 0),
    ("layers.{}.mlp.up_proj", "blk.{}.ffn_up", "layers.{}.feed_forward.w3", 0),
    ("layers.{}.mlp.down_proj", "blk.{}.ffn_down", "layers.{}.feed_forward.w2", 1),
    ("norm", "output_norm", "norm", None),
    ("lm_head", "output", "output", 0),
)


def last_name(name: str) -> str:
    """layers.0.self_attn.q_proj.weight -> q_proj."""
    return name.removesuffix(".weight").rpartition(".")[2]


@dataclass
class Weight:
    """One tensor of a checkpoint where it lies: in mapped files, read by read() or dense().

    Its shards are uint8 (rows, bytes per row), joined along `axis`: Meta's checkpoints have several.
    """

    ggml_type: str
    shape: tuple[int, ...]  # in torch's order, (out, in)
    shards: list[Tensor]
    axis: int = 0
    hf_head_dim: int = 0  # not 0: the rows of each head are in Hugging Face's order
    source: mmap.mmap | None = None  # the file that the one shard is mapped from, at its offset

    @property
    def block(self) -> tuple[int, int]:
        """Elements and bytes of one block: columns are cut between blocks only."""
        import gguf

        return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.ggml_type]]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        return math.prod(self.shape) // self.block[0] * self.block[1]

    def read(self) -> Tensor:
        """uint8 (rows, bytes per row) in Meta's order: the mapped file itself if nothing moves."""
        data = self.shards[0] if len(self.shards) == 1 else torch.cat(self.shards, self.axis)
        if self.hf_head_dim:  # each head's rows 0, 2, 4, ... before 1, 3, 5, ...
            heads = data.unflatten(0, (-1, 2, self.hf_head_dim // 2))
            data = heads.transpose(1, 2).flatten(0, 2)
        data = data.contiguous()
        if data.storage_offset() % DENSE.get(self.ggml_type, torch.float16).itemsize:
            data = data.clone()  # old safetensors files do not align their tensors
        if data.data_ptr() != self.shards[0].data_ptr():
            self.release()
        return data

    def part(self, axis: int, start: int, stop: int) -> Weight:
        """Rows (axis 0) or columns (1) start to stop, whole heads and blocks; reads no others."""
        shape, shards, offset = list(self.shape), [], 0
        shape[axis] = stop - start
        block, size = self.block if axis == 1 else (1, 1)
        begin, end = start // block * size, stop // block * size  # in rows, or in bytes of a row
        for shard in self.shards:
            span = slice(max(begin - offset, 0), max(end - offset, 0))
            shards.append(shard[span] if axis == 0 else shard[:, span])
            if axis == self.axis:  # the next shard begins where this one ends
                offset += shard.shape[axis]
        return replace(self, shape=tuple(shape), shards=[s for s in shards if s.numel()])

    def dense(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """The weight as a dense tensor, converted a few rows at a time; mapped if it fits as is."""
        rows = self.read()
        if DENSE.get(self.ggml_type) == dtype:
            return rows.view(dtype).view(self.shape).to(device)
        out = torch.empty(self.shape, dtype=dtype, device=device)
        flat = out.view(len(rows), -1)
        step = max(1, 2**20 // flat.shape[1])  # temporaries that stay in the processor's cache
        for i in range(0, len(rows), step):
            flat[i : i + step] = dequantize(rows[i : i + step], self.ggml_type)
        self.release()
        return out

    def release(self) -> None:
        """Drop the source's pages after copying: they need not stay in memory beside the copy."""
        if self.source is not None and hasattr(mmap, "MADV_DONTNEED"):
            for shard in self.shards:
                start = shard.storage_offset() // mmap.PAGESIZE * mmap.PAGESIZE
                stop = shard.storage_offset() + (len(shard) - 1) * shard.stride(0) + shard.shape[1]
                self.source.madvise(mmap.MADV_DONTNEED, start, stop - start)


@dataclass
class Checkpoint:
    """What a model file or directory holds, its tensors still unread."""

    format: str  # such as "GGUF version 3"
    config: Config
    weights: dict[str, Weight]  # by the names of this file
    tokenizer: Callable[[], Tokenizer]
    chat_template: str = ""  # empty: it does not claim to be tuned for conversation


# What a file may ask of memory and time before its weights are read. A Llama of 126 layers (405B)
# has 1137 tensors, 160 KB of JSON or pickle, and less than a million tokens and merges.
MAX_ENTRIES = 5000  # tensors of a file, keys of a GGUF
MAX_HEADER = 2**21  # bytes of JSON, of a pickle, of a zip's directory
MAX_METADATA = 2**24  # bytes of a GGUF before its tensors; of a tokenizer.model
MAX_VALUES = 2**21  # in all arrays of a GGUF's metadata


def map_file(path: Path) -> mmap.mmap:
    """A file's bytes, private and writable. What is no regular file is never opened: it may block."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError(f"{path}: not a regular file")
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise ValueError(f"{path}: damaged: the file is empty")
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def read_file(path: Path, limit: int = MAX_HEADER) -> bytes:
    """The bytes of a regular file that is neither empty nor longer than `limit`; else ValueError."""
    content = map_file(path)
    if len(content) > limit:
        raise ValueError(f"{path}: {len(content)} bytes; accepted are up to {limit}")
    return content[:]


def map_weight(source: mmap.mmap, ggml_type: str, shape: tuple[int, ...], start: int) -> Weight:
    """The tensor that lies in a mapped file from byte `start`. ValueError beyond the file's end."""
    weight = Weight(ggml_type, shape, [], source=source)
    end = start + weight.nbytes
    if end > len(source):
        raise ValueError(f"it ends at byte {end}, the file at {len(source)}: cut off?")
    rows = torch.frombuffer(source, dtype=torch.uint8)[start:end]
    weight.shards.append(rows.view(math.prod(shape[:-1]), -1))
    return weight


def lookup(
    path: Path, settings: dict[str, Any], key: str, expected: type, default: Any = None
) -> Any:
    """The value of `key`, of the `expected` type; needed if it has no default. ValueError."""
    value = settings.get(key)
    value = default if value is None else value
    if value is None:
        raise ValueError(f"{path}: the key {key} is missing")
    fits = isinstance(value, (int, float) if expected is float else expected)
    if fits and expected in (int, float):  # within what float32 can hold
        fits = not isinstance(value, bool) and abs(value) < 1e38
    if not fits:
        raise ValueError(f"{path}: {key} is {str(value)[:40]!r}, not {expected.__name__}")
    return value


GGUF_SCALARS = {i: letter for i, letter in enumerate("BbHhIif?--Qqd") if letter != "-"}  # to struct
GGUF_STRING, GGUF_ARRAY = 8, 9


class GGUF:
    """A GGUF file's metadata and tensors (ggml's gguf.md); all is checked before anything is used.

    gguf.GGUFReader gives the same but takes seconds for a vocabulary of 32000. Tensors are views of
    the mapped file. Raises FileNotFoundError, and ValueError that names the file and the item.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.offset, self.values_left = Path(path), 0, MAX_VALUES
        self.bytes = map_file(self.path)
        magic, self.version = self.unpack("4sI", "header")
        if magic != b"GGUF":
            raise ValueError(f"{self.path}: starts with {magic!r}, not with b'GGUF'")
        if self.version not in (2, 3):
            known = "2 and 3, little-endian, are read"
            raise ValueError(f"{self.path}: GGUF version {self.version:#x}; {known}")
        tensor_count, key_count = self.unpack("QQ", "header")
        if max(tensor_count, key_count) > MAX_ENTRIES:
            found = f"{tensor_count} tensors and {key_count} keys"
            raise ValueError(f"{self.path}: {found}; accepted are up to {MAX_ENTRIES} of each")
        self.metadata: dict[str, Any] = {}
        for i in range(key_count):
            key = self.string(f"key {i} of {key_count}")
            if key in self.metadata:
                raise ValueError(f"{self.path}: the key {key!r} stands twice")
            (value_type,) = self.unpack("I", key)
            self.metadata[key] = self.value(value_type, key)
        infos = [self.tensor_info(f"tensor {i} of {tensor_count}") for i in range(tensor_count)]
        align = self.get("general.alignment", int, 32)
        if not 8 <= align <= 2**20 or align & (align - 1):  # as gguf.md has it
            raise ValueError(f"{self.path}: general.alignment is {align}, no power of 2 from 8")
        base = end = -(-self.offset // align) * align
        self.tensors: dict[str, Weight] = {}
        for name, type_name, shape, offset in sorted(infos, key=lambda info: info[-1]):
            if name in self.tensors:
                raise ValueError(f"{self.path}: the tensor {name!r} stands twice")
            if offset % align or base + offset < end:
                raise ValueError(f"{self.path}: {name}: offset {offset} overlaps or is not aligned")
            try:
                weight = map_weight(self.bytes, type_name, shape, base + offset)
            except ValueError as error:
                raise ValueError(f"{self.path}: {name}: {error}") from None
            self.tensors[name], end = weight, base + offset + weight.nbytes

    def take(self, size: int, item: str) -> int:
        """Go on by `size` bytes; where they begin. ValueError beyond the file or MAX_METADATA."""
        start, self.offset = self.offset, self.offset + size
        if self.offset > min(len(self.bytes), MAX_METADATA):
            whole = f"the end of the file or of {MAX_METADATA} bytes of metadata"
            raise ValueError(f"{self.path}: {item} needs {size} bytes more, beyond {whole}")
        return start

    def unpack(self, letters: str, item: str) -> tuple:
        """The next little-endian values, as struct's letters name them."""
        letters = "<" + letters
        return struct.unpack_from(letters, self.bytes, self.take(struct.calcsize(letters), item))

    def string(self, item: str) -> str:
        """The next string: a length of 8 bytes and UTF-8."""
        (size,) = self.unpack("Q", item)
        start = self.take(size, item)
        text = self.bytes[start : self.offset]
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self.path}: {item} is not UTF-8: {text[:40]!r}") from None

    def value(self, value_type: int, item: str) -> Any:
        """The next metadata value: a number, a string or a list of either."""
        if value_type == GGUF_STRING:
            return self.string(item)
        if value_type in GGUF_SCALARS:
            return self.unpack(GGUF_SCALARS[value_type], item)[0]
        if value_type != GGUF_ARRAY:
            raise ValueError(f"{self.path}: {item} has the unknown value type {value_type}")
        value_type, count = self.unpack("IQ", item)
        self.values_left -= count
        if self.values_left < 0 or value_type not in (*GGUF_SCALARS, GGUF_STRING):
            found = f"an array of {count} values of type {value_type}"
            raise ValueError(f"{self.path}: {item} is {found}")
        if value_type == GGUF_STRING:
            return [self.string(item) for _ in range(count)]
        return list(self.unpack(f"{count}{GGUF_SCALARS[value_type]}", item))

    def tensor_info(self, item: str) -> tuple[str, str, tuple[int, ...], int]:
        """The next entry of the tensor table: name, ggml type, shape, offset in the data."""
        import gguf

        name = self.string(item)
        (n_dims,) = self.unpack("I", name)
        if not 1 <= n_dims <= 4:
            raise ValueError(f"{self.path}: {name} has {n_dims} dimensions; 1 to 4 are possible")
        dims = self.unpack(f"{n_dims}Q", name)  # the fastest comes first
        number, offset = self.unpack("IQ", name)
        try:
            ggml_type = gguf.GGMLQuantizationType(number)
        except ValueError:
            raise ValueError(f"{self.path}: {name} has the unknown type {number}") from None
        if dims[0] % gguf.GGML_QUANT_SIZES[ggml_type][0] or not all(0 < n < 2**31 for n in dims):
            found = f"{name} of type {ggml_type.name} has the sizes {list(dims)}"
            raise ValueError(f"{self.path}: {found}")
        return name, ggml_type.name, dims[::-1], offset

    def get(self, key: str, expected: type, default: Any = None) -> Any:
        """The metadata value of `key`, checked as lookup() does."""
        return lookup(self.path, self.metadata, key, expected, default)


def gguf_tensors(file: GGUF) -> dict[str, Weight]:
    """The tensors of a GGUF file, of all parts if it is the first of a split one; else ValueError."""
    tensors, parts = dict(file.tensors), file.get("split.count", int, 1)
    if parts > 1:
        stem, is_first = re.subn(r"-00001-of-\d{5}\.gguf$", "", file.path.name)
        if file.get("split.no", int, 0) or not is_first:
            name = f"NAME-00001-of-{parts:05}.gguf"
            raise ValueError(f"{file.path}: one of {parts} parts; give {name}")
        for i in range(2, parts + 1):
            part = GGUF(file.path.with_name(f"{stem}-{i:05}-of-{parts:05}.gguf"))
            if part.get("split.no", int) != i - 1 or part.tensors.keys() & tensors.keys():
                raise ValueError(f"{part.path}: not part {i} of {file.path}")
            tensors |= part.tensors
    return tensors


def check_gguf(file: GGUF, tensors: dict[str, Weight]) -> None:
    """Raises ValueError for what is no model of Llama 2's family, and for types that hold no weights."""
    get, refused = file.get, f"{file.path}: this is not a Llama 2 model: "
    architecture, purpose = get("general.architecture", str), get("general.type", str, "model")
    if architecture != "llama" or purpose != "model":
        raise ValueError(f"{refused}architecture {architecture!r}, type {purpose!r}")
    experts = get("llama.expert_count", int, 0)
    if experts:
        raise ValueError(f"{refused}a mixture of {experts} experts")
    vocabulary = get("tokenizer.ggml.model", str)
    if vocabulary != "llama":
        raise ValueError(f"{refused}its vocabulary is {vocabulary!r}, not 'llama' (SentencePiece)")
    scaling = get("llama.rope.scaling.type", str, "linear")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{refused}RoPE scaling {scaling!r}; accepted are 'none' and 'linear'")
    for name, weight in {weight.ggml_type: (n, weight) for n, weight in tensors.items()}.values():
        try:
            dequantize(weight.shards[0][:1, : weight.block[1]], weight.ggml_type)
        except NotImplementedError:
            found = f"{name} is of type {weight.ggml_type}, which is no weight"
            raise ValueError(f"{file.path}: {found}") from None


def gguf_config(file: GGUF, tensors: dict[str, Weight]) -> Config:
    """The configuration that a GGUF file's keys and the shapes of its tensors tell; or ValueError."""
    get = file.get

    def count(key: str, default: int | None = None) -> int:
        value = file.metadata.get(key, default)  # some counts may be given for each layer
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if type(value) is int:
            return value
        raise ValueError(f"{file.path}: {key} is {str(value)[:40]}; accepted is one number")

    hidden, heads = count("llama.embedding_length"), count("llama.attention.head_count")
    head_dim = hidden // max(heads, 1)
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        found = count(f"llama.{key}", head_dim)
        if found != head_dim:
            raise ValueError(f"{file.path}: llama.{key} is {found}, not the head size {head_dim}")
    factor = get("llama.rope.scaling.factor", float, get("llama.rope.scale_linear", float, 1.0))
    if get("llama.rope.scaling.type", str, "linear") == "none":
        factor = 1.0
    vocab_size = matrix_shape(tensors, "token_embd", file.path)[0]
    tokens = len(get("tokenizer.ggml.tokens", list))
    if tokens != vocab_size:
        raise ValueError(f"{file.path}: {tokens} tokens but {vocab_size} embedding rows")
    return Config(
        hidden_size=hidden,
        intermediate_size=count("llama.feed_forward_length"),
        num_hidden_layers=count("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=count("llama.attention.head_count_kv", heads),
        vocab_size=vocab_size,
        max_position_embeddings=count("llama.context_length"),
        rms_norm_eps=get("llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=get("llama.rope.freq_base", float, 10000.0),
        rope_scaling_factor=factor or 1.0,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=get("tokenizer.ggml.bos_token_id", int, 1),
        eos_token_id=get("tokenizer.ggml.eos_token_id", int, 2),
    )


def gguf_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Llama-family GGUF file, or the first part of a split one; else ValueError."""
    file = GGUF(path)
    tensors = gguf_tensors(file)
    check_gguf(file, tensors)
    divisors = tensors.pop("rope_freqs.weight", None)
    config = gguf_config(file, tensors)
    weights = rename(tensors, 1, config, path)
    if divisors is not None:
        if divisors.shape != (config.head_dim // 2,):
            found = f"rope_freqs.weight is {list(divisors.shape)}"
            raise ValueError(f"{path}: {found}; needed is {[config.head_dim // 2]}")
        factors = divisors.dense(torch.float32).tolist()
        config = replace(config, rope_freq_factors=tuple(factors))
    parts = file.get("split.count", int, 1)
    return Checkpoint(
        format=f"GGUF version {file.version}" + f", {parts} parts" * (parts > 1),
        config=config,
        weights=weights,
        tokenizer=lambda: Tokenizer.from_gguf(file),
        chat_template=file.get("tokenizer.chat_template", str, ""),
    )


def matrix_shape(tensors: dict[str, Weight], name: str, path: Path) -> tuple[int, ...]:
    """Rows and columns of a matrix that a configuration is read from. Raises ValueError."""
    weight = tensors.get(name + ".weight")
    if weight is None or len(weight.shape) != 2:
        raise ValueError(f"{path}: the matrix {name}.weight is missing")
    return weight.shape


def name_map(column: int, config: Config) -> Iterator[tuple[str, str]]:
    """The name of each tensor here and in a column of NAMES."""
    for row in NAMES:
        for layer in range(config.num_hidden_layers) if "{}" in row[0] else (0,):
            yield row[0].format(layer) + ".weight", row[column].format(layer) + ".weight"


def rename(
    tensors: dict[str, Weight], column: int, config: Config, path: str | Path
) -> dict[str, Weight]:
    """Translate names by a column of NAMES. ValueError unless all names and shapes fit."""
    if config.num_hidden_layers > len(tensors):  # before anything that size is built
        raise ValueError(f"{path}: {config.num_hidden_layers} layers but {len(tensors)} tensors")
    with torch.device("meta"):  # all layers are like the first
        first = dict(Llama(replace(config, num_hidden_layers=1)).named_parameters())
    theirs, wanted = {}, {}
    for ours, their in name_map(column, config):
        parameter = first.get(re.sub(r"^layers\.\d+", "layers.0", ours))
        if parameter is not None:
            theirs[their], wanted[ours] = ours, tuple(parameter.shape)
    problems = []
    for problem, names in (
        ("unknown", tensors.keys() - theirs.keys()),
        ("missing", theirs.keys() - tensors.keys()),
    ):
        listed = ", ".join(name[:60] for name in sorted(names)[:4]) + ", ..." * (len(names) > 4)
        problems += [f"{len(names)} tensors are {problem}: {listed}"] if names else []
    if problems:
        raise ValueError(f"{path}: {'; '.join(problems)}")
    for name, ours in theirs.items():
        if tensors[name].shape != wanted[ours]:
            shape = list(tensors[name].shape)
            raise ValueError(f"{path}: {name} is {shape}; needed is {list(wanted[ours])}")
    return {ours: tensors[name] for name, ours in theirs.items()}


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object in which no key stands twice. Raises ValueError or RecursionError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key stands twice")
        return found

    content = json.loads(text, object_pairs_hook=unique)
    if type(content) is not dict:
        raise ValueError(f"it is of type {type(content).__name__}")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object. Raises ValueError on anything else."""
    text = read_file(path)
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a JSON object: {error}") from None


def read_tensors(path: Path) -> dict[str, Weight]:
    """What a .safetensors file or one of torch.save holds, mapped. Nothing in it is executed.

    Raises ValueError on damaged files and on anything but matrices and vectors.
    """
    source = map_file(path)
    read = safetensors_tensors if path.suffix == ".safetensors" else torch_tensors
    try:
        return read(source)
    except (ValueError, TypeError, LookupError, RecursionError, struct.error) as error:
        reason = str(error)[:160]
        raise ValueError(f"{path}: damaged, or not a file of tensors alone: {reason}") from None


def check_tensor(name: str, ggml_type: Any, shape: Sequence[Any]) -> None:
    """Raises ValueError unless it is a matrix or a vector of a type that we read."""
    fits = len(shape) in (1, 2) and all(type(n) is int and 0 < n < 2**31 for n in shape)
    if not fits or ggml_type not in DENSE:
        found, accepted = f"{ggml_type} {list(shape)}", ", ".join(DENSE)
        raise ValueError(f"{name} is {found}; accepted are matrices and vectors of {accepted}")


def safetensors_tensors(source: mmap.mmap) -> dict[str, Weight]:
    """Hugging Face's format: the size of a header, the header in JSON, the tensors without gaps."""
    size = int.from_bytes(source[:8], "little")
    if not size <= min(len(source) - 8, MAX_HEADER):
        raise ValueError(f"a header of {size} bytes; accepted are up to {MAX_HEADER}")
    header = parse_json(source[8 : 8 + size])
    header.pop("__metadata__", None)
    if len(header) > MAX_ENTRIES:
        raise ValueError(f"{len(header)} tensors; accepted are up to {MAX_ENTRIES}")
    weights, base = {}, 8 + size
    end = base
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        ggml_type, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        check_tensor(name, ggml_type, shape)
        weights[name] = map_weight(source, ggml_type, tuple(shape), end)
        if base + start != end or stop - start != weights[name].nbytes:
            found = f"{name} lies at bytes {start} to {stop}"
            raise ValueError(
                f"{found}; needed are {end - base} to {end - base + weights[name].nbytes}"
            )
        end = base + stop
    if end != len(source):
        raise ValueError(f"the tensors end at byte {end}, the file at {len(source)}")
    return weights


def zip_files(source: mmap.mmap) -> dict[str, tuple[int, int]]:
    """Start and size of each file in a zip as torch.save writes it: nothing compressed, no comment.

    Stricter than the format, so that there is but one way to read it. Raises ValueError.
    """
    end = len(source) - 22
    magic, size, at = struct.unpack_from("<4s8xII", source, end)
    if source[end - 20 : end - 16] == b"PK":  # above 4 GB: a longer record, its locator
        end -= 76
        size, at = struct.unpack_from("<QQ", source, end + 40)
    if magic != b"PK" or at + size != end or size > MAX_HEADER:
        raise ValueError("the zip's directory is not at its end, or is too long: cut off?")
    files, last = {}, 0
    for entry in sorted(zipfile.ZipFile(source).infolist(), key=lambda entry: entry.header_offset):
        name, begin = entry.orig_filename, entry.header_offset
        if entry.compress_type or entry.flag_bits & 1 or entry.compress_size != entry.file_size:
            raise ValueError(f"{name[:60]} is compressed or encrypted, as torch.save never does")
        local, *lengths = struct.unpack_from("<4s22xHH", source, begin)
        start = begin + 30 + sum(lengths)
        local += source[begin + 30 : begin + 30 + lengths[0]]
        if local != b"PK" + name.encode() or begin < last or name in files:
            raise ValueError(f"{name[:60]} in the zip overlaps, stands twice or has two names")
        last = start + entry.file_size
        files[name] = start, entry.file_size
    if last > at:
        raise ValueError("a file in the zip overlaps its directory")
    return files


@dataclass
class Stored:
    """A tensor in a pickle of torch.save: the storage that holds its numbers, and where in it."""

    ggml_type: str
    key: str  # the storage's name
    numel: int  # of the storage
    offset: int = 0
    shape: tuple[int, ...] = ()


def rebuild_tensor(
    storage: Stored, offset: int, shape: tuple, stride: tuple, grad: Any, hooks: Any, *more: Any
) -> Stored:
    """torch._utils._rebuild_tensor_v2: a part of a storage. ValueError unless it is contiguous."""
    counts = [offset, *shape, *stride]
    if not all(type(n) is int and n >= 0 for n in counts) or stride != (*shape[1:], 1) or any(more):
        raise ValueError("a tensor that is not contiguous, or not as it lies in the file")
    return replace(storage, offset=offset, shape=shape)


PICKLE_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
PICKLE_GLOBALS: dict[str, Any] = {  # what a state dict's pickle may name: what stands for it
    "collections OrderedDict": lambda: {},  # noqa: PIE807 (unlike dict, it takes no arguments)
    "torch._utils _rebuild_tensor_v2": rebuild_tensor,
    "torch._utils _rebuild_parameter": lambda tensor, grad, hooks: tensor,
    "torch FloatStorage": "F32",
    "torch HalfStorage": "F16",
    "torch BFloat16Storage": "BF16",
}


def unpickle(file: io.BytesIO) -> Any:
    """The next pickle in a file: dicts and tuples of text, numbers and Stored.

    Not by Python's unpickler: only the opcodes of a state dict are understood, nothing is called
    but the functions above. Keys are text, and no value is hashed, compared or shown before its
    type is known: a tuple may hold itself 2**60 times. Raises ValueError, TypeError, LookupError.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}

    def since_mark() -> list[Any]:
        start = marks.pop()
        found = stack[start:]
        del stack[start:]
        return found

    for count, (opcode, value, _) in enumerate(pickletools.genops(file)):
        if count > 2**18 or len(stack) > 2**12:  # 35 opcodes a tensor; SETITEMS takes 2000 values
            raise ValueError("a pickle longer than a state dict's")
        match opcode.name:
            case "PROTO":
                pass
            case "BINUNICODE" | "BININT" | "BININT1" | "BININT2" | "LONG1":
                stack.append(value)
            case "NONE" | "NEWTRUE" | "NEWFALSE" | "EMPTY_TUPLE":
                stack.append(PICKLE_CONSTANTS[opcode.name])
            case "EMPTY_DICT":
                stack.append({})
            case "MARK":
                marks.append(len(stack))
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                size = int(opcode.name[-1])
                stack[-size:] = [tuple(stack[-size:])]
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "SETITEM" | "SETITEMS":
                pair = opcode.name == "SETITEM"
                items = [stack.pop(-2), stack.pop()] if pair else since_mark()
                for key, item in zip(items[::2], items[1::2], strict=True):
                    if type(key) is not str or key in stack[-1]:
                        raise ValueError("a key that is no text, or stands twice")
                    stack[-1][key] = item
            case "GLOBAL" if value in PICKLE_GLOBALS:
                stack.append(PICKLE_GLOBALS[value])
            case "BINPERSID":
                kind, ggml_type, key, _, numel, *view = stack.pop()
                texts = all(type(text) is str for text in (kind, ggml_type, key))
                if not texts or kind != "storage" or type(numel) is not int or any(view):
                    raise ValueError("a storage that is a view of another, or none")
                stack.append(Stored(ggml_type, key, numel))
            case "REDUCE":
                arguments = stack.pop()
                stack.append(stack.pop()(*arguments))
            case "BUILD":  # an OrderedDict's attributes, such as _metadata
                if type(stack.pop()) is not dict or type(stack[-1]) is not dict:
                    raise ValueError("a tensor with attributes of its own")
            case "STOP":
                return stack.pop()
            case _:
                raise ValueError(f"{opcode.name} {str(value or '')[:60]}")


def state_dict(file: io.BytesIO) -> dict[str, Stored]:
    """The next pickle in a file, which must be a dict of matrices and vectors. ValueError."""
    content = unpickle(file)
    if type(content) is not dict or len(content) > MAX_ENTRIES:
        raise ValueError(f"a {type(content).__name__}; accepted is a dict of {MAX_ENTRIES} tensors")
    for name, stored in content.items():
        if type(stored) is not Stored:
            raise ValueError(f"{name} is of type {type(stored).__name__}; accepted are tensors")
        check_tensor(name, stored.ggml_type, stored.shape)
    return content


def zip_state_dict(source: mmap.mmap) -> tuple[dict[str, Stored], dict[str, tuple[int, int]]]:
    """The tensors of a zip by torch.save, and start and size of each storage."""
    files = zip_files(source)
    (pickled,) = (name for name in files if name.endswith("/data.pkl"))
    folder = pickled.removesuffix("data.pkl")
    start, size = files.get(f"{folder}byteorder", (0, 0))
    if source[start : start + min(size, 9)] not in (b"", b"little"):
        raise ValueError("its numbers are big-endian")
    start, size = files[pickled]
    content = state_dict(io.BytesIO(source[start : start + min(size, MAX_HEADER)]))
    return content, {t.key: files[f"{folder}data/{t.key}"] for t in content.values()}


def legacy_state_dict(source: mmap.mmap) -> tuple[dict[str, Stored], dict[str, tuple[int, int]]]:
    """The same of torch.save before 2020: five pickles, then the storages in the order of the last."""
    file = io.BytesIO(source[:MAX_HEADER])
    magic, _, system = (unpickle(file) for _ in range(3))
    if magic != 0x1950A86A20F9469CFC6C or system["little_endian"] is not True:
        raise ValueError("neither a zip nor pickles of torch.save")
    content, places = state_dict(file), {}
    sizes = {t.key: t.numel * DENSE[t.ggml_type].itemsize for t in content.values()}
    keys = [key for opcode, key, _ in pickletools.genops(file) if opcode.name == "BINUNICODE"]
    end = file.tell()
    for key in keys:  # 8 bytes with the count of the numbers, then the numbers
        places[key] = end + 8, sizes[key]
        end += 8 + sizes[key]
    if end != len(source):
        raise ValueError(f"its storages end at byte {end}, the file at {len(source)}: cut off?")
    return content, places


def torch_tensors(source: mmap.mmap) -> dict[str, Weight]:
    """What torch.save wrote, each tensor within its storage. Raises ValueError, LookupError, ..."""
    is_zip = source[:4] == b"PK\3\4"
    content, places = zip_state_dict(source) if is_zip else legacy_state_dict(source)
    weights = {}
    for name, t in content.items():
        item, (start, size) = DENSE[t.ggml_type].itemsize, places[t.key]
        if size != t.numel * item or t.offset + math.prod(t.shape) > t.numel:
            raise ValueError(f"{name} is not within its storage of {size} bytes")
        weights[name] = map_weight(source, t.ggml_type, t.shape, start + t.offset * item)
    if sum(weight.nbytes for weight in weights.values()) > 2 * len(source):
        raise ValueError("its tensors share bytes")  # embed_tokens and lm_head may
    return weights


def find_tokenizer(*directories: Path) -> Path:
    """The first tokenizer.model in them, if it can be one. FileNotFoundError, ValueError."""
    for directory in directories:
        if (directory / "tokenizer.model").exists():
            read_file(directory / "tokenizer.model", MAX_METADATA)
            return directory / "tokenizer.model"
    needed = "tokenizer.model (SentencePiece) is missing; tokenizer.json cannot stand in for it"
    raise FileNotFoundError(f"{directories[0]}: {needed}")


META_SETTINGS = "dim n_layers n_heads n_kv_heads vocab_size multiple_of ffn_dim_multiplier norm_eps"
META_SETTINGS += " rope_theta max_seq_len max_batch_size"


def meta_checkpoint(path: Path, files: list[Path]) -> Checkpoint:
    """Open Meta's directory. Its shards, which Meta's code runs on a GPU each, are joined."""
    if [file.name for file in files] != [f"consolidated.{i:02}.pth" for i in range(len(files))]:
        raise ValueError(f"{path}: of the shards up to {files[-1].name} there are {len(files)}")
    shards = [read_tensors(file) for file in files]
    axes, tensors = {last_name(row[2]): row[3] for row in NAMES}, {}
    for name, weight in shards[0].items():
        parts = [shard.get(name) for shard in shards]
        if any(
            w is None or (w.ggml_type, w.shape) != (weight.ggml_type, weight.shape) for w in parts
        ):
            raise ValueError(f"{path}: {name} differs in type or shape from shard to shard")
        axis, shape = axes.get(last_name(name)), list(weight.shape)
        if axis is not None and len(shape) == 2 and len(parts) > 1:
            shape[axis] *= len(parts)
            weight = Weight(weight.ggml_type, tuple(shape), [w.shards[0] for w in parts], axis)
        tensors[name] = weight
    tensors.pop("rope.freqs", None)  # computed, not learned

    params = path / "params.json"
    settings = read_json(params)
    get = partial(lookup, params, settings)
    odd = [key for key in settings if settings[key] and key not in META_SETTINGS.split()]
    if odd:
        raise ValueError(f"{params}: {odd[0]} is not of Llama 2; accepted are {META_SETTINGS}")
    hidden, heads, multiple = get("dim", int), get("n_heads", int), get("multiple_of", int, 256)
    vocab_size, columns = matrix_shape(tensors, "tok_embeddings", path)
    if columns != hidden:
        found = f"{len(files)} shards have {columns} columns of tok_embeddings, dim is {hidden}"
        raise ValueError(f"{path}: {found}: are shards missing?")
    intermediate = matrix_shape(tensors, "layers.0.feed_forward.w1", path)[0]
    formula = int(int(8 * hidden / 3) * get("ffn_dim_multiplier", float, 1.0))
    formula = -(-formula // max(multiple, 1)) * multiple  # rounded up
    if formula != intermediate:
        raise ValueError(f"{params}: {formula} rows of w1 follow; the shards have {intermediate}")
    config = Config(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=get("n_layers", int),
        num_attention_heads=heads,
        num_key_value_heads=get("n_kv_heads", int, heads),
        vocab_size=vocab_size,
        rms_norm_eps=get("norm_eps", float),
        rope_theta=get("rope_theta", float, 10000.0),
    )
    weights = rename(tensors, 2, config, path)
    file = find_tokenizer(path, path.resolve().parent)
    tokenizer = partial(Tokenizer.from_file, file, vocab_size)
    return Checkpoint(f"Meta's directory, {len(files)} .pth", config, weights, tokenizer)


def hf_checkpoint(path: Path, files: list[Path]) -> Checkpoint:
    """Open a Hugging Face directory: config.json, tokenizer.model, .safetensors or .bin files."""
    file = path / "config.json"
    settings = read_json(file)
    for key in ("rope_scaling", "rope_parameters"):  # the latter since transformers 5, with theta
        rope = lookup(file, settings, key, dict, {})
        settings |= {"rope_type": rope.get("type", "default")} if rope else {}
        settings |= {k: rope[k] for k in ("rope_type", "rope_theta", "factor") if k in rope}
    get = partial(lookup, file, settings)
    heads = get("num_attention_heads", int)
    linear = get("rope_type", str, "default") == "linear"
    for key, accepted in {
        "model_type": "llama",
        "quantization_config": None,  # GPTQ, AWQ, bitsandbytes, ...
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_act": "silu",
        "head_dim": get("hidden_size", int) // max(heads, 1),
        "partial_rotary_factor": 1.0,
        "rope_type": "linear" if linear else "default",
    }.items():
        found = settings.get(key)
        if found is not None and found != accepted:
            raise ValueError(f"{file}: {key} is {str(found)[:60]}; accepted is {accepted}")

    suffix = files[0].suffix
    base = "model.safetensors" if suffix == ".safetensors" else "pytorch_model.bin"
    index = path / f"{base}.index.json"
    if index.exists():  # without one, all files that are there
        names = lookup(index, read_json(index), "weight_map", dict).values()
        files = sorted({path / Path(str(name)).name for name in names})
    tensors: dict[str, Weight] = {}
    for part in files:
        for name, weight in read_tensors(part).items():
            ours = name.removeprefix("model.")
            if ours in tensors:
                raise ValueError(f"{part}: {name} stands in another file, too")
            if not ours.endswith(".rotary_emb.inv_freq"):  # computed, not learned
                tensors[ours] = weight
    tied = get("tie_word_embeddings", bool, False)
    names = "hidden_size intermediate_size num_hidden_layers vocab_size max_position_embeddings"
    config = Config(
        **{name: get(name, int) for name in names.split()},  # the keys are Config's names
        num_attention_heads=heads,
        num_key_value_heads=get("num_key_value_heads", int, heads),
        rms_norm_eps=get("rms_norm_eps", float),
        rope_theta=get("rope_theta", float, 10000.0),
        rope_scaling_factor=get("factor", float, 1.0) if linear else 1.0,
        bos_token_id=get("bos_token_id", int, 1),
        eos_token_id=get("eos_token_id", int, 2),
        tie_word_embeddings=tied and "lm_head.weight" not in tensors,
    )
    weights = rename(tensors, 0, config, path)
    for name, weight in weights.items():
        if last_name(name) in ("q_proj", "k_proj"):
            weight.hf_head_dim = config.head_dim
    template, other = path / "chat_template.jinja", path / "tokenizer_config.json"
    if template.exists():
        template = read_file(template).decode("utf-8", "replace")
    else:
        template = read_json(other).get("chat_template") if other.exists() else ""
    form = f"Hugging Face directory, {len(files)} {suffix}"
    tokenizer = partial(Tokenizer.from_file, find_tokenizer(path), config.vocab_size)
    return Checkpoint(form, config, weights, tokenizer, str(template or ""))


def printable(text: str) -> str:
    """Text from a file for a terminal: control, format and unassigned characters become "?"."""
    text = " ".join(text.split())
    return "".join("?" if unicodedata.category(c).startswith("C") else c for c in text)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Recognise a model file or directory and check its headers; no tensor is read yet."""
    path = Path(path)
    try:
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or directory")
        if not path.is_dir() and path.suffix not in (".pth", ".bin", ".safetensors", ".json"):
            return gguf_checkpoint(path)
        for settings, pattern, open_directory in (
            ("config.json", "model*.safetensors", hf_checkpoint),
            ("config.json", "pytorch_model*.bin", hf_checkpoint),
            ("params.json", "consolidated.*.pth", meta_checkpoint),
        ):
            files = sorted(path.glob(pattern))
            if files and (path / settings).is_file():
                return open_directory(path, files)
        found = sorted(os.listdir(path))[:5] if path.is_dir() else ["one file of a directory"]
        raise ValueError(
            f"{path}: found {', '.join(found) or 'nothing'}; accepted is a .gguf file, or a"
            " directory with params.json and consolidated.00.pth (Meta) or with config.json and"
            " model*.safetensors or pytorch_model*.bin (Hugging Face)"
        )
    except (ValueError, RecursionError) as error:  # names the file, repeats no pages of it
        text = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise ValueError(printable(text)[:400]) from None


def show_progress(items: Collection, label: str, show: bool) -> Iterable:
    """The items, with a progress bar on stderr."""
    if not show:
        return items
    from tqdm import tqdm

    return tqdm(items, label, unit="tensor", leave=False, file=sys.stderr)


def keeps_blocks(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether a weight stays in memory as it is in the file, for activations of `dtype`."""
    dense = ("F32",) if dtype == torch.float32 else tuple(DENSE)
    return (
        len(weight.shape) == 2 and weight.ggml_type in GGML_TYPES and weight.ggml_type not in dense
    )


def build_model(
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
    compile: bool = True,
    activation_bits: int = 32,
) -> Llama:
    """Read the weights, one after the other, into a model. `dtype` is that of the activations.

    Dense weights are converted to it, quantised ones keep their blocks. With float32, dense 16-bit
    ones keep their 16 bits too: half the memory, and the same numbers. `compile`: multiply by the
    compiled kernels; where the CPU's cannot be compiled, it is slow and a warning says why.
    `activation_bits`, 32, 16 or 8: to what a CPU may round what enters a layer, as QuantizedLinear
    tells; with bfloat16 to 16 at most.
    """
    bits = min(activation_bits, 16) if dtype == torch.bfloat16 else activation_bits
    options: dict[str, Any] = {"activation_bits": bits}  # of QuantizedLinear
    kept = any(keeps_blocks(weight, dtype) for weight in checkpoint.weights.values())
    if compile and kept and torch.device(device).type == "cpu":
        try:
            options["library"], _ = kernels()
        except OSError as error:
            warnings.warn(f"quantised weights will be slow: {error}", stacklevel=2)
    elif compile and kept and torch.device(device).type == "cuda":
        options["unpack"] = torch.compile(dequantize, dynamic=True)
    with torch.device("meta"):
        model = Llama(checkpoint.config)
    for name, weight in show_progress(checkpoint.weights.items(), "loading", progress):
        parent, _, attribute = name.removesuffix(".weight").rpartition(".")
        module = model.get_submodule(name.removesuffix(".weight"))
        if not keeps_blocks(weight, dtype):
            module.weight = nn.Parameter(weight.dense(dtype, device), requires_grad=False)
            continue
        data = weight.read().to(device)
        if isinstance(module, nn.Embedding):
            module = QuantizedEmbedding(data, weight.ggml_type, dtype)
            if checkpoint.config.tie_word_embeddings:
                model.lm_head = QuantizedLinear(data, weight.ggml_type, **options)
        else:
            module = QuantizedLinear(data, weight.ggml_type, **options)
        setattr(model.get_submodule(parent), attribute, module)
    if checkpoint.config.tie_word_embeddings and isinstance(model.embed_tokens, nn.Embedding):
        model.lm_head.weight = model.embed_tokens.weight
    if "library" in options:
        model.run_layers = NativeLayers(model, options["library"])
    return model.eval()


def load(
    path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Llama, Tokenizer]:
    """A .gguf file, a Meta or Hugging Face directory -> model and tokenizer.

    Raises ValueError or FileNotFoundError that says what is wrong.
    """
    checkpoint = open_checkpoint(path)
    return build_model(checkpoint, device, dtype or torch.float32), checkpoint.tokenizer()


SAVE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")


def save_kind(weight: Weight, kind: str | None) -> str:
    """The type of a weight in a file of `kind`: vectors F32, rows not of whole blocks F16."""
    if len(weight.shape) == 1:
        return "F32"
    fits = weight.shape[-1] % replace(weight, ggml_type=kind or weight.ggml_type).block[0] == 0
    return (kind or weight.ggml_type) if fits else "F16"


def save_gguf(
    checkpoint: Checkpoint, path: str | Path, kind: str | None = None, progress: bool = False
) -> None:
    """Write any checkpoint as one GGUF file, tensor by tensor. Without `kind` the types stay.

    The file appears under its name once it is complete. Raises ValueError for other types.
    """
    import gguf
    import numpy

    if kind is not None and kind not in SAVE_TYPES:
        raise ValueError(f"cannot write the type {kind}; accepted are {', '.join(SAVE_TYPES)}")
    config, path = checkpoint.config, Path(path)
    unfinished = path.with_name(path.name + ".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    settings = {
        "general.quantization_version": gguf.GGML_QUANT_VERSION,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope_theta),
        "llama.rope.scaling.type": "none" if config.rope_scaling_factor == 1 else "linear",
        "llama.rope.scaling.factor": float(config.rope_scaling_factor),
        "llama.vocab_size": config.vocab_size,
    }
    settings |= checkpoint.tokenizer().vocabulary(config.vocab_size)
    settings |= {
        "tokenizer.ggml.bos_token_id": config.bos_token_id,
        "tokenizer.ggml.eos_token_id": config.eos_token_id,
        "tokenizer.chat_template": checkpoint.chat_template,
    }
    for key, value in settings.items():
        kind_of_value = gguf.GGUFValueType.get_type(value)  # of 32 bits, as llama.cpp wants them
        if type(value) is int:
            kind_of_value = gguf.GGUFValueType.UINT32
        if value not in ("", [], -1):
            writer.add_key_value(key, value, kind_of_value)
    names = dict(name_map(1, config))
    weights = {names[ours]: weight for ours, weight in checkpoint.weights.items()}
    if config.rope_freq_factors is not None:
        factors = torch.tensor([config.rope_freq_factors]).view(torch.uint8)
        weights["rope_freqs.weight"] = Weight("F32", (config.head_dim // 2,), [factors])
    for name, weight in weights.items():
        target = replace(weight, ggml_type=save_kind(weight, kind))
        raw = gguf.GGMLQuantizationType[target.ggml_type]
        writer.add_tensor_info(name, weight.shape, numpy.dtype("f4"), target.nbytes, raw)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for weight in show_progress(weights.values(), "saving", progress):
            target = save_kind(weight, kind)
            if target == weight.ggml_type:
                rows = weight.read().numpy()
            else:
                values = weight.dense(torch.float32).numpy()
                if target == "F16" and abs(values).max() > 65504:
                    raise ValueError("a weight is beyond the range of F16; BF16 can hold it")
                rows = gguf.quants.quantize(values, gguf.GGMLQuantizationType[target])
            writer.write_tensor_data(rows)
        writer.close()
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


# --------------------------------------------------------------------------------------------------
# 11. Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces


def sentencepiece_model(gguf: GGUF) -> bytes:
    """A GGUF file's vocabulary as SentencePiece's ModelProto (sentencepiece_model.proto), in bytes.

    Written by hand: sentencepiece's own class for it needs protobuf, which it does not install.
    """
    pieces = gguf.get("tokenizer.ggml.tokens", list)
    scores = gguf.get("tokenizer.ggml.scores", list, [])
    types = list(gguf.get("tokenizer.ggml.token_type", list, [NORMAL] * len(pieces)))
    unk = gguf.get("tokenizer.ggml.unknown_token_id", int, 0)
    bos = gguf.get("tokenizer.ggml.bos_token_id", int, 1)
    eos = gguf.get("tokenizer.ggml.eos_token_id", int, 2)
    n = len(pieces)
    for name, values, fits in (  # what SentencePiece would trust blindly
        ("tokens", pieces, lambda piece: isinstance(piece, str)),
        ("scores", scores, lambda score: isinstance(score, (int, float)) and abs(score) < 1e38),
        ("token_type", types, lambda kind: isinstance(kind, int) and NORMAL <= kind <= BYTE),
    ):
        bad = [repr(value)[:40] for value in values if not fits(value)]
        if bad or len(values) != n:
            found = f"{len(values)} values for {n} tokens" + f", among them {bad[:1]}" * bool(bad)
            raise ValueError(f"{gguf.path}: tokenizer.ggml.{name} has {found}")
    if not all(0 <= i < n for i in (unk, bos, eos)):
        raise ValueError(f"{gguf.path}: unknown, BOS, EOS ids {unk}, {bos}, {eos} of {n} tokens")
    types[bos] = types[eos] = CONTROL  # the ids decide: converters have left them NORMAL, and
    types[unk] = UNKNOWN  # this one CONTROL, which SentencePiece refuses

    def varint(number: int) -> bytes:
        out = bytearray()
        number &= 2**64 - 1
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        return bytes((*out, number))

    def integer(field: int, number: int) -> bytes:
        return varint(field << 3) + varint(number)

    def message(field: int, content: bytes) -> bytes:
        return varint(field << 3 | 2) + varint(len(content)) + content

    names = [piece.encode() for piece in pieces]
    out = [
        message(1, message(1, name) + b"\x15" + struct.pack("<f", score) + integer(3, kind))
        for name, score, kind in zip(names, scores, types, strict=True)
    ]
    trainer = integer(3, 2) + integer(4, n)  # model_type BPE, vocab_size
    trainer += integer(35, types.count(BYTE) == 256)  # byte_fallback
    trainer += integer(40, unk) + integer(41, bos) + integer(42, eos) + integer(43, -1)
    trainer += message(45, names[unk]) + message(46, names[bos]) + message(47, names[eos])
    add_dummy_prefix = gguf.get("tokenizer.ggml.add_space_prefix", bool, True)
    remove_extra = gguf.get("tokenizer.ggml.remove_extra_whitespaces", bool, False)
    normalizer = message(1, b"identity") + integer(3, add_dummy_prefix)
    normalizer += integer(4, remove_extra) + integer(5, True)  # escape_whitespaces
    return b"".join((*out, message(2, trainer), message(3, normalizer)))


class Tokenizer:
    """SentencePiece, from a tokenizer.model or from a GGUF's own vocabulary.

    Text never becomes BOS, EOS or another control id, whatever it says: a typed `<s>` is text.
    """

    def __init__(self, model_proto: bytes, source: str | Path, add_bos: bool = True) -> None:
        import sentencepiece

        try:
            self.sp = sentencepiece.SentencePieceProcessor(model_proto=model_proto)
            self.vocab_size = self.sp.vocab_size()
            self.sp.id_to_piece(list(range(self.vocab_size)))  # all are UTF-8
        except (RuntimeError, ValueError) as error:
            problem = f"not a SentencePiece model: {error}"
            raise ValueError(f"{source}: {problem}"[:400]) from None
        self.bos_id, self.eos_id = self.sp.bos_id(), self.sp.eos_id()
        self.add_bos = add_bos  # whether a prompt begins with BOS: so in every Llama 2
        self.metadata: dict[str, Any] = {}  # of a GGUF file, all about its vocabulary

    @classmethod
    def from_file(cls, path: str | Path, max_pieces: int | None = None) -> Tokenizer:
        """Read SentencePiece's tokenizer.model. ValueError if it has more pieces than the model."""
        tokenizer = cls(read_file(Path(path), MAX_METADATA), path)
        if max_pieces is not None and tokenizer.vocab_size > max_pieces:
            raise ValueError(f"{path}: {tokenizer.vocab_size} pieces; the model has {max_pieces}")
        return tokenizer

    @classmethod
    def from_gguf(cls, gguf: GGUF | str | Path) -> Tokenizer:
        """Rebuild SentencePiece's model from the vocabulary inside a GGUF file."""
        gguf = gguf if isinstance(gguf, GGUF) else GGUF(gguf)
        add_bos = gguf.get("tokenizer.ggml.add_bos_token", bool, True)
        tokenizer = cls(sentencepiece_model(gguf), gguf.path, add_bos)
        keys = [key for key in gguf.metadata if key.startswith("tokenizer.")]
        tokenizer.metadata = {key: gguf.metadata[key] for key in keys}
        return tokenizer

    def encode(self, text: str, bos: bool = True) -> list[int]:
        """Text -> ids. Raises ValueError when BOS is asked for and the vocabulary has none."""
        if bos and self.bos_id < 0:
            raise ValueError("the vocabulary has no BOS token; pass bos=False")
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        return [self.bos_id] * bos + self.sp.encode(text)

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text; control tokens are silent, bytes that are not UTF-8 become U+FFFD."""
        ids = list(ids)
        for token_id in ids:
            self.check(token_id)
        return self.sp.decode(ids)

    def check(self, token_id: int) -> None:
        """Raises ValueError for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id}; accepted is 0 to {self.vocab_size - 1}")

    def piece(self, token_id: int) -> tuple[bytes, int]:
        """The UTF-8 bytes that a token stands for and its type; b"" for control tokens."""
        self.check(token_id)
        if self.sp.is_control(token_id):
            return b"", CONTROL
        if self.sp.is_unknown(token_id):
            return " \u2047 ".encode(), UNKNOWN
        text = self.sp.id_to_piece(token_id)
        if self.sp.is_byte(token_id):
            return bytes((int(text[3:5], 16),)), BYTE
        return text.replace("\u2581", " ").encode(), NORMAL

    def vocabulary(self, count: int) -> dict[str, Any]:
        """By the keys of GGUF, filled up to `count` pieces with unused ones.

        SentencePiece does not tell which pieces are user-defined: they become normal ones.
        """
        sp, found, padding = self.sp, range(self.vocab_size), range(self.vocab_size, count)
        tests = {
            sp.is_unknown: UNKNOWN,
            sp.is_control: CONTROL,
            sp.is_byte: BYTE,
            sp.is_unused: UNUSED,
        }
        types = [next((t for test, t in tests.items() if test(i)), NORMAL) for i in found]
        return self.metadata or {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": sp.id_to_piece([*found]) + [f"[PAD{i}]" for i in padding],
            "tokenizer.ggml.scores": sp.get_score([*found]) + [0.0 for _ in padding],
            "tokenizer.ggml.token_type": types + [UNUSED for _ in padding],
            "tokenizer.ggml.unknown_token_id": sp.unk_id(),
            "tokenizer.ggml.add_bos_token": self.add_bos,
            "tokenizer.ggml.add_space_prefix": sp.encode_as_pieces("a")[0] != "a",
            "tokenizer.ggml.remove_extra_whitespaces": sp.encode("a  a") == sp.encode("a a"),
        }


# SentencePiece replaces malformed UTF-8 byte by byte; Python's "replace" once per broken sequence.
codecs.register_error("replace_each_byte", lambda e: ("\ufffd" * (e.end - e.start), e.end))


class StreamDecoder:
    """Ids -> text one by one: a character of several byte tokens comes out once it is whole.

    SentencePiece puts a space before a text; it is taken off the first piece again unless the text
    continues another (`first=False`). What it yields joins to Tokenizer.decode of all ids.
    """

    def __init__(self, tokenizer: Tokenizer, first: bool = True) -> None:
        self.tokenizer, self.first = tokenizer, first
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace_each_byte")

    def decode(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        data, kind = self.tokenizer.piece(token_id)
        text = "" if kind == BYTE else self.flush()  # bytes before another piece stay incomplete
        if kind == CONTROL:
            return text
        if self.first and kind == NORMAL:
            data = data.removeprefix(b" ")
        self.first = False
        return text + self.utf8.decode(data)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for bytes that never became a character."""
        text = self.utf8.decode(b"", final=True)
        self.utf8.reset()
        return text


# --------------------------------------------------------------------------------------------------
# 12. Chat format

RESERVED_TAGS = ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>")


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]) -> list[int]:
    """Messages {"role", "content"} -> ids, as Meta's chat_completion encodes them (generation.py).

    Each question and its answer are encoded by themselves between BOS and EOS; the system message
    belongs to the first question. Raises ValueError on another order of roles (system?, user,
    assistant, ..., user) and on reserved tags in a message, which would let it speak for others.
    """
    turns = [(message["role"], message["content"]) for message in messages]
    for role, content in turns:
        for tag in RESERVED_TAGS:
            if tag in content:
                raise ValueError(f"the {role} message contains the reserved tag {tag}")
    if len(turns) > 1 and turns[0][0] == "system":
        (_, system), (role, question), *rest = turns
        turns = [(role, f"<<SYS>>\n{system}\n<</SYS>>\n\n{question}"), *rest]
    roles = [role for role, _ in turns]
    if len(turns) % 2 == 0 or roles != ["user", "assistant"] * (len(turns) // 2) + ["user"]:
        found = ", ".join(message["role"] for message in messages) or "no message"
        raise ValueError(
            f"accepted is: system (or not), user, assistant, ..., user; found: {found}"
        )
    ids = []
    for i in range(0, len(turns) - 1, 2):
        question, answer = turns[i][1].strip(), turns[i + 1][1].strip()
        ids += tokenizer.encode(f"[INST] {question} [/INST] {answer} ") + [tokenizer.eos_id]
    return ids + tokenizer.encode(f"[INST] {turns[-1][1].strip()} [/INST]")


# --------------------------------------------------------------------------------------------------
# 13. Sampling


def sample(
    logits: Tensor,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 0.95,
    min_p: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """logits (..., V) -> ids (...), -1 where the logits are not finite. Temperature 0 is greedy.

    In this order: temperature, the top_k likeliest (0: all), the fewest that reach top_p together
    (Holtzman et al. 2019, arXiv:1904.09751), those at least min_p times as likely as the likeliest
    (Nguyen et al. 2024, arXiv:2407.01082). Raises ValueError for parameters out of range.
    """
    if not (0 <= temperature < math.inf and top_k >= 0 and 0 < top_p <= 1 and 0 <= min_p <= 1):
        found = f"temperature {temperature}, top_k {top_k}, top_p {top_p}, min_p {min_p}"
        accepted = "temperature >= 0, top_k >= 0, 0 < top_p <= 1, 0 <= min_p <= 1"
        raise ValueError(f"sampling with {found}; accepted is {accepted}")
    finite = logits.isfinite().all(-1)
    if temperature == 0:
        return logits.argmax(-1).where(finite, -1)
    logits = logits.float() - logits.amax(-1, keepdim=True)  # no temperature can overflow these
    probs, ids = (logits / max(temperature, 1e-6)).softmax(-1).sort(-1, descending=True)  # (..., V)
    if top_k:
        probs, ids = probs[..., :top_k], ids[..., :top_k]
    before = probs.cumsum(-1) - probs  # what stands before each one; 0 for the first, which stays
    drop = (before >= top_p * probs.sum(-1, keepdim=True)) & (before > 0) & (top_p < 1)
    drop |= probs < min_p * probs[..., :1]
    probs = probs.masked_fill(drop, 0.0).cumsum(-1)
    # The inverse of the cumulative distribution at one random number per row. That one comes from
    # the CPU, so that a seed means the same on every device.
    u = torch.rand(logits.shape[:-1], generator=generator).to(probs.device)[..., None]
    place = torch.searchsorted(probs, u * probs[..., -1:], right=True)
    place = place.clamp(max=(~drop).sum(-1, keepdim=True) - 1)  # u near 1 and rounding
    return ids.gather(-1, place).squeeze(-1).where(finite, -1)


# --------------------------------------------------------------------------------------------------
# 14. Generation

PREFILL_CHUNK = 512  # prompt tokens per forward pass: bounds the memory for activations and masks


class StaticCache(Cache):
    """A Cache as a step of one token sees it: the position is a tensor, so that no shape changes.

    The same compiled code, on CUDA the same graph, then serves every position: it attends to the
    first `window` slots and masks those that are still empty.
    """

    def __init__(self, cache: Cache, window: int) -> None:
        vars(self).update(vars(cache))  # the same tensors
        self.window = window
        self.slot = torch.zeros(1, dtype=torch.int64, device=cache.k.device)  # the position

    def rope(self, T: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the position: (1, D/2), with padding (B, 1, D/2)."""
        where = self.slot if self.padding is None else (self.slot - self.padding)[:, None]
        return self.cos[where], self.sin[where]

    def mask(self, T: int) -> Tensor:
        """Which slots are filled: (1, window), with padding (B, 1, 1, window)."""
        column = torch.arange(self.window, device=self.slot.device)
        mask = (column <= self.slot)[None]
        return (
            mask if self.padding is None else mask & (column >= self.padding[:, None, None, None])
        )

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, G, 1, D) of one layer; return the window, (B, G, window, D)."""
        self.k[layer].index_copy_(2, self.slot, k)
        self.v[layer].index_copy_(2, self.slot, v)
        return self.k[layer, :, :, : self.window], self.v[layer, :, :, : self.window]

    def advance(self, T: int) -> None:
        """The position is set from outside, by CompiledStep."""


class CompiledStep:
    """model(tokens, cache) with its one-token steps compiled; longer passes run as they are.

    On CUDA the compiled step is captured as a graph: no launches, no Python, no wait per token.
    There is one per window, which doubles as the cache fills: empty slots are hardly read.
    """

    def __init__(self, model: Llama, cache: Cache, **options: Any) -> None:
        self.model, self.cache, self.options = model, cache, options  # options of torch.compile
        device = cache.k.device
        self.tokens = torch.zeros(cache.batch_size, 1, dtype=torch.int64, device=device)
        self.steps: dict[int, tuple[StaticCache, Callable[[], Tensor]]] = {}  # by window

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor:
        if tokens.shape[1] > 1:
            return self.model(tokens, cache)
        end = cache.slots(1).stop
        window = min(max(512, 1 << (end - 1).bit_length()), cache.max_seq_len)
        if window not in self.steps:
            self.steps[window] = self.capture(window)
        static, step = self.steps[window]
        self.tokens.copy_(tokens)
        static.slot.fill_(cache.pos)
        logits = step()  # (B, V)
        cache.advance(1)
        return logits

    def capture(self, window: int) -> tuple[StaticCache, Callable[[], Tensor]]:
        """Compile the step for one window. What it stores meanwhile is written again later."""
        static = StaticCache(self.cache, window)
        static.slot.fill_(self.cache.pos)
        forward = torch.compile(self.model, **self.options)
        if self.tokens.device.type != "cuda":
            return static, lambda: forward(self.tokens, static)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.no_grad():
            for _ in range(3):  # compile and warm up before the capture, as torch.cuda.graph asks
                forward(self.tokens, static)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), torch.no_grad():
            logits = forward(self.tokens, static)

        def replay() -> Tensor:
            graph.replay()
            return logits

        return static, replay


@dataclass
class Report:
    """What generate() did; filled in while it runs."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0  # until the first new token is known
    new_ids: list[list[int]] = field(default_factory=list)  # per row
    new_seconds: float = 0.0  # for all but the first; the consumer's own time is not counted
    stop_reasons: list[str] = field(default_factory=list)  # per row; "" while it goes on

    @property
    def new_tokens(self) -> int:
        """How many tokens were generated, in all rows together."""
        return sum(map(len, self.new_ids))


def check_options(
    max_new_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int | None,
) -> None:
    """Raises ValueError for parameters of generate() that are out of range."""
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; accepted is 0 or more")
    if seed is not None and not 0 <= seed < 2**63:
        raise ValueError(f"seed is {seed}; accepted is 0 to 2**63 - 1")
    sample(torch.zeros(1), temperature, top_k, top_p, min_p)


def generate(
    model: Llama,
    prompt: Sequence[int] | Sequence[Sequence[int]],
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | None = None,
    stop_ids: Collection[int] | None = None,
    cache: Cache | None = None,
    step: Callable[[Tensor, Cache], Tensor] | None = None,
    report: Report | None = None,
) -> Iterator[int] | Iterator[list[int | None]]:
    """Continue a prompt: yields new ids one by one, without the one that stops it (default: EOS).

    A list of prompts yields a list per step, None in rows that have finished; row i draws from
    seed + i, as it would alone. `cache`: the prompt continues what is stored there. `step`: what
    runs the model, such as a CompiledStep of that cache.
    Raises ValueError for an empty prompt, ids out of range, and a prompt beyond the context.
    """
    single = len(prompt) == 0 or isinstance(prompt[0], int)
    rows = [list(row) for row in ([prompt] if single else prompt)]
    config, weight = model.config, model.norm.weight
    lengths = [len(row) for row in rows]
    for row in rows:
        bad = [i for i in row if not 0 <= i < config.vocab_size]
        if not row or bad:
            problem = f"holds the token id {bad[0]}" if bad else "is empty"
            raise ValueError(f"the prompt {problem}; accepted are ids below {config.vocab_size}")
    check_options(max_new_tokens, temperature, top_k, top_p, min_p, seed)
    limit = config.max_position_embeddings if cache is None else cache.max_seq_len - cache.pos
    if max(lengths) > limit:
        raise ValueError(f"the prompt has {max(lengths)} tokens, the context holds {limit}")
    room = [min(max_new_tokens, limit - n) for n in lengths]  # new tokens per row
    padding = torch.tensor([max(lengths) - n for n in lengths])
    if cache is None:
        size = max(lengths) + max(room)
        uneven = padding if padding.any() else None
        cache = Cache(config, len(rows), size, weight.dtype, weight.device, uneven)
    elif padding.any():
        raise ValueError("prompts of different lengths cannot continue a cache")
    tokens = torch.tensor([[0] * (max(lengths) - len(row)) + row for row in rows])
    report = Report() if report is None else report
    report.prompt_tokens, report.prompt_seconds, report.new_seconds = sum(lengths), 0.0, 0.0
    report.new_ids, report.stop_reasons = [[] for _ in rows], [""] * len(rows)
    stop_ids = (config.eos_token_id,) if stop_ids is None else stop_ids
    step = model if step is None else step
    generators = [torch.Generator() for _ in rows]
    for i, generator in enumerate(generators):
        generator.seed() if seed is None else generator.manual_seed(seed + i)

    def steps() -> Iterator[list[int | None]]:
        nonlocal tokens
        reasons = report.stop_reasons
        while True:
            start = time.perf_counter()
            for chunk in tokens.to(weight.device).split(PREFILL_CHUNK, dim=1):
                logits = step(chunk, cache)  # (B, V)
            if temperature == 0:
                ids = sample(logits, 0.0).tolist()  # the one wait for the device per step
            else:
                draws = [
                    sample(row, temperature, top_k, top_p, min_p, generator)
                    for row, generator in zip(logits, generators, strict=True)
                ]
                ids = torch.stack(draws).tolist()
            seconds = time.perf_counter() - start
            if report.prompt_seconds:
                report.new_seconds += seconds
            else:
                report.prompt_seconds = seconds
            if -1 in ids:
                raise ValueError("the logits are not finite: NaN or infinity in the weights")
            for i, token_id in enumerate(ids):
                if not reasons[i] and token_id in stop_ids:
                    reasons[i] = f"stop token {token_id}"
                elif not reasons[i]:
                    report.new_ids[i].append(token_id)
            if all(reasons):
                return
            yield [None if reason else i for i, reason in zip(ids, reasons, strict=True)]
            room[:] = [n - 1 for n in room]
            set_ends()
            if all(reasons):
                return
            tokens = torch.tensor(ids)[:, None]

    def set_ends() -> None:
        for i, n in enumerate(room):
            if n <= 0 and not report.stop_reasons[i]:
                full = max_new_tokens > limit - lengths[i]
                report.stop_reasons[i] = "context full" if full else "max new tokens"

    set_ends()
    if all(report.stop_reasons):
        return iter(())
    return (step[0] for step in steps()) if single else steps()


def stream_text(
    model: Llama,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    first: bool = True,
    stop: Sequence[str] = (),
    **options: Any,
) -> Iterator[str]:
    """generate() as pieces of text, up to the first of the texts in `stop`, which is not shown."""
    decoder, held = StreamDecoder(tokenizer, first), ""
    options["report"] = report = options.get("report") or Report()

    def release(final: bool) -> tuple[str, str, str]:
        """Split what is held into text to show now, text to keep and the stop text found."""
        found = [(held.index(text), text) for text in stop if text in held]
        if found:
            place, text = min(found)
            return held[:place], "", text
        keep = 0  # the end of what is held may be the beginning of a stop text
        for text in stop if not final else ():
            keep = max(keep, *(n for n in range(len(text)) if held.endswith(text[:n])))
        return held[: len(held) - keep], held[len(held) - keep :], ""

    for token_id in generate(model, prompt, **options):
        held += decoder.decode(token_id)
        text, held, stopped_by = release(final=False)
        if text:
            yield text
        if stopped_by:
            report.stop_reasons[0] = f"stop text {stopped_by!r}"
            return
    held += decoder.flush()
    text, _, _ = release(final=True)
    if text:
        yield text


# --------------------------------------------------------------------------------------------------
# 15. Larger than one device


def start_ranks() -> int:
    """Meet the other processes that torchrun started, if it did; return this one's rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ and not distributed.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        patience = datetime.timedelta(days=30)  # in a chat, the others wait for what rank 0 reads
        distributed.init_process_group(backend, timeout=patience)
    return distributed.get_rank() if distributed.is_initialized() else 0


def all_ranks(value: Any) -> list[Any]:
    """What each process has as `value`, by rank; a process alone has its own."""
    if not distributed.is_initialized():
        return [value]
    values = [None] * distributed.get_world_size()
    distributed.all_gather_object(values, value)
    return values


def from_rank_0(read: Callable[[], Any]) -> Any:
    """What `read` returns on rank 0, which alone calls it: they share one standard input."""
    return all_ranks(read() if start_ranks() == 0 else None)[0]


def rank_part(checkpoint: Checkpoint, rank: int, ranks: int) -> Checkpoint:
    """What one of several devices holds of a model: a part of every matrix (tensor parallelism).

    Of attention it is key/value heads with their query heads, of the MLP some of its width: rows of
    the first matrices, the same columns of the last. (Megatron-LM, arXiv:1909.08053, section 3; not
    torch's DTensor, which cuts tensors of numbers, not of blocks, and reads them whole first.)
    Raises ValueError for more ranks than the heads or the blocks allow.
    """
    config, weights = checkpoint.config, dict(checkpoint.weights)
    kv_heads, axes = config.num_key_value_heads, {last_name(row[0]): row[3] for row in NAMES}
    if kv_heads % ranks:
        counts = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
        raise ValueError(f"{ranks} ranks for {kv_heads} key/value heads; accepted are {counts}")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    for name, weight in list(weights.items()):
        axis = axes[last_name(name)]
        if axis is None:
            continue
        size, block = weight.shape[axis], weight.block[0] if axis == 1 else 1
        run = block  # what must stay together: a block, of the MLP one of down_proj's columns, ...
        if ".mlp." in name:
            run = weights[re.sub("[a-z]+_proj", "down_proj", name)].block[0]
        elif ".self_attn." in name:  # ... a key/value head with its query heads
            run = size // kv_heads
        start, stop = (size // run * r // ranks * run for r in (rank, rank + 1))
        if start == stop or start % block or stop % block:
            found = f"{size} cannot be divided by {ranks} ranks into runs of {run}"
            raise ValueError(f"{name}, {weight.ggml_type} in blocks of {block}: {found}")
        weights[name] = weight.part(axis, start, stop)
    config = replace(config, num_key_value_heads=kv_heads // ranks, tie_word_embeddings=False)
    return replace(checkpoint, config=config, weights=weights)


def connect_ranks(model: Llama) -> None:
    """Make the model of a rank_part() one with those of the other ranks: same logits on each.

    The products of o_proj and down_proj are added up. Those of embed_tokens and lm_head stand side
    by side: each rank puts its own into zeros, so that adding them up is exact.
    """

    def add(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        distributed.all_reduce(y)
        return y

    def join(start: int, size: int, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        whole = y.new_zeros(*y.shape[:-1], size)
        whole[..., start : start + y.shape[-1]] = y
        return add(module, args, whole)

    device, rank = model.norm.weight.device, distributed.get_rank()
    for layer in model.layers:
        layer.self_attn.o_proj.register_forward_hook(add)
        layer.mlp.down_proj.register_forward_hook(add)
    token = torch.zeros(1, 1, dtype=torch.int64, device=device)
    for module, x in ((model.embed_tokens, token), (model.lm_head, model.norm.weight[None])):
        widths = all_ranks(module(x).shape[-1])
        module.register_forward_hook(partial(join, sum(widths[:rank]), sum(widths)))


def memory_plan(
    checkpoint: Checkpoint, context: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, int]:
    """Bytes of memory for weights, cache and the rest while it runs, for one row of `context`."""
    config, item = checkpoint.config, dtype.itemsize
    kept, other = 0, 0  # bytes of the file that stay, numbers that are converted
    unpacked = 0  # of the weights that stay: a GPU unpacks a whole matrix, a CPU part of it
    for weight in checkpoint.weights.values():
        count = math.prod(weight.shape)
        if keeps_blocks(weight, dtype):
            kept, unpacked = kept + weight.nbytes, max(unpacked, count)
        else:
            other += count
    if torch.device(device).type == "cpu":
        unpacked = min(unpacked, CHUNK // 2)
    widths = 4 * config.hidden_size + 3 * config.intermediate_size
    heads = config.num_hidden_layers * config.num_key_value_heads
    activations = min(context, PREFILL_CHUNK) * (widths * item + context)
    return {
        "weights": kept + other * item,
        "cache": 2 * heads * config.head_dim * context * item,
        "overhead": activations + 10 * unpacked,  # float32, integers, dtype
    }


def free_memory(device: torch.device) -> int:
    """Bytes that a process can have on a device, what others use and may give back not counted."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not Path("/proc/meminfo").exists():  # not Linux: all there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = re.search(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
    free, group = int(found[1]) * 1024, Path("/sys/fs/cgroup")  # with the page cache
    try:  # the limit of a container
        limit, used = ((group / f"memory.{name}").read_text() for name in ("max", "current"))
        cached = re.search(r"^file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        free = min(free, int(limit) - int(used) + int(cached[1]))
    except (OSError, ValueError):  # there is none
        pass
    return free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's processes share it


def check_memory(
    checkpoint: Checkpoint, context: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Raises ValueError, before anything is loaded, if a model cannot fit: with what would."""
    plan = memory_plan(checkpoint, context, dtype, device)
    free = min(all_ranks(free_memory(device)))
    if sum(plan.values()) <= free:
        return
    fits = []
    room = (free - plan["weights"] - plan["overhead"]) * context // plan["cache"]
    if room > 0:
        fits.append(f"--context {room}")
    for kind in ("Q8_0", "Q4_0"):
        weights = {
            k: replace(w, ggml_type=save_kind(w, kind)) for k, w in checkpoint.weights.items()
        }
        smaller = replace(checkpoint, weights=weights)
        need = sum(memory_plan(smaller, context, dtype, device).values())
        if need <= free:
            fits.append(f"type {kind} ({need / 1e9:.1f} GB; --save converts)")
    raise ValueError(
        f"the model needs {gigabytes(plan)}, {free / 1e9:.1f} GB are free on {device};"
        f" what would fit: {', '.join(fits) or 'more devices, with torchrun'}"
    )


def gigabytes(plan: dict[str, int]) -> str:
    """A memory plan as text."""
    parts = [f"{name} {size / 1e9:.3g}" for name, size in plan.items()]
    return f"{' + '.join(parts)} = {sum(plan.values()) / 1e9:.3g} GB"


# --------------------------------------------------------------------------------------------------
# 16. Command line

VERSION = "0.1.0"
CHAT_CONTEXT = 8192  # tokens that a chat makes room for if not told: a file may claim any context
DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "fairytales.gguf"


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a wrong one ends in one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="llama2.py", description="Run Llama 2 models.")
    parser.error = lambda message: sys.exit(fail(message))

    def text_type(argument: str) -> str:
        return os.fsencode(argument).decode("utf-8", "replace")  # the shell passes any bytes

    add = parser.add_argument
    add("--model", metavar="PATH", type=Path, default=DEFAULT_MODEL, help=".gguf file or directory")
    text = parser.add_mutually_exclusive_group()
    text.add_argument(
        "--prompt", metavar="TEXT", type=text_type, help="text to continue (default: stdin)"
    )
    text.add_argument(
        "--prompt-file", metavar="FILE", type=Path, help="the prompt, read from a file"
    )
    add("--chat", action="store_true", help="converse; the prompt is the first question")
    add("--system", metavar="TEXT", type=text_type, help="with --chat: what it is told beforehand")
    add("--max-new-tokens", metavar="N", type=int, default=256, help="default: %(default)s")
    add("--temperature", metavar="T", type=float, default=0.8, help="default: 0.8; 0 is greedy")
    add("--top-k", metavar="K", type=int, default=0, help="only the K likeliest (default: all)")
    add("--top-p", metavar="P", type=float, default=0.95, help="default: 0.95; 1 is off")
    add("--min-p", metavar="P", type=float, default=0.0, help="default: 0, off")
    add("--seed", metavar="N", type=int, default=0, help="default: 0; -1 draws another each time")
    add("--context", metavar="N", type=int, help="tokens at most (default: all that the model can)")
    add(
        "--stop",
        metavar="TEXT",
        type=text_type,
        action="append",
        default=[],
        help="end before this text; repeatable",
    )
    add("--no-echo", action="store_true", help="do not repeat the prompt")
    dtype = "of the activations (default: float32 on a CPU, bfloat16 or float16 elsewhere)"
    bits = "what a CPU may round them to in products (default: 16 for more than 64 MiB)"
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help=dtype)
    add("--activation-bits", choices=(32, 16, 8), type=int, help=bits)
    add("--threads", metavar="N", type=int, help="CPU threads (default: torch's choice)")
    add("--compile", action=argparse.BooleanOptionalAction, help="default: for more than 64 MiB")
    add("--save", metavar="OUT.gguf", type=Path, help="write the model as one GGUF file and exit")
    add("--type", choices=SAVE_TYPES, help="with --save: of the matrices (default: as they are)")
    add("--info", action="store_true", help="describe the model and exit")
    add("--quiet", action="store_true", help="nothing on stderr but errors")
    add("--version", action="version", version=f"llama2.py {VERSION}, torch {torch.__version__}")
    args = parser.parse_args(argv)
    if args.system is not None and not args.chat:
        parser.error("--system needs --chat")
    if args.type is not None and args.save is None:
        parser.error("--type needs --save")
    if "" in args.stop:
        parser.error("--stop needs a text that is not empty")
    if args.prompt_file is not None:
        args.prompt = args.prompt_file.read_bytes().decode("utf-8", "replace")
    elif args.prompt is None and not args.chat and not args.info and not args.save:
        if sys.stdin.isatty():
            parser.print_usage(sys.stderr)
            sys.exit(2)
        args.prompt = from_rank_0(sys.stdin.buffer.read).decode("utf-8", "replace")
    return args


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16, "mps": torch.float16}


def note(text: str) -> None:
    """A line on stderr; nothing if that cannot be written."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def fail(message: object) -> int:
    """One line on stderr; 2, the exit status for what the user or a file got wrong."""
    text = " ".join((str(message) or type(message).__name__).split())
    if start_ranks() == 0 or isinstance(message, RuntimeError):  # the others would say the same
        note("llama2.py: error: " + re.sub(r"[\0-\x1f\x7f-\x9f]", "?", text))  # names from files
    return 2


def choose_device(name: str) -> torch.device:
    """auto is cuda, then mps, then cpu. Raises ValueError for a device that is not there."""
    there = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    if name == "auto":
        name = next(device for device, is_there in there.items() if is_there)
    if not there[name]:
        found = ", ".join(device for device, is_there in there.items() if is_there)
        raise ValueError(f"--device {name} is not available; accepted here: {found}")
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "cuda" and rank >= torch.cuda.device_count():
        raise ValueError(f"rank {rank} has no GPU: there are {torch.cuda.device_count()}")
    return torch.device(name, rank if name == "cuda" else None)


def is_large(checkpoint: Checkpoint) -> bool:
    """Whether speed is worth a compiler's seconds and rounded activations: above 64 MiB."""
    return sum(weight.nbytes for weight in checkpoint.weights.values()) > 2**26


def default_bits(checkpoint: Checkpoint, dtype: str) -> int:
    """The command line's `activation_bits`: large models are rounded unless a dtype is named."""
    return 16 if is_large(checkpoint) and dtype == "auto" else 32


def tune_process() -> None:
    """What suits a process that does nothing else."""
    with suppress(AttributeError, OSError, TypeError):  # it is glibc's
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD and M_TRIM_THRESHOLD: what is freed is kept, for to
        mallopt(-1, 2**28)  # get pages anew from the system takes a tenth of a prompt's time


def weight_bytes(model: Llama) -> int:
    """Bytes of weights that a decoded token reads: all but the embedding (one row of it)."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    if model.lm_head.state_dict().keys() and not model.config.tie_word_embeddings:
        for t in (*model.embed_tokens.parameters(), *model.embed_tokens.buffers()):
            tensors.pop(id(t), None)
    return sum(t.nbytes for t in tensors.values())


def peak_memory(device: torch.device) -> int:
    """The most bytes of memory that were in use: of the device for CUDA, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows does not tell
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe_checkpoint(checkpoint: Checkpoint, plan: dict[str, int], context: int) -> str:
    """What --info prints; `plan` is that of memory_plan()."""
    kinds = Counter(weight.ggml_type for weight in checkpoint.weights.values())
    size = sum(weight.nbytes for weight in checkpoint.weights.values())
    rows = {
        "format": checkpoint.format,
        **{item.name: getattr(checkpoint.config, item.name) for item in fields(Config)},
        "tensors": ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()),
        "size": f"{size / 1e9:.3g} GB",
        f"memory at {context} tokens": gigabytes(plan),
    }
    return "".join(f"{name:<25} {value}\n" for name, value in rows.items())


def describe(report: Report, model: Llama, load_seconds: float, seed: int) -> str:
    """The line on stderr at the end of a run."""
    device = model.norm.weight.device
    parts = [f"load {load_seconds:.2f} s"]
    if kernels.cache_info().currsize and kernels()[1] > 1:
        parts[0] += f" ({kernels()[1]:.1f} s of it to compile kernels, once)"
    parts.append(f"prompt {report.prompt_tokens} tokens")
    if report.prompt_seconds:
        parts[-1] += f", {report.prompt_tokens / report.prompt_seconds:.1f} tokens/s"
    parts.append(f"generated {report.new_tokens} tokens")
    if report.new_seconds:
        rate = (report.new_tokens - 1) / report.new_seconds
        parts[-1] += f", {rate:.1f} tokens/s, {rate * weight_bytes(model) / 1e9:.1f} GB/s"
    parts.append(f"peak memory {peak_memory(device) / 1e9:.2f} GB")
    parts.append(f"seed {seed}")
    parts.append(f"stopped: {', '.join(report.stop_reasons)}")
    return "; ".join(parts)


def write(text: str) -> None:
    """Text to stdout, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def chat(model: Llama, tokenizer: Tokenizer, args: argparse.Namespace, options: dict) -> None:
    """A conversation that keeps its cache: of each turn only what is new is computed.

    The ids are always Meta's encoding of the whole conversation; the cache is cut back to the part
    of them that it holds. A full context drops the oldest turns and keeps the system message.
    """
    report, cache = options["report"], options["cache"]
    system = [{"role": "system", "content": args.system}] if args.system else []
    messages, stored = [], []  # the conversation; the ids that the cache holds
    stop = (*args.stop, *RESERVED_TAGS)  # where a model begins to speak for the user
    question = args.prompt
    while True:
        if question is None:
            if sys.stdin.isatty() and sys.stderr.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            line = from_rank_0(sys.stdin.buffer.readline).decode("utf-8", "replace")
            if not line:
                return
            question = line.rstrip("\n")
        if not question.strip():
            question = None
            continue
        turns, dropped = [*messages, {"role": "user", "content": question}], 0
        question = None
        reserve = min(args.max_new_tokens, cache.max_seq_len // 4)  # room for an answer
        try:
            ids = encode_chat(tokenizer, system + turns)
            while len(ids) + reserve > cache.max_seq_len and len(turns) > 1:
                del turns[:2]
                dropped += 1
                ids = encode_chat(tokenizer, system + turns)
            if len(ids) > cache.max_seq_len:
                raise ValueError(f"{len(ids)} tokens; the context holds {cache.max_seq_len}")
        except ValueError as error:
            fail(error)
            continue
        messages = turns
        if dropped and not args.quiet:
            note(f"context full: forgot the oldest {dropped} turn{'s' * (dropped > 1)}")
        same = 0
        while same < min(len(stored), len(ids) - 1) and stored[same] == ids[same]:
            same += 1
        cache.truncate(same)
        answer = ""
        try:
            for text in stream_text(model, tokenizer, ids[same:], stop=stop, **options):
                text = text.lstrip() if not answer else text
                answer += text
                write(text)
        except KeyboardInterrupt:
            report.stop_reasons = ["interrupted"]
        write("\n")
        if "context full" in report.stop_reasons and not args.quiet:
            note("context full: the answer ends here")
        messages.append({"role": "assistant", "content": answer})
        stored = [*ids, *(report.new_ids or [[]])[0]][: cache.pos]


def run(args: argparse.Namespace) -> None:
    """Load the model and do what the command line says."""
    start = time.perf_counter()
    seed = args.seed if args.seed != -1 else from_rank_0(torch.seed) % 2**31
    sampling = (args.temperature, args.top_k, args.top_p, args.min_p)
    check_options(args.max_new_tokens, *sampling, seed)  # before seconds are spent on loading
    if args.threads is not None:
        if not 1 <= args.threads <= (os.cpu_count() or 1):
            raise ValueError(f"--threads {args.threads}; accepted is 1 to {os.cpu_count()}")
        torch.set_num_threads(args.threads)
    device = choose_device(args.device)
    if args.model == DEFAULT_MODEL and not args.model.exists():
        raise FileNotFoundError(f"the bundled model {args.model} is missing; pass --model PATH")
    progress = not args.quiet and sys.stderr.isatty()
    checkpoint, rank, ranks = open_checkpoint(args.model), start_ranks(), len(all_ranks(None))
    if args.save is not None:
        return save_gguf(checkpoint, args.save, args.type, progress) if rank == 0 else None
    if ranks > 1:
        checkpoint = rank_part(checkpoint, rank, ranks)
    config = checkpoint.config
    context = config.max_position_embeddings if args.context is None else args.context
    if not 1 <= context <= config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise ValueError(f"--context {context}; accepted is 1 to {limit}, the model's context")
    dtype = DTYPES.get(args.dtype, AUTO_DTYPE[device.type])
    if args.info:
        plan = memory_plan(checkpoint, context, dtype, device)
        return write(describe_checkpoint(checkpoint, plan, context))
    tokenizer = checkpoint.tokenizer()
    size = context if args.context else min(context, CHAT_CONTEXT)
    if not args.chat:
        ids = tokenizer.encode(args.prompt, bos=tokenizer.add_bos)
        if len(ids) > context:
            raise ValueError(f"the prompt has {len(ids)} tokens, the context holds {context}")
        size = min(context, len(ids) + max(args.max_new_tokens, 1))
    check_memory(checkpoint, size, dtype, device)
    large = is_large(checkpoint)  # a small model is done before a compiler is
    args.compile = large if args.compile is None else args.compile
    bits = args.activation_bits or default_bits(checkpoint, args.dtype)
    tune_process()
    with warnings.catch_warnings(record=True) as problems:
        model = build_model(checkpoint, device, dtype, progress, args.compile, bits)
    for problem in problems if not args.quiet else ():
        note(f"llama2.py: {problem.message}")
    if ranks > 1:
        connect_ranks(model)
    load_seconds = time.perf_counter() - start
    report = Report()
    options = {
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "top_k": args.top_k,
        "top_p": args.top_p,
        "min_p": args.min_p,
        "seed": seed,
        "report": report,
        "cache": Cache(config, 1, size, dtype, device),
    }
    if args.compile and device.type == "cuda" and ranks == 1:
        options["step"] = CompiledStep(model, options["cache"])
    try:
        if args.chat:
            if not checkpoint.chat_template and not args.quiet:
                note("note: this model does not say that it was tuned for chat")
            return chat(model, tokenizer, args, options)
        if not args.no_echo:
            write(args.prompt)
        for text in stream_text(
            model, tokenizer, ids, first=not args.prompt, stop=args.stop, **options
        ):
            write(text)
        write("\n")
    except KeyboardInterrupt:
        report.stop_reasons = ["interrupted"]
        note("")  # the terminal shows ^C at the end of the text
        raise
    finally:  # for a chat, of its last answer
        if not args.quiet and report.stop_reasons and all(report.stop_reasons):
            note(describe(report, model, load_seconds, seed))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    try:
        if start_ranks():
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # rank 0 alone prints
        args = parse_args(argv)
        args.quiet |= start_ranks() > 0
        run(args)
        if distributed.is_initialized():  # its threads may abort a process that ends before them
            distributed.destroy_process_group()
        return 0
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `| head`: whoever read has seen enough
        return 0
    except (ValueError, OSError, MemoryError, RuntimeError, ImportError) as error:
        return fail(error)  # RuntimeError is torch's: out of memory, not possible on this device
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # a full disk, a closed pipe: the interpreter would try again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, on_interrupt)
    sys.exit(main())
