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
import math
import mmap
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # Ctrl-C while torch is imported, which takes seconds: no traceback
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch
import torch.nn.functional as F
from torch import Tensor, nn

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
    position, so that no caller can be off by one. `padding` (B,) says how many tokens at the left of
    each row are filler: prompts of different lengths are aligned at their ends. A full cache raises
    ValueError.
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
    dict must come through load(), which permutes them; load_state_dict() would take it and be wrong.
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
            for layer in self.layers:
                x = layer(x, cos, sin, mask, cache)
            if not all_positions:
                x = x[:, -1]  # (B, C): the rest of the largest matrix product would be thrown away
            logits = self.lm_head(
                self.norm(x)
            ).float()  # float32 island 4 of 4: what is sampled from

        if cache is not None:
            cache.advance(T)
        return logits


# ==================================================================================================
# End of the model. Above: torch and math only, to be read beside the paper and cut out whole.
# Below: what it takes to run it on real files, for real users.
# ==================================================================================================


# --------------------------------------------------------------------------------------------------
# 9. Quantised weights


def dequantize(blocks: Tensor, kind: str) -> Tensor:
    """uint8 blocks (..., bytes) of one ggml type -> float32 (..., elements)."""
    import gguf

    array = gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(array)


class QuantizedLinear(nn.Module):
    """x @ W.T with W kept as the file's blocks: uint8 (rows, bytes per row) of one ggml type."""

    def __init__(self, blocks: Tensor, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("blocks", blocks)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, dequantize(self.blocks, self.kind).to(x.dtype))


