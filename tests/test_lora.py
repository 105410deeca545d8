"""Tests of examples/lora.py; PEFT is the oracle."""

import dataclasses
import json
import re
import runpy
import sys

import pytest
import torch

peft = pytest.importorskip("peft")

import lora
from test_hostile import contents, lowered
from training import adapters
from training.dialogues import Sample

import llama2
from test_llama2 import TALE, make_hf, raises, ran

IDS = torch.tensor([[1, *range(300, 340)]])
pytestmark = pytest.mark.usefixtures("bundled")


def reference():
    """The bundled model as transformers has it."""
    model, _ = llama2.load(llama2.DEFAULT_MODEL, trainable=True)
    return make_hf(model.config, model.state_dict())


def write_adapter(folder, **options):
    """An adapter that PEFT writes, with a random B; returns its model."""
    config = peft.LoraConfig(lora_alpha=11, target_modules=[*adapters.PROJECTIONS], **options)
    model = peft.get_peft_model(reference(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.eval().save_pretrained(folder)
    return model


def test_samples_together_equal_samples_alone():
    """Padded to one length: the mean over all that is learned, as transformers has it."""
    model, _ = llama2.load(llama2.DEFAULT_MODEL)
    masks = [0, 0, 1, 1], [0, 1, 1, 0, 1, 1, 1], [0, 0, 0, 1, 1]
    samples = [
        Sample(IDS[0, i : i + len(mask)], torch.tensor(mask) > 0, "")
        for i, mask in enumerate(masks)
    ]
    together = lora.loss_of(model, samples)
    sums = [lora.loss_of(model, [sample]) * sample.learned.sum() for sample in samples]
    torch.testing.assert_close(together, sum(sums) / sum(map(sum, masks)))
    logits = model(IDS[:, 1:7])[0]
    labels = torch.where(samples[1].learned, samples[1].tokens, -100)[1:]
    expected = torch.nn.functional.cross_entropy(logits, labels)
    torch.testing.assert_close(lora.loss_of(model, [samples[1]]), expected)


@pytest.mark.parametrize("init", [True, "gaussian", "orthogonal"])
def test_adapters_of_peft(tmp_path, init):
    where = {"layers_to_transform": [0, 2], "layers_pattern": "layers"}
    expected = write_adapter(tmp_path, r=6, init_lora_weights=init, **where)(IDS).logits
    model, _ = llama2.load(llama2.DEFAULT_MODEL)
    assert (model(IDS) - expected).abs().max() > 0.1
    adapters.load_adapter(model, tmp_path)
    assert (model(IDS) - expected).abs().max() < 1e-4


def test_command_line(tmp_path):
    """Train, go on, merge: PEFT and the saved file say what the adapted model says."""
    (tmp_path / "tales").write_text(TALE * 16, "utf-8")
    losses = []
    for options in ("--targets q_proj k_proj down_proj --rank 3", "--out tuned.gguf --type F32"):
        options += " --adapter ours --data tales --steps 2 --rate 0.002"
        *_, said = ran(sys.executable, lora.__file__, *options.split(), cwd=tmp_path)
        losses += [float(line.split()[-1]) for line in said.split("\n") if "loss" in line]
    assert losses[-1] < losses[0] and losses[3] == pytest.approx(losses[2], abs=2e-3)
    model, _ = llama2.load(llama2.DEFAULT_MODEL)
    adapters.load_adapter(model, tmp_path / "ours")
    trained = [w.any() for name, w in model.state_dict().items() if "lora_B" in name]
    assert all(trained) and len(trained) == 3 * model.config.num_hidden_layers
    ours = model(IDS)
    theirs = peft.PeftModel.from_pretrained(reference(), tmp_path / "ours")
    assert (theirs(IDS).logits - ours).abs().max() < 1e-4
    assert said.endswith("\nwrote tuned.gguf\n")
    merged, _ = llama2.load(tmp_path / "tuned.gguf")
    assert (merged(IDS) - ours).abs().max() < 1e-3


def row(answer, question="hi"):
    said = {"role": "assistant", "content": answer}
    return json.dumps({"messages": [{"role": "user", "content": question}, said]}) + "\n"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """run(options) -> exit status, stderr of lora.py in a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def run(options):
        monkeypatch.setattr("sys.argv", ["lora.py", *options.split()])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(lora.__file__, run_name="__main__")
        return end.value.code, capsys.readouterr().err

    return run


def test_dialogues(tmp_path, run, monkeypatch):
    """What the assistant says is learned, by SentencePiece, too; rows that are too long are not."""
    assistant = "Once upon a time"
    rows = [row(assistant)] * 20 + [row(assistant, "long " * 999)]
    rows[4] = row("x " * 999)
    (tmp_path / "rows.JSONL").write_text("".join(rows))
    _, tokenizer = llama2.load(llama2.DEFAULT_MODEL)
    samples, held_out = lora.read_dialogues(tmp_path / "rows.JSONL", tokenizer, "llama-2")
    expected = tokenizer.encode(f"{assistant} </s>", bos=False, parse_special=True)
    assert len(samples) == 18 and len(held_out) == 3
    for tokens, learned in samples[5:]:
        assert tokens[learned].tolist() == expected
    command = "--data rows.JSONL --chat-template llama-2 --adapter ours --steps 5"
    status, said = run(command)
    tokens = 17 * len(expected)
    assert status == 0
    assert said.endswith(
        f"learned from 17 rows, 17 answers, {tokens} tokens; left out: 2 rows of more than 512"
        " tokens, the model's limit, as line 5, line 21\n"
    )
    status, said = run(f"{command} --strict")
    assert status == 2 and "2 rows of more than 512 tokens" in said and "[" not in said
    status, said = run(f"{command} --steps 1")
    assert "learned from 4 rows, 4 answers" in said
    model, _ = llama2.load(llama2.DEFAULT_MODEL)
    model.config = dataclasses.replace(model.config, sliding_window=20)
    monkeypatch.setattr("llama2.load", lambda path: (model, tokenizer))
    status, said = run(f"{command} --adapter new --strict")
    assert "21 rows of more than 20 tokens" in said
    (tmp_path / "tales").write_text(TALE * 16, "utf-8")
    status, said = run("--data tales --steps 1 --adapter new")
    assert said.endswith("learned from 4 rows, 0 answers, 76 tokens\n")


def test_data_that_is_refused_before_the_first_step(tmp_path, run):
    model = f"--model {llama2.DEFAULT_MODEL} --adapter ours --chat-template chatml --data"
    for name, text, expected in (
        ("a.jsonl", row("a") * 9, "a.jsonl: there are 9 dialogues; expected 10 or more"),
        (
            "a.json",
            row("a") * 20 + "{}",
            "a.json: 1 rows cannot be learned from: line 21: expected messages",
        ),
        ("a.ndjson", "[]", "there are 0 dialogues"),
        ("a.txt", row("a") * 99, "a.txt: the text is JSON; give it a name that ends in .jsonl"),
        ("a", f"\ufeff[\n  {row('a')}]" * 99, "a: the text is JSON"),
        ("b.txt", "Once upon a time", "b.txt: the text has . tokens; expected 2570 or more"),
    ):
        (tmp_path / name).write_text(text, "utf-8")
        status, said = run(f"{model} {name}")
        assert status == 2 and re.search(expected, said) and said.count("\n") == 1, said
        assert not (tmp_path / "ours").exists()


def test_settings_of_an_adapter_that_exists(tmp_path, run):
    """Options may repeat them, not differ."""
    (tmp_path / "rows.jsonl").write_text(row("a") * 10)
    command = "--data rows.jsonl --chat-template chatml --adapter ours --steps 1"
    assert run(f"{command} --rank 3 --alpha 5 --targets v_proj up_proj")[0] == 0
    assert run(f"{command} --rank 3 --alpha 5 --targets up_proj v_proj")[0] == 0
    before = contents(tmp_path / "ours")
    for option, said in {
        "--rank 8": "r is 3, not 8",
        "--alpha 16": "lora_alpha is 5.0, not 16.0",
        "--targets v_proj": "target_modules is .'up_proj', 'v_proj'., not .'v_proj'.",
    }.items():
        for options in (f"{command} {option}", f"--adapter ours --out new.gguf {option}"):
            status, error = run(options)
            assert status == 2 and re.search(f"ours: its {said}: name a new folder", error)
    assert contents(tmp_path / "ours") == before and not (tmp_path / "new.gguf").exists()


def test_an_interrupt_keeps_what_was_learned(tmp_path, run, monkeypatch):
    (tmp_path / "tales").write_text(TALE * 16, "utf-8")
    step = torch.optim.AdamW.step

    def interrupted(optimizer):
        step(optimizer)
        raise KeyboardInterrupt

    monkeypatch.setattr("torch.optim.AdamW.step", interrupted)
    status, said = run("--data tales --adapter ours")
    assert status == 130
    assert said.endswith("is kept\nlearned from 4 rows, 0 answers, 1024 tokens\n")
    model, _ = llama2.load(llama2.DEFAULT_MODEL)
    adapters.load_adapter(model, tmp_path / "ours")


def test_a_full_disk_is_an_error_of_the_system(model_path, tmp_path, no_grad):
    """Not of safetensors; the adapter of before stays."""
    model, _ = llama2.load(model_path)
    adapters.add_adapters(model, ["q_proj"], 8, 1.0)
    adapters.save_adapter(model, tmp_path)
    old = contents(tmp_path)
    model.lora_settings["lora_alpha"] = 2.0
    for limit, name in ((1000, "adapter_model"), (10, "adapter_config")):
        with lowered("RLIMIT_FSIZE", limit), pytest.raises(OSError, match=f"too large.*{name}"):
            adapters.save_adapter(model, tmp_path)
        assert contents(tmp_path) == old


def test_what_does_not_fit(tmp_path):
    """An adapter of another shape or type, settings that nobody writes, a damaged file."""
    write_adapter(tmp_path, r=5)

    def refused(said, layers=9):
        model = llama2.Llama(llama2.Config(64, 128, layers, 4, 4, 512))
        raises(said, adapters.load_adapter, model, tmp_path)

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
