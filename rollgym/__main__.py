"""Entry point of ``python -m rollgym``: the ``rollgym`` command."""

from rollgym.cli import main

main()
