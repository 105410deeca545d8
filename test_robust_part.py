"""Nothing that a file or a user does breaks llama2.py: mutated files, odd text, signals, streams."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import json
import math
import os
import random
import resource
import shlex
import signal
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch

import llama2

SCRIPT = Path(llama2.__file__)
DEVICES = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, CONTEXT = 32, 64, 2, 4, 2, 64
PIECES = [("<unk>", 2), ("<s>", 3), ("</s>", 3)]
PIECES += [(f"<0x{i:02X}>", 6) for i in range(256)]
PIECES += [(piece, 1) for piece in ("\u2581a", "ab", "\u2581", *"abcdefgh")]

# --------------------------------------------------------------------------------------------------
# A tiny valid GGUF file as lists that a test may change, and its bytes with every boundary known

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LETTERS = dict(enumerate("BbHhIif?--Qqd"))


def tiny_keys():
    """The metadata of the tiny model: [name, type, value]; an array's value is (type, values)."""
    n = len(PIECES)
    llama = {"context_length": CONTEXT, "embedding_length": HIDDEN, "block_count": LAYERS}
    llama |= {"feed_forward_length": FFN, "attention.head_count": HEADS}
    llama |= {"attention.head_count_kv": KV_HEADS, "rope.dimension_count": HIDDEN // HEADS}
    return [
        ["general.architecture", STRING, "llama"],
        ["general.alignment", U32, 32],
        *[[f"llama.{name}", U32, value] for name, value in llama.items()],
        ["llama.attention.layer_norm_rms_epsilon", F32, 1e-5],
        ["llama.rope.freq_base", F32, 10000.0],
        ["llama.rope.scaling.factor", F32, 1.0],
        ["tokenizer.ggml.model", STRING, "llama"],
        ["tokenizer.ggml.tokens", ARRAY, (STRING, [piece for piece, _ in PIECES])],
        ["tokenizer.ggml.scores", ARRAY, (F32, [-float(i) for i in range(n)])],
        ["tokenizer.ggml.token_type", ARRAY, (I32, [kind for _, kind in PIECES])],
        ["tokenizer.ggml.bos_token_id", U32, 1],
        ["tokenizer.ggml.eos_token_id", U32, 2],
        ["tokenizer.ggml.unknown_token_id", U32, 0],
        ["tokenizer.ggml.add_bos_token", BOOL, True],
    ]


def tiny_tensors(hidden=HIDDEN, ffn=FFN, kinds=("Q4_0", "Q8_0", "F16", "BF16", "Q5_1")):
    """The tensors of the tiny model: [name, dims (fastest first), type, offset or None, bytes]."""
    kv, rng, tensors = hidden * KV_HEADS // HEADS, np.random.RandomState(0), []
    shapes = {"attn_q": (hidden, hidden), "attn_k": (hidden, kv), "attn_v": (hidden, kv)}
    shapes |= {"attn_output": (hidden, hidden), "ffn_gate": (hidden, ffn), "ffn_up": (hidden, ffn)}
    shapes |= {"ffn_down": (ffn, hidden), "attn_norm": (hidden,), "ffn_norm": (hidden,)}
    shapes = {f"blk.{i}.{name}": dims for i in range(LAYERS) for name, dims in shapes.items()}
    vocabulary = (hidden, len(PIECES))
    shapes |= {"token_embd": vocabulary, "output": vocabulary, "output_norm": (hidden,)}
    for i, (name, dims) in enumerate(shapes.items()):
        kind = gguf.GGMLQuantizationType[kinds[i % len(kinds)] if len(dims) == 2 else "F32"]
        weight = (rng.standard_normal(dims[::-1]) * 0.2 + (len(dims) == 1)).astype(np.float32)
        try:
            data = gguf.quants.quantize(weight, kind).tobytes()
        except NotImplementedError:  # K-quants: any bytes are valid; their scales stay small
            block, size = gguf.GGML_QUANT_SIZES[kind]
            data = rng.randint(0, 24, (weight.size // block, size)).astype(np.uint8).tobytes()
        tensors.append([name + ".weight", list(dims), int(kind), None, data])
    return tensors


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


def tiny_model(path, keys=None, tensors=None):
    """Write the tiny model, with other keys or tensors if given."""
    path.write_bytes(gguf_file(keys or tiny_keys(), tensors or tiny_tensors())[0])
    return path


@pytest.fixture(autouse=True)
def one_thread(tiny):
    """Tiny sums are faster in one thread, and threads count against the memory of at_most()."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny model as it should be, loaded once: what is compiled or imported then is not timed."""
    path = tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    llama2.load(path)
    return path


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


def mutation(seed):
    """The bytes of the tiny model after one to three changes, decided by the seed."""
    rng = random.Random(seed)
    keys, tensors = tiny_keys(), tiny_tensors()
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


# The same model as directories: Hugging Face's (one file, two with an index, .bin) and Meta's.

FORMS = ("hf", "hf index", "bin", "meta")


def safetensors_file(tensors):
    """Named tensors as safetensors' bytes, in float32."""
    header, body = {}, b""
    for name, t in tensors.items():
        data = t.numpy().tobytes()
        offsets = [len(body), len(body) + len(data)]
        header[name] = {"dtype": "F32", "shape": list(t.shape), "data_offsets": offsets}
        body += data
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def saved(content, **options):
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


@functools.cache
def directory(form):
    """{file name: bytes} of the tiny model."""
    config = llama2.Config(HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, len(PIECES), CONTEXT)
    state = {n: t.detach() for n, t in llama2.Llama(config).named_parameters()}
    values = {key: value[1] if kind == ARRAY else value for key, kind, value in tiny_keys()}
    vocabulary = SimpleNamespace(
        path="", get=lambda key, kind, default=None: values.get(key, default)
    )
    files = {"tokenizer.model": llama2.sentencepiece_model(vocabulary)}
    if form == "meta":
        params = {"dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "n_kv_heads": KV_HEADS}
        params |= {"norm_eps": 1e-5, "vocab_size": -1, "multiple_of": 32, "ffn_dim_multiplier": 0.7}
        files["params.json"] = json.dumps(params).encode()
        shards = [{"rope.freqs": torch.ones(4)}, {"rope.freqs": torch.ones(4)}]
        for ours, theirs in llama2.name_map(2, config):
            axis = {row[2].split(".")[-1]: row[3] for row in llama2.NAMES}[theirs.split(".")[-2]]
            t = state[ours]
            for shard, part in zip(
                shards, [t, t] if axis is None else t.chunk(2, axis), strict=True
            ):
                shard[theirs] = part.clone()
        return files | {f"consolidated.{i:02}.pth": saved(shard) for i, shard in enumerate(shards)}
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    settings = {name: getattr(config, name) for name in names}
    settings |= {"model_type": "llama", "tie_word_embeddings": False, "hidden_act": "silu"}
    settings |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    files["config.json"] = json.dumps(settings).encode()
    state = {name if name == "lm_head.weight" else f"model.{name}": t for name, t in state.items()}
    if form == "hf":
        return files | {"model.safetensors": safetensors_file(state)}
    if form == "bin":
        return files | {"pytorch_model.bin": saved(state)}
    halves = [dict(list(state.items())[i::2]) for i in (0, 1)]
    shards = {f"model-0000{i}-of-00002.safetensors": half for i, half in enumerate(halves, 1)}
    index = {"weight_map": {name: file for file, half in shards.items() for name in half}}
    files["model.safetensors.index.json"] = json.dumps(index).encode()
    return files | {name: safetensors_file(half) for name, half in shards.items()}


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


def mutated_directory(seed, path):
    """Write the tiny model's directory with one or two files changed or missing."""
    rng = random.Random(seed)
    files = dict(directory(rng.choice(FORMS)))
    for name in rng.sample(list(files), rng.choice((1, 1, 1, 2))):
        if rng.randrange(20):
            files[name] = mutate_file(rng, name, files[name])
        else:
            del files[name]
    path.mkdir()
    for name, data in files.items():
        (path / name).write_bytes(data)
    return path


@contextlib.contextmanager
def at_most(megabytes):
    """Let this process take so much more memory; beyond it, allocations fail."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


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
        new = list(llama2.generate(model, ids, max_new_tokens=2, temperature=0.8, stop_ids=()))
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


def test_tiny_model_runs(tiny):
    """The file that all mutations start from is valid."""
    assert outcome(tiny) == "runs"


@pytest.mark.parametrize("start", range(0, 320, 40))
def test_mutated_files(tiny, tmp_path, start):
    """Forty mutations: an error that names the file, or a model that runs, in bounded time and memory."""
    said = []
    for seed in range(start, start + 40):
        path = tmp_path / f"{seed}.gguf"
        path.write_bytes(mutation(seed))
        said.append(bounded_outcome(path))
    assert 1 <= said.count("runs") <= 30  # neither all valid nor all refused at the first byte


def test_mutated_files_by_hypothesis(tiny, tmp_path):
    """The same, with mutations that hypothesis looks for and shrinks."""
    hypothesis = pytest.importorskip("hypothesis")
    data, spans, _ = gguf_file(tiny_keys(), tiny_tensors())
    places = hypothesis.strategies.sampled_from(spans)
    pieces = hypothesis.strategies.one_of(
        hypothesis.strategies.binary(max_size=24),
        hypothesis.strategies.integers(0, 2**64 - 1).map(lambda n: n.to_bytes(8, "little")),
    )
    path = tmp_path / "m.gguf"

    @hypothesis.settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @hypothesis.given(hypothesis.strategies.lists(hypothesis.strategies.tuples(places, pieces)))
    def check(changes):
        changed = bytearray(data)
        for (place, size), piece in changes[:5]:
            changed[place : place + size] = piece
        path.write_bytes(changed)
        bounded_outcome(path)

    check()


@pytest.mark.parametrize("form", FORMS)
def test_tiny_directories_run(tmp_path, form):
    """The directories that mutations start from are valid."""
    for name, data in directory(form).items():
        (tmp_path / name).write_bytes(data)
    assert outcome(tmp_path) == "runs"


@pytest.mark.parametrize("start", range(0, 200, 40))
def test_mutated_directories(tmp_path, start):
    """params.json, config.json, index, safetensors, .pth, .bin and tokenizer.model: forty mutations."""
    seeds = range(start, start + 40)
    said = [bounded_outcome(mutated_directory(seed, tmp_path / f"{seed}")) for seed in seeds]
    assert 1 <= said.count("runs") <= 30


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("name", ["consolidated.00.pth", "pytorch_model.bin"])
def test_pickles_run_nothing(tmp_path, name, zipped):
    """A pickle that would run code is refused before it does."""
    for file, data in directory("meta" if "consolidated" in name else "bin").items():
        (tmp_path / file).write_bytes(data)
    content = {"x": torch.ones(2, 2), "bomb": Bomb(tmp_path / "exploded")}
    (tmp_path / name).write_bytes(saved(content, _use_new_zipfile_serialization=zipped))
    with pytest.raises(ValueError, match=f"{name}: damaged, or not a file of tensors alone"):
        llama2.load(tmp_path)
    assert not (tmp_path / "exploded").exists()
    torch.load(tmp_path / name, weights_only=False)
    assert (tmp_path / "exploded").exists()  # it would have


def test_compressed_pickles_are_refused(tmp_path):
    """torch.save never compresses: a megabyte that swells to a gigabyte is not read."""
    files = directory("bin")
    for file, data in files.items():
        (tmp_path / file).write_bytes(data)
    packed = zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(io.BytesIO(files["pytorch_model.bin"])) as original, packed:
        for entry in original.infolist():
            packed.writestr(entry.filename, original.read(entry))
    assert "compressed" in bounded_outcome(tmp_path)


def test_index_stays_in_its_directory(tmp_path):
    """A weight_map that points elsewhere reads nothing there."""
    for file, data in directory("hf index").items():
        (tmp_path / file).write_bytes(data)
    path = tmp_path / "model.safetensors.index.json"
    for name in ("../../etc/passwd", "/etc/passwd", "..", "", "a\0b"):
        path.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert "passwd: " not in bounded_outcome(tmp_path).replace(f"{tmp_path}/passwd", "")


@pytest.mark.parametrize(
    "key, number, said",
    [
        ("llama.block_count", 2**31, "num_hidden_layers"),
        ("llama.block_count", 2**28, "layers"),
        ("llama.block_count", 20, "missing"),
        ("llama.context_length", 2**28, "runs"),
        ("llama.context_length", 2**31, "max_position_embeddings"),
        ("llama.embedding_length", 2**27, "head size"),
        ("llama.feed_forward_length", 2**28, "needed is"),
        ("llama.attention.head_count", 2**28, "head size"),
        ("llama.attention.head_count_kv", 3, "multiple"),
        ("llama.attention.head_count_kv", 0, "num_key_value_heads"),
        ("split.count", 65535, "65535"),
        ("general.alignment", 2**31, "alignment"),
        ("general.alignment", 1, "alignment"),  # float32 could not be read in place
    ],
)
def test_absurd_counts_do_not_allocate(tmp_path, key, number, said):
    """A count is believed only as far as the file or the request bears it out."""
    keys = [entry for entry in tiny_keys() if entry[0] != key] + [[key, U32, number]]
    assert said in bounded_outcome(tiny_model(tmp_path / "absurd.gguf", keys))


N = len(PIECES)


@pytest.mark.parametrize(
    "name, kind, value, said",
    [
        ("tokens", ARRAY, (STRING, [f"t{i}" for i in range(N - 1)]), f"{N - 1} tokens"),
        ("tokens", ARRAY, (STRING, []), "0 tokens"),
        ("tokens", ARRAY, (STRING, ["same"] * N), "already defined"),
        ("tokens", ARRAY, (STRING, ["<unk>", "<s>", "</s>"] + [""] * (N - 3)), "SentencePiece"),
        ("tokens", ARRAY, (STRING, [p for p, _ in PIECES[:-1]] + ["\0x"]), "null"),
        ("tokens", ARRAY, (STRING, [p for p, _ in PIECES[:-1]] + ["x" * 10**6]), "too long"),
        ("tokens", ARRAY, (U32, list(range(N))), "values for"),
        ("tokens", U32, 5, "not list"),
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
        ("bos_token_id", STRING, "1", "not int"),
    ],
)
def test_hostile_vocabularies(tmp_path, name, kind, value, said):
    """SentencePiece is C++: what it would choke on is refused before, or by it, as ValueError."""
    name = f"tokenizer.ggml.{name}"
    keys = [entry for entry in tiny_keys() if entry[0] != name] + [[name, kind, value]]
    assert said in bounded_outcome(tiny_model(tmp_path / "vocabulary.gguf", keys))


def test_chains_of_merges_end(tmp_path):
    """Merges nested 19 deep and a text of a million equal letters: linear, not quadratic."""
    pieces = [(piece, kind) for piece, kind in PIECES if len(piece) == 1 or kind != 1]
    pieces += [("a" * 2**i, 1) for i in range(1, 10)]
    for kind in (1, 4, 5):  # normal, user-defined, unused
        rows = {"tokens": (STRING, [p for p, _ in pieces])}
        rows["scores"] = (F32, [-float(i) for i in range(len(pieces))])
        rows["token_type"] = (I32, [k if len(p) < 2 or k != 1 else kind for p, k in pieces])
        keys = [entry for entry in tiny_keys() if entry[0].split(".")[-1] not in rows]
        keys += [[f"tokenizer.ggml.{name}", ARRAY, value] for name, value in rows.items()]
        path = tmp_path / f"{kind}.gguf"
        path.write_bytes(gguf_file(keys, [])[0])
        tokenizer, start = llama2.Tokenizer.from_gguf(path), time.perf_counter()
        assert len(tokenizer.encode("a" * 10**6)) > 1000
        assert time.perf_counter() - start < 5


# --------------------------------------------------------------------------------------------------
# Bad numbers

QUANTS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "F16", "BF16", "F32"]
QUANTS += [f"Q{bits}_K" for bits in (2, 3, 4, 5, 6)]


@pytest.mark.parametrize("kind", QUANTS)
def test_bytes_of_no_sense_in_weights(tmp_path, kind):
    """Every scale NaN or infinity: told at the logits; random bytes: told or run, never a crash."""
    keys, n = tiny_keys(), 256
    for entry in keys:
        entry[2] = {"llama.embedding_length": n, "llama.feed_forward_length": n}.get(
            entry[0], n // HEADS if entry[0] == "llama.rope.dimension_count" else entry[2]
        )
    good = tiny_tensors(n, n, (kind,))
    for data in (b"\xff", b"\x7c\x7c", bytes(random.Random(0).randbytes(997))):
        tensors = [list(tensor) for tensor in good]
        for tensor in tensors:
            if tensor[0] in ("blk.1.ffn_up.weight", "output.weight"):
                size = len(tensor[4])
                tensor[4] = (data * (size // len(data) + 1))[:size]
        said = bounded_outcome(tiny_model(tmp_path / "bad.gguf", keys, tensors))
        assert "not finite" in said or (said == "runs" and data != b"\xff")


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["output_norm", "blk.0.attn_norm", "blk.1.ffn_norm"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_norms_that_are_not_finite(tmp_path, name, bad, temperature):
    """One bad number in a norm ends in an error, in no row of a batch in a sampled token."""
    tensors = tiny_tensors()
    for tensor in tensors:
        if tensor[0] == name + ".weight":
            tensor[4] = struct.pack("<f", bad) + tensor[4][4:]
    model, _ = llama2.load(tiny_model(tmp_path / "bad.gguf", None, tensors))
    for prompt in ([1, 268], [[1, 268], [1, 265, 266]]):
        with pytest.raises(ValueError, match="not finite"):
            list(llama2.generate(model, prompt, 4, temperature))


# --------------------------------------------------------------------------------------------------
# Prompts


class Stdin(io.TextIOWrapper):
    """Bytes on standard input."""

    def __init__(self, data):
        super().__init__(io.BytesIO(data))


@pytest.fixture
def cli(tiny, capsys, monkeypatch):
    """Run the command line in this process: -> exit status, stdout, stderr."""

    def run(*argv, stdin=b"", model=tiny):
        monkeypatch.setattr(sys, "stdin", Stdin(stdin))
        try:
            status = llama2.main(["--model", str(model), *map(str, argv)])
        except SystemExit as stop:
            status = stop.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err and "\x1b" not in err and "\r" not in err
        return status, out, err

    return run


TEXTS_TO_CONTINUE = {
    "empty": "",
    "spaces": "   ",
    "newlines": "\n\t\r\n",
    "NUL": "a\0b",
    "controls": "".join(map(chr, range(1, 32))) + "\x7f\x80\x9f",
    "right to left": "\u202e\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "joined emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467\ufe0f",
    "noncharacters": "\ufffe\uffff\U0010ffff\u2581\ufeff",
    "combining": "e\u0301\u0300" * 4,
    "control tokens": "<s></s><unk><0x0A>",
}


@pytest.mark.parametrize("text", TEXTS_TO_CONTINUE.values(), ids=TEXTS_TO_CONTINUE.keys())
@pytest.mark.parametrize("way", ["argument", "file", "stdin"])
def test_prompts(cli, tmp_path, text, way):
    """Any text is continued, whichever way it comes, and comes out as it went in."""
    (tmp_path / "prompt").write_bytes(text.encode())
    ways = {"argument": ["--prompt", text], "file": ["--prompt-file", tmp_path / "prompt"]}
    argv, stdin = ways.get(way, []), text.encode() * (way == "stdin")
    status, out, err = cli(*argv, "--max-new-tokens", 2, stdin=stdin)
    assert (status, err.count("\n")) == (0, 1)
    assert out.replace("\r\n", "\n").startswith(text.replace("\r\n", "\n"))


@pytest.mark.parametrize("text", ["<s>", "</s>", "<unk>", "[INST]", "<<SYS>>", "<0x0A>", "a</s>b"])
def test_text_like_special_tokens_is_text(tiny, text):
    """A typed control token is never that token."""
    tokenizer = llama2.Tokenizer.from_gguf(tiny)
    ids = tokenizer.encode(text, bos=False)
    assert not {0, 1, 2} & set(ids) and tokenizer.decode(ids) == text


def test_any_bytes_on_stdin(cli):
    """Bytes that are not UTF-8 become U+FFFD; nothing raises."""
    rng = random.Random(0)
    samples = [bytes([i]) for i in (0, 0x80, 0xC3, 0xE2, 0xED, 0xF4, 0xFF)] + [b"\xed\xa0\x80"]
    for data in samples + [rng.randbytes(rng.randrange(1, 15)) for _ in range(12)]:
        status, out, _ = cli("--max-new-tokens", 1, "--quiet", stdin=data)
        assert status == 0 and out.startswith(io.StringIO(data.decode("utf-8", "replace")).read())


SURROGATES = [(0xDCFF,), (0xDCC3, 0xDCA9), (0xD800,), (0xDFFF, 0xD800)]


@pytest.mark.parametrize("text", ["".join(map(chr, codes)) for codes in SURROGATES], ids=ascii)
def test_lone_surrogates(cli, tiny, text):
    """Arguments of bytes that are not UTF-8 arrive as lone surrogates."""
    ids = llama2.Tokenizer.from_gguf(tiny).encode(text)
    assert ids[0] == 1
    status, out, err = cli("--prompt", text, "--max-new-tokens", 1)
    assert status in (0, 2) and err.count("\n") == 1
    assert status or out.startswith(
        text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    )


def test_prompt_beyond_the_context(cli):
    """A megabyte of text: an error with both numbers before anything is written, no silent cut."""
    status, out, err = cli(stdin=b"ab cd" * 200_000)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert f"the context holds {CONTEXT}" in err and "tokens" in err


# --------------------------------------------------------------------------------------------------
# Command line


@pytest.mark.parametrize(
    "argv, said",
    [
        ("--temperature -1", "temperature -1"),
        ("--temperature nan", "temperature nan"),
        ("--temperature inf", "temperature inf"),
        ("--top-k -1", "top_k -1"),
        ("--top-p 0", "top_p 0"),
        ("--top-p 1.01", "top_p 1.01"),
        ("--min-p -0.5", "min_p -0.5"),
        ("--seed -2", "seed is -2"),
        ("--seed 9223372036854775808", "seed is 9223372036854775808"),
        ("--max-new-tokens -1", "max_new_tokens is -1"),
        ("--max-new-tokens many", "--max-new-tokens"),
        ("--context 0", "--context 0"),
        ("--context 65", "--context 65"),
        ("--context 2", "the context holds 2"),
        ("--threads 0", "--threads 0"),
        ("--threads 100000", "--threads 100000"),
        ("--device tpu", "tpu"),
        ("--dtype float8", "float8"),
        ("--stop=", "--stop"),
        ("--system x", "--chat"),
        ("--prompt-file absent.txt", "absent.txt"),
        ("--model absent.gguf", "absent.gguf"),
        ("--model {dir}", "{dir}"),
        ("--model /dev/null", "/dev/null"),
        ("--unheard-of", "--unheard-of"),
        *[(f"--device {name}", name) for name in ("cuda", "mps") if not DEVICES[name]],
    ],
)
def test_one_line_and_status_2(cli, tmp_path, argv, said):
    """A wrong argument is told in one line that names it; nothing is written to stdout."""
    argv = argv.format(dir=tmp_path).split()
    prompt = [] if "--prompt-file" in argv else ["--prompt", "ab"]
    status, out, err = cli(*prompt, *argv)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("llama2.py: error: ") and said.format(dir=tmp_path) in err


@pytest.mark.parametrize(
    "argv",
    [
        "--max-new-tokens 0",
        "--temperature 1e-300",
        "--temperature 1e300",
        "--top-k 99999999999999999999",
        "--top-p 1e-300",
        "--seed -1",
        "--context 3",
        "--threads 1",
        "--dtype float16",
        "--dtype bfloat16",
        "--max-new-tokens 99999999999999999999",
    ],
)
def test_extremes_that_are_fine(cli, argv):
    """What is unusual and means something works."""
    status, out, err = cli("--prompt", "ab", *argv.split(), "--stop", "never seen")
    assert status == 0 and out.startswith("ab") and err.count("\n") == 1


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(cli, tmp_path):
    path = tiny_model(tmp_path / "secret.gguf")
    path.chmod(0)
    status, out, err = cli("--prompt", "ab", model=path)
    assert (status, out, err.count("\n")) == (2, "", 1) and "secret.gguf" in err


def test_names_from_files_reach_no_terminal(cli, tmp_path):
    """Control characters in a tensor's name are not passed on: they would steer the terminal."""
    tensors = tiny_tensors()
    tensors[3][0] = "\x1b[31mred\x9b\0.weight"
    status, _, err = cli("--prompt", "ab", model=tiny_model(tmp_path / "red.gguf", None, tensors))
    assert status == 2 and err.count("\n") == 1
    assert err.rstrip("\n").isprintable()


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error:\nout of memory"), MemoryError()], ids=["torch", "python"]
)
def test_what_torch_cannot_do_is_one_line(cli, monkeypatch, error):
    """Out of memory, a kernel that the device lacks: torch raises RuntimeError."""

    def refuse(*args):
        raise error

    monkeypatch.setattr(llama2.Llama, "forward", refuse)
    status, _, err = cli("--prompt", "ab")
    assert (status, err.count("\n")) == (2, 1) and err.startswith("llama2.py: error: ")


# --------------------------------------------------------------------------------------------------
# Streams and signals

LAUNCH = f"{shlex.quote(sys.executable)} {shlex.quote(str(SCRIPT))} --model $MODEL --threads 1 "
LAUNCH += "--temperature 0 --prompt 'ab \u00e9' --max-new-tokens 30"
SHELL = {  # -> exit status, a part of stdout, lines on stderr
    "head": (f"{LAUNCH} | head -c 2", 0, b"ab", None),
    "stdout full": (f"{LAUNCH} > /dev/full", 2, b"", 1),
    "stdout closed": (f"{LAUNCH} >&-", 0, b"", 1),
    "stderr full": (f"{LAUNCH} 2> /dev/full", 0, b"ab", 0),
    "all closed": (f"{LAUNCH} <&- >&- 2>&-", 0, b"", 0),
    "help, full": (f"{LAUNCH} --help > /dev/full", 0, b"", 0),
    "ascii": (f"PYTHONIOENCODING=ascii {LAUNCH}", 0, rb"ab \xe9", 1),
    "C locale": (f"LC_ALL=C PYTHONUTF8=0 PYTHONCOERCECLOCALE=0 {LAUNCH}", 0, rb"ab \xe9", 1),
}


@pytest.fixture(scope="module")
def started(tiny):
    """The commands of SHELL, started side by side: each spends its time on importing torch."""
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    environment = os.environ | {"MODEL": str(tiny), "LC_ALL": "C.UTF-8"}
    environment.pop("PYTHONIOENCODING", None)
    shell = ["bash", "-o", "pipefail", "-c"]
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return {
        name: subprocess.Popen([*shell, command], env=environment, **pipes)
        for name, (command, *_) in SHELL.items()
    }


@pytest.mark.parametrize("name", SHELL)
def test_streams(started, name):
    """A reader that leaves, a full disk, closed streams, other encodings: no traceback, no status 120."""
    _, status, text, lines = SHELL[name]
    out, err = started[name].communicate(timeout=120)
    assert b"Traceback" not in err and b"Exception" not in err and b"\x1b" not in err
    assert started[name].returncode == status and text in out
    assert lines is None or err.count(b"\n") == lines


def test_interrupt_while_torch_is_imported(tiny):
    """Ctrl-C in the seconds before main() ends quietly."""
    command = [sys.executable, str(SCRIPT), "--model", str(tiny), "--prompt", "ab"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    maps = Path(f"/proc/{process.pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    while "libtorch" not in maps.read_text() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (out, err) == (b"", b"") and process.returncode in (-signal.SIGINT, 130)


@pytest.mark.parametrize(
    "owner, name, calls, written, reported",
    [
        (llama2, "open_checkpoint", 1, "", False),
        (llama2, "build_model", 1, "", False),
        (llama2.Llama, "forward", 1, "ab", True),
        (llama2.Llama, "forward", 5, "ab", True),
        (llama2.StreamDecoder, "decode", 3, "ab", True),
    ],
    ids=["opening", "loading", "prefill", "generating", "decoding"],
)
def test_interrupt(cli, monkeypatch, owner, name, calls, written, reported):
    """Ctrl-C at any moment: status 130, what was written stays, the report tells it."""
    interrupt_call(monkeypatch, owner, name, calls)
    status, out, err = cli("--prompt", "ab", "--max-new-tokens", 20)
    assert status == 130 and out.startswith(written) and ("interrupted" in err) == reported


def interrupt_call(monkeypatch, owner, name, calls):
    """Press Ctrl-C in the given call of a function."""
    original, count = getattr(owner, name), iter(range(1, 10**6))

    def function(*args, **options):
        if next(count) == calls:
            signal.raise_signal(signal.SIGINT)
        return original(*args, **options)

    monkeypatch.setattr(owner, name, function)


# --------------------------------------------------------------------------------------------------
# Chat


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """The tiny model with room for a conversation: its vocabulary spends a token on most letters."""
    keys = [entry for entry in tiny_keys() if entry[0] != "llama.context_length"]
    path = tmp_path_factory.mktemp("talker") / "talker.gguf"
    dense = tiny_tensors(kinds=("F32",))  # many steps: nothing to dequantise in each
    return tiny_model(path, [*keys, ["llama.context_length", U32, 320]], dense)


@pytest.fixture
def heard(monkeypatch):
    """What each turn of a chat fed to the model, as the ids that its cache then stood for."""
    turns, content, wanted = [], [], []
    forward, encode, sample = llama2.Llama.forward, llama2.encode_chat, llama2.sample

    def spy_forward(model, tokens, cache, *args):
        content[cache.pos :] = tokens[0].tolist()
        return forward(model, tokens, cache, *args)

    def spy_encode(tokenizer, messages):
        wanted[:] = encode(tokenizer, messages)
        return list(wanted)

    def spy_sample(logits, *args, **options):
        if wanted and logits.numel() > 1:  # the first token of an answer
            assert content == wanted
            turns.append(list(content))
            wanted.clear()
        return sample(logits, *args, **options)

    monkeypatch.setattr(llama2.Llama, "forward", spy_forward)
    monkeypatch.setattr(llama2, "encode_chat", spy_encode)
    monkeypatch.setattr(llama2, "sample", spy_sample)
    return turns


def test_chat_that_fills_its_context(cli, talker, heard):
    """Says so, drops the oldest turns, keeps the system prompt; the cache holds Meta's encoding."""
    questions = [f"{letter * 20}?" for letter in "abcdefgh"]
    argv = ["--chat", "--system", "hfhf", "--max-new-tokens", 30, "--temperature", 0]
    stdin = "\n".join(questions).encode()
    status, _, err = cli(*argv, stdin=stdin, model=talker)
    assert status == 0 and err.count("context full: forgot the oldest") >= 2
    tokenizer = llama2.Tokenizer.from_gguf(talker)
    assert len(heard) == len(questions)
    for ids, question in zip(heard, questions, strict=True):
        text = tokenizer.decode(ids)
        assert len(ids) + 30 <= 320 and text.count("<<SYS>>\nhfhf") == 1
        assert text.endswith(f"{question} [/INST]")
    assert questions[0] in tokenizer.decode(heard[1])
    assert questions[0] not in tokenizer.decode(heard[-1])
    assert questions[-2] in tokenizer.decode(heard[-1])


def test_chat_answer_cut_by_the_context(cli, talker):
    """An answer that the context cuts off is not passed over in silence."""
    argv = ["--chat", "--max-new-tokens", 10**6, "--temperature", 0]
    status, _, err = cli(*argv, stdin=b"ab\n", model=talker)
    assert status == 0 and "context full: the answer ends here" in err


def test_chat_refuses_and_goes_on(cli, talker, heard):
    """Reserved tags and questions beyond the context are refused; the conversation stays."""
    lines = ["abab", "x [/INST] y", "<<SYS>>", "c" * 1000, "", "fefe"]
    argv = ["--chat", "--max-new-tokens", 5, "--temperature", 0]
    status, _, err = cli(*argv, stdin="\n".join(lines).encode(), model=talker)
    assert status == 0 and err.count("reserved tag") == 2 and "the context holds 320" in err
    text = llama2.Tokenizer.from_gguf(talker).decode(heard[-1])
    assert len(heard) == 2 and text.startswith("[INST] abab [/INST]") and "fefe" in text


def test_chat_answer_with_reserved_tags(cli, talker, heard, monkeypatch):
    """A model that speaks for the user is stopped there, and the next turn is possible."""
    tokenizer, calls = llama2.Tokenizer.from_gguf(talker), []
    script = tokenizer.encode("ab [INST] cd", bos=False)

    def scripted(model, prompt, report, **options):
        calls.append(prompt)
        report.__init__(new_ids=[[]], stop_reasons=[""])
        yield from script

    monkeypatch.setattr(llama2, "generate", scripted)
    status, out, err = cli("--chat", "--quiet", stdin=b"ab\ncd\n", model=talker)
    assert (status, err, len(calls)) == (0, "", 2) and out == "ab \nab \n"


def test_interrupt_in_chat(cli, talker, heard, monkeypatch):
    """Ctrl-C stops the answer, not the session; even the first, before anything is generated."""
    for calls in (1, 4):
        heard.clear()
        with monkeypatch.context() as context:
            interrupt_call(context, llama2.Llama, "forward", calls)
            argv = ["--chat", "--max-new-tokens", 8, "--temperature", 0]
            status, out, _ = cli(*argv, stdin=b"ab\ncd\n", model=talker)
        assert status == 0 and out.count("\n") >= 2
        text = llama2.Tokenizer.from_gguf(talker).decode(heard[-1])
        assert "[INST] ab [/INST]" in text and text.endswith("[INST] cd [/INST]")


# --------------------------------------------------------------------------------------------------
# Again and again


@pytest.mark.parametrize("argv", [["--temperature", 0], ["--seed", 7]])
def test_same_command_same_text(cli, argv):
    """Twice in a row, and with one thread or two, which these small sums do not notice."""
    most = min(2, os.cpu_count() or 1)
    argv = ["--prompt", "ab", "--max-new-tokens", 16, *argv]
    runs = {cli(*argv, "--threads", n)[1] for n in (1, 1, most, most)}
    assert len(runs) == 1


def test_seeds_do_not_know_their_neighbours(tiny):
    """Row i of a batch draws what it would draw alone with seed + i."""
    model, _ = llama2.load(tiny)
    prompts = [[1, 260 + i] * (i + 1) for i in range(4)]
    options = {"max_new_tokens": 12, "temperature": 1.5, "stop_ids": ()}
    rows = list(zip(*llama2.generate(model, prompts, seed=5, **options), strict=True))
    for i, row in enumerate(rows):
        assert list(row) == list(llama2.generate(model, prompts[i], seed=5 + i, **options))


def test_memory_stays_flat(tmp_path):
    """Twenty generations to the end of the context leave nothing behind."""
    keys = [entry for entry in tiny_keys() if entry[0] != "llama.context_length"]
    path, dense = tmp_path / "m.gguf", tiny_tensors(kinds=("F32",))
    model, _ = llama2.load(tiny_model(path, [*keys, ["llama.context_length", U32, 24]], dense))

    def resident():
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    sizes = []
    for _ in range(20):
        assert len(list(llama2.generate(model, [1], 10**6, 0.8, stop_ids=()))) == 23
        sizes.append(resident())
    assert sizes[-1] - sizes[4] < 8 * 2**20
