"""An agent of openai-agents with a tool, over chat."""

import asyncio
import os
import sys

from openai import AsyncOpenAI

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled  # noqa: TID251 - the package openai-agents


@function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"Rain in {city}."


async def main() -> None:
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(
        model=os.environ["OPENAI_MODEL"], openai_client=AsyncOpenAI(max_retries=0)
    )
    agent = Agent(name="Weather", instructions="Be brief.", model=model, tools=[get_weather])
    if sys.argv[1] == "stream":
        result = Runner.run_streamed(agent, "How is Oslo?")
        async for _ in result.stream_events():
            pass
    else:
        result = await Runner.run(agent, "How is Oslo?")
    print(result.final_output)


asyncio.run(main())
