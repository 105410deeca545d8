"""Tests of models/train.py: it trains, goes on from its checkpoint, and what it writes loads."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import random
import re
import sys
from types import SimpleNamespace

import pytest
import torch

import llama2
from test_llama2 import CONFIG, SCRIPT, TALE, assert_close, make_model

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


@pytest.fixture
def refused(run, capsys):
    """What the one line on stderr says."""

    def refused(*options):
        with pytest.raises(SystemExit, match="2"):
            run(*options)
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return refused


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


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_trained(train, run, tokenizer, tmp_path, monkeypatch, tied):
    """From a model that exists; each gradient is of one step alone."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    llama2.save_gguf(make_model(config), tmp_path / "init.gguf", "F32", tokenizer=tokenizer)
    loss_of = train.next_token_loss

    def checked(model, batch, bf16):
        assert all(p.grad is None for p in model.parameters())
        return loss_of(model, batch, bf16)

    monkeypatch.setattr(train, "next_token_loss", checked)
    options = ("--init", tmp_path / "init.gguf", "--epochs", 0.05, "--warmup", 0, "--type", "F32")
    status, *_, out = run(*options)
    before, after = (dict(llama2.load(p)[0].named_parameters()) for p in (options[1], out))
    assert status == 0 and len(after) == 20 + (not tied)
    for name, weight in after.items():
        assert not torch.isclose(weight, before[name], atol=1e-6).all(), name


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


def test_a_loss_that_is_not_finite(train, run, monkeypatch, capsys):
    """Ends the run before it changes a weight."""
    monkeypatch.setattr(train, "evaluate", lambda *args: 1.0)
    loss_of = train.next_token_loss
    monkeypatch.setattr(train, "next_token_loss", lambda *args: loss_of(*args) * math.nan)
    with pytest.raises(SystemExit, match="2"):
        run()
    assert "the gradient of step 1 is nan; try a lower --lr" in capsys.readouterr().err


def test_too_few_stories(refused, tmp_path):
    (tmp_path / "text").write_text("One.\n\nTwo.", "utf-8")
    assert "holds 2 stories" in refused()


def test_checkpoints_that_cannot_be_used(run, refused):
    """Whatever is wrong, one line says so, and what to do."""
    *_, out = run("--epochs", 0.05)
    path = out.with_suffix(".ckpt")
    data, state = path.read_bytes(), torch.load(path)
    for damaged in (b"", b"no pickle", data[:-99], data[:999] + bytes(99) + data[1098:]):
        path.write_bytes(damaged)
        assert f"{path} cannot be used; remove it" in refused()
    for other in ([], {"step": 3}, state | {"model": {}}, state | {"optimizers": [{}]}):
        torch.save(other, path)
        assert f"{path} cannot be used; remove it" in refused()
    torch.save(state, path)
    assert "another text or architecture" in refused("--heads", 8)
    assert "--context 65; " in refused("--init", out, "--context", 65)
