"""LoRA: train adapters for any model, whose weights do not change (arXiv:2106.09685).

    python examples/lora.py --data DIALOGUES.jsonl --adapter DIR [--model FILE.gguf]
    python examples/lora.py --data TEXT.txt --adapter DIR [--model FILE.gguf]
    python examples/lora.py --adapter DIR --out tuned.gguf [--type Q4_0] [--model FILE.gguf]

The model may be quantised. DIR has PEFT's format: each reads what the other writes; an adapter that
exists is trained further. Of dialogues only what the assistant says is learned: training/dialogues.py says what
a row of .jsonl, .ndjson or .json may be. A tenth of the data is held out, to show the loss on it.
"""

import re
import sys
import time
from pathlib import Path

import prelude

with prelude.imports(__name__):
    import torch
    import torch.nn.functional as F
    from prompts import read_template
    from save import SAVE_TYPES, save_gguf
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.checkpoint import checkpoint
    from training import adapters
    from training.dialogues import Sample, read_samples

    import llama2

LENGTH, BATCH = 256, 4  # tokens of a sequence of a text, sequences of a training step
DIALOGUES = (".jsonl", ".ndjson", ".json")


def loss_of(model: llama2.Llama, samples: list) -> torch.Tensor:
    """Cross-entropy of those tokens of the samples that their `learned` marks; none is the first.

    Samples go through the model together, filled up behind their ends. To save memory, backward()
    computes blocks again.
    """
    tokens, learned = (pad_sequence(part, batch_first=True) for part in zip(*samples))
    T = tokens.shape[1]
    cos, sin = llama2.rope_tables(model.config, T)
    mask = torch.ones(T, T, dtype=torch.bool).tril()
    x = model.embed_tokens(tokens)  # (B, T, C)
    for block in model.layers:
        x = checkpoint(block, x, cos, sin, mask, None, use_reentrant=False)
    x = x[:, :-1][learned[:, 1:]]  # what predicts a token stands one place before it
    return F.cross_entropy(model.lm_head(model.norm(x)), tokens[learned])


def read_text(path: Path, tokenizer: llama2.Tokenizer, limit: int) -> tuple:
    """Samples of a text: from each position of nine tenths of it, and up to 8 of the rest."""
    with llama2.naming(path):
        text = path.read_bytes().decode("utf-8-sig")
        if re.match(r'\s*\[?\s*{\s*"', text):
            raise ValueError("the text is JSON; give it a name that ends in .jsonl")
        ids = tokenizer.encode(text)
        length = min(LENGTH + 1, limit)
        if len(ids) < 10 * length:
            raise ValueError(f"the text has {len(ids)} tokens; expected {10 * length} or more")
    last = len(ids) * 9 // 10
    learned = torch.arange(length) > 0  # all but the first
    windows = enumerate(torch.tensor(ids).unfold(0, length, 1))
    samples = [Sample(tokens, learned, f"sequence {i}") for i, tokens in windows]
    return samples[: last - length + 1], samples[last :: length - 1][:8]


def read_dialogues(path: Path, tokenizer: llama2.Tokenizer, template: str | None) -> tuple:
    """Samples of dialogues: nine tenths of them, and up to 8 of the rest."""
    samples = read_samples(path, tokenizer, template)
    if len(samples) < 10:
        raise ValueError(f"{path}: there are {len(samples)} dialogues; expected 10 or more")
    last = len(samples) * 9 // 10
    return samples[:last], samples[last:][:8]


