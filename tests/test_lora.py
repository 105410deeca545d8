"""Tests of examples/lora.py; PEFT is the oracle."""

import subprocess
import sys

import pytest
import torch

peft = pytest.importorskip("peft")

import lora
from test_hostile import contents, lowered

import llama2
from test_llama2 import TALE, make_hf, raises

IDS = torch.tensor([[1, *range(300, 340)]])
pytestmark = pytest.mark.usefixtures("bundled")


def reference():
    """The bundled model as transformers has it."""
    model, _ = llama2.load(llama2.DEFAULT_MODEL, trainable=True)
    return make_hf(model.config, model.state_dict())


def write_adapter(folder, **options):
    """An adapter that PEFT writes, with a random B; returns its model."""
    config = peft.LoraConfig(lora_alpha=11, target_modules=[*lora.PROJECTIONS], **options)
    model = peft.get_peft_model(reference(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.eval().save_pretrained(folder)
    return model


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal"])
def test_adapters_of_peft(tmp_path, init):
    where = {"layers_to_transform": [0, 2], "layers_pattern": "layers"}
    expected = write_adapter(tmp_path, r=6, init_lora_weights=init, **where)(IDS).logits
    model, _ = llama2.load(llama2.DEFAULT_MODEL)
    assert (model(IDS) - expected).abs().max() > 0.1
    lora.load_adapter(model, tmp_path)
    assert (model(IDS) - expected).abs().max() < 1e-4


def test_command_line(tmp_path):
    """Train, go on, merge: PEFT and the saved file say what the adapted model says."""
    (tmp_path / "tales").write_text(TALE * 16, "utf-8")
    losses = []
    for options in ("--targets q_proj k_proj down_proj --rank 3", "--out tuned.gguf --type F32"):
        options += " --adapter ours --data tales --steps 2 --rate 0.002"
        command = [sys.executable, lora.__file__, *options.split()]
        run = subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, text=True)
        losses += [float(line.split()[-1]) for line in run.stderr.split("\n") if "loss" in line]
    assert losses[-1] < losses[0] and losses[3] == pytest.approx(losses[2], abs=2e-3)
    model, _ = llama2.load(llama2.DEFAULT_MODEL)
    lora.load_adapter(model, tmp_path / "ours")
    trained = [w.any() for name, w in model.state_dict().items() if "lora_B" in name]
    assert all(trained) and len(trained) == 3 * model.config.num_hidden_layers
    ours = model(IDS)
    theirs = peft.PeftModel.from_pretrained(reference(), tmp_path / "ours")
    assert (theirs(IDS).logits - ours).abs().max() < 1e-4
    merged, _ = llama2.load(tmp_path / "tuned.gguf")
    assert (merged(IDS) - ours).abs().max() < 1e-3


DIALOGUE = (
    '{"messages": [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B",'
    '"weight": 0}, {"role": "user", "content": "C"}, {"role": "assistant", "content": "D"}]}\n'
)


def test_dialogues(tmp_path):
    """What the assistant says is learned, unless its weight is 0."""
    path = tmp_path / "lines"
    path.write_text(DIALOGUE * 10)
    _, tokenizer = llama2.load(llama2.DEFAULT_MODEL)
    samples, _ = lora.read_dialogues(path, tokenizer, "llama-2")
    for tokens, learned in samples:
        assert tokens[learned].tolist() == tokenizer.encode("D </s>", bos=False, parse_special=True)


@torch.no_grad()
def test_a_full_disk_is_an_error_of_the_system(model_path, tmp_path):
    """Not of safetensors; the adapter of before stays."""
    model, _ = llama2.load(model_path)
    lora.add_adapters(model, ["q_proj"], 8, 1.0)
    lora.save_adapter(model, tmp_path)
    old = contents(tmp_path)
    with lowered("RLIMIT_FSIZE", 1000), pytest.raises(OSError, match="too large.*adapter_model"):
        lora.save_adapter(model, tmp_path)
    assert contents(tmp_path) == old


def test_what_does_not_fit(tmp_path):
    """An adapter of another shape or type, settings that nobody writes, a damaged file."""
    write_adapter(tmp_path, r=5)

    def refused(said, layers=9):
        model = llama2.Llama(llama2.Config(64, 128, layers, 4, 4, 512))
        raises(said, lora.load_adapter, model, tmp_path)

    refused("which does not fit")
    refused(r"layers\.1\..* has no place", layers=1)
    peft.LoraConfig(use_dora=True).save_pretrained(tmp_path)
    refused("use_dora' is True")
    peft.LoraConfig(init_lora_weights="olora").save_pretrained(tmp_path)
    refused("init_lora_weights' is 'olora'")
    for text, said in {
        "[]": "damaged",
        "[" * 9999: "damaged",
        '{"peft_type": "IA3"}': "peft_type' is 'IA3'",
        '{"r": 1000000000000, "lora_alpha": 1}': "r is 1000000000000 .* have r .5.",
        '{"r": 5}': "lora_alpha None",
        '{"r": 5, "lora_alpha": NaN}': "lora_alpha nan",
    }.items():
        (tmp_path / "adapter_config.json").write_text(text)
        refused(said)
    weights = tmp_path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    refused("damaged")  # before the settings are
