"""Tests of examples/drafts.py: the same text, to the last bit of its logits, whatever is drafted."""

import copy
import functools

import drafts
import pytest
import test_bits
import torch
from drafts import Drafts, prompt_lookup

import llama2
from test_llama2 import cases, needs_kernels

pytestmark = needs_kernels
PROMPT = [1, 5, 9, 20, 31, 5, 9, 20, 7]


@pytest.fixture(scope="module", params=[("Q4_K", True), ("Q4_K", False), ("F16", False)])
def model(request):
    """A model with the kernels."""
    return test_bits.model_of(*request.param)


@pytest.mark.parametrize("temperature", [0, 1])
def test_whatever_is_drafted(model, monkeypatch, native, temperature):
    """What comes, something else, what comes for a while, nothing; up to the end of the cache."""
    sampling = llama2.Sampling(temperature, top_p=1, seed=7)

    def generated(step):
        """A text, and the logits that it was sampled from."""
        logits = []

        def spy(tokens, cache):
            logits.append(step(tokens, cache))
            return logits[-1]

        options = {"cache": model.new_cache(28), "step": spy}
        return [*llama2.generate(model, PROMPT, sampling, 20, (), **options)], torch.cat(logits)

    ids, logits = generated(functools.partial(llama2.prefill, model))
    assert len(ids) == 19
    for name, change in {
        "right": lambda ids: ids,
        "wrong": lambda ids: [63 - i for i in ids],
        "mixed": lambda ids: [*ids[: len(ids) % 4], 3, 4],
        "none": lambda ids: [],
    }.items():

        def lookup(stored, limit, change=change):
            draft = change([*PROMPT, *ids][len(stored) :])
            return torch.tensor(draft[:limit], dtype=torch.int64)

        monkeypatch.setattr(drafts, "prompt_lookup", lookup)
        for limit in (1, 3, 30):
            step = Drafts(model, limit)
            again, its_logits = generated(step)
            assert again == ids and torch.equal(its_logits, logits)
            if name == "right":
                tokens = min(limit + 1, native.gemv_tokens)
                assert step.accepted == 18 * (tokens - 1) // tokens
            elif name != "mixed":
                assert step.accepted == 0


def test_drafts_that_are_not_used(model):
    """The text in a cache that was reset for new weights; another text in another cache."""
    model = copy.deepcopy(model)
    step = Drafts(model)
    cache, other = model.new_cache(), model.new_cache()
    text, another = torch.tensor([[1, 5, 60, 61, 60, 61, 60, 61]]), torch.tensor([PROMPT[:8]])
    for n in (6, 7):
        step(text[:, :n], cache)
    assert cache.common_prefix(text) == 8  # of which one was drafted
    model.norm.weight.mul_(2)
    cache.reset()
    assert torch.equal(step(text, cache), llama2.prefill(model, text, other))
    llama2.prefill(model, another, other)
    assert torch.equal(step(another, other), llama2.prefill(model, another, other))


def test_what_is_read_without_drafts(model):
    """A batch, a model that the kernels do not run, and one of whose layers torch computes a part."""
    hooked = copy.deepcopy(model)
    hooked.layers[1].self_attn.register_forward_hook(lambda *args: None)
    assert Drafts(model).limit == 3 and Drafts(hooked).limit == 0
    tokens = torch.tensor([PROMPT, PROMPT])
    for batch, each in ((tokens, model), (tokens[:1], llama2.Llama(model.config))):
        step = Drafts(each)
        cache = each.new_cache(batch_size=len(batch))
        for n in (7, 8, 9):
            step(batch[:, :n], cache)
            assert cache.pos == n


LOOKUPS = """
71234512368123 | 681 | 3
712345123 | 45123 | 9
7123451236 |  | 9
71 |  | 9
"""


@cases("text, draft, limit", LOOKUPS)
def test_prompt_lookup(text, draft, limit):
    actual = prompt_lookup(torch.tensor([*map(int, text)]), int(limit))
    assert actual.tolist() == [*map(int, draft)]
