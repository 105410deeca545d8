"""The benchmark of llama2.py: what is fast, what is not, and where the time goes, on this machine.

    python bench_llama2.py                                   # the suite: each layer by itself
    python bench_llama2.py --claims                          # five claims, each with a verdict
    python bench_llama2.py --breakdown                       # shares of a forward pass
    python bench_llama2.py --model FILE.gguf                 # a whole model: load, prompt, tokens
    python bench_llama2.py --config 7b --type Q4_0           # the same with random weights
    python bench_llama2.py --table FILES...                  # next to llama.cpp
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
from statistics import median, quantiles
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.benchmark import Timer

import llama2

BASELINES = Path(__file__).resolve().parent / ".benchmarks"
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
    low, _, high = quantiles([*samples] * (1 + (len(samples) < 2)), n=4, method="inclusive")
    return high - low


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
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    note()
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        print("|", " | ".join((first.ljust(widths[0]), *cells)), "|", flush=True)
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
        plan = llama2.memory_plan(checkpoint, context, self.dtype, self.device)
        llama2.check_memory(plan, context, self.device, llama2.free_memory(self.device))
        *_, exact = llama2.choose_dtypes(self.args.dtype, self.device, checkpoint)
        return llama2.build(self.args, checkpoint, self.device, self.dtype, exact)

    def randn(self, *shape: int) -> Tensor:
        """Random activations."""
        return torch.randn(shape, dtype=self.dtype, device=self.device)

    def tokens(self, config: llama2.Config, B: int, T: int) -> Tensor:
        """Random token ids (B, T)."""
        return torch.randint(config.vocab_size, (B, T), device=self.device)

    def cache(self, config: llama2.Config, room: int, filled: int = 0) -> llama2.Cache:
        """A cache for one row, its first `filled` slots taken."""
        cache = llama2.Cache(config, 1, room, self.dtype, self.device)
        fill(cache, filled)
        return cache


def fill(cache: llama2.Cache, n: int) -> None:
    """Make a cache hold n tokens, all random numbers: speed does not depend on values."""
    cache.reset()
    for both in (cache.k, cache.v):
        both[:, :, :, :n].normal_()
    cache.advance(n)


def forward(s: Setting, model: llama2.Llama, T: int, context: int = 0) -> Callable[[], Tensor]:
    """One pass of T tokens behind `context` others; it can be repeated."""
    cache = s.cache(model.config, context + T, context)
    tokens = s.tokens(model.config, 1, T)

    def run() -> Tensor:
        cache.truncate(context)
        return model(tokens, cache)

    return run


# --------------------------------------------------------------------------------------------------
# 3. The suite: the names and sizes of the benchmark that came before, and a few more

SUITE = {  # name -> numbers of tokens, and the means of its Candle version on a CPU in seconds
    "rope_forward": ((1, 8, 32, 128), (62.6e-6, 206.1e-6, 467.8e-6, 9.2e-3)),
    "qkv_projection": ((1, 8, 32, 128), (19.1e-3, 21.0e-3, 50.8e-3, 65.5e-3)),
    "attention_scores": ((1, 8, 32, 128), (3.8e-6, 44.8e-6, 308.5e-6, 8.5e-3)),
    "causal_mask": ((8, 32, 128, 512), (9.9e-6, 118.7e-6, 2.1e-3, 58.8e-3)),
    "full_attention": ((1, 8, 32, 128, 512), (11.5e-6, 119.8e-6, 1.07e-3)),
    "rms_norm": ((1, 128), ()),
    "mlp": ((1, 128), ()),
    "block": ((1, 128), ()),
    "prefill": ((32, 128, 512), ()),
    "decode": ((128,), ()),
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
        # Candle's figure includes applying the mask to the scores of all heads.
        "causal_mask": lambda: scores.masked_fill(~cache.mask(T), -math.inf),
        "full_attention": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask(T)),
        "rms_norm": lambda: layer.input_layernorm(x),
        "mlp": lambda: layer.mlp(x),
        "block": lambda: layer(x, *angles, cache.mask(T), cache),
        "prefill": forward(s, model, T),
        "decode": forward(s, model, 1, context=T),
    }


def run_suite(s: Setting) -> dict:
    """Time each entry; compare with a baseline if one is named."""
    model = s.build(s.checkpoint("7b", layers=2))
    c, result, rows = model.config, {}, []
    comparable = (c.hidden_size, c.num_attention_heads) == (4096, 32)
    for name, (sizes, published) in SUITE.items():
        for i, T in enumerate(sizes):
            full = f"{name}/{T}"
            if s.args.filter not in full or T >= c.max_position_embeddings:
                continue
            note(full)
            found = measure(suite_calls(s, model, T)[name], s.args.seconds)
            result[full] = {"median": median(found), "iqr": iqr(found), "samples": len(found)}
            theirs = show(published[i]) if comparable and i < len(published) else ""
            rows.append((full, show(median(found)), show(iqr(found)), len(found), theirs))
    if not rows:
        raise ValueError(f"--filter {s.args.filter!r} matches no benchmark")
    print(f"prefill and decode: {c.num_hidden_layers} layers of {c.hidden_size} and the head")
    table(("benchmark", "median", "IQR", "samples", "Candle, published"), rows)
    if comparable:
        print("Candle's means come from another machine: only shapes and ratios carry over.")
    return {"suite": result, **baselines(s.args, machine(s), result)}


def change(new: Mapping[str, float], old: Mapping[str, float]) -> tuple[float, float, str]:
    """The relative change of a median, its uncertainty, and a verdict.

    The uncertainty combines both inter-quartile ranges and is at least 3 %.
    """
    part = new["median"] / old["median"] - 1
    noise = math.hypot(new["iqr"] / old["median"], old["iqr"] / old["median"] * (1 + part))
    word = "regressed" if part > 0 else "improved"
    return part, max(noise, 0.03), word if abs(part) > max(noise, 0.03) else "within noise"


def baselines(args: argparse.Namespace, here: Mapping[str, object], result: dict) -> dict:
    """Compare the suite's result with a saved one, and save it; `here` is what it was taken on."""
    out = {}
    if args.baseline is not None:
        file = BASELINES / f"{args.baseline}.json"
        if not file.exists():
            names = ", ".join(sorted(f.stem for f in BASELINES.glob("*.json"))) or "none"
            raise ValueError(f"--baseline {args.baseline}: not there; saved are: {names}")
        saved = json.loads(file.read_text())
        old = saved["suite"]
        if other := [f"{k} {v}" for k, v in saved["machine"].items() if v != here.get(k)]:
            print("beware: the baseline was taken with", ", ".join(other))
        out = {name: change(result[name], old[name]) for name in result if name in old}
        rows = [(name, f"{a:+.1%}", f"+-{b:.1%}", word) for name, (a, b, word) in out.items()]
        table((f"against {args.baseline}", "change", "uncertainty", "verdict"), rows)
    if args.save_baseline is not None:
        BASELINES.mkdir(exist_ok=True)
        saved = {"machine": here, "suite": result}
        (BASELINES / f"{args.save_baseline}.json").write_text(json.dumps(saved))
    return {"baseline": out}


