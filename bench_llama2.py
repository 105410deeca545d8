"""The benchmark of llama2.py: how fast it is on this machine, and whether speed changes its text.

    python bench_llama2.py                                # the suite: each layer by itself
    python bench_llama2.py --claims                       # five claims, each with a verdict
    python bench_llama2.py --breakdown                    # the share of each part of a pass
    python bench_llama2.py --model FILE.gguf              # a whole model: prompts, generation
    python bench_llama2.py --config 1b                    # the same with random weights
    python bench_llama2.py --table FILE.gguf ...          # beside llama.cpp and others
    python bench_llama2.py --parallel 1,2,4,8 --model FILE.gguf  # sequences side by side
    python bench_llama2.py --perplexity TEXT --model FILE.gguf
    python bench_llama2.py --fidelity FILE.gguf           # does what is fast write what is exact?

Figures are medians; what is compared runs in turns (A B A B), so that a machine which slows down
slows both. First calls, which may compile, are not counted. On a shared machine trust only ratios.
"""

import argparse
import copy
import importlib.util
import inspect
import itertools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from statistics import mean, median
from subprocess import CalledProcessError
from typing import NamedTuple
from unittest.mock import patch

if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch is imported, as llama2.py

import torch
import torch.nn.functional as F
from torch.testing import assert_close
from torch.utils.benchmark import Timer

import llama2
from llama2 import Cache, Llama

# --------------------------------------------------------------------------------------------------
# 1. Timing and printing


def clock():
    """The time, once the device has done its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def seconds(function):
    """Wall-clock time of one call."""
    start = clock()
    function()
    return clock() - start


def measure(function, limit=1.0):
    """The time of a call, measured for about `limit` seconds."""
    seconds(function)  # may compile
    threads = torch.get_num_threads()  # left alone the Timer would use one
    timer = Timer("call()", globals={"call": function}, num_threads=threads)
    return timer.blocked_autorange(min_run_time=limit)


def relative_times(functions):
    """Times of functions that run in turns A B A B, divided by the first's: medians of 7 turns."""
    turns = [[measure(call, 0.03).median for call in functions.values()] for _ in range(7)]
    samples = [*zip(*turns)]
    return {name: ratio(times, samples[0]) for name, times in zip(functions, samples)}


def ratio(a, b):
    """The median of a / b, round by round: what slows one round slows both."""
    return median(x / y for x, y in zip(a, b))


