"""Nothing that a file or a user does breaks llama2.py: mutated files, odd text, signals, streams."""

from __future__ import annotations

import codecs
import collections
import contextlib
import math
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

import llama2

SCRIPT = Path(llama2.__file__)
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
    llama = dict(context_length=CONTEXT, embedding_length=HIDDEN, block_count=LAYERS)
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
    shapes = dict(attn_q=(hidden, hidden), attn_k=(hidden, kv), attn_v=(hidden, kv))
    shapes |= dict(attn_output=(hidden, hidden), ffn_gate=(hidden, ffn), ffn_up=(hidden, ffn))
    shapes |= dict(ffn_down=(ffn, hidden), attn_norm=(hidden,), ffn_norm=(hidden,))
    shapes = {f"blk.{i}.{name}": dims for i in range(LAYERS) for name, dims in shapes.items()}
    vocabulary = (hidden, len(PIECES))
    shapes |= dict(token_embd=vocabulary, output=vocabulary, output_norm=(hidden,))
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
                self.put(struct.pack(f"<{len(values)}{LETTERS[inner]}", *values))
            else:
                for i, item in enumerate(values):
                    spans = list(self.spans)
                    self.value(inner, item)
                    self.spans = spans if i > 2 else self.spans  # a few boundaries of many
        else:
            self.put(struct.pack("<" + LETTERS.get(kind, "I"), value))


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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """The tiny model as it should be."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


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
    if kind == ARRAY and choice:
        inner, values = value[0], list(value[1])
        where = rng.randrange(len(values))
        if choice == 1:
            pool = {STRING: TEXTS + tuple(values[:5]), F32: FLOATS[:7]}.get(inner, NUMBERS[:4])
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
        data = np.frombuffer(tensor[4], dtype).copy()
        data[rng.randrange(len(data)) :: rng.choice((1, 7, 10**9))] = bad
        tensor[4] = data.tobytes()
    else:
        tensor[4] = tensor[4][: rng.randrange(1, len(tensor[4]))]
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
