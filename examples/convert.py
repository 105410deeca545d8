"""Convert a checkpoint to GGUF or to a Hugging Face folder.

    python examples/convert.py SOURCE OUT.gguf [--type T] [--force]
    python examples/convert.py SOURCE FOLDER [--type T] [--force]

SOURCE is one of Meta's folders (params.json, consolidated.*.pth; Llama 2 or 3), a Hugging Face folder
with pytorch_model*.bin, or any model that llama2.py opens. OUT is a GGUF file, or a Hugging Face
folder (config.json, model.safetensors, the tokenizer's files). --type is the type of the matrices:
F32, F16, BF16, and in GGUF files Q8_0 and Q4_0. With --force what OUT has now stays whole until the
new model is.

Pickles are read by torch.load(weights_only=True): as safe as your version of torch makes it.
"""

import argparse
import base64
import json
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path

import prelude

with prelude.imports(__name__):
    import save
    import torch
    from torch import Tensor

    import llama2

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
    if first.dtype not in save.TYPES:
        raise ValueError(f"{name} is {first.dtype}; expected {', '.join(save.DTYPES)}")
    shape = [*first.shape]
    shape[axis] *= len(shards)

    def read() -> Tensor:
        w = torch.cat(shards, axis) if len(shards) > 1 else first.contiguous()
        return w.detach().view(-1, w.shape[-1]).view(torch.uint8)

    return llama2.Weight(save.TYPES[first.dtype], tuple(shape), read)


PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def pickle_files(folder: Path) -> list[Path]:
    """The files that have the tensors, as transformers finds them: one, else those of an index."""
    if (folder / PICKLE).exists():
        return [folder / PICKLE]
    with llama2.naming(folder / PICKLE_INDEX):
        index = json.loads((folder / PICKLE_INDEX).read_bytes())
        names = sorted({*index["weight_map"].values()})
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"names the file {name!r:.60}; expected one in the same folder")
    return [folder / name for name in names]


def open_pickles(folder: Path) -> llama2.Checkpoint:
    """A Hugging Face folder of pytorch_model*.bin. Raises ValueError."""
    weights = {}
    for path in pickle_files(folder):
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
        divisors = llama2.llama3_divisors(save.llama3_rope(factor), config)
        config = replace(config, rope_freq_factors=divisors)
    return config


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
    try:
        save.check_tensors(weights, config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}: missing shards?") from error
    tokenizer = meta_tokenizer(folder, config)
    stops = [tokenizer.special_ids.get(f"<|{name}|>") for name in ("eot_id", "eom_id")]
    config = replace(
        config,
        bos_token_id=tokenizer.bos_id,
        eos_token_id=tokenizer.eos_id,
        stop_token_ids=tuple(i for i in stops if i is not None),
    )
    # As in Meta's generation.py.
    sampling = {"temperature": 0.6, "top_p": 0.9}
    return llama2.Checkpoint(str(folder), config, weights, lambda: tokenizer, recommended=sampling)


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
    # As the tokenizer.json of Llama 3.
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {**flags, "id": i, "content": text, "special": True}
        for i, text in enumerate(special, len(pieces))
    ]
    steps = llama2.PRE_TOKENIZERS["llama-bpe"]
    vocab = {text: i for i, text in enumerate(texts)}
    content = {
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": steps[-1],  # ByteLevel
        "model": {"type": "BPE", "vocab": vocab, "merges": rules, "ignore_merges": True},
    }
    ends = len(pieces), len(pieces) + 1
    return llama2.Tokenizer(llama2.Vocabulary(texts, types, content, *ends, prepend_scheme="never"))


# --------------------------------------------------------------------------------------------------
# Command line


def open_source(source: str) -> llama2.Checkpoint:
    """Open a checkpoint of any form. Raises ValueError or FileNotFoundError."""
    folder = Path(source).absolute()
    if any(folder.glob("consolidated.*.pth")):
        return open_meta(folder)
    has_pickles = (folder / PICKLE).exists() or any(folder.glob("pytorch_model-*-of-*.bin"))
    if has_pickles and not any(folder.glob("model*.safetensors")):
        return open_pickles(folder)
    return llama2.open_checkpoint(source)


def convert(args: argparse.Namespace) -> None:
    """Do what the command line says."""
    out = Path(args.out)
    is_gguf = out.suffix.lower() == ".gguf"
    check, write = (
        (save.check_file, save.save_gguf) if is_gguf else (save.check_folder, save.save_folder)
    )
    written = out.resolve()  # if this is the working directory, another one takes its place
    check(out, args.force)  # before the source is read, which may be downloaded
    write(open_source(args.source), out, args.type, overwrite=args.force)
    weights = llama2.open_checkpoint(written).weights.values()
    print(f"wrote {out}: {save.describe_tensors(weights)}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status: 2 after a mistake, which one line explains."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = llama2.Parser(prog="convert.py", description=__doc__, formatter_class=raw)
    parser.add_argument("source", metavar="SOURCE")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--type", choices=save.SAVE_TYPES, help="of the matrices")
    parser.add_argument("--force", action="store_true", help="replace what is there")
    args = parser.parse_args(argv)
    llama2.use_threads()
    with prelude.errors(parser):
        convert(args)
    return 0


if __name__ == "__main__":
    # On SIGTERM, exit by an exception, so that what is unfinished is deleted.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
