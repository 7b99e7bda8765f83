"""Tasks on archives: get files out of them, and make them."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from typing import Any

from rollgym.envs.terminal.families.base import (
    WORDS,
    Draft,
    Kind,
    Rng,
    answer,
    integer,
    listing,
    paths,
    pick,
    sample,
    sentence,
    unchanged,
)
from rollgym.envs.terminal.types import EPOCH, Check, Tree, file


def tar(files: Mapping[str, bytes]) -> bytes:
    """Return files as a compressed tar archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), EPOCH
            archive.addfile(member, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0)


def _text(rng: Rng) -> str:
    return "".join(f"{sentence(rng)}\n" for _ in range(integer(rng, 2, 6)))


def _texts(rng: Rng, count: int, depth: int) -> dict[str, bytes]:
    return {name: _text(rng).encode() for name in paths(rng, count, depth, ("txt", "md", "log"))}


def _extract(rng: Rng, level: int) -> Draft:
    outer, inner, target, wanted = sample(rng, WORDS, 4)
    wanted, target, inner = f"{wanted}.dat", f"{target}.txt", f"{inner}.tar.gz"
    content = _text(rng)
    member = f"{pick(rng, WORDS)}/{wanted}"
    files = {**_texts(rng, integer(rng, 4, 8), 2), member: content.encode()}
    given: dict[str, Any] = {"target": target, "member": member, "level": level}
    tree: Tree
    if level == 1:
        given["archive"] = f"{outer}.tar.gz"
        tree = {given["archive"]: file(tar(files))}
        what = f"The archive {given['archive']} contains the file {member}."
    elif level == 2:
        given |= {"archive": f"{outer}.tar.gz", "inner": inner}
        tree = {given["archive"]: file(tar({**_texts(rng, 3, 1), inner: tar(files)}))}
        what = (
            f"The archive {given['archive']} contains the archive {inner}, which contains the file {member}."
        )
    else:
        given |= {"folder": outer, "member": wanted}
        archives = sample(rng, WORDS, integer(rng, 4, 7))
        tree = {f"{outer}/{name}.tar.gz": file(tar(_texts(rng, 4, 2))) for name in archives}
        tree[f"{outer}/{pick(rng, archives)}.tar.gz"] = file(tar(files))
        what = f"One of the archives in the folder {outer} contains a file {wanted} in some folder."
    return Draft(
        instruction=f"{what} Write the content of this file to the file {target} in the current folder. "
        "Leave "
        "no other new files behind.",
        parameters=given,
        tree=tree,
        checks=[answer(target, content), listing({**tree, target: file("")}), *unchanged(tree, sorted(tree))],
    )


def _solve_extract(given: Mapping[str, Any]) -> list[str]:
    member, target = given["member"], given["target"]
    if given["level"] == 1:
        return [f"tar -tzf {given['archive']}", f"tar -xzOf {given['archive']} {member} > {target}"]
    if given["level"] == 2:
        inner = f"tar -xzOf {given['archive']} {given['inner']}"
        return [f"{inner} | tar -tzf -", f"{inner} | tar -xzOf - {member} > {target}"]
    found = f"tar -tzf $a | grep '/{member}$'"
    return [
        f"for a in {given['folder']}/*.tar.gz; do m=$({found}) && tar -xzOf $a $m > {target}; done; cat "
        f"{target}"
    ]


def _packed(archive: str, files: Mapping[str, bytes]) -> Check:
    """Check the content of an archive of the agent, by unpacking it in a sandbox."""
    unpack = f"rm -rf /tmp/x && mkdir /tmp/x && tar -xzf {archive} -C /tmp/x && cd /tmp/x"
    sums = "find . -type f | LC_ALL=C sort | xargs -r sha256sum"
    expected = [f"{hashlib.sha256(files[name]).hexdigest()}  ./{name}" for name in sorted(files)]
    return Check(kind="run", command=f"{unpack} && {sums}", expected="\n".join(expected))


def _pack(rng: Rng, level: int) -> Draft:
    top, target = sample(rng, WORDS, 2)
    files = _texts(rng, integer(rng, 6, 10), 2)
    given: dict[str, Any] = {"folder": top, "level": level}
    if level == 3:
        parts = sample(rng, WORDS, integer(rng, 2, 4))
        content = {part: _texts(rng, integer(rng, 2, 4), 1) for part in parts}
        files = {f"{part}/{name}": text for part, each in content.items() for name, text in each.items()}
        given["target"] = target
        checks = [_packed(f"{target}/{part}.tar.gz", each) for part, each in content.items()]
        task = (
            f"For every folder NAME directly in the folder {top} create an archive {target}/NAME.tar.gz "
            "of its files, "
            "with paths relative to that folder NAME (they begin with neither of the two folders)."
        )
    else:
        given["target"] = f"{target}.tar.gz"
        wanted = {f"{top}/{name}": text for name, text in files.items()}
        task = f"Create the compressed archive {given['target']} of the folder {top} with all its files."
        if level == 2:
            given["extension"] = "md"
            extra = {f"tmp/{word}.md": _text(rng).encode() for word in sample(rng, WORDS, 2)}
            files |= {f"{pick(rng, WORDS)}/{pick(rng, WORDS)}.md": _text(rng).encode(), **extra}
            wanted = {
                f"{top}/{name}": text
                for name, text in files.items()
                if name.endswith(".md") and not name.startswith("tmp/")
            }
            task = (
                f"Create the compressed archive {given['target']} of those files below the folder {top} "
                "whose "
                f"name ends in .md, without the files below {top}/tmp."
            )
        task += f" Paths in the archive begin with {top}/."
        checks = [_packed(given["target"], wanted)]
    tree: Tree = {f"{top}/{name}": file(text) for name, text in files.items()}
    return Draft(
        instruction=f"{task} Use tar and gzip. Leave the folder {top} as it is.",
        parameters=given,
        tree=tree,
        checks=[*checks, listing(tree, top), *unchanged(tree, sorted(tree))],
    )


def _solve_pack(given: Mapping[str, Any]) -> list[str]:
    top, target = given["folder"], given["target"]
    if given["level"] == 1:
        return [f"tar -czf {target} {top}", f"tar -tzf {target}"]
    if given["level"] == 2:
        found = f"find {top} -type f -name '*.{given['extension']}' -not -path '{top}/tmp/*'"
        return [f"{found} | tar -czf {target} -T -", f"tar -tzf {target}"]
    make = f'tar -czf {target}/$(basename "$d").tar.gz -C "$d" .'
    return [f"mkdir -p {target}", f"for d in {top}/*/; do {make}; done; ls {target}"]


ARCHIVES = (
    Kind("archives", "extract a file", _extract, _solve_extract),
    Kind("archives", "make an archive", _pack, _solve_pack),
)