# --------------------------------------------------------------------------------------------------
# 4. Claims: verdicts are functions of numbers; each claim is tested against naive variants


def judge(cases: Mapping[str, float], low: float, high: float = math.inf) -> str:
    """confirmed if all numbers lie from low to high, refuted if none does, else depends."""
    holds = [low <= value <= high for value in cases.values()]
    return "confirmed" if all(holds) else "depends" if any(holds) else "refuted"


def listed(cases: Mapping[str, float], form: str = ".2f") -> str:
    """The numbers behind a verdict: factors, or percentages if the form ends in %."""
    unit = "" if form.endswith("%") else "x"
    return ", ".join(f"{value:{form}}{unit} {name}" for name, value in cases.items())


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


def claim_mask(s: Setting, model: llama2.Llama) -> tuple[str, str, dict]:
    """(a) Making, finding and applying the mask, compared with the pass that needs it."""
    c, saved, times = model.config, {}, {}
    room = min(c.max_position_embeddings, 4096)
    for T in (128, 512):
        note(f"claim (a), {T} tokens")
        cache = s.cache(c, room)
        mask, q = cache.mask(T), s.randn(1, c.num_attention_heads, T, c.head_dim)
        scores, attention = q @ q.mT, partial(F.scaled_dot_product_attention, q, q, q)
        ways = {
            "made by loops": partial(mask_by_loops, cache, T),
            "made by torch": partial(mask_by_torch, cache, T),
            "found in a dictionary": partial({T: mask_by_torch(cache, T)}.get, T),
            "sliced from one band": partial(cache.mask, T),
        }
        for name, way in ways.items():
            check_same(name, way(), mask)
        ways["applied to the scores"] = partial(torch.where, mask, scores, -math.inf)
        ways["attention given the mask"] = partial(attention, attn_mask=mask)
        ways["attention that is causal by itself"] = partial(attention, is_causal=True)
        times[T] = {name: median(samples) for name, samples in interleave(ways).items()}
        times[T]["forward pass"] = whole = median(measure(forward(s, model, T), 0.5))
        for how in ("loops", "torch"):
            gain = max(times[T][f"made by {how}"] - times[T]["sliced from one band"], 0.0)
            saved[f"at {T} against {how}"] = gain / (whole + gain)
    rows = [(name, *(show(times[T][name]) for T in times)) for name in times[512]]
    table(("(a) the causal mask", *(f"{T} tokens" for T in times)), rows)
    text = "part of a forward pass that it saves: " + listed(saved, ".2%")
    return judge(saved, 0.05), text, {"seconds": times, "saved": saved}


