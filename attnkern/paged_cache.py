"""`PagedCache`: keys and values of many sequences in pages of one pool, for all layers of a model."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .api import attention
from .arguments import Window, autocasts, index_of, show, type_error
from .packed import paged_ranges, ranges_within_window
from .pages import is_page_size
from .params import DTYPES, LEAST_PAGE
from .varlen import check_packed_window

_HUGE = 2**21  # bytes of a huge page


class PagedCache:
    """Keys and values of sequences that come, grow and go, in pages that none of them has to itself before it needs it.

    A step of a model is one call of `step` and, for each of its layers, one of `Step.attention`:

        cache = attnkern.PagedCache(pages=512, heads=8, head_dim=128, layers=32, dtype=torch.bfloat16)
        prompt = cache.add()
        step = cache.step([prompt], [17])                        # room for 17 tokens
        out = step.attention(0, query, key, value)               # (17, Hq, 128), of layer 0
        step = cache.step([prompt, other, third])                # later: a token for each of three sequences

    Args:
        pages: how many there are. It takes 2 * layers * pages * heads * page_size * head_dim numbers.
        heads, head_dim, head_dim_v: of keys and values; head_dim_v None: head_dim.
        layers: of the model: each has keys and values of its own in a page.
        page_size: tokens of a page, a power of two from 16 on. The larger, the faster a page is read, and the more room
            is left over in a sequence's last one.
        dtype, device: of keys and values.

    Attributes:
        keys: (layers, pages, heads, page_size, head_dim), values likewise: what `attention` takes with a block_table.
            The heads come first in a page, so that what one head reads lies together.

    Raises:
        TypeError: an argument of the wrong type. ValueError: sizes that are not positive, page_size that is no power of
        two from 16 on, a dtype of no call.
    """

    def __init__(
        self,
        pages: int,
        heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        layers: int = 1,
        page_size: int = 64,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        pages, heads, head_dim = _size("pages", pages), _size("heads", heads), _size("head_dim", head_dim)
        head_dim_v = head_dim if head_dim_v is None else _size("head_dim_v", head_dim_v)
        layers = _size("layers", layers)
        page_size = _integer("page_size", page_size)
        if not is_page_size(page_size):
            raise ValueError(f"attnkern: page_size must be a power of two from {LEAST_PAGE} on, got {page_size}")
        if not isinstance(dtype, torch.dtype):
            raise type_error("dtype", "torch.dtype", dtype)
        if dtype not in DTYPES:
            raise ValueError(f"attnkern: dtype must be float32, float64, bfloat16 or float16, got {show(dtype)}")
        if not isinstance(device, (torch.device, str, int)):
            raise type_error("device", "torch.device, str or int", device)
        self.page_size = page_size
        with torch.inference_mode(False):  # nothing outside of it could write into a tensor of inference mode
            self.keys, self.values = (
                _pool((layers, pages, heads, page_size, size), dtype, torch.device(device))
                for size in (head_dim, head_dim_v)
            )
        self._free = list(range(pages - 1, -1, -1))
        self._users = [0] * pages  # sequences that have the page
        self._pages: dict[int, list[int]] = {}
        self._lengths: dict[int, int] = {}
        self._next = 0
        # Of each sequence, when tokens left their places (the number of the change), and how many stayed, least first.
        self._losses: dict[int, list[tuple[int, int]]] = {}
        self._changes = 0
        # Of pages that were copied, when that was last, and how many of its rows the copy has got.
        self._copies: dict[int, tuple[int, int]] = {}

    @property
    def free_pages(self) -> int:
        """How many pages no sequence has."""
        return len(self._free)

    def __repr__(self) -> str:
        layers, pages, heads, size, head_dim = self.keys.shape
        return (
            f"PagedCache({_counted(len(self._pages), 'sequence')} in {pages - self.free_pages} of {pages} pages of "
            f"{size} tokens, {_counted(layers, 'layer')}, {_counted(heads, 'head')} of {head_dim}, "
            f"{show(self.keys.dtype)}, {self.keys.device})"
        )

    def add(self) -> int:
        """A new sequence without tokens: the number that it goes by. It takes no page yet."""
        return self._new([], 0)

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A new sequence that begins with the first `length` tokens of another, None: all, and shares its pages.

        Whichever of the two grows first into a page that both have gets a copy of that one page. A step's tokens are
        to have keys and values before another step makes that copy: `Step.write` raises RuntimeError afterwards.
        """
        sequence, length = self._checked(sequence, length)
        pages = self._pages[sequence][: self._pages_of(length)]
        for page in pages:
            self._users[page] += 1
        return self._new(list(pages), length)

    def cut(self, sequence: int, length: int) -> None:
        """Drops the tokens of a sequence behind its first `length` ones, and the pages that only they were in."""
        sequence, length = self._checked(sequence, length)
        kept = self._pages_of(length)
        if length < self._lengths[sequence]:
            self._lose(sequence, length)
        self._release(self._pages[sequence][kept:])
        del self._pages[sequence][kept:]
        self._lengths[sequence] = length

    def free(self, sequence: int) -> None:
        """Ends a sequence. Its pages are free, but for those that others have, too."""
        sequence, _ = self._checked(sequence, None)
        self._release(self._pages.pop(sequence))
        del self._lengths[sequence], self._losses[sequence]
        self._changes += 1

    def length(self, sequence: int) -> int:
        """How many tokens a sequence has."""
        return self._checked(sequence, None)[1]

    def step(self, sequences: Sequence[int], tokens: Sequence[int] | int = 1) -> Step:
        """Makes room for more tokens of some sequences, and counts them as theirs.

        Args:
            sequences: numbers of different sequences. tokens: how many each of them gets, one number: all as many.

        Returns:
            What the layers' attention needs to know. Its tokens have keys and values only once `Step.attention` or
            `Step.write` has been given them, for each layer.

        Raises:
            ValueError: no such sequence, the same one twice, fewer than 0 tokens. RuntimeError: there are too few pages
            for all of it, or, beside different numbers of tokens, a sequence is too long for so many others; nothing
            has changed then.
        """
        sequences = _integers("sequences", sequences)
        each = _integers("tokens", tokens, len(sequences))
        if len(each) != len(sequences):
            raise ValueError(f"attnkern: tokens must be a number for each of {len(sequences)} sequences, got {each}")
        if len(set(sequences)) != len(sequences):
            raise ValueError(f"attnkern: sequences must be different, got {list(sequences)}")
        if any(n < 0 for n in each):
            raise ValueError(f"attnkern: tokens must be 0 or more, got {each}")
        before = [self.length(s) for s in sequences]
        pages_after = [self._pages_of(length + n) for length, n in zip(before, each, strict=True)]
        copied, added = [], []
        for s, length, n, after in zip(sequences, before, each, pages_after, strict=True):
            at = length // self.page_size
            shared = n > 0 and length % self.page_size > 0 and self._users[self._pages[s][at]] > 1
            copied.append(at if shared else None)
            added.append(after - len(self._pages[s]))
        # (The last of several that share a page keeps it, if all of them grow: a page more than needed, at most.)
        needed = sum(added) + sum(place is not None for place in copied)
        if needed > self.free_pages:
            raise RuntimeError(
                f"attnkern: the cache has {self.free_pages} free pages, and the step needs {needed}: free sequences, "
                "or give it fewer"
            )
        longest = max(pages_after, default=0)
        if len(set(each)) > 1 and len(each) * longest * self.page_size >= 2**31:
            raise RuntimeError(
                "attnkern: sequences of a step with different numbers of tokens, all as long as the longest, must have "
                f"less than 2**31 keys, got {len(each)} x {longest} pages of {self.page_size}: make a step of the long "
                "ones by themselves"
            )
        old, new = [], []
        for s, place, more, n in zip(sequences, copied, added, each, strict=True):
            pages = self._pages[s]
            if place is not None and self._users[pages[place]] > 1:
                old.append(pages[place])
                self._users[pages[place]] -= 1
                pages[place] = self._taken()
                new.append(pages[place])
                self._lose(s, place * self.page_size)
                self._copies[old[-1]] = self._changes, self._lengths[s] % self.page_size
            pages += [self._taken() for _ in range(more)]
            self._lengths[s] += n
        if new:
            for x in (self.keys, self.values):
                x[:, new] = x[:, old]
        return Step(self, tuple(sequences), tuple(before), tuple(each))

    def _new(self, pages: list[int], length: int) -> int:
        self._next += 1
        self._pages[self._next], self._lengths[self._next], self._losses[self._next] = pages, length, []
        return self._next

    def _lose(self, sequence: int, length: int) -> None:
        """Notes that a sequence's tokens behind the first `length` ones are no longer where they were."""
        self._changes += 1
        losses = self._losses[sequence]
        while losses and losses[-1][1] >= length:
            losses.pop()
        losses.append((self._changes, length))

    def _taken(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        self._copies.pop(page, None)
        return page

    def _release(self, pages: Sequence[int]) -> None:
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page] == 0:
                self._free.append(page)

    def _pages_of(self, length: int) -> int:
        return -(-length // self.page_size)

    def _checked(self, sequence: int, length: int | None) -> tuple[int, int]:
        """A sequence that there is, and `length`, None: all, of it."""
        sequence = _integer("sequence", sequence)
        if sequence not in self._lengths:
            raise ValueError(
                f"attnkern: sequence must be one that add or fork made, and free hasn't ended, got {sequence}"
            )
        most = self._lengths[sequence]
        length = most if length is None else _integer("length", length)
        if not 0 <= length <= most:
            raise ValueError(f"attnkern: length must be from 0 to the sequence's {most} tokens, got {length}")
        return sequence, length


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _integer(name: str, x: Any) -> int:
    """As Python's int: a tensor for a number would be another one once it changes."""
    if (found := index_of(x)) is None:
        raise type_error(name, "int", x)
    return found


def _size(name: str, x: Any) -> int:
    if (x := _integer(name, x)) < 1:
        raise ValueError(f"attnkern: {name} must be 1 or more, got {x}")
    return x


def _integers(name: str, x: Any, copies: int | None = None) -> list[int]:
    """As a list of Python's ints; with `copies` x may be one integer that stands for so many."""
    x = x.tolist() if hasattr(x, "tolist") else x  # a tensor, or numpy's
    if copies is not None and hasattr(x, "__index__"):
        return [_integer(name, x)] * copies
    if not isinstance(x, Iterable):
        raise type_error(name, "a sequence of ints" if copies is None else "int or a sequence of ints", x)
    return [_integer(name, n) for n in x]


def _pool(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for pages, which isn't set. On a CPU in huge pages of the operating system, where it has some: rows in any
    order would else cost a walk through its page tables for every 4 KiB."""
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < 4 * _HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype, device=device)
    try:
        memory = mmap.mmap(-1, size + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError):  # there isn't so much, as torch says
        return torch.empty(shape, dtype=dtype, device=device)
    with contextlib.suppress(OSError):  # a system without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    held = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the memory
    begin = -held.data_ptr() % _HUGE
    return held[begin : begin + size].view(dtype).view(shape)


class Step:
    """Tokens that `PagedCache.step` has made room for, sequence after sequence: T of them in all.

    Attributes:
        block_table: int32 (sequences, pages of the longest), seqused_k: int32 (sequences,), the tokens that each has
            with the new ones; cu_seqlens_q: int32 (sequences + 1,), where its new tokens begin: as `varlen_attention`
            takes them.
        positions: int64 (T,): the place of each token in its sequence, from 0 on.
    """

    def __init__(
        self, cache: PagedCache, sequences: tuple[int, ...], before: tuple[int, ...], tokens: tuple[int, ...]
    ) -> None:
        self._cache = cache
        # As many new tokens in every sequence are a batch of them; else they are packed.
        self._batch = len(tokens) if len(set(tokens)) == 1 and tokens[0] > 0 else 0
        rows = [cache._pages[s] for s in sequences]
        # Of each sequence: where its new tokens begin and end, and the pages that they lie in.
        self._new = {
            s: (b, b + n, row[b // cache.page_size :] if n else [])
            for s, b, n, row in zip(sequences, before, tokens, rows, strict=True)
        }
        # The cache's last change before this step, and that up to which lost tokens have been looked for.
        self._planned = self._changes = cache._changes
        most = max(map(len, rows), default=0)
        # One tensor, one copy to the device: the table, and how many tokens there were and are new.
        padded = [[*row, *[0] * (most - len(row)), b, n] for row, b, n in zip(rows, before, tokens, strict=True)]
        numbers = torch.tensor(padded, dtype=torch.int64, device="cpu")
        numbers = numbers.view(len(rows), most + 2).to(cache.keys.device, non_blocking=True)
        self.block_table = numbers[:, :most].to(torch.int32)
        first, new = numbers[:, most], numbers[:, most + 1]
        self.seqused_k = (first + new).to(torch.int32)
        self.cu_seqlens_q = torch.nn.functional.pad(new.cumsum(0), (1, 0)).to(torch.int32)
        total = sum(tokens)
        sequence = torch.repeat_interleave(new, output_size=total)
        self.positions = torch.arange(total, device=new.device) - self.cu_seqlens_q[sequence] + first[sequence]
        self._page = numbers[sequence, self.positions // cache.page_size]
        self._row = self.positions % cache.page_size
        self._ranges: dict[Any, Tensor] = {}

    def __repr__(self) -> str:
        tokens, sequences = _counted(len(self.positions), "token"), _counted(len(self._new), "sequence")
        return f"Step({tokens} of {sequences})"

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Puts the tokens' keys (T, Hk, E) and values (T, Hv, Ev) into the pages of a layer."""
        self._check_pages()
        layer = self._checked_layer(layer)
        both = ("key", key, self._cache.keys), ("value", value, self._cache.values)
        for name, x, pool in both:
            if not isinstance(x, Tensor):
                raise type_error(name, "Tensor", x)
            expected = (len(self.positions), pool.shape[2], pool.shape[4])
            if tuple(x.shape) != expected or x.dtype != pool.dtype or x.device != pool.device:
                raise RuntimeError(
                    f"attnkern: {name} must be {expected} {show(pool.dtype)} {pool.device}, got {show(x.shape)} "
                    f"{show(x.dtype)} {x.device}"
                )
        self._check_copies()
        for _, x, pool in both:
            pool[layer][self._page, :, self._row] = x.detach()

    @torch.no_grad()
    def attention(
        self,
        layer: int,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        is_causal: bool = True,
        window: Window = None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        return_lse: bool = False,
        backend: str | None = None,
    ) -> Any:
        """Attention of the tokens to all that their sequences hold in a layer, after `write` of key and value if given.

        Args:
            layer: from 0 on. query: (T, Hq, E), of the cache's dtype and device. key, value: as in `write`.
            is_causal, window: within each sequence, the last new token level with the last that there is.
            scale, softcap, return_lse, backend: as in `attnkern.attention`; sinks likewise, (Hq,).

        Returns:
            (T, Hq, Ev); with return_lse also lse (Hq, T). There is no gradient.
        """
        if key is not None or value is not None:
            if key is None or value is None:
                raise RuntimeError("attnkern: key and value must be given together")
            self.write(layer, key, value)
        if not isinstance(query, Tensor):
            raise type_error("query", "Tensor", query)
        self._check_pages()
        if query.dim() != 3 or query.shape[0] != len(self.positions):
            raise RuntimeError(f"attnkern: query must be ({len(self.positions)}, Hq, E), got {show(query.shape)}")
        layer, cache = self._checked_layer(layer), self._cache
        fits = query.dtype == cache.keys.dtype or autocasts(query.device)
        if not fits or query.device != cache.keys.device:
            raise RuntimeError(
                f"attnkern: query must be {show(cache.keys.dtype)} {cache.keys.device}, as the cache, got "
                f"{show(query.dtype)} {query.device}"
            )
        ranges = self._key_ranges(*check_packed_window(is_causal, window, "bottom_right"), query)
        table = self.block_table if self._batch else self.block_table.reshape(1, -1)
        batch = self._batch or 1
        q = query.unflatten(0, (batch, len(self.positions) // batch)).transpose(1, 2)
        results: Any = attention(
            q,
            cache.keys[layer],
            cache.values[layer],
            scale=scale,
            enable_gqa=True,
            softcap=softcap,
            key_ranges=ranges,
            sinks=sinks,
            block_table=table,
            return_lse=return_lse,
            backend=backend,
        )
        if not return_lse:
            return results.transpose(1, 2).flatten(0, 1)
        out, lse = results
        return out.transpose(1, 2).flatten(0, 1), lse.transpose(0, 1).flatten(1)

    def _checked_layer(self, layer: int) -> int:
        layer, layers = _integer("layer", layer), len(self._cache.keys)
        if not 0 <= layer < layers:
            raise ValueError(f"attnkern: layer must be from 0 to {layers - 1}, got {layer}")
        return layer

    def _check_pages(self) -> None:
        """Raises where tokens up to the step's last have left their places, which may be others' by now."""
        cache = self._cache
        if self._changes != cache._changes:
            for sequence, (before, end, _) in self._new.items():
                losses = cache._losses.get(sequence, [(cache._changes, -1)])  # of one that has been freed: all
                if any(change > self._changes and kept < end for change, kept in losses):
                    start = f"attnkern: sequence {sequence} of this step has been"
                    if sequence not in cache._lengths:
                        raise RuntimeError(f"{start} freed since")
                    remedy = "call PagedCache.step again"
                    if cache._lengths[sequence] > before:
                        remedy = f"to give it these tokens, call PagedCache.cut({sequence}, {before}), then step"
                    raise RuntimeError(f"{start} cut, or got a page of its own, since: {remedy}")
            self._changes = cache._changes

    def _check_copies(self) -> None:
        """Raises where a page that the step's tokens are to be written into has been copied without them."""
        cache = self._cache
        if self._planned == cache._changes:
            return
        for sequence, (before, _, pages) in self._new.items():
            for i, page in enumerate(pages):
                change, rows = cache._copies.get(page, (0, 0))
                if change > self._planned and rows > (before % cache.page_size if i == 0 else 0):
                    raise RuntimeError(
                        f"attnkern: a fork of sequence {sequence} got a copy of its page before this step's tokens "
                        "were written there: write a step's tokens before the next step"
                    )

    def _key_ranges(self, left: int | None, right: int | None, query: Tensor) -> Tensor:
        """The keys of each token, the same for all layers."""
        if (found := self._ranges.get((left, right))) is None:
            if self._batch:
                ends, level = self.seqused_k.to(torch.int64)[:, None], self.positions.view(self._batch, -1)
                found = ranges_within_window(torch.zeros_like(ends), ends, level, left, right).to(torch.int32)
            else:
                found = paged_ranges(
                    *(query, self.block_table, self._cache.page_size, self.cu_seqlens_q, self.seqused_k),
                    *(left, right, "bottom_right"),
                )
            self._ranges[left, right] = found
        return found
