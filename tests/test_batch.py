"""Tests of examples/batch.py: a batch writes what each of its sequences writes alone."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

import llama2
from test_llama2 import GREEDY, SCRIPT, TOKENS, assert_close

sys.path.insert(0, str(SCRIPT.parent / "examples"))
import batch
from batch import generate_batch

PROMPTS = [[1, 5, 9, 200, 31, 77, 8], [1, 70], [1, 5, 9, 31]]


@torch.no_grad()
@pytest.mark.parametrize("chunk", [512, 3])
def test_logits_are_those_of_each_sequence_alone(model, monkeypatch, chunk):
    """Shorter sequences never see the filler, in whatever chunks the prompts are read."""
    monkeypatch.setattr(llama2, "PREFILL_CHUNK", chunk)
    seen = []

    def note(ids, logits):
        seen.append((ids, logits.clone()))
        return logits

    sampling = llama2.Sampling(temperature=1, seed=0, logits_processor=note)
    assert len(list(generate_batch(model, PROMPTS, sampling, 6, stop_ids=()))) == 6
    assert len(seen) == 18
    for ids, logits in seen:
        assert_close(logits, model(torch.tensor([ids]))[0, -1])


@pytest.mark.parametrize("T", [1, 5])
def test_filler_sees_itself(model, T):
    """A softmax over nothing would be NaN."""
    mask = batch.PaddedCache(model, torch.tensor([0, 3]), 8).mask(T)
    assert mask.shape == (2, 1, T, T) and mask.any(-1).all()


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("prompts", [PROMPTS, [[1, 5, 9]] * 3, [TOKENS[0].tolist(), [1]]])
def test_ids_are_those_of_each_sequence_alone(model, temperature, prompts):
    """Sequence i has the seed `seed` + i. One ends at a stop token, or with the context of 64."""
    sampling = llama2.Sampling(temperature, top_p=0.9, seed=7)

    def alone(i, stop_ids=()):
        own = replace(sampling, seed=7 + i)
        return list(llama2.generate(model, prompts[i], own, 50, stop_ids))

    assert len(alone(0)) == min(50, 64 - len(prompts[0]))
    for stop_ids in ((), alone(1)[3:4]):
        steps = list(generate_batch(model, prompts, sampling, 50, stop_ids))
        sequences = [*zip(*steps, strict=True)]
        assert len(sequences) == len(prompts)
        for i, sequence in enumerate(sequences):
            ids = alone(i, stop_ids)
            assert [*sequence] == ids + [None] * (len(steps) - len(ids))
    assert len(alone(1, stop_ids)) <= 3


def test_arguments_that_are_refused(model):
    for prompts in ([], [[1], [320]], [[1], [5] * 65]):
        with pytest.raises(ValueError, match="expected"):
            next(generate_batch(model, prompts, GREEDY, 3))
    with pytest.raises(ValueError, match="0 new tokens"):
        next(generate_batch(model, PROMPTS, GREEDY, -1))


def test_command_line(cli_path, monkeypatch, capsys):
    """Each prompt and its text, and both speeds."""
    argv = ["batch.py", "the fox", "a", "--max-new-tokens", "4", "--seed", str(2**63 - 1)]
    monkeypatch.setattr(sys, "argv", [*argv, "--model", str(cli_path)])
    assert batch.main() == 0
    first, second, report = capsys.readouterr().out.split("\n\n")
    assert first.startswith("the fox") and second.startswith("a")
    assert report.count("tokens/s") == 2 and "texts: True" in report
