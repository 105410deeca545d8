"""Damaged and hostile files: one error that names the file and the item, soon and in little memory.

What is damaged by chance is in test_fuzz.py. Here is what chance would seldom find: claims that would
take long or much memory, what SentencePiece would choke on, and what is no regular file.
"""

import contextlib
import json
import os
import struct
import time
from pathlib import Path

import pytest

import llama2
from test_llama2 import cases, write_files

# --------------------------------------------------------------------------------------------------
# What must come of each file


def contents(folder):
    """The files of a folder by their names."""
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def directory(forms, tmp_path_factory):
    """{file name: bytes} of a model in two files with an index."""
    files = contents(forms[0] / "hf_index") | {
        "tokenizer_config.json": b'{"chat_template": "", "add_bos_token": true}',
        "generation_config.json": b'{"eos_token_id": 2}',
        "added_tokens.json": b'{"</s>": 2}',
    }
    assert outcome(write_files(tmp_path_factory.mktemp("directory"), files)) == "runs"
    return files


STATM = Path("/proc/self/statm")  # Linux: this process's memory in pages


@contextlib.contextmanager
def lowered(name, limit):
    """Another limit of the system for this process."""
    resource = pytest.importorskip("resource")  # not on Windows
    number = getattr(resource, name)
    before = resource.getrlimit(number)
    resource.setrlimit(number, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(number, before)


@contextlib.contextmanager
def limited(path=None):
    """Let this process take 300 MB more of memory (on Linux), besides a file, and 5 seconds."""
    start, memory = time.process_time(), contextlib.nullcontext()
    if STATM.exists():
        pages = int(STATM.read_text().split()[0])
        size = 300 * 2**20 + (path.stat().st_size if path else 0)
        memory = lowered("RLIMIT_AS", pages * os.sysconf("SC_PAGESIZE") + size)
    with memory:
        yield
    assert time.process_time() - start < 5


def read(reader, path):
    """What a reader gives, or None, and what it says is wrong."""
    try:
        with limited(path):
            return reader(path), ""
    except (ValueError, OSError) as error:
        said = str(error)
    assert path.name in said and said.isprintable() and len(said) < 600
    return None, said


def outcome(path):
    """Load a model and generate two tokens: "runs", or what the error said."""
    loaded, said = read(llama2.load, path)
    return said or generated(*loaded)


@limited()
def generated(model, tokenizer):
    """The same for a model that was loaded."""
    try:
        ids = tokenizer.encode("ab \u00e9\U0001f600")
        new = list(llama2.generate(model, ids, max_new_tokens=2, stop_ids=()))
        tokenizer.decode(new)
    except ValueError as error:
        return str(error)
    return "runs"


# --------------------------------------------------------------------------------------------------
# GGUF

KEY = struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 1) + b"k"
HEADERS = {  # case: bytes, what the error says
    "big-endian": (b"GGUF\0\0\0\3", "little-endian"),
    "a long key": (KEY[:24] + bytes(7) + b"\x40", "a text of 46"),
    "an unknown type": (KEY + b"\r\0\0\0", "k: has the unknown type"),
    "many strings": (KEY + struct.pack("<IIQ", 9, 8, 2**60), "bad.gguf: k:"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers(tmp_path, case):
    """Each is met before anything of the size that it claims is allocated."""
    data, said = HEADERS[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    os.truncate(path, 4 * 10**8)  # zeros, of which the disk holds none
    assert said in outcome(path)


# SentencePiece is C++, and what it would choke on is refused before, or by it.
HOSTILE_VALUES = """
llama.block_count | 268435456 | layers
llama.embedding_length | 134217728 | embd
tokenizer.ggml.tokens | ["same"] | same
tokenizer.ggml.token_type | [6] | byte
"""


@cases("key, value, said", HOSTILE_VALUES)
def test_hostile_values(write_tiny, key, value, said):
    """A count is believed only as far as the file bears it out; a list is as long as it must be."""
    value = json.loads(value)
    assert said in outcome(write_tiny({key: 320 * value if isinstance(value, list) else value}))


# --------------------------------------------------------------------------------------------------
# What is no regular file


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no FIFOs")
@pytest.mark.parametrize(
    "name",
    ["model-00001-of-00002.safetensors", "tokenizer.model", "tokenizer_config.json", "a.gguf"],
)
def test_only_regular_files_are_read(directory, tmp_path, name):
    """A FIFO blocks for ever, /dev/zero has no end."""
    path = write_files(tmp_path / "model", directory) / name
    fifo, sparse = tmp_path / "fifo", tmp_path / "sparse"
    os.mkfifo(fifo)
    sparse.touch()
    os.truncate(sparse, 2**40)
    for target in ("/dev/zero", fifo, sparse):
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        assert name in outcome(path if name == "a.gguf" else path.parent)
