"""Sampling and what draws by it: distributions against transformers, seeds, stop texts, caches.

The frozen numbers were made by the processors of transformers 5.23; where it is installed, random
logits are compared with it, too. Penalties follow llama_sampler_penalties of llama.cpp.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import tracemalloc

import pytest
import torch
from helpers import GREEDY, SHAPE, Scripted, scripted

import llama2

LOGITS = torch.tensor([0.5, 2.0, -1.0, 1.5, 1.0, 0.0, 1.9, -0.5])
SEEN = [1, 2, 2, 6]  # ids before LOGITS
OFF = {"temperature": 1.0, "top_p": 1.0}  # besides what a test is about
FROZEN = [
    (
        {"temperature": 0.5},
        [0.02075, 0.41679, 0.00103, 0.15333, 0.05641, 0.00763, 0.34124, 0.00281],
    ),
    ({"top_k": 3}, [0, 0.39819, 0, 0.24151, 0, 0, 0.3603, 0]),
    ({"top_k": 99}, [0.06622, 0.29677, 0.01478, 0.18, 0.10918, 0.04016, 0.26853, 0.02436]),
    ({"top_p": 0.5}, [0, 0.52498, 0, 0, 0, 0, 0.47502, 0]),
    ({"top_p": 0.9}, [0.07192, 0.32233, 0, 0.19551, 0.11858, 0, 0.29166, 0]),
    ({"min_p": 0.3}, [0, 0.34731, 0, 0.21066, 0.12777, 0, 0.31426, 0]),
    (
        {"top_k": 6, "top_p": 0.95, "min_p": 0.2, "temperature": 1.5},
        [0.09689, 0.26337, 0, 0.18871, 0.13522, 0.06942, 0.24638, 0],
    ),
    (
        {"repetition_penalty": 1.3},
        [0.0837, 0.23644, 0.01384, 0.22752, 0.138, 0.05077, 0.21894, 0.03079],
    ),
    (
        {"repetition_penalty": 0.7, "temperature": 0.8, "top_p": 0.8},
        [0, 0.54452, 0, 0, 0, 0, 0.45548, 0],
    ),
]


def frequencies(monkeypatch, logits, ids=(), n=4000, **options):
    """How often each id is drawn, if the random numbers are n evenly spaced ones: within 1 / n."""
    sampling, texts = llama2.Sampling(**OFF | options), [list(ids)] * n
    with monkeypatch.context() as context:
        context.setattr(torch, "rand", lambda *args, **kwargs: (torch.arange(n) + 0.5) / n)
        drawn = llama2.sample(logits.expand(n, -1), sampling, texts)
    return drawn.bincount(minlength=len(logits)) / n


def by_transformers(logits, ids=(), **options):
    """The distribution that transformers draws from."""
    process = pytest.importorskip("transformers").generation.logits_process
    made = {
        "repetition_penalty": process.RepetitionPenaltyLogitsProcessor,
        "temperature": process.TemperatureLogitsWarper,
        "top_k": process.TopKLogitsWarper,
        "top_p": process.TopPLogitsWarper,
        "min_p": process.MinPLogitsWarper,
    }
    scores = logits[None].clone()
    for name, kind in made.items():
        if name in options:
            scores = kind(options[name])(torch.tensor([ids]), scores)
    return scores.softmax(-1)[0]


# --------------------------------------------------------------------------------------------------
# Distributions


@pytest.mark.parametrize("options, wanted", FROZEN, ids=str)
def test_distributions_are_those_of_transformers(monkeypatch, options, wanted):
    found = frequencies(monkeypatch, LOGITS, SEEN, **options)
    assert (found - torch.tensor(wanted)).abs().max() < 4e-4
    assert (found > 0).tolist() == [p > 0 for p in wanted]


def test_random_distributions_equal_transformers(monkeypatch):
    """Of 700 tokens, more than are sorted first."""
    generator = torch.Generator().manual_seed(0)
    for i in range(12):
        logits = 3 * torch.randn(700, generator=generator)
        ids = torch.randint(700, (50,), generator=generator).tolist()
        options = [
            {"temperature": 1.3, "repetition_penalty": 1.2},
            {"temperature": 0.7, "top_p": 0.9},
            {"top_k": 600, "top_p": 0.97},
            {"min_p": 0.02, "top_k": 30, "repetition_penalty": 0.8},
        ][i % 4]
        found = frequencies(monkeypatch, logits, ids, 2000, **options)
        assert (found - by_transformers(logits, ids, **options)).abs().max() < 6e-4, options


def test_draws_are_random():
    """As often as they should be: chi-square at 1 in a million."""
    n, wanted = 20000, LOGITS.softmax(-1)
    generator = torch.Generator().manual_seed(0)
    drawn = llama2.sample(LOGITS.expand(n, -1), llama2.Sampling(**OFF), generator=generator)
    counts = drawn.bincount(minlength=len(LOGITS))
    assert ((counts - n * wanted) ** 2 / (n * wanted)).sum() < 42


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "top_p": 1.0},
        {"temperature": 3.0, "top_p": 0.999},
        {"top_k": 5},
        {"top_k": 90},
        {"top_k": 150, "top_p": 1.0},
        {"top_k": 6, "top_p": 1.0},
        {"top_p": 1.0, "min_p": 0.01},
        {"repetition_penalty": 1.5},
    ],
    ids=str,
)
def test_draws_are_the_same_whatever_is_sorted(monkeypatch, options):
    """For steep and flat logits, many of them equal, in rows together and alone."""
    generator, sampling = torch.Generator().manual_seed(0), llama2.Sampling(**options)
    scale = torch.tensor([[0.1], [1.0], [4.0], [9.0]])
    logits = (scale * torch.randn(40, 4, 200, generator=generator)).bfloat16().float().view(160, -1)
    texts = [[i % 200, 7] for i in range(160)]

    def draw(first):
        monkeypatch.setattr(llama2, "LIKELIEST", first)
        generators = [torch.Generator().manual_seed(i) for i in range(160)]
        return llama2.sample(logits, sampling, texts, generators).tolist()

    wanted = draw(200)
    assert draw(100) == draw(20) == draw(2) == wanted and len(set(wanted)) > 20
    rows = zip(logits, texts, (torch.Generator().manual_seed(i) for i in range(160)), strict=True)
    alone = [llama2.sample(row, sampling, ids, generator) for row, ids, generator in rows]
    assert [token_id.item() for token_id in alone] == wanted


def test_little_is_sorted(monkeypatch):
    """The whole vocabulary only if the draw may need it."""
    sizes, sort = [], torch.Tensor.sort
    monkeypatch.setattr(
        torch.Tensor, "sort", lambda x, *a, **k: sizes.append(len(x)) or sort(x, *a, **k)
    )
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    llama2.sample(4 * logits)
    assert max(sizes) <= llama2.LIKELIEST
    monkeypatch.setattr(llama2, "LIKELIEST", 100)
    sizes.clear()
    llama2.sample(2 * logits)
    assert sizes[-1] == 1600
    llama2.sample(0.1 * logits)
    assert max(sizes) == 5000


def test_top_p_is_the_fewest_that_reach_it():
    """Four of eight equal tokens reach 0.5; catches the one too many of `>` for `>=`. 0 leaves one."""
    for top_p, count in ((0.5, 4), (1e-9, 1), (0.0, 1)):
        sampling = llama2.Sampling(temperature=1.0, top_p=top_p)
        drawn = llama2.sample(torch.zeros(5000, 8), sampling, generator=torch.Generator())
        assert drawn.unique().numel() == count


def test_temperature_zero_is_greedy_and_tiny_ones_nearly():
    for temperature in (0.0, 1e-3, 1e-30):
        assert llama2.sample(1e4 * LOGITS, llama2.Sampling(temperature)).item() == 1
    tie = torch.tensor([1.0, 3.0, 3.0])
    for sampling in (GREEDY, llama2.Sampling(0, top_k=1), llama2.Sampling(1, top_k=1)):
        assert llama2.sample(tie, sampling).item() == 1


@pytest.mark.parametrize(
    "sampling", [GREEDY, llama2.Sampling(), llama2.Sampling(presence_penalty=1)]
)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_logits_that_are_not_finite_are_told(sampling, bad):
    logits = torch.stack([LOGITS, LOGITS])
    logits[1, 3] = bad
    first, second = llama2.sample(logits, sampling, [[], []]).tolist()
    assert first >= 0 and second == -1


# --------------------------------------------------------------------------------------------------
# Changes of logits


def test_penalties_are_those_of_llama_cpp():
    """Divided or multiplied, less the frequency for each time, less the presence once; 64 tokens."""
    sampling = llama2.Sampling(repetition_penalty=2, presence_penalty=0.25, frequency_penalty=0.5)
    wanted = LOGITS.clone()
    wanted[1] = 2.0 / 2 - 0.5 - 0.25
    wanted[2] = -1.0 * 2 - 2 * 0.5 - 0.25
    wanted[6] = 1.9 / 2 - 0.5 - 0.25
    for ids in (SEEN, [0, 5, *[7] * 3, *SEEN * 16][-64:][-4:], [3, *[300] * 60, *SEEN]):
        assert torch.allclose(sampling.adjust(LOGITS, ids), wanted)
    far = sampling.adjust(LOGITS, [3, *[5] * 64])
    assert far[3] == LOGITS[3] and far[5] == -64 * 0.5 - 0.25
    assert sampling.adjust(LOGITS, []).equal(LOGITS)


def test_bias_and_processor():
    """The bias comes first; the processor sees all ids and what the others left of the logits."""
    calls = []

    def only_odd(ids, logits):
        calls.append((ids, logits.clone()))
        logits[::2] = -math.inf
        return logits

    logits = LOGITS.clone()
    sampling = llama2.Sampling(
        0, logit_bias={1: -math.inf, 3: -5, 5: 0.5}, presence_penalty=1, logits_processor=only_odd
    )
    assert llama2.sample(logits, sampling, SEEN).item() == 5
    ((ids, seen),) = calls
    assert (
        ids == SEEN and seen[1] == -math.inf and seen[3] == -3.5 and seen[6] == pytest.approx(0.9)
    )
    assert logits.equal(LOGITS)  # scores and other callers see the model's
    with pytest.raises(ValueError, match="no token that can be drawn"):
        llama2.sample(logits, llama2.Sampling(logit_bias=dict.fromkeys(range(8), -math.inf)))
    with pytest.raises(ValueError, match="the id 8; must be below 8"):
        llama2.sample(logits, llama2.Sampling(logit_bias={8: 1}))
    with pytest.raises(ValueError, match=r"must return logits \(8,\)"):
        llama2.sample(logits, llama2.Sampling(logits_processor=lambda ids, logits: logits[:3]))


def test_a_processor_writes_what_a_grammar_wants(model):
    """The whole text reaches it, whichever row: here a text that counts."""

    def count(ids, logits):
        allowed = torch.full_like(logits, -math.inf)
        allowed[ids[-1] + 1] = 0
        return allowed

    sampling = llama2.Sampling(logits_processor=count)
    rows = zip(*llama2.generate_batch(model, [[1, 5, 9], [1, 70]], sampling, 4, stop_ids=[12]))
    assert [*rows] == [(10, 11, None, None), (71, 72, 73, 74)]


def test_ids_may_be_a_tensor_and_must_be_integers(model):
    """Whose items are no keys to count by: penalties would see each one once."""
    options = {"sampling": llama2.Sampling(0, frequency_penalty=2.0), "max_new_tokens": 9}
    ids = [1, 70, 70, 70, 80]
    assert [*llama2.generate(model, torch.tensor(ids), **options)] == [
        *llama2.generate(model, ids, **options)
    ]
    for odd in ("text", [1.5], [None]):
        with pytest.raises(ValueError, match="the prompt: .*integer"):
            llama2.generate(model, odd)


def test_penalties_count_what_a_cache_holds(model):
    sampling, ids = llama2.Sampling(1, seed=2, repetition_penalty=1.8), [1, 5, 9, 200, 31, 8]
    wanted = [*llama2.generate(model, ids, sampling, 9, stop_ids=())]
    options = {"cache": llama2.Cache(model.config), "stop_ids": ()}
    [*llama2.generate(model, [*ids[:4], 77], sampling, 2, **options)]
    stream = llama2.generate(model, ids, sampling, 9, **options)
    assert [*stream] == wanted and stream.report.prompt_tokens == 2
    assert max(map(wanted.count, wanted)) < 3


# --------------------------------------------------------------------------------------------------
# One set of values


@pytest.mark.parametrize(
    "options",
    [
        *[{"temperature": v} for v in (-1.0, math.nan, math.inf, "hot", None, True)],
        *[{"top_k": v} for v in (-1, 1.5, None, True)],
        *[{"top_p": v} for v in (-0.1, 1.1, math.nan)],
        *[{"min_p": v} for v in (-0.1, 1.1)],
        *[{"repetition_penalty": v} for v in (0.0, -1.0, math.inf)],
        *[{"presence_penalty": v} for v in (math.nan, 101)],
        *[{"frequency_penalty": v} for v in (-math.inf, "1")],
        *[{"seed": v} for v in (-1, 2**63, 1.0)],
        *[
            {"logit_bias": v}
            for v in (
                {"1": 1},
                {1: "1"},
                {1: math.nan},
                {1: math.inf},
                {True: 1},
                {1: 10**310},
                {1: -(10**310)},
            )
        ],
    ],
    ids=str,
)
def test_sampling_refuses(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        llama2.Sampling(**options)


def test_one_set_of_defaults(cli):
    """sample, generate, generate_batch and the command line take the value, and its defaults."""
    for function in (llama2.sample, llama2.generate, llama2.generate_batch):
        assert inspect.signature(function).parameters["sampling"].default == llama2.Sampling()
    args = llama2.parse_args(["--prompt", "x"])
    assert args.sampling == llama2.Sampling(seed=0)
    changed = {"temperature": 0.5, "top_k": 3, "top_p": 0.25, "min_p": 0.125}
    changed |= {"repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 2.0}
    argv = [f"--{name.replace('_', '-')}={value}" for name, value in changed.items()]
    assert llama2.parse_args(["--prompt", "x", *argv, "--seed=7"]).sampling == llama2.Sampling(
        **changed, seed=7
    )
    others = {field.name for field in dataclasses.fields(llama2.Sampling)} - changed.keys()
    assert others == {"seed", "logit_bias", "logits_processor"}
    for argument, said in (("--repetition-penalty=0", "repetition_penalty is 0.0"),):
        status, out, err = cli("--prompt", "x", argument)
        assert (status, out, err.count("\n")) == (2, "", 1) and said in err


def test_global_state_is_left_alone(model):
    """torch's generator is moved by sample() alone, if it is given neither a seed nor another one."""
    logits, state = LOGITS.clone(), torch.get_rng_state()
    llama2.sample(logits, llama2.Sampling(1.0, 3, 0.5, 0.1), generator=torch.Generator())
    assert llama2.sample(logits, llama2.Sampling(seed=3)) == llama2.sample(
        logits, llama2.Sampling(seed=3)
    )
    for sampling in (llama2.Sampling(seed=3), llama2.Sampling(), GREEDY):
        [*llama2.generate(model, [1, 5], sampling, 3)]
        [*llama2.generate_batch(model, [[1, 5], [1, 6, 7]], sampling, 3)]
    llama2.parse_args(["--prompt", "x"])
    assert logits.equal(LOGITS) and torch.get_rng_state().equal(state)
    llama2.sample(logits)
    assert not torch.get_rng_state().equal(state)


