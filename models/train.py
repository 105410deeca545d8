"""Train a small Llama 2 on short texts and write it as GGUF, for llama2.py and llama.cpp.

    python models/train.py stories.txt --out models/stories.gguf

The file is UTF-8: stories with an empty line between them. The model is the very `llama2.Llama`
that runs the result afterwards; nothing in it knows about training. Needs torch, sentencepiece,
gguf and tqdm. A run that was stopped goes on from its last checkpoint when the same command is
given again. --init MODEL.gguf starts from a model that exists: more of the same text, or yours; of
several models from the mean of their weights, which --epochs 0 saves as it is.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import re
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))
import prelude

with prelude.imports(__name__, "torch sentencepiece gguf tqdm"):
    import numpy as np
    import sentencepiece
    import torch
    import torch.nn.functional as F
    from save import SAVE_TYPES, save_gguf
    from torch import Tensor, nn
    from tqdm import tqdm

    import llama2

PADDING = -1  # after the end of a row

# --------------------------------------------------------------------------------------------------
# Data


def read_stories(path: Path) -> tuple[list[str], list[str]]:
    """(training, held out): every fiftieth story is held out."""
    with llama2.naming(path):
        text = path.read_text(encoding="utf-8")
    stories = [part.strip("\n") for part in re.split(r"\n{2,}", text) if part.strip()]
    if len(stories) < 50:
        raise ValueError(f"{path} holds {len(stories)} stories; needed are 50 or more")
    held_out = stories[49::50]
    del stories[49::50]
    return stories, held_out


def train_tokenizer(stories: list[str], size: int) -> llama2.Tokenizer:
    """A byte-pair vocabulary with Llama 2's settings: identity, byte fallback, a space in front."""
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for story in stories for line in story.split("\n") if line),
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
    except RuntimeError as error:
        said = str(error).rpartition("] ")[2]  # how many pieces the text makes, or needs
        raise ValueError(f"--vocab {size} does not fit the text: {said}") from error
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.model"
        path.write_bytes(model.getvalue())
        return llama2.Tokenizer.from_file(path)


def encode(tokenizer: llama2.Tokenizer, stories: list[str], context: int) -> list[Tensor]:
    """Rows: a story with BOS and EOS is one; if it is longer than the context, several."""
    rows = []
    for story in stories:
        ids = torch.tensor([*tokenizer.encode(story, bos=True), tokenizer.eos_id])
        rows += [ids[i : i + context + 1] for i in range(0, len(ids) - 1, context)]
    return sorted(rows, key=len)


def cut(rows: list[Tensor], tokens: int) -> list[range]:
    """Sorted rows as ranges of neighbours that are, padded, at most `tokens` (or a single row)."""
    ranges, start = [], 0
    for i, row in enumerate(rows):
        if i > start and (i + 1 - start) * (len(row) - 1) > tokens:
            ranges.append(range(start, i))
            start = i
    return [*ranges, range(start, len(rows))]


def pad(rows: list[Tensor]) -> Tensor:
    """(B, T + 1)"""
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)


def batches(rows: list[Tensor], tokens: int, seed: int, step: int) -> Iterator[Tensor]:
    """Endless (B, T + 1) from `step` on: rows of about one length, shuffled anew in each epoch."""
    lengths, ranges = [len(row) for row in rows], cut(rows, tokens)
    while True:
        epoch, first = divmod(step, len(ranges))
        rng = np.random.default_rng([seed, epoch])
        order = np.lexsort((rng.random(len(rows)), lengths))  # by length; random among equals
        for i in rng.permutation(len(ranges))[first:]:
            yield pad([rows[j] for j in order[ranges[i]]])
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
        tie_word_embeddings=True,
    )
    model = llama2.Llama(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            branch = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * args.layers) ** branch)
    return model


def initial_model(paths: list[str], device: str) -> tuple[llama2.Llama, llama2.Tokenizer]:
    """The mean of some models' weights (model soups, arXiv:2203.05482), and their vocabulary."""
    model, tokenizer = llama2.load(paths[0], device, trainable=True)
    for path in paths[1:]:
        other, others = llama2.load(path, device, trainable=True)
        if other.config != model.config or others.pieces != tokenizer.pieces:
            raise ValueError(f"{path} has another shape or vocabulary than {paths[0]}")
        for w, more in zip(model.parameters(), other.parameters(), strict=True):
            w.data += more.data
    for w in model.parameters():
        w.data /= len(paths)
    return model, tokenizer


