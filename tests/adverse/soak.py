"""Many calls from several threads, then a server under hostile clients: texts stay exact, and memory ends where it was.

    python -m tests.adverse.soak --minutes 30 --seed 0

Half of the time is for calls. A small random model in float64 has two sets of weights, A and B. What it says with either is
computed before, by plain decoding on a generator that does nothing else. Then every thread makes random calls: greedy or
sampled, by several policies, on a generator that all share (over a transformers model whose weights other calls exchange
meanwhile) or on one of its own. Some are refused, broken off, interrupted, or make calls within calls. No call begins while
the weights are being written, so each is known to run on A or on B alone. The other half is the trial of `hostile_clients`.
"""

from __future__ import annotations

import argparse
import gc
import sys
import threading
import traceback
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from time import perf_counter
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessorList, StoppingCriteriaList

from bench.engines.servers import selfspec_server
from hostile_clients import COSTLY_OPTIONS, OPTIONS, HostileTrial, costly_trial, expected_answers
from layerskip_models import DEMO_PATH, from_transformers
from layerskip_models.checkpoints.synthetic import Recipe, synthetic_llama
from selfspec import SelfSpecGenerator

FIXED = ("ar", "ls:2-6", "svip:1")
"""Policies without a memory: a seed decides what they draw."""
LEARNING = ("auto", "del", "spide:2", "fs:2-3", "dv:1")
PROMPTS = ([5, 1, 7], [9], list(range(40)))
LENGTHS = (2, 32)
SEED = 5
KEPT_BYTES = 60_000
"""For texts that later prompts go on from, in each generator: a few of them."""
MOST_RSS = 48 << 20
"""Bytes of resident memory that may be gained between warm-up and end: the allocator's, which threads leave in pieces."""
MOST_TENSORS = 120
"""Tensors alive that may be gained: a state here and there that is between uses, seen to come and go by about 70."""
MOST_TENSOR_BYTES = 640 << 10
"""The bytes of those."""


class Key(NamedTuple):
    """What decides a text. weights, prompt: by number; seed: None when greedy."""

    weights: int
    prompt: int
    length: int
    policy: str
    seed: int | None


class Planned(Exception):
    """Raised on purpose by a streamer, a criterion or a processor."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What is alive. rss: resident bytes of this process. threads: of Python."""

    rss: int
    tensors: int
    tensor_bytes: int
    threads: int

    @staticmethod
    def now() -> Memory:
        """After a collection."""
        for _ in range(3):
            gc.collect()
        alive = [o for o in gc.get_objects() if issubclass(type(o), Tensor) and not o.is_mkldnn]
        rss = psutil.Process().memory_info().rss
        return Memory(rss, len(alive), sum(t.untyped_storage().nbytes() for t in alive), len(threading.enumerate()))


