"""Tests of bench_llama2.py: every mode runs, and its arithmetic is right."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import partial
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


@pytest.mark.parametrize(
    ("cases", "low", "high", "word"),
    [
        ({"a": 2.5, "b": 2.0}, 2, 3, "confirmed"),
        ({"a": 1.9, "b": 3.1}, 2, 3, "refuted"),
        ({"a": 1.9, "b": 2.1}, 2, 3, "depends"),
    ],
)
def test_verdicts(cases, low, high, word):
    assert bench.Finding("", cases, low, high).verdict() == word


def test_engines_take_turns_and_the_best_of_the_others_counts():
    log = []

    def engine(name, rate):
        return lambda: log.append(name) or {"tg": rate}

    engines = {
        "A": engine("A", 6.0),
        "B": engine("B", 4.0),
        "C": engine("C", 8.0),
    }
    rows = bench.compare(bench.take_turns(engines, 2))
    assert log == [*"ABCABC"]
    assert rows == {
        "A": {"tg": 6.0},
        "B": {"tg": 4.0},
        "C": {"tg": 8.0},
        "ours / best": {"tg": 0.75},
    }


def test_suite_times_each_name_at_each_size(run):
    found = run("--suite", "--config", "tiny")["suite"]
    assert len(found) == 10 * len(bench.SIZES)
    assert {"rope_forward/8", "causal_mask/512", "decode/128"} <= found.keys()


def test_copied_alone_beside_llama2(tmp_path):
    """The suite runs; what needs a file says so."""
    for module in (bench, llama2):
        shutil.copy(module.__file__, tmp_path)
    short = (
        "import sys, bench_llama2 as b; b.SIZES = (1,); b.measure = b.partial(b.measure, limit=0); "
    )
    command = [sys.executable, "-c", short + "sys.exit(b.main(sys.argv[1:]))", "--config", "tiny"]
    run = partial(subprocess.run, check=False, cwd=tmp_path, capture_output=True, text=True)
    suite = run([*command, "--suite"])
    assert suite.returncode == 0, suite.stderr
    assert "decode/1 " in suite.stdout
    claims = run([*command, "--claims"])
    assert claims.returncode == 2
    assert "pass --model FILE.gguf" in claims.stderr and claims.stderr.count("\n") == 1


def test_claims(run):
    found = run("--claims", "--config", "tiny")["claims"]
    assert [*found] == [*bench.CLAIMS]
    for row in found.values():
        assert row.pop("verdict") == bench.Finding(**row).verdict()


def test_a_model_of_functions_computes_the_same():
    model = llama2.Llama(bench.CONFIGS["tiny"])
    tokens = bench.random_tokens(model, 5)
    plain = bench.without_modules(model)
    assert torch.equal(plain(tokens), model(tokens))


def test_breakdown_adds_up(run):
    found = run("--breakdown", "--config", "tiny", "--rounds", 1)["breakdown"]
    assert [*found] == ["1", "32", "128"]
    for shares in found.values():
        assert sum(shares.values()) == pytest.approx(1)


def test_profile_is_a_trace(run, tmp_path):
    run("--profile", tmp_path / "trace.json", "--config", "tiny")
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_whole_model_beside_transformers(run):
    pytest.importorskip("transformers")
    found = run("--model", FILE, *SHORT, "--depth", 4, "--compare", "transformers")
    rows = found["models"][FILE.name]["tokens/s"]
    assert [*rows] == ["llama2.py", "transformers", "ours / best"]


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_table_beside_two_peers(run, tmp_path, capsys):
    tests = [
        {"n_prompt": 8, "avg_ts": 100.0},
        {"n_prompt": 16, "avg_ts": 200.0},
        {"n_prompt": 0, "avg_ts": 10.0},
    ]
    peer = script(tmp_path / "llama-bench", f"echo '{json.dumps(tests)}'")
    argv = ("--table", FILE, *SHORT, "--llama-bench", f"llama.cpp={peer}", f"ik={peer}")
    rows = run(*argv)["models"][FILE.name]["tokens/s"]
    assert [*rows] == ["llama2.py", "llama.cpp", "ik", "ours / best"]
    assert rows["ik"] == {"pp8": 100.0, "pp16": 200.0, "tg": 10.0}
    script(peer, "echo no such model >&2; exit 1")
    assert bench.main([*map(str, argv)]) == 2
    assert capsys.readouterr().err == "bench_llama2.py: error: no such model\n"


def test_plot_is_an_svg(tmp_path):
    pytest.importorskip("matplotlib")
    row = {"pp1": 10.0, "pp8": 50.0, "tg": 9.0}
    rows = {"llama2.py": row, "llama.cpp": row, "ours / best": row}
    model = {"tokens/s": rows}
    bench.plot({"a": model, "b": model}, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    assert "llama.cpp" in text
    assert "ours / best" not in text


def test_perplexity_equals_a_direct_computation(run, tmp_path):
    (tmp_path / "text").write_text(STORY)
    found = run("--perplexity", tmp_path / "text", "--context", 32)["perplexity"]
    model, tokenizer = llama2.load(FILE)
    windows = bench.windows(tokenizer, STORY, 32)  # (N, 32)
    assert windows[:, 0].eq(tokenizer.bos_id).all()
    logits = model(windows)[:, 16:-1].flatten(0, 1)
    loss = F.cross_entropy(logits, windows[:, 17:].flatten())
    assert found["tokens"] == len(logits)
    assert found["value"] == pytest.approx(loss.exp().item(), rel=1e-4)


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
    assert theirs["answers like exact's"] == "0 of 1"
    assert theirs["KL"] == ""
    (tmp_path / "one").write_text("The king")
    assert bench.main([*map(str, argv)]) == 2
    assert "reads 'The king' as the ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "a", "--config", "7b"), "not allowed with argument"),
        (("--model", "missing.gguf"), "missing.gguf"),
        (("--table", str(FILE), "--llama-bench", "missing-bench"), "missing-bench"),
        (("--perplexity", __file__, "--context", "100000"), "expected twice --context"),
    ],
)
def test_wrong_use_is_one_line(argv, message, capsys):
    assert bench.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("bench_llama2.py: error:")
    assert message in error
    assert error.count("\n") == 1
