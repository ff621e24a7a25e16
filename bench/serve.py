"""A server's stream of requests on the CPU: keys and values in pages against padded caches with F.sdpa.

Requests with prompts and outputs of random lengths arrive, run beside each other and go. Each step of the model takes
one token of every sequence that generates, and prompt tokens of others, in chunks, up to a budget. A small transformer
with random weights runs the same steps with `attnkern.PagedCache`, for each page size, and with caches that are padded
to the longest request. All take turns in every step, so that what disturbs the machine reaches all of them. All get the
tokens that the first one chose: what the others choose must be the same in float32.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from attnkern import PagedCache
from attnkern.backends.failed import FallbackWarning
from attnkern.params import LEAST_PAGE
from bench.cases import DTYPES

from . import machine, report
from .plots import DISTURBED, DISTURBED_ROW, cache_label, machine_line
from .provider import BASELINE, Provider
from .record import Row
from .stream import Part, Step, Stream, of_prefix, requests, schedule
from .sweep import Runner
from .timing import Load, quantile

OURS = "attnkern"  # and the page size: attnkern-64
GROUPED = f"{BASELINE}-gqa"
# |ours - theirs| / |theirs| of all logits. Both round to the dtype in every layer.
ALLOWED = {"fp32": 1e-4, "bf16": 5e-2}
USUAL_SHARE = 0.15  # of the peak, that a step reaches


# --- the model --------------------------------------------------------------------------------------------------------


class Transformer:
    """Embedding, layers of RMSNorm, attention with rotary positions and grouped heads, RMSNorm and MLP."""

    def __init__(self, stream: Stream) -> None:
        of, draw = stream.sizes, torch.Generator().manual_seed(stream.seed)
        self.sizes, dtype = of, DTYPES[stream.dtype]

        def weights(rows: int, columns: int) -> Tensor:
            return (torch.randn(rows, columns, generator=draw) * columns**-0.5).to(dtype)

        rows = (of.heads + 2 * of.heads_k) * of.head_dim
        self.embedding = torch.randn(of.vocabulary, of.width, generator=draw).to(dtype)
        self.layers = [
            (weights(rows, of.width), weights(of.width, of.width), weights(of.hidden, of.width),
             weights(of.width, of.hidden))
            for _ in range(stream.layers)
        ]  # fmt: skip
        self.out = weights(of.vocabulary, of.width)
        self.frequencies = 10000.0 ** -(torch.arange(of.head_dim // 2) * 2 / of.head_dim)

    @torch.no_grad()
    def __call__(self, tokens: Tensor, positions: Tensor, last: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        """Logits behind the tokens at `last`. `attend(layer, query, key, value)`: (T, heads, head_dim) each."""
        of = self.sizes
        x = self.embedding[tokens]
        angles = positions[:, None].float() * self.frequencies
        cos, sin = (f(angles)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))

        def rotated(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        def norm(x: Tensor) -> Tensor:
            return F.rms_norm(x, (of.width,))

        for n, (qkv, out, up, down) in enumerate(self.layers):
            heads = F.linear(norm(x), qkv).unflatten(1, (-1, of.head_dim))
            query, key, value = heads.split([of.heads, of.heads_k, of.heads_k], 1)
            attended = attend(n, rotated(query), rotated(key), value)
            x = x + F.linear(attended.flatten(1), out)
            x = x + F.linear(F.gelu(F.linear(norm(x), up)), down)
        return F.linear(norm(x[last]), self.out)

    @property
    def flops(self) -> float:
        """Of the products with weights, for a token that chooses one."""
        return 2 * (self.out.numel() + sum(w.numel() for layer in self.layers for w in layer))


# --- two ways to keep keys and values ---------------------------------------------------------------------------------


class Way(Protocol):
    """What a server does for attention: `begin` a step, `attend` in each layer, `end` it. `keep`: the sequence in a
    slot is the prefix of others from now on."""

    def begin(self, step: Step) -> None: ...
    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor: ...
    def end(self, step: Step) -> None: ...
    def keep(self, slot: int) -> None: ...
    @property
    def nbytes(self) -> int: ...


class Paged:
    """`attnkern.PagedCache`. Sequences share the pages of the prefix."""

    def __init__(self, cache: PagedCache) -> None:
        self.cache, self.most = cache, 0
        self.prefix: tuple[int, ...] = ()
        self.sequences: dict[int, int] = {}  # slot: the cache's number

    def begin(self, step: Step) -> None:
        for slot, shares in step.admitted:
            self.sequences[slot] = self.cache.fork(*self.prefix) if shares else self.cache.add()
        self.step = self.cache.step([self.sequences[p.slot] for p in step.parts], [p.tokens for p in step.parts])
        self.most = max(self.most, self.cache.keys.shape[1] - self.cache.free_pages)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.step.attention(layer, query, key, value)

    def end(self, step: Step) -> None:
        for slot in step.ended:
            self.cache.free(self.sequences.pop(slot))

    def keep(self, slot: int) -> None:
        self.prefix = (self.sequences.pop(slot),)

    @property
    def nbytes(self) -> int:
        return self.cache.keys.nbytes + self.cache.values.nbytes


class Padded:
    """Caches (slots, heads, longest, head_dim) and F.sdpa: one call for all that generate, with a bool mask, and one
    for each piece of a prompt. The prefix is computed once, and copied to each sequence that begins with it.

    `as_rows`: the query heads of a token that share a key head go to F.sdpa as rows of that head, which in bfloat16 is
    several times as fast as its `enable_gqa`."""

    def __init__(self, stream: Stream, slots: int, longest: int, as_rows: bool) -> None:
        of, self.as_rows = stream.sizes, as_rows
        # Zeros: what the mask hides must be finite.
        shape = stream.layers, slots, of.heads_k, longest, of.head_dim
        self.keys, self.values = (torch.zeros(shape, dtype=DTYPES[stream.dtype]) for _ in range(2))
        self.length = stream.prefix
        self.prefix: tuple[Tensor, ...] = ()

    def begin(self, step: Step) -> None:
        for slot, shares in step.admitted:
            if shares:
                for cache, prefix in zip((self.keys, self.values), self.prefix, strict=True):
                    cache[:, slot, :, : self.length] = prefix
        self.slot = torch.tensor([p.slot for p in step.parts for _ in range(p.tokens)])
        self.position = torch.tensor([p.begin + i for p in step.parts for i in range(p.tokens)])
        self.decoding = step.decoding
        if step.decoding:
            slots, lengths = self.slot[: step.decoding], self.position[: step.decoding] + 1
            self.batch, self.longest = int(slots.max()) + 1, int(lengths.max())
            every = torch.ones(self.batch, dtype=torch.int64)  # a row without keys would be NaN
            every[slots] = lengths
            self.mask = (torch.arange(self.longest) < every[:, None]).view(self.batch, 1, 1, -1)
        self.chunks: list[tuple[Part, Tensor | None]] = []
        for part in step.parts[step.decoding :]:
            end = part.begin + part.tokens
            mask = torch.ones(part.tokens, end, dtype=torch.bool).tril(part.begin) if part.begin else None
            self.chunks.append((part, mask))

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = self.keys[layer], self.values[layer]
        keys[self.slot, :, self.position] = key
        values[self.slot, :, self.position] = value
        outs, done = [], self.decoding
        if done:
            slots, n = self.slot[:done], self.longest
            q = query.new_zeros(self.batch, query.shape[1], 1, query.shape[2])
            q[slots] = query[:done].unsqueeze(2)
            k, v = keys[: self.batch, :, :n], values[: self.batch, :, :n]
            if self.as_rows:
                q = q.view(self.batch, k.shape[1], -1, q.shape[3])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask, enable_gqa=not self.as_rows)
            outs.append(out[slots].reshape(done, *query.shape[1:]))
        for part, mask in self.chunks:
            q = query[done : done + part.tokens].transpose(0, 1).unsqueeze(0)
            k, v = (x[part.slot : part.slot + 1, :, : part.begin + part.tokens] for x in (keys, values))
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
            outs.append(out[0].transpose(0, 1))
            done += part.tokens
        return torch.cat(outs)

    def end(self, step: Step) -> None:
        pass  # the next sequence writes over what is there

    def keep(self, slot: int) -> None:
        self.prefix = tuple(x[:, slot, :, : self.length].clone() for x in (self.keys, self.values))

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.keys, self.values, *self.prefix))


def pages_needed(stream: Stream, steps: Sequence[Step], page_size: int) -> int:
    """The most pages that are in use at once."""
    bound = sum(r.length // page_size + 2 for r in requests(stream)) + stream.prefix // page_size + 2
    way = Paged(PagedCache(bound, 1, 1, page_size=page_size))
    if stream.prefix:
        way.begin(of_prefix(stream))
        way.keep(0)
    for step in steps:
        way.begin(step)
        way.end(step)
    return way.most


def make(name: str, stream: Stream, steps: Sequence[Step]) -> Way:
    """A way by its name, with as much memory as these steps need."""
    if name in (BASELINE, GROUPED):
        slots = 1 + max(part.slot for step in steps for part in step.parts)
        longest = max(stream.prefix, *(r.length for r in requests(stream)))
        return Padded(stream, slots, longest, as_rows=name == BASELINE)
    size, of = int(name.rpartition("-")[2]), stream.sizes
    pages = pages_needed(stream, steps, size)
    options: dict[str, Any] = {"layers": stream.layers, "page_size": size, "dtype": DTYPES[stream.dtype]}
    return Paged(PagedCache(pages, of.heads_k, of.head_dim, **options))


def page_sizes(text: str) -> list[int]:
    """``64,16``."""
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        if not part.isdecimal() or int(part) < LEAST_PAGE or int(part) & (int(part) - 1):
            raise ValueError(f"{part!r} is no power of two from {LEAST_PAGE} on")
        found.append(int(part))
    if not found:
        raise ValueError("nothing is named")
    return list(dict.fromkeys(found))


def ways(sizes: Iterable[int]) -> list[Provider]:
    """The ways that are compared, as a sweep's providers."""

    def bind(*_: Any) -> Any:
        raise NotImplementedError("a stream takes no case")

    ours = [Provider(f"{OURS}-{size}", f"PagedCache, pages of {size}", ("cpu",), bind) for size in sizes]
    theirs = {BASELINE: "padded caches and F.sdpa", GROUPED: "the same, enable_gqa=True"}
    return [*(Provider(name, about, ("cpu",), bind) for name, about in theirs.items()), *ours]


