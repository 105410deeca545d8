"""Tests of examples/training/dialogues.py: what is learned of dialogues, and how their files are read.

TEMPLATES names a folder of chat templates (*.jinja), such as models/templates of llama.cpp, which
are then tried, too. The oracles are marks, in a computation of our own, and the masks of transformers.
"""

import json
import os
import re
from contextlib import suppress
from os.path import commonprefix
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
template_utils = pytest.importorskip("transformers.utils.chat_template_utils")

from test_chat import FAMILIES, folder, load, load_theirs, text_of
from training import dialogues

import llama2
from test_llama2 import dialogue, raises

# What they write of an answer is not what they write of the same answer in a history.
OURS = {
    "thinks": """{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if loop.last %}
{{- m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}{{ '<|im_end|>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "thinks in the prompt, and leaves the end open": """{% for m in messages %}
{{- '<|im_start|>' + m.role + ' ' + m.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant <think>' }}{% endif %}""",
    "always writes a header": """{% for m in messages %}
{{- '<|im_start|>' + m.role + ' ' + m.content + eos_token }}{% endfor %}{{ '<|im_start|>assistant' }}""",
}
FILES = sorted(Path(os.environ.get("TEMPLATES", "nowhere")).glob("*.jinja"))
TEMPLATES = {name: template for name, (template, *_) in FAMILIES.items()}
TEMPLATES |= OURS | llama2.CHAT_TEMPLATES | {path.stem: path.read_text("utf-8") for path in FILES}
# Control tokens that templates write.
TAG = r"<\|[\w:]+\|>|<\uff5c[^<>]+?\uff5c>|\[/?[A-Z_]+\]|</?(?:start_of_turn|end_of_turn|think)>"


TOOLS = json.loads("""[{"type": "function", "function": {"name": "wind", "description": "d", "parameters":
{"type": "object", "properties": {"city": {"type": "string", "description": "c"}}}}}]""")
SHAPES = json.loads("""{
"system": [{"role": "system", "content": "SYS1"}, {"role": "user", "content": "QUE1"},
{"role": "assistant", "content": "ANS1"}],
"turns": [{"role": "user", "content": "QUE1"}, {"role": "assistant", "content": "ANS1"},
{"role": "user", "content": "QUE2"}, {"role": "assistant", "content": "ANS2"},
{"role": "user", "content": "QUE3"}, {"role": "assistant", "content": "ANS3"}],
"tools": [{"role": "user", "content": "QUE1"},
{"role": "assistant", "content": "", "tool_calls": [{"id": "abcdefgh1", "function": {"name": "wind",
"arguments": {"city": "ROME"}}}]},
{"role": "tool", "content": "RES1", "tool_call_id": "abcdefgh1"}, {"role": "assistant", "content": "ANS2"}],
"reasoning": [{"role": "user", "content": "QUE1"},
{"role": "assistant", "content": "ANS1", "reasoning_content": "THO1"},
{"role": "user", "content": "QUE2"}, {"role": "assistant", "content": "ANS2", "reasoning": "THO2"}],
"two answers": [{"role": "user", "content": "QUE1"}, {"role": "assistant", "content": "ANS1"},
{"role": "assistant", "content": "ANS2"}],
"weights": [{"role": "user", "content": "QUE1"}, {"role": "assistant", "content": "ANS1", "weight": 0},
{"role": "user", "content": "QUE2"}, {"role": "assistant", "content": "ANS2", "weight": 1}]
}""")
WORD = re.compile("(?:SYS|QUE|ANS|RES|THO)\\d|ROME")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")


def render(template, messages, tools, prompt):
    """The text of a dialogue by transformers."""
    return template_utils._compile_jinja_template(template).render(
        messages=messages,
        tools=tools,
        documents=None,
        add_generation_prompt=prompt,
        bos_token="<s>",
        eos_token="</s>",
    )


def normal(given):
    """A message as templates expect it."""
    message = {key: value for key, value in given.items() if key != "weight"}
    for thought in {message.get(name) for name in THOUGHTS} - {None}:
        message |= dict.fromkeys(THOUGHTS, thought)
    if message["role"] == "tool":
        message["name"] = "wind"
    if "tool_calls" in message:
        message["tool_calls"] = [call | {"type": "function"} for call in message["tool_calls"]]
    return message


def marked(template, messages, tools, i):
    """The text before an answer, and the answer. The last word before it is the mark: behind that
    the prompt and the turn are the same, up to the answer, or to where the prompt begins to think."""
    prompt = render(template, messages[:i], tools, True)
    turn = render(template, messages[: i + 1], tools, False)
    word = WORD.findall(json.dumps(messages[i - 1]))[-1]
    assert word in prompt and word in turn
    asked, answered = (text.rpartition(word)[2] for text in (prompt, turn))
    common = commonprefix([asked, answered])
    if common != asked:
        common = re.sub(r"[<\[][^>\]]*$", "", common)
    answer = answered[len(common) :]
    last = ""
    with suppress(TypeError):  # a template that takes no dialogue without tools
        last = render(template, SHAPES["two answers"][:2], None, False)
    if "</s>" in answer:
        answer = answer[: answer.rindex("</s>") + 4]
    elif not last.rpartition("ANS1")[2].strip():  # the template leaves open where an answer ends
        answer += "</s>"
    assert {*WORD.findall(json.dumps(messages[i]))} == {*WORD.findall(answer)}
    assert not tools or "wind" in prompt
    return prompt[: len(prompt) - len(asked) + len(common)], answer


def learned_in(tokenizer, samples):
    """(what comes before, what is learned) of each answer, in the order of the dialogue."""
    found = []
    for tokens, learned in samples:
        ids, learned = tokens.tolist(), learned.tolist()
        starts = [i for i in range(1, len(ids)) if learned[i] and not learned[i - 1]]
        for start in starts:
            end = ([*learned[start:], False]).index(False) + start
            found.append((text_of(tokenizer, ids[:start]), text_of(tokenizer, ids[start:end])))
    return sorted(found, key=lambda pair: len(pair[0]))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_learned(tmp_path, name, shape):
    """What the assistant says and what ends it, behind the prompt for it; or the row is refused,
    because the template raises, or leaves out what is said."""
    template, given = TEMPLATES[name], SHAPES[shape]
    tags = dict.fromkeys(["<s>", "</s>", *re.findall(TAG, template)], True)
    tokenizer = load(folder(tmp_path, template, tags))
    tools = TOOLS if shape == "tools" else None
    messages = [normal(message) for message in given]
    wanted = [i for i, m in enumerate(given) if m["role"] == "assistant" and m.get("weight", 1)]
    try:
        expected = [marked(template, messages, tools, i) for i in wanted]
    except Exception:  # noqa: BLE001
        expected = None
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": given, "tools": tools}), "utf-8")
    try:
        found = learned_in(tokenizer, dialogues.read_samples(path, tokenizer, None))
    except ValueError as error:
        assert expected is None, error
    else:
        if shape == "two answers":  # in one sequence, with nothing between them
            (before, answer), (start, more) = expected
            if (start + more).startswith(before + answer) and len(start) <= len(before + answer):
                expected = [(before, (start + more).removeprefix(before))]
        assert found == expected


# Ten templates with transformers' tag: what stands before an answer, the answer, another message.
GENERATION = r"""
'<|im_start|>assistant\n' | m.content + '<|im_end|>\n' | '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n'
'<|im_start|>assistant\n' | '<think>\n\n</think>\n\n' + m.content + '<|im_end|>' | m.role + m.content
'<|start_header_id|>assistant<|end_header_id|>\n\n' | m.content | trim + '<|eot_id|>' | '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>'
'<|assistant|>\n' | m.content + eos_token | '<|' + m.role + '|>\n' + m.content + '</s>\n'
'ASSISTANT:' | ' ' + m.content | trim + eos_token | m.role | upper + ': ' + m.content + '\n'
'<start_of_turn>model\n' | m.content | trim + '<|im_end|>\n' | '<start_of_turn>user\n' + m.content + '<end_of_turn>\n'
'' | ' ' + m.content | trim + eos_token | '[INST] ' + m.content + ' [/INST]'
'' | m.content + eos_token | bos_token + '[INST]' + m.content + '[/INST]'
'<|im_start|>assistant' | '\n' + m.content + '<|im_end|>' | '<|im_start|>user\n' + m.content + '\n'
'### Response:\n' | m.content + '\n<|eot_id|>\n' | '### ' + m.role + ':\n' + m.content + '\n'
"""
TAGGED = """{% for m in messages %}{% if m.role == 'assistant' %}{{ HEADER }}{% generation %}
{{- ANSWER }}{% endgeneration %}{% else %}{{ OTHER }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ HEADER }}{% endif %}"""
SPOKEN = ["s:Be~kind. u:hi~ a:yes", "u:a a:~b~ u:c a:d", "u:\u65e5 a:caf\u00e9 a:'x'"]


@pytest.mark.parametrize("parts", GENERATION.strip().split("\n"))
def test_masks_of_transformers(tmp_path, parts):
    template = TAGGED
    for name, part in zip(
        ("HEADER", "ANSWER", "OTHER"), re.split(r" \| (?!trim|upper)", parts), strict=True
    ):
        template = template.replace(name, part)
    path = folder(tmp_path / "model", template)
    tokenizer, theirs = load(path), load_theirs(path)
    rows = tmp_path / "rows.jsonl"
    for said in SPOKEN:
        rows.write_text(json.dumps({"messages": dialogue(said)}))
        (sample,) = dialogues.read_samples(rows, tokenizer, None)
        expected = theirs.apply_chat_template(
            dialogue(said), return_dict=True, return_assistant_tokens_mask=True
        )
        assert sample.tokens.tolist() == expected["input_ids"]
        assert sample.learned.tolist() == [*map(bool, expected["assistant_masks"])]


# --------------------------------------------------------------------------------------------------
# Files, as their writers mean them

QWEN = """{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}
{{- '<|im_end|>\n' }}{% endif %}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'tool' %}{{ m.name + ': ' }}{% endif %}
{%- if m.reasoning_content %}{{ '<think>' + m.thinking + '</think>' }}{% endif %}{{ m.content }}
{%- for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name + c.type }}
{{- c.function.arguments | tojson }}{% endfor %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
END = "<|im_end|>"
ASKED = '{"role": "user", "content": "a"}'
WIND = '{"type": "function", "function": {"name": "wind"}}'
# A row, and what is learned of it.
ROWS = (
    r"""
{"messages": [ASKED, {"role": "assistant", "content": "b"}]} | bEND
{"messages": [{"role": "developer", "content": "s"}, ASKED, {"role": "assistant", "content": "b", "weight": null}]} | bEND
{"messages": [ASKED, {"role": "assistant", "content": "b", "tool_calls": null, "name": null, "reasoning": null, "weight": 1.0}], "tools": null} | bEND
{"messages": [ASKED, {"role": "assistant", "content": "b", "weight": false}, ASKED, {"role": "assistant", "content": "c"}]} | cEND
{"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "image": null}]}, {"role": "assistant", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]}]} | b\ncEND
{"messages": [ASKED, {"role": "assistant", "content": "b\u2028c\u0085d\u2029"}]} | b\u2028c\u0085d\u2029END
{"messages": [ASKED, {"role": "assistant", "reasoning": "t", "content": "b"}]} | <think>t</think>bEND
{"messages": [ASKED, {"role": "assistant", "reasoning_content": "t", "content": "b"}]} | <think>t</think>bEND
{"messages": [ASKED, {"role": "assistant", "thinking": "t", "content": "b"}]} | <think>t</think>bEND
{"prompt": [ASKED, {"role": "assistant", "content": "b"}, ASKED], "completion": [{"role": "assistant", "content": "c"}]} | cEND
{"prompt": "a b", "completion": " c d"} |  c d</s>
{"prompt": "", "completion": "c d"} |  d</s>
{"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]} | bEND
{"conversations": [ASKED, {"role": "assistant", "content": "b"}]} | bEND
{"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "wind", "arguments": "{\"x\": 1}"}}]}], "tools": [WIND]} | <tool_call>windfunction{"x": 1}END
{"messages": [ASKED, {"role": "assistant", "content": "", "tool_calls": [{"id": "i", "type": "function", "function": {"name": "wind", "arguments": ""}}]}, {"role": "tool", "tool_call_id": "i", "content": "r"}, {"role": "assistant", "content": "c"}], "tools": "[WIND_]"} | <tool_call>windfunction{}END
{"messages": [ASKED, {"role": "assistant", "weight": 0, "tool_calls": [{"id": "i", "function": {"name": "wind", "arguments": ""}}]}, {"role": "tool", "tool_call_id": "i", "content": "r"}, {"role": "assistant", "content": "c"}], "tools": [WIND]} | cEND
{"messages": [ASKED, {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "wind", "arguments": {"x": "y", "z": null}}}]}], "tools": ["WIND_"]} | <tool_call>windfunction{"x": "y"}END
""".replace("WIND_", WIND.replace('"', r"\""))
    .replace("WIND", WIND)
    .replace("ASKED", ASKED)
)


@pytest.fixture
def reader(tmp_path):
    """reader(text, name) -> what is learned first in each sequence of a file with this text."""
    tokenizer = load(folder(tmp_path, QWEN))

    def read(text, name="rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        samples = dialogues.read_samples(path, tokenizer, None)
        return [learned_in(tokenizer, [sample])[0] for sample in samples]

    return read


@pytest.mark.parametrize("case", ROWS.strip().split("\n"))
def test_rows(reader, case):
    row, expected = case.split(" | ")
    expected = expected.replace("END", END).encode().decode("unicode-escape")
    ((before, learned),) = reader(row)
    assert learned == expected
    assert ("wind" in before) == ("wind" in row)
    assert ("tool\nwind: r<" in before) is ('"weight": 0' in row)  # results have a name


ROW = ROWS.strip().split("\n")[0].split(" | ")[0]


@pytest.mark.parametrize(
    "text",
    [
        f"{ROW}\n{ROW}\n",
        f"\ufeff\n{ROW}\r\n\n  \n{ROW}\n\n",
        f"[{ROW}, {ROW}]",
        f"\ufeff\n[\n  {ROW},\n  {ROW}\n]\n",
    ],
)
def test_files(reader, text):
    """Lines, which end at "\\n", or an array."""
    assert [learned for _, learned in reader(text)] == [f"b{END}"] * 2


WRONG = r"""
{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]} | line 2: damaged: KeyError 'text'
{"messages": 5} | line 2: expected messages, conversations, or prompt and completion
{"prompt": "a", "completion": [ASKED]} | line 2: expected messages
[5] | line 2: expected messages
{"messages": [ASKED | line 2: Expecting ',' delimiter
{"messages": [ASKED]} | line 2: there is no answer to learn
{"messages": [{"role": "assistant", "content": "b"}]} | line 2: there is no answer to learn
{"messages": [ASKED, {"role": "assistant", "content": "b", "weight": 0}]} | line 2: there is no answer to learn
{"messages": [ASKED, {"role": "assistant", "content": "b", "weight": 0.5}]} | line 2: the weights are .1, 0.5.; expected 0 or 1
{"messages": [ASKED, {"role": "assistant", "content": ""}]} | line 2: an answer says nothing
{"messages": [ASKED, {"role": "assistant", "function_call": {"name": "wind"}}]} | line 2: an answer says nothing
{"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "wind", "arguments": "x"}}]}]} | line 2: Expecting value
{"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "wind", "arguments": "[1]"}}]}]} | line 2: damaged
{"messages": [ASKED, {"role": "assistant", "content": "b"}], "tools": "x"} | line 2: Expecting value
{"conversations": [{"from": "human", "value": "a"}, {"from": "bard", "value": "b"}]} | line 2: damaged: KeyError 'bard'
[[[[[[ | line 2: Expecting value
""".replace("ASKED", ASKED)


@pytest.mark.parametrize("case", WRONG.strip().split("\n"))
def test_rows_that_cannot_be_read(reader, case):
    row, said = case.split(" | ")
    raises(rf"rows.jsonl: 1 rows .*: {said}", reader, f"{ROW}\n{row}\n")


def test_up_to_five_rows_are_named(reader):
    with pytest.raises(ValueError, match="7 rows .*: line 2: .*line 4: .*") as error:
        reader("\n".join([ROW, *["{}", ROW] * 7]))
    assert str(error.value).count("line") == 5
    raises("row 2: expected messages", reader, f"[{ROW}, {{}}]")
    raises("rows.json: Expecting", reader, f"[{ROW}\n{ROW}]", "rows.json")
    raises("rows.jsonl: .*utf-8", reader, ROW.encode("utf-16"))


LEFT_OUT = r"""
chatml | {"messages": [ASKED, {"role": "assistant", "content": "b"}], "tools": [WIND]} | 'wind', of a tool
chatml | {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "wind"}}]}]} | 'wind', of
chatml | {"messages": [ASKED, {"role": "assistant", "content": "b", "reasoning": "t u"}]} | 'tu', of a tool or an answer
{% for m in messages %}{{ m.content.split('</think>')[-1] }}{% endfor %} | {"messages": [ASKED, {"role": "assistant", "content": "<think>t</think>b"}]} | 't'
{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %} | {"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": {"name": "wind", "arguments": {"x": 1}}}]}]} | 'x'
{% for m in messages %}{% if loop.last or m.role == 'assistant' %}{{ m.role }}{% endif %}{% endfor %}{{ messages[-1].content }} | {"messages": [ASKED, {"role": "assistant", "content": "b"}]} | does not show where
"""
LEFT_OUT = LEFT_OUT.replace("WIND", WIND).replace("ASKED", ASKED)


@pytest.mark.parametrize("case", LEFT_OUT.strip().split("\n"))
def test_what_a_template_leaves_out(tmp_path, case):
    """Tools, calls, reasoning, arguments; and a template of which nobody can tell."""
    template, row, said = case.split(" | ")
    tokenizer = load(folder(tmp_path, None))
    (tmp_path / "rows").write_text(row)
    raises(rf"line 1: .*{said}", dialogues.read_samples, tmp_path / "rows", tokenizer, template)
