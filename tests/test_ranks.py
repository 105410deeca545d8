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

import pytest
import torch
import torch.distributed.run

import llama2
from test_llama2 import CONFIG, PROMPT, SCRIPT, TOKENS, assert_close, needs, quantised

pytestmark = [
    needs("rank_share"),
    pytest.mark.skipif(os.name == "nt", reason="never tried there"),
]
RANK_FORMS = ("hf_index", "q4.gguf", "tied.gguf", "wide.gguf")
RANKS = 2
PROMPTS = TOKENS[:2, :9]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun(script, *args, **options):
    """Run RANKS processes of a script."""
    command = [sys.executable, torch.distributed.run.__file__, "--standalone", "--no-python"]
    command += [f"--nproc-per-node={RANKS}", sys.executable, script, *map(str, args)]
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent)}
    options |= {"env": environment, "capture_output": True, "timeout": 300}
    return subprocess.run(command, check=False, **options)


def run_rank(root, out):
    """What one rank does in test_ranks_equal_one_process: saves what it computes and holds."""
    torch.set_num_threads(1)
    group = llama2.Ranks()
    rank = group.rank
    assert group.gather(rank) == list(range(RANKS))
    actual = {}
    for form in RANK_FORMS:
        part = llama2.rank_share(llama2.open_checkpoint(root / form), rank, RANKS)
        model = llama2.build_model(part)
        held = bytes_held(model)
        llama2.connect_ranks(model, group)
        ids, sampled = (generated(model, temperature) for temperature in (0, 1))
        actual[form] = (model(PROMPTS), ids, sampled, held)
        # Where rounding differs between ranks, rank 0's logits are everyone's.
        model.register_forward_hook(lambda module, args, y: y * (1 - rank), prepend=True)
        assert group.gather(generated(model, 1)) == [sampled] * RANKS
    group.close()
    torch.save(actual, out / str(rank))


def generated(model, temperature):
    sampling = llama2.Sampling(temperature, top_p=1, seed=3)
    return list(llama2.generate(model, PROMPTS[0], sampling, 6))


def bytes_held(model):
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def test_ranks_equal_one_process(forms, vocabulary, tmp_path):
    root = forms[0]
    llama2.save_gguf(llama2.open_checkpoint(root / "hf"), root / "q4.gguf", "Q4_0", overwrite=True)
    tied = llama2.open_checkpoint(root / "hf")
    del tied.weights["lm_head.weight"]
    tied.config = dataclasses.replace(tied.config, tie_word_embeddings=True)
    llama2.save_gguf(tied, root / "tied.gguf", "Q8_0", overwrite=True)
    wide = dataclasses.replace(CONFIG, head_dim=32)  # heads are together wider than the stream
    keys = {"llama.attention.key_length": 32, "llama.attention.value_length": 32}
    quantised(vocabulary, root / "wide.gguf", ["F32", "Q8_0"], wide, keys)
    process = torchrun(__file__, root, tmp_path)
    assert process.returncode == 0, process.stderr.decode()
    actual = [torch.load(tmp_path / str(rank)) for rank in range(RANKS)]
    for form in RANK_FORMS:
        model, _ = llama2.load(root / form)
        held = bytes_held(model)
        if form == "tied.gguf":  # the embedding and the head are cut along different axes
            held += model.embed_tokens.blocks.nbytes
        for rank in range(RANKS):
            logits, ids, sampled, rank_held = actual[rank][form]
            assert_close(logits, model(PROMPTS), 2e-5)
            assert torch.equal(logits, actual[0][form][0])
            assert ids == generated(model, 0)
            assert sampled == actual[0][form][2]
            assert rank_held / held < 1.3 / RANKS, (form, rank)


def test_ranks_from_the_command_line(forms, tmp_path, capsys):
    """Two by torchrun, that share five blocks of a row."""
    path = tmp_path / "q4.gguf"
    llama2.save_gguf(llama2.open_checkpoint(forms[0] / "hf"), path, "Q4_0")
    args = ["--model", str(path), "--temperature", "0", "--max-new-tokens", "12"]
    assert llama2.main([*args, "--prompt", PROMPT]) == 0
    alone = capsys.readouterr().out
    process = torchrun(SCRIPT, *args, input=PROMPT.encode())
    assert (process.returncode, process.stdout) == (0, alone.encode())  # rank 0 alone reads, ...
    assert process.stderr.count(b"generated 12 tokens") == 1  # ... and prints


def test_shares_that_are_refused(forms):
    """More ranks than heads; a share that ends within a block of 256."""
    checkpoint = llama2.open_checkpoint(forms[0] / "hf")
    with pytest.raises(ValueError, match=r"8 ranks for 4 key/value heads; expected \[1, 2, 4\]"):
        llama2.rank_share(checkpoint, 0, 8)
    for layer, size, unit in (
        ("layers.0.mlp.down_proj", 160, 256),
        ("layers.0.self_attn.o_proj", 128, 32),
        ("embed_tokens", 128, 256),
    ):
        name = f"{layer}.weight"
        weight = dataclasses.replace(checkpoint.weights[name], ggml_type="Q4_K")
        weights = checkpoint.weights | {name: weight}
        actual = f"{layer}.*: {size} cannot be divided by 2 ranks into units of {unit}"
        with pytest.raises(ValueError, match=actual):
            llama2.rank_share(dataclasses.replace(checkpoint, weights=weights), 0, 2)


def test_waiting_for_others_can_be_ended():
    """A rendezvous that cannot be complete: one rank of two, which hears Ctrl-C or is terminated."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    ports = [free_port() for _ in numbers]
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
    rank["MASTER_ADDR"] = "127.0.0.1"
    ranks = []
    for port in ports:
        environment = os.environ | rank | {"MASTER_PORT": str(port)}
        command = [sys.executable, SCRIPT, "--prompt", "x"]
        ranks.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE))
    for number, port, process in zip(numbers, ports, ranks, strict=True):
        deadline = time.monotonic() + 200
        while True:  # until it listens for the other
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(100) in (-number, 128 + number)


if __name__ == "__main__":
    run_rank(*map(Path, sys.argv[1:]))
