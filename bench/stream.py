"""A server's stream of requests, with prompts and outputs of random lengths, and the steps in which a server runs
their tokens. Nothing here depends on how keys and values are kept."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from bench.cases import DTYPES

SPREAD = {"prompt": 0.8, "output": 0.6}  # sigma of the lengths' logarithms
MOST = 6  # times the median, that a length is cut to


@dataclass(frozen=True)
class Sizes:
    """Of the transformer."""

    heads: int = 8
    heads_k: int = 2
    head_dim: int = 64
    hidden: int = 2048
    vocabulary: int = 4096

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


TINY = Sizes(4, 2, 16, 64, 97)


@dataclass(frozen=True)
class Stream:
    """What is served. Lengths are lognormal about their medians; ``prefix`` tokens begin a share ``shared`` of requests
    beside their prompts; ``arrivals`` requests come in a step, on average; a step takes ``tokens`` at most."""

    dtype: str
    requests: int = 160
    running: int = 64
    tokens: int = 256
    prompt: int = 200
    output: int = 80
    prefix: int = 500
    shared: float = 0.5
    arrivals: float = 0.7
    layers: int = 4
    seed: int = 0
    sizes: Sizes = Sizes()

    def __post_init__(self) -> None:
        if self.tokens < self.running:
            raise ValueError(
                f"{self.tokens} is less than a token for each of {self.running} sequences that run at once"
            )

    @property
    def name(self) -> str:
        return f"serve-{self.requests}-{self.dtype}"

    @property
    def token_bytes(self) -> int:
        """Of a token's keys and values in all layers."""
        return 2 * self.layers * self.sizes.heads_k * self.sizes.head_dim * DTYPES[self.dtype].itemsize


class Request(NamedTuple):
    arrival: float  # in steps
    prefix: int
    prompt: int  # behind the prefix
    output: int

    @property
    def length(self) -> int:
        """Tokens whose keys and values are kept in the end; the last one is not fed again."""
        return self.prefix + self.prompt + self.output - 1


class Part(NamedTuple):
    """New tokens of a sequence in a step, from `begin` on; `chooses`: their last one's logits choose the next token."""

    request: int
    slot: int
    begin: int
    tokens: int
    chooses: bool


class Step(NamedTuple):
    """Of the server. The first `decoding` parts are one generated token each, the others pieces of prompts."""

    arrived: list[int]  # requests that came before it
    admitted: list[tuple[int, bool]]  # slots that a sequence gets, and whether it begins with the prefix
    parts: list[Part]
    decoding: int
    ended: list[int]  # slots whose sequence is done behind it
    live: int  # tokens that the sequences consist of then, the prefix counted once


def requests(stream: Stream) -> list[Request]:
    draw = random.Random(stream.seed)

    def length(median: int, sigma: float) -> int:
        return max(1, min(MOST * median, round(draw.lognormvariate(math.log(median), sigma))))

    found, at = [], 0.0
    for _ in range(stream.requests):
        prompt, output = length(stream.prompt, SPREAD["prompt"]), length(stream.output, SPREAD["output"])
        found.append(Request(at, stream.prefix if draw.random() < stream.shared else 0, prompt, output))
        at += draw.expovariate(stream.arrivals)
    return found


def schedule(stream: Stream) -> list[Step]:
    """First come, first served; those that generate come before prompts. It depends on the stream alone, on no time."""
    coming = deque(enumerate(requests(stream)))
    waiting: deque[tuple[int, Request]] = deque()
    slots = list(range(stream.running))
    running: dict[int, tuple[int, Request, int]] = {}  # slot: number, request, tokens so far
    steps: list[Step] = []
    clock = 0.0
    while coming or waiting or running:
        if not waiting and not running:
            clock = max(clock, coming[0][1].arrival)  # nothing to do until then
        arrived = []
        while coming and coming[0][1].arrival <= clock:
            arrived.append(coming[0][0])
            waiting.append(coming.popleft())
        parts, chunks, admitted = [], [], []
        prompts = [slot for slot, (_, r, done) in running.items() if done < r.prefix + r.prompt]
        left = stream.tokens
        for slot, (number, _, done) in running.items():
            if slot not in prompts:
                parts.append(Part(number, slot, done, 1, True))
                left -= 1
        while left and (prompts or (waiting and slots)):
            if prompts:
                slot = prompts.pop(0)
            else:
                slot = heapq.heappop(slots)
                number, request = waiting.popleft()
                running[slot] = number, request, request.prefix
                admitted.append((slot, request.prefix > 0))
            number, request, done = running[slot]
            whole = request.prefix + request.prompt
            taken = min(left, whole - done)
            chunks.append(Part(number, slot, done, taken, done + taken == whole))
            left -= taken
        ended = []
        for part in parts + chunks:
            number, request, done = running[part.slot]
            running[part.slot] = number, request, done + part.tokens
            if done + part.tokens == request.length:
                ended.append(part.slot)
        live = stream.prefix + sum(done - request.prefix for _, request, done in running.values())
        steps.append(Step(arrived, admitted, parts + chunks, len(parts), ended, live))
        for slot in ended:
            del running[slot]
            heapq.heappush(slots, slot)
        clock += 1
    return steps


def of_prefix(stream: Stream) -> Step:
    """The step that computes the prefix, before the clock runs."""
    return Step([], [(0, False)], [Part(-1, 0, 0, stream.prefix, False)], 0, [], stream.prefix)
