"""Wrong values of every option of every script: one line on stderr that names it, exit status 2.

The parsers say which options there are. A new script needs its command here.
"""

import io
import itertools
import re
import runpy
import shlex
import signal
import sys
from unittest.mock import MagicMock, patch

import pytest

import llama2
from test_llama2 import SCRIPT, TALE, one_line, ran, table, write_files

ROOT = SCRIPT.parent
COMMANDS = """
llama2.py | --model {model} --chat --quiet
bench_llama2.py | --model {model} --perplexity {files}/schema --context 32
models/train.py | {files}/text --out new.gguf --epochs 0.01 --batch 64 --threads 1 --vocab 340 --hidden 8 --mlp 8 --layers 1 --heads 2
examples/batch.py | {prompt} a --model {model} --max-new-tokens 4 --seed 9223372036854775807
examples/confidence.py | {prompt} --model {model} --max-new-tokens 1
examples/convert.py | {model} new.gguf
examples/drafts.py | {prompt} --model {model} --max-new-tokens 9
examples/lens.py | {prompt} --model {model}
examples/lora.py | --model {model} --data {files}/text --steps 1 --out new.gguf
examples/schema.py | --model {model} --schema {files}/schema --prompt {prompt} --max-new-tokens 1
examples/server/__main__.py | --model {model} --port 0 --quiet
"""
COMMANDS = dict(table(COMMANDS))  # of each script, one that ends soon
WRITTEN = {  # to stdout, by a script that is tested nowhere else
    "examples/batch.py": r"(?s)fox.*\n\na.*\n\n",
    "examples/drafts.py": r"(?s).*tokens/s.*tokens/s.*the same text: True.*",
}
VALUES = "0 -1 nan inf word no/such/file raw.bin"  # the last: a file that is no text
RIGHT = {  # values: the options that take them; all others take none
    "0": "--decay --depth --draft --epochs --max-new-tokens --min-p --port --seed --top-p --warmup"
    " --weight-decay",
    "0 -1": "--temperature --top-k",  # greedy; all, as in llama.cpp
    "0 -1 nan inf word": "--out",  # a new file in a folder that exists
    "0 -1 nan inf word raw.bin": "--json --profile",  # or one that is replaced
    VALUES: "--api-key --cors --prompt --stop --system"  # any text
    " --questions --text",  # or of a mode that is not chosen
}
RIGHT_HERE = {
    ("llama2.py", "--seed"): "0 -1",  # a random one
    ("llama2.py", "--max-new-tokens"): "0 -1",  # no limit
    ("models/train.py", "--out"): "",  # .gguf
    ("examples/lora.py", "--adapter"): "0 -1 nan inf word no/such/file",  # a folder, which is made
    ("examples/server/__main__.py", "--host"): VALUES,
}


@pytest.fixture
def run(cli_path, tmp_path, monkeypatch, capsys):
    """Run a script in a folder of its own: run(script, options) -> exit status, stdout, stderr."""
    write_files(tmp_path, {"text": TALE.replace("\n", "\n\n") * 20, "schema": {"title": TALE}})
    count = itertools.count()
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr("torch.set_flush_denormal", MagicMock())
    monkeypatch.setattr("socket.create_server", MagicMock())

    def end(number, handler):
        if handler is signal.default_int_handler:  # the server's
            raise KeyboardInterrupt

    monkeypatch.setattr("signal.signal", end)

    def run(script, *options, prompt="fox"):
        folder = write_files(tmp_path / f"{next(count)}", {"raw.bin": b"\xff\xfe\0"})
        monkeypatch.chdir(folder)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
        command = COMMANDS[script].format(
            model=cli_path.as_posix(), files=tmp_path.as_posix(), prompt=prompt
        )
        monkeypatch.setattr("sys.argv", [script, *shlex.split(command), *options])
        with pytest.raises(SystemExit) as end:
            if script == "llama2.py":
                sys.exit(llama2.main())
            runpy.run_path(str(ROOT / script), run_name="__main__")
            sys.exit(0)
        status, (out, err) = end.value.code, capsys.readouterr()
        if "pip install" in f"{status} {err}":
            pytest.skip("a package is not installed")
        return status, out, err

    return run


