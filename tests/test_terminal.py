"""The terminal: any text, any stream, any signal; the command line never ends in a traceback."""

from __future__ import annotations

import io
import itertools
import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import launch
import pytest
from helpers import SCRIPT, write_gguf

import llama2


def endless(path, keys, tensors, context):
    """The tiny model, which as such never says the token that ends a text (if greedy)."""
    output = tensors["output.weight"].copy()
    output[llama2.Config.eos_token_id] = 0  # some other logit is above 0
    keys = keys | {"llama.context_length": context}
    return write_gguf(path, keys, tensors | {"output.weight": output})


# --------------------------------------------------------------------------------------------------
# Prompts


TEXTS_TO_CONTINUE = {
    "empty": "",
    "spaces": "   ",
    "newlines": "\n\t\r\n",
    "NUL": "a\0b",
    "controls": "".join(map(chr, range(1, 32))) + "\x7f\x80\x9f",
    "right to left": "\u202e\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "joined emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467\ufe0f",
    "noncharacters": "\ufffe\uffff\U0010ffff\u2581\ufeff",
    "combining": "e\u0301\u0300" * 4,
    "control tokens": "<s></s><unk><0x0A>",
}


@pytest.mark.parametrize("text", TEXTS_TO_CONTINUE.values(), ids=TEXTS_TO_CONTINUE.keys())
@pytest.mark.parametrize("way", ["argument", "file", "stdin"])
def test_prompts(cli, tmp_path, text, way):
    """Any text is continued, whichever way it comes, and comes out as it went in."""
    (tmp_path / "prompt").write_bytes(text.encode())
    ways = {"argument": ["--prompt", text], "file": ["--prompt-file", tmp_path / "prompt"]}
    argv, stdin = ways.get(way, []), text.encode() * (way == "stdin")
    status, out, err = cli(*argv, "--max-new-tokens", 2, stdin=stdin)
    assert (status, err.count("\n")) == (0, 1)
    assert out.replace("\r\n", "\n").startswith(text.replace("\r\n", "\n"))


def test_any_bytes_on_stdin(cli):
    """Bytes that are not UTF-8 become U+FFFD; nothing raises."""
    rng = random.Random(0)
    samples = [bytes([i]) for i in (0, 0x80, 0xC3, 0xE2, 0xED, 0xF4, 0xFF)] + [b"\xed\xa0\x80"]
    for data in samples + [rng.randbytes(rng.randrange(1, 15)) for _ in range(12)]:
        status, out, _ = cli("--max-new-tokens", 1, "--quiet", stdin=data)
        assert status == 0 and out.startswith(io.StringIO(data.decode("utf-8", "replace")).read())


@pytest.mark.parametrize("codes, shown", [((0xDCFF,), "\ufffd"), ((0xDCC3, 0xDCA9), "\u00e9")])
def test_arguments_that_are_not_utf_8(cli, codes, shown):
    """Such bytes arrive as lone surrogates: what they are in UTF-8 is continued."""
    status, out, err = cli("--prompt", "".join(map(chr, codes)), "--max-new-tokens", 1)
    assert (status, err.count("\n")) == (0, 1) and out.startswith(shown)


@pytest.mark.parametrize("codes", [(0xD800,), (0xDFFF, 0xD800)])
def test_surrogates_that_are_no_bytes_are_refused(cli, codes):
    status, out, err = cli("--prompt", "".join(map(chr, codes)), "--max-new-tokens", 1)
    assert (status, out, err.count("\n")) == (2, "", 1) and "--prompt" in err


def test_prompt_beyond_the_context(cli):
    """A megabyte of text: an error with both numbers before anything is written, no silent cut."""
    status, out, err = cli(stdin=b"ab cd" * 200_000)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "the context holds 400" in err and "tokens" in err


# --------------------------------------------------------------------------------------------------
# Command line


