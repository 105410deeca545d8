"""Tests of bench_llama2.py: every mode runs, and its arithmetic is right."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import bench_llama2 as bench
import llama2

pytestmark = pytest.mark.usefixtures("quick")
STORY = (
    "Once upon a time there was a king who had three sons, and the youngest was the wisest. " * 12
)


@pytest.fixture
def quick(monkeypatch):
    """Few rounds, little memory, nothing compiled."""

    def interleave(ways, rounds=1):
        return {name: [bench.seconds(way) for _ in range(2)] for name, way in ways.items()}

    measure = bench.measure
    monkeypatch.setattr(bench, "interleave", interleave)
    monkeypatch.setattr(bench, "measure", lambda way, limit: measure(way, min(limit, 0.002)))
    monkeypatch.setattr(bench, "bandwidth", lambda device: 1e10)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def bench_json(tmp_path, *argv):
    """Run the command line; what it wrote as JSON."""
    file = tmp_path / "result.json"
    assert bench.main([*map(str, argv), "--json", str(file)]) == 0
    return json.loads(file.read_text())


# --------------------------------------------------------------------------------------------------
# Arithmetic on made-up numbers


def test_ratio_is_the_median_of_the_rounds():
    # The machine was ten times slower in the second round: the rounds still agree.
    assert bench.ratio([2.0, 20.0, 2.0], [1.0, 10.0, 1.0]) == 2.0


def test_iqr():
    assert bench.iqr([1.0, 2.0, 3.0, 4.0, 5.0]) == 2.0
    assert bench.iqr([7.0]) == 0.0


@pytest.mark.parametrize(
    ("cases", "low", "high", "word"),
    [
        ({"a": 2.5, "b": 2.0}, 2, 3, "confirmed"),
        ({"a": 1.9, "b": 3.1}, 2, 3, "refuted"),
        ({"a": 1.9, "b": 2.1}, 2, 3, "depends"),
        ({"a": 100.0}, 1.05, math.inf, "confirmed"),
        ({"a": 1.04}, 1.05, math.inf, "refuted"),
    ],
)
def test_verdicts(cases, low, high, word):
    assert bench.Finding("", cases, low, high).verdict() == word


def test_compare_gives_rates_and_their_ratio():
    samples = {"ours": {"pp8": [2.0, 4.0, 2.0]}, "other": {"pp8": [1.0, 2.0, 1.0]}}
    found = bench.compare(samples, {"pp8": 8})["pp8"]
    assert found["tokens/s"] == {"ours": 4.0, "other": 8.0} and found["ratio"] == {"other": 0.5}
    assert (found["seconds"], found["iqr"]) == (2.0, 1.0)


def test_a_line_of_the_plot():
    assert bench.bar({"ours": 5.0, "llama": 2.5, "ik": 10.0}, 10.0, 8) == "##l#    i"


def test_engines_take_turns():
    log = []

    def engine(name):
        def run(prompts, new, depth):
            log.append(name)
            return {"tg": float(len(log))}

        return run

    found = bench.take_turns({"A": engine("A"), "B": engine("B")}, (8,), 1, 8, rounds=2)
    assert log == ["A", "B"] * 3
    assert found == {"A": {"tg": [3.0, 5.0]}, "B": {"tg": [4.0, 6.0]}}  # without the warm-up


def test_functions_take_turns(monkeypatch):
    monkeypatch.undo()
    log = []
    found = bench.interleave({"a": lambda: log.append("a"), "b": lambda: time.sleep(0.04)}, 2)
    assert [len(samples) for samples in found.values()] == [2, 2]
    assert 0 < max(found["a"]) < 0.04 <= min(found["b"])
    assert log


def test_bandwidth(monkeypatch):
    monkeypatch.undo()
    assert bench.bandwidth(torch.device("cpu"), 2**16) > 0


def test_show():
    found = [bench.show(value) for value in (2.0, 0.0125, 62.6e-6, 5e-9)]
    assert found == ["2 s", "12.5 ms", "62.6 us", "5 ns"]


# --------------------------------------------------------------------------------------------------
# Models without a file, naive variants


@pytest.mark.parametrize("kind", llama2.GGML_TYPES)
def test_random_weights_are_finite(kind):
    weight = bench.RandomWeight(kind, (300, 512), [])
    assert weight.read().nbytes == weight.nbytes
    dense = weight.dense(torch.float32)
    assert dense.isfinite().all()
    assert dense.std() > 0


def test_types_of_random_weights():
    config = llama2.Config(256, 512, 8, 4, 2, vocab_size=64)
    for kind in ("Q8_0", "Q4_K"):
        kinds = {name: w.ggml_type for name, w in bench.random_weights(config, kind).items()}
        assert kinds["lm_head.weight"] == kinds["layers.0.self_attn.q_proj.weight"] == kind
        assert kinds["norm.weight"] == kinds["layers.0.input_layernorm.weight"] == "F32"


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_naive_variants_equal_the_reference(kv_heads):
    config = llama2.Config(64, 96, 2, 4, kv_heads, vocab_size=50, max_position_embeddings=64)
    torch.manual_seed(0)
    model = llama2.Llama(config).eval()
    s = bench.Setting(bench.parse_args([]), torch.device("cpu"), torch.float32)
    ids = s.tokens(config, 1, 12)[0]
    with torch.no_grad():
        want = bench.step_through(s, model, ids, 5)
        for without in (*((part,) for part in bench.NAIVE), tuple(bench.NAIVE)):
            found = bench.step_through(s, model, ids, 5, without)
            torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)
        a, b = s.cache(config, 12), s.cache(config, 12)
        inlined = bench.inline(model)
        for chunk in ids[None].split(7, 1):
            torch.testing.assert_close(inlined(chunk, a), model(chunk, b), rtol=1e-4, atol=1e-5)


def test_a_wrong_variant_is_not_timed():
    with pytest.raises(ValueError, match="differs from the reference"):
        bench.check_same("it", torch.ones(3), torch.zeros(3) + 2)
    with pytest.raises(ValueError, match="differs from the reference"):
        bench.check_same("it", torch.full((3,), math.nan), torch.ones(3))


# --------------------------------------------------------------------------------------------------
# Modes


def test_suite(tmp_path):
    tiny = ("--suite", "--config", "tiny", "--seconds", "0.01")
    found = bench_json(tmp_path, *tiny)["suite"]
    assert found.keys() == {f"{name}/{T}" for name, sizes in bench.SUITE.items() for T in sizes}
    assert all(row["samples"] >= 3 for row in found.values())
    assert list(bench_json(tmp_path, *tiny, "--filter", "rope_forward/8")["suite"]) == [
        "rope_forward/8"
    ]


def test_claims(tmp_path, capsys):
    """Each verdict is the one that follows from the figures that are told with it."""
    found = bench_json(tmp_path, "--claims", "--config", "tiny")["claims"]
    assert [*found] == [*bench.CLAIMS]
    for row in found.values():
        assert row.pop("verdict") == bench.Finding(**row).verdict()
    mask, _, modules, loading, all_of_it = (row["cases"] for row in found.values())
    assert (len(mask), len(modules), len(all_of_it)) == (4, 4, 2)
    assert all(0 <= part < 1 for part in mask.values())
    assert all(value > 0 for value in loading.values())
    out = capsys.readouterr().out
    assert out.count("(e)") >= 2
    assert all(name in out for row in found.values() for name in row["cases"])


@pytest.mark.parametrize(
    "options",
    [
        ("--config", "tiny", "--type", "Q4_0", "--context-sweep", 16, 64),
        ("--config", "tiny", "--dtype", "bfloat16", "--batch", 3, "--layers", 1),
        ("--config", "tiny", "--type", "Q8_0", "--compile"),
        ("--model", llama2.DEFAULT_MODEL),
    ],
)
def test_whole_model(tmp_path, options):
    short = ("--prompt-tokens", 8, "--gen-tokens", 2, "--rounds", 2)
    (found,) = bench_json(tmp_path, *options, *short)["models"].values()
    assert found["weights"] > 0 and found["fraction"] > 0 and found["peak memory"] > 0
    sweep = {"tg@16", "tg@64"} if "--context-sweep" in options else set()
    assert found["tests"].keys() == {"pp8", "tg"} | sweep
    batch = 3 if "--batch" in options else 1
    for name, row in found["tests"].items():
        tokens = batch * (8 if name == "pp8" else 1)
        assert row["tokens/s"] == {"llama2.py": pytest.approx(tokens / row["seconds"])}


@pytest.mark.parametrize("other", ["transformers", "transformers-bfloat16"])
def test_compare_with_transformers(tmp_path, other):
    pytest.importorskip("transformers")
    short = ("--prompt-tokens", 8, "--gen-tokens", 2, "--rounds", 2)
    found = bench_json(tmp_path, "--config", "tiny", "--compare", other, *short)["models"]
    row = found["random weights"]["tests"]["tg"]
    assert row["tokens/s"][other] > 0 and row["ratio"][other] > 0


@pytest.fixture
def llama_bench(tmp_path, monkeypatch):
    """A llama-bench that answers at once, and tells what it was asked."""
    tests = [{"n_prompt": n, "n_gen": 0, "avg_ts": 100.0} for n in (8, 16)]
    tests.append({"n_prompt": 0, "n_gen": 2, "avg_ts": 10.0})
    tests.append({"n_prompt": 0, "n_gen": 2, "avg_ts": 5.0, "n_depth": 32})
    program = tmp_path / "bin" / "llama-bench"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$@" >>"$0.log"\necho \'{json.dumps(tests)}\'\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_table(tmp_path, llama_bench, capsys):
    """All lengths of prompts in one process; a second llama-bench beside the first."""
    path = llama2.DEFAULT_MODEL
    argv = ("--table", path, path, "--prompt-tokens", 8, 16, "--gen-tokens", 2, "--rounds", 1)
    (found,) = bench_json(tmp_path, *argv)["models"].values()
    assert found["tests"].keys() == {"pp8", "pp16", "tg"} and found["fraction"] > 0
    for name, rate in (("pp8", 100.0), ("pp16", 100.0), ("tg", 10.0)):
        row = found["tests"][name]
        assert row["tokens/s"]["llama.cpp"] == pytest.approx(rate)
        assert row["ratio"]["llama.cpp"] == pytest.approx(row["tokens/s"]["llama2.py"] / rate)
    asked = Path(f"{llama_bench}.log").read_text().splitlines()
    assert len(asked) == 4 and "-p 8,16 -n 2" in asked[0]  # warm-up and a round of two files
    two = ("--llama-bench", llama_bench, f"ik={llama_bench}", "--context-sweep", 32)
    (found,) = bench_json(tmp_path, *argv, *two)["models"].values()
    assert [*found["tests"]["tg"]["ratio"]] == ["llama.cpp", "ik"]
    assert found["tests"]["tg@32"]["tokens/s"]["ik"] == pytest.approx(5.0)
    out = capsys.readouterr().out
    assert (
        "ik (ours / theirs)" in out and "l: llama.cpp, i: ik" in out and "pp16, ours / best" in out
    )
    assert "of the memory's bandwidth" in out
    llama_bench.write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    assert bench.main([*map(str, argv)]) == 2
    assert "llama-bench failed: no such model" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------
# Perplexity


def test_windows_are_those_of_llama_perplexity():
    cut = list(bench.windows(range(100, 111), context=5, bos=1))
    assert cut == [[1, 101, 102, 103, 104], [1, 106, 107, 108, 109]]
    assert next(bench.windows(range(9), context=4, bos=None)) == [0, 1, 2, 3]


def test_perplexity_of_made_up_losses():
    value, error = bench.perplexity(torch.full((4,), math.log(7.0)))
    assert value == pytest.approx(7.0)
    assert error == pytest.approx(0.0, abs=1e-5)
    value, error = bench.perplexity(torch.tensor([0.0, 2.0]))
    assert value == pytest.approx(math.e)
    assert error == pytest.approx(math.e * 1.0)  # standard deviation sqrt(2), of two


def test_perplexity_equals_a_direct_computation(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(STORY)
    found = bench_json(tmp_path, "--perplexity", text, "--context", 32)["perplexity"]
    model, tokenizer = llama2.load(llama2.DEFAULT_MODEL)
    ids, losses = tokenizer.encode(STORY), []
    for start in range(0, len(ids) // 32 * 32, 32):
        window = torch.tensor([tokenizer.bos_id, *ids[start + 1 : start + 32]])
        with torch.no_grad():
            logits = model(window[None])[0]
        losses += F.cross_entropy(logits[16:-1], window[17:], reduction="none").tolist()
    assert found["tokens"] == len(losses)
    want = math.exp(sum(losses) / len(losses))
    assert found["value"] == pytest.approx(want, rel=1e-4)


# --------------------------------------------------------------------------------------------------
# Wrong command lines


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--table", "a", "--llama-bench", "a", "b"), "several programs need names"),
        (("--table", "a", "--batch", "2"), "--table runs one row"),
        (("--model", "a", "--config", "7b"), "exclude each other"),
        (("--rounds", "0"), "'0' is not a whole number above 0"),
        (("--seconds", "0"), "expected above 0"),
        (("--no-such-option",), "unrecognized arguments"),
        (("--config", "8b"), "invalid choice: '8b'"),
        (("--model", "missing.gguf"), "missing.gguf"),
        (("--suite", "--config", "tiny", "--filter", "none"), "matches no benchmark"),
        (("--config", "tiny", "--gen-tokens", "2000"), "the context holds 1024"),
        (("--config", "tiny", "--compare", "llama.cpp"), "invalid choice: 'llama.cpp'"),
        (("--perplexity", "missing.txt"), "missing.txt"),
    ],
)
def test_wrong_use_is_one_line(argv, message, capsys):
    try:
        status = bench.main(argv)
    except SystemExit as leave:
        status = leave.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.count("\n") == 1
    assert error.startswith("bench_llama2.py: error:")
    assert message in error


def test_a_text_that_is_too_short(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time")
    assert bench.main(["--perplexity", str(text), "--context", "32"]) == 2
    assert "expected two windows" in capsys.readouterr().err
