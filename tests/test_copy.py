"""What is loaded can be trained, looked into, copied and saved; what is wrong with it is said."""

from __future__ import annotations

import copy
import errno
import io
import math
import os
import pickle
import re
import subprocess
import sys
from dataclasses import replace

import gguf
import pytest
import torch
from torch import nn

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
        with pytest.raises(ValueError, match=rf"\A.*{match}.*\Z"):  # one line
            llama2.load(source, **options)


def test_calls_with_what_is_no_tensor_of_ids(model):
    for odd in ("text", [1, 2], TOKENS[0], TOKENS.float()):
        with pytest.raises(ValueError, match="tokens"):
            model(odd)


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
    expected = llama2.load(forms[0] / "hf")[0](TOKENS[:1, :9])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)  # the next number
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free + 4, limits[1]))
    try:
        model, _ = llama2.load(forms[0] / "hf")
        assert torch.equal(model(TOKENS[:1, :9]), expected)
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
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight + 1)  # no longer the embeddings
    llama2.save_gguf(model, tmp_path / "apart.gguf", tokenizer=tokenizer)
    assert_close(llama2.load(tmp_path / "apart.gguf")[0](tokens), model(tokens), 1e-6)


def test_widths_without_whole_blocks_are_saved_as_f16(vocabulary, tmp_path):
    path, _ = quantised(
        vocabulary, tmp_path / "x.gguf", ["F32"], replace(WIDE, intermediate_size=80)
    )
    llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / "q.gguf", "Q8_0")
    weights = llama2.open_checkpoint(tmp_path / "q.gguf").weights
    types = [weights[f"layers.0.mlp.{name}_proj.weight"].ggml_type for name in ("up", "down")]
    assert types == ["Q8_0", "F16"]


# --------------------------------------------------------------------------------------------------
# Copies


@torch.no_grad()
def test_copies_hold_the_file_once(small):
    """Not once for every tensor that lies in it."""
    model, _ = llama2.load(small)
    expected = model(TOKENS[:1, :9])
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    stored = torch.load(file, weights_only=False)
    pickled = pickle.loads(pickle.dumps(model))
    sizes = [len(file.getvalue())]
    for other in (copy.deepcopy(model), pickled, stored, model.share_memory()):
        sizes.append(len(pickle.dumps(other)))
        assert torch.equal(other(TOKENS[:1, :9]), expected)
    assert max(sizes) < 1.2 * small.stat().st_size


@torch.no_grad()
def test_models_of_one_checkpoint_are_their_own(tmp_path, vocabulary):
    """Changing one changes neither another, nor the checkpoint, nor the file."""
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["F16", "Q8_0", "F32"])
    content = path.read_bytes()
    checkpoint = llama2.open_checkpoint(path)
    one, _ = llama2.load(checkpoint)
    two, _ = llama2.load(checkpoint)
    expected = two(TOKENS[:1, :9])
    for t in (*one.parameters(), *one.buffers()):
        t.zero_()
    for model in (two, llama2.load(checkpoint)[0]):
        assert torch.equal(model(TOKENS[:1, :9]), expected)
    assert path.read_bytes() == content


def test_states_of_other_types_are_refused(tmp_path, vocabulary):
    """Q4_0 and Q4_K have as many bytes per row."""
    models = []
    for ggml_type in ("Q4_0", "Q4_K", "F32"):
        path, _ = quantised(vocabulary, tmp_path / f"{ggml_type}.gguf", [ggml_type])
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
@pytest.mark.parametrize("ggml_type", [None, "F32", "Q8_0"])
@torch.no_grad()
def test_a_model_becomes_a_gguf_file(small, tmp_path, ggml_type, compile):
    model, tokenizer = llama2.load(small, compile=compile)
    llama2.save_gguf(model, tmp_path / "out.gguf", ggml_type, tokenizer=tokenizer)
    again, same = llama2.load(tmp_path / "out.gguf")
    assert same.encode("a fox") == tokenizer.encode("a fox")
    tolerance = 0.02 if ggml_type == "Q8_0" else 1e-4
    assert_close(again(TOKENS[:1, :9]), model(TOKENS[:1, :9]), tolerance)
    if ggml_type is None:
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


