"""Tests of bench_llama2.py: every mode runs, and its arithmetic is right."""

import itertools
import json
import os
import shutil
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import bench_llama2 as bench
import llama2
from test_llama2 import cases

STORY = "Once upon a time there was a king who had three sons. " * 20
pytestmark = pytest.mark.usefixtures("bundled")
needs_shell = pytest.mark.skipif(os.name != "posix", reason="a shell script")


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """One sample of everything, in a folder with the bundled model and a text."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(llama2.DEFAULT_MODEL, "x.gguf")
    Path("text").write_text(STORY)
    monkeypatch.setattr(bench, "bandwidth", lambda device: 1e10)

    def measure(function, limit=1.0):
        return SimpleNamespace(median=bench.seconds(function), iqr=0.0)

    monkeypatch.setattr(bench, "measure", measure)


def run(command):
    """A command line; what it wrote as JSON."""
    assert bench.main([*command.split(), "--json", "result.json"]) == 0
    return json.loads(Path("result.json").read_text())


def fail(command, capsys):
    """What a command line that ends in an error says on stderr."""
    assert bench.main(command.split()) == 2
    return capsys.readouterr().err


def script(path, text):
    Path(path).write_text(f"#!/bin/sh\n{text}\n")
    Path(path).chmod(0o755)


def test_verdicts():
    for a, b, word in (2.5, 2.0, "confirmed"), (1.9, 3.1, "refuted"), (1.9, 2.1, "depends"):
        assert bench.Finding("", {"a": a, "b": b}, 2, 3).verdict() == word


def test_engines_take_turns_and_the_best_of_the_others_counts():
    log = []
    rates = {"A": 6.0, "B": 4.0, "C": 8.0}

    def engine(name):
        log.append(name)
        return {"tg": rates[name]}

    samples = bench.take_turns({name: partial(engine, name) for name in rates}, 2)
    rows = bench.compare(samples)
    assert log == [*"ABCABC"]
    assert {name: row["tg"] for name, row in rows.items()} == rates | {"ours / best": 0.75}


def test_suite_times_each_name_at_each_size():
    actual = run("--suite --config tiny")["suite"]
    assert len(actual) == 10 * len(bench.SIZES) and "causal_mask/512" in actual


def test_claims():
    actual = run("--claims --config tiny")["claims"]
    assert [*actual] == [*bench.CLAIMS]
    for row in actual.values():
        assert row.pop("verdict") == bench.Finding(**row).verdict()


def test_a_model_of_functions_computes_the_same():
    model = llama2.Llama(bench.CONFIGS["tiny"])
    tokens = bench.random_tokens(model, 5)
    assert torch.equal(bench.without_modules(model)(tokens), model(tokens))


def test_breakdown_adds_up_and_profile_is_a_trace(monkeypatch):
    monkeypatch.setattr(bench, "clock", itertools.count().__next__)
    actual = run("--breakdown --profile trace.json --config tiny --depth 0 9")
    for times in actual["token"].values():  # a tick for each call of a part, and for the whole
        rest = times.pop("the rest of a pass")
        assert times["layers"] == 2 and rest == 1 - sum(times.values())
    assert [*actual["breakdown"]] == ["1", "32", "128"]
    for row in actual["breakdown"].values():
        assert sum(row.values()) == pytest.approx(1)
    assert json.loads(Path("trace.json").read_text())["traceEvents"]


def test_whole_model_beside_transformers():
    pytest.importorskip("transformers")
    sizes = "--prompt-tokens 8 16 --gen-tokens 2 --rounds 2 --depth 0 4"
    actual = run(f"--model x.gguf {sizes} --compare transformers")["models"]["x.gguf"]
    _, theirs, _ = actual["tokens/s"].values()
    assert [*theirs] == ["pp8", "pp16", "tg", "pp8@4", "pp16@4", "tg@4"]


@needs_shell
def test_table_beside_two_peers(capsys):
    """ik_llama.cpp has depths in another program."""
    tests = [{"n_prompt": n, "n_depth": 16, "avg_ts": n + 9} for n in (8, 0)]
    script("peer", f"echo '{json.dumps(tests)}'")
    Path("ik").mkdir()
    line = '{"n_kv": 16, "speed_pp": 5, "speed_tg": 4}'
    script("ik/llama-bench", "exit 1")  # is not asked
    script("ik/llama-sweep-bench", f"echo 'PP\n{line}\n{{\"n_kv\": 8}}' >&2")
    command = """--table x.gguf --gen-tokens 2 --rounds 2 --prompt-tokens 8 --depth 16
        --llama-bench llama.cpp=./peer ik=ik/llama-bench"""
    _, *peers, _ = run(command)["models"]["x.gguf"]["tokens/s"].values()
    assert peers == [{"pp8@16": 17, "tg@16": 9}, {"pp8@16": 5, "tg@16": 4}]
    script("peer", "echo no such model >&2; exit 1")
    assert fail(command, capsys) == "bench_llama2.py: error: no such model\n"


def test_sequences_side_by_side(capsys):
    actual = run("--parallel 1,3 --model x.gguf --gen-tokens 2 --rounds 1")["parallel"]
    assert [*actual] == ["1", "3"] and min(actual.values()) > 0
    assert "times the first" in capsys.readouterr().out


def test_perplexity_equals_a_direct_computation(bundled):
    actual = run("--perplexity text --model x.gguf --context 32")["perplexity"]
    model, tokenizer = bundled
    windows = bench.windows(tokenizer, STORY, 32)  # (N, 32)
    assert windows[:, 0].eq(tokenizer.bos_id).all()
    logits = model(windows)[:, 16:-1].flatten(0, 1)
    loss = F.cross_entropy(logits, windows[:, 17:].flatten())
    expected = {"tokens": len(logits), "value": pytest.approx(loss.exp().item(), rel=1e-4)}
    assert actual == expected


@needs_shell
def test_fidelity(bundled, monkeypatch, capsys):
    monkeypatch.setattr(bench, "NEW_TOKENS", 8)
    shown = [f"{i} -> 'x'" for i in bundled[1].encode("Once upon a time")]
    script("peer", f'printf "%s\\n" {" ".join(map(repr, shown))} >&2; echo x')
    Path("one").write_text("Once upon a time")
    command = """--fidelity x.gguf --text text --context 32 --questions one
        --llama-completion ./peer"""
    *ours, theirs = run(command)["fidelity"]
    assert {row["answers like exact's"] for row in ours} == {"1 of 1"}
    assert all(float(row["KL"]) < 1e-6 for row in ours)
    assert (theirs["answers like exact's"], theirs["KL"]) == ("0 of 1", "")
    Path("one").write_text("The king")
    assert "reads 'The king' as the ids" in fail(command, capsys)


WRONG = """
--claims --model absent.gguf | absent.gguf
--table x.gguf | llama-bench: there is no such program
--perplexity text --context 100000 | expected twice --context
"""


@cases("command, message", WRONG)
def test_wrong_use_is_one_line(command, message, capsys, monkeypatch):
    monkeypatch.setattr(bench, "shutil", SimpleNamespace(which=lambda path: None))
    error = fail(command, capsys)
    assert error.startswith("bench_llama2.py: error: ") and error.count("\n") == 1
    assert message in error