# --- a run ------------------------------------------------------------------------------------------------------------


class Mismatch(Exception):
    """A way gave another result than the baseline."""

    def __init__(self, way: str, text: str) -> None:
        super().__init__(text)
        self.way = way


class Server:
    """Runs the steps of a stream in several ways side by side, and keeps what they took."""

    def __init__(self, stream: Stream, names: Sequence[str], clock: Callable[[], float] = time.perf_counter) -> None:
        self.stream, self.names, self.clock = stream, list(names), clock
        self.steps, self.model = schedule(stream), Transformer(stream)
        self.ways = {name: make(name, stream, self.steps) for name in names}
        self.seconds: dict[str, list[float]] = {name: [] for name in names}  # of each step
        self.attention = dict.fromkeys(names, 0.0)
        self.off, self.all = dict.fromkeys(names, 0.0), 0.0  # squares of the logits' differences, and of the logits
        self.chosen: dict[int, list[int]] = {n: [] for n in range(stream.requests)}
        self.disturbed = 0
        draw = torch.Generator().manual_seed(stream.seed + 1)

        def tokens(n: int) -> list[int]:
            return torch.randint(stream.sizes.vocabulary, (n,), generator=draw).tolist()

        prefix = tokens(stream.prefix)
        self.given = {-1: prefix}
        self.given |= {n: prefix[: r.prefix] + tokens(r.prompt) for n, r in enumerate(requests(stream))}

    def run(self) -> None:
        """Raises Mismatch."""
        if self.stream.prefix:
            step = of_prefix(self.stream)
            inputs = self._inputs(step)
            for name, way in self.ways.items():
                self._call(name, step, inputs)
                way.keep(0)
            self.attention = dict.fromkeys(self.names, 0.0)
        for n, step in enumerate(self.steps):
            inputs, shift, before, logits = self._inputs(step), n % len(self.names), Load.now(), {}
            for name in self.names[shift:] + self.names[:shift]:
                start = self.clock()
                logits[name] = self._call(name, step, inputs)
                self.seconds[name].append(self.clock() - start)
            self.disturbed += Load.now().disturbed_since(before)
            self._compare(step, logits)

    def _inputs(self, step: Step) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens, positions, and the places of the tokens behind which the next ones are chosen."""
        tokens: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for part in step.parts:
            known = self.given[part.request]
            end = part.begin + part.tokens
            tokens += known[part.begin : end] or [self.chosen[part.request][part.begin - len(known)]]
            positions += range(part.begin, end)
            if part.chooses:
                last.append(len(tokens) - 1)
        return torch.tensor(tokens), torch.tensor(positions), torch.tensor(last, dtype=torch.int64)

    def _call(self, name: str, step: Step, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, list[int]]:
        """Logits, and the tokens that they choose."""
        way, clock, spent = self.ways[name], self.clock, 0.0

        def attend(*arguments: Any) -> Tensor:
            nonlocal spent
            start = clock()
            out = way.attend(*arguments)
            spent += clock() - start
            return out

        start = clock()
        way.begin(step)
        spent += clock() - start
        logits = self.model(*inputs, attend)
        chosen = logits.argmax(-1).tolist()
        start = clock()
        way.end(step)
        self.attention[name] += spent + clock() - start
        return logits, chosen

    def _compare(self, step: Step, found: dict[str, tuple[Tensor, list[int]]]) -> None:
        base, tokens = found[self.names[0]]
        choosing = [part for part in step.parts if part.chooses]
        self.all += float(base.double().square().sum())
        for name in self.names[1:]:
            logits, others = found[name]
            self.off[name] += float((logits.double() - base.double()).square().sum())
            if self.stream.dtype == "fp32" and others != tokens:
                at = next(i for i, (a, b) in enumerate(zip(others, tokens, strict=True)) if a != b)
                number = choosing[at].request
                raise Mismatch(
                    name,
                    f"token {len(self.chosen[number])} of request {number} is {others[at]}, with {self.names[0]} "
                    f"{tokens[at]}",
                )
        for part, token in zip(choosing, tokens, strict=True):
            self.chosen[part.request].append(token)

    def error(self, name: str) -> float:
        return math.sqrt(self.off[name] / self.all)

    def latencies(self, name: str) -> tuple[list[float], list[float]]:
        """Seconds from each request's arrival to its first token, and between the tokens that follow each other."""
        at = 0.0
        arrived: dict[int, float] = {}
        latest: dict[int, float] = {}
        first, between = [], []
        for step, seconds in zip(self.steps, self.seconds[name], strict=True):
            arrived.update(dict.fromkeys(step.arrived, at))
            at += seconds
            for part in step.parts:
                if not part.chooses:
                    continue
                if part.request in latest:
                    between.append(at - latest[part.request])
                else:
                    first.append(at - arrived[part.request])
                latest[part.request] = at
        return first, between


