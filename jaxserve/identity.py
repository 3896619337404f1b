"""What KV pages belong to: a hash of the weights' files and of everything else that decides what a page holds.

It is the same whether the weights come from disk or from a sidecar, which has hashed the files as it read them. Two
fine-tunes of one model differ in their files' content and share nothing.
"""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import checkpoints
from jaxserve.programs import ProgramSet
from jaxserve.sidecar import files, key

REMEMBERED = 1000
"""Files whose hashes are kept."""


def identity(programs: ProgramSet, content: Mapping[str, str], environment: Mapping[str, Any]) -> str:
    """Hexadecimal; equal only for engines that compute the same pages: weights, layout, programs, devices.

    ``content`` has the SHA-256 of the checkpoint's files by name, ``environment`` what the programs depend on.
    """
    fields = key.fields(programs.cfg, programs.dtype, programs.mesh.size, programs.specs, "target")
    cache = programs.cache
    layout = (programs.record_shapes, cache.dtypes, programs.page_size, str(cache.layers), cache.windows)
    facts = [fields, dict(content), layout, dict(programs.mesh.shape), dict(environment)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()


def content(source: checkpoints.Checkpoint, folder: Path) -> dict[str, str]:
    """SHA-256 of the checkpoint's files by name.

    A file is read once: as long as its inode, size and times are what they were, the hash is the one that was noted in
    ``folder`` then.
    """
    notes = folder / "checkpoints.json"
    known = _read(notes)
    found, new = {}, {}
    for path in source.files:
        absolute, stat = os.path.abspath(path), files.look(path)
        noted = known.get(absolute)
        if noted is not None and noted[1] == list(stat):
            value = noted[0]
        else:
            settled = files.settled(stat)
            value = files.sha256(path)
            if settled and files.look(path) == stat:
                new[absolute] = [value, list(stat)]
        found[files.relative(path, source.path)] = value
    if new:
        kept = {path: note for path, note in known.items() if path not in new} | new
        with contextlib.suppress(OSError):  # then they are hashed again
            _write(notes, dict(list(kept.items())[-REMEMBERED:]))
    return found


def _read(notes: Path) -> dict[str, Any]:
    try:
        known = json.loads(notes.read_bytes())
    except (OSError, ValueError):
        return {}
    sound = isinstance(known, dict) and all(isinstance(note, list) and len(note) == 2 for note in known.values())
    return known if sound else {}


def _write(notes: Path, known: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=notes.parent, delete=False) as file:  # 0600, renamed into place
        json.dump(known, file)
    os.replace(file.name, notes)
