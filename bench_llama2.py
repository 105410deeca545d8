"""The benchmark of llama2.py: what is fast, what is not, and where the time goes, on this machine.

    python bench_llama2.py                                   # the suite: each layer by itself
    python bench_llama2.py --claims                          # five claims, each with a verdict
    python bench_llama2.py --breakdown                       # shares of a forward pass
    python bench_llama2.py --model FILE.gguf                 # a whole model: load, prompt, tokens
    python bench_llama2.py --config 7b --type Q4_0           # the same without a file
    python bench_llama2.py --table FILES...                  # beside llama.cpp's llama-bench
    python bench_llama2.py --perplexity TEXT --model FILE.gguf

How it measures: medians and inter-quartile ranges by torch.utils.benchmark; what is compared takes
turns (A B A B), so that a machine which slows down slows both; the first call, which may compile, is
never counted; the device is waited for. Only ratios taken in one run mean anything on a shared machine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.benchmark import Timer

import llama2

BASELINES = Path(__file__).resolve().parent / ".benchmarks"

# --------------------------------------------------------------------------------------------------
# 1. Timing


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one sample per block of calls or per round."""

    samples: tuple[float, ...]

    def quantile(self, q: float) -> float:
        """The sample below which the part q of all samples lies."""
        return torch.tensor(self.samples, dtype=torch.float64).quantile(q).item()

    @property
    def median(self) -> float:
        """The middle sample, which one interruption does not move as it moves the mean."""
        return self.quantile(0.5)

    @property
    def iqr(self) -> float:
        """The inter-quartile range: half of all samples lie within it."""
        return self.quantile(0.75) - self.quantile(0.25)

    def to_dict(self) -> dict:
        """What is written as JSON."""
        return {"median": self.median, "iqr": self.iqr, "samples": len(self.samples)}


def synchronize() -> None:
    """Wait until the device has done what it was given."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def seconds(function: Callable[[], object]) -> float:
    """Wall-clock time of one call."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def timer(function: Callable[[], object]) -> Timer:
    """torch's Timer, which waits for the device, with the threads that are set (its default is 1)."""
    return Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())


def measure(function: Callable[[], object], limit: float = 1.0) -> Timing:
    """Repeat until the range is below 5 % of the median or `limit` seconds are over; 3 times at least."""
    once = seconds(function)
    once = min(once, seconds(function)) if once > limit else once  # the first call may compile
    found = timer(function).adaptive_autorange(
        0.05, min_run_time=limit / 10, max_run_time=max(limit, 2.1 * once)
    )
    return Timing(tuple(found.times))


def interleave(
    functions: Mapping[str, Callable[[], object]], rounds: int = 5, limit: float = 0.05
) -> dict[str, Timing]:
    """Measure the functions in turns; each sample is the median of one turn."""
    samples = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            samples[name].append(timer(function).blocked_autorange(min_run_time=limit).median)
    return {name: Timing(tuple(values)) for name, values in samples.items()}


def ratio(a: Timing, b: Timing) -> Timing:
    """a / b, round by round."""
    return Timing(tuple(x / y for x, y in zip(a.samples, b.samples, strict=True)))


