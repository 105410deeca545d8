"""Damaged and hostile files: one error that names the file and the item, soon and in little memory.

A valid model is taken apart into lists, changed, and written again by a writer of this file's own,
since gguf's refuses what must be tried here.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import struct
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import llama2
from test_llama2 import CONFIG, make_weights, quantised, write_gguf, write_hf

# --------------------------------------------------------------------------------------------------
# A GGUF file as lists that a test may change

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LETTERS = dict(zip([U8, I8, U16, I16, U32, I32, F32, BOOL, U64, I64, F64], "BbHhIif?Qqd"))


def taken_apart(path):
    """Metadata as [name, type, value], tensors as [name, dims (fastest first), type, bytes].

    The value of an array is (type, values).
    """
    reader = gguf.GGUFReader(path)
    keys = []
    for name, field in reader.fields.items():
        kind = int(field.types[0])
        value = field.contents()
        if kind == ARRAY:
            value = (int(field.types[1]), value)
        if not name.startswith("GGUF."):
            keys.append([name, kind, value])
    tensors = []
    for t in reader.tensors:
        dims = t.shape.tolist()
        tensors.append([t.name, dims, int(t.tensor_type), t.data.tobytes()])
    return keys, tensors


def u32(number):
    return struct.pack("<I", number)


def u64(number):
    return struct.pack("<Q", number)


def string(text):
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    return u64(len(data)) + data


def value_fields(kind, value):
    """The bytes of a value, a field at a time; of an array two items, then all others as one."""
    if kind == STRING:
        data = string(value)
        yield from (data[:8], data[8:])
    elif kind == ARRAY:
        inner, values = value
        yield from (u32(inner), u64(len(values)))
        items = [b"".join(value_fields(inner, item)) for item in values]
        yield from (*items[:2], b"".join(items[2:]))
    else:
        yield struct.pack("<" + LETTERS[kind], value)


def header_fields(keys, tensors):
    """The bytes of a header, a field at a time."""
    yield from (b"GGUF", u32(3), u64(len(tensors)), u64(len(keys)))
    for name, kind, value in keys:
        yield from value_fields(STRING, name)
        yield u32(kind)
        yield from value_fields(kind, value)
    offset = 0
    for name, dims, kind, data in tensors:
        yield from value_fields(STRING, name)
        yield u32(len(dims))
        yield from map(u64, dims)
        yield from (u32(kind), u64(offset))
        offset += len(data) + -len(data) % 32


def joined(fields, tensors=()):
    """A file's bytes."""
    parts = [b"".join(fields), *(tensor[3] for tensor in tensors)]
    return b"".join(part + bytes(-len(part) % 32) for part in parts)


def written(path, keys, tensors):
    """The file that such lists describe."""
    path.write_bytes(joined(header_fields(keys, tensors), tensors))
    return path


def changed(keys, name, kind, value):
    """The keys with another value of one."""
    return [entry for entry in keys if entry[0] != name] + [[name, kind, value]]


@pytest.fixture(scope="module")
def parts(tmp_path_factory, vocabulary):
    """The keys and tensors of a valid model, loaded once: what is imported then is not timed."""
    path = tmp_path_factory.mktemp("valid") / "valid.gguf"
    more = {"llama.rope.freq_base": 10000.0, "tokenizer.ggml.add_bos_token": True}
    quantised(vocabulary, path, ("Q4_0", "Q8_0", "F16", "BF16", "Q5_1"), CONFIG, more)
    llama2.load(path)
    return taken_apart(path)


FORMS = ("hf", "hf index")


@pytest.fixture(scope="module")
def directories(tmp_path_factory, vocabulary):
    """{form: {file name: bytes}} of the tiny model."""
    root = tmp_path_factory.mktemp("directories")
    weights = make_weights(CONFIG)
    write_hf(root / "hf", CONFIG, weights)
    write_hf(root / "hf index", CONFIG, weights, files=2)
    found = {}
    for form in FORMS:
        shutil.copy(vocabulary[0], root / form)
        files = sorted((root / form).iterdir())
        found[form] = {file.name: file.read_bytes() for file in files}
    return found


