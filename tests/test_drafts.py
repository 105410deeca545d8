"""Drafts: the same text, whatever is guessed; and less time, or as much, by a clock of their own."""

from __future__ import annotations

import copy
import importlib
import math
import random
from types import SimpleNamespace

import pytest
import torch
from helpers import GREEDY, SCRIPT, WIDE, needs, quantised

import llama2

pytestmark = needs("Drafts")
PROMPT = [1, 5, 9, 200, 31, 5, 9, 200, 77]
FREE = llama2.Sampling(temperature=1, top_p=1, seed=7)


def loaded(path, exact=True):
    """A model with kernels, and its tokenizer."""
    if not llama2.kernels().library:
        pytest.skip(f"no compiled kernels here: {llama2.kernels().problem}")
    return llama2.load(path, accelerated=True, exact=exact)


@pytest.fixture(scope="module")
def path(vocabulary, tmp_path_factory):
    return quantised(vocabulary, tmp_path_factory.mktemp("drafts") / "q.gguf", ["Q8_0"])[0]


@pytest.fixture(scope="module")
def native(path):
    return loaded(path)[0]


class Eager(llama2.Drafts if hasattr(llama2, "Drafts") else object):
    """Reads all that is proposed: neither the clock nor what was right decides anything."""

    right = property(lambda self: 99, lambda self, value: None)
    credit = property(lambda self: math.inf, lambda self, value: None)

    def __init__(self, model, propose=None, most=3):
        super().__init__(model, most)
        self.propose = propose or llama2.prompt_lookup

    def __call__(self, tokens, cache):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llama2, "prompt_lookup", self.propose)
            return super().__call__(tokens, cache)


def to_text(ids):
    return "".join(map(chr, ids))


def guessers(text):
    """Proposals for a known text (ids): right, wrong, right sometimes, none at all."""
    text, randoms = to_text(text), random.Random(0)

    def mixed(before, n):
        right = text[len(before) :][: randoms.randint(0, n)]
        return right + to_text(randoms.choices(range(320), k=n - len(right)))

    return {
        "right": lambda before, n: text[len(before) :][:n],
        "wrong": lambda before, n: chr(3) * n,
        "mixed": mixed,
        "none": lambda before, n: "",
        "prompt_lookup": llama2.prompt_lookup,
    }


