"""The same jobs on this engine and on its peers, in alternation, beside the physical floor.

Each contender is one engine with one dtype in a process of its own, in the Python interpreter named for it. All are
started first; then every round gives each job to every contender in turn (in an order that rotates), while the others
are stopped. A figure is the median over the rounds; an engine's figure is that of its quicker dtype.
"""

import argparse
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from benchmarks import floor, report
from benchmarks.stats import median
from benchmarks.workers import Contender, Job, Result, Worker, WorkerError

HELP = "this engine and its peers on the same jobs, in alternation"


@dataclass
class Record:
    """All rounds of one job on one contender."""

    job: Job
    contender: Contender
    results: list[Result] = field(default_factory=list)

    @property
    def throughput(self) -> float | None:
        return median(r.throughput for r in self.results) if self.results else None

    @property
    def ttft(self) -> float | None:
        times = [r.ttft for r in self.results if r.ttft is not None]
        return median(times) if times else None

    @property
    def decode_rate(self) -> float | None:
        rates = [rate for r in self.results if (rate := r.decode_rate) is not None]
        return median(rates) if rates else None

    @property
    def score(self) -> float | None:
        """What contenders are compared by, more is better: the decode rate of a lone request, the throughput of many,
        the reciprocal of the time to first token where the first token is all there is."""
        if self.job.output_len == 1:
            return 1 / self.ttft if self.ttft else None
        return self.decode_rate if self.job.batch == 1 else self.throughput

    def floor(self, size: floor.ModelSize, machine: floor.Machine) -> float:
        """The best score that the machine allows."""
        job, itemsize = self.job, self.contender.itemsize
        if job.output_len == 1:
            return 1 / size.prefill_seconds(machine, job.batch, job.input_len, itemsize)
        if job.batch == 1:
            return 1 / size.step_seconds(machine, 1, job.input_len + job.output_len / 2, itemsize)
        seconds = size.job_seconds(machine, job.batch, job.input_len, job.output_len, itemsize)
        return job.batch * job.output_len / seconds

    def payload(self) -> dict[str, Any]:
        return {
            "job": vars(self.job),
            "contender": self.contender.label,
            "seconds": [r.seconds for r in self.results],
            "ttft": [r.ttft for r in self.results],
            "throughput": self.throughput,
            "decode_rate": self.decode_rate,
            "score": self.score,
        }


def run_rounds(workers: list[Worker], jobs: list[Job], rounds: int, vocab_size: int, seed: int) -> list[Record]:
    """Give every job to every worker ``rounds`` times; a worker that fails is named and left out from then on."""
    records = {(job, worker): Record(job, worker.contender) for job in jobs for worker in workers}
    alive = list(workers)

    def attempt(worker: Worker, job: Job, output_len: int, seed: int) -> Result | None:
        try:
            return worker.run(job.prompts(vocab_size, seed), output_len)
        except WorkerError as error:
            report.CONSOLE.print(f"[red]{error}[/red]", highlight=False)
            alive.remove(worker)
            return None

    for job in jobs:
        for worker in list(alive):  # compile, fill caches, fault pages in
            attempt(worker, job, min(4, job.output_len), -1)
    for number in range(rounds):
        for job in jobs:
            for worker in list(alive[number % len(alive) :] + alive[: number % len(alive)]) if alive else []:
                if result := attempt(worker, job, job.output_len, seed + number):
                    records[job, worker].results.append(result)
                    report.CONSOLE.print(
                        f"round {number + 1}  {job.label:>14}  {worker.contender.label:<32} "
                        f"{result.throughput:8.1f} tok/s  first {report.cell(result.ttft)} s",
                        highlight=False,
                    )
    return list(records.values())


def best(records: Iterable[Record]) -> Record | None:
    """The record with the highest score."""
    return max((r for r in records if r.score), key=lambda r: r.score or 0.0, default=None)


def show_records(records: list[Record], size: floor.ModelSize, machine: floor.Machine) -> None:
    rows = []
    for r in records:
        limit = r.floor(size, machine)
        share = f"{r.score / limit:.0%}" if r.score else None
        spread = f"{min(x.throughput for x in r.results):.1f}-{max(x.throughput for x in r.results):.1f}"
        shown = spread if r.results and r.job.output_len > 1 else None
        throughput = r.throughput if r.job.output_len > 1 else None
        rows.append([r.job.label, r.contender.label, throughput, shown, r.decode_rate, r.ttft, share])
    columns = ["job (batch x in+out)", "engine", "tok/s", "range", "decode tok/s", "TTFT s", "of the floor"]
    report.show("Medians over the rounds", columns, rows, caption=describe(machine, size))


