"""An agent of openai-agents with a tool: ``use_agents.py chat|responses whole|stream``."""

import asyncio
import os
import sys

from openai import AsyncOpenAI

from agents import (  # noqa: TID251 - the package openai-agents
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


async def main(api: str, form: str) -> None:
    set_tracing_disabled(True)
    model = MODELS[api](model=os.environ["OPENAI_MODEL"], openai_client=AsyncOpenAI(max_retries=0))
    agent = Agent(name="Weather", instructions="Be brief.", model=model, tools=[get_weather])
    if form == "stream":
        result = Runner.run_streamed(agent, "How is Oslo?")
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "How is Oslo?")
    print(result.final_output)


asyncio.run(main(*sys.argv[1:]))