@pytest.mark.parametrize(
    "argv",
    [
        "--max-new-tokens 0",
        "--temperature 1e-300",
        "--temperature 1e300",
        "--top-k 99999999999999999999",
        "--top-p 1e-300",
        "--top-p 0",
        "--seed -1",
        "--context 3",
        "--threads 1",
        "--dtype float16",
        "--dtype bfloat16",
        "--max-new-tokens 99999999999999999999",
    ],
)
def test_extremes_that_are_fine(cli, argv):
    """What is unusual and means something works."""
    short = ["--max-new-tokens", 20]  # unless argv says otherwise
    status, out, err = cli("--prompt", "ab", *short, *argv.split(), "--stop", "never seen")
    assert status == 0 and out.startswith("ab") and err.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(cli, cli_path, tmp_path):
    path = tmp_path / "secret.gguf"
    path.write_bytes(cli_path.read_bytes())
    path.chmod(0)
    status, out, err = cli("--prompt", "ab", model=path)
    assert (status, out, err.count("\n")) == (2, "", 1) and "secret.gguf" in err


def test_names_from_files_reach_no_terminal(cli, tmp_path, keys, tensors):
    """Control characters in a tensor's name are not passed on: they would steer the terminal."""
    odd = tensors | {"\x1b[31mred\x9b\x07.weight": tensors["output_norm.weight"]}
    path = write_gguf(tmp_path / "red.gguf", keys, odd)
    status, _, err = cli("--prompt", "ab", model=path)
    assert status == 2 and err.count("\n") == 1
    assert err.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error:\nout of memory"), MemoryError()], ids=["torch", "python"]
)
def test_what_torch_cannot_do_is_one_line(cli, monkeypatch, error):
    """Out of memory, a kernel that the device lacks: torch raises RuntimeError."""

    def refuse(*args):
        raise error

    monkeypatch.setattr(llama2.Llama, "forward", refuse)
    status, _, err = cli("--prompt", "ab")
    assert (status, err.count("\n")) == (2, 1) and err.startswith("llama2.py: error: ")


# --------------------------------------------------------------------------------------------------
# Streams and signals

OPTIONS = "--model $MODEL --threads 1 --temperature 0 --max-new-tokens 30"
PIPED = f"$FORK {OPTIONS}"
LAUNCH = f"{PIPED} --prompt 'ab \u00e9'"
ANEW = f"$PYTHON {OPTIONS} --prompt 'ab \u00e9'"  # how Python decodes its arguments
SHELL = {  # -> exit status, a part of stdout, lines on stderr
    "head": (f"{LAUNCH} | head -c 2", 0, b"ab", None),
    "pipe": (f"printf 'fox \\377\\360\\237' | {PIPED} --quiet", 0, b"fox \xef\xbf\xbd", 0),
    "stdout full": (f"{LAUNCH} > /dev/full", 2, b"", 1),
    "stdout closed": (f"{LAUNCH} >&-", 0, b"", 1),
    "stderr full": (f"{LAUNCH} 2> /dev/full", 0, b"ab", 0),
    "all closed": (f"{LAUNCH} <&- >&- 2>&-", 0, b"", 0),
    "help, full": (f"{LAUNCH} --help > /dev/full", 0, b"", 0),
    "ascii": (f"PYTHONIOENCODING=ascii {LAUNCH}", 0, rb"ab \xe9", 1),
    "C locale": (f"LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {ANEW}", 0, rb"ab \xe9", 1),
}


