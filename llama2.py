"""Llama 2 and 3 in one file of PyTorch: run it, read it beside the paper, copy the part you need.

    python llama2.py --prompt "Once upon a time"               # the small bundled model
    python llama2.py --model llama-2-7b-chat.Q4_0.gguf --chat  # a real model

    import llama2
    model, tokenizer = llama2.load("llama-2-7b.Q4_0.gguf")     # or a Meta or Hugging Face folder
    for token_id in llama2.generate(model, tokenizer.encode("Hello")): ...
    logits = model(tokens, llama2.Cache(model.config))         # (B, T) int64 -> (B, V) float32

Four parts: I is the model, in torch alone; cut it out and paste it anywhere. II runs it on
real files: weights, tokenizer, chat, sampling. III makes it faster and larger: delete it, and
kernels/ beside it, and everything still works. IV is the command line.

Letters in shape comments:

    B  batch             H  query heads            D  head size, C / H
    T  new tokens        G  key/value heads        C  hidden size
    S  visible tokens    L  layers                 V  vocabulary

Data flow:

    text --Tokenizer--> ids (B, T) --embed_tokens--> x (B, T, C)
      L times, Block:   x = x + CausalSelfAttention(RMSNorm(x))       reads and extends the Cache
                        x = x + MLP(RMSNorm(x))
    x --RMSNorm, lm_head--> logits (B, V) --sample--> next id --StreamDecoder--> text

Papers: Llama 2 (Touvron et al. 2023, arXiv:2307.09288), LLaMA (arXiv:2302.13971), RoPE (Su et al.
2021, arXiv:2104.09864), RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), SwiGLU (Shazeer 2020,
arXiv:2002.05202), grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).
"""

from __future__ import annotations

__version__ = "0.3.0"
__all__ = [
    "Config", "rope_tables", "apply_rotary_emb", "Cache", "RMSNorm", "CausalSelfAttention", "MLP",
    "Block", "Llama", "dequantize", "QuantizedLinear", "QuantizedEmbedding", "Checkpoint",
    "open_checkpoint", "build_model", "load", "state_dict_from_hf", "save_gguf", "save_pretrained",
    "Tokenizer", "StreamDecoder", "encode_chat", "Sampling", "sample", "generate",
    "generate_batch", "stream_text", "score", "main",
]  # fmt: skip

if __name__ == "__main__":  # before torch is imported: Ctrl-C ends it, idle OpenMP threads sleep
    import os, signal

    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ.get("OMP_WAIT_POLICY") or os.environ.setdefault("GOMP_SPINCOUNT", "10000")

# ==================================================================================================
# Part I: The model
# ==================================================================================================
#
# Any dtype works. Four places compute in float32 whatever it is; comments count these "islands".

import math
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --------------------------------------------------------------------------------------------------
# 1. Config


@dataclass(frozen=True)
class Config:
    """The architecture, named as in Hugging Face's config.json. ValueError on impossible values."""

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
    stop_token_ids: tuple[int, ...] = ()  # others that end a text

    def __post_init__(self) -> None:
        for item in fields(self):
            value, kind = getattr(self, item.name), type(item.default)
            if kind not in (int, float) or item.name.endswith("_token_id"):
                continue
            most = 2**28 if kind is int else 1e38  # no product of two sizes overflows
            if not isinstance(value, (int, kind)) or not 0 < value <= most:
                raise ValueError(f"{item.name} is {value!r}; it must be above 0, up to {most}")
        C, H, G = self.hidden_size, self.num_attention_heads, self.num_key_value_heads
        if C % H or C // H % 2:
            raise ValueError(f"hidden_size {C} must be num_attention_heads {H} x an even size")
        if H % G:
            raise ValueError(
                f"num_attention_heads {H} is not a multiple of num_key_value_heads {G}"
            )
        factors, count = self.rope_freq_factors or (), self.head_dim // 2
        if self.rope_freq_factors is not None and len(factors) != count:
            raise ValueError(f"rope_freq_factors has {len(factors)} values; it must have {count}")
        if not all(0 < factor < math.inf for factor in factors):
            raise ValueError("rope_freq_factors must be positive numbers")

    @property
    def head_dim(self) -> int:
        """D, the size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def llama2_7b(cls) -> "Config":
        """Llama 2 7B. Sizes: LLaMA paper, table 2; the MLP's: Meta's model.py and params.json."""
        return cls()

    @classmethod
    def llama2_13b(cls) -> "Config":
        """Llama 2 13B, published in the same places as 7B."""
        return cls(5120, 13824, 40, 40, 40)

    @classmethod
    def llama2_70b(cls) -> "Config":
        """Llama 2 70B: LLaMA paper, table 2 (65B); 8 key/value heads: Llama 2 paper, A.2.1."""
        return cls(8192, 28672, 80, 64, 8)


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
        factors = torch.tensor(config.rope_freq_factors, dtype=torch.float32, device=device)
        frequency = frequency / factors
    position = torch.arange(length, dtype=torch.float32, device=device) / config.rope_scaling_factor
    angle = torch.outer(position, frequency)  # (length, D/2)
    return angle.cos(), angle.sin()


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (2i, 2i+1) of x (B, T, heads, D) by its angle; cos, sin: ([B,] T, D/2).

    This is the order of Meta's weights. Hugging Face pairs i with i + D/2, and orders the rows of
    q_proj and k_proj to match: used as they are, those would give gibberish here.
    """
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (B, T, heads, D/2)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same angle for all heads
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).type_as(x)


# --------------------------------------------------------------------------------------------------
# 3. Cache


