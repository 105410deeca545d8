"""Families of models in their published forms, small: the table of docs/usage.md is tried.

families.json has of each what its files say, but for sizes, which keep their ratios, vocabularies,
which keep their method, special tokens and flags, and long templates, which keep their traits.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import save
import torch
from save import save_folder, save_gguf
from test_chat import FAMILIES as CHATS
from test_chat import TOOL, assert_as_transformers
from test_config import USAGE
from test_llama3 import published_json
from test_vocabularies import engine_of, llama2_json, trained

import llama2
from test_llama2 import (
    SHAPE,
    TALE,
    TOKENS,
    assert_close,
    cases,
    dialogue,
    hf_state,
    make_weights,
    raises,
    safetensors,
    write_files,
)

tokenizers = pytest.importorskip("tokenizers")
DATA = json.loads(Path(__file__).with_name("families.json").read_text("utf-8"))
FAMILIES, REFUSED = DATA["families"], DATA["refused"]
TEMPLATES = {name: chat[0] for name, chat in CHATS.items()} | DATA["templates"]
TEXTS = [
    TALE[: TALE.index("<s>")],
    "a fox's 12345 1.5  ",
    "\n\tif x:\n        y",
    "\u65e5 \U0001f600",
]
DIALOGUES = [dialogue(text) for text in ("u:hi", "u:the~fox a:it~ran~ u:so", "s:S u:hi a:ran")]


def write_family(path, family):
    """A directory as it is published, with random weights."""
    if "pre" in family:  # llama.cpp's name for how words are cut
        steps = llama2.PRE_TOKENIZERS[family["pre"]]
        content = published_json("gpt-2", added=())
        content["pre_tokenizer"]["pretokenizers"] = steps
        content["model"]["ignore_merges"] = family["pre"] in llama2.LIKE_LLAMA_3
    else:
        trained(path, **family.get("trained", {}))
        ours = llama2.Tokenizer.from_file(path / "tokenizer.model")
        content = llama2_json(ours, family.get("json") == "legacy")
    engine = engine_of(content)
    for name in ("special", "plain"):
        options = {"special": name == "special", "normalized": False}
        added = [tokenizers.AddedToken(text, **options) for text in family.get(name, [])]
        engine.add_tokens(added)
    if "post" in family:
        bos = tuple(family["post"])
        engine.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos[0]} $A", special_tokens=[bos]
        )
    if "pre" in family or "json" in family:
        engine.save(str(path / "tokenizer.json"))
    added = {i: token.__getstate__() for i, token in engine.get_added_tokens_decoder().items()}
    template = TEMPLATES.get(family.get("template"))
    settings = family["settings"] | {"added_tokens_decoder": added, "chat_template": template}
    names = {*SHAPE, "head_dim", "tie_word_embeddings"} & family["config"].keys()
    config = llama2.Config(**{name: family["config"][name] for name in names})
    files = {"config.json": family["config"], "tokenizer_config.json": settings}
    files["generation_config.json"] = family.get("generation", {})
    files["model.safetensors"] = safetensors(hf_state(config, make_weights(config, scale=0.15)))
    write_files(path, files)


def ends(model, tokenizer):
    """The texts of all that ends an answer."""
    stops = llama2.chat_stops(tokenizer) if tokenizer.chat_template else llama2.ChatStops([], [])
    config = model.config
    ids = {config.eos_token_id, *config.stop_token_ids, tokenizer.eos_id, *stops.ids}
    return sorted([tokenizer.pieces[i] for i in ids] + stops.texts)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_run(tmp_path, monkeypatch, name):
    """Logits and ids are transformers', also after conversions there and back twice."""
    family = FAMILIES[name]
    write_family(tmp_path, family)
    model, tokenizer = llama2.load(tmp_path)
    checkpoint = llama2.open_checkpoint(tmp_path)
    for write, form in [(save_gguf, "x.gguf"), (save_folder, "x"), (save_gguf, "y.gguf")]:
        write(checkpoint, tmp_path / form)
        checkpoint = llama2.open_checkpoint(tmp_path / form)
    again, same = llama2.load(checkpoint)
    save_folder(checkpoint, tmp_path / "y", "F32")
    # llama.cpp's converter names EOS alone.
    keys = save.model_keys
    named = r"eot_token_id|eom_token_id|eos_token_ids"
    with monkeypatch.context() as patch:
        patch.setattr(
            save,
            "model_keys",
            lambda *a: {k: v for k, v in keys(*a).items() if not re.search(named, k)},
        )
        save_gguf(llama2.open_checkpoint(tmp_path), tmp_path / "z.gguf")
    converted = llama2.load(tmp_path / "z.gguf")
    if all(re.fullmatch(llama2.END_TEXT, text) for text in family["ends"]):
        assert ends(*converted) == family["ends"]
    last = llama2.open_checkpoint(tmp_path / "y").tokenizer
    tokens = TOKENS[:2] % model.config.vocab_size
    assert_close(again(tokens), model(tokens), 1e-6)
    for field in (
        "max_position_embeddings",
        "rope_scaling_factor",
        "tie_word_embeddings",
        "bos_token_id",
    ):
        assert getattr(again.config, field) == getattr(model.config, field)
    assert ends(model, tokenizer) == ends(again, same) == ends(again, last) == family["ends"]
    assert tokenizer.chat_template == same.chat_template == last.chat_template
    assert tokenizer.add_bos is same.add_bos is family["bos"]
    transformers = pytest.importorskip("transformers")
    load = transformers.AutoModelForCausalLM.from_pretrained
    assert_close(model(tokens), load(tmp_path, dtype=torch.float32).eval()(tokens).logits, 1e-5)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    dialogues = DIALOGUES if "template" in family else []
    if transformers.__version__ < "5":
        assert differences(tokenizer, theirs, dialogues) == ""
    else:  # which builds the tokenizers of some families anew
        if transformers.__version__.startswith("5.23."):
            assert differences(tokenizer, theirs, dialogues) == family.get("differs", "")
        if (tmp_path / "tokenizer.json").exists():
            theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    saved = transformers.AutoTokenizer.from_pretrained(tmp_path / "y")
    for ours in (tokenizer, same, last):
        for text in TEXTS:
            assert ours.encode(text) == saved.encode(text)
            ids = theirs.encode(text, add_special_tokens=False)
            assert ours.encode(text, bos=False) == ids, text
        for messages in dialogues:
            for tools in (None, [TOOL]):
                assert_as_transformers(ours, theirs, messages, False, tools=tools)


