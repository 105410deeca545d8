"""Write a model as a GGUF file or a Hugging Face folder. Programs import this module.

    from save import save_folder, save_gguf
    save_gguf(model, "mine.gguf", "Q8_0", tokenizer=tokenizer)         # llama.cpp reads it, too
    save_folder(llama2.open_checkpoint("mine.gguf"), "folder", "F16")  # transformers reads it, too

Both take a model in memory with its tokenizer, or a checkpoint, and refuse what cannot be held:
biases, adapters that are not merged, other modules. examples/convert.py is the program.
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
import re
import secrets
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import llama2

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = {dtype: name for name, dtype in DTYPES.items()}
SAVE_TYPES = (*DTYPES, "Q8_0", "Q4_0")  # a folder has the first three
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of pieces, as in GGUF

# --------------------------------------------------------------------------------------------------
# What is written: a checkpoint


def model_checkpoint(model: llama2.Llama, tokenizer: llama2.Tokenizer | None) -> llama2.Checkpoint:
    """The Checkpoint of a model in memory, without a copy.

    Raises ValueError if it has something that a file cannot hold.
    """
    if tokenizer is None:
        raise ValueError("a model can only be saved with its tokenizer")
    quantised = llama2.QuantizedLinear, llama2.QuantizedEmbedding
    own = llama2.Llama, llama2.Block, llama2.CausalSelfAttention, llama2.MLP, llama2.RMSNorm
    for name, module in model.named_modules():
        if not isinstance(module, (*own, *quantised, nn.ModuleList, nn.Linear, nn.Embedding)):
            raise ValueError(f"a file cannot hold {name}, a {type(module).__name__}")
    weights = {}
    for name, w in model.state_dict().items():
        path, _, last = name.rpartition(".")
        module = model.get_submodule(path)
        w = w.detach().cpu().contiguous()
        if isinstance(module, quantised):  # their tensor is named by its type
            weights[f"{path}.weight"] = make_weight(w, last)
        else:
            weights[name] = make_weight(w)
    own_config = replace(model.config, num_hidden_layers=len(model.layers))
    config = replace(own_config, tie_word_embeddings=False)
    with llama2.naming("a file cannot hold the model as it is"):
        check_tensors(weights, config)
    embedding, head = weights["embed_tokens.weight"], weights["lm_head.weight"]
    # The two are one tensor in a new model. Training or a replaced module may have changed that.
    if model.config.tie_word_embeddings and torch.equal(embedding.read(), head.read()):
        del weights["lm_head.weight"]
        config = own_config
    usual = vars(llama2.Sampling())
    sampling = vars(model.sampling or llama2.Sampling())
    sampling = {n: sampling[n] for n in llama2.GGUF_SAMPLING if sampling[n] != usual[n]}
    return llama2.Checkpoint("the model", config, weights, lambda: tokenizer, recommended=sampling)


def make_weight(w: Tensor, ggml_type: str = "") -> llama2.Weight:
    """A Weight for a tensor in memory: rows of blocks of `ggml_type`, or else a dense tensor."""
    if ggml_type:
        stored = llama2.find_type(ggml_type)
        columns = w.shape[1] // stored.nbytes * stored.count
        return llama2.Weight(ggml_type, (len(w), columns), lambda: w)
    w = w if w.dtype in TYPES else w.float()
    rows = torch.atleast_2d(w).view(torch.uint8)
    return llama2.Weight(TYPES[w.dtype], tuple(w.shape), lambda: rows)


def check_tensors(weights: Mapping[str, llama2.Weight], config: llama2.Config) -> None:
    """Raises ValueError unless these are all tensors of the model, in their shapes."""
    if config.num_hidden_layers > len(weights):  # said before anything of that size is built
        raise ValueError(f"{config.num_hidden_layers} layers in {len(weights)} tensors")
    with torch.device("meta"):
        model = llama2.Llama(config)
    shapes = {name: tuple(w.shape) for name, w in model.named_parameters()}
    for name in sorted(shapes.keys() ^ weights.keys()):
        problem = "is missing" if name in shapes else "is no tensor of a Llama"
        raise ValueError(f"{name} {problem}")
    for name, shape in shapes.items():
        if weights[name].shape != shape:
            raise ValueError(f"{name} is {weights[name].shape}; expected {shape}")


def as_checkpoint(
    model: llama2.Llama | llama2.Checkpoint, tokenizer: llama2.Tokenizer | None
) -> llama2.Checkpoint:
    """What is to be saved. Raises ValueError if the tokenizer does not fit the model."""
    model = getattr(model, "_orig_mod", model)  # torch.compile() wraps a model
    if isinstance(model, llama2.Llama):
        model = model_checkpoint(model, tokenizer)
    if not isinstance(model, llama2.Checkpoint):
        raise ValueError(f"the model is a {type(model).__name__}; expected a Llama or a Checkpoint")
    pieces, rows = model.tokenizer.vocab_size, model.config.vocab_size
    if pieces > rows:
        raise ValueError(f"the tokenizer has {pieces} pieces, the model {rows} rows")
    return model


def config_with_ends(checkpoint: llama2.Checkpoint) -> llama2.Config:
    """The Config, which also names the tokens that end a text by their own texts: so it has them
    after load(), and other programs need to be told."""
    config = checkpoint.config
    ends = llama2.ends_by_text(config, checkpoint.tokenizer)
    return replace(config, stop_token_ids=(*config.stop_token_ids, *ends))


def describe_tensors(weights: Iterable[llama2.Weight]) -> str:
    """How many tensors of each type there are, and the size of all."""
    weights = [*weights]
    types = Counter(weight.ggml_type for weight in weights)
    counts = ", ".join(f"{n} {name}" for name, n in types.most_common())
    return f"{counts}; {sum(weight.nbytes for weight in weights) / 1e9:.3f} GB"


def pad_token_id(checkpoint: llama2.Checkpoint) -> int | None:
    """The id of the padding token: the tokenizer's own, or what config.json says; None: unknown."""
    vocabulary = checkpoint.tokenizer.vocabulary
    text = vocabulary.special_tokens.get("pad_token")
    if text in vocabulary.pieces:
        return vocabulary.pieces.index(text)
    path = Path(checkpoint.path) / "config.json"
    settings = json.loads(path.read_bytes()) if path.is_file() else {}
    token_id = settings.get("pad_token_id")
    return token_id if token_id in range(checkpoint.config.vocab_size) else None