def describe(machine: floor.Machine, size: floor.ModelSize) -> str:
    return (
        f"Floor measured in this run on {machine.threads} threads: {machine.read_bytes_per_second / 1e9:.1f} GB/s "
        f"read, {machine.float32_flops / 1e9:.0f} GFLOP/s float32; {size.parameters / 1e6:.0f} M weights a token."
    )


def show_ratios(records: list[Record], jobs: list[Job], subject: str) -> list[dict[str, Any]]:
    """``subject``'s score over each peer's, each in its quicker dtype."""
    peers = list(dict.fromkeys(r.contender.engine for r in records if r.contender.engine != subject))
    rows, payload = [], []
    for job in jobs:
        ours = best(r for r in records if r.job == job and r.contender.engine == subject)
        row: list[object] = [job.label, ours.contender.dtype if ours else None]
        for peer in peers:
            theirs = best(r for r in records if r.job == job and r.contender.engine == peer)
            ratio = ours.score / theirs.score if ours and theirs and ours.score and theirs.score else None
            row.append(f"{ratio:.2f}x ({theirs.contender.dtype})" if ratio and theirs else None)
            payload.append({"job": vars(job), "peer": peer, "ratio": ratio})
        rows.append(row)
    if peers:
        report.show(f"{subject} over each peer (above 1 is quicker)", ["job", f"{subject} in", *peers], rows)
    return payload


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="for jaxserve, and for the size the floor assumes")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 32, 64], help="requests at once")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--ttft-len", nargs="*", type=int, default=[1024], help="prompts timed to their first token")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=report.usable_cpus())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an engine option of jaxserve; repeatable"
    )
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    parser.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="ENGINE=PYTHON,model=PATH[,dtype=...]",
        help="transformers, vllm (Hugging Face folder) or llama_cpp (GGUF file); repeatable",
    )
    parser.add_argument("--without-jaxserve", action="store_true", help="measure the peers alone")


def jobs_of(args: argparse.Namespace) -> list[Job]:
    jobs = [Job(batch, args.input_len, args.output_len) for batch in args.batch]
    return jobs + [Job(1, length, 1) for length in args.ttft_len]


def own_contenders(args: argparse.Namespace) -> list[Contender]:
    options = dict(option.partition("=")[::2] for option in args.option)
    return [Contender(engine="jaxserve", model=args.model, dtype=dtype, options=options) for dtype in args.dtype]


def measure(args: argparse.Namespace, contenders: list[Contender]) -> None:
    """Start the contenders, run the rounds, print and save."""
    where = report.environment()
    report.warn_if_busy()
    jobs = jobs_of(args)
    size = floor.ModelSize.of(args.model)
    machine = floor.measure(args.threads)
    max_len = max(job.input_len + job.output_len for job in jobs) + 8
    with contextlib.ExitStack() as stack:
        workers = []
        for contender in contenders:
            try:
                worker = Worker(
                    contender, threads=args.threads, max_seqs=max(job.batch for job in jobs), max_len=max_len
                )
            except WorkerError as error:
                report.CONSOLE.print(f"[red]{error}[/red]", highlight=False)
                continue
            workers.append(stack.enter_context(worker))
            report.CONSOLE.print(f"{contender.label}: {worker.info.get('version')}, up in {worker.start_seconds:.1f} s")
        if not workers:
            raise SystemExit("no engine could be started")
        vocab_size = min(worker.info.get("vocab_size") or 32000 for worker in workers)
        records = run_rounds(workers, jobs, args.rounds, vocab_size, args.seed)
        started = {w.contender.label: {"seconds": w.start_seconds, "info": w.info} for w in workers}
    machine = machine.best(floor.measure(args.threads))
    show_records(records, size, machine)
    peaks = {r.contender.label: max((x.peak_rss for x in r.results), default=0) for r in records}
    rows = [[label, start["seconds"], peaks[label] / 2**30] for label, start in started.items()]
    report.show("Processes", ["engine", "start to ready s", "peak RSS GiB"], rows)
    ratios = show_ratios(records, jobs, "jaxserve")
    report.save_json(
        args.json,
        {
            "benchmark": "compare",
            "environment": where,
            "machine": vars(machine),
            "model": vars(size),
            "arguments": {key: value for key, value in vars(args).items() if key != "run"},
            "started": started,
            "peak_rss": peaks,
            "records": [r.payload() | {"floor": r.floor(size, machine)} for r in records],
            "ratios": ratios,
        },
    )
    shown = [job for job in jobs if job.output_len > 1]
    series = {
        c.label: [next((r.score for r in records if r.job == job and r.contender == c), None) for job in shown]
        for c in contenders
    }
    report.plot_bars(args.plot, "Output tokens a second", "tok/s", [job.label for job in shown], series)


def run(args: argparse.Namespace) -> None:
    try:
        peers = [Contender.parse(text) for text in args.peer]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    measure(args, peers if args.without_jaxserve else own_contenders(args) + peers)
