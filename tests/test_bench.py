"""Tests of bench_llama2.py: every mode runs, and its arithmetic is right."""

from __future__ import annotations

import json
import math
import time

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
def quick(monkeypatch, tmp_path):
    """Few rounds, little memory, nothing compiled, baselines in a folder of the test's own."""

    def interleave(ways, rounds=1):
        return {name: [bench.seconds(way) for _ in range(2)] for name, way in ways.items()}

    measure = bench.measure
    monkeypatch.setattr(bench, "interleave", interleave)
    monkeypatch.setattr(bench, "measure", lambda way, limit: measure(way, min(limit, 0.002)))
    monkeypatch.setattr(bench, "bandwidth", lambda device: 1e10)
    monkeypatch.setattr(bench, "BASELINES", tmp_path / ".benchmarks")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def bench_json(tmp_path, *argv):
    """Run the command line; what it wrote as JSON."""
    file = tmp_path / "result.json"
    assert bench.main([*map(str, argv), "--json", str(file)]) == 0
    return json.loads(file.read_text())


# --------------------------------------------------------------------------------------------------
# Arithmetic on made-up numbers


def test_shares_sum_to_one_and_name_the_remainder():
    found = bench.shares({"qkv": 2.0, "MLP": 5.0}, whole=10.0)
    assert found["qkv"] == 0.2
    assert found["head"] == 0.0
    assert list(found.values())[-1] == pytest.approx(0.3)
    assert sum(found.values()) == pytest.approx(1.0)


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
    assert bench.judge(cases, low, high) == word


def test_verdicts_show_their_figures():
    assert bench.listed({"at 128": 0.0512}, ".2%") == "5.12% at 128"
    assert bench.listed({"eager": 1.234}) == "1.23x eager"


@pytest.mark.parametrize(
    ("new", "old", "word"),
    [
        ((1.2, 0.0), (1.0, 0.0), "regressed"),
        ((0.8, 0.0), (1.0, 0.0), "improved"),
        ((1.02, 0.0), (1.0, 0.0), "within noise"),  # below 3 % nothing is believed
        ((1.2, 0.3), (1.0, 0.0), "within noise"),
        ((1.2, 0.0), (1.0, 0.3), "within noise"),
    ],
)
def test_change_against_a_baseline(new, old, word):
    new, old = ({"median": m, "iqr": r} for m, r in (new, old))
    part, noise, found = bench.change(new, old)
    assert found == word
    assert part == pytest.approx(new["median"] / old["median"] - 1)
    assert noise >= 0.03


def test_compare_gives_rates_and_their_ratio():
    ours, theirs = {"pp8": [2.0, 4.0, 2.0]}, {"pp8": [1.0, 2.0, 1.0]}
    assert bench.compare(ours, theirs, {"pp8": 8}) == {
        "pp8": {"ours": 4.0, "theirs": 8.0, "ratio": 0.5}
    }


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


def test_suite_and_baselines(tmp_path, monkeypatch, capsys):
    tiny = ("--suite", "--config", "tiny", "--seconds", "0.01")
    found = bench_json(tmp_path, *tiny, "--save-baseline", "a")["suite"]
    names = {f"{name}/{T}" for name, (sizes, _) in bench.SUITE.items() for T in sizes}
    assert found.keys() == names
    assert all(row["samples"] >= 3 for row in found.values())
    again = bench_json(tmp_path, *tiny, "--baseline", "a", "--filter", "rope_forward/8")
    assert list(again["baseline"]) == ["rope_forward/8"]
    monkeypatch.setattr(bench, "change", lambda new, old: (0.5, 0.03, "regressed"))
    saved = json.loads((bench.BASELINES / "a.json").read_text())
    saved["machine"]["threads"] = 64
    (bench.BASELINES / "a.json").write_text(json.dumps(saved))
    argv = [*tiny, "--baseline", "a", "--filter", "rms_norm/1"]
    assert bench.main(argv) == 0
    assert bench.main([*argv, "--fail-on-regression"]) == 1
    out = capsys.readouterr().out
    assert "regressed" in out
    assert "the baseline was taken with threads 64" in out


def test_claims(tmp_path, capsys):
    """Each verdict is the one that follows from the figures that are told with it."""
    found = bench_json(tmp_path, "--claims", "--config", "tiny")["claims"]
    mask, caches, modules, loading, all_of_it = (found[claim] for claim in bench.CLAIMS)
    limit = 1 + llama2.DEFAULT_MODEL.stat().st_size / 0.5e9
    for row, cases, *bounds in (
        (mask, mask["saved"], 0.05),
        (caches, caches["ratios"], 1.05),
        (modules, modules["ratios"], 1.05),
        (loading, {"": sum(loading["seconds"].values())}, 0, limit),
        (all_of_it, all_of_it["ratios"], 2, 3),
    ):
        assert row["verdict"] == bench.judge(cases, *bounds)
        assert all(f"{name}" in row["because"] for name in cases)
    assert len(mask["saved"]) == len(modules["ratios"]) == 4 and len(all_of_it["ratios"]) == 2
    assert all(0 <= part < 1 for part in mask["saved"].values())
    assert capsys.readouterr().out.count("(e)") >= 2


