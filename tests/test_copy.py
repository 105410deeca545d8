"""What is loaded can be trained, looked into, copied and saved; what is wrong with it is said."""

from __future__ import annotations

import copy
import errno
import io
import math
import os
import pickle
import shutil
from dataclasses import replace
from functools import partial

import gguf
import pytest
import torch

import llama2
from test_llama2 import (
    CONFIG,
    GREEDY,
    SHAPE,
    TOKENS,
    WIDE,
    assert_close,
    make_hf,
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
        ({"trainable": True, "dtype": torch.bfloat16}, "dtype is bfloat16; expected float32$"),
        ({"context": 10**6}, "1000000"),
    ],
)
def test_wrong_options_of_load(small, options, match):
    with pytest.raises(ValueError, match=match) as error:
        llama2.load(small, **options)
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


def test_what_cannot_be_saved(small, tmp_path):
    model, tokenizer = llama2.load(small)
    save = partial(llama2.save_gguf, model, tmp_path / "out.gguf")
    with pytest.raises(ValueError, match="tokenizer"):
        save()
    model.norm.bias = torch.nn.Parameter(torch.ones(256))
    with pytest.raises(ValueError, match="cannot hold norm.bias"):
        save(tokenizer=tokenizer)
    model.layers[0].mlp.up_proj = torch.nn.Identity()
    with pytest.raises(ValueError, match="up_proj.*Identity"):
        save(tokenizer=tokenizer)
    assert not (tmp_path / "out.gguf").exists()


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


def test_what_a_file_says_of_the_model_is_kept(tmp_path, vocabulary):
    """Name, author, licence; not what is no longer true."""
    more = {"general.name": "Fox", "general.tags": ["a", "b"], "general.file_type": 2}
    path, _ = quantised(vocabulary, tmp_path / "a.gguf", ["Q8_0"], keys=more)
    llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / "b.gguf", "F16")
    fields = gguf.GGUFReader(tmp_path / "b.gguf").fields
    assert fields["general.name"].contents() == "Fox"
    assert fields["general.tags"].contents() == ["a", "b"]
    assert "general.file_type" not in fields
    assert fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION


def test_the_command_line_says_what_it_wrote(small, tmp_path, cli):
    argv = ["--save", tmp_path / "out.gguf", "--type", "F16"]
    status, out, err = cli(*argv, model=small)
    assert (status, out) == (0, "")
    for word in ("out.gguf", "F16", "MB"):
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
