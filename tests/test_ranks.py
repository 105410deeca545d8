"""Tests of tensor parallelism: each rank holds its share, and all together say what one would."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import ranks
from torch import distributed

import llama2
from test_llama2 import CONFIG, FORMS, PROMPT, TOKENS, assert_close, quantised, raises, ran

pytestmark = pytest.mark.skipif(os.name == "nt", reason="never tried there")
RANKS = 2
PROMPTS = TOKENS[:2, :9]


def torchrun(script, *args, text=""):
    """Run RANKS processes of a script; what they write, to stdout and to stderr."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={RANKS}", script, *args]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    status, *written = ran(*command, env=environment, input=text, timeout=300)
    assert status == 0, written
    return written


def run_rank(root):
    """What one rank does in test_ranks_equal_one_process."""
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    for form in ("hf_index", "q4.gguf", "tied.gguf", "wide.gguf"):
        checkpoint = llama2.open_checkpoint(root / form)
        whole, share = map(
            llama2.build_model, (checkpoint, ranks.rank_share(checkpoint, rank, RANKS))
        )
        # A tied head counts: it is cut along another axis than the embedding.
        size, all_bytes = (sum(t.nbytes for t in m.state_dict().values()) for m in (share, whole))
        assert size / all_bytes < 1.3 / RANKS, form
        if rank:
            assert ranks.follow() == 0
            continue
        model, _ = ranks.load(checkpoint)
        assert_close(model(PROMPTS), whole(PROMPTS), 2e-5)
        for temperature in (0, 1):  # the second time in another cache
            assert generated(model, temperature) == generated(whole, temperature)
        ranks.broadcast(None)


def generated(model, temperature):
    sampling = llama2.Sampling(temperature, top_p=1, seed=3)
    return list(llama2.generate(model, PROMPTS[0], sampling, 6))


def test_ranks_equal_one_process(forms):
    root = forms[0]
    quantised(root / "q4.gguf", "Q4_0", FORMS)
    tied = replace(FORMS, tie_word_embeddings=True)
    quantised(root / "tied.gguf", "Q8_0", tied)
    wide = replace(CONFIG, head_dim=32)  # heads are together wider than the stream
    keys = {"llama.attention.key_length": 32, "llama.attention.value_length": 32}
    quantised(root / "wide.gguf", "F32 Q8_0", wide, keys)
    torchrun(__file__, root)


def test_ranks_from_the_command_line(forms, cli):
    """Two by torchrun: rank 0 alone reads and prints; a chat goes back to an empty cache."""
    model = forms[0] / "hf"
    options = ["--temperature", "0", "--max-new-tokens", "12"]
    _, alone, _ = cli(*options, "--prompt", PROMPT, model=model)
    out, err = torchrun(ranks.__file__, "--model", model, *options, text=PROMPT)
    assert (out, err.count("generated 12 tokens")) == (alone, 1)
    text = f"{PROMPT}\n/reset\n{PROMPT}\n{PROMPT}\n"
    _, alone, _ = cli(*options, "--chat", model=model, stdin=text.encode())
    assert torchrun(ranks.__file__, "--model", model, *options, "--chat", text=text)[0] == alone


def test_every_rank_reports_its_own_error(monkeypatch, capsys):
    monkeypatch.setattr(ranks, "broadcast", MagicMock(side_effect=RuntimeError("out of\nmemory")))
    monkeypatch.setattr(distributed, "get_rank", lambda: 1)
    assert ranks.follow() == 2
    assert capsys.readouterr().err == "ranks.py: error: rank 1: out of memory\n"


def test_shares_that_are_refused(forms):
    """More ranks than heads; a share that ends within a block of 256."""
    checkpoint = llama2.open_checkpoint(forms[0] / "hf")
    raises(
        r"8 ranks for 4 key/value heads; expected \[1, 2, 4\]", ranks.rank_share, checkpoint, 0, 8
    )
    for expected in (
        r"layers.0.mlp.down_proj.weight \(Q4_K\): 160 cannot be divided by 2 ranks into units of 256",
        r"layers.0.self_attn.o_proj.weight \(Q4_K\): 128 cannot be divided by 2 ranks into units of 32",
        r"embed_tokens.weight \(Q4_K\): 128 cannot be divided by 2 ranks into units of 256",
    ):
        name = expected.split()[0]
        weight = replace(checkpoint.weights[name], ggml_type="Q4_K")
        weights = checkpoint.weights | {name: weight}
        raises(expected, ranks.rank_share, replace(checkpoint, weights=weights), 0, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_waiting_for_others_can_be_ended(number):
    """A rendezvous that cannot be complete: one rank of two, which hears Ctrl-C or is terminated."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = probe.getsockname()
    rank = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 TORCHELASTIC_RUN_ID=x MASTER_ADDR={} MASTER_PORT={}"
    command = [
        "env",
        *rank.format(*address).split(),
        sys.executable,
        ranks.__file__,
        "--prompt",
        "x",
    ]
    process = subprocess.Popen(command)
    while process.poll() is None:  # until it listens for the other
        with contextlib.suppress(OSError), socket.create_connection(address):
            break
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(100) in (-number, 128 + number)


if __name__ == "__main__":
    run_rank(Path(sys.argv[1]))
    os._exit(0)  # torch 2.6 may abort, or wait for ever, where the threads of its group are ended
