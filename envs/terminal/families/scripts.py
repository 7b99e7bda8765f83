"""Tasks on scripts: repair a program that fails. Hidden inputs decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgym.envs.terminal.families.base import (
    PEOPLE,
    WORDS,
    Draft,
    Kind,
    Rng,
    integer,
    listing,
    pick,
    sample,
    sentence,
    unchanged,
    write_file,
)
from rollgym.envs.terminal.types import Check, Tree, file

PYTHON = """\
import sys


def read(path):
    rows = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if @skip@:
                continue
            name, value = line.split("@separator@")
            rows.append((name.strip(), int(value)))
    return rows


def main():
    results = {}
    for name, value in read(sys.argv[@argument@]):
        @combine@
    ranked = sorted(results, key=lambda name: (@order@, name))
    for name in ranked[:@top@]:
        print(name, results[name])


main()
"""
COMBINE = {
    "the sum of its values": "results[name] = results.get(name, 0) + value",
    "its largest value": "results[name] = max(results.get(name, 0), value)",
    "the number of its lines": "results[name] = results.get(name, 0) + 1",
}
RESULTS: Mapping[str, Callable[[list[int]], int]] = dict(zip(COMBINE, (sum, max, len), strict=True))
SEPARATORS = {",": "a comma", ";": "a semicolon", ":": "a colon", "|": "a vertical bar"}


def _python_parts(given: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Right and wrong text of each part of the program."""
    separator = given["separator"]
    other = next(each for each in SEPARATORS if each != separator)
    right = COMBINE[given["result"]]
    wrong = "results[name] = value" if "+ 1" not in right else "results[name] = 1"
    return {
        "skip": ('not line or line.startswith("#")', "not line"),
        "separator": (separator, other),
        "argument": ("1", "0"),
        "combine": (right, wrong),
        "order": ("-results[name]", "results[name]"),
        "top": (str(given["top"]), f"{given['top']} - 1"),
    }


def _fill(template: str, parts: Mapping[str, tuple[str, str]], wrong: Sequence[str]) -> str:
    for name, (good, bad) in parts.items():
        template = template.replace(f"@{name}@", bad if name in wrong else good)
    return template


def _python_input(rng: Rng, given: Mapping[str, Any], people: Sequence[str]) -> tuple[str, str]:
    """An input and what the program must print for it; every wrong part shows."""
    while True:
        rows = [(pick(rng, people), integer(rng, 1, 90)) for _ in range(integer(rng, 14, 24))]
        groups: dict[str, list[int]] = {}
        for name, value in rows:
            groups.setdefault(name, []).append(value)
        results = {name: RESULTS[given["result"]](group) for name, group in groups.items()}
        # What a program prints that keeps the last line of a name only.
        last = {name: RESULTS[given["result"]](group[-1:]) for name, group in groups.items()}
        ranked = _ranked(results, given["top"])
        if (
            len(groups) == len(people)
            and ranked != _ranked(last, given["top"])
            and len(set(results.values())) > 1
        ):
            break
    lines = [f"{name}{given['separator']}{value}" for name, value in rows]
    lines.insert(integer(rng, 0, len(lines)), f"# {sentence(rng)}")
    lines.insert(integer(rng, 0, len(lines)), "")
    return "\n".join(lines) + "\n", "".join(f"{name} {value}\n" for name, value in ranked)


def _ranked(results: Mapping[str, int], top: int) -> list[tuple[str, int]]:
    return sorted(results.items(), key=lambda each: (-each[1], each[0]))[:top]


def _python(rng: Rng, level: int) -> Draft:
    script, sample_name = (
        f"{name}.{end}" for name, end in zip(sample(rng, WORDS, 2), ("py", "txt"), strict=True)
    )
    given: dict[str, Any] = {
        "script": script,
        "separator": pick(rng, list(SEPARATORS)),
        "result": pick(rng, list(COMBINE)),
        "top": integer(rng, 2, 4),
    }
    parts = _python_parts(given)
    people = sample(rng, PEOPLE, integer(rng, 5, 7))
    inputs = [_python_input(rng, given, people) for _ in range(3)]
    tree: Tree = {
        script: file(_fill(PYTHON, parts, sample(rng, list(parts), level))),
        sample_name: file(inputs[0][0]),
        "expected.txt": file(inputs[0][1]),
    }
    checks = [
        Check(
            kind="run", command=f"python3 {script} unseen.dat", files={"unseen.dat": text}, expected=expected
        )
        for text, expected in inputs[1:]
    ]
    return Draft(
        instruction=f"The Python program {script} does not do what it should; repair it. It gets the path "
        "of a "
        f"file as its argument. Each line of the file is a name and a whole number above 0, separated by "
        f"{SEPARATORS[given['separator']]} ({given['separator']}); empty lines and lines that begin with "
        "# are "
        f"left out. It prints a line `name result` for the {given['top']} names with the highest results, "
        "the "
        "highest first and names with the same result in alphabetical order. The result of a name is "
        f"{given['result']}. For example, `python3 {script} {sample_name}` must print what is in "
        "expected.txt. "
        "It is tested with other files.",
        parameters=given,
        tree=tree,
        checks=[*checks, *unchanged(tree, [sample_name, "expected.txt"])],
    )


