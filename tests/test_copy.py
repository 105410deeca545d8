"""What is loaded can be trained, looked into, copied and saved; what is wrong with it is said."""

from __future__ import annotations

import copy
import errno
import io
import math
import os
import pickle
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import gguf
import pytest
import torch

import llama2
from test_llama2 import (
    CONFIG,
    GREEDY,
    SCRIPT,
    SHAPE,
    TOKENS,
    WIDE,
    assert_close,
    make_hf,
    make_model,
    make_weights,
    quantised,
    write_hf,
)

BUNDLED = llama2.DEFAULT_MODEL


@pytest.fixture
def small(vocabulary, tmp_path):
    """A GGUF file of quantised matrices."""
    return quantised(vocabulary, tmp_path / "small.gguf", ["Q4_K", "Q8_0"])[0]


# --------------------------------------------------------------------------------------------------
# Loading


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float33"}, "float33"),
        ({"device": "gpu"}, "gpu"),
        ({"trainable": True, "dtype": torch.bfloat16}, "dtype is 'bfloat16'; expected float32$"),
        ({"context": 10**6}, "1000000; expected 1 to 64"),
        ({"context": 0}, "context 0; expected 1 to 64"),
        ({"context": -1}, "context -1; expected 1 to 64"),
    ],
)
def test_wrong_options_of_load(small, options, match):
    for source in (small, llama2.open_checkpoint(small)):
        with pytest.raises(ValueError, match=match) as error:
            llama2.load(source, **options)
        assert "\n" not in str(error.value)


def test_calls_with_what_is_no_tensor_of_ids(model):
    for odd in ("text", [1, 2], TOKENS[0], TOKENS.float()):
        with pytest.raises(ValueError, match="tokens"):
            model(odd)


def test_no_id_is_drawn_that_the_tokenizer_lacks(tmp_path, vocabulary):
    """Where the embedding has more rows than the vocabulary has tokens."""
    config = llama2.Config(**SHAPE | {"vocab_size": 420})
    weights = make_weights(config)
    weights["lm_head.weight"][320:] *= 50  # these would be drawn all the time
    write_hf(tmp_path / "model", config, weights)
    shutil.copy(vocabulary[0], tmp_path / "model")
    model, _ = llama2.load(tmp_path / "model")
    ids = list(llama2.generate(model, [1, 5, 6], GREEDY, 40, stop_ids=()))
    assert len(ids) == 40
    assert max(ids) < 320


@pytest.mark.parametrize(
    ("value", "said"),
    [(math.nan, r"NaN or infinity in layers\.0\.mlp\.up_proj"), (3e38, "finite weights overflow")],
)
def test_weights_without_sense_are_named(tmp_path, vocabulary, value, said):
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["F32"])
    model, _ = llama2.load(path)
    model.layers[0].mlp.up_proj.weight.data[3] = value
    with pytest.raises(ValueError, match=rf"x\.gguf.*{said}"):
        list(llama2.generate(model, [1, 2, 3]))


@torch.no_grad()
def test_few_files_may_be_open(forms):
    """Each tensor that is mapped holds one; macOS allows 256, of which a 7B model needs 291."""
    resource = pytest.importorskip("resource")  # not on Windows
    wanted = llama2.load(forms[0] / "hf")[0](TOKENS[:1, :9])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)  # the next number
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 4, limits[1]))
    try:
        model, _ = llama2.load(forms[0] / "hf")
        assert torch.equal(model(TOKENS[:1, :9]), wanted)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


# --------------------------------------------------------------------------------------------------
# Training


def test_a_trained_model_is_saved_as_it_is(vocabulary, tmp_path):
    """Every weight is trained, and none without trainable=True; tied embeddings stay tied."""
    config = replace(WIDE, tie_word_embeddings=True)
    keys = {"tokenizer.chat_template": "{{ messages }} [INST] <<SYS>>"}
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["Q4_K", "Q8_0"], config, keys)
    frozen, _ = llama2.load(path)
    assert not any(p.requires_grad for p in frozen.parameters())
    model, tokenizer = llama2.load(path, trainable=True)
    tokens = TOKENS[:2, :9]
    assert_close(model(tokens), frozen(tokens))
    model(tokens).square().mean().backward()
    for name, p in model.named_parameters():
        assert p.dtype == torch.float32
        assert p.grad.any(), name
    torch.optim.SGD(model.parameters(), 0.01).step()
    llama2.save_gguf(model, tmp_path / "out.gguf", tokenizer=tokenizer)
    again, same = llama2.load(tmp_path / "out.gguf")
    assert_close(again(tokens), model(tokens), 1e-6)
    assert (again(tokens) - frozen(tokens)).abs().max() > 0.01
    assert again.config == model.config
    assert same.chat_template == tokenizer.chat_template == "{{ messages }} [INST] <<SYS>>"
    assert same.encode("A fox.\n") == tokenizer.encode("A fox.\n")


