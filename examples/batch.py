"""Continue several prompts as one batch: more tokens a second than one by one.

    python examples/batch.py "Once upon a time" "The king" [--model FILE]

The prompts may differ in length. One forward pass for the whole batch reads the weights from memory
once. Sequence i is what generate() makes of its prompt alone with the seed `--seed` + i, but for
rounding.
"""

import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import waits  # noqa: F401

try:
    import torch
    from torch import Tensor, nn

    import llama2
except ImportError as error:
    print(f"batch.py: {error.name} is missing: pip install {error.name}", file=sys.stderr)
    sys.exit(2)


class Sequences:
    """Several caches as one, for passes of one token each (T = 1): what Llama.forward() asks of a cache.

    sequences  plain Caches of batch size 1, as many as the tokens (B, 1); each has a position, and
               perhaps a size, of its own
    layer      the layer whose turn it is, as in a Cache
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
        self.layer = layer + 1
        return keys, values

    def advance(self, tokens: Tensor) -> None:
        """Count tokens (B, 1) as stored."""
        for cache, token in zip(self.sequences, tokens, strict=True):
            cache.advance(token[None])
        self.layer = 0


class PaddedCache(llama2.Cache):
    """A Cache for sequences of different lengths, aligned at their ends.

    `padding` (B,) int64: how many tokens at the left of each sequence are padding. They shift its
    positions, which changes nothing: attention with RoPE depends on distances alone.
    """

    def __init__(self, model: llama2.Llama, padding: Tensor, max_seq_len: int) -> None:
        weight = model.norm.weight
        dtype = model.cache_dtype or weight.dtype
        config = replace(model.config, num_hidden_layers=len(model.layers))
        super().__init__(config, len(padding), max_seq_len, dtype, weight.device)
        self.padding = padding.to(weight.device)

    def mask(self, T: int) -> Tensor:
        """As Cache.mask(), but padding attends to itself, and nothing else to it: bool (B, 1, T, S)."""
        visible = super().mask(T)
        S = self.slots(T).stop
        slot = torch.arange(S, device=self.k.device)
        real = slot >= self.padding[:, None, None, None]  # (B, 1, 1, S)
        itself = slot == slot[S - T :, None]  # for padding: softmax over nothing is NaN
        return (real | itself) if visible is None else visible & (real | itself)


def generate_batch(
    model: llama2.Llama,
    prompts: Sequence[Sequence[int]],
    sampling: llama2.Sampling,
    max_new_tokens: int,
    stop_ids: Collection[int] | None = None,
) -> Iterator[list[int | None]]:
    """Continue prompts of any lengths: each decode step yields an id per sequence, None if it ended.

    Sequence i is sampled with the seed sampling.seed + i. `stop_ids` end a sequence (default: EOS).
    Raises ValueError, at the first step, for what generate() refuses.
    """
    context = model.config.max_position_embeddings
    lengths = [len(ids) for ids in prompts]
    if not prompts or max(lengths) > context or max_new_tokens < 0:
        expected = f"expected one or more of at most {context} tokens, and 0 new tokens or more"
        raise ValueError(f"prompts of {lengths} tokens, {max_new_tokens} new ones; {expected}")

    # 1. One cache for the batch. Shorter prompts are padded at the left, so that all end together.
    limits = [min(max_new_tokens, context - length) for length in lengths]
    size = max(lengths) + max(limits)
    padding = max(lengths) - torch.tensor(lengths)
    if padding.any():
        cache = PaddedCache(model, padding, size)
    else:
        cache = model.new_cache(size, len(prompts))

    # 2. A Generation for each sequence samples its tokens, and knows when it ends. Its step does not
    # call the model: it returns its own logits of `logits` (B, V), which one pass computes for all.
    generations = []
    for i, ids in enumerate(prompts):
        seed = None if sampling.seed is None else (sampling.seed + i) % 2**63
        own = replace(sampling, seed=seed)
        options = {"cache": cache, "step": lambda tokens, cache, i=i: logits[i, None]}
        generations.append(llama2.generate(model, ids, own, limits[i], stop_ids, **options))
    prompts = [torch.tensor(generation.ids) for generation in generations]
    tokens = nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_side="left")  # (B, n)

    # 3. Each decode step is one pass of the model. Finished sequences stay in the batch, ignored.
    for _ in range(max(limits)):
        logits = llama2.prefill(model, tokens, cache)
        new_ids = [next(generation, None) for generation in generations]
        if not any(token_id is not None for token_id in new_ids):
            break
        yield new_ids
        last = [[generation.ids[-1]] for generation in generations]
        tokens = torch.cat((tokens, torch.tensor(last)), 1)


def generate_one_by_one(
    model: llama2.Llama, prompts: Sequence[list[int]], sampling: llama2.Sampling, limit: int
) -> list[list[int]]:
    """The new ids of each prompt alone, with the seeds of generate_batch()."""
    texts = []
    for i, ids in enumerate(prompts):
        own = replace(sampling, seed=(sampling.seed + i) % 2**63)
        texts.append(list(llama2.generate(model, ids, own, limit)))
    return texts


def main() -> int:
    """Continue prompts together, then one by one; returns the exit status."""
    parser = llama2.Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompts", metavar="PROMPT", nargs="+")
    parser.add_argument("--model", default=llama2.DEFAULT_MODEL, help="what llama2.load() reads")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=64)
    parser.add_argument("--temperature", metavar="X", type=float, default=0.8)
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    args = parser.parse_args()
    llama2.use_threads()
    try:
        model, tokenizer = llama2.load(args.model, progress=True)
        prompts = [tokenizer.encode(prompt) for prompt in args.prompts]
        sampling = llama2.Sampling(args.temperature, seed=args.seed)
        list(generate_batch(model, prompts, sampling, 1))  # the first pass is slower than others
        start = time.perf_counter()
        steps = list(generate_batch(model, prompts, sampling, args.max_new_tokens))
        middle = time.perf_counter()
        alone = generate_one_by_one(model, prompts, sampling, args.max_new_tokens)
        end = time.perf_counter()
    except (ImportError, ValueError, OSError, RuntimeError) as error:
        parser.error(str(error))

    together = []
    for i, ids in enumerate(prompts):
        together.append([step[i] for step in steps if step[i] is not None])
        print(tokenizer.decode(ids + together[i]), end="\n\n")
    speed = sum(map(len, together)) / (middle - start)
    print(f"together:   {speed:.1f} tokens/s")
    speed = sum(map(len, alone)) / (end - middle)
    print(f"one by one: {speed:.1f} tokens/s, the same texts: {alone == together}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
