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
from collections import deque
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

    The mask of a pass is one tensor, cache.mask(1): bool (B, 1, 1, S), where S is pos + 1.
    """

    def __init__(self, sequences: Sequence[llama2.Cache]) -> None:
        self.sequences = sequences
        self.layer = 0
        self.own = torch.tensor([cache.pos for cache in sequences])  # the positions of `visible`
        self.visible = torch.empty(0)

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
        own = torch.tensor([cache.pos for cache in self.sequences])
        if not self.visible.numel() or not own.equal(self.own):  # once in a pass
            visible = torch.arange(self.pos + T) <= own[:, None, None, None]
            self.own, self.visible = own, visible.to(self.sequences[0].k.device)
        return self.visible

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (B, G, 1, D) of one layer; return all (B, G, S, D), zeros behind the shorter."""
        B, G, T, D = k.shape
        keys, values = k.new_zeros(2, B, G, self.pos + T, D)
        for i, cache in enumerate(self.sequences):
            own = cache.update(layer, k[i, None], v[i, None])
            for all_of_them, one in zip((keys, values), own, strict=True):
                all_of_them[i, :, : cache.pos + T] = one[0]
        return keys, values

    def advance(self, tokens: Tensor) -> None:
        """Count tokens (B, 1) as stored."""
        for cache, token in zip(self.sequences, tokens, strict=True):
            cache.advance(token[None])


@torch.no_grad()
def has_bits_of_one(model: llama2.Llama) -> bool:
    """Whether a sequence has the same bits beside another as alone. Only the CPU kernels promise it;
    a trial shows whether they run all of the model.
    """
    if type(model.layers[0]).__name__ != "NativeBlock" or not llama2.load_kernels():
        return False
    caches = [model.new_cache(8), model.new_cache(8)]
    tokens = torch.zeros(2, 1, dtype=torch.int64)
    for cache, cache.pos in zip(caches, (6, 3), strict=True):
        for numbers in cache.k, cache.v:
            numbers.normal_(generator=torch.Generator().manual_seed(cache.pos))
    alone = [model(tokens[:1], cache) for cache in caches]
    for cache in caches:
        cache.truncate(cache.pos - 1)
    return model(tokens, Sequences(caches)).equal(torch.cat(alone))


class NotYet(Exception):
    """What a step raises whose logits come with the next pass. Nothing has changed: ask it again."""


class Row:
    """A `step` for generate() whose passes Rows makes."""

    read = staticmethod(llama2.prefill)  # makes the passes of a prompt
    chunk = llama2.PREFILL_CHUNK  # its tokens in a pass, if nobody else waits

    def __init__(self, owner: Any = None) -> None:
        self.owner = owner  # among the rows of one, equal prompts are read once
        self.cache: Any = None
        self.tokens: Any = None  # (1, n), while logits are asked for
        self.result: Any = None  # these logits (1, V), or an error
        self.prompt: Any = None  # what is equal for equal prompts
        self.first: Any = None  # the logits after the prompt

    def __call__(self, tokens: Tensor, cache: llama2.Cache) -> Tensor:
        """tokens (1, n) -> logits (1, V), once a pass has made them. Raises NotYet until then."""
        if self.tokens is None:
            self.tokens, self.cache = tokens, cache
            cache.truncate(min(cache.common_prefix(tokens), tokens.shape[1] - 1))
            self.start = cache.pos
            if self.prompt is None:
                self.prompt = self.owner, self.start, tokens.tolist()
        if self.result is None:
            raise NotYet
        result, self.tokens, self.result = self.result, None, None
        if isinstance(result, Exception):
            raise result
        return result

    def end(self, result: Any) -> None:
        """Give the logits, or the error, for which the step waits."""
        self.result = result
        if self.first is None and isinstance(result, Tensor):
            self.first = result

    @property
    def lacking(self) -> int:
        """How many tokens are to be read before there are logits."""
        return (
            0
            if self.tokens is None or self.result is not None
            else self.tokens.shape[1] - self.cache.pos
        )