class QuantizedEmbedding(nn.Module):
    """Rows of W, dequantised when looked up; W is the file's blocks as in QuantizedLinear."""

    def __init__(self, blocks: Tensor, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind, self.dtype = kind, dtype
        self.register_buffer("blocks", blocks)

    def forward(self, tokens: Tensor) -> Tensor:
        rows = self.blocks[tokens.flatten()]
        return dequantize(rows, self.kind).view(*tokens.shape, -1).to(self.dtype)


# --------------------------------------------------------------------------------------------------
# 10. Checkpoints

# The one name table, and the reader's dictionary. Every name ends in ".weight".
NAMES = (  # this file and Hugging Face (there behind "model."), GGUF, Meta
    ("embed_tokens", "token_embd", "tok_embeddings"),
    ("layers.{}.input_layernorm", "blk.{}.attn_norm", "layers.{}.attention_norm"),
    ("layers.{}.self_attn.q_proj", "blk.{}.attn_q", "layers.{}.attention.wq"),
    ("layers.{}.self_attn.k_proj", "blk.{}.attn_k", "layers.{}.attention.wk"),
    ("layers.{}.self_attn.v_proj", "blk.{}.attn_v", "layers.{}.attention.wv"),
    ("layers.{}.self_attn.o_proj", "blk.{}.attn_output", "layers.{}.attention.wo"),
    ("layers.{}.post_attention_layernorm", "blk.{}.ffn_norm", "layers.{}.ffn_norm"),
    ("layers.{}.mlp.gate_proj", "blk.{}.ffn_gate", "layers.{}.feed_forward.w1"),
    ("layers.{}.mlp.up_proj", "blk.{}.ffn_up", "layers.{}.feed_forward.w3"),
    ("layers.{}.mlp.down_proj", "blk.{}.ffn_down", "layers.{}.feed_forward.w2"),
    ("norm", "output_norm", "norm"),
    ("lm_head", "output", "output"),
)


@dataclass
class Weight:
    """One tensor as it lies in the file: uint8 (rows, bytes per row), mapped, unread."""

    kind: str  # its ggml type
    shape: tuple[int, ...]  # in torch's order, (out, in)
    data: Tensor

    def dense(self, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """The weight as a tensor of its own in memory, converted a few rows at a time."""
        out = torch.empty(self.shape, dtype=dtype, device=device)
        rows, flat = self.data, out.view(len(self.data), -1)
        step = max(1, 2**20 // flat.shape[1])  # temporaries that stay in the processor's cache
        for i in range(0, len(rows), step):
            flat[i : i + step] = dequantize(rows[i : i + step], self.kind)
        return out


@dataclass
class Checkpoint:
    """What a model file or directory holds, its tensors still unread."""

    form: str  # such as "GGUF version 3"
    config: Config
    weights: dict[str, Weight]  # by the names of this file
    tokenizer: Callable[[], Tokenizer]
    chat: bool  # whether it claims to be tuned for conversation


def ggml_type(number: int, item: str) -> tuple[str, int, int]:
    """A ggml type's name, its elements and its bytes per block."""
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(number)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        dequantize(torch.zeros(1, size, dtype=torch.uint8), kind.name)  # not all can be read
    except (ValueError, NotImplementedError):
        raise ValueError(f"{item} has the unknown type {number}") from None
    return kind.name, block, size


GGUF_SCALARS = dict(enumerate("BbHhIif?--Qqd"))  # value type -> struct letter
GGUF_STRING, GGUF_ARRAY = 8, 9


class GGUF:
    """A GGUF file's metadata and tensors (ggml's gguf.md); all is checked before anything is used.

    gguf.GGUFReader gives the same but takes seconds for a vocabulary of 32000. Tensors are views of
    the mapped file. Raises FileNotFoundError, and ValueError that names the file and the item.
    """

    def __init__(self, path: str | Path) -> None:
        self.path, self.offset = Path(path), 0
        with self.path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size < 24:
                raise ValueError(f"{self.path}: {self.size} bytes are too few for a GGUF file")
            self.bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        magic, self.version = self.unpack("4sI", "header")
        if magic != b"GGUF":
            raise ValueError(f"{self.path}: starts with {magic!r}, not with b'GGUF'")
        if self.version not in (2, 3):
            known = "2 and 3, little-endian, are read"
            raise ValueError(f"{self.path}: GGUF version {self.version:#x}; {known}")
        tensor_count, key_count = self.unpack("QQ", "header")
        self.metadata: dict[str, Any] = {}
        for i in range(key_count):
            key = self.string(f"key {i} of {key_count}")
            if key in self.metadata:
                raise ValueError(f"{self.path}: the key {key!r} stands twice")
            (kind,) = self.unpack("I", key)
            self.metadata[key] = self.value(kind, key)
        infos = [self.tensor_info(f"tensor {i} of {tensor_count}") for i in range(tensor_count)]
        align = self.get("general.alignment", int, 32)
        if not 0 < align <= 2**20 or align & (align - 1):
            raise ValueError(f"{self.path}: general.alignment is {align}, not a power of two")
        base = end = -(-self.offset // align) * align
        whole = torch.frombuffer(self.bytes, dtype=torch.uint8)
        self.tensors: dict[str, Weight] = {}
        for name, kind, shape, row_bytes, offset in sorted(infos, key=lambda info: info[-1]):
            size, start = math.prod(shape[:-1]) * row_bytes, base + offset
            if name in self.tensors:
                raise ValueError(f"{self.path}: the tensor {name!r} stands twice")
            if offset % align or start < end:
                raise ValueError(f"{self.path}: {name}: offset {offset} overlaps or is not aligned")
            end = start + size
            if end > self.size:
                raise ValueError(
                    f"{self.path}: {name} ends at byte {end}, the file at {self.size}: cut off?"
                )
            self.tensors[name] = Weight(kind, shape, whole[start:end].view(-1, row_bytes))

    def unpack(self, letters: str, item: str) -> tuple:
        """The next little-endian values, as struct's letters name them."""
        try:
            values = struct.unpack_from("<" + letters, self.bytes, self.offset)
        except struct.error:
            raise ValueError(f"{self.path}: the file ends inside {item}") from None
        self.offset += struct.calcsize("<" + letters)
        return values

    def string(self, item: str) -> str:
        """The next string: a length of 8 bytes and UTF-8."""
        (size,) = self.unpack("Q", item)
        end = self.offset + size
        if end > self.size:
            raise ValueError(
                f"{self.path}: {item} is {size} bytes long, beyond the end of the file"
            )
        text, self.offset = self.bytes[self.offset : end], end
        try:
            return text.decode()
        except UnicodeDecodeError:
            raise ValueError(f"{self.path}: {item} is not UTF-8: {text[:40]!r}") from None

    def value(self, kind: int, item: str) -> Any:
        """The next metadata value: a number, a string or a list of either."""
        if kind == GGUF_STRING:
            return self.string(item)
        if kind in GGUF_SCALARS and GGUF_SCALARS[kind] != "-":
            return self.unpack(GGUF_SCALARS[kind], item)[0]
        if kind != GGUF_ARRAY:
            raise ValueError(f"{self.path}: {item} has the unknown value type {kind}")
        kind, count = self.unpack("IQ", item)
        if kind == GGUF_STRING and count <= (self.size - self.offset) // 8:
            return [self.string(item) for _ in range(count)]
        letter = GGUF_SCALARS.get(kind, "-")
        if letter == "-" or count * struct.calcsize(letter) > self.size - self.offset:
            raise ValueError(f"{self.path}: {item} is an array of {count} values of type {kind}")
        return list(self.unpack(f"{count}{letter}", item))

    def tensor_info(self, item: str) -> tuple[str, str, tuple[int, ...], int, int]:
        """The next entry of the tensor table: name, type, shape, bytes per row, data offset."""
        name = self.string(item)
        (n_dims,) = self.unpack("I", name)
        if not 1 <= n_dims <= 4:
            raise ValueError(f"{self.path}: {name} has {n_dims} dimensions; 1 to 4 are possible")
        dims = self.unpack(f"{n_dims}Q", name)  # the fastest comes first
        kind, offset = self.unpack("IQ", name)
        type_name, block, block_bytes = ggml_type(kind, f"{self.path}: {name}")
        if dims[0] % block or not all(0 < n < 2**31 for n in dims):
            raise ValueError(f"{self.path}: {name} of type {type_name} has the sizes {list(dims)}")
        return name, type_name, dims[::-1], dims[0] // block * block_bytes, offset

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The metadata value of `key`, checked to be of `kind`; needed if it has no default."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ValueError(f"{self.path}: the key {key} is missing")
        if isinstance(value, (int, float) if kind is float else kind):
            return value
        raise ValueError(f"{self.path}: {key} is {str(value)[:40]!r}, not {kind.__name__}")


def gguf_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Llama-family GGUF file, or the first part of a split one; else ValueError."""
    gguf = GGUF(path)
    get, tensors = gguf.get, dict(gguf.tensors)
    parts = get("split.count", int, 1)
    if parts > 1:
        stem, is_first = re.subn(r"-00001-of-\d{5}\.gguf$", "", gguf.path.name)
        if get("split.no", int, 0) or not is_first:
            raise ValueError(
                f"{gguf.path}: one of {parts} parts; give NAME-00001-of-{parts:05}.gguf"
            )
        for i in range(2, parts + 1):
            part = GGUF(gguf.path.with_name(f"{stem}-{i:05}-of-{parts:05}.gguf"))
            if part.get("split.no", int) != i - 1 or part.tensors.keys() & tensors.keys():
                raise ValueError(f"{part.path}: not part {i} of {gguf.path}")
            tensors |= part.tensors

    fail = f"{gguf.path}: this is not a Llama 2 model: "
    architecture = get("general.architecture", str)
    if architecture != "llama" or get("general.type", str, "model") != "model":
        raise ValueError(
            f"{fail}architecture {architecture!r}, type {get('general.type', str, 'model')!r}"
        )
    if get("llama.expert_count", int, 0):
        raise ValueError(f"{fail}a mixture of {get('llama.expert_count', int)} experts")
    vocabulary = get("tokenizer.ggml.model", str)
    if vocabulary != "llama":
        raise ValueError(f"{fail}its vocabulary is {vocabulary!r}, not 'llama' (SentencePiece)")
    for kind, name in {weight.kind: name for name, weight in tensors.items()}.items():
        try:
            dequantize(tensors[name].data[:1], kind)
        except NotImplementedError:
            raise ValueError(f"{gguf.path}: {name} is of type {kind}, which is no weight") from None

    def count(key: str, default: int | None = None) -> int:
        value = gguf.metadata.get(key, default)  # some counts may be given for each layer
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, int):
            return value
        raise ValueError(f"{gguf.path}: {key} is {str(value)[:40]}; accepted is one number")

    hidden, heads = count("llama.embedding_length"), count("llama.attention.head_count")
    head_dim = hidden // max(heads, 1)
    for key in ("rope.dimension_count", "attention.key_length", "attention.value_length"):
        if count(f"llama.{key}", head_dim) != head_dim:
            found = count(f"llama.{key}")
            raise ValueError(f"{fail}llama.{key} is {found}, not the head size {head_dim}")
    scaling = get("llama.rope.scaling.type", str, "linear")
    if scaling not in ("none", "linear"):
        raise ValueError(f"{fail}RoPE scaling {scaling!r}; accepted are 'none' and 'linear'")
    factor = get("llama.rope.scaling.factor", float, get("llama.rope.scale_linear", float, 1.0))
    divisors = tensors.pop("rope_freqs.weight", None)
    if divisors:
        divisors = tuple(divisors.dense(torch.float32, "cpu").flatten().tolist())
    for name in [name for name in tensors if name.endswith(".attn_qkv.weight")]:
        fused = tensors.pop(name)  # the rows of q, k and v in one tensor
        kv_rows = (fused.shape[0] - hidden) // 2
        if len(fused.shape) != 2 or kv_rows < 1 or hidden < 1 or fused.shape[0] % 2 != hidden % 2:
            raise ValueError(f"{gguf.path}: {name} is {list(fused.shape)}; hidden size {hidden}")
        for part, rows in zip("qkv", fused.data.split([hidden, kv_rows, kv_rows]), strict=True):
            weight = Weight(fused.kind, (len(rows), fused.shape[1]), rows)
            tensors[name.replace("attn_qkv", f"attn_{part}")] = weight
    embedding = tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError(f"{gguf.path}: the tensor token_embd.weight is missing")
    if len(get("tokenizer.ggml.tokens", list)) != embedding.shape[0]:
        tokens = len(gguf.metadata["tokenizer.ggml.tokens"])
        raise ValueError(f"{gguf.path}: {tokens} tokens but {embedding.shape[0]} embedding rows")
    config = Config(
        hidden_size=hidden,
        intermediate_size=count("llama.feed_forward_length"),
        num_hidden_layers=count("llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=count("llama.attention.head_count_kv", heads),
        vocab_size=embedding.shape[0],
        max_position_embeddings=count("llama.context_length"),
        rms_norm_eps=get("llama.attention.layer_norm_rms_epsilon", float),
        rope_theta=get("llama.rope.freq_base", float, 10000.0),
        rope_scaling_factor=1.0 if scaling == "none" else factor or 1.0,
        rope_freq_factors=divisors,
        tie_word_embeddings="output.weight" not in tensors,
        bos_token_id=get("tokenizer.ggml.bos_token_id", int, 1),
        eos_token_id=get("tokenizer.ggml.eos_token_id", int, 2),
    )
    return Checkpoint(
        form=f"GGUF version {gguf.version}" + f", {parts} parts" * (parts > 1),
        config=config,
        weights=rename(tensors, 1, config, path),
        tokenizer=lambda: Tokenizer.from_gguf(gguf),
        chat="tokenizer.chat_template" in gguf.metadata,
    )


def rename(
    tensors: dict[str, Weight], form: int, config: Config, path: str | Path
) -> dict[str, Weight]:
    """Translate names by column `form` of NAMES. ValueError unless all names and shapes fit."""
    if config.num_hidden_layers > len(tensors):  # before anything that size is built
        raise ValueError(f"{path}: {config.num_hidden_layers} layers but {len(tensors)} tensors")
    with torch.device("meta"):  # all layers are like the first
        parameters = dict(Llama(replace(config, num_hidden_layers=1)).named_parameters())
    theirs, wanted = {}, {}
    for row in NAMES:
        parameter = parameters.get(row[0].format(0) + ".weight")
        for layer in range(config.num_hidden_layers) if "{}" in row[0] else (0,):
            if parameter is not None:
                ours = row[0].format(layer) + ".weight"
                theirs[row[form].format(layer) + ".weight"] = ours
                wanted[ours] = tuple(parameter.shape)
    missing, unknown = theirs.keys() - tensors.keys(), tensors.keys() - theirs.keys()
    if missing or unknown:
        problem, names = ("missing", missing) if missing else ("unknown", unknown)
        listed = ", ".join(sorted(names)[:5]) + ", ..." * (len(names) > 5)
        raise ValueError(f"{path}: {len(names)} tensors are {problem}: {listed}")
    for name, ours in theirs.items():
        if tensors[name].shape != wanted[ours]:
            shape = list(tensors[name].shape)
            raise ValueError(f"{path}: {name} is {shape}; needed is {list(wanted[ours])}")
    return {ours: tensors[name] for name, ours in theirs.items()}


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Recognise a model file or directory and check its header; no tensor is read yet."""
    path = Path(path)
    try:
        if path.is_file():
            return gguf_checkpoint(path)
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such file or directory")
        raise ValueError("not a file; accepted is a .gguf file")
    except ValueError as error:  # every message names the file, and none repeats pages of it
        text = str(error) if str(path) in str(error) else f"{path}: {error}"
        raise ValueError(text[:400]) from None


def build_model(
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    progress: bool = False,
) -> Llama:
    """Read the weights, one after the other, into a model. `dtype` is that of the activations.

    Dense weights are converted to it, quantised ones keep their blocks. With float32, dense 16-bit
    ones keep their 16 bits too: half the memory, and the same numbers.
    """
    with torch.device("meta"):
        model = Llama(checkpoint.config)
    items = checkpoint.weights.items()
    if progress:
        from tqdm import tqdm

        items = tqdm(items, "loading", unit="tensor", leave=False, file=sys.stderr)
    for name, weight in items:
        parent, _, attribute = name.removesuffix(".weight").rpartition(".")
        module = model.get_submodule(f"{parent}.{attribute}".lstrip("."))
        keep = weight.kind not in ("F32", "F16", "BF16")
        if keep and isinstance(module, nn.Linear):
            module = QuantizedLinear(weight.data, weight.kind)
        elif keep and isinstance(module, nn.Embedding):
            module = QuantizedEmbedding(weight.data, weight.kind, dtype)
        else:
            module.weight = nn.Parameter(weight.dense(dtype, device), requires_grad=False)
        setattr(model.get_submodule(parent), attribute, module)
    if checkpoint.config.tie_word_embeddings:
        embedding = checkpoint.weights["embed_tokens.weight"]
        if isinstance(model.embed_tokens, QuantizedEmbedding):
            model.lm_head = QuantizedLinear(embedding.data, embedding.kind)
        else:
            model.lm_head.weight = model.embed_tokens.weight
    return model.eval()


def load(
    path: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> tuple[Llama, Tokenizer]:
    """A .gguf file -> model and tokenizer. ValueError or FileNotFoundError says what is wrong."""
    checkpoint = open_checkpoint(path)
    return build_model(checkpoint, device, dtype or torch.float32), checkpoint.tokenizer()


# --------------------------------------------------------------------------------------------------
# 11. Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces


def sentencepiece_model(gguf: GGUF) -> bytes:
    """A GGUF file's vocabulary as SentencePiece's ModelProto, serialised (sentencepiece_model.proto).

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
        except RuntimeError as error:
            problem = f"not a SentencePiece model: {error}"
            raise ValueError(f"{source}: {problem}"[:400]) from None
        self.bos_id, self.eos_id = self.sp.bos_id(), self.sp.eos_id()
        self.add_bos = add_bos  # whether a prompt begins with BOS: so in every Llama 2

    @classmethod
    def from_file(cls, path: str | Path) -> Tokenizer:
        """Read SentencePiece's tokenizer.model."""
        return cls(Path(path).read_bytes(), path)

    @classmethod
    def from_gguf(cls, gguf: GGUF | str | Path) -> Tokenizer:
        """Rebuild SentencePiece's model from the vocabulary inside a GGUF file."""
        gguf = gguf if isinstance(gguf, GGUF) else GGUF(gguf)
        add_bos = gguf.get("tokenizer.ggml.add_bos_token", bool, True)
        return cls(sentencepiece_model(gguf), gguf.path, add_bos)

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
        if kind == CONTROL:
            return ""
        text = "" if kind == BYTE else self.flush()  # bytes before another piece stay incomplete
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
    drop = (before >= top_p * probs.sum(-1, keepdim=True)) & (top_p < 1)
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

    On CUDA the compiled step is captured as a graph: no launches, no Python, no wait per token. There
    is one per window, which doubles as the cache fills, so that empty slots are hardly read.
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
        """Compile the step for one window. What it stores while that runs is written again later."""
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
    report: Report | None = None,
) -> Iterator[int] | Iterator[list[int | None]]:
    """Continue a prompt: yields new ids one by one, without the one that stops it (default: EOS).

    A list of prompts yields a list per step, None in rows that have finished; row i draws from seed
    + i, so that it gets what it would get alone. `cache`: the prompt continues what is stored there.
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
    report.__init__(sum(lengths), new_ids=[[] for _ in rows], stop_reasons=[""] * len(rows))
    stop_ids = (config.eos_token_id,) if stop_ids is None else stop_ids
    generators = [torch.Generator() for _ in rows]
    for i, generator in enumerate(generators):
        generator.seed() if seed is None else generator.manual_seed(seed + i)

    def steps() -> Iterator[list[int | None]]:
        nonlocal tokens
        reasons = report.stop_reasons
        while True:
            start = time.perf_counter()
            for chunk in tokens.to(weight.device).split(PREFILL_CHUNK, dim=1):
                logits = model(chunk, cache)  # (B, V)
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
# 15. Command line

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
    add("--model", metavar="PATH", type=Path, default=DEFAULT_MODEL, help=".gguf file")
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
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of the activations")
    add("--threads", metavar="N", type=int, help="CPU threads (default: torch's choice)")
    add("--info", action="store_true", help="describe the model and exit")
    add("--quiet", action="store_true", help="nothing on stderr but errors")
    add("--version", action="version", version=f"llama2.py {VERSION}, torch {torch.__version__}")
    args = parser.parse_args(argv)
    if args.system is not None and not args.chat:
        parser.error("--system needs --chat")
    if "" in args.stop:
        parser.error("--stop needs a text that is not empty")
    if args.prompt_file is not None:
        args.prompt = args.prompt_file.read_bytes().decode("utf-8", "replace")
    elif args.prompt is None and not args.chat and not args.info:
        if sys.stdin.isatty():
            parser.print_usage(sys.stderr)
            sys.exit(2)
        args.prompt = sys.stdin.buffer.read().decode("utf-8", "replace")
    return args


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def note(text: str) -> None:
    """A line on stderr; nothing if that cannot be written."""
    with suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def fail(message: object) -> int:
    """One line on stderr; 2, the exit status for what the user or a file got wrong."""
    note("llama2.py: error: " + " ".join((str(message) or type(message).__name__).split()))
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
    return torch.device(name)


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
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe(report: Report, model: Llama, load_seconds: float, seed: int) -> str:
    """The line on stderr at the end of a run."""
    device = model.norm.weight.device
    parts = [f"load {load_seconds:.2f} s"]
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
            line = sys.stdin.buffer.readline().decode("utf-8", "replace")
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
    seed = args.seed if args.seed != -1 else torch.seed() % 2**31
    sampling = (args.temperature, args.top_k, args.top_p, args.min_p)
    check_options(args.max_new_tokens, *sampling, seed)  # before seconds are spent on loading
    if args.threads is not None:
        if not 1 <= args.threads <= (os.cpu_count() or 1):
            raise ValueError(f"--threads {args.threads}; accepted is 1 to {os.cpu_count()}")
        torch.set_num_threads(args.threads)
    device = choose_device(args.device)
    if args.model == DEFAULT_MODEL and not args.model.exists():
        raise FileNotFoundError(f"the bundled model {args.model} is missing; pass --model PATH")
    checkpoint = open_checkpoint(args.model)
    config = checkpoint.config
    context = config.max_position_embeddings if args.context is None else args.context
    if not 1 <= context <= config.max_position_embeddings:
        limit = config.max_position_embeddings
        raise ValueError(f"--context {context}; accepted is 1 to {limit}, the model's context")
    if args.info:
        return print(checkpoint.form, config, sep="\n")
    dtype = DTYPES.get(args.dtype, torch.float32 if device.type == "cpu" else torch.bfloat16)
    model = build_model(checkpoint, device, dtype, progress=not args.quiet and sys.stderr.isatty())
    tokenizer = checkpoint.tokenizer()
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
    }
    if args.chat:
        if not checkpoint.chat and not args.quiet:
            note("note: this model does not say that it was tuned for chat")
        size = context if args.context else min(context, CHAT_CONTEXT)
        options["cache"] = Cache(config, 1, size, dtype, device)
        return chat(model, tokenizer, args, options)
    ids = tokenizer.encode(args.prompt, bos=tokenizer.add_bos)
    if len(ids) > context:
        raise ValueError(f"the prompt has {len(ids)} tokens, the context holds {context}")
    size = min(context, len(ids) + max(args.max_new_tokens, 1))
    options["cache"] = Cache(config, 1, size, dtype, device)
    if not args.no_echo:
        write(args.prompt)
    try:
        for text in stream_text(
            model, tokenizer, ids, first=not args.prompt, stop=args.stop, **options
        ):
            write(text)
        write("\n")
    except KeyboardInterrupt:
        report.stop_reasons = ["interrupted"]
        note("")  # the terminal shows ^C at the end of the text
        raise
    finally:
        if not args.quiet and all(report.stop_reasons):
            note(describe(report, model, load_seconds, seed))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    try:
        run(parse_args(argv))
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