class Cache:
    """What one pass hands to the next: keys, values, RoPE tables, causal masks, ids, the position.

    It is allocated once, for `max_seq_len` tokens (default: the model's context). It owns the
    position, so that no caller can be off by one, and knows the ids that it holds, so that any
    caller can tell what it lacks. `dtype` may have fewer bits than the model's.
    """

    def __init__(
        self,
        config: Config,
        batch_size: int = 1,
        max_seq_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        S = config.max_position_embeddings if max_seq_len is None else max_seq_len
        if batch_size < 1 or S < 1 or not dtype.is_floating_point:
            wanted = "batch_size and max_seq_len must be at least 1, dtype a floating point one"
            raise ValueError(f"{wanted}; they are {batch_size}, {S} and {dtype}")
        L, G, D = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        self.k = torch.zeros(L, batch_size, G, S, D, dtype=dtype, device=device)
        self.v = torch.zeros(L, batch_size, G, S, D, dtype=dtype, device=device)
        self.cos, self.sin = rope_tables(config, S, device)  # (max_seq_len, D/2)
        self.band = torch.ones(0, S, dtype=torch.bool, device=device)  # see mask()
        self.tokens = torch.zeros(batch_size, S, dtype=torch.int64, device=device)
        self.max_seq_len = S
        self.pos = 0  # how many tokens are stored; the next one gets this position

    def check(self, config: Config, tokens: Tensor) -> None:
        """Raises ValueError unless it was made for this model and for the rows of `tokens`."""
        L, G, D = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        shape = (L, len(tokens), G, self.max_seq_len, D)
        for t in (self.k, self.v):
            if t.shape != shape or t.device != tokens.device:
                found = f"{tuple(t.shape)} on {t.device}"
                raise ValueError(f"the cache is {found}; it must be {shape} on {tokens.device}")
        if not 0 <= self.pos <= self.max_seq_len:
            raise ValueError(f"the cache's position is {self.pos} of {self.max_seq_len}")

    def slots(self, T: int) -> slice:
        """Where the next T tokens are stored. Raises ValueError when they do not fit."""
        if self.pos + T > self.max_seq_len:
            raise ValueError(
                f"the cache holds {self.max_seq_len} tokens: {self.pos} are stored, {T} do not fit"
            )
        return slice(self.pos, self.pos + T)

    def rope(self, T: int) -> tuple[Tensor, Tensor]:
        """cos and sin for the next T tokens: (T, D/2)."""
        return self.cos[self.slots(T)], self.sin[self.slots(T)]

    def mask(self, T: int) -> Tensor | None:
        """Which of the S = pos + T tokens a new one sees: bool (T, S).

        Aligned at the lower right, a new token sees the past and itself: for pos = 2 and T = 3,

            1 1 1 . .
            1 1 1 1 .
            1 1 1 1 1

        (is_causal=True of scaled_dot_product_attention aligns at the upper left: wrong here.) Every
        such mask is the lower right corner of one band (T, max_seq_len), which is kept for the
        largest T that was asked for. A single token sees everything: None.
        """
        S = self.slots(T).stop
        if T == 1:
            return None
        if T > len(self.band):
            ones = torch.ones(T, self.max_seq_len, dtype=torch.bool, device=self.band.device)
            self.band = ones.tril(self.max_seq_len - T)
        return self.band[len(self.band) - T :, self.max_seq_len - S :]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v (B, G, T, D) of one layer; return all that is visible (B, G, S, D)."""
        where = self.slots(k.shape[2])
        self.k[layer, :, :, where] = k
        self.v[layer, :, :, where] = v
        keys, values = self.k[layer, :, :, : where.stop], self.v[layer, :, :, : where.stop]
        return keys.type_as(k), values.type_as(v)  # views if the dtypes are the same

    def advance(self, tokens: Tensor) -> None:
        """Count tokens (B, T) as stored: called once per forward pass, after the last layer."""
        where = self.slots(tokens.shape[1])
        self.tokens[:, where] = tokens
        self.pos = where.stop

    def common_prefix(self, tokens: Tensor) -> int:
        """How many of the first tokens (B, T) it holds already, in every row."""
        n = min(self.pos, tokens.shape[1])
        same = (self.tokens[:, :n] == tokens[:, :n].to(self.tokens.device)).all(dim=0)
        return int(same.cumprod(0).sum())

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
            mask = torch.cat([mask] * (H // G), dim=-2)  # (..., H/G * T, S)
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

    The rows of q_proj and k_proj are in Meta's order (see apply_rotary_emb). For Hugging Face's use
    load() or state_dict_from_hf(), which permute them: load_state_dict() cannot tell them apart.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        # As small as nn.Linear's: the N(0, 1) of nn.Embedding makes tied logits sqrt(C) too large.
        rows = torch.empty(config.vocab_size, config.hidden_size)
        rows.uniform_(-(config.hidden_size**-0.5), config.hidden_size**-0.5)
        self.embed_tokens = nn.Embedding.from_pretrained(rows, freeze=False)
        self.layers = nn.ModuleList(Block(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, all_positions: bool = False
    ) -> Tensor:
        """tokens (B, T) int64 -> logits float32: (B, V) of the last position, or (B, T, V) of all.

        With a cache the tokens continue what it holds. Without one they stand alone: one causal
        pass, all positions, differentiable. ValueError for a cache that is full or does not fit.
        """
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens must be a tensor, not a {type(tokens).__name__}")  # noqa: TRY004
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():
            found = f"{tuple(tokens.shape)} {tokens.dtype}"
            raise ValueError(f"tokens must be (B, T) int64, one or more, not {found}")
        T, mask = tokens.shape[1], None
        if cache is not None:
            cache.check(self.config, tokens)
            (cos, sin), mask = cache.rope(T), cache.mask(T)
        else:
            cos, sin = rope_tables(self.config, T, tokens.device)
            mask = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
            all_positions = True

        # No gradient through a cache: it is written in place.
        with torch.set_grad_enabled(cache is None and torch.is_grad_enabled()):
            x = self.embed_tokens(tokens)  # (B, T, C)
            for block in self.layers:
                x = block(x, cos, sin, mask, cache)
            if not all_positions:
                x = x[:, -1]  # (B, C): the other rows of the largest matrix product would go unused
            # float32 island 4 of 4: what is sampled from.
            logits = self.lm_head(self.norm(x)).float()

        if cache is not None:
            cache.advance(tokens)
        return logits


class PaddedCache(Cache):
    """A Cache for prompts of different lengths, aligned at their ends.

    `padding` (B,) int64: how many tokens at the left of each row are filler.
    """

    def __init__(self, config: Config, padding: Tensor, *args, **kwargs) -> None:
        super().__init__(config, len(padding), *args, **kwargs)
        self.padding = padding.to(self.k.device)

    def rope(self, T: int) -> tuple[Tensor, Tensor]:
        """cos and sin for the next T tokens: (B, T, D/2)."""
        where = self.slots(T)
        slot = torch.arange(where.start, where.stop, device=self.cos.device)
        position = (slot - self.padding[:, None]).clamp(min=0)  # a row's first real token is at 0
        return self.cos[position], self.sin[position]

    def mask(self, T: int) -> Tensor:
        """Which of the S = pos + T tokens a new one sees, fillers not: bool (B, 1, T, S)."""
        visible, S = super().mask(T), self.slots(T).stop
        slot = torch.arange(S, device=self.k.device)
        real = slot >= self.padding[:, None, None, None]  # (B, 1, 1, S)
        itself = slot == slot[S - T :, None]  # for filler: softmax over nothing is NaN
        return (real | itself) if visible is None else visible & (real | itself)


# ==================================================================================================
# Part II: Running it
# ==================================================================================================

import codecs
import functools
import io
import itertools
import json
import mmap
import operator
import os
import pickle
import pickletools
import re
import secrets
import shutil
import stat
import struct
import sys
import time
import weakref
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

# --------------------------------------------------------------------------------------------------
# 9. Weights
#
# Rows of quantised matrices are stored in blocks of 32 or 256 weights: integers q of 2 to 8 bits,
# and for every 16 or 32 of them a scale s and, in some types, a minimum m. A weight is s * q - m.
# The results are bit for bit those of the gguf package.

# Dense (unblocked) types, as GGUF and safetensors name them.
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DENSE_NAMES = {dtype: name for name, dtype in DENSE.items()}


def expect(condition: object, problem: str) -> None:
    """Raises ValueError unless the condition holds."""
    if not condition:
        raise ValueError(problem)


# How each type is stored: weights and bytes per block; where the lowest bits of its integers q are
# (first byte, width and n, see unpack_bits()), and the bits above them; q's zero point.
GGML_TYPES: dict[str, tuple[int, int, tuple[int, ...], tuple[int, ...], int]] = {
    "F32": (1, 4, (), (), 0),
    "F16": (1, 2, (), (), 0),
    "BF16": (1, 2, (), (), 0),
    "Q4_0": (32, 18, (2, 16, 4), (), 8),
    "Q4_1": (32, 20, (4, 16, 4), (), 0),
    "Q5_0": (32, 22, (6, 16, 4), (2, 1, 1), 16),
    "Q5_1": (32, 24, (8, 16, 4), (4, 1, 1), 0),
    "Q8_0": (32, 34, (2, 32, 8), (), 0),
    "Q2_K": (256, 84, (16, 32, 2), (), 0),
    "Q3_K": (256, 110, (32, 32, 2), (0, 32, 1), 4),
    "Q4_K": (256, 144, (16, 32, 4), (), 0),
    "Q5_K": (256, 176, (48, 32, 4), (16, 32, 1), 0),
    "Q6_K": (256, 210, (0, 64, 4), (128, 32, 2), 32),
}


def half(b: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32: (n, bytes) -> (n, 1)."""
    low, high = (b[:, i : i + 1].view(torch.uint8).short() for i in (at, at + 1))
    return (low | high << 8).view(torch.float16).float()


def unpack_bits(b: Tensor, count: int, at: int, width: int, n: int) -> Tensor:
    """`count` n-bit integers: of every `width` bytes the lowest n bits of each, then the next n."""
    b = b[:, at : at + count * n // 8].contiguous().view(len(b), -1, width)
    return torch.stack([(b >> shift) & (2**n - 1) for shift in range(0, 8, n)], 2).flatten(1)


def unpack_scales(b: Tensor, ggml_type: str) -> tuple[Tensor, ...]:
    """Blocks (n, bytes) -> scales (n, groups) and, if the type has them, minima."""
    match ggml_type:
        case "Q4_0" | "Q5_0" | "Q8_0":
            return (half(b, 0),)
        case "Q4_1" | "Q5_1":
            return half(b, 0), -half(b, 2)
        case "Q2_K":  # 16 scales and minima of 4 bits
            return half(b, 80) * (b[:, :16] & 15), half(b, 82) * (b[:, :16] >> 4)
        case "Q3_K":  # 16 scales of 6 bits, the upper two stored apart
            scale = unpack_bits(b, 16, 96, 8, 4) | unpack_bits(b, 16, 104, 4, 2) << 4
            return (half(b, 108) * (scale.view(torch.int8) - 32),)
        case "Q6_K":  # 16 scales of 8 bits
            return (half(b, 208) * b[:, 192:208].view(torch.int8),)
    # Q4_K, Q5_K: 8 scales and minima of 6 bits; the last four's top 2 bits are in bytes 0-7.
    packed = b[:, 4:16].T.contiguous()  # (12, n): the long axis last is faster
    low, top = torch.cat((packed[8:] & 15, packed[8:] >> 4)), packed[:8] >> 6 << 4  # (8, n)
    scale = torch.cat((packed[:4] & 63, low[:4] | top[:4]))
    minimum = torch.cat((packed[4:8] & 63, low[4:] | top[4:]))
    return half(b, 0) * scale.T, half(b, 2) * minimum.T


def unpack(blocks: Tensor, ggml_type: str) -> tuple[Tensor, ...]:
    """uint8 (rows, bytes per row) -> of n blocks q (n, block), s and, if they have them, m."""
    block, block_bytes, low, high, zero_point = GGML_TYPES[ggml_type]
    b = blocks.reshape(-1, block_bytes)
    q = b[:, low[0] :].view(torch.int8) if low[2] == 8 else unpack_bits(b, block, *low)
    if high:
        q = q | unpack_bits(b, block, *high) << low[2]
    if zero_point:
        q = q.view(torch.int8) - zero_point
    return q, *unpack_scales(b, ggml_type)


def dequantize(blocks: Tensor, ggml_type: str) -> Tensor:
    """uint8 (rows, bytes per row) -> float32 (rows, weights); rare types by gguf on the CPU."""
    if ggml_type in DENSE:
        return blocks.view(DENSE[ggml_type]).float()
    if ggml_type in GGML_TYPES:
        q, s, *m = unpack(blocks, ggml_type)
        w = q.float().view(len(q), s.shape[1], -1).mul_(s[..., None])  # (n, groups, width)
        if m:
            w.sub_(m[0][..., None])
        return w.view(len(blocks), -1)
    import gguf
    import numpy

    with numpy.errstate(all="ignore"):  # NaN and infinity are reported at the logits
        array = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[ggml_type])
    return torch.from_numpy(array)


CHUNK = 2**20  # weights dequantised at a time, so that they stay in the CPU's cache


class Quantized(nn.Module):
    """A matrix W that stays in the file's blocks, uint8 (rows, bytes per row). Not trainable.

    Its ggml type is part of the state: load_state_dict() raises ValueError for another one.
    """

    blocks: Tensor

    def __init__(self, blocks: Tensor, ggml_type: str) -> None:
        super().__init__()
        block, block_bytes, *_ = GGML_TYPES[ggml_type]
        needed = f"{ggml_type} needs uint8 (rows, n * {block_bytes})"
        fits = blocks.dim() == 2 and blocks.shape[1] % block_bytes == 0
        found = f"{tuple(blocks.shape)} {blocks.dtype}"
        expect(fits and blocks.dtype == torch.uint8, f"{needed}, not {found}")
        self.ggml_type = ggml_type
        self.register_buffer("blocks", blocks)
        self.in_features = blocks.shape[1] // block_bytes * block
        self.out_features = len(blocks)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{self.in_features}, {self.out_features}, {self.ggml_type}"

    def get_extra_state(self) -> str:
        """The ggml type, which state_dict() holds beside the blocks."""
        return self.ggml_type

    def set_extra_state(self, state: str) -> None:
        """Nothing to set: _load_from_state_dict() has made sure that the types are the same."""

    def _load_from_state_dict(self, state: Mapping, prefix: str, *args: Any) -> None:
        found = state.get(f"{prefix}_extra_state", self.ggml_type)
        expect(found == self.ggml_type, f"{prefix}blocks are {self.ggml_type}, the state's {found}")
        super()._load_from_state_dict(state, prefix, *args)


class QuantizedLinear(Quantized):
    """y = x W^T with W (out, in) in blocks: nn.Linear for a quantised matrix."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out) of x's dtype: dequantise some rows of W, multiply, go on."""
        chunks = self.blocks.split(max(1, CHUNK // self.in_features))
        y = [F.linear(x, dequantize(chunk, self.ggml_type).to(x.dtype)) for chunk in chunks]
        return torch.cat(y, -1)


class QuantizedEmbedding(Quantized):
    """Rows of W, dequantised when they are looked up: nn.Embedding for a quantised matrix."""

    def __init__(self, blocks: Tensor, ggml_type: str, dtype: torch.dtype) -> None:
        super().__init__(blocks, ggml_type)
        self.dtype = dtype

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (...) -> (..., C). Raises IndexError for ids out of range, as nn.Embedding."""
        if tokens.is_cuda and not torch.compiler.is_compiling():  # torch would end the process
            wrong = (tokens < 0) | (tokens >= len(self.blocks))
            if not torch.cuda.is_current_stream_capturing() and wrong.any():
                raise IndexError("index out of range in self")
        rows = F.embedding(tokens.flatten(), self.blocks)
        return dequantize(rows, self.ggml_type).view(*tokens.shape, -1).to(self.dtype)


# --------------------------------------------------------------------------------------------------
# 10. Checkpoints

# The names of all tensors, less ".weight", in each format. The axis is the one along which Meta's
# shards and our ranks divide a matrix: 0 for its outputs, 1 for its inputs.
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

# The names of all settings. Those that may be missing have Config's defaults: see read_config().
SETTINGS = (  # Config and Hugging Face, GGUF, Meta, whether it is needed
    ("hidden_size", "llama.embedding_length", "dim", True),
    ("intermediate_size", "llama.feed_forward_length", "", True),
    ("num_hidden_layers", "llama.block_count", "n_layers", True),
    ("num_attention_heads", "llama.attention.head_count", "n_heads", True),
    ("num_key_value_heads", "llama.attention.head_count_kv", "n_kv_heads", False),
    ("vocab_size", "llama.vocab_size", "", True),
    ("max_position_embeddings", "llama.context_length", "", True),
    ("rms_norm_eps", "llama.attention.layer_norm_rms_epsilon", "norm_eps", True),
    ("rope_theta", "llama.rope.freq_base", "rope_theta", False),
    ("rope_scaling_factor", "llama.rope.scaling.factor", "", False),
    ("bos_token_id", "tokenizer.ggml.bos_token_id", "", False),
    ("eos_token_id", "tokenizer.ggml.eos_token_id", "", False),
)


def last_name(name: str) -> str:
    """layers.0.self_attn.q_proj.weight -> q_proj."""
    return name.removesuffix(".weight").rpartition(".")[2]


def rows_from_hf(w: Tensor, head_dim: int) -> Tensor:
    """Rows of q_proj or k_proj in Hugging Face's order -> Meta's, which load_state_dict() needs."""
    return w.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def state_dict_from_hf(state: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The state dict of a Llama of transformers, for load_state_dict() of one of this file."""
    renamed = {name.removeprefix("model."): w for name, w in state.items()}
    for name, w in renamed.items():
        if last_name(name) in ("q_proj", "k_proj"):
            renamed[name] = rows_from_hf(w, config.head_dim)
    return renamed


class MappedFile(mmap.mmap):
    """A regular file mapped into memory, private and writable. ValueError if it cannot be."""

    path: Path
    identity: tuple[int, ...]

    @classmethod
    def open(cls, path: Path, before: MappedFile | None = None) -> MappedFile:
        """Map a regular file (a pipe would block). `before`: it must be that file, unchanged."""
        expect(stat.S_ISREG(path.stat().st_mode), f"{path}: not a regular file")
        with path.open("rb") as file:
            try:
                mapped = cls(file.fileno(), 0, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as error:  # empty, or larger than the address space
                raise ValueError(f"{path}: damaged: cannot be mapped: {error}") from None
            status = os.fstat(file.fileno())
        mapped.path = path
        mapped.identity = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        same = before is None or mapped.identity == before.identity
        expect(same, f"{path}: the file has changed since it was opened")
        return mapped


@dataclass
class Weight:
    """One tensor of a checkpoint, still in its memory-mapped files: read() or dense() reads it."""

    ggml_type: str
    shape: tuple[int, ...]  # in torch's order, (out, in)
    shards: list[Tensor]  # uint8 (rows, bytes per row); only Meta's checkpoints have several
    axis: int = 0  # along which they are joined
    hf_head_dim: int = 0  # not 0: the rows of each head are in Hugging Face's order
    source: MappedFile | None = None  # what the one shard lies in, at its offset

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
        """uint8 (rows, bytes per row) in Meta's order: a view of the file if nothing moves."""
        data = self.shards[0] if len(self.shards) == 1 else torch.cat(self.shards, self.axis)
        if self.hf_head_dim:
            data = rows_from_hf(data, self.hf_head_dim)
        data = data.contiguous()
        size = DENSE.get(self.ggml_type, torch.float16).itemsize
        return data.clone() if data.storage_offset() % size else data  # old safetensors files

    def part(self, axis: int, start: int, stop: int) -> Weight:
        """A view of rows (axis 0) or columns (1) from start to stop, which lie between blocks."""
        block, size = self.block if axis == 1 else (1, 1)
        shards = []
        begin, end = start // block * size, stop // block * size  # in rows, or in bytes of a row
        for shard in self.shards:
            shards.append(shard[begin:end] if axis == 0 else shard[:, begin:end])
            if axis == self.axis:  # the next shard begins where this one ends
                begin, end = (max(n - shard.shape[axis], 0) for n in (begin, end))
        shape = tuple(stop - start if i == axis else n for i, n in enumerate(self.shape))
        return replace(self, shape=shape, shards=[s for s in shards if s.numel()])

    def dense(self, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """The weight as a dense tensor, a few rows at a time; a view of the file if unchanged."""
        rows = self.read()
        if DENSE.get(self.ggml_type) == dtype and len(self.shape) > 1:
            return rows.view(dtype).view(self.shape).to(device)
        out = torch.empty(self.shape, dtype=dtype, device=device)
        flat = out.view(len(rows), -1)
        step = max(1, CHUNK // flat.shape[1])

        def convert(i: int) -> None:
            flat[i : i + step] = dequantize(rows[i : i + step], self.ggml_type)

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:  # gguf computes in one thread
            list((pool.map if self.is_rare else map)(convert, range(0, len(rows), step)))
        return out

    @property
    def is_rare(self) -> bool:
        """Whether it is a matrix of blocks that only gguf can dequantise: IQ1 to IQ4, TQ, MXFP4."""
        return self.ggml_type not in GGML_TYPES and len(self.shape) == 2


@dataclass
class Checkpoint:
    """What a model file or directory holds, its tensors still unread."""

    format: str  # such as "GGUF version 3"
    config: Config
    weights: dict[str, Weight]  # by the names of this file
    tokenizer: Callable[[], Tokenizer]
    chat_template: str = ""  # empty: it does not claim to be tuned for conversation
    path: str = ""
    states_context: bool = True  # else the files do not say, and --context may be larger
    metadata: dict[str, Any] = field(default_factory=dict)  # what else a GGUF says of the model

    def read(self, label: str, progress: bool = False) -> Iterator[tuple[str, Weight]]:
        """Each weight, mapped anew: changes of a model reach neither file nor checkpoint."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        again = functools.cache(lambda source: MappedFile.open(source.path, before=source))
        items = self.weights.items()
        disable = None if progress else True  # None: unless it is a terminal
        for name, weight in tqdm(items, label, unit="tensor", leave=False, disable=disable):
            if weight.source is not None:
                source, (rows,) = again(weight.source), weight.shards  # each file once
                memory = torch.frombuffer(source, dtype=torch.uint8)
                rows = memory.as_strided(rows.shape, rows.stride(), rows.storage_offset())
                weight = replace(weight, source=source, shards=[rows])
            yield name, weight
            if weight.source is not None and hasattr(mmap, "MADV_DONTNEED"):
                weight.source.madvise(mmap.MADV_DONTNEED)  # pages that were read need no memory

    def allow_context(self, context: int | None) -> Checkpoint:
        """A copy for `context` tokens at least. Raises ValueError beyond what the files allow."""
        most = self.config.max_position_embeddings
        context = most if context is None else context
        limit = "its context or window" if self.states_context else "or more if trained for more"
        fits = 0 < context <= most or (context > 0 and not self.states_context)
        expect(fits, f"--context {context}; expected 1 to {most}, {limit}")
        config = replace(self.config, max_position_embeddings=max(context, most))
        return replace(self, config=config)


# Limits of what is read besides weights. A Llama of 126 layers (405B) has 1137 tensors and 160 KB
# of JSON or pickle; the largest vocabularies have 0.8 million values.
MAX_ENTRIES = 5000  # tensors or keys of a GGUF
MAX_HEADER = 2**20  # bytes of JSON, of a pickle, of a zip's directory
MAX_METADATA = 2**24  # bytes of a GGUF before its tensors
MAX_VOCABULARY = 2**22  # bytes of a tokenizer.model, of which SentencePiece makes 40 times as many
MAX_TOKENIZER_JSON = 2**25  # bytes; Llama 3.2's has 17 MB
MAX_VALUES = 2**20  # in all arrays of a GGUF's metadata, in a tokenizer.json


def printable(text: str) -> str:
    """Text from a file, safe for a terminal: unprintable characters become "?"."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def well_formed(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


@contextmanager
def naming(item: object, problem: str = "") -> Iterator[None]:
    """Turns errors into a ValueError that names the file or item, in 400 printable characters."""
    try:
        yield
    except (OSError, ImportError, MemoryError):  # which say nothing of a file's content
        raise
    except Exception as error:  # noqa: BLE001 (whatever damaged files make Python's modules raise)
        text = str(error) if str(error).startswith(str(item)) else f"{item}: {problem}{error}"
        raise ValueError(printable(text[:400])) from None


def read_file(path: Path, limit: int = MAX_HEADER) -> bytes:
    """The content of a file. Raises ValueError if it is empty or longer than `limit`."""
    source = MappedFile.open(path)
    expect(len(source) <= limit, f"{path}: damaged: {len(source)} bytes; expected at most {limit}")
    return source[:]


def map_weight(source: MappedFile, name: str, ggml_type: str, shape: tuple, start: int) -> Weight:
    """A tensor that lies at byte `start` of a mapped file. Raises ValueError if it cannot."""
    weight = Weight(ggml_type, shape, [], source=source)
    fits = 1 <= len(shape) <= 4 and all(type(n) is int and 0 < n < 2**31 for n in shape)
    whole = fits and shape[-1] % weight.block[0] == 0
    expect(whole, f"{name} of type {ggml_type} has the sizes {list(shape)}")
    end = start + weight.nbytes
    expect(end <= len(source), f"{name} ends at byte {end}, the file at {len(source)}: truncated?")
    rows = torch.frombuffer(source, dtype=torch.uint8)[start:end]
    weight.shards.append(rows.view(math.prod(shape[:-1]), -1))
    return weight


def lookup(path: Path, settings: Mapping, key: str, expected: Any, default: Any = None) -> Any:
    """The value of `key`, which has the type `expected`, or is among these values; ValueError."""
    value = settings.get(key)
    value = default if value is None else value
    if isinstance(expected, tuple):
        fits, known = value in expected, " or ".join(map(str, expected))
    else:
        fits = isinstance(value, (int, float) if expected is float else expected)
        known = expected.__name__
    if fits and expected in (int, float):  # within what float32 can hold
        fits = not isinstance(value, bool) and abs(value) < 1e38
    if not fits:  # a long list takes long to print
        found = "missing" if value is None else f"{value!r:.60}"
        raise ValueError(f"{path}: {key} is {found}; expected {known}")
    return value


def read_config(column: int, get: Callable, **known: Any) -> Config:
    """A Config: the fields `known`, and the rest by get(key, ...) from SETTINGS' column."""
    for row in SETTINGS:
        field, key, default = row[0], row[column], getattr(Config, row[0])
        if field == "num_key_value_heads":
            default = known["num_attention_heads"]
        if key and field not in known:
            known[field] = get(key, type(default), None if row[3] else default)
    return Config(**known)


GGUF_TYPES = dict(zip((*range(9), 10, 11, 12), "BbHhIif?sQqd"))  # a value's type: struct's letter
GGUF_STRING, GGUF_ARRAY = 8, 9


class GGUF:
    """A GGUF file's metadata and tensors (ggml's gguf.md). gguf.GGUFReader would take seconds."""

    def __init__(self, path: str | Path) -> None:
        import gguf

        self.path, self.offset, self.values_left = Path(path), 0, MAX_VALUES
        self.file = MappedFile.open(self.path)
        self.end = min(len(self.file), MAX_METADATA)  # of what is read here
        self.metadata: dict[str, Any] = {}
        self.get = partial(lookup, self.path, self.metadata)
        self.tensors: dict[str, Weight] = {}
        with naming(self.path):
            magic, self.version = self.unpack("4sI", "header")
            expect(magic == b"GGUF", f"starts with {magic!r}, not with b'GGUF'")
            expect(self.version in (2, 3), f"version {self.version:#x}, not 2 or 3 little-endian")
            tensor_count, key_count = self.unpack("QQ", "header")
            found = f"{tensor_count} tensors, {key_count} keys; at most {MAX_ENTRIES}"
            expect(max(tensor_count, key_count) <= MAX_ENTRIES, found)
            for i in range(key_count):
                (key,) = self.values(GGUF_STRING, 1, f"key {i} of {key_count}")
                expect(key not in self.metadata, f"duplicate key {key!r}")
                (value_type,) = self.unpack("I", key)
                is_array = value_type == GGUF_ARRAY
                value_type, count = self.unpack("IQ", key) if is_array else (value_type, 1)
                values = self.values(value_type, count, key)
                self.metadata[key] = values if is_array else values[0]
            infos = []
            for i in range(tensor_count):
                (name,) = self.values(GGUF_STRING, 1, f"tensor {i} of {tensor_count}")
                (n_dims,) = self.unpack("I", name)
                expect(n_dims <= 4, f"{name} has {n_dims} dimensions; expected 1 to 4")
                *dims, number, offset = self.unpack(f"{n_dims}QIQ", name)  # the fastest comes first
                with naming(name):
                    ggml_type = gguf.GGMLQuantizationType(number).name
                infos.append((offset, name, ggml_type, tuple(dims[::-1])))
            align = self.get("general.alignment", tuple(2**i for i in range(3, 21)), 32)  # gguf.md
            base = end = -(-self.offset // align) * align
            for offset, name, ggml_type, shape in sorted(infos):
                expect(name not in self.tensors, f"duplicate tensor {name!r}")
                fits = offset % align == 0 and base + offset >= end
                expect(fits, f"{name}: offset {offset} is not aligned or overlaps another")
                weight = map_weight(self.file, name, ggml_type, shape, base + offset)
                self.tensors[name], end = weight, base + offset + weight.nbytes

    def take(self, size: int, item: str) -> bytes:
        """The next bytes. ValueError beyond the end."""
        start, self.offset = self.offset, self.offset + size
        if self.offset > self.end:
            raise ValueError(f"{item} needs {size} bytes, beyond the file or {MAX_METADATA} bytes")
        return self.file[start : self.offset]

    def unpack(self, letters: str, item: str) -> tuple:
        """The next little-endian values, as struct's letters name them."""
        return struct.unpack("<" + letters, self.take(struct.calcsize("<" + letters), item))

    def values(self, value_type: int, count: int, item: str) -> list:
        """The next numbers or strings, each of these a length of 8 bytes and UTF-8."""
        self.values_left -= count
        found = f"{item}: {count} values of type {value_type}"
        expect(value_type in GGUF_TYPES, f"{found}, which is unknown")
        expect(self.values_left >= 0, f"{found}; expected at most {MAX_VALUES} in all")
        if value_type != GGUF_STRING:
            return list(self.unpack(f"{count}{GGUF_TYPES[value_type]}", item))
        texts = []
        with naming(item, "not UTF-8: "):
            for _ in range(count):  # Llama 3 has 400,000 of them
                size = int.from_bytes(self.take(8, item), "little")
                texts.append(self.take(size, item).decode())
        return texts

    def stop_ids(self) -> tuple[int, ...]:
        """The ids besides EOS that end a text: end of turn, end of message."""
        eos = self.get("tokenizer.ggml.eos_token_id", int, 2)
        ends = (self.get(f"tokenizer.ggml.{end}_token_id", int, eos) for end in ("eot", "eom"))
        return tuple(token_id for token_id in dict.fromkeys(ends) if token_id != eos)


def gguf_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Llama-family GGUF file, or the first part of a split one; else ValueError."""
    file = GGUF(path)
    get, tensors, parts = file.get, dict(file.tensors), file.get("split.count", int, 1)
    stem, is_first = re.subn(r"-00001-of-\d{5}\.gguf$", "", file.path.name)
    expect(parts < 2 or is_first, f"one of {parts} parts; pass NAME-00001-of-{parts:05}.gguf")
    for i in range(2, parts + 1):
        part = GGUF(file.path.with_name(f"{stem}-{i:05}-of-{parts:05}.gguf"))
        expect(not part.tensors.keys() & tensors.keys(), f"{part.path}: not part {i} of {path}")
        tensors |= part.tensors
    for name, weight in {w.ggml_type: (name, w) for name, w in tensors.items()}.values():
        with naming(name):  # one of each type: whether it is of weights at all
            dequantize(weight.shards[0][:1, : weight.block[1]], weight.ggml_type)
    get("general.architecture", ("llama",))
    get("llama.expert_count", (0, None))
    factor = get("llama.rope.scaling.factor", float, get("llama.rope.scale_linear", float, 1.0))
    if get("llama.rope.scaling.type", ("linear", "none", None)) == "none":
        factor = 1.0
    vocab_size = len(get("tokenizer.ggml.tokens", list))  # the embedding's rows, too: see rename()
    config = read_config(1, get, vocab_size=vocab_size, rope_scaling_factor=factor or 1.0)
    tied = "output.weight" not in tensors
    config = replace(config, tie_word_embeddings=tied, stop_token_ids=file.stop_ids())
    get("llama.rope.dimension_count", (config.head_dim, None))
    divisors = tensors.pop("rope_freqs.weight", None)
    weights = rename(tensors, 1, config)
    if divisors is not None:
        fits = divisors.shape == (config.head_dim // 2,)
        expect(fits, f"rope_freqs.weight is {divisors.shape}; expected ({config.head_dim // 2},)")
        config = replace(config, rope_freq_factors=tuple(divisors.dense(torch.float32).tolist()))
    form = f"GGUF version {file.version}" + f", {parts} parts" * (parts > 1)
    template = get("tokenizer.chat_template", str, "")
    checkpoint = Checkpoint(form, config, weights, partial(Tokenizer.from_gguf, file), template)
    # save_gguf() writes keys anew that follow from the tensors, or that the tokenizer knows.
    known = r"general\.(arch|file_type|align)|llama\.rope\.scal|quantize|split|tokenizer"
    others = {k: v for k, v in file.metadata.items() if not re.match(known, k)}
    return replace(checkpoint, path=str(path), metadata=others)


def name_map(column: int, config: Config) -> dict[str, str]:
    """The names here -> those of a column of NAMES."""
    return {
        f"{row[0]}.weight".format(layer): f"{row[column]}.weight".format(layer)
        for row in NAMES
        for layer in range(config.num_hidden_layers)
    }


def rename(tensors: dict[str, Weight], column: int, config: Config) -> dict[str, Weight]:
    """Translate names by a column of NAMES. ValueError unless all names and shapes fit."""
    layers, count = config.num_hidden_layers, len(tensors)  # before anything that size is built
    expect(layers <= count, f"{layers} layers, but only {count} tensors")
    names = name_map(column, config)
    if config.tie_word_embeddings:
        del names["lm_head.weight"]
    odd = {"unknown": tensors.keys() - names.values(), "missing": names.values() - tensors.keys()}
    for problem, those in odd.items():
        found = ", ".join(sorted(those))[:150]
        expect(not those, f"{len(those)} tensors are {problem}: {found}")
    with torch.device("meta"):  # all layers are like the first
        first = dict(Llama(replace(config, num_hidden_layers=1)).named_parameters())
    for ours, theirs in names.items():
        shape, needed = tensors[theirs].shape, first[re.sub(r"\.\d+\.", ".0.", ours)].shape
        expect(shape == needed, f"{theirs} is {list(shape)}; expected {list(needed)}")
        if column == 0 and last_name(ours) in ("q_proj", "k_proj"):
            tensors[theirs].hf_head_dim = config.head_dim
    return {ours: tensors[theirs] for ours, theirs in names.items()}


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object without duplicate keys. Raises ValueError or RecursionError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        expect(len(found) == len(pairs), "a key is duplicated")
        return found

    content = json.loads(text, object_pairs_hook=unique)
    expect(type(content) is dict, f"it is a JSON {type(content).__name__}")
    return content


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object, {} if there is no file. Raises ValueError on anything else."""
    with naming(path, "not a JSON object: "):
        return parse_json(read_file(path)) if path.exists() else {}


def read_tensors(path: Path) -> dict[str, Weight]:
    """The tensors of a .safetensors file or one of torch.save; nothing is executed. ValueError."""
    read = safetensors_tensors if path.suffix == ".safetensors" else torch_tensors
    with naming(path, "damaged, or it holds more than tensors: "):
        return read(MappedFile.open(path))


def safetensors_tensors(source: MappedFile) -> dict[str, Weight]:
    """Hugging Face's format: the size of a header, the header in JSON, the tensors without gaps."""
    size = int.from_bytes(source[:8], "little")
    most = min(len(source) - 8, MAX_HEADER)
    expect(size <= most, f"a header of {size} bytes; expected at most {most}")
    header = parse_json(source[8 : 8 + size])
    header.pop("__metadata__", None)
    weights, base, start = {}, 8 + size, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        ggml_type, shape, found = entry["dtype"], entry["shape"], entry["data_offsets"]
        expect(ggml_type in DENSE, f"{name} has the type {ggml_type}; expected {', '.join(DENSE)}")
        weight = weights[name] = map_weight(source, name, ggml_type, tuple(shape), base + start)
        needed = [start, start + weight.nbytes]
        expect(repr(found) == repr(needed), f"{name} is at bytes {found}; expected {needed}")
        start = needed[1]
    expect(base + start == len(source), f"bytes from {base + start} on that are no tensor's")
    return weights


def zip_files(source: MappedFile) -> dict[str, tuple[int, int]]:
    """Start and size of each file in a zip of torch.save, read strictly. Raises ValueError."""
    end = len(source) - 22
    magic, size, at, comment = struct.unpack_from("<4s8xIIH", source, end)
    if source[end - 20 : end - 16] == b"PK\6\7":  # above 4 GB: a longer record, its locator
        size, at, record = struct.unpack_from("<QQ8xQ", source, end - 36)
        end = record if record == end - 76 else -1
    whole = magic == b"PK\5\6" and not comment and at + size == end and size <= MAX_HEADER
    expect(whole, "not a zip as torch.save writes it since torch 1.6, too long, or truncated")
    files = {}
    archive = zipfile.ZipFile(source)  # type: ignore[call-overload]  # it needs seek and read
    for entry in archive.infolist():
        name, begin = entry.orig_filename, entry.header_offset
        local, *lengths = struct.unpack_from("<4s22xHH", source, begin)
        local += source[begin + 30 : begin + 30 + lengths[0]]
        fits = local == b"PK\3\4" + name.encode() and name not in files
        fits = fits and not entry.compress_type and not entry.flag_bits & 1
        expect(fits, f"{name[:60]} is compressed, encrypted, duplicated or has two names")
        files[name] = begin + 30 + sum(lengths), entry.file_size
    return files


# All that the pickle of a state dict needs: constants, dicts, tuples, calls of a few functions.
OPCODES = {
    "PROTO", "NONE", "NEWTRUE", "NEWFALSE", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1",
    "EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "MARK", "TUPLE", "EMPTY_DICT", "SETITEM",
    "SETITEMS", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "GLOBAL", "BINPERSID", "REDUCE",
    "BUILD", "STOP",
}  # fmt: skip


class PickledDict(dict):
    """A pickle's dict. Only strings are hashed as keys: a tuple may hold itself 2**60 times."""

    def __setitem__(self, key: Any, value: Any) -> None:
        expect(type(key) is str and key not in self, "a key that is no string, or is duplicated")
        super().__setitem__(key, value)

    def __setstate__(self, attributes: Any) -> None:
        """Leaves out an OrderedDict's attributes, such as _metadata."""
        expect(type(attributes) is PickledDict, "attributes that are no dict")


def checked_pickle(data: bytes) -> bytes:
    """The pickle of a state dict, with PickledDict for all dicts. ValueError for other opcodes."""
    stream, last = io.BytesIO(data), ""
    opcodes: list[bytes] = []
    for opcode, value, start in pickletools.genops(stream):
        name, found = opcode.name, data[start : stream.tell()]
        expect(name in OPCODES, f"{name} {str(value or '')[:60]}")
        expect(last != "BUILD" or name == "STOP", "a tensor with extra attributes")
        fits = len(opcodes) < 2**16 and (name != "LONG_BINPUT" or (value or 0) < 2**16)
        expect(fits, "the pickle is longer than a state dict's")  # which has 35 opcodes a tensor
        opcodes.append(b"ccollections\nOrderedDict\n)R" if name == "EMPTY_DICT" else found)
        last = name
    return b"".join(opcodes)


class StateDictReader(pickle.Unpickler):
    """Reads a checked pickle: finds what is `known`, and makes tensors' storages by `storage`."""

    def __init__(self, data: bytes, known: dict[str, Any], storage: Callable) -> None:
        super().__init__(io.BytesIO(data))
        self.known, self.storage = known, storage

    def find_class(self, module: str, name: str) -> Any:
        return self.known[f"{module} {name}"]

    def persistent_load(self, identity: Any) -> Weight:
        return self.storage(*identity)


def torch_tensors(source: MappedFile) -> dict[str, Weight]:
    """What torch.save wrote: a zip of a pickle and of storages."""
    files = zip_files(source)
    (pickled,) = (name for name in files if name.endswith("/data.pkl"))
    folder = pickled.removesuffix("data.pkl")
    start, _ = files.get(f"{folder}byteorder", (0, 0))
    expect(source[start : start + 3] != b"big", "its numbers are big-endian")

    def storage(kind: str, ggml_type: str, key: str, device: Any, numel: int) -> Weight:
        expect(type(ggml_type) is type(key) is str, "a storage of an unknown type")
        start, size = files[f"{folder}data/{key}"]
        shape = (size // DENSE[ggml_type].itemsize,)
        expect(shape == (numel,), "a storage that does not match its size")
        return map_weight(source, "a storage", ggml_type, shape, start)

    def tensor(base: Weight, offset: int, shape: tuple, stride: tuple, *options: Any) -> Weight:
        """torch._utils._rebuild_tensor_v2. Options: requires_grad, hooks, metadata."""
        counts = [offset, *shape, *stride]
        fits = type(base) is Weight and all(type(n) is int and n >= 0 for n in counts)
        fits = fits and len(shape) < 3 and stride == (*shape[1:], 1) and not any(options[2:])
        expect(fits, "a tensor that is not contiguous in the file")
        expect(offset + math.prod(shape) <= base.shape[0], "a tensor not within its storage")
        at = base.shards[0].storage_offset() + offset * base.block[1]
        return map_weight(source, "a tensor", base.ggml_type, shape, int(at))

    known: dict[str, Any] = {  # names that a state dict's pickle may use: their replacements
        "collections OrderedDict": lambda: PickledDict(),  # which takes no arguments here
        "torch._utils _rebuild_tensor_v2": tensor,
        "torch._utils _rebuild_parameter": lambda tensor, grad, hooks: tensor,
        "torch FloatStorage": "F32",
        "torch HalfStorage": "F16",
        "torch BFloat16Storage": "BF16",
    }

    start, size = files[pickled]
    content = checked_pickle(source[start : start + min(size, MAX_HEADER)])
    weights = StateDictReader(content, known, storage).load()
    for name, weight in weights.items():
        expect(type(weight) is Weight, f"{name} is of type {type(weight).__name__}, not a tensor")
    size = sum(weight.nbytes for weight in weights.values())  # embed_tokens and lm_head may be one
    expect(size <= 2 * len(source), "its tensors share bytes")
    return weights


def read_meta(path: Path, files: list[Path]) -> tuple[Config, dict[str, Weight]]:
    """Meta's directory. Its shards, which Meta's code runs on a GPU each, are joined."""
    shards = [read_tensors(file) for file in files]
    axes, tensors = {last_name(row[2]): row[3] for row in NAMES}, {}
    for name, weight in shards[0].items():
        parts = [lookup(file, shard, name, Weight) for file, shard in zip(files, shards)]
        kinds = {(part.ggml_type, part.shape) for part in parts}
        expect(len(kinds) == 1, f"{name} differs in type or shape from shard to shard")
        axis, shape = axes.get(last_name(name)), list(weight.shape)
        if axis is not None and len(shape) == 2 and len(parts) > 1:
            shape[axis] *= len(parts)
            pieces = [part.shards[0] for part in parts]
            weight = Weight(weight.ggml_type, tuple(shape), pieces, axis)
        tensors[name] = weight
    tensors.pop("rope.freqs", None)  # computed, not learned

    params = path / "params.json"
    settings = read_json(params)
    known = {"vocab_size", "multiple_of", "ffn_dim_multiplier"} | {row[2] for row in SETTINGS}
    odd = " ".join({key for key in settings if settings[key]} - known)
    expect(not odd, f"{params}: unknown key {odd[:60]}; expected {' '.join(sorted(known))}")
    vocab_size, columns = lookup(path, tensors, "tok_embeddings.weight", Weight).shape
    width, _ = lookup(path, tensors, "layers.0.feed_forward.w1.weight", Weight).shape
    get = partial(lookup, params, settings)
    config = read_config(2, get, vocab_size=vocab_size, intermediate_size=width)
    found = f"have {columns} columns of tok_embeddings, but dim is {config.hidden_size}"
    expect(columns == config.hidden_size, f"{len(files)} shards {found}: are shards missing?")
    return config, rename(tensors, 2, config)


def read_chat_template(path: Path) -> str:
    """The chat template of a Hugging Face directory, "" if there is none."""
    if (path / "chat_template.jinja").exists():
        return read_file(path / "chat_template.jinja").decode("utf-8", "replace")
    file = path / "tokenizer_config.json"
    settings = read_json(file)
    template = settings.get("chat_template")
    if isinstance(template, list):  # of several with names
        named = {str(t.get("name")): t.get("template") for t in template if isinstance(t, dict)}
        settings["chat_template"] = named.get("default")
    return well_formed(lookup(file, settings, "chat_template", str, ""))


HF_ACCEPTED: dict[str, tuple] = {
    "model_type": ("llama", "mistral", None),
    "quantization_config": (None,),  # GPTQ, AWQ, bitsandbytes, ...
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "partial_rotary_factor": (1, None),
    "rope_type": ("default", "linear", "llama3", None),
}
ROPE_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor"}
ROPE_KEYS |= {"high_freq_factor", "original_max_position_embeddings"}


def llama3_divisors(get: Callable, config: Config) -> tuple[float, ...]:
    """What Llama 3.1 divides rotary frequencies by: 1 for short waves, `factor` for long ones."""
    factor = get("factor", float)
    low, high = (get(f"{end}_freq_factor", float) for end in ("low", "high"))
    original = get("original_max_position_embeddings", int, config.max_position_embeddings)
    pair = torch.arange(0, config.head_dim, 2) / config.head_dim
    waves = original / (2 * math.pi * config.rope_theta**pair)  # in the original context
    smooth = ((waves - low) / (high - low)).clamp(0, 1)
    return tuple((1 / ((1 - smooth) / factor + smooth)).tolist())


def read_hf(path: Path, files: list[Path]) -> tuple[Config, dict[str, Weight]]:
    """A Hugging Face directory: config.json, generation_config.json, .safetensors or .bin files."""
    file = path / "config.json"
    settings = read_json(file)
    get = partial(lookup, file, settings)
    # rope_scaling is the name of transformers 4; rope_parameters is that of 5, and has theta, too.
    rope = get("rope_scaling", dict, {}) | get("rope_parameters", dict, {})
    settings |= {"rope_type": rope.get("type")} | {k: rope[k] for k in ROPE_KEYS & rope.keys()}
    for key, accepted in HF_ACCEPTED.items():
        get(key, accepted)
    linear = settings["rope_type"] == "linear"
    settings["rope_scaling_factor"] = get("factor", float, 1.0) if linear else 1.0
    if settings.get("model_type") == "mistral":  # which is Llama within a sliding window
        window = get("sliding_window", int, 2**28)
        settings["max_position_embeddings"] = min(window, get("max_position_embeddings", int))
    for index in path.glob(f"*model{files[0].suffix}.index.json"):  # else all files that are there
        names = lookup(index, read_json(index), "weight_map", dict).values()
        files = sorted({path / Path(str(name)).name for name in names})
    tensors: dict[str, Weight] = {}
    for part in files:
        for name, weight in read_tensors(part).items():
            ours = name.removeprefix("model.")
            expect(ours not in tensors, f"{part}: {name} is also in another file")
            if not ours.endswith(".rotary_emb.inv_freq"):  # computed, not learned
                tensors[ours] = weight
    tied = get("tie_word_embeddings", bool, False) and "lm_head.weight" not in tensors
    others, vocab_size = read_json(path / "generation_config.json"), get("vocab_size", int)
    both: list[Any] = [settings.get("eos_token_id"), others.get("eos_token_id")]
    found = [i for value in both for i in (value if isinstance(value, list) else [value])]
    found = [i for i in found if i is not None] or [Config.eos_token_id]
    fits = all(type(i) is int and 0 <= i < vocab_size for i in found)
    problem = f"eos_token_id is {str(found)[:40]}, not ids below {vocab_size}"
    expect(fits, f"{file} or generation_config.json: {problem}")
    settings["eos_token_id"], *stop_ids = dict.fromkeys(found)
    config = read_config(0, get, tie_word_embeddings=tied, stop_token_ids=tuple(stop_ids))
    get("head_dim", (config.head_dim, None))
    if settings["rope_type"] == "llama3":
        config = replace(config, rope_freq_factors=llama3_divisors(get, config))
    return config, rename(tensors, 0, config)


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Recognise a model file or directory and check its headers; no tensor is read yet."""
    path = Path(path)
    is_folder = stat.S_ISDIR(path.stat().st_mode)  # or FileNotFoundError
    with naming(path):
        if not is_folder and path.suffix not in (".pth", ".bin", ".safetensors", ".json"):
            return gguf_checkpoint(path)
        for form, settings, pattern, other, read in (
            ("Hugging Face", "config.json", "model*.safetensors", "tokenizer.json", read_hf),
            ("Hugging Face", "config.json", "pytorch_model*.bin", "tokenizer.json", read_hf),
            ("Meta", "params.json", "consolidated.*.pth", "../tokenizer.model", read_meta),
        ):
            files = sorted(path.glob(pattern))
            if files and (path / settings).is_file():
                break
        else:
            found = sorted(os.listdir(path))[:5] if is_folder else ["one file of a directory"]
            wanted = "a .gguf file, or a directory of Meta (params.json and consolidated.00.pth) or"
            wanted += " Hugging Face (config.json and model*.safetensors or pytorch_model*.bin)"
            raise ValueError(f"found {', '.join(found) or 'nothing'}; expected {wanted}")
        config, weights = read(path, files)
        file = path / "tokenizer.model"
        tokenizer = partial(Tokenizer.from_file, file if file.exists() else path / other, config)
        kind = f"{form} directory, {len(files)} {files[0].suffix}"
        template = read_chat_template(path)
        # Meta's files state no context: 4096 tokens are Llama 2's, Code Llama's is 16384.
        return Checkpoint(kind, config, weights, tokenizer, template, str(path), form != "Meta")


def keeps_blocks(weight: Weight, dtype: torch.dtype) -> bool:
    """Whether a weight stays in the file's blocks in memory, for activations of `dtype`."""
    dense = ("F32",) if dtype == torch.float32 else tuple(DENSE)
    return len(weight.shape) == 2 and weight.ggml_type in GGML_TYPES.keys() - dense


def build_model(
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
    trainable: bool = False,
) -> Llama:
    """Read the weights into a model, one at a time, for activations of `dtype`.

    Blocks stay as they are (rare types become 16-bit ones), and so do 16-bit matrices beside
    float32 activations: half the memory, the same numbers. `trainable`: all become parameters of
    `dtype`.
    """
    with torch.device("meta"):
        model = Llama(checkpoint.config)
    model.name_or_path = checkpoint.path  # type: ignore[assignment]  # as in transformers
    for name, weight in checkpoint.read("loading", progress):
        names = [name.removesuffix(".weight")]
        if names == ["embed_tokens"] and checkpoint.config.tie_word_embeddings:
            names.append("lm_head")
        if weight.is_rare and dtype == torch.float32 and not trainable:
            weight = Weight("F16", weight.shape, [weight.dense(torch.float16).view(torch.uint8)])
        if trainable or not keeps_blocks(weight, dtype):
            parameter = nn.Parameter(weight.dense(dtype, device), requires_grad=trainable)
            for name in names:
                model.get_submodule(name).weight = parameter
            continue
        blocks, kind = weight.read().to(device), weight.ggml_type
        for name in names:
            if name == "embed_tokens":
                model.embed_tokens = QuantizedEmbedding(blocks, kind, dtype)
            else:
                model.set_submodule(name, QuantizedLinear(blocks, kind))
    if not trainable:
        model.register_forward_hook(refuse_training, with_kwargs=True)
    return model.train(trainable)


def refuse_training(model: nn.Module, inputs: tuple, options: dict, logits: Tensor) -> None:
    """A hook: backward() through frozen weights alone is a ValueError that says what to do."""
    alone = len(inputs) + len(options) == 1 and not torch.compiler.is_compiling()
    if alone and torch.is_grad_enabled() and not logits.requires_grad and type(logits) is Tensor:

        def refuse(gradient: Tensor) -> None:
            raise ValueError("frozen weights; load(path, trainable=True) makes a trainable model")

        logits.requires_grad_().register_hook(refuse)


def model_checkpoint(model: Llama, tokenizer: Any = None) -> Checkpoint:
    """A model and its tokenizer as a Checkpoint, not copied. ValueError if a module is missing."""
    config, weights = model.config, {}
    with naming(Path("the model"), "not the modules of a Llama: "):
        for name in name_map(0, config):
            module: Any = model.get_submodule(name.removesuffix(".weight"))
            if isinstance(module, Quantized):
                shape = module.out_features, module.in_features
                weights[name] = Weight(module.ggml_type, shape, [module.blocks.cpu()])
            else:
                w = module.weight.detach().cpu().contiguous()
                w = w if w.dtype in DENSE_NAMES else w.float()
                rows = torch.atleast_2d(w).view(torch.uint8)
                weights[name] = Weight(DENSE_NAMES[w.dtype], tuple(w.shape), [rows])
    embedding, head = (weights[f"{name}.weight"].shards[0] for name in ("embed_tokens", "lm_head"))
    if config.tie_word_embeddings and torch.equal(embedding, head):
        del weights["lm_head.weight"]
    config = replace(config, tie_word_embeddings="lm_head.weight" not in weights)
    template = getattr(tokenizer, "chat_template", "")
    return Checkpoint("a model", config, weights, lambda: tokenizer, template)


def blame(model: Llama) -> str:
    """Why logits are not finite: the first weight that is not, or none."""
    origin = getattr(model, "name_or_path", "") or "the model"
    weights: dict[str, Weight] = {}
    with suppress(ValueError):  # where a module has been replaced
        weights = model_checkpoint(model).weights
    bad = (k for k, w in weights.items() if not w.dense(torch.float32).isfinite().all())
    return f"{origin}: NaN or infinity in {next(bad, 'no weight: sums of finite ones overflow')}"


def is_large(checkpoint: Checkpoint) -> bool:
    """Whether compiling kernels pays: for more than 64 MiB of weights."""
    return sum(weight.nbytes for weight in checkpoint.weights.values()) > 2**26


def load(
    path: str | Path | Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str | None = None,
    accelerated: bool | None = None,
    exact: bool = True,
    trainable: bool = False,
) -> tuple[Llama, Tokenizer]:
    """A .gguf file, a Meta or Hugging Face directory, or a Checkpoint -> model and tokenizer.

    Its weights are frozen, unless `trainable`: then all are dense float32 parameters.
    `accelerated`: use accelerate() of part III (default: if the model is large), which rounds
    activations to 16 bits unless `exact`. ValueError or FileNotFoundError says what is wrong.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    device = choose_device(device, checkpoint)
    chosen = str(dtype or "float32").removeprefix("torch.")
    accepted = ["float32"] if trainable else [*DTYPES]
    expect(chosen in accepted, f"dtype is {dtype!r}; it must be {' or '.join(accepted)}")
    tokenizer = checkpoint.tokenizer()
    if trainable:
        size = 4 * sum(math.prod(weight.shape) for weight in checkpoint.weights.values())
        free, needed = free_memory(device), f"{show_bytes(size)} of float32 parameters"
        problem = f"{needed}, and four times as much to train them, but {show_bytes(free)} free"
        expect(size <= free, f"{problem} on {device}")
    model = build_model(checkpoint, device, DTYPES[chosen], trainable=trainable)
    model.token_count = tokenizer.vocab_size  # type: ignore[assignment]  # no id beyond it is drawn
    faster = part_3("accelerate")
    if faster and not trainable and (is_large(checkpoint) if accelerated is None else accelerated):
        faster(model, exact)
    return model, tokenizer


def part_3(name: str) -> Callable | None:
    """A function of part III, or None in a copy of this file without that part."""
    return globals().get(name)


def memory_plan(
    checkpoint: Checkpoint, context: int, dtype: torch.dtype, cache_dtype: torch.dtype
) -> dict[str, int]:
    """Bytes of memory for weights, cache and temporaries of one row of `context` tokens."""
    config, weights = checkpoint.config, 0
    for weight in checkpoint.weights.values():
        dense = math.prod(weight.shape) * (2 if weight.is_rare else dtype.itemsize)
        weights += weight.nbytes if keeps_blocks(weight, dtype) else dense
    rows = min(context, 4 * PREFILL_CHUNK)  # of activations; beside them one matrix is unpacked
    widths = 4 * config.hidden_size + 3 * config.intermediate_size
    numbers = rows * widths + config.hidden_size * config.intermediate_size
    return {
        "weights": weights,
        "cache": 2 * Cache(config, 1, context, cache_dtype, "meta").k.nbytes,
        "overhead": numbers * dtype.itemsize + rows * context,
    }


def free_memory(device: torch.device) -> float:
    """Bytes that a process can allocate on a device; infinity if unknown (Windows)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free, group = math.inf, Path("/sys/fs/cgroup")
    with suppress(AttributeError, ValueError, OSError):  # all of the machine's memory
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(ValueError, OSError):  # Linux
        (kilobytes,) = re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        free = 1024 * int(kilobytes)
    with suppress(ValueError, OSError):  # the limit of a container, if it has one
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = re.findall(r"^file (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        free = min(free, limit - used + sum(map(int, cached)))
    return free / max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))  # shared by torchrun's


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16, "mps": torch.float16}


def choose_device(name: torch.device | str, checkpoint: Checkpoint) -> torch.device:
    """auto: CUDA, else MPS for dense weights, else the CPU. ValueError if it is not available."""
    if name == "auto":  # MPS would unpack quantised weights anew for every token
        dense = all(weight.ggml_type in DENSE for weight in checkpoint.weights.values())
        mps = dense and torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if name == "cuda":
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"device {str(name)!r} is not available: {reason}") from None


def choose_dtypes(
    name: str, device: torch.device, checkpoint: Checkpoint, compile: bool = True
) -> tuple[torch.dtype, torch.dtype, bool]:
    """The dtypes of activations and cache, and `exact`: False for large models with "auto"."""
    dtype = DTYPES.get(name, AUTO_DTYPE[device.type])
    matrices = [weight for weight in checkpoint.weights.values() if len(weight.shape) == 2]
    if name == "auto" and device.type == "cuda" and {w.ggml_type for w in matrices} == {"F16"}:
        dtype = torch.float16  # bfloat16 would round them
    exact = name != "auto" or not is_large(checkpoint)
    have_kernels = part_3("have_kernels")
    native = have_kernels and compile and not exact and device.type == "cpu" and have_kernels()
    blocks = all(weight.is_rare or keeps_blocks(weight, dtype) for weight in matrices)
    # Kernels read a cache of 16 bits; torch would convert all of it anew for every token.
    return dtype, torch.float16 if native and blocks else dtype, exact


def show_bytes(size: float) -> str:
    """A number of bytes as a person reads it."""
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def show_plan(plan: dict[str, int]) -> str:
    """A memory plan as text."""
    parts = [f"{name} {show_bytes(size)}" for name, size in plan.items()]
    return f"{' + '.join(parts)} = {show_bytes(sum(plan.values()))}"


def check_memory(plan: dict[str, int], context: int, device: torch.device, free: float) -> None:
    """Raises ValueError, before anything is loaded, if a model cannot fit."""
    missing = sum(plan.values()) - free
    if missing > 0:
        most = int(context * (1 - missing / plan["cache"]))  # which would fit
        advice = "fewer bits per weight (--save OUT.gguf --type Q4_0) or more devices (torchrun)"
        advice = f"--context {most}" if most > 0 else advice
        found = f"{show_plan(plan)}, but {device} has {show_bytes(free)} free"
        raise ValueError(f"the model needs {found}; try {advice}")


SAVE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")


def encode_weight(name: str, weight: Weight, ggml_type: str) -> Tensor:
    """A weight as another type: uint8 (rows, bytes per row). ValueError beyond F16's range."""
    import gguf

    if weight.ggml_type == ggml_type:
        return weight.read()
    w = weight.dense(torch.float32)
    if ggml_type not in ("F32", "BF16") and w.abs().max() > 65504:
        raise ValueError(f"{name}: a number beyond the range of F16; BF16 can hold it")
    data = gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[ggml_type])
    return torch.from_numpy(data).view(torch.uint8)


def gguf_settings(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, Any]:
    """The metadata to write, without what 32 bits cannot hold: check_saved() sees if it matters."""
    import gguf

    def fits(value: Any) -> bool:
        if isinstance(value, list):
            return value != [] and all(isinstance(v, str) or abs(v) < 2**31 for v in value)
        if isinstance(value, float):
            return abs(value) < 3e38
        return isinstance(value, str) or 0 <= value < 2**32

    config = checkpoint.config
    settings = checkpoint.metadata | tokenizer.vocabulary(config.vocab_size)
    for name, key, *_ in SETTINGS:
        settings[key] = type(getattr(Config, name))(getattr(config, name))
    for key, token_id in zip(("eot", "eom"), config.stop_token_ids):
        settings[f"tokenizer.ggml.{key}_token_id"] = token_id
    settings["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    settings["llama.rope.dimension_count"] = config.head_dim
    settings["llama.rope.scaling.type"] = "linear"  # a factor of 1 is none
    settings["tokenizer.chat_template"] = checkpoint.chat_template
    return {key: value for key, value in settings.items() if value != "" and fits(value)}


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file that becomes `path` when the block succeeds, and is deleted when it fails.

    A file that is replaced passes on its permissions. ValueError if it is read-only.
    """
    path = Path(os.path.realpath(path))  # through symlinks, as writing would go
    exists = os.path.lexists(path)
    writable = path.is_file() and path.stat().st_mode & stat.S_IWUSR
    expect(writable or not exists, f"{path}: cannot be replaced: read-only, or not a regular file")
    for old in path.parent.glob(f"*.{'[0-9a-f]' * 8}.unfinished"):  # of a run that was killed
        with suppress(OSError):
            if old.stat().st_mtime < time.time() - 3600:
                old.unlink()
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if exists:
            shutil.copymode(path, unfinished)
        unfinished.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say where
        raise
    finally:
        unfinished.unlink(missing_ok=True)


# Texts that vocabularies split differently: spaces, NFKC forms, control characters, tags.
ODD_TEXT = "  two  spaces  a\tb\r\n\n \0\x7f\u200b\ufeff\u2028 \u3000\uff21 \ufb01 \u2460 e\u0301"
ODD_TEXT += " \u2581\u2581a \u4e16 \U0001f469\u200d\U0001f680 <s><unk> ABC abc 4,567.89 "


def check_saved(checkpoint: Checkpoint, tokenizer: Tokenizer, path: Path) -> None:
    """Raises ValueError unless the settings and the tokenizer of a saved file are the same."""
    saved = open_checkpoint(path)
    for name, ours in vars(checkpoint.config).items():
        theirs = getattr(saved.config, name)
        same = ours == theirs or (type(ours) is float and math.isclose(ours, theirs, rel_tol=1e-6))
        expect(same, f"GGUF cannot represent {name} {ours}: it would be {theirs}")
    rebuilt = saved.tokenizer()
    pieces = [piece.replace("\u2581", " ") for piece in rebuilt.pieces]
    joined = ["".join(pieces[i::997]) for i in range(997)]
    for text in ("", ODD_TEXT, *ODD_TEXT.split(" "), *joined, *pieces):
        ids, others = (t.encode(text, bos=False) for t in (tokenizer, rebuilt))
        if ids != others or tokenizer.decode(ids) != rebuilt.decode(ids):
            found = f"{text[:20]!r} has the ids {ids[:9]}, but from the file {others[:9]}"
            raise ValueError(f"GGUF cannot represent this vocabulary: {found}")


def save_gguf(
    model: Llama | Checkpoint,
    path: str | Path,
    ggml_type: str | None = None,
    progress: bool = False,
    tokenizer: Tokenizer | None = None,
) -> None:
    """Write a model with its tokenizer, or a checkpoint, as one GGUF file.

    Matrices become `ggml_type`; None: they stay as they are. The file appears once it is complete.
    `tokenizer`: a model's; a checkpoint has its own.
    Raises ValueError for what a GGUF file cannot hold.
    """
    import gguf
    import numpy

    expect(ggml_type in (None, *SAVE_TYPES), f"type {ggml_type!r}; expected one of {SAVE_TYPES}")
    checkpoint = model if isinstance(model, Checkpoint) else model_checkpoint(model, tokenizer)
    tokenizer = checkpoint.tokenizer()
    expect(tokenizer, "a model can only be saved with its tokenizer")
    names = name_map(1, checkpoint.config)
    if factors := checkpoint.config.rope_freq_factors:
        rows = torch.tensor([factors]).view(torch.uint8)
        weights = {"rope_freqs.weight": Weight("F32", (len(factors),), [rows])}
        checkpoint = replace(checkpoint, weights=weights | checkpoint.weights)
    with replacing(Path(path)) as file:
        types, writer = gguf.GGUFValueType, gguf.GGUFWriter(file.name, "llama")
        for key, value in gguf_settings(checkpoint, tokenizer).items():
            is_int = type(value) is int
            writer.add_key_value(key, value, types.UINT32 if is_int else types.get_type(value))
        targets = {}
        for name, weight in checkpoint.weights.items():
            kind = "F32" if len(weight.shape) == 1 else ggml_type or weight.ggml_type
            target = targets[name] = replace(weight, ggml_type=kind)
            if weight.shape[-1] % target.block[0]:  # rows that are not whole blocks
                target.ggml_type = "F16"
            number = gguf.GGMLQuantizationType[target.ggml_type]
            sizes = target.shape, numpy.dtype("f4"), target.nbytes
            writer.add_tensor_info(names.get(name, name), *sizes, number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        file.seek(0, os.SEEK_END)
        for name, weight in checkpoint.read("saving", progress):
            file.write(bytes(-file.tell() % 32))
            file.write(encode_weight(name, weight, targets[name].ggml_type).numpy().data)
        file.write(bytes(-file.tell() % 32))
        file.flush()
        with naming(Path(path)):
            check_saved(checkpoint, tokenizer, Path(file.name))


def save_pretrained(
    model: Llama, tokenizer: Tokenizer, directory: str | Path, dtype: torch.dtype = torch.float32
) -> None:
    """Write a model as a Hugging Face directory, all weights as `dtype`; transformers reads it.

    Raises ValueError for what config.json cannot hold, and for another model's directory.
    """
    checkpoint, folder = model_checkpoint(model, tokenizer), Path(directory)
    expect(dtype in DENSE_NAMES, f"dtype is {dtype}; it must be one of {', '.join(DTYPES)}")
    config, ggml_type = checkpoint.config, DENSE_NAMES[dtype]
    expect(tokenizer, "a model can only be saved with its tokenizer")
    stops = [config.eos_token_id, *config.stop_token_ids]
    settings = {row[0]: getattr(config, row[0]) for row in SETTINGS}
    del settings["rope_scaling_factor"]
    settings |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "eos_token_id": stops if len(stops) > 1 else stops[0],
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "rope_scaling": hf_rope_scaling(config),
    }
    files = {"config.json": settings, **tokenizer.hf_files(config)}
    folder.mkdir(parents=True, exist_ok=True)
    patterns = ("*.safetensors", "*.index.json", "generation_config.json", "chat_template*")
    found = {path.name for p in (*patterns, "*token*") for path in folder.glob(p)}
    found -= {"model.safetensors", *files}
    expect(not found, f"{folder} holds files of another model: {', '.join(sorted(found))}")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in checkpoint.weights.items():
        start, end = end, end + math.prod(weight.shape) * dtype.itemsize
        entry = {"dtype": ggml_type, "shape": weight.shape, "data_offsets": [start, end]}
        header[name if name == "lm_head.weight" else f"model.{name}"] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(folder / "model.safetensors") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, weight in checkpoint.weights.items():
            rows = encode_weight(name, weight, ggml_type)
            if last_name(name) in ("q_proj", "k_proj"):  # of each head rows 0, 2, 4, ..., 1, 3, ...
                pairs = (-1, config.head_dim // 2, 2)
                rows = rows.unflatten(0, pairs).transpose(1, 2).flatten(0, 2)
            file.write(rows.numpy().data)
    for file_name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content, indent=2).encode()
        with replacing(folder / file_name) as file:
            file.write(data)


def hf_rope_scaling(config: Config) -> dict[str, Any] | None:
    """config.json's rope_scaling. ValueError for factors that are not Llama 3.1's."""
    factor, factors = config.rope_scaling_factor, config.rope_freq_factors
    if factors is None:
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    rope = {"rope_type": "llama3", "factor": round(max(factors), 3), "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    published = llama3_divisors(lambda key, *_: rope[key], config)
    near = all(abs(a - b) < 1e-4 for a, b in zip(factors, published))
    expect(near and factor == 1, "config.json cannot hold these rope_freq_factors: not Llama 3's")
    return rope


# --------------------------------------------------------------------------------------------------
# 11. Tokenizer
#
# Whatever file a vocabulary is in, it is read as the keys of a GGUF file, which make a Tokenizer.

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces

# A SentencePiece model is a protobuf message (sentencepiece_model.proto). It is read and written by
# hand, because sentencepiece does not install the package protobuf, which its own class needs.
# Appending one message to another merges them: pieces are added, settings replaced.


def protobuf(fields: Mapping[int, Any]) -> bytes:
    """A message of fields by their numbers: integers, floats, bytes or messages."""
    message = b""

    def varint(number: int) -> bytes:  # seven bits a byte; the eighth says that more follow
        low, rest = number & 127, number >> 7
        return bytes((low | 128,)) + varint(rest) if rest else bytes((low,))

    for number, value in fields.items():
        if isinstance(value, float):
            message += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            message += varint(number << 3) + varint(value % 2**64)
        else:
            data = value if isinstance(value, bytes) else protobuf(value)
            message += varint(number << 3 | 2) + varint(len(data)) + data
    return message


def read_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: their numbers, and an integer or bytes."""
    file = io.BytesIO(message)

    def read_varint() -> int:
        (byte,) = file.read(1)
        return byte if byte < 128 else byte - 128 + (read_varint() << 7)

    while file.tell() < len(message):
        number, wire_type = divmod(read_varint(), 8)
        size = {1: 8, 5: 4}.get(wire_type) or read_varint()  # of type 0: the value itself
        yield number, file.read(size) if wire_type else size


def open_sentencepiece(path: Path, model: bytes) -> Any:
    """SentencePiece's processor for a model. Raises ValueError."""
    import sentencepiece

    sentencepiece.set_min_log_level(2)  # errors are raised, not printed as well
    with naming(path, "not a SentencePiece model: "):
        return sentencepiece.SentencePieceProcessor(model_proto=model)


def read_tokenizer_model(path: Path, config: Config) -> tuple[dict[str, Any], bytes]:
    """tokenizer.model and what the files beside it add, as keys, and its settings. ValueError."""
    data = read_file(path, MAX_VOCABULARY)
    tiktoken = re.match(rb"[A-Za-z0-9+/]+=* 0\r?\n", data)  # Meta's Llama 3
    expect(not tiktoken, "it is tiktoken's text; use a GGUF file or Hugging Face directory")
    sp = open_sentencepiece(path, data)
    count = sp.vocab_size()
    expect(count <= config.vocab_size, f"{count} pieces; the model has {config.vocab_size}")
    model = [*read_fields(sp.serialized_model_proto())]
    settings = b"".join(protobuf({number: value}) for number, value in model if number != 1)
    types = [dict(read_fields(piece)).get(3, NORMAL) for number, piece in model if number == 1]
    pieces, scores = sp.id_to_piece([*range(count)]), sp.get_score([*range(count)])
    for i, kind in enumerate(types):
        if kind == USER_DEFINED:  # in GGUF files, these have plain spaces
            pieces[i] = pieces[i].replace("\u2581", " ")
    add_tokens(pieces, types, read_added_tokens(path.parent, pieces), config.vocab_size)
    keys = {"model": "llama", "tokens": pieces, "token_type": types, "add_bos_token": True}
    keys["scores"] = scores + [0.0] * (len(pieces) - count)
    keys |= {"bos_token_id": sp.bos_id(), "eos_token_id": sp.eos_id()}
    keys["unknown_token_id"] = sp.unk_id()
    keys["add_space_prefix"] = sp.encode_as_pieces("a")[0] != "a"
    keys["remove_extra_whitespaces"] = sp.encode("a  a") == sp.encode("a a")
    return keys, settings


def read_added_tokens(path: Path, pieces: list[str]) -> list[dict[str, Any]]:
    """Tokens that the files beside a tokenizer.model add, as tokenizer.json would have them."""
    names = ("added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
    files = [read_json(path / name) for name in names]

    def content(token: Any) -> str:
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str) or not text or "\0" in text:
            raise ValueError(f"{', '.join(names)}: {str(token)[:40]!r} is not a token")
        return well_formed(text)

    texts: dict[int, str] = {}
    decoder = lookup(path / names[2], files[2], "added_tokens_decoder", dict, {})
    for key, token in decoder.items() or [(i, text) for text, i in files[0].items()]:
        if not re.fullmatch("[0-9]{1,9}", str(key)):
            raise ValueError(f"{content(token)[:40]!r} has the id {str(key)[:40]!r}")
        texts[int(key)] = content(token)
    special = [t for t in decoder.values() if isinstance(t, dict) and t.get("special")]
    roles = [f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    for name in (*roles, "additional_special_tokens"):
        for tokens in (settings.get(name) or [] for settings in files[1:]):
            special += tokens if isinstance(tokens, list) else [tokens]
    controls, known = dict.fromkeys(map(content, special)), {*pieces, *texts.values()}
    first = max([len(pieces) - 1, *texts]) + 1  # those without a number follow
    texts |= dict(enumerate([text for text in controls if text not in known], first))
    return [{"id": i, "content": text, "special": text in controls} for i, text in texts.items()]


def add_tokens(pieces: list[str], types: list[int], added: Iterable[Mapping], rows: int) -> None:
    """Add a directory's tokens, those below `rows`; gaps become unused pieces. ValueError."""
    for token in added:
        i, text = token["id"], token["content"]
        if not 0 <= i < rows:
            continue  # Llama 2's own directory names a padding token that its model has no row for
        gap = range(len(pieces), i + 1)
        pieces += [f"[PAD{j}]" for j in gap]
        types += [UNUSED] * len(gap)
        if types[i] == UNUSED:
            pieces[i] = text
        elif pieces[i].replace("\u2581", " ") != text.replace("\u2581", " "):
            raise ValueError(f"token {i} is {pieces[i]!r}, elsewhere {text[:40]!r}")
        if types[i] != CONTROL:
            types[i] = CONTROL if token["special"] else USER_DEFINED
        strips = types[i] == USER_DEFINED and (token.get("lstrip") or token.get("rstrip"))
        expect(not strips, f"the token {text!r} takes spaces beside it")


# How byte-level BPE cuts text into words before it merges the bytes of each, as tokenizer.json says
# it: Llama 3 takes contractions, letters, up to three digits, punctuation, white space.
LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
LLAMA_3 += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Isolated", "invert": False}
DIGITS = {"type": "Digits", "individual_digits": True}
AS_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
PRE_TOKENIZERS = {"llama-bpe": [SPLIT, AS_BYTES | {"use_regex": False}]}
PRE_TOKENIZERS["llama-v3"] = PRE_TOKENIZERS["llama-bpe"]
PRE_TOKENIZERS["smollm"] = [DIGITS, AS_BYTES | {"use_regex": True}]
# The characters that stand for bytes in its pieces: printable ones stand for themselves.
OTHERS = [byte for byte in range(256) if byte == 32 or not chr(byte).isprintable()]
BYTES = {chr(byte): byte for byte in range(256) if byte not in OTHERS}
BYTES |= {chr(256 + i): byte for i, byte in enumerate(OTHERS)}
# SentencePiece's U+2581 for a space: by tokenizer.json's normalizer, or its pre_tokenizer.
PREPEND = {"type": "Prepend", "prepend": "\u2581"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "split": False}
ESCAPES: tuple = (([PREPEND, REPLACE], {}), (None, METASPACE))


def read_tokenizer_json(path: Path, config: Config) -> tuple[dict[str, Any], bytes]:
    """A tokenizer.json as keys, and no settings. Raises ValueError for what is not Llama's."""
    data, rows = read_file(path, MAX_TOKENIZER_JSON), config.vocab_size
    expect(data.count(b",") <= MAX_VALUES, f"more than {MAX_VALUES} values")
    content = parse_json(data)
    parts = ("model", "pre_tokenizer", "normalizer", "post_processor", "added_tokens")
    model, pre, normalizer, post, added = (content.get(part) or {} for part in parts)
    expect(model["type"] == "BPE", f"it is a {model['type']}")
    vocab = model["vocab"]
    texts = {i: text for text, i in vocab.items()}
    fits = len(texts) == len(vocab) and all(type(i) is int and 0 <= i < rows for i in texts)
    expect(fits, f"its ids are not different and below {rows}")
    pieces = [texts.get(i, f"[PAD{i}]") for i in range(max(texts) + 1)]
    types = [NORMAL if i in texts else UNUSED for i in range(len(pieces))]
    add_tokens(pieces, types, added, rows)
    merges = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    starts = [step.get("single", [])[:1] for step in post.get("processors", [post])]
    ends = (config.bos_token_id, config.eos_token_id, *config.stop_token_ids)
    keys: dict[str, Any] = {"tokens": pieces, "token_type": types}
    keys |= {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    keys["add_bos_token"] = any("SpecialToken" in step for start in starts for step in start)
    keys["add_space_prefix"] = pre.pop("prepend_scheme", "") != "never"
    known = [name for name, s in PRE_TOKENIZERS.items() if s == pre.get("pretokenizers")]
    if known and not normalizer:
        special = {types[i] for i in ends} <= {CONTROL, USER_DEFINED}
        expect(special, f"the ids of BOS and EOS, {ends}, are not all of added tokens")
        keys |= {"model": "gpt2", "pre": known[0], "merges": [" ".join(m) for m in merges]}
    elif model["byte_fallback"] and (normalizer.get("normalizers"), pre) in ESCAPES:
        for byte in {f"<0x{byte:02X}>" for byte in range(256)} & vocab.keys():
            types[vocab[byte]] = BYTE
        keys |= {"model": "llama", "unknown_token_id": vocab["<unk>"]}
        keys["scores"] = sentencepiece_scores(pieces, types, merges)
    else:
        found = f"pre_tokenizer {str(pre)[:150]}, normalizer {str(normalizer)[:80]}"
        raise ValueError(f"{found}; expected that of Llama 2, Llama 3 or SmolLM2")
    return keys, b""


def sentencepiece_scores(pieces: list[str], types: list[int], merges: list) -> list[float]:
    """Scores by which SentencePiece does these merges. Raises ValueError if it would do others."""
    ranks = {left + right: -float(rank) for rank, (left, right) in enumerate(merges)}
    texts = {piece for piece, kind in zip(pieces, types) if kind == NORMAL}
    expect(all(len(piece) <= 512 for piece in texts), "a piece of more than 512 characters")
    pairs = {(p[:i], p[i:]) for p in texts for i in range(1, len(p))}  # it merges any such two
    lost = {p for p in pairs if texts >= {*p}} - {*map(tuple, merges)} or ranks.keys() - {*pieces}
    if lost:
        raise ValueError(f"the merges and the pieces do not match: {min(lost)}")
    # Pieces of spaces alone come last, as in tokenizer.model: transformers 5 writes them first.
    return [ranks.get(p, 0.0) if p.strip("\u2581") else -1e9 for p in pieces]


class Tokenizer:
    """SentencePiece, or byte-level BPE as Llama 3 has it. Text never becomes a control token."""

    def __init__(self, path: Path, keys: dict, stops: Iterable = (), settings: bytes = b"") -> None:
        self.source, self.keys, self.get = path, keys, partial(lookup, path, keys)
        self.is_bpe = self.get("tokenizer.ggml.model", ("llama", "gpt2")) == "gpt2"
        self.read_pieces(stops)  # ids that end a text besides EOS
        kinds = enumerate(zip(self.pieces, self.types))
        self.special_ids = {p: i for i, (p, kind) in kinds if kind in (CONTROL, USER_DEFINED)}
        self.chat_template = self.get("tokenizer.chat_template", str, "")  # in Jinja; not executed
        bos = keys.get("tokenizer.ggml.pre") != "smollm"
        self.add_bos = self.get("tokenizer.ggml.add_bos_token", bool, bos)  # before a prompt
        prefix = self.get("tokenizer.ggml.add_space_prefix", bool, True)
        self.strips_space = prefix and not self.is_bpe  # decode() takes off what encode() adds
        if self.is_bpe:  # without control tokens, which so cannot come from text
            self.bpe = self.byte_pairs(NORMAL, USER_DEFINED)
        else:
            self.build_sentencepiece(settings)  # a tokenizer.model's, else those in the keys

    def read_pieces(self, stop_ids: Iterable[int]) -> None:
        """The pieces, their types, the ids of BOS and EOS (-1: none). Raises ValueError."""
        get, prefix = self.get, f"{self.source}: tokenizer.ggml."
        self.pieces: list[str] = get("tokenizer.ggml.tokens", list)
        self.vocab_size = n = len(self.pieces)
        self.types = types = [*get("tokenizer.ggml.token_type", list, [NORMAL] * n)]
        scores = get("tokenizer.ggml.scores", list, [0.0] * n if self.is_bpe else [])
        for name, values, fits in (  # SentencePiece does not check these
            ("tokens", self.pieces, lambda piece: isinstance(piece, str)),
            ("scores", scores, lambda score: isinstance(score, (int, float)) and abs(score) < 1e38),
            ("token_type", types, lambda kind: type(kind) is int and NORMAL <= kind <= BYTE),
        ):
            bad = [repr(value)[:40] for value in values if not fits(value)][:1]
            found = f"{len(values)} values for {n} tokens, wrong ones: {bad}"
            expect(len(values) == n and not bad, f"{prefix}{name} has {found}")
        expect(len({*self.pieces}) == n, f"{prefix}tokens has duplicates")
        bos = get("tokenizer.ggml.bos_token_id", int, None if self.is_bpe else 1)
        eos = get("tokenizer.ggml.eos_token_id", int, None if self.is_bpe else 2)
        for i in (bos, eos, *stop_ids):
            expect(-1 <= i < n, f"{self.source}: the BOS or EOS id is {i} of {n} tokens")
            # Some converters mark BOS and EOS as NORMAL; what is USER_DEFINED could be typed.
            if i >= 0 and (i in (bos, eos) or types[i] == USER_DEFINED):
                types[i] = CONTROL
        if not self.is_bpe:  # some mark it as CONTROL: SentencePiece refuses
            unknown = get("tokenizer.ggml.unknown_token_id", int, 0)
            expect(0 <= unknown < n, f"{prefix}unknown_token_id is {unknown} of {n} tokens")
            types[unknown] = UNKNOWN
        self.bos_id, self.eos_id = (i if types[i] == CONTROL else -1 for i in (bos, eos))

    def build_sentencepiece(self, settings: bytes) -> None:
        """Make SentencePiece's processors, of which the second puts no space in front of a text."""
        trainer: dict[int, Any] = {3: 2, 35: self.types.count(BYTE) == 256}  # BPE, byte_fallback
        for j, i in enumerate((self.types.index(UNKNOWN), self.bos_id, self.eos_id)):
            trainer |= {40 + j: i, 45 + j: self.pieces[i].encode() if i >= 0 else b"none"}
        remove_extra = self.get("tokenizer.ggml.remove_extra_whitespaces", bool, False)
        normalizer = {3: self.strips_space, 4: remove_extra}  # add_dummy_prefix, as below
        fields = [settings or protobuf({2: trainer, 3: normalizer})]
        for text, score, kind in zip(self.pieces, self.keys["tokenizer.ggml.scores"], self.types):
            escaped = text.replace(" ", "\u2581") if kind == USER_DEFINED else text
            fields.append(protobuf({1: {1: escaped.encode(), 2: float(score), 3: kind}}))
        self.sp = open_sentencepiece(self.source, b"".join(fields))
        fields.append(protobuf({3: {3: False}}))
        self.sp_no_prefix = open_sentencepiece(self.source, b"".join(fields))

    def byte_pairs(self, *kinds: int) -> Any:
        """A tokenizers.Tokenizer that knows the pieces of these types."""
        pre = self.get("tokenizer.ggml.pre", tuple(PRE_TOKENIZERS))
        merges = self.get("tokenizer.ggml.merges", list)
        try:
            import tokenizers
        except ImportError as error:
            raise ImportError(f"{self.source}: {error}: pip install tokenizers") from None
        rows = [row for row in zip(self.pieces, itertools.count(), self.types) if row[2] in kinds]
        vocab = {piece: i for piece, i, _ in rows}
        words = {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]}
        content = {"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": []}}
        content |= {"pre_tokenizer": words, "decoder": AS_BYTES | {"use_regex": True}}
        with naming(self.source, "tokenizer.ggml.merges: "):
            bpe = tokenizers.Tokenizer.from_str(json.dumps(content))
            pairs = [tuple(merge.split(" ")) for merge in merges]
            odd = [(a, b) for a, b in pairs if not (a in vocab and b in vocab and a + b in vocab)]
            expect(not odd, f"{odd[:1]} are not pieces that make another")
            # Llama 3 takes a word that is a piece as it is, whatever its merges would make of it.
            bpe.model = tokenizers.models.BPE(vocab, pairs, ignore_merges=pre != "smollm")
            token = partial(tokenizers.AddedToken, normalized=False)
            bpe.add_tokens([token(p, special=k == CONTROL) for p, _, k in rows if k != NORMAL])
            if CONTROL in kinds and self.add_bos and self.bos_id >= 0:
                bos, template = self.pieces[self.bos_id], tokenizers.processors.TemplateProcessing
                bpe.post_processor = template([bos, "$A"], special_tokens=[(bos, self.bos_id)])
        return bpe

    @classmethod
    def from_file(cls, path: str | Path, config: Config | None = None) -> Tokenizer:
        """Read tokenizer.model or .json and what the files beside it say. ValueError."""
        path, config = Path(path), config or Config(vocab_size=2**18)
        read = read_tokenizer_json if path.suffix == ".json" else read_tokenizer_model
        with naming(path, "not a tokenizer of Llama's: "):
            keys, settings = read(path, config)
        other, default = path.with_name("tokenizer_config.json"), keys["add_bos_token"]
        keys["add_bos_token"] = lookup(other, read_json(other), "add_bos_token", bool, default)
        keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
        keys["tokenizer.chat_template"] = read_chat_template(path.parent)
        ends = {config.bos_token_id, config.eos_token_id, *config.stop_token_ids}
        return cls(path, keys, ends & {*range(len(keys["tokenizer.ggml.tokens"]))}, settings)

    @classmethod
    def from_gguf(cls, gguf: GGUF | str | Path) -> Tokenizer:
        """The vocabulary inside a GGUF file."""
        gguf = gguf if isinstance(gguf, GGUF) else GGUF(gguf)
        keys = {k: v for k, v in gguf.metadata.items() if k.startswith("tokenizer.")}
        return cls(gguf.path, keys, gguf.stop_ids())

    def encode(self, text: str, bos: bool | None = None, first: bool = True) -> list[int]:
        """Text -> ids. `bos`: begin with BOS (None: as the vocabulary says); ValueError without it.

        `first`: it begins a text, where SentencePiece adds a space.
        """
        expect(isinstance(text, str), f"a {type(text).__name__} is not text")
        text, bos = well_formed(text), (self.add_bos if bos is None else bos)
        expect(self.bos_id >= 0 or not bos, f"{self.source} has no BOS token; pass bos=False")
        if self.is_bpe:
            ids = self.bpe.encode(text, add_special_tokens=False).ids
        else:
            ids = (self.sp if first else self.sp_no_prefix).encode(text)
        return [self.bos_id] * bos + ids

    def decode(self, ids: Iterable[int]) -> str:
        """Ids -> text; control tokens are silent, bytes that are not UTF-8 become U+FFFD."""
        expect(isinstance(ids, Iterable), f"a {type(ids).__name__} is not a list of token ids")
        decoder = StreamDecoder(self)
        return "".join([*map(decoder.decode, ids), decoder.flush()])

    def piece(self, token_id: int) -> tuple[bytes, int]:
        """The bytes that a token means, and BYTE, CONTROL, UNKNOWN or NORMAL. ValueError."""
        if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
            raise ValueError(f"token id {token_id}; expected 0 to {self.vocab_size - 1}")
        text, kind = self.pieces[token_id], self.types[token_id]
        if self.is_bpe:  # the bytes around a control token may be of one character
            if kind == NORMAL and BYTES.keys() >= {*text}:
                return bytes(BYTES[c] for c in text), BYTE
            return text.encode() * (kind in (NORMAL, USER_DEFINED)), BYTE
        if kind == BYTE:
            return bytes.fromhex(text[3:5]), BYTE  # of <0xE2>
        text = {CONTROL: "", UNKNOWN: " \u2047 "}.get(kind, text.replace("\u2581", " "))
        return text.encode(), kind if kind in (CONTROL, UNKNOWN) else NORMAL

    def hf_files(self, config: Config) -> dict[str, Any]:
        """A Hugging Face directory's files for it: names, and bytes or what becomes JSON."""
        ids = {"bos_token": self.bos_id, "eos_token": config.eos_token_id}
        settings: dict[str, Any] = {"legacy": False, "clean_up_tokenization_spaces": False}
        settings |= {role: self.pieces[i] for role, i in ids.items() if 0 <= i < self.vocab_size}
        settings |= {"add_bos_token": self.add_bos, "chat_template": self.chat_template or None}
        if self.is_bpe:
            settings["tokenizer_class"], name = "PreTrainedTokenizerFast", "tokenizer.json"
            model = self.byte_pairs(NORMAL, USER_DEFINED, CONTROL).to_str().encode()
        else:
            settings["tokenizer_class"], name = "LlamaTokenizer", "tokenizer.model"
            model = self.sp.serialized_model_proto()
        return {"tokenizer_config.json": settings, name: model}

    def vocabulary(self, count: int) -> dict[str, Any]:
        """GGUF's keys for it, with unused pieces up to `count`."""
        keys, more = dict(self.keys), range(self.vocab_size, count)
        padding = {"tokens": [f"[PAD{i}]" for i in more], "token_type": [UNUSED] * len(more)}
        for name, values in (padding | {"scores": [0.0] * len(more)}).items():
            if (key := f"tokenizer.ggml.{name}") in keys:
                keys[key] = keys[key] + values
        return keys


# SentencePiece replaces malformed UTF-8 byte by byte; Python's "replace" once per broken sequence.
codecs.register_error(
    "replace_each_byte",
    lambda e: ("\ufffd" * (e.end - e.start), e.end),  # type: ignore[attr-defined]
)


class StreamDecoder:
    """Ids -> text, one by one; a character of several byte tokens comes out once it is whole.

    `first`: drop the space that encode() adds at the start of a text.
    """

    def __init__(self, tokenizer: Tokenizer, first: bool = True) -> None:
        self.tokenizer, self.strip = tokenizer, first and tokenizer.strips_space
        errors = "replace" if tokenizer.is_bpe else "replace_each_byte"
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors)

    def decode(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        data, kind = self.tokenizer.piece(token_id)
        text = "" if kind == BYTE else self.flush()  # bytes before it stay incomplete
        if self.strip and kind == NORMAL:
            data = data.removeprefix(b" ")
        self.strip = self.strip and kind == CONTROL
        return text + self.utf8.decode(data)

    def flush(self) -> str:
        """The rest at the end: U+FFFD for bytes that did not complete a character."""
        return self.utf8.decode(b"", final=True)


# --------------------------------------------------------------------------------------------------
# 12. Chat formats


@dataclass(frozen=True)
class ChatFormat:
    """How a family of models was trained to converse: <s> is BOS, </s> is EOS.

    {} is a message, {-} one without white space around it. Tags are encoded as tokens of their own
    where the vocabulary has them, else as text.
    """

    name: str
    tags: tuple[str, ...]  # begin or end a role; like EOS, they end an answer
    turn: str = ""  # of each ROLE that has no form of its own:
    user: str = ""
    assistant: str = ""  # after the last question, the model continues from what is before {}
    system: str = ""
    start: str = ""
    template_has: tuple[str, ...] = ()  # besides the first tag: its chat template is recognised so
    template_lacks: tuple[str, ...] = ()
    system_in: int | None = None  # the index of the question that includes it
    as_tokens: bool = False  # only for vocabularies with a token for each tag
    default_system: str | None = None  # where none is given; only for templates that say so

    def suits(self, template: str) -> bool:
        """Whether its texts are in a chat template, and none that other formats have."""
        lacks = not any(text in template for text in self.template_lacks)
        return lacks and all(text in template for text in (self.tags[0], *self.template_has))

    def form(self, role: str) -> str:
        """A message of that role and what is around it."""
        return getattr(self, role) or self.turn.replace("ROLE", role)


MISTRAL = ChatFormat(  # versions 2 and 3 of mistral-common, as of Mistral 7B Instruct v0.3
    "mistral",
    ("[INST]", "[/INST]"),
    template_lacks=("[SYSTEM_PROMPT]",),
    start="<s>",
    user="[INST] {}[/INST]",
    assistant=" {-}</s>",
    system="{}\n\n",
    system_in=-1,
    as_tokens=True,
)
LLAMA_3_CHAT = ChatFormat(
    "llama-3",
    ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    turn="<|start_header_id|>ROLE<|end_header_id|>\n\n{-}<|eot_id|>",
    start="<s>",
)
# OpenHermes 2.5 and many others
CHATML = ChatFormat("chatml", ("<|im_start|>", "<|im_end|>"), "<|im_start|>ROLE\n{}<|im_end|>\n")
KNOWLEDGE = "Cutting Knowledge Date: December 2023"
SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

CHAT_FORMATS = (
    ChatFormat(  # Meta's generation.py, with its space after BOS; each turn ends with EOS
        "llama-2",
        ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
        template_has=("<<SYS>>",),
        user="<s> [INST] {-} [/INST]",
        assistant=" {-} </s>",
        system="<<SYS>>\n{}\n<</SYS>>\n\n",
        system_in=0,
    ),
    replace(  # Llama 3.1 to 3.3
        LLAMA_3_CHAT,
        template_has=(KNOWLEDGE,),
        system="<|start_header_id|>system<|end_header_id|>\n\n"
        f"{KNOWLEDGE}\nToday Date: {{date}}\n\n{{-}}<|eot_id|>",
        default_system="",
    ),
    LLAMA_3_CHAT,
    MISTRAL,
    replace(  # version 1: v0.1 and v0.2, whose first templates had no space before [INST]
        MISTRAL, user=" [INST] {} [/INST]", assistant=" {}</s>", system_in=0, as_tokens=False
    ),
    ChatFormat(  # Zephyr 7B, TinyLlama Chat
        "zephyr",
        ("<|assistant|>", "<|user|>", "<|system|>"),
        turn="<|ROLE|>\n{}</s>\n",
        template_has=("eos_token",),
        template_lacks=("<|end|>", "<|endoftext|>"),
    ),
    ChatFormat(  # Vicuna 1.1 and 1.5, as in the published templates and llama.cpp; FastChat, which
        "vicuna",  # trained it, has a space where these have a newline, and none after </s>
        ("USER:", "ASSISTANT:"),
        template_has=("USER: ", "ASSISTANT: "),
        template_lacks=("SYSTEM: ",),
        start="<s>",
        user="USER: {-}\n",
        assistant="ASSISTANT: {-}</s>\n",
        system="{-}\n\n",
    ),
    replace(CHATML, template_has=(SMOLLM,), default_system=SMOLLM),  # SmolLM2
    CHATML,
)
CHAT_FORMAT_NAMES = tuple(dict.fromkeys(row.name for row in CHAT_FORMATS))
CHOICES = ", ".join(CHAT_FORMAT_NAMES)


def recognise_chat_format(template: str) -> str:
    """The format of a chat template, which is never executed. ValueError if it is unknown."""
    known = [row.name for row in CHAT_FORMATS if row.suits(template)]
    start = " ".join(template.split())[:60]
    expect(known or not start, f"unknown chat template {start!r}; choose --chat-format: {CHOICES}")
    return known[0] if start else "llama-2"


def describe_chat_format(template: str) -> str:
    """The format's name as --info prints it, or why there is none."""
    try:
        name = recognise_chat_format(template)
    except ValueError as error:
        return str(error)
    return name if template.strip() else f"{name} (assumed: the model has no chat template)"


def find_chat_format(tokenizer: Tokenizer, name: str | None) -> tuple[ChatFormat, dict, list[str]]:
    """The row of a name (None: by the template), ids of its tags, tags that no text may have."""
    template = tokenizer.chat_template
    if name is None:
        problem = f"the model has no chat template; pass chat_format, one of {CHOICES}"
        expect(template.strip(), problem)
        name = recognise_chat_format(template)
    for row in CHAT_FORMATS:
        ids = {t: tokenizer.special_ids[t] for t in row.tags if t in tokenizer.special_ids}
        fits = row.default_system is None or row.suits(template)
        if row.name == name and fits and (len(ids) == len(row.tags) or not row.as_tokens):
            control = [tag for tag, i in ids.items() if tokenizer.types[i] == CONTROL]
            return row, ids, [tag for tag in row.tags if tag not in control]
    raise ValueError(f"unknown chat format {name!r}; choose from {CHOICES}")


def check_messages(messages: Sequence, tags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """(role, text) pairs. ValueError for roles out of order, contents that are not text, tags."""
    listed = isinstance(messages, Sequence) and all(isinstance(m, Mapping) for m in messages)
    expect(listed, "expected a list of messages, each with role and content")
    roles: list[Any] = [message.get("role") for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    found = ", ".join(map(str, roles)) or "no message"
    order = "[system,] user, assistant, ..., user; join messages of one role in a row"
    in_turn = turns == [*["user", "assistant"] * (len(turns) // 2), "user"]
    expect(in_turn, f"expected the roles {order}; found: {found}")
    for role, message in zip(roles, messages):
        content: Any = message.get("content")
        if isinstance(content, list):  # as OpenAI has it: of {"type": "text", "text"}
            with suppress(TypeError, LookupError):
                content = "\n".join(part["text"] for part in content)
        kind = type(content).__name__  # the content is not quoted: it does not belong in a log
        expect(isinstance(content, str), f"the {role} message is a {kind}, not text")
        for tag in tags:
            expect(tag not in content, f"the {role} message contains the reserved tag {tag}")
        yield role, content


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping],
    chat_format: str | None = None,
    date_string: str | None = None,
) -> list[int]:
    """Messages {"role", "content"} -> ids, those of transformers with `"legacy": false`.

    `chat_format`: a name of CHAT_FORMATS (None: the tokenizer's own). `date_string`: the date in
    Llama 3.1's system message (None: the template's own, the same every day). Raises ValueError for
    roles out of order and for tags in a message, which could impersonate another role.
    """
    row, tag_ids, reserved = find_chat_format(tokenizer, chat_format)
    turns = [*check_messages(messages, reserved)]
    if turns[0][0] != "system" and row.default_system is not None:
        turns.insert(0, ("system", row.default_system))
    if turns[0][0] == "system" and row.system_in is not None:
        (_, system), *turns = turns
        asked = row.system.replace("{}", system) + turns[row.system_in][1]
        turns[row.system_in] = ("user", asked)
    cue = row.form("assistant").partition("{")[0].rstrip(" ")
    form = row.start + "".join(row.form(role) for role, _ in turns) + cue
    contents = iter([t.strip() if "{-}" in row.form(role) else t for role, t in turns])
    named = re.search(r'date_string = "([\w ]{1,40})"', tokenizer.chat_template)
    date = date_string or (named[1] if named else "26 Jul 2024")
    expect(re.fullmatch(r"[\w ,./-]{1,40}", date), f"date_string is {date[:40]!r}, not a date")
    form = form.replace("{date}", date)
    token_ids = {"<s>": tokenizer.bos_id, "</s>": tokenizer.eos_id, **tag_ids}
    ids: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, token_ids))})", form):
        if part in token_ids:
            ids.append(token_ids[part])
        else:  # all that is between two tokens is encoded together
            text = re.sub(r"\{-?\}", lambda mark: next(contents), part)
            ids += tokenizer.encode(text, bos=False, first=not ids)
    expect(min(ids) >= 0, f"the vocabulary has no BOS or EOS token; {row.name} needs it")
    return ids


# --------------------------------------------------------------------------------------------------
# 13. Sampling

SAMPLING_LIMITS = {  # what its numbers may be
    "temperature": (0, sys.float_info.max), "top_k": (0, math.inf), "top_p": (0, 1),
    "min_p": (0, 1), "repetition_penalty": (0.01, 100), "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100), "seed": (0, 2**63 - 1),
}  # fmt: skip
PENALTY_WINDOW = 64  # the penalties count so many tokens, those of the prompt too, as llama.cpp
LIKELIEST = 512  # tokens that are sorted first, the others only if a draw may need them


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn; the command line and the server have the same defaults.

    The order is logit_bias, penalties, logits_processor, temperature, top_k, top_p, min_p. Raises
    ValueError for values out of range.
    """

    temperature: float = 0.8  # the logits are divided by it; 0 is greedy
    top_k: int = 0  # only the k likeliest; 0: all
    top_p: float = 0.95  # the fewest likeliest that have this probability (arXiv:1904.09751)
    min_p: float = 0.0  # only those with this part of the highest probability (arXiv:2407.01082)
    repetition_penalty: float = 1.0  # divides logits of recent tokens, or multiplies negative ones
    presence_penalty: float = 0.0  # subtracted from the logits of recent tokens
    frequency_penalty: float = 0.0  # the same, once for each time that they occur
    logit_bias: Mapping[int, float] | None = None  # added to the logits of these ids
    seed: int | None = None  # None: a random one
    logits_processor: Callable[[list[int], Tensor], Tensor] | None = None  # of ids, logits (V,)

    def __post_init__(self) -> None:
        for name, (low, high) in SAMPLING_LIMITS.items():
            value, default = getattr(self, name), getattr(Sampling, name)
            kinds = (int, float) if isinstance(default, float) else (int,)
            fits = (type(value) in kinds and low <= value <= high) or value is default is None
            expect(fits, f"{name} is {value!r}; must be {low} to {high:g}")
        for item, bias in (self.logit_bias or {}).items():
            finite = type(bias) in (int, float) and abs(bias) <= sys.float_info.max
            fits = type(item) is int and (finite or bias == -math.inf)
            expect(fits, f"logit_bias has {item!r}: {bias!r}; must be id: number")

    def adjust(self, logits: Tensor, ids: Sequence[int]) -> Tensor:
        """logits (V,) of what follows `ids`, with bias, penalties and logits_processor applied."""
        logits, penalty = logits.float().clone(), self.repetition_penalty
        for item, bias in (self.logit_bias or {}).items():
            V = len(logits)
            expect(0 <= item < V, f"logit_bias has the id {item}; must be below {V}")
            logits[item] += bias
        counts = Counter(i for i in ids[-PENALTY_WINDOW:] if i < len(logits))
        if counts:
            places, times = torch.tensor([[*counts], [*counts.values()]], device=logits.device)
            seen = logits[places]
            seen = torch.where(seen > 0, seen / penalty, seen * penalty)  # arXiv:1909.05858
            logits[places] = seen - times * self.frequency_penalty - self.presence_penalty
        if self.logits_processor:
            shape, logits = logits.shape, self.logits_processor(list(ids), logits)
            fits = isinstance(logits, Tensor) and logits.shape == shape
            expect(fits, f"logits_processor must return logits {tuple(shape)}")
        return logits


def sample(
    logits: Tensor,
    sampling: Sampling = Sampling(),
    ids: Sequence = (),
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Tensor:
    """logits (..., V) -> ids (...), -1 where the logits are not finite.

    `ids`: what comes before; for logits (B, V) a list of B lists. `generator`: one, or a list of
    one per row (default: a new one with sampling.seed, else torch's). ValueError if no token can be
    drawn.
    """
    V, shape = logits.shape[-1], logits.shape[:-1]
    finite = (logits * 0).sum(-1) == 0
    penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    if penalties != (1, 0, 0) or sampling.logit_bias or sampling.logits_processor:
        rows, texts = logits.reshape(-1, V), [ids] if logits.dim() == 1 else ids
        expect(len(rows) == len(texts), "penalties need `ids`: what comes before each row")
        logits = torch.stack([*map(sampling.adjust, rows, texts)]).view(*shape, V)
        some = logits.amax(-1).isfinite() | ~finite
        expect(some.all(), "logit_bias or logits_processor leaves no token that can be drawn")
    if sampling.temperature == 0:
        return logits.argmax(-1).where(finite, -1)
    # Weights relative to the likeliest token's, which is 1: no temperature can overflow them.
    logits = logits.float() - logits.amax(-1, keepdim=True)
    weights = (logits / max(sampling.temperature, 1e-6)).exp()  # (..., V)
    if generator is None and sampling.seed is not None:
        generator = torch.Generator().manual_seed(sampling.seed)
    if isinstance(generator, Sequence):
        u = torch.cat([torch.rand(1, generator=g, dtype=torch.float32) for g in generator])
    else:
        u = torch.rand(shape, generator=generator, dtype=torch.float32)
    # The inverse of the cumulative distribution at u, on the CPU, so that a seed gives the same on
    # every device. Only the likeliest n tokens are sorted, if no other could change the draw.
    k, top_p, total = min(sampling.top_k or V, V), sampling.top_p, weights.sum(-1, keepdim=True)
    filtered = k < V or top_p < 1 or sampling.min_p > 0
    every = torch.arange(V, device=weights.device).expand_as(weights)
    first = max(LIKELIEST, sampling.top_k + 1)
    for n in (first, 16 * first, V):
        places = weights.topk(n).indices.sort(-1).values if n < V else every
        values, order = weights.gather(-1, places).cpu().sort(dim=-1, descending=True, stable=True)
        sums = values.cumsum(-1, dtype=torch.float64)
        whole = sums[..., k - 1 : k] if k < V else total.cpu().double()
        kept = (values > 0) & (values >= sampling.min_p)
        kept &= (sums - values < top_p * whole) | (top_p == 1)
        last = (kept[..., :k].sum(-1, keepdim=True) - 1).clamp(min=0)
        mass = sums.gather(-1, last) if filtered else whole
        place = torch.searchsorted(sums, u[..., None] * mass, right=True).minimum(last)
        end = last if filtered else place
        if (values.gather(-1, end) > values[..., -1:]).all():
            break
    place = order.gather(-1, place).to(places.device)
    return places.gather(-1, place).squeeze(-1).where(finite, -1)


# --------------------------------------------------------------------------------------------------
# 14. Generation

PREFILL_CHUNK = 512  # prompt tokens per forward pass: bounds the memory for activations and masks
SCORE_CHUNK = 128  # the same where the logits of all positions are needed

Item = TypeVar("Item")


def prefill_chunk(device: torch.device) -> int:
    """Prompt tokens per forward pass: more on a GPU, where each pass dequantises whole matrices."""
    return PREFILL_CHUNK if device.type == "cpu" else 4 * PREFILL_CHUNK


class Report:
    """A generation's record so far. Its lists have an item for each row."""

    def __init__(self, model: Llama, prompts: list[list[int]], prompt_tokens: int) -> None:
        self.model = weakref.ref(model)
        self.texts = prompts  # and all ids that were drawn, with the one that stops
        self.new_ids: list[list[int]] = [[] for _ in prompts]  # without it
        self.stop_reasons = ["" for _ in prompts]  # "" while it goes on
        self.prompt_tokens = prompt_tokens  # that were read: a cache may hold the others
        self.seconds: list[float] = []  # of each step, the prompt in the first; the caller's not
        self.drafted = 0  # new tokens that took no pass of their own
        self.passes = 0  # of the cache, as this generation has left it


class Stream(Iterator[Item]):
    """An iterator over a generation, with its `report`, which is up to date after each item."""

    def __init__(self, items: Iterator[Item], report: Report) -> None:
        self.items, self.report = items, report

    def __next__(self) -> Item:
        return next(self.items)


def check_prompt(config: Config, ids: Sequence[int], limit: int) -> list[int]:
    """The ids as a list. Raises ValueError if there are none, too many, or some out of range."""
    V = config.vocab_size
    with naming("the prompt"):
        ids = [operator.index(i) for i in ids]  # of a tensor, too
    wrong = next((i for i in ids if not 0 <= i < V), None)
    expect(wrong is None, f"the prompt holds the token id {wrong}; expected ids below {V}")
    expect(ids, "the prompt is empty; expected one token at least")
    expect(len(ids) <= limit, f"the prompt has {len(ids)} tokens, the context holds {limit}")
    return ids


# The generation that used each cache last: those before it cannot go on, the next one need not
# read again what it has left there.
CACHE_USERS: weakref.WeakKeyDictionary[Cache, Report] = weakref.WeakKeyDictionary()


def held(model: Llama, cache: Cache, ids: Sequence[int]) -> int:
    """How many of the first ids, all but one at most, the last generation has left in a cache."""
    last = CACHE_USERS.get(cache)
    if last is None or last.model() is not model or last.passes != cache.passes:
        return 0
    pairs = zip(last.texts[0][: cache.pos], ids[:-1])
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def generate(
    model: Llama,
    ids: Sequence[int],
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    **options: Any,
) -> Stream[int]:
    """Continue a prompt: yields new ids, without the stop id. Takes generate_batch()'s options."""
    batch = generate_batch(model, [ids], sampling, max_new_tokens, **options)
    return Stream((token_id for (token_id,) in batch if token_id is not None), batch.report)


def generate_batch(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = Sampling(),
    max_new_tokens: int = 256,
    stop_ids: Collection[int] | None = None,
    vocab_size: int | None = None,
    cache: Cache | None = None,
    step: Callable[[Tensor, Cache], Tensor] | None = None,
) -> Stream[list[int | None]]:
    """Continue several prompts of any lengths: yields a list per step, None in finished rows.

    Row i draws with the seed sampling.seed + i. `stop_ids` end a row (default: EOS). Only ids below
    `vocab_size` are drawn (default: the tokenizer's). `cache`, for one prompt: the beginning that
    the last generation has left there is not read again, so that each turn of a conversation costs
    what is new (reset() it after changing weights or its tensors). `step(tokens, cache)` is called
    in place of the model, such as Drafts of part III. ValueError for what is out of range.
    """
    config, weight = model.config, model.norm.weight
    V: Any = vocab_size or getattr(model, "token_count", config.vocab_size)  # as load() found it
    expect(V > 0, f"vocab_size is {V}; must be 1 or more")
    ends = (config.eos_token_id, *config.stop_token_ids) if stop_ids is None else stop_ids
    limit = config.max_position_embeddings if cache is None else cache.max_seq_len
    texts = [check_prompt(config, prompt, limit) for prompt in prompts]
    expect(texts, "no prompts; expected at least one")
    expect(len(texts) == 1 or cache is None, f"{len(texts)} prompts; a cache continues one")
    expect(max_new_tokens >= 0, f"max_new_tokens is {max_new_tokens}; must be 0 or more")
    longest, shortest = max(map(len, texts)), min(map(len, texts))
    padding = torch.tensor([longest - len(text) for text in texts])
    prompt = torch.tensor([[0] * (longest - len(text)) + text for text in texts])  # (B, T)
    size = longest + min(max_new_tokens, limit - shortest)
    if cache is not None:
        cache.truncate(held(model, cache, texts[0]))
    elif padding.any():
        cache = PaddedCache(config, padding, size, weight.dtype, weight.device)
    else:
        cache = Cache(config, len(texts), size, weight.dtype, weight.device)
    report = CACHE_USERS[cache] = Report(model, texts, sum(map(len, texts)) - cache.pos)
    report.passes = cache.passes
    seed = torch.Generator().seed() if sampling.seed is None else sampling.seed  # a random one
    generators = [torch.Generator().manual_seed(seed + i) for i in range(len(texts))]

    def end(i: int) -> str:
        """Why row i ends here; "" if it does not."""
        if len(report.new_ids[i]) == max_new_tokens:
            return "max new tokens"
        return "context full" if len(texts[i]) == limit else ""

    def steps(tokens: Tensor) -> Iterator[list[int | None]]:  # tokens (B, T)
        while active := [i for i, reason in enumerate(report.stop_reasons) if not reason]:
            start = time.perf_counter()
            alone = CACHE_USERS[cache] is report and cache.passes == report.passes
            expect(alone, "the cache was used by another generation: this one cannot go on")
            for chunk in tokens.to(weight.device).split(prefill_chunk(weight.device), dim=1):
                logits = (step or model)(chunk, cache)
                report.passes = cache.passes
            logits, before = logits[active, :V], [texts[i] for i in active]
            drawn = sample(logits, sampling, before, [generators[i] for i in active]).tolist()
            if -1 in drawn:
                raise ValueError(f"the logits are not finite: {blame(model)}")
            report.seconds.append(time.perf_counter() - start)
            new: list[int | None] = [None] * len(texts)
            for i, token_id in zip(active, drawn):
                texts[i].append(token_id)
                if token_id in ends:
                    report.stop_reasons[i] = f"stop token {token_id}"
                    continue
                new[i] = token_id
                report.new_ids[i].append(token_id)
                report.stop_reasons[i] = end(i)
            if any(token_id is not None for token_id in new):
                yield new
            tokens = torch.tensor([[token_id or 0] for token_id in new])  # 0 in finished rows

    report.stop_reasons = [end(i) for i in range(len(texts))]
    return Stream(steps(prompt[:, cache.pos :]), report)


def split_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str, str]:
    """Split text into what can be shown, a possible beginning of a stop text, and the stop text."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    if found:
        place, stop = min(found)
        return text[:place], "", stop
    begins = (i for i in range(len(text)) if any(stop.startswith(text[i:]) for stop in stops))
    keep = next(begins, len(text))
    return text[:keep], text[keep:], ""


def stream_text(
    model: Llama,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    stop: str | Sequence[str] = (),
    chat_format: str | None = None,
    **options: Any,
) -> Stream[str]:
    """generate() as text that continues the prompt's, piece by piece, until a `stop` text comes.

    `chat_format`: treat it as an answer: strip leading white space, stop at the format's tags.
    """
    config, stop = model.config, ((stop,) if isinstance(stop, str) else tuple(stop))
    for text in stop:
        expect(text and isinstance(text, str), f"stop is {stop}; must be texts that are not empty")
    if chat_format is not None:
        _, tag_ids, tags = find_chat_format(tokenizer, chat_format)
        ends = (config.eos_token_id, *config.stop_token_ids, tokenizer.eos_id)
        options["stop_ids"] = {*options.get("stop_ids", ends), *tag_ids.values()}
        stop += tuple(tags)
    tokens = generate(model, ids, **{"vocab_size": tokenizer.vocab_size, **options})
    decoder = StreamDecoder(tokenizer, first=not tokenizer.decode(ids))

    def pieces() -> Iterator[str]:
        strip, held_back = chat_format is not None, ""
        for token_id in itertools.chain(tokens, [None]):
            new = decoder.flush() if token_id is None else decoder.decode(token_id)
            text, held_back, found = split_at_stop(held_back + new, stop)
            if found:
                tokens.report.stop_reasons[0] = f"stop text {found!r}"
            elif token_id is None:  # no stop text can follow
                text += held_back
            if strip:
                text = text.lstrip()
                strip = not text
            if text:
                yield text
            if found:
                return

    return Stream(pieces(), tokens.report)


@torch.no_grad()
def score(model: Llama, ids: Sequence[int]) -> Tensor:
    """T ids -> log-probability of each id given those before it, float32 (T - 1,).

    Raises ValueError for ids that generate() refuses.
    """
    config, weight = model.config, model.norm.weight
    ids = check_prompt(config, ids, config.max_position_embeddings)
    tokens = torch.tensor([ids], device=weight.device)  # (1, T)
    cache = Cache(config, 1, len(ids), weight.dtype, weight.device)
    logprobs = torch.empty(len(ids) - 1, dtype=torch.float32)
    for start in range(0, len(ids) - 1, SCORE_CHUNK):
        chunk = tokens[:, start : start + SCORE_CHUNK + 1]
        logits = model(chunk[:, :-1], cache, all_positions=True)[0]  # (t, V)
        logprobs[start : cache.pos] = -F.cross_entropy(logits, chunk[0, 1:], reduction="none")
    return logprobs


# ==================================================================================================
# Part III: Faster and larger. Delete it freely, and kernels/ with it
# ==================================================================================================

import datetime
import importlib.util
import signal
import warnings

from torch import distributed

__all__ += ["accelerate", "Drafts"]

# --------------------------------------------------------------------------------------------------
# 15. CPU kernels

KERNELS = Path(__file__).resolve().parent / "kernels"
KERNELS_VERSION = 3  # of the interface between kernels/cpu.cpp and this file
TYPE_IDS = {  # ggml's numbers, by which cpu.cpp knows the types
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}


@dataclass
class Kernels:
    """kernels/cpu.cpp as a library, or the reason why there is none."""

    library: Any = None  # its functions raise MemoryError or RuntimeError
    problem: str = ""
    compile_seconds: float = 0.0  # 0 if it was compiled before
    few_rows: int = 0  # up to here a row's result has the bits that it has alone


@functools.cache
def kernels() -> Kernels:
    """Compile kernels/cpu.cpp once per machine and open it. It runs on torch's own threads."""
    path = KERNELS / "build.py"
    if not path.is_file():
        return Kernels(problem=f"{path} is missing; the folder belongs beside llama2.py")
    spec: Any = importlib.util.spec_from_file_location("llama2_kernels_build", path)
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return Kernels(**build.load(KERNELS_VERSION))


def accelerate(model: Llama, exact: bool = True) -> Llama:
    """Make a model faster by changing the classes of its modules; returns the model.

    On a CPU, quantised layers then run by kernels/cpu.cpp, if it compiles: see kernels(). `exact`
    keeps activations in float32 (1e-6 relative per layer); else products of quantised matrices
    round them to 16-bit integers with a scale per group (6e-5). On CUDA, torch.compile makes the
    steps of one token.
    """
    device = model.norm.weight.device.type
    if device == "cuda" and importlib.util.find_spec("triton"):
        change_classes(model, {QuantizedLinear: CompiledLinear, Block: CompiledBlock})
    if device == "cpu" and kernels().library:
        change_classes(model, {QuantizedLinear: NativeLinear, Block: NativeBlock})
        for module in model.modules():
            if type(module) is NativeLinear:
                module.exact = exact
        blocks = [block for block in model.layers if type(block) is NativeBlock]
        if not exact and len(blocks) == len(model.layers) and all(b.matrices() for b in blocks):
            model.cache_dtype = torch.float16  # type: ignore[assignment]
    return model


def change_classes(model: nn.Module, kinds: dict[type[nn.Module], type[nn.Module]]) -> None:
    """Give modules of these classes others, which add methods: weights, hooks and names stay."""
    for module in model.modules():
        module.__class__ = kinds.get(type(module), type(module))


def address(t: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Where C++ finds a tensor; 0 unless it is contiguous on a CPU, of this dtype and shape."""
    readable = t.is_cpu and t.dtype == dtype and t.shape == shape and t.is_contiguous()
    return t.data_ptr() if readable else 0


class NativeProduct(torch.autograd.Function):
    """x W^T by the kernels; its gradient with respect to x by plain torch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: Tensor, linear: "NativeLinear") -> Tensor:
        """x (..., in) float32 and contiguous -> (..., out) float32."""
        ctx.save_for_backward(blocks)
        ctx.ggml_type = linear.ggml_type
        N, K = linear.out_features, linear.in_features
        y = x.new_empty(*x.shape[:-1], N)
        kernels().library.linear(
            TYPE_IDS[linear.ggml_type],
            not linear.exact,
            blocks.data_ptr(),
            x.data_ptr(),
            y.data_ptr(),
            x.numel() // K,
            N,
            K,
        )
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The gradient of y (..., out) -> that of x (..., in)."""
        (blocks,) = ctx.saved_tensors
        (dy,) = gradients
        rows = max(1, CHUNK // dy.shape[-1])
        pairs = zip(dy.split(rows, -1), blocks.split(rows))
        dx = sum(part @ dequantize(some, ctx.ggml_type) for part, some in pairs)
        return dx, None, None


class NativeLinear(QuantizedLinear):
    """QuantizedLinear by the kernels; other devices, dtypes and layouts by plain torch."""

    exact: bool

    def address(self, N: int, K: int) -> int:
        """Where C++ finds the blocks of W (N, K); 0 if it cannot read them."""
        block, block_bytes, *_ = GGML_TYPES[self.ggml_type]
        if (self.out_features, self.in_features) != (N, K) or K % 32:
            return 0
        return address(self.blocks, torch.uint8, (N, K // block * block_bytes))

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out) of x's dtype."""
        if torch.compiler.is_compiling() or x.dtype not in DENSE_NAMES or not kernels().library:
            return super().forward(x)
        x32 = x.float().contiguous()
        N, K = self.out_features, self.in_features
        if not address(x32, torch.float32, (*x.shape[:-1], K)) or not self.address(N, K):
            return super().forward(x)
        return NativeProduct.apply(x32, self.blocks, self).to(x.dtype)


def is_unchanged(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a module is just of this class: without hooks, or a forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    return type(module) is kind and not hooks and "forward" not in vars(module)


class NativeBlock(Block):
    """Block by one call of the kernels for each pass; what they cannot do, by plain torch."""

    def matrices(self) -> list[Any]:
        """From q_proj to down_proj; none if parts of the Block were replaced or have hooks."""
        attention, mlp = self.self_attn, self.mlp
        if not is_unchanged(attention, CausalSelfAttention) or not is_unchanged(mlp, MLP):
            return []
        norms = (self.input_layernorm, self.post_attention_layernorm)
        if not all(is_unchanged(norm, RMSNorm) for norm in norms):
            return []
        matrices = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
        matrices += [mlp.gate_proj, mlp.up_proj, mlp.down_proj]
        if not all(is_unchanged(matrix, NativeLinear) for matrix in matrices):
            return []
        return matrices if len({matrix.exact for matrix in matrices}) == 1 else []

    def pack(self, C: int, kv_size: int, head_dim: int) -> bytes:
        """struct Layer of kernels/cpu.cpp; empty if the kernels cannot run this Block."""
        matrices = self.matrices()
        if not matrices:
            return b""
        q, k, v, o, gate, up, down = matrices
        norms = (self.input_layernorm, self.post_attention_layernorm)
        q_size, inner = q.out_features, gate.out_features
        addresses = [
            q.address(q_size, C),
            k.address(kv_size, C),
            v.address(kv_size, C),
            o.address(C, q_size),
            gate.address(inner, C),
            up.address(inner, C),
            down.address(C, inner),
            *(address(norm.weight, torch.float32, (C,)) for norm in norms),
        ]
        if not all(addresses) or q_size % kv_size or head_dim != self.self_attn.head_dim:
            return b""
        types = [TYPE_IDS[matrix.ggml_type] for matrix in matrices]
        eps = [norm.eps for norm in norms]
        sizes = (C, q_size, kv_size, head_dim, inner)
        return struct.pack("16q2d6q", *addresses, *types, *eps, *sizes, not q.exact)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        y = None
        plain = torch.is_grad_enabled() or torch.compiler.is_compiling()
        if not plain and type(cache) is Cache and kernels().library:
            y = self.by_kernels(x, cos, sin, mask, cache)
        return super().forward(x, cos, sin, mask, cache) if y is None else y

    def by_kernels(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache
    ) -> Tensor | None:
        """forward() in one call; None, with nothing stored, where the kernels do not apply."""
        B, T, C = x.shape
        L, _, G, room, D = cache.k.shape
        layer = self.pack(C, G * D, D)
        i, pos, dtype = self.self_attn.layer, cache.pos, cache.k.dtype
        if not layer or D % 16 or dtype not in (torch.float32, torch.float16):
            return None
        if not 0 <= i < L or not 0 <= pos <= room - T:
            return None
        masks = [None if m is None else m.data_ptr() for m in (mask, cache.mask(T))]
        if masks[0] != masks[1]:  # they know the cache's own alone
            return None
        y = torch.empty_like(x)
        addresses = [
            address(x, torch.float32, (B, T, C)),
            address(y, torch.float32, (B, T, C)),
            address(cos, torch.float32, (T, D // 2)),
            address(sin, torch.float32, (T, D // 2)),
            address(cache.k, dtype, (L, B, G, room, D)),
            address(cache.v, dtype, (L, B, G, room, D)),
        ]
        if not all(addresses):
            return None
        half = dtype == torch.float16
        kernels().library.run_layer(layer, *addresses, half, i, B, T, pos, room)
        return y


# --------------------------------------------------------------------------------------------------
# 16. Compiled steps
#
# For a GPU: torch.compile makes one graph of a Block, for steps of one token, which serves all
# Blocks. It has never run on a GPU; the tests compile it for a CPU.


@functools.cache
def compiled(function: Callable) -> Callable:
    """A function by torch.compile, which takes seconds when it is called first."""
    # By default Inductor writes what took many operations to memory: here that would be all of W.
    options: Any = {"realize_reads_threshold": 64, "realize_opcount_threshold": 1000}
    return torch.compile(function, dynamic=True, options=options)


def multiply_row(x: Tensor, blocks: Tensor, ggml_type: str) -> Tensor:
    """One row x (..., in) times W^T, summed as W is unpacked: compiled, W is never in memory."""
    # Views of another size keep x from being computed anew for each row of W.
    x32 = x.float().flatten().view(torch.int16).view(torch.float32)
    y = (dequantize(blocks, ggml_type) * x32).sum(-1)
    return y.to(x.dtype).view(*x.shape[:-1], -1)


class CompiledLinear(QuantizedLinear):
    """QuantizedLinear for a GPU: one row is multiplied as W is unpacked."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out) of x's dtype."""
        if x.numel() != self.in_features or torch.is_grad_enabled():
            return super().forward(x)
        inside = torch.compiler.is_compiling()  # of a Block, which is compiled as a whole
        multiply = multiply_row if inside else compiled(multiply_row)
        return multiply(x, self.blocks, self.ggml_type)


class LayerCache:
    """One layer of a Cache with a slot for the next token, in tensors alone: S is a dimension."""

    def __init__(self, cache: Cache, layer: int) -> None:
        S = cache.slots(1).stop
        self.k = cache.k[layer, :, :, :S]  # (B, G, S, D)
        self.v = cache.v[layer, :, :, :S]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """As Cache.update(), for one token."""
        self.k[:, :, -1:] = k
        self.v[:, :, -1:] = v
        return self.k.type_as(k), self.v.type_as(v)


class CompiledBlock(Block):
    """Block whose steps of one token are compiled."""

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Any
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        is_step = x.shape[1] == 1 and type(cache) in (Cache, PaddedCache)
        if not is_step or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().forward(x, cos, sin, mask, cache)
        layer_cache = LayerCache(cache, self.self_attn.layer)
        return compiled(Block.forward)(self, x, cos, sin, mask, layer_cache)


# --------------------------------------------------------------------------------------------------
# 17. Several devices


class Ranks:
    """The processes that torchrun started, one per device."""

    def __init__(self) -> None:
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        # A process that waits for the others runs no Python: signals end it at once.
        handlers = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGINT, signal.SIGTERM)}
        # In a chat, the others wait for rank 0's reader: patience.
        distributed.init_process_group(backend, timeout=datetime.timedelta(days=30))
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()

    def gather(self, value: Any) -> list[Any]:
        """What each process has as `value`, by rank."""
        values = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def close(self) -> None:
        """Leave the group: its threads could otherwise abort the process at exit."""
        distributed.destroy_process_group()


def rank_part(checkpoint: Checkpoint, rank: int, count: int) -> Checkpoint:
    """One of `count` ranks' part of every matrix (Megatron-LM, arXiv:1909.08053, section 3).

    Attention is divided by key/value heads, the MLP by its width: rows of the first matrices, the
    same columns of the last. ValueError unless heads and blocks can be divided by them.
    """
    config, weights = checkpoint.config, dict(checkpoint.weights)
    kv_heads, axes = config.num_key_value_heads, {last_name(row[0]): row[3] for row in NAMES}
    counts = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    expect(count in counts, f"{count} ranks for {kv_heads} key/value heads; expected {counts}")
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    for name, weight in list(weights.items()):
        if (axis := axes[last_name(name)]) is None:
            continue
        size, block = weight.shape[axis], weight.block[0] if axis == 1 else 1
        unit = block  # the smallest part that a rank can have; larger are:
        if ".self_attn." in name:  # a key/value head with its query heads
            unit = size // kv_heads
        elif ".mlp." in name:  # the columns of one block of down_proj
            unit = weights[re.sub("[a-z]+_proj", "down_proj", name)].block[0]
        start, stop = (size // unit * r // count * unit for r in (rank, rank + 1))
        problem = f"{size} cannot be divided by {count} ranks into units of {unit}"
        fits = start < stop and start % block == stop % block == 0
        expect(fits, f"{name} ({weight.ggml_type}): {problem}")
        weights[name] = weight.part(axis, start, stop)
    config = replace(config, num_key_value_heads=kv_heads // count, tie_word_embeddings=False)
    return replace(checkpoint, config=config, weights=weights)


def connect_ranks(model: Llama, ranks: Ranks) -> None:
    """Join a model of rank_part() with those of the other ranks: all give rank 0's logits.

    They come on the CPU, where all draw the same ids from them, if they are given the same seed.
    """

    def share(module: nn.Module, args: Any, logits: Tensor) -> Tensor:
        logits = logits.cpu()
        distributed.broadcast(logits, 0)
        return logits

    def add(module: nn.Module, args: Any, y: Tensor) -> Tensor:
        distributed.all_reduce(y)
        return y

    def concatenate(start: int, size: int, module: nn.Module, args: Any, y: Tensor) -> Tensor:
        zeros = start, size - start - y.shape[-1]  # on both sides; adding them is exact
        return add(module, args, F.pad(y, zeros))

    for name, module in model.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            module.register_forward_hook(add)
    model.register_forward_hook(share)
    token = torch.zeros(1, 1, dtype=torch.int64, device=model.norm.weight.device)
    for module, x in ((model.embed_tokens, token), (model.lm_head, model.norm.weight[None])):
        widths = ranks.gather(module(x).shape[-1])
        start = sum(widths[: ranks.rank])
        module.register_forward_hook(partial(concatenate, start, sum(widths)))


# --------------------------------------------------------------------------------------------------
# 18. Drafts (github.com/apoorvumang/prompt-lookup-decoding)

REPEATED = 3  # so many ids as before: what followed them then is the guess


def prompt_lookup(ids: Tensor, most: int) -> Tensor:
    """Up to `most` ids that followed the last few ids (n,) where these came before, most recently."""
    if len(ids) <= REPEATED:
        return ids[:0]
    runs = ids[:-1].unfold(0, REPEATED, 1)  # all but the last few themselves
    places = (runs == ids[-REPEATED:]).all(1).nonzero()
    if not len(places):
        return ids[:0]
    end = int(places[-1]) + REPEATED
    return ids[end : end + most]


class Drafts:
    """A `step` for generate(): reads guesses with the last id. The same text in less time.

    Up to kernels().few_rows ids in one pass have the logits that each has alone, to the last bit.
    They are kept: when the id that is drawn is the guess, its logits are there. The cache holds
    guesses, too, until what is read next replaces them. For one row, and Blocks that the kernels
    run; others are read as without drafts.
    """

    def __init__(self, model: Llama, most: int = 3) -> None:
        self.model = model
        self.most = most  # guesses in a pass
        self.read = torch.empty(0, dtype=torch.int64)  # the ids up to the end of the last pass
        self.logits = torch.empty(0, 0)  # after the last of them (rows, V)
        self.accepted = 0  # guesses that were right

    def __call__(self, texts: Tensor, cache: Cache) -> Tensor:
        """texts (B, n) -> logits (B, V) after the last ids; the cache then holds them."""
        n = texts.shape[1]
        held = cache.common_prefix(texts)
        row = n - 1 - (len(self.read) - len(self.logits))
        if held == n and row >= 0 and torch.equal(self.read[:n], texts[0]):
            self.accepted += row > 0
            return self.logits[row, None]
        alike = {type(block) for block in self.model.layers} == {NativeBlock}
        alike = alike and type(self.model.lm_head) is NativeLinear and type(cache) is Cache
        if len(texts) > 1 or held < n - 1 or not alike:
            return read_texts(self.model, texts, cache)
        room = min(self.most, cache.max_seq_len - n, kernels().few_rows - 1)
        guess = prompt_lookup(texts[0], room)
        self.read = torch.cat((texts[0], guess))
        cache.truncate(n - 1)
        self.logits = self.model(self.read[None, n - 1 :], cache, all_positions=True)[0]
        return self.logits[:1]


# ==================================================================================================
# Part IV: Command line
# ==================================================================================================

import argparse
import ctypes
import gc
import signal
import warnings
from typing import NoReturn

# --------------------------------------------------------------------------------------------------
# 19. Command line

DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "fairytales.gguf"
CHAT_CONTEXT = 8192  # the context of a chat without --context: a file may claim any number


def shared(read: Callable[[], Any], ranks: Ranks | None) -> Any:
    """Rank 0's read(), broadcast to all ranks; without ranks, read()."""
    if ranks is None:
        return read()
    return ranks.gather(read() if ranks.rank == 0 else None)[0]


class Parser(argparse.ArgumentParser):
    """Raises ValueError for a wrong command line instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse_args(argv: Sequence[str] | None, ranks: Ranks | None = None) -> argparse.Namespace:
    """The command line. Raises ValueError for a wrong one."""
    parser = Parser(prog="llama2.py", description="Run Llama 2 and 3 models.")

    def decode(argument: str) -> str:
        return os.fsencode(argument).decode("utf-8", "replace")  # the shell passes any bytes

    add, prompt = parser.add_argument, parser.add_mutually_exclusive_group().add_argument
    text: Any = {"metavar": "TEXT", "type": decode}
    add("--model", metavar="PATH", type=Path, default=DEFAULT_MODEL, help=".gguf or directory")
    prompt("--prompt", **text, help="text to continue (default: stdin)")
    prompt("--prompt-file", metavar="FILE", type=Path, help="the prompt, read from a file")
    add("--chat", action="store_true", help="chat; the prompt is the first question")
    add("--system", **text, help="with --chat: the system prompt")
    add("--chat-format", choices=CHAT_FORMAT_NAMES, help="default: as its chat template says")
    add("--max-new-tokens", metavar="N", type=int, help="default: 256, with --chat no limit")
    parser.set_defaults(**vars(Sampling()))
    number: Any = {"metavar": "X", "type": float}
    add("--temperature", **number, help="default: %(default)s; 0 is greedy")
    add("--top-k", metavar="K", type=int, help="only the K likeliest tokens (default: 0, all)")
    add("--top-p", **number, help="only the likeliest that have this probability in all (1: all)")
    add("--min-p", **number, help="only tokens with this fraction of the highest probability (0)")
    add("--repetition-penalty", **number, help="divides logits of recent tokens (1: off)")
    add("--presence-penalty", **number, help="taken off logits of recent tokens (0: off)")
    add("--frequency-penalty", **number, help="the same for each time they occur (0: off)")
    add("--seed", metavar="N", type=int, default=0, help="default: 0; -1: a random one")
    add("--stop", **text, action="append", default=[], help="stop before this text; repeatable")
    add("--no-echo", action="store_true", help="do not repeat the prompt")
    add("--context", metavar="N", type=int, help="most tokens in all (default: the model's)")
    device = "default: CUDA, else MPS for dense weights, else the CPU"
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help=device)
    dtype = "of the activations (default on a CPU: float32, rounded to 16 bits in large models)"
    add("--dtype", choices=("auto", *DTYPES), default="auto", help=dtype)
    add("--threads", metavar="N", type=int, help="CPU threads (default: torch's choice)")
    add("--draft", metavar="N", type=int, help="guess up to N repeated tokens (default: 3; 0: off)")
    add("--compile", action=argparse.BooleanOptionalAction, help="default: for models above 64 MiB")
    add("--save", metavar="OUT.gguf", type=Path, help="write the model as one GGUF file and exit")
    add("--type", choices=SAVE_TYPES, help="with --save: type of the matrices (default: unchanged)")
    add("--force", action="store_true", help="with --save: replace an existing file")
    add("--info", action="store_true", help="describe the model and exit")
    add("--quiet", action="store_true", help="print only errors to stderr")
    version = f"llama2.py {__version__}, torch {torch.__version__}"
    add("--version", action="version", version=version)
    args = parser.parse_args(argv)
    for option, needed in (("system", "chat"), ("chat_format", "chat"), ("type", "save")):
        alone = getattr(args, option) is not None and not getattr(args, needed)
        expect(not alone, f"--{option.replace('_', '-')} needs --{needed}")
    cores = os.cpu_count() or 1
    fits = args.threads is None or 1 <= args.threads <= cores
    expect(fits, f"--threads {args.threads}; expected 1 to {cores}")
    expect((args.draft or 0) >= 0, f"--draft {args.draft}; expected 0 or more")
    most = args.max_new_tokens
    expect((most or 0) >= 0, f"--max-new-tokens {most}; expected 0 or more")
    expect("" not in args.stop, "--stop must not be empty")
    if args.seed == -1:
        args.seed = shared(torch.seed, ranks) % 2**31
    args.sampling = Sampling(**{name: getattr(args, name) for name in vars(Sampling())})
    missing = f"the bundled model {DEFAULT_MODEL} is missing; pass --model PATH"
    expect(args.model != DEFAULT_MODEL or args.model.exists(), missing)
    if args.prompt_file is not None:
        args.prompt = args.prompt_file.read_bytes().decode("utf-8", "replace")
    elif args.prompt is None and not args.chat and not args.info and not args.save:
        if sys.stdin.isatty():
            parser.print_usage(sys.stderr)
            sys.exit(2)
        args.prompt = shared(sys.stdin.buffer.read, ranks).decode("utf-8", "replace")
    return args


def note(text: str) -> None:
    """Print a line to stderr, if it can be written to."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def fail(message: object, program: str = "llama2.py") -> int:
    """Print an error as one line; returns 2, the exit status for wrong input."""
    note(f"{program}: error: {printable(str(message) or type(message).__name__)}")
    return 2


def weight_bytes(model: Llama) -> int:
    """Bytes of weights read per generated token: all but the embedding (one row of it)."""
    modules = (model.layers, model.norm, model.lm_head)
    return sum(t.nbytes for m in modules for t in (*m.parameters(), *m.buffers()))


def peak_memory(device: torch.device) -> int:
    """The most bytes of memory in use: of the device for CUDA, else of the process. 0: unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows does not tell
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def contents(checkpoint: Checkpoint) -> str:
    """How many tensors a checkpoint has of each type, and their size."""
    types = Counter(weight.ggml_type for weight in checkpoint.weights.values())
    size = sum(weight.nbytes for weight in checkpoint.weights.values())
    return f"{', '.join(f'{n} {name}' for name, n in types.most_common())}; {show_bytes(size)}"


def describe_checkpoint(checkpoint: Checkpoint, plan: dict[str, int], context: int) -> str:
    """What --info prints; `plan` is that of memory_plan()."""
    config = vars(checkpoint.config)
    parameters = sum(math.prod(weight.shape) for weight in checkpoint.weights.values())
    rows = {
        "format": checkpoint.format,
        "parameters": f"{parameters:,}",
        **{k: f"{v:.7g}" if isinstance(v, float) else v for k, v in config.items()},  # float32
        "chat format": describe_chat_format(checkpoint.chat_template),
        "tensors": contents(checkpoint),
        f"memory at {context} tokens": show_plan(plan),
    }
    return "".join(f"{name:<25} {value}\n" for name, value in rows.items())


def describe(report: Report, model: Llama, load_seconds: float, seed: int) -> str:
    """The line on stderr at the end of a run."""
    parts = [f"load {load_seconds:.2f} s"]
    found: Any = part_3("kernels")
    if found and found.cache_info().currsize and (seconds := found().compile_seconds):
        parts[0] += f" ({seconds:.1f} s of it to compile kernels, once)"
    parts.append(f"prompt {report.prompt_tokens} tokens")
    if report.seconds:
        parts[-1] += f", {report.prompt_tokens / report.seconds[0]:.1f} tokens/s"
    parts.append(f"generated {len(report.new_ids[0])} tokens")
    if steps := report.seconds[1:]:  # a token each: all but the first, with the one that stops
        seconds, read = sum(steps), (len(steps) - report.drafted) * weight_bytes(model)
        parts[-1] += f", {len(steps) / seconds:.1f} tokens/s, {read / seconds / 1e9:.1f} GB/s"
        if report.drafted:
            parts.append(f"{report.drafted} of them drafted")
    if peak := peak_memory(model.norm.weight.device):
        parts.append(f"peak memory {peak / 1e9:.2f} GB")
    return "; ".join([*parts, f"seed {seed}", f"stopped: {', '.join(report.stop_reasons)}"])


write = partial(print, end="", flush=True)  # to stdout, as it is and at once


CHAT_KEYS = "Ctrl-C stops an answer, /exit or Ctrl-D ends, /reset forgets all, /help says more"
CHAT_HELP = f"{CHAT_KEYS}; pasted lines are one question; a space before a slash sends it as text"


def read_question() -> str | None:
    """The next question from standard input, edited if it is typed; None at the end of input."""
    if not sys.stdin.isatty():
        line = sys.stdin.buffer.readline().decode("utf-8", "replace")
        return line.rstrip("\r\n") if line else None
    try:
        if sys.stdout.isatty():
            return input("> ")  # by readline
        print("> ", end="", file=sys.stderr, flush=True)  # stdout is for answers alone
        return input()
    except (EOFError, KeyboardInterrupt) as end:
        note("")  # what comes next begins on a line of its own
        return "" if isinstance(end, KeyboardInterrupt) else None


def show(stream: Stream[str]) -> str:
    """Write a text as it comes, and return it; Ctrl-C ends it early."""
    shown, controls = "", re.compile(r"(?!\r\n)[\0-\x08\x0b-\x1f\x7f-\x9f]")
    try:
        for text in stream:
            shown += text
            if sys.stdout.isatty():  # which control characters from a model could steer
                text = controls.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
            write(text)
    except KeyboardInterrupt:
        stream.report.stop_reasons = ["interrupted"]
    write("\n")
    return shown


def chat(
    model: Llama, tokenizer: Tokenizer, options: dict, args: argparse.Namespace, ranks: Any
) -> Report | None:
    """A conversation; when the context is full, turns are dropped until half of it is free."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows edits lines itself; a pasted text is one question
            __import__("readline").parse_and_bind("set enable-bracketed-paste on")
    say = (lambda text: None) if args.quiet else note
    complain = (lambda problem: None) if ranks and ranks.rank else fail
    name, size = args.model.resolve().name, options["cache"].max_seq_len
    form = args.chat_format or describe_chat_format(tokenizer.chat_template)
    say(f"{name}, format {form}, {size} tokens; {CHAT_KEYS}")
    system = [{"role": "system", "content": args.system}] if args.system else []
    messages: list[dict[str, str]] = []
    report, first = None, [args.prompt] if args.prompt is not None else []
    for question in itertools.chain(first, iter(partial(shared, read_question, ranks), None)):
        command = question.split()[0] if question.startswith("/") else ""
        if command == "/exit":
            break
        messages = [] if command == "/reset" else messages
        if command in ("/help", "/reset"):
            say(CHAT_HELP if command == "/help" else "the conversation is forgotten")
        elif command:
            complain(f"unknown command {command}; {CHAT_HELP}")
        if command or not question.strip():
            continue
        turns = [*messages, {"role": "user", "content": question}]
        limit = size - min(options["max_new_tokens"], size // 4)  # minus an answer
        try:
            ids = encode_chat(tokenizer, system + turns, options["chat_format"])
            while len(ids) > limit and len(turns) > 1:
                del turns[:2]
                limit = size // 2
                ids = encode_chat(tokenizer, system + turns, options["chat_format"])
            stream = stream_text(model, tokenizer, ids, **options)
        except ValueError as error:
            complain(error)
            continue
        if dropped := (len(messages) + 1 - len(turns)) // 2:
            say(f"context full: dropped the oldest {dropped} turn{'s' * (dropped > 1)}")
        report, answer = stream.report, show(stream)
        if report.stop_reasons[0] in ("context full", "max new tokens"):
            say(f"{report.stop_reasons[0]}: the answer ends here")
        messages = [*turns, {"role": "assistant", "content": answer}]
    return report


def build(
    args: argparse.Namespace,
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    exact: bool,
) -> Llama:
    """The model, accelerated if it is large or --compile says so; warnings become notes."""
    gc.freeze()  # garbage collection skips torch's objects: 2 % of generation
    with suppress(AttributeError, OSError, TypeError):  # glibc keeps freed memory: 10 % of a prompt
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(-3, 2**25)  # M_MMAP_THRESHOLD
        mallopt(-1, 2**28)  # M_TRIM_THRESHOLD
    accelerate = part_3("accelerate")
    with warnings.catch_warnings(record=True) as problems:
        warnings.simplefilter("always")
        model = build_model(checkpoint, device, dtype, progress=not args.quiet)
        if is_large(checkpoint) or args.compile:
            if accelerate:
                accelerate(model, exact, compile=args.compile is not False)
            else:
                warnings.warn("quantised weights are slow without part III of llama2.py")
    for text in {str(problem.message): None for problem in problems if not args.quiet}:
        note(f"llama2.py: {text}")
    return model


def run(args: argparse.Namespace, ranks: Ranks | None) -> int:
    """Load the model and do what the command line says; returns the exit status."""
    start = time.perf_counter()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    checkpoint = open_checkpoint(args.model)
    if args.save is not None:
        if not ranks or ranks.rank == 0:
            allowed = args.force or not args.save.is_file()
            expect(allowed, f"{args.save} exists already; --force replaces it")
            save_gguf(checkpoint, args.save, args.type, progress=not args.quiet)
            if not args.quiet:
                note(f"wrote {args.save}: {contents(open_checkpoint(args.save))}")
        return 0
    device = choose_device(args.device, checkpoint)
    if ranks:
        checkpoint = rank_part(checkpoint, ranks.rank, ranks.count)
    checkpoint = checkpoint.allow_context(args.context)
    config, template = checkpoint.config, checkpoint.chat_template
    context = args.context or config.max_position_embeddings
    # Of ranks torch runs the attention: it would convert a cache of 16 bits for every token.
    native = args.compile is not False and not ranks
    dtype, cache_dtype, exact = choose_dtypes(args.dtype, device, checkpoint, native)
    plan = partial(memory_plan, checkpoint, dtype=dtype, cache_dtype=cache_dtype)
    if args.info:
        write(describe_checkpoint(checkpoint, plan(context), context))
        return 0

    tokenizer = checkpoint.tokenizer()
    if args.chat:
        chat_format = args.chat_format or recognise_chat_format(template)
        size = context if args.context else min(context, CHAT_CONTEXT)
        most = size if args.max_new_tokens is None else args.max_new_tokens
    else:
        chat_format, most = None, 256 if args.max_new_tokens is None else args.max_new_tokens
        ids = check_prompt(config, tokenizer.encode(args.prompt), context)
        size = min(context, len(ids) + max(most, 1))
    free = free_memory(device)
    check_memory(plan(size), size, device, min(ranks.gather(free)) if ranks else free)
    model = build(args, checkpoint, device, dtype, exact)
    if ranks:
        connect_ranks(model, ranks)
    load_seconds = time.perf_counter() - start

    options = {"sampling": args.sampling, "max_new_tokens": most, "stop": args.stop}
    options |= {"cache": Cache(config, 1, size, cache_dtype, device), "chat_format": chat_format}
    if drafts := part_3("Drafts"):
        options["step"] = drafts(model, most=3 if args.draft is None else args.draft)
        if args.draft and type(model.layers) is not NativeLayers and not args.quiet:
            note("llama2.py: no drafts: they need the kernels on a CPU")
    if args.chat:
        report = chat(model, tokenizer, options, args, ranks)
    else:
        if not args.no_echo:
            write(args.prompt)
        stream = stream_text(model, tokenizer, ids, **options)
        report = stream.report
        show(stream)
    if report and not args.quiet:
        note(describe(report, model, load_seconds, args.seed))
    return 130 if report and not args.chat and report.stop_reasons == ["interrupted"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    ranks, rank = None, 0
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ and (meet := part_3("Ranks")):
            ranks = meet()
            rank = ranks.rank
        if rank:
            sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")  # rank 0 alone prints
        args = parse_args(argv, ranks)
        args.quiet |= rank > 0
        status = run(args, ranks)
        if ranks:
            ranks.close()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `| head`: the reader has closed the pipe
        return 0
    except (ValueError, OSError, MemoryError, RuntimeError, ImportError) as error:
        # All ranks see a user's mistake: rank 0 alone reports it. RuntimeError is torch's (out of
        # memory, an unsupported operation): each rank reports its own.
        return fail(error) if rank == 0 or isinstance(error, RuntimeError) else 2
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:  # a full disk, a closed pipe: the interpreter would try again at exit
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, on_interrupt)
    for name in ("SIGTERM", "SIGHUP"):  # exit by an exception: unfinished files are cleaned up
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
