"""Whole models of Hugging Face transformers: what a training step, a prompt and a token gain from attnkern.

Each model is transformers' own class with its published sizes and random weights; nothing is downloaded. One model
object runs with transformers' "sdpa", with "attnkern" (`model.set_attn_implementation`, nothing else), and with
attention left out: a stand-in that adds a query, one key and one value, so that all that stands before and behind
attention still runs, forward and backward. The three take turns in the rounds of timing.py. What leaving it out saves
is attention's share of the time, masks included; what is left bounds any gain (Amdahl).
"""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attnkern.backends.failed import FallbackWarning
from attnkern.integrations import transformers as integration
from bench.cases import DTYPES

from . import machine, report
from .memory import peak_growth
from .plots import machine_line
from .provider import BASELINE, Provider
from .record import Row
from .sweep import Runner
from .timing import Timing, Work, measure, quantile

OURS = integration.NAME
LEFT_OUT = "attention-left-out"
PASSES = ("training", "prefill", "decode")
# Of all numbers together: |ours - theirs| / |theirs|. Both round to the dtype in every layer. After Llama's 22 in bf16
# each is 4 % from float32, and as far from the other; T5's gradients in float32 differ by 5e-5.
ALLOWED = {"fp32": 1e-4, "bf16": 5e-2}
USUAL_SHARE = 0.4  # of the peak, that a model reaches
CALLS_BEFORE = 2  # of each competitor, before the rounds
MADE = 100e6  # random weights drawn in a second


@dataclass(frozen=True)
class Shape:
    """What one pass computes. ``length``: tokens of the model (of its decoder, if it has two parts), or those that
    stand in the cache of a decoding step. ``source``: the encoder's. ``layers``: of a model cut to so many."""

    batch: int
    length: int
    source: int = 0
    layers: int | None = None


@dataclass(frozen=True)
class Model:
    """A class of transformers, its sizes, and what to run it on. ``tiny``: sizes for tests."""

    name: str
    label: str
    cls: str
    config: str
    takes: str  # tokens, image, text or audio; the last two have an encoder and a decoder
    passes: dict[str, Shape]
    sizes: dict[str, Any]
    tiny: dict[str, Any]
    layers_in_all: int = 0  # where a pass has fewer

    def configuration(self, shape: Shape, tiny: bool) -> Any:
        import transformers

        cut = {} if shape.layers is None else {"num_hidden_layers": shape.layers}
        return getattr(transformers, self.config)(**{**self.sizes, **cut, **(self.tiny if tiny else {})})

    def make(self, shape: Shape, tiny: bool, **options: Any) -> Any:
        """With random weights, drawn by transformers."""
        import transformers

        return getattr(transformers, self.cls)._from_config(self.configuration(shape, tiny), **options)


