"""The terminal: any text, any stream, any signal; the command line never ends in a traceback."""

import itertools
import os
import re
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import llama2
from test_llama2 import SCRIPT, cases, one_line, ran

PYTHON = [sys.executable, str(SCRIPT), "--threads", "1", "--temperature", "0"]
on_posix = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such streams")


def parrot(write_tiny, tensors, token_id, context=400, keys=None):
    """A model that says one token for ever."""
    silent = {name: np.zeros_like(tensor) for name, tensor in tensors.items()}
    silent["token_embd.weight"] += 1
    silent["output_norm.weight"] += 1
    silent["output.weight"][token_id] = 1
    return write_tiny({"llama.context_length": context} | (keys or {}), silent)


# --------------------------------------------------------------------------------------------------
# Prompts

TEXT = "\n\t\r\n<s></s><unk><0x0A>" + "".join(map(chr, range(1, 128)))
TEXT += "\ufffe\uffff\U0010ffff\u2581\ufeff\u202e\u05e9e\u0301"


@pytest.mark.parametrize("by", ["--prompt-file", "stdin"])
def test_bytes_of_prompts(cli, tmp_path, by):
    """Any text comes out as it went in. A byte order mark and one line end are an editor's; what is not UTF-8 is refused by name."""
    path = tmp_path / "letter.txt"
    options = ("--max-new-tokens", 3, "--quiet")

    def run(data):
        path.write_bytes(data)
        return cli(*options, *([by, path] if by != "stdin" else []), stdin=data)

    assert run(TEXT.encode())[1].replace("\r\n", "\n").startswith(TEXT.replace("\r\n", "\n"))
    told = cli(*options, "--prompt", "the fox")
    for data in (b"the fox", b"the fox\n", b"the fox\r\n", b"\xef\xbb\xbfthe fox\n"):
        assert run(data) == told
    assert run(b"\nthe fox\n\n")[1].startswith("\nthe fox\n")
    for encoding in ("latin-1", "utf-16", "utf-16-le", "utf-16-be"):
        status, out, err = run("caf\u00e9 fox".encode(encoding))
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert re.search("(letter.txt|standard input): .*(NUL bytes.*UTF-8|'utf-8' codec)", err)


def test_raw_prompts_end_where_answers_end(cli, write_tiny, tensors, keys):
    """At what the template writes, if the prompt has control tokens."""
    pytest.importorskip("tokenizers")
    name = keys["tokenizer.ggml.tokens"][300]
    types = [*keys["tokenizer.ggml.token_type"][:300], 3, *keys["tokenizer.ggml.token_type"][301:]]
    template = "{% for message in messages %}{{ message.content }}NAME{% endfor %}"
    said = {"tokenizer.chat_template": template.replace("NAME", name)}
    model = parrot(write_tiny, tensors, 300, keys=said | {"tokenizer.ggml.token_type": types})
    options = ("--prompt", "fox", "--max-new-tokens", 5)
    assert "stopped: stop token 300" in cli(*options, "--parse-special", model=model)[2]
    assert "stopped: max new tokens" in cli(*options, model=model)[2]
    assert "chat template" not in cli(*options, "--parse-special")[2]


def test_arguments_that_are_not_utf_8(cli, cli_path, tmp_path):
    """Such bytes arrive as lone surrogates. No text is made of them; a file may be named so."""
    for argv in (["--prompt", "a\udcff"], ["--chat", "--system=\udce9"], ["--stop", "\ud800"]):
        assert re.search(r"'.*\\ud.*' is not UTF-8", one_line(cli(*argv)))
    odd = os.fsencode(tmp_path) + b"/caf\xe9.gguf"
    try:
        os.link(cli_path, odd)
    except OSError:
        pytest.skip("a file's name is UTF-8 here")
    assert cli("--prompt", "ab", "-n", 1, model=os.fsdecode(odd))[0] == 0


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


STREAMS = r"""
PYTHONIOENCODING=ascii $RUN|head -c 7 | 0;ab \\xe9;
$RUN > /dev/full | 2;;llama2.py: error: [^\n]*No space left on device\n
$RUN --chat --max-new-tokens 3 <&- | 0;.+\n;
$RUN >&- | 0;;
$RUN 2>&- | 0;ab .+\n;
"""  # a command, then its status, what it writes to stdout and to stderr


