"""What programs have in common that continue a prompt, answer it, or learn to. A module, no program."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama2


def add_options(parser: llama2.Parser, max_new_tokens: int) -> None:
    """The model, and how it writes; `max_new_tokens` is the default."""
    add = parser.add_argument
    limit = llama2.in_range(int, 0)
    add("--model", default=llama2.DEFAULT_MODEL, help="what llama2.load() reads")
    add("--max-new-tokens", metavar="N", type=limit, default=max_new_tokens)
    add("--temperature", metavar="X", type=float, help="default: the model's files, else 0.8")
    add("--seed", metavar="N", type=int, default=0)


def load(
    args: argparse.Namespace, device: str = "cpu", **options: Any
) -> tuple[llama2.Llama, llama2.Tokenizer, llama2.Sampling]:
    """What the options ask for, and where they do not, the model's files; `options` are others of
    llama2.load().
    """
    llama2.use_threads()
    model, tokenizer = llama2.load(args.model, device, "auto", progress=True, **options)
    sampling = replace(model.sampling, seed=args.seed)
    if args.temperature is not None:
        sampling = replace(sampling, temperature=args.temperature)
    return model, tokenizer, sampling


def read_template(option: str | None) -> str | None:
    """--chat-template, a name or a file, as llama2.encode_chat() takes it."""
    if not option or option in llama2.CHAT_TEMPLATES:
        return option
    with llama2.naming(Path(option)):
        return Path(option).read_text("utf-8")


def answer(
    model: llama2.Llama, tokenizer: llama2.Tokenizer, prompt: str, chat: bool, **options: Any
) -> llama2.TextStream:
    """The text after a prompt; `chat`: the answer to it as a question. Options are generate()'s."""
    if chat:
        messages = [{"role": "user", "content": prompt}]
        return llama2.chat(model, tokenizer, messages, **options)
    return llama2.stream_text(model, tokenizer, tokenizer.encode(prompt), **options)
