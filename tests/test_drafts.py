"""Tests of examples/drafts.py: the same text, to the last bit of its logits, whatever is drafted."""

from __future__ import annotations

import copy
import math
import random
import sys

import pytest
import torch

import llama2
from test_llama2 import GREEDY, SCRIPT, SHAPE, needs, quantised

sys.path.insert(0, str(SCRIPT.parent / "examples"))
import drafts
from drafts import Drafts, prompt_lookup

pytestmark = needs("load_kernels")
PROMPT = [1, 5, 9, 200, 31, 5, 9, 200, 77]
SAMPLED = llama2.Sampling(temperature=1, top_p=1, seed=7)
CONFIG = llama2.Config(**SHAPE | {"hidden_size": 256, "intermediate_size": 512})


@pytest.fixture(scope="module", params=[("Q4_K", True), ("Q4_K", False), ("F16", False)], ids=str)
def model(request, vocabulary, tmp_path_factory, native):
    """A model with the kernels."""
    ggml_type, fast = request.param
    path = tmp_path_factory.mktemp("drafts") / "q.gguf"
    path, _ = quantised(vocabulary, path, [ggml_type], CONFIG)
    model = llama2.build_model(llama2.open_checkpoint(path))
    return llama2.accelerate(model, fast)


def generated(model, sampling, cache, step=None):
    """A text, and the logits that it was sampled from."""
    step = step or (lambda tokens, cache: llama2.prefill(model, tokens, cache))
    logits = []

    def spy(tokens, cache):
        logits.append(step(tokens, cache))
        return logits[-1]

    ids = [*llama2.generate(model, PROMPT, sampling, 20, (), cache=cache, step=spy)]
    return ids, torch.cat(logits)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_whatever_is_drafted(model, monkeypatch, sampling, dtype):
    """What comes, something else, what comes for a while; up to the end of the cache."""

    def new_cache():
        return llama2.Cache(CONFIG, 1, 28, dtype)

    ids, logits = generated(model, sampling, new_cache())
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
        "wrong": lambda ids, limit: torch.full((limit,), 3),
        "mixed": mixed,
    }
    for name, lookup in lookups.items():
        monkeypatch.setattr(drafts, "prompt_lookup", lookup)
        for limit in (1, 3, 30):
            step = Drafts(model, limit)
            again, its_logits = generated(model, sampling, new_cache(), step)
            assert again == ids and torch.equal(its_logits, logits)
            if name == "right":
                tokens = min(limit + 1, llama2.load_kernels().gemv_tokens)
                assert step.accepted == 18 - math.ceil(18 / tokens)
            if name == "wrong":
                assert step.accepted == 0


def test_generations_that_take_turns(model):
    """One cache, one Drafts, two texts: each as it is alone."""
    prompts = (PROMPT, [1, 70, 71, 70, 71, 70])
    options = {"cache": llama2.Cache(CONFIG), "step": Drafts(model)}
    streams = [llama2.generate(model, ids, SAMPLED, 12, (), **options) for ids in prompts]
    together = [*zip(*streams, strict=True)]
    for i, ids in enumerate(prompts):
        alone = llama2.generate(model, ids, SAMPLED, 12, ())
        assert [*alone] == [step[i] for step in together]


def test_another_text_in_another_cache(model):
    """All of it is stored, but the logits of the last pass are not its own."""
    step = Drafts(model)
    cache = llama2.Cache(CONFIG)
    tokens = torch.tensor([PROMPT])
    for n in (8, 9):
        expected = llama2.prefill(model, tokens[:, :n], cache)
    repeated = torch.tensor([[1, 5, 70, 71, 70, 71, 70]])
    other = llama2.Cache(CONFIG)
    for n in (6, 7):
        step(repeated[:, :n], other)
    assert other.pos == 9  # with a draft
    assert torch.equal(step(tokens, cache), expected)


def test_a_cache_that_was_reset_gives_nothing_from_before(model):
    """Else changed weights would not be heard."""
    model = copy.deepcopy(model)
    step = Drafts(model)
    cache = llama2.Cache(CONFIG)
    tokens = torch.tensor([PROMPT])
    for _ in range(2):
        step(tokens[:, :-1], cache)
        logits = step(tokens, cache)
        expected = llama2.Cache(CONFIG)
        llama2.prefill(model, tokens[:, :-1], expected)
        assert torch.equal(logits, llama2.prefill(model, tokens, expected))
        cache.reset()
        with torch.no_grad():
            model.norm.weight.mul_(2)


def test_what_is_read_without_drafts(model):
    """A batch, and a model that the kernels do not run."""
    tokens = torch.tensor([PROMPT, PROMPT])
    plain = llama2.Llama(CONFIG)
    for batch, each in ((tokens, model), (tokens[:1], plain)):
        step = Drafts(each)
        cache = llama2.Cache(CONFIG, len(batch))
        for n in (7, 8, 9):
            logits = step(batch[:, :n], cache)
            assert cache.pos == n
        assert logits.shape == (len(batch), 320)


def test_prompt_lookup():
    ids = torch.tensor([7, 1, 2, 3, 4, 5, 1, 2, 3, 6, 8, 1, 2, 3])
    assert prompt_lookup(ids, 3).tolist() == [6, 8, 1]
    assert prompt_lookup(ids, 0).tolist() == []
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
