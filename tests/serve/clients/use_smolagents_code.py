"""A code agent of smolagents."""

import os
import sys

from smolagents import CodeAgent, OpenAIServerModel, tool


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: The city.
    """
    return f"Rain in {city}."


model = OpenAIServerModel(
    model_id=os.environ["OPENAI_MODEL"],
    api_base=os.environ["OPENAI_BASE_URL"],
    api_key=os.environ["OPENAI_API_KEY"],
)
stream = sys.argv[1] == "stream"
agent = CodeAgent(tools=[get_weather], model=model, max_steps=4, stream_outputs=stream, verbosity_level=0)
answer = agent.run("How is Oslo?")
print(f"\n{answer}")
