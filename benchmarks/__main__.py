"""``python -m benchmarks COMMAND``."""

import argparse

from benchmarks import (
    accuracy,
    compare,
    export,
    grammar,
    hisparse,
    host,
    kernels,
    offline,
    overhead,
    serving,
    soak,
    startup,
    tiers,
    watermark,
)

COMMANDS = {
    "accuracy": accuracy,
    "offline": offline,
    "serving": serving,
    "startup": startup,
    "hisparse": hisparse,
    "host": host,
    "grammar": grammar,
    "kernels": kernels,
    "overhead": overhead,
    "compare": compare,
    "export": export,
    "soak": soak,
    "tiers": tiers,
    "watermark": watermark,
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
