"""What must be equal for an engine to take weights from a sidecar: named fields, compared one by one."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.config import ModelConfig
from jaxserve.params import Specs
from jaxserve.sharding import HeadLayout

ROLES = ("target", "draft")
Fields = dict[str, Any]


def fields(model: ModelConfig, dtype: str, tensor_parallel: int, specs: Specs, role: str) -> Fields:
    """The key of weights as JSON values, the files they come from aside."""
    layouts = [HeadLayout.of(mixer, tensor_parallel) for mixer in model.mixers]
    about = {f"model.{name}": value for name, value in dataclasses.asdict(model).items()}
    made = {
        "role": role,
        **about,
        "own_head": "head" in specs,
        "dtype": dtype,
        "tensor_parallel": tensor_parallel,
        "heads.kv_source": [layout.kv_source for layout in layouts],
        "heads.q_source": [layout.q_source for layout in layouts],
        "layout_version": layout_version(),
    }
    return json.loads(json.dumps(made, sort_keys=True))  # tuples become lists, as they are on the wire


@functools.cache
def layout_version() -> str:
    """A hash of the sources that decide what a weight's bytes are and how they are laid out."""
    package = Path(__file__).resolve().parents[1]
    paths = [package / "params.py", package / "declare.py", package / "sharding.py", package / "sidecar" / "layout.py"]
    for folder in (package / "models", package / "quantization", package.parent / "checkpoints"):
        paths += sorted(folder.glob("*.py"))
    state = hashlib.sha256()
    for path in paths:
        state.update(f"{path.name}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()[:16]


def differences(have: Mapping[str, Any], want: Mapping[str, Any]) -> list[str]:
    """Every field that differs, with both values, in words; of lists and tables, the entries that do."""
    if have == want:
        return []
    theirs, mine = _entries(have), _entries(want)
    names = [*mine, *(name for name in theirs if name not in mine)]
    return [
        f"{name}: {theirs.get(name, 'absent')} in the sidecar, {mine.get(name, 'absent')} here"
        for name in names
        if theirs.get(name) != mine.get(name)
    ]


def _entries(value: Any, name: str = "") -> dict[str, str]:
    """A JSON value as texts by dotted name."""
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if not children or not value:
        return {name: json.dumps(value)}
    out: dict[str, str] = {}
    for key, child in children:
        out |= _entries(child, f"{name}.{key}" if name else str(key))
    return out