# --------------------------------------------------------------------------------------------------
# A GGUF file


def check_range(w: Tensor, dtype: torch.dtype) -> None:
    """Raises ValueError for a number that `dtype` cannot hold: scales of blocks are float16."""
    largest = w.abs().max()
    if largest.isnan():
        raise ValueError("NaN among its numbers, as after training that diverged")
    if largest > torch.finfo(dtype).max:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(f"a number, {largest:.3g}, beyond the range of {name}; BF16 can hold more")


def convert_weight(weight: llama2.Weight, ggml_type: str | None) -> llama2.Weight:
    """The Weight to save: a matrix becomes `ggml_type` (None: it stays as it is), norms F32.

    Where the rows of a matrix are not whole blocks of that type, it becomes F16.
    """
    target = "F32" if len(weight.shape) == 1 else ggml_type or weight.ggml_type
    if weight.shape[-1] % llama2.find_type(target).count:
        target = "F16"

    def read() -> Tensor:
        import gguf

        w = weight.dense(torch.float32)
        check_range(w, DTYPES.get(target, torch.float16))
        data = gguf.quants.quantize(w.numpy(), gguf.GGMLQuantizationType[target])
        return torch.from_numpy(data).view(torch.uint8)

    return weight if target == weight.ggml_type else llama2.Weight(target, weight.shape, read)


