"""Tests of examples/lora.py; PEFT is the oracle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

import llama2

EXAMPLES = Path(llama2.__file__).resolve().parent / "examples"
import lora

from test_llama2 import TALE, make_hf

IDS = torch.tensor([[1, *range(300, 340)]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


def reference():
    """The bundled model as transformers has it."""
    model, _ = llama2.load(llama2.DEFAULT_MODEL, trainable=True)
    return make_hf(model.config, model.state_dict())


def write_adapter(folder, **changes):
    """An adapter that PEFT writes, with a random B; returns its model."""
    options = {"r": 5, "lora_alpha": 11, "target_modules": [*lora.PROJECTIONS]} | changes
    config = peft.LoraConfig(**options)
    model = peft.get_peft_model(reference(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.eval().save_pretrained(folder / "theirs")
    return model


@torch.no_grad()
@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal"])
def test_adapters_of_peft(folder, init):
    where = {"layers_to_transform": [0, 2], "layers_pattern": "layers"}
    expected = write_adapter(folder, r=6, init_lora_weights=init, **where)(IDS).logits
    model, _ = llama2.load(llama2.DEFAULT_MODEL)
    assert (model(IDS) - expected).abs().max() > 0.1
    lora.load_adapter(model, folder / "theirs")
    assert (model(IDS) - expected).abs().max() < 1e-4


@torch.no_grad()
def test_command_line(folder):
    """Train, go on, merge: PEFT and the saved file say what the adapted model says."""
    (folder / "tales.txt").write_text(TALE * 16, "utf-8")
    command = [sys.executable, EXAMPLES / "lora.py", "--adapter", folder / "ours"]
    command += ["--data", folder / "tales.txt", "--steps", "2", "--rate", "0.002"]
    chosen = ["--targets", "q_proj", "k_proj", "down_proj", "--rank", "3"]
    out = ["--out", folder / "tuned.gguf", "--type", "F32"]
    losses = []
    for options in (chosen, out):
        run = subprocess.run([*command, *options], check=False, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        losses += [float(line.split()[-1]) for line in run.stderr.split("\n") if "loss" in line]
    assert losses[-1] < losses[0] and losses[3] == pytest.approx(losses[2], abs=2e-3)
    model, _ = llama2.load(llama2.DEFAULT_MODEL)
    lora.load_adapter(model, folder / "ours")
    trained = [w.any() for name, w in model.state_dict().items() if "lora_B" in name]
    assert all(trained) and len(trained) == 3 * model.config.num_hidden_layers
    ours = model(IDS)
    theirs = peft.PeftModel.from_pretrained(reference(), folder / "ours")
    assert (theirs(IDS).logits - ours).abs().max() < 1e-4
    merged, _ = llama2.load(folder / "tuned.gguf")
    assert (merged(IDS) - ours).abs().max() < 1e-3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"use_dora": True}, "use_dora' is True"),
        ({"bias": "lora_only"}, "bias' is 'lora_only'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights' is 'olora'"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head.* has no place"),
    ],
)
def test_what_does_not_fit(folder, changes, said):
    write_adapter(folder, **changes)
    model, _ = llama2.load(llama2.DEFAULT_MODEL)
    with pytest.raises(ValueError, match=said):
        lora.load_adapter(model, folder / "theirs")


def test_other_models(folder):
    """An adapter of another shape, and one of another type of model."""
    write_adapter(folder)
    for layers, said in ((1, r"layers\.1\..* has no place"), (9, "which does not fit")):
        model = llama2.Llama(llama2.Config(64, 128, layers, 4, 4, 512))
        with pytest.raises(ValueError, match=said):
            lora.load_adapter(model, folder / "theirs")
    settings = folder / "theirs" / "adapter_config.json"
    weights = folder / "theirs" / "adapter_model.safetensors"
    for text, said in (
        ('{"peft_type": "IA3"}', "peft_type' is 'IA3'"),
        ('{"r": 1000000000000, "lora_alpha": 1}', "r is 1000000000000 .* have r .5."),
        ('{"r": 5}', "lora_alpha None"),
        ('{"r": 5, "lora_alpha": NaN}', "lora_alpha nan"),
        ("[]", "damaged"),
        ("[" * 9999, "damaged"),
    ):
        settings.write_text(text)
        with pytest.raises(ValueError, match=said):
            lora.load_adapter(model, folder / "theirs")
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match="damaged"):
        lora.load_adapter(model, folder / "theirs")