def bandwidth(device, size=2**29):
    """Bytes per second that reading memory gives, here and now."""
    numbers = torch.ones(size // 4, device=device)
    return size / measure(numbers.sum).median


def note(text=""):
    """Progress, on one line of a terminal that the next one replaces."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def table(*rows):
    """Print a Markdown table, the first row its header, that also reads well in a terminal."""
    note()
    lines = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        print("|", *(f"{cell:>{width}} |" for cell, width in zip(line, widths)))
    print()


def describe_machine():
    """What figures are of: the machine, versions, the last commit that changed the code, the day."""
    cpu = f"{os.cpu_count()}-core {platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
    version = f"llama2.py {llama2.__version__}"
    command = ["git", "log", "-1", "--format=%h", "--", "llama2.py", "kernels"]
    options = {"cwd": Path(llama2.__file__).parent, "stderr": subprocess.DEVNULL}
    with suppress(OSError, CalledProcessError):  # no git, or not a repository
        version += " " + subprocess.check_output(command, text=True, **options).strip()
    threads = f"{torch.get_num_threads()} threads"
    return f"{cpu}, {threads}, torch {torch.__version__}, {version.strip()}, {date.today()}"


# --------------------------------------------------------------------------------------------------
# 2. Models, with a file and without

CONFIGS = {
    "tiny": llama2.Config(256, 512, 2, 4, 2, vocab_size=512, max_position_embeddings=1024),
    "1b": llama2.Config(2048, 5632, 22, 32, 4, max_position_embeddings=2048),  # TinyLlama's shape
    "7b": llama2.Config.llama2_7b(),
    "7b-2-layers": replace(llama2.Config.llama2_7b(), num_hidden_layers=2),
}


def load(args, path):
    """Model and tokenizer of a file as the command line loads it.

    Without a file: no tokenizer, and random weights, dense, in the shape of --config.
    """
    if path:
        return llama2.load(path, args.device, args.dtype, compile=args.compile)
    dtype = getattr(torch, args.dtype.replace("auto", "float32"))
    model = Llama(CONFIGS[args.config or "7b-2-layers"])
    return model.to(args.device, dtype), None


def random_tokens(model, T):
    """Random token ids (1, T)."""
    return torch.randint(model.config.vocab_size, (1, T), device=model.norm.weight.device)


def forward(model, T, context=0):
    """One pass of T tokens after `context` others; it can be repeated."""
    cache = model.new_cache(context + T)
    tokens = random_tokens(model, context + T)
    if context:
        model(tokens[:, :context], cache)

    def run():
        cache.truncate(context)
        return model(tokens[:, context:], cache)

    return run


# --------------------------------------------------------------------------------------------------
# 3. The suite: the names of the benchmark that came before, and a few more

SIZES = (1, 8, 32, 128, 512)  # tokens


def suite_calls(model, T):
    """What each name of the suite means for T tokens."""
    c = model.config
    layer = model.layers[0]
    projections = [getattr(layer.self_attn, f"{name}_proj") for name in "qkv"]
    cache = model.new_cache(T)
    cos, sin = cache.rope(T)
    x = torch.randn(1, T, c.hidden_size).to(model.norm.weight)
    q, k, v = torch.randn(3, 1, c.num_attention_heads, T, c.head_dim).to(x)
    by_position = q.transpose(1, 2), k.transpose(1, 2)
    scores = q @ k.mT
    unseen = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return {
        "rope_forward": lambda: [llama2.apply_rotary_emb(x, cos, sin) for x in by_position],
        "qkv_projection": lambda: [projection(x) for projection in projections],
        "attention_scores": lambda: q @ k.mT * c.head_dim**-0.5,
        "causal_mask": lambda: scores.masked_fill(unseen, -math.inf),
        "full_attention": lambda: F.scaled_dot_product_attention(q, k, v, cache.mask(T)),
        "rms_norm": lambda: layer.input_layernorm(x),
        "mlp": lambda: layer.mlp(x),
        "block": lambda: layer(x, cos, sin, cache.mask(T), cache),
        "prefill": forward(model, T),
        "decode": forward(model, 1, context=T),
    }


def run_suite(args):
    """Each layer by itself; "prefill" and "decode" are whole passes."""
    model, _ = load(args, args.model)
    result = {}
    for T in SIZES:
        for name, call in suite_calls(model, T).items():
            measured = measure(call)
            result[f"{name}/{T}"] = {"median": measured.median, "iqr": measured.iqr}
    rows = [(name, *(f"{1e3 * t:.4g}" for t in row.values())) for name, row in result.items()]
    table(("benchmark", "median, ms", "IQR, ms"), *rows)
    return {"suite": result}


# --------------------------------------------------------------------------------------------------
# 4. Where the time goes

PARTS = {  # of a pass, by the names of its modules
    "q_proj": "QKV projection",
    "k_proj": "QKV projection",
    "v_proj": "QKV projection",
    "o_proj": "softmax and output",
    "mlp": "MLP",
    "input_layernorm": "norms",
    "post_attention_layernorm": "norms",
    "norm": "norms",
    "lm_head": "head",
}


def timed(times, part, function):
    """The function; its seconds, less those of timed ones inside, are added to times[part]."""

    def run(*inputs):
        before = times.total()
        start = clock()
        result = function(*inputs)
        whole = clock() - start
        times[part] += whole - (times.total() - before)
        return result

    return run


def written_out(times, q, k, v, attn_mask=None):
    """Attention by separate operations: the scores of all heads are written to memory."""
    part = partial(timed, times)
    scores = part("scores", torch.matmul)(q * q.shape[-1] ** -0.5, k.mT)
    if attn_mask is not None:
        scores = part("mask", scores.masked_fill)(~attn_mask, -math.inf)
    return part("softmax and output", lambda: scores.float().softmax(-1).type_as(v) @ v)()


def token_parts(model):
    """Functions that a token of generation takes, as (owner, name), and the part that each is."""
    parts = {
        (llama2, "sample"): "sampling",
        (Cache, "common_prefix"): "ids",
        (Cache, "advance"): "ids",
        (Cache, "rope"): "RoPE",
        (Cache, "mask"): "mask",
        (model.embed_tokens, "forward"): "embedding",
        (model.norm, "forward"): "last norm",
        (model.lm_head, "forward"): "last matrix",
    }
    block = type(model.layers[0])
    if block.__name__ == "NativeBlock":
        parts[inspect.getmodule(block.forward), "run_blocks"] = "looking up layers"
        parts[llama2.load_kernels(), "run_blocks"] = "layers"
    else:
        parts[block, "forward"] = "layers"
    return parts


def time_token(args, model, tokenizer, depth):
    """Seconds of each part of a token that is sampled behind `depth` others.

    The rest of a pass and of the loop, Python between all these, is what a token without clocks
    takes longer than the parts.
    """
    count = args.rounds * args.gen_tokens
    ids = random_tokens(model, depth + 1)  # (1, depth + 1)
    cache = model.new_cache(depth + 1 + 2 * count)
    for numbers in (cache.k, cache.v):
        numbers.fill_(0.01)  # all zero they would not be in memory
    cache.advance(ids[:, :-1])
    options = {"cache": cache, "stop_ids": (), "max_new_tokens": 2 * count}
    generation = llama2.generate(model, ids[0].tolist(), **options)
    decode = llama2.StreamDecoder(tokenizer).decode if tokenizer else str
    wholes = sorted(seconds(lambda: decode(next(generation))) for _ in range(count))
    times = Counter()
    tokens = []
    with ExitStack() as stack:
        for (owner, name), part in token_parts(model).items():
            function = timed(times, part, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, function))
        for _ in range(count):
            times.clear()
            decode(next(generation))
            tokens.append(times.copy())
    tokens.sort(key=Counter.total)
    middle = slice(count // 4, count - count // 4)  # without those that were disturbed
    parts = {part: mean(times[part] for times in tokens[middle]) for part in tokens[0]}
    return parts | {"the rest of a pass": mean(wholes[middle]) - sum(parts.values())}


def run_token(args):
    """Where the time of a token goes that is sampled and decoded, as the command line does."""
    model, tokenizer = load(args, args.model)
    measured = {depth: time_token(args, model, tokenizer, depth) for depth in args.depth}
    parts = measured[args.depth[0]]
    columns = [["part of a token", *parts]]
    for depth, times in measured.items():
        whole = sum(times.values())
        columns.append([f"ms behind {depth}", *(f"{1e3 * times[part]:.3f}" for part in parts)])
        columns.append(["share", *(f"{times[part] / whole:.1%}" for part in parts)])
    table(*zip(*columns))
    return measured


def run_breakdown(args):
    """The share of each part of a token, then of a pass of 1, 32 and 128 tokens in plain torch."""
    token = run_token(args)
    args.compile = False
    model, _ = load(args, args.model)
    times = Counter()
    for name, module in model.named_modules():
        if part := PARTS.get(name.rpartition(".")[2]):
            module.forward = timed(times, part, module.forward)
    shares = {}
    with (
        patch.object(F, "scaled_dot_product_attention", partial(written_out, times)),
        patch.object(llama2, "apply_rotary_emb", timed(times, "RoPE", llama2.apply_rotary_emb)),
    ):
        for T in (1, 32, 128):
            run = forward(model, T)
            run()
            times.clear()
            for _ in range(args.rounds):
                run()
            shares[T] = {part: value / times.total() for part, value in times.items()}
    rows = [(name, *(f"{shares[T].get(name, 0):.1%}" for T in shares)) for name in shares[128]]
    table(("share of a pass", *(f"{T} tokens" for T in shares)), *rows)
    return {"token": token, "breakdown": shares}


def run_profile(args):
    """Write torch.profiler's trace of a pass of 128 tokens, for Perfetto or chrome://tracing."""
    model, _ = load(args, args.model)
    run = forward(model, 128)
    run()
    with torch.profiler.profile() as profile:
        run()
    profile.export_chrome_trace(str(args.profile))
    return {}


# --------------------------------------------------------------------------------------------------
# 5. Claims: verdicts are functions of numbers; each claim is tested against naive variants


class Finding(NamedTuple):
    """What a claim's verdict follows from: numbers, and the bounds within which they confirm it."""

    what: str
    cases: dict[str, float]
    low: float
    high: float = math.inf

    def verdict(self):
        """confirmed if all numbers lie within the bounds, refuted if none does, else depends."""
        holds = [self.low <= value <= self.high for value in self.cases.values()]
        return ("refuted", "depends", "confirmed")[any(holds) + all(holds)]


def mask_by_loops(cache, T):
    """Element by element, as a first version does."""
    rows = [[j <= cache.pos + i for j in range(cache.pos + T)] for i in range(T)]
    return None if T == 1 else torch.tensor(rows, device=cache.k.device)


def mask_by_torch(cache, T):
    """Made anew for each pass."""
    return torch.ones(T, cache.pos + T, dtype=torch.bool, device=cache.k.device).tril(cache.pos)


def claim_mask(args, model):
    """(a) Making and finding the mask, compared with the pass that needs it."""
    saved = {}
    for T in (128, 512):
        cache = model.new_cache(T)
        ways = [Cache.mask, mask_by_loops, mask_by_torch]
        calls = {way.__name__: partial(way, cache, T) for way in ways}
        _, ours, *others = relative_times({"pass": forward(model, T)} | calls).items()
        for name, value in others:
            assert_close(calls[name](), cache.mask(T))
            gain = value - ours[1]  # in passes
            saved[f"{name} at {T}"] = gain / (gain + 1)
    return Finding("part of a forward pass that it saves", saved, 0.05)


def attention_steps(model, context):
    """A token's cache update and attention, all layers, after context - 1 others, in three ways."""
    c = model.config
    pair = torch.randn(2, 1, c.num_key_value_heads, 1, c.head_dim).to(model.norm.weight)
    cache = model.new_cache(context)
    cache.advance(random_tokens(model, context - 1))
    layers = [both.clone() for both in torch.stack((cache.k, cache.v), dim=1)]

    def unified(layer):
        cache.layer = layer
        return cache.update(*pair)

    def per_layer(layer):
        layers[layer][..., -1:, :] = pair
        return layers[layer]

    def concatenated(layer):
        return torch.cat((layers[layer][..., 1:, :], pair), dim=-2)

    def step(update):
        for layer in range(len(layers)):
            F.scaled_dot_product_attention(pair[0], *update(layer))

    return {way.__name__: partial(step, way) for way in (unified, per_layer, concatenated)}


def claim_cache(args, model):
    """(b) One decode step of the cache and the attention over it."""
    cases = {}
    for context in (128, 512, 1024):
        _, *others = relative_times(attention_steps(model, context)).items()
        cases |= {f"{name} at {context}": value for name, value in others}
    return Finding("time of others / unified", cases, 1.05)


def without_modules(model):
    """A model of the same weights whose layers, and all in them, are functions: forward()."""
    plain = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    for module in plain.layers.modules():
        vars(module).update({name: child.forward for name, child in module.named_children()})
    vars(plain)["layers"] = [layer.forward for layer in plain.layers]
    return plain


def claim_modules(args, model):
    """(c) A decode step as it is, and by functions in place of modules."""
    small = Llama(CONFIGS["tiny"]).to(model.norm.weight)
    cases = {}
    for size, m in (("small", small), ("large", model)):
        ways = {"functions": forward(without_modules(m), 1, 64), "modules": forward(m, 1, 64)}
        cases[size] = relative_times(ways)["modules"]
    return Finding("modules / functions", cases, 1.05)


def claim_loading(args, model):
    """(d) From a real file to its first token: within a second and 2 s per GB."""
    path = args.model or llama2.DEFAULT_MODEL

    def first_token():
        loaded, tokenizer = load(args, path)
        next(llama2.generate(loaded, tokenizer.encode("Once upon")))

    allowed = 1 + path.stat().st_size / 0.5e9
    cases = {path.name: seconds(first_token) / allowed}
    return Finding("part of the time allowed", cases, 0, 1)


def step_through(model, ids, start, cached=True):
    """The logits of each step of a generation whose outcome is ids[:, start:]."""
    cache = model.new_cache(ids.shape[1])
    logits = []
    for end in range(start, ids.shape[1] + 1):
        if not cached:
            cache.reset()
        logits.append(model(ids[:, cache.pos : end], cache))
    return torch.cat(logits)


def claim_speedup(args, model):
    """(e) Everything on and everything naive, for 6 new tokens."""

    @patch.object(Cache, "mask", mask_by_loops)
    @patch.object(F, "scaled_dot_product_attention", partial(written_out, Counter()))
    def naive(*inputs):
        return step_through(*inputs, cached=False)

    cases = {}
    for T in (32, 128):
        inputs = model, random_tokens(model, T + 5), T
        ways = {"on": partial(step_through, *inputs), "naive": partial(naive, *inputs)}
        assert_close(ways["naive"](), ways["on"](), rtol=0.02, atol=0.02)
        cases[f"after {T} tokens"] = relative_times(ways)["naive"]
    return Finding("naive / all on", cases, 2, 3)


CLAIMS = {
    "(a) caching the causal mask makes the model faster": claim_mask,
    "(b) one unified cache is faster than others": claim_cache,
    "(c) a module per layer costs speed": claim_modules,
    "(d) real files load fast": claim_loading,
    "(e) all of it together gives 2-3x": claim_speedup,
}


def run_claims(args):
    """Five claims, each with a verdict."""
    (args.model or llama2.DEFAULT_MODEL).stat()  # a wrong one is noticed before minutes have passed
    model, _ = load(args, None)
    print(f"{len(model.layers)} layers and the head")
    result = {}
    for claim, measure_claim in CLAIMS.items():
        measured = measure_claim(args, model)
        cases = ", ".join(f"{value:.3g} {name}" for name, value in measured.cases.items())
        print(f"{claim}: {measured.verdict().upper()}\n    {measured.what}: {cases}")
        result[claim] = {**measured._asdict(), "verdict": measured.verdict()}
    return {"claims": result}


# --------------------------------------------------------------------------------------------------
# 6. Whole models, and others beside them

# An engine measures once: tokens/s by test. "pp128" is a prompt of 128 tokens, "tg" generation.


def test_name(prompt, depth):
    """Of a prompt of so many tokens, or 0 for generation, behind `depth` others."""
    name = f"pp{prompt}" if prompt else "tg"
    return f"{name}@{depth}" if depth else name


def in_process(args, step, truncate, tokens):
    """An engine from `step`: tokens (1, T), behind those that truncate() left, -> logits (1, V)."""

    def feed(start, end, size=512):
        for i in range(start, end, size):
            logits = step(tokens[:, i : min(i + size, end)])
            logits.argmax().item()  # as whoever shows the text must

    def run():
        tests = {T: (0, T) for T in args.prompt_tokens} | {0: (0, args.gen_tokens, 1)}
        rates = {}
        read = 0
        for depth in sorted(args.depth):
            truncate(read)
            feed(read, depth)
            read = depth
            for prompt, test in tests.items():
                for _ in range(2):  # the first does not count, as in llama-bench
                    truncate(depth)
                    rates[test_name(prompt, depth)] = test[1] / seconds(partial(feed, *test))
        return rates

    return run


def transformers_engine(args, name, model, tokens):
    """The same shape as Hugging Face's model, eager; "transformers-DTYPE" in that dtype."""
    import transformers

    shape = transformers.LlamaConfig(**vars(model.config))
    dtype = getattr(torch, name.partition("-")[2] or "float32")
    other = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype)
    other.to(tokens.device)
    past = transformers.DynamicCache()

    def step(tokens):
        return other(tokens, past_key_values=past, logits_to_keep=1).logits[:, -1]

    def truncate(length):
        if extra := past.get_seq_length() - length:
            past.crop(-extra)

    return in_process(args, step, truncate, tokens)