def check_file(path: Path, overwrite: bool) -> None:
    """Raises ValueError unless a file may be written there."""
    if path.exists() and not (overwrite and path.is_file()):
        raise ValueError(f"{path} exists already; overwrite=True (--force) replaces a file")


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Locks a file or folder, and says whether it could. Windows does not remove an open file."""
    descriptor = os.open(path if fcntl else os.devnull, os.O_RDONLY)
    is_free = fcntl is None
    try:
        with suppress(OSError, AttributeError):  # another run has it; a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_free = True
        yield is_free
    finally:
        os.close(descriptor)


@contextmanager
def unfinished(path: Path) -> Iterator[Path]:
    """A name beside `path` for what is not finished yet, and is removed at the end.

    What killed runs have left there is removed, too; what other runs are writing is locked.
    """
    pattern = rf"{re.escape(path.name)}\.[0-9a-f]{{8}}\.unfinished"
    for old in path.parent.glob("*.unfinished"):
        with suppress(OSError), locked(old) as is_free:
            if is_free and re.fullmatch(pattern, old.name):
                remove(old)
    new = path.with_name(f"{path.name}.{secrets.token_hex(4)}.unfinished")
    try:
        yield new
    except OSError as error:  # on a full disk: name the path
        named = error.filename if error.filename != str(new) else None
        raise OSError(error.errno, error.strerror, named or str(path)) from error
    finally:
        remove(new)


def remove(path: Path) -> None:
    """Remove a file, or a folder and what is in it, if it exists."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def replacing(path: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """A new file that becomes `path` if the `with` block succeeds, and is deleted if it fails.

    A link stays a link. The new file gets the permissions of the file that it replaces.
    """
    path = path.resolve()
    check_file(path, overwrite)
    exists = path.exists()
    with unfinished(path) as new:
        with new.open("xb") as file, locked(new):
            if exists:
                shutil.copymode(path, new)
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


NUMBER_SIZES = dict(zip((*range(8), 10, 11, 12), (1, 1, 2, 2, 4, 4, 4, 1, 8, 8, 8), strict=True))
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = range(4, 10)


def stored_values(path: Path) -> dict[str, bytes]:
    """The metadata of a GGUF file that llama2.py has read: each value with its type, as bytes."""
    values = {}
    with path.open("rb") as file:

        def number(size: int) -> int:
            return int.from_bytes(file.read(size), "little")

        file.seek(16)  # behind the magic, the version and the number of tensors
        for _ in range(number(8)):
            key = file.read(number(8)).decode()
            start = file.tell()
            item_type, count = number(4), 1
            if item_type == ARRAY:
                item_type, count = number(4), number(8)
            if item_type == STRING:
                for _ in range(count):
                    file.seek(number(8), 1)
            else:
                file.seek(count * NUMBER_SIZES[item_type], 1)
            size = file.tell() - start
            file.seek(start)
            values[key] = file.read(size)
    # Until version 0.6.0 these were written as UINT32, which llama.cpp does not take.
    head = struct.pack("<II", ARRAY, UINT32)
    types = values.get("tokenizer.ggml.token_type", b"")
    if types.startswith(head):
        values["tokenizer.ggml.token_type"] = struct.pack("<II", ARRAY, INT32) + types[len(head) :]
    return values


def pack_text(text: str) -> bytes:
    """A text in GGUF: its length, and UTF-8."""
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def pack_value(value: Any, integer: int = UINT32) -> bytes:
    """A value of the metadata with its type, as gguf.GGUFWriter packs it.

    `integer` is the type of an integer. In a list that is always INT32, as llama.cpp expects.
    """
    if isinstance(value, list):
        items = [pack_value(item, INT32) for item in value]
        head = struct.pack("<I", ARRAY) + items[0][:4] + struct.pack("<Q", len(items))
        return head + b"".join(item[4:] for item in items)
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<Ii" if integer == INT32 else "<II", integer, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    return struct.pack("<I", STRING) + pack_text(value)


def model_keys(config: llama2.Config, vocabulary: llama2.Vocabulary) -> dict[str, Any]:
    """GGUF's keys for a Config. `vocabulary` has the EOS that its chat template means."""
    ends = [
        i
        for i in dict.fromkeys((*config.stop_token_ids, config.eos_token_id))
        if i != vocabulary.eos_id and i in range(config.vocab_size)
    ]
    keys = {
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.block_count": config.num_hidden_layers,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.vocab_size": config.vocab_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope_theta),
        "llama.rope.scaling.type": "linear" if config.rope_scaling_factor != 1 else None,
        "llama.rope.scaling.factor": float(config.rope_scaling_factor),
        # llama.cpp's converter writes none of these three: llama.cpp finds an "end of turn" by its
        # text. Ollama reads eos_token_ids; llama.cpp reads the first two of them by other names.
        "tokenizer.ggml.eos_token_ids": ends,
    }
    if config.rope_scaling_factor == 1:
        keys["llama.rope.scaling.factor"] = None
    for end, token_id in zip(("eot", "eom"), ends):
        keys[f"tokenizer.ggml.{end}_token_id"] = token_id
    return keys


def vocabulary_keys(vocabulary: llama2.Vocabulary, count: int) -> dict[str, Any]:
    """GGUF's keys for a vocabulary, padded to `count` pieces. Raises ValueError."""
    padding = range(len(vocabulary.pieces), count)
    keys: dict[str, Any] = {"token_type": [*vocabulary.types]}
    if isinstance(vocabulary.model, bytes):
        keys |= sentencepiece_keys(vocabulary)
    else:
        keys |= json_keys(vocabulary)
    keys |= {
        "tokens": vocabulary.pieces + [f"[PAD{i}]" for i in padding],
        "token_type": keys["token_type"] + [UNUSED] * len(padding),
        "bos_token_id": vocabulary.bos_id,
        "eos_token_id": vocabulary.eos_id,
        "add_bos_token": vocabulary.add_bos,  # the converter writes it if the tokenizer's files do
    }
    if "scores" in keys:
        # As in SentencePiece; llama.cpp's converter writes CONTROL where other files say "special".
        if (unknown := keys["unknown_token_id"]) is not None:
            keys["token_type"][unknown] = UNKNOWN
        added = keys["token_type"][len(keys["scores"]) :]
        keys["scores"] += [-1e4 if t == UNUSED else -1e3 for t in added]
        if vocabulary.prepend_scheme == "never":
            keys["add_space_prefix"] = False
        elif vocabulary.prepend_scheme != "prepend":
            # llama2.py alone knows this key: GGUF cannot say where else a space is added.
            keys["prepend_scheme"] = vocabulary.prepend_scheme
    for name, role in SPECIAL_TOKENS.items():
        text = vocabulary.special_tokens.get(role)
        if text in vocabulary.pieces:
            keys[f"{name}_token_id"] = vocabulary.pieces.index(text)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return metadata | {"tokenizer.chat_template": vocabulary.chat_template}