@pytest.fixture(scope="module")
def started(cli_path):
    """The commands of SHELL, started side by side."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    environment = os.environ | {"MODEL": str(cli_path), "LC_ALL": "C.UTF-8"}
    environment["PYTHON"] = f"{sys.executable} -m {SCRIPT.stem}"  # what is compiled already
    environment["FORK"] = " ".join(launch.command(SCRIPT))
    environment.pop("PYTHONIOENCODING", None)
    shell = ["bash", "-o", "pipefail", "-c"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return {
        name: subprocess.Popen([*shell, command], cwd=SCRIPT.parent, env=environment, **pipes)
        for name, (command, *_) in SHELL.items()
    }


@pytest.mark.parametrize("name", SHELL)
def test_streams(started, name):
    """A reader that leaves, a full disk, closed streams, other encodings: no traceback, no status 120."""
    _, status, text, lines = SHELL[name]
    out, err = started[name].communicate(timeout=120)
    assert b"Traceback" not in err and b"Exception" not in err and b"\x1b" not in err
    assert started[name].returncode == status and text in out
    assert lines is None or err.count(b"\n") == lines


def start(command, path, *arguments):
    """llama2.py as a process of its own."""
    command = [*command, "--model", str(path), "--threads", "1", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to one process")
def test_interrupted_process(tmp_path, keys, tensors):
    """Ctrl-C in the middle of a text of a hundred thousand tokens."""
    path = endless(tmp_path / "m.gguf", keys, tensors, 2**17)
    options = ("--temperature", "0", "--max-new-tokens", "100000")
    process = start(launch.command(SCRIPT), path, "--prompt", "fox", *options)
    assert process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130 and b"Traceback" not in err and b"interrupted" in err


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc tells what is imported")
def test_interrupt_while_torch_is_imported(cli_path):
    """Ctrl-C in the seconds before main() ends quietly."""
    process = start([sys.executable, str(SCRIPT)], cli_path, "--prompt", "ab")
    maps = Path(f"/proc/{process.pid}/maps")
    while "libtorch" not in maps.read_text() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (out, err) == (b"", b"") and process.returncode in (-signal.SIGINT, 130)


@pytest.mark.parametrize(
    "owner, name, calls, written, reported",
    [
        (llama2, "open_checkpoint", 1, "", False),
        (llama2, "build_model", 1, "", False),
        (llama2.Llama, "forward", 1, "ab", True),
        (llama2.Llama, "forward", 5, "ab", True),
        (llama2.StreamDecoder, "decode", 8, "ab", True),
    ],
    ids=["opening", "loading", "prefill", "generating", "decoding"],
)
def test_interrupt(cli, monkeypatch, owner, name, calls, written, reported):
    """Ctrl-C at any moment: status 130, what was written stays, the report tells it."""
    interrupt_call(monkeypatch, owner, name, calls)
    status, out, err = cli("--prompt", "ab", "--max-new-tokens", 20)
    assert status == 130 and out.startswith(written) and ("interrupted" in err) == reported


def interrupt_call(monkeypatch, owner, name, calls):
    """Press Ctrl-C in the given call of a function."""
    original, count = getattr(owner, name), iter(range(1, 10**6))

    def function(*args, **options):
        if next(count) == calls:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, function)


# --------------------------------------------------------------------------------------------------
# Chat


@pytest.fixture
def heard(monkeypatch):
    """What each turn of a chat fed to the model, as the ids that its cache then stood for."""
    turns, content, wanted = [], [], []
    forward, encode, sample = llama2.Llama.forward, llama2.encode_chat, llama2.sample

    def spy_forward(model, tokens, cache, *args):
        content[cache.pos :] = tokens[0].tolist()
        return forward(model, tokens, cache, *args)

    def spy_encode(tokenizer, messages, *args):
        wanted[:] = encode(tokenizer, messages, *args)
        return list(wanted)

    def spy_sample(logits, *args, **options):
        if wanted and logits.numel() > 1:  # the first token of an answer
            assert content == wanted
            turns.append(list(content))
            wanted.clear()
        return sample(logits, *args, **options)

    monkeypatch.setattr(llama2.Llama, "forward", spy_forward)
    monkeypatch.setattr(llama2, "encode_chat", spy_encode)
    monkeypatch.setattr(llama2, "sample", spy_sample)
    return turns


def test_lines_may_end_as_on_windows(cli, heard, cli_path):
    assert cli("--chat", "--max-new-tokens", 2, stdin=b"fox\r\n")[0] == 0
    assert llama2.Tokenizer.from_gguf(cli_path).decode(heard[0]).endswith("fox [/INST]")


def test_rate_counts_the_token_that_stops(model):
    """Of the steps the first belongs to the prompt, the last may stop: two tokens in 0.1 s."""
    report = llama2.Report(model, [[1] * 5], 5)
    report.new_ids, report.seconds = [[7, 7]], [0.5, 0.04, 0.06]
    said = llama2.describe(report, model, 1.0, 0)
    assert "prompt 5 tokens, 10.0 tokens/s; generated 2 tokens, 20.0 tokens/s" in said
    report.seconds = []
    assert "prompt 5 tokens; generated" in llama2.describe(report, model, 1.0, 0)


def test_chat_that_fills_its_context(cli, cli_path, heard):
    """Says so, drops turns until half is free, keeps the system prompt; the cache holds Meta's encoding."""
    questions = [f"{letter * 20}?" for letter in "abcdefgh"]
    argv = ["--chat", "--system", "hfhf", "--max-new-tokens", 30]
    stdin = "\n".join(questions).encode()
    status, _, err = cli(*argv, stdin=stdin)
    assert status == 0 and 1 <= err.count("context full: dropped the oldest") <= 2
    tokenizer = llama2.Tokenizer.from_gguf(cli_path)
    assert len(heard) == len(questions)
    for ids, question in zip(heard, questions, strict=True):
        text = tokenizer.decode(ids)
        assert len(ids) + 30 <= 400 and text.count("<<SYS>>\nhfhf") == 1
        assert text.endswith(f"{question} [/INST]")
    assert questions[0] in tokenizer.decode(heard[1])
    assert questions[0] not in tokenizer.decode(heard[-1])
    assert questions[-2] in tokenizer.decode(heard[-1])
    lengths = [*map(len, heard)]
    full = [new for old, new in itertools.pairwise(lengths) if new < old]
    assert 1 <= len(full) <= 2 and max(full) <= 200 and max(lengths) > 300


