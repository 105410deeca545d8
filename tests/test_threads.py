"""The kernels' own threads: kernels/team.h by its driver, and what a process with them may do."""

import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from test_llama2 import SCRIPT, needs_kernels, ran

pytestmark = [
    needs_kernels,
    pytest.mark.usefixtures("native"),
    pytest.mark.skipif(os.name != "posix", reason="POSIX's signals and processes"),
]
linux = pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")


def cores():
    """On how many this process may run."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()


COMPILER = shutil.which("g++") or shutil.which("clang++") or ""


@linux
def test_driver(tmp_path):
    """Exceptions, forks, threads that do not start, callers at once: tests/team.cpp."""
    command = [*shlex.split(os.environ.get("CXX", COMPILER)), "-std=c++17", "-O2", "-pthread"]
    source = SCRIPT.parent / "tests" / "team.cpp"
    subprocess.run([*command, str(source), "-o", str(tmp_path / "team")], check=True)
    status, *said = ran(tmp_path / "team")
    assert not status, said


def test_programs_say_how_threads_wait_before_they_import_torch():
    """Later, OpenMP would not see it."""
    folders = ("examples", "examples/server", "models", "docs/make")
    paths = [path for folder in folders for path in (SCRIPT.parent / folder).glob("*.py")]
    texts = {path: path.read_text("utf-8").split("\nimport prelude") for path in paths}
    before = {path: text[0] for path, text in texts.items() if len(text) == 2}
    assert len(before) > 9
    for path, text in before.items():
        assert not re.search(r"(?m)^ *(import|from) (torch|llama2|save|bench)", text), path


# A process of its own, with a matrix that two threads multiply in some milliseconds
BEGIN = """
import os, signal, sys, threading, time
import torch
import llama2
from test_kernels import layer_of, wide_blocks
layer = layer_of(wide_blocks("Q4_K", 3000)[0].repeat(10, 1), "Q4_K", fast=True)
x = torch.randn(100, 512)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
expected = layer(x).numpy().tobytes()
def right():  # compared without torch, which has threads of its own
    return layer(x).numpy().tobytes() == expected
def threads():
    return len(os.listdir("/proc/self/task"))
alone = threads()
"""


def run(code, before="", status=0):
    """What a process prints that runs code after BEGIN, and ends with this status."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", before + BEGIN + code]
    ended, out, err = ran(*command, env=environment, timeout=100)
    assert ended == status, err
    return out.split()


@linux
def test_number_of_threads_is_that_of_each_call():
    """It starts as many as are asked for, but not more than there are cores to run them."""
    code = """
for n in (1, 2, 1, 100):
    torch.set_num_threads(n)
    print(right(), threads() - alone)
"""
    expected = [0, min(cores(), 2) - 1, min(cores(), 2) - 1, cores() - 1]
    assert run(code) == [word for n in expected for word in ("True", str(n))]
    one_core = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])"
    assert run(code, one_core) == ["True", "0"] * 4


@linux
def test_threads_that_cannot_be_started_are_done_without():
    """A limit of the system's on processes, which counts threads. It does not bind root."""
    code = """
import resource
resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
torch.set_num_threads(2)
print(right(), right(), threads() - alone)
"""
    assert run(code) == ["True", "True", "0"]


@pytest.mark.skipif(cores() < 2, reason="one core")
@linux
def test_a_child_has_threads_of_its_own():
    """Also one that is forked while another thread of Python is inside the kernels."""
    code = """
torch.set_num_threads(2)
right(), right()
stop = False
def work():
    with torch.no_grad():
        while not stop:
            layer(x)
other = threading.Thread(target=work)
other.start()
for _ in range(5):
    child = os.fork()
    if not child:
        signal.alarm(50)
        start = time.perf_counter()
        good = right() and right() and threads() == 2
        os._exit(not (good and time.perf_counter() - start < 1))
    print(os.waitpid(child, 0)[1])
    time.sleep(0.01)
stop = True
other.join()
print(right())
"""
    assert run(code) == [*"00000", "True"]


@pytest.mark.parametrize("end", ["sys.exit(7)", "os.kill(os.getpid(), signal.SIGINT)"])
def test_a_process_ends_while_threads_compute(end):
    """By its own end, and by Ctrl-C, which is Python's business and not that of a worker."""
    code = f"""
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(2)
y = torch.empty(100, 30000)
numbers = 2, llama2.GGML_TYPES["Q4_K"].number, layer.blocks.nbytes, 100, 30000, 512, True
pointers = [t.data_ptr() for t in (layer.blocks, x, y)]
def work():  # a thread that Python ends within torch would end in std::terminate()
    while True:
        llama2.load_kernels().linear(*pointers, *numbers)
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
print(right())
sys.stdout.flush()
try:
    {end}
    work()
except KeyboardInterrupt:
    sys.exit(7)
"""
    assert run(code, status=7) == ["True"]