SPECIAL_TOKENS = {  # the name of a special token in GGUF -> in tokenizer_config.json
    "unknown": "unk_token",
    "padding": "pad_token",
    "seperator": "sep_token",  # so spelt in GGUF
    "cls": "cls_token",
    "mask": "mask_token",
}


class SentencePiece:
    """The content of a tokenizer.model, which is a message of protobuf. Raises ValueError.

    Its fields have numbers, those of sentencepiece_model.proto.
    """

    def __init__(self, model: bytes) -> None:
        fields = [*read_protobuf(model)]
        messages = [dict(read_protobuf(value)) for number, value in fields if number == 1]
        # Of a field that comes twice, the last one counts.
        trainer, normalizer = (dict(read_protobuf(dict(fields).get(i, b""))) for i in (2, 3))
        self.pieces = [message[1].decode() for message in messages]
        self.scores = [struct.unpack("<f", message.get(2, bytes(4)))[0] for message in messages]
        self.types = [message.get(3, NORMAL) for message in messages]
        self.byte_fallback = bool(trainer.get(35))
        self.strips_spaces = bool(normalizer.get(4, True))
        # model_type, treat_whitespace_as_suffix, precompiled_charsmap
        if trainer.get(3) != 2 or trainer.get(24) or normalizer.get(2):
            raise ValueError(
                "GGUF can only hold a tokenizer.model of BPE that changes no characters"
            )

    def left_to_engine(self, vocabulary: llama2.Vocabulary) -> list[int]:
        """The ids of user-defined pieces that llama2.py leaves to sentencepiece."""
        types = zip(self.types, vocabulary.types)
        return [i for i, both in enumerate(types) if both == (USER_DEFINED, NORMAL)]


