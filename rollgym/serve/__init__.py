"""An endpoint for clients of OpenAI and Anthropic that records episodes: any program can be trained.

Conversations of clients become episodes, with the sampled token ids, their log-probs and the versions of the
weights (docs/serve.md)::

    async with RecordingServer(engine, tokenizer) as server:
        agent = SubprocessAgent(server, ["python", "my_agent.py"])
        episode = await agent.play(spec)

Nothing here imports torch or transformers; starlette and uvicorn are imported when a server starts.
"""

from rollgym.sandbox.launcher_child import ProgramEpisode
from rollgym.serve.options import ServeOptions
from rollgym.serve.program import Program
from rollgym.serve.server import RecordingServer
from rollgym.serve.subprocess_agent import SubprocessAgent

__all__ = ["Program", "ProgramEpisode", "RecordingServer", "ServeOptions", "SubprocessAgent"]
