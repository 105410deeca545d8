"""What a model's files say is followed, changes nothing, or is refused by its name.

transformers is the oracle of config.json, llama.cpp that of GGUF's keys, where they are installed.
docs/usage.md has a table of all fields and keys, which this file checks.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

import llama2
from test_llama2 import (
    FORMS,
    TOKENS,
    assert_close,
    config_keys,
    gguf_name,
    hf_state,
    make_weights,
    quantised,
    safetensors,
    vocabulary_keys,
    write_gguf,
    write_hf,
)

USAGE = (Path(llama2.__file__).parent / "docs" / "usage.md").read_text("utf-8")
ROWS = TOKENS[:2, :20]


def table(heading):
    """A table of docs/usage.md: {name: what is done with it}."""
    text = USAGE[USAGE.index(heading) :]
    entries = {}
    for names, verdict in re.findall(
        r"(?m)^\| (`.*`.*) \| (\w+).*\|$", text[: text.index("\n\n**")]
    ):
        entries |= dict.fromkeys(re.findall(r"`([\w.]+)`", names), verdict)
    return entries


def write_model(path, vocabulary, change, config=FORMS):
    """A Hugging Face directory with changed settings; None takes one away."""
    write_hf(path, config, make_weights(config, scale=0.15))
    shutil.copy(vocabulary[0], path)
    settings = json.loads((path / "config.json").read_text()) | change
    settings = {key: value for key, value in settings.items() if value is not None}
    (path / "config.json").write_text(json.dumps(settings))
    return path


@torch.no_grad()
def assert_as_transformers(path, tokens=ROWS, tolerance=1e-5):
    """The logits; returns transformers' model and ours."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ours, _ = llama2.load(path)
    assert_close(ours(tokens), theirs(tokens).logits, tolerance)
    return theirs, ours


# --------------------------------------------------------------------------------------------------
# config.json, field by field

LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FOLLOWED = {
    "rms_norm_eps": 0.03,
    "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
    "tie_word_embeddings": True,
    "hidden_act": "swish",
    "max_position_embeddings": 24,
    "bos_token_id": 7,
    "eos_token_id": [5, 6],
    "sliding_window": 30,
}
IGNORED = {
    "initializer_range": 0.5,
    "use_cache": False,
    "pad_token_id": 3,
    "pretraining_tp": 2,
    "attention_dropout": 0.5,
}
REFUSED = {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}
SHAPES = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim"]
SHAPES += ["num_attention_heads", "num_key_value_heads"]  # with other ones, weights do not fit


def test_the_table_has_all_fields_of_transformers():
    """A new version's new field is a question that somebody must answer."""
    transformers = pytest.importorskip("transformers")
    fields = {*transformers.LlamaConfig.__annotations__} | {
        *transformers.MistralConfig.__annotations__
    }
    fields = {
        name for name in fields if not re.search("_map|_plan|model_type|keys_to|strict", name)
    }
    entries = table("**config.json.**")
    assert fields - {"architectures"} <= entries.keys()
    for name in fields & {*FOLLOWED, *SHAPES}:
        assert entries[name] == "followed", name
    for name in fields & {*IGNORED}:
        assert entries[name] == "ignored", name
    for name in fields & {*REFUSED} - {"hidden_act"}:
        assert entries[name] == "refused", name


@pytest.mark.parametrize("name", [*FOLLOWED, *IGNORED])
def test_fields_that_are_followed_or_ignored(tmp_path, vocabulary, name):
    change = {name: (FOLLOWED | IGNORED)[name]}
    if name == "sliding_window":
        change["model_type"] = "mistral"
    path = write_model(tmp_path / "hf", vocabulary, change)
    _, ours = assert_as_transformers(path)
    if name == "eos_token_id":
        assert (ours.config.eos_token_id, ours.config.stop_token_ids) == (5, (6,))
    if name == "sliding_window":
        assert ours.config.max_position_embeddings == 30


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_are_refused(tmp_path, vocabulary, name):
    path = write_model(tmp_path / "hf", vocabulary, {name: REFUSED[name]})
    with pytest.raises(ValueError, match=f"config.json: {name} is"):
        llama2.open_checkpoint(path)