def test_breakdown(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "seconds", lambda run: 5.0)  # so slow that two passes are enough
    found = bench_json(tmp_path, "--breakdown", "--config", "tiny")["breakdown"]
    assert list(found) == ["decode", "128 tokens", "512 tokens"]
    for phase in found.values():
        assert sum(phase["shares"].values()) == pytest.approx(1.0)
        assert all(share > 0 for share in phase["shares"].values())
    assert "call" not in llama2.apply_rotary_emb.__qualname__  # the ranges are taken away again
    assert F.scaled_dot_product_attention is torch._C._nn.scaled_dot_product_attention


def test_profile(tmp_path):
    trace = tmp_path / "trace.json"
    argv = ("--profile", trace, "--config", "tiny", "--prompt-tokens", 8, "--gen-tokens", 2)
    assert len(bench_json(tmp_path, *argv)["profile"]) == 10
    assert json.loads(trace.read_text())["traceEvents"]


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
    found = bench_json(tmp_path, *options, *short)["whole"]
    assert found["weights read per token"] > 0
    assert found["tokens/s"] > 0
    assert ("context" in found) == ("--context-sweep" in options)


@pytest.mark.parametrize("other", ["transformers", "transformers-bfloat16"])
def test_compare_with_transformers(tmp_path, other):
    pytest.importorskip("transformers")
    short = ("--prompt-tokens", 8, "--gen-tokens", 2, "--rounds", 2)
    found = bench_json(tmp_path, "--config", "tiny", "--compare", other, *short)["whole"]
    assert found[other]["tg"].keys() == {"ours", "theirs", "ratio"}


@pytest.fixture
def llama_bench(tmp_path, monkeypatch):
    """A llama-bench that answers at once."""
    tests = [{"n_prompt": n, "n_gen": 0, "avg_ts": 100.0} for n in (8, 16)]
    tests.append({"n_prompt": 0, "n_gen": 2, "avg_ts": 10.0})
    program = tmp_path / "bin" / "llama-bench"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{json.dumps(tests)}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def test_compare_with_llama_bench(tmp_path, llama_bench, capsys):
    argv = ("--model", llama2.DEFAULT_MODEL, "--compare", "llama.cpp", "--rounds", 2)
    short = ("--prompt-tokens", 8, "--gen-tokens", 2)
    found = bench_json(tmp_path, *argv, *short)["whole"]["llama.cpp"]
    assert found["pp8"]["theirs"] == pytest.approx(100.0)
    assert found["tg"]["theirs"] == pytest.approx(10.0)
    llama_bench.write_text("#!/bin/sh\necho no such model >&2\nexit 1\n")
    assert bench.main([*map(str, argv)]) == 2
    assert "llama-bench failed: no such model" in capsys.readouterr().err


def test_table(tmp_path, llama_bench):
    path = llama2.DEFAULT_MODEL
    argv = ("--table", path, "--table-prompts", 8, 16, "--rounds", 1)
    found = bench_json(tmp_path, *argv)["table"][path.name]
    assert found.keys() == {"pp8", "pp16", "tg", "bandwidth", "fraction"}
    assert found["pp16"]["theirs"] == pytest.approx(100.0)
    assert found["fraction"] > 0


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
    assert found["files"][0]["perplexity"] == pytest.approx(want, rel=1e-4)


def test_divergence():
    a, b = torch.randn(2, 5, 30)
    want = F.kl_div(b.log_softmax(-1), a.log_softmax(-1), log_target=True, reduction="none")
    torch.testing.assert_close(bench.divergence(a, b).float(), want.sum(-1))


def test_a_model_does_not_diverge_from_itself(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(STORY)
    path = llama2.DEFAULT_MODEL
    argv = ("--perplexity", text, "--context", 32, "--compare-types", path, path)
    found = bench_json(tmp_path, *argv)["perplexity"]
    assert found["kl"] == {"mean": 0.0, "p99": 0.0, "same_top": 1.0}
    assert found["files"][0] == found["files"][1]


# --------------------------------------------------------------------------------------------------
# Wrong command lines


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--compare-types", "a", "b"), "--compare-types needs --perplexity"),
        (("--model", "a", "--config", "7b"), "exclude each other"),
        (("--rounds", "0"), "'0' is not a whole number above 0"),
        (("--seconds", "0"), "accepted is above 0"),
        (("--no-such-option",), "unrecognized arguments"),
        (("--config", "8b"), "invalid choice: '8b'"),
        (("--model", "missing.gguf"), "missing.gguf: no such file"),
        (("--suite", "--config", "tiny", "--filter", "none"), "matches no benchmark"),
        (("--config", "tiny", "--gen-tokens", "2000"), "more tokens than the context of 1024"),
        (("--config", "tiny", "--compare", "llama.cpp"), "needs --model FILE"),
        (("--config", "tiny", "--suite", "--baseline", "b", "--filter", "rms"), "saved are: none"),
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
    assert "needed are two windows" in capsys.readouterr().err