# --------------------------------------------------------------------------------------------------
# Copies


@torch.no_grad()
def test_copies_hold_the_file_once(small):
    """Not once for every tensor that lies in it."""
    model, _ = llama2.load(small)
    wanted = model(TOKENS[:1, :9])
    most = 1.2 * small.stat().st_size
    file = io.BytesIO()
    torch.save(model, file)
    assert file.tell() < most
    file.seek(0)
    stored = torch.load(file, weights_only=False)
    pickled = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), pickled, stored, model.share_memory()):
        assert len(pickle.dumps(other)) < most
        assert torch.equal(other(TOKENS[:1, :9]), wanted)


@torch.no_grad()
def test_models_of_one_checkpoint_are_their_own(tmp_path, vocabulary):
    """Changing one changes neither another, nor the checkpoint, nor the file."""
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["F16", "Q8_0", "F32"])
    content = path.read_bytes()
    checkpoint = llama2.open_checkpoint(path)
    one, _ = llama2.load(checkpoint)
    two, _ = llama2.load(checkpoint)
    wanted = two(TOKENS[:1, :9])
    for t in (*one.parameters(), *one.buffers()):
        t.zero_()
    for model in (two, llama2.load(checkpoint)[0]):
        assert torch.equal(model(TOKENS[:1, :9]), wanted)
    assert path.read_bytes() == content


def test_states_of_other_types_are_refused(tmp_path, vocabulary):
    """Q4_0 and Q4_K have as many bytes per row."""
    models = []
    for kind in ("Q4_0", "Q4_K", "F32"):
        path, _ = quantised(vocabulary, tmp_path / f"{kind}.gguf", [kind])
        models.append(llama2.load(path)[0])
    first, *others = models
    first.load_state_dict(first.state_dict())
    for other in others:
        with pytest.raises(RuntimeError):
            first.load_state_dict(other.state_dict())


@torch.no_grad()
def test_state_dicts_of_transformers():
    theirs = make_hf(CONFIG, make_weights(CONFIG))
    ours = llama2.Llama(CONFIG)
    ours.load_state_dict(llama2.state_dict_from_hf(theirs.state_dict(), CONFIG))
    assert_close(ours(TOKENS), theirs(TOKENS).logits, 1e-5)


# --------------------------------------------------------------------------------------------------
# Saving


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", [None, "F32", "Q8_0"])
@torch.no_grad()
def test_a_model_becomes_a_gguf_file(small, tmp_path, kind, compile):
    model, tokenizer = llama2.load(small, compile=compile)
    llama2.save_gguf(model, tmp_path / "out.gguf", kind, tokenizer=tokenizer)
    again, same = llama2.load(tmp_path / "out.gguf")
    assert same.encode("a fox") == tokenizer.encode("a fox")
    tolerance = 0.02 if kind == "Q8_0" else 1e-4
    assert_close(again(TOKENS[:1, :9]), model(TOKENS[:1, :9]), tolerance)
    if kind is None:
        blocks = dict(model.named_buffers())
        for name, value in again.named_buffers():
            assert torch.equal(value, blocks[name]), name


