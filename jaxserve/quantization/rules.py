"""Which quantized checkpoints are read: the ``quantization_config`` of config.json."""

from dataclasses import dataclass
from typing import Any

from jaxserve.config import ConfigError


@dataclass(frozen=True)
class BlockFp8:
    """e4m3 weights with a scale for every square of ``block`` by ``block``; products with unquantized activations."""

    block: int

    def __str__(self) -> str:
        return f"fp8, a scale for {self.block}x{self.block} weights"


@dataclass(frozen=True)
class MxExperts:
    """Experts in MXFP4, as families that know them declare."""

    def __str__(self) -> str:
        return "experts in mxfp4"


SUPPORTED = "fp8 with a square weight_block_size is"


def rule(hf: dict[str, Any]) -> BlockFp8 | MxExperts | None:
    """How the checkpoint is quantized; None where it is not. Raises ``ConfigError`` naming what is not supported."""
    config = hf.get("quantization_config")
    if not config:
        return None
    if not isinstance(config, dict):
        raise ConfigError(f"quantization_config must be an object, got {config!r}")
    method = config.get("quant_method")
    if method == "mxfp4":
        return MxExperts()
    if method != "fp8":
        detail = "".join(f", {name} {config[name]!r}" for name in ("quant_algo", "format", "bits") if name in config)
        raise ConfigError(f"quantization_config: quant_method {method!r}{detail} is not supported; {SUPPORTED}")
    block = config.get("weight_block_size")
    sizes: list[Any] = block if isinstance(block, list) and len(block) == 2 else [None]
    if any(type(size) is not int or size < 1 or size != sizes[0] for size in sizes):
        raise ConfigError(f"quantization_config: weight_block_size {block!r} is not supported; {SUPPORTED}")
    for name, known in (("fmt", "e4m3"), ("activation_scheme", "dynamic")):
        if config.get(name, known) != known:
            raise ConfigError(f"quantization_config: {name} {config[name]!r} is not supported ({known!r} is)")
    if hf.get("expert_dtype", "fp8") != "fp8":
        raise ConfigError(f"expert_dtype {hf['expert_dtype']!r} is not supported ('fp8' is)")
    return BlockFp8(sizes[0])
