"""An OpenAI-compatible endpoint that records: any program that talks to a model can be trained.

A client's conversations come back as episodes, with the token ids that were sampled, their log-probs and the
versions of the weights (docs/serve.md)::

    async with RecordingServer(engine, tokenizer) as server:
        player = ProgramPlayer(server, ["python", "my_agent.py"])
        episode = await player.play(spec)

Nothing here imports torch or transformers; starlette and uvicorn are imported when a server starts.
"""

from rollgym.serve.options import ServeOptions
from rollgym.serve.program import ProgramPlayer
from rollgym.serve.server import RecordingServer

__all__ = ["ProgramPlayer", "RecordingServer", "ServeOptions"]
