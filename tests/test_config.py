"""What a model's files say is followed, changes nothing, or is refused by its name.

transformers is the oracle of config.json, where it is installed; what becomes of GGUF's keys is what
llama.cpp does. docs/usage.md has a table of all fields and keys, which this file checks.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from save import save_folder, save_gguf

import llama2
from test_llama2 import TOKENS, assert_close, cases, json_cases, raises, safetensors, write_files

USAGE = (Path(llama2.__file__).parent / "docs" / "usage.md").read_text("utf-8")
VERDICTS = {  # name -> what is done with it
    name: verdict
    for names, verdict in re.findall(
        r"(?m)^\| (`[^|]*) \| (followed|ignored|refused)", USAGE.partition("\n## The server\n")[0]
    )
    for name in re.findall(r"`([\w.]+)`", names)
}


def assert_as_transformers(path, tokens=TOKENS[:1]):
    """The logits; returns transformers' model and ours."""
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    ours, _ = llama2.load(path)
    assert_close(ours(tokens), theirs(tokens).logits, 1e-5)
    return theirs, ours


# --------------------------------------------------------------------------------------------------
# config.json, field by field

LLAMA_3 = json.loads("""{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
"high_freq_factor": 4.0}""")
FOLLOWED = json.loads("""{"rms_norm_eps": 0.03, "tie_word_embeddings": true, "hidden_act": "swish",
"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0}}""")
IGNORED = json.loads("""{"initializer_range": 0.5, "use_cache": false, "pad_token_id": 3,
"pretraining_tp": 2, "attention_dropout": 0.5}""")
REFUSED = json.loads("""{"attention_bias": true, "mlp_bias": true, "partial_rotary_factor": 0.5,
"hidden_act": "gelu"}""")
OTHERS = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim
num_key_value_heads bos_token_id eos_token_id max_position_embeddings sliding_window"""  # followed


def test_the_table_has_all_fields_of_transformers():
    """A new version's new field is a question that somebody must answer."""
    expected = dict.fromkeys(REFUSED, "refused") | dict.fromkeys(IGNORED, "ignored")
    expected |= dict.fromkeys([*FOLLOWED, *OTHERS.split()], "followed")
    assert expected.items() <= VERDICTS.items()
    transformers = pytest.importorskip("transformers")
    fields = transformers.LlamaConfig.__annotations__ | transformers.MistralConfig.__annotations__
    known = "_map|_plan|model_type|keys_to|strict|architectures"
    assert not [name for name in fields.keys() - VERDICTS if not re.search(known, name)]


FIELDS = [{name: value} for name, value in (FOLLOWED | IGNORED).items()]
ABSENT = dict.fromkeys(("rms_norm_eps", "rope_parameters", "hidden_act"))  # as in old files


@pytest.mark.parametrize("change", [*FIELDS, ABSENT], ids=str)
def test_fields_that_are_followed_or_ignored(write_model, change):
    assert_as_transformers(write_model(change))


@pytest.mark.parametrize("name", REFUSED)
def test_fields_that_are_refused(write_model, name):
    path = write_model({name: REFUSED[name]})
    raises(f"config.json: {name} is", llama2.open_checkpoint, path)


def test_frequencies_of_llama3_need_a_band(write_model):
    path = write_model({"rope_parameters": LLAMA_3 | {"low_freq_factor": 4.0}})
    raises("config.json: low_freq_factor is 4.0", llama2.open_checkpoint, path)


ROPES = """\
{"rope_scaling": {"type": "linear", "factor": 4.0}}
{"rope_scaling": {"rope_type": "linear", "factor": 4.0}, "rope_theta": 30000.0}
{"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
{"rope_scaling": {"rope_type": "default"}, "rope_parameters": {"rope_type": "yarn"}}
{"rope_scaling": null, "rope_parameters": null, "rope_theta": 500000.0}
{"rope_parameters": {"rope_theta": 70000.0}}
{"rope_parameters": {"rope_type": "default", "rope_theta": 70000.0}, "rope_theta": 500000.0}
{"rope_scaling": LLAMA_3}, "max_position_embeddings": 64}
{"rope_scaling": LLAMA_3, "original_max_position_embeddings": 16, "rope_theta": 100000.0}}"""
ROPES = ROPES.replace("LLAMA_3", json.dumps(LLAMA_3)[:-1])


@json_cases("change", ROPES)
def test_rope_settings_by_transformers_precedence(write_model, change):
    """Beside rope_parameters, which are the default, if they are not changed."""
    assert_as_transformers(write_model(change))


CONTEXTS = """\
16384 | {"max_sequence_length": 16384, "rope_scaling": {"factor": 4.0, "type": "linear"}}
4096 | {"rope_scaling": {"factor": 8.0, "type": "linear"}}
4096 | {"max_position_embeddings": null, "max_sequence_length": 4096}
2048 | {"max_position_embeddings": null}
4000 | {"model_type": "mistral", "sliding_window": 4000}
4096 | {"model_type": "mistral", "sliding_window": null}"""


