"""Make the pictures of the docs from real output: ``make pictures``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

# rich's own frame loads a font from the network; this one uses the reader's fonts.
FRAME = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; font-variant-east-asian: full-width; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs><clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>{lines}</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g></svg>
"""


def save(screen: Console, name: str, title: str) -> None:
    """Write a recorded console as SVG."""
    text = screen.export_svg(title=title, code_format=FRAME, unique_id=name)
    (ROOT / "docs" / "images" / f"{name}.svg").write_text(text, encoding="utf-8")


def recorder(width: int) -> Console:
    """Return a console that records without output."""
    return Console(
        record=True, width=width, file=open(os.devnull, "w"), force_terminal=True, force_interactive=False
    )


def demo() -> None:
    """Record the final table of ``make demo``."""
    import demo as program

    screen = recorder(104)
    program.main(["--plain"], screen)
    save(screen, "demo", "make demo")


def play() -> None:
    """Record a few moves of Sokoban in a terminal."""
    from rollgym.cli.play import PlaySession
    from rollgym.core.registry import make

    screen = recorder(72)
    session = PlaySession(screen, make("rollgym/Sokoban-v0"), "rollgym/Sokoban-v0", {})
    moves = iter(["/hint", "down", "/quit"])

    def typed(prompt: str = "", **_: object) -> str:
        word = next(moves)
        screen.print(f"{prompt}{word}", highlight=False)
        return word

    screen.input = typed  # type: ignore[assignment]
    session.play({"task": 3, "split": "test"}, seed=1)
    save(screen, "play", "rollgym play rollgym/Sokoban-v0")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        demo()
        play()
