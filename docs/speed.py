"""Measures what docs/speed.md shows of this version, and draws docs/speed.svg.

    pip install matplotlib
    python docs/speed.py SMALL.gguf 1B-Q4_0.gguf ... --long SMALL.gguf 1B-Q4_K_M.gguf \\
        --llama-bench llama.cpp=PATH/llama-bench ik_llama.cpp=OTHER/llama-bench

Nothing else should run on the machine. --draw only draws again what was measured last.
"""

import argparse
import io
import json
import os
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the command line does
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import bench_llama2 as bench

LAST = Path(tempfile.gettempdir()) / "llama2-speed.json"  # what was measured last
GREY = "#808080"  # it reads on light and on dark, as do
COLOURS = ("#2f81f7", "#d29922", "#db61a2", "#3fb950")


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


def measure_all(args: argparse.Namespace) -> dict:
    """A token of the first file, passes of all, long contexts of some, beside the peers."""
    peers = ["--llama-bench", *args.llama_bench]
    passes = ["--prompt-tokens", 1, 2, 4, 8, 16, 32, 128, 512, "--rounds", args.rounds]
    long = ["--prompt-tokens", 512, "--depth", *args.depth, "--rounds", args.long_rounds]
    return {
        "token": measure("--breakdown", "--model", args.files[0], "--depth", 0, 131072),
        "passes": measure("--table", *args.files, *passes, *peers),
        "contexts": measure("--table", *(args.long or args.files[:1]), *long, *peers),
    }


def show(rate: float) -> str:
    """Tokens/s, to about three digits."""
    return f"{rate:.1f}" if rate < 100 else f"{rate:.0f}"


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def compare(result: dict) -> str:
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
    return markdown(["tokens/s", *ours, "GB/s of memory's", "MB per 1,000 tokens"], rows)


def split(result: dict) -> str:
    """A line for each depth: the milliseconds of a token and of each part, with its share."""
    rows = []
    for depth, times in result["token"].items():
        whole = sum(times.values())
        cells = [f"{1e3 * value:.3f} = {value / whole:.1%}" for value in times.values()]
        rows.append(
            [f"{int(depth):,} tokens", f"{1e3 * whole:.3f}, {show(1 / whole)} tokens/s", *cells]
        )
    return markdown(["ms behind", "all", *times], rows)


def write(page: Path, results: dict) -> None:
    """Put the machine and the tables between the page's marks."""
    contents = {name: compare(results[name]) for name in ("passes", "contexts")}
    contents["passes"] = f"{results['passes']['machine']}\n\n{contents['passes']}"
    contents["token"] = split(results["token"])
    text = page.read_text("utf-8")
    for name, content in contents.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        text = before + mark + content + end + after
    page.write_text(text, "utf-8")


def draw(results: dict, path: Path) -> None:
    """tokens/s of each engine, a panel for each model, as wide as a page on GitHub."""
    import matplotlib.pyplot as plt

    coloured = ("text.", "axes.edge", "axes.label", "xtick.", "ytick.")
    style = {f"{name}color": GREY for name in coloured}
    style |= {"svg.fonttype": "none", "axes.titlesize": "medium", "xtick.labelsize": "small"}
    plt.style.use(style)
    panels = [
        (name.removesuffix(".gguf"), part, found["tokens/s"])
        for part in ("passes", "contexts")
        for name, found in results[part]["models"].items()
    ]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, squeeze=False, layout="constrained")
    figure.set_size_inches(2.85 * columns, 2.7 * lines)
    for ax in axes.flat[len(panels) :]:
        ax.remove()
    for ax, (name, part, rows) in zip(axes.flat, panels):
        draw_panel(ax, part, rows)
        ax.set(title=name, ylabel="tokens/s", ylim=(0, None))
        ax.spines[["top", "right"]].set_visible(False)
    lines, names = axes[0][0].get_legend_handles_labels()
    figure.legend(lines, names, loc="outside upper center", ncols=4, frameon=False)
    figure.supxlabel(results["passes"]["machine"], size="x-small")
    figure.savefig(path, format="svg", transparent=True)


def draw_panel(ax: Any, part: str, rows: dict) -> None:
    """A line for each engine: prompts by their tokens, or generation by the tokens before it."""
    ax.set(xlabel="tokens in a pass" if part == "passes" else "generation behind N tokens")
    drawn = "pp" if part == "passes" else "tg"  # "tg@512" stands for 512 on the axis
    engines = [engine for engine in rows if engine != "ours / best"]
    for engine, colour in zip(engines, COLOURS):
        tests = [test for test in rows[engine] if test.startswith(drawn)]
        names = [test[2:].lstrip("@") or "0" for test in tests]
        rates = [rows[engine][test] for test in tests]
        width = 2.2 if engine == engines[0] else 1.2
        ax.plot(names, rates, color=colour, marker=".", lw=width, label=engine)


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
    add("--llama-bench", metavar="NAME=PATH", nargs="+", default=["llama-bench"])
    add("--rounds", type=number(int, 1), default=3)
    add("--long-rounds", type=number(int, 1), default=2)
    add("--draw", action="store_true", help="measure nothing")
    args = parser.parse_args()
    bench.note = show_progress
    if not args.draw:
        LAST.write_text(json.dumps(measure_all(args)), "utf-8")
    results = json.loads(LAST.read_text("utf-8"))
    write(ROOT / "docs" / "speed.md", results)
    draw(results, ROOT / "docs" / "speed.svg")


if __name__ == "__main__":
    main()
