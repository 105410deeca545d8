"""The house: llama2.py copied alone into a folder, without its part III, and how long its parts are."""

from __future__ import annotations

import builtins
import importlib.util
import re
import sys

import pytest
import torch
from cut import without_part_3
from helpers import SCRIPT, TOKENS, assert_close, make_model, needs, quantised

pytestmark = needs("accelerate")  # else there is nothing to cut


@pytest.fixture(params=["alone", "without part III"])
def copied(request, tmp_path, monkeypatch):
    """llama2.py copied into an empty folder, as a module, and whether it has part III."""
    text, whole = SCRIPT.read_text("utf-8"), request.param == "alone"
    path = tmp_path / "copied_llama2.py"
    path.write_text(text if whole else without_part_3(text), "utf-8")
    spec = importlib.util.spec_from_file_location("copied_llama2", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "copied_llama2", module)
    spec.loader.exec_module(module)
    assert whole == hasattr(module, "accelerate") == hasattr(module, "Ranks")
    return module, whole


@torch.no_grad()
def test_quantised_models_run(copied, tmp_path, vocabulary, capsys, monkeypatch):
    """By torch, with one note that it is slow and what to add."""
    llama2, whole = copied
    path, weights = quantised(vocabulary, tmp_path / "x.gguf", ["Q4_K", "Q8_0"])
    wanted = make_model(weights=weights, config=llama2.open_checkpoint(path).config)
    model, _ = llama2.load(path)
    assert_close(model(TOKENS[:2, :9]), wanted(TOKENS[:2, :9]))
    argv = ["--model", str(path), "--prompt", "fox", "--max-new-tokens", "3", "--temperature", "0"]
    assert llama2.main(argv) == 0
    small, error = capsys.readouterr()
    assert "slow" not in error and len(error.splitlines()) == 1
    monkeypatch.setattr(llama2, "is_large", lambda checkpoint: True)
    assert llama2.main([*argv, "--dtype", "float32"]) == 0
    large, error = capsys.readouterr()
    needed = "kernels/cpu.cpp is missing" if whole else "part III"
    assert large == small and error.count("slow") == 1 and needed in error.replace("\\", "/")


def test_import_is_quick(monkeypatch):
    """`import llama2` imports torch and what comes with Python, nothing else."""
    original, found = builtins.__import__, set()

    def spy(name, env=None, *args):
        if env and env["__name__"] == "llama2":
            found.add(name.partition(".")[0])
        return original(name, env, *args)

    monkeypatch.delitem(sys.modules, "llama2")
    monkeypatch.setattr(builtins, "__import__", spy)
    importlib.import_module("llama2")
    assert "json" in found and found - sys.stdlib_module_names == {"torch"}


BUDGETS = {  # lines of each part of llama2.py: at most, and what they are for
    "head": (60, "what it is, how to run it, letters of dimensions, papers: one screen"),
    "I": (410, "the model: read beside the paper in one sitting"),
    "II": (2300, "three forms of files, two kinds of vocabularies; no input is trusted"),
    "III": (660, "kernels, compiled steps, devices, drafts: what must be worth its deletion"),
    "IV": (390, "options, the chat loop, the report"),
}


@pytest.mark.parametrize("part", BUDGETS)
def test_parts_keep_their_budgets(part):
    """Lines are paid for by readers: a part that grows must say why."""
    pieces = re.split(rf"# {'=' * 98}\n# Part (\w+): ", SCRIPT.read_text("utf-8"))
    sizes = [text.count("\n") for text in pieces[::2]]
    lines = dict(zip(["head", *pieces[1::2]], sizes, strict=True))
    assert lines.keys() == BUDGETS.keys()
    most, reason = BUDGETS[part]
    assert lines[part] <= most, (
        f"part {part} ({reason}) has {lines[part]} lines; at most {most}."
        " Look for what no user would miss: a second way to do one thing, a check or message written"
        " twice, an option nobody needs, code that only tests call. Do not join lines or drop comments"
        " for it. If all that is left earns its place, the number is raised here, and the reason says"
        " what for: a decision about the design, to be explained in the commit."
    )
