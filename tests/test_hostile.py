"""Hostile files: nothing in them ends in a crash, a hang, much memory or a run of foreign code.

Valid files of a tiny model are taken apart into lists that a test may change, and written again by a
writer of this file's own, since gguf's refuses what must be tried here.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import math
import mmap
import pickle
import random
import shutil
import struct
import time
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from helpers import (
    CONFIG,
    make_weights,
    quantised,
    write_gguf,
    write_hf,
    write_meta,
)

import llama2

# --------------------------------------------------------------------------------------------------
# A GGUF file as lists that a test may change, and its bytes with every boundary known

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LETTERS = dict(enumerate("BbHhIif?--Qqd"))


def taken_apart(path):
    """Metadata as [name, type, value], tensors as [name, dims (fastest first), type, offset, bytes].

    An array's value is (type, values); an offset of None is where the tensor's turn comes.
    """
    reader, keys = gguf.GGUFReader(path), []
    for name, field in reader.fields.items():
        kind, value = int(field.types[0]), field.contents()
        if not name.startswith("GGUF."):
            keys.append([name, kind, (int(field.types[1]), value) if kind == ARRAY else value])
    tensors = [
        [t.name, t.shape.tolist(), int(t.tensor_type), None, t.data.tobytes()]
        for t in reader.tensors
    ]
    return keys, tensors


def number_bytes(kind, number):
    """A number of one GGUF type; integers that do not fit lose their high bits."""
    letter = LETTERS.get(kind, "I").replace("-", "I")
    if letter in "BbHhIiQq":
        size = struct.calcsize(letter)
        return (int(number) % 256**size).to_bytes(size, "little")
    return struct.pack("<" + letter, number)


class Writer:
    """GGUF bytes; `spans` tells where each structural field begins and how long it is."""

    def __init__(self):
        self.data, self.spans = bytearray(), []

    def put(self, data):
        self.spans.append((len(self.data), len(data)))
        self.data += data

    def string(self, text):
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        self.put(struct.pack("<Q", len(data)))
        self.put(data)

    def value(self, kind, value):
        if kind == STRING:
            self.string(value)
        elif kind == ARRAY:
            inner, values = value
            self.put(struct.pack("<I", inner))
            self.put(struct.pack("<Q", len(values)))
            if LETTERS.get(inner, "-") != "-":
                self.put(b"".join(number_bytes(inner, item) for item in values))
            else:
                for i, item in enumerate(values):
                    spans = list(self.spans)
                    self.value(inner, item)
                    self.spans = spans if i > 2 else self.spans  # a few boundaries of many
        else:
            self.put(number_bytes(kind, value))


def gguf_file(keys, tensors, align=32, version=3):
    """-> the file's bytes, its structural fields as (offset, size), where its data begins."""
    writer = Writer()
    for data in (b"GGUF", struct.pack("<I", version)):
        writer.put(data)
    for count in (len(tensors), len(keys)):
        writer.put(struct.pack("<Q", count))
    for name, kind, value in keys:
        writer.string(name)
        writer.put(struct.pack("<I", kind))
        writer.value(kind, value)
    body = bytearray()
    for name, dims, kind, offset, data in tensors:
        body += bytes(-len(body) % align)
        writer.string(name)
        writer.put(struct.pack("<I", len(dims)))
        for n in dims:
            writer.put(struct.pack("<Q", n))
        writer.put(struct.pack("<I", kind))
        writer.put(struct.pack("<Q", len(body) if offset is None else offset))
        body += data
    start = len(writer.data) + -len(writer.data) % align
    return bytes(writer.data).ljust(start, b"\0") + body, writer.spans, start


def written(path, keys, tensors):
    """The file that such lists describe."""
    path.write_bytes(gguf_file(keys, tensors)[0])
    return path


def without(keys, *names):
    """All keys but those whose last words are given."""
    return [entry for entry in keys if entry[0].split(".")[-1] not in names]


