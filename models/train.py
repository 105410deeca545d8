"""Train a small Llama 2 on UTF-8 text files and write it as GGUF, for llama2.py and llama.cpp.

    python models/train.py tales.txt more_tales.txt --out models/fairytales.gguf

A text is a row of documents with a blank line between them. The model is the very `llama2.Llama`
that runs the file afterwards; nothing in it knows about training. Needs torch, sentencepiece, gguf
and tqdm. A stopped run goes on from its last checkpoint when the same command is given again.
"""

from __future__ import annotations

import argparse
import copy
import io
import itertools
import math
import re
import sys
import tempfile
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path

import numpy as np
import sentencepiece
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import llama2

# --------------------------------------------------------------------------------------------------
# Data


def read_documents(paths: list[Path], run: int = 20) -> tuple[list[str], list[list[str]]]:
    """(training, held out of each file): every tenth document is held out, if it has no twin.

    Collections repeat themselves: the same tale by two editors would make the held-out loss a test of
    memory. A twin is a document that shares a run of 20 words with another, in whichever file. The
    count starts anew with each file, so that one more file leaves the others' held-out tales alone.
    """
    files = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text: {error}") from None
        files.append([part.strip("\n") for part in re.split(r"\n{2,}", text) if part.strip()])
        if len(files[-1]) < 10:
            found = f"{path} holds {len(files[-1])} documents"
            raise ValueError(f"{found}; needed are 10 or more, with a blank line between")
    owner: dict[int, str] = {}  # run of words -> the first document that has it
    twins = set()
    for document in itertools.chain(*files):
        words = document.split()
        for i in range(len(words) - run + 1):
            first = owner.setdefault(hash(tuple(words[i : i + run])), document)
            if first is not document:
                twins |= {first, document}
    train, held_out = [], []
    for path, documents in zip(paths, files, strict=True):
        held_out.append([document for document in documents[9::10] if document not in twins])
        if not held_out[-1]:
            raise ValueError(f"{path}: every tenth document repeats another, none can be held out")
        train += [document for document in documents if document not in held_out[-1]]
    return train, held_out


def train_tokenizer(documents: list[str], size: int) -> bytes:
    """A byte-pair vocabulary with Llama 2's settings: identity, byte fallback, a space in front."""
    model = io.BytesIO()
    lines = (line for document in documents for line in document.split("\n") if line)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=model,
        model_type="bpe",
        vocab_size=size,
        byte_fallback=True,  # what no piece covers, newlines among it, is written in bytes
        character_coverage=0.99998,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        max_sentence_length=1 << 20,
        minloglevel=2,
    )
    return model.getvalue()


def encode(tokenizer: sentencepiece.SentencePieceProcessor, document: str) -> Tensor:
    """BOS, the document, EOS."""
    return torch.tensor([tokenizer.bos_id(), *tokenizer.encode(document), tokenizer.eos_id()])


def batches(stream: Tensor, T: int, B: int, seed: int, step: int):
    """Endless (B, T + 1) windows from `step` on; each epoch cuts the stream elsewhere and shuffles."""
    per_epoch = (len(stream) - 1 - T) // T // B
    while True:
        epoch, first = divmod(step, per_epoch)
        rng = np.random.default_rng([seed, epoch])
        offset = rng.integers(T)
        order = torch.from_numpy(rng.permutation(per_epoch * B)) * T + offset
        for i in range(first, per_epoch):
            yield stream[order[i * B : (i + 1) * B, None] + torch.arange(T + 1)]
            step += 1


# --------------------------------------------------------------------------------------------------
# Model


def new_model(args: argparse.Namespace) -> llama2.Llama:
    """Normal(0, 0.02) as in GPT-2, smaller where 2 * layers branches add up in the residual stream."""
    config = llama2.Config(
        hidden_size=args.hidden,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        vocab_size=args.vocab,
        max_position_embeddings=args.context,
        tie_word_embeddings=not args.untied,
    )
    model = llama2.Llama(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            branch = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * args.layers) ** branch)
    return model


