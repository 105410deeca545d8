"""Coding programs write a file, by the model of scripted.py: python tests/agents/programs.py NAME URL

Each gets an address, a key and a model, and is asked once in a folder of its own, by its command without
a terminal. URL ends in /v1. npm install --prefix FOLDER @openai/codex @qwen-code/qwen-code opencode-ai
@github/copilot, and pip install aider-chat; their commands must be in PATH.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TEXT = "hello from the model"


def codex(url, question):
    """By /v1/responses, the only interface that it has."""
    provider = f'{{name="local", base_url="{url}", wire_api="responses", env_key="OPENAI_API_KEY"}}'
    settings = [
        "-c",
        f"model_providers.local={provider}",
        "-c",
        'model_provider="local"',
        "-m",
        "any",
    ]
    settings += ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    closed = "http://127.0.0.1:9"  # where updates are looked for
    variables = {"HTTP_PROXY": closed, "HTTPS_PROXY": closed, "NO_PROXY": "127.0.0.1"}
    return ["codex", "exec", *settings, question], variables, {}


def qwen(url, question):
    variables = {"OPENAI_BASE_URL": url, "OPENAI_MODEL": "any"}
    settings = {
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    files = {".qwen/settings.json": json.dumps(settings)}
    return ["qwen", "--auth-type", "openai", "--yolo", "-p", question], variables, files


def opencode(url, question):
    """By chats."""
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": url, "apiKey": "any"},
        "models": {"any": {}},
    }
    settings = {"provider": {"local": provider}, "model": "local/any", "autoupdate": False}
    return ["opencode", "run", question], {}, {"opencode.json": json.dumps(settings)}


def copilot(url, question, wire="responses"):
    variables = {
        "COPILOT_PROVIDER_BASE_URL": url,
        "COPILOT_PROVIDER_API_KEY": "any",
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_WIRE_API": wire,
        "COPILOT_MODEL": "any",
        "COPILOT_OFFLINE": "true",
    }
    return ["copilot", "--allow-all-tools", "-p", question], variables, {}


def copilot_chats(url, question):
    return copilot(url, question, "completions")


def aider(url, question):
    """It writes what the answer shows."""
    options = ["--model", "openai/any", "--yes-always", "--no-git", "--edit-format", "whole"]
    options += ["--no-show-model-warnings", "--message", question, "hello.txt"]
    return ["aider", *options], {"OPENAI_API_BASE": url}, {}


if __name__ == "__main__":
    name, url = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder).resolve()
        work, home = folder / "work", folder / "home"
        work.mkdir()
        home.mkdir()
        question = f"Write the text {TEXT!r} into the file hello.txt. FOLDER={work}"
        command, variables, files = globals()[name](url, question)
        for file, text in files.items():
            (work / file).parent.mkdir(exist_ok=True)
            (work / file).write_text(text)
        variables |= {"OPENAI_API_KEY": "any", "HOME": str(home), "PATH": os.environ["PATH"]}
        ran = subprocess.run(
            command, cwd=work, env=variables, stdin=subprocess.DEVNULL, check=False, timeout=100,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        written = work / "hello.txt"
        said = written.read_text().strip() if written.exists() else None
        print(f"{name}: status {ran.returncode}, hello.txt: {said}")
        if ran.returncode or said != TEXT:
            sys.exit(ran.stdout[-4000:])
