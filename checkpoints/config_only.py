"""What a model is, without its weights: the config, and the files beside it."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .checkpoint import TOKENIZER_ASSETS, Checkpoint, CheckpointError, Rows, read_json
from .hf import folder_asset
from .orbax import META_NAME
from .resolve import open_checkpoint, resolve_model


class ConfigOnly(Checkpoint):
    """A config.json, alone or in a folder; or the config of any other checkpoint. There are no tensors."""

    format = "config"

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        asset: Callable[[str], bytes | None] = lambda name: None,
    ):
        self.path, self.config, self.generation_config = path, config, generation_config
        self.tensors = {}
        self._asset = asset

    def read(self, name: str, rows: Rows = None) -> np.ndarray:
        raise CheckpointError(f"{self.path}: no tensor {name}: this is a config alone")

    def asset(self, name: str) -> bytes | None:
        return self._asset(name)

    @property
    def files(self) -> tuple[Path, ...]:
        return ()

    def fingerprint(self) -> str:
        return hashlib.sha256(json.dumps([self.config, self.generation_config], sort_keys=True).encode()).hexdigest()

    def close(self) -> None:
        pass


def open_config(model: str) -> ConfigOnly:
    """What ``model`` is, which may also be a .json file or a folder without weights; weights that are there are left
    alone.

    Raises:
        CheckpointError: nothing is there, or it cannot be read.
    """
    path = Path(model).expanduser()
    if path.suffix.lower() == ".json" and path.is_file():
        return ConfigOnly(path, read_json(path), {})
    path = resolve_model(model)
    if path.is_dir() and (path / "config.json").is_file() and not (path / META_NAME).is_file():
        generation = path / "generation_config.json"
        return ConfigOnly(
            path,
            read_json(path / "config.json"),
            read_json(generation) if generation.is_file() else {},
            lambda name: folder_asset(path, name),
        )
    with open_checkpoint(path) as source:
        assets = {name: source.asset(name) for name in TOKENIZER_ASSETS}
    return ConfigOnly(path, source.config, source.generation_config, assets.get)
