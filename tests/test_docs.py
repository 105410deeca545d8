"""What the pages say of the code is true: names, tests, tables, the code that README shows."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from test_llama2 import SCRIPT, needs

ROOT = SCRIPT.parent
README, DETAILS = ROOT / "README.md", ROOT / "docs" / "details.md"


def page(path: Path) -> str:
    """A page's text; the test is skipped where llama2.py was copied without it."""
    if not path.exists():
        pytest.skip(f"{path.name} is not here")
    return path.read_text("utf-8")


def names(path: Path) -> set[str]:
    """The functions, classes and methods of a file, methods as Class.method."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        for part in getattr(node, "body", []) if isinstance(node, ast.ClassDef) else []:
            if isinstance(part, ast.FunctionDef):
                found.add(f"{node.name}.{part.name}")
    return found


@needs("accelerate")
def test_details_name_functions_tests_and_lines_that_exist():
    """Each item: the function here, places in the references at a commit, the test."""
    items = re.split(r"^\d+\. ", page(DETAILS), flags=re.MULTILINE)[1:]
    assert len(items) >= 30
    ours = names(SCRIPT)
    tests = set.union(*map(names, [ROOT / "test_llama2.py", *(ROOT / "tests").glob("test_*.py")]))
    for item in items:
        text = " ".join(item.split())
        assert text.startswith("**") and ".** " in text, text
        here, test = re.findall(r"- Here `([\w.]+)`", text), re.findall(r"Test `(\w+)`", text)
        assert len(here) == len(test) == 1, text
        assert here[0] in ours, f"docs/details.md: llama2.py has no {here[0]}"
        assert test[0] in tests, f"docs/details.md: there is no test {test[0]}"
    links = re.findall(
        r"\[(?:Meta|transformers|llama\.cpp) `(.*?)` (\S+)\]\((\S+)\)", page(DETAILS)
    )
    assert len(links) >= 50
    for file, lines, url in links:
        commit = r"/blob/(?:[0-9a-f]{40}|v\d+\.\d+\.\d+)/"
        anchor = "-L".join(lines.split("-"))
        assert re.search(commit, url) and url.endswith(f"/{file}#L{anchor}"), url
