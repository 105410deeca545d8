"""Damaged and hostile files: one error that names the file and the item, soon and in little memory.

A valid model is taken apart into lists, changed, and written again by a writer of this file's own,
since gguf's refuses what must be tried here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import llama2
from test_llama2 import CONFIG, make_weights, quantised, write_files, write_gguf, write_hf

# --------------------------------------------------------------------------------------------------
# A GGUF file as lists that a test may change

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
SIZES = {U8: 1, I8: 1, U16: 2, I16: 2, U32: 4, I32: 4, BOOL: 1, U64: 8, I64: 8}


def taken_apart(path):
    """Metadata as [name, type, value], tensors as [name, dims (fastest first), type, bytes].

    The value of an array is (type, values).
    """
    reader = gguf.GGUFReader(path)
    keys = []
    for name, field in reader.fields.items():
        value_type, *inner = map(int, field.types[:2])
        value = field.contents()
        if not name.startswith("GGUF."):
            keys.append([name, value_type, [*inner, value] if inner else value])
    tensors = []
    for t in reader.tensors:
        tensors.append([t.name, t.shape.tolist(), int(t.tensor_type), t.data.tobytes()])
    return [keys, tensors]


def integer(number, size):
    """So many bytes of it, little-endian."""
    return (number % 256**size).to_bytes(size, "little")


def u32(number):
    return integer(number, 4)


def u64(number):
    return integer(number, 8)


def string(text):
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return u64(len(data)) + data


def value_fields(value_type, value):
    """The bytes of a value, a field at a time; the items of an array are one."""
    if value_type == STRING:
        data = string(value)
        yield from (data[:8], data[8:])
    elif value_type == ARRAY:
        inner, values = value
        yield from (u32(inner), u64(len(values)))
        yield b"".join(field for item in values for field in value_fields(inner, item))
    elif value_type in SIZES:
        yield integer(value, SIZES[value_type])
    else:
        yield struct.pack("<f" if value_type == F32 else "<d", value)


def header_fields(keys, tensors):
    """The bytes of a header, a field at a time."""
    yield from (b"GGUF", u32(3), u64(len(tensors)), u64(len(keys)))
    for name, value_type, value in keys:
        yield from value_fields(STRING, name)
        yield u32(value_type)
        yield from value_fields(value_type, value)
    offset = 0
    for name, dims, value_type, data in tensors:
        yield from value_fields(STRING, name)
        yield u32(len(dims))
        yield from map(u64, dims)
        yield from (u32(value_type), u64(offset))
        offset += len(data) + -len(data) % 32


def joined(fields, tensors=()):
    """A file's bytes."""
    parts = [b"".join(fields), *(tensor[3] for tensor in tensors)]
    return b"".join(part + bytes(-len(part) % 32) for part in parts)


def written(path, keys, tensors):
    """The file that such lists describe."""
    path.write_bytes(joined(header_fields(keys, tensors), tensors))
    return path


def changed(keys, name, value_type, value):
    """The keys with another value of one."""
    return [entry for entry in keys if entry[0] != name] + [[name, value_type, value]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory, vocabulary):
    """The keys and tensors of a valid model, loaded once: what is imported then is not timed."""
    path = tmp_path_factory.mktemp("valid") / "valid.gguf"
    more = {"llama.rope.freq_base": 10000.0, "tokenizer.ggml.add_bos_token": True}
    quantised(vocabulary, path, ("Q4_0", "Q8_0", "F16", "BF16", "Q5_1"), CONFIG, more)
    llama2.load(path)
    return taken_apart(path)


@pytest.fixture(scope="module")
def directory(tmp_path_factory, vocabulary):
    """{file name: bytes} of the tiny model in two files with an index."""
    path = tmp_path_factory.mktemp("directory") / "hf"
    write_hf(path, CONFIG, make_weights(CONFIG), files=2)
    shutil.copy(vocabulary[0], path)
    files = {
        "tokenizer_config.json": {"chat_template": "", "add_bos_token": True},
        "generation_config.json": {"eos_token_id": 2},
        "added_tokens.json": {"</s>": 2},
    }
    write_files(path, files)
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


# --------------------------------------------------------------------------------------------------
# What must come of each

STATM = Path("/proc/self/statm")  # Linux: this process's memory in pages


@contextlib.contextmanager
def limited():
    """Let this process take 300 MB more of memory (on Linux), and 5 seconds."""
    start = time.process_time()
    if not STATM.exists():
        yield
    else:
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = int(STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + 300 * 2**20, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - start < 5


def read(reader, path):
    """What a reader gives, or None, and what it says is wrong."""
    try:
        with limited():
            return reader(path), ""
    except (ValueError, OSError) as error:
        said = str(error)
    assert path.name in said and said.isprintable() and len(said) < 600
    return None, said


@limited()
def outcome(path):
    """Load a model and generate two tokens: "runs", or what the error said."""
    loaded, said = read(llama2.load, path)
    if said:
        return said
    model, tokenizer = loaded
    try:
        ids = tokenizer.encode("ab \u00e9\U0001f600")
        new = list(llama2.generate(model, ids, max_new_tokens=2, stop_ids=()))
        tokenizer.decode(new)
    except ValueError as error:
        return str(error)
    return "runs"


def refused(path, word):
    """The outcome is an error that holds the word, whatever its case."""
    said = outcome(path)
    assert said != "runs" and word.lower() in said.lower()


def test_what_all_changes_start_from_runs(parts, directory, tmp_path):
    """A context is allocated only when it is asked for."""
    keys = changed(parts[0], "llama.context_length", U32, 2**28)
    assert outcome(written(tmp_path / "a.gguf", keys, parts[1])) == "runs"
    assert outcome(write_files(tmp_path / "model", directory)) == "runs"


# --------------------------------------------------------------------------------------------------
# GGUF


def start_of_gguf(tensors, keys, *fields):
    return joined([b"GGUF", u32(3), u64(tensors), u64(keys), *fields])


HEADERS = {
    "another magic": (b"GGML" + u32(3), "starts with b'GGML'"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3), "endian"),
    "a long key": (start_of_gguf(0, 1, u64(2**62)), "a text of 46"),
    "an unknown type": (start_of_gguf(0, 1, string("k"), u32(13)), "k: has the unknown type"),
    "many strings": (
        start_of_gguf(0, 1, string("k"), u32(ARRAY), u32(STRING), u64(2**60)),
        "bad.gguf: k:",
    ),
}


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers(tmp_path, case):
    """Each is met before anything of the size that it claims is allocated."""
    data, word = HEADERS[case]
    path = tmp_path / "bad.gguf"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(4 * 10**8)  # zeros, of which the disk holds none
    refused(path, word)


