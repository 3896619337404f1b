"""``jaxserve bench``: how quick a configuration is here, also without weights: by its config alone."""

import argparse
import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from jaxserve.commands.common import UsageError, add_model, check_engine, load
from jaxserve.config import ConfigError, EngineConfig
from jaxserve.options import add_options, given

PROMPT, OUTPUT, BATCH, ROUNDS = 512, 64, (1, 8), 3


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Loads a model and measures first token, prefill and decode. With --load-format random no weights are needed: "
        "shapes of any size can be tried from a config.json, whole or with some of their layers."
    )
    add_model(parser)
    parser.set_defaults(model=None)
    what = parser.add_argument_group("what to measure")
    what.add_argument("--config", metavar="FILE", help="a config.json, in the place of the model")
    what.add_argument("--layers", type=int, metavar="N", help="keep only the first N layers (random weights)")
    what.add_argument("--prompt-len", type=int, default=PROMPT, metavar="N", help=f"(default: {PROMPT})")
    what.add_argument("--output-len", type=int, default=OUTPUT, metavar="N", help=f"(default: {OUTPUT})")
    what.add_argument(
        "--batch",
        type=int,
        nargs="+",
        default=list(BATCH),
        metavar="N",
        help=f"requests at once, several sizes one after another (default: {' '.join(map(str, BATCH))})",
    )
    what.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=f"medians are shown (default: {ROUNDS})")
    parser.add_argument("--json", action="store_true", help="print JSON, for scripts")
    skip = ("model", "served_name", "prefix_caching")
    add_options(parser, EngineConfig, title="engine", skip=skip)
    parser.set_defaults(command=run, kinds=(EngineConfig,))


def run(parsed: argparse.Namespace) -> int:
    _check(parsed)
    config = check_engine(parsed)
    with tempfile.TemporaryDirectory(prefix="jaxserve-bench-") as folder:
        name = parsed.model
        if parsed.layers is not None:
            parsed.model = _cut(config, parsed.layers, Path(folder))
        asked = given(parsed, EngineConfig)
        more: dict[str, Any] = {"served_name": name, "prefix_caching": False}
        more |= {} if "max_num_seqs" in asked else {"max_num_seqs": max(parsed.batch)}
        more |= {} if "max_model_len" in asked else {"max_model_len": parsed.prompt_len + parsed.output_len}
        try:
            llm = load(parsed, **more)
        except ConfigError as error:
            if "max_model_len" in asked:
                raise
            raise ConfigError(str(error).replace("max_model_len", "--prompt-len + --output-len")) from None
        with llm:
            return _measure(llm, parsed)


def _check(parsed: argparse.Namespace) -> None:
    """Settle which model is meant. Raises UsageError."""
    if parsed.config is not None and parsed.model is not None:
        raise UsageError(f"give a model or --config, not both {parsed.model} and {parsed.config}")
    asked = given(parsed, EngineConfig)
    if (parsed.config or "").lower().endswith(".json") and asked.get("load_format") != "random":
        raise UsageError(f"--config {parsed.config} has no weights: add --load-format random")
    parsed.model = parsed.config or parsed.model or EngineConfig.model
    for name in ("prompt_len", "output_len", "rounds"):
        if getattr(parsed, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(parsed, name)}")
    if min(parsed.batch) < 1:
        raise UsageError(f"--batch must be at least 1, got {min(parsed.batch)}")
    if max(parsed.batch) > (most := asked.get("max_num_seqs", max(parsed.batch))):
        raise UsageError(f"--batch {max(parsed.batch)} cannot run at once with --max-num-seqs {most}")
    length = parsed.prompt_len + parsed.output_len
    if length > (longest := asked.get("max_model_len", length)):
        raise UsageError(f"--prompt-len + --output-len is {length}, more than --max-model-len {longest}")
    if parsed.layers is not None and asked.get("load_format") != "random":
        raise UsageError("--layers needs --load-format random: weights of a checkpoint are for all of its layers")


def _cut(config: EngineConfig, layers: int, folder: Path) -> str:
    """Write the config of the first layers alone; returns the file's path."""
    import checkpoints
    from jaxserve.bench import cut_layers

    with checkpoints.open_config(config.model) as source:
        path = folder / "config.json"
        path.write_text(json.dumps(cut_layers(source.config, layers)))
        return str(path)


def _measure(llm: Any, parsed: argparse.Namespace) -> int:
    from jaxserve.bench import Job, describe, measure
    from jaxserve.progress import Progress

    jobs = [Job(batch, parsed.prompt_len, parsed.output_len) for batch in parsed.batch]
    with Progress(llm.config.load_progress) as bars:
        results = list(measure(llm, jobs, parsed.rounds, progress=bars.bar("rounds")))
    facts = describe(llm)
    rows = [
        {**dataclasses.asdict(r.job), **{n: round(v, 3) for n, v in dataclasses.asdict(r).items() if n != "job"}}
        for r in results
    ]
    if parsed.json:
        print(json.dumps({"facts": facts, "rounds": parsed.rounds, "jobs": rows}))
        return 0
    _show(facts, rows)
    return 0


def _show(facts: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from jaxserve.report import human_bytes

    about = Table(show_header=False)
    for name, value in facts.items():
        text = human_bytes(value) if "bytes" in name else f"{value:,}" if name == "parameters" else str(value)
        about.add_row(name.replace("_", " "), text)
    table = Table("batch", "prompt", "output", "first token ms", "prefill tok/s", "decode tok/s", "ms a step")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        table.add_row(*(f"{value:,.1f}" if isinstance(value, float) else str(value) for value in row.values()))
    console = Console()
    console.print(about)
    console.print(table)