SCRIPTS = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.py", "examples/*.py", "examples/*/__main__.py", "models/*.py")
    for path in ROOT.glob(pattern)
    if "Parser(" in path.read_text("utf-8")
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_wrong_values(run, script):
    fine = int(script == "examples/schema.py")  # 1: its answer is cut at --max-new-tokens
    status, out, _ = run(script)
    assert status == fine and re.fullmatch(WRITTEN.get(script, "(?s).*"), out)
    with patch.object(llama2.Parser, "parse_args", autospec=True, side_effect=SystemExit) as parse:
        run(script)
    for action in parse.call_args.args[0]._actions:
        if not action.option_strings or action.nargs == 0:  # it takes no value
            continue
        option = action.option_strings[0]
        right = RIGHT_HERE.get(
            (script, option),
            "".join(values for values, options in RIGHT.items() if option in options.split()),
        )
        for value in VALUES.split():
            status, _, err = run(script, option, value)
            case = f"{script} {option} {value}: {status}, {err}"
            if value in right.split():
                assert status == fine, case
            else:
                assert (status, err.count("\n")) == (2, 1), case
                words = option.strip("-").replace("-", "[-_ ]")  # max_new_tokens, chat template
                assert re.search(f": .*({words}|{value})", err), case


PEERS = """
-hf x/y:Q4_K_M | --model
-ngl 99 | --device
-cnv | --chat
--file=x | --prompt-file
--ctx-size 512 | --context
--max_new_tokens 5 | --max-new-tokens
--repeat-penalty 1.1 | --repetition-penalty
-fa on | --help
-b 512 | unrecognized arguments: -b 512
--template x | unrecognized arguments: --template x
"""


def test_options_of_other_programs(run):
    """One line names ours, of the same script. -ngl is none of our -n, nor is -fa one of -f."""
    for option, ours in table(PEERS):
        said = (
            ours
            if "unrecognized" in ours
            else f"no option {re.split('[ =]', option)[0]}: see {ours}"
        )
        assert said in one_line(run("llama2.py", *option.split()))
    assert "no option --parallel" not in one_line(run("llama2.py", "--parallel", "2"))
    assert "no option -hf: see --model" in one_line(run("examples/lens.py", "-hf", "x"))
    assert "no option -np: see --help" in one_line(run("llama2.py", "-np", "2"))
    argv = ["-f", "x", "-sys", "s", "--chat", "--temp", "0.5", "-n5"]  # what is ours, too
    args = llama2.parse_args(argv)
    assert (str(args.prompt_file), args.system, args.temperature) == ("x", "s", 0.5)
    assert args.max_new_tokens == 5


PACKAGED = [script for script in SCRIPTS if "/" in script and "convert" not in script]
PACKAGED += [f"docs/make/{name}.py" for name in ("learn", "loads", "page", "several", "speed")]


@pytest.mark.parametrize("script", PACKAGED)
def test_a_missing_package_is_one_line(tmp_path, monkeypatch, script):
    (tmp_path / "torch.py").write_text("raise ImportError(name='torch')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    err = one_line(ran(sys.executable, ROOT / script.removesuffix("/__main__.py")))
    assert " is missing: pip install" in err  # torch, or what is not there anyway


PROMPTED = [name for name in COMMANDS if "{prompt}" in COMMANDS[name]]
PROMPTED.remove("examples/batch.py")  # it ends that prompt alone


@pytest.mark.parametrize("script", PROMPTED)
def test_a_prompt_without_tokens(run, write_tiny, script):
    """The empty one, of a vocabulary that puts no BOS in front."""
    path = write_tiny({"tokenizer.ggml.add_bos_token": False})
    assert "expected" in one_line(run(script, "--model", str(path), prompt="''"))
