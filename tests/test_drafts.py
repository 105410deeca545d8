"""Tests of examples/drafts.py: the same text, to the last bit of its logits, whatever is drafted."""

from __future__ import annotations

import copy
import functools
import math
import random
import sys

import pytest
import test_bits
import torch

import llama2
from test_llama2 import GREEDY, SCRIPT, needs

sys.path.insert(0, str(SCRIPT.parent / "examples"))
import drafts
from drafts import Drafts, prompt_lookup

pytestmark = needs("load_kernels")
PROMPT = [1, 5, 9, 20, 31, 5, 9, 20, 7]
SAMPLED = llama2.Sampling(temperature=1, top_p=1, seed=7)


@pytest.fixture(scope="module", params=[("Q4_K", True), ("Q4_K", False), ("F16", False)], ids=str)
def model(request, native):
    """A model with the kernels."""
    return test_bits.model_of(*request.param)


def generated(model, sampling, cache, step=None):
    """A text, and the logits that it was sampled from."""
    step = step or functools.partial(llama2.prefill, model)
    logits = []

    def spy(tokens, cache):
        logits.append(step(tokens, cache))
        return logits[-1]

    ids = [*llama2.generate(model, PROMPT, sampling, 20, (), cache=cache, step=spy)]
    return ids, torch.cat(logits)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_whatever_is_drafted(model, monkeypatch, sampling):
    """What comes, something else, what comes for a while, nothing; up to the end of the cache."""
    ids, logits = generated(model, sampling, model.new_cache(28))
    text = [*PROMPT, *ids]
    assert len(text) == 28
    rng = random.Random(0)

    def right(ids, limit):
        return torch.tensor(text[len(ids) : len(ids) + limit], dtype=torch.int64)

    def mixed(ids, limit):
        draft = right(ids, limit)
        return torch.cat((draft[: rng.randint(0, limit)], torch.tensor([3, 4])))[:limit]

    lookups = {
        "right": right,
        "wrong": lambda ids, limit: torch.full((limit,), min({*range(64)} - {*text})),
        "mixed": mixed,
        "none": lambda ids, limit: ids[:0],
    }
    for name, lookup in lookups.items():
        monkeypatch.setattr(drafts, "prompt_lookup", lookup)
        for limit in (1, 3, 30):
            step = Drafts(model, limit)
            again, its_logits = generated(model, sampling, model.new_cache(28), step)
            assert again == ids and torch.equal(its_logits, logits)
            if name == "right":
                tokens = min(limit + 1, llama2.load_kernels().gemv_tokens)
                assert step.accepted == 18 - math.ceil(18 / tokens)
            if name in ("wrong", "none"):
                assert step.accepted == 0


def test_drafts_that_are_not_used(model):
    """Another text in another cache; the text itself in a cache that was reset for new weights."""
    model = copy.deepcopy(model)
    step = Drafts(model)
    cache, other = model.new_cache(), model.new_cache()
    text, another = torch.tensor([[1, 5, 60, 61, 60, 61, 60, 61]]), torch.tensor([PROMPT])
    for n in (8, 9):
        expected = llama2.prefill(model, another[:, :n], other)
    for new_weights in (False, True):
        for n in (6, 7):
            step(text[:, :n], cache)
        assert cache.common_prefix(text) == 8  # of which one was drafted
        if new_weights:
            model.norm.weight.mul_(2)
            cache.reset()
            other.reset()
            assert torch.equal(step(text, cache), llama2.prefill(model, text, other))
        else:
            assert torch.equal(step(another, other), expected)


def test_what_is_read_without_drafts(model):
    """A batch, and a model that the kernels do not run."""
    tokens = torch.tensor([PROMPT, PROMPT])
    for batch, each in ((tokens, model), (tokens[:1], llama2.Llama(model.config))):
        step = Drafts(each)
        cache = each.new_cache(batch_size=len(batch))
        for n in (7, 8, 9):
            logits = step(batch[:, :n], cache)
            assert cache.pos == n
        assert logits.shape == (len(batch), 64)


def test_prompt_lookup():
    ids = torch.tensor([7, 1, 2, 3, 4, 5, 1, 2, 3, 6, 8, 1, 2, 3])
    assert prompt_lookup(ids, 3).tolist() == [6, 8, 1]
    assert prompt_lookup(ids[:9], 9).tolist() == [4, 5, 1, 2, 3]
    assert prompt_lookup(ids[:10], 9).tolist() == []
    assert prompt_lookup(ids[:2], 9).tolist() == []


def test_command_line(cli_path, monkeypatch, capsys):
    """The text that is written without drafts, too, and both speeds."""
    argv = ["drafts.py", "fox fox fox", "--max-new-tokens", "9", "--model", str(cli_path)]
    monkeypatch.setattr(sys, "argv", argv)
    assert drafts.main() == 0
    out = capsys.readouterr().out
    assert out.count("tokens/s") == 2 and "the same text: True" in out