@cases("command, expected", STREAMS)
def test_streams(cli_path, command, expected):
    """A reader that leaves and that has another encoding; a full disk is one line; closed streams."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    run = f"{' '.join(PYTHON)} --model {cli_path} --quiet --prompt 'ab \u00e9'"
    outcome = ran("bash", "-o", "pipefail", "-c", command.replace("$RUN", run))
    assert re.fullmatch(f"(?s){expected}", ";".join(map(str, outcome)))


@on_posix
def test_interrupted_process(write_tiny, tensors):
    """Ctrl-C in the middle of a text of a hundred thousand tokens."""
    path = parrot(write_tiny, tensors, 300, 2**17)
    argv = [*PYTHON, "--model", path, "--prompt", "fox", "--max-new-tokens", "100000"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 130
    assert err.endswith(b"stopped: interrupted; temperature 0 (option)\n")


# --------------------------------------------------------------------------------------------------
# Chat


@pytest.fixture
def heard(monkeypatch, cli_model):
    """The prompts of a chat."""
    texts, check_ids = [], llama2.check_ids

    def spy(*args):
        ids = check_ids(*args)
        texts.append(cli_model[1].decode(ids))
        return ids

    monkeypatch.setattr(llama2, "check_ids", spy)
    return texts


def test_chat_that_fills_its_context(cli, heard):
    """Says so, drops turns until half is free, keeps the system prompt."""
    questions = [f"{letter * 20}?" for letter in "abcdefgh"]
    stdin = "\n".join(questions).encode()
    status, _, err = cli("--chat", "--system", "hfhf", "--max-new-tokens", 30, stdin=stdin)
    assert status == 0
    assert 1 <= err.count("context full") <= 2
    for question, text in zip(questions, heard, strict=True):
        assert text.endswith(f"{question} [/INST]")
        assert text.count("<<SYS>>\nhfhf") == 1
    assert questions[-2] in heard[-1] and questions[0] not in heard[-1]


def test_without_a_limit_a_text_ends_with_its_context(cli, write_tiny):
    """As -n -1 means it in llama.cpp; an answer goes on, too, and may fill what is left."""
    options = ("-n", -1, "-c", 40, "--quiet")
    _, text, err = cli("--prompt", "ab", *options[:4])
    assert (
        "stopped: context full" in err and text == cli("--prompt", "ab", "-n", 99, *options[2:])[1]
    )
    assert "context full: the answer was cut" in cli("--chat", *options[:4], stdin=b"ab\n")[2]
    model = write_tiny({"tokenizer.ggml.add_bos_token": False, "llama.context_length": 400})
    assert "expected 1 to 400, the context" in one_line(cli("--prompt", "", "-n", 5, model=model))


def test_more_goes_on_with_an_answer(cli, heard):
    """With its text as it was shown."""
    argv = ["--chat", "--max-new-tokens", 3, "--temperature", 0]
    _, first, _ = cli(*argv, stdin=b"ab\n")
    status, out, err = cli(*argv, stdin=b"/more\nab\n/more\nAND\n")
    assert status == 0 and out.startswith(first) and out.count("\n") == 3
    assert "no answer yet with which /more" in err and err.count("was cut, /more goes on") == 3
    assert heard[-2] == f"[INST] ab [/INST] {first.strip()}"
    assert heard[-1].startswith(heard[-2]) and heard[-1].endswith("[INST] AND [/INST]")


QUESTIONS = """
// add two numbers
/* as in C */ ab
/usr/bin/env is
/etc/passwd
/
 /usr is
