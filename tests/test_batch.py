"""Tests of examples/batch.py: a batch writes what each of its sequences writes alone."""

from dataclasses import replace
from itertools import zip_longest

import batch
import pytest
import torch
from batch import generate_batch

import llama2
from test_llama2 import GREEDY, TOKENS, arrange, assert_close

PROMPTS = [[1, 5, 9, 200, 31, 77, 8], [1, 70], [1, 5, 9, 31]]


@torch.no_grad()
@pytest.mark.parametrize("chunk", [512, 3])
def test_logits_are_those_of_each_sequence_alone(model, monkeypatch, chunk):
    """Shorter sequences never see the filler, in whatever chunks the prompts are read."""
    monkeypatch.setattr(llama2, "PREFILL_CHUNK", chunk)

    def check(ids, logits):
        assert_close(logits, model(torch.tensor([ids]))[0, -1])
        return logits

    sampling = llama2.Sampling(temperature=1, seed=0, logits_processor=check)
    assert len([*generate_batch(model, PROMPTS, sampling, 6, stop_ids=())]) == 6


@torch.no_grad()
@pytest.mark.parametrize("places", [[0, 1, 1, 0], [1]])
@pytest.mark.parametrize("prompts", [PROMPTS, [[1, 5, 9]] * 3])
def test_layers_repeated_and_removed(model, prompts, places):
    arranged = arrange(model, places)
    steps = [*generate_batch(arranged, prompts, GREEDY, 6, stop_ids=())]
    alone = [[*llama2.generate(arranged, ids, GREEDY, 6, stop_ids=())] for ids in prompts]
    assert steps == [[*ids] for ids in zip(*alone)]
    for ids, new_ids in zip(prompts, alone):
        logits = arranged(torch.tensor([ids + new_ids]))[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == new_ids


def test_filler_sees_itself(model):
    """A softmax over nothing would be NaN."""
    cache = batch.PaddedCache(model, torch.tensor([0, 3]), 8)
    assert cache.mask(1).any(-1).all() and cache.mask(5).any(-1).all()


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("prompts", [PROMPTS, [[1, 5, 9]] * 3, [TOKENS[0].tolist(), [1]]])
def test_ids_are_those_of_each_sequence_alone(model, temperature, prompts):
    """Sequence i has the seed `seed` + i. One ends at a stop token, or with the context of 64."""
    sampling = llama2.Sampling(temperature, top_p=0.9, seed=7)

    def alone(stop_ids):
        return [
            [*llama2.generate(model, ids, replace(sampling, seed=7 + i), 50, stop_ids)]
            for i, ids in enumerate(prompts)
        ]

    for stop_ids in ((), alone(())[1][3:4]):
        steps = [*generate_batch(model, prompts, sampling, 50, stop_ids)]
        assert steps == [[*ids] for ids in zip_longest(*alone(stop_ids))]


def test_arguments_that_are_refused(model):
    for prompts, limit in (([], 3), ([[1], [5] * 65], 3), (PROMPTS, -1)):
        with pytest.raises(ValueError, match="expected one or more .* and 0 new tokens or more"):
            next(generate_batch(model, prompts, GREEDY, limit))


@torch.no_grad()
def test_sequences_at_positions_of_their_own(model):
    """They join and leave between steps; caches may have different sizes."""
    caches = [model.new_cache(size) for size in (20, 64, 13)]
    alone = [model.new_cache(64) for _ in caches]
    for ids, *pair in zip(PROMPTS, caches, alone):
        for cache in pair:
            model(torch.tensor([ids]), cache)
    for step, chosen in enumerate(([0, 1, 2], [2, 1], [1], [0, 2, 1], [0, 1, 2])):
        tokens = torch.tensor([[7 + step + i] for i in chosen])
        logits = model(tokens, batch.Sequences([caches[i] for i in chosen]))
        expected = [model(token[None], alone[i]) for i, token in zip(chosen, tokens)]
        assert_close(logits, torch.cat(expected))
    assert [c.pos for c in caches] == [c.pos for c in alone]
    with pytest.raises(ValueError, match="13 tokens: 13 are stored, 1 do not fit"):
        for _ in range(9):
            model(torch.tensor([[5], [6]]), batch.Sequences([caches[1], caches[2]]))
    assert caches[1].pos == alone[1].pos + 13 - alone[2].pos  # nothing of the refused pass
