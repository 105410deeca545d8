"""The house: llama2.py copied alone into a folder, without its part IV, and how long its parts are."""

from __future__ import annotations

import ast
import builtins
import functools
import importlib.util
import io
import re
import subprocess
import sys
import tokenize
from bisect import bisect

import pytest
import torch
from cut import without_part_4

import llama2
from test_llama2 import SCRIPT, TOKENS, assert_close, make_model, needs, quantised

pytestmark = needs("accelerate")  # else there is nothing to cut


@pytest.fixture(params=["alone", "without part IV"])
def copied(request, tmp_path, monkeypatch):
    """llama2.py copied into an empty folder, as a module."""
    text = SCRIPT.read_text("utf-8")
    if request.param != "alone":
        text = without_part_4(text)
    path = tmp_path / "copied_llama2.py"
    path.write_text(text, "utf-8")
    spec = importlib.util.spec_from_file_location("copied_llama2", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "copied_llama2", module)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def test_quantised_models_run(copied, tmp_path, vocabulary, capsys):
    """By torch; if kernels are asked for, with one line that it is slow."""
    path, weights = quantised(vocabulary, tmp_path / "x.gguf", ["Q4_K", "Q8_0"])
    model, _ = copied.load(path)
    expected = make_model(model.config, weights)
    assert_close(model(TOKENS[:2, :9]), expected(TOKENS[:2, :9]))
    argv = ["--model", str(path), "--prompt", "fox", "--max-new-tokens", "3", "--temperature", "0"]
    assert copied.main(argv) == 0
    text, error = capsys.readouterr()
    assert "slow" not in error
    assert copied.main([*argv, "--compile"]) == 0
    again, error = capsys.readouterr()
    assert again == text
    assert error.count("slow") == hasattr(copied, "accelerate")


def test_import_is_quick(monkeypatch):
    """`import llama2` imports torch and what comes with Python, nothing else."""
    original = builtins.__import__
    actual = set()

    def spy(name, env=None, *args):
        if env and env["__name__"] == "llama2":
            actual.add(name.partition(".")[0])
        return original(name, env, *args)

    monkeypatch.delitem(sys.modules, "llama2")
    monkeypatch.setattr(builtins, "__import__", spy)
    importlib.import_module("llama2")
    assert actual - sys.stdlib_module_names == {"torch"}


def test_loading_imports_no_compiler():
    """A second of torch._dynamo, which some of torch's functions import on the meta device."""
    if not llama2.DEFAULT_MODEL.exists():
        pytest.skip("the bundled model is not here")
    code = "import sys, llama2; llama2.load(llama2.DEFAULT_MODEL); assert 'torch._dynamo' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=SCRIPT.parent)


# --------------------------------------------------------------------------------------------------
# Budgets. Tokens are paid for by readers; a dense line that becomes two plain ones costs nothing

BUDGETS = {  # tokens at most, tokens of a line that holds code at most
    "head": (150, 11.5),
    "I": (2750, 11.5),
    "II": (4500, 10.5),
    "III": (11420, 10.5),  # the aim is 11,200
    "IV": (2750, 11.0),
    "V": (2900, 10.0),
}
LONG = {"parse_args"}  # functions above 450 tokens: the options' parser
ADVICE = """Look for what no user would miss: a second way to do one thing, a check or message written
twice, an option nobody needs, code that only tests call. If a line is dense, let one statement do one
thing. If all that is left earns its place, raise the number here, and say in the commit what for."""
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


@functools.cache
def tokens_of(text):
    """The tokens that are code, without comments, docstrings and line ends."""
    docstrings, tokens = set(), []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(node.lineno)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_docstring = token.type == tokenize.STRING and token.start[0] in docstrings
        if token.string and token.type not in SILENT and not is_docstring:
            tokens.append(token)
    return tokens


def code_lines(text):
    """The line of each token that is code, in order."""
    return [token.start[0] for token in tokens_of(text)]


@pytest.mark.parametrize("part", BUDGETS)
def test_parts_keep_their_budgets(part):
    texts = re.split(r"(?m)^(?=# Part \w+: )", SCRIPT.read_text("utf-8"))
    names = ["head"]
    for text in texts[1:]:
        names.append(re.match(r"# Part (\w+)", text)[1])
    assert names == list(BUDGETS)
    lines = code_lines(texts[names.index(part)])
    limit, density = BUDGETS[part]
    assert len(lines) <= limit, ADVICE
    assert len(lines) / len({*lines}) <= density, ADVICE


def test_functions_fit_a_screen_and_few_are_named_once():
    """A loop that can be read from top to bottom is better than four pieces: 450 tokens.

    A function that one place calls costs a jump: 55 of them.
    """
    text = SCRIPT.read_text("utf-8")
    lines = code_lines(text)
    assert len(lines) <= 24250, ADVICE
    words = re.findall(r"\w+", " ".join(token.string for token in tokens_of(text)))
    long, once = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            if bisect(lines, node.end_lineno) - bisect(lines, node.lineno - 1) > 450:
                long.add(node.name)
            if words.count(node.name) == 2 and not node.name.startswith("__"):
                once.add(node.name)
    assert long <= LONG, ADVICE
    assert len(once) <= 55, sorted(once)


def test_few_functions_lie_before_the_first_token(monkeypatch):
    """From main() to the text of the first token of README's first command."""
    if not llama2.DEFAULT_MODEL.exists():
        pytest.skip("the bundled model is not here")
    prompt = "Once upon a time"
    called = set()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename == llama2.__file__ and code.co_name[0] != "<":
            called.add((code.co_firstlineno, code.co_name))

    class Output(io.StringIO):
        def write(self, text):
            if text not in (prompt, ""):
                raise BrokenPipeError  # which ends it quietly
            return len(text)

    monkeypatch.setattr(sys, "stdout", Output())
    sys.setprofile(note)
    try:
        assert llama2.main(["--prompt", prompt, "--quiet"]) == 0
    finally:
        sys.setprofile(None)
    assert len(called) <= 80, sorted(called)
