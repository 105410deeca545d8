"""Tests of models/train.py: it trains, goes on from its checkpoint, and what it writes loads."""

from __future__ import annotations

import importlib.util
import math
import random
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import llama2
from test_llama2 import SCRIPT, TALE, assert_close

pytestmark = pytest.mark.skipif(
    not hasattr(torch.optim, "Muon"), reason="training takes torch 2.9 or newer"
)


@pytest.fixture(scope="module")
def train():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train", SCRIPT.parent / "models" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    torch.set_flush_denormal(False)


@pytest.fixture
def run(train, tmp_path, monkeypatch, capsys):
    """Train a model of almost nothing on a hundred stories: -> status, stdout, stderr, the file."""
    words, chance, path = TALE.split(), random.Random(0), tmp_path / "text"
    stories = [" ".join(chance.choices(words, k=chance.randint(20, 60))) for _ in range(100)]
    path.write_text("\n\n".join(stories), "utf-8")
    sizes = "--vocab 340 --hidden 32 --mlp 64 --layers 1 --heads 4 --kv-heads 2 --context 64"

    def run(*options, name="out.gguf"):
        argv = ["train.py", path, "--out", tmp_path / name, *sizes.split(), "--batch", 256]
        monkeypatch.setattr(sys, "argv", [str(a) for a in [*argv, "--threads", 1, *options]])
        return train.main(), *capsys.readouterr(), tmp_path / name

    return run


def test_an_interrupted_run_goes_on(train, run, monkeypatch):
    """From its checkpoint, to the weights of a run that nothing interrupted; the file has them."""
    options = ("--epochs", 0.2, "--eval-every", 3, "--warmup", 2, "--type", "F32")
    _, said, _, whole = run(*options, name="whole.gguf")
    steps = int(re.search(r"(\d+) steps", said)[1])
    assert steps > 5
    rate = train.learning_rate

    def stop(step, *others):
        if step == 4:
            raise KeyboardInterrupt
        return rate(step, *others)

    monkeypatch.setattr(train, "learning_rate", stop)
    status, _, err, _ = run(*options)
    assert status == 130 and "goes on from the last checkpoint" in err
    monkeypatch.setattr(train, "learning_rate", rate)
    status, said, _, out = run(*options)
    assert status == 0 and "before step 4" in said
    state = torch.load(out.with_suffix(".ckpt"), weights_only=True)
    assert state["step"] == steps
    model, tokenizer = llama2.load(out, trainable=True)
    once, _ = llama2.load(whole, trainable=True)
    for name, weight in model.state_dict().items():
        assert torch.equal(once.state_dict()[name], weight), name
        assert_close(state["model"][name], weight, 1e-6)
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"


def test_both_losses_fall(run):
    """Held out before the first step as a model that knows nothing."""
    status, said, _, out = run("--epochs", 1, "--lr", 0.01, "--warmup", 1)
    before = float(re.search(r"before step 1: ([\d.]+)", said)[1])
    assert status == 0 and before == pytest.approx(math.log(340), abs=0.1)
    training, held_out = map(float, re.search(r"loss ([\d.]+), held out ([\d.]+)", said).groups())
    assert max(training, held_out) < before - 0.5
    weights = llama2.open_checkpoint(out).weights  # Q8_0 where rows are made of whole blocks
    assert weights["layers.0.mlp.up_proj.weight"].ggml_type == "Q8_0"
    _, again, _, more = run("--epochs", 0.1, "--init", out, name="more.gguf")
    resumed = float(re.search(r"before step 1: ([\d.]+)", again)[1])
    assert resumed == pytest.approx(held_out, abs=0.01)
    *_, mean = run("--epochs", 0, "--init", out, more, name="mean.gguf")
    first, second, both = (llama2.load(path)[0].norm.weight for path in (out, more, mean))
    assert_close(both, (first + second) / 2, 1e-6)
    assert not torch.equal(first, second)


def test_batches(train):
    """An epoch has each row once, in batches below the limit."""
    rows = [torch.full((2 + i // 2,), i) for i in range(90)]
    data = train.batches(rows, 100, seed=0, step=0)
    epochs = [[next(data) for _ in train.cut(rows, 100)] for _ in range(2)]
    for epoch in epochs:
        assert sorted(int(row[0]) for batch in epoch for row in batch) == [*range(90)]
        assert all(len(batch) * (batch.shape[1] - 1) <= 100 for batch in epoch)
    assert [b.tolist() for b in epochs[0]] != [b.tolist() for b in epochs[1]]


def test_long_stories_are_cut(train):
    """A row has at most the context and one token to predict; no token is predicted twice."""

    def encode(text, bos):
        return [1] * bos + [*map(int, text.split())]

    words = SimpleNamespace(eos_id=2, encode=encode)
    rows = train.encode(words, ["3 4 5 6 7 8", "9"], context=3)
    assert sorted(row.tolist() for row in rows) == [[1, 3, 4, 5], [1, 9, 2], [5, 6, 7, 8], [8, 2]]


def test_too_few_stories(run, tmp_path):
    """One line that says so, and status 2."""
    (tmp_path / "text").write_text("One.\n\nTwo.", "utf-8")
    status, _, err, _ = run()
    assert status == 2 and "holds 2 stories" in err and err.count("\n") == 1
