"""Measures several answers at once: passes of the model, clients of the server, and who waits for whom.

    python docs/make/several.py passes FILE.gguf --llama-batched-bench PATH/llama-batched-bench
    python docs/make/several.py clients FILE.gguf --other OLDER/examples/server
    python docs/make/several.py waits FILE.gguf

Each prints a table of medians for docs/speed.md, and ends after `--limit` seconds. What is compared
runs in turns. Nothing else should run on the machine.
"""

import argparse
import asyncio
import itertools
import json
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from speed import ROOT, bench, markdown, prelude, show

SERVER = ROOT / "examples" / "server"
COUNTS = (1, 2, 4, 6, 8)  # of sequences in a pass
CLIENTS, PROMPT, STEPS = 4, 128, 48  # clients, and the tokens that each one sends and gets
LONG = 4000  # tokens of the prompt that others have to wait for
Times = list[float]  # when each token of a stream came


def measure_passes(args: argparse.Namespace) -> str:
    """Tokens/s of all sequences of a pass together, beside llama.cpp's."""
    args.gen_tokens = STEPS // 2
    model, _ = bench.load(args, args.file)
    passes = {count: bench.parallel_engine(args, model, count) for count in COUNTS}
    counts = ",".join(map(str, COUNTS))
    options = f"-npp 128 -ntg {args.gen_tokens} -npl {counts} -c 4096 --output-format jsonl"

    def ours() -> dict[int, float]:
        return {count: run()["tg"] for count, run in passes.items()}

    def theirs() -> dict[int, float]:
        done = bench.call_program(args.llama_batched_bench, args.file, options)
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return {row["pl"]: row["speed_tg"] for row in rows}

    ours()  # the first does not count
    peers = {"llama.cpp": theirs} if args.llama_batched_bench else {}
    samples = bench.take_turns({"llama2.py": ours} | peers, args.rounds)
    mine, *others = samples.values()
    cells = []
    for count in COUNTS:
        cells.append(show(median(mine[count])))
        for other in others:
            cells[-1] += f" / {show(median(other[count]))}"
            cells[-1] += f" = {bench.ratio(mine[count], other[count]):.2f}"
    gain = f"{bench.ratio(mine[4], mine[1]):.2f}"
    return markdown([args.file.name, *map(str, COUNTS), "4 times 1"], [["tokens/s", *cells, gain]])


