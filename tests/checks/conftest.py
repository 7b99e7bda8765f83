import sys
from pathlib import Path

# Environments are named by module here and in other processes, so the module must be importable.
HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)
