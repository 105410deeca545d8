"""Convert a checkpoint to GGUF or to a Hugging Face folder.

    python examples/convert.py SOURCE OUT.gguf [--type T] [--force]
    python examples/convert.py SOURCE FOLDER [--type T] [--force]

SOURCE is one of Meta's folders (params.json, consolidated.*.pth; Llama 2 or 3), a Hugging Face folder
with pytorch_model*.bin, or any model that llama2.py opens. OUT is a GGUF file, or a Hugging Face
folder (config.json, model.safetensors, the tokenizer's files); for a folder the whole model must fit
into memory. --type is the type of the matrices: F32, F16, BF16, and in GGUF files Q8_0 and Q4_0.

Pickles are read by torch.load(weights_only=True): as safe as your version of torch makes it.
"""

import argparse
import base64
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
try:
    from safetensors.torch import save_file

    import llama2
except ImportError as error:
    sys.exit(f"convert.py: {error.name} is missing: pip install {error.name}")

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
TYPES = {dtype: name for name, dtype in DTYPES.items()}

# --------------------------------------------------------------------------------------------------
# Pickles


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of torch.save, memory-mapped. Raises ValueError."""
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return {str(name): w for name, w in state.items() if w.dim()}  # without single numbers
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # whatever damaged files make torch raise
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path}: torch.load finds no tensors by their names: {reason}") from error


def make_weight(name: str, shards: list[Tensor], axis: int = 0) -> llama2.Weight:
    """A weight from one tensor, or from several shards joined along an axis. Raises ValueError."""
    first = shards[0]
    if {(w.dtype, w.shape) for w in shards} != {(first.dtype, first.shape)}:
        raise ValueError(f"{name} differs in type or shape from shard to shard")
    if first.dtype not in TYPES:
        raise ValueError(f"{name} is {first.dtype}; expected {', '.join(DTYPES)}")
    shape = [*first.shape]
    shape[axis] *= len(shards)

    def read() -> Tensor:
        w = torch.cat(shards, axis) if len(shards) > 1 else first.contiguous()
        return w.detach().view(-1, w.shape[-1]).view(torch.uint8)

    return llama2.Weight(TYPES[first.dtype], tuple(shape), read)


def open_pickles(folder: Path) -> llama2.Checkpoint:
    """A Hugging Face folder of pytorch_model*.bin. Raises ValueError."""
    weights = {}
    for path in sorted(folder.glob("pytorch_model*.bin")):
        weights |= {name: make_weight(name, [w]) for name, w in read_pickle(path).items()}
    return llama2.open_hf(folder, weights)


# --------------------------------------------------------------------------------------------------
# Meta

# Meta's name of a tensor within its layer -> Hugging Face's, and how it is sharded: by rows (0), by
# columns (1), or not at all (None: every shard has a copy).
NAMES: dict[str, tuple[str, int | None]] = {
    "tok_embeddings": ("embed_tokens", 1),  # in Llama 3: 0
    "attention_norm": ("input_layernorm", None),
    "attention.wq": ("self_attn.q_proj", 0),
    "attention.wk": ("self_attn.k_proj", 0),
    "attention.wv": ("self_attn.v_proj", 0),
    "attention.wo": ("self_attn.o_proj", 1),
    "ffn_norm": ("post_attention_layernorm", None),
    "feed_forward.w1": ("mlp.gate_proj", 0),
    "feed_forward.w2": ("mlp.down_proj", 1),
    "feed_forward.w3": ("mlp.up_proj", 0),
    "norm": ("norm", None),
    "output": ("lm_head", 0),
}
PARAMS = {  # keys of params.json
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
# Other keys: used below, or implied by the shapes of the tensors.
OTHER_PARAMS = ("use_scaled_rope", "vocab_size", "multiple_of", "ffn_dim_multiplier")


def meta_config(folder: Path, weights: dict[str, llama2.Weight]) -> llama2.Config:
    """params.json as a Config. Raises ValueError."""
    path = folder / "params.json"
    params = json.loads(path.read_bytes())
    if not isinstance(params, dict):
        raise ValueError(f"{path}: expected a JSON object")
    known = (*PARAMS, *OTHER_PARAMS)
    for key, value in params.items():
        if value and key not in known:  # it may change the architecture
            raise ValueError(f"{path}: unknown key {key[:60]!r}; expected {', '.join(known)}")
    values = {hf: params[key] for key, hf in PARAMS.items() if key in params}
    values.setdefault("num_key_value_heads", params.get("n_heads"))
    # params.json has no context. Theta tells Llama 3 and Code Llama from Llama 2.
    context = {500000: 8192, 1000000: 16384}.get(params.get("rope_theta"), 4096)
    scaled = params.get("use_scaled_rope")
    values["vocab_size"] = weights["embed_tokens.weight"].shape[0]
    values["intermediate_size"] = weights["layers.0.mlp.gate_proj.weight"].shape[0]
    values["max_position_embeddings"] = 131072 if scaled else context
    try:
        config = llama2.Config(**values)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if scaled:
        # Meta's code has 8 for all; 32 is right for Llama 3.2 1B and 3B (llama-models, issue 166).
        factor = 32.0 if config.hidden_size in (2048, 3072) else 8.0
        divisors = llama2.llama3_divisors(llama3_rope(factor), config)
        config = replace(config, rope_freq_factors=divisors)
    return config


def llama3_rope(factor: float) -> dict[str, Any]:
    """The `rope_scaling` of Llama 3.1 and later, as in their config.json."""
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def meta_weights(folder: Path) -> dict[str, llama2.Weight]:
    """The tensors of consolidated.*.pth, joined, by Hugging Face's names. Raises ValueError."""
    paths = sorted(folder.glob("consolidated.*.pth"))
    shards = [read_pickle(path) for path in paths]
    for path, shard in zip(paths, shards):
        if shard.keys() != shards[0].keys():
            raise ValueError(f"{path}: it does not have the tensors of the first shard")
    weights = {}
    for name, first in shards[0].items():
        layer, last = re.fullmatch(r"(?s)(layers\.\d+\.)?(.*?)(?:\.weight)?", name).groups()
        if name == "rope.freqs":  # computed, not learned
            continue
        if last not in NAMES:
            raise ValueError(f"{paths[0]}: unknown tensor {name[:60]!r}")
        hf_name, axis = NAMES[last]
        same_width = first.shape[-1] == shards[0]["norm.weight"].shape[0]
        if last == "tok_embeddings" and same_width:
            axis = 0
        sources = shards[:1] if axis is None else shards
        tensors = [shard[name] for shard in sources]
        weights[f"{layer or ''}{hf_name}.weight"] = make_weight(name, tensors, axis or 0)
    return weights


