"""Throughput of this engine alone: all requests at once, at several batch sizes, and the time to first token."""

import argparse

from benchmarks import compare

HELP = "tokens a second at several batch sizes, all requests at once"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    compare.add_job_arguments(parser)


def run(args: argparse.Namespace) -> None:
    compare.measure(args, compare.own_contenders(args))
