"""Continue many prompts side by side: more tokens a second than one by one, and the same texts.

    python examples/batch.py "Once upon a time" "The king" [--model FILE]
    python examples/batch.py --file prompts.txt --chat --json > answers.jsonl

`--parallel` of them are written at a time; the next begins when one ends. One pass of the model makes
a token for each, at a position of its own, and reads the weights from memory once. Text i is the one
that generate() makes of prompt i alone with the seed `--seed` + i: bit for bit by the kernels, else
but for rounding.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import waits  # noqa: F401

try:
    import torch
    from torch import Tensor
    from tqdm import tqdm

    import llama2
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(f"batch.py: {error.name} is missing: pip install {error.name}", file=sys.stderr)
    sys.exit(2)

PIECE = 128  # tokens of a prompt that are read between two steps of others


class Sequences:
    """Several caches as one, for passes of one token each (T = 1): what Llama.forward() asks of a cache.

    sequences  plain Caches of batch size 1, as many as the tokens (B, 1); each has a position, and
               perhaps a size, of its own
    layer      index of the layer that runs, as in a Cache
    pos        the highest of the positions
    """

    def __init__(self, sequences: Sequence[llama2.Cache]) -> None:
        self.sequences = sequences
        self.layer = 0

    @property
    def pos(self) -> int:
        return max(cache.pos for cache in self.sequences)

    def check(self, model: llama2.Llama, tokens: Tensor) -> None:
        """Raises ValueError unless each sequence is for this model and has room for its token."""
        if tokens.shape != (len(self.sequences), 1):
            raise ValueError(
                f"tokens are {tuple(tokens.shape)}; expected one for each of {len(self.sequences)} sequences"
            )
        for cache, token in zip(self.sequences, tokens, strict=True):
            cache.check(model, token[None])
            cache.slots(1)

    def rope(self, T: int) -> tuple[Tensor, ...]:
        """cos and sin for the next token of each: (B, 1, D/2)."""
        pairs = [cache.rope(T) for cache in self.sequences]
        return tuple(map(torch.stack, zip(*pairs, strict=True)))

    def mask(self, T: int) -> Tensor:
        """Which of the longest sequence's tokens each new token sees: bool (B, 1, 1, S)."""
        positions = torch.tensor([cache.pos for cache in self.sequences])
        mask = torch.arange(self.pos + T) <= positions[:, None, None, None]
        return mask.to(self.sequences[0].k.device)

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, G, 1, D) of one layer; return all (B, G, S, D), zeros behind the shorter."""
        B, G, T, D = k.shape
        keys, values = k.new_zeros(2, B, G, self.pos + T, D)
        for i, cache in enumerate(self.sequences):
            S = cache.pos + T
            keys[i, :, :S], values[i, :, :S] = cache.update(layer, k[i, None], v[i, None])
        return keys, values

    def advance(self, tokens: Tensor) -> None:
        """Count tokens (B, 1) as stored."""
        for cache, token in zip(self.sequences, tokens, strict=True):
            cache.advance(token[None])


def copy_tokens(source: llama2.Cache, target: llama2.Cache, n: int) -> None:
    """Have a cache hold the first n tokens of another one, and nothing else."""
    target.reset()
    target.k[:, :, :, :n] = source.k[:, :, :, :n]
    target.v[:, :, :, :n] = source.v[:, :, :, :n]
    target.advance(source.tokens[:, :n])


@torch.no_grad()
def has_bits_of_one(model: llama2.Llama) -> bool:
    """Whether a sequence has the same bits beside another as alone. Only the CPU kernels promise it;
    a trial shows whether they run all of the model.
    """
    if type(model.layers[0]).__name__ != "NativeBlock" or not llama2.load_kernels():
        return False
    tokens = torch.zeros(2, 1, dtype=torch.int64)
    caches = [model.new_cache(8), model.new_cache(8)]
    alone = []
    for stored, cache in zip((6, 3), caches, strict=True):
        model(tokens[:1].expand(1, stored), cache)
        alone.append(model(tokens[:1], cache))
        cache.truncate(stored)
    return model(tokens, Sequences(caches)).equal(torch.cat(alone))


class NotYet(Exception):
    """What a step raises whose logits come with the next pass. Nothing has changed: ask it again."""


def patiently(items: Iterator) -> Iterator:
    """The items, and None each time that the next one has to wait for a pass."""
    while True:
        try:
            yield next(items)
        except NotYet:
            yield None
        except StopIteration:
            return


class Row:
    """A `step` for generate() whose passes Rows makes."""

    read = staticmethod(llama2.prefill)  # makes the passes of a prompt
    chunk = llama2.PREFILL_CHUNK  # its tokens in a pass, if nobody else waits
    owner: Any = None  # among the rows of one, equal prompts are read once
    cache: Any = None
    tokens: Any = None  # (1, n), while logits are asked for
    result: Any = None  # these logits (1, V), or an error
    prompt: Any = None  # what is equal for equal prompts
    first: Any = None  # the logits after the prompt

    def __call__(self, tokens: Tensor, cache: llama2.Cache) -> Tensor:
        """tokens (1, n) -> logits (1, V), once a pass has made them. Raises NotYet until then."""
        if self.result is None:
            if self.tokens is None:
                self.tokens, self.cache = tokens, cache
                cache.truncate(min(cache.common_prefix(tokens), tokens.shape[1] - 1))
                self.start = cache.pos
                self.prompt = self.prompt or (self.owner, self.start, tokens.tolist())
            raise NotYet
        result, self.result = self.result, None
        if isinstance(result, Exception):
            raise result
        self.first = result if self.first is None else self.first
        return result

    def end(self, result: Any) -> None:
        """Give the logits, or the error, for which the step waits."""
        self.tokens, self.result = None, result

    @property
    def lacking(self) -> int:
        """How many tokens are to be read before there are logits."""
        return 0 if self.tokens is None else self.tokens.shape[1] - self.cache.pos


class Rows(list[Row]):
    """The rows of a model, and the one loop that writes their texts."""

    def __init__(self, model: llama2.Llama, otherwise: int = 1) -> None:
        """`otherwise`: the sequences of a pass where that changes their bits."""
        self.model = model
        self.is_exact = has_bits_of_one(model)
        self.size = llama2.load_kernels().gemv_tokens if self.is_exact else otherwise

    def write(self, begin: Callable[[list], Any]) -> Iterator:
        """Write texts side by side; yields the owner of each as it ends.

        begin(owners of those that are written) gives the next text and its owner, or None: not yet,
        or, if none is written, no more. A text is an iterator that yields when it waits for a pass.
        """
        running: dict[Iterator, Any] = {}
        while True:
            while new := begin([*running.values()]):
                text, running[text] = new
            if not running:
                return
            for text, owner in [*running.items()]:
                if next(text, self) is self:
                    del running[text]
                    yield owner
            self.run()

    def run(self) -> None:
        """A decode step for each row that waits for one, and a pass for one of the prompts, in turn."""
        steps = [row for row in self if row.lacking == 1]
        groups = [steps[i : i + self.size] for i in range(0, len(steps), self.size)]
        unread = [row for row in self if row.lacking > 1 and not self.copy_equal(row)]
        for rows in groups:
            self.run_pass(rows, 1)
        if unread:
            row = unread[0]
            size = min(row.lacking, row.chunk - (row.cache.pos - row.start) % row.chunk)
            if self.is_exact and (groups or unread[1:]):
                # Bits stay, because no piece is so small that it is a step's.
                size = math.ceil(size / math.ceil(size / PIECE))
            self.run_pass([row], size)
            self.sort(key=lambda other: other.prompt == row.prompt)  # next time, others come first

    def copy_equal(self, row: Row) -> bool:
        """Whether an equal prompt was read, which is copied."""
        for other in self:
            if other.prompt == row.prompt and other.first is not None:
                copy_tokens(other.cache, row.cache, row.tokens.shape[1])
                row.end(other.first)
                return True
        return False

    def run_pass(self, rows: list[Row], size: int) -> None:
        """A pass for so many of the tokens that a row lacks, or for one of each of several rows."""
        first, *others = rows
        try:
            if others:
                tokens = torch.cat([row.tokens[:, -1:] for row in rows])
                cache: Any = Sequences([row.cache for row in rows])
                logits = self.model(tokens.to(self.model.norm.weight.device), cache)
            else:
                tokens = first.tokens[:, : first.cache.pos + size]
                logits = first.read(self.model, tokens, first.cache)
            for row, one in zip(rows, logits.split(1), strict=True):
                if not row.lacking:
                    row.end(one)
        except Exception as error:  # noqa: BLE001 (it ends one text, and no other)
            if not others:
                first.end(error)
                return
            for row in rows:  # nothing has changed, and it may be the error of one
                self.run_pass([row], 1)


def run_batch(
    model: llama2.Llama, starts: Iterable[Callable[..., Iterator]], parallel: int = 4
) -> Iterator[tuple[int, Any, list]]:
    """Run generate() or stream_text() for several prompts side by side; `starts` are functions of
    their `step`. Yields, as they end, (i, iterator i or its ValueError, what it returned).
    """
    rows = Rows(model, parallel)
    waiting = enumerate(starts)

    def write(start: Callable[..., Iterator], result: list) -> Iterator[None]:
        row = Row()
        rows.append(row)
        try:
            result[1] = start(step=row)
            for item in patiently(result[1]):
                if item is None:
                    yield
                else:
                    result[2].append(item)
        except ValueError as error:
            result[1] = error
        rows.remove(row)

    def begin(running: list) -> Any:
        if len(running) < parallel:
            for i, start in waiting:
                result = [i, None, []]
                return write(start, result), result
        return None

    yield from map(tuple, rows.write(begin))


def main() -> int:
    """Continue prompts, or answer them; returns the exit status."""
    parser = llama2.Parser(description=__doc__.partition("\n")[0])
    number = llama2.in_range
    add = parser.add_argument
    add("prompts", metavar="PROMPT", nargs="*")
    add("--file", metavar="FILE", type=Path, help="of further prompts, one a line")
    add("--model", default=llama2.DEFAULT_MODEL, help="what llama2.load() reads")
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--chat", action="store_true", help="prompts are questions")
    add("--json", action="store_true", help="a line of JSON for each, in order")
    add("--parallel", metavar="N", type=number(int, 1), default=4)
    add("--max-new-tokens", metavar="N", type=number(int, 0), default=64)
    add("--temperature", metavar="X", type=float, default=0.8)
    add("--seed", metavar="N", type=int, default=0)
    args = parser.parse_args()
    llama2.use_threads()
    prompts = args.prompts
    status = tokens = printed = 0
    try:
        if args.file:
            with llama2.naming(args.file):
                prompts += args.file.read_text("utf-8").splitlines()
        model, tokenizer = llama2.load(args.model, args.device, "auto", progress=True)
        sampling = llama2.Sampling(args.temperature, seed=args.seed)

        def start(i: int, step: Row) -> Iterator[str]:
            own = replace(sampling, seed=(args.seed + i) % 2**63)
            options = {"sampling": own, "max_new_tokens": args.max_new_tokens, "step": step}
            if args.chat:
                messages = [{"role": "user", "content": prompts[i]}]
                return llama2.chat(model, tokenizer, messages, **options)
            return llama2.stream_text(model, tokenizer, tokenizer.encode(prompts[i]), **options)

        starts = [partial(start, i) for i in range(len(prompts))]
        begun = time.perf_counter()
        ended: dict[int, dict] = {}  # and not printed yet
        bar = tqdm(total=len(prompts), leave=False, disable=None, unit="text")
        for i, stream, texts in run_batch(model, starts, args.parallel):
            ended[i] = answer = {"prompt": prompts[i], "text": "".join(texts)}
            if isinstance(stream, ValueError):
                answer["error"] = str(stream)
                status = 1
            else:
                answer["stop_reason"] = stream.stop_reason
                tokens += len(stream.generation.new_ids)
            bar.update()
            while answer := ended.pop(printed, None):
                text = answer["prompt"] + answer["text"] + "\n"
                if "error" in answer:
                    text += f"error: {answer['error']}\n"
                print(json.dumps(answer, ensure_ascii=False) if args.json else text, flush=True)
                printed += 1
        bar.close()
        speed = tokens / (time.perf_counter() - begun)
        print(f"{tokens} tokens, {speed:.1f} tokens/s", file=sys.stderr)
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        parser.error(str(error))
    return status


if __name__ == "__main__":
    sys.exit(main())
