"""Tests of bench_llama2.py: every mode runs, and its arithmetic is right."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import bench_llama2 as bench
import llama2

FILE = llama2.DEFAULT_MODEL
STORY = "Once upon a time there was a king who had three sons. " * 20
SHORT = ("--prompt-tokens", 8, 16, "--gen-tokens", 2, "--rounds", 2)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One sample of everything."""

    def measure(function, limit=1.0):
        return SimpleNamespace(median=bench.seconds(function), iqr=0.0)

    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "bandwidth", lambda device: 1e10)


@pytest.fixture
def run(tmp_path):
    """The command line; what it wrote as JSON."""

    def run(*argv):
        file = tmp_path / "result.json"
        assert bench.main([*map(str, argv), "--json", str(file)]) == 0
        return json.loads(file.read_text())

    return run


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_verdicts():
    for a, b, word in (2.5, 2.0, "confirmed"), (1.9, 3.1, "refuted"), (1.9, 2.1, "depends"):
        assert bench.Finding("", {"a": a, "b": b}, 2, 3).verdict() == word


def test_engines_take_turns_and_the_best_of_the_others_counts():
    log = []

    def engine(name, rate):
        return lambda: log.append(name) or {"tg": rate}

    rates = {"A": 6.0, "B": 4.0, "C": 8.0}
    engines = {name: engine(name, rate) for name, rate in rates.items()}
    rows = bench.compare(bench.take_turns(engines, 2))
    assert log == [*"ABCABC"]
    assert {name: row["tg"] for name, row in rows.items()} == rates | {"ours / best": 0.75}


def test_suite_times_each_name_at_each_size(run):
    actual = run("--suite", "--config", "tiny")["suite"]
    assert len(actual) == 10 * len(bench.SIZES) and "causal_mask/512" in actual


def test_copied_alone_beside_llama2(tmp_path):
    """What needs a file says so."""
    for module in (bench, llama2):
        shutil.copy(module.__file__, tmp_path)
    command = [sys.executable, "bench_llama2.py", "--config", "tiny", "--claims"]
    claims = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True)
    assert claims.returncode == 2
    said = claims.stderr.splitlines()[-1]  # old versions of torch look for a CUDA before
    assert "pass --model FILE.gguf" in said and "Traceback" not in claims.stderr


def test_claims(run):
    actual = run("--claims", "--config", "tiny")["claims"]
    assert [*actual] == [*bench.CLAIMS]
    for row in actual.values():
        assert row.pop("verdict") == bench.Finding(**row).verdict()


def test_a_model_of_functions_computes_the_same():
    model = llama2.Llama(bench.CONFIGS["tiny"])
    tokens = bench.random_tokens(model, 5)
    plain = bench.without_modules(model)
    assert torch.equal(plain(tokens), model(tokens))


def test_breakdown_adds_up_and_profile_is_a_trace(run, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "clock", itertools.count().__next__)
    path = tmp_path / "trace.json"
    actual = run("--breakdown", "--profile", path, "--config", "tiny", "--depth", 0, 9)
    for times in actual["token"].values():  # a tick for each part, and one between two
        around = times.pop("Python around")
        assert times["layers"] == 2 and around == sum(times.values()) + 1
    assert [*actual["breakdown"]] == ["1", "32", "128"]
    for row in actual["breakdown"].values():
        assert sum(row.values()) == pytest.approx(1)
    assert json.loads(path.read_text())["traceEvents"]


def test_whole_model_beside_transformers(run):
    pytest.importorskip("transformers")
    actual = run("--model", FILE, *SHORT, "--depth", 0, 4, "--compare", "transformers")
    _, theirs, _ = actual["models"][FILE.name]["tokens/s"].values()
    assert [*theirs] == ["pp8", "pp16", "tg", "pp8@4", "pp16@4", "tg@4"]


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_table_beside_two_peers(run, tmp_path, capsys):
    """ik_llama.cpp has depths in another program."""
    tests = [{"n_prompt": n, "n_depth": 16, "avg_ts": n + 9} for n in (8, 0)]
    peer = script(tmp_path / "llama-bench", f"echo '{json.dumps(tests)}'")
    (tmp_path / "ik").mkdir()
    line = '{"n_kv": 16, "speed_pp": 5, "speed_tg": 4}'
    sweep = script(tmp_path / "ik" / "llama-sweep-bench", f"echo 'PP\n{line}\n{{\"n_kv\": 8}}' >&2")
    argv = ("--table", FILE, *SHORT, "--prompt-tokens", 8, "--depth", 16)
    argv += ("--llama-bench", f"llama.cpp={peer}", f"ik={sweep}")
    _, *peers, _ = run(*argv)["models"][FILE.name]["tokens/s"].values()
    assert peers == [{"pp8@16": 17, "tg@16": 9}, {"pp8@16": 5, "tg@16": 4}]
    script(peer, "echo no such model >&2; exit 1")
    assert bench.main([*map(str, argv)]) == 2
    assert capsys.readouterr().err == "bench_llama2.py: error: no such model\n"


def test_perplexity_equals_a_direct_computation(run, tmp_path):
    (tmp_path / "text").write_text(STORY)
    actual = run("--perplexity", tmp_path / "text", "--context", 32)["perplexity"]
    model, tokenizer = llama2.load(FILE)
    windows = bench.windows(tokenizer, STORY, 32)  # (N, 32)
    assert windows[:, 0].eq(tokenizer.bos_id).all()
    logits = model(windows)[:, 16:-1].flatten(0, 1)
    loss = F.cross_entropy(logits, windows[:, 17:].flatten())
    assert actual["tokens"] == len(logits)
    assert actual["value"] == pytest.approx(loss.exp().item(), rel=1e-4)


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_fidelity(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench, "NEW_TOKENS", 8)
    (tmp_path / "text").write_text(STORY)
    _, tokenizer = llama2.load(FILE)
    shown = [f"{i} -> 'x'" for i in tokenizer.encode("Once upon a time")]
    peer = script(tmp_path / "peer", f'printf "%s\\n" {" ".join(map(repr, shown))} >&2; echo x')
    (tmp_path / "one").write_text("Once upon a time")
    argv = ("--fidelity", FILE, "--text", tmp_path / "text", "--context", 32)
    argv += ("--questions", tmp_path / "one", "--llama-completion", peer)
    *ours, theirs = run(*argv)["fidelity"]
    assert {row["answers like exact's"] for row in ours} == {"1 of 1"}
    assert all(float(row["KL"]) < 1e-6 for row in ours)
    assert (theirs["answers like exact's"], theirs["KL"]) == ("0 of 1", "")
    (tmp_path / "one").write_text("The king")
    assert bench.main([*map(str, argv)]) == 2
    assert "reads 'The king' as the ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--table", str(FILE), "--llama-bench", "missing-bench"), "missing-bench"),
        (("--perplexity", __file__, "--context", "100000"), "expected twice --context"),
    ],
)
def test_wrong_use_is_one_line(argv, message, capsys):
    assert bench.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_llama2.py: error:") and error.count("\n") == 1
    assert message in error
