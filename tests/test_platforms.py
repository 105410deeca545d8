"""What other platforms lack, taken away here: Windows, macOS."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

import llama2


def test_windows_has_neither_sysconf_nor_resource(cli, monkeypatch):
    """Memory is then unknown: nothing is refused, and all runs."""
    read_text = Path.read_text

    def hidden(path, *args, **kwargs):
        if path.parts[1:2] in (("proc",), ("sys",)):
            raise FileNotFoundError(path)
        return read_text(path, *args, **kwargs)

    monkeypatch.delattr(os, "sysconf", raising=False)
    monkeypatch.setitem(sys.modules, "resource", None)  # importing it fails
    monkeypatch.setattr(Path, "read_text", hidden)
    status, out, err = cli("--prompt", "a", "--max-new-tokens", 3)
    assert (status, out[0]) == (0, "a")
    assert "stopped: " in err


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="MPS is there")
def test_quantised_files_prefer_the_cpu_to_mps(tmp_path, monkeypatch, cli_path):
    """MPS, which would unpack them anew for every token, is taken for dense weights."""
    llama2.save_gguf(llama2.open_checkpoint(cli_path), tmp_path / "x.gguf", "Q8_0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    model, _ = llama2.load(tmp_path / "x.gguf", "auto")
    assert model.norm.weight.device.type == "cpu"
    with pytest.raises(ValueError, match="mps"):  # which this torch does not have
        llama2.load(cli_path, "auto")
