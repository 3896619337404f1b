"""tokenizer.json and tokenizer_config.json from the metadata of a GGUF file, so that one tokenizer serves every format.

Two kinds of vocabulary: byte-level BPE ("gpt2": tokens and merges, the pre-tokenizer named by ``tokenizer.ggml.pre``)
and SentencePiece BPE ("llama": tokens and scores, bytes as <0xXX>). The patterns are those of the models' own files.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .checkpoint import CheckpointError
from .gguf_config import optional_integer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 1, 2, 3, 4, 6
_SPACE = "\u2581"  # SentencePiece's visible space

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS = {"llama-bpe": _LLAMA3, "qwen2": _QWEN2, "tekken": _TEKKEN}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "default": "gpt-2", "deepseek-r1-qwen": "qwen2"}
PRE_TOKENIZERS = ("gpt-2", "smollm", *_PATTERNS, *_ALIASES)


def tokenizer_files(path: Path, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The two JSON documents by file name; empty where the file has no tokenizer.

    Raises:
        CheckpointError: a tokenizer model or pre-tokenizer that is not supported (named), or inconsistent lists.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind is None or kind == "no_vocab":
        return {}
    tokens = _list(path, metadata, "tokens", str)
    types = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        types = _list(path, metadata, "token_type", int, len(tokens))
    for name in ("bos", "eos", "unknown", "padding"):
        token_id = optional_integer(path, metadata, f"tokenizer.ggml.{name}_token_id")
        if token_id is not None and not 0 <= token_id < len(tokens):
            raise CheckpointError(f"{path}: tokenizer.ggml.{name}_token_id {token_id} is outside the vocabulary")
    if kind == "gpt2":
        document = _byte_level(path, metadata, tokens)
    elif kind == "llama":
        document = _sentencepiece(path, metadata, tokens, types)
    else:
        raise CheckpointError(f"{path}: tokenizer model {kind!r} is not supported in GGUF; gpt2 and llama are")
    document["added_tokens"] = [
        {
            "id": token_id,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": types[token_id] != _USER_DEFINED,
        }
        for token_id, token in enumerate(tokens)
        if types[token_id] in (_CONTROL, _USER_DEFINED) or (types[token_id] == _UNKNOWN and kind == "llama")
    ]
    add_bos, add_eos = _adds(kind, metadata)
    document["post_processor"] = _post_processor(metadata, tokens, add_bos, add_eos)
    return {"tokenizer.json": document, "tokenizer_config.json": _config(metadata, tokens, add_bos, add_eos)}


def _list(path: Path, metadata: Mapping[str, Any], name: str, kind: type, length: int | None = None) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(value, list) or (value and type(value[0]) is not kind):  # GGUF's arrays are of one type
        raise CheckpointError(f"{path}: tokenizer.ggml.{name} must be a list of {kind.__name__} values")
    if length is not None and len(value) != length:
        raise CheckpointError(f"{path}: tokenizer.ggml.{name} has {len(value)} entries for {length} tokens")
    return value


def _byte_level(path: Path, metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    stated = metadata.get("tokenizer.ggml.pre", "default")
    pre = _ALIASES.get(stated, stated)
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise CheckpointError(f"{path}: pre-tokenizer {stated!r} (tokenizer.ggml.pre) is not supported; known: {known}")
    merges = _list(path, metadata, "merges", str)
    for merge in merges:
        if merge.count(" ") != 1:
            raise CheckpointError(f"{path}: tokenizer.ggml.merges: {merge!r} is not a pair")
    # As they are, because that is read in two thirds of the time; but then the library drops what looks like a comment
    commented = "\n#version" in "\n".join(["", *merges])
    pairs = [merge.split(" ") for merge in merges] if commented else merges
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    steps: list[dict[str, Any]] = [byte_level]
    if pre == "smollm":
        steps = [{"type": "Digits", "individual_digits": True}, byte_level]
    elif pre in _PATTERNS:
        split = {"type": "Split", "pattern": {"Regex": _PATTERNS[pre]}, "behavior": "Isolated", "invert": False}
        steps = [split, {**byte_level, "use_regex": False}]
    return {
        "version": "1.0",
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps},
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre in ("llama-bpe", "tekken"),
            "vocab": _vocab(path, tokens),
            "merges": pairs,
        },
    }


def _sentencepiece(path: Path, metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = _list(path, metadata, "scores", float, len(tokens))
    vocab = _vocab(path, tokens)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        "version": "1.0",
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]},
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown] if unknown is not None else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": _merges(tokens, types, scores),
        },
    }


def _merges(tokens: list[str], types: list[int], scores: list[float]) -> list[list[str]]:
    """SentencePiece joins the pair whose union scores best: as merges, every split of every piece, by score."""
    pieces = {t: i for i, t in enumerate(tokens) if types[i] not in (_UNKNOWN, _CONTROL, _BYTE)}
    found = []
    for piece, token_id in pieces.items():
        for cut in range(1, len(piece)):
            left, right = pieces.get(piece[:cut]), pieces.get(piece[cut:])
            if left is not None and right is not None:
                found.append((-scores[token_id], token_id, left, right, piece[:cut], piece[cut:]))
    found.sort()
    return [[left, right] for *_, left, right in found]


def _vocab(path: Path, tokens: list[str]) -> dict[str, int]:
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocab[token] != token_id)
        raise CheckpointError(f"{path}: tokenizer.ggml.tokens: {twice!r} appears twice")
    return vocab


def _adds(kind: str, metadata: Mapping[str, Any]) -> tuple[bool, bool]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    bos_default = kind == "llama" or _ALIASES.get(pre, pre) in ("llama-bpe", "tekken")
    has_bos = metadata.get("tokenizer.ggml.bos_token_id") is not None
    has_eos = metadata.get("tokenizer.ggml.eos_token_id") is not None
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", bos_default)) and has_bos
    return add_bos, bool(metadata.get("tokenizer.ggml.add_eos_token", False)) and has_eos


def _post_processor(metadata: Mapping[str, Any], tokens: list[str], bos: bool, eos: bool) -> dict[str, Any] | None:
    if not bos and not eos:
        return None
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special = {}
    for kind, at in (("bos", 0), ("eos", 2)):
        if bos if kind == "bos" else eos:
            token_id = metadata[f"tokenizer.ggml.{kind}_token_id"]
            token = tokens[token_id]
            single.insert(at, {"SpecialToken": {"id": token, "type_id": 0}})
            special[token] = {"id": token, "ids": [token_id], "tokens": [token]}
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def _config(metadata: Mapping[str, Any], tokens: list[str], add_bos: bool, add_eos: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "add_bos_token": add_bos,
        "add_eos_token": add_eos,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token_id is not None:
            config[f"{key}_token"] = tokens[token_id]
    named = [
        {"name": key.removeprefix("tokenizer.chat_template."), "template": value}
        for key, value in metadata.items()
        if key.startswith("tokenizer.chat_template.")
    ]
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        config["chat_template"] = [{"name": "default", "template": template}, *named] if named else template
    return config