# Dropout is off: F.sdpa has no kernel for it on a CPU, and the results could not be compared.
_TINY = {"vocab_size": 97, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32}
_TINY_TWO = {"vocab_size": 97, "d_model": 32}
MODELS = (
    Model(
        "bert",
        "BERT-base",
        "BertForSequenceClassification",
        "BertConfig",
        "tokens",
        {"training": Shape(2, 512), "prefill": Shape(2, 512)},
        {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        {**_TINY, "intermediate_size": 48},
    ),
    Model(
        "gpt2",
        "GPT-2 small",
        "GPT2LMHeadModel",
        "GPT2Config",
        "tokens",
        {"training": Shape(1, 1024), "prefill": Shape(1, 1024), "decode": Shape(8, 1000)},
        {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2},
        _TINY,
    ),
    Model(
        "vit",
        "ViT-B/16, 384 px",
        "ViTForImageClassification",
        "ViTConfig",
        "image",
        {"training": Shape(2, 577), "prefill": Shape(2, 577)},
        {"image_size": 384, "num_labels": 1000},
        {**{n: x for n, x in _TINY.items() if n != "vocab_size"}, "intermediate_size": 48, "image_size": 64},
    ),
    Model(
        "whisper",
        "Whisper-small",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        "audio",
        {"training": Shape(1, 128, 1500), "prefill": Shape(1, 1, 1500), "decode": Shape(4, 200, 1500)},
        {
            "d_model": 768,
            **{f"{part}_layers": 12 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 12 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 3072 for part in ("encoder", "decoder")},
        },
        {
            **_TINY_TWO,
            **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
            **{f"{part}_attention_heads": 2 for part in ("encoder", "decoder")},
            **{f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")},
            "max_source_positions": 40,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
    Model(
        "t5",
        "T5-small",
        "T5ForConditionalGeneration",
        "T5Config",
        "text",
        {"training": Shape(2, 256, 1024), "prefill": Shape(2, 1, 1024), "decode": Shape(8, 256, 1024)},
        {"dropout_rate": 0.0, "decoder_start_token_id": 0},
        {**_TINY_TWO, "d_kv": 16, "d_ff": 48, "num_layers": 2, "num_heads": 2},
    ),
    Model(
        "llama",
        "Llama-like 1B",
        "LlamaForCausalLM",
        "LlamaConfig",
        "tokens",
        # All layers are alike. All 22 take 17 GB to train in float32, and minutes.
        {"training": Shape(1, 1024, layers=2), "prefill": Shape(1, 2048, layers=2), "decode": Shape(4, 2000)},
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 22,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "vocab_size": 32000,
            "max_position_embeddings": 2048,
        },
        {**_TINY, "intermediate_size": 48, "num_key_value_heads": 1},
        layers_in_all=22,
    ),
)


@dataclass(frozen=True)
class Workload:
    """One pass of one model in one dtype: what a :class:`Case` is to single calls of attention."""

    model: str
    pass_name: str
    dtype: str
    shape: Shape
    tiny: bool
    transformers: str  # its version

    @property
    def of(self) -> Model:
        return next(model for model in MODELS if model.name == self.model)

    @property
    def size(self) -> str:
        """As ``2 x 512``, ``1 x 1500 to 128`` with an encoder, ``8 x 1 after 1000`` for a decoding step."""
        shape = self.shape
        text = f"1 after {shape.length}" if self.pass_name == "decode" else str(shape.length)
        if shape.source:
            text = f"{shape.source} to {text}"
        cut = "" if shape.layers is None else f", {shape.layers} of {self.of.layers_in_all} layers"
        return f"{shape.batch} x {text}{cut}{', tiny' * self.tiny}"

    @property
    def name(self) -> str:
        return f"{self.of.label}, {self.size}, {self.dtype}"

    forward_only = False

    @functools.cached_property
    def weights(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in self.of.make(self.shape, self.tiny).parameters())

    def flops(self, pass_name: str) -> float:
        """About: two for each weight and token, thrice that in training. Without attention."""
        tokens = 1.0 if pass_name == "decode" else self.shape.length
        if self.shape.source:  # each of the two parts has half of the weights
            tokens = (tokens + (self.shape.source if pass_name != "decode" else 0)) / 2
        return (6.0 if pass_name == "training" else 2.0) * self.weights * self.shape.batch * tokens


def workloads(models: Sequence[str], dtypes: Sequence[str], passes: Sequence[str], tiny: bool) -> list[Workload]:
    """What the names select, model by model. Raises ImportError without a transformers that takes attnkern."""
    integration.register()
    _register_left_out()
    from transformers.utils import logging

    logging.set_verbosity_error()  # it has words on losses and caches
    version = importlib.metadata.version("transformers")
    found = []
    for model in MODELS:
        for dtype in dtypes if model.name in models else ():
            for pass_name, shape in model.passes.items():
                if pass_name in passes:
                    if tiny:
                        shape = replace(shape, length=min(shape.length, 20), source=min(shape.source, 40))
                    found.append(Workload(model.name, pass_name, dtype, shape, tiny, version))
    return found


def sides() -> list[Provider]:
    """The implementations of transformers that are compared, as a sweep's providers."""

    def bind(*_: Any) -> Any:
        raise NotImplementedError("a model's attention takes no case")

    return [Provider(name, f'attn_implementation="{name}"', ("cpu",), bind) for name in (BASELINE, OURS)]


# --- attention left out -----------------------------------------------------------------------------------------------


def _register_left_out() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(LEFT_OUT, _left_out)
    AttentionMaskInterface.register(LEFT_OUT, lambda *_, **__: None)


def _left_out(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **others: Any) -> tuple[Tensor, None]:
    """As transformers' attention functions. All that needs a gradient gets one, and no key but the last is read."""
    key, value = key[:, :, -1:], value[:, :, -1:]
    if key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    out = query + key + value
    if (bias := others.get("position_bias")) is not None:
        out = out + bias[..., :1, :1]
    return out.transpose(1, 2).contiguous(), None


# --- the three passes -------------------------------------------------------------------------------------------------


def _tokens(config: Any, *shape: int) -> Tensor:
    return torch.randint(3, config.vocab_size, shape)


def _inputs(workload: Workload, config: Any, dtype: torch.dtype) -> dict[str, Any]:
    """What the model's `forward` takes, without labels."""
    shape, takes = workload.shape, workload.of.takes
    if takes == "tokens":
        return {"input_ids": _tokens(config, shape.batch, shape.length)}
    if takes == "image":
        return {"pixel_values": torch.randn(shape.batch, 3, config.image_size, config.image_size).to(dtype)}
    if takes == "text":
        return {"input_ids": _tokens(config, shape.batch, shape.source)}
    return {"input_features": torch.randn(shape.batch, config.num_mel_bins, 2 * shape.source).to(dtype)}


def _training(workload: Workload, model: Any, dtype: torch.dtype) -> Callable[[], Any]:
    """Forward, backward and AdamW. The learning rate is 0: all steps are the same, and no less work."""
    inputs = _inputs(workload, model.config, dtype)
    shape = workload.shape
    if workload.of.takes in ("text", "audio"):
        labels = _tokens(model.config, shape.batch, shape.length)
    elif workload.of.cls.endswith("Classification"):
        labels = torch.randint(0, model.config.num_labels, (shape.batch,))
    else:
        labels = inputs["input_ids"]
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)

    def step() -> list[Tensor]:
        optimizer.zero_grad(set_to_none=True)
        model(**inputs, labels=labels).loss.backward()
        optimizer.step()
        return [p.grad for p in model.parameters() if p.grad is not None]

    return step


def _prefill(workload: Workload, model: Any, dtype: torch.dtype) -> Callable[[], Any]:
    """The whole input at once, without gradients; of language models the last token's logits, as `generate` asks."""
    inputs = _inputs(workload, model.config, dtype)
    if workload.of.takes in ("text", "audio"):
        inputs["decoder_input_ids"] = _tokens(model.config, workload.shape.batch, workload.shape.length)
    elif "decode" in workload.of.passes:
        inputs |= {"logits_to_keep": 1, "use_cache": True}
    model.eval()
    return torch.no_grad()(lambda: [model(**inputs).logits])


def _decode(workload: Workload, model: Any, dtype: torch.dtype) -> Callable[[], Any]:
    """One token for each sequence, behind a full cache of random keys and values."""
    from transformers import DynamicCache, EncoderDecoderCache
    from transformers.modeling_outputs import BaseModelOutput

    config, shape = model.config, workload.shape
    decoder = config.get_text_config(decoder=True)
    heads = getattr(decoder, "num_key_value_heads", None) or decoder.num_attention_heads
    size = getattr(decoder, "d_kv", None) or decoder.hidden_size // decoder.num_attention_heads
    layers = getattr(decoder, "num_decoder_layers", None) or decoder.num_hidden_layers

    def filled(length: int) -> Any:
        cache = DynamicCache(config=decoder)
        for layer in range(layers):
            key, value = torch.randn(2, shape.batch, heads, length, size).to(dtype).unbind()
            cache.update(key, value, layer)
        return cache

    cache, name, more = filled(shape.length), "input_ids", {}
    if shape.source:
        cache, name = EncoderDecoderCache(cache, filled(shape.source)), "decoder_input_ids"
        encoded = torch.randn(shape.batch, shape.source, config.hidden_size).to(dtype)
        more["encoder_outputs"] = BaseModelOutput(last_hidden_state=encoded)
    token = _tokens(config, shape.batch, 1)
    more["cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"] = cache
    model.eval()

    @torch.no_grad()
    def step() -> list[Tensor]:
        logits = model(**{name: token}, **more, use_cache=True).logits
        cache.crop(-1)
        return [logits]

    return step


WAYS = {"training": _training, "prefill": _prefill, "decode": _decode}


def difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """|found - expected| / |expected| of all numbers together; nan where one is not finite."""
    off = sum(
        float((x.float() - y.float()).square().sum(dtype=torch.float64)) for x, y in zip(found, expected, strict=True)
    )
    return math.sqrt(off / sum(float(y.float().square().sum(dtype=torch.float64)) for y in expected))


class ModelRunner(Runner):
    """Runs workloads in place of cases; keeps the last model."""

    _made: tuple[Any, Any] = (None, None)

    def expected_seconds(self, groups: Iterable[tuple[Any, str]], competitors: int) -> float:
        sampling, total = self.sampling, 0.0
        for workload, pass_name in groups:
            peak = machine.peak(self.device, workload.dtype, torch.get_num_threads())
            flops = workload.flops(pass_name)
            call = flops / (USUAL_SHARE * peak.rate)
            rounds = max(sampling.min_rounds, min(sampling.rounds, sampling.budget / (competitors + 1) / call))
            total += workload.weights / MADE + (competitors + 1) * (CALLS_BEFORE + rounds) * call
        return total

    def run(self, workload: Any, pass_name: str, providers: Sequence[Provider]) -> list[Row]:
        """One row for either side; where one is wrong or raises, nothing is timed."""
        rows = {p.name: self._model_row(workload, p) for p in providers}
        try:
            step, works = self._works(workload)
            results: dict[str, list[Tensor]] = {}
            with works[LEFT_OUT].context():
                step()  # what a first call sets up stays
            for name in rows:
                with works[name].context(), warnings.catch_warnings():
                    warnings.simplefilter("error", FallbackWarning)  # it would not be our kernels that are timed
                    result, rows[name]["memory"] = peak_growth(step, self.device)
                    results[name] = [x.clone() for x in result]
                    del result
            error = difference(results[OURS], results[BASELINE])
            del results
            allowed = ALLOWED[workload.dtype]
            rows[OURS] |= {"error": error, "allowed_share": error / allowed}
            if not error <= allowed:
                message = f"differs from {BASELINE} by {error:.1e} of it, {allowed:.0e} is allowed"
                rows[OURS] |= {"status": "wrong", "message": message}
                return list(rows.values())
            timings = measure(works, self.sampling, self.device)
        except Exception as error:  # of one model; the others go on
            text = " ".join(str(error).split())
            for row in rows.values():
                row |= {"status": "error", "message": f"{type(error).__name__}: {text}"[:300]}
            return list(rows.values())
        for name, row in rows.items():
            row |= _speed(timings[name], timings)
        theirs, ours = (rows[name]["limit"] - 1 for name in (BASELINE, OURS))
        # Where ours is lost in the noise, nothing can be said about attention alone.
        rows[OURS]["attention_ratio"] = theirs / ours if ours > 0.01 else None
        return list(rows.values())

    def _model_row(self, workload: Workload, side: Provider) -> Row:
        return {
            "key": self.key(workload, workload.pass_name, side.name),
            "case": workload.name,
            "model": workload.of.label,
            "size": workload.size,
            "pass": workload.pass_name,
            "provider": side.name,
            "dtype": workload.dtype,
            "batch": workload.shape.batch,
            "tags": [],
            "transformers": workload.transformers,
            "device": self._device,
            "threads": torch.get_num_threads(),
            "clock": self.clock,
            "status": "ok",
        }

    def _works(self, workload: Workload) -> tuple[Callable[[], Any], dict[str, Work]]:
        torch.manual_seed(self.seed)
        dtype, wanted = DTYPES[workload.dtype], (workload.model, workload.dtype, workload.shape.layers, workload.tiny)
        if self._made[0] != wanted:
            self._made = (None, None)  # frees the other first
            gc.collect()
            self._made = (wanted, workload.of.make(workload.shape, workload.tiny, dtype=dtype))
        model = self._made[1]
        model.zero_grad(set_to_none=True)
        step = WAYS[workload.pass_name](workload, model, dtype)
        return step, {name: Work(step, partial(_attending, model, name)) for name in (BASELINE, OURS, LEFT_OUT)}


@contextmanager
def _attending(model: Any, name: str) -> Iterator[None]:
    model.set_attn_implementation(name)
    yield


def _speed(timing: Timing, timings: dict[str, Timing]) -> Row:
    """``limit``: its time over that without attention, the most that it could gain. All are medians over the rounds."""
    baseline = timings[BASELINE]
    ratios = timing.ratios(baseline)
    limit = timings[LEFT_OUT].ratio(timing)
    return {
        **timing.row(),
        "ratio": timing.ratio(baseline),
        "ratio_p20": quantile(ratios, 0.2),
        "ratio_p80": quantile(ratios, 0.8),
        "rest_seconds": timings[LEFT_OUT].median,
        "limit": limit,
        "attention_share": 1 - 1 / limit,
    }


# --- the report -------------------------------------------------------------------------------------------------------

CSV = (
    *("case", "model", "size", "pass", "provider", "dtype", "status", "seconds", "p20", "p80", "rounds", "dropped"),
    *("clean", "ratio", "ratio_p20", "ratio_p80", "rest_seconds", "attention_share", "limit", "attention_ratio"),
    *("memory", "error", "allowed_share", "threads", "clock", "transformers", "message"),
)
HEAD = (
    *("model", "pass", "batch x tokens", "dtype", "sdpa", "attnkern", "times faster", "attention's share", "at most"),
    *("attention alone", "memory, sdpa", "memory, attnkern"),
)


def lines(rows: Iterable[Row]) -> Iterator[list[str]]:
    """The table's cells, as HEAD has them; the share is that of sdpa's time, and so is the bound."""
    rows = list(rows)
    theirs = {(row["case"], row["pass"]): row for row in rows if row["provider"] == BASELINE}
    for row in rows:
        base = theirs.get((row["case"], row["pass"]))
        if row["provider"] != OURS or base is None:
            continue
        names = [row["model"], row["pass"], row["size"], row["dtype"]]
        if row.get("seconds") is None:
            yield [*names, row["status"], *[""] * (len(HEAD) - 5)]
            continue
        alone, noisy = row.get("attention_ratio"), " ~" * report.noisy(row)
        yield [
            *names,
            *(report.duration(x["seconds"]) for x in (base, row)),
            f"{row['ratio']:.2f}{noisy}",
            f"{base['attention_share']:.0%}",
            f"{base['limit']:.2f}",
            "" if alone is None else f"{alone:.1f}",
            *("" if x.get("memory") is None else report.size(x["memory"]) for x in (base, row)),
        ]


def table(rows: Iterable[Row]) -> str:
    """In Markdown."""
    texts = [list(HEAD), ["---"] * len(HEAD), *lines(rows)]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in texts)


def markdown(rows: Sequence[Row], runs: Sequence[dict[str, Any]]) -> str:
    """The table as a page of its own."""
    version = next((row["transformers"] for row in rows), "")
    where = f"{machine_line(runs[-1])} | transformers {version}: `{runs[-1]['command']}`"
    return f"# What a model gains\n\n{where}\n\nA `~` is {report.NOISY}\n\n{table(rows)}"
