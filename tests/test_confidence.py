"""A test of examples/confidence.py: it prints the text and the probabilities of the library."""

import re
import runpy

import pytest

import llama2
from test_llama2 import SCRIPT

PROGRAM = str(SCRIPT.parent / "examples" / "confidence.py")


def test_numbers_in_a_pipe_and_shades_in_a_terminal(bundled, capsys, monkeypatch):
    model, tokenizer = bundled
    generation = llama2.generate(model, tokenizer.encode("The wolf"), llama2.Sampling(seed=5), 40)
    count = len([*generation])
    text = tokenizer.decode(generation.ids)
    chances = llama2.score(model, generation.ids)[-count:].exp()
    monkeypatch.setattr("sys.argv", [PROGRAM, "The wolf", "--seed=5", "--max-new-tokens=40"])
    runpy.run_path(PROGRAM)
    numbers, _, table = capsys.readouterr().out.partition("\n\nThe least")
    assert re.sub(r"\(\d+%\)", "", numbers) == text
    shown = [float(chance) for chance in re.findall(r"([\d.]+)% \|", table)]
    assert shown == pytest.approx((chances.sort().values[:5] * 100).tolist(), abs=0.1)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    runpy.run_path(PROGRAM)
    shades = capsys.readouterr().out
    assert re.sub(r"\x1b\[[\d;]*m", "", shades).startswith(text + "\n\nThe least certain")
    assert shades.count("\x1b[30;48;5;") == numbers.count("%)")
