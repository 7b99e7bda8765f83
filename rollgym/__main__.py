"""``python -m rollgym`` is the ``rollgym`` command."""

from rollgym.cli import main

main()