def read_protobuf(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a message of protobuf: a number and a value, which is an integer or bytes."""
    file = io.BytesIO(message)

    def read_varint() -> int:
        byte = file.read(1)[0]
        return byte if byte < 128 else byte - 128 + (read_varint() << 7)

    while file.tell() < len(message):
        number, wire_type = divmod(read_varint(), 8)
        if wire_type == 0:
            yield number, read_varint()
        else:
            yield number, file.read(4 if wire_type == 5 else read_varint())


def sentencepiece_keys(vocabulary: llama2.Vocabulary) -> dict[str, Any]:
    """GGUF's keys for the bytes of a tokenizer.model. Raises ValueError."""
    sp = SentencePiece(vocabulary.model)
    types = [*vocabulary.types]
    for i in sp.left_to_engine(vocabulary):
        types[i] = USER_DEFINED
    return {
        "model": "llama",
        "pre": "default",
        "token_type": types,
        "scores": sp.scores,
        "unknown_token_id": sp.types.index(UNKNOWN) if UNKNOWN in sp.types else None,
        "remove_extra_whitespaces": sp.strips_spaces or None,
    }


SPACES = (  # the steps of a tokenizer.json that treats spaces as SentencePiece does
    r'\[(({"prepend": "\\u2581", "type": "Prepend"}, )?'
    r'{"content": "\\u2581", "pattern": {"String": " "}, "type": "Replace"}'
    r'|{"prepend_scheme": "\w+", "replacement": "\\u2581", "split": false, "type": "Metaspace"})\]'
)


def json_steps(content: Mapping[str, Any]) -> str:
    """The steps of a tokenizer.json before its model, as JSON: equal steps are equal texts."""
    steps = []
    for name, plural in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = content.get(name) or {plural: []}  # one step, or a Sequence of several
        steps += step.get(plural, [step])
    # Two settings need not be the same: one is a default, the other changes no id.
    return (
        json.dumps(steps, sort_keys=True)
        .replace(', "use_regex": true', "")
        .replace('"trim_offsets": false', '"trim_offsets": true')
    )


def json_keys(vocabulary: llama2.Vocabulary) -> dict[str, Any]:
    """GGUF's keys for a tokenizer.json. Raises ValueError if GGUF cannot describe it.

    For the steps before the model GGUF has only a name: that of equal steps in PRE_TOKENIZERS.
    """
    content = vocabulary.model
    added = content.get("added_tokens", ())
    if re.search('"(single_word|lstrip|rstrip)": true', json.dumps(added)):
        raise ValueError("GGUF cannot say that an added token takes the spaces beside it")
    normalizer = content.get("normalizer") or {"normalizers": []}
    for token in added if normalizer.get("normalizers", True) else ():
        if token.get("normalized") and vocabulary.types[token["id"]] == USER_DEFINED:
            raise ValueError(f"GGUF cannot say that {token['content']!r:.60} is normalized first")
    model, steps = content["model"], json_steps(content)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    if re.fullmatch(SPACES, steps) and merges:
        return {
            "model": "llama",
            "pre": "default",
            "scores": merge_scores(vocabulary, merges),
            "unknown_token_id": vocabulary.pieces.index(model.get("unk_token") or "<unk>"),
        }
    for pre, named_steps in llama2.PRE_TOKENIZERS.items():
        is_like_llama_3 = bool(model.get("ignore_merges"))
        same_steps = steps == json.dumps(named_steps, sort_keys=True)
        if same_steps and is_like_llama_3 == (pre in llama2.LIKE_LLAMA_3):
            return {"model": "gpt2", "pre": pre, "merges": merges}
    raise ValueError(f"GGUF has no name for {steps:.150}")


def sentencepiece_merges(vocabulary: llama2.Vocabulary) -> list[tuple[str, int]]:
    """SentencePiece merges any two pieces that make a third one: that one, and where it is cut."""
    words = {piece for piece, t in zip(vocabulary.pieces, vocabulary.types) if t == NORMAL}
    return [
        (word, i) for word in words for i in range(1, len(word)) if words >= {word[:i], word[i:]}
    ]


def merge_scores(vocabulary: llama2.Vocabulary, merges: list[str]) -> list[float]:
    """Scores by which SentencePiece merges in the order of `merges`. Raises ValueError."""
    expected = {f"{word[:i]} {word[i:]}" for word, i in sentencepiece_merges(vocabulary)}
    if others := expected.difference(merges):
        raise ValueError(f"GGUF cannot say that {min(others)!r} are not merged")
    scores = {merge.replace(" ", ""): -float(rank) for rank, merge in enumerate(merges)}
    return [scores.get(piece, 0.0) for piece in vocabulary.pieces]


INTEGERS = {  # keys whose integers are signed
    "general.sampling.top_k": INT32,
    "general.sampling.penalty_last_n": INT32,
}


def gguf_metadata(checkpoint: llama2.Checkpoint) -> dict[str, bytes]:
    """The metadata for a GGUF file of a checkpoint, each value packed. Raises ValueError.

    If the checkpoint comes from a GGUF file, its keys stay as they are in that file; if its Config
    was changed, all keys but those of the Config.
    """
    import gguf

    config, path = checkpoint.config, Path(checkpoint.path)
    keys: dict[str, Any] = {"general.architecture": "llama"}
    keys["general.quantization_version"] = gguf.GGML_QUANT_VERSION
    vocabulary = checkpoint.tokenizer.vocabulary
    stored = {}
    if checkpoint.file is None:
        # The converter also makes up what describes a model to people: a name, a size, ...
        keys["general.type"] = "model"
        keys |= vocabulary_keys(vocabulary, config.vocab_size)
        keys |= model_keys(config_with_ends(checkpoint), vocabulary)
        keys["tokenizer.ggml.padding_token_id"] = pad_token_id(checkpoint)
        for name, value in checkpoint.sampling.items():
            # No text and no vocabulary has more than an INT32 can count.
            value = [*value] if name == "stop_strings" else min(value, 2**31 - 1)
            keys[llama2.GGUF_SAMPLING[name]] = value
    else:
        stored = stored_values(path)
        if llama2.open_checkpoint(path).config != config:
            for key, value in model_keys(config, vocabulary).items():
                stored.pop(key, None)
                keys[key] = value
    written = {key: value for key, value in keys.items() if value not in (None, "", [])}
    packed = {key: pack_value(value, INTEGERS.get(key, UINT32)) for key, value in written.items()}
    packed |= stored
    # The new file is not split.
    return {key: value for key, value in packed.items() if not key.startswith("split.")}


def write_gguf(
    file: BinaryIO, metadata: dict[str, bytes], weights: dict[str, llama2.Weight], align: int
) -> None:
    """Write the content of a GGUF file, as docs/gguf.md of ggml describes it."""
    import gguf

    file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(weights), len(metadata)))
    file.writelines(pack_text(key) + value for key, value in metadata.items())
    offset = 0
    for name, weight in weights.items():
        dims = weight.shape[::-1]  # the columns come first
        number = gguf.GGMLQuantizationType[weight.ggml_type]
        head = struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)
        file.write(pack_text(name) + head)
        offset += -(-weight.nbytes // align) * align
    for name, weight in weights.items():
        file.write(bytes(-file.tell() % align))
        with llama2.naming(name):
            rows = weight.read()
        file.write(rows.contiguous().numpy().data)
    file.write(bytes(-file.tell() % align))


def save_gguf(
    model: llama2.Llama | llama2.Checkpoint,
    path: str | Path,
    ggml_type: str | None = None,
    tokenizer: llama2.Tokenizer | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model with its tokenizer, or a checkpoint, as one GGUF file.

    Matrices become `ggml_type` (None: they stay as they are). A model needs its `tokenizer`; a
    checkpoint has one. The file appears when it is complete. Raises ValueError for what a GGUF file
    cannot hold, and if there is a file of this name, unless `overwrite`.
    """
    import gguf

    if ggml_type not in (None, *SAVE_TYPES):
        raise ValueError(f"type {ggml_type!r}; expected one of {', '.join(SAVE_TYPES)}")
    checkpoint = as_checkpoint(model, tokenizer)
    metadata = gguf_metadata(checkpoint)
    config, file = checkpoint.config, checkpoint.file
    align = file.metadata.get("general.alignment", 32) if file else 32
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    weights = {}
    for name, weight in checkpoint.weights.items():
        gguf_name = names.get_name(hf_name(name), try_suffixes=(".weight",))
        weights[gguf_name] = convert_weight(weight, ggml_type)
    if ggml_type or file is None:  # the type of most matrices; llama.cpp guesses what has no number
        types = Counter(w.ggml_type for w in weights.values() if len(w.shape) > 1)
        name = f"MOSTLY_{types.most_common(1)[0][0]}".replace("MOSTLY_F32", "ALL_F32")
        metadata.pop("general.file_type", None)
        if name in gguf.LlamaFileType.__members__:
            metadata["general.file_type"] = pack_value(int(gguf.LlamaFileType[name]))
    if factors := config.rope_freq_factors:
        weights["rope_freqs.weight"] = make_weight(
            torch.tensor(factors, dtype=torch.float32, device="cpu")
        )
    with replacing(Path(path), overwrite) as out:
        write_gguf(out, metadata, weights, align)


# --------------------------------------------------------------------------------------------------
# A Hugging Face folder


def hf_name(name: str) -> str:
    """Hugging Face's name of a tensor."""
    return name if name == "lm_head.weight" else f"model.{name}"


def llama3_rope(factor: float) -> dict[str, Any]:
    """The `rope_scaling` of Llama 3.1 and later, as in their config.json."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def hf_config(config: llama2.Config, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for what it cannot say."""
    settings = dict(vars(config))
    stops = settings.pop("stop_token_ids")
    if stops:
        settings["eos_token_id"] = [config.eos_token_id, *stops]
    factor = settings.pop("rope_scaling_factor")
    divisors = settings.pop("rope_freq_factors")
    name = "Mistral" if config.sliding_window else "Llama"
    settings["architectures"] = [f"{name}ForCausalLM"]
    settings["model_type"] = name.lower()
    settings["torch_dtype"] = str(dtype).removeprefix("torch.")
    if divisors:
        rope = llama3_rope(round(max(divisors), 3))
        published = llama2.llama3_divisors(rope, config)
        if factor != 1 or any(abs(a - b) > 1e-4 for a, b in zip(divisors, published)):
            raise ValueError("config.json cannot hold these rope_freq_factors: not Llama 3's")
        settings["rope_scaling"] = rope
    elif factor != 1:
        settings["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    return settings


def tokenizer_files(tokenizer: llama2.Tokenizer) -> dict[str, Any]:
    """The tokenizer's files in a folder: their names, and bytes or an object to write as JSON."""
    vocabulary = tokenizer.vocabulary
    settings: dict[str, Any] = {
        "add_bos_token": vocabulary.add_bos,
        "chat_template": vocabulary.chat_template or None,
        "clean_up_tokenization_spaces": False,
    }
    for role in SPECIAL_TOKENS.values():
        settings[role] = vocabulary.special_tokens.get(role)
    for role, token_id in (("bos_token", vocabulary.bos_id), ("eos_token", vocabulary.eos_id)):
        settings[role] = None if token_id is None else vocabulary.pieces[token_id]
    files: dict[str, Any] = {"tokenizer_config.json": settings}
    content = vocabulary.model
    if isinstance(content, bytes):
        files["tokenizer.model"] = content  # has the scores, which GGUF needs
        content = sentencepiece_json(vocabulary)
    else:
        content = content | {"added_tokens": added_tokens(vocabulary, content["added_tokens"])}
    if content is None:
        return files | {"tokenizer_config.json": settings | model_settings(vocabulary)}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # which runs tokenizer.json as it is
    adds_bos = '"single": [{"SpecialToken"' in json.dumps(content.get("post_processor"))
    if vocabulary.add_bos != adds_bos:
        processor = bos_processor(vocabulary) if vocabulary.add_bos else None
        content = content | {"post_processor": processor}
    return files | {"tokenizer.json": content}


FLAGS = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)


def added_tokens(vocabulary: llama2.Vocabulary, known: Iterable[Any] = ()) -> list[dict[str, Any]]:
    """The special tokens as a tokenizer.json lists them; those that are known keep their flags."""
    flags = {token["content"]: token for token in known}
    return [
        {**FLAGS, **flags.get(piece, {}), "id": i, "content": piece, "special": t == CONTROL}
        for i, (piece, t) in enumerate(zip(vocabulary.pieces, vocabulary.types))
        if t in (CONTROL, USER_DEFINED)
    ]


def model_settings(vocabulary: llama2.Vocabulary) -> dict[str, Any]:
    """What tokenizer_config.json says of a tokenizer.model that has no tokenizer.json beside it."""
    return {
        "tokenizer_class": "LlamaTokenizer",
        "legacy": vocabulary.prepend_scheme != "start",
        "add_prefix_space": vocabulary.prepend_scheme != "never",
        "added_tokens_decoder": {token.pop("id"): token for token in added_tokens(vocabulary)},
    }


def generation_config(checkpoint: llama2.Checkpoint) -> dict[str, Any]:
    """The content of generation_config.json: how to sample, and what ends a text."""
    config = config_with_ends(checkpoint)
    settings = dict(checkpoint.sampling)
    settings["do_sample"] = settings.get("temperature", 1) > 0
    if not settings["do_sample"]:
        del settings["temperature"]
    if settings.get("top_k") == -1:
        settings["top_k"] = 0  # so transformers says "all"
    if "repetition_penalty" in settings:  # transformers knows no other number than -1, "all"
        settings.setdefault("penalty_last_n", llama2.Sampling.penalty_last_n)
    if settings.get("penalty_last_n") == -1:
        del settings["penalty_last_n"]
    settings["bos_token_id"] = config.bos_token_id
    settings["eos_token_id"] = [config.eos_token_id, *config.stop_token_ids]
    return settings


def bos_processor(vocabulary: llama2.Vocabulary) -> dict[str, Any]:
    """The post_processor of a tokenizer.json that writes BOS in front of a text."""
    bos = vocabulary.pieces[vocabulary.bos_id]
    single = [
        {"SpecialToken": {"id": bos, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [vocabulary.bos_id], "tokens": [bos]}},
    }


SPACE = "\u2581"  # SentencePiece's sign for a space


def sentencepiece_json(vocabulary: llama2.Vocabulary) -> dict[str, Any] | None:
    """A tokenizer.json that does what sentencepiece does with a tokenizer.model; None: none does."""
    pieces, types = vocabulary.pieces, vocabulary.types
    scheme = vocabulary.prepend_scheme
    try:
        sp = SentencePiece(vocabulary.model)
    except ValueError:
        return None
    if sp.strips_spaces or not sp.byte_fallback or sp.left_to_engine(vocabulary):
        return None  # none of the models that were published
    # 1. Any two pieces that make a third one are merged, the highest score first. Of equal scores,
    #    sentencepiece merges the leftmost pair, tokenizers the first in its list. In this order it is
    #    the same pair where one character is repeated, as in the usual pieces of several spaces.
    scores = dict(zip(pieces, sp.scores))
    merges = sentencepiece_merges(vocabulary)
    merges.sort(key=lambda merge: (-scores[merge[0]], -merge[1], merge[1] - len(merge[0]), merge))
    merged = {word for word, _ in merges if len({*word}) > 1}
    if scheme == "start" or len({scores[word] for word in merged}) < len(merged):
        return None

    # 2. Where spaces are added.
    steps: list[dict[str, Any]] = []
    if scheme == "prepend":
        steps.append({"type": "Prepend", "prepend": SPACE})
    pre_tokenizer = None
    if scheme in ("first", "always"):
        pre_tokenizer = {"type": "Metaspace", "replacement": SPACE, "split": False}
        pre_tokenizer["prepend_scheme"] = scheme
    else:
        steps.append({"type": "Replace", "pattern": {"String": " "}, "content": SPACE})
    decoders = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if scheme != "never":
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0",
        "added_tokens": [
            {**FLAGS, "id": i, "content": pieces[i], "special": t != USER_DEFINED}
            for i, t in enumerate(types)
            if t in (UNKNOWN, CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "Sequence", "normalizers": steps} if steps else None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {
            "type": "BPE",
            "unk_token": pieces[sp.types.index(UNKNOWN)] if UNKNOWN in sp.types else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {piece: i for i, piece in enumerate(pieces) if types[i] != UNUSED},
            "merges": [f"{word[:i]} {word[i:]}" for word, i in merges],
        },
    }


def rows_to_hf(w: Tensor, head_dim: int) -> Tensor:
    """Rows of q_proj or k_proj from Meta's order (pairs are neighbours) into Hugging Face's."""
    return w.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def dtype_in_folder(weight: llama2.Weight, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a weight in a folder whose matrices are `dtype`: norms keep their own."""
    own = DTYPES.get(weight.ggml_type, torch.float32)
    return own if len(weight.shape) == 1 else dtype


def make_tensor(name: str, weight: llama2.Weight, dtype: torch.dtype, head_dim: int) -> Tensor:
    """A weight as a tensor for the folder. Raises ValueError for numbers beyond its range."""
    w = weight.dense(torch.float32)
    dtype = dtype_in_folder(weight, dtype)
    with llama2.naming(name):
        check_range(w, dtype)
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        w = rows_to_hf(w, head_dim)
    return w.to(dtype).contiguous()


def write_safetensors(path: Path, checkpoint: llama2.Checkpoint, dtype: torch.dtype) -> None:
    """Write the weights, one after another: a JSON header, then the numbers without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in checkpoint.weights.items():
        own = dtype_in_folder(weight, dtype)
        start, end = end, end + math.prod(weight.shape) * own.itemsize
        entry = {"dtype": TYPES[own], "shape": weight.shape, "data_offsets": [start, end]}
        header[hf_name(name)] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, weight in checkpoint.weights.items():
            w = make_tensor(name, weight, dtype, checkpoint.config.head_dim)
            file.write(w.view(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


# The names of a model's files in a folder, in full. What else lies there is not deleted.
MODEL_FILES = (
    r"(generation_)?config\.json|tokenizer\.json|tokenizer_config\.json|tokenizer\.model"
    r"|(special_tokens_map|added_tokens|vocab)\.json|merges\.txt|chat_template\.(jinja|json)"
    r"|additional_chat_templates/\w+\.jinja|README\.md|LICENSE(\.txt|\.md)?|USE_POLICY\.md|\.gitattributes"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|pytorch_model(-\d{5}-of-\d{5})?\.bin|pytorch_model\.bin\.index\.json"
)


def check_folder(folder: Path, overwrite: bool) -> None:
    """Raises ValueError unless a model may be written there."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder, or a name that ends in .gguf")
    paths = [path for path in folder.rglob("*") if not path.is_dir() or not any(path.iterdir())]
    names = sorted(path.relative_to(folder).as_posix() for path in paths)
    if names and not overwrite:
        raise ValueError(
            f"{folder} is not empty; overwrite=True (--force) replaces the model there"
        )
    for name in names:
        if not re.fullmatch(MODEL_FILES, name) or (folder / name).is_dir():
            raise ValueError(f"{folder} also has {name}, no file of a model: name another folder")


@contextmanager
def replacing_folder(folder: Path, overwrite: bool) -> Iterator[Path]:
    """A new folder that becomes `folder` if the `with` block succeeds, and is deleted if it fails."""
    folder = folder.resolve()
    check_folder(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with unfinished(folder) as new:
        new.mkdir()
        with locked(new):
            yield new
        if folder.exists():
            shutil.copymode(folder, new)
            exchange(new, folder)
        else:
            new.rename(folder)


def exchange(a: Path, b: Path) -> None:
    """Exchange the names of two folders: at once where the system can, else one after the other."""
    names = os.fsencode(a), os.fsencode(b)
    with suppress(AttributeError, TypeError):  # older systems, Windows
        system = ctypes.CDLL(None)
        if sys.platform == "darwin":
            status = system.renamex_np(*names, 2)  # RENAME_SWAP
        else:
            status = system.renameat2(-100, names[0], -100, names[1], 2)  # RENAME_EXCHANGE
        if status == 0:
            return
    aside = a.with_name(f"{a.name}.old")
    b.rename(aside)
    try:
        a.rename(b)
    except BaseException:
        aside.rename(b)
        raise
    aside.rename(a)


def save_folder(
    model: llama2.Llama | llama2.Checkpoint,
    folder: str | Path,
    ggml_type: str | None = None,
    tokenizer: llama2.Tokenizer | None = None,
    overwrite: bool = False,
) -> None:
    """Write a model with its tokenizer, or a checkpoint, as a Hugging Face folder.

    The arguments are those of save_gguf(), but matrices are F32, F16 or BF16 (None: as they are, or
    F16). The folder appears when it is complete. Raises ValueError for what it cannot hold, for one
    that is not empty, unless `overwrite`, and for one that holds more than a model.
    """
    if ggml_type not in (None, *DTYPES):
        raise ValueError(f"type {ggml_type}; a Hugging Face folder has {', '.join(DTYPES)}")
    checkpoint = as_checkpoint(model, tokenizer)
    types = {w.ggml_type for w in checkpoint.weights.values() if len(w.shape) == 2}
    own = types.pop() if len(types) == 1 else ""
    dtype = DTYPES[ggml_type or (own if own in DTYPES else "F16")]
    settings = hf_config(config_with_ends(checkpoint), dtype)
    pad = pad_token_id(checkpoint)
    files = {"config.json": settings if pad is None else settings | {"pad_token_id": pad}}
    files |= tokenizer_files(checkpoint.tokenizer)
    if checkpoint.sampling:
        files["generation_config.json"] = generation_config(checkpoint)
    with replacing_folder(Path(folder), overwrite) as new:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else json.dumps(content, indent=2).encode()
            (new / name).write_bytes(data)
        write_safetensors(new / "model.safetensors", checkpoint, dtype)


if __name__ == "__main__":
    print("save.py is a module; its program: python examples/convert.py --help", file=sys.stderr)
    sys.exit(2)