RENDERED = r"""
TowerInstruct | <|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n
Code Llama | \u2581<PRE> def f(n):\n    \u2581<SUF>\n    return n \u2581<MID>
"""


@cases("name, prompt", RENDERED)
def test_prompts_that_clients_render(tmp_path, name, prompt):
    """The texts of control tokens are these tokens, as transformers reads them, if somebody says so."""
    transformers = pytest.importorskip("transformers")
    prompt = prompt.encode().decode("unicode-escape")
    write_family(tmp_path, FAMILIES[name])
    ids = llama2.load(tmp_path)[1].encode(prompt, parse_special=True)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ids == theirs(prompt)["input_ids"]


def differences(ours, theirs, dialogues):
    """In what transformers' ids are not ours: spaces at the start, words, BOS, chats."""
    found = []
    for what, texts in {"spaces": [" the"], "words": TEXTS}.items():
        if any(ours.encode(t, False) != theirs.encode(t, add_special_tokens=False) for t in texts):
            found.append(what)
    if ours.encode("a")[0] != theirs.encode("a")[0]:
        found.append("BOS")
    asked = {"add_generation_prompt": True, "return_dict": False}
    for messages in dialogues[:2]:  # Mistral's refuse a system message
        if llama2.encode_chat(ours, messages) != theirs.apply_chat_template(messages, **asked):
            return ", ".join([*found, "chats"])
    return ", ".join(found)


@pytest.mark.parametrize("name", REFUSED)
def test_families_that_are_refused(tmp_path, write_tiny, name):
    """By what their config.json says, and by a key or a tensor of their GGUF files."""
    family = REFUSED[name]
    write_files(tmp_path, {"config.json": family["config"], "model.safetensors": b""})
    raises(f"config.json: {family['key']} is", llama2.open_checkpoint, tmp_path)
    for key, value in family["gguf"].items():
        biases = {key: np.zeros(64, "f4")} if key.startswith("blk.") else {}
        raises(f"x.gguf: .*{key}", llama2.open_checkpoint, write_tiny({key: value}, biases))


def test_the_table_is_what_was_tried():
    expected = "|---|---|---|---|\n"
    for name, family in (FAMILIES | REFUSED).items():
        state = "refused" if name in REFUSED else family.get("state", "random weights")
        expected += f"| {name} | {state} | {family['note']} | {family.get('differs', '')} |\n"
    assert f"{expected}\n" in USAGE