def unpacked(files, path):
    """A directory of these files."""
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


# --------------------------------------------------------------------------------------------------
# What must come of each

STATM = Path("/proc/self/statm")  # Linux: this process's memory in pages


@contextlib.contextmanager
def limited(megabytes=300, seconds=5):
    """Let this process take so much more memory (on Linux) and time."""
    start = time.process_time()
    if not STATM.exists():
        yield
    else:
        import resource  # not on Windows

        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        used = int(STATM.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + megabytes * 2**20, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - start < seconds


def outcome(path, name="", **limits):
    """Load a model and generate two tokens: "runs", or what the error said."""
    with limited(**limits):
        try:
            model, tokenizer = llama2.load(path)
        except (ValueError, OSError) as error:
            assert (name or path.name) in str(error)
            assert str(error).isprintable() and len(str(error)) < 600
            return str(error)
        try:
            ids = tokenizer.encode("ab \u00e9\U0001f600")
            new = list(llama2.generate(model, ids, max_new_tokens=2, stop_ids=()))
            tokenizer.decode(new)
        except ValueError as error:
            return str(error)
    return "runs"


def refused(path, word, name="", **limits):
    """The outcome is an error that holds the word, whatever its case."""
    said = outcome(path, name, **limits)
    assert said != "runs" and word.lower() in said.lower()


# --------------------------------------------------------------------------------------------------
# Changes by chance

COUNTS = (0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
VALUES = {
    STRING: ("", "\0", b"\xff\xfe", "\ud800", "gpt2", "yarn"),
    F32: (0.0, -1.0, math.nan, math.inf, 1e-45, 1e38),
    BOOL: (True, False),
    I64: (0, 1, -1, 2**31, 2**62, -(2**63)),
    U32: (0, 1, 3, 255, 2**28, 2**32 - 1),
}
ARRAYS = ((U32, [2, 2]), (STRING, []), (ARRAY, [(U32, [1])]), (U8, [1] * 999))


def change_value(rng, entry):
    """Another value of one key, or of one item of an array, or a value of another type."""
    _, kind, value = entry
    if kind == ARRAY and rng.randrange(3):
        inner, values = value
        values = list(values)
        way = rng.randrange(6)
        if way == 0:
            values = values[: len(values) // 2]
        elif way == 1:
            values = values * 2
        elif way == 2:
            values.reverse()
        else:
            odd = VALUES.get(inner, (0, 1, 9))
            values[rng.randrange(len(values))] = rng.choice(odd)
        entry[2] = (inner, values)
        return
    if kind not in VALUES or not rng.randrange(3):
        entry[1] = rng.choice((*VALUES, ARRAY))
    entry[2] = rng.choice(VALUES.get(entry[1], ARRAYS))


def change_tensor(rng, tensors):
    """Another name, shape, type or content of one tensor."""
    tensor = rng.choice(tensors)
    choice = rng.randrange(5)
    if choice == 0:
        tensors.remove(tensor)
    elif choice == 1:
        tensor[0] = rng.choice((tensors[0][0], "rope_freqs.weight", "blk.2.ffn_up.weight", b"\xff"))
    elif choice == 2:
        tensor[1] = [rng.choice((*COUNTS, *tensor[1])) for _ in range(rng.choice((1, 2, 3)))]
    elif choice == 3:
        tensor[2] = rng.choice((*range(45), 2**31))
    else:
        tensor[3] = rng.choice((b"", tensor[3][:9], b"\xff" * len(tensor[3])))


def mutation(seed, parts):
    """The bytes of the valid file after one change, decided by the seed."""
    rng = random.Random(seed)
    keys = [list(entry) for entry in parts[0]]
    tensors = [list(entry) for entry in parts[1]]
    way = rng.randrange(8)
    if way < 2:
        change_value(rng, rng.choice(keys))
    elif way < 4:
        change_tensor(rng, tensors)
    elif way == 4:
        entry = keys.pop(rng.randrange(len(keys)))
        keys += rng.choice(([], [entry, entry]))
    fields = list(header_fields(keys, tensors))
    if way == 5:  # a length, a count, a dimension, an offset
        places = [i for i, field in enumerate(fields) if len(field) in (4, 8)]
        place = rng.choice(places)
        size = len(fields[place])
        fields[place] = (rng.choice(COUNTS) % 256**size).to_bytes(size, "little")
    data = bytearray(joined(fields, tensors))
    if way == 6:
        end = rng.randrange(len(data))
        del data[end:]
    elif way == 7:
        change_bytes(rng, data)
    return bytes(data)


def change_bytes(rng, data):
    """Some of them, of the header or anywhere."""
    for _ in range(rng.choice((1, 2, 8))):
        end = rng.choice((64, 9000, len(data)))
        place = rng.randrange(min(end, len(data)))
        data[place] = rng.randrange(256)


def test_the_valid_file_runs(parts, tmp_path):
    """What all changes start from."""
    assert outcome(written(tmp_path / "again.gguf", *parts)) == "runs"


@pytest.mark.parametrize("form", FORMS)
def test_valid_directories_run(directories, tmp_path, form):
    assert outcome(unpacked(directories[form], tmp_path / "model")) == "runs"


@pytest.mark.parametrize("start", range(0, 240, 40))
def test_gguf_files_changed_by_chance(parts, tmp_path, start):
    """Forty of them: an error that names the file, or a model that runs."""
    said = []
    for seed in range(start, start + 40):
        path = tmp_path / f"{seed}.gguf"
        path.write_bytes(mutation(seed, parts))
        said.append(outcome(path))
    assert 1 <= said.count("runs") <= 30


ODD_JSON = (0, -1, 2**63, 10**400, 0.5, math.nan, math.inf, None, True, "", "../x")
ODD_JSON += ("\ud800", [], {}, [1], {"a": 1}, [[[[]]]])


def changed_json(rng, content):
    """One value of it is another one; or all of it, as bytes."""
    spots = [content]
    for spot in spots:
        children = spot.values() if isinstance(spot, dict) else spot
        spots += [child for child in children if isinstance(child, (dict, list)) and child]
    spot = rng.choice((content, rng.choice(spots)))
    key = rng.choice(list(spot) if isinstance(spot, dict) else range(len(spot)))
    if rng.randrange(6):
        spot[key] = rng.choice(ODD_JSON)
    else:
        del spot[key]
    odd = (b"[" * 10**5, b"[]", b"", b'{"a":' * 10**4, b"\xff\xfe{}", b'{"a": 1, "a": 1}')
    return json.dumps(content).encode() if rng.randrange(8) else rng.choice(odd)


def changed_file(rng, name, data):
    """One change of one file of a directory."""
    if not rng.randrange(5):
        return data[: rng.randrange(len(data))]
    if name.endswith(".json"):
        return changed_json(rng, json.loads(data))
    if name.endswith(".safetensors") and rng.randrange(2):
        size = int.from_bytes(data[:8], "little")
        text = changed_json(rng, json.loads(data[8 : 8 + size]))
        told = rng.choice((len(text), len(text), *COUNTS[:2]))
        return u64(told) + text + data[8 + size :]
    data = bytearray(data)
    change_bytes(rng, data)
    return bytes(data)


@pytest.mark.parametrize("form", FORMS)
def test_directories_changed_by_chance(directories, tmp_path, form):
    """Settings, index, weights and vocabulary of each form."""
    said = []
    for seed in range(40):
        rng = random.Random(f"{form} {seed}")
        files = dict(directories[form])
        name = rng.choice(list(files))
        files[name] = changed_file(rng, name, files[name])
        said.append(outcome(unpacked(files, tmp_path / f"{seed}")))
    assert 1 <= said.count("runs") <= 30


# --------------------------------------------------------------------------------------------------
# GGUF


def start_of_gguf(tensors, keys, *fields):
    return joined([b"GGUF", u32(3), u64(tensors), u64(keys), *fields])


KEY = string("k")


def start_of_array(kind, count):
    return start_of_gguf(0, 1, KEY, u32(ARRAY), u32(kind), u64(count))


def start_of_tensor(size, kind, offset):
    return start_of_gguf(1, 0, string("t"), u32(1), u64(size), u32(kind), u64(offset))


HEADERS = {
    "another magic": (b"GGML" + u32(3), "GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3), "endian"),
    "many tensors": (start_of_gguf(2**60, 0), ""),
    "a long key": (start_of_gguf(0, 1, u64(2**62)), "key"),
    "a long string": (start_of_gguf(0, 1, KEY, u32(STRING), u64(10**8)), "k"),
    "an unknown type": (start_of_gguf(0, 1, KEY, u32(13)), "type"),
    "many strings": (start_of_array(STRING, 2**60), "k"),
    "not UTF-8": (start_of_gguf(0, 1, string(b"\xff")), "UTF-8"),
    "dimensions": (start_of_gguf(1, 0, string("t"), u32(9)), "dimension"),
    "a tensor's type": (start_of_tensor(32, 99, 0), "99"),
    "an offset": (start_of_tensor(32, 0, 2**63), "t"),
    "a size": (start_of_tensor(2**63, 0, 0), "t"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_hostile_headers(tmp_path, case):
    """Each is met before anything of the size that it claims is allocated."""
    data, word = HEADERS[case]
    path = tmp_path / "bad.gguf"
    with path.open("wb") as file:
        file.write(data)
        file.truncate(2 * 10**8)  # zeros, of which the disk holds none
    refused(path, word, megabytes=260)


@pytest.mark.parametrize(
    ("key", "number", "word"),
    [
        ("llama.block_count", 2**31, "num_hidden_layers"),
        ("llama.block_count", 2**28, "layers"),
        ("llama.context_length", 2**31, "max_position_embeddings"),
        ("llama.embedding_length", 2**27, "embd"),
        ("llama.attention.head_count_kv", 0, "num_key_value_heads"),
        ("split.count", 65535, "65535"),
        ("general.alignment", 2**31, "alignment"),
    ],
)
def test_absurd_counts_do_not_allocate(parts, tmp_path, key, number, word):
    """A count is believed only as far as the file bears it out."""
    keys = changed(parts[0], key, U32, number)
    refused(written(tmp_path / "a.gguf", keys, parts[1]), word)


def test_a_context_is_allocated_only_when_asked_for(parts, tmp_path):
    keys = changed(parts[0], "llama.context_length", U32, 2**28)
    assert outcome(written(tmp_path / "a.gguf", keys, parts[1])) == "runs"


@pytest.mark.parametrize("mark", ["\u202e", "\x1b[2J", "\x9b31m", "\n\r"])
def test_no_control_characters_reach_the_terminal(parts, tmp_path, mark, capsys):
    """Escapes and their like, in names of tensors, keys and values."""
    keys, tensors = parts
    renamed = [[f"x{mark}y.weight", *tensors[0][1:]], *tensors[1:]]
    other = changed(keys, "general.architecture", STRING, f"x{mark}y")
    odd = [*keys, [f"k{mark}", ARRAY, (ARRAY, [])]]
    for content in ((keys, renamed), (other, tensors), (odd, tensors)):
        path = written(tmp_path / "a.gguf", *content)
        assert llama2.main(["--model", str(path), "--info"]) == 2
        said = capsys.readouterr().err
        assert said.endswith("\n") and said[:-1].isprintable() and "a.gguf" in said


# --------------------------------------------------------------------------------------------------
# Vocabularies: SentencePiece is C++, and what it would choke on is refused before, or by it

N = CONFIG.vocab_size
VOCABULARIES = [
    ("tokens", (STRING, [f"t{i}" for i in range(N - 1)]), "319"),
    ("tokens", (STRING, []), "vocab_size"),
    ("tokens", (STRING, ["same"] * N), "same"),
    ("tokens", (STRING, [f"t{i}" for i in range(N - 1)] + ["\0x"]), ""),
    ("tokens", (U32, list(range(N))), ""),
    ("scores", (F32, [0.0]), "scores"),
    ("token_type", (I32, [9] * N), "token_type"),
    ("token_type", (I32, [6] * N), "byte"),
]


@pytest.mark.parametrize(("name", "value", "word"), VOCABULARIES)
def test_hostile_vocabularies(parts, tmp_path, name, value, word):
    keys = changed(parts[0], f"tokenizer.ggml.{name}", ARRAY, value)
    refused(written(tmp_path / "a.gguf", keys, parts[1]), word)


@pytest.mark.parametrize("name", ["bos", "eos", "unknown"])
@pytest.mark.parametrize(("kind", "value"), [(U32, N), (U32, 2**32 - 1), (STRING, "1")])
def test_ids_beyond_the_vocabulary(parts, tmp_path, name, kind, value):
    keys = changed(parts[0], f"tokenizer.ggml.{name}_token_id", kind, value)
    refused(written(tmp_path / "a.gguf", keys, parts[1]), name if kind == STRING else "token id")


# --------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "F16", "BF16", "F32"])
@pytest.mark.parametrize("data", [b"\xff", random.Random(0).randbytes(997)], ids=["ff", "any"])
def test_bytes_of_no_sense_in_weights(vocabulary, tmp_path, kind, data):
    """Every scale NaN: told at the logits; random bytes: told or run."""
    quantised(vocabulary, tmp_path / "good.gguf", [kind])
    keys, tensors = taken_apart(tmp_path / "good.gguf")
    for tensor in tensors:
        if tensor[0] in ("blk.0.ffn_up.weight", "output.weight"):
            size = len(tensor[3])
            tensor[3] = (data * (size // len(data) + 1))[:size]
    said = outcome(written(tmp_path / "bad.gguf", keys, tensors))
    assert "finite" in said or (said == "runs" and data != b"\xff")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_weights_that_are_not_finite(tmp_path, keys, tensors, bad, temperature):
    """One bad number in a norm ends in an error, not in a sampled token."""
    norm = tensors["blk.1.ffn_norm.weight"].copy()
    norm[0] = bad
    path = write_gguf(tmp_path / "bad.gguf", keys, tensors | {"blk.1.ffn_norm.weight": norm})
    model, _ = llama2.load(path)
    with pytest.raises(ValueError, match="finite"):
        list(llama2.generate(model, [1, 268], llama2.Sampling(temperature), 4))


# --------------------------------------------------------------------------------------------------
# safetensors and JSON


def read_header(data):
    size = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def refused_header(directories, path, text, body):
    """A directory whose safetensors file has this header is refused."""
    text = text if isinstance(text, bytes) else text.encode()
    files = directories["hf"] | {"model.safetensors": u64(len(text)) + text + body}
    refused(unpacked(files, path), "model.safetensors")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("shape", shape) for shape in ([65], [-64], [10**400], [64.0], [0], [], None)),
        *(("dtype", dtype) for dtype in ("I64", "F16", ["F32"], None)),
        *(
            ("data_offsets", at)
            for at in ([0], [0, 1, 2], [[0], [1]], [256, 0], [2**62, 2**62 + 256])
        ),
        *(("data_offsets", at) for at in ([0.0, 256.0], [-256, 0], None)),
    ],
)
def test_hostile_safetensors(directories, tmp_path, field, value):
    """A tensor that is not where and what its entry says."""
    header, body = read_header(directories["hf"]["model.safetensors"])
    header["model.norm.weight"][field] = value
    refused_header(directories, tmp_path / "model", json.dumps(header), body)


def test_overlaps_and_bytes_behind(directories, tmp_path):
    header, body = read_header(directories["hf"]["model.safetensors"])
    refused_header(directories, tmp_path / "behind", json.dumps(header), body + bytes(8))
    names = ["model.layers.0.input_layernorm.weight", "model.norm.weight"]
    header[names[0]] = header[names[1]]
    refused_header(directories, tmp_path / "overlap", json.dumps(header), body)


HEADER_TEXTS = ["", "[]", "{", '{"a":' * 10**5, '{"__metadata__": ' + "[" * 10**5, b"\xff{}"]
HEADER_TEXTS += ['{"a": 1}', '{"a": ' + "1" * 10**5 + "}", "{" + " " * 10**7 + "}"]


@pytest.mark.parametrize("text", HEADER_TEXTS, ids=lambda text: repr(text[:9]))
def test_headers_that_are_none(directories, tmp_path, text):
    refused_header(directories, tmp_path / "model", text, bytes(64))


ODD_VALUES = ["NaN", "1e999", "1" + "0" * 400, "1" * 5000, "[" * 900 + "]" * 900, "[" * 50000]
ODD_VALUES += ["true", '"\\ud800"', '{"a": {"a": 1}}', "-1", "0", "0.5", "[]", "null"]
JSON_FILES = ["config", "tokenizer_config", "generation_config", "added_tokens"]


@pytest.mark.parametrize("stem", JSON_FILES)
def test_odd_values_in_json(directories, tmp_path, stem):
    """Any value under any key: an error that names the file, or a model."""
    name = f"{stem}.json"
    path = unpacked(directories["hf"], tmp_path / "model")
    default = b'{"eos_token_id": 2, "chat_template": "", "add_bos_token": true, "x": 3}'
    content = json.loads(directories["hf"].get(name, default))
    for value in ODD_VALUES:
        for key in content:
            text = json.dumps(content | {key: "VALUE"}).replace('"VALUE"', value)
            (path / name).write_text(text)
            with limited():
                try:
                    assert llama2.open_checkpoint(path).tokenizer
                except (ValueError, OSError) as error:
                    assert "model" in str(error) and len(str(error)) < 600


# --------------------------------------------------------------------------------------------------
# What is no regular file


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no FIFOs")
@pytest.mark.parametrize("kind", ["FIFO", "/dev/zero", "directory", "empty", "sparse"])
@pytest.mark.parametrize(
    "file",
    ["hf/model.safetensors", "hf/tokenizer.model", "hf/tokenizer_config.json", "a.gguf"],
)
def test_only_regular_files_are_read(directories, tmp_path, file, kind):
    """A FIFO blocks for ever, /dev/zero has no end."""
    form, _, name = file.rpartition("/")
    folder = unpacked(directories.get(form, {}), tmp_path / "model")
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "/dev/zero":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        with path.open("wb") as stream:
            stream.truncate(2**40 if kind == "sparse" else 0)
    refused(folder if form else path, "", name if form or kind != "directory" else "gguf")


# --------------------------------------------------------------------------------------------------
# Saving


def listing(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_may_be_saved_to_itself(parts, tmp_path):
    """Its weights are mapped, and stay so until all are written."""
    path = written(tmp_path / "a.gguf", *parts)
    tokens = torch.tensor([[1, 5, 9]])
    wanted = llama2.load(path)[0](tokens)
    llama2.save_gguf(llama2.open_checkpoint(path), path, overwrite=True)
    assert torch.equal(llama2.load(path)[0](tokens), wanted)
    assert listing(tmp_path) == ["a.gguf"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError()])
def test_what_ends_early_leaves_nothing(parts, tmp_path, monkeypatch, error):
    """The target stays as it was."""
    path = written(tmp_path / "a.gguf", *parts)
    target = tmp_path / "b.gguf"
    target.write_bytes(b"old")
    calls = []

    def quantize(*args):
        calls.append(listing(tmp_path))
        raise error

    monkeypatch.setattr(gguf.quants, "quantize", quantize)
    with pytest.raises(type(error)):
        llama2.save_gguf(llama2.open_checkpoint(path), target, "Q8_0", overwrite=True)
    assert len(calls[0]) == 3  # the unfinished one was there
    assert listing(tmp_path) == ["a.gguf", "b.gguf"] and target.read_bytes() == b"old"


def test_numbers_beyond_f16(tmp_path, keys, tensors):
    """Weights that would become infinite are refused, and the target is not touched."""
    large = {"output.weight": np.full_like(tensors["output.weight"], 1e5)}
    path = write_gguf(tmp_path / "a.gguf", keys, tensors | large)
    for ggml_type in ("F16", "Q8_0", "Q4_0"):
        with pytest.raises(ValueError, match="output.weight"):
            llama2.save_gguf(llama2.open_checkpoint(path), tmp_path / "b.gguf", ggml_type)
    assert listing(tmp_path) == ["a.gguf"]