def test_settings_that_are_absent_are_transformers_own(tmp_path, vocabulary):
    """Old files lack settings: eps is 1e-6 then, not Llama 2's."""
    absent = ("rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act")
    path = write_model(tmp_path / "hf", vocabulary, dict.fromkeys(absent))
    theirs, ours = assert_as_transformers(path)
    assert ours.config.rms_norm_eps == theirs.config.rms_norm_eps == 1e-6
    assert ours.config.max_position_embeddings == theirs.config.max_position_embeddings


ROPES = [
    {"rope_scaling": {"type": "linear", "factor": 4.0}},  # beside rope_parameters: default
    {"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 3e4},
    {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    {"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "yarn"}},
    {"rope_scaling": None, "rope_parameters": None, "rope_theta": 5e5},
    {"rope_parameters": {"rope_theta": 7e4}},  # without a type
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7e4}, "rope_theta": 5e5},
    {"rope_scaling": LLAMA_3, "max_position_embeddings": 64},  # which is the original context
    {"rope_scaling": LLAMA_3 | {"original_max_position_embeddings": 16, "rope_theta": 1e5}},
]


@pytest.mark.parametrize("change", ROPES, ids=str)
def test_rope_settings_by_transformers_precedence(tmp_path, vocabulary, change):
    assert_as_transformers(write_model(tmp_path / "hf", vocabulary, change), TOKENS[:1])


@pytest.mark.parametrize("rope_type", ["yarn", "dynamic", "longrope", "proportional"])
def test_other_rope_types_are_refused(tmp_path, vocabulary, rope_type):
    change = {"rope_scaling": {"type": rope_type, "factor": 2.0}}
    with pytest.raises(ValueError, match=f"rope_type is '{rope_type}'"):
        llama2.open_checkpoint(write_model(tmp_path / "hf", vocabulary, change))


@pytest.mark.parametrize(
    ("change", "context"),
    [
        (  # vicuna-7b-v1.5-16k
            {"max_sequence_length": 16384, "rope_scaling": {"factor": 4.0, "type": "linear"}},
            16384,
        ),
        ({"rope_scaling": {"factor": 8.0, "type": "linear"}}, 32768),
        ({"max_position_embeddings": None, "max_sequence_length": 4096}, 4096),
        ({"model_type": "mistral", "sliding_window": 4000}, 4000),
        ({"model_type": "mistral", "sliding_window": None}, 4096),
    ],
)
def test_contexts(tmp_path, vocabulary, change, context):
    path = write_model(tmp_path / "hf", vocabulary, change)
    assert llama2.open_checkpoint(path).config.max_position_embeddings == context
    with pytest.raises(ValueError, match=str(context)):
        llama2.load(path, context=context + 1)


# Mistral Nemo: 5120 / 32 = 160, but heads of 128; Minitron's width: 96, but heads of 128.
WIDE_HEADS = dataclasses.replace(FORMS, head_dim=20, hidden_size=256)
NARROW_HEADS = dataclasses.replace(FORMS, head_dim=48)


@pytest.mark.parametrize("config", [WIDE_HEADS, NARROW_HEADS], ids=["nemo", "minitron"])
@torch.no_grad()
def test_heads_of_another_size(tmp_path, vocabulary, config):
    """From a directory, from what is saved of it, and quantised: by torch and by the kernels."""
    path = write_model(tmp_path / "hf", vocabulary, {"head_dim": config.head_dim}, config)
    _, ours = assert_as_transformers(path)
    assert ours.layers[0].self_attn.q_proj.weight.shape == (8 * config.head_dim, config.hidden_size)
    llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / "x.gguf")
    again, _ = llama2.load(tmp_path / "x.gguf")
    assert again.config == ours.config
    assert_close(again(ROWS), ours(ROWS), 1e-6)
    as_llama_cpp(tmp_path / "x.gguf", again)
    wide = dataclasses.replace(config, hidden_size=256, intermediate_size=256, head_dim=64)
    keys = {"llama.attention.key_length": 64, "llama.attention.value_length": 64}
    quantised(vocabulary, tmp_path / "q.gguf", ["Q4_0", "Q6_K"], wide, keys)
    plain, _ = llama2.load(tmp_path / "q.gguf", compile=False)
    fast, _ = llama2.load(tmp_path / "q.gguf", compile=True)
    assert_close(fast(ROWS), plain(ROWS), 1e-5)


