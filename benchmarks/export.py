"""Write a model as the files that the peers read: a Hugging Face folder, and a GGUF file where the source is one.

The peers must compute with the same numbers as this engine, so quantized tensors are written dequantized.
"""

import argparse
import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

import checkpoints
from benchmarks import report

HELP = "write a model for the peers: a Hugging Face folder and a GGUF file"
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
GGUF_TYPES = {
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
}
REWRITTEN = ("general.architecture", "general.file_type", "general.quantization_version")


def write_folder(ckpt: checkpoints.Checkpoint, folder: Path, dtype: str) -> None:
    """One safetensors file, the config with ``dtype``, and the tokenizer's files. Holds the whole model in memory."""
    try:
        from safetensors.numpy import save_file
    except ModuleNotFoundError:
        raise SystemExit("writing a folder needs safetensors: install jaxserve[bench]") from None
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(ckpt.read(name).astype(DTYPES[dtype])) for name in ckpt.tensors}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in ckpt.config.items() if key != "torch_dtype"} | {"dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if ckpt.generation_config:
        (folder / "generation_config.json").write_text(json.dumps(ckpt.generation_config, indent=1))
    for name in checkpoints.TOKENIZER_ASSETS:
        if (content := ckpt.asset(name)) is not None:
            (folder / name).write_bytes(content)


def write_gguf(source: Path, target: Path, dtype: str) -> None:
    """The GGUF file ``source`` with its matrices dequantized; names, layout and all other fields stay."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key not in REWRITTEN:
            kind, *inner = field.types
            writer.add_key_value(key, field.contents(), kind, sub_type=inner[-1] if inner else None)
    encoding, file_type = GGUF_TYPES[dtype]
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
        if values.ndim == 1 or dtype == "float32":  # norms stay float32, as llama.cpp keeps them
            writer.add_tensor(tensor.name, values)
        else:
            packed = gguf.quantize(values, encoding)
            writer.add_tensor(tensor.name, packed, raw_shape=packed.shape, raw_dtype=encoding)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", type=Path, help="folder to write float32/, bfloat16/, float32.gguf, bfloat16.gguf into"
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", nargs="+", default=list(DTYPES), choices=list(DTYPES))


def run(args: argparse.Namespace) -> None:
    path = checkpoints.resolve_model(args.model)
    with checkpoints.open_checkpoint(path) as ckpt:
        for dtype in args.dtype:
            write_folder(ckpt, args.target / dtype, dtype)
            report.CONSOLE.print(f"Wrote {args.target / dtype}")
            if ckpt.format == "gguf":
                target = args.target / f"{dtype}.gguf"
                write_gguf(path, target, dtype)
                report.CONSOLE.print(f"Wrote {target}")