def open_meta(folder: Path) -> llama2.Checkpoint:
    """One of Meta's folders. Raises ValueError unless all tensors are there."""
    try:
        weights = meta_weights(folder)
        config = meta_config(folder, weights)
    except KeyError as error:
        raise ValueError(f"{folder}: {error} is missing") from error
    if config.num_hidden_layers > len(weights):
        raise ValueError(f"{folder}: {config.num_hidden_layers} layers in {len(weights)} tensors")
    with torch.device("meta"):
        model = llama2.Llama(config)
    shapes = {name: tuple(w.shape) for name, w in model.named_parameters()}
    for name in sorted(shapes.keys() | weights.keys()):
        shape = weights[name].shape if name in weights else "missing"
        if shape != shapes.get(name):
            expected = shapes.get(name, "no such tensor")
            raise ValueError(f"{folder}: {name} is {shape}; expected {expected}: missing shards?")
    tokenizer = meta_tokenizer(folder, config)
    stops = [tokenizer.special_ids.get(f"<|{name}|>") for name in ("eot_id", "eom_id")]
    config = replace(
        config,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        stop_token_ids=tuple(i for i in stops if i is not None),
    )
    return llama2.Checkpoint(str(folder), config, weights, lambda: tokenizer)


def meta_tokenizer(folder: Path, config: llama2.Config) -> llama2.Tokenizer:
    """tokenizer.model in the folder or the one above it. Raises ValueError."""
    for path in (folder / "tokenizer.model", folder.parent / "tokenizer.model"):
        if path.is_file():
            is_tiktoken = re.match(rb"[A-Za-z0-9+/]+=* \d+\n", path.read_bytes())
            if is_tiktoken:
                return llama3_tokenizer(path)
            vocabulary = llama2.Tokenizer.from_file(path, config).vocabulary
            # Meta's code encodes each question and answer by itself, with a space in front.
            return llama2.Tokenizer(replace(vocabulary, prepend_scheme="prepend"))
    raise FileNotFoundError(f"{folder}: no tokenizer.model there or one folder up")


# Llama 3's special tokens, which follow those of its file, as in Meta's tokenizer.py.
SPECIAL = """begin_of_text end_of_text reserved_special_token_0 reserved_special_token_1
    finetune_right_pad_id step_id start_header_id end_header_id eom_id eot_id python_tag image"""
SPECIAL_NAMES = SPECIAL.split() + [f"reserved_special_token_{i}" for i in range(2, 246)]


