"""The benchmark of llama2.py: what is fast and what is not, on this machine.

    python bench_llama2.py                                   # the suite: each layer by itself
    python bench_llama2.py --claims                          # five claims, each with a verdict
    python bench_llama2.py --model FILE.gguf                 # a whole model: load, prompt, tokens
    python bench_llama2.py --config 7b --type Q4_0           # the same with random weights
    python bench_llama2.py --table FILES...                  # beside llama.cpp and others
    python bench_llama2.py --table FILES... --isa haswell    # the same, limited to AVX2
    python bench_llama2.py --perplexity TEXT --model FILE.gguf

Method: medians and inter-quartile ranges; the suite uses torch.utils.benchmark. What is compared
runs in turns (A B A B), so that a machine which slows down slows both. First calls, which may
compile, are not counted; the device is synchronised. On a shared machine trust only ratios.
"""

from __future__ import annotations

import argparse
import contextlib
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
from statistics import median
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer

import llama2

Call = Callable[[], object]

# --------------------------------------------------------------------------------------------------
# 1. Timing and printing


def synchronize() -> None:
    """Wait until the device has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    elif torch.backends.mps.is_available():
        torch.mps.synchronize()


def seconds(function: Call) -> float:
    """Wall-clock time of one call."""
    synchronize()
    start = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - start


def timer(function: Call) -> Timer:
    """torch's Timer, which synchronises the device; left alone it would use one thread."""
    return Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())


def measure(function: Call, limit: float = 1.0) -> list[float]:
    """Samples, at least three, until their spread is below 5 % or `limit` seconds are over."""
    seconds(function)  # may compile
    samples = [seconds(function)]
    if samples[0] < limit:  # else the Timer's trial runs would cost more than the samples
        options = {"min_run_time": limit / 5, "max_run_time": limit}
        samples = timer(function).adaptive_autorange(0.05, **options).times
    return samples + [seconds(function) for _ in range(3 - len(samples))]


def interleave(functions: Mapping[str, Call], rounds: int = 5) -> dict[str, list[float]]:
    """Measure the functions in turns A B A B; each sample is the median of one turn."""
    samples = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            samples[name].append(timer(function).blocked_autorange(min_run_time=0.03).median)
    return samples


def iqr(samples: Sequence[float]) -> float:
    """The inter-quartile range: the middle half of the samples lies within it."""
    return torch.tensor(samples).quantile(torch.tensor([0.25, 0.75])).diff().item()


def ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """The median of a / b, round by round: what slows one round slows both."""
    return median(x / y for x, y in zip(a, b, strict=True))


def bandwidth(device: torch.device, size: int = 2**29) -> float:
    """Bytes per second of memory, here and now: the better of reading and copying."""
    a = torch.ones(size // 4, device=device)
    b = torch.empty_like(a)
    ways = ((a.sum, a.nbytes), (lambda: b.copy_(a), 2 * a.nbytes))
    return max(count / median(measure(way, 0.5)) for way, count in ways)


def show(value: float) -> str:
    """Seconds as a person reads them."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


def note(text: str = "") -> None:
    """Progress, on one line of a terminal that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text[:100]}", end="", file=sys.stderr, flush=True)


def table(header: Sequence[object], rows: Iterable[Sequence[object]]) -> None:
    """Print Markdown that also reads well in a terminal: first column left, the others right."""
    rows = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, [":".rjust(width, "-") for width in widths])
    rows[1][0] = "-" * widths[0]
    note()
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        print("|", " | ".join((row[0].ljust(widths[0]), *cells[1:])), "|", flush=True)
    print()


# --------------------------------------------------------------------------------------------------
# 2. Models without a file

CONFIGS = {
    "tiny": llama2.Config(256, 512, 2, 4, 2, vocab_size=512, max_position_embeddings=1024),
    "1b": llama2.Config(2048, 5632, 22, 32, 4, max_position_embeddings=2048),  # TinyLlama's shape
    "7b": llama2.Config.llama2_7b(),
    "13b": llama2.Config.llama2_13b(),
    "70b": llama2.Config.llama2_70b(),
}


def scale_bytes(ggml_type: str) -> Tensor:
    """Which bytes of a block are the upper halves of float16 scales: where 0x7e makes a NaN."""
    blocks = torch.eye(llama2.GGML_TYPES[ggml_type][1], dtype=torch.uint8) * 0x7E
    return llama2.dequantize(blocks, ggml_type).isnan().any(1)