def call_program(program, path, options, *others):
    """Run a peer's program. OSError if it is missing, CalledProcessError if it fails."""
    options += f" -t {torch.get_num_threads()}"
    command = [program, "-m", path, *options.split(), *others]
    env = {**os.environ}
    env.pop("OMP_WAIT_POLICY", None)  # is for torch: a peer's threads wait as it was built to
    return subprocess.run(command, capture_output=True, check=True, encoding="utf-8", env=env)


def llama_bench(args, program, path):
    """A llama-bench, llama.cpp's or a fork's: one process for all tests, with its own warm-up."""
    prompts, depths = (",".join(map(str, sizes)) for sizes in (args.prompt_tokens, args.depth))
    options = f"-p {prompts} -n {args.gen_tokens} -r 1 -o json"
    if args.depth != [0]:  # forks may not know it
        options += f" -d {depths}"

    def run():
        tests = json.loads(call_program(program, path, options).stdout)
        return {test_name(t["n_prompt"], t.get("n_depth", 0)): t["avg_ts"] for t in tests}

    return run


def sweep_bench(args, program, path):
    """ik_llama.cpp's llama-sweep-bench: its llama-bench knows no depth. ValueError for others."""
    T = args.prompt_tokens[0]
    if args.prompt_tokens[1:] or any(depth % T for depth in args.depth):
        raise ValueError(f"{program} takes one --prompt-tokens, and multiples of it as --depth")
    log = Path(tempfile.gettempdir()) / "llama-sweep-bench"  # else it is written where one is
    size = max(args.depth) + T
    options = f"-c {size} -ub {T} -n {args.gen_tokens} -wb --output-format jsonl"

    def run():
        done = call_program(program, path, options, "--log-file", log)
        rates = {}
        for row in map(json.loads, re.findall("(?m)^{.*", done.stderr)):  # all is printed there
            if row["n_kv"] in args.depth:
                rates[test_name(T, row["n_kv"])] = row["speed_pp"]
                rates[test_name(0, row["n_kv"])] = row["speed_tg"]
        return rates

    return run


