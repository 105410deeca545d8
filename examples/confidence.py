"""How sure a model is of each token that it generates, and what else it could have generated.

    python examples/confidence.py "Once upon a time" [--model PATH] [--seed N]

A terminal shows the shades of the server's page; in a pipe or file (| cat) there are numbers instead.
"""

import sys

import prelude

with prelude.imports(__name__):
    from prompts import add_options, load

    import llama2

# The colour of a terminal (of 256) for a token that is less probable than this.
SHADES = {0.9: 230, 0.6: 222, 0.3: 215, 0.1: 208}
parser = llama2.Parser(description=__doc__.split("\n")[0])
parser.add_argument("prompt")
add_options(parser, max_new_tokens=80)
args = parser.parse_args()
has_colours = sys.stdout.isatty()
distributions = []  # (V,) for each new token


def step(tokens, cache):
    """tokens (1, n) -> logits (1, V), whose probabilities are kept."""
    logits = llama2.prefill(model, tokens, cache)
    distributions.append(logits[0, : model.vocab_size].softmax(-1))
    return logits


def shaded(text: str, chance: float) -> str:
    """A text in the shade of its probability; the white space around it has none."""
    # No control characters, which a terminal would obey.
    text = "".join(c if c.isprintable() or c.isspace() else "?" for c in text)
    word = text.strip()
    shades = [shade for bound, shade in SHADES.items() if chance < bound]
    if not word or not shades:
        return text
    coloured = f"\x1b[30;48;5;{shades[-1]}m{word}\x1b[m"
    return text.replace(word, coloured if has_colours else f"{word}({chance:.0%})")


with prelude.errors(parser):
    model, tokenizer, sampling = load(args)
    ids = tokenizer.encode(args.prompt)
    generation = llama2.generate(model, ids, sampling, args.max_new_tokens, step=step)
    decoder = llama2.StreamDecoder(tokenizer, first=False)
    print(args.prompt, end="")
    for token_id in generation:
        chance = distributions[-1][token_id].item()
        print(shaded(decoder.decode(token_id), chance), end="", flush=True)
print("\n\nThe least certain | the likeliest in their places")
# There may be one distribution more: that of the stop token.
pairs = zip(generation.new_ids, distributions, strict=False)
for token_id, chances in sorted(pairs, key=lambda pair: pair[1][pair[0]].item())[:5]:
    top = [token_id, *chances.topk(4).indices.tolist()]
    names = [repr(tokenizer.token_bytes(i).decode(errors="replace")) for i in top]
    cells = [f"{name:<12}{chances[i]:6.1%}" for name, i in zip(names, top, strict=True)]
    print(cells[0], "|", *cells[1:])