def test_chat_answer_cut_by_the_context(cli, tmp_path, keys, tensors):
    """An answer that the context cuts off is not passed over in silence."""
    path = endless(tmp_path / "m.gguf", keys, tensors, 100)
    status, _, err = cli("--chat", "--max-new-tokens", 10**6, stdin=b"ab\n", model=path)
    assert status == 0 and "context full: the answer ends here" in err
    for argv in ((), ("--quiet",)):  # as far as the context goes, unless told
        status, out, err = cli("--chat", *argv, stdin=b"ab\n", model=path)
        assert status == 0 and len(out) > 60
        assert err == "" if argv else "context full: the answer ends here" in err
    status, _, err = cli("--chat", "--max-new-tokens", 3, stdin=b"ab\n", model=path)
    assert status == 0 and "max new tokens: the answer ends here" in err


def test_chat_commands(cli, cli_path, heard):
    """They are not sent to the model, nor is a word that is none; a space before a slash sends it."""
    lines = ["/help", "ab", "/reset", "/halp me", " /usr is", "/", "/exit", "never"]
    argv = ["--chat", "--max-new-tokens", 3]
    status, out, err = cli(*argv, stdin="\n".join(lines).encode())
    said = err.splitlines()
    assert status == 0 and out.count("\n") == len(heard) == 2
    assert said[0].startswith(
        "cli.gguf, format llama-2 (assumed: the model has no chat template), 400"
    )
    assert all(key in said[0] for key in ("Ctrl-C", "/exit", "/help"))
    assert said[1] == llama2.CHAT_HELP and "/reset" in said[1] and "slash" in said[1]
    assert "llama2.py: error: unknown command /halp" in err and "error: unknown command /; " in err
    decode = llama2.Tokenizer.from_gguf(cli_path).decode
    assert decode(heard[0]) == "[INST] ab [/INST]" and decode(heard[1]) == "[INST] /usr is [/INST]"
    status, out, err = cli("--chat", "--quiet", stdin=b"/help\n/reset\n/exit\nab\n")
    assert (status, out, err) == (0, "", "")


def test_control_characters_are_shown_to_a_terminal(model, monkeypatch):
    """Escape sequences of a vocabulary would steer it; pipes and files get what the model said."""
    text = "a\x1b]0;title\x07\tb\r\nc\x9b31m\x7f\rd\n"
    for terminal in (True, False):
        out = io.StringIO(newline="")
        out.isatty = lambda terminal=terminal: terminal
        monkeypatch.setattr(sys, "stdout", out)
        assert llama2.show(llama2.Stream(iter([text]), llama2.Report(model, [[1]], 1))) == text
        seen = "a\\x1b]0;title\\x07\tb\r\nc\\x9b31m\\x7f\\x0dd\n"
        assert out.getvalue() == (seen if terminal else text) + "\n"