class Rows(list[Row]):
    """The rows of a model: run() makes their passes."""

    def __init__(self, model: llama2.Llama, otherwise: int = 1) -> None:
        """`otherwise`: the sequences of a pass where that changes their bits."""
        self.model = model
        self.is_exact = has_bits_of_one(model)
        self.size = llama2.load_kernels().gemv_tokens if self.is_exact else otherwise

    def run(self) -> None:
        """A decode step for each row that waits for one, and one pass for one of the prompts."""
        steps = [row for row in self if row.lacking == 1]
        prompts = [row for row in self if row.lacking > 1]
        window = self.model.config.sliding_window or sys.maxsize
        full = [row for row in steps if row.tokens.shape[1] > window]  # each gets its error alone
        groups = [[row] for row in full]
        steps = [row for row in steps if row not in full]
        groups += [steps[i : i + self.size] for i in range(0, len(steps), self.size)]
        for rows in groups:
            self.step(rows)
        for row in prompts:
            same = [other for other in self if other is not row and other.prompt == row.prompt]
            if source := next((other for other in same if other.first is not None), None):
                n = row.tokens.shape[1]
                row.cache.k[:, :, :, :n] = source.cache.k[:, :, :, :n]
                row.cache.v[:, :, :, :n] = source.cache.v[:, :, :, :n]
                row.cache.truncate(0)
                row.cache.advance(row.tokens)
                row.end(source.first)
        for row in prompts:
            same = [other for other in prompts if other.prompt == row.prompt]
            if row.lacking and row is max(same, key=lambda other: other.cache.pos):
                self.read(row, alone=len(prompts) + len(groups) == 1)
                self.remove(row)  # next time, others come first
                self.append(row)
                break

    def step(self, rows: list[Row]) -> None:
        """One pass for the next token of each."""
        try:
            if len(rows) == 1:
                logits = llama2.prefill(self.model, rows[0].tokens, rows[0].cache)
            else:
                tokens = torch.cat([row.tokens[:, -1:] for row in rows])
                cache: Any = Sequences([row.cache for row in rows])
                logits = self.model(tokens.to(self.model.norm.weight.device), cache)
            for row, one in zip(rows, logits.split(1), strict=True):
                row.end(one)
        except Exception as error:  # noqa: BLE001 (it ends these texts, and no others)
            for row in rows:
                row.end(error)

    def read(self, row: Row, alone: bool) -> None:
        """One pass for a prompt. Bits stay, because no piece is so small that it is a step's."""
        n, pos = row.tokens.shape[1], row.cache.pos
        size = min(n - pos, row.chunk - (pos - row.start) % row.chunk)
        if self.is_exact and not alone:
            size = math.ceil(size / math.ceil(size / PIECE))
        try:
            logits = row.read(self.model, row.tokens[:, : pos + size], row.cache)
            if pos + size == n:
                row.end(logits)
        except Exception as error:  # noqa: BLE001
            row.end(error)


def run_batch(
    model: llama2.Llama, starts: Iterable[Callable[..., Iterator]], parallel: int = 4
) -> Iterator[tuple[int, Any, list]]:
    """Run generate() or stream_text() for several prompts side by side; `starts` are functions of
    their `step`. Yields, as they end, (i, iterator i or its ValueError, what it returned).
    """
    rows = Rows(model, parallel)
    waiting = deque(enumerate(starts))
    running: dict[Row, tuple[int, Iterator, list]] = {}
    while waiting or running:
        while waiting and len(running) < parallel:
            i, start = waiting.popleft()
            row = Row()
            try:
                running[row] = i, start(step=row), []
                rows.append(row)
            except ValueError as error:
                yield i, error, []
        for row, (i, iterator, items) in [*running.items()]:
            result: Any = iterator
            try:
                for item in iterator:
                    items.append(item)
            except NotYet:
                continue
            except ValueError as error:
                result = error
            del running[row]
            rows.remove(row)
            yield i, result, items
        rows.run()


def show(answer: dict, as_json: bool) -> None:
    """Print a prompt and what was written."""
    text = answer["prompt"] + answer["text"] + "\n"
    if "error" in answer:
        text += f"error: {answer['error']}\n"
    print(json.dumps(answer, ensure_ascii=False) if as_json else text, flush=True)


def main() -> int:
    """Continue prompts, or answer them; returns the exit status."""
    parser = llama2.Parser(description=__doc__.partition("\n")[0])
    number = llama2.in_range
    parser.add_argument("prompts", metavar="PROMPT", nargs="*")
    parser.add_argument("--file", metavar="FILE", type=Path, help="of further prompts, one a line")
    parser.add_argument("--model", default=llama2.DEFAULT_MODEL, help="what llama2.load() reads")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--chat", action="store_true", help="prompts are questions")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each, in order")
    parser.add_argument("--parallel", metavar="N", type=number(int, 1), default=4)
    parser.add_argument("--max-new-tokens", metavar="N", type=number(int, 0), default=64)
    parser.add_argument("--temperature", metavar="X", type=float, default=0.8)
    parser.add_argument("--seed", metavar="N", type=int, default=0)
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

        def start(i: int, prompt: str, step: Row) -> Iterator[str]:
            own = replace(sampling, seed=(args.seed + i) % 2**63)
            options = {"sampling": own, "max_new_tokens": args.max_new_tokens, "step": step}
            if args.chat:
                messages = [{"role": "user", "content": prompt}]
                return llama2.chat(model, tokenizer, messages, **options)
            return llama2.stream_text(model, tokenizer, tokenizer.encode(prompt), **options)

        starts = [partial(start, *pair) for pair in enumerate(prompts)]
        begun = time.perf_counter()
        ended: dict[int, dict] = {}  # and not printed yet
        bar = tqdm(total=len(prompts), leave=False, disable=None, unit="text")
        for i, stream, texts in run_batch(model, starts, args.parallel):
            ended[i] = {"prompt": prompts[i], "text": "".join(texts)}
            if isinstance(stream, ValueError):
                ended[i]["error"] = str(stream)
                status = 1
            else:
                ended[i]["stop_reason"] = stream.stop_reason
                tokens += len(stream.generation.new_ids)
            bar.update()
            while printed in ended:
                show(ended.pop(printed), args.json)
                printed += 1
        bar.close()
        speed = tokens / (time.perf_counter() - begun)
        print(f"{tokens} tokens, {speed:.1f} tokens/s", file=sys.stderr)
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        parser.error(str(error))
    return status


if __name__ == "__main__":
    sys.exit(main())