def claim_cache(s: Setting, model: llama2.Llama) -> tuple[str, str, dict]:
    """(b) One decode step of the cache and the attention over it, all layers."""
    c, times, cases = model.config, {}, {}
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
        cache = s.cache(c, context, context - 1)
        others = {"per layer": LayerCaches(cache), "concatenated": ConcatenatingCache(cache)}
        ways = {name: partial(step, one) for name, one in {"unified": cache, **others}.items()}
        for name, way in ways.items():
            check_same(name, way(), step(cache))
        samples = interleave(ways, rounds=9)
        times[context] = {name: median(values) for name, values in samples.items()}
        for name in others:
            cases[f"{name} at {context}"] = ratio(samples[name], samples["unified"])
    rows = [(n, *map(show, row.values())) for n, row in times.items()]
    table((f"(b) {c.num_hidden_layers} layers, context", *times[128]), rows)
    text = "time of others / unified: " + listed(cases)
    return judge(cases, 1.05), text, {"seconds": times, "ratios": cases}


def claim_modules(s: Setting, model: llama2.Llama) -> tuple[str, str, dict]:
    """(c) A decode step by modules and by one function; small, where overhead shows, and large."""
    small = llama2.Llama(CONFIGS["tiny"]).to(s.device, s.dtype)
    cases, rows, overhead = {}, [], 0.0
    for size, m in (("small", small), ("large", model)):
        cache, token = s.cache(m.config, 128, 64), s.tokens(m.config, 1, 1)

        def step(function: Callable, cache: llama2.Cache = cache, token: Tensor = token) -> Tensor:
            cache.truncate(64)
            return function(token, cache)

        for how in ("eager", "compiled"):
            note(f"claim (c), {size}, {how}")
            change = torch.compile if how == "compiled" else lambda function: function
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
            if (size, how) == ("small", "eager"):
                overhead = max(a - b, 0.0) / m.config.num_hidden_layers
            rows.append((f"{size}, {how}", show(a), show(b), f"{factor:.2f}x", show(first)))
    table(("(c) a decode step", "modules", "one function", "ratio", "first calls"), rows)
    text = f"modules / one function: {listed(cases)}; {show(overhead)} per layer"
    return judge(cases, 1.05), text, {"ratios": cases, "overhead": overhead}


def claim_loading(s: Setting, model: llama2.Llama) -> tuple[str, str, dict]:
    """(d) From a real file to its first token: within a second and 2 s per GB."""
    path, made = s.args.model or llama2.DEFAULT_MODEL, []
    if not path.is_file():
        return "not measured", f"{path} is not a file: pass --model FILE", {}
    times = {"load": seconds(lambda: made.extend(llama2.load(path, s.device, s.dtype)))}
    loaded, tokenizer = made
    tokens = llama2.generate(
        loaded, tokenizer.encode("Once upon"), llama2.Sampling(temperature=0), stop_ids=()
    )
    times["first token"] = seconds(lambda: next(tokens))
    size, total = path.stat().st_size, sum(times.values())
    text = ", ".join(f"{name} {show(value)}" for name, value in times.items())
    text = f"{path.name}, {size / 1e6:.0f} MB in {show(total)}: {text}"
    return judge({"": total}, 0, 1 + size / 0.5e9), text, {"seconds": times}


