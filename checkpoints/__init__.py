"""Weights on disk: Hugging Face folders, GGUF files and converted (orbax) trees, read by name and by row.

A leaf of the house: nothing here imports jaxserve.
"""

from .checkpoint import TOKENIZER_ASSETS, Checkpoint, CheckpointError, TensorInfo
from .config_only import ConfigOnly, open_config
from .orbax import OrbaxCheckpoint, load_tree, read_meta, save_tree
from .resolve import EMBEDDED_MODEL, open_checkpoint, resolve_model

__all__ = [
    "EMBEDDED_MODEL",
    "TOKENIZER_ASSETS",
    "Checkpoint",
    "CheckpointError",
    "ConfigOnly",
    "OrbaxCheckpoint",
    "TensorInfo",
    "load_tree",
    "open_checkpoint",
    "open_config",
    "read_meta",
    "resolve_model",
    "save_tree",
]
