"""Tasks on files: rename, edit, collect, set permissions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollgym.envs.terminal.families.base import (
    WORDS,
    Draft,
    Kind,
    Rng,
    integer,
    listing,
    paths,
    pick,
    quote,
    sample,
    sentence,
    unchanged,
)
from rollgym.envs.terminal.types import Check, Tree, file

EXTENSIONS = ("txt", "log", "csv", "md", "dat", "conf", "tmp", "out")


def _lines(rng: Rng, low: int = 2, high: int = 8) -> list[str]:
    return [sentence(rng) for _ in range(integer(rng, low, high))]


def _text(rng: Rng, low: int = 2, high: int = 8) -> str:
    return "\n".join(_lines(rng, low, high)) + "\n"


def _rename(rng: Rng, level: int) -> Draft:
    old, new, other = sample(rng, EXTENSIONS, 3)
    top, word = sample(rng, [word.upper() for word in WORDS], 2)
    top = top.lower()
    names = paths(rng, integer(rng, 6, 12), 0 if level == 1 else 2, (old, old, other))
    names[0] = names[0].rpartition(".")[0] + f".{old}"
    # Decoys: the extension in the middle of a name.
    names += [f"{name}.{other}" for name in names[:2]]
    before: Tree = {}
    after: Tree = {}
    for number, name in enumerate(names):
        lines = _lines(rng)
        chosen = number == 0 or rng.random() < 0.5
        if level == 3 and chosen:
            lines[integer(rng, 0, len(lines) - 1)] += f" {word} {pick(rng, WORDS)}"
        before[f"{top}/{name}"] = file("\n".join(lines) + "\n")
        if name.endswith(f".{old}") and (level < 3 or chosen):
            name = name.removesuffix(f".{old}") + f".{new}"
        after[f"{top}/{name}"] = before[f"{top}/{names[number]}"]
    where = f"in the folder {top}" if level == 1 else f"in the folder {top} and all folders below it"
    which = f" and that contains the word {word}" if level == 3 else ""
    return Draft(
        instruction=f"Rename every file {where} whose name ends in .{old}{which}, so that its name ends in "
        f".{new} instead. Leave all other files as they are.",
        parameters={
            "folder": top,
            "old": old,
            "new": new,
            "word": word if level == 3 else "",
            "level": level,
        },
        tree=before,
        checks=[listing(after), *unchanged(after, sorted(after))],
    )


def _solve_rename(given: Mapping[str, Any]) -> list[str]:
    top, old, new = given["folder"], given["old"], given["new"]
    if given["level"] == 1:
        found = f"ls {top}/*.{old}"
    elif given["word"]:
        found = f"grep -rlw --include='*.{old}' {given['word']} {top}"
    else:
        found = f"find {top} -type f -name '*.{old}'"
    return [f'{found} | while IFS= read -r f; do mv "$f" "${{f%.{old}}}.{new}"; done']


def _replace(rng: Rng, level: int) -> Draft:
    top, old, new = sample(rng, WORDS, 3)
    names = [f"{top}/{name}" for name in paths(rng, integer(rng, 4, 7), level - 1, ("conf", "conf", "txt"))]
    names[0] = names[0].rpartition(".")[0] + ".conf"
    if level == 1:
        return _set_key(rng, top, names)
    tree: Tree = {}
    checks = []
    for number, name in enumerate(names):
        lines = [f"{key} = {sentence(rng, 1, 3)}" for key in sample(rng, WORDS, integer(rng, 3, 7))]
        for _ in range(integer(rng, 1, 2) if number else 2):
            lines[integer(rng, 0, len(lines) - 1)] += f" {old}"
        # Decoys: a longer word, and a comment.
        lines.insert(integer(rng, 0, len(lines)), f"{pick(rng, WORDS)} = {old}s")
        lines.insert(integer(rng, 0, len(lines)), f"# {old} {sentence(rng, 1, 3)}")
        tree[name] = file("\n".join(lines) + "\n")
        if name.endswith(".conf"):
            edited = [
                line
                if level == 3 and line.startswith("#")
                else " ".join(new if word == old else word for word in line.split(" "))
                for line in lines
            ]
            checks.append(Check(kind="text", path=name, expected="\n".join(edited)))
        else:
            checks += unchanged(tree, [name])
    comments = " Leave lines that begin with # as they are." if level == 3 else ""
    return Draft(
        instruction=f"In all files below the folder {top} whose name ends in .conf, replace the word "
        f"{old} by "
        f"{new}, only where it is a whole word.{comments} Change no other files.",
        parameters={"folder": top, "old": old, "new": new, "level": level},
        tree=tree,
        checks=[listing(tree), *checks],
    )


def _set_key(rng: Rng, top: str, names: list[str]) -> Draft:
    tree: Tree = {}
    for name in names:
        keys = sample(rng, WORDS, integer(rng, 4, 9))
        tree[name] = file("".join(f"{key} = {integer(rng, 1, 999)}\n" for key in keys))
    lines = tree[names[0]]["content"].decode().splitlines()
    place, value = integer(rng, 0, len(lines) - 1), integer(rng, 1000, 9999)
    key = lines[place].split()[0]
    lines[place] = f"{key} = {value}"
    return Draft(
        instruction=f"In the file {names[0]}, set {key} to {value}. Change nothing else.",
        parameters={"file": names[0], "key": key, "value": value, "level": 1},
        tree=tree,
        checks=[Check(kind="text", path=names[0], expected="\n".join(lines)), *unchanged(tree, names[1:])],
    )


def _solve_replace(given: Mapping[str, Any]) -> list[str]:
    if given["level"] == 1:
        return [f"sed -i 's/^{given['key']} = .*/{given['key']} = {given['value']}/' {given['file']}"]
    skip = "/^#/!" if given["level"] == 3 else ""
    edit = f"{skip}s/\\b{given['old']}\\b/{given['new']}/g"
    return [f"find {given['folder']} -type f -name '*.conf' -exec sed -i '{edit}' {{}} +"]


def _collect(rng: Rng, level: int) -> Draft:
    top, target = sample(rng, WORDS, 2)
    names = [f"{top}/{name}" for name in paths(rng, integer(rng, 6, 12), level - 1, EXTENSIONS)]
    if level == 3:
        return _duplicates(rng, top, names)
    sizes = sample(rng, range(40, 900), len(names))
    tree: Tree = {}
    for name, size in zip(names, sizes, strict=True):
        text = " ".join(pick(rng, WORDS) for _ in range(size // 4 + 2))
        tree[name] = file(f"{text[: size - 1]}\n")
    if level == 1:
        largest = max(tree, key=lambda name: len(tree[name]["content"]))
        after = {**tree, target: tree[largest]}
        instruction = f"Copy the largest file in the folder {top} to the file {target} in the current folder."
        given: dict[str, Any] = {"folder": top, "target": target}
    else:
        limit = sorted(sizes)[-integer(rng, 2, 4)] - 1
        after = {}
        for name, entry in tree.items():
            large = len(entry["content"]) > limit
            after[f"{target}/{name.rpartition('/')[2]}" if large else name] = entry
        instruction = (
            f"Create the folder {target} in the current folder and move every file below the folder {top} "
            f"that is larger than {limit} bytes directly into it. Leave the smaller files where they are."
        )
        given = {"folder": top, "target": target, "limit": limit}
    return Draft(
        instruction=instruction,
        parameters={**given, "level": level},
        tree=tree,
        checks=[listing(after), *unchanged(after, sorted(after))],
    )


def _duplicates(rng: Rng, top: str, names: list[str]) -> Draft:
    texts = [_text(rng) for _ in range(max(2, len(names) // 2))]
    tree: Tree = {
        name: file(texts[at % len(texts)]) for at, name in enumerate(sample(rng, names, len(names)))
    }
    kept: dict[bytes, str] = {}
    for name in sorted(tree):
        kept.setdefault(tree[name]["content"], name)
    after = {name: tree[name] for name in kept.values()}
    return Draft(
        instruction=f"Some files below the folder {top} have the same content. Of all files with the same "
        "content, keep the one whose path comes first in alphabetical order (that of LC_ALL=C sort) and "
        "delete the others.",
        parameters={"folder": top, "level": 3},
        tree=tree,
        checks=[listing(after), *unchanged(after, sorted(after))],
    )


def _solve_collect(given: Mapping[str, Any]) -> list[str]:
    top = given["folder"]
    if given["level"] == 1:
        return [f'cp "$(ls -S {top}/* | head -n 1)" {given["target"]}']
    if given["level"] == 2:
        target = given["target"]
        return [
            f"mkdir -p {target}",
            f"find {top} -type f -size +{given['limit']}c -exec mv -t {target} {{}} +",
        ]
    return [
        f"find {top} -type f | LC_ALL=C sort | xargs sha256sum > /tmp/sums",
        "cat /tmp/sums",
        "awk 'seen[$1]++ {print $2}' /tmp/sums | xargs rm",
    ]


def _permissions(rng: Rng, level: int) -> Draft:
    top, report = sample(rng, WORDS, 2)
    names = [f"{top}/{name}" for name in paths(rng, integer(rng, 5, 10), level, ("sh", "sh", "txt", "md"))]
    names[0] = names[0].rpartition(".")[0] + ".sh"
    modes = (0o644, 0o640, 0o600) if level == 1 else (0o644, 0o664, 0o666, 0o755, 0o777, 0o622)
    tree: Tree = {name: file(_text(rng, 1, 4), mode=pick(rng, modes)) for name in names}
    if level > 1:
        tree[names[0]]["mode"] = 0o666
    checks = unchanged(tree, names)
    for name in names:
        mode = tree[name]["mode"]
        wanted = (0o755 if name.endswith(".sh") else mode) if level == 1 else mode & ~0o022
        checks.append(Check(kind="mode", path=name, expected=f"{wanted:o}"))
    writable = sorted(name for name in names if tree[name]["mode"] & 0o002)
    instruction = f"Set the permissions of every file below the folder {top} whose name ends in .sh to 755 "
    instruction += "(rwxr-xr-x). Leave the permissions of all other files as they are."
    if level > 1:
        instruction = (
            f"No file below the folder {top} may be writable by its group or by others: remove these "
            "permissions where they are set, and leave all other permissions as they are."
        )
    if level == 3:
        instruction = (
            f"Find all files below the folder {top} that are writable by others, and write their paths, as "
            f"find prints them from the current folder ({top}/...), to the file {report}.txt, one per line, "
            f"sorted. Then: {instruction[0].lower()}{instruction[1:]}"
        )
        checks.append(Check(kind="text", path=f"{report}.txt", expected="\n".join(writable)))
    return Draft(
        instruction=instruction,
        parameters={"folder": top, "report": f"{report}.txt" if level == 3 else "", "level": level},
        tree=tree,
        checks=checks,
    )


def _solve_permissions(given: Mapping[str, Any]) -> list[str]:
    top = given["folder"]
    if given["level"] == 1:
        return [f"find {top} -type f -name '*.sh' -exec chmod 755 {{}} +"]
    commands = [f"chmod -R g-w,o-w {quote(top)}"]
    if given["report"]:
        commands.insert(0, f"find {top} -type f -perm -o+w | LC_ALL=C sort > {given['report']}")
    return commands


FILES = (
    Kind("files", "rename files", _rename, _solve_rename),
    Kind("files", "edit files", _replace, _solve_replace),
    Kind("files", "collect files", _collect, _solve_collect),
    Kind("files", "set permissions", _permissions, _solve_permissions),
)