@pytest.mark.parametrize(
    ("error", "said"), [(OSError(errno.ENOSPC, "No space left"), "out.gguf"), (MemoryError(), None)]
)
def test_what_ends_early_leaves_nothing(small, tmp_path, monkeypatch, error, said):
    """The target stays as it was; the error names the file, which the system's does not."""
    target = tmp_path / "out.gguf"
    target.write_bytes(b"old")

    def fsync(number):
        assert len(os.listdir(tmp_path)) == 3  # with the unfinished one
        raise error

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(type(error), match=said):
        llama2.save_gguf(llama2.open_checkpoint(small), target, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["out.gguf", "small.gguf"]
    assert target.read_bytes() == b"old"


def with_bias(model):
    old = model.layers[0].mlp.up_proj
    model.layers[0].mlp.up_proj = torch.nn.Linear(old.in_features, old.out_features)


def with_adapter(model):
    """As examples/lora.py hangs one on a projection."""
    model.layers[1].self_attn.q_proj.lora_A = torch.nn.Linear(64, 2, bias=False)


def with_pefts_adapter(model):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    peft.inject_adapter_in_model(config, model)


def with_other_norm(model):
    model.norm = torch.nn.LayerNorm(64, bias=False)


def with_identity(model):
    model.layers[0].mlp.up_proj = torch.nn.Identity()


def with_other_size(model):
    model.lm_head = torch.nn.Linear(64, 300, bias=False)


def with_fewer_layers(model):
    del model.layers[1]


def with_more_layers(model):
    model.layers.append(copy.deepcopy(model.layers[0]))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (with_bias, r"unknown: layers\.0\.mlp\.up_proj\.bias"),
        (with_adapter, r"unknown: layers\.1\.self_attn\.q_proj\.lora_A"),
        (with_pefts_adapter, r"q_proj.*a Linear|lora_A"),
        (with_other_norm, "norm, a LayerNorm"),
        (with_identity, "up_proj, a Identity"),
        (with_other_size, r"lm_head\.weight is \[300, 64\]; expected \[320, 64\]"),
        (with_fewer_layers, r"missing: layers\.1\."),
        (with_more_layers, r"unknown: layers\.2\."),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_file_cannot_hold_is_refused(model_path, tmp_path, change, said):
    """Silently dropped, each of them would give a file of another model."""
    model, tokenizer = llama2.load(model_path, trainable=True)
    change(model)
    with pytest.raises(ValueError, match=f"a file cannot hold.*{said}"):
        llama2.save_gguf(model, tmp_path / "out.gguf", tokenizer=tokenizer)
    assert not [*tmp_path.iterdir()]


def test_more_pieces_than_rows_are_refused(tmp_path, model_path):
    """load() would refuse such a file, in place of the one that was there."""
    _, tokenizer = llama2.load(model_path)
    model = make_model(llama2.Config(**SHAPE | {"vocab_size": 300}))
    (tmp_path / "out.gguf").write_bytes(b"old")
    with pytest.raises(ValueError, match="320 pieces, the model 300 rows"):
        llama2.save_gguf(model, tmp_path / "out.gguf", tokenizer=tokenizer, overwrite=True)
    with pytest.raises(ValueError, match="tokenizer"):
        llama2.save_gguf(model, tmp_path / "out.gguf", overwrite=True)
    assert (tmp_path / "out.gguf").read_bytes() == b"old"


NUMBERS = {"UINT8": 255, "INT8": -128, "UINT16": 65535, "INT16": -32768, "UINT32": 2**32 - 1}
NUMBERS |= {"INT32": -1, "UINT64": 8_030_261_312, "INT64": -5, "FLOAT32": 0.5, "FLOAT64": 0.1}
NUMBERS |= {"BOOL": True, "STRING": "Fox \U0001f98a"}


def test_every_key_keeps_its_type(tmp_path, keys, tensors):
    """All of GGUF's, arrays too; such as ollama's general.parameter_count, a UINT64."""
    types = gguf.GGUFValueType
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    for name, value in NUMBERS.items():
        writer.add_key_value(f"general.{name}", value, types[name])
        writer.add_key_value(f"own.{name}", [value, value], types.ARRAY, types[name])
    writer.add_custom_alignment(64)
    writer.add_key_value("general.quantization_version", 2, types.UINT8)
    for key, value in keys.items():
        writer.add_key_value(key, value, types.get_type(value))
    writer.add_key_value("tokenizer.ggml.padding_token_id", 3, types.UINT64)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    llama2.save_gguf(llama2.open_checkpoint(tmp_path / "a.gguf"), tmp_path / "b.gguf")
    before, after = gguf.GGUFReader(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "b.gguf")
    assert {*before.fields} == {*after.fields}
    for key, field in before.fields.items():
        assert (after.fields[key].types, after.fields[key].contents()) == (
            field.types,
            field.contents(),
        ), key
    for old, new in zip(before.tensors, after.tensors, strict=True):
        assert (old.name, old.data_offset % 64) == (new.name, new.data_offset % 64)
        assert (old.data == new.data).all()


def test_a_changed_checkpoint_is_saved_as_it_is(tmp_path, vocabulary):
    """Keys of its file that are no longer true are replaced; its name stays."""
    more = {"general.name": "Fox", "llama.rope.freq_base": 1e4}
    path, _ = quantised(vocabulary, tmp_path / "a.gguf", ["Q8_0"], keys=more)
    checkpoint = llama2.open_checkpoint(path)
    checkpoint.config = replace(checkpoint.config, rope_theta=5e5)
    llama2.save_gguf(checkpoint, tmp_path / "b.gguf")
    again = llama2.open_checkpoint(tmp_path / "b.gguf")
    assert again.config == checkpoint.config
    assert again.file.metadata["general.name"] == "Fox"
    assert again.tokenizer.encode("a fox") == checkpoint.tokenizer.encode("a fox")


SAVE_TO_A_FULL_DISK = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # write() then fails, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
import llama2
sys.exit(llama2.main(["--model", sys.argv[1], "--save", sys.argv[2]]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such limit")
def test_a_full_disk_leaves_nothing(small, tmp_path):
    """One line says what is wrong and where."""
    out = tmp_path / "out.gguf"
    out.write_bytes(b"old")
    command = [sys.executable, "-c", SAVE_TO_A_FULL_DISK, str(small), str(out)]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "--force" in done.stderr
    out.unlink()
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert str(out) in done.stderr and "None" not in done.stderr
    assert re.search("requested and|No space|File too large", done.stderr)
    assert not [*tmp_path.glob("out*")]


def test_a_file_that_is_replaced_hands_on_what_it_is(small, tmp_path):
    """Its permissions; a link stays a link to the file that it names. New ones obey the umask."""
    (tmp_path / "target").mkdir()
    target, link = tmp_path / "target" / "real.gguf", tmp_path / "out.gguf"
    target.write_bytes(b"old")
    target.chmod(0o640)
    link.symlink_to(target)
    checkpoint = llama2.open_checkpoint(small)
    llama2.save_gguf(checkpoint, link, overwrite=True)
    assert link.is_symlink() and link.resolve() == target
    assert target.stat().st_mode & 0o777 == 0o640
    assert llama2.open_checkpoint(link).config == checkpoint.config
    before = os.umask(0o027)
    try:
        llama2.save_gguf(checkpoint, tmp_path / "new.gguf")
    finally:
        os.umask(before)
    assert (tmp_path / "new.gguf").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in (tmp_path / "target").iterdir()] == ["real.gguf"]


@pytest.mark.parametrize("kind", ["FIFO", "directory", "absent folder"])
def test_only_regular_files_are_replaced(small, tmp_path, kind):
    out = tmp_path / "out.gguf"
    if kind == "FIFO":
        getattr(os, "mkfifo", lambda path: pytest.skip("Windows has no FIFOs"))(out)
    elif kind == "directory":
        out.mkdir()
    else:
        out = tmp_path / "absent" / "out.gguf"
    names = sorted(tmp_path.iterdir())
    with pytest.raises((ValueError, OSError), match=re.escape(str(out))) as error:
        llama2.save_gguf(llama2.open_checkpoint(small), out, overwrite=True)
    assert "\n" not in str(error.value)
    assert sorted(tmp_path.iterdir()) == names


def test_what_a_file_says_of_the_model_is_kept(tmp_path, vocabulary):
    """Name, author, licence; not what is no longer true."""
    more = {"general.name": "Fox", "general.tags": ["a", "b"], "general.file_type": 2}
    path, _ = quantised(vocabulary, tmp_path / "a.gguf", ["Q8_0"], keys=more)
    for ggml_type in ("F16", None):
        out = tmp_path / f"{ggml_type}.gguf"
        llama2.save_gguf(llama2.open_checkpoint(path), out, ggml_type)
        fields = gguf.GGUFReader(out).fields
        assert fields["general.name"].contents() == "Fox"
        assert fields["general.tags"].contents() == ["a", "b"]
        assert ("general.file_type" in fields) == (ggml_type is None)
        assert fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION


def test_the_command_line_says_what_it_wrote(small, tmp_path, cli):
    argv = ["--save", tmp_path / "out.gguf", "--type", "F16"]
    status, out, err = cli(*argv, model=small)
    assert (status, out) == (0, "")
    for word in ("out.gguf", "F16", "GB"):
        assert word in err
    status, _, err = cli(*argv, model=small)
    assert status == 2
    assert "--force" in err
    assert cli(*argv, "--force", "--quiet", model=small) == (0, "", "")


# --------------------------------------------------------------------------------------------------
# Beside llama.cpp


@pytest.mark.skipif(not BUNDLED.exists(), reason="the bundled model is not here")
@pytest.mark.parametrize("kind", [None, "F16", "Q8_0"])
def test_llama_cpp_writes_the_same_text(tmp_path, kind):
    """Greedy; it reads what is saved of the bundled model."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not here")
    path = tmp_path / "saved.gguf"
    llama2.save_gguf(llama2.open_checkpoint(BUNDLED), path, kind)
    theirs = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, verbose=False)
    model, tokenizer = llama2.load(path)
    prompt = "The princess opened the door and"
    ids = tokenizer.encode(prompt)
    assert theirs.tokenize(prompt.encode()) == ids
    pieces = llama2.stream_text(model, tokenizer, ids, sampling=GREEDY, max_new_tokens=24)
    said = theirs.create_completion(ids, max_tokens=24, temperature=0.0)
    assert said["choices"][0]["text"] == "".join(pieces)


# --------------------------------------------------------------------------------------------------
# Names


def test_public_names_exist_and_are_described():
    assert len(set(llama2.__all__)) == len(llama2.__all__)
    for name in llama2.__all__:
        assert getattr(llama2, name).__doc__, name
