"""A rich console for text of others. Apart from `rollgym.terminal`, since rich is slow to import."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.errors import MarkupError
from rich.segment import Segment
from rich.text import Text

from rollgym.terminal import printable, raw


class SafeConsole(Console):
    """Colors and tables as rich makes them; control characters in the text are written out, without links."""

    @property
    def file(self) -> IO[str]:
        """Where it writes: the stream below a guarded one, which would write out rich's own codes."""
        found: IO[str] = raw(super().file)
        return found

    @file.setter
    def file(self, new: IO[str]) -> None:
        self._file = new

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What a renderable prints, printable."""
        for text, style, control in super().render(renderable, options):
            if control:
                yield Segment(text, style, control)
            else:
                plain = style.update_link(None) if style is not None and style.link else style
                yield Segment(printable(text), plain)

    def render_str(self, text: str, **how: Any) -> Text:
        """Text with rich's markup; as it is where brackets in it only look like markup."""
        try:
            return super().render_str(text, **how)
        except MarkupError:
            return super().render_str(text, **{**how, "markup": False})
