"""Other surroundings: what Windows and macOS lack, taken away here, and torch's defaults."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_config import LLAMA_3

import llama2
from test_llama2 import quantised, raises


def test_windows_has_neither_proc_nor_resource(cli, monkeypatch):
    """Memory is then unknown: nothing is refused, and all runs."""

    def read_text(path):
        raise FileNotFoundError(path)

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setitem(sys.modules, "resource", None)  # importing it fails
    status, _, err = cli("--prompt", "a", "--max-new-tokens", 3)
    assert status == 0 and "stopped: " in err


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="MPS is there")
def test_quantised_files_prefer_the_cpu_to_mps(tmp_path, monkeypatch, cli_path):
    """MPS, which would unpack them anew for every token, is taken for dense weights."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    path, _ = quantised(tmp_path / "x.gguf", "Q8_0")
    assert llama2.load(path, "auto")[0].norm.weight.device.type == "cpu"
    raises("mps", llama2.load, cli_path, "auto")  # which this torch does not have


def computed(path, **options):
    """What a model computes: log-probabilities with a cache, logits without one, new ids."""
    model, _ = llama2.load(path, **options)
    ids = [*range(9)]
    new = [*llama2.generate(model, ids, llama2.Sampling(seed=1), 3, stop_ids=())]
    logits = model(torch.tensor([ids], device="cpu"))
    return llama2.score(model, ids).tolist(), logits.tolist(), new


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"])
def test_torchs_defaults_change_no_bit(write_model, tmp_path, default):
    """As gpt-fast, torchtune and Meta's own code set them. Models that run, and that are trained."""
    quantised(tmp_path / "x.gguf", "Q4_K F16 IQ4_NL")
    for path in (tmp_path / "x.gguf", write_model({"rope_scaling": LLAMA_3})):
        for options in ({"compile": True}, {"trainable": True}):
            expected = computed(path, **options)
            try:
                (torch.set_default_device if default == "meta" else torch.set_default_dtype)(
                    default
                )
                assert computed(path, **options) == expected
            finally:
                torch.set_default_device(None)
                torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("ggml_type, dtype", [("BF16", "bfloat16"), ("F16", "float16")])
def test_mps_has_float16_but_for_bfloat16(tmp_path, monkeypatch, ggml_type, dtype):
    """Such a model may overflow float16."""
    path, _ = quantised(tmp_path / "x.gguf", ggml_type)
    checkpoint = llama2.open_checkpoint(path)
    mps = SimpleNamespace(device=torch.device("mps"))
    monkeypatch.setattr(torch, "empty", lambda *_, **__: mps)
    plan = llama2.plan_loading(checkpoint, "mps", "auto")
    assert plan.dtype == getattr(torch, dtype)