def test_no_control_characters_reach_the_terminal(parts, tmp_path):
    """Escapes and their like, in names of tensors, keys and values."""
    keys, tensors = parts
    mark = "\u202e\x1b[2J\x9b31m\n\r"
    renamed = [[f"x{mark}y.weight", *tensors[0][1:]], *tensors[1:]]
    other = changed(keys, "general.architecture", STRING, f"x{mark}y")
    odd = [*keys, [f"k{mark}", ARRAY, (ARRAY, [])]]
    for content in ((keys, renamed), (other, tensors), (odd, tensors)):
        refused(written(tmp_path / "a.gguf", *content), "[2J")


N = CONFIG.vocab_size
TEXTS = [f"t{i}" for i in range(N - 1)]
VALUES_OF_KEYS = [
    ("llama.block_count", U32, 2**28, "layers"),
    ("llama.context_length", U32, 2**31, "max_position_embeddings"),
    ("llama.embedding_length", U32, 2**27, "embd"),
    ("split.count", U32, 65535, "65535"),
    # SentencePiece is C++, and what it would choke on is refused before, or by it
    ("tokenizer.ggml.tokens", ARRAY, (STRING, TEXTS), "319"),
    ("tokenizer.ggml.tokens", ARRAY, (STRING, ["same"] * N), "same"),
    ("tokenizer.ggml.token_type", ARRAY, (I32, [6] * N), "byte"),
]


@pytest.mark.parametrize(("key", "value_type", "value", "word"), VALUES_OF_KEYS)
def test_hostile_values(parts, tmp_path, key, value_type, value, word):
    """A count is believed only as far as the file bears it out."""
    keys = changed(parts[0], key, value_type, value)
    refused(written(tmp_path / "a.gguf", keys, parts[1]), word)


# --------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("ggml_type", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "F16", "BF16", "F32"])
def test_scales_that_are_no_numbers(vocabulary, tmp_path, ggml_type):
    """They are told at the logits."""
    quantised(vocabulary, tmp_path / "good.gguf", [ggml_type])
    keys, tensors = taken_apart(tmp_path / "good.gguf")
    for tensor in tensors:
        if tensor[0] in ("blk.0.ffn_up.weight", "output.weight"):
            tensor[3] = b"\xff" * len(tensor[3])
    assert "finite" in outcome(written(tmp_path / "bad.gguf", keys, tensors))


# --------------------------------------------------------------------------------------------------
# What is no regular file


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no FIFOs")
@pytest.mark.parametrize("file_type", ["FIFO", "/dev/zero", "sparse"])
@pytest.mark.parametrize(
    "name",
    ["model-00001-of-00002.safetensors", "tokenizer.model", "tokenizer_config.json", "a.gguf"],
)
def test_only_regular_files_are_read(directory, tmp_path, name, file_type):
    """A FIFO blocks for ever, /dev/zero has no end."""
    path = write_files(tmp_path / "model", directory) / name
    path.unlink(missing_ok=True)
    if file_type == "FIFO":
        os.mkfifo(path)
    elif file_type == "/dev/zero":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as stream:
            stream.truncate(2**40)
    refused(path if name == "a.gguf" else path.parent, name)


# --------------------------------------------------------------------------------------------------
# Saving


def test_a_file_may_be_saved_to_itself(parts, tmp_path):
    """Its weights are mapped, and stay so until all are written."""
    path = written(tmp_path / "a.gguf", *parts)
    tokens = torch.tensor([[1, 5, 9]])
    expected = llama2.load(path)[0](tokens)
    llama2.save_gguf(llama2.open_checkpoint(path), path, overwrite=True)
    assert torch.equal(llama2.load(path)[0](tokens), expected)
    assert os.listdir(tmp_path) == ["a.gguf"]


def test_numbers_beyond_f16(tmp_path, keys, tensors):
    """Weights that would become infinite are refused, and the target is not touched."""
    large = {"output.weight": np.full_like(tensors["output.weight"], 1e5)}
    path = write_gguf(tmp_path / "a.gguf", keys, tensors | large)
    for ggml_type in ("F16", "Q8_0", "Q4_0"):
        with pytest.raises(ValueError, match="output.weight"):
            llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / "b.gguf", ggml_type)
    assert os.listdir(tmp_path) == ["a.gguf"]
