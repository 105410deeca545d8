"""Measures what docs/speed.md shows of this version on a processor, and draws docs/speed.svg.

    pip install matplotlib
    python docs/make/speed.py SMALL.gguf 1B-Q4_0.gguf ... --processor "Zen 5" \\
        --llama-bench llama.cpp=PATH/llama-bench ik_llama.cpp=OTHER/llama-bench

Nothing else should run on the machine. The page has a place for each processor's passes; --parts
measures a token's parts and long contexts, too. Without files: draw the page's tables again.
"""

import argparse
import io
import json
import re
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import prelude

with prelude.imports("__main__"):  # of the programs that import this one, too
    import bench_llama2 as bench

PAGE = ROOT / "docs" / "speed.md"
GREY = "#808080"  # it reads on light and on dark, as do
COLOURS = ("#2f81f7", "#d29922", "#db61a2", "#3fb950", "#f85149")
COLOURED = ("text.", "axes.edge", "axes.label", "xtick.", "ytick.")


def show_progress(text: str = "") -> None:
    """In place of bench.note(): a line for each engine of each round."""
    if text:
        print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


def measure(*argv: Any) -> dict:
    """Run the benchmark; its result. What it prints is not shown."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        path = Path(folder) / "result.json"
        if status := bench.main([*map(str, argv), "--json", str(path)]):
            sys.exit(status)
        return json.loads(path.read_text("utf-8"))


def measure_parts(args: argparse.Namespace) -> dict:
    """Passes of all files, a token of the first, long contexts of some, beside the peers."""
    peers = ["--llama-bench", *args.llama_bench]
    passes = ["--prompt-tokens", *args.passes, "--rounds", args.rounds]
    long = ["--prompt-tokens", 512, "--depth", *args.depth, "--rounds", args.long_rounds]
    options = {
        "passes": ("--table", *args.files, *passes, *peers),
        "contexts": ("--table", *(args.long or args.files[:1]), *long, *peers),
        "token": ("--breakdown", "--model", args.files[0], "--depth", 0, 131072),
    }
    return {part: measure(*options[part]) for part in args.parts}


def show(rate: float) -> str:
    """Tokens/s, to about three digits."""
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def compare(title: str, result: dict) -> str:
    """A line for each model: its tokens/s, those of the faster peer, and their ratio."""
    rows = []
    for name, model in result["models"].items():
        rates = dict(model["tokens/s"])
        ours = rates.pop("llama2.py")
        rates.pop("ours / best", None)
        cells = [name.removesuffix(".gguf")]
        for test, rate in ours.items():
            peer = max((peer[test] for peer in rates.values()), default=rate)
            cells.append(f"{show(rate)} / {show(peer)} = {rate / peer:.2f}")
        reached, given = model["reached"] / 1e9, model["bandwidth"] / 1e9
        cells.append(f"{reached:.0f} of {given:.0f}")
        rows.append([*cells, f"{model['bytes per token of context'] / 1e3:.1f}"])
    return markdown([title, *ours, "GB/s of memory's", "MB per 1,000 tokens"], rows)


def split(title: str, result: dict) -> str:
    """A line for each depth: the milliseconds of a token and of each part, with its share."""
    rows = []
    for depth, times in result["token"].items():
        whole = sum(times.values())
        cells = [f"{1e3 * value:.3f} = {value / whole:.1%}" for value in times.values()]
        rows.append(
            [f"{int(depth):,} tokens", f"{1e3 * whole:.3f}, {show(1 / whole)} tokens/s", *cells]
        )
    return markdown([f"{title}: ms behind", "all", *times], rows)


def put(mark: str, table: str) -> None:
    """Put a table behind a mark of the page, in place of the one that is there."""
    text = PAGE.read_text("utf-8")
    if mark not in text:
        sys.exit(f"{PAGE} has no line {mark}for this table:\n{table}")
    PAGE.write_text(re.sub(rf"({mark})(\|.*\n)*", rf"\g<1>{table}", text), "utf-8")


def write(results: dict, processor: str) -> None:
    """Put tables behind the page's marks; their first cell is the processor, version and date."""
    for part, result in results.items():
        mark = f"<!-- passes {processor} -->\n" if part == "passes" else f"<!-- {part} -->\n"
        title = ", ".join([processor, *result["machine"].split(", ")[-2:]])
        put(mark, (split if part == "token" else compare)(title, result))


def draw(path: Path) -> None:
    """Ratios to the faster peer from the page's tables, a panel for each processor."""
    import matplotlib.pyplot as plt

    style = {f"{name}color": GREY for name in COLOURED}
    style |= {"svg.fonttype": "none", "axes.titlesize": "medium", "xtick.labelsize": "small"}
    plt.style.use(style)
    tables = re.findall(r"<!-- passes .* -->\n((?:\|.*\n)+)", PAGE.read_text("utf-8"))
    lines = -(-len(tables) // 2)
    figure, axes = plt.subplots(lines, 2, squeeze=False, sharey=True, layout="constrained")
    figure.set_size_inches(8.5, 2.4 * lines)
    for ax in axes.flat[len(tables) :]:
        ax.remove()
    shown: dict[str, Any] = {}
    for ax, table in zip(axes.flat, tables):
        cells = [line.split(" | ") for line in re.findall(r"(?m)^\| (.*) \|$", table)]
        tests = [test for test in cells[0] if test.startswith(("pp", "tg"))]
        for name, *rates in cells[2:]:
            ratios = [(i, float(r.split()[-1])) for i, r in enumerate(rates[: len(tests)]) if r]
            colour = COLOURS[[*shown, name].index(name)]
            [shown[name]] = ax.plot(*zip(*ratios), color=colour, marker=".", label=name)
        ax.axhline(1, color=GREY, lw=0.8)
        ax.set(title=cells[0][0].rpartition(",")[0], ylim=(0.5, 2.5))
        ax.set_xticks(range(len(tests)), tests)
        ax.spines[["top", "right"]].set_visible(False)
    figure.supylabel("tokens/s, divided by the faster peer's", size="small")
    figure.legend(shown.values(), shown, loc="outside upper center", ncols=5, frameon=False)
    figure.savefig(path, format="svg", transparent=True)


def main() -> None:
    parser = bench.llama2.Parser(description=__doc__.partition("\n")[0])
    number = bench.llama2.in_range
    add = parser.add_argument
    add("files", metavar="FILE", type=Path, nargs="*", help="GGUF files")
    add(
        "--long", metavar="FILE", type=Path, nargs="+", help="of them with long contexts: the first"
    )
    depth = number(int, 0)
    add("--depth", metavar="N", type=depth, nargs="+", default=[0, 512, 4096, 16384])
    peers = {"metavar": "NAME=PATH", "type": bench.program, "nargs": "+"}
    add("--llama-bench", **peers, default=["llama-bench"])
    add("--processor", metavar="NAME", help="the place of its passes in the page")
    parts = ("passes", "contexts", "token")
    add("--parts", choices=parts, nargs="+", default=["passes"], help="default: passes")
    sizes = [1, 2, 4, 8, 16, 32, 128, 512]
    add("--passes", metavar="N", type=number(int, 1), nargs="+", default=sizes)
    add("--rounds", type=number(int, 1), default=3)
    add("--long-rounds", type=number(int, 1), default=2)
    args = parser.parse_args()
    bench.note = show_progress
    with prelude.errors(parser):
        if args.files:
            write(measure_parts(args), args.processor)
        draw(ROOT / "docs" / "speed.svg")


if __name__ == "__main__":
    main()
