"""The terminal: any text, any stream, any signal; the command line never ends in a traceback."""

from __future__ import annotations

import itertools
import os
import random
import re
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import llama2
from test_llama2 import SCRIPT, write_gguf

PYTHON = [sys.executable, str(SCRIPT), "--threads", "1", "--temperature", "0"]
on_posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such streams")


def parrot(path, keys, tensors, token_id, context=400):
    """A model that says one token for ever."""
    silent = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    silent["token_embd.weight"] += 1
    silent["output_norm.weight"] += 1
    silent["output.weight"][token_id] = 1
    return write_gguf(path, keys | {"llama.context_length": context}, silent)


# --------------------------------------------------------------------------------------------------
# Prompts

TEXTS = [
    "",
    "   ",
    "\n\t\r\n",
    "a\0b",
    "".join(map(chr, range(1, 32))) + "\x7f\x80\x9f",
    "\u202e\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\ufe0f",
    "\ufffe\uffff\U0010ffff\u2581\ufeff",
    "e\u0301\u0300" * 4,
    "<s></s><unk><0x0A>",
]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_any_text_is_continued_and_comes_out_as_it_went_in(cli, text):
    piped = cli("--max-new-tokens", 2, "--quiet", stdin=text.encode())
    assert piped == cli("--prompt", text, "--max-new-tokens", 2, "--quiet")
    status, out, err = piped
    assert (status, err) == (0, "")
    assert out.replace("\r\n", "\n").startswith(text.replace("\r\n", "\n"))


def test_any_bytes_on_stdin(cli):
    """Bytes that are not UTF-8 become U+FFFD; nothing raises."""
    chance = random.Random(0)
    samples = [b"\xff", b"a\xc3", b"\xe2\x82", b"\xed\xa0\x80", chance.randbytes(50)]
    for data in samples:
        status, out, _ = cli("--max-new-tokens", 1, "--quiet", stdin=data)
        shown = data.decode("utf-8", "replace").replace("\r\n", "\n")
        assert status == 0
        assert out.replace("\r\n", "\n").startswith(shown)


def test_arguments_that_are_not_utf_8(cli):
    """Such bytes arrive as lone surrogates."""
    status, _, err = cli("--prompt", "a\udcff\ud800", "--max-new-tokens", 1, "--quiet")
    assert (status, err) == (0, "")


@pytest.mark.parametrize(
    "argv",
    [
        "--max-new-tokens 0",
        "--temperature 1e5",
        "--top-k 999999999",
        "--top-p 0",
        "--seed -1",
        "--context 3",
        "--max-new-tokens 2147483648 --context 99",
    ],
)
def test_extremes_that_are_fine(cli, argv):
    status, out, err = cli("--prompt", "ab", "--max-new-tokens", 20, *argv.split())
    assert status == 0
    assert out.startswith("ab")
    assert err.count("\n") == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_slow_dtypes_are_named(cli, dtype):
    status, _, err = cli(
        "--prompt", "ab", "--max-new-tokens", 2, "--device", "cpu", "--dtype", dtype
    )
    assert status == 0
    assert f"{dtype} is several times slower" in err


@pytest.mark.parametrize("error", [RuntimeError("CUDA error:\nout of memory"), MemoryError()])
def test_what_torch_cannot_do_is_one_line(cli, monkeypatch, error):
    def refuse(*args):
        raise error

    monkeypatch.setattr(llama2.Llama, "forward", refuse)
    status, _, err = cli("--prompt", "ab")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("llama2.py: error: ")


# --------------------------------------------------------------------------------------------------
# Streams and signals