@contextmanager
def serve(path: Path, file: Any, *options: Any) -> Iterator[int]:
    """Start a server; gives its port."""
    command = [sys.executable, path, "--model", file, "--port", "0", "--quiet", *map(str, options)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        said = ""
        while not (line := server.stderr.readline()).startswith("listening on "):
            said += line
            if not line:
                raise ValueError(f"{path} did not start: {said}")
        yield int(line.rpartition(":")[2])
    finally:
        server.terminate()
        server.wait()


async def stream(port: int, body: dict[str, Any], times: Times) -> None:
    """Ask for a completion, and note when each of its tokens comes."""
    data = json.dumps({"stream": True, **body}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        async for line in reader:
            if b'"error"' in line:
                sys.exit(f"several.py: {line.decode()}")
            if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                times.append(time.perf_counter())
    finally:
        writer.close()


def rate(streams: list[Times]) -> float:
    """Tokens/s of all streams, from when the last has begun to when the first ends."""
    start = max(times[0] for times in streams)
    end = min(times[-1] for times in streams)
    return sum(start < t <= end for times in streams for t in times) / (end - start)


class Asking:
    """Bodies of requests. Each answer is one word again and again, so that an event is a token."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode = tokenizer.encode
        self.word = tokenizer.encode(" the", bos=False)[-1]

    def body(self, start: Any, tokens: int, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """A prompt of so many tokens that begins like no other."""
        ids = self.encode(f"{start} " + f"{bench.QUESTIONS} " * (1 + tokens // 100))[:tokens]
        about = {"prompt": ids, "max_tokens": max_tokens, "logit_bias": {self.word: 100}}
        return about | fields

    async def rate(self, port: int, clients: int) -> float:
        """Tokens/s of so many clients; their prompts are held after the first time."""
        streams: list[Times] = [[] for _ in range(clients)]
        bodies = [self.body(i, PROMPT, STEPS) for i in range(clients)]
        await asyncio.gather(*(stream(port, *pair) for pair in zip(bodies, streams, strict=True)))
        return rate(streams)


def measure_clients(args: argparse.Namespace) -> str:
    """Tokens/s by HTTP of four clients beside a pass of four, and of one client beside an older server."""
    args.gen_tokens = STEPS
    model, tokenizer = bench.load(args, args.file)
    pass_of_all = bench.parallel_engine(args, model, CLIENTS)
    asking = Asking(tokenizer)
    with serve(SERVER, args.file) as port, serve(args.other or SERVER, args.file) as other:

        def clients() -> dict[str, float]:
            return {
                "pass": pass_of_all()["tg"],
                "clients": asyncio.run(asking.rate(port, CLIENTS)),
                "one": asyncio.run(asking.rate(port, 1)),
                "other": asyncio.run(asking.rate(other, 1)),
            }

        clients()  # the first does not count
        samples = bench.take_turns({"": clients}, args.rounds)[""]
    together, alone = (("clients", "pass"), ("one", "other"))
    header = [args.file.name, f"{CLIENTS} clients / a pass of {CLIENTS}", "1 client / older server"]
    row = ["tokens/s"]
    for a, b in together, alone:
        cell = " / ".join(show(median(samples[name])) for name in (a, b))
        row.append(f"{cell} = {bench.ratio(samples[a], samples[b]):.2f}")
    return markdown(header, [row])


async def wait_for_long(port: int, asking: Asking, seed: int) -> tuple[float, float]:
    """While a long prompt is read: the longest time between two tokens of one who writes, and when a
    short question gets its first token."""
    written: Times = []
    read: Times = []
    short: Times = []
    asked = ("writes", 16, LONG), ("long", LONG, 1), ("short", 16, 2)
    bodies = [asking.body(f"{seed} {name}", *sizes, seed=seed) for name, *sizes in asked]
    writer = asyncio.create_task(stream(port, bodies[0], written))

    async def until(count: int) -> None:
        while len(written) < count:
            await asyncio.sleep(0.005)

    await until(4)
    begun = time.perf_counter()
    long = asyncio.create_task(stream(port, bodies[1], read))
    await until(len(written) + LONG // PROMPT // 2)  # half of it is read: a token for each chunk
    start = time.perf_counter()
    await stream(port, bodies[2], short)
    await long
    writer.cancel()
    with suppress(asyncio.CancelledError):
        await writer
    if short[0] > read[0]:
        sys.exit("several.py: the long prompt was read before the question was asked")
    times = [begun, *(t for t in written if begun < t < read[0]), read[0]]
    waits = [later - earlier for earlier, later in itertools.pairwise(times)]
    return max(waits), short[0] - start


def measure_waits(args: argparse.Namespace) -> str:
    """How long others wait while a long prompt is read, in the time of a chunk of it."""
    model, tokenizer = bench.load(args, args.file)
    chunks = {}
    for depth in (0, LONG - PROMPT):
        cache = model.new_cache(depth + PROMPT)
        tokens = bench.random_tokens(model, depth + PROMPT)
        cache.k.fill_(0.01)  # all zero they would not be in memory
        cache.v.fill_(0.01)
        cache.advance(tokens[:, :depth])
        chunks[depth] = cache, tokens

    def measure_chunk(depth: int) -> float:
        cache, tokens = chunks[depth]
        cache.truncate(depth)
        return bench.seconds(lambda: model(tokens[:, depth:], cache))

    asking = Asking(tokenizer)
    rows = defaultdict(list)
    with serve(SERVER, args.file, "--context", LONG + 96, "--parallel", CLIENTS) as port:
        for depth in chunks:
            measure_chunk(depth)
        for i in range(args.rounds):
            first, last = map(measure_chunk, chunks)
            gap, start = asyncio.run(wait_for_long(port, asking, i))
            rows["chunk of 128, ms: first / last"].append((first, last))
            rows["longest wait, in last chunks"].append(gap / last)
            rows["a short question begins, in last chunks"].append(start / last)
            print(f"{first:.3f} {last:.3f} {gap:.3f} {start:.3f}", file=sys.stderr)
    first, last = map(median, zip(*rows.pop("chunk of 128, ms: first / last"), strict=True))
    cells = [f"{1e3 * first:.0f} / {1e3 * last:.0f}"]
    cells += [f"{median(values):.2f}" for values in rows.values()]
    header = [args.file.name, "chunk of 128, ms: first / last", *rows]
    return markdown(header, [["", *cells]])


PARTS = {"passes": measure_passes, "clients": measure_clients, "waits": measure_waits}


def stop(signal_number: int, frame: Any) -> None:
    sys.exit("several.py: it took longer than --limit")


def main() -> None:
    parser = bench.llama2.Parser(description=__doc__.partition("\n")[0])
    number = bench.llama2.in_range
    add = parser.add_argument
    add("part", choices=PARTS)
    add("file", metavar="FILE", type=Path, help="a GGUF file")
    peer = {"metavar": "PATH", "type": bench.program}
    add("--llama-batched-bench", **peer, help="llama.cpp's program, beside passes")
    add("--other", metavar="PATH", type=Path, help="an older server, beside one client")
    add("--rounds", metavar="N", type=number(int, 1), default=3)
    add("--limit", metavar="SECONDS", type=number(int, 1), default=295)
    args = parser.parse_args()
    args.device, args.dtype, args.compile = "cpu", "auto", None
    bench.llama2.use_threads()
    bench.note = lambda text="": None
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(args.limit)
    with prelude.errors(parser), bench.torch.no_grad():
        print(bench.describe_machine())
        print(PARTS[args.part](args))


if __name__ == "__main__":
    main()
