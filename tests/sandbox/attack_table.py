"""Try every attack on every sandbox of this machine; print the table, or write it into the docs.

python tests/sandbox/attack_table.py --write
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from attacks import ATTACKS, Attack, Trial, Verdict, staged  # noqa: E402
from attacks.stage import NOBODY  # noqa: E402

from rollgym.core.errors import RollgymError  # noqa: E402
from rollgym.sandbox.types import Level, SandboxSettings  # noqa: E402

LEVELS = {
    "namespaces": Level.NAMESPACES,
    "docker": Level.NAMESPACES,
    "landlock": Level.LANDLOCK,
    "none": Level.NONE,
}
UNPRIVILEGED = " (user)"
"""Ends the name of a column that was run without root."""
COLUMNS = ["namespaces", "namespaces" + UNPRIVILEGED, "docker", "landlock", "landlock" + UNPRIVILEGED, "none"]
BEGIN, END = "<!-- table of attacks: begin -->", "<!-- table of attacks: end -->"
SUMMARY_BEGIN, SUMMARY_END = "<!-- summary of attacks: begin -->", "<!-- summary of attacks: end -->"
TABLE_PAGE = ROOT / "docs" / "security_tables.md"
SUMMARY_PAGE = ROOT / "docs" / "security.md"
Findings = dict[str, tuple[str, str]]
"""By the attack's name: the verdict and why."""

PROBE = """
import ctypes, os
libc = ctypes.CDLL(None)
spaces = []
for name in ("mnt", "net", "pid", "ipc"):
    try: spaces.append(os.readlink("/proc/self/ns/" + name))
    except OSError: spaces.append("hidden")
print(libc.prctl(21, 0, 0, 0, 0), libc.prctl(39, 0, 0, 0, 0), os.getuid(), *spaces)
"""


def settings(backend: str) -> SandboxSettings:
    """How to open a backend, however weak."""
    return SandboxSettings(backend=backend, minimum=Level.NONE, allow_unsafe=backend == "none")  # type: ignore[arg-type]


def claims(trial: Trial, backend: str) -> str | None:
    """What is untrue of what the sandbox says of its walls; attacks are tried only where nothing is."""
    sandbox = trial.open()
    if sandbox.backend != backend or sandbox.level != LEVELS[backend]:
        return f"asked for {backend}, got {sandbox.backend} of level {sandbox.level!r}"
    ran = trial.ask(PROBE)
    if not ran.ok:
        return f"the probe failed: {ran}"
    seccomp, privileges, uid, *spaces = ran.stdout.split()
    if sandbox.level >= Level.LANDLOCK and (seccomp, privileges) != ("2", "1"):
        return f"seccomp is {seccomp}, no_new_privs is {privileges}"
    if sandbox.level >= Level.LANDLOCK and uid == "0":
        return "the code runs as root"
    own = [os.readlink(f"/proc/self/ns/{name}") for name in ("mnt", "net", "pid", "ipc")]
    if sandbox.level >= Level.NAMESPACES and ("hidden" in spaces or set(own) & set(spaces)):
        return f"namespaces {spaces} are not its own"
    return None


def chosen(quick: bool, names: list[str] | None = None) -> list[Attack]:
    """The attacks to try."""
    if names:
        return [attack for attack in ATTACKS if attack.name in names]
    return [a for a in ATTACKS if not quick or a.control]


def tried(backend: str, attacks: list[Attack], say: bool = False) -> Findings:
    """Try attacks on a backend, with the rights of this process."""
    found: Findings = {}
    with staged() as stage:
        trial = Trial(stage, settings(backend))
        try:
            if wrong := claims(trial, backend):
                raise SystemExit(f"{backend} is not what it claims: {wrong}")
            for attack in attacks:
                start = time.monotonic()
                verdict, why = trial.attack(attack)
                found[attack.name] = (str(verdict), why)
                if say:
                    line = (
                        f"{backend:11} {attack.name:30} {verdict:10} {time.monotonic() - start:5.1f} s  {why}"
                    )
                    print(line[:230], file=sys.stderr, flush=True)
        finally:
            trial.close()
    return found


def user_command() -> list[str]:
    """An interpreter that a user without rights may start; raises where there is none."""
    python = "/usr/bin/python3"
    code = "import sys, rollgym.sandbox.factory, numpy; print(*sys.version_info[:2])"
    command = [python, "-B", "-c", code]
    ran = subprocess.run(command, **as_user(), capture_output=True, text=True)  # type: ignore[call-overload]
    if ran.returncode or ran.stdout.split() != [str(n) for n in sys.version_info[:2]]:
        raise RuntimeError(f"{python} cannot run rollgym as another user: {ran.stderr[-300:] or ran.stdout}")
    return [python, "-B"]