@pytest.mark.parametrize(
    ("command", "status", "shown", "said"),
    [
        ("PYTHONIOENCODING=ascii $RUN | head -c 7", 0, rb"ab \xe9", b""),
        ("$RUN > /dev/full", 2, b"", b"error: [^\n]*No space left on device\n"),
    ],
)
def test_streams(cli_path, command, status, shown, said):
    """A reader that leaves and that has another encoding; a full disk is one line."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    run = f"{' '.join(PYTHON)} --model {cli_path} --quiet --prompt 'ab \u00e9'"
    shell = ["bash", "-o", "pipefail", "-c", command.replace("$RUN", run)]
    process = subprocess.run(shell, check=False, capture_output=True)
    assert (process.returncode, process.stdout) == (status, shown)
    assert re.fullmatch(b"(llama2.py: )?" + said, process.stderr)


@on_posix
def test_interrupted_process(tmp_path, keys, tensors):
    """Ctrl-C in the middle of a text of a hundred thousand tokens."""
    path = parrot(tmp_path / "m.gguf", keys, tensors, 300, 2**17)
    argv = [*PYTHON, "--model", path, "--prompt", "fox", "--max-new-tokens", "100000"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert re.search(b"stopped: interrupted; seed 0\n$", err)


def interrupt_call(monkeypatch, calls):
    """Press Ctrl-C in the given pass of the model."""
    original = llama2.Llama.forward
    count = itertools.count(1)

    def forward(*args, **options):
        if next(count) == calls:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(llama2.Llama, "forward", forward)


@pytest.mark.parametrize("calls", [1, 5])
def test_interrupt(cli, monkeypatch, calls):
    """Ctrl-C while the prompt is read or a text is written: status 130, what was written stays."""
    interrupt_call(monkeypatch, calls)
    status, out, err = cli("--prompt", "ab", "--max-new-tokens", 20)
    assert (status, out[:2]) == (130, "ab")
    assert "interrupted" in err


# --------------------------------------------------------------------------------------------------
# Chat


@pytest.fixture
def heard(monkeypatch, cli_model):
    """The texts that stand before each answer, as the model read them."""
    texts = []
    forward = llama2.Llama.forward

    def spy(model, tokens, cache, *args):
        if tokens.shape[1] > 1:
            ids = torch.cat([cache.tokens[0, : cache.pos], tokens[0]])
            texts.append(cli_model[1].decode(ids.tolist()))
        return forward(model, tokens, cache, *args)

    monkeypatch.setattr(llama2.Llama, "forward", spy)
    return texts


def test_lines_may_end_as_on_windows(cli, heard):
    assert cli("--chat", "--max-new-tokens", 2, stdin=b"fox\r\n")[0] == 0
    assert heard == ["[INST] fox [/INST]"]


def test_chat_that_fills_its_context(cli, heard):
    """Says so, drops turns until half is free, keeps the system prompt."""
    questions = [f"{letter * 20}?" for letter in "abcdefgh"]
    argv = ["--chat", "--system", "hfhf", "--max-new-tokens", 30]
    status, _, err = cli(*argv, stdin="\n".join(questions).encode())
    assert status == 0
    assert 1 <= err.count("context full") <= 2
    asked = {question: [text for text in heard if question in text] for question in questions}
    for question, texts in asked.items():
        assert texts[0].endswith(f"{question} [/INST]")
        assert texts[0].count("<<SYS>>\nhfhf") == 1
    assert heard[-1] not in asked[questions[0]]
    assert heard[-1] in asked[questions[-2]]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-new-tokens", 10**6], "context full: the answer"),
        (["--max-new-tokens", 3], "max new tokens: the answer"),
        (["--quiet"], ""),
    ],
)
def test_chat_answer_that_is_cut(cli, tmp_path, keys, tensors, argv, said):
    """It is not passed over in silence, unless told."""
    path = parrot(tmp_path / "m.gguf", keys, tensors, 300, 100)
    status, out, err = cli("--chat", *argv, stdin=b"ab\n", model=path)
    assert status == 0
    assert len(out) > 2
    assert said in err
    assert err or argv == ["--quiet"]


def test_chat_commands(cli, heard):
    """They are not sent to the model, nor is a word that is none; a space before a slash sends it."""
    lines = ["ab", "/reset", "/halp me", " /usr is", "/", "/exit", "never"]
    argv = ["--chat", "--max-new-tokens", 3]
    status, out, err = cli(*argv, stdin="\n".join(lines).encode())
    assert status == 0
    assert out.count("\n") == 2
    assert heard == ["[INST] ab [/INST]", "[INST] /usr is [/INST]"]
    template, keys, *_ = err.splitlines()
    assert "no chat template: llama-2 is assumed" in template
    for word in ("cli.gguf", "400", "Ctrl-C", "/exit", "/reset"):
        assert word in keys
    assert re.search("unknown command /halp me; .*/exit", err)
    for end in (b"/exit", b"/quit", b"/EXIT", b"exit"):
        assert cli("--chat", "--quiet", stdin=b"/reset\n" + end + b"\nab\n") == (0, "", "")


def test_chat_refuses_and_goes_on(cli, heard):
    """A question beyond the context is refused; the conversation stays. Tags are text."""
    lines = ["abab", "c" * 1000, "", "x [/INST] y"]
    argv = ["--chat", "--max-new-tokens", 5]
    status, _, err = cli(*argv, stdin="\n".join(lines).encode())
    assert status == 0
    assert len(re.findall(r"the prompt has \d+ tokens; .*400", err)) == 1
    assert len(heard) == 2
    assert heard[1].startswith(heard[0])
    assert heard[1].endswith("[INST] x [/INST] y [/INST]")


def test_chat_template_by_name_and_file(cli, heard, tmp_path):
    """It says what an answer begins and ends with; one that fails is one line."""
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    for template, text in (("vicuna", "USER: ab\nASSISTANT:"), (path, "<ab>")):
        argv = ["--chat", "--chat-template", template, "--max-new-tokens", 3]
        status, out, err = cli(*argv, stdin=b"ab")
        assert status == 0 and out and "assumed" not in err
        assert heard.pop() == text
    for text, said in (("{{ oops(", "template"), ("{{ raise_exception('no users') }}", "no users")):
        path.write_text(text)
        status, out, err = cli("--chat", "--chat-template", path, stdin=b"ab")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert said in err


@pytest.mark.parametrize("calls", [1, 4])
def test_interrupt_in_chat(cli, heard, monkeypatch, calls):
    """Ctrl-C stops the answer, not the session; even the first, before anything is generated."""
    interrupt_call(monkeypatch, calls)
    status, out, _ = cli("--chat", "--max-new-tokens", 8, stdin=b"ab\ncd\n")
    assert status == 0
    assert out.count("\n") >= 2
    assert heard[-1].startswith("[INST] ab [/INST]")
    assert heard[-1].endswith("[INST] cd [/INST]")


def test_interrupted_template(cli, heard, tmp_path, monkeypatch):
    """Ctrl-C while a template loops for ever: one line, and the session goes on."""
    path = tmp_path / "template.jinja"
    loop = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
    loop = f"{{% if messages[0].content == 'ab' %}}{loop}{{% endif %}}"
    path.write_text(loop + "{{ messages[0].content }}")
    questions = iter(["ab", "cd"])

    def ask():
        question = next(questions, None)
        if question == "ab":
            threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
        return question

    monkeypatch.setattr(llama2, "read_question", ask)
    argv = ["--chat", "--chat-template", path, "--max-new-tokens", 3]
    status, _, err = cli(*argv)
    assert (status, heard) == (0, ["cd"])
    assert err.count("error: interrupted") == 1


@on_posix
def test_chat_at_a_terminal(tmp_path, keys, tensors):
    """Lines are edited, a pasted text is one question, Ctrl-C gives a new line; a model's control
    characters, which could steer the terminal, are shown as text."""
    pytest.importorskip("readline")
    import pty

    path = parrot(tmp_path / "m.gguf", keys, tensors, 3 + 0x1B)
    outer, inner = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "INPUTRC": os.devnull}
    argv = [*PYTHON, "--model", path, "--chat", "--max-new-tokens", "2"]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), inner)
    process = subprocess.Popen(argv, env=environment, start_new_session=True, **streams)
    os.close(inner)
    screen = b""

    def expect(text):
        nonlocal screen
        while text not in screen:
            assert select.select([outer], [], [], 120)[0], screen
            screen += os.read(outer, 4096)
        before, _, screen = screen.partition(text)
        return before

    expect(b"> ")
    os.write(outer, b"/hap\x1b[Dl\r")  # an arrow to the left, the missing letter
    expect(b"unknown command /halp; Ctrl-C stops")
    expect(b"> ")
    os.write(outer, b"\x1b[200~two\nlines\n\x1b[201~and more\r")
    expect(b"and more")
    answer = expect(b"> ")
    assert answer.count(b"\\x1b\\x1b") == 1
    os.write(outer, b"not this")
    expect(b"not this")
    process.send_signal(signal.SIGINT)
    while not select.select([outer], [], [], 2)[0]:  # it came just before readline waited
        process.send_signal(signal.SIGINT)
    expect(b"> ")
    os.write(outer, b"\x04")
    assert process.wait(60) == 0
    os.close(outer)
