"""A task of two calls, by real agents: what they say must have the number, and both tools be called.

    python examples/server --model agent.gguf --chat-template tests/agents/template.jinja   # train.py made it
    pip install openai-agents && python tests/agents/run.py openai_agents http://127.0.0.1:8080/v1

Also langgraph (pip install langgraph langchain-openai), pydantic_ai ("pydantic-ai-slim[openai]"),
smolagents ("smolagents[openai]"), strands ("strands-agents[openai]"), agent_framework
(agent-framework-core agent-framework-openai), semantic_kernel (semantic-kernel), agno (agno openai) and
litellm_loop (litellm); vercel.mjs has Vercel's SDK and agents.mjs OpenAI's in JavaScript.
"""

import sys

QUESTION = "What is the temperature in Rome in Fahrenheit?"
CALLED = []


def get_temperature(city: str) -> float:
    """The temperature in a city, in degrees Celsius.

    Args:
        city: The name of the city.
    """
    CALLED.append(f"get_temperature {city}")
    return 20.0


def to_fahrenheit(celsius: float) -> float:
    """Convert degrees Celsius to Fahrenheit.

    Args:
        celsius: The degrees Celsius.
    """
    CALLED.append(f"to_fahrenheit {celsius:g}")
    return celsius * 1.8 + 32


TOOLS = [get_temperature, to_fahrenheit]


def openai_agents(url):
    """By /v1/responses, its default, and by chats; each whole and streamed."""
    import asyncio

    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=url, api_key="any")
    settings = agents.ModelSettings(temperature=0)
    tools = [agents.function_tool(tool) for tool in TOOLS]

    async def stream(agent):
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    for make in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent("A", tools=tools, model=make("any", client), model_settings=settings)
        yield agents.Runner.run_sync(agent, QUESTION).final_output
        yield asyncio.get_event_loop().run_until_complete(stream(agent))


def langgraph(url):
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    for responses in (False, True):
        model = ChatOpenAI(
            model="any", base_url=url, api_key="any", temperature=0, use_responses_api=responses
        )
        agent = create_react_agent(model, TOOLS)
        question = {"messages": [("user", QUESTION)]}
        yield agent.invoke(question)["messages"][-1].text
        yield "".join(chunk.text for chunk, _ in agent.stream(question, stream_mode="messages"))


def pydantic_ai(url):
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    for make in (OpenAIChatModel, OpenAIResponsesModel):
        model = make("any", provider=OpenAIProvider(base_url=url, api_key="any"))
        agent = Agent(model, tools=TOOLS, model_settings={"temperature": 0})
        yield agent.run_sync(QUESTION).output
        with agent.run_stream_sync(QUESTION) as result:
            yield result.get_output()


def smolagents(url):
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    model = OpenAIServerModel("any", api_base=url, api_key="any", temperature=0)
    for stream in (False, True):
        tools = [tool(one) for one in TOOLS]
        agent = ToolCallingAgent(
            tools, model, stream_outputs=stream, max_steps=4, verbosity_level=0
        )
        yield str(agent.run(QUESTION))


def strands(url):
    from strands import Agent, tool
    from strands.models.openai import OpenAIModel

    options = {"client_args": {"base_url": url, "api_key": "any"}, "params": {"temperature": 0}}
    agent = Agent(
        OpenAIModel(model_id="any", **options), tools=[*map(tool, TOOLS)], callback_handler=None
    )
    yield str(agent(QUESTION))


def agent_framework(url):
    """Its default is /v1/responses with a store."""
    import asyncio

    from agent_framework import Agent
    from agent_framework.openai import OpenAIChatClient, OpenAIChatCompletionClient

    async def ask(client, streamed):
        agent = Agent(client=client, tools=TOOLS)
        if not streamed:
            return (await agent.run(QUESTION)).text
        stream = agent.run(QUESTION, stream=True)
        async for _ in stream:
            pass
        return (await stream.get_final_response()).text

    loop = asyncio.new_event_loop()
    for make in (OpenAIChatClient, OpenAIChatCompletionClient):
        for streamed in (False, True):
            yield loop.run_until_complete(
                ask(make(model="any", base_url=url, api_key="any"), streamed)
            )
    loop.run_until_complete(loop.shutdown_asyncgens())


def semantic_kernel(url):
    """Its agent of /v1/responses, which names the last answer, and that of chats."""
    import asyncio

    from openai import AsyncOpenAI
    from semantic_kernel.agents import ChatCompletionAgent, OpenAIResponsesAgent
    from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion
    from semantic_kernel.functions import kernel_function

    class Weather:
        get_temperature = staticmethod(kernel_function(get_temperature))
        to_fahrenheit = staticmethod(kernel_function(to_fahrenheit))

    async def ask(agent):
        return str((await agent.get_response(messages=QUESTION)).content)

    client = AsyncOpenAI(base_url=url, api_key="any")
    options = {"name": "A", "plugins": [Weather()]}
    loop = asyncio.new_event_loop()
    yield loop.run_until_complete(
        ask(OpenAIResponsesAgent(ai_model_id="any", client=client, **options))
    )
    service = OpenAIChatCompletion(ai_model_id="any", async_client=client)
    yield loop.run_until_complete(ask(ChatCompletionAgent(service=service, **options)))


def agno(url):
    from agno.agent import Agent
    from agno.models.openai import OpenAIChat, OpenAIResponses

    for make in (OpenAIResponses, OpenAIChat):
        agent = Agent(model=make(id="any", base_url=url, api_key="any"), tools=TOOLS)
        yield agent.run(QUESTION).content
        yield "".join(event.content or "" for event in agent.run(QUESTION, stream=True))


def litellm_loop(url):
    """A loop as its pages show it: each message goes back as it came, with an effort for thinking."""
    import json

    import litellm

    tools = []
    for tool, key, kind in (
        (get_temperature, "city", "string"),
        (to_fahrenheit, "celsius", "number"),
    ):
        schema = {"type": "object", "properties": {key: {"type": kind}}, "required": [key]}
        function = {"name": tool.__name__, "parameters": schema}
        tools.append({"type": "function", "function": function})
    options = {"model": "openai/any", "api_base": url, "api_key": "any", "tools": tools}
    messages = [{"role": "user", "content": QUESTION}]
    while True:
        reply = litellm.completion(
            messages=messages,
            **options,
            reasoning_effort="low",
            allowed_openai_params=["reasoning_effort"],
        )
        message = reply.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = globals()[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(result)})
    yield message.content


if __name__ == "__main__":
    for answer in globals()[sys.argv[1]](sys.argv[2]):
        print(f"{sys.argv[1]}: {', '.join(CALLED)}: {answer.strip()}")
        assert CALLED == ["get_temperature Rome", "to_fahrenheit 20"]
        assert "68" in answer
        CALLED.clear()
