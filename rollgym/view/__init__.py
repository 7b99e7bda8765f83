"""The report page and the live page of a run: `rollgym view`.

    reader.py          reads a run folder line by line; bad lines are skipped and counted
    overview.py        the first page: rates and means with intervals, curves, failures
    episode_detail.py  one episode: its turns, its tokens and their advantages
    timeline.py        the scheduler's events as lanes
    page.py            the HTML document; export.py: a single file; live.py: a server on loopback
    static/            script and style, embedded in the page

Text of environments and models is data: the script shows it as text, never as markup.
"""

from rollgym.view.export import Exported, export
from rollgym.view.reader import RunView

__all__ = ["Exported", "RunView", "export"]
