"""Pipes are counted by user: what one sandbox holds must not starve another one of the same user."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from attack_table import as_user, user_command

HOARD = """
import fcntl, os
hoard = []
size = 1 << 20
while size >= 4096:
    try:
        if len(hoard) > 100: break
        hoard.append(os.pipe())
        if fcntl.fcntl(hoard[-1][1], fcntl.F_SETPIPE_SZ, size) < size: size //= 2
    except OSError:
        size //= 2
print(fcntl.fcntl(os.pipe()[1], fcntl.F_GETPIPE_SZ))
"""
"""Takes and keeps all pages that a user's pipes may have; says what a new pipe then holds."""

SCRIPT = f"""
import json, sys
from rollgym.core.errors import RollgymError
from rollgym.sandbox.factory import open_sandbox
from rollgym.sandbox.types import Level, Limits, SandboxSettings
settings = SandboxSettings(backend=sys.argv[1], minimum=Level.NONE, limits=Limits(seconds=10))
try:
    agent, judge = open_sandbox(settings), open_sandbox(settings)
except RollgymError as error:
    print(json.dumps({{"missing": str(error)}}))
    raise SystemExit
held = agent.run({HOARD!r})
sums = [judge.exec("import sys; print(len(sys.stdin.read()))", stdin="x" * n).stdout for n in {{sizes}}]
spoken = judge.exec("print('y' * 300_000)", limits=Limits(seconds=10, output_chars=400_000)).stdout
print(json.dumps({{"held": held.stdout, "sums": sums, "spoken": len(spoken)}}))
agent.close(), judge.close()
"""


@pytest.mark.parametrize("backend", ["namespaces", "landlock"])
def test_an_execution_gets_its_input_when_another_sandbox_holds_all_pipe_pages(backend: str) -> None:
    sizes = [0, 100, 8_000, 30_000, 65_536, 200_000]
    try:
        command = user_command()
    except RuntimeError as error:
        pytest.skip(str(error))
    words = [*command, "-c", SCRIPT.replace("{sizes}", str(sizes)), backend]
    ran = subprocess.run(words, **as_user(), capture_output=True, text=True)  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    if "missing" in found:
        pytest.skip(found["missing"])
    assert int(found["held"]) < 1 << 16, "the pages were not all held: this shows nothing"
    assert [text.strip() for text in found["sums"]] == [str(size) for size in sizes]
    assert found["spoken"] == 300_001