def add_dropout(model: nn.Module, p: float) -> None:
    """Dropout where each branch joins the residual stream, hooked on from outside the model."""
    for name, module in model.named_modules():
        if name.endswith(("embed_tokens", "o_proj", "down_proj")):
            module.register_forward_hook(lambda module, _, y: F.dropout(y, p, module.training))


@torch.no_grad()
def evaluate(model: llama2.Llama, documents: list[Tensor], T: int) -> float:
    """Nats of all documents, each read from its start in windows of T tokens."""
    device, total = model.embed_tokens.weight.device, 0.0
    model.eval()
    for ids in documents:
        for i in range(0, len(ids) - 1, T):
            window = ids[i : i + T + 1].to(device)
            logits = model(window[None, :-1])[0]
            total += F.cross_entropy(logits, window[1:], reduction="sum").item()
    model.train()
    return total


def learning_rate(step: int, steps: int, warmup: int, peak: float) -> float:
    """Linear warm-up, then a cosine down to a fiftieth."""
    if step < warmup:
        return peak * (step + 1) / warmup
    cosine = 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(1, steps - warmup))
    return peak * (0.02 + 0.98 * cosine)


# --------------------------------------------------------------------------------------------------
# Training


def train(args: argparse.Namespace) -> None:
    """Train, with a checkpoint and the GGUF of the best weights so far after every evaluation."""
    if not args.out.parent.is_dir():
        raise ValueError(f"--out: there is no folder {args.out.parent}")
    torch.manual_seed(args.seed)
    train_texts, held_texts = read_documents(args.texts)
    held_bytes = [sum(len(text.encode()) for text in texts) for texts in held_texts]
    checkpoint_path = args.out.with_suffix(".ckpt")
    state = None
    if checkpoint_path.exists():
        state = torch.load(checkpoint_path, map_location="cpu", weights_only=True)
    proto = state["tokenizer"] if state else train_tokenizer(train_texts, args.vocab)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=proto)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.model"
        file.write_bytes(proto)
        pieces = llama2.Tokenizer.from_file(file)
    stream = torch.cat([encode(tokenizer, text) for text in train_texts])
    held_out = [[encode(tokenizer, text) for text in texts] for texts in held_texts]
    train_bytes = sum(len(text.encode()) for text in train_texts)

    model = new_model(args).to(args.device)
    average = copy.deepcopy(model)  # of the weights, over about the last 1 / (1 - ema) steps
    add_dropout(model, args.dropout)
    groups = [  # norms are not decayed
        {"params": [p for p in model.parameters() if p.dim() == 2]},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, args.lr, betas=(0.9, 0.95), weight_decay=args.weight_decay, fused=True
    )
    step, best, seconds = 0, math.inf, 0.0
    if state:
        if state["config"] != asdict(model.config) or state["tokens"] != len(stream):
            raise ValueError(f"{checkpoint_path} is of another text or architecture; remove it")
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        step, best, seconds = state["step"], state["best"], state["seconds"]

    T, B = args.context, args.batch
    per_epoch = (len(stream) - 1 - T) // T // B
    if per_epoch < 1:
        raise ValueError(f"{len(stream)} tokens are no batch of {B} x {T}")
    steps = math.ceil(args.epochs * per_epoch)
    every = args.eval_every or per_epoch
    held_tokens = sum(len(ids) - 1 for ids in itertools.chain(*held_out))
    print(f"{len(train_texts)} documents to train on: {train_bytes} bytes, {len(stream)} tokens")
    for path, texts, size in zip(args.texts, held_texts, held_bytes, strict=True):
        print(f"{len(texts)} documents of {path.name} held out: {size} bytes")
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {steps} steps of {B} x {T}")

    nats = sum(evaluate(average, documents, T) for documents in held_out)
    print(f"held-out loss before step {step + 1}: {nats / held_tokens:.3f} nats per token")
    recent: deque[float] = deque(maxlen=20)  # losses of the last steps
    data = batches(stream, T, B, args.seed, step)
    bar = tqdm(total=steps * B * T, initial=step * B * T, unit="tok", unit_scale=True)
    start = time.monotonic()
    while step < steps:
        rate = learning_rate(step, steps, args.warmup, args.lr)
        for group in optimizer.param_groups:
            group["lr"] = rate
        window = next(data).to(args.device)
        with torch.autocast(args.device, torch.bfloat16, enabled=args.bf16):
            logits = model(window[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        decay = min(args.ema, step / (step + 10))
        with torch.no_grad():
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 1 - decay)
        recent.append(loss.item())
        running = sum(recent) / len(recent)
        bar.update(B * T)
        bar.set_postfix_str(f"loss {running:.3f}, held out {nats / held_tokens:.3f}")

        if step % every == 0 or step == steps:
            each = [evaluate(average, documents, T) for documents in held_out]
            bits = [n / math.log(2) / size for n, size in zip(each, held_bytes, strict=True)]
            nats = sum(each)
            seconds += time.monotonic() - start
            bar.write(
                f"epoch {step / per_epoch:.2f}, {seconds:.0f} s: training loss {running:.3f},"
                f" held out {nats / held_tokens:.3f},"
                f" {', '.join(f'{figure:.4f}' for figure in bits)} bits/byte"
            )
            if nats < best:
                best = nats
                llama2.save_gguf(average, args.out, args.type, tokenizer=pieces)
            state = {
                "model": model.state_dict(),
                "average": average.state_dict(),
                "optimizer": optimizer.state_dict(),
                "tokenizer": proto,
                "config": asdict(model.config),
                "tokens": len(stream),
                "rng": torch.get_rng_state(),
                "step": step,
                "best": best,
                "seconds": seconds,
            }
            torch.save(state, checkpoint_path.with_suffix(".tmp"))
            checkpoint_path.with_suffix(".tmp").replace(checkpoint_path)
            start = time.monotonic()
    bar.close()
    size, nats = args.out.stat().st_size, best / held_tokens
    print(f"{args.out}: {size} bytes, held out {nats:.4f} nats per token")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    help = "UTF-8: documents with a blank line between them"
    add("texts", metavar="TEXT", type=Path, nargs="+", help=help)
    add("--out", type=Path, default=Path("model.gguf"), help="checkpoint beside it as .ckpt")
    add("--type", choices=llama2.SAVE_TYPES, default="Q8_0", help="of the matrices")
    add("--vocab", type=int, default=4096, help="pieces of the vocabulary")
    add("--hidden", type=int, default=384)
    add("--mlp", type=int, default=896, help="width inside the MLP")
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=12)
    add("--kv-heads", type=int, default=4)
    add("--untied", action="store_true", help="an output matrix of its own")
    add("--context", type=int, default=512)
    add("--batch", type=int, default=4, help="windows of one context per step")
    add("--epochs", type=float, default=13)
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--warmup", type=int, default=100, help="steps")
    add("--weight-decay", type=float, default=0.3)
    add("--dropout", type=float, default=0.2)
    add("--ema", type=float, default=0.99, help="decay of the averaged weights that are kept")
    add("--eval-every", type=int, help="steps (default: an epoch)")
    add("--device", default="cpu", choices=("cpu", "cuda", "mps"))
    add("--bf16", action="store_true", help="bfloat16 autocast, where the machine has it")
    add("--threads", type=int, default=torch.get_num_threads(), help="on the CPU")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.device != "cpu" and not getattr(torch, args.device).is_available():
        parser.error(f"--device {args.device}: PyTorch finds none here")
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    try:
        train(args)
    except (ValueError, OSError, RuntimeError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "train.py: stopped; the same command goes on from the last checkpoint", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
