"""The logit lens: what each layer would say next, if it were the last (nostalgebraist 2020).

    python examples/lens.py "The king had a daughter who was" [--model PATH]

The output of every block goes through the final norm and the output matrix, by forward hooks alone.
"""

import prelude

with prelude.imports(__name__):
    import torch

    import llama2

parser = llama2.Parser(description=__doc__.split("\n")[0])
parser.add_argument("prompt")
parser.add_argument("--model", default=llama2.DEFAULT_MODEL, help="any that llama2.load() reads")
args = parser.parse_args()
llama2.use_threads()
with prelude.errors(parser):
    model, tokenizer = llama2.load(args.model)
ids = tokenizer.encode(args.prompt)
limit = model.config.max_position_embeddings
if not 0 < len(ids) <= limit:
    parser.error(f"the prompt has {len(ids)} tokens; expected 1 to {limit}")

states = []  # after each block: (1, T, C)
hooks = [block.register_forward_hook(lambda _, __, x: states.append(x)) for block in model.layers]
with torch.no_grad():
    model(torch.tensor([ids]))
    lens = model.lm_head(model.norm(torch.cat(states))).float()  # (L, T, V)
for hook in hooks:
    hook.remove()
chances, words = lens.softmax(-1).max(-1)  # (L, T)


def cell(token_id: int, chance: float | None = None) -> str:
    """A token, and how likely it is, as 14 characters of the table."""
    word = ascii(tokenizer.token_bytes(token_id).decode(errors="replace"))[1:-1][:9]
    return f"{word:<9}{'' if chance is None else f'{chance:4.0%}':<5}"


places = range(max(0, len(ids) - 5), len(ids))  # the last positions: five fit into a terminal
print("after     ", *(cell(ids[t]) for t in places))
for layer in range(len(states)):
    row = (cell(words[layer, t].item(), chances[layer, t].item()) for t in places)
    print(f"layer {layer + 1:<4}", *row)