@json_cases("context, change", CONTEXTS)
def test_contexts(write_model, context, change):
    """As published, which a linear factor does not change: DeepSeek Coder, LLaMA-2-7B-32K."""
    config = llama2.open_checkpoint(write_model(change)).config
    assert config.max_position_embeddings == int(context)


@pytest.mark.parametrize("model_type", ["mistral", "llama"])
def test_a_pass_beyond_a_sliding_window_is_refused(write_model, tmp_path, model_type, no_grad):
    """With and without a cache, of a folder and another one made of it. Llama has none. In GGUF, as in
    llama.cpp, there is none either; the context of a file made of the folder ends with the window.
    """
    change = {"model_type": model_type, "sliding_window": 12, "max_position_embeddings": 16}
    folder = write_model(change)
    save_gguf(llama2.open_checkpoint(folder), tmp_path / "x.gguf")
    save_folder(llama2.open_checkpoint(folder), tmp_path / "again")
    for path in (folder, tmp_path / "x.gguf", tmp_path / "again"):
        model, _ = llama2.load(path)
        assert model.config.max_position_embeddings == (12 if model_type == "mistral" else 16)
        assert_as_transformers(path, TOKENS[:1, :12]) if path.is_dir() else None
        if model_type == "llama" or path.suffix:
            assert_as_transformers(path) if path.is_dir() else None
            raises("expected 1 to", llama2.score, model, [1] * 17)
            continue
        assert model.config.sliding_window == 12
        raises("sliding window", model, TOKENS[:1, :13])
        cache = model.new_cache(20)
        model(TOKENS[:1, :12], cache)
        raises("sliding window", model, TOKENS[:1, 12:13], cache)
        raises("12", llama2.score, model, TOKENS[0, :13])


# --------------------------------------------------------------------------------------------------
# Which files of a directory are read

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
BESIDE = ("adapter_model.safetensors", "consolidated.safetensors", SHARD.replace("2", "3"))


@pytest.mark.parametrize("form", ["hf", "hf_index"])
def test_the_index_names_the_files(forms, tmp_path, form):
    """Whatever names they have, and whatever lies beside them; one file needs no index."""
    path = shutil.copytree(forms[0] / form, tmp_path / form)
    other = safetensors({"model.norm.weight": torch.zeros(5)})
    index = '{"weight_map": {"a": "absent"}}'
    if form == "hf_index":
        (path / SHARD).rename(path / "b.safetensors")
        index = (path / INDEX).read_text().replace(SHARD, "b.safetensors")
    assert_as_transformers(write_files(path, dict.fromkeys(BESIDE, other) | {INDEX: index}))


DAMAGED = """
{"weight_map": {}} | only 0 tensors
{"weight_map": ["a"]} | weight_map is
{"weight_map": {"a": "absent.safetensors"}} | absent.safetensors
{"weight_map": {"a": "../a.safetensors"}} | index.json: names the file '../a.safetensors'
[] | index.json: a JSON list
"""


@cases("content, said", DAMAGED)
def test_damaged_indexes(forms, tmp_path, content, said):
    path = shutil.copytree(forms[0] / "hf_index", tmp_path / "hf")
    write_files(path, {INDEX: content})
    with pytest.raises((ValueError, OSError), match=said) as error:
        llama2.open_checkpoint(path)
    assert str(path) in str(error.value)


# --------------------------------------------------------------------------------------------------
# GGUF's keys

KEYS = json.loads("""{
    "general.type": "adapter", "general.architecture": "qwen2", "general.name": "Fox",
    "llama.vocab_size": 31000, "llama.context_length": 48,
    "llama.attention.layer_norm_rms_epsilon": 0.03, "llama.attention.key_length": 20,
    "llama.attention.value_length": 20, "llama.attention.causal": false,
    "llama.attention.sliding_window": 4, "llama.attention.scale": 3.0,
    "llama.rope.dimension_count": 8, "llama.rope.freq_base": 500000.0,
    "llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0,
    "llama.rope.scale_linear": 4.0, "llama.rope.scaling.attn_factor": 1.5,
    "llama.rope.scaling.original_context_length": 16, "llama.rope.scaling.finetuned": true,
    "llama.logit_scale": 3.0, "llama.pooling_type": 1, "llama.expert_count": 8
}""")  # what llama.cpp reads of architecture llama


@pytest.mark.parametrize("key", KEYS)
def test_keys(write_tiny, model, key):
    """What the table says is done, as in llama.cpp."""
    path, verdict = write_tiny({key: KEYS[key]}), VERDICTS[key]
    if verdict == "refused" or key.endswith("key_length"):  # the weights then do not fit
        said = key if verdict == "refused" else r"blk.0.attn_\w+.weight is"
        raises(f"x.gguf: {said}", llama2.open_checkpoint, path)
        return
    ours, _ = llama2.load(path)
    same = torch.allclose(ours(TOKENS), model(TOKENS))
    assert same == (verdict == "ignored" or key == "llama.context_length")


