"""What other platforms lack, taken away here: Windows, macOS."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import llama2
from test_llama2 import quantised


def test_windows_has_neither_proc_nor_resource(cli, monkeypatch):
    """Memory is then unknown: nothing is refused, and all runs."""

    def read_text(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setitem(sys.modules, "resource", None)  # importing it fails
    status, _, err = cli("--prompt", "a", "--max-new-tokens", 3)
    assert status == 0 and "stopped: " in err


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="MPS is there")
def test_quantised_files_prefer_the_cpu_to_mps(tmp_path, monkeypatch, cli_path, vocabulary):
    """MPS, which would unpack them anew for every token, is taken for dense weights."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["Q8_0"])
    assert llama2.load(path, "auto")[0].norm.weight.device.type == "cpu"
    with pytest.raises(ValueError, match="mps"):  # which this torch does not have
        llama2.load(cli_path, "auto")