# --------------------------------------------------------------------------------------------------
# The text


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0", "F16"])
def test_logits_are_those_of_one_id_at_a_time(kind, exact, tmp_path, vocabulary):
    """Bit for bit, for as many as are read at once, behind a prompt, in caches of both dtypes."""
    model, _ = loaded(quantised(vocabulary, tmp_path / "x.gguf", [kind])[0], exact)
    tokens = torch.arange(100, 133)[None]
    for dtype in (torch.float32, torch.float16):
        cache = llama2.Cache(WIDE, 1, 64, dtype)
        with torch.no_grad():
            model(tokens, cache)
            wanted = torch.cat([model(token, cache) for token in tokens[:, :24].split(1, 1)])
            for rows in range(2, llama2.kernels().few_rows + 1):
                cache.truncate(33)
                parts = tokens[:, : 24 // rows * rows].split(rows, 1)
                found = torch.cat([llama2.Drafts(model).read(part, cache) for part in parts])
                assert torch.equal(found, wanted[: len(found)]), (dtype, rows)
                assert cache.pos == 33 + len(found)


@pytest.mark.parametrize(
    "options",
    [
        {"sampling": GREEDY},
        {"sampling": FREE},
        {"sampling": llama2.Sampling(1, seed=2, repetition_penalty=1.5, frequency_penalty=0.5)},
        {"sampling": llama2.Sampling(0, presence_penalty=5, logit_bias={7: 2}), "vocab_size": 300},
        {"sampling": FREE, "max_new_tokens": 5},
        {"sampling": FREE, "max_new_tokens": 200},  # more than the context holds
    ],
    ids=str,
)
def test_any_draft_gives_the_same_text(native, options):
    """The same ids, scores and reports; the cache holds the same after each id."""
    options = {"max_new_tokens": 24, "stop_ids": ()} | options

    def write(step):
        cache, steps = llama2.Cache(native.config), []
        stream = llama2.generate(native, PROMPT, cache=cache, step=step, **options)
        for token_id in stream:
            steps.append((token_id, cache.pos))
        report = stream.report
        k = cache.k[:, :, :, : cache.pos].clone()
        return steps, report.stop_reasons, report.texts, k, report.drafted

    *wanted, k, none = write(None)
    ids = [*PROMPT, *(token_id for token_id, _ in wanted[0])]
    for name, propose in guessers(ids).items():
        *found, k_found, drafted = write(Eager(native, propose, 3))
        assert found == wanted and torch.equal(k_found, k), name
        if name == "right":
            assert drafted >= (len(ids) - len(PROMPT)) // 2 - 1
        assert none == 0 and (drafted == 0 or name != "none")


def test_a_processor_hears_each_place_once(native):
    heard = []

    def hear(ids, logits):
        heard.append(ids)
        return logits

    sampling = llama2.Sampling(1, seed=5, logits_processor=hear)
    ids = [*llama2.generate(native, PROMPT, sampling, 20, stop_ids=())]
    wanted, heard = heard, []
    for propose in guessers([*PROMPT, *ids]).values():
        heard.clear()
        step = Eager(native, propose)
        assert [*llama2.generate(native, PROMPT, sampling, 20, stop_ids=(), step=step)] == ids
        assert heard == wanted


def test_stops(native, path):
    """By an id, by a text: nothing behind it is told, and the cache ends where it would."""
    tokenizer = llama2.Tokenizer.from_gguf(path)
    ids = [*llama2.generate(native, PROMPT, FREE, 20, stop_ids=())]
    propose = guessers([*PROMPT, *ids])["right"]
    for count in range(1, 12):
        stop_ids = {ids[count]} - {*ids[:count]}
        for step in (None, Eager(native, propose, 5)):
            cache = llama2.Cache(native.config)
            options = {"stop_ids": stop_ids, "cache": cache, "step": step}
            stream = llama2.generate(native, PROMPT, FREE, 20, **options)
            end = count if stop_ids else 20
            assert [*stream] == ids[:end] and cache.pos == len(PROMPT) + end - (not stop_ids)
    text = "".join(llama2.stream_text(native, tokenizer, PROMPT, sampling=FREE, stop_ids=()))
    for step in (None, Eager(native, propose, 5)):
        options = {"sampling": FREE, "stop_ids": (), "stop": text[6:9], "step": step}
        stream = llama2.stream_text(native, tokenizer, PROMPT, **options)
        assert "".join(stream) == text[: text.index(text[6:9])]


def test_a_conversation_goes_on(native, path):
    """Turns that reuse a cache, or are left early: the same text from as many ids that are read."""
    tokenizer = llama2.Tokenizer.from_gguf(path)

    def turns(step):
        caches, told, ids = [llama2.Cache(native.config) for _ in range(2)], [], list(PROMPT)
        options = {"sampling": FREE, "max_new_tokens": 8, "stop_ids": (), "step": step}
        for turn in range(4):
            stream = llama2.stream_text(native, tokenizer, ids, cache=caches[0], **options)
            told.append("".join(stream) if turn != 1 else next(stream))
            told.append(stream.report.prompt_tokens)
            ids += [*stream.report.new_ids[0], 5, 9, 200, 77]
            if turn == 2:  # another text comes between, in the other cache
                other = [1, 70, 71, 70]
                stream = llama2.stream_text(native, tokenizer, other, cache=caches[1], **options)
                told.append("".join(stream))
        return told

    wanted = turns(None)
    for propose in (llama2.prompt_lookup, *guessers(PROMPT).values()):
        assert turns(Eager(native, propose)) == wanted


def test_the_server_drafts(native, path, monkeypatch):
    """Its log-probabilities are the same, too; it is asked before each pass whether to go on."""
    examples = SCRIPT.parent / "examples"
    if not examples.exists():
        pytest.skip("llama2.py was copied without its examples")
    monkeypatch.syspath_prepend(examples)
    serving, tokenizer = importlib.import_module("serving"), llama2.Tokenizer.from_gguf(path)
    options = {"echo": True, "top": 2, "sampling": FREE, "max_new_tokens": 20}

    def answer(run):
        session = serving.Session(native, tokenizer, [llama2.Cache(WIDE) for _ in range(2)])
        passes = []
        session.check, session.run = lambda: passes.append(1), run or session.run
        stream, scores = session.stream_text(PROMPT, **options)
        assert isinstance(session.run, llama2.Drafts) or run is native
        return "".join(stream), scores, len(passes), stream.report

    text, scores, passes, report = answer(native)
    assert passes == len(report.seconds) + 1 and report.drafted == 0
    propose = guessers([*PROMPT, *report.new_ids[0]])["right"]
    for run in (Eager(native, propose), None):
        found = answer(run)
        assert found[:3] == (text, scores, passes)
    *_, report = answer(Eager(native, propose))
    assert report.drafted > 5


def test_nothing_waits_for_another_generation(native):
    """Logits are those of the text that the cache holds now."""
    ids = [*llama2.generate(native, PROMPT, GREEDY, 20, stop_ids=())]
    other = [*llama2.generate(native, [1, 70, 71, 72], GREEDY, 20, stop_ids=())]
    step, cache = Eager(native, guessers([*PROMPT, *ids])["right"]), llama2.Cache(WIDE)
    options = {"stop_ids": (), "step": step, "cache": cache}
    for _ in range(2):
        stream = llama2.generate(native, PROMPT, GREEDY, 20, **options)
        assert [next(stream) for _ in range(3)] == ids[:3] and step.waiting
        stream = llama2.generate(native, PROMPT, GREEDY, 20, **options)  # begins with one id
        assert [*stream] == ids and stream.report.prompt_tokens == 1
        assert [*llama2.generate(native, [1, 70, 71, 72], GREEDY, 20, **options)] == other
    stream = llama2.generate(native, PROMPT, GREEDY, 20, **options)
    assert [next(stream) for _ in range(2)] == ids[:2] and len(step.waiting) > 1
    clean, pos = copy.deepcopy(cache), cache.pos
    native(torch.tensor([[70, 71]]), cache)  # somebody else's tokens, in the places of the guesses
    cache.truncate(pos)
    for token_id in ids[1:4]:
        token = torch.tensor([[token_id]])
        assert torch.equal(step(token, cache), native(token, clean))


# --------------------------------------------------------------------------------------------------
# Where the contract ends


def without(model, monkeypatch, case):
    """Make the model one for which several rows are not promised to be what they are alone."""
    if case == "hook":
        model.norm.register_forward_hook(lambda module, args, y: y)
    elif case == "hook of a block":
        model.layers[0].register_forward_hook(lambda module, args, y: y)
    elif case == "other head":
        head = model.lm_head
        model.lm_head = llama2.QuantizedLinear(head.blocks, head.ggml_type)
    elif case == "patched":
        forward = model.norm.forward
        model.norm.forward = lambda x: forward(x)
    elif case == "more parts":
        model.more = torch.nn.Linear(2, 2)
    elif case == "no kernels":
        found = llama2.Kernels(problem="none")
        monkeypatch.setattr(llama2, "kernels", lambda: found)
    elif case == "bfloat16":
        model.embed_tokens.dtype = torch.bfloat16


@pytest.mark.parametrize(
    "case",
    [
        "hook",
        "hook of a block",
        "other head",
        "patched",
        "more parts",
        "no kernels",
        "bfloat16",
        "",
    ],
)
def test_off_where_nothing_is_promised(path, monkeypatch, case):
    model, _ = loaded(path)
    without(model, monkeypatch, case)
    ids = [*llama2.generate(model, PROMPT, GREEDY, 9, stop_ids=())]
    step = Eager(model, guessers([*PROMPT, *ids])["right"])
    stream = llama2.generate(model, PROMPT, GREEDY, 9, stop_ids=(), step=step)
    assert [*stream] == ids and (stream.report.drafted == 0) == (case != "")


def test_several_rows_and_plain_models(model, native):
    for some in (model, native):
        for prompts in ([PROMPT, PROMPT], [PROMPT, PROMPT[:4]], [PROMPT]):
            wanted = [*llama2.generate_batch(some, prompts, FREE, 6)]
            step = Eager(some, lambda text, n: chr(5) * n)
            assert [*llama2.generate_batch(some, prompts, FREE, 6, step=step)] == wanted
            assert len(prompts) == 1 or not step.texts


# --------------------------------------------------------------------------------------------------
# Guesses


def test_prompt_lookup_finds_the_longest_run():
    """Against trying every place; the most recent of the longest."""
    randoms = random.Random(0)
    for _ in range(400):
        ids = [randoms.randrange(3) for _ in range(randoms.randint(1, 40))]
        best = (1, None)
        for end in range(1, len(ids)):  # a run before it that is that before len(ids)
            run = 0
            while run < min(end, 16) and ids[end - 1 - run] == ids[-1 - run]:
                run += 1
            best = max(best, (run, end)) if run > 1 else best
        wanted = [] if best[1] is None else ids[best[1] :][:5]
        assert [*map(ord, llama2.prompt_lookup(to_text(ids), 5))] == wanted


class Clock:
    """Time that passes for passes of so many rows alone; every so many are disturbed by others."""

    def __init__(self, rows, noise=0.0, disturbed=0):
        self.rows, self.noise, self.disturbed = rows, noise, disturbed
        self.now, self.spent, self.passes, self.randoms = 0.0, 0.0, 0, random.Random(1)

    def perf_counter(self):
        return self.now

    def spend(self, seconds):
        seconds *= 1 + self.randoms.random() * self.noise
        self.spent, self.passes = self.spent + seconds, self.passes + 1
        self.now += seconds * (4 if self.disturbed and self.passes % self.disturbed == 0 else 1)


def seconds_of(text, prompt, clock, propose, monkeypatch):
    """How long a text takes after so many of its ids, in passes of one row."""
    if not llama2.kernels().library:
        pytest.skip("no compiled kernels here")
    monkeypatch.setattr(llama2, "time", clock)
    model = SimpleNamespace(
        layers=llama2.NativeLayers([]), config=SimpleNamespace(vocab_size=99999)
    )

    def run(tokens, cache):
        clock.spend(clock.rows[tokens.shape[1]] if cache.pos else 0.0)
        cache.advance(tokens.shape[1])
        return torch.zeros(tokens.shape[1], 1)

    class Model(SimpleNamespace):
        def __call__(self, tokens, cache):
            return run(tokens, cache)[-1:]

    monkeypatch.setattr(llama2, "prompt_lookup", propose)
    step, cache = llama2.Drafts(Model(**vars(model))), llama2.Cache(WIDE, 1, len(text))
    step.read = run
    llama2.CACHE_USERS[cache] = llama2.Report(step.model, [text], prompt)
    with torch.no_grad():
        step(torch.tensor([text[:prompt]]), cache)
        for token_id in text[prompt:]:
            step(torch.tensor([[token_id]]), cache)
    return clock.spent / (len(text) - prompt)


ROWS = {1: 1.0, 2: 1.25, 3: 1.4, 4: 1.6, 5: 1.9, 6: 2.2, 7: 2.5, 8: 2.8}
FOURS = {1: 1.0, 2: 1.2, 3: 1.8, 4: 1.8}  # where 3 rows take as long as 4
STEEP = {n: float(n) for n in ROWS}  # where nothing is won by reading several at once


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_quotes_are_faster_and_other_text_is_not_slower(monkeypatch, noise):
    randoms = random.Random(3)
    source = randoms.choices(range(900), k=300)
    edited = [i if randoms.random() > 0.05 else 950 for i in source]
    fresh = randoms.choices(range(900), k=600)
    looping = [*fresh[:200], *[randoms.randrange(4) for _ in range(400)]]  # runs that say nothing

    def seconds(text, prompt, rows, propose=llama2.prompt_lookup, disturbed=0):
        return seconds_of(text, prompt, Clock(rows, noise, disturbed), propose, monkeypatch)

    one = 1 + noise / 2
    assert seconds([*source, *edited], 300, ROWS) < one / 1.5
    assert seconds([*source, *edited], 300, STEEP) < one * 1.03
    for disturbed in (5, 7, 10, 13):
        assert seconds([*source, *edited], 300, FOURS, disturbed=disturbed) < one / 1.5
    for rows in (ROWS, STEEP):
        assert seconds(fresh, 100, rows) < one * 1.03
        assert seconds(looping, 100, rows) < one * 1.03
        assert seconds(fresh, 100, rows, lambda text, n: chr(998) * n) < one * 1.03  # never right
    right = to_text(fresh)
    assert seconds(fresh, 100, ROWS, lambda text, n: right[len(text) :][:n]) < one / 2


# --------------------------------------------------------------------------------------------------
# Command line


def test_command_line(path, cli, monkeypatch):
    """The same text with and without."""
    loaded(path)
    argv = ["--model", str(path), "--prompt", "the fox saw the fox saw", "--compile"]
    argv += ["--max-new-tokens", "20"]
    monkeypatch.setattr(llama2.Drafts, "credit", Eager.credit, raising=False)
    status, wanted, err = cli(*argv, "--draft", "0")
    assert status == 0 and "drafted" not in err
    monkeypatch.setattr(llama2.Drafts, "right", Eager.right, raising=False)
    for draft in ([], ["--draft=3"]):
        status, out, err = cli(*argv, *draft)
        assert (status, out) == (0, wanted) and "no drafts" not in err
    status, out, err = cli(*argv, "--no-compile", "--draft", "3")
    assert status == 0 and "no drafts: they need the kernels on a CPU" in err
    for wrong in ("-1", "many", "1.5"):
        status, out, err = cli(*argv, f"--draft={wrong}")
        assert (status, err.count("\n")) == (2, 1) and "--draft" in err
