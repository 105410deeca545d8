"""Runs scripts as processes of their own without the seconds that each would spend importing torch.

A process that has imported torch forks one for each script. What is begun by `command()` is a small
client: it hands over its streams, its environment and the signals that it gets, and ends as the
script does. Streams are closed or encoded as Python made them when the client started; what a test says
of the rest of its start needs `[sys.executable, script]`.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def command(script) -> list[str]:
    """What to run instead of `python script`; elsewhere than on Linux that itself."""
    if not sys.platform.startswith("linux"):
        return [sys.executable, str(script)]
    return [sys.executable, "-sS", __file__, address(), str(script)]


@functools.cache
def address() -> str:
    """Starts the process that forks, once; it ends with this one."""
    folder = tempfile.TemporaryDirectory()
    path = f"{folder.name}/socket"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
    environment.pop("PYTHONIOENCODING", None)
    # Pipes all: Python's streams remember that what they stand on cannot be sought in.
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    server = subprocess.Popen([sys.executable, __file__, path], env=environment, **pipes)
    atexit.register(lambda: (server.communicate(), folder.cleanup()))
    assert server.stdout.readline() == b"ready\n"
    return path


def receive(connection: socket.socket) -> bytes:
    """What was sent by send(). Nothing if the other side has gone."""
    size = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL) or bytes(4))[0]
    return connection.recv(size, socket.MSG_WAITALL) if size else b""


def send(connection: socket.socket, value) -> None:
    data = json.dumps(value).encode()
    connection.sendall(struct.pack("<I", len(data)) + data)


def client(path: str, *argv: str) -> None:
    """Have argv run with these streams; end as it does."""
    standard = (sys.stdin, sys.stdout, sys.stderr)  # None where there is none
    streams = [stream and (stream.encoding, stream.errors) for stream in standard]
    for _ in range(streams.count(None)):
        os.open(os.devnull, os.O_RDWR)  # takes the number of a closed stream
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    socket.send_fds(connection, [b"3"], [0, 1, 2])
    send(connection, [argv, dict(os.environ), os.getcwd(), streams])
    pid = json.loads(receive(connection))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    for stream in range(3):  # they are the script's alone now
        os.dup2(os.open(os.devnull, os.O_RDWR), stream)
    status = json.loads(receive(connection))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def serve(path: str) -> None:
    """Returns in a forked process, ready to be the script; the first one ends with its stdin."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    os.write(1, b"ready\n")
    while listener in select.select([listener, 0], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        argv, environment, folder, states = json.loads(receive(connection))
        if pid := os.fork():
            for stream in (0, 1, 2, *streams):
                os.close(stream)
            send(connection, pid)
            send(connection, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            os._exit(0)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # though pytest runs under nohup
        for stream, sent in enumerate(streams):
            os.dup2(sent, stream)
            os.close(sent)
        connection.close()
        listener.close()
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            if states[number] is None:
                os.close(number)
                setattr(sys, name, None)
            else:
                encoding, errors = states[number]
                getattr(sys, name).reconfigure(encoding=encoding, errors=errors)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv, sys.path[0] = argv, str(Path(argv[0]).resolve().parent)
        return
    while True:
        try:
            os.wait()
        except ChildProcessError:
            os._exit(0)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        client(*sys.argv[1:])
    sys.path.insert(0, str(ROOT))
    import gguf  # noqa: F401
    import sentencepiece  # noqa: F401

    import llama2  # noqa: F401

    try:
        import starlette.applications
        import starlette.responses
        import starlette.routing  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError:
        pass
    import torch.distributed.run

    scripts = (ROOT / "llama2.py", ROOT / "examples" / "server.py", torch.distributed.run.__file__)
    codes = {str(path): compile(Path(path).read_bytes(), path, "exec") for path in scripts}
    serve(sys.argv[1])
    script = sys.argv[0]
    code = codes.get(script) or compile(Path(script).read_bytes(), script, "exec")
    status = 0
    try:
        exec(code, {"__name__": "__main__", "__file__": script})  # noqa: S102
    except SystemExit as end:
        status = end.code or 0
    # Python's own end, without the time in which it takes torch apart.
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            status = 120
    os._exit(status)
