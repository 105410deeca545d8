"""Tests of models/train.py: it trains, goes on from its checkpoint, and what it writes loads."""

from __future__ import annotations

import importlib.util
import math
import random
import re
import sys

import pytest
import torch
from helpers import SCRIPT, TALE, assert_close

import llama2


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
    """Train a model of almost nothing on thirty documents: -> status, stdout, stderr, the file."""
    words, chance, text = TALE.split(), random.Random(0), tmp_path / "text"
    text.write_text("\n\n".join(" ".join(chance.choices(words, k=80)) for _ in range(30)), "utf-8")
    sizes = "--vocab 340 --hidden 32 --mlp 64 --layers 1 --heads 4 --kv-heads 2 --context 32"
    out = tmp_path / "out.gguf"

    def run(*options):
        argv = ["train.py", str(text), "--out", str(out), *sizes.split(), "--threads", "1"]
        monkeypatch.setattr(sys, "argv", [*argv, *map(str, options)])
        return train.main(), *capsys.readouterr(), out

    return run


@pytest.mark.parametrize("options", [(), ("--untied",)], ids=["tied", "untied"])
@torch.no_grad()
def test_two_steps(run, options):
    """One step, then the second from the checkpoint: the file holds the averaged weights."""
    options = (*options, "--type", "F32", "--lr", 0.1)
    with torch.enable_grad():
        status, said, _, out = run("--epochs", 1e-9, *options)
        assert status == 0 and "1 steps of 4 x 32" in said
        tokens = int(re.search(r"train on: \d+ bytes, (\d+) tokens", said)[1])
        per_epoch = (tokens - 1 - 32) // 32 // 4
        status, said, _, out = run("--epochs", 1.5 / per_epoch, *options)
    assert status == 0 and "2 steps of 4 x 32" in said
    state = torch.load(out.with_suffix(".ckpt"), weights_only=True)
    assert state["step"] == 2
    loaded, tokenizer = llama2.load(out)
    assert loaded.config.tie_word_embeddings == (options[0] != "--untied")
    trained = llama2.Llama(loaded.config)
    trained.load_state_dict(state["average"])
    ids = torch.tensor([tokenizer.encode("Once upon a time")])
    assert_close(loaded(ids), trained(ids), 1e-6)
    assert tokenizer.decode(ids[0].tolist()) == "Once upon a time"


def test_losses_are_shown_from_the_start(run):
    """Held out before the first step as a model that knows nothing; then both fall, without a lag."""
    status, said, shown, _ = run("--epochs", 1, "--lr", 0.01, "--warmup", 1, "--dropout", 0)
    assert status == 0 and "inf" not in said + shown
    before = float(re.search(r"before step 1: ([\d.]+)", said)[1])
    assert before == pytest.approx(math.log(340), abs=0.1)
    first = re.search(r"loss ([\d.]+), held out ([\d.]+)", shown)
    assert float(first[2]) == pytest.approx(before, abs=1e-3)
    training, held_out = map(float, re.search(r"loss ([\d.]+), held out ([\d.]+)", said).groups())
    assert held_out < before and training == pytest.approx(held_out, abs=0.2)


def test_default_type(run):
    """Q8_0 where rows are made of whole blocks."""
    status, _, _, out = run("--epochs", 1e-9)
    weights = llama2.open_checkpoint(out).weights
    assert status == 0 and weights["layers.0.mlp.up_proj.weight"].ggml_type == "Q8_0"
    assert weights["norm.weight"].ggml_type == "F32"


def test_too_little_text(run):
    """One line that says so, and status 2."""
    status, _, err, _ = run("--context", 10**4)
    assert status == 2 and "are no batch of 4 x 10000" in err and err.count("\n") == 1


def test_another_file_leaves_the_split_alone(train, tmp_path):
    """Each file's own tenth documents are held out; one with a twin in the other file is not."""
    paths = [tmp_path / "a", tmp_path / "b"]
    texts = [
        [f"{path.name} " + " ".join(f"{path.name}{i}.{j}" for j in range(30)) for i in range(30)]
        for path in paths
    ]
    texts[1][19] = texts[1][3]
    texts[1][5] += " " + texts[0][29]
    for path, documents in zip(paths, texts, strict=True):
        path.write_text("\n\n".join(documents), "utf-8")
    _, (alone,) = train.read_documents(paths[:1])
    assert alone == [texts[0][i] for i in (9, 19, 29)]
    training, (first, second) = train.read_documents(paths)
    assert first == alone[:2] and second == [texts[1][9], texts[1][29]]
    assert sorted(training + first + second) == sorted(texts[0] + texts[1])