def claim_speedup(s: Setting, model: llama2.Llama) -> tuple[str, str, dict]:
    """(e) Everything on, everything naive, and each part naive by itself, for 6 new tokens."""
    cases, rows = {}, []
    variants = {"all on": (), "all naive": (*NAIVE,)} | {f"no {part}": (part,) for part in NAIVE}
    for T in (32, 128):
        ids = s.tokens(model.config, 1, T + 5)[0]
        samples = {name: [] for name in variants}
        reference = step_through(s, model, ids, T)
        for i in range(4):
            for name, without in variants.items():
                note(f"claim (e), {T} tokens, {name}, round {i} of 3")
                way = partial(step_through, s, model, ids, T, without)
                if i == 0:
                    check_same(name, way(), reference)
                else:
                    samples[name].append(seconds(way))
        for name, values in samples.items():
            factor = ratio(values, samples["all on"])
            rows.append((f"prompt of {T}, {name}", show(median(values)), f"{factor:.2f}x"))
        cases[f"behind {T} tokens"] = ratio(samples["all naive"], samples["all on"])
    table(("(e) 6 new tokens", "median", "of all on"), rows)
    return judge(cases, 2, 3), "naive / all on: " + listed(cases), {"ratios": cases, "rows": rows}


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
    found = {claim: run(s, model) for claim, run in CLAIMS.items()}
    for claim, (word, text, _) in found.items():
        print(f"{claim}: {word.upper()}\n    {text}")
    return {"claims": {k: {"verdict": v[0], "because": v[1], **v[2]} for k, v in found.items()}}


# --------------------------------------------------------------------------------------------------
# 5. Where the time goes

PARTS = {  # part of a pass -> the modules that it consists of, by the last part of their names
    "norms": ("input_layernorm", "post_attention_layernorm", "norm"),
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "rotation": (),
    "attention": (),
    "output": ("o_proj",),
    "MLP": ("mlp",),
    "embedding": ("embed_tokens",),
    "head": ("lm_head",),
}
FUNCTIONS = (  # and the functions that belong to a part
    (llama2, "apply_rotary_emb", "rotation"),
    (llama2.Cache, "update", "attention"),
    (F, "scaled_dot_product_attention", "attention"),
)


@contextlib.contextmanager
def component(name: str) -> Iterator[None]:
    """A range in the profile; the device is synchronised, so that it holds its own work only."""
    synchronize()
    with record_function(f"part:{name}"):
        yield
        synchronize()


@contextlib.contextmanager
def components(model: llama2.Llama) -> Iterator[None]:
    """Ranges around the parts of a model, patched in from outside and removed again."""
    part_of = {word: part for part, words in PARTS.items() for word in words}
    named = [(part_of.get(path.split(".")[-1]), module) for path, module in model.named_modules()]
    places = [(module, "forward", part) for part, module in named if part]
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in (*places, *FUNCTIONS):
            wrapped = component(name)(getattr(owner, attribute))  # context managers decorate too
            stack.enter_context(patch.object(owner, attribute, wrapped))
        yield


def shares(parts: Mapping[str, float], whole: float) -> dict[str, float]:
    """Each part's share of the whole, and the rest, which no part holds: together exactly 1."""
    out = {name: parts.get(name, 0.0) / whole for name in PARTS}
    return out | {"other (sums, reshapes, Python)": 1 - sum(out.values())}


def run_breakdown(s: Setting) -> dict:
    """Profile decoding and two prompts in place."""
    model, out = s.build(s.checkpoint("1b")), {}
    c = model.config
    print(f"{c.num_hidden_layers} layers of {c.hidden_size}; profiling the parts takes time, too\n")
    for name, T, context in (("decode", 1, 128), ("128 tokens", 128, 0), ("512 tokens", 512, 0)):
        note(name)
        run = forward(s, model, T, context)
        run()
        once = seconds(run)
        count = max(2, min(10, int(5 / once)))
        with components(model), profile(activities=[ProfilerActivity.CPU]) as trace:
            for _ in range(count):
                component("whole")(run)()
        sums = {e.key: e.cpu_time_total * 1e-6 / count for e in trace.key_averages()}
        whole = sums.pop("part:whole")
        found = shares({part: sums.get(f"part:{part}", 0.0) for part in PARTS}, whole)
        out[name] = {"shares": found, "seconds": whole, "without_profiler": once}
        rows = [(part, f"{share:.1%}", show(share * whole)) for part, share in found.items()]
        rows += [("whole", "100.0%", show(whole)), ("without the profiler", "", show(once))]
        table((name, "share", "per pass"), rows)
    return {"breakdown": out}