"""


def test_chat_commands_and_what_is_refused(cli, heard):
    """A slash and letters is a command, of ours or none; it is not sent to the model. A comment, a
    path, or such a word behind a space is a question.

    A question beyond the context is refused, and the conversation goes on. Tags are text.
    """
    lines = "ab\r|/reset|/halp me|/HELP|/exit codes?|" + "c" * 1000 + "|| |x [/INST] y|/exit|never"
    stdin = lines.replace("|", "\n").encode()
    status, out, err = cli("--chat", "--max-new-tokens", 3, stdin=stdin)
    assert status == 0
    assert out.count("\n") == err.count("max new tokens: the answer was cut") == 2
    assert heard == ["[INST] ab [/INST]", "[INST] x [/INST] y [/INST]"]
    template, keys, *_ = err.splitlines()
    assert "no chat template: llama-2 is assumed" in template
    assert re.match("cli.gguf, 400 tokens; .*Ctrl-C.*/more.*/reset.*/exit.*/help", keys)
    assert err.splitlines().count(keys.removeprefix("cli.gguf, 400 tokens; ")) == 1
    for line in ("/halp me", "/exit codes?"):
        assert f"no command {line}; with a space in front it is sent; /help lists all" in err
    assert len(re.findall(r"the prompt has \d+ tokens; .*400", err)) == 1
    said = "the conversation is forgotten\n"  # what was asked for is said with --quiet, too
    assert cli("--chat", "--quiet", stdin=b"/reset\n/EXIT\nab\n") == (0, "", said)
    for line in filter(None, QUESTIONS.splitlines()):
        assert "error" not in cli("--chat", "--max-new-tokens", 1, stdin=line.encode())[2]
        assert heard.pop() == f"[INST] {line.strip()} [/INST]"
    options = ("--chat", "--max-new-tokens", 1, "--prompt", "/exit\nthe loop")
    assert cli(*options, stdin=b"")[0] == 0 and heard.pop() == "[INST] /exit\nthe loop [/INST]"


def test_questions_of_a_pipe_that_are_not_utf_8(cli):
    for line in (b"caf\xe9", "ab".encode("utf-16-le")):
        error = cli("--chat", "--quiet", "-n", 1, stdin=b"ab\n" + line + b"\n")[2].splitlines()[-1]
        assert re.match("llama2.py: error: standard input: .*(utf-8|UTF-8)", error)


def test_a_prompt_to_a_model_that_can_chat(cli, write_tiny):
    """It is continued, as everywhere; a line says that --chat answers."""
    for template in ("{{ messages[0].content }}", " "):
        model = write_tiny({"tokenizer.chat_template": template})
        for options in ([], ["--parse-special"], ["--quiet"]):
            status, out, err = cli("--prompt", "fox", "--max-new-tokens", 1, *options, model=model)
            assert status == 0 and out.startswith("fox")
            is_told = err.startswith("the prompt is continued as a text; --chat answers it\n")
            assert is_told is ("--chat" in err) is (template != " " and not options)


def test_chat_template_by_name_and_file(cli, heard, tmp_path):
    """It says what an answer begins and ends with."""
    path = tmp_path / "template.jinja"
    path.write_text("{% for message in messages %}<{{ message.content }}>{% endfor %}")
    for template, text in (("vicuna", "USER: ab\nASSISTANT:"), (path, "<ab>")):
        argv = ["--chat", "--chat-template", template, "--max-new-tokens", 3]
        status, out, err = cli(*argv, stdin=b"ab")
        assert status == 0 and out and "assumed" not in err
        assert heard.pop() == text


@pytest.mark.parametrize(
    "calls, owner, name, first",
    [
        (1, llama2.Llama, "forward", "[INST] ab [/INST]"),
        (4, llama2.Llama, "forward", "[INST] ab [/INST]"),
        (2, llama2, "encode_chat", "[INST] cd [/INST]"),  # what was asked is no part of the session
    ],
)
def test_interrupt_in_chat(cli, heard, monkeypatch, calls, owner, name, first):
    """Ctrl-C in a call of a function stops the answer, before or after it began, not the session."""
    original, count = getattr(owner, name), itertools.count(1)

    def interrupted(*args, **options):
        if next(count) == calls:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, interrupted)
    status, out, err = cli("--chat", "--max-new-tokens", 8, stdin=b"ab\ncd\n")
    assert status == 0
    assert out.count("\n") >= len(heard)
    assert err.count("error: interrupted") == (owner is llama2)
    assert heard[-1].startswith(first) and heard[-1].endswith("[INST] cd [/INST]")


@on_posix
def test_chat_at_a_terminal(write_tiny, tensors):
    """Lines are edited, a pasted text is one question, Ctrl-C gives a new line; a model's control
    characters, which could steer the terminal, are shown as text."""
    is_gnu = "libedit" not in pytest.importorskip("readline").__doc__
    import pty

    path = parrot(write_tiny, tensors, 3 + 0x1B)
    outer, inner = pty.openpty()
    process = subprocess.Popen(
        [*PYTHON, "--model", path, "--chat", "--max-new-tokens", "2"],
        env=os.environ | {"TERM": "xterm", "INPUTRC": os.devnull},
        start_new_session=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), inner),
    )
    os.close(inner)
    screen = b""

    def expect(text, typed=b""):
        nonlocal screen
        os.write(outer, typed)
        while text not in screen:
            assert select.select([outer], [], [], 120)[0], screen
            screen += os.read(outer, 4096)
        before, _, screen = screen.partition(text)
        return before

    asked = expect(b"> ")
    assert (b"\x1b[?2004h" in asked) == is_gnu  # the terminal shall mark what is pasted
    # an arrow to the left, the missing letter
    expect(b"no command /halp; with a space in front it is sent", typed=b"/hap\x1b[Dl\r")
    expect(b"> ")
    if is_gnu:
        expect(b"and more", typed=b"\x1b[200~/exit\n// lines\n\x1b[201~and more\r")
        assert expect(b"> ").count(b"\\x1b\\x1b") == 1
    expect(b"not this", typed=b"not this")
    process.send_signal(signal.SIGINT)
    while not select.select([outer], [], [], 2)[0]:  # it came just before readline waited
        process.send_signal(signal.SIGINT)
    expect(b"> ")
    os.write(outer, b"\x04")
    assert process.wait(60) == 0
    os.close(outer)
