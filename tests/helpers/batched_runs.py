"""Texts to be decoded alone and in a batch, what came of each, and when they join and leave."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import selfspec.cache.pool
from fuzz_models import looped_options, random_model, small_config
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.kernels.check import native_works
from layerskip_models.kv_cache import KVCache
from layerskip_models.linear import Layout
from looped_models import converted
from policies import Policy, RoundRecord
from random_adapters import adapted
from scripted_policies import EVERY_POLICY, ScriptedExit, StopAtTokens, StopBelow, named_policy
from selfspec import SelfSpecGenerator
from selfspec.engine.engine import Engine
from selfspec.engine.results import GenerationResult, StepOutput
from selfspec.engine.sequence import Sequence
from tiny_llama import VOCAB_SIZE, tiny_llama, tiny_tokenizer

NUM_LAYERS = 4
_NATIVE = native_works(torch.device("cpu"), torch.float32)
needs_native = pytest.mark.skipif(not _NATIVE, reason="no native kernels here")
LAYOUTS = ["plain", pytest.param("native", marks=needs_native)]
BATCH_SENSITIVE = ("auto", "auto+spide", "del:cost=measured")
"""Policies that may draft otherwise in a batch, since a row costs less there: greedy text is the same all the same."""

SCRIPTED: dict[str, Callable[[], Policy]] = {
    "changing plans": lambda: Policy(ScriptedExit([(1, 3), (None, 0), (3, 2), (2, 7)])),
    "stop before a draw": lambda: Policy(ScriptedExit([(2, 5), (3, 4)]), StopBelow(0.4)),
    "stop after a draw": lambda: Policy(ScriptedExit([(1, 6)]), StopAtTokens(range(0, 24, 3))),
}
POLICIES = ("ar", *SCRIPTED, *EVERY_POLICY)


def model_of(layout: Layout, num_layers: int = NUM_LAYERS) -> LayerSkipModel:
    """On our kernels in float32; on PyTorch's operators in float64, where a batch changes only a number's last digits.

    Two of its exits have adapters, and one is bare. For 4 bits its matrices are as wide as these need.
    """
    dtype = torch.float64 if layout == "plain" else torch.float32
    shape = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64} if layout == "int4" else {}
    llama = tiny_llama(num_layers=num_layers, heads=4, kv_heads=2, late_scale=0.5, dtype=dtype, seed=21, **shape)
    return adapted(from_transformers(llama, layout=layout), [1, 3])


@cache
def shared_model(layout: Layout, kv_dtype: str = "auto") -> LayerSkipModel:
    return model_of(layout).with_kv_dtype(kv_dtype)


def generator_of(layout: Layout, kv_dtype: str = "auto") -> SelfSpecGenerator:
    return SelfSpecGenerator(shared_model(layout, kv_dtype), tiny_tokenizer())


def random_kv_dtype(random: Random, layout: Layout) -> str:
    """On operators always the arithmetic's: there a batch changes last digits, and rounding may make more of them."""
    return random.choice(["auto", "bfloat16"]) if layout == "native" else "auto"


@cache
def looped_model(
    layout: Layout, *, num_loops: int = 4, normed: bool = True, vocab_size: int = VOCAB_SIZE
) -> LayerSkipModel:
    """Of 2 layers, in whose texts drafts of the first loop are often accepted, and often not.

    normed: with the final norm between loops. Types as in `model_of`.
    """
    options = looped_options("nanbeige", num_loops, skip_norm=not normed)
    config = small_config("nanbeige", 16, 24, 2, 4, 2, head_dim=8, vocab_size=vocab_size, rms_norm_eps=1e-6, **options)
    made: Any = random_model(config, late_scale=0.02, sharpness=1.5, seed=21)
    for part in (made.model.layers[0].self_attn.o_proj, made.model.layers[0].mlp.down_proj):
        part.weight.data.mul_(0.1)  # it runs in every loop
    return converted(made.to(torch.float64 if layout == "plain" else torch.float32), layout)


def looped_generator(layout: Layout, prefix_cache: int | None = None) -> SelfSpecGenerator:
    return SelfSpecGenerator(looped_model(layout), tiny_tokenizer(), prefix_cache=prefix_cache)


@dataclass(frozen=True, kw_only=True)
class Wish:
    """One text: the call it is, the step before which it joins, and the one before which it is cancelled, if it is.

    policy: a name; made afresh for each run, so that no text learns from another.
    """

    prompt: list[int]
    policy: str = "ar"
    exit_layer: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    joins: int = 0
    leaves: int | None = None

    def arguments(self, model: LayerSkipModel) -> dict[str, Any]:
        """Of `generate`, but for the prompt."""
        made = SCRIPTED[self.policy]() if self.policy in SCRIPTED else named_policy(self.policy, self.exit_layer, model)
        return {"policy": made, "trace": True, **self.options}


