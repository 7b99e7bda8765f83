"""An agent of smolagents with a tool: ``use_smolagents.py tool|code whole|stream``."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, ToolCallingAgent, tool

AGENTS = {"tool": ToolCallingAgent, "code": CodeAgent}


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: The city.
    """
    return f"Rain in {city}."


kind, form = sys.argv[1:]
model = OpenAIServerModel(
    model_id=os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
agent = AGENTS[kind](
    tools=[get_weather], model=model, max_steps=4, stream_outputs=form == "stream", verbosity_level=0
)
answer = agent.run("How is Oslo?")
print(f"\n{answer}")
