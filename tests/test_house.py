"""The house: llama2.py copied alone, how it opens kernels/, and how long its parts are."""

import ast
import builtins
import importlib
import io
import re
import shutil
import sys
import tokenize
from bisect import bisect
from unittest.mock import MagicMock, patch

import pytest
import torch

import llama2
from test_llama2 import SCRIPT, TOKENS, assert_close, make_model, needs_kernels, quantised, ran


def test_quantised_models_run(tmp_path, capsys, monkeypatch, no_grad):
    """Copied alone: by torch; if kernels are asked for, with one line that it is slow."""
    shutil.copy(SCRIPT, tmp_path / "copied.py")
    monkeypatch.syspath_prepend(tmp_path)
    copied = importlib.import_module("copied")
    path, weights = quantised(tmp_path / "x.gguf", "Q4_K Q8_0")
    model, _ = copied.load(path)
    expected = make_model(model.config, weights)
    assert_close(model(TOKENS[:2, :9]), expected(TOKENS[:2, :9]))
    argv = ["--model", str(path), "--prompt=fox", "--max-new-tokens=3", "--temperature=0"]
    assert copied.main(argv) == 0
    text, error = capsys.readouterr()
    assert "slow" not in error
    assert copied.main([*argv, "--compile"]) == 0
    again, error = capsys.readouterr()
    assert again == text
    assert error.count("slow") == 1 and f"{copied.KERNELS} is missing" in error
    assert copied.load_kernels() is None
    assert copied.accelerate(model) is model and type(model) is copied.Llama


def test_import_is_quick(monkeypatch):
    """`import llama2` imports torch and what comes with Python, nothing else."""
    monkeypatch.delitem(sys.modules, "llama2")
    with patch("builtins.__import__", wraps=builtins.__import__) as spy:
        importlib.import_module("llama2")
    calls = [call.args for call in spy.call_args_list if call.args[1:]]
    names = {args[0].partition(".")[0] for args in calls if args[1]["__name__"] == "llama2"}
    assert names - sys.stdlib_module_names == {"torch"}


def run_in_a_new_process(code, folder=SCRIPT.parent, *arguments):
    """Run code in which `llama2` is the one of a folder."""
    status, *said = ran(sys.executable, "-c", code, *arguments, cwd=folder)
    assert status == 0, said


def test_loading_imports_no_compiler(bundled):
    """A second of torch._dynamo, which some of torch's functions import on the meta device."""
    code = "import sys, llama2; llama2.load(llama2.DEFAULT_MODEL); assert 'torch._dynamo' not in sys.modules"
    run_in_a_new_process(code)


@needs_kernels
def test_kernels_does_not_hide_the_package_of_this_name():
    """transformers looks for PyPI's `kernels`; a plain folder is not taken for it."""
    pytest.importorskip("transformers")
    code = """
import sys; sys.path.insert(0, "")
import transformers.integrations.hub_kernels
from transformers.utils import is_kernels_available
assert not is_kernels_available() or hasattr(__import__("kernels"), "get_kernel")
"""
    run_in_a_new_process(code)


@needs_kernels
@pytest.mark.parametrize("deleted", [False, True])
def test_pickles_of_accelerated_models(tmp_path, native, deleted):
    """They load in a process that has only imported llama2; without kernels/, as plain classes."""
    path, _ = quantised(tmp_path / "x.gguf", "Q4_K Q8_0")
    model, _ = llama2.load(path, compile=True)
    names = {type(module).__name__ for module in model.modules()}
    assert {"NativeBlock", "NativeLinear"} < names
    with torch.no_grad():
        torch.save((model, TOKENS[:1, :9], model(TOKENS[:1, :9])), tmp_path / "model.pt")
    folder = SCRIPT.parent
    if deleted:
        folder = tmp_path
        shutil.copy(SCRIPT, folder)
    code = """
import copy, sys, warnings
sys.path.insert(0, "")
warnings.simplefilter("ignore")
import llama2, torch
assert not [name for name in sys.modules if name.startswith("kernels")]
model, tokens, expected = torch.load(sys.argv[1], weights_only=False)
native = "NativeBlock" in {type(module).__name__ for module in model.modules()}
assert native == (sys.argv[2] == "False")
assert isinstance(model.layers[0].mlp.up_proj, llama2.QuantizedLinear)
for m in (model, copy.deepcopy(model)):
    with torch.no_grad():
        torch.testing.assert_close(m(tokens), expected, atol=1e-4, rtol=1e-4)
"""
    run_in_a_new_process(code, folder, tmp_path / "model.pt", deleted)


