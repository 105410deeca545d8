"""Tests of models/train.py: it trains, goes on from its checkpoint, and what it writes loads."""

import dataclasses
import importlib
import math
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from save import save_gguf

import llama2
from test_llama2 import CONFIG, SCRIPT, TALE, assert_close, make_model

pytestmark = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="training takes torch 2.9 or newer"
)
COMMAND = """train.py text --out out.gguf --vocab 340 --hidden 32 --mlp 64 --layers 1 --heads 4
    --kv-heads 2 --context 64 --batch 256 --threads 1 """


@pytest.fixture(scope="module")
def train():
    """The script as a module."""
    with pytest.MonkeyPatch.context() as context:
        context.syspath_prepend(SCRIPT.parent / "models")
        yield importlib.import_module("train")
    torch.set_flush_denormal(False)


@pytest.fixture
def run(train, tmp_path, monkeypatch, capsys):
    """Train a model of almost nothing on a hundred stories: -> stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    words, chance = TALE.split(), random.Random(0)
    stories = [" ".join(chance.choices(words, k=20 + i % 40)) for i in range(100)]
    Path("text").write_text("\n\n".join(stories), "utf-8")

    def run(options, status=0):
        monkeypatch.setattr(sys, "argv", (COMMAND + options).split())
        with pytest.raises(SystemExit) as end:
            sys.exit(train.main())
        assert end.value.code == status
        return capsys.readouterr()

    return run


def test_an_interrupted_run_goes_on(train, run):
    """From its checkpoint, to the file of a run that nothing interrupted."""
    options = "--epochs 0.2 --eval-every 3 --warmup 2 --type F32"
    run(f"{options} --out whole.gguf")
    with patch.object(train, "evaluate", side_effect=[9, 9, KeyboardInterrupt]):
        _, err = run(options, status=130)
    assert "goes on from the last checkpoint" in err
    assert "before step 4" in run(options).out
    assert Path("out.gguf").read_bytes() == Path("whole.gguf").read_bytes()
    _, tokenizer = llama2.load("out.gguf")
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"


def test_both_losses_fall(run):
    """Held out before the first step as a model that knows nothing."""

    def losses(options):
        return [float(x) for x in re.findall(r"(?:step 1:|loss|out) ([\d.]+)", run(options).out)]

    before, training, held_out = losses("--epochs 1 --lr 0.01 --warmup 1")
    assert before == pytest.approx(math.log(340), abs=0.1)
    assert max(training, held_out) < before - 0.5
    weights = llama2.open_checkpoint("out.gguf").weights  # Q8_0 where rows are of whole blocks
    assert weights["layers.0.mlp.up_proj.weight"].ggml_type == "Q8_0"
    resumed, *_ = losses("--epochs 0.1 --init out.gguf --out more.gguf")
    assert resumed == pytest.approx(held_out, abs=0.01)
    run("--epochs 0 --init out.gguf more.gguf --out mean.gguf")
    models = (llama2.load(f"{name}.gguf")[0] for name in ("out", "more", "mean"))
    first, second, both = (model.norm.weight for model in models)
    assert_close(both, (first + second) / 2, 1e-6)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_trained(run, tokenizer, tied):
    """From a model that exists."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    save_gguf(make_model(config), "init.gguf", "F32", tokenizer=tokenizer)
    run("--init init.gguf --epochs 0.05 --warmup 0 --type F32")
    models = (llama2.load(path)[0] for path in ("init.gguf", "out.gguf"))
    before, after = (dict(model.named_parameters()) for model in models)
    assert len(after) == 20 + (not tied)
    for name, weight in after.items():
        assert not torch.isclose(weight, before[name], atol=1e-6).all(), name


def test_a_text_that_is_too_small_for_its_vocabulary(run):
    _, err = run("--vocab 9999", status=2)
    assert err.count("\n") == 1
    assert re.search(r"error: --vocab 9999 does not fit the text: .* a value <= \d+\.\n$", err)


def test_batches(train):
    """An epoch has each row once, in batches below the limit."""
    rows = [torch.full((2 + i // 2,), i) for i in range(90)]
    data = train.batches(rows, 100, seed=0, step=0)
    first, second = epochs = [[next(data).tolist() for _ in train.cut(rows, 100)] for _ in "12"]
    for epoch in epochs:
        assert sorted(row[0] for batch in epoch for row in batch) == [*range(90)]
        assert all(len(batch) * (len(batch[0]) - 1) <= 100 for batch in epoch)
    assert first != second


def test_long_stories_are_cut(train):
    """A row has at most the context and one token to predict; no token is predicted twice."""

    def encode(text, bos):
        return [1] * bos + [*map(int, text.split())]

    words = SimpleNamespace(eos_id=2, encode=encode)
    rows = train.encode(words, ["3 4 5 6 7 8", "9"], context=3)
    assert [row.tolist() for row in rows] == [[8, 2], [1, 9, 2], [1, 3, 4, 5], [5, 6, 7, 8]]


def test_a_loss_that_is_not_finite(train, run):
    """Ends the run before it changes a weight."""

    def loss(model, batch, bf16):
        return model.norm.weight[0] * math.nan

    with patch.object(train, "next_token_loss", loss):
        _, err = run("", status=2)
    assert "the gradient of step 1 is nan; try a lower --lr" in err


def test_what_cannot_be_used(run):
    """Whatever is wrong, one line says so, and what to do."""

    def refused(options=""):
        _, err = run(options, status=2)
        assert err.count("\n") == 1
        return err

    run("--epochs 0.05")
    path = Path("out.ckpt")
    data, state = path.read_bytes(), torch.load(path)
    for damaged in (b"no pickle", data[:-99], data[:999] + bytes(99) + data[1098:]):
        path.write_bytes(damaged)
        assert "out.ckpt cannot be used; remove it" in refused()
    for other in ([], state | {"model": {}}, state | {"optimizers": [{}]}):
        torch.save(other, path)
        assert "out.ckpt cannot be used; remove it" in refused()
    torch.save(state, path)
    assert "another text or architecture" in refused("--heads 8")
    assert "--context 65; " in refused("--init out.gguf --context 65")
    Path("text").write_text("One.\n\nTwo.")
    assert "holds 2 stories" in refused()