@pytest.fixture(scope="module")
def valid(tmp_path_factory, vocabulary):
    """A valid file, loaded once: what is imported then is not timed. All mutations start from it."""
    path, kinds = tmp_path_factory.mktemp("valid") / "valid.gguf", ("Q4_0", "Q8_0", "F16", "BF16")
    quantised(
        vocabulary,
        path,
        (*kinds, "Q5_1"),
        CONFIG,
        {
            "general.alignment": 32,
            "llama.rope.dimension_count": CONFIG.head_dim,
            "llama.rope.freq_base": 10000.0,
            "llama.rope.scaling.factor": 1.0,
            "tokenizer.ggml.add_bos_token": True,
        },
    )
    llama2.load(path)
    return path


@pytest.fixture
def parts(valid):
    """The valid file's keys and tensors."""
    return taken_apart(valid)


# --------------------------------------------------------------------------------------------------
# Mutations

COUNTS = (0, 1, 2, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1)
NUMBERS = (0, 1, -1, 3, 2**31, 2**32, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -1.0, math.nan, math.inf, -math.inf, 1e-45, 1e38, 1e308)
TEXTS = ("", "\0", "\ud800", b"\xff\xfe", b"\xf0\x9f", "x" * 5000, "llama", "gpt2", "none", "yarn")
NAMES = ("rope_freqs.weight", "blk.0.attn_qkv.weight", "blk.0.attn_q.bias", "blk.1.attn_q.weight")
EXTRA_KEYS = (
    ("llama.expert_count", U32, 8),
    ("llama.rope.scaling.type", STRING, "none"),
    ("llama.attention.key_length", U64, 2**63),
    ("split.count", U16, 3),
    ("general.type", STRING, "adapter"),
    ("tokenizer.ggml.add_space_prefix", BOOL, False),
    ("tokenizer.chat_template", U32, 1),
)


def mutate_value(rng, entry):
    """Another value or another type for one metadata key."""
    _, kind, value = entry
    choice = rng.randrange(4)
    if kind == ARRAY and choice and value[1]:
        inner, values = value[0], list(value[1])
        where = rng.randrange(len(values))
        if choice == 1:
            pool = {STRING: TEXTS + tuple(values[:5]), F32: FLOATS[:7], ARRAY: [(U8, [1, 2])]}
            pool = pool.get(inner, NUMBERS)
            for _ in range(rng.choice((1, 3, 50))):
                values[rng.randrange(len(values))] = rng.choice(pool)
        elif choice == 2:
            values = rng.choice((values[:where], values * 2, [], values[::-1]))
        else:
            other = rng.choice((U8, I64, F64, BOOL, STRING, ARRAY))
            sample = {STRING: "a", ARRAY: (U8, [1, 2])}.get(other, 1)
            inner, values = other, [sample] * len(values)
        entry[2] = (inner, values)
        return
    pools = {STRING: TEXTS, F32: FLOATS[:7], F64: FLOATS, BOOL: (0, 1), I64: NUMBERS}
    pools[ARRAY] = ((U32, [2, 2]), (ARRAY, [(U32, [1]), (U32, [1])]), (STRING, []), (U8, [1] * 999))
    if choice == 0:
        entry[1] = kind = rng.choice((STRING, F32, F64, BOOL, I64, U64, ARRAY))
    entry[2] = rng.choice(pools.get(kind, tuple(n for n in COUNTS if n < 2**32)))


