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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import prelude

with prelude.imports(__name__):
    import torch
    from drafts import tokens_of_equal_bits
    from prompts import add_options, answer, load
    from torch import Tensor
    from tqdm import tqdm

    import llama2

PIECE = 128  # tokens of a prompt that are read between two steps of others


@dataclass(eq=False)
class Sequences:
    """Several caches as one, in which each has a position of its own: what Llama.forward() asks of a
    cache.

    sequences  plain Caches of batch size 1, as many as the tokens (B, T); their sizes may differ
    layer      index of the layer that runs, as in a Cache
    pos        the highest of the positions
    """

    sequences: list[llama2.Cache]
    layer: int = 0

    @property
    def pos(self) -> int:
        return max(cache.pos for cache in self.sequences)

    def check(self, model: llama2.Llama, tokens: Tensor) -> None:
        """Raises ValueError unless each sequence is for this model."""
        for cache, own in zip(self.sequences, tokens.split(1), strict=True):
            cache.check(model, own)

    def rope(self, T: int) -> tuple[Tensor, ...]:
        """cos and sin for the next T tokens of each: (B, T, D/2). Raises ValueError if one is full."""
        pairs = [torch.stack(cache.rope(T)) for cache in self.sequences]
        return torch.stack(pairs, dim=1).unbind()

    def mask(self, T: int) -> Tensor:
        """Which of the longest sequence's tokens each new token sees: bool (B, 1, T, S)."""
        new = torch.stack([torch.arange(T) + cache.pos for cache in self.sequences])  # positions
        mask = torch.arange(self.pos + T) <= new[:, None, :, None]
        return mask.to(self.sequences[0].k.device)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Store k and v (B, G, T, D) of the layer; return all (B, G, S, D), zeros behind the shorter."""
        B, G, T, D = k.shape
        both = k.new_zeros(2, B, G, self.pos + T, D)
        for i, cache in enumerate(self.sequences):
            cache.layer = self.layer
            both[:, i, :, : cache.pos + T] = torch.cat(cache.update(k[i, None], v[i, None]))
        return both.unbind()

    def advance(self, tokens: Tensor) -> None:
        """Count tokens (B, T) as stored."""
        for cache, own in zip(self.sequences, tokens.split(1)):
            cache.advance(own)


def copy_tokens(source: llama2.Cache, target: llama2.Cache, n: int) -> None:
    """Have a cache hold the first n tokens of another one, and nothing else."""
    target.reset()
    target.k[..., :n, :] = source.k[..., :n, :]
    target.v[..., :n, :] = source.v[..., :n, :]
    target.advance(source.tokens[:, :n])


class NotYet(Exception):
    """What a step raises whose logits come with the next pass. Nothing has changed: ask it again."""


@dataclass(eq=False)
class Row:
    """A text that Rows writes. It is the `step` of the iterator over it, such as generate()."""

    chunk = llama2.PREFILL_CHUNK  # the prompt's tokens in a pass, if nobody else waits
    begin: Any = None  # makes the iterator of its `step`
    number: int = 0  # among the texts of run_batch()
    items: list = field(default_factory=list)  # what the iterator has given
    iterator: Any = None
    ended: Any = None  # the iterator, or an error, when the text is over
    owner: Any = None  # among the rows of one, equal prompts are read once
    prompt: Any = None  # what is equal for equal prompts
    first: Any = None  # the logits after the prompt
    cache: Any = None
    tokens: Any = None  # (1, n), whose logits the iterator asked for
    logits: Any = None  # these (1, V), until it asks again

    def take(self, item: Any) -> None:
        """Keep what the iterator has given."""
        self.items.append(item)

    def end(self, ended: Any) -> None:
        """Note that the text is over: with the iterator, or with an error."""
        self.ended = ended

    def go_on(self) -> None:
        """Write up to where logits are lacking, or to the end."""
        try:
            self.iterator = self.iterator or self.begin(step=self)
            for item in self.iterator:
                self.take(item)
            self.end(self.iterator)
        except NotYet:
            pass
        except Exception as error:  # noqa: BLE001 (it ends this text, and no other)
            self.end(error)

    def __call__(self, tokens: Tensor, cache: llama2.Cache) -> Tensor:
        """tokens (1, n) -> logits (1, V), once a pass has made them. Raises NotYet until then."""
        if self.logits is None:
            cache.truncate(min(cache.common_prefix(tokens), tokens.shape[1] - 1))
            self.tokens, self.cache = tokens, cache
            self.prompt = self.prompt or (self.owner, cache.pos, tokens.tolist())
            raise NotYet
        logits, self.logits = self.logits, None
        return logits

    @property
    def lacking(self) -> int:
        """How many tokens are to be read before there are logits."""
        return self.tokens.shape[1] - self.cache.pos

    def read(self, model: llama2.Llama, tokens: Tensor) -> Tensor:
        """A pass for the next tokens (1, T) of this row alone: logits (1, V)."""
        return model(tokens, self.cache)


class Rows(list[Row]):
    """The rows of a model, written side by side; those that are over are remembered."""

    def __init__(self, model: llama2.Llama, otherwise: int = 1) -> None:
        """`otherwise`: the sequences of a pass where that changes their bits."""
        self.model = model
        equal = tokens_of_equal_bits(model)
        self.is_exact = equal > 1
        self.size = equal if self.is_exact else otherwise

    def run(self) -> None:
        """Write each text up to where logits are lacking. Then make a decode step for each, and a
        pass for one of the prompts, in turn.
        """
        for row in [*self]:
            if not row.ended:
                row.go_on()
        active = [row for row in self if not row.ended]
        steps = [row for row in active if row.lacking == 1]
        unread = [row for row in active if row.lacking > 1]
        for i in range(0, len(steps), self.size):
            self.run_pass(steps[i : i + self.size], 1)
        for row in unread[:1]:
            equal = [other for other in self if other.prompt == row.prompt]
            read = [other for other in equal if other.first is not None]
            if read:
                copy_tokens(read[0].cache, row.cache, row.tokens.shape[1])
                row.logits = read[0].first
            else:
                size = min(row.lacking, row.chunk - (row.cache.pos - row.prompt[1]) % row.chunk)
                if self.is_exact and active[1:]:
                    # Bits stay, because no piece is so small that it is a step's.
                    size = math.ceil(size / math.ceil(size / PIECE))
                self.run_pass([row], size)
            row.first = row.logits
            self.sort(key=equal.__contains__)  # next time, others come first

    def run_pass(self, rows: list[Row], size: int) -> None:
        """A pass for so many of the tokens that each of the rows lacks."""
        first, *others = rows
        try:
            parts = [row.tokens[:, row.cache.pos :][:, :size] for row in rows]
            tokens = torch.cat(parts).to(self.model.norm.weight.device)
            if others:
                logits = self.model(tokens, Sequences([row.cache for row in rows]))
            else:
                logits = first.read(self.model, tokens)
            for row, own in zip(rows, logits.split(1)):
                if not row.lacking:
                    row.logits = own
        except Exception as error:  # noqa: BLE001 (it ends one text, and no other)
            if not others:
                first.end(error)
                return
            for row in rows:  # nothing has changed, and it may be the error of one
                self.run_pass([row], 1)


def run_batch(
    model: llama2.Llama, starts: Iterable[Callable], parallel: int = 4
) -> Iterator[tuple[int, Any, list]]:
    """Run generate() or stream_text() for several prompts side by side; `starts` are functions of
    their `step`. Yields, as they end, (i, iterator i or its error, what it returned).
    """
    rows = Rows(model, parallel)
    waiting = map(Row, starts, count())
    rows += islice(waiting, parallel)
    while rows:
        rows.run()
        for row in [row for row in rows if row.ended]:
            rows.remove(row)
            rows += islice(waiting, 1)
            yield row.number, row.ended, row.items


def main() -> int:
    """Continue prompts, or answer them; returns the exit status."""
    parser = llama2.Parser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("prompts", metavar="PROMPT", nargs="*")
    add("--file", metavar="FILE", type=Path, help="of further prompts, one a line")
    add_options(parser, max_new_tokens=64)
    add("--device", default="auto", help="auto, cpu, cuda or mps")
    add("--chat", action="store_true", help="prompts are questions")
    add("--json", action="store_true", help="a line of JSON for each, in order")
    add("--parallel", metavar="N", type=llama2.in_range(int, 1), default=4)
    args = parser.parse_args()
    prompts = args.prompts
    status = tokens = printed = 0
    ended: dict[int, str] = {}  # and not printed yet
    with prelude.errors(parser):
        if args.file:
            with llama2.naming(args.file):
                prompts += args.file.read_text("utf-8").splitlines()
        model, tokenizer, sampling = load(args, args.device)
        starts = (
            partial(
                answer,
                model,
                tokenizer,
                prompt,
                args.chat,
                sampling=replace(sampling, seed=(args.seed + i) % 2**63),
                max_new_tokens=args.max_new_tokens,
            )
            for i, prompt in enumerate(prompts)
        )
        begun = time.perf_counter()
        batch = run_batch(model, starts, args.parallel)
        for i, stream, texts in tqdm(batch, total=len(prompts), leave=False, disable=None):
            text = "".join(texts)
            record = {"prompt": prompts[i], "text": text}
            if isinstance(stream, Exception):
                record["error"] = str(stream)
                text += f"\nerror: {stream}"
                status = 1
            else:
                record["stop_reason"] = stream.stop_reason
                tokens += len(stream.generation.new_ids)
            line = f"{prompts[i]}{text}\n"
            ended[i] = json.dumps(record, ensure_ascii=False) if args.json else line
            while text := ended.pop(printed, ""):
                print(text, flush=True)
                printed += 1
        speed = tokens / (time.perf_counter() - begun)
        print(f"{tokens} tokens, {speed:.1f} tokens/s", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