OWN_WORDS = """
{"hidden_size": 64, "llama.embedding_length": null} | llama.embedding_length is missing
{"num_hidden_layers": 9, "llama.block_count": "2"} | llama.block_count is '2'; expected int
{"temperature": 0.5, "eos_token": "a", "chat_template": "b", "rope_type": "yarn", "sliding_window": 4} | runs
{"general.sampling.temperature": 0.5} | runs
"""


@json_cases("changed, said", OWN_WORDS)
def test_a_folders_words_are_no_keys_of_gguf(write_tiny, changed, said):
    """They change nothing there, and an error names the key that stands in the file."""
    path = write_tiny(changed)
    if said != "runs":
        raises(rf"x\.gguf: {re.escape(said)}", llama2.open_checkpoint, path)
        return
    found, plain = llama2.open_checkpoint(path), llama2.open_checkpoint(write_tiny())
    assert found.config == plain.config and found.sampling == plain.sampling == {}
    assert vars(found.tokenizer.vocabulary) == vars(plain.tokenizer.vocabulary)


# --------------------------------------------------------------------------------------------------
# Files that are not what their names say

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 49\n"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "x.gguf"])
def test_pointers_of_git_lfs(write_model, name):
    """What a clone without git-lfs has in the places of large files."""
    path = write_files(write_model({}), {name: POINTER})
    path = path / name if name == "x.gguf" else path
    raises(rf"{name}: a pointer of git-lfs.*git lfs pull", llama2.open_checkpoint, path)


def test_frequencies_of_old_files(write_model):
    """They are computed, so their type does not count."""
    torch_files = pytest.importorskip("safetensors.torch")
    path = write_model({})
    state = torch_files.load_file(path / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8).double()
    torch_files.save_file(state, path / "model.safetensors")
    assert_as_transformers(path)


def test_matrices_that_mlx_has_quantised(write_model):
    """Integers of 32 bits, with scales beside them."""
    path = write_model({"quantization": {"group_size": 64, "bits": 4}})
    data = (path / "model.safetensors").read_bytes()
    write_files(path, {"model.safetensors": data.replace(b'"F32"', b'"U32"', 1)})
    raises(r"model\.safetensors: .*: dtype is 'U32'; .* MLX", llama2.open_checkpoint, path)


def test_a_checkpoint_remembers_where_its_files_are(write_model, tmp_path, monkeypatch, no_grad):
    """By an absolute path: also a second model of it, whose files are mapped again, and its tokenizer."""
    home, other = tmp_path / "home", tmp_path / "other"
    home.mkdir()
    write_model({}).rename(home / "folder")
    shutil.copytree(home, other)
    write_files(other / "folder", {"tokenizer.model": b"damaged"})
    path = other / "folder" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4000] + bytes(4000))
    monkeypatch.chdir(home)
    checkpoint = llama2.open_checkpoint("folder")
    expected = llama2.load(home / "folder")[0](TOKENS)
    monkeypatch.chdir(other)
    assert checkpoint.tokenizer.encode("fox")
    for _ in range(2):
        assert torch.equal(llama2.load(checkpoint)[0](TOKENS), expected)


def test_formats_before_gguf(tmp_path):
    """They are no file of a directory; llama2.c's have the same ending."""
    name = "llama-2-7b.ggmlv3.q4_0.bin"
    path = write_files(tmp_path, {name: b"tjgg" + bytes(28)}) / name
    raises(rf"{name}: starts with b'tjgg'.* GGML .* llama2\.c", llama2.open_checkpoint, path)


@pytest.mark.parametrize("name", ["model.safetensors", "x.gguf"])
def test_downloads_that_ended_early(write_model, write_tiny, name):
    """Known when the file is opened: a tensor that ends beyond it could not be mapped."""
    path = write_tiny() if name == "x.gguf" else write_model({})
    file = path / name if path.is_dir() else path
    size = file.stat().st_size - 1000
    os.truncate(file, size)
    raises(rf"{name}: .*ends at byte \d+, the file at {size}: trunc", llama2.open_checkpoint, path)


NUMBERS = """
31 | removed its types Q4_0_4_4, .*: take the file of Q4_0
77 | 77 is not a valid
"""


@cases("number, said", NUMBERS)
def test_types_that_are_removed_or_unknown(write_tiny, number, said):
    """The type of a tensor stands behind its name, the count of its dimensions, and these."""
    path, name = write_tiny(), "token_embd.weight"
    data = bytearray(path.read_bytes())
    data[data.index(name.encode()) + len(name) + 4 + 2 * 8] = int(number)
    path.write_bytes(data)
    raises(rf"x\.gguf: {name}: .*{said}", llama2.open_checkpoint, path)