def take_turns(engines, rounds):
    """Run the engines A B A B: samples by engine and test."""
    samples = {name: defaultdict(list) for name in engines}
    for i in range(rounds):
        for name, engine in engines.items():
            note(f"round {i + 1} of {rounds}: {name}")
            for test, value in engine().items():
                samples[name][test].append(value)
    return samples


def compare(samples):
    """Tokens/s of each engine by test, and ours (the first's) divided by the best of the others."""
    rows = {name: {t: median(v) for t, v in tests.items()} for name, tests in samples.items()}
    ours, *others = samples.values()
    if others:
        rows["ours / best"] = {t: min(ratio(ours[t], other[t]) for other in others) for t in ours}
    return rows


def run_model(args, path):
    """Measure and print one model: its name and figures."""
    model, _ = load(args, path)
    size = max(args.depth) + max(*args.prompt_tokens, args.gen_tokens)
    tokens = random_tokens(model, size)
    cache = model.new_cache(size)
    engines = {"llama2.py": in_process(args, partial(model, cache=cache), cache.truncate, tokens)}
    for text in args.llama_bench if args.table else ():
        name, _, peer = program(text).rpartition("=")
        sweep = Path(peer).with_name("llama-sweep-bench")
        if args.depth != [0] and sweep.exists():
            engines[name] = sweep_bench(args, sweep, path)
        else:
            engines[name or peer] = llama_bench(args, peer, path)
    for name in args.compare:
        engines[name] = transformers_engine(args, name, model, tokens)
    rows = compare(take_turns(engines, args.rounds))
    name, ours = path.name if path else args.config, rows["llama2.py"]
    cells = [(engine, *(round(row[test], 2) for test in ours)) for engine, row in rows.items()]
    table((f"{name}, tokens/s", *ours), *cells)
    tensors = model.state_dict().items()  # of an embedding, a token reads one row
    weights = sum(t.nbytes for name, t in tensors if "embed" not in name)
    reached = weights * ours[test_name(0, min(args.depth))]
    given = bandwidth(tokens.device)
    print(f"A token reads its weights at {reached / 1e9:.1f} GB/s; memory gives {given / 1e9:.1f}.")
    memory = sum(t.nbytes for t in vars(cache).values() if isinstance(t, torch.Tensor)) / size
    print(f"1,000 tokens of context take {memory / 1e3:.1f} MB.\n")
    return name, {
        "tokens/s": rows,
        "reached": reached,
        "bandwidth": given,
        "bytes per token of context": memory,
    }


