"""docs/tour.md says what docs/tour.py finds in the model, and its changes do as it says."""

import re
import shlex
import sys

import pytest
import torch

from test_llama2 import SCRIPT, assert_close

pytest.importorskip("matplotlib")
FOLDER = SCRIPT.parent / "docs"
sys.path.insert(0, str(FOLDER))
import tour

PAGE = (FOLDER / "tour.md").read_text("utf-8")
QUICK = [*range(4), *range(5, 10)]  # stations; `python docs/tour.py --check` takes all
pytestmark = pytest.mark.usefixtures("bundled")


@pytest.mark.parametrize("station", QUICK)
def test_the_page_and_its_pictures_show_what_the_model_does(station, capsys):
    assert tour.main(["--check", str(station)]) == 0, capsys.readouterr().out


def test_what_differs_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tour, "PAGE", tmp_path / "tour.md")
    monkeypatch.setattr(tour, "FOLDER", tmp_path)
    tour.PAGE.write_text(PAGE.replace("90%", "91%"), "utf-8")
    for name in ("5-heads.svg", "5-maps.svg"):
        picture = (FOLDER / "tour" / name).read_text("utf-8")
        (tmp_path / name).write_text(picture.replace(",0.0,0.0,0.0,", ",0.0,0.5,0.0,"), "utf-8")
    assert tour.main(["--check", "5"]) == 1
    out = capsys.readouterr().out
    assert "+" in out
    named = re.findall(r"5-\w+(?=.svg)", out)
    assert named == ["5-maps", "5-muted"]  # the latter is not there


def test_the_attention_that_is_drawn_is_the_model_s():
    probe = tour.Probe()
    seen = probe.watch(tour.PROMPT)
    for layer, shares in enumerate(probe.attention(tour.PROMPT)):
        v = probe.heads(seen, layer, "v").repeat_interleave(3, 1)
        fetched = torch.einsum("hts,shd->thd", shares, v).flatten(1)
        expected = seen[f"layers.{layer}.self_attn"]
        assert_close(probe.model.layers[layer].self_attn.o_proj(fetched), expected)


def test_changes_do_as_the_page_says(capsys):
    _, *changes = re.split(r"(?m)^\d\. ", re.search(r"```diff\n(.*?)```", PAGE, re.DOTALL)[1])
    answers = re.findall(r'^\d\. .*?"(.*?)"', PAGE.partition("</summary>")[2], re.MULTILINE)
    command = shlex.split(re.search(r"python llama2\.py (.*)", PAGE)[1])
    for change, answer in zip(changes, answers, strict=True):
        assert tour.with_change(change).main(command) == 0
        assert f"green {answer}" in capsys.readouterr().out.replace("\n", " ")


def test_pictures_suit_a_phone_and_both_modes():
    names = re.findall(r"!\[[^\]]{40,}\]\(tour/(.*?)\)", PAGE)
    pictures = {path.name: path.read_text("utf-8") for path in (FOLDER / "tour").glob("*")}
    assert {*names} == {*pictures}
    assert sum(map(len, pictures.values())) < 600_000
    for text in pictures.values():
        assert len(text) < 60_000
        assert "prefers-color-scheme:dark" in text
        assert 'width="360pt"' in text
        assert min(map(float, re.findall(r"font-size: ([\d.]+)px; font-family", text))) >= 9