@dataclass(slots=True)
class SoakReport:
    """counts: calls by what became of them. failures: what should not have been, one line or traceback each."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    warm: Memory | None = None
    end: Memory | None = None

    def check_memory(self) -> None:
        """Add a failure for what has grown beyond its bound."""
        assert self.warm is not None and self.end is not None
        before, after = self.warm, self.end
        if after.rss - before.rss > MOST_RSS:
            self.failures.append(f"resident memory grew from {before.rss} to {after.rss} bytes")
        if after.tensors - before.tensors > MOST_TENSORS:
            self.failures.append(f"live tensors grew from {before.tensors} to {after.tensors}")
        if after.tensor_bytes - before.tensor_bytes > MOST_TENSOR_BYTES:
            self.failures.append(f"live tensors' bytes grew from {before.tensor_bytes} to {after.tensor_bytes}")
        if after.threads > before.threads:
            self.failures.append(f"threads grew from {before.threads} to {after.threads}")


def _llama(seed: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return synthetic_llama(config, Recipe(eps=0.4, sharpness=3.0, seed=seed), dtype=torch.float64, device="cpu")


class Soak:
    """seed: random seed of all choices. threads: how many make calls at the same time."""

    def __init__(self, *, threads: int, seed: int) -> None:
        self.report = SoakReport()
        self._num_threads, self._seed = threads, seed
        self._weights = [{name: p.detach().clone() for name, p in _llama(s).named_parameters()} for s in (1, 2)]
        self._source = _llama(1)
        models = [from_transformers(_llama(s), layout="plain") for s in (1, 2)]
        self._expected = self._texts([SelfSpecGenerator(model) for model in models])
        self._shared = SelfSpecGenerator(self._source, prefix_cache=KEPT_BYTES)
        self._version = 0
        self._writing = threading.Lock()  # the source's weights, or the start of a call that reads them
        self._own = [SelfSpecGenerator(models[0], prefix_cache=KEPT_BYTES) for _ in range(threads)]
        self._count = threading.Lock()

    def run(self, seconds: float) -> SoakReport:
        """Warm up for a quarter of the time, then the rest."""
        self._phase(seconds / 4, 0)
        self.report.warm = Memory.now()
        self._phase(seconds * 3 / 4, 1)
        self.report.end = Memory.now()
        self.report.check_memory()
        return self.report

    def _texts(self, generators: list[SelfSpecGenerator]) -> dict[Key, list[int]]:
        """What each call must say: greedy by any policy as plain decoding says, sampled as the policy draws alone."""
        texts: dict[Key, list[int]] = {}
        for version, generator in enumerate(generators):
            for number, prompt in enumerate(PROMPTS):
                greedy = generator.generate(prompt, max_new_tokens=max(LENGTHS), policy="ar").new_tokens
                for length in LENGTHS:
                    for name in (*FIXED, *LEARNING):
                        texts[Key(version, number, length, name, None)] = greedy[:length]
                    for name in FIXED:
                        result = generator.generate(prompt, max_new_tokens=length, policy=name, **_sampling(SEED))
                        texts[Key(version, number, length, name, SEED)] = result.new_tokens
        return texts

    def _phase(self, seconds: float, phase: int) -> None:
        end = perf_counter() + seconds
        threads = [
            threading.Thread(target=self._work, args=(index, Random(f"{self._seed} {phase} {index}"), end))
            for index in range(self._num_threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _work(self, index: int, random: Random, end: float) -> None:
        while perf_counter() < end and len(self.report.failures) < 20:
            try:
                outcome = self._one(index, random)
            except BaseException:
                outcome = "failed"
                self.report.failures.append(traceback.format_exc())
            with self._count:
                self.report.counts[outcome] += 1

    def _one(self, index: int, random: Random) -> str:
        """One call; returns its kind. AssertionError, or any error that was not planned, is a failure."""
        number, length = random.randrange(len(PROMPTS)), random.choice(LENGTHS)
        seed = random.choice((None, SEED))
        name = random.choice(FIXED if seed is not None else (*FIXED, *LEARNING))
        options: dict[str, Any] = {"max_new_tokens": length, "policy": name}
        if seed is not None:
            options.update(_sampling(seed))
        trouble = random.choice((None, None, None, "refused", "streamer", "criterion", "processor", "interrupt"))
        generator = random.choice((self._shared, self._own[index]))
        actor = _Actor(self, generator, random, trouble, length)
        if trouble == "refused":
            wrong = random.choice(
                ({"max_new_tokens": 0}, {"policy": "ls:9-1"}, {"top_p": 2.0}, {"seed": 1, "generator": 2})
            )
            try:
                with actor.binding():  # it may be the one that copies new weights
                    generator.generate(PROMPTS[number], **{**options, "do_sample": True, **wrong})
            except (ValueError, TypeError):
                return "refused"
            raise AssertionError(f"not refused: {wrong}")
        if trouble in ("criterion", "processor"):
            actor.attach(options, trouble)
        with actor.binding():
            stream = generator.stream(PROMPTS[number], **options)
            version = self._version if generator is self._shared else 0
        expected = self._expected[Key(version, number, length, name, seed)]
        read: list[int] = []
        kind = "exact"
        try:
            with stream:
                for piece in stream:
                    assert isinstance(piece, list)
                    read += piece
                    actor.between()
                    if trouble == "streamer" and random.random() < 0.2:
                        kind = "broken off"
                        break
        except Planned:
            kind = "raised"
        except KeyboardInterrupt:
            kind = "interrupted"
        if seed is not None and kind == "exact" and actor.raised:
            return "drafts cut short"  # a draft whose processor raises is none: the rest is drawn in another order
        assert read == expected[: len(read)], (name, number, length, seed, version, read, expected)
        assert kind != "exact" or len(read) == length
        return kind


class _Actor:
    """What happens around one call: planned errors inside it, updates and other calls between its rounds."""

    def __init__(
        self, soak: Soak, generator: SelfSpecGenerator, random: Random, trouble: str | None, length: int
    ) -> None:
        self._soak, self._generator, self._random, self._trouble = soak, generator, random, trouble
        self._at = random.randrange(1, 2 * length + 1)  # of the tokens, or never
        self.raised = False

    def binding(self) -> threading.Lock:
        """Held while a call begins."""
        return self._soak._writing

    def attach(self, options: dict[str, Any], trouble: str) -> None:
        """A criterion that answers False, or a processor that changes nothing, until its turn to raise."""

        def check(input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Any:
            self._at -= 1
            if self._at == 0:
                self.raised = True
                raise Planned(trouble)
            return False if trouble == "criterion" else scores

        if trouble == "criterion":
            options["stopping_criteria"] = StoppingCriteriaList([check])
        else:
            options["logits_processor"] = LogitsProcessorList([check])

    def between(self) -> None:
        soak, random = self._soak, self._random
        if self._trouble == "interrupt" and random.random() < 0.2:
            raise KeyboardInterrupt
        if random.random() < 0.02:  # exchange the weights, in one of several ways
            with soak._writing:
                soak._version = 1 - soak._version
                for name, parameter in soak._source.named_parameters():
                    parameter.data.copy_(soak._weights[soak._version][name])
        if random.random() < 0.02:
            with soak._writing:
                stream = self._generator.stream(PROMPTS[1], max_new_tokens=32, policy="auto")
                version = soak._version if self._generator is soak._shared else 0
            text = [token for piece in stream for token in piece]
            assert text == soak._expected[Key(version, 1, 32, "auto", None)], "a call within a call"


def _sampling(seed: int) -> dict[str, Any]:
    return {"do_sample": True, "temperature": 1.1, "top_p": 0.95, "seed": seed}


def main(arguments: list[str] | None = None) -> int:
    """The command; its exit status is 1 if anything was wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.adverse.soak", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="how long in all (default 30)")
    parser.add_argument("--threads", type=int, default=4, help="threads that make calls at the same time (default 4)")
    parser.add_argument("--clients", type=int, default=12, help="clients of the server, a third hostile (default 12)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--most-wait", type=float, default=2.0, help="seconds to a first token (default 2)")
    parser.add_argument("--most-growth", type=float, default=5.0, help="of the server's memory, in percent (default 5)")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # threads with a team each would wait for each other
    seconds = 30 * given.minutes
    calls = Soak(threads=given.threads, seed=given.seed).run(seconds)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in calls.counts.most_common())
    print(f"{calls.counts.total():,} calls from {given.threads} threads: {kinds}")
    print(f"after warm-up {calls.warm}\nat the end    {calls.end}", *calls.failures, sep="\n", flush=True)
    trial = HostileTrial(clients=given.clients, seed=given.seed, asked=expected_answers())
    with selfspec_server(DEMO_PATH, OPTIONS) as server:
        served = trial.run(server, seconds, most_wait=given.most_wait, most_growth=given.most_growth / 100)
    print("\n".join(served.lines()), flush=True)
    with selfspec_server(DEMO_PATH, COSTLY_OPTIONS) as server:
        costly = costly_trial(server, min(30.0, seconds), most_wait=given.most_wait)
    print("\n".join(costly.lines()))
    return int(bool(calls.failures or served.failures or costly.failures))


if __name__ == "__main__":
    sys.exit(main())
