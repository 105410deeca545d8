"""A task of two calls, by real agents: what they say must have the number, and both tools be called.

    python examples/server --model agent.gguf --chat-template tests/agents/template.jinja   # train.py made it
    pip install openai-agents && python tests/agents/run.py openai_agents http://127.0.0.1:8080/v1

Also langgraph (pip install langgraph langchain-openai), pydantic_ai ("pydantic-ai-slim[openai]"),
smolagents ("smolagents[openai]") and strands ("strands-agents[openai]"); vercel.mjs has Vercel's SDK.
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


if __name__ == "__main__":
    for answer in globals()[sys.argv[1]](sys.argv[2]):
        print(f"{sys.argv[1]}: {', '.join(CALLED)}: {answer.strip()}")
        assert CALLED == ["get_temperature Rome", "to_fahrenheit 20"]
        assert "68" in answer
        CALLED.clear()