def test_another_default_dtype(model):
    """Draws and scores are in float32 all the same."""
    n, sampling = 300, llama2.Sampling(**OFF, seed=1)
    wanted = llama2.sample(LOGITS.expand(n, -1), sampling)
    scores = llama2.score(model, [1, 5, 9, 200])
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert llama2.sample(LOGITS.expand(n, -1), sampling).equal(wanted)
        found = llama2.score(model, [1, 5, 9, 200])
        assert found.dtype == scores.dtype and torch.allclose(found, scores, atol=1e-5)
    finally:
        torch.set_default_dtype(torch.float32)


# --------------------------------------------------------------------------------------------------
# Stop texts


def test_a_stop_text_is_one_text(tokenizer):
    """And not its letters; texts that are none or empty are refused."""
    script = [*tokenizer.encode("the fox saw the moon and laughed", bos=False), 2]

    def text(stop):
        stream = llama2.stream_text(scripted(script, 1), tokenizer, [1], stop=stop, sampling=GREEDY)
        return "".join(stream)

    assert text("moon and") == text(["moon and"]) == "the fox saw the "
    assert text("END") == "the fox saw the moon and laughed"
    for bad in ("", [""], ["a", ""], [5], [None]):
        with pytest.raises(ValueError, match="stop is"):
            text(bad)


