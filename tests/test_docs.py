"""What the pages say of the code is true: names, tests, tables, the code that README shows."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
import test_chat
from helpers import SCRIPT, needs

import llama2

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


def table(text: str, header: str) -> list[list[str]]:
    """The cells of the rows of a page's table, whose first header cell is `header`."""
    lines = text.splitlines()
    start = next(
        i for i, line in enumerate(lines) if line.startswith(f"| {header} |".replace("  ", " "))
    )
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def first_cells(header: str) -> list[str]:
    """The names in backquotes in the first column of one of README's tables."""
    return [name for row in table(page(README), header) for name in re.findall("`(.*?)`", row[0])]


def test_readme_shows_the_attention_that_runs():
    source = inspect.getsource(llama2.CausalSelfAttention.forward)
    assert f"```py\n{textwrap.dedent(source)}```" in page(README)


def test_chat_formats_have_a_row_in_readme_and_an_oracle():
    formats = list(llama2.CHAT_FORMAT_NAMES)
    assert first_cells("chat format") == formats, "README's table of chat formats"
    (more,) = re.findall(r"^NAMES = ({.*})$", page(ROOT / "tests" / "test_llama3.py"), re.MULTILINE)
    oracles = {name for _, name, _ in test_chat.FORMATS} | set(ast.literal_eval(more).values())
    assert oracles == set(formats), "the oracles: test_chat.FORMATS, test_llama3.NAMES"
    frozen = {name.rstrip("+") for name, _ in test_chat.IDS} | set(ast.literal_eval(more).values())
    assert frozen == set(formats), "the frozen ids: test_chat.IDS, test_llama3.CHAT_IDS"


REFUSED = {  # what config.json may say of a model, and README's words for what is not supported
    "model_type": "other architectures",
    "quantization_config": "GPTQ, AWQ and bitsandbytes",
    "attention_bias": "biases",
    "mlp_bias": "biases",
    "hidden_act": "other activations",
    "partial_rotary_factor": "head sizes",
    "rope_type": "RoPE scaling",
}


def test_what_is_refused_is_in_readme():
    assert llama2.HF_ACCEPTED.keys() == REFUSED.keys(), "README's row of what is rejected"
    (row,) = [row[1] for row in table(page(README), "") if "rejected" in row[0]]
    assert not [words for words in REFUSED.values() if words not in row]


def test_quantised_types_are_listed_in_readme():
    (listed,) = re.findall(r"Types that stay\s+quantised: (.*?)\.", page(README), re.DOTALL)
    assert re.findall(r"\w+", listed) == [t for t in llama2.GGML_TYPES if t not in llama2.DENSE]


def test_sampling_options_are_in_readme_and_tested():
    (paragraph,) = re.findall(r"^Sampling options .*?\n\n", page(README), re.DOTALL | re.MULTILINE)
    options = {field.name for field in dataclasses.fields(llama2.Sampling)}
    assert set(re.findall("`(.*?)`", paragraph)) == options, "README's paragraph on sampling"
    tests = page(ROOT / "tests" / "test_sampling.py") + page(ROOT / "test_llama2.py")
    assert not [name for name in options if f"{name}=" not in tests and f'"{name}"' not in tests]


def test_readme_is_short():
    lines = page(README).splitlines()
    assert len(lines) < 200
    for line in lines:
        assert len(line) <= 120 or line.startswith("|") or "](" in line, line


def test_workflow_is_valid_and_runs_what_is_promised():
    path = ROOT / ".github" / "workflows" / "ci.yml"
    text = page(path)
    for promised in (
        "ubuntu-22.04",
        "ubuntu-24.04",
        "-arm",
        "macos-",
        "windows-",
        '"3.10"',
        "2.5.1",
    ):
        assert promised in text, promised
    if checker := shutil.which("check-jsonschema"):
        command = [checker, "--builtin-schema", "vendor.github-workflows", path]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## \[(.*?)\]", page(ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == llama2.__version__


def test_recipes_name_what_exists():
    text = page(ROOT / "CONTRIBUTING.md")
    for name in (
        "CHAT_FORMATS",
        "Sampling",
        "SAMPLING_LIMITS",
        "sample",
        "parse_args",
        "GGML_TYPES",
    ):
        assert f"`{name}" in text and hasattr(llama2, name), name
    for name in ("TEMPLATES", "FORMATS", "IDS"):
        assert f"`{name}`" in text and hasattr(test_chat, name), name