def llama3_tokenizer(path: Path) -> llama2.Tokenizer:
    """Llama 3's tokenizer.model (tiktoken): a line for each token, its bytes in base64 and its rank."""
    ranks = {}
    for line in path.read_bytes().splitlines():
        piece, rank = line.split()
        ranks[base64.b64decode(piece)] = int(rank)
    if [*ranks.values()] != [*range(len(ranks))]:
        raise ValueError(f"{path}: its ranks are not 0, 1, 2, ...")
    merges = []
    for piece in ranks:  # tiktoken merges any two that make a token, the lowest rank first
        cuts = [(piece[:i], piece[i:]) for i in range(1, len(piece))]
        pairs = [(a, b) for a, b in cuts if a in ranks and b in ranks]
        merges += sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return byte_level_tokenizer([*ranks], merges)


# The characters by which byte-level BPE writes bytes: printable ones stand for themselves.
OTHERS = [byte for byte in range(256) if byte == 32 or not chr(byte).isprintable()]
CHARACTERS = {byte: chr(byte) for byte in range(256)}
CHARACTERS |= {byte: chr(256 + i) for i, byte in enumerate(OTHERS)}


def characters(piece: bytes) -> str:
    """A token's bytes as byte-level BPE writes them."""
    return "".join(CHARACTERS[byte] for byte in piece)


def byte_level_tokenizer(
    pieces: list[bytes], merges: list[tuple[bytes, bytes]]
) -> llama2.Tokenizer:
    """Llama 3's tokenizer from its tokens and merges."""
    special = [f"<|{name}|>" for name in SPECIAL_NAMES]
    texts = [*map(characters, pieces), *special]
    types = [1] * len(pieces) + [3] * len(special)  # NORMAL and CONTROL, as in GGUF
    rules = [f"{characters(a)} {characters(b)}" for a, b in merges]
    content = llama2.bpe_json(texts, types, "llama-bpe", rules)
    ends = len(pieces), len(pieces) + 1
    return llama2.Tokenizer(llama2.Vocabulary(texts, types, content, *ends, prepend_scheme="never"))


# --------------------------------------------------------------------------------------------------
# Writing GGUF

SPACES = (  # the steps of a tokenizer.json that treats spaces as SentencePiece does
    r'\[({("prepend": "\\u2581", "type": "Prepend"'
    r'|"content": "\\u2581", "pattern": {"String": " "}, "type": "Replace"'
    r'|("prepend_scheme": "\w+", )?"replacement": "\\u2581", "split": false, "type": "Metaspace")'
    r"}(, )?)*\]"
)


def sentencepiece_keys(vocabulary: llama2.Vocabulary) -> dict[str, Any] | None:
    """GGUF's keys for a tokenizer.json that works like SentencePiece, else None. Raises ValueError."""
    model, pieces = vocabulary.model, vocabulary.pieces
    if isinstance(model, bytes) or not re.fullmatch(SPACES, llama2.json_steps(model)):
        return None
    if re.search('"(single_word|lstrip|rstrip)": true', json.dumps(model.get("added_tokens"))):
        return None
    model = model["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", [])]
    words = {piece for piece, t in zip(pieces, vocabulary.types) if t == 1}  # NORMAL, as in GGUF
    # SentencePiece merges any two pieces that make a third one.
    pairs = {
        f"{word[:i]} {word[i:]}"
        for word in words
        for i in range(1, len(word))
        if words >= {word[:i], word[i:]}
    }
    if others := pairs.difference(merges):
        raise ValueError(f"GGUF cannot say that {min(others)!r} are not merged")
    scores = {merge.replace(" ", ""): -float(rank) for rank, merge in enumerate(merges)}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [scores.get(piece, 0.0) for piece in pieces],
        "tokenizer.ggml.unknown_token_id": pieces.index(model.get("unk_token") or "<unk>"),
    }


# --------------------------------------------------------------------------------------------------
# Writing a Hugging Face folder