def show(value: float) -> str:
    """Seconds as a person reads them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def bandwidth(device: torch.device, size: int = 2**29) -> float:
    """Bytes per second that memory delivers: the best of reading and of copying, here and now."""
    a = torch.ones(size // 4, device=device)
    b = torch.empty_like(a)
    ways = {"read": (a.sum, a.nbytes), "copy": (lambda: b.copy_(a), 2 * a.nbytes)}
    return max(count / measure(way, 0.5).median for way, count in ways.values())


def note(text: str) -> None:
    """Progress, on one line of a terminal that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print Markdown that also reads well in a terminal: first column left, the others right."""
    rows = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    note("")
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("|", " | ".join(cells), "|", flush=True)


# --------------------------------------------------------------------------------------------------
# 2. Models without a file

TINY = llama2.Config(
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=512,
    max_position_embeddings=1024,
)
TINYLLAMA = llama2.Config(
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=22,
    num_key_value_heads=4,
    max_position_embeddings=2048,
)
CONFIGS = {
    "tiny": TINY,
    "1b": TINYLLAMA,  # the shape of TinyLlama 1.1B
    "7b": llama2.Config.llama2_7b(),
    "13b": llama2.Config.llama2_13b(),
    "70b": llama2.Config.llama2_70b(),
}

# Where the float16 scales stand in a block of each quantised type: any other bytes are valid numbers.
SCALES = {
    "Q4_0": slice(0, 2),
    "Q4_1": slice(0, 4),
    "Q5_0": slice(0, 2),
    "Q5_1": slice(0, 4),
    "Q8_0": slice(0, 2),
    "Q2_K": slice(80, 84),
    "Q3_K": slice(108, 110),
    "Q4_K": slice(0, 4),
    "Q5_K": slice(0, 4),
    "Q6_K": slice(208, 210),
}
DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
MIXES = {"Q4_K_M": "Q4_K", "Q5_K_M": "Q5_K"}
TYPES = (*DENSE, *SCALES, *MIXES)


def random_weight(kind: str, shape: tuple[int, ...], seed: int = 0) -> llama2.Weight:
    """A weight of random blocks with one small scale. Real memory, but few different rows: filled fast."""
    import gguf

    if len(shape) == 1:  # norms stay near 1 and in float32
        return llama2.Weight("F32", shape, torch.ones(shape).view(torch.uint8)[None])
    generator = torch.Generator().manual_seed(seed)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    sample = (min(shape[0], 2**20 // shape[1] + 1), shape[1] // elements, size)
    if kind in DENSE:
        rows = torch.randn(sample[:2], generator=generator) * shape[1] ** -0.5
        blocks = rows.to(DENSE[kind]).view(torch.uint8)
    else:
        if shape[1] % elements:
            raise ValueError(f"rows of {shape[1]} weights are not made of {kind}'s {elements}")
        blocks = torch.randint(256, sample, dtype=torch.uint8, generator=generator)
        scale = torch.full((2,), 2.0**-14, dtype=torch.float16).view(torch.uint8)
        where = SCALES[kind]
        blocks[..., where] = scale[: where.stop - where.start]
    blocks = blocks.view(sample[0], -1)
    data = blocks.repeat(-(-shape[0] // sample[0]), 1)[: shape[0]]
    return llama2.Weight(kind, shape, data)


class RandomWeights(Mapping):
    """The weights of a checkpoint, each made when it is asked for: no two are held at once."""

    def __init__(self, config: llama2.Config, kind: str) -> None:
        self.config, self.kind = config, kind
        with torch.device("meta"):
            named = llama2.Llama(config).named_parameters()
            self.shapes = {name: tuple(p.shape) for name, p in named}

    def type_of(self, name: str) -> str:
        """The type that llama.cpp's llama-quantize gives to a tensor of a file of this type."""
        if self.kind in DENSE or self.kind == "Q8_0":
            return self.kind
        if name == "lm_head.weight":
            return "Q6_K"
        if self.kind in MIXES and ("v_proj" in name or "down_proj" in name):
            layer, L = int(name.split(".")[1]), self.config.num_hidden_layers
            if layer < L // 8 or layer >= 7 * L // 8 or (layer - L // 8) % 3 == 2:
                return "Q6_K"
        return MIXES.get(self.kind, self.kind)

    def __getitem__(self, name: str) -> llama2.Weight:
        return random_weight(self.type_of(name), self.shapes[name], len(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


def random_checkpoint(config: llama2.Config, kind: str) -> llama2.Checkpoint:
    """A checkpoint of random weights that goes the way of a file's."""

    def no_tokenizer() -> llama2.Tokenizer:
        raise ValueError("a model without a file has no tokenizer; pass --model FILE")

    weights = RandomWeights(config, kind)
    return llama2.Checkpoint(f"random {kind}", config, weights, no_tokenizer, False)


# --------------------------------------------------------------------------------------------------
# 3. The suite: names and sizes of the benchmark that came before, and a few more


@dataclass
class Setting:
    """What a mode works with, from the command line."""

    args: argparse.Namespace
    device: torch.device
    dtype: torch.dtype

    def checkpoint(self, config: str = "7b", layers: int | None = None) -> llama2.Checkpoint:
        """--model, or else random weights of --config (or the mode's own), --layers and --type."""
        args = self.args
        if args.model is not None and args.config is None:
            return llama2.open_checkpoint(args.model)
        shape, layers = (
            CONFIGS[args.config or config],
            args.layers or (args.config is None and layers),
        )
        shape = replace(shape, num_hidden_layers=layers or shape.num_hidden_layers)
        kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
        return random_checkpoint(shape, args.type or kinds[self.dtype])

    def build(self, checkpoint: llama2.Checkpoint) -> llama2.Llama:
        """The model, with a progress bar at a terminal."""
        return llama2.build_model(checkpoint, self.device, self.dtype, progress=sys.stderr.isatty())

    def randn(self, *shape: int) -> Tensor:
        """Random activations."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def tokens(self, config: llama2.Config, B: int, T: int) -> Tensor:
        """Random token ids (B, T)."""
        return torch.randint(config.vocab_size, (B, T), device=self.device)

    def cache(self, config: llama2.Config, length: int, batch: int = 1) -> llama2.Cache:
        """An empty cache."""
        return llama2.Cache(config, batch, length, self.dtype, self.device)


# Each maker gets the setting, the model and the number T of tokens and returns the call to be timed.


def rope_forward(s: Setting, model: llama2.Llama, T: int) -> Callable[[], object]:
    """The rotation of queries and keys, as in one layer."""
    c = model.config
    q, k = (
        s.randn(1, T, c.num_attention_heads, c.head_dim),
        s.randn(1, T, c.num_key_value_heads, c.head_dim),
    )
    angles = s.cache(c, T).rope(T)
    return lambda: (llama2.apply_rotary_emb(q, *angles), llama2.apply_rotary_emb(k, *angles))


def qkv_projection(s: Setting, model: llama2.Llama, T: int) -> Callable[[], object]:
    """The three products before attention."""
    x, a = s.randn(1, T, model.config.hidden_size), model.layers[0].self_attn
    return lambda: (a.q_proj(x), a.k_proj(x), a.v_proj(x))


def attention_scores(s: Setting, model: llama2.Llama, T: int) -> Callable[[], object]:
    """q k^T / sqrt(D), all heads, written out."""
    c = model.config
    q, k = (s.randn(1, c.num_attention_heads, T, c.head_dim) for _ in range(2))
    return lambda: q @ k.transpose(-1, -2) * c.head_dim**-0.5


def causal_mask(s: Setting, model: llama2.Llama, T: int) -> Callable[[], object]:
    """Getting the mask and applying it to the scores of all heads: what they called the mask."""
    scores, cache = s.randn(1, model.config.num_attention_heads, T, T), s.cache(model.config, T)
    return lambda: scores.masked_fill(~cache.mask(T), -math.inf)


def full_attention(s: Setting, model: llama2.Llama, T: int) -> Callable[[], object]:
    """Scores, mask, softmax and the weighted sum of values, without the projections."""
    c = model.config
    q, k, v = (s.randn(1, c.num_attention_heads, T, c.head_dim) for _ in range(3))
    cache = s.cache(c, T)
    return lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask(T))


def part(name: str, s: Setting, model: llama2.Llama, T: int) -> Callable[[], object]:
    """A module of the first layer that needs nothing but x."""
    module, x = model.get_submodule(f"layers.0.{name}"), s.randn(1, T, model.config.hidden_size)
    return lambda: module(x)


def block(s: Setting, model: llama2.Llama, T: int) -> Callable[[], object]:
    """One whole layer behind an empty cache."""
    x, cache = s.randn(1, T, model.config.hidden_size), s.cache(model.config, T)
    return lambda: model.layers[0](x, *cache.rope(T), cache.mask(T), cache)


def forward(s: Setting, model: llama2.Llama, T: int, context: int = 0) -> Callable[[], Tensor]:
    """A pass of the whole model over T tokens behind `context` others; the same pass at each call."""
    cache, tokens = s.cache(model.config, context + T), s.tokens(model.config, 1, T)
    cache.k.normal_(), cache.v.normal_()
    cache.advance(context)

    def run() -> Tensor:
        cache.truncate(context)
        return model(tokens, cache)

    return run


def decode(s: Setting, model: llama2.Llama, T: int) -> Callable[[], object]:
    """One token behind T others."""
    return forward(s, model, 1, T)


SUITE = (
    ("rope_forward", rope_forward, (1, 8, 32, 128)),
    ("qkv_projection", qkv_projection, (1, 8, 32, 128)),
    ("attention_scores", attention_scores, (1, 8, 32, 128)),
    ("causal_mask", causal_mask, (8, 32, 128, 512)),
    ("full_attention", full_attention, (1, 8, 32, 128, 512)),
    ("rms_norm", partial(part, "input_layernorm"), (1, 128)),
    ("mlp", partial(part, "mlp"), (1, 128)),
    ("block", block, (1, 128)),
    ("prefill", forward, (32, 128, 512)),
    ("decode", decode, (128,)),
)

# The Candle CPU means that were published for the suite, in seconds.
PUBLISHED = {
    "rope_forward": {1: 62.6e-6, 8: 206.1e-6, 32: 467.8e-6, 128: 9.2e-3},
    "qkv_projection": {1: 19.1e-3, 8: 21.0e-3, 32: 50.8e-3, 128: 65.5e-3},
    "attention_scores": {1: 3.8e-6, 8: 44.8e-6, 32: 308.5e-6, 128: 8.5e-3},
    "causal_mask": {8: 9.9e-6, 32: 118.7e-6, 128: 2.1e-3, 512: 58.8e-3},
    "full_attention": {1: 11.5e-6, 8: 119.8e-6, 32: 1.07e-3},
}
PUBLISHED_CACHED_MASK = {8: 9.1e-6, 32: 117.4e-6, 128: 1.9e-3, 512: 55.0e-3}


def run_suite(s: Setting) -> dict:
    """Time each entry; compare with a baseline if one is named."""
    model = s.build(s.checkpoint("7b", layers=2))
    c, timings, rows = model.config, {}, []
    print(
        f"hidden {c.hidden_size}, {c.num_attention_heads} heads, prefill and decode through"
        f" {c.num_hidden_layers} layers and the head"
    )
    comparable = (c.hidden_size, c.num_attention_heads) == (4096, 32)
    for name, make, sizes in SUITE:
        for T in sizes:
            full = f"{name}/{T}"
            if s.args.filter not in full or T > c.max_position_embeddings:
                continue
            note(full)
            timings[full] = timing = measure(make(s, model, T), s.args.seconds)
            theirs = PUBLISHED.get(name, {}).get(T) if comparable else None
            row = [full, show(timing.median), show(timing.iqr), len(timing.samples)]
            rows.append(row + [show(theirs) if theirs else ""])
    if not rows:
        raise ValueError(f"--filter {s.args.filter!r} matches no benchmark")
    table(("benchmark", "median", "IQR", "samples", "Candle, published"), rows)
    if comparable:
        cached = ", ".join(f"{T}: {show(t)}" for T, t in PUBLISHED_CACHED_MASK.items())
        print(f"Candle's causal_mask after it was cached: {cached}.")
        print("Candle's means come from another machine: only shapes and ratios carry over.")
    result = {name: timing.to_dict() for name, timing in timings.items()}
    return {"suite": result, **baselines(s.args, result)}


# --------------------------------------------------------------------------------------------------
# 4. Baselines


def change(new: Mapping[str, float], old: Mapping[str, float]) -> tuple[float, float, str]:
    """How much longer the median is than before, that change's uncertainty (both parts of 1), a word.

    The uncertainty adds the relative inter-quartile ranges of both; below 3 % nothing is believed.
    """
    part = new["median"] / old["median"] - 1
    noise = math.hypot(new["iqr"] / new["median"], old["iqr"] / old["median"])
    noise = max(0.03, noise * new["median"] / old["median"])
    word = "within noise" if abs(part) <= noise else "regressed" if part > 0 else "improved"
    return part, noise, word


def baselines(args: argparse.Namespace, result: dict) -> dict:
    """Save the suite's result or compare it with a saved one."""
    out, file = {}, BASELINES / f"{args.baseline}.json"
    if args.baseline is not None:
        if not file.exists():
            names = ", ".join(sorted(f.stem for f in BASELINES.glob("*.json"))) or "none"
            raise ValueError(f"--baseline {args.baseline}: there is none; saved are: {names}")
        old = json.loads(file.read_text())
        both = {name: change(result[name], old[name]) for name in result if name in old}
        rows = [
            (name, f"{part:+.1%}", f"+-{noise:.1%}", word)
            for name, (part, noise, word) in both.items()
        ]
        table((f"against {args.baseline}", "change", "uncertainty", "verdict"), rows)
        out = {"baseline": {name: row for name, row in both.items()}}
        out["regressed"] = [name for name, row in both.items() if row[2] == "regressed"]
    if args.save_baseline is not None:
        file = BASELINES / f"{args.save_baseline}.json"
        BASELINES.mkdir(exist_ok=True)
        file.write_text(json.dumps(result, indent=1))
        print(f"saved {file}")
    return out


# --------------------------------------------------------------------------------------------------
# 5. Claims. Verdicts are functions of numbers; the naive variants are what each claim is held against.

MATTERS = 0.05  # below 5 % of the time nobody notices


def verdict(effects: Iterable[bool]) -> str:
    """confirmed if the claim holds in all cases, refuted if in none, else depends."""
    effects = list(effects)
    return "confirmed" if all(effects) else "depends" if any(effects) else "refuted"


def judge_mask(saved: Mapping[str, float]) -> tuple[str, str]:
    """`saved`: the part of a forward pass that a cached mask saves, per case."""
    cases = ", ".join(f"{part:.2%} {name}" for name, part in saved.items())
    return verdict(part >= MATTERS for part in saved.values()), f"saved of a forward pass: {cases}"


def judge_cache(times: Mapping[int, Mapping[str, float]]) -> tuple[str, str]:
    """`times`: seconds of a decode step by context and kind of cache."""
    gains = {
        other: [row[other] / row["unified"] for row in times.values()]
        for other in next(iter(times.values()))
        if other != "unified"
    }
    text = "; ".join(
        f"{other} takes {min(gain):.2f}x to {max(gain):.2f}x the time"
        for other, gain in gains.items()
    )
    return verdict(g > 1 + MATTERS for gain in gains.values() for g in gain), text


def judge_modules(ratios: Mapping[str, float], overhead: float) -> tuple[str, str]:
    """`ratios`: time with modules / time of one function; `overhead`: seconds per layer, eager."""
    cases = ", ".join(f"{value:.2f}x {name}" for name, value in ratios.items())
    text = f"modules / one function: {cases}; {show(max(overhead, 0.0))} per layer"
    return verdict(value > 1 + MATTERS for value in ratios.values()), text


def judge_loading(parts: Mapping[str, float], size: int) -> tuple[str, str]:
    """`parts`: seconds from a file of `size` bytes to the first token."""
    total = sum(parts.values())
    text = ", ".join(f"{name} {show(value)}" for name, value in parts.items())
    good = total < 1 or size / total > 0.5e9
    return verdict([good]), f"{text}: {show(total)} for {size / 1e6:.0f} MB"


def judge_speedup(ratios: Mapping[str, float]) -> tuple[str, str]:
    """`ratios`: everything naive / everything on, per case; the claim is 2 to 3 times."""
    text = ", ".join(f"{value:.2f}x {name}" for name, value in ratios.items())
    return verdict(2 <= value <= 3 for value in ratios.values()), text


def check_same(name: str, found: Tensor, wanted: Tensor) -> None:
    """A variant that computes something else is not timed."""
    limit = 1e-4 if wanted.dtype == torch.float32 and found.dtype == torch.float32 else 5e-2
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    if not error <= limit:
        raise ValueError(f"{name} differs from the reference by {error:.1e}: not timed")


def mask_by_loops(cache: llama2.Cache, T: int) -> Tensor | None:
    """Each element by itself: how it was first done."""
    S = cache.slots(T).stop
    rows = [[j <= S - T + i for j in range(S)] for i in range(T)]
    return None if T == 1 else torch.tensor(rows, device=cache.k.device)


def mask_by_torch(cache: llama2.Cache, T: int) -> Tensor:
    """Made anew for each pass by two operations."""
    S = cache.slots(T).stop
    return torch.ones(T, S, dtype=torch.bool, device=cache.k.device).tril(S - T)


def attention_written_out(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None
) -> Tensor:
    """Attention by separate operations: the scores of all heads stand in memory."""
    scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    return scores.softmax(-1).type_as(v) @ v


class LayerCaches:
    """Two tensors per layer, all of them allocated beforehand."""

    def __init__(self, cache: llama2.Cache) -> None:
        self.pos = cache.pos
        self.k, self.v = ([t.clone() for t in both] for both in (cache.k, cache.v))

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        end = self.pos + k.shape[2]
        self.k[layer][:, :, self.pos : end], self.v[layer][:, :, self.pos : end] = k, v
        return self.k[layer][:, :, :end], self.v[layer][:, :, :end]


class ConcatenatingCache(LayerCaches):
    """Copies what it holds for each new token, as most first versions do."""

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        old_k, old_v = (t[layer][:, :, : self.pos] for t in (self.k, self.v))
        return torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)


def inline(model: llama2.Llama) -> Callable[[Tensor, llama2.Cache], Tensor]:
    """The mathematics of Llama.forward as one function without modules, the weights looked up before."""
    c, head_dim = model.config, model.config.head_dim
    ends = model.embed_tokens.weight, model.norm.weight, model.lm_head.weight
    layers = [tuple(layer.parameters()) for layer in model.layers]

    @torch.no_grad()
    def run(tokens: Tensor, cache: llama2.Cache) -> Tensor:
        def norm(x: Tensor, weight: Tensor) -> Tensor:
            x32 = x.float()
            x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + c.rms_norm_eps)
            return x32.type_as(x) * weight

        (B, T), G = tokens.shape, c.num_key_value_heads
        (cos, sin), mask = cache.rope(T), cache.mask(T)
        if mask is not None and c.num_attention_heads != G:
            mask = mask.repeat(c.num_attention_heads // G, 1)
        x = F.embedding(tokens, ends[0])
        for i, (norm1, wq, wk, wv, wo, norm2, gate, up, down) in enumerate(layers):
            h = norm(x, norm1)
            q, k, v = (F.linear(h, w).unflatten(-1, (-1, head_dim)) for w in (wq, wk, wv))
            q = llama2.apply_rotary_emb(q, cos, sin).transpose(1, 2)
            k = llama2.apply_rotary_emb(k, cos, sin).transpose(1, 2)
            k, v = cache.update(i, k, v.transpose(1, 2))
            q = q.reshape(B, G, -1, head_dim)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            x = x + F.linear(y.reshape(B, -1, T, head_dim).transpose(1, 2).flatten(2), wo)
            h = norm(x, norm2)
            x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
        logits = F.linear(norm(x[:, -1], ends[1]), ends[2]).float()
        cache.advance(T)
        return logits

    return run


def continue_text(
    s: Setting, model: llama2.Llama, ids: Tensor, start: int, naive: Sequence[str] = ()
) -> Tensor:
    """Logits of each step of a generation that reads ids[start:] one by one; `naive` switches off parts."""
    cache, logits = s.cache(model.config, len(ids)), []
    with contextlib.ExitStack() as stack:
        if "mask cache" in naive:
            stack.enter_context(patch.object(llama2.Cache, "mask", mask_by_loops))
        if "fused attention" in naive:
            stack.enter_context(
                patch.object(F, "scaled_dot_product_attention", attention_written_out)
            )
        for end in range(start, len(ids) + 1):
            if "KV cache" in naive:
                cache.reset()
            logits.append(model(ids[None, cache.pos : end], cache))
    return torch.cat(logits)


def claim_mask(s: Setting, model: llama2.Llama) -> tuple[str, str, dict]:
    """(a) Making, finding and applying the mask, beside the pass that needs it."""
    c, saved, detail = model.config, {}, {}
    for T in (128, 512):
        cache = s.cache(c, max(T, min(c.max_position_embeddings, 4096)))
        kept = {(T, T): mask_by_torch(cache, T)}
        ways = {
            "made by loops": partial(mask_by_loops, cache, T),
            "made by torch": partial(mask_by_torch, cache, T),
            "found in a dict": partial(kept.get, (T, T)),
            "sliced from one": partial(cache.mask, T),
        }
        q, scores = s.randn(1, c.num_attention_heads, T, c.head_dim), s.randn(1, 1, T, T)
        scores, mask = scores.repeat(1, c.num_attention_heads, 1, 1), cache.mask(T)
        for name, way in ways.items():
            check_same(name, way().float(), mask.float())
        ways["applied to scores"] = lambda scores=scores, mask=mask: scores.masked_fill(
            ~mask, -math.inf
        )
        attention = partial(F.scaled_dot_product_attention, q, q, q)
        ways["attention with it"] = partial(attention, attn_mask=mask)
        ways["attention, is_causal"] = partial(attention, is_causal=True)
        note(f"claim (a), {T} tokens")
        times = {name: t.median for name, t in interleave(ways).items()}
        times["forward pass"] = whole = measure(forward(s, model, T), 0.5).median
        for how in ("loops", "torch"):
            gain = times[f"made by {how}"] - times["sliced from one"]
            saved[f"at {T} against {how}"] = max(gain, 0.0) / whole
        detail[str(T)] = times
    rows = [[name, *(show(detail[T][name]) for T in detail)] for name in detail["128"]]
    table(("(a) causal mask", "128 tokens", "512 tokens"), rows)
    lengths, room = 512, c.max_position_embeddings
    print(
        f"memory for all lengths to {lengths}: a dict of masks {sum(n * n for n in range(lengths + 1)) / 1e6:.0f} MB,"
        f" one band {lengths * room / 1e6:.1f} MB\n"
    )
    return *judge_mask(saved), {"seconds": detail, "saved": saved}


def claim_cache(s: Setting, model: llama2.Llama) -> tuple[str, str, dict]:
    """(b) One decode step of the cache and the attention over it, all layers."""
    c, times = model.config, {}
    for context in (128, 512, 1024, 2048, 4096):
        if context > c.max_position_embeddings:
            continue
        cache = s.cache(c, context)
        cache.k.normal_(), cache.v.normal_()
        cache.advance(context - 1)
        q = s.randn(
            1, c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads, c.head_dim
        )
        k, v = (s.randn(1, c.num_key_value_heads, 1, c.head_dim) for _ in range(2))

        def step(cache: object, q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            for layer in range(c.num_hidden_layers):
                y = F.scaled_dot_product_attention(q, *cache.update(layer, k, v))
            return y

        caches = {"unified": cache, "per layer": LayerCaches(cache)}
        caches["concatenated"] = ConcatenatingCache(cache)
        ways = {name: partial(step, kind) for name, kind in caches.items()}
        for name, way in ways.items():
            check_same(name, way(), step(cache))
        note(f"claim (b), context {context}")
        times[context] = {name: t.median for name, t in interleave(ways, rounds=7).items()}
    kinds = list(next(iter(times.values())))
    rows = [(n, *(show(row[kind]) for kind in kinds)) for n, row in times.items()]
    table((f"(b) {c.num_hidden_layers} layers, context", *kinds), rows)
    print()
    return *judge_cache(times), {"seconds": times}


def claim_modules(s: Setting, model: llama2.Llama) -> tuple[str, str, dict]:
    """(c) A decode step by modules and by one function; small, where overhead shows, and at full size."""
    small = s.build(random_checkpoint(TINY, "F32"))
    ratios, rows, overhead = {}, [], 0.0
    for size, m in (("small", small), ("large", model)):
        cache, token = s.cache(m.config, 128), s.tokens(m.config, 1, 1)
        cache.advance(64)

        def step(function: Callable, cache: llama2.Cache = cache, token: Tensor = token) -> Tensor:
            cache.truncate(64)
            return function(token, cache)

        for how in ("eager", "compiled"):
            functions = {"modules": m, "one function": inline(m)}
            if how == "compiled":
                functions = {name: torch.compile(f) for name, f in functions.items()}
            ways = {name: partial(step, f) for name, f in functions.items()}
            note(f"claim (c), {size}, {how}")
            try:
                first = sum(seconds(way) for way in ways.values())
                check_same("one function", ways["one function"](), step(m))
            except torch._dynamo.exc.TorchDynamoException as error:
                print(f"not compiled: {str(error).splitlines()[0][:100]}")
                continue
            times = interleave(ways, rounds=9)
            found = ratio(times["modules"], times["one function"])
            if (size, how) == ("small", "eager"):
                difference = times["modules"].median - times["one function"].median
                overhead = difference / m.config.num_hidden_layers
            ratios[f"{size}, {how}"] = found.median
            cells = [show(t.median) for t in times.values()] + [f"{found.median:.2f}x"]
            rows.append((f"{size} model, {how}", *cells, f"{found.iqr:.2f}", show(first)))
    table(("(c) decode step", "modules", "one function", "ratio", "IQR", "first calls"), rows)
    print()
    return *judge_modules(ratios, overhead), {"ratios": ratios, "overhead_per_layer": overhead}


def claim_loading(s: Setting, model: llama2.Llama) -> tuple[str, str, dict]:
    """(d) From a real file to its first token."""
    path, parts, made = s.args.model or llama2.DEFAULT_MODEL, {}, {}
    if not path.exists():
        return "not measured", f"{path.name} is missing: pass --model FILE", {}
    steps = {
        "header": lambda: llama2.open_checkpoint(path),
        "tokenizer": lambda: made["header"].tokenizer(),
        "weights": lambda: s.build(made["header"]),
        "first token": lambda: next(
            llama2.generate(made["weights"], made["tokenizer"].encode("Once upon a time"), 1)
        ),
    }
    for name, step in steps.items():
        parts[name] = seconds(lambda name=name, step=step: made.update({name: step()}))
    return *judge_loading(parts, path.stat().st_size), {"seconds": parts}


def claim_speedup(s: Setting, model: llama2.Llama) -> tuple[str, str, dict]:
    """(e) Everything on against everything naive, and each part by itself, generating 8 tokens."""
    parts, ratios, rows = ("KV cache", "mask cache", "fused attention"), {}, []
    variants = {"all on": (), "all naive": parts, **{f"no {part}": (part,) for part in parts}}
    for T in (32, 128):
        ids = s.tokens(model.config, 1, T + 7)[0]
        ways = {k: partial(continue_text, s, model, ids, T, v) for k, v in variants.items()}
        reference = ways["all on"]()
        for name, way in ways.items():
            note(f"claim (e), {T} tokens, {name}")
            check_same(name, way(), reference)
        samples = {name: [] for name in ways}
        for _ in range(3):
            for name, way in ways.items():
                note(f"claim (e), {T} tokens, {name}")
                samples[name].append(seconds(way))
        times = {name: Timing(tuple(values)) for name, values in samples.items()}
        for name, timing in times.items():
            factor = ratio(timing, times["all on"]).median
            rows.append((f"prompt {T} + 8, {name}", show(timing.median), f"{factor:.2f}x"))
        ratios[f"behind {T} tokens"] = ratio(times["all naive"], times["all on"]).median
    table(("(e) end to end", "median", "of all on"), rows)
    print()
    return *judge_speedup(ratios), {"ratios": ratios, "rows": rows}


CLAIMS = (
    ("(a) caching the causal mask makes the model faster", claim_mask),
    ("(b) one unified cache is faster than others", claim_cache),
    ("(c) a module per layer costs speed", claim_modules),
    ("(d) a real file loads without delay", claim_loading),
    ("(e) all optimisations together give 2-3x", claim_speedup),
)


def run_claims(s: Setting) -> dict:
    """All five, then one line for each."""
    if s.args.model is not None and s.args.config is None:
        s.args.config = "7b"  # --model is what claim (d) loads
        s.args.layers = s.args.layers or 2
    model = s.build(s.checkpoint("7b", layers=2))
    c, rows, out = model.config, [], {}
    print(f"shape: hidden {c.hidden_size}, {c.num_hidden_layers} layers, {s.dtype}\n")
    for claim, run in CLAIMS:
        word, text, detail = run(s, model)
        rows.append((claim, word, text))
        out[claim] = {"verdict": word, "because": text, **detail}
    note("")
    for claim, word, text in rows:
        print(f"{claim}: {word.upper()}\n    {text}")
    return {"claims": out}


# --------------------------------------------------------------------------------------------------
# 6. Where the time goes

COMPONENTS = {  # the end of a module's name -> what it is part of
    "embed_tokens": "embedding",
    "layernorm": "norms",
    "norm": "norms",
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "output",
    "mlp": "MLP",
    "lm_head": "head",
}
ORDER = ("norms", "qkv", "rotation", "attention", "output", "MLP", "embedding", "head")
WHOLE = "whole"


@contextlib.contextmanager
def component(name: str) -> Iterator[None]:
    """A range in the profile; on an accelerator it waits, so that the range holds its own work."""
    synchronize()
    with record_function(f"part:{name}"):
        yield
        synchronize()


@contextlib.contextmanager
def ranges(model: llama2.Llama) -> Iterator[None]:
    """Ranges around the components of a model, put there from outside and taken away again."""

    def inside(name: str, function: Callable) -> Callable:
        def call(*args: object, **kwargs: object) -> object:
            with component(name):
                return function(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for path, module in model.named_modules():
            for ending, name in COMPONENTS.items():
                if path.endswith(ending):
                    stack.enter_context(
                        patch.object(module, "forward", inside(name, module.forward))
                    )
                    break
        for owner, function, name in (
            (llama2, "apply_rotary_emb", "rotation"),
            (llama2.Cache, "update", "attention"),
            (F, "scaled_dot_product_attention", "attention"),
        ):
            wrapped = inside(name, getattr(owner, function))
            stack.enter_context(patch.object(owner, function, wrapped))
        yield


def shares(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Each part of the measured whole, the remainder named: together exactly 1."""
    out = {name: parts.get(name, 0.0) / whole for name in ORDER}
    return out | {"other: residual sums, reshapes, Python": 1 - sum(out.values())}


def run_breakdown(s: Setting) -> dict:
    """Profile decode and two prompts in place."""
    model = s.build(s.checkpoint("1b"))
    out, c = {}, model.config
    print(
        f"hidden {c.hidden_size}, {c.num_hidden_layers} layers, {s.dtype};"
        " profiled in place, the profiler's own cost included"
    )
    activities = [ProfilerActivity.CPU]
    for name, T, context in (("decode", 1, 128), ("128 tokens", 128, 0), ("512 tokens", 512, 0)):
        note(name)
        run = forward(s, model, T, context)
        once = min(seconds(run), seconds(run))  # the first one warms up
        count = max(2, min(20, int(5 / once)))
        with ranges(model), profile(activities=activities) as trace:
            for _ in range(count):
                with component(WHOLE):
                    run()
        sums = {}
        for event in trace.events():
            if event.name.startswith("part:"):
                key = event.name.removeprefix("part:")
                sums[key] = sums.get(key, 0.0) + event.time_range.elapsed_us() * 1e-6 / count
        whole = sums.pop(WHOLE)
        found = shares(sums, whole)
        out[name] = {"shares": found, "seconds": whole, "without_profiler": once}
        rows = [
            (part, f"{share:.1%}", show(share * whole), ("#" * round(40 * share)).ljust(40))
            for part, share in found.items()
        ]
        rows.append(("whole", "100.0%", show(whole), f"without profiler {show(once)}".ljust(40)))
        table((name, "share", "per pass", "".ljust(40)), rows)
        print()
    return {"breakdown": out}


def run_profile(s: Setting) -> dict:
    """A trace of a prompt and a few tokens, and the ten operations that cost most."""
    model = s.build(s.checkpoint("1b"))
    steps = [forward(s, model, s.args.prompt_tokens), forward(s, model, 1, s.args.prompt_tokens)]
    for step in steps:
        step()
    activities = [ProfilerActivity.CPU]
    if s.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as trace:
        steps[0]()
        for _ in range(s.args.gen_tokens):
            steps[1]()
    trace.export_chrome_trace(str(s.args.profile))
    events = trace.key_averages()
    on_device = s.device.type == "cuda"
    cost = {
        e.key: (e.self_device_time_total if on_device else e.self_cpu_time_total, e.count)
        for e in events
    }
    total = sum(time for time, _ in cost.values())
    top = sorted(cost.items(), key=lambda item: -item[1][0])[:10]
    rows = [(key[:60], f"{t / total:.1%}", show(t * 1e-6), n) for key, (t, n) in top]
    table(("operation", "share", "total", "calls"), rows)
    print(f"wrote {s.args.profile}: open it in chrome://tracing or ui.perfetto.dev")
    return {"profile": rows}


# --------------------------------------------------------------------------------------------------
# 7. Whole models, and others beside them


@dataclass
class Run:
    """One run of one engine."""

    first: dict[int, float]  # prompt length -> seconds to the first new token
    token: float  # median seconds per further token


# An engine runs each prompt length once and `new` further tokens behind `depth` tokens.
Engine = Callable[[Sequence[int], int, int], Run]


def our_engine(s: Setting, model: llama2.Llama, room: int, batch: int = 1) -> Engine:
    """llama2.generate, as a user calls it: what it compiles or captures is used."""
    cache = s.cache(model.config, room, batch)

    def run(prompts: Sequence[int], new: int, depth: int) -> Run:
        first, token = {}, math.nan
        for T in dict.fromkeys((*prompts, depth)):
            rows, stamps = s.tokens(model.config, batch, T).tolist(), []
            count = new + 1 if T == depth else 1
            cache.reset()
            start = time.perf_counter()
            for _ in llama2.generate(model, rows, count, stop_ids=(), cache=cache):
                stamps.append(time.perf_counter() - start)
            first[T] = stamps[0]
            if T == depth and new:
                steps = [b - a for a, b in zip(stamps, stamps[1:], strict=False)]
                token = Timing(tuple(steps)).median
        return Run({T: first[T] for T in prompts}, token)

    return run


def transformers_engine(s: Setting, config: llama2.Config, batch: int = 1) -> Engine:
    """The same shape with random weights in Hugging Face's model, eager, with its growing cache."""
    import transformers

    names = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads vocab_size"
        " num_key_value_heads max_position_embeddings rms_norm_eps tie_word_embeddings"
    )
    shape = transformers.LlamaConfig(**{name: getattr(config, name) for name in names.split()})
    with torch.device(s.device):
        before = torch.get_default_dtype()
        torch.set_default_dtype(s.dtype)
        with patch("torch.nn.init.normal_", lambda tensor, *_, **__: tensor):
            model = transformers.LlamaForCausalLM(shape).eval()
        torch.set_default_dtype(before)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.01)

    @torch.no_grad()
    def run(prompts: Sequence[int], new: int, depth: int) -> Run:
        first, steps = {}, []
        for T in dict.fromkeys((*prompts, depth)):
            tokens, past = s.tokens(config, batch, T), transformers.DynamicCache()
            for i in range(new + 1 if T == depth else 1):
                start = time.perf_counter()
                out = model(tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
                tokens = out.logits[:, -1].argmax(-1, keepdim=True)
                tokens.tolist()  # waits for the device, as a caller does who shows the text
                steps.append(time.perf_counter() - start)
                if i == 0:
                    first[T] = steps.pop()
        token = Timing(tuple(steps)).median if steps else math.nan
        return Run({T: first[T] for T in prompts}, token)

    return run


def llama_bench_engine(path: Path, threads: int) -> Engine:
    """llama.cpp's own llama-bench; each run is a process that warms up by itself."""

    def call(*options: object) -> list[dict]:
        command = ["llama-bench", "-m", path, "-t", threads, "-r", 1, "-o", "json", *options]
        done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"llama-bench failed: {done.stderr.strip().splitlines()[-1:]}")
        return json.loads(done.stdout)

    def run(prompts: Sequence[int], new: int, depth: int) -> Run:
        prompt = ("-p", ",".join(map(str, prompts)) or 0)
        if depth > 1:
            results = call(*prompt, "-n", 0) + (
                call("-p", 0, "-n", new, "-d", depth) if new else []
            )
        else:
            results = call(*prompt, "-n", new)
        first = {r["n_prompt"]: r["n_prompt"] / r["avg_ts"] for r in results if r["n_prompt"]}
        token = [1 / r["avg_ts"] for r in results if r["n_gen"]]
        return Run(first, token[0] if token else math.nan)

    return run


def llama_cpp_python_engine(path: Path, threads: int, room: int) -> Engine:
    """llama.cpp through its Python binding."""
    import llama_cpp

    options = {"n_threads": threads, "n_threads_batch": threads, "verbose": False}
    model = llama_cpp.Llama(str(path), n_ctx=room, n_batch=512, **options)

    def run(prompts: Sequence[int], new: int, depth: int) -> Run:
        first, steps = {}, []
        for T in dict.fromkeys((*prompts, depth)):
            model.reset()
            first[T] = seconds(lambda T=T: model.eval([1] * T))
            if T == depth:
                steps = [seconds(lambda: model.eval([1])) for _ in range(new)]
        token = Timing(tuple(steps)).median if steps else math.nan
        return Run({T: first[T] for T in prompts}, token)

    return run


def llama_cpp_engine(path: Path | None, threads: int, room: int) -> Engine:
    """llama-bench if it is on the PATH, else llama-cpp-python. ValueError if neither is there."""
    if path is None:
        raise ValueError("--compare llama.cpp needs --model FILE: it cannot run without a file")
    if shutil.which("llama-bench"):
        return llama_bench_engine(path, threads)
    if importlib.util.find_spec("llama_cpp"):
        return llama_cpp_python_engine(path, threads, room)
    raise ValueError("llama.cpp: no llama-bench on the PATH; or pip install llama-cpp-python")


def take_turns(
    engines: Mapping[str, Engine], prompts: Sequence[int], new: int, depth: int, rounds: int
) -> dict[str, dict[str, Timing]]:
    """Run the engines A B A B; per engine the timings of "ppN", seconds per prompt, and of "tg"."""
    samples = {name: {} for name in engines}
    for i in range(rounds + 1):
        for name, engine in engines.items():
            note(f"{name}, " + (f"round {i} of {rounds}" if i else "warm-up"))
            if i == 0 and name == "llama.cpp":
                continue  # each of its runs begins with one
            run = engine(prompts, new, depth)
            if i:
                found = {f"pp{T}": value for T, value in run.first.items()} | {"tg": run.token}
                for key, value in found.items():
                    samples[name].setdefault(key, []).append(value)
    return {
        name: {key: Timing(tuple(values)) for key, values in found.items()}
        for name, found in samples.items()
    }


def context_sweep(s: Setting, model: llama2.Llama, lengths: Sequence[int]) -> dict[int, float]:
    """Median seconds per token behind n tokens, without computing those: their values do not matter."""
    cache, times = s.cache(model.config, max(lengths) + 17), {}
    cache.k.normal_(), cache.v.normal_()
    for n in lengths:
        note(f"context {n}")
        cache.reset()
        cache.advance(n)
        stamps = [
            time.perf_counter() for _ in llama2.generate(model, [1], 17, stop_ids=(), cache=cache)
        ]
        steps = [b - a for a, b in zip(stamps, stamps[1:], strict=False)]
        times[n] = Timing(tuple(steps)).median
    return times


def run_whole(s: Setting) -> dict:
    """One model: load, prompt, tokens, memory; others beside it; speed as the context fills."""
    args, made = s.args, {}
    P, N, B = args.prompt_tokens, args.gen_tokens, args.batch
    checkpoint = s.checkpoint()
    c, room = checkpoint.config, P + N + 1
    if room > c.max_position_embeddings:
        raise ValueError(
            f"{P} prompt and {N} new tokens exceed the model's context of {c.max_position_embeddings}"
        )
    load = seconds(lambda: made.update(model=s.build(checkpoint)))
    model = made["model"]
    engines = {"llama2.py": our_engine(s, model, room, B)}
    compile_and_run = seconds(lambda: engines["llama2.py"]((P,), N, P))
    for other in args.compare:
        if other == "llama.cpp":
            if B > 1:
                raise ValueError("--compare llama.cpp runs one row: leave --batch at 1")
            engines[other] = llama_cpp_engine(args.model, torch.get_num_threads(), room)
        else:
            engines[other] = transformers_engine(s, c, B)
    found = take_turns(engines, (P,), N, P, args.rounds)
    ours = found["llama2.py"]
    speed, size = bandwidth(s.device), llama2.weight_bytes(model)
    pp, tg = ours[f"pp{P}"].median, ours["tg"].median
    kv = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * s.dtype.itemsize
    rate = size / tg
    facts = {
        "load": show(load),
        "first run, with compiling": show(compile_and_run),
        f"time to first token ({P} tokens)": show(pp),
        "prompt": f"{B * P / pp:.1f} tokens/s",
        "time per token": f"{show(tg)} (IQR {show(ours['tg'].iqr)} over {args.rounds} rounds)",
        "generation": f"{B / tg:.2f} tokens/s, batch {B}",
        "weights read per step": f"{size / 1e9:.3f} GB, {rate / 1e9:.1f} GB/s",
        "memory bandwidth": f"{speed / 1e9:.1f} GB/s measured, {rate / speed:.0%} of it reached",
        "KV cache": f"{kv} bytes per token",
        "peak memory": f"{llama2.peak_memory(s.device) / 1e9:.2f} GB",
    }
    table((checkpoint.form, "measured"), facts.items())
    out = {"load": load, "first_run": compile_and_run, "prompt_seconds": pp, "token_seconds": tg}
    out |= {"weight_bytes": size, "bandwidth": speed, "fraction": rate / speed, "kv_bytes": kv}
    out |= {"peak_memory": llama2.peak_memory(s.device), "tokens_per_second": B / tg}
    if args.compare:
        rows, out["compare"] = [], {}
        for name in args.compare:
            pairs = {key: ratio(found[name][key], ours[key]) for key in ours}
            out["compare"][name] = {key: pair.median for key, pair in pairs.items()}
            for key, count in ((f"pp{P}", B * P), ("tg", B)):
                cells = [f"{count / t[key].median:.1f}" for t in (ours, found[name])]
                rows.append((f"{name}, {key}", *cells, f"{pairs[key].median:.2f}x"))
        print()
        table(("tokens/s", "llama2.py", "theirs", "ours / theirs"), rows)
    if args.context_sweep:
        lengths = [n for n in args.context_sweep if n + 17 <= c.max_position_embeddings]
        times = context_sweep(s, model, lengths or [1])
        base = next(iter(times.values()))
        print()
        rows = [(n, show(t), f"{1 / t:.2f}", f"{base / t:.2f}x") for n, t in times.items()]
        table(("context", "per token", "tokens/s", "of the first"), rows)
        out["context"] = times
    return {"whole": out}


def run_table(s: Setting) -> dict:
    """For each file: prompts of 128 and 512 tokens and 16 new ones, ours and llama.cpp's in turns."""
    rows, out, prompts, new = [], {}, tuple(s.args.table_prompts), 16
    header = [f"{key} ours / llama.cpp" for key in (*(f"pp{T}" for T in prompts), f"tg{new}")]
    for path in s.args.table:
        model = s.build(llama2.open_checkpoint(path))
        engines = {"llama2.py": our_engine(s, model, max(prompts) + new + 1)}
        try:
            room = max(prompts) + new + 1
            engines["llama.cpp"] = llama_cpp_engine(path, torch.get_num_threads(), room)
        except ValueError as error:
            print(f"ours alone: {error}")
        found = take_turns(engines, prompts, new, 1, s.args.rounds)
        speed = bandwidth(s.device)
        ours, theirs = found["llama2.py"], found.get("llama.cpp")
        fraction = llama2.weight_bytes(model) / ours["tg"].median / speed
        row, out[path.name] = [path.name], {"bandwidth": speed, "fraction": fraction}
        for key, count in (*((f"pp{T}", T) for T in prompts), ("tg", 1)):
            cell = f"{count / ours[key].median:.1f}"
            out[path.name][key] = {"ours": count / ours[key].median}
            if theirs:
                rate, pair = count / theirs[key].median, ratio(theirs[key], ours[key]).median
                cell += f" / {rate:.1f} = {pair:.2f}"
                out[path.name][key] |= {"llama.cpp": rate, "ratio": pair}
            row.append(cell)
        rows.append((*row, f"{fraction:.0%} of {speed / 1e9:.0f} GB/s"))
        table(("file", *header, "memory"), [rows[-1]])
        del model, engines
    print()
    table(("file", *header, "memory"), rows)
    return {"table": out}


# --------------------------------------------------------------------------------------------------
# 8. Perplexity


def windows(ids: Sequence[int], context: int, bos: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs (T,) and the targets of their second half, as llama.cpp's llama-perplexity cuts a text.

    Windows do not overlap; what is left at the end is dropped. The first token of each gives way to BOS.
    """
    first = context // 2
    for start in range(0, len(ids) - context + 1, context):
        window = torch.tensor(ids[start : start + context])
        target = window[first + 1 :].clone()
        if bos is not None:
            window[0] = bos
        yield window, target


def score(logits: Tensor, target: Tensor) -> Tensor:
    """Negative log-likelihoods (n,) of the targets by the logits of the positions before them."""
    n = len(target)
    return F.cross_entropy(logits[-n - 1 : -1].float(), target, reduction="none")


def perplexity(losses: Tensor) -> tuple[float, float]:
    """exp(mean loss) and its standard error."""
    losses = losses.double()
    value = losses.mean().exp().item()
    return value, value * losses.std(correction=0).item() / math.sqrt(max(len(losses) - 1, 1))


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(a || b) of the distributions that logits (n, V) stand for: (n,), in nats."""
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def run_perplexity(s: Setting) -> dict:
    """Perplexity of one file, or of two with the divergence between them."""
    args, context = s.args, s.args.context
    paths = args.compare_types or [args.model or llama2.DEFAULT_MODEL]
    text = args.perplexity.read_bytes().decode("utf-8", "replace")
    models, tokenizer = [], None
    for path in paths:
        checkpoint = llama2.open_checkpoint(path)
        if context > checkpoint.config.max_position_embeddings:
            limit = checkpoint.config.max_position_embeddings
            raise ValueError(f"--context {context}; the model's is {limit}")
        other = checkpoint.tokenizer()
        if tokenizer and other.vocab_size != tokenizer.vocab_size:
            raise ValueError(f"{paths[0]} and {path} have different vocabularies")
        tokenizer = other
        models.append(s.build(checkpoint))
    ids = tokenizer.encode(text, bos=tokenizer.add_bos)
    if context < 4 or len(ids) < 2 * context:
        needed = f"needed are {2 * context}, two windows of --context {context} (4 or more)"
        raise ValueError(f"{args.perplexity}: {len(ids)} tokens; {needed}")
    cut = list(windows(ids, context, tokenizer.bos_id if tokenizer.add_bos else None))
    losses, divergences, same = [[] for _ in models], [], []
    for i, (window, target) in enumerate(cut):
        found = []
        for model, own in zip(models, losses, strict=True):
            cache = s.cache(model.config, context)
            logits = model(window[None].to(s.device), cache, all_positions=True)[0]
            found.append(logits[-len(target) - 1 : -1].cpu())
            own.append(F.cross_entropy(found[-1], target, reduction="none"))
        if len(found) == 2:
            divergences.append(divergence(*found))
            same.append(found[0].argmax(-1) == found[1].argmax(-1))
        value, error = perplexity(torch.cat(losses[0]))
        note(f"window {i + 1} of {len(cut)}: perplexity {value:.4f} +- {error:.4f}")
    out, rows = {}, []
    for path, own in zip(paths, losses, strict=True):
        value, error = perplexity(torch.cat(own))
        out[str(path)] = {"perplexity": value, "error": error}
        rows.append((path.name, f"{value:.4f}", f"+-{error:.5f}", len(torch.cat(own))))
    table(("file", "perplexity", "standard error", "tokens scored"), rows)
    if divergences:
        kl, agree = torch.cat(divergences), torch.cat(same).double().mean().item()
        out["kl"] = {"mean": kl.mean().item(), "p99": kl.quantile(0.99).item(), "same_top": agree}
        print(
            f"KL divergence {paths[0].name} || {paths[1].name}: mean {out['kl']['mean']:.6f},"
            f" 99th percentile {out['kl']['p99']:.6f}; same likeliest token {agree:.2%}"
        )
    return {"perplexity": out, "windows": len(cut), "context": context}


# --------------------------------------------------------------------------------------------------
# 9. Command line


def fail(message: object) -> int:
    """One line on stderr; 2, the exit status for what the user or a file got wrong."""
    print("bench_llama2.py: error:", " ".join(str(message).split()), file=sys.stderr)
    return 2


def count(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def counts(text: str) -> list[int]:
    """Whole numbers with commas between them."""
    return [count(item) for item in text.split(",")]


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; a wrong one ends in one line on stderr and exit status 2."""
    parser = argparse.ArgumentParser(prog="bench_llama2.py", description="Measure llama2.py.")
    parser.error = lambda message: sys.exit(fail(message))
    mode = parser.add_argument_group("what to measure (default: the suite; --model: that model)")
    add = mode.add_argument
    add("--suite", action="store_true", help="each layer by itself")
    add("--claims", action="store_true", help="five claims with verdicts")
    add("--breakdown", action="store_true", help="shares of a forward pass")
    add(
        "--profile", metavar="FILE", type=Path, help="write a trace; print the costliest operations"
    )
    add("--table", metavar="FILE", type=Path, nargs="+", help="files beside llama.cpp")
    add("--perplexity", metavar="TEXT", type=Path, help="perplexity over a text file")
    add("--compare-types", metavar="GGUF", type=Path, nargs=2, help="with --perplexity: two files")
    shape = parser.add_argument_group("of what")
    add = shape.add_argument
    add("--model", metavar="FILE", type=Path, help="a file (default: random weights)")
    add("--config", choices=CONFIGS, help="a shape without a file")
    add("--layers", metavar="N", type=count, help="that many layers of the shape only")
    add("--type", choices=TYPES, help="of the random weights (default: --dtype)")
    add("--prompt-tokens", metavar="N", type=count, default=128, help="default: 128")
    add("--gen-tokens", metavar="N", type=count, default=16, help="default: 16")
    add("--batch", metavar="N", type=count, default=1, help="rows at once")
    add("--context", metavar="N", type=count, default=512, help="of --perplexity: default 512")
    add("--context-sweep", metavar="N,N", type=counts, help="speed behind so many tokens")
    add("--table-prompts", metavar="N,N", type=counts, default=[128, 512], help="default: 128,512")
    how = parser.add_argument_group("how")
    add = how.add_argument
    add("--compare", choices=("transformers", "llama.cpp"), nargs="+", default=[])
    add("--rounds", metavar="N", type=count, default=5, help="of what takes turns (default: 5)")
    add("--seconds", metavar="S", type=float, default=1.0, help="at most per benchmark, about")
    add("--filter", metavar="TEXT", default="", help="only benchmarks with this in their name")
    add("--save-baseline", metavar="NAME", help="keep the suite's result")
    add("--baseline", metavar="NAME", help="compare the suite with a kept result")
    add("--fail-on-regression", action="store_true", help="exit 1 if the comparison finds one")
    add("--json", metavar="FILE", type=Path, help="write the result there as well")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    add("--dtype", choices=("auto", *llama2.DTYPES), default="auto", help="of the activations")
    add("--threads", metavar="N", type=count, help="CPU threads (default: torch's choice)")
    args = parser.parse_args(argv)
    if args.compare_types and args.perplexity is None:
        parser.error("--compare-types needs --perplexity TEXT")
    if args.model is not None and args.config is not None and not args.claims:
        parser.error("--model and --config exclude each other")
    for name in filter(None, (args.baseline, args.save_baseline)):
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            parser.error(f"the baseline name {name!r}: letters, digits, '-', '_' and '.' only")
    if not 0 < args.seconds < 3600:
        parser.error(f"--seconds {args.seconds}; accepted is above 0 and below 3600")
    return args


def machine(s: Setting) -> dict[str, object]:
    """What the figures depend on."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), name)
    device = str(s.device)
    if s.device.type == "cuda":
        device = torch.cuda.get_device_name(s.device)
    return {
        "machine": f"{name}, {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(s.dtype).removeprefix("torch."),
        "device": device,
    }


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    device = llama2.choose_device(args.device)
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    s = Setting(args, device, llama2.DTYPES.get(args.dtype, default))
    result = {"machine": machine(s)}
    print("; ".join(f"{key} {value}" for key, value in result["machine"].items()), flush=True)
    modes = {
        run_claims: args.claims,
        run_breakdown: args.breakdown,
        run_profile: args.profile,
        run_table: args.table,
        run_perplexity: args.perplexity,
    }
    chosen = [mode for mode, wanted in modes.items() if wanted]
    if (
        args.suite
        or args.baseline
        or args.save_baseline
        or not (chosen or args.model or args.config)
    ):
        chosen.insert(0, run_suite)
    with torch.no_grad():
        for mode in chosen or [run_whole]:
            result |= mode(s)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    return 1 if args.fail_on_regression and result.get("regressed") else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        return run(parse_args(argv))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `| head`: whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, MemoryError, ImportError) as error:
        return fail(error)


if __name__ == "__main__":
    sys.exit(main())
