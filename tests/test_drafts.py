"""Drafts: the same text, to the last bit of its logits, whatever is guessed."""

from __future__ import annotations

import copy
import random

import pytest
import torch

import llama2
from test_llama2 import GREEDY, SHAPE, needs, quantised

pytestmark = needs("Drafts")
PROMPT = [1, 5, 9, 200, 31, 5, 9, 200, 77]
FREE = llama2.Sampling(temperature=1, top_p=1, seed=7)
CONFIG = llama2.Config(**SHAPE | {"hidden_size": 256, "intermediate_size": 512})


@pytest.fixture(scope="module", params=[("Q4_K", True), ("Q4_K", False), ("F16", False)])
def model(request, vocabulary, tmp_path_factory):
    """A model with the kernels."""
    if not llama2.load_kernels().library:
        pytest.skip(f"no compiled kernels here: {llama2.load_kernels().problem}")
    kind, exact = request.param
    path, _ = quantised(vocabulary, tmp_path_factory.mktemp("drafts") / "q.gguf", [kind], CONFIG)
    model = llama2.build_model(llama2.open_checkpoint(path))
    return llama2.accelerate(model, exact)


def guessers(text):
    """Guesses for a known text: right, wrong, right for a while, none."""
    randoms = random.Random(0)

    def right(ids, most):
        return torch.tensor(text[len(ids) : len(ids) + most], dtype=torch.int64)

    def mixed(ids, most):
        guess = right(ids, most)
        return torch.cat((guess[: randoms.randint(0, most)], torch.tensor([3, 4])))[:most]

    return {
        "right": right,
        "wrong": lambda ids, most: torch.full((most,), 3),
        "mixed": mixed,
        "none": lambda ids, most: ids[:0],
    }


class Seen:
    """A step that keeps the logits that another gives."""

    def __init__(self, step):
        self.step = step
        self.logits = []

    def __call__(self, texts, cache):
        self.logits.append(self.step(texts, cache))
        return self.logits[-1]


def generated(model, sampling, step, cache=None):
    """A text, and the logits that it was drawn from."""
    seen = Seen(step)
    ids = [*llama2.generate(model, PROMPT, sampling, 20, stop_ids=(), step=seen, cache=cache)]
    return ids, torch.cat(seen.logits)


def plain(model):
    """The step without drafts."""
    return lambda texts, cache: llama2.read_tokens(model, texts, cache)


@pytest.mark.parametrize("sampling", [GREEDY, FREE], ids=["greedy", "free"])
@pytest.mark.parametrize("half", [True, False])
def test_whatever_is_guessed(model, monkeypatch, sampling, half):
    dtype = torch.float16 if half else torch.float32
    cache = llama2.Cache(CONFIG, 1, 64, dtype)
    ids, logits = generated(model, sampling, plain(model), cache)
    for name, guess in guessers([*PROMPT, *ids]).items():
        monkeypatch.setattr(llama2, "prompt_lookup", guess)
        for most in (1, 3, 30):
            drafts = llama2.Drafts(model, most)
            found, found_logits = generated(
                model, sampling, drafts, llama2.Cache(CONFIG, 1, 64, dtype)
            )
            assert found == ids and torch.equal(found_logits, logits)
            if name == "right":
                rows = min(most, llama2.load_kernels().few_rows - 1) + 1
                assert drafts.accepted >= 19 - 19 // rows - 1
            if name in ("wrong", "none"):
                assert drafts.accepted == 0


def test_a_cache_is_filled_to_its_end(model, monkeypatch):
    text = [*PROMPT, *generated(model, GREEDY, plain(model))[0]]
    monkeypatch.setattr(llama2, "prompt_lookup", guessers(text)["right"])
    cache = llama2.Cache(CONFIG, 1, 20)
    stream = llama2.generate(
        model, PROMPT, GREEDY, 20, stop_ids=(), cache=cache, step=llama2.Drafts(model)
    )
    assert [*stream] == text[9:20]


def test_generations_that_take_turns(model):
    """One cache, one Drafts, two texts: each as it is alone; a turn goes on from what is held."""
    other = [1, 70, 71, 70, 71, 70]
    wanted = [[*llama2.generate(model, ids, FREE, 12, stop_ids=())] for ids in (PROMPT, other)]
    drafts = llama2.Drafts(model)
    cache = llama2.Cache(CONFIG)
    streams = [
        llama2.generate(model, ids, FREE, 12, stop_ids=(), cache=cache, step=drafts)
        for ids in (PROMPT, other)
    ]
    assert [[*ids] for ids in zip(*zip(*streams))] == wanted
    ids = [*PROMPT, *wanted[0], 5, 9]
    again = [*llama2.generate(model, ids, FREE, 12, stop_ids=(), cache=cache, step=drafts)]
    assert again == [*llama2.generate(model, ids, FREE, 12, stop_ids=())]


def test_changed_weights_are_heard(model):
    """A cache that is reset gives nothing from before."""
    model = copy.deepcopy(model)
    drafts = llama2.Drafts(model)
    cache = llama2.Cache(CONFIG)
    texts = torch.tensor([PROMPT])
    for _ in range(2):
        wanted = llama2.read_tokens(model, texts, llama2.Cache(CONFIG))
        assert torch.equal(drafts(texts, cache), wanted)
        cache.reset()
        with torch.no_grad():
            model.norm.weight.mul_(2)


def test_rows_and_models_of_other_kinds(model):
    """Are read as without drafts."""
    texts = torch.tensor([PROMPT, PROMPT])
    drafts = llama2.Drafts(model)
    assert drafts(texts, llama2.Cache(CONFIG, 2)).shape == (2, 320)
    random_model = llama2.Llama(CONFIG)
    for step in (llama2.Drafts(random_model), plain(random_model)):
        cache = llama2.Cache(CONFIG)
        for n in (7, 8, 9):
            logits = step(texts[:1, :n], cache)
        assert cache.pos == 9 and logits.shape == (1, 320)


def test_prompt_lookup():
    ids = torch.tensor([7, 1, 2, 3, 4, 5, 1, 2, 3, 6, 8, 1, 2, 3])
    assert llama2.prompt_lookup(ids, 3).tolist() == [6, 8, 1]
    assert llama2.prompt_lookup(ids, 0).tolist() == []
    assert llama2.prompt_lookup(ids[:9], 9).tolist() == [4, 5, 1, 2, 3]
    assert llama2.prompt_lookup(ids[:10], 9).tolist() == []


def test_prompt_of_two_ids(model):
    """On an empty cache."""
    cache = llama2.Cache(CONFIG)
    drafts = llama2.Drafts(model)
    assert drafts(torch.tensor([PROMPT[:2]]), cache).shape == (1, CONFIG.vocab_size)
    assert cache.pos == 2


def test_command_line_takes_their_number(cli, monkeypatch):
    """Three unless told; none without the kernels."""
    found = []
    drafts = llama2.Drafts
    monkeypatch.setattr(llama2, "Drafts", lambda *args: found.append(args[1]) or drafts(*args))
    for options in ([], ["--draft", 5], ["--draft", 0]):
        arguments = ["--prompt", "ab", "--max-new-tokens", 2, "--compile", *options]
        assert cli(*arguments, model=llama2.DEFAULT_MODEL)[0] == 0
    assert found == ([3, 5, 0] if llama2.load_kernels().library else [])
