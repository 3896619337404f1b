"""What users do in the benchmark of the memory tiers. Seconds, of everything or to a first token."""

import queue
import random
import threading
import time

import jaxserve
from jaxserve.request import Delta, SamplingParams


def prompts(rng: random.Random, count: int, length: int) -> list[list[int]]:
    return [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


def converse(llm: jaxserve.LLM, seed: int, users: int, length: int, turns: int) -> float:
    """Seconds for ``users`` who each come back ``turns`` times with all that was said."""
    rng = random.Random(seed)
    said = prompts(rng, users, length)
    begun = time.perf_counter()
    for _ in range(turns):
        outputs = llm.generate(said, max_tokens=4, temperature=0.0, ignore_eos=True, progress=False)
        said = [
            [*text, *output.outputs[0].token_ids, *(rng.randrange(1000, 40000) for _ in range(4))]
            for text, output in zip(said, outputs, strict=True)
        ]
    return time.perf_counter() - begun


def burst(llm: jaxserve.LLM, seed: int, users: int, length: int) -> float:
    """Seconds for ``users`` with short prompts and long answers, all at once: they outgrow the device as they go."""
    asked = prompts(random.Random(seed), users, 16)
    begun = time.perf_counter()
    llm.generate(asked, max_tokens=length, temperature=0.0, ignore_eos=True, progress=False)
    return time.perf_counter() - begun


class Asked:
    """A request under way: ``wait`` gives its tokens, ``first`` the seconds to the first of them."""

    def __init__(self, llm: jaxserve.LLM, prompt: list[int], tokens: int, priority: int = 0):
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        self.begun, self.first = time.perf_counter(), 0.0
        self._deltas: queue.SimpleQueue[tuple[float, Delta]] = queue.SimpleQueue()
        llm.submit(
            prompt, params, on_delta=lambda delta: self._deltas.put((time.perf_counter(), delta)), priority=priority
        )

    def wait(self) -> list[int]:
        found: list[int] = []
        while True:
            when, delta = self._deltas.get()
            if delta.token_ids and not found:
                self.first = when - self.begun
            found += delta.token_ids
            if delta.request_done:
                if delta.finish_reason != "length":
                    raise RuntimeError(f"a request has ended with {delta.finish_reason}")
                return found


def first_tokens(llm: jaxserve.LLM, asked: list[list[int]]) -> list[float]:
    """Of prompts that come all at once."""
    waiting = [Asked(llm, prompt, 1) for prompt in asked]
    for one in waiting:
        one.wait()
    return [one.first for one in waiting]


def shared(llm: jaxserve.LLM, seed: int, length: int, users: int, misses: int) -> dict[str, list[float]]:
    """To the first token where the first ``length`` tokens are new, and where others have sent them.

    One after another, and all ``users`` at once: with a prompt that is known, with one that is new to all of them, and
    with one each, so that there is nothing to share. The last takes as long as everything else together, and is done
    once.
    """
    rng = random.Random(seed)
    kinds = ("new", "known", "known, all at once", "new, all at once", "different, all at once")
    found: dict[str, list[float]] = {name: [] for name in kinds}

    def ask(system: list[int], count: int) -> list[list[int]]:
        return [system + own for own in prompts(rng, count, 20)]

    for _ in range(misses):
        known, new = prompts(rng, 2, length)
        found["new"] += first_tokens(llm, ask(known, 1))
        for one in ask(known, users // misses):
            found["known"] += first_tokens(llm, [one])
        found["known, all at once"] += first_tokens(llm, ask(known, users))
        found["new, all at once"] += first_tokens(llm, ask(new, users))
    found["different, all at once"] += first_tokens(llm, prompts(rng, users, length + 20))
    return found


def interactive(
    llm: jaxserve.LLM, seed: int, *, jobs: int, job: tuple[int, int], users: int, history: int, turns: int, pause: float
) -> tuple[float, list[float]]:
    """Users who chat while ``jobs`` of worse priority, (prompt, answer) tokens each, run. A user comes back ``turns``
    times, ``pause`` seconds after each answer. Returns seconds until all is done, and to each of the users' first
    tokens."""
    rng = random.Random(seed)
    begun = time.perf_counter()
    batch = [Asked(llm, prompt, job[1], priority=10) for prompt in prompts(rng, jobs, job[0])]
    firsts: list[float] = []

    def chat(said: list[int], asks: list[list[int]]) -> None:
        for ask in asks:
            time.sleep(pause)
            said += ask
            turn = Asked(llm, said, 16)
            said += turn.wait()
            firsts.append(turn.first)

    chats = [
        threading.Thread(target=chat, args=(said, prompts(rng, turns, 20))) for said in prompts(rng, users, history)
    ]
    for thread in chats:
        thread.start()
    for thread in chats:
        thread.join()
    for one in batch:
        one.wait()
    if len(firsts) != users * turns:
        raise RuntimeError("a user was not answered")
    return time.perf_counter() - begun, firsts
