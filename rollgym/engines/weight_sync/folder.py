"""Parts as files in a folder that the learner's ranks and the engines share."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rollgym.core.errors import EngineLost, one_line
from rollgym.engines.weight_sync.wire import Chunk, Part

_SUFFIX = ".safetensors"
_CHUNKS = "chunks"


class PartFile:
    """A part in a file."""

    shared = True

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Part:
        """Read it."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self.path, framework="numpy") as file:
                return [_chunk(values, file) for values in json.loads(file.metadata()[_CHUNKS])]
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise EngineLost(
                f"Cannot read new weights from {self.path}: {one_line(error)}. With weight_route=disk, the "
                "run's folder must be on a disk that all nodes share."
            ) from error


def _chunk(values: dict[str, Any], file: Any) -> Chunk:
    plain: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in values.items()}
    plain["arrays"] = tuple(file.get_tensor(name) for name in plain["arrays"])
    return Chunk(**plain)


def write_part(folder: Path, stamp: str, number: int, rank: int, part: Part) -> PartFile:
    """Write what a rank sends of a bucket; the file appears complete."""
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    arrays: dict[str, Any] = {}
    chunks = []
    for at, chunk in enumerate(part):
        names = [f"{at}.{index}" for index in range(len(chunk.arrays))]
        arrays |= dict(zip(names, chunk.arrays, strict=True))
        chunks.append(chunk._asdict() | {"arrays": names})
    path = folder / f"{stamp}-{number}-{rank}{_SUFFIX}"
    unfinished = path.with_suffix(".part")
    save_file(arrays, unfinished, {_CHUNKS: json.dumps(chunks)})
    os.replace(unfinished, path)
    return PartFile(path)


def clean_folder(folder: Path, keep: Collection[str] = ()) -> None:
    """Delete the files of all updates but these stamps."""
    for file in list(folder.glob("*-*-*")) if folder.is_dir() else []:
        if file.name.partition("-")[0] not in keep:
            file.unlink(missing_ok=True)
