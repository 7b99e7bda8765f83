"""An episode as text for a judge."""

from __future__ import annotations

from rollgym.core.types import Episode


def transcript(episode: Episode, longest: int | None = None) -> str:
    """Return the transcript of an episode; above ``longest`` characters the middle is left out."""
    lines = [f"Instructions:\n{episode.instructions.strip()}"] if episode.instructions.strip() else []
    for number, turn in enumerate(episode.turns, 1):
        reply = turn.action if turn.response is None else turn.response
        lines.append(f"Observation {number}:\n{turn.observation}")
        lines.append(f"Reply {number}:\n{reply}")
    lines.append(f"At the end:\n{episode.final_observation}")
    text = "\n\n".join(lines)
    if longest is None or len(text) <= longest:
        return text
    head = longest // 2
    tail = longest - head
    return f"{text[:head]}\n[{len(text) - longest} characters left out]\n{text[len(text) - tail :]}"
