"""GGUF files in Hugging Face's terms: tensor names, row order, config.json and tokenizer files."""

import json
import re
import threading
from pathlib import Path

import ml_dtypes
import numpy as np

from .checkpoint import Checkpoint, CheckpointError, RawFile, Rows, TensorInfo, digest, find_tensor, row_index
from .gguf_config import (
    config_from_metadata,
    generation_config_from_metadata,
    optional_integer,
    permuted_head_dim,
)
from .gguf_format import BLOCKS, GgufTensor, read_header
from .gguf_tokenizer import tokenizer_files

_PLAIN = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CHUNK_ELEMENTS = 8192
"""The package's dequantizer works on 16 rows at a time; rows of this length made it fastest (twice, measured)."""

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"


class GgufCheckpoint(Checkpoint):
    """One .gguf file of a dense decoder (llama, mistral3, qwen2, qwen3). The header is checked on opening."""

    format = "gguf"

    def __init__(self, path: Path):
        self.path = path
        self._header = read_header(path)
        metadata = self._header.metadata
        split = optional_integer(path, metadata, "split.count") or 0
        if split > 1:
            raise CheckpointError(f"{path}: is one of {split} parts; merge a split GGUF into one file first")
        self._stored: dict[str, GgufTensor] = {}
        for name, tensor in self._header.tensors.items():
            if name != ROPE_FACTORS:
                self._stored[_hf_name(path, name)] = tensor
        self._file = RawFile(path)
        try:
            self.config = config_from_metadata(path, metadata, self._header.tensors, self._rope_factors())
            self.generation_config = generation_config_from_metadata(path, metadata)
        except BaseException:
            self._file.close()
            raise
        self.tensors = {
            name: TensorInfo(t.shape, _PLAIN.get(t.encoding, np.dtype(np.float32)), t.nbytes, t.encoding)
            for name, t in self._stored.items()
        }
        self._assets: dict[str, bytes] | None = None
        self._lock = threading.Lock()

    def _rope_factors(self) -> list[float] | None:
        tensor = self._header.tensors.get(ROPE_FACTORS)
        if tensor is None:
            return None
        if tensor.encoding != "F32" or len(tensor.shape) != 1:
            raise CheckpointError(f"{self.path}: tensor {ROPE_FACTORS} must be a F32 vector, is {tensor.encoding}")
        return self._file.read(tensor.offset, tensor.nbytes, ROPE_FACTORS).view("<f4").astype(np.float64).tolist()

    def read(self, name: str, rows: Rows = None) -> np.ndarray:
        tensor: GgufTensor = find_tensor(self.path, self._stored, name)
        what = f"tensor {name} ({tensor.name})"
        if not tensor.shape or 0 in tensor.shape:
            raise CheckpointError(f"{self.path}: {what} has no elements to read: shape {tensor.shape}")
        index = row_index(f"{self.path}: {what}", rows, tensor.shape[0])
        head_dim = permuted_head_dim(self.config, name)
        if head_dim:
            index = _interleaved(index, head_dim, tensor.shape[0])
        shape = (len(index), *tensor.shape[1:])
        if not len(index):
            return np.empty(shape, self.tensors[name].dtype)
        if len(tensor.shape) == 1 and tensor.encoding not in _PLAIN:
            flat = self._file.read(tensor.offset, tensor.nbytes, what)
            return dequantize(flat, tensor.encoding)[np.asarray(index)]
        raw = self._file.read_rows(tensor.offset, tensor.nbytes // tensor.shape[0], index, what)
        return dequantize(raw.reshape(-1), tensor.encoding).reshape(shape)

    def asset(self, name: str) -> bytes | None:
        with self._lock:
            if self._assets is None:
                self._assets = {
                    key: json.dumps(value, ensure_ascii=False).encode()
                    for key, value in tokenizer_files(self.path, self._header.metadata).items()
                }
            return self._assets.get(name)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    def fingerprint(self) -> str:
        with self.path.open("rb") as file:
            return digest([self.path], {self.path.name: file.read(self._header.nbytes)})

    def close(self) -> None:
        self._file.close()


def dequantize(raw: np.ndarray, encoding: str) -> np.ndarray:
    """Blocks of ``encoding`` (uint8, flat) as a flat array: float32, or the plain dtype where nothing is quantized."""
    if encoding in _PLAIN:
        return raw.view(_PLAIN[encoding])
    from gguf import GGMLQuantizationType, quants

    type_id, elements, nbytes = next((k, e, n) for k, (name, e, n) in BLOCKS.items() if name == encoding)
    row = _CHUNK_ELEMENTS // elements * nbytes
    whole = len(raw) // row * row
    kind = GGMLQuantizationType(type_id)
    parts = [quants.dequantize(raw[:whole].reshape(-1, row), kind).reshape(-1)] if whole else []
    if whole < len(raw):
        parts.append(quants.dequantize(raw[whole:].reshape(1, -1), kind).reshape(-1))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _interleaved(index: range | np.ndarray, head_dim: int, length: int) -> range | np.ndarray:
    """Where HF's row (head, half, pair) lies in a llama-type GGUF, which keeps rotary pairs side by side."""
    row = np.asarray(index, np.int64)
    if length % head_dim or not len(row):
        return index
    head, within = np.divmod(row, head_dim)
    half, pair = np.divmod(within, head_dim // 2)
    return head * head_dim + pair * 2 + half


def _hf_name(path: Path, name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match = _LAYER.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        raise CheckpointError(f"{path}: tensor {name} is not one a dense decoder has; this model is not supported")
    return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