TYPED = """
import llama2, sys
__import__("readline")
print(*(ascii(llama2.read_question()) for _ in range(5)), sep="\\n", file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no pseudo-terminals")
def test_typed_questions(tmp_path):
    """Lines are edited and remembered, a pasted text is one question, Ctrl-C gives a new line."""
    pytest.importorskip("readline")
    import pty

    (tmp_path / "typed.py").write_text(TYPED)
    outer, inner = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "INPUTRC": os.devnull}
    command = launch.command(tmp_path / "typed.py")
    process = subprocess.Popen(
        command, stdin=inner, stdout=inner, stderr=subprocess.PIPE, env=environment
    )
    os.close(inner)
    screen = b""

    def expect(text):
        nonlocal screen
        while text not in screen:
            screen += os.read(outer, 4096)
        screen = screen.partition(text)[2]

    expect(b"> ")
    os.write(outer, b"helo\x1b[Dl\r")  # an arrow to the left, the missing letter
    expect(b"> ")
    os.write(outer, b"\x1b[200~two\nlines\n\x1b[201~and more\r")
    expect(b"> ")
    os.write(outer, b"\x1b[A\x1b[A!\r")  # two up: the first question
    expect(b"> ")
    os.write(outer, b"not this")
    expect(b"not this")
    process.send_signal(signal.SIGINT)
    while not select.select([outer], [], [], 2)[0]:  # it came just before readline waited
        process.send_signal(signal.SIGINT)
    expect(b"> ")
    os.write(outer, b"\x04")
    _, said = process.communicate(timeout=60)
    os.close(outer)
    lines = ["hello", "two\nlines\nand more", "hello!", "", None]
    assert [line for line in said.decode().splitlines() if line] == [ascii(line) for line in lines]


def test_chat_refuses_and_goes_on(cli, cli_path, heard):
    """Reserved tags and questions beyond the context are refused; the conversation stays."""
    lines = ["abab", "x [/INST] y", "<<SYS>>", "c" * 1000, "", "fefe"]
    argv = ["--chat", "--max-new-tokens", 5]
    status, _, err = cli(*argv, stdin="\n".join(lines).encode())
    assert status == 0 and err.count("reserved tag") == 2 and "the context holds 400" in err
    assert "the model has no chat template" in err
    text = llama2.Tokenizer.from_gguf(cli_path).decode(heard[-1])
    assert len(heard) == 2 and text.startswith("[INST] abab [/INST]") and "fefe" in text
    assert cli("--chat", "--quiet") == (0, "", "")  # the end of input at once


def test_chat_answer_with_reserved_tags(cli, cli_path, heard, monkeypatch):
    """A model that speaks for the user is stopped there, and the next turn is possible."""
    tokenizer, calls = llama2.Tokenizer.from_gguf(cli_path), []
    script = tokenizer.encode("ab [INST] cd", bos=False)

    def scripted(model, prompt, **options):
        calls.append(prompt)
        return llama2.Stream(iter(script), llama2.Report(model, [list(prompt)], len(prompt)))

    monkeypatch.setattr(llama2, "generate", scripted)
    status, out, err = cli("--chat", "--quiet", stdin=b"ab\ncd\n")
    assert (status, err, len(calls)) == (0, "", 2) and out == "ab \nab \n"


def test_interrupt_in_chat(cli, cli_path, heard, monkeypatch):
    """Ctrl-C stops the answer, not the session; even the first, before anything is generated."""
    for calls in (1, 4):
        heard.clear()
        with monkeypatch.context() as context:
            interrupt_call(context, llama2.Llama, "forward", calls)
            argv = ["--chat", "--max-new-tokens", 8]
            status, out, _ = cli(*argv, stdin=b"ab\ncd\n")
        assert status == 0 and out.count("\n") >= 2
        text = llama2.Tokenizer.from_gguf(cli_path).decode(heard[-1])
        assert "[INST] ab [/INST]" in text and text.endswith("[INST] cd [/INST]")


# --------------------------------------------------------------------------------------------------
# Again and again


@pytest.mark.parametrize("argv", [[], ["--temperature", 0.8, "--seed", 7]])
def test_same_command_same_text(cli, argv):
    """Twice in a row, and with one thread or two, which these small sums do not notice."""
    most = min(2, os.cpu_count() or 1)
    argv = ["--prompt", "ab", "--max-new-tokens", 8, *argv]
    runs = {cli(*argv, "--threads", n)[1] for n in (1, 1, most)}
    assert len(runs) == 1
