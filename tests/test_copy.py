"""What is loaded can be trained, looked into, copied and saved; what is wrong with it is said."""

from __future__ import annotations

import copy
import errno
import io
import os
import pickle

import pytest
import torch
import torch.nn.functional as F

import llama2
from test_llama2 import GREEDY, SHAPE, TOKENS, assert_close, make_weights, quantised, write_hf

BUNDLED = llama2.DEFAULT_MODEL


@pytest.fixture
def small(vocabulary, tmp_path):
    """A GGUF file of quantised matrices."""
    path, _ = quantised(vocabulary, tmp_path / "small.gguf", ["Q4_K", "Q8_0"])
    return path


# --------------------------------------------------------------------------------------------------
# Loading


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"dtype": "float33"}, "float33"),
        ({"dtype": 3}, "dtype"),
        ({"device": "gpu"}, "gpu"),
        ({"device": "cuda:77"}, "cuda:77"),
        ({"trainable": True, "dtype": torch.bfloat16}, "dtype"),
        ({"context": 10**6}, "1000000"),
    ],
)
def test_wrong_options_of_load(small, options, match):
    with pytest.raises(ValueError, match=match) as error:
        llama2.load(small, **options)
    assert "\n" not in str(error.value)


def test_dtypes_may_be_torchs_own(small):
    model, _ = llama2.load(small, dtype=torch.bfloat16)
    assert model.norm.weight.dtype == torch.bfloat16


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
    (tmp_path / "model" / "tokenizer.model").write_bytes(vocabulary[0].read_bytes())
    model, _ = llama2.load(tmp_path / "model")
    sampling = llama2.Sampling(temperature=2.0, top_p=1.0, seed=0)
    ids = list(llama2.generate(model, [1, 5, 6], sampling, 40, stop_ids=()))
    assert len(ids) == 40
    assert max(ids) < 320


def test_weights_that_are_not_numbers_are_named(tmp_path, vocabulary):
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["F32"])
    model, _ = llama2.load(path)
    with torch.no_grad():
        model.layers[0].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"x\.gguf.*layers\.0\.mlp\.up_proj"):
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


def test_every_weight_of_a_trainable_model_is_trained(small):
    frozen, _ = llama2.load(small)
    model, _ = llama2.load(small, trainable=True)
    assert_close(model(TOKENS[:1, :9]), frozen(TOKENS[:1, :9]))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(5):
        logits = model(TOKENS[:2, :-1]).flatten(0, 1)
        loss = F.cross_entropy(logits, TOKENS[:2, 1:].flatten())
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.3
    for name, p in model.state_dict().items():
        assert not torch.equal(p, before[name]), name


def test_a_frozen_model_is_frozen_and_adapters_on_it_are_trained(small):
    model, _ = llama2.load(small)
    assert not any(p.requires_grad for p in model.parameters())
    model(TOKENS[:1, :5]).numpy()  # which torch refuses where a gradient is needed
    added = torch.nn.Parameter(torch.zeros(model.config.hidden_size))
    model.layers[0].register_forward_hook(lambda module, args, y: y + added)
    model(TOKENS[:1, :5]).square().mean().backward()
    assert added.grad.abs().sum() > 0


# --------------------------------------------------------------------------------------------------
# Copies


def saved_by_torch(model):
    file = io.BytesIO()
    torch.save(model, file)
    return file.getvalue()


