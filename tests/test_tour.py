"""docs/tour.md says what docs/tour.py finds in the model, and its changes do as it says."""

from __future__ import annotations

import importlib.util
import re
import shlex

import pytest
import torch

import llama2
from test_llama2 import SCRIPT, assert_close

pytest.importorskip("matplotlib")
FOLDER = SCRIPT.parent / "docs"
if not (FOLDER / "tour.md").exists() or not llama2.DEFAULT_MODEL.exists():
    pytest.skip("the tour or the bundled model is not here", allow_module_level=True)
PAGE = (FOLDER / "tour.md").read_text("utf-8")
QUICK = [0, 1, 2, 3, 5, 6, 7, 8, 9]  # stations; `python docs/tour.py --check` takes all


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(importlib.sys.modules, path.stem, module)  # which dataclasses look up
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tour():
    threads = torch.get_num_threads()
    yield load_module(FOLDER / "tour.py")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("station", QUICK)
def test_the_page_and_its_pictures_show_what_the_model_does(tour, station, capsys):
    assert tour.main(["--check", str(station)]) == 0, capsys.readouterr().out


def test_what_differs_is_named(tour, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tour, "PAGE", tmp_path / "tour.md")
    monkeypatch.setattr(tour, "FOLDER", tmp_path)
    tour.PAGE.write_text(PAGE.replace("90%", "91%"), "utf-8")
    for name in ("5-heads.svg", "5-maps.svg"):
        picture = (FOLDER / "tour" / name).read_text("utf-8")
        (tmp_path / name).write_text(picture.replace(",0.0,0.0,0.0,", ",0.0,0.5,0.0,"), "utf-8")
    assert tour.main(["--check", "5"]) == 1
    out = capsys.readouterr().out
    assert out.count("+") >= 1
    assert "5-maps.svg" in out
    assert "5-muted.svg" in out  # is not there
    assert "5-heads.svg" not in out


@torch.no_grad()
def test_the_attention_that_is_drawn_is_the_model_s(tour):
    probe = tour.Probe()
    seen = probe.watch(tour.PROMPT)
    for layer, shares in enumerate(probe.attention(tour.PROMPT)):
        v = probe.heads(seen, layer, "v").repeat_interleave(3, 1)
        fetched = torch.einsum("hts,shd->thd", shares, v).flatten(1)
        expected = seen[f"layers.{layer}.self_attn"]
        assert_close(probe.model.layers[layer].self_attn.o_proj(fetched), expected)


@pytest.mark.parametrize("number", range(1, 6))
def test_changes_do_as_the_page_says(number, tmp_path, capsys):
    change = re.split(r"(?m)^\d\. ", re.search(r"```diff\n(.*?)```", PAGE, re.DOTALL)[1])[number]
    answer = re.findall(r'^\d\. .*?"(.*?)"', PAGE.partition("</summary>")[2], re.MULTILINE)[
        number - 1
    ]
    source = SCRIPT.read_text("utf-8")
    for old, new in re.findall(r"^-(.*\n)\+(.*\n)", change, re.MULTILINE):
        source = source.replace(old, new)
    path = tmp_path / "changed_llama2.py"
    path.write_text(source, "utf-8")
    command = shlex.split(re.search(r"python llama2\.py (.*)", PAGE)[1])
    assert load_module(path).main([*command, "--model", str(llama2.DEFAULT_MODEL)]) == 0
    assert f"green {answer}" in capsys.readouterr().out.replace("\n", " ")


def test_pictures_suit_a_phone_and_both_modes():
    alternatives = re.findall(r"!\[([^\]]{40,})\]\(tour/(.*?)\)", PAGE)
    paths = sorted((FOLDER / "tour").glob("*"))
    assert sorted(name for _, name in alternatives) == [path.name for path in paths]
    assert sum(path.stat().st_size for path in paths) < 600_000
    for path in paths:
        text = path.read_text("utf-8")
        assert len(text) < 60_000
        assert "prefers-color-scheme:dark" in text
        assert 'width="360pt"' in text
        assert min(map(float, re.findall(r"font-size: ([\d.]+)px; font-family", text))) >= 9
