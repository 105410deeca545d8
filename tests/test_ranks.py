"""Tests of tensor parallelism: each rank holds its share, and all together say what one would."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import gguf
import pytest
import torch
import torch.distributed.run

import llama2
from test_llama2 import CONFIG, GREEDY, PROMPT, SCRIPT, TOKENS, assert_close, make_weights, needs

pytestmark = [
    needs("rank_part"),
    pytest.mark.skipif(os.name == "nt", reason="never tried there"),
]
RANK_SCRIPT = Path(__file__).with_name("rank.py")
RANK_FORMS = ("hf_index", "q4.gguf", "tied.gguf")
RANKS = 2


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_rank(rank, port, script, *args):
    """One of RANKS processes, as torchrun starts it."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "TORCHELASTIC_RUN_ID": "x"}
    command = [sys.executable, script, *map(str, args)]
    return subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.PIPE)


@pytest.fixture(scope="module", autouse=True)
def torchrun(forms, tmp_path_factory):
    """A command line, and torchrun with it, which runs beside the other tests."""
    path = tmp_path_factory.mktemp("torchrun") / "q4.gguf"
    llama2.save_gguf(llama2.open_checkpoint(forms[0] / "hf"), path, "Q4_0")
    prompt = path.with_name("prompt")
    prompt.write_text(PROMPT, "utf-8")
    args = ["--model", str(path), "--temperature", "0", "--max-new-tokens", "12"]
    command = [sys.executable, torch.distributed.run.__file__, "--standalone", "--no-python"]
    command += [f"--nproc-per-node={RANKS}", sys.executable, SCRIPT, *args]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    with prompt.open("rb") as stdin:
        return args, subprocess.Popen(command, stdin=stdin, **pipes)


def test_ranks_equal_one_process(forms, tmp_path):
    root, tokens = forms[0], TOKENS[:2, :9]
    llama2.save_gguf(llama2.open_checkpoint(root / "hf"), root / "q4.gguf", "Q4_0", overwrite=True)
    tied = llama2.open_checkpoint(root / "hf")
    del tied.weights["lm_head.weight"]
    tied.config = dataclasses.replace(tied.config, tie_word_embeddings=True)
    llama2.save_gguf(tied, root / "tied.gguf", "Q8_0", overwrite=True)
    torch.save(tokens, root / "tokens")
    port = free_port()
    ranks = [start_rank(i, port, RANK_SCRIPT, root, tmp_path, *RANK_FORMS) for i in range(RANKS)]
    for process in ranks:
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors.decode()
    found = [torch.load(tmp_path / str(rank)) for rank in range(RANKS)]
    for form in RANK_FORMS:
        model, _ = llama2.load(root / form)
        ids = list(llama2.generate(model, tokens[0].tolist(), GREEDY, 6))
        held = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
        if form == "tied.gguf":  # the embedding and the head are cut along different axes
            held += model.embed_tokens.blocks.nbytes
        for rank in range(RANKS):
            logits, rank_ids, drawn, rank_held = found[rank][form]
            assert_close(logits, model(tokens), 2e-5)
            assert torch.equal(logits, found[0][form][0])
            assert rank_ids == ids
            assert drawn == found[0][form][2]
            assert rank_held / held < 1.3 / RANKS, (form, rank)


def test_ranks_from_the_command_line(torchrun, capsys):
    """Two, that share five blocks of a row."""
    args, process = torchrun
    assert llama2.main([*args, "--prompt", PROMPT]) == 0
    alone = capsys.readouterr().out
    out, errors = process.communicate(timeout=300)
    assert (process.returncode, out) == (0, alone), errors  # rank 0 alone reads, ...
    assert errors.count("generated 12 tokens") == 1  # ... and prints


def test_too_many_ranks(forms):
    checkpoint = llama2.open_checkpoint(forms[0] / "hf")
    with pytest.raises(ValueError, match=r"8 ranks for 4 key/value heads; expected \[1, 2, 4\]"):
        llama2.rank_part(checkpoint, 0, 8)
    name = "layers.0.mlp.down_proj.weight"
    weight = checkpoint.weights[name]
    checkpoint.weights[name] = dataclasses.replace(weight, ggml_type="Q4_K")  # blocks of 256
    with pytest.raises(ValueError, match="160 cannot be divided by 2 ranks into units of 256"):
        llama2.rank_part(checkpoint, 0, 2)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@torch.no_grad()
def test_the_shares_of_all_ranks_are_the_whole(kind):
    """Of heads that are together wider than the residual stream, and an uneven MLP."""
    config = dataclasses.replace(CONFIG, head_dim=32)
    weights = {}
    for name, w in make_weights(config).items():
        stored = "F32" if "norm" in name else kind
        blocks = gguf.quants.quantize(w, gguf.GGMLQuantizationType[stored]).view("uint8")
        blocks = torch.from_numpy(blocks.reshape(w.shape[0] if w.ndim > 1 else 1, -1))
        weights[name] = llama2.Weight(stored, w.shape, lambda blocks=blocks: blocks)
    checkpoint = llama2.Checkpoint("", "", config, weights, None)
    whole = llama2.build_model(checkpoint)
    shares = [
        llama2.build_model(llama2.rank_part(checkpoint, rank, RANKS)) for rank in range(RANKS)
    ]
    tokens = TOKENS[:2, :9]
    x = whole.embed_tokens(tokens)
    assert_close(torch.cat([m.embed_tokens(tokens) for m in shares], -1), x, 1e-6)
    assert_close(torch.cat([m.lm_head(x) for m in shares], -1), whole.lm_head(x), 1e-5)
    inputs = x, *llama2.rope_tables(config, 9), torch.ones(9, 9, dtype=torch.bool).tril(), None
    for layer, block in enumerate(whole.layers):
        attention = [m.layers[layer].self_attn(*inputs) for m in shares]
        assert_close(sum(attention), block.self_attn(*inputs), 1e-5)
        assert_close(sum(m.layers[layer].mlp(x) for m in shares), block.mlp(x), 1e-5)


def test_waiting_for_others_can_be_ended():
    """A rendezvous that cannot be complete: one rank of two, which hears Ctrl-C or is terminated."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    ports = [free_port() for _ in numbers]
    ranks = [start_rank(0, port, SCRIPT, "--prompt", "x") for port in ports]
    for number, port, process in zip(numbers, ports, ranks, strict=True):
        deadline = time.monotonic() + 200
        while True:  # until it listens for the other
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(100) in (-number, 128 + number)