@needs_kernels
def test_each_copy_has_kernels_of_its_own(tmp_path, monkeypatch, native, no_grad):
    """Renamed, in a package, and twice under one name in one process."""
    path, _ = quantised(tmp_path / "x.gguf", "Q4_K Q8_0")
    expected = llama2.load(path, compile=True)[0](TOKENS[:1, :9])
    for folder in (tmp_path, tmp_path / "package"):
        folder.mkdir(exist_ok=True)
        shutil.copy(SCRIPT, folder / "other.py")
        shutil.copytree(llama2.KERNELS, folder / "kernels")
    monkeypatch.syspath_prepend(tmp_path)
    modules = [llama2]
    for name in ("other", "other", "package.other"):
        sys.modules.pop(name, None)
        modules.append(importlib.import_module(name))
    for module in modules:
        model, _ = module.load(path, compile=True)
        block = type(model.layers[0])
        assert issubclass(block, module.Block) and block is module.NativeBlock
        assert block.__module__ == module.__name__
        assert torch.equal(model(TOKENS[:1, :9]), expected)
    assert len({module.NativeBlock for module in modules}) == 4
    with pytest.raises(AttributeError, match="no attribute 'NativeNorm'"):
        _ = llama2.NativeNorm
    for name in ("other", "package.other", "package"):
        del sys.modules[name]


# --------------------------------------------------------------------------------------------------
# Budgets. Tokens are paid for by readers; a dense line that becomes two plain ones costs nothing

BUDGETS = {  # tokens at most, tokens of a line that holds code at most
    "head": (60, 11.5),
    "I": (2760, 11.0),
    "II": (5470, 9.0),
    "III": (10080, 9.2),
    "IV": (3080, 9.0),
}
ALL = 21430  # tokens of the file
KERNELS = 1800  # lines of kernels/*.cpp and *.h, as clang-format writes them
KERNELS_PYTHON = (10500, 12.5)  # tokens of kernels/*.py at most, tokens of a line at most
LONGEST = 450  # tokens of a function: a loop that can be read from top to bottom is better than four pieces
ONCE = 26  # functions that are named in one place, each of which costs a jump
DEEP = 86  # functions from main() to the text of the first token of README's first command
ADVICE = """Look for what no user would miss: a second way to do one thing, a check or message written
twice, an option nobody needs, code that only tests call. If a line is dense, let one statement do one
thing. If all that is left earns its place, raise the number here, and say in the commit what for."""


def code_of(text):
    """The tokens that are code, without comments, docstrings and line ends; the line of each; all
    lines that they cover."""
    tokens, lines, covered = [], [], set()
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    docstrings = {node.lineno for node in nodes if isinstance(node.value, ast.Constant)}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_code = token.string.strip() and token.type != tokenize.COMMENT
        if is_code and token.start[0] not in docstrings:
            tokens.append(token.string)
            lines.append(token.start[0])
            covered |= {*range(token.start[0], token.end[0] + 1)}
    return tokens, lines, covered


def test_parts_keep_their_budgets():
    parts = ["head", *re.split(r"(?m)^# Part (\w+): .*", SCRIPT.read_text("utf-8"))]
    texts = dict(zip(parts[::2], parts[1::2]))
    assert [*texts] == [*BUDGETS]
    for part, (limit, density) in BUDGETS.items():
        tokens, _, covered = code_of(texts[part])
        assert len(tokens) <= limit, (part, ADVICE)
        assert len(tokens) / len(covered) <= density, (part, ADVICE)


@needs_kernels
def test_kernels_keep_their_budget():
    files = [f for f in llama2.KERNELS.iterdir() if f.suffix in (".cpp", ".h")]
    assert files and sum(f.read_text("utf-8").count("\n") for f in files) <= KERNELS, ADVICE
    counts = [code_of(f.read_text("utf-8"))[1:] for f in llama2.KERNELS.glob("*.py")]
    count = sum(len(lines) for lines, _ in counts)
    limit, density = KERNELS_PYTHON
    assert count <= limit and count / sum(len(covered) for _, covered in counts) <= density, ADVICE


def test_functions_fit_a_screen_and_few_are_named_once():
    text = SCRIPT.read_text("utf-8")
    tokens, lines, _ = code_of(text)
    words = re.findall(r"\w+", " ".join(tokens))
    assert len(lines) <= ALL, ADVICE
    long, once = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef):
            if bisect(lines, node.end_lineno) - bisect(lines, node.lineno - 1) > LONGEST:
                long.add(node.name)
            if words.count(node.name) == 2 and not node.name.startswith("__"):
                once.add(node.name)
    assert long <= {"parse_args"}, ADVICE  # the options' parser
    assert len(once) <= ONCE, sorted(once)


def test_few_functions_lie_before_the_first_token(bundled, monkeypatch):
    written = MagicMock(side_effect=[None, BrokenPipeError])  # the prompt; what ends it quietly
    monkeypatch.setattr(llama2, "write", written)
    called = set()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename == llama2.__file__ and code.co_name[0] != "<":
            called.add((code.co_firstlineno, code.co_name))

    sys.setprofile(note)
    try:
        assert llama2.main(["--prompt", "Once upon a time", "--quiet"]) == 0
    finally:
        sys.setprofile(None)
    assert len(called) <= DEEP, sorted(called)
