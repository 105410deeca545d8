"""A test of examples/confidence.py: it prints the text and the probabilities of the library."""

import os
import re
import subprocess
import sys

import pytest

import llama2
from test_llama2 import SCRIPT

PROGRAM = SCRIPT.parent / "examples" / "confidence.py"
COMMAND = [sys.executable, PROGRAM, "The wolf", "--seed=5", "--max-new-tokens=40"]


def test_numbers_in_a_pipe_and_shades_in_a_terminal(bundled):
    model, tokenizer = bundled
    prompt = tokenizer.encode("The wolf")
    generation = llama2.generate(model, prompt, llama2.Sampling(seed=5), 40)
    count = len([*generation])
    text = tokenizer.decode(generation.ids)
    chances = llama2.score(model, generation.ids)[-count:].exp()

    numbers, _, table = subprocess.check_output(COMMAND, text=True).partition("\n\nThe least")
    assert re.sub(r"\(\d+%\)", "", numbers) == text
    shown = [float(chance) for chance in re.findall(r"([\d.]+)% \|", table)]
    assert shown == pytest.approx((chances.sort().values[:5] * 100).tolist(), abs=0.1)

    pty = pytest.importorskip("pty")
    outer, inner = pty.openpty()
    subprocess.check_call(COMMAND, stdout=inner)
    shades = os.read(outer, 2**16).decode().replace("\r\n", "\n")
    assert re.sub(r"\x1b\[[\d;]*m", "", shades).startswith(text + "\n\nThe least certain")
    assert shades.count("\x1b[30;48;5;") == numbers.count("%)")