def new_optimizers(model: llama2.Llama, args: argparse.Namespace) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices; AdamW for the embedding, the output matrix and the norms."""
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() == 1]
    tables = [*dict.fromkeys((model.embed_tokens.weight, model.lm_head.weight))]  # one if tied
    groups = [{"params": tables}, {"params": norms, "weight_decay": 0.0}]
    options = {"lr": args.lr, "weight_decay": args.weight_decay}
    return [
        torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True, **options),
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **options),
    ]


def next_token_loss(model: nn.Module, batch: Tensor, bf16: bool) -> Tensor:
    """Mean nats of the tokens of a batch (B, T + 1)."""
    with torch.autocast(batch.device.type, torch.bfloat16, enabled=bf16):
        logits = model(batch[:, :-1].clamp(min=0))
    return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PADDING)


@torch.no_grad()
def evaluate(model: nn.Module, rows: list[Tensor], tokens: int) -> float:
    """Nats of all rows together."""
    total = 0.0
    for part in cut(rows, tokens):
        batch = pad(rows[part.start : part.stop]).to(model.norm.weight.device)
        count = int((batch[:, 1:] != PADDING).sum())
        total += next_token_loss(model, batch, bf16=False).item() * count
    return total


def learning_rate(step: int, steps: int, args: argparse.Namespace) -> float:
    """Up in `warmup` steps, then flat, and down to 0 in the last part of the run, `decay`.

    So --epochs may still be changed when a run goes on, as long as it has not begun to fall.
    """
    up = (step + 1) / max(1, args.warmup)
    down = (steps - step) / max(1, steps * args.decay)
    return args.lr * min(up, 1.0, down)


# --------------------------------------------------------------------------------------------------
# Training


def restore(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], tokens: int
) -> tuple[int, float]:
    """Go on from a checkpoint: returns its step and the seconds so far.

    Raises ValueError if it is damaged or of another text or architecture.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state["config"] != asdict(model.config) or state["tokens"] != tokens:
            raise ValueError("another text or architecture")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        return state["step"], state["seconds"]
    except Exception as error:  # a damaged pickle may raise any
        raise ValueError(
            f"{path} cannot be used; remove it to begin anew: {error!r:.100}"
        ) from error


def train(args: argparse.Namespace) -> None:
    """Train, with a checkpoint and the GGUF of the weights so far after every evaluation."""
    if args.out.suffix != ".gguf" or not args.out.parent.is_dir():
        raise ValueError(f"--out {args.out}; expected NAME.gguf in a folder that exists")
    torch.manual_seed(args.seed)
    train_texts, held_texts = read_stories(args.stories)
    held_bytes = sum(len(text.encode()) for text in held_texts)
    checkpoint_path = args.out.with_suffix(".ckpt")
    goes_on = checkpoint_path.exists()
    if args.init:
        model, tokenizer = initial_model(args.init, args.device)
        limit = model.config.max_position_embeddings
        if args.context > limit:
            raise ValueError(f"--context {args.context}; {args.init[0]} is for {limit} or fewer")
    else:
        model = new_model(args).to(args.device)
        if goes_on:
            tokenizer = llama2.Tokenizer.from_gguf(args.out)
        else:
            tokenizer = train_tokenizer(train_texts, args.vocab)
    rows = encode(tokenizer, train_texts, args.context)
    held_out = encode(tokenizer, held_texts, args.context)
    tokens, held_tokens = (sum(len(row) - 1 for row in part) for part in (rows, held_out))

    optimizers = new_optimizers(model, args)
    step, seconds = 0, 0.0
    if goes_on:
        step, seconds = restore(checkpoint_path, model, optimizers, tokens)

    per_epoch = len(cut(rows, args.batch))
    steps = math.ceil(args.epochs * per_epoch)
    every = args.eval_every or per_epoch
    print(f"{len(train_texts)} stories to train on, {tokens} tokens; {len(held_texts)} held out")
    print(f"{sum(p.numel() for p in model.parameters())} parameters, {steps} steps")

    nats = evaluate(model, held_out, args.batch)
    print(f"held-out loss before step {step + 1}: {nats / held_tokens:.3f} nats per token")
    if step == steps:  # nothing to train: the mean of several models
        save_gguf(model, args.out, args.type, tokenizer=tokenizer, overwrite=True)
    loss_of = torch.compile(next_token_loss, dynamic=True) if args.compile else next_token_loss
    recent: deque[float] = deque(maxlen=50)  # losses of the last steps
    data = batches(rows, args.batch, args.seed, step)
    start = time.monotonic()
    with tqdm(total=steps, initial=step, unit="step", mininterval=10) as bar:
        while step < steps:
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate(step, steps, args)
            loss = loss_of(model, next(data).to(args.device), args.bf16)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if not norm.isfinite():
                raise ValueError(f"the gradient of step {step + 1} is {norm}; try a lower --lr")
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad()
            step += 1
            recent.append(loss.item())
            running = sum(recent) / len(recent)
            bar.update()
            bar.set_postfix_str(f"loss {running:.3f}", refresh=False)

            if step % every == 0 or step == steps:
                nats = evaluate(model, held_out, args.batch)
                seconds += time.monotonic() - start
                bar.write(
                    f"step {step}, epoch {step / per_epoch:.2f}, {seconds:.0f} s:"
                    f" training loss {running:.3f}, held out {nats / held_tokens:.3f},"
                    f" {nats / math.log(2) / held_bytes:.4f} bits/byte"
                )
                save_gguf(model, args.out, args.type, tokenizer=tokenizer, overwrite=True)
                state = {
                    "model": model.state_dict(),
                    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                    "config": asdict(model.config),
                    "tokens": tokens,
                    "step": step,
                    "seconds": seconds,
                }
                torch.save(state, checkpoint_path.with_suffix(".tmp"))
                checkpoint_path.with_suffix(".tmp").replace(checkpoint_path)
                start = time.monotonic()
    print(f"{args.out}: {args.out.stat().st_size} bytes")