class RandomWeight(llama2.Weight):
    """A weight that is made when it is read. It takes its full memory, but few rows differ."""

    def read(self) -> Tensor:
        """Random blocks with small scales, uint8 (rows, bytes per row); norms are ones."""
        if len(self.shape) == 1:
            return torch.ones(self.shape).view(torch.uint8)[None]
        (rows, columns), (elements, size) = self.shape, self.block
        if columns % elements:
            found = f"rows of {columns} cannot be made of {self.ggml_type} blocks"
            raise ValueError(f"{found}, which hold {elements} weights each")
        few = min(rows, 2**20 // columns + 1)
        if self.ggml_type in llama2.DENSE:
            values = torch.randn(few, columns) * columns**-0.5
            blocks = values.to(llama2.DENSE[self.ggml_type]).view(torch.uint8)
        else:
            blocks = torch.randint(256, (few, columns // elements, size), dtype=torch.uint8)
            blocks[..., scale_bytes(self.ggml_type)] = 4  # 2**-14 and a little
        return blocks.flatten(1).repeat(-(-rows // few), 1)[:rows]


def random_weights(config: llama2.Config, ggml_type: str) -> dict[str, llama2.Weight]:
    """Random weights of one type; norms are float32, as in files."""
    with torch.device("meta"):
        named = llama2.Llama(config).named_parameters()
    types = ((name, tuple(p.shape), ggml_type if p.dim() > 1 else "F32") for name, p in named)
    return {name: RandomWeight(own_type, shape, []) for name, shape, own_type in types}


@dataclass
class Setting:
    """What a mode works with: the command line, and the device and dtype that follow from it."""

    args: argparse.Namespace
    device: torch.device
    dtype: torch.dtype

    def checkpoint(self, config: str, layers: int | None = None) -> llama2.Checkpoint:
        """--model, or random weights of --config or else of the mode's own shape."""
        args = self.args
        if args.model is not None and not args.claims:
            return llama2.open_checkpoint(args.model)
        shape = CONFIGS[args.config or config]
        layers = args.layers or (None if args.config else layers) or shape.num_hidden_layers
        shape = replace(shape, num_hidden_layers=layers)
        dense = {dtype: name for name, dtype in llama2.DENSE.items()}
        weights = random_weights(shape, args.type or dense[self.dtype])
        return llama2.Checkpoint("random weights", shape, weights, lambda: None)

    def build(self, checkpoint: llama2.Checkpoint, context: int = 512) -> llama2.Llama:
        """The model as the command line builds it. ValueError if there is no memory for it."""
        plan = llama2.memory_plan(checkpoint, context, self.dtype, self.dtype)
        llama2.check_memory(plan, context, self.device, llama2.free_memory(self.device))
        *_, exact = llama2.choose_dtypes(self.args.dtype, self.device, checkpoint)
        return llama2.build(self.args, checkpoint, self.device, self.dtype, exact)

    def randn(self, *shape: int) -> Tensor:
        """Random activations."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def tokens(self, config: llama2.Config, B: int, T: int) -> Tensor:
        """Random token ids (B, T)."""
        return torch.randint(config.vocab_size, (B, T), device=self.device)

    def cache(self, config: llama2.Config, size: int, filled: int = 0) -> llama2.Cache:
        """A cache for one row, its first `filled` slots taken."""
        cache = llama2.Cache(config, 1, size, self.dtype, self.device)
        fill(cache, filled)
        return cache


def fill(cache: llama2.Cache, n: int) -> None:
    """Make a cache hold n tokens, all random numbers: speed does not depend on values."""
    cache.reset()
    for both in (cache.k, cache.v):
        both[:, :, :, :n].normal_()
    cache.advance(n)


def forward(s: Setting, model: llama2.Llama, T: int, context: int = 0) -> Callable[[], Tensor]:
    """One pass of T tokens after `context` others; it can be repeated."""
    cache = s.cache(model.config, context + T, context)
    tokens = s.tokens(model.config, 1, T)

    def run() -> Tensor:
        cache.truncate(context)
        return model(tokens, cache)

    return run


# --------------------------------------------------------------------------------------------------
# 3. The suite: the names and sizes of the benchmark that came before, and a few more

SUITE = {  # name -> numbers of tokens
    "rope_forward": (1, 8, 32, 128),
    "qkv_projection": (1, 8, 32, 128),
    "attention_scores": (1, 8, 32, 128),
    "causal_mask": (8, 32, 128, 512),
    "full_attention": (1, 8, 32, 128, 512),
    "rms_norm": (1, 128),
    "mlp": (1, 128),
    "block": (1, 128),
    "prefill": (32, 128, 512),
    "decode": (128,),
}


def suite_calls(s: Setting, model: llama2.Llama, T: int) -> dict[str, Call]:
    """What each name of the suite means for T tokens."""
    c, rotate = model.config, llama2.apply_rotary_emb
    layer = next(m for m in model.modules() if isinstance(m, llama2.Block))
    a, cache, x = layer.self_attn, s.cache(c, T), s.randn(1, T, c.hidden_size)
    q, k, v = (s.randn(1, c.num_attention_heads, T, c.head_dim) for _ in range(3))
    angles, scores, swapped = cache.rope(T), q @ k.mT, (q.transpose(1, 2), k.transpose(1, 2))
    return {
        "rope_forward": lambda: [rotate(both, *angles) for both in swapped],
        "qkv_projection": lambda: (a.q_proj(x), a.k_proj(x), a.v_proj(x)),
        "attention_scores": lambda: q @ k.mT * c.head_dim**-0.5,
        "causal_mask": lambda: scores.masked_fill(~cache.mask(T), -math.inf),
        "full_attention": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask(T)),
        "rms_norm": lambda: layer.input_layernorm(x),
        "mlp": lambda: layer.mlp(x),
        "block": lambda: layer(x, *angles, cache.mask(T), cache),
        "prefill": forward(s, model, T),
        "decode": forward(s, model, 1, context=T),
    }


def run_suite(s: Setting) -> dict:
    """Time each entry."""
    model = s.build(s.checkpoint("7b", layers=2))
    c, result, rows = model.config, {}, []
    for name, T in ((name, T) for name, sizes in SUITE.items() for T in sizes):
        full = f"{name}/{T}"
        if s.args.filter in full and T < c.max_position_embeddings:
            note(full)
            found = measure(suite_calls(s, model, T)[name], s.args.seconds)
            result[full] = {"median": median(found), "iqr": iqr(found), "samples": len(found)}
            rows.append((full, show(median(found)), show(iqr(found)), len(found)))
    if not rows:
        raise ValueError(f"--filter {s.args.filter!r} matches no benchmark")
    print(f"prefill and decode: {c.num_hidden_layers} layers of {c.hidden_size} and the head")
    table(("benchmark", "median", "IQR", "samples"), rows)
    return {"suite": result}


# --------------------------------------------------------------------------------------------------
# 4. Claims: verdicts are functions of numbers; each claim is tested against naive variants


def check_same(name: str, found: Tensor, wanted: Tensor) -> None:
    """Raises ValueError for a variant that computes something else: it is not timed."""
    error = (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()
    if not error <= (1e-4 if wanted.dtype == torch.float32 == found.dtype else 5e-2):
        raise ValueError(f"{name} differs from the reference by {error:.1e}: not timed")


def mask_by_loops(cache: llama2.Cache, T: int) -> Tensor | None:
    """Element by element, as a first version does."""
    S = cache.slots(T).stop
    rows = [[j <= S - T + i for j in range(S)] for i in range(T)]
    return None if T == 1 else torch.tensor(rows, device=cache.k.device)


def mask_by_torch(cache: llama2.Cache, T: int) -> Tensor:
    """Made anew for each pass by two operations."""
    S = cache.slots(T).stop
    return torch.ones(T, S, dtype=torch.bool, device=cache.k.device).tril(S - T)


def written_out(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None) -> Tensor:
    """Attention by separate operations: the scores of all heads are written to memory."""
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    return scores.softmax(-1).type_as(v) @ v


class LayerCaches:
    """Two preallocated tensors per layer."""

    def __init__(self, cache: llama2.Cache) -> None:
        self.pos = cache.pos
        self.k, self.v = ([layer.clone() for layer in both] for both in (cache.k, cache.v))

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        own_k, own_v, end = self.k[layer], self.v[layer], self.pos + k.shape[2]
        own_k[:, :, self.pos : end], own_v[:, :, self.pos : end] = k, v
        return own_k[:, :, :end], own_v[:, :, :end]


class ConcatenatingCache(LayerCaches):
    """Copies all keys and values for each new token, as most first versions do."""

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        old_k, old_v = self.k[layer][:, :, : self.pos], self.v[layer][:, :, : self.pos]
        return torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)


def inline(model: llama2.Llama) -> Callable[[Tensor, llama2.Cache], Tensor]:
    """Llama.forward as one function without modules, the weights looked up once."""
    c, D, G = model.config, model.config.head_dim, model.config.num_key_value_heads
    embedding, last, head = (m.weight for m in (model.embed_tokens, model.norm, model.lm_head))
    layers = [tuple(layer.parameters()) for layer in model.layers]

    @torch.no_grad()
    def run(tokens: Tensor, cache: llama2.Cache) -> Tensor:
        def norm(x: Tensor, weight: Tensor) -> Tensor:
            x32 = x.float()
            x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + c.rms_norm_eps)
            return x32.type_as(x) * weight

        B, T = tokens.shape
        (cos, sin), mask = cache.rope(T), cache.mask(T)
        if mask is not None and c.num_attention_heads != G:
            mask = mask.repeat(c.num_attention_heads // G, 1)
        x = F.embedding(tokens, embedding)
        for i, (norm1, wq, wk, wv, wo, norm2, gate, up, down) in enumerate(layers):
            h = norm(x, norm1)
            q, k, v = (F.linear(h, w).unflatten(-1, (-1, D)) for w in (wq, wk, wv))
            q = llama2.apply_rotary_emb(q, cos, sin).transpose(1, 2)
            k = llama2.apply_rotary_emb(k, cos, sin).transpose(1, 2)
            k, v = cache.update(i, k, v.transpose(1, 2))
            y = F.scaled_dot_product_attention(q.reshape(B, G, -1, D), k, v, attn_mask=mask)
            x = x + F.linear(y.reshape(B, -1, T, D).transpose(1, 2).flatten(2), wo)
            h = norm(x, norm2)
            x = x + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, up), down)
        cache.advance(T)
        return F.linear(norm(x[:, -1], last), head).float()

    return run


NAIVE = {  # what claim (e) switches off; without "KV cache" each step computes all tokens again
    "KV cache": None,
    "mask cache": (llama2.Cache, "mask", mask_by_loops),
    "fused attention": (F, "scaled_dot_product_attention", written_out),
}


def step_through(
    s: Setting, model: llama2.Llama, ids: Tensor, start: int, without: Sequence[str] = ()
) -> Tensor:
    """The logits of each step of a generation whose outcome is ids[start:]."""
    cache, logits = s.cache(model.config, len(ids)), []
    with contextlib.ExitStack() as stack:
        for replacement in filter(None, map(NAIVE.get, without)):
            stack.enter_context(patch.object(*replacement))
        for end in range(start, len(ids) + 1):
            if "KV cache" in without:
                cache.reset()
            logits.append(model(ids[None, cache.pos : end], cache))
    return torch.cat(logits)


class Finding(NamedTuple):
    """What a claim's verdict follows from: numbers, and the bounds within which they confirm it."""

    what: str
    cases: dict[str, float]
    low: float
    high: float = math.inf

    def verdict(self) -> str:
        """confirmed if all numbers lie within the bounds, refuted if none does, else depends."""
        holds = [self.low <= value <= self.high for value in self.cases.values()]
        return "confirmed" if all(holds) else "depends" if any(holds) else "refuted"


def claim_mask(s: Setting, model: llama2.Llama) -> Finding:
    """(a) Making and finding the mask, compared with the pass that needs it."""
    c, saved, times = model.config, {}, {}
    for T in (128, 512):
        note(f"claim (a), {T} tokens")
        cache = s.cache(c, min(c.max_position_embeddings, 4096))
        ways = {
            "made by loops": partial(mask_by_loops, cache, T),
            "made by torch": partial(mask_by_torch, cache, T),
            "sliced from one band": partial(cache.mask, T),
        }
        for name, way in ways.items():
            check_same(name, way(), cache.mask(T))
        times[T] = {name: median(samples) for name, samples in interleave(ways).items()}
        times[T]["forward pass"] = whole = median(measure(forward(s, model, T), 0.5))
        for how in ("loops", "torch"):
            gain = max(times[T][f"made by {how}"] - times[T]["sliced from one band"], 0.0)
            saved[f"at {T} against {how}"] = gain / (whole + gain)
    rows = [(name, *(show(times[T][name]) for T in times)) for name in times[512]]
    table(("(a) the causal mask", *(f"{T} tokens" for T in times)), rows)
    return Finding("part of a forward pass that it saves", saved, 0.05)


def claim_cache(s: Setting, model: llama2.Llama) -> Finding:
    """(b) One decode step of the cache and the attention over it, all layers."""
    c, rows, cases = model.config, [], {}
    G, group = c.num_key_value_heads, c.num_attention_heads // c.num_key_value_heads
    q, (k, v) = s.randn(1, G, group, c.head_dim), s.randn(2, 1, G, 1, c.head_dim)

    def step(cache: llama2.Cache | LayerCaches) -> Tensor:
        for layer in range(c.num_hidden_layers):
            y = F.scaled_dot_product_attention(q, *cache.update(layer, k, v))
        return y

    for context in (128, 512, 1024, 2048, 4096):
        if context > c.max_position_embeddings:
            break
        note(f"claim (b), context {context}")
        unified = s.cache(c, context, context - 1)
        others = {"per layer": LayerCaches(unified), "concatenated": ConcatenatingCache(unified)}
        ways = {name: partial(step, one) for name, one in {"unified": unified, **others}.items()}
        for name, way in ways.items():
            check_same(name, way(), step(unified))
        samples = interleave(ways, rounds=9)
        rows.append((context, *(show(median(values)) for values in samples.values())))
        for name in others:
            cases[f"{name} at {context}"] = ratio(samples[name], samples["unified"])
    table((f"(b) {c.num_hidden_layers} layers, context", *samples), rows)
    return Finding("time of others / unified", cases, 1.05)


def claim_modules(s: Setting, model: llama2.Llama) -> Finding:
    """(c) A decode step by modules and by one function; small, where overhead shows, and large."""
    small = llama2.Llama(CONFIGS["tiny"]).to(s.device, s.dtype)
    cases, rows = {}, []
    for size, m in (("small", small), ("large", model)):
        cache, token = s.cache(m.config, 128, 64), s.tokens(m.config, 1, 1)

        def step(function: Callable, cache: llama2.Cache = cache, token: Tensor = token) -> Tensor:
            cache.truncate(64)
            return function(token, cache)

        for how, change in (("eager", lambda function: function), ("compiled", torch.compile)):
            note(f"claim (c), {size}, {how}")
            ways = {"modules": m, "one function": inline(m)}
            ways = {name: partial(step, change(function)) for name, function in ways.items()}
            try:
                first = sum(map(seconds, ways.values()))
            except torch._dynamo.exc.TorchDynamoException as error:
                print(f"(c) {size}, not compiled: {str(error).splitlines()[0][:100]}")
                continue
            check_same("one function", ways["one function"](), step(m))
            both = interleave(ways, rounds=9)
            a, b = map(median, both.values())
            cases[f"{size} {how}"] = factor = ratio(*both.values())
            rows.append((f"{size}, {how}", show(a), show(b), f"{factor:.2f}x", show(first)))
    table(("(c) a decode step", "modules", "one function", "ratio", "first calls"), rows)
    return Finding("modules / one function", cases, 1.05)


def claim_loading(s: Setting, model: llama2.Llama) -> Finding:
    """(d) From a real file to its first token: within a second and 2 s per GB."""
    path, made = s.args.model or llama2.DEFAULT_MODEL, []
    size = sum(weight.nbytes for weight in llama2.open_checkpoint(path).weights.values())
    load = seconds(lambda: made.extend(llama2.load(path, s.device, s.dtype)))
    loaded, tokenizer = made
    tokens = llama2.generate(loaded, tokenizer.encode("Once upon"), stop_ids=())
    first = seconds(lambda: next(tokens))
    what = f"{path.name}, {size / 1e6:.0f} MB, load {show(load)}, first token {show(first)}"
    return Finding(what, {"of the time allowed": (load + first) / (1 + size / 0.5e9)}, 0, 1)


def claim_speedup(s: Setting, model: llama2.Llama) -> Finding:
    """(e) Everything on, everything naive, and each part naive by itself, for 6 new tokens."""
    cases, rows = {}, []
    variants = {"all on": (), "all naive": (*NAIVE,)} | {f"no {part}": (part,) for part in NAIVE}
    for T in (32, 128):
        ids = s.tokens(model.config, 1, T + 5)[0]
        ways = {
            name: partial(step_through, s, model, ids, T, parts) for name, parts in variants.items()
        }
        for name, way in ways.items():
            check_same(name, way(), step_through(s, model, ids, T))
        samples = interleave(ways, rounds=3)
        for name, values in samples.items():
            factor = ratio(values, samples["all on"])
            rows.append((f"prompt of {T}, {name}", show(median(values)), f"{factor:.2f}x"))
        cases[f"after {T} tokens"] = ratio(samples["all naive"], samples["all on"])
    table(("(e) 6 new tokens", "median", "of all on"), rows)
    return Finding("naive / all on", cases, 2, 3)


CLAIMS = {
    "(a) caching the causal mask makes the model faster": claim_mask,
    "(b) one unified cache is faster than others": claim_cache,
    "(c) a module per layer costs speed": claim_modules,
    "(d) real files load fast": claim_loading,
    "(e) all of it together gives 2-3x": claim_speedup,
}


def run_claims(s: Setting) -> dict:
    """Measure all five, then print two lines for each."""
    model = s.build(s.checkpoint("7b", layers=2))
    print(f"{model.config.num_hidden_layers} layers of {model.config.hidden_size} and the head\n")
    out = {claim: run(s, model) for claim, run in CLAIMS.items()}
    for claim, found in out.items():
        cases = ", ".join(f"{value:.3g} {name}" for name, value in found.cases.items())
        print(f"{claim}: {found.verdict().upper()}\n    {found.what}: {cases}")
    return {"claims": {k: v._asdict() | {"verdict": v.verdict()} for k, v in out.items()}}


# --------------------------------------------------------------------------------------------------
# 5. Whole models, and others beside them

# An engine takes prompt lengths, how many tokens to generate, and by name the depths at which to do
# so: the number of tokens before them. It returns seconds: for each prompt by a name such as
# "pp128", per new token by the name of its depth.
Engine = Callable[[Sequence[int], int, Mapping[str, int]], dict[str, float]]
Samples = dict[str, list[float]]


def greedy_engine(
    step: Callable[[Tensor], Tensor], reset: Call, set_depth: Call | None, tokens: Tensor
) -> Engine:
    """An engine in this process. `step`: tokens (B, T) -> logits (B, V); prompts begin `tokens`."""
    last = tokens[:, :1].clone()

    def feed(tokens: Tensor) -> None:
        last.copy_(step(tokens).argmax(-1, keepdim=True))
        last.tolist()  # as whoever shows the text must

    def prompt(T: int) -> None:
        reset()
        feed(tokens[:, :T])

    def run(prompts: Sequence[int], new: int, depths: Mapping[str, int]) -> dict[str, float]:
        found = {}
        for T in prompts:
            prompt(T)  # once unmeasured, as llama-bench does
            found[f"pp{T}"] = seconds(partial(prompt, T))
        for name, depth in depths.items():
            reset()
            if depth:
                (set_depth or prompt)(depth)
            found[name] = sum(seconds(partial(feed, last)) for _ in range(new)) / new
        return found

    return run


def our_engine(
    s: Setting, checkpoint: llama2.Checkpoint, model: llama2.Llama, size: int, batch: int = 1
) -> Engine:
    """llama2.py with the cache of its command line."""
    compile = s.args.compile is not False
    _, dtype, _ = llama2.choose_dtypes(s.args.dtype, s.device, checkpoint, compile)
    cache = llama2.Cache(model.config, batch, size, dtype, s.device)

    def step(tokens: Tensor) -> Tensor:
        for chunk in tokens.split(llama2.prefill_chunk(s.device), 1):
            logits = model(chunk, cache)
        return logits

    return greedy_engine(
        step, cache.reset, partial(fill, cache), s.tokens(model.config, batch, size)
    )


def transformers_engine(s: Setting, config: llama2.Config, size: int, name: str) -> Engine:
    """The same shape as Hugging Face's model, eager; "transformers-DTYPE" in that dtype."""
    import transformers

    dtype, past = llama2.DTYPES.get(name.removeprefix("transformers-"), s.dtype), None
    with torch.device("meta"):
        shape = transformers.LlamaConfig(**vars(config))
        model = transformers.LlamaForCausalLM(shape).eval().to(dtype)
    model.to_empty(device=s.device)
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.fill_(0.01)

    def reset() -> None:
        nonlocal past
        past = transformers.DynamicCache()

    def step(tokens: Tensor) -> Tensor:
        return model(tokens, past_key_values=past, use_cache=True, logits_to_keep=1).logits[:, -1]

    return greedy_engine(step, reset, None, s.tokens(config, s.args.batch, size))


def llama_bench_engine(program: str, path: Path) -> Engine:
    """A llama-bench, llama.cpp's or a fork's: one process for all prompts, with its own warm-up."""
    if shutil.which(program) is None:
        raise ValueError(f"there is no {program}: --llama-bench PATH names llama.cpp's llama-bench")

    def call(*options: object) -> dict[str, float]:
        threads = torch.get_num_threads()
        command = [program, "-m", path, "-t", threads, "-r", 1, "-o", "json", *options]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise ValueError(f"{program} failed: {why[0]}")
        found = {}
        for test in json.loads(done.stdout):
            n, depth = test["n_prompt"], test.get("n_depth", 0)  # forks may not know depths
            found[f"pp{n}" if n else f"tg@{depth}"] = (n or 1) / test["avg_ts"]
        return found

    def run(prompts: Sequence[int], new: int, depths: Mapping[str, int]) -> dict[str, float]:
        found = call("-p", ",".join(map(str, prompts)), "-n", new)
        if any(depths.values()):
            found |= call(
                "-p", 0, "-n", new, "-d", ",".join(map(str, filter(None, depths.values())))
            )
        return found | {name: found[f"tg@{depth}"] for name, depth in depths.items()}

    return run


def take_turns(engines: Mapping[str, Engine], *tests: object, rounds: int) -> dict[str, Samples]:
    """Run the engines A B A B after a warm-up; the samples of each by name."""
    samples = {name: {} for name in engines}
    for i in range(rounds + 1):
        for name, engine in engines.items():
            note(f"{name}, " + (f"round {i} of {rounds}" if i else "warm-up"))
            for key, value in engine(*tests).items():
                samples[name].setdefault(key, []).extend([value] * (i > 0))
    return samples


def compare(samples: Mapping[str, Samples], tokens: Mapping[str, int]) -> dict[str, dict]:
    """What the engines, ours first, reached for each key of `tokens`, numbers per sample."""
    ours, rows = next(iter(samples.values())), {}
    for key, n in tokens.items():
        rows[key] = {"seconds": median(ours[key]), "iqr": iqr(ours[key])}
        rows[key]["tokens/s"] = {name: n / median(each[key]) for name, each in samples.items()}
        rows[key]["ratio"] = {
            name: ratio(each[key], ours[key]) for name, each in samples.items() if each is not ours
        }
    return rows


def bar(rates: Mapping[str, float], most: float, width: int = 40) -> str:
    """A line of a plot: # up to the first rate, the others' initials where theirs are."""
    (_, ours), *others = rates.items()
    line = list(("#" * round(width * ours / most)).ljust(width + 1))
    for name, rate in others:
        line[round(width * rate / most)] = name[0]
    return "".join(line)


def run_model(s: Setting, path: Path | None) -> dict:
    """One model: load, prompts, tokens, memory; others beside it; speed as the context fills."""
    args, made = s.args, []
    prompts = args.prompt_tokens or ([128, 512] if args.table else [128])
    new, B, depths = args.gen_tokens, args.batch, {"tg": 0}
    depths |= {f"tg@{n}": n for n in args.context_sweep}
    checkpoint = llama2.open_checkpoint(path) if args.table else s.checkpoint("7b")
    size, limit = max(*prompts, *depths.values()) + new, checkpoint.config.max_position_embeddings
    if size > limit:
        raise ValueError(f"the context holds {limit} tokens, not {size - new} and {new} new ones")
    load = seconds(lambda: made.append(s.build(checkpoint, size)))
    (model,) = made
    engines = {"llama2.py": our_engine(s, checkpoint, model, size, B)}
    take_turns(engines, prompts[:1], new, {"tg": 0}, rounds=0)
    peak = llama2.peak_memory(s.device)  # before the others come
    for text in args.llama_bench if args.table else ():
        name, _, program = text.rpartition("=")
        engines[name or "llama.cpp"] = llama_bench_engine(program, path)
    for name in args.compare:
        engines[name] = transformers_engine(s, checkpoint.config, size, name)
    samples = take_turns(engines, prompts, new, depths, rounds=args.rounds)
    rows = compare(samples, {f"pp{T}": B * T for T in prompts} | dict.fromkeys(depths, B))
    others, most = [*engines][1:], max(x for row in rows.values() for x in row["tokens/s"].values())
    lines = []
    for key, row in rows.items():
        ours, *theirs = row["tokens/s"].values()
        cells = [f"{a:.1f} ({b:.2f})" for a, b in zip(theirs, row["ratio"].values(), strict=True)]
        times = show(row["seconds"]), show(row["iqr"])
        lines.append((key, *times, f"{ours:.1f}", *cells, bar(row["tokens/s"], most)))
    marks = ", ".join(("#: llama2.py", *(f"{name[0]}: {name}" for name in others)))
    header = (path.name if path else "random weights", "time", "IQR", "tokens/s")
    table((*header, *(f"{name} (ours / theirs)" for name in others), marks), lines)
    size, speed = llama2.weight_bytes(model), bandwidth(s.device)
    fraction = size / rows["tg"]["seconds"] / speed
    print(f"loaded in {show(load)}, kernels compiled if needed; peak memory {peak / 1e9:.2f} GB")
    print(f"a token reads {size / 1e9:.3f} GB of weights: {fraction:.0%} of the memory's bandwidth")
    print(f"({fraction * speed / 1e9:.1f} of {speed / 1e9:.1f} GB/s, measured now)\n")
    facts = {"load": load, "peak memory": peak, "weights": size, "bandwidth": speed}
    return facts | {"fraction": fraction, "tests": rows}


def run_models(s: Setting) -> dict:
    """run_model() for --model, --config or all files of --table, which a last table sums up."""
    out, lines = {}, []
    for path in s.args.table or [s.args.model]:
        name = path.name if path else "random weights"
        found = out[str(path or name)] = run_model(s, path)
        cells = []
        for row in found["tests"].values():
            ours, *_ = row["tokens/s"].values()
            best = min(row["ratio"], key=row["ratio"].get, default=None)
            cells.append(f"{ours:.1f}")
            if best:
                cells[-1] += f" / {row['tokens/s'][best]:.1f} = {row['ratio'][best]:.2f}"
        lines.append((name, *cells, f"{found['fraction']:.0%}"))
    if len(lines) > 1:
        table(("file", *(f"{key}, ours / best" for key in found["tests"]), "bandwidth"), lines)
    return {"models": out}


# --------------------------------------------------------------------------------------------------
# 6. Perplexity


def windows(ids: Sequence[int], context: int, bos: int | None) -> Iterator[list[int]]:
    """The windows of `context` ids that llama-perplexity cuts a text into: BOS replaces the first id
    of each, and what counts is how the second half is predicted, from id context // 2 + 1 on."""
    for start in range(0, len(ids) - context + 1, context):
        window = list(ids[start : start + context])
        yield window if bos is None else [bos, *window[1:]]


def perplexity(losses: Tensor) -> tuple[float, float]:
    """exp(mean loss) and its standard error."""
    value = losses.double().mean().exp().item()
    return value, value * losses.double().std().item() / math.sqrt(len(losses))


def run_perplexity(s: Setting) -> dict:
    """Perplexity of a text. ValueError if it is too short."""
    path, T = s.args.model or llama2.DEFAULT_MODEL, s.args.context
    checkpoint = llama2.open_checkpoint(path)
    tokenizer, limit = checkpoint.tokenizer(), checkpoint.config.max_position_embeddings
    text = s.args.perplexity.read_bytes().decode("utf-8", "replace")
    ids = tokenizer.encode(text, tokenizer.add_bos)
    if not 4 <= T <= limit or len(ids) < 2 * T:
        found = f"{s.args.perplexity} has {len(ids)} tokens and the model a context of {limit}"
        raise ValueError(f"--context {T}: {found}; expected two windows of 4 to {limit} tokens")
    model, losses = s.build(checkpoint, T), []
    for window in windows(ids, T, tokenizer.bos_id if tokenizer.add_bos else None):
        losses.append(-llama2.score(model, window)[T // 2 :])
        value, error = perplexity(torch.cat(losses))
        note(f"window {len(losses)} of {len(ids) // T}: perplexity {value:.4f} +- {error:.4f}")
    tokens = sum(map(len, losses))
    rows = [(path.name, f"{value:.4f}", f"+-{error:.5f}")]
    table((f"{tokens} tokens scored", "perplexity", "standard error"), rows)
    return {"perplexity": {"tokens": tokens, "value": value, "error": error}}


# --------------------------------------------------------------------------------------------------
# 7. Processors with fewer instructions than this one

ISAS = {  # what compilers call them -> what oneDNN, MKL and ATen call the most that they may use
    "x86-64": ("SSE41", "SSE4_2", "default"),
    "haswell": ("AVX2", "AVX2", "avx2"),  # AVX2 and FMA: most desktops and laptops
    "skylake-avx512": ("AVX512_CORE", "AVX512", "avx512"),
    "icelake-server": ("AVX512_CORE_VNNI", "AVX512", "avx512"),  # VNNI, but no bfloat16
}
LIMITED = "BENCH_LLAMA2_ISA"  # tells the second process that it is the limited one


def run_limited(isa: str, argv: Sequence[str]) -> int:
    """Run again in a process whose libraries see fewer instructions; returns its exit status.

    They look when they are first used, some while torch is imported: too late in this process.
    """
    names = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "ATEN_CPU_CAPABILITY", LIMITED)
    env = os.environ | dict(zip(names, (*ISAS[isa], isa), strict=True))
    status = subprocess.run([sys.executable, __file__, *argv], env=env, check=False).returncode
    if status < 0:
        raise ValueError(f"--isa {isa}: ended by signal {-status}; does this processor have it?")
    return status


def limit_kernels(isa: str) -> None:
    """In that process: compile kernels for `isa`, and let llama2.py see no newer instructions."""
    if builder := llama2.kernel_builder():
        builder.TARGETS[:] = [f"-march={isa}"]
    torch.cpu.get_capabilities = dict


# --------------------------------------------------------------------------------------------------
# 8. Command line


def count(text: str) -> int:
    """A whole number above zero."""
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises ValueError for a wrong one."""
    parser = llama2.Parser(prog="bench_llama2.py", description="Measure llama2.py.")
    parser.set_defaults(quiet=False)  # for llama2.build
    modes = "modes (default: the suite, or --model or --config)"
    add = parser.add_argument_group(modes).add_argument
    add("--suite", action="store_true", help="each layer by itself")
    add("--claims", action="store_true", help="five claims with verdicts")
    add("--table", metavar="GGUF", type=Path, nargs="+", help="files beside llama.cpp")
    add("--perplexity", metavar="TEXT", type=Path, help="perplexity of a text file")
    add = parser.add_argument_group("of what").add_argument
    add("--model", metavar="FILE", type=Path, help="a model (default: random weights)")
    add("--config", choices=CONFIGS, help="the shape of random weights")
    add("--layers", metavar="N", type=count, help="only so many layers of it")
    add("--type", choices=llama2.GGML_TYPES, help="of random weights (default: --dtype)")
    numbers = {"metavar": "N", "type": count, "nargs": "+"}
    prompts = "lengths of prompts (default: 128; with --table also 512)"
    add("--prompt-tokens", **numbers, help=prompts)
    add("--gen-tokens", metavar="N", type=count, default=16, help="default: 16")
    add("--batch", metavar="N", type=count, default=1, help="rows at once (default: 1)")
    add("--context-sweep", **numbers, default=[], help="generation after N tokens")
    add("--context", metavar="N", type=count, default=512, help="of --perplexity (default: 512)")
    others = ("transformers", "transformers-bfloat16")
    add("--compare", choices=others, nargs="+", default=[], help="run these in turns with ours")
    programs = "for --table (default: the one on the PATH); NAME= tells several apart"
    options = {"metavar": "[NAME=]PATH", "nargs": "+", "default": ["llama-bench"]}
    add("--llama-bench", **options, help=programs)
    add = parser.add_argument_group("how").add_argument
    add("--rounds", metavar="N", type=count, default=5, help="of what runs in turns (default: 5)")
    add("--seconds", metavar="S", type=float, default=1.0, help="per entry of the suite, about")
    add("--filter", metavar="TEXT", default="", help="only entries with this in their name")
    add("--compile", action=argparse.BooleanOptionalAction, help="default: as llama2.py")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    dtype = "of the activations (default: as llama2.py; float32 is exact)"
    add("--dtype", choices=("auto", *llama2.DTYPES), default="auto", help=dtype)
    add("--isa", choices=ISAS, help="use no more instructions than this x86-64 processor has")
    add("--threads", metavar="N", type=count, help="CPU threads (default: torch's choice)")
    add("--json", metavar="FILE", type=Path, help="write the result there as well")
    args = parser.parse_args(argv)
    if args.model is not None and args.config is not None and not args.claims:
        parser.error("--model and --config exclude each other")
    if args.claims and args.type is not None:
        parser.error("--claims runs dense weights of --dtype: it takes no --type")
    if args.table and args.batch > 1:
        parser.error("--table runs one row: it takes no --batch")
    names = [text.rpartition("=")[0] for text in args.llama_bench]
    if len({*names}) < len(names):
        parser.error("--llama-bench: several programs need names, NAME=PATH")
    if not 0 < args.seconds < 3600:
        parser.error(f"--seconds {args.seconds}: expected above 0 and below 3600")
    return args


def machine(s: Setting) -> dict[str, object]:
    """What the figures depend on."""
    model = platform.processor() or "unknown"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((x.split(":")[1].strip() for x in lines if x.startswith("model name")), model)
    found = getattr(torch.cpu, "get_capabilities", dict)()  # torch before 2.11 cannot tell
    special = [x for x in ("avx_vnni", "avx512_vnni", "avx512_bf16", "amx_bf16") if found.get(x)]
    aten, cuda = torch.backends.cpu.get_cpu_capability(), s.device.type == "cuda"
    return {
        "processor": f"{model}, {platform.machine()}",
        "instruction set": " ".join((s.args.isa or "native", aten, *special)),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": s.args.dtype,
        "device": torch.cuda.get_device_name(s.device) if cuda else s.device.type,
    }


def run(args: argparse.Namespace) -> int:
    """Do what the command line says; returns the exit status."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    if args.isa is not None:
        limit_kernels(args.isa)
    auto = "cuda" if torch.cuda.is_available() else "cpu"
    device = llama2.choose_device(auto if args.device == "auto" else args.device, None)
    default = llama2.AUTO_DTYPE[device.type]
    s = Setting(args, device, llama2.DTYPES.get(args.dtype, default))
    result = {"machine": machine(s)}
    print("; ".join(f"{key} {value}" for key, value in result["machine"].items()), flush=True)
    modes = {
        run_suite: args.suite,
        run_claims: args.claims,
        run_models: args.table,
        run_perplexity: args.perplexity,
    }
    chosen = [mode for mode, wanted in modes.items() if wanted]
    with torch.no_grad():
        for mode in chosen or [run_models if args.model or args.config else run_suite]:
            result |= mode(s)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = parse_args(argv)
        if args.isa not in (None, os.environ.get(LIMITED)):
            return run_limited(args.isa, argv)
        return run(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `| head`: whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, MemoryError, ImportError, torch.OutOfMemoryError) as error:
        return llama2.fail(error, "bench_llama2.py")


if __name__ == "__main__":
    sys.exit(main())
