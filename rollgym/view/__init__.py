"""The report page and the live page of a run: `rollgym view`.

    read.py       a run's folder, read line by line: bad lines are skipped and counted
    numbers.py    rates and means with intervals; overview.py: everything on the first page
    bodies.py     one episode as the page shows it; tokens.py, credit.py: what its tokens were and were worth
    timeline.py   the scheduler's events as lanes
    page.py       the HTML around it; export.py: one file; live.py: a server on loopback
    static/       our own script and style, put into the page as they are

Whatever an environment or a model wrote is data here: the script shows it as text, never as markup.
"""

from rollgym.view.export import Exported, export
from rollgym.view.read import RunView

__all__ = ["Exported", "RunView", "export"]