def main() -> int:
    parser = llama2.Parser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    number = llama2.in_range
    size = number(int, 1)
    add("stories", metavar="FILE", type=Path, help="UTF-8: stories, an empty line between them")
    add("--out", type=Path, default=Path("model.gguf"), help="checkpoint beside it as .ckpt")
    init_help = "start from its weights and vocabulary, not from noise; of several from the mean"
    add("--init", metavar="MODEL", nargs="+", help=init_help)
    add("--type", choices=SAVE_TYPES, default="Q8_0", help="of the matrices")
    add("--vocab", type=number(int, 260), default=4096, help="pieces of the vocabulary")
    add("--hidden", type=size, default=384)
    add("--mlp", type=size, default=640, help="width inside the MLP")
    add("--layers", type=size, default=5)
    add("--heads", type=size, default=6)
    add("--kv-heads", type=size, default=2)
    add("--context", type=size, default=512)
    add("--batch", type=size, default=4096, help="tokens per step, at most")
    add("--epochs", type=number(float, 0, 1e6), default=6)
    add("--lr", type=number(float, 1e-9, 1), default=3e-3, help="peak learning rate")
    add("--warmup", type=number(int, 0), default=100, help="steps")
    decay_help = "part of the steps in which the rate falls to 0"
    add("--decay", type=number(float, 0, 1), default=0.4, help=decay_help)
    add("--weight-decay", type=number(float, 0, 1), default=0.1)
    add("--eval-every", type=size, help="steps (default: an epoch)")
    add("--device", default="cpu", choices=("cpu", "cuda", "mps"))
    add("--bf16", action="store_true", help="bfloat16 autocast, where the machine has it")
    add("--compile", action="store_true", help="torch.compile; needs a C++ compiler on a CPU")
    threads = number(int, 1, os.cpu_count() or 1)
    add("--threads", type=threads, help="on the CPU")
    add("--seed", type=number(int, 0, 2**63 - 1), default=0)
    args = parser.parse_args()
    if args.device != "cpu" and not getattr(torch, args.device).is_available():
        parser.error(f"--device {args.device}: PyTorch finds none here")
    if not hasattr(torch.optim, "Muon"):
        parser.error(f"torch {torch.__version__} has no Muon: pip install torch>=2.9")
    llama2.use_threads(args.threads)
    torch.set_flush_denormal(True)
    try:
        with prelude.errors(parser):
            train(args)
    except KeyboardInterrupt:
        print(
            "train.py: stopped; the same command goes on from the last checkpoint", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