class ServeRunner(Runner):
    """Runs streams in place of cases."""

    def expected_seconds(self, groups: Iterable[tuple[Any, str]], competitors: int) -> float:
        total = 0.0
        for stream, _ in groups:
            tokens = sum(part.tokens for step in schedule(stream) for part in step.parts)
            peak = machine.peak(self.device, stream.dtype, torch.get_num_threads())
            total += competitors * tokens * Transformer(stream).flops / (USUAL_SHARE * peak.rate)
        return total

    def run(self, stream: Any, pass_name: str, providers: Sequence[Provider]) -> list[Row]:
        rows = {p.name: self._stream_row(stream, pass_name, p) for p in providers}
        clock = time.process_time if self.sampling.cpu_time else time.perf_counter
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", FallbackWarning)  # it would not be our kernels that are timed
                server = Server(stream, list(rows), clock)
                server.run()
            for name, row in rows.items():
                row |= self._figures(server, name)
                if not row["error"] <= (allowed := ALLOWED[stream.dtype]):
                    text = f"logits differ from {BASELINE}'s by {row['error']:.1e} of them, {allowed:.0e} is allowed"
                    row |= {"status": "wrong", "message": text}
        except Mismatch as error:  # the tokens of a run with another result are no measure of the others
            for name, row in rows.items():
                wrong = name == error.way
                row |= {
                    "status": "wrong" if wrong else "error",
                    "message": str(error) if wrong else f"{error.way} is wrong",
                }
        except Exception as error:  # of one dtype; the others go on
            text = " ".join(str(error).split())
            for row in rows.values():
                row |= {"status": "error", "message": f"{type(error).__name__}: {text}"[:300]}
        return list(rows.values())

    def _stream_row(self, stream: Stream, pass_name: str, way: Provider) -> Row:
        return {
            "key": self.key(stream, pass_name, way.name),
            "case": stream.name,
            "pass": pass_name,
            "provider": way.name,
            "dtype": stream.dtype,
            **{n: getattr(stream, n) for n in ("requests", "running", "prefix", "shared", "layers")},
            "budget": stream.tokens,
            "tags": [],
            "device": self._device,
            "threads": torch.get_num_threads(),
            "clock": self.clock,
            "status": "ok",
        }

    def _figures(self, server: Server, name: str) -> Row:
        stream, seconds, way = server.stream, sum(server.seconds[name]), server.ways[name]
        prompt = sum(part.tokens for step in server.steps for part in step.parts[step.decoding :])
        generated = sum(map(len, server.chosen.values()))
        first, between = server.latencies(name)
        live = max(step.live for step in server.steps)
        row: Row = {
            "seconds": seconds,
            "ratio": sum(server.seconds[BASELINE]) / seconds,
            "steps": len(server.steps),
            "prompt_tokens": prompt,
            "generated_tokens": generated,
            "prompt_per_second": prompt / seconds,
            "generated_per_second": generated / seconds,
            "first_p50": quantile(first, 0.5),
            "first_p99": quantile(first, 0.99),
            "between_p50": quantile(between, 0.5),
            "between_p99": quantile(between, 0.99),
            "attention_seconds": server.attention[name],
            "attention_share": server.attention[name] / seconds,
            "attention_ratio": server.attention[BASELINE] / server.attention[name],
            "cache_bytes": way.nbytes,
            "live_bytes": live * stream.token_bytes,
            "error": server.error(name),
            "allowed_share": server.error(name) / ALLOWED[stream.dtype],
            "clean": self.sampling.cpu_time or server.disturbed <= DISTURBED * len(server.steps),
            "disturbed": server.disturbed / len(server.steps),
        }
        if isinstance(way, Paged):
            row |= {"page_size": way.cache.page_size, "pages": way.most}
        return row


