"""Measures what docs/speed.md shows of a busy machine, and of a container's quota.

It starts programs that use a core each, or gives one core of CPU time (Linux, as root).

    python docs/make/loads.py FILE.gguf --processor "Zen 4" --other 0.6.0=OLDER/llama2.py \\
        --llama-bench llama.cpp=PATH/llama-bench ik_llama.cpp=OTHER/llama-bench

All programs run in turns, as commands of their own; a cell is the median. Nothing else should run.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from speed import ROOT, bench, markdown, put, show

SPIN = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    for _ in range(10**5): pass"
QUOTAS = {  # the folder of a new group -> what to write into which of its files: one core
    "/sys/fs/cgroup/cpu/llama2-loads": {
        "cpu.cfs_period_us": "100000",
        "cpu.cfs_quota_us": "100000",
    },
    "/sys/fs/cgroup/llama2-loads": {"cpu.max": "100000 100000"},
}


@contextmanager
def busy(count: int) -> Iterator[str]:
    """So many programs that use a core each; gives what a command begins with: nothing."""
    programs = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(count)]
    try:
        yield ""
    finally:
        for program in programs:
            program.kill()
            program.wait()


@contextmanager
def quota() -> Iterator[str]:
    """A group of processes that have one core; gives what a command begins with to be in it."""
    groups = [(Path(f), settings) for f, settings in QUOTAS.items() if Path(f).parent.exists()]
    if not groups:
        sys.exit("loads.py: no cgroups here; --no-quota leaves them out")
    folder, settings = groups[0]
    folder.mkdir(exist_ok=True)
    try:
        for name, value in settings.items():
            (folder / name).write_text(value)
        yield f"echo $$ > {folder}/cgroup.procs; "
    finally:
        folder.rmdir()


def tokens_per_second(command: str) -> float:
    """What llama2.py or llama-bench reports."""
    done = subprocess.run(command, shell=True, check=False, capture_output=True, text=True)
    rates = re.findall(r"generated \d+ tokens, ([\d.]+) tokens/s", done.stderr)
    rates += re.findall(r"tg\d+ *\| *([\d.]+)", done.stdout)
    if not rates:
        sys.exit(f"loads.py: no speed in the output of {command}\n{done.stderr[-500:]}")
    return float(rates[-1])


def main() -> None:
    parser = bench.llama2.Parser(description=__doc__.partition("\n")[0])
    number = bench.llama2.in_range
    add = parser.add_argument
    add("file", metavar="FILE", help="a GGUF file")
    add("--processor", metavar="NAME", required=True, help="as the table is to call it")
    add("--busy", metavar="N", type=number(int, 0), nargs="+", default=[0, 1, 2, 4])
    add("--tokens", metavar="N", type=number(int, 2), default=40)
    add("--rounds", metavar="N", type=number(int, 1), default=7)
    add("--other", metavar="NAME=PATH", help="another llama2.py, such as an older one")
    add("--llama-bench", metavar="NAME=PATH", type=bench.program, nargs="+", default=[])
    add("--no-quota", action="store_true")
    args = parser.parse_args()
    os.environ.pop("OMP_WAIT_POLICY", None)  # for this program: each sets its own, or none

    options = f"--model {args.file} --prompt x --temperature 0 --max-new-tokens {args.tokens}"
    here = f"{sys.executable} {ROOT / 'llama2.py'} {options}"
    commands = {"llama2.py": here, "with --threads 1": f"{here} --threads 1"}
    if args.other:
        name, _, path = args.other.partition("=")
        commands[name] = f"{sys.executable} {path} {options}"
    for peer in args.llama_bench:
        name, _, path = peer.partition("=")
        commands[name] = f"{path} -m {args.file} -p 0 -n {args.tokens} -t 2 -r 1"

    loads = {f"{n} busy program{'s' * (n > 1)}" if n else "idle": busy(n) for n in args.busy}
    if not args.no_quota:
        loads["a quota of one core"] = quota()
    rows = []
    for load, group in loads.items():
        rates: dict[str, list[float]] = {name: [] for name in commands}
        with group as start:
            for turn in range(args.rounds):
                for name, command in commands.items():
                    rates[name].append(tokens_per_second(start + command))
                print(time.strftime("%H:%M:%S"), load, turn, file=sys.stderr, flush=True)
        rows.append([load, *(show(statistics.median(rate)) for rate in rates.values())])
    title = f"{args.processor}, llama2.py {bench.llama2.__version__}, {time.strftime('%Y-%m-%d')}"
    put("<!-- loads -->\n", markdown([f"{title}: tokens/s", *commands], rows))


if __name__ == "__main__":
    main()
