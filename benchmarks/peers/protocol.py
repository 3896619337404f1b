"""What a worker and its driver say to each other: JSON lines, jobs on standard input, results on standard output.

    worker -> {"event": "ready", "engine": "...", "version": "...", ...}
    driver -> {"prompts": [[1, 2, 3], ...], "max_tokens": 128}
    worker -> {"event": "done", "seconds": 1.5, "ttft": 0.1, "token_ids": [[...], ...], "peak_rss": 123456789}

A job is greedy, ignores the end of sequence and starts every prompt at once. ``ttft`` is the mean over the prompts of
the time from the job's start to the first token; None where the engine cannot tell. The end of the input ends the
worker. Whatever the engine prints goes to standard error.
"""

import argparse
import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
import traceback


def peak_rss():
    """Largest resident size of this process so far, in bytes."""
    try:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def die_with_parent():
    """Have Linux kill this process when its driver ends, however it ends: a stopped worker would not see it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG


def pin(threads):
    """Keep this process to the first ``threads`` CPUs it may use, so that every engine has the same; returns them."""
    if not hasattr(os, "sched_setaffinity"):
        return list(range(threads))
    cpus = sorted(os.sched_getaffinity(0))[:threads]
    if len(cpus) < threads:
        raise SystemExit(f"{threads} threads were asked for, only {len(cpus)} CPUs may be used")
    os.sched_setaffinity(0, cpus)
    return cpus


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--max-seqs", type=int, required=True, help="most prompts in a job")
    parser.add_argument("--max-len", type=int, required=True, help="longest prompt and output together")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="for the engine itself")
    args = parser.parse_args()
    args.options = {}
    for option in args.option:
        key, _, value = option.partition("=")
        try:
            args.options[key] = json.loads(value)
        except ValueError:
            args.options[key] = value
    args.cpus = pin(args.threads)
    return args


def serve(load):
    """Run a worker. ``load(args)`` returns ``(info, run)``: a dict about the engine, and
    ``run(prompts, max_tokens) -> (token_ids, ttft)``."""
    die_with_parent()
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(**message):
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    try:
        args = parse_arguments()
        info, run = load(args)
        reply(event="ready", **info)
        for line in sys.stdin:
            job = json.loads(line)
            start = time.perf_counter()
            token_ids, ttft = run(job["prompts"], job["max_tokens"])
            seconds = time.perf_counter() - start
            reply(event="done", seconds=seconds, ttft=ttft, token_ids=token_ids, peak_rss=peak_rss())
    except Exception as error:
        traceback.print_exc()
        reply(event="error", message=f"{type(error).__name__}: {error}")
        sys.exit(1)
