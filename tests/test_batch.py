"""Tests of examples/batch.py: side by side, each text is what its prompt gives alone."""

import json
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import batch
import prompts
import pytest
import torch

import llama2
from test_llama2 import TOKENS, arrange, assert_close, make_model

PROMPTS = [[1, 5, 9, 200, 31, 77, 8], [1, 70], [1, 5, 9, 31]]
MANY = [*PROMPTS, TOKENS[0].tolist(), [], [1, 70], [1], [5] * 65, [1, 5, 9, 31]]


def texts(model, stop_ids, temperature=0.9):
    """Functions that begin each of MANY, as generate() does."""
    options = {"max_new_tokens": 25, "stop_ids": stop_ids}
    for i, ids in enumerate(MANY):
        sampling = llama2.Sampling(temperature, top_p=0.9, seed=7 + i // 2)
        yield partial(llama2.generate, model, ids, sampling, **options)


def alone(start):
    try:
        return [*start()]
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("places", [[0, 1], [0, 1, 1, 0]])
def test_ids_are_those_of_each_prompt_alone(model, monkeypatch, places):
    """One ends at a stop token, one with the context of 64; two have no tokens, or too many."""
    model = arrange(model, places)
    stop_ids = alone([*texts(model, ())][1])[3:4]
    for temperature in (0, 0.9):
        expected = [alone(start) for start in texts(model, stop_ids, temperature)]
        for parallel, chunk in ((1, 512), (3, 3), (8, 512)):
            monkeypatch.setattr(batch.Row, "chunk", chunk)
            ended = [*batch.run_batch(model, texts(model, stop_ids, temperature), parallel)]
            actual = {i: str(it) if isinstance(it, ValueError) else ids for i, it, ids in ended}
            assert [actual[i] for i in range(len(MANY))] == expected


def test_equal_prompts_are_read_once(model):
    """By whatever row came first, and copied for each of the others."""
    starts = [partial(llama2.generate, model, [1, 5, 9] * 9, max_new_tokens=3)] * 5
    with patch.object(batch.Row, "read", side_effect=batch.Row.read, autospec=True) as read:
        assert len([*batch.run_batch(model, starts, 3)]) == 5
    lengths = [call.args[2].shape[1] for call in read.call_args_list]
    assert lengths.count(27) == 1  # others are steps


def test_a_full_window_ends_its_own_text(model):
    windowed = make_model(replace(model.config, sliding_window=9), model.state_dict())
    options = {"sampling": llama2.Sampling(seed=1), "max_new_tokens": 6}
    starts = [partial(llama2.generate, windowed, ids, **options) for ids in PROMPTS]
    ended = {i: (it, ids) for i, it, ids in batch.run_batch(windowed, starts, 3)}
    assert str(ended[0][0]) == "more tokens than the sliding window has, 9"
    assert len(ended[0][1]) == 3  # a pass that was refused has changed nothing
    assert [ended[i][1] for i in (1, 2)] == [alone(start) for start in starts[1:]]


def test_program(bundled, capsys, monkeypatch, tmp_path):
    """JSON lines come in the order of the prompts; one that is too long ends with its error."""
    model, tokenizer = bundled
    path = tmp_path / "prompts"
    path.write_text("The wolf\n" + "The king " * 600 + "\nWho?\n")
    command = f"batch.py fox --file {path} --json --max-new-tokens 9 --seed {2**63 - 1}"
    for chat in ("", "--chat"):
        monkeypatch.setattr("sys.argv", f"{command} {chat}".split())
        assert batch.main() == 1
        output = capsys.readouterr()
        answers = [*map(json.loads, output.out.splitlines())]
        for i, answer in enumerate(answers):
            sampling = llama2.Sampling(seed=(2**63 - 1 + i) % 2**63)
            options = {"sampling": sampling, "max_new_tokens": 9}
            if i == 2:
                assert "512, the context" in answer["error"] and not answer["text"]
                continue
            ids = tokenizer.encode(answer["prompt"])
            stream = llama2.stream_text(model, tokenizer, ids, **options)
            if chat:
                messages = [{"role": "user", "content": answer["prompt"]}]
                stream = llama2.chat(model, tokenizer, messages, **options)
            assert answer["text"] == "".join(stream)
        assert " ".join(answer["prompt"][:8] for answer in answers) == "fox The wolf The king Who?"
        assert output.err.endswith(" tokens/s\n")
        assert ("batch.py: the model has no chat template: " in output.err) == bool(chat)


@pytest.mark.parametrize("option, temperature", [((), 0.25), (("--temperature", "0"), 0.0)])
def test_sampling_is_what_the_files_recommend(write_tiny, option, temperature):
    """But for options that are given, in all programs of prompts.py."""
    path = write_tiny({"general.sampling.temp": 0.25, "general.sampling.top_k": 7})
    parser = llama2.Parser()
    prompts.add_options(parser, max_new_tokens=9)
    args = parser.parse_args(["--model", str(path), "--seed", "5", *option])
    *_, sampling = prompts.load(args)
    assert sampling == llama2.Sampling(temperature, top_k=7, seed=5)


def test_several_tokens_of_each_sequence(model, no_grad):
    """They see those of their own before them, as alone."""
    caches = [model.new_cache(64), model.new_cache(32)]
    alone = []
    for ids, new, cache in zip(PROMPTS, TOKENS[:, :3], caches):
        model(torch.tensor([ids]), cache)
        alone.append(model(new[None], cache, all_positions=True))
        cache.truncate(len(ids))
    actual = model(TOKENS[:2, :3], batch.Sequences(caches), all_positions=True)
    assert_close(actual, torch.cat(alone))