def hf_config(config: llama2.Config, dtype: torch.dtype) -> dict[str, Any]:
    """The content of config.json. Raises ValueError for what it cannot say."""
    settings = dict(vars(config))
    stops = settings.pop("stop_token_ids")
    if stops:
        settings["eos_token_id"] = [config.eos_token_id, *stops]
    factor = settings.pop("rope_scaling_factor")
    divisors = settings.pop("rope_freq_factors")
    settings["architectures"] = ["LlamaForCausalLM"]
    settings["model_type"] = "llama"
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
    model = vocabulary.model
    is_bytes = isinstance(model, bytes)
    settings: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizer" if is_bytes else "PreTrainedTokenizerFast",
        "add_bos_token": vocabulary.add_bos,
        "chat_template": vocabulary.chat_template or None,
        "clean_up_tokenization_spaces": False,
        "legacy": vocabulary.prepend_scheme in ("always", "prepend"),
    }
    for role, token_id in (("bos", vocabulary.bos_id), ("eos", vocabulary.eos_id)):
        if token_id is not None:
            settings[f"{role}_token"] = vocabulary.pieces[token_id]
    if is_bytes:
        return {"tokenizer_config.json": settings, "tokenizer.model": model}
    if vocabulary.add_bos and not model.get("post_processor"):
        bos = settings["bos_token"]
        single = [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        model = {
            **model,
            "post_processor": {
                "type": "TemplateProcessing",
                "single": single,
                "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {bos: {"id": bos, "ids": [vocabulary.bos_id], "tokens": [bos]}},
            },
        }
    return {"tokenizer_config.json": settings, "tokenizer.json": model}


def rows_to_hf(w: Tensor, head_dim: int) -> Tensor:
    """Rows of q_proj or k_proj from Meta's order (pairs are neighbours) into Hugging Face's."""
    return w.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def make_tensor(name: str, weight: llama2.Weight, dtype: torch.dtype, head_dim: int) -> Tensor:
    """A weight as a tensor for the folder. Raises ValueError for numbers beyond `dtype`'s range."""
    w = weight.dense(torch.float32)
    if w.abs().max() > torch.finfo(dtype).max:
        raise ValueError(f"{name} has a number beyond the range of {dtype}; BF16 can hold it")
    if name.endswith(("q_proj.weight", "k_proj.weight")):
        w = rows_to_hf(w, head_dim)
    return w.to(dtype).contiguous()


def save_folder(checkpoint: llama2.Checkpoint, folder: Path, ggml_type: str | None) -> None:
    """Write a Hugging Face folder; its files appear once all are complete. Raises ValueError."""
    config = checkpoint.config
    types = {w.ggml_type for w in checkpoint.weights.values() if len(w.shape) == 2}
    own = types.pop() if len(types) == 1 else ""
    dtype = DTYPES[ggml_type or (own if own in DTYPES else "F16")]
    files = {"config.json": hf_config(config, dtype), **tokenizer_files(checkpoint.tokenizer)}
    tensors = {}
    for name, weight in checkpoint.weights.items():
        hf_name = name if name == "lm_head.weight" else f"model.{name}"
        tensors[hf_name] = make_tensor(name, weight, dtype, config.head_dim)
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "model.safetensors.unfinished"
    try:
        save_file(tensors, unfinished, {"format": "pt"})
        unfinished.replace(folder / "model.safetensors")
    finally:
        unfinished.unlink(missing_ok=True)
    for name, content in files.items():
        data = content if isinstance(content, bytes) else json.dumps(content, indent=2).encode()
        (folder / name).write_bytes(data)


# --------------------------------------------------------------------------------------------------
# Command line


def open_source(source: str) -> llama2.Checkpoint:
    """Open a checkpoint of any form. Raises ValueError or FileNotFoundError."""
    folder = Path(source)
    if any(folder.glob("consolidated.*.pth")):
        return open_meta(folder)
    has_safetensors = any(folder.glob("model*.safetensors"))
    if any(folder.glob("pytorch_model*.bin")) and not has_safetensors:
        return open_pickles(folder)
    return llama2.open_checkpoint(source)


def convert(args: argparse.Namespace) -> None:
    """Do what the command line says."""
    out = Path(args.out)
    if out.suffix == ".gguf":
        checkpoint = open_source(args.source)
        vocabulary = checkpoint.tokenizer.vocabulary
        vocabulary.keys = vocabulary.keys or sentencepiece_keys(vocabulary)
        llama2.save_gguf(checkpoint, out, args.type, overwrite=args.force)
        return
    if args.type not in (None, *DTYPES):
        raise ValueError(f"--type {args.type}; a Hugging Face folder has {', '.join(DTYPES)}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())) and not args.force:
        raise ValueError(f"{out} is there already and not an empty folder; --force writes into it")
    save_folder(open_source(args.source), out, args.type)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 after a mistake, which one line explains."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = llama2.Parser(prog="convert.py", description=__doc__, formatter_class=raw)
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--type", choices=("F32", "F16", "BF16", "Q8_0", "Q4_0"))
    parser.add_argument("--force", action="store_true", help="replace what is there")
    args = parser.parse_args(argv)
    try:
        convert(args)
    except ImportError as error:
        parser.error(f"{error}; pip install {error.name}")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