REPLACED = [  # a module of a model, another one in its place, what the error says
    ("layers.0.mlp.up_proj", nn.Linear(64, 96), r"unknown: layers\.0\.mlp\.up_proj\.bias"),
    ("layers.0.mlp.up_proj", nn.Identity(), "up_proj, a Identity"),
    # As examples/lora.py hangs an adapter on a projection.
    ("layers.1.self_attn.q_proj.lora_A", nn.Linear(64, 2, bias=False), r"unknown: .*\.lora_A"),
    ("norm", nn.LayerNorm(64, bias=False), "norm, a LayerNorm"),
    ("lm_head", nn.Linear(64, 300, bias=False), r"lm_head\.weight is \[300, 64\]; .* \[320, 64\]"),
    ("layers", nn.ModuleList([llama2.Block(CONFIG, 0)]), r"missing: layers\.1\."),
    ("layers.2", llama2.Block(CONFIG, 2), r"unknown: layers\.2\."),
    ("PEFT", None, r"q_proj.*a Linear|lora_A"),
]


@pytest.mark.parametrize(("name", "module", "said"), REPLACED)
def test_what_a_file_cannot_hold_is_refused(model_path, tmp_path, name, module, said):
    """Silently dropped, each of them would give a file of another model."""
    model, tokenizer = llama2.load(model_path, trainable=True)
    if name == "PEFT":
        peft = pytest.importorskip("peft")
        peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["q_proj"], r=2), model)
    else:
        model.set_submodule(name, module)
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
    command = [sys.executable, "-c", SAVE_TO_A_FULL_DISK, str(small), str(out)]
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


def test_only_regular_files_are_replaced(small, tmp_path):
    (tmp_path / "directory").mkdir()
    paths = [tmp_path / "directory", tmp_path / "absent" / "out.gguf"]
    if hasattr(os, "mkfifo"):  # Windows has no FIFOs
        paths.append(tmp_path / "fifo")
        os.mkfifo(paths[-1])
    names = sorted(tmp_path.iterdir())
    for out in paths:
        with pytest.raises((ValueError, OSError), match=re.escape(str(out))) as error:
            llama2.save_gguf(llama2.open_checkpoint(small), out, overwrite=True)
        assert "\n" not in str(error.value)
    assert sorted(tmp_path.iterdir()) == names


def test_what_a_file_says_of_the_model_is_kept(tmp_path, vocabulary):
    """Name, author, licence; not what is no longer true: its types, or keys of what was changed."""
    more = {"general.name": "Fox", "general.tags": ["a", "b"], "general.file_type": 2}
    more["llama.rope.freq_base"] = 1e4
    path, _ = quantised(vocabulary, tmp_path / "a.gguf", ["Q8_0"], keys=more)
    out = tmp_path / "b.gguf"
    for ggml_type, theta in (("F16", 1e4), (None, 1e4), (None, 5e5)):
        checkpoint = llama2.open_checkpoint(path)
        checkpoint.config = replace(checkpoint.config, rope_theta=theta)
        llama2.save_gguf(checkpoint, out, ggml_type, overwrite=True)
        fields = gguf.GGUFReader(out).fields
        assert fields["general.name"].contents() == "Fox"
        assert fields["general.tags"].contents() == ["a", "b"]
        assert ("general.file_type" in fields) == (ggml_type is None)
        assert fields["general.quantization_version"].contents() == gguf.GGML_QUANT_VERSION
        again = llama2.open_checkpoint(out)
        assert again.config == checkpoint.config
        assert again.tokenizer.encode("a fox") == checkpoint.tokenizer.encode("a fox")


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
@pytest.mark.parametrize("ggml_type", [None, "F16", "Q8_0"])
def test_llama_cpp_writes_the_same_text(tmp_path, ggml_type):
    """Greedy; it reads what is saved of the bundled model."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not here")
    path = tmp_path / "saved.gguf"
    llama2.save_gguf(llama2.open_checkpoint(BUNDLED), path, ggml_type)
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