def as_user() -> dict[str, object]:
    """Options for `subprocess` to be somebody without rights."""
    paths = os.pathsep.join([str(ROOT), sysconfig.get_path("purelib")])
    env = {"PATH": "/usr/bin:/bin:/usr/sbin", "PYTHONPATH": paths, "LANG": "C.UTF-8", "HOME": "/nonexistent"}
    # A number of its own, so that processes of others do not count; in a container, only few exist.
    whole = "4294967295" in Path("/proc/self/uid_map").read_text()
    uid = 30_000_000 + os.getpid() if whole else NOBODY
    user = {"user": uid, "group": uid, "extra_groups": []} if os.getuid() == 0 else {}
    return {"env": env, "cwd": "/", **user}


def tried_as_user(backend: str, quick: bool, say: bool = False) -> Findings:
    """Try attacks in a process without rights."""
    words = ["--json", "--backend", backend] + ["--quick"] * quick
    command = [*user_command(), str(Path(__file__).resolve()), *words]
    errors = None if say else subprocess.PIPE
    ran = subprocess.run(command, **as_user(), stdout=subprocess.PIPE, stderr=errors, text=True)  # type: ignore[call-overload]
    if ran.returncode:
        raise RuntimeError(f"attacks without rights failed: {(ran.stderr or '')[-1000:]}")
    found: Findings = {name: (pair[0], pair[1]) for name, pair in json.loads(ran.stdout).items()}
    return found


def columns(wanted: list[str], quick: bool) -> dict[str, Findings]:
    """Every column that can be had here."""
    found: dict[str, Findings] = {}
    for column in wanted:
        backend = column.removesuffix(UNPRIVILEGED)
        try:
            if column != backend:
                found[column] = tried_as_user(backend, quick, say=True)
            else:
                found[column] = tried(backend, chosen(quick), say=True)
        except (RollgymError, RuntimeError) as error:
            print(f"{column}: not here: {error}", file=sys.stderr)
    return found


def cells(text: str) -> dict[str, dict[str, str]]:
    """The table of a page: by column, the verdict of each attack."""
    rows = [
        [c.strip() for c in line.strip().strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    head = next((row for row in rows if row[:1] == ["attack"]), [])
    body = [row for row in rows if row[0].startswith("`") and len(row) == len(head)]
    return {
        name: {row[0].strip("`"): row[i].strip("*") for row in body if row[i] != "–"}
        for i, name in enumerate(head)
        if i >= 2
    }


def table(verdicts: dict[str, dict[str, str]]) -> str:
    """Level by attack, as Markdown."""
    lines = ["| attack | it would gain | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 2) + "|"]
    for family in dict.fromkeys(attack.family for attack in ATTACKS):
        lines.append(f"| **{family}** |" + " |" * (len(COLUMNS) + 1))
        for attack in (a for a in ATTACKS if a.family == family):
            row = [verdicts.get(column, {}).get(attack.name, "–") for column in COLUMNS]
            marked = [f"**{v}**" if v == Verdict.SUCCEEDED else v for v in row]
            lines.append(f"| `{attack.name}` | {attack.gain} | " + " | ".join(marked) + " |")
    return "\n".join(["", summary(verdicts), "", *lines, ""])


def summary(verdicts: dict[str, dict[str, str]]) -> str:
    """How many of each verdict, by column."""
    lines = ["| | " + " | ".join(map(str, Verdict)) + " |", "|---" * (len(Verdict) + 1) + "|"]
    for column in (c for c in COLUMNS if verdicts.get(c)):
        counts = [list(verdicts[column].values()).count(str(v)) for v in Verdict]
        lines.append(f"| {column} | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--backend", action="append", help="one column, such as 'namespaces (user)'; by default all"
    )
    parser.add_argument("--only", action="append", help="one attack")
    parser.add_argument("--quick", action="store_true", help="only attacks that succeed without walls")
    parser.add_argument(
        "--json", action="store_true", help="one backend with the rights of this process, as JSON"
    )
    parser.add_argument(
        "--write", action="store_true", help="update the tables of the docs; columns that were not run stay"
    )
    options = parser.parse_args()
    if options.json or options.only:
        attacks = chosen(options.quick, options.only)
        print(json.dumps(tried((options.backend or ["namespaces"])[0], attacks, say=True), indent=1))
        return
    found = columns(options.backend or COLUMNS, options.quick)
    new = {column: {name: verdict for name, (verdict, _) in row.items()} for column, row in found.items()}
    verdicts = {**cells(TABLE_PAGE.read_text()), **new} if options.write else new
    if not options.write:
        print(table(verdicts))
        return
    replace_between(TABLE_PAGE, BEGIN, END, table(verdicts))
    replace_between(SUMMARY_PAGE, SUMMARY_BEGIN, SUMMARY_END, "\n" + summary(verdicts) + "\n")


def replace_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two markers of a page."""
    before, _, rest = page.read_text().partition(begin)
    page.write_text(before + begin + "\n" + text + "\n" + end + rest.partition(end)[2])


if __name__ == "__main__":
    main()