@pytest.mark.parametrize("letters", ["a", "ab", "aab"])
def test_what_may_begin_a_stop_text(letters):
    """Against trying every beginning of it; a stop text of 40,000 characters takes no more memory."""
    stops = [letters * 3 + "c", letters[::-1] * 2, "bb"]
    for number in range(3**7):
        text = "".join("abc"[number // 3**i % 3] for i in range(7))
        shown, held, found = llama2.split_at_stop(text, stops)
        places = [(text.index(stop), stop) for stop in stops if stop in text]
        if places:
            assert (shown, held, found) == (text[: min(places)[0]], "", min(places)[1])
            continue
        begins = [n for s in stops for n in range(len(s)) if text.endswith(s[:n])]
        assert found == "" and shown + held == text and len(held) == max(begins)
    long = letters * 20_000
    tracemalloc.start()
    for text in ("no", long[:-1], long[:9000] + "c", "c" * 30_000):
        assert llama2.split_at_stop(text, [long])[1] == (text if long.startswith(text) else "")
    assert tracemalloc.get_traced_memory()[1] < 2e6
    tracemalloc.stop()


# --------------------------------------------------------------------------------------------------
# One cache, several generations


def test_streams_that_share_a_cache_cannot_take_turns(model, tokenizer):
    """An error, not wrong text."""
    cache, ids = llama2.Cache(model.config), [1, 5, 9]
    options = {"sampling": GREEDY, "stop_ids": ()}
    first = llama2.generate(model, ids, cache=cache, **options)
    wanted = [*llama2.generate(model, ids, **options)]
    assert [next(first), next(first)] == wanted[:2]
    second = llama2.generate(model, ids, cache=cache, **options)
    with pytest.raises(ValueError, match="used by another generation"):
        next(first)
    assert [*second] == wanted
    first = llama2.stream_text(model, tokenizer, ids, cache=cache, **options)
    next(first)
    llama2.stream_text(model, tokenizer, [1, 70, 80, 90], cache=cache, **options)
    with pytest.raises(ValueError, match="used by another generation"):
        list(first)


def test_a_conversation_goes_on(model, tokenizer):
    """What a cache holds of a prompt is not read again, whatever the caller does with its lists."""
    ids, cache = [1, 5, 9, 30], llama2.Cache(model.config)
    options = {"sampling": GREEDY, "max_new_tokens": 6, "stop_ids": ()}
    for more, read in (([8, 8, 8], 4), ([], 3), ([70], 1), ([71], 1), ([72], 1)):
        stream = llama2.stream_text(model, tokenizer, ids, cache=cache, **options)
        text, new = "".join(stream), stream.report.new_ids[0]
        assert text == "".join(llama2.stream_text(model, tokenizer, ids, **options))
        assert text == tokenizer.decode([*ids, *new])[len(tokenizer.decode(ids)) :]
        assert stream.report.prompt_tokens == read
        ids += more
    other = scripted([7, 8], len(ids))  # the same cache would fit
    assert llama2.held(model, cache, ids) == len(ids) - 1 and llama2.held(other, cache, ids) == 0
    cache.truncate(4)
    assert llama2.held(model, cache, ids) == 4
    model(torch.tensor([[7, 8]]), cache)  # somebody else's tokens, in the places of these
    assert llama2.held(model, cache, ids) == 0
    assert text != "".join(llama2.stream_text(model, tokenizer, [7, 8], cache=cache, **options))
    with pytest.raises(ValueError, match="2 prompts; a cache continues one"):
        llama2.generate_batch(model, [ids, ids], cache=cache)


def test_all_that_a_script_says_is_heard():
    """Rows that have ended are not sampled any more."""
    model = Scripted(llama2.Config(**SHAPE))
    model.script, model.start = [7, 2, 9, 9], 2
    heard = []

    def hear(ids, logits):
        heard.append(ids)
        return logits

    sampling = llama2.Sampling(0, logits_processor=hear)
    [*llama2.generate_batch(model, [[1, 5]] * 2, sampling, 4)]
    assert heard == [[1, 5], [1, 5], [1, 5, 7], [1, 5, 7]]