@pytest.mark.skipif(not BUNDLED.exists(), reason="the bundled model is not here")
@pytest.mark.parametrize("compile", [False, True])
@torch.no_grad()
def test_copies_hold_the_file_once(compile):
    """Not once for every tensor that lies in it."""
    model, _ = llama2.load(BUNDLED, compile=compile)
    wanted = model(TOKENS[:1, :9])
    most = 1.2 * BUNDLED.stat().st_size
    pickled = pickle.dumps(model)
    stored = saved_by_torch(model)
    assert len(pickled) < most
    assert len(stored) < most
    copied = copy.deepcopy(model)
    storages = {}
    for t in (*copied.parameters(), *copied.buffers()):
        storages[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    assert sum(storages.values()) < most
    again = torch.load(io.BytesIO(stored), weights_only=False)
    for other in (copied, pickle.loads(pickled), again, model.share_memory()):
        assert torch.equal(other(TOKENS[:1, :9]), wanted)


@torch.no_grad()
def test_models_of_one_checkpoint_are_their_own(tmp_path, vocabulary):
    """Changing one changes neither another, nor the checkpoint, nor the file."""
    path, _ = quantised(vocabulary, tmp_path / "x.gguf", ["F16", "Q8_0", "F32"])
    content = path.read_bytes()
    path.chmod(0o444)
    checkpoint = llama2.open_checkpoint(path)
    one, _ = llama2.load(checkpoint)
    two, _ = llama2.load(checkpoint)
    wanted = two(TOKENS[:1, :9])
    for t in (*one.parameters(), *one.buffers()):
        t.zero_()
    three, _ = llama2.load(checkpoint)
    assert torch.equal(two(TOKENS[:1, :9]), wanted)
    assert torch.equal(three(TOKENS[:1, :9]), wanted)
    assert not any(t.any() for t in (*one.parameters(), *one.buffers()))
    assert path.read_bytes() == content


@pytest.mark.parametrize(("ours", "other"), [("Q4_0", "Q4_K"), ("Q5_K", "Q5_0"), ("Q4_0", "F32")])
def test_states_of_other_types_are_refused(tmp_path, vocabulary, ours, other):
    """Q4_0 and Q4_K, Q5_0 and Q5_K have as many bytes per row."""
    for kind in (ours, other):
        quantised(vocabulary, tmp_path / f"{kind}.gguf", [kind])
    model, _ = llama2.load(tmp_path / f"{ours}.gguf")
    wrong, _ = llama2.load(tmp_path / f"{other}.gguf")
    model.load_state_dict(model.state_dict())
    with pytest.raises((ValueError, RuntimeError)):
        model.load_state_dict(wrong.state_dict())


@torch.no_grad()
def test_state_dicts_of_transformers():
    transformers = pytest.importorskip("transformers")
    shape = SHAPE | {"rms_norm_eps": 1e-5}
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)).eval()
    ours = llama2.Llama(llama2.Config(**shape)).eval()
    state = llama2.state_dict_from_hf(theirs.state_dict(), ours.config)
    ours.load_state_dict(state)
    assert_close(ours(TOKENS), theirs(TOKENS).logits, 1e-5)


# --------------------------------------------------------------------------------------------------
# Saving


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", [None, "F32", "Q8_0"])
@torch.no_grad()
def test_a_model_becomes_a_gguf_file(small, tmp_path, kind, compile):
    model, tokenizer = llama2.load(small, compile=compile)
    llama2.save_gguf(model, tmp_path / "out.gguf", kind, tokenizer=tokenizer)
    with pytest.raises(ValueError, match="overwrite"):  # an existing file is not replaced silently
        llama2.save_gguf(model, tmp_path / "out.gguf", kind, tokenizer=tokenizer)
    again, same = llama2.load(tmp_path / "out.gguf")
    assert same.encode("a fox") == tokenizer.encode("a fox")
    tolerance = 0.02 if kind == "Q8_0" else 1e-4
    assert_close(again(TOKENS[:1, :9]), model(TOKENS[:1, :9]), tolerance)
    if kind is None:
        blocks = dict(model.named_buffers())
        for name, value in again.named_buffers():
            assert torch.equal(value, blocks[name]), name


@pytest.mark.skipif(not BUNDLED.exists(), reason="the bundled model is not here")
def test_a_trained_model_is_saved_as_it_is(tmp_path):
    """Tied embeddings and a chat template included."""
    model, tokenizer = llama2.load(BUNDLED, trainable=True)
    tokenizer.vocabulary.chat_template = "{{ messages }} [INST] <<SYS>>"
    tokens = torch.tensor([tokenizer.encode("Once upon a time, in a small house,")])
    model(tokens).square().mean().backward()
    torch.optim.SGD(model.parameters(), 0.01).step()
    with torch.no_grad():
        wanted = model.eval()(tokens)
    llama2.save_gguf(model, tmp_path / "out.gguf", tokenizer=tokenizer)
    again, same = llama2.load(tmp_path / "out.gguf")
    with torch.no_grad():
        assert_close(again(tokens), wanted, 1e-6)
    assert again.config == model.config
    assert same.chat_template == tokenizer.vocabulary.chat_template
    assert same.encode("A fox.\n") == tokenizer.encode("A fox.\n")


def test_what_cannot_be_saved(small, tmp_path):
    model, tokenizer = llama2.load(small)
    with pytest.raises(ValueError, match="tokenizer"):
        llama2.save_gguf(model, tmp_path / "out.gguf")
    model.layers[0].mlp.up_proj = torch.nn.Identity()
    with pytest.raises(ValueError, match="up_proj|Identity"):
        llama2.save_gguf(model, tmp_path / "out.gguf", tokenizer=tokenizer)
    assert not (tmp_path / "out.gguf").exists()


def test_a_full_disk_leaves_nothing(small, tmp_path, monkeypatch):
    """The error names the file, which the system's does not."""

    def full(number):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="out.gguf"):
        llama2.save_gguf(llama2.open_checkpoint(small), tmp_path / "out.gguf")
    assert not list(tmp_path.glob("out*"))


def test_what_a_file_says_of_the_model_is_kept(tmp_path, vocabulary):
    """Name, author, licence; not what is no longer true."""
    gguf = pytest.importorskip("gguf")
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
    """Greedy; it reads the bundled model and what is saved of it."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama.cpp is not here")
    path = BUNDLED
    if kind:
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