def run_models(args):
    """Whole models: prompts and generation, beside llama.cpp and others."""
    return {"models": dict(run_model(args, path) for path in args.table or [args.model])}


def parallel_engine(args, model, count):
    """Decode steps of several sequences, each behind 128 tokens or more, as examples/batch.py has them."""
    from batch import Rows, Sequences

    prompt, size = 128, Rows(model, count).size
    caches = [model.new_cache(prompt + count + args.gen_tokens) for _ in range(count)]
    for i, cache in enumerate(caches):
        model(random_tokens(model, prompt + i), cache)
    groups = [caches[i : i + size] for i in range(0, count, size)]

    def steps():
        for _ in range(args.gen_tokens):
            for group in groups:
                cache = Sequences(group) if len(group) > 1 else group[0]
                model(random_tokens(model, len(group)).mT, cache)

    def run():
        for i, cache in enumerate(caches):
            cache.truncate(prompt + i)
        return {"tg": count * args.gen_tokens / seconds(steps)}

    return run


def run_parallel(args):
    """Tokens/s of so many sequences side by side."""
    sys.path.append(str(Path(__file__).resolve().parent / "examples"))
    model, _ = load(args, args.model)
    engines = {count: parallel_engine(args, model, count) for count in args.parallel}
    for engine in engines.values():
        engine()
    samples = {n: tests["tg"] for n, tests in take_turns(engines, args.rounds).items()}
    rates = {n: median(values) for n, values in samples.items()}
    first = samples[args.parallel[0]]
    rows = [(n, f"{rates[n]:.4g}", f"{ratio(samples[n], first):.2f}") for n in samples]
    table(("sequences", "tokens/s of all", "times the first"), *rows)
    return {"parallel": rates}