# --------------------------------------------------------------------------------------------------
# Which files of a directory are read


def shards(config, names):
    """The files of a model whose index has these names."""
    state = hf_state(config, make_weights(config, scale=0.15))
    files, index = {}, {}
    for i, name in enumerate(names):
        part = {key: state[key] for key in [*state][i :: len(names)]}
        files[name] = safetensors(part)
        index |= dict.fromkeys(part, name)
    content = json.dumps({"metadata": {}, "weight_map": index}).encode()
    return files | {"model.safetensors.index.json": content}


ADAPTER = {"adapter_model.safetensors": safetensors({"x.lora_A.weight": torch.zeros(2, 8)})}
OTHER = safetensors({"model.norm.weight": torch.zeros(5)})
NAMES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
DIRECTORIES = {
    "an adapter beside its model": ADAPTER,
    "an adapter beside shards": ADAPTER | shards(FORMS, NAMES),
    "shards of an earlier save": shards(FORMS, NAMES) | {"model-00001-of-00003.safetensors": OTHER},
    "names of their own": shards(FORMS, ("weights-a.safetensors", "b.safetensors")),
    "consolidated weights, too": {"consolidated.safetensors": OTHER},
    "one file and an index": {"model.safetensors.index.json": b'{"weight_map": {"a": "absent"}}'},
}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_the_index_names_the_files(tmp_path, vocabulary, hf_model, name):
    """As transformers reads it."""
    path = write_model(tmp_path / "hf", vocabulary, {})
    files = DIRECTORIES[name]
    if "one file" not in name and "model.safetensors.index.json" in files:
        (path / "model.safetensors").unlink()
    for file, content in files.items():
        (path / file).write_bytes(content)
    ours, _ = llama2.load(path)
    with torch.no_grad():
        assert_close(ours(ROWS), hf_model(ROWS).logits, 1e-5)
    if "adapter" not in name:  # which transformers would add, if it had its settings
        assert_as_transformers(path)


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ('{"weight_map": {}}', "only 0 tensors"),
        ('{"weight_map": ["a"]}', "weight_map is"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "absent.safetensors"),
        ('{"weight_map": {"a": 5}}', "damaged"),
        ("[]", "model.safetensors.index.json: a JSON list"),
    ],
)
def test_damaged_indexes(tmp_path, vocabulary, index, said):
    path = write_model(tmp_path / "hf", vocabulary, {})
    (path / "model.safetensors").rename(path / NAMES[0])
    (path / "model.safetensors.index.json").write_text(index)
    with pytest.raises((ValueError, OSError), match=said) as error:
        llama2.open_checkpoint(path)
    assert str(path) in str(error.value)


# --------------------------------------------------------------------------------------------------
# GGUF's keys

KEYS = {  # what llama.cpp reads of architecture llama: value, verdict
    "general.type": ("adapter", "refused"),
    "general.architecture": ("qwen2", "refused"),
    "general.name": ("Fox", "ignored"),
    "llama.vocab_size": (31000, "ignored"),
    "llama.context_length": (48, "followed"),
    "llama.attention.layer_norm_rms_epsilon": (0.03, "followed"),
    "llama.attention.key_length": (20, "followed"),  # the weights then do not fit
    "llama.attention.value_length": (20, "refused"),
    "llama.attention.causal": (False, "refused"),
    "llama.attention.sliding_window": (4, "ignored"),
    "llama.attention.scale": (3.0, "ignored"),
    "llama.rope.dimension_count": (8, "refused"),
    "llama.rope.freq_base": (5e5, "followed"),
    "llama.rope.scaling.type": ("yarn", "refused"),
    "llama.rope.scaling.factor": (4.0, "followed"),
    "llama.rope.scale_linear": (4.0, "followed"),
    "llama.rope.scaling.attn_factor": (1.5, "refused"),
    "llama.rope.scaling.original_context_length": (16, "ignored"),
    "llama.rope.scaling.finetuned": (True, "ignored"),
    "llama.logit_scale": (3.0, "ignored"),
    "llama.pooling_type": (1, "ignored"),
    "llama.expert_count": (8, "refused"),
}