def fit_data(tensor):
    """Give a tensor data of the size that its type and dims ask for, if that is small."""
    with contextlib.suppress(ValueError):
        block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor[2])]
        needed = math.prod(tensor[1]) // block * size
        if 0 < needed < 2**18:
            tensor[4] = (tensor[4] * (needed // len(tensor[4]) + 1))[:needed]


def mutate_structure(rng, keys, tensors):
    """One change to what the file says: keys, types, shapes, names, offsets, data."""
    key, tensor, other = rng.choice(keys), rng.choice(tensors), rng.choice(tensors)
    choice = rng.randrange(14)
    if choice < 4:
        mutate_value(rng, key)
    elif choice == 4:
        keys.remove(key)
    elif choice == 5:
        keys.insert(rng.randrange(len(keys)), list(rng.choice((key, *EXTRA_KEYS))))
    elif choice == 6:
        tensors.remove(tensor)
    elif choice == 7:
        tensor[0] = rng.choice((other[0], *NAMES, "x.weight", "", b"\xff", "blk.2.ffn_up.weight"))
    elif choice == 8:
        tensor[1] = rng.choice((tensor[1][::-1], tensor[1] + [1], tensor[1][:1], [1, *tensor[1]]))
    elif choice == 9:
        where = rng.randrange(len(tensor[1]))
        tensor[1][where] = rng.choice((*COUNTS, tensor[1][where] * 2, tensor[1][where] + 1))
    elif choice == 10:
        tensor[2] = rng.choice((*range(45), 2**31))
    elif choice == 11:
        tensor[3] = rng.choice((0, 1, 32, 33, 64, 2**20, *COUNTS))
    elif choice == 12:
        dtype, bad = rng.choice((("<f4", math.nan), ("<f4", math.inf), ("<f2", math.nan)))
        data = np.frombuffer(tensor[4].ljust(4)[: len(tensor[4]) & -4 or 4], dtype).copy()
        data[rng.randrange(len(data)) :: rng.choice((1, 7, 10**9))] = bad
        tensor[4] = data.tobytes()
    else:
        tensor[4] = tensor[4][: len(tensor[4]) // rng.choice((2, 3, 100)) + 1]
    if choice in (8, 9, 10) and rng.randrange(3):
        fit_data(tensor)


def mutation(seed, parts):
    """The bytes of the valid file after one to three changes, decided by the seed."""
    rng = random.Random(seed)
    keys, tensors = copy.deepcopy(parts)
    way = rng.randrange(10)
    if way < 5:
        for _ in range(rng.choice((1, 1, 2, 3))):
            mutate_structure(rng, keys, tensors)
    data, spans, start = gguf_file(keys, tensors)
    data = bytearray(data)
    if way == 5:  # cut off: at a boundary, or anywhere
        del data[rng.choice((rng.choice(spans)[0], rng.randrange(len(data)), start)) :]
    elif way in (6, 7):  # a length, a count, a dimension, an offset: any field of 4 or 8 bytes
        place, size = rng.choice([span for span in spans if span[1] in (4, 8)])
        number = rng.choice((*COUNTS, len(data), int.from_bytes(data[place : place + size]) + 1))
        data[place : place + size] = (number % 256**size).to_bytes(size, "little")
    elif way > 7:  # bits and bytes, in the header or anywhere
        for _ in range(rng.choice((1, 2, 8))):
            place = rng.randrange(rng.choice((64, start, len(data))))
            data[place] = rng.choice((data[place] ^ 1 << rng.randrange(8), rng.randrange(256)))
    return bytes(data)


# The same model as directories: Hugging Face's (one file, two with an index, .bin) and Meta's

HOSTILE_FORMS = ("hf", "hf index", "bin", "meta")


def saved(content, **options):
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


@pytest.fixture(scope="module")
def directories(tmp_path_factory, vocabulary):
    """{form: {file name: bytes}} of the tiny model."""
    root, weights = tmp_path_factory.mktemp("directories"), make_weights(CONFIG)
    write_hf(root / "hf", CONFIG, weights)
    write_hf(root / "hf index", CONFIG, weights, files=2)
    write_hf(root / "bin", CONFIG, weights, ".bin")
    write_meta(root / "meta", CONFIG, weights, 2)
    for form in HOSTILE_FORMS:
        shutil.copy(vocabulary[0], root / form)
    return {
        form: {file.name: file.read_bytes() for file in sorted((root / form).iterdir())}
        for form in HOSTILE_FORMS
    }


def unpacked(files, path):
    """A directory of these files."""
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


class Bomb:
    """Unpickled by a careless reader, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


ODD_VALUES = (0, 1, -1, 3, 2**31, 2**63, 10**400, 0.5, -1e-5, 1e308, math.nan, math.inf, "", "x")
ODD_VALUES += (
    None,
    True,
    False,
    [],
    {},
    [1],
    {"a": 1},
    "\ud800",
    "model.safetensors",
    "../x",
    "F16",
)
ODD_TENSORS = (
    7,
    [1, 2],
    {1: torch.ones(2)},
    {"x": 1},
    {"x": torch.tensor(1.0)},
    {"x": torch.ones(2, 2, 2)},
    {"x": torch.ones(3, 2).t()},
    {"x": torch.ones(1).expand(2**20, 2**15)},
    {"x": torch.ones(0, 3)},
    {"x": torch.ones(2, 2).to_sparse()},
    {"x": torch.ones(2, 2, device="meta")},
    {"x": torch.ones(2, 2, dtype=torch.complex64)},
    {"model": {"x": torch.ones(2, 2)}},
)


def mutate_json(rng, content):
    """Change one value, anywhere in it; return it as bytes."""
    spots = [content]
    for spot in spots:
        children = spot.values() if isinstance(spot, dict) else spot
        spots += [child for child in children if isinstance(child, (dict, list)) and child]
    spot = rng.choice((content, rng.choice(spots)))
    key = rng.choice(list(spot) if isinstance(spot, dict) else range(len(spot)))
    choice = rng.randrange(8)
    if choice == 0:
        del spot[key]
    elif choice == 1:
        spot[key] = rng.choice(list(spot.values() if isinstance(spot, dict) else spot))
    elif choice == 2 and isinstance(spot, dict):
        spot[rng.choice(("x", "", "head_dim", "rope_scaling", "moe"))] = spot[key]
    else:
        spot[key] = rng.choice(ODD_VALUES)
    if choice == 7:
        return rng.choice((b"[" * 10**5, b"[]", b"", b"null", b'{"a":' * 10**4, b"\xff\xfe{}"))
    return json.dumps(content).encode()


def mutate_file(rng, name, data):
    """One change to one file of a directory."""
    way = rng.randrange(6)
    if way == 0:
        return data[: rng.randrange(len(data) + 1)]
    if way == 1 or name == "tokenizer.model":
        data = bytearray(data)
        for _ in range(rng.choice((1, 2, 10))):
            place = rng.randrange(rng.choice((min(300, len(data)), len(data))))
            data[place] = rng.choice((data[place] ^ 1 << rng.randrange(8), rng.randrange(256)))
        return bytes(data)
    if name.endswith(".json"):
        return mutate_json(rng, json.loads(data))
    if name.endswith(".safetensors"):
        size = int.from_bytes(data[:8], "little")
        if way == 2:
            return struct.pack("<Q", rng.choice(COUNTS)) + data[8:]
        text = mutate_json(rng, json.loads(data[8 : 8 + size]))
        return struct.pack("<Q", len(text)) + text + data[8 + size :]
    if way == 2:
        content = rng.choice(ODD_TENSORS)
        return saved(content, _use_new_zipfile_serialization=rng.random() < 0.7)
    content = torch.load(io.BytesIO(data), weights_only=True)
    key = rng.choice(list(content))
    if way == 3:
        content[key] = rng.choice(ODD_TENSORS)
    elif way == 4:
        content[rng.choice((*content, "x", 3, ""))] = content.pop(key)
    else:
        content[key].view(-1)[:: rng.choice((1, 9))] = rng.choice((math.nan, math.inf, 1e38))
    return saved(content, _use_new_zipfile_serialization=rng.random() < 0.7)


def mutated_directory(seed, directories, path):
    """A directory of the tiny model with one or two files changed or missing."""
    rng = random.Random(seed)
    files = dict(directories[rng.choice(HOSTILE_FORMS)])
    for name in rng.sample(list(files), rng.choice((1, 1, 1, 2))):
        if rng.randrange(20):
            files[name] = mutate_file(rng, name, files[name])
        else:
            del files[name]
    return unpacked(files, path)


STATM = Path("/proc/self/statm")  # Linux: this process's memory in pages, all and resident


@contextlib.contextmanager
def at_most(megabytes):
    """Let this process take so much more memory; beyond it, allocations fail. Elsewhere: no limit."""
    if not STATM.exists():
        yield
        return
    import resource  # not on Windows

    pages = int(STATM.read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@pytest.mark.skipif(not STATM.exists(), reason="memory is limited on Linux alone")
def test_memory_is_limited():
    """What the tests below rely on."""
    with at_most(300), pytest.raises(RuntimeError):
        torch.empty(400 * 2**20, dtype=torch.uint8)


def outcome(path):
    """Load a file and generate two tokens: "runs", or what the ValueError or OSError said."""
    try:
        model, tokenizer = llama2.load(path)
    except (ValueError, OSError) as error:
        assert path.name in str(error), f"does not name the file: {error}"
        assert len(str(error)) < 500, "an error should fit in a line or two"
        return str(error)
    try:
        ids = tokenizer.encode("ab \u00e9\U0001f600", bos=tokenizer.add_bos)
        options = {"max_new_tokens": 2, "sampling": llama2.Sampling(seed=0), "stop_ids": ()}
        new = list(llama2.generate(model, ids, **options))
        assert all(0 <= token_id < model.config.vocab_size for token_id in new)
        tokenizer.decode(new)
        return "runs"
    except ValueError as error:
        return str(error)


def bounded_outcome(path):
    """outcome() within 5 seconds and 300 MB."""
    start = time.perf_counter()
    with at_most(300):
        said = outcome(path)
    assert time.perf_counter() - start < 5
    return said


def test_valid_file_runs(valid, parts, tmp_path):
    """The file that all mutations start from, and that it survives being taken apart."""
    assert outcome(valid) == "runs"
    assert outcome(written(tmp_path / "again.gguf", *parts)) == "runs"


@pytest.mark.parametrize("start", range(0, 320, 40))
def test_mutated_files(parts, tmp_path, start):
    """Forty mutations: an error that names the file, or a model that runs, in bounded time and memory."""
    said = []
    for seed in range(start, start + 40):
        path = tmp_path / f"{seed}.gguf"
        path.write_bytes(mutation(seed, parts))
        said.append(bounded_outcome(path))
    assert 1 <= said.count("runs") <= 30  # neither all valid nor all refused at the first byte


def test_mutated_files_by_hypothesis(parts, tmp_path):
    """The same, with mutations that hypothesis looks for and shrinks."""
    hypothesis = pytest.importorskip("hypothesis")
    data, spans, _ = gguf_file(*parts)
    places = hypothesis.strategies.sampled_from(spans)
    pieces = hypothesis.strategies.one_of(
        hypothesis.strategies.binary(max_size=24),
        hypothesis.strategies.integers(0, 2**64 - 1).map(lambda n: n.to_bytes(8, "little")),
    )
    path = tmp_path / "m.gguf"

    @hypothesis.settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @hypothesis.given(hypothesis.strategies.lists(hypothesis.strategies.tuples(places, pieces)))
    def check(changes):
        changed = bytearray(data)
        for (place, size), piece in changes[:5]:
            changed[place : place + size] = piece
        path.write_bytes(changed)
        bounded_outcome(path)

    check()


@pytest.mark.parametrize("form", HOSTILE_FORMS)
def test_valid_directories_run(directories, tmp_path, form):
    """The directories that mutations start from are valid."""
    assert outcome(unpacked(directories[form], tmp_path)) == "runs"


@pytest.mark.parametrize("start", range(0, 200, 40))
def test_mutated_directories(directories, tmp_path, start):
    """params.json, config.json, index, safetensors, .pth, .bin and tokenizer.model: forty mutations."""
    seeds = range(start, start + 40)
    paths = [mutated_directory(seed, directories, tmp_path / f"{seed}") for seed in seeds]
    said = [bounded_outcome(path) for path in paths]
    assert 1 <= said.count("runs") <= 30


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["consolidated.00.pth", "pytorch_model.bin"])
def test_pickles_run_nothing(directories, tmp_path, name, zipped):
    """A pickle that would run code is refused before it does."""
    unpacked(directories["meta" if "consolidated" in name else "bin"], tmp_path)
    content = {"x": torch.ones(2, 2), "bomb": Bomb(tmp_path / "exploded")}
    (tmp_path / name).write_bytes(saved(content, _use_new_zipfile_serialization=zipped))
    with pytest.raises(ValueError, match=f"{name}: damaged, or it holds more than tensors"):
        llama2.load(tmp_path)
    (tmp_path / name).write_bytes(pickle.dumps(content["bomb"], protocol=2))  # not torch.save's
    with pytest.raises(ValueError, match=name):
        llama2.load(tmp_path)
    assert not (tmp_path / "exploded").exists()
    torch.load(io.BytesIO(saved(content)), weights_only=False)
    assert (tmp_path / "exploded").exists()  # it would have


def test_compressed_pickles_are_refused(directories, tmp_path):
    """torch.save never compresses: a megabyte that swells to a gigabyte is not read."""
    files = directories["bin"]
    unpacked(files, tmp_path)
    packed = zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(io.BytesIO(files["pytorch_model.bin"])) as original, packed:
        for entry in original.infolist():
            packed.writestr(entry.filename, original.read(entry))
    assert "compressed" in bounded_outcome(tmp_path)


def test_index_stays_in_its_directory(directories, tmp_path):
    """A weight_map that points elsewhere reads nothing there, not even a valid file."""
    files, inside = dict(directories["hf"]), tmp_path / "inside"
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes(files.pop("model.safetensors"))
    index = unpacked(files, inside) / "model.safetensors.index.json"
    shutil.copy(outside, inside / "model.safetensors")  # read without an index
    assert outcome(inside) == "runs"
    for name in ("../outside.safetensors", str(outside), "..", "", "a\0b"):
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert bounded_outcome(inside) != "runs"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../outside.safetensors"}}))
    shutil.copy(outside, inside)
    assert outcome(inside) == "runs"  # of the directory's own file of that name


@pytest.mark.parametrize(
    "key, number, said",
    [
        ("llama.block_count", 2**31, "num_hidden_layers"),
        ("llama.block_count", 2**28, "layers"),
        ("llama.block_count", 20, "missing"),
        ("llama.context_length", 2**28, "runs"),
        ("llama.context_length", 2**31, "max_position_embeddings"),
        ("llama.embedding_length", 2**27, "dimension_count is 16"),
        ("llama.feed_forward_length", 2**28, "expected"),
        ("llama.attention.head_count", 2**28, "num_attention_heads 268435456"),
        ("llama.attention.head_count_kv", 3, "multiple"),
        ("llama.attention.head_count_kv", 0, "num_key_value_heads"),
        ("split.count", 65535, "65535"),
        ("general.alignment", 2**31, "alignment"),
        ("general.alignment", 1, "alignment"),  # float32 could not be read in place
    ],
)
def test_absurd_counts_do_not_allocate(parts, tmp_path, key, number, said):
    """A count is believed only as far as the file or the request bears it out."""
    keys = [entry for entry in parts[0] if entry[0] != key] + [[key, U32, number]]
    assert said in bounded_outcome(written(tmp_path / "absurd.gguf", keys, parts[1]))


N = CONFIG.vocab_size


@pytest.mark.parametrize(
    "name, kind, value, said",
    [
        ("tokens", ARRAY, (STRING, [f"t{i}" for i in range(N - 1)]), f"expected [{N - 1}, "),
        ("tokens", ARRAY, (STRING, []), "vocab_size is 0"),
        ("tokens", ARRAY, (STRING, ["same"] * N), "duplicates"),
        ("tokens", ARRAY, lambda pieces: (STRING, [*pieces[:-1], ""]), "SentencePiece"),
        ("tokens", ARRAY, lambda pieces: (STRING, [*pieces[:-1], "\0x"]), "null"),
        ("tokens", ARRAY, lambda pieces: (STRING, [*pieces[:-1], "x" * 10**6]), "too long"),
        ("tokens", ARRAY, (U32, list(range(N))), "values for"),
        ("tokens", U32, 5, "expected list"),
        ("scores", ARRAY, (F32, [math.nan] * N), "nan"),
        ("scores", ARRAY, (F64, [-1e300] * N), "scores"),
        ("scores", ARRAY, (STRING, ["1"] * N), "scores"),
        ("scores", ARRAY, (F32, [0.0]), "1 values"),
        ("token_type", ARRAY, (I32, [9] * N), "token_type"),
        ("token_type", ARRAY, (I32, [-(2**31)] * N), "token_type"),
        ("token_type", ARRAY, (F32, [1.0] * N), "token_type"),
        ("token_type", ARRAY, (I32, [6] * N), "byte piece"),
        ("token_type", ARRAY, (I32, [4] * N), "runs"),
        ("token_type", ARRAY, (I32, [3] * N), "runs"),
        ("bos_token_id", U32, N, "BOS"),
        ("eos_token_id", U32, 2**32 - 1, "EOS"),
        ("unknown_token_id", U32, N, "unknown"),
        ("bos_token_id", U32, 0, "no BOS"),
        ("bos_token_id", STRING, "1", "expected int"),
    ],
)
def test_hostile_vocabularies(parts, tmp_path, name, kind, value, said):
    """SentencePiece is C++: what it would choke on is refused before, or by it, as ValueError."""
    name = f"tokenizer.ggml.{name}"
    if callable(value):  # of the pieces that are there
        value = value(next(entry[2][1] for entry in parts[0] if entry[0].endswith(".tokens")))
    keys = [entry for entry in parts[0] if entry[0] != name] + [[name, kind, value]]
    assert said in bounded_outcome(written(tmp_path / "vocabulary.gguf", keys, parts[1]))


def test_chains_of_merges_end(parts, tmp_path):
    """Merges nested nine deep and a text of a million equal letters: linear, not quadratic."""
    found = {entry[0].split(".")[-1]: entry[2] for entry in parts[0]}
    pieces = list(zip(found["tokens"][1], found["token_type"][1], strict=True))
    pieces = [(piece, kind) for piece, kind in pieces if len(piece) == 1 or kind != 1]
    pieces += [("a" * 2**i, 1) for i in range(1, 10)]
    for kind in (1, 4, 5):  # normal, user-defined, unused
        rows = {"tokens": (STRING, [p for p, _ in pieces])}
        rows["scores"] = (F32, [-float(i) for i in range(len(pieces))])
        rows["token_type"] = (I32, [k if len(p) < 2 or k != 1 else kind for p, k in pieces])
        keys = without(parts[0], *rows)
        keys += [[f"tokenizer.ggml.{name}", ARRAY, value] for name, value in rows.items()]
        path = written(tmp_path / f"{kind}.gguf", keys, [])
        tokenizer, start = llama2.Tokenizer.from_gguf(path), time.perf_counter()
        assert len(tokenizer.encode("a" * 10**6)) > 1000
        assert time.perf_counter() - start < 5


# --------------------------------------------------------------------------------------------------
# Bad numbers

QUANTS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "F16", "BF16", "F32"]
QUANTS += [f"Q{bits}_K" for bits in (2, 3, 4, 5, 6)]


@pytest.mark.parametrize("kind", QUANTS)
def test_bytes_of_no_sense_in_weights(vocabulary, tmp_path, kind):
    """Every scale NaN or infinity: told at the logits; random bytes: told or run, never a crash."""
    quantised(vocabulary, tmp_path / "good.gguf", [kind])
    keys, good = taken_apart(tmp_path / "good.gguf")
    for data in (b"\xff", b"\x7c\x7c", bytes(random.Random(0).randbytes(997))):
        tensors = [list(tensor) for tensor in good]
        for tensor in tensors:
            if tensor[0] in ("blk.0.ffn_up.weight", "output.weight"):
                size = len(tensor[4])
                tensor[4] = (data * (size // len(data) + 1))[:size]
        said = bounded_outcome(written(tmp_path / "bad.gguf", keys, tensors))
        assert "not finite" in said or (said == "runs" and data != b"\xff")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["output_norm", "blk.0.attn_norm", "blk.1.ffn_norm"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_norms_that_are_not_finite(tmp_path, keys, tensors, name, bad, temperature):
    """One bad number in a norm ends in an error, in no row of a batch in a sampled token."""
    norm = tensors[f"{name}.weight"].copy()
    norm[0] = bad
    path = write_gguf(tmp_path / "bad.gguf", keys, tensors | {f"{name}.weight": norm})
    model, _ = llama2.load(path)
    for prompts in ([[1, 268]], [[1, 268], [1, 265, 266]]):
        with pytest.raises(ValueError, match="not finite"):
            list(llama2.generate_batch(model, prompts, llama2.Sampling(temperature), 4))


# --------------------------------------------------------------------------------------------------
# Again and again


@pytest.mark.skipif(not STATM.exists(), reason="memory is told by Linux alone")
def test_memory_stays_flat(tmp_path, keys, tensors):
    """Twenty generations to the end of the context leave nothing behind."""
    path = tmp_path / "short.gguf"
    model, _ = llama2.load(write_gguf(path, keys | {"llama.context_length": 24}, tensors))

    def resident():
        gc.collect()
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    for i in range(20):
        options = {"max_new_tokens": 10**6, "stop_ids": ()}
        assert len(list(llama2.generate(model, [1], **options))) == 23
        if i == 4:
            warm = resident()
    assert resident() - warm < 8 * 2**20