# --------------------------------------------------------------------------------------------------
# 7. Texts: perplexity and fidelity


def read_text(path):
    """The text of a file. Raises ValueError or OSError, which name it."""
    with llama2.naming(path):
        return path.read_text(encoding="utf-8")


def windows(tokenizer, text, context):
    """The windows (N, context) that llama-perplexity cuts a text into, each with BOS at first."""
    ids = torch.tensor(tokenizer.encode(text))
    count = len(ids) // context
    if count < 2:
        raise ValueError(f"a text of {len(ids)} tokens; expected twice --context {context}")
    chunks = ids[: count * context].view(count, context)
    if tokenizer.add_bos:
        chunks[:, 0] = tokenizer.bos_id
    return chunks


def run_perplexity(args):
    """Perplexity of a text: how well the second half of each window is predicted."""
    model, tokenizer = load(args, args.model or llama2.DEFAULT_MODEL)
    texts = windows(tokenizer, read_text(args.perplexity), args.context)
    logprobs = torch.cat([llama2.score(model, text)[args.context // 2 :] for text in texts])
    value = math.exp(-logprobs.double().mean())
    table(("tokens scored", "perplexity"), (len(logprobs), f"{value:.4f}"))
    return {"perplexity": {"tokens": len(logprobs), "value": value}}


NEW_TOKENS = 64  # of an answer
QUESTIONS = """\
What is the capital of France?
Write a short poem about the sea.
How do I boil an egg?
Explain photosynthesis in simple words.
Who wrote Romeo and Juliet?
What is the difference between a list and a tuple in Python?
Tell me a story about a fox and a crow.
Why is the sky blue?
Give me three tips for sleeping better.
Translate "good morning" into Spanish.
What is 17 times 23?
Name five animals that live in the desert.
How does a bicycle stay upright?
Write a Python function that reverses a string.
What causes the seasons?
Describe your favourite meal.
What should I pack for a week in the mountains?
Summarise the plot of Cinderella.
How do computers store numbers?
Write an email asking for a day off."""
OPENINGS = """\
Once upon a time
There was once a king who
The little girl went into the forest and
One day a fox met
In a small house by the sea there lived
The old woman said
A poor farmer had three sons
The boy looked at the bird and
Long ago, when animals could speak,
The princess opened the door and saw
It was a cold winter night
The bear was very hungry
"Where are you going?" asked the wolf
Tom had a red ball
The mother told her daughter
On the top of the mountain
Every morning the miller
The dog ran to the river
A giant lived in a castle
The sun was shining and the children"""


# A reader is a pair of functions: one answers a prompt greedily, ids -> text; the other reads a text,
# ids (1, T) -> logits (T, V).


def our_reader(model, tokenizer, cache=None):
    """llama2.py, by default with the cache that its command line makes."""
    cache = cache or model.new_cache()
    options = {"sampling": llama2.Sampling(temperature=0), "max_new_tokens": NEW_TOKENS}

    def answer(prompt):
        return "".join(llama2.stream_text(model, tokenizer, prompt, cache=cache, **options))

    def logits(text):
        cache.reset()
        return model(text, cache, all_positions=True)[0]

    return answer, logits


def transformers_reader(path, config, tokenizer):
    """transformers with the file's weights in float32."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    ends = [config.eos_token_id, *config.stop_token_ids]
    options = {"do_sample": False, "eos_token_id": ends, "pad_token_id": ends[0]}

    def answer(prompt):
        (ids,) = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, **options)
        return tokenizer.decode(ids.tolist())[len(tokenizer.decode(prompt)) :]

    return answer, lambda text: model(text).logits[0]


def llama_cpp_reader(program, path, tokenizer):
    """llama.cpp's llama-completion, its cache in float32. ValueError if it reads other ids."""
    options = f"""-n {NEW_TOKENS} --temp 0 -ctk f32 -ctv f32 -fa off -no-cnv --no-warmup
        --verbose-prompt --no-display-prompt"""

    def answer(prompt):
        own = prompt[1:] if tokenizer.add_bos else prompt  # it adds BOS itself
        text = ""
        for _, group in itertools.groupby(own, lambda i: tokenizer.decode([i]) != ""):
            ids = [*group]
            text += tokenizer.decode(ids) or "".join(tokenizer.vocabulary.pieces[i] for i in ids)
        done = call_program(program, path, options, "-p", text)
        ids = [int(i) for i in re.findall(r"(\d+) -> '", done.stderr)]
        if ids != prompt:
            raise ValueError(f"{program} reads {text!r} as the ids {ids}; expected {prompt}")
        return done.stdout.strip("\n").removesuffix(" [end of text]")

    return answer, None


def read_texts(readers, texts):
    """KL divergence from exact per token and perplexity of texts (N, T), as text, by reader."""
    sums = defaultdict(Counter)
    for text in texts.split(1):
        for name, (_, logits) in readers.items():  # exact is the first
            if logits is None:
                continue
            logprobs = logits(text)[:-1].double().log_softmax(-1)
            if name == "exact":
                exact = logprobs
            kl = F.kl_div(logprobs, exact, reduction="batchmean", log_target=True)
            sums[name]["KL"] += kl.item() / len(texts)
            sums[name]["loss"] += F.nll_loss(logprobs, text[0, 1:]).item() / len(texts)
    return {k: (f"{v['KL']:.1e}", f"{math.exp(v['loss']):.4f}") for k, v in sums.items()}


def read_prompts(args, tokenizer):
    """Questions as a chat model is asked them, or openings of stories: a list of ids for each."""
    is_chat = bool(tokenizer.chat_template)
    text = QUESTIONS if is_chat else OPENINGS
    if args.questions:
        text = read_text(args.questions)
    if not is_chat:
        return [tokenizer.encode(line) for line in text.splitlines()]
    messages = [{"role": "user", "content": line} for line in text.splitlines()]
    return [llama2.encode_chat(tokenizer, [message]) for message in messages]


def run_fidelity(args):
    """Greedy answers of exact, fast and others, and how far their logits are from exact's."""
    path = args.fidelity
    exact, tokenizer = llama2.load(path, args.device, compile=args.compile)
    prompts = read_prompts(args, tokenizer)
    fast, _ = llama2.load(path, args.device, "auto", compile=True)
    readers = {
        "exact": our_reader(exact, tokenizer),
        "fast, float32 cache": our_reader(fast, tokenizer, Cache(fast.config, device=args.device)),
        "fast": our_reader(fast, tokenizer),
    }
    small = path.stat().st_size < 2**30  # transformers makes all weights float32
    if small and importlib.util.find_spec("transformers"):
        readers["transformers"] = transformers_reader(path, exact.config, tokenizer)
    if args.llama_completion:
        readers["llama.cpp"] = llama_cpp_reader(args.llama_completion, path, tokenizer)
    answers = {
        name: [answer(prompt).strip("\n") for prompt in prompts]
        for name, (answer, _) in readers.items()
    }
    text = read_text(args.text) if args.text else "\n".join(answers["exact"])
    texts = read_texts(readers, windows(tokenizer, text, args.context))
    rows = []
    for name, answer in answers.items():
        pairs = [pair for pair in zip(answer, answers["exact"]) if pair[0] != pair[1]]
        common = [tokenizer.encode(os.path.commonprefix(pair), bos=False) for pair in pairs]
        equal = f"{len(prompts) - len(pairs)} of {len(prompts)}"
        parted = median(map(len, common)) if pairs else ""
        rows.append((name, equal, parted, *texts.get(name, ("", ""))))
    header = [path.name, "answers like exact's", "others part after, tokens", "KL", "perplexity"]
    table(header, *rows)
    return {"fidelity": [dict(zip(header, row)) for row in rows]}


# --------------------------------------------------------------------------------------------------
# 8. Command line


def output_file(text):
    """The type of an option; a folder that is missing would else be noticed after the run."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no such folder")
    return Path(text)


def program(text):
    """The type of an option, [NAME=]PATH: else a wrong path would be noticed after minutes."""
    if not shutil.which(text.rpartition("=")[2]):
        raise argparse.ArgumentTypeError(f"{text}: there is no such program")
    return text


def counts(text):
    """The type of an option: numbers with commas between them."""
    return [llama2.in_range(int, 1, 64)(part) for part in text.split(",")]


FLAG = {"action": "store_true"}
FILE = {"metavar": "FILE", "type": Path}
OUTPUT = {"metavar": "FILE", "type": output_file}
MODES = {  # by their options, with what these take
    "--suite": (run_suite, FLAG),
    "--claims": (run_claims, FLAG),
    "--breakdown": (run_breakdown, FLAG),
    "--profile": (run_profile, OUTPUT),
    "--table": (run_models, FILE | {"nargs": "+"}),
    "--parallel": (run_parallel, {"metavar": "N,N", "type": counts}),
    "--perplexity": (run_perplexity, FILE),
    "--fidelity": (run_fidelity, FILE),
}


def parse_args(argv):
    """The command line; a wrong one ends in one line and exit status 2."""
    parser = llama2.Parser(prog="bench_llama2.py", description="Measure llama2.py.")

    def number(default, low=1):
        return {"metavar": "N", "type": llama2.in_range(int, low), "default": default}

    modes = "modes (default: the suite, or a whole model with --model or --config)"
    add = parser.add_argument_group(modes).add_argument
    for option, (mode, value) in MODES.items():
        add(option, **value, help=mode.__doc__)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--model", **FILE, help="a model (default: random weights)")
    add("--config", choices=CONFIGS, help="of random weights (default: 7b-2-layers)")
    add = parser.add_argument
    add("--prompt-tokens", **number([128, 512]), nargs="+", help="default: 128 512")
    add("--gen-tokens", **number(16), help="default: 16")
    add("--depth", **number([0], low=0), nargs="+", help="both behind N tokens (default: 0)")
    add("--context", **number(512, low=3), help="tokens of a text's windows (default: 512)")
    add("--questions", **FILE, help="of --fidelity, one a line (default: 20 of ours)")
    add("--text", **FILE, help="that --fidelity reads (default: exact's answers)")
    others = ("transformers", "transformers-bfloat16")
    add("--compare", choices=others, nargs="+", default=[], help="the same shape there")
    peers = {"metavar": "[NAME=]PATH", "nargs": "+", "default": ["llama-bench"]}
    add("--llama-bench", **peers, type=program, help="for --table (default: that on the PATH)")
    completion = "llama.cpp's program, for --fidelity"
    add("--llama-completion", metavar="PATH", type=program, help=completion)
    add("--rounds", **number(5), help="default: 5")
    add("--compile", action=argparse.BooleanOptionalAction)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dtype", choices=llama2.DTYPES, default="auto")
    add("--json", **OUTPUT, help="write the result there as well")
    return parser.parse_args(argv)


@torch.no_grad()
def main(argv=None):
    """Run the command line; returns the exit status."""
    try:
        args = parse_args(argv)
        llama2.use_threads()
        machine = describe_machine()
        print(machine, end="\n\n")
        chosen = [mode for option, (mode, _) in MODES.items() if getattr(args, option[2:])]
        if not chosen:
            chosen = [run_models if args.model or args.config else run_suite]
        result = {"machine": machine}
        for mode in chosen:
            result |= mode(args)
        if args.json:
            args.json.write_text(json.dumps(result, indent=1))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # as in `| head`: whoever read has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (
        ValueError,
        OSError,
        MemoryError,
        ImportError,
        RuntimeError,
        argparse.ArgumentTypeError,
        CalledProcessError,
    ) as error:
        problem = getattr(error, "stderr", "") or str(error) or type(error).__name__
        print("bench_llama2.py: error:", problem.strip().splitlines()[-1], file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