def as_llama_cpp(path, model, tokens=TOKENS[:1, :20]):
    """llama.cpp's logits are those of a model, but for its rounding of the cache to 16 bits."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not here")
    theirs = llama_cpp.Llama(str(path), n_ctx=32, n_threads=1, verbose=False, logits_all=True)
    theirs.eval(tokens[0].tolist())
    expected = torch.tensor(theirs.scores[: tokens.shape[1]])[None]
    assert_close(model(tokens), expected, 0.02)


@pytest.mark.parametrize("key", KEYS)
@torch.no_grad()
def test_keys(tmp_path, vocabulary, key):
    value, verdict = KEYS[key]
    assert table("**GGUF keys.**")[key] == verdict
    keys = config_keys(FORMS) | vocabulary_keys(vocabulary[1])
    stored = {gguf_name(n): w for n, w in make_weights(FORMS, scale=0.15).items()}
    plain = write_gguf(tmp_path / "plain.gguf", keys, stored)
    changed = {} if key == "general.architecture" else {key: value}
    arch = value if key == "general.architecture" else "llama"
    path = write_gguf(tmp_path / "x.gguf", keys | changed, stored, arch)
    if verdict == "refused" or key.endswith("key_length"):
        said = key if verdict == "refused" else r"blk.0.attn_\w+.weight is"
        with pytest.raises(ValueError, match=f"x.gguf: {said}"):
            llama2.open_checkpoint(path)
        return
    model, other = llama2.load(path)[0], llama2.load(plain)[0]
    same = torch.allclose(model(ROWS), other(ROWS))
    assert same == (verdict == "ignored" or key == "llama.context_length")
    as_llama_cpp(path, model)


# --------------------------------------------------------------------------------------------------
# Files that are not what their names say

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 49\n"


@pytest.mark.parametrize(
    "name", ["model.safetensors", "tokenizer.model", "tokenizer.json", "config.json", "x.gguf"]
)
def test_pointers_of_git_lfs(tmp_path, vocabulary, name):
    """What a clone without git-lfs has in the places of large files."""
    path = write_model(tmp_path / "hf", vocabulary, {})
    if name == "tokenizer.json":
        (path / "tokenizer.model").unlink()
    (path / name).write_bytes(POINTER)
    with pytest.raises(ValueError, match=rf"{name}: a pointer of git-lfs.*git lfs pull"):
        assert llama2.open_checkpoint(path / name if name == "x.gguf" else path).tokenizer


@pytest.mark.parametrize(
    ("number", "said"), [(31, "removed its type Q4_0_4_4"), (77, "77 is not a valid")]
)
def test_types_that_are_removed_or_unknown(tmp_path, keys, tensors, number, said):
    path = write_gguf(tmp_path / "x.gguf", keys, tensors)
    data = bytearray(path.read_bytes())
    start = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    data[start : start + 4] = number.to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"x\.gguf: token_embd\.weight: .*{said}"):
        llama2.open_checkpoint(path)


def test_tiktokens_file_beside_tokenizer_json(tmp_path, vocabulary):
    """Directories of Llama 3 that somebody copied Meta's tokenizer.model into."""
    pytest.importorskip("tokenizers")
    path = write_model(tmp_path / "hf", vocabulary, {})
    vocab = {chr(i): i for i in range(33, 127)}
    content = {"model": {"type": "BPE", "vocab": vocab, "merges": []}, "added_tokens": []}
    content["decoder"] = content["pre_tokenizer"] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
    }
    (path / "tokenizer.json").write_text(json.dumps(content))
    (path / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    assert llama2.open_checkpoint(path).tokenizer.encode("AB", bos=False) == [65, 66]
    (path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer.model: tiktoken's"):
        assert llama2.open_checkpoint(path).tokenizer