# --- the report -------------------------------------------------------------------------------------------------------

CSV = (
    *("case", "provider", "dtype", "status", "requests", "running", "budget", "prefix", "shared", "layers", "steps"),
    *("prompt_tokens", "generated_tokens", "seconds", "ratio", "prompt_per_second", "generated_per_second"),
    *("first_p50", "first_p99", "between_p50", "between_p99", "attention_seconds", "attention_share"),
    *("attention_ratio", "cache_bytes", "live_bytes", "page_size", "pages", "error", "allowed_share", "clean"),
    *("disturbed", "threads", "clock", "message"),
)
HEAD = (
    *("cache", "dtype", "prompt tokens/s", "generated tokens/s", "times faster", "first token, p50"),
    *("first token, p99", "between tokens, p50", "between tokens, p99", "attention's share", "attention alone"),
    *("memory", "of it live", "pages"),
)


def lines(rows: Iterable[Row]) -> Iterator[list[str]]:
    """The table's cells, as HEAD has them."""
    for row in rows:
        names = [cache_label(row["provider"]), row["dtype"]]
        if row.get("seconds") is None or row["status"] != "ok":
            yield [*names, row["status"], *[""] * (len(HEAD) - 3)]
            continue
        other = row["provider"] != BASELINE
        yield [
            *names,
            *(f"{row[f'{kind}_per_second']:.0f}" for kind in ("prompt", "generated")),
            (f"{row['ratio']:.2f}" if other else "") + " ~" * report.noisy(row),
            *(report.duration(row[n]) for n in ("first_p50", "first_p99", "between_p50", "between_p99")),
            f"{row['attention_share']:.0%}",
            f"{row['attention_ratio']:.1f}" if other else "",
            report.size(row["cache_bytes"]),
            f"{row['live_bytes'] / row['cache_bytes']:.0%}",
            str(row.get("pages", "")),
        ]


def table(rows: Iterable[Row]) -> str:
    """In Markdown."""
    texts = [list(HEAD), ["---"] * len(HEAD), *lines(rows)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in texts)


def summary(rows: Iterable[Row]) -> str:
    """What was served, in a sentence."""
    row = next((row for row in rows if row.get("seconds") is not None), None)
    if row is None:
        return ""
    return (
        f"{row['requests']} requests, {row['shared']:.0%} of them behind a prefix of {row['prefix']} tokens, in "
        f"{row['steps']} steps of at most {row['running']} sequences and {row['budget']} tokens: "
        f"{row['prompt_tokens']} prompt tokens and {row['generated_tokens']} generated ones; {row['layers']} layers"
    )


def markdown(rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> str:
    """The table as a page of its own."""
    where = f"{machine_line(runs[-1])}: `{runs[-1]['command']}`"
    return f"# A server's stream\n\n{where}\n\n{summary(rows)}. A `~` is {DISTURBED_ROW}\n\n{table(rows)}"