def run_profile(s: Setting) -> dict:
    """A trace of a prompt and a few tokens, and the ten costliest operations."""
    model, P = s.build(s.checkpoint("1b")), s.args.prompt_tokens
    prompt, token = forward(s, model, P), forward(s, model, 1, P)
    prompt(), token()
    cuda = [ProfilerActivity.CUDA] * (s.device.type == "cuda")
    with profile(activities=[ProfilerActivity.CPU, *cuda], record_shapes=True) as trace:
        prompt()
        for _ in range(s.args.gen_tokens):
            token()
    trace.export_chrome_trace(str(s.args.profile))
    field = "self_device_time_total" if cuda else "self_cpu_time_total"
    cost = sorted(((getattr(e, field), e.key, e.count) for e in trace.key_averages()), reverse=True)
    total = sum(time for time, *_ in cost)
    rows = [(k[:60], f"{t / total:.1%}", show(t * 1e-6), n) for t, k, n in cost[:10]]
    table(("operation", "share", "total", "calls"), rows)
    print(f"wrote {s.args.profile}: open it at ui.perfetto.dev or chrome://tracing")
    return {"profile": rows}


# --------------------------------------------------------------------------------------------------
# 6. Whole models, and others next to them

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
            (set_depth or prompt)(depth)
            found[name] = sum(seconds(partial(feed, last)) for _ in range(new)) / new
        return found

    return run


def our_engine(
    s: Setting, checkpoint: llama2.Checkpoint, model: llama2.Llama, room: int, batch: int = 1
) -> Engine:
    """llama2.py with the cache and the compiled steps of its command line."""
    _, dtype, _ = llama2.choose_dtypes(s.args.dtype, s.device, checkpoint)
    cache, forward = llama2.Cache(model.config, batch, room, dtype, s.device), model
    large = llama2.is_large(checkpoint)
    if s.device.type == "cuda" and (large if s.args.compile is None else s.args.compile):
        forward = llama2.CompiledStep(model, cache)

    def step(tokens: Tensor) -> Tensor:
        for chunk in tokens.split(llama2.PREFILL_CHUNK, 1):
            logits = forward(chunk, cache)
        return logits

    return greedy_engine(
        step, cache.reset, partial(fill, cache), s.tokens(model.config, batch, room)
    )


def transformers_engine(s: Setting, config: llama2.Config, room: int, name: str) -> Engine:
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

    return greedy_engine(step, reset, None, s.tokens(config, s.args.batch, room))


def llama_bench_engine(program: str, path: Path) -> Engine:
    """llama.cpp's llama-bench: each call is a process, which warms up by itself."""
    if shutil.which(program) is None:
        raise ValueError(f"there is no {program}: --llama-bench PATH names llama.cpp's llama-bench")

    def call(*options: object) -> dict[str, float]:
        threads = torch.get_num_threads()
        command = [program, "-m", path, "-t", threads, "-r", 1, "-o", "json", *options]
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
        if done.returncode:
            why = done.stderr.splitlines()[-1:] or [f"exit status {done.returncode}"]
            raise ValueError(f"llama-bench failed: {why[0]}")
        tests = [(test["n_prompt"], test["avg_ts"]) for test in json.loads(done.stdout)]
        return {f"pp{n}" if n else "tg": (n or 1) / rate for n, rate in tests}

    def run(prompts: Sequence[int], new: int, depths: Mapping[str, int]) -> dict[str, float]:
        found = call("-p", ",".join(map(str, prompts)), "-n", 0)
        for name, depth in depths.items():
            found[name] = call("-p", 0, "-n", new, "-d", depth)["tg"]
        return found

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


def compare(ours: Samples, theirs: Samples, tokens: Mapping[str, int]) -> dict[str, dict]:
    """Tokens/s of both and their ratio, for each key of `tokens`: how many one sample computed."""
    out = {}
    for key, n in tokens.items():
        rates = {"ours": n / median(ours[key]), "theirs": n / median(theirs[key])}
        out[key] = rates | {"ratio": ratio(theirs[key], ours[key])}
    return out