@dataclass(kw_only=True)
class Course:
    """What came of a text: its tokens as they came, its result or error, and the rows of its cache at the end."""

    tokens: list[int] = field(default_factory=list)
    result: GenerationResult | None = None
    error: Exception | None = None
    rows: Tensor | None = None  # [2, layers, kv_heads, length - 1, head_dim]
    context: Tensor | None = None  # hidden states that were kept for the policy, [layers, length - 1, hidden]
    steps: list[int] = field(default_factory=list)  # those that brought something

    def take(self, step: int, progress: StepOutput, text: Sequence) -> None:
        self.steps.append(step)
        self.tokens += progress.tokens
        self.result, self.error = progress.result, progress.error
        if progress.result is None:
            return
        end = text.length - 1
        assert text.cache.length == end
        self.rows = torch.stack([text.cache.keys.mT[:, :, :end], text.cache.values[:, :, :end]])
        layers = text.observes.context_layers
        if layers:
            self.context = torch.stack([text.states.rows(layer, 0, end) for layer in layers])


def run_together(
    generator: SelfSpecGenerator,
    wishes: abc.Sequence[Wish],
    watch: Callable[[Engine, list[StepOutput]], None] | None = None,
) -> list[Course]:
    """Every text to its end, or until it is cancelled."""
    courses = [Course() for _ in wishes]
    texts: dict[int, tuple[int, Sequence]] = {}  # by ticket: its number, itself
    step, to_come = 0, dict(enumerate(wishes))
    with generator.engine() as engine:
        while to_come or len(engine):
            for index, wish in [*to_come.items()]:
                if wish.joins <= step:
                    del to_come[index]
                    ticket = engine.add(wish.prompt, **wish.arguments(generator.model))
                    texts[ticket] = index, engine._slots[ticket].sequence
            for ticket, (index, _) in texts.items():
                if wishes[index].leaves is not None and wishes[index].leaves <= step:
                    engine.cancel(ticket)
            found = engine.step()
            for progress in found:
                index, text = texts[progress.ticket]
                courses[index].take(step, progress, text)
            if watch is not None:
                watch(engine, found)
            step += 1
    return courses


def run_alone(model: LayerSkipModel, wish: Wish) -> Course:
    """The same text, with nobody beside it, from beginning to end."""
    generator = SelfSpecGenerator(model, tiny_tokenizer(), runner="eager")
    return run_together(generator, [dataclasses.replace(wish, joins=0, leaves=None)])[0]


def facts(record: RoundRecord) -> dict[str, Any]:
    """All that a round's record says, but for times and for how many shared it."""
    left_out = {"batch_size", *(f.name for f in dataclasses.fields(record) if f.name.endswith("seconds"))}
    found = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name not in left_out}
    for name in ("shadow", "rejected"):
        shadow = found[name]
        if shadow is not None:
            p = shadow.acceptance_probabilities
            found[name] = (
                shadow.layers,
                shadow.tokens.tolist(),
                shadow.confidences.tolist(),
                shadow.target_tokens.tolist(),
                None if p is None else p.tolist(),
            )
    return found


def assert_same(found: Course, expected: Course, *, rounds: bool = True, exact: bool = True) -> None:
    """The same text, ended for the same reason. rounds: by the same rounds. exact: bit for bit, keys and values as well."""
    assert found.tokens == expected.tokens
    assert (found.error is None) == (expected.error is None)
    if expected.result is None:
        return
    assert found.result is not None
    assert torch.equal(found.result.sequences, expected.result.sequences)
    assert (found.result.stop_reason, found.result.text) == (expected.result.stop_reason, expected.result.text)
    assert found.result.new_tokens == found.tokens
    if rounds:
        traces = [[facts(record) for record in course.result.trace] for course in (found, expected)]
        if exact:
            assert traces[0] == traces[1]
        else:
            names = ("draft_tokens", "num_accepted", "exit_layer", "max_speculations", "stop_cause", "tokens")
            assert [[one[name] for name in names] for one in traces[0]] == [
                [one[name] for name in names] for one in traces[1]
            ]
    for ours, theirs in ((found.rows, expected.rows), (found.context, expected.context)):
        assert (ours is None) == (theirs is None)
        if ours is not None and exact:
            assert torch.equal(ours, theirs)
        elif ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9 if ours.dtype == torch.float64 else 1e-3)


def in_threads(works: abc.Iterable[Callable[[], object]], meanwhile: Callable[[], object] = lambda: None) -> None:
    """Do all of it at once, and something in this thread; raises the first error."""
    errors: list[BaseException] = []

    def run(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    meanwhile()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]


class CacheCount:
    """The KV caches that a pool has made, and how many of them still exist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[weakref.ref[KVCache]] = []
        monkeypatch.setattr(selfspec.cache.pool, "KVCache", self._make)

    def _make(self, *arguments: Any) -> KVCache:
        cache = KVCache(*arguments)
        self.made.append(weakref.ref(cache))
        return cache

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(cache() is not None for cache in self.made)