def train(model: llama2.Llama, samples: list, held_out: list, steps: int, rate: float) -> list:
    """Train the adapters; show the loss on what is held out. Returns what was learned from."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    start = time.perf_counter()
    used, order = [], []
    try:
        for step in range(steps + 1):
            if step % max(1, steps // 10) == 0:
                with torch.no_grad():
                    loss = loss_of(model, held_out)
                if not loss.isfinite():
                    raise ValueError(f"the loss is {loss} after {step} steps; try a lower --rate")
            left = (time.perf_counter() - start) / max(1, step) * (steps - step)
            text = f"{'#' * (30 * step // steps):30}] {step} of {steps}, {left:.0f} s left"
            text = f"{text if step else text.partition(',')[0]}, held-out loss {loss:.3f}"
            print(f"\r[{text:75}", end="\n" if step == steps else "", file=sys.stderr, flush=True)
            if step < steps:
                for _ in range(BATCH):
                    order = order or torch.randperm(len(samples)).tolist()  # each once, then again
                    used.append(samples[order.pop()])
                loss_of(model, used[-BATCH:]).backward()
                optimizer.step()
                optimizer.zero_grad()
    except KeyboardInterrupt:
        print("\ninterrupted: what was learned until now is kept", file=sys.stderr)
    return used


if __name__ == "__main__":
    parser = llama2.Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default=llama2.DEFAULT_MODEL, help="what llama2.load() reads")
    parser.add_argument(
        "--data", metavar="FILE", type=Path, help=f"a text, or dialogues ({', '.join(DIALOGUES)})"
    )
    parser.add_argument("--chat-template", metavar="NAME|FILE", help="default: the model's")
    parser.add_argument("--strict", action="store_true", help="refuse rows that are too long")
    parser.add_argument("--adapter", metavar="DIR", type=Path, help="is read if it exists, written")
    parser.add_argument("--out", metavar="FILE.gguf", type=Path, help="write the merged model")
    parser.add_argument("--type", choices=SAVE_TYPES, default="Q8_0")
    parser.add_argument(
        "--targets",
        nargs="+",
        choices=adapters.PROJECTIONS,
        default=[],
        help="default: q_proj v_proj",
    )
    numbers = {
        "--rank": (8, llama2.in_range(int, 1)),
        "--alpha": (16.0, llama2.in_range(float, 1e-6, 1e6)),
        "--steps": (200, llama2.in_range(int, 1)),
        "--rate": (1e-3, llama2.in_range(float, 1e-9, 1)),
    }
    for name, (value, number) in numbers.items():
        default = value if name in ("--steps", "--rate") else None  # an adapter has its own
        parser.add_argument(name, type=number, default=default, help=f"default: {value}")
    args = parser.parse_args()
    llama2.use_threads()
    status = 0
    if not (args.adapter or (args.data and args.out)) or (args.out and args.out.exists()):
        parser.error("expected --adapter, or --data and a new file as --out")
    if args.out and not args.out.parent.is_dir():  # else only noticed after training
        parser.error(f"--out {args.out}: there is no folder {args.out.parent}")
    with prelude.errors(parser):
        model, tokenizer = llama2.load(args.model)
        limit = model.config.max_position_embeddings
        limit = min(limit, model.config.sliding_window or limit)
        targets = sorted({*args.targets})
        given = {"target_modules": targets, "r": args.rank, "lora_alpha": args.alpha}
        given = {name: value for name, value in given.items() if value}
        if args.adapter and (args.adapter.exists() or not args.data):
            adapters.load_adapter(model, args.adapter)
        else:
            new = {"target_modules": ["q_proj", "v_proj"], "r": 8, "lora_alpha": 16.0} | given
            adapters.add_adapters(model, *new.values())
        for name, value in given.items():
            if value != model.lora_settings[name]:
                problem = f"its {name} is {model.lora_settings[name]}, not {value}"
                raise ValueError(f"{args.adapter}: {problem}: name a new folder, or no such option")
        if args.data:
            template = read_template(args.chat_template)
            if args.data.suffix.lower() in DIALOGUES:
                sides = read_dialogues(args.data, tokenizer, template)
            else:
                sides = read_text(args.data, tokenizer, limit)
            left_out = ""
            long = dict.fromkeys(s.row for side in sides for s in side if len(s.tokens) > limit)
            if long:
                text = (
                    f"{len(long)} rows of more than {limit} tokens, the model's limit, as"
                    f" {', '.join([*long][:5])}"
                )
                left_out = f"; left out: {text}"
                sides = [[s for s in side if s.row not in long] for side in sides]
                if args.strict or not all(sides):
                    raise ValueError(f"{args.data}: {text}")
                print(left_out[2:], file=sys.stderr)
            used = train(model, *sides, args.steps, args.rate)
            status = 130 * (len(used) < args.steps * BATCH)
            if args.adapter:
                adapters.save_adapter(model, args.adapter)
            rows, answers = {sample.row for sample in used}, sum(s.answers for s in {*used})
            tokens = sum(int(sample.learned.sum()) for sample in {*used})
            text = f"learned from {len(rows)} rows, {answers} answers, {tokens} tokens{left_out}"
            print(text, file=sys.stderr)
        if args.out:
            adapters.merge_adapters(model)
            save_gguf(model, args.out, args.type, tokenizer=tokenizer)
            print(f"wrote {args.out}", file=sys.stderr)
    sys.exit(status)