def run_whole(s: Setting) -> dict:
    """One model: load, prompt, tokens, memory; others next to it; speed as the context fills."""
    args, made, checkpoint = s.args, [], s.checkpoint("7b")
    P, N, B, config = args.prompt_tokens, args.gen_tokens, args.batch, checkpoint.config
    depths = {"tg": P} | {f"tg@{n}": n for n in args.context_sweep}
    room, limit = max(depths.values()) + N, config.max_position_embeddings
    if room > limit:
        raise ValueError(f"more tokens than the context of {limit}: {room - N} and {N} new ones")
    load = seconds(lambda: made.append(s.build(checkpoint, room)))
    (model,) = made
    engines = {"llama2.py": our_engine(s, checkpoint, model, room, B)}
    take_turns(engines, (P,), N, {"tg": P}, rounds=1)
    peak = llama2.peak_memory(s.device)  # before the others come
    for other in args.compare:
        if other == "llama.cpp":
            engines[other] = llama_bench_engine(args.llama_bench, args.model)
        else:
            engines[other] = transformers_engine(s, config, room, other)
    samples = take_turns(engines, (P,), N, depths, rounds=args.rounds)
    ours = samples["llama2.py"]
    first, tg = median(ours[f"pp{P}"]), median(ours["tg"])
    size, speed = llama2.weight_bytes(model), bandwidth(s.device)
    reached = f"{speed / 1e9:.1f} GB/s, {size / tg / speed:.0%} reached"
    facts = {
        "load, kernels compiled if needed": (load, show(load)),
        f"first token, prompt of {P}": (first, f"{show(first)}, {B * P / first:.1f} tokens/s"),
        f"each further token, batch {B}": (tg, f"{show(tg)}, IQR {show(iqr(ours['tg']))}"),
        "tokens/s": (B / tg, f"{B / tg:.2f}"),
        "weights read per token": (size, f"{size / 1e9:.3f} GB, {size / tg / 1e9:.1f} GB/s"),
        "memory bandwidth, measured": (speed, reached),
        "peak memory": (peak, f"{peak / 1e9:.2f} GB"),
    }
    out = {name: value for name, (value, _) in facts.items()}
    if args.context_sweep:
        out["context"] = times = {n: median(ours[f"tg@{n}"]) for n in args.context_sweep}
        for n, each in times.items():
            facts[f"each token behind {n}"] = each, f"{show(each)}, {B / each:.2f} tokens/s"
    title = args.model.name if args.model else "random weights"
    table((title, ""), ((name, text) for name, (_, text) in facts.items()))
    for name in args.compare:
        tokens = {f"pp{P}": B * P} | dict.fromkeys(depths, B)
        out[name] = found = compare(ours, samples[name], tokens)
        rows = [(key, *(f"{value:.2f}" for value in row.values())) for key, row in found.items()]
        table(("tokens/s", "llama2.py", name, "ours / theirs"), rows)
    return {"whole": out}


def run_table(s: Setting) -> dict:
    """For each file: prompts and 16 new tokens, ours and llama.cpp's in turns."""
    prompts, new, rows, out = s.args.table_prompts, 16, [], {}
    depths = {"tg": 0} | {f"tg@{n}": n for n in s.args.context_sweep}
    tokens = {f"pp{T}": T for T in prompts} | dict.fromkeys(depths, 1)
    room = max(*prompts, *depths.values()) + new
    header = ("file", *(f"{key} ours / llama.cpp" for key in tokens), "bandwidth reached")
    for path in s.args.table:
        engines = {"llama.cpp": llama_bench_engine(s.args.llama_bench, path)}
        checkpoint = llama2.open_checkpoint(path)
        model = s.build(checkpoint, room)
        engines["ours"] = our_engine(s, checkpoint, model, room)
        samples = take_turns(engines, prompts, new, depths, rounds=s.args.rounds)
        found = compare(samples["ours"], samples["llama.cpp"], tokens)
        speed = bandwidth(s.device)
        fraction = llama2.weight_bytes(model) * found["tg"]["ours"] / speed
        out[path.name] = {**found, "bandwidth": speed, "fraction": fraction}
        cells = [f"{r['ours']:.1f} / {r['theirs']:.1f} = {r['ratio']:.2f}" for r in found.values()]
        rows.append((path.name, *cells, f"{fraction:.0%} of {speed / 1e9:.0f} GB/s"))
        table(header, rows[-1:])
        del model, engines  # before the next one needs the memory
    if len(rows) > 1:
        table(header, rows)
    return {"table": out}


# --------------------------------------------------------------------------------------------------
# 7. Perplexity