def _solve_python(given: Mapping[str, Any]) -> list[str]:
    program = _fill(PYTHON, _python_parts(given), ())
    return [f"cat {given['script']}", write_file(given["script"], program), "ls"]


BASH = """\
#!/bin/bash
total=0
for file in @files@; do
  @exists@
  count=$(wc @option@ < @input@)
  echo "@name@ $count"
  total=@total@
done
echo "total @last@"
"""
UNITS: Mapping[str, tuple[str, Callable[[str], int]]] = {
    "-l": ("lines", lambda text: text.count("\n")),
    "-w": ("words", lambda text: len(text.split())),
    "-c": ("bytes", len),
}


def _bash_parts(given: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    option, end = given["option"], given["extension"]
    return {
        "files": (f'"$1"/*.{end}', f"$1/*.{end}"),
        "exists": ('[ -e "$file" ] || continue', ":"),
        "option": (option, "-w" if option != "-w" else "-l"),
        "input": ('"$file"', "$file"),
        "name": ('$(basename "$file")', "$file"),
        "total": ("$((total + count))", "$count"),
        "last": ("$total", "$count"),
    }


def _bash_case(rng: Rng, given: Mapping[str, Any], empty: bool) -> tuple[dict[str, str], str, str]:
    """Files, the folder to pass, and what the script must print."""
    top = " ".join(sample(rng, WORDS, 2))
    words = sample(rng, WORDS, integer(rng, 2, 4))
    names = [f"{word} {pick(rng, WORDS)}.{given['extension']}" for word in words]
    others = [f"{word}.other" for word in sample(rng, WORDS, 2)]
    texts = {
        name: "".join(f"{sentence(rng)}\n" for _ in range(integer(rng, 2, 5))) for name in (*names, *others)
    }
    counted = () if empty else sorted(names)
    sizes = {name: UNITS[given["option"]][1](texts[name]) for name in counted}
    lines = [f"{name} {size}" for name, size in sizes.items()] + [f"total {sum(sizes.values())}"]
    files = {f"{top}/{name}": texts[name] for name in (*counted, *others)}
    return files, top, "\n".join(lines)


def _bash(rng: Rng, level: int) -> Draft:
    script = f"{pick(rng, WORDS)}.sh"
    given: dict[str, Any] = {
        "script": script,
        "option": pick(rng, list(UNITS)),
        "extension": pick(rng, ("txt", "log", "csv", "md")),
    }
    parts = _bash_parts(given)
    tree: Tree = {script: file(_fill(BASH, parts, sample(rng, list(parts), level)), mode=0o755)}
    shown, shown_top, shown_output = _bash_case(rng, given, False)
    tree |= {path: file(text) for path, text in shown.items()}
    tree["expected.txt"] = file(shown_output + "\n")
    checks = []
    for empty in (False, True):
        files, top, expected = _bash_case(rng, given, empty)
        files = {f"unseen/{path}": text for path, text in files.items()}
        checks.append(
            Check(kind="run", command=f"bash {script} 'unseen/{top}'", files=files, expected=expected)
        )
    unit, end = UNITS[given["option"]][0], given["extension"]
    return Draft(
        instruction=f"The bash script {script} does not do what it should; repair it. It gets the path of a "
        f"folder as its argument. For every file directly in this folder whose name ends in .{end} it "
        "prints a "
        f"line with the name of the file (without the folder) and the number of its {unit}, in the order of "
        f"bash's patterns (*.{end}), and at the end a line `total N` with the sum of these numbers, which "
        "is 0 "
        "if there are no such files. Names of files and folders may contain spaces. For example, "
        f"`bash {script} '{shown_top}'` must print what is in expected.txt. It is tested with other folders.",
        parameters=given,
        tree=tree,
        checks=[*checks, *unchanged(tree, sorted(set(tree) - {script})), listing(tree, shown_top)],
    )


def _solve_bash(given: Mapping[str, Any]) -> list[str]:
    program = _fill(BASH, _bash_parts(given), ())
    return [f"cat {given['script']}", write_file(given["script"], program), "ls"]


SCRIPTS = (
    Kind("scripts", "repair a Python program", _python, _solve_python),
    Kind("scripts", "repair a bash script", _bash, _solve_bash),
)