def windows(ids: Sequence[int], context: int, bos: int | None) -> Iterator[list[int]]:
    """The windows of `context` ids that llama-perplexity cuts a text into.

    They do not overlap, an incomplete last one is dropped, BOS replaces the first id of each. What
    counts is how the second half is predicted, from id context // 2 + 1 on.
    """
    for start in range(0, len(ids) - context + 1, context):
        window = list(ids[start : start + context])
        yield window if bos is None else [bos, *window[1:]]


def perplexity(losses: Tensor) -> tuple[float, float]:
    """exp(mean loss) and its standard error."""
    value = losses.double().mean().exp().item()
    return value, value * losses.double().std().item() / math.sqrt(len(losses))


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(a || b) in nats of the distributions that two sets of logits (n, V) stand for: (n,)."""
    p, q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def read_text(
    args: argparse.Namespace, checkpoints: Sequence[llama2.Checkpoint]
) -> tuple[list[int], int | None]:
    """The text as ids, and BOS if windows begin with it. ValueError if it is too short."""
    text, T = args.perplexity.read_bytes().decode("utf-8", "replace"), args.context
    tokenizers = [checkpoint.tokenizer() for checkpoint in checkpoints]
    ids, *others = [tokenizer.encode(text, tokenizer.add_bos) for tokenizer in tokenizers]
    configs = [checkpoint.config for checkpoint in checkpoints]
    if others not in ([], [ids]) or len({config.vocab_size for config in configs}) > 1:
        raise ValueError("the files of --compare-types have different vocabularies")
    limit = min(config.max_position_embeddings for config in configs)
    if not 4 <= T <= limit or len(ids) < 2 * T:
        found = f"{args.perplexity} has {len(ids)} tokens and the model a context of {limit}"
        raise ValueError(f"--context {T}: {found}; needed are two windows of 4 to {limit}")
    return ids, tokenizers[0].bos_id if tokenizers[0].add_bos else None


def run_perplexity(s: Setting) -> dict:
    """Perplexity of one file, or of two and the divergence of the second from the first."""
    T, kl, same = s.args.context, [], []
    paths = s.args.compare_types or [s.args.model or llama2.DEFAULT_MODEL]
    checkpoints = [llama2.open_checkpoint(path) for path in paths]
    ids, bos = read_text(s.args, checkpoints)
    models, losses = [s.build(checkpoint, T) for checkpoint in checkpoints], [[] for _ in paths]
    top = models[0].config.vocab_size if len(models) == 2 else 0  # the whole distribution
    for i, window in enumerate(windows(ids, T, bos)):
        logits = []
        for model, own in zip(models, losses, strict=True):
            logprobs, likeliest, whose = (x[T // 2 :] for x in llama2.score(model, window, top))
            own.append(-logprobs)
            logits.append(torch.empty_like(likeliest).scatter_(1, whose, likeliest))
        if top:
            kl.append(divergence(*logits))
            same.append(logits[0].argmax(-1) == logits[1].argmax(-1))
        value, error = perplexity(torch.cat(losses[0]))
        note(f"window {i + 1} of {len(ids) // T}: perplexity {value:.4f} +- {error:.4f}")
    out = {"tokens": sum(map(len, losses[0])), "files": []}
    for path, own in zip(paths, losses, strict=True):
        value, error = perplexity(torch.cat(own))
        out["files"].append({"file": path.name, "perplexity": value, "error": error})
    rows = [(name, f"{p:.4f}", f"+-{e:.5f}") for name, p, e in map(dict.values, out["files"])]
    table((f"{out['tokens']} tokens scored", "perplexity", "standard error"), rows)
    if top:
        kl, agree = torch.cat(kl), torch.cat(same).double().mean().item()
        out["kl"] = {"mean": kl.mean().item(), "p99": kl.quantile(0.99).item(), "same_top": agree}
        text = "KL divergence: mean {mean:.6f}, 99th percentile {p99:.6f}".format(**out["kl"])
        print(f"{text}; the same likeliest token {agree:.2%}")
    return {"perplexity": out}


# --------------------------------------------------------------------------------------------------
# 8. Processors with fewer instructions than this one

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
    compile = llama2.run_compiler

    def run_compiler(command: list[str], folder: Path) -> bytes:
        words = [f"-march={isa}" if word == "-march=native" else word for word in command]
        return compile(words, folder)

    llama2.run_compiler, torch.cpu.get_capabilities = run_compiler, dict


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


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises ValueError for a wrong one."""
    parser = llama2.Parser(prog="bench_llama2.py", description="Measure llama2.py.")
    parser.set_defaults(quiet=False)  # for llama2.build
    group = parser.add_argument_group("modes (default: the suite, or --model or --config)")
    add = group.add_argument
    add("--suite", action="store_true", help="each layer by itself")
    add("--claims", action="store_true", help="five claims with verdicts")
    add("--breakdown", action="store_true", help="shares of a forward pass")
    add("--profile", metavar="FILE", type=Path, help="write a trace; show the costliest operations")
    add("--table", metavar="GGUF", type=Path, nargs="+", help="files next to llama.cpp")
    add("--perplexity", metavar="TEXT", type=Path, help="perplexity of a text file")
    add("--compare-types", metavar="GGUF", type=Path, nargs=2, help="with --perplexity: two files")
    add = parser.add_argument_group("of what").add_argument
    add("--model", metavar="FILE", type=Path, help="a model (default: random weights)")
    add("--config", choices=CONFIGS, help="the shape of random weights")
    add("--layers", metavar="N", type=count, help="only so many layers of it")
    types = "of random weights (default: --dtype)"
    add("--type", choices=llama2.GGML_TYPES, help=types)
    add("--prompt-tokens", metavar="N", type=count, default=128, help="default: 128")
    add("--gen-tokens", metavar="N", type=count, default=16, help="default: 16")
    add("--batch", metavar="N", type=count, default=1, help="rows at once (default: 1)")
    add(
        "--context-sweep",
        metavar="N",
        type=count,
        nargs="+",
        default=[],
        help="generation behind N",
    )
    add("--table-prompts", metavar="N", type=count, nargs="+", default=[128, 512])
    add("--context", metavar="N", type=count, default=512, help="of --perplexity (default: 512)")
    peers = ("transformers", "transformers-bfloat16", "llama.cpp")
    add("--compare", choices=peers, nargs="+", default=[], help="run these in turns with ours")
    add("--llama-bench", metavar="PATH", default="llama-bench", help="default: the one on the PATH")
    add = parser.add_argument_group("how").add_argument
    add("--rounds", metavar="N", type=count, default=5, help="of what runs in turns (default: 5)")
    add("--seconds", metavar="S", type=float, default=1.0, help="per entry of the suite, about")
    add("--filter", metavar="TEXT", default="", help="only entries with this in their name")
    add("--save-baseline", metavar="NAME", help="keep the suite's result")
    add("--baseline", metavar="NAME", help="compare the suite with a kept result")
    add("--fail-on-regression", action="store_true", help="exit 1 if that finds one")
    add("--compile", action=argparse.BooleanOptionalAction, help="default: as llama2.py")
    add("--device", choices=("auto", "cpu", "cuda", "mps"), default="auto")
    dtype = "of the activations (default: as llama2.py; float32 is exact)"
    add("--dtype", choices=("auto", *llama2.DTYPES), default="auto", help=dtype)
    add("--isa", choices=ISAS, help="use no more instructions than this x86-64 processor has")
    add("--threads", metavar="N", type=count, help="CPU threads (default: torch's choice)")
    add("--json", metavar="FILE", type=Path, help="write the result there as well")
    args = parser.parse_args(argv)
    if args.compare_types and args.perplexity is None:
        parser.error("--compare-types needs --perplexity TEXT")
    if args.model is not None and args.config is not None and not args.claims:
        parser.error("--model and --config exclude each other")
    if args.claims and args.type is not None:
        parser.error("--claims runs dense weights of --dtype: it takes no --type")
    if "llama.cpp" in args.compare and (args.model is None or args.batch > 1):
        parser.error("--compare llama.cpp needs --model FILE, and one row")
    if not 0 < args.seconds < 3600:
        parser.error(f"--seconds {args.seconds}; accepted is above 0 and below 3600")
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
        run_suite: args.suite or args.baseline or args.save_baseline,
        run_claims: args.claims,
        run_breakdown: args.breakdown,
        run_profile: args.profile,
        run_table: args.table,
        run_perplexity: args.perplexity,
    }
    chosen = [mode for mode, wanted in modes.items() if wanted]
    with torch.no_grad():
        for mode in chosen or [run_whole if args.model or args.config else run_suite]:
            result |= mode(s)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1))
    regressed = any(word == "regressed" for *_, word in result.get("baseline", {}).values())
    return 1 if args.fail_on_regression and regressed else 0


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
        return fail(error)


if __name__ == "__main__":
    sys.exit(main())
