"""`selfspec-bench gpu`: on a GPU, in a few minutes, whether texts are the same, and speed beside transformers'.

A process of its own measures, a line of the record at a time. What fails is a line, too, and the next measurement goes on;
if the process hangs or loses the device, the next step begins in a new one.
"""

from __future__ import annotations

import gc
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import Any

import torch
from torch import Tensor

from bench.commands.batch_command import measured_texts
from bench.commands.bench_options import GpuCommand
from bench.commands.session import recording, show
from bench.engines.own import GREEDY, EngineLostError, SelfSpecEngine, TimedEngine
from bench.engines.peer_process import Peer, PeerProcess
from bench.engines.transformers_engine import TransformersEngine, transformers_engines
from bench.machine import WeightBytes, measure_bandwidth, synchronize
from bench.measure import in_turn, output_digest
from bench.models import load_network, num_layers_of
from bench.provenance import provenance
from bench.record import Line
from layerskip_models import from_transformers
from layerskip_models.checkpoints.loading import resolve_device
from layerskip_models.families import IN_TRANSFORMERS
from selfspec import SelfSpecGenerator
from selfspec.analysis.comparison import first_difference
from selfspec.cli.console import one_line_errors

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "initializer_range": 0.3,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
}  # fmt: skip
_POLICIES = ("ls:3-4", "dv:3", "del", "auto:cost=layers", "copy:4")
_ANSWER_SECONDS = 100.0  # transformers compiles for 30


def gpu(options: GpuCommand) -> None:
    with one_line_errors():
        device = resolve_device(options.device)
        on_gpu = device.type == "cuda"
        shapes = (options.shapes or ("llama3.2-1B,llama3-8B,llama2-7B" if on_gpu else "small")).split(",")
        for shape in shapes:
            num_layers_of(f"synthetic:{shape}")  # raises for an unknown one
        where = provenance(device, torch.bfloat16 if on_gpu else torch.float32)
        where |= {"commit": where["commit"] or options.commit, "versions": _versions()}
    repeats, texts = (2, (1, 8)) if options.quick else (4, (1, 8, 32))
    asked = {"model": f"synthetic weights ({', '.join(shapes)})", "repeats": repeats, "quick": options.quick}
    first = {"kind": "run", "command": "gpu", "configuration": asked, "provenance": where}
    steps: dict[str, Callable[[Callable[..., Line]], None]] = {"exactness": _exactness}
    steps |= {shape: partial(_speeds, shape, repeats, texts) for shape in shapes}
    steps["transformers"] = partial(_speeds, shapes[0], repeats, ())
    make, end = partial(Peer, engines=[_Measurer(device)]), monotonic() + 60 * options.minutes
    with recording(options.output, first) as record, ExitStack() as running:
        peer: PeerProcess | None = None

        def ask(kind: str, **key: Any) -> Line:
            if monotonic() > end or peer is None:
                raise EngineLostError("no time was left")
            line = record.find(kind, **key) if kind != "model" else None
            line = line or record.write(**peer.call(0, "measure", kind, key))
            if kind == "model" and line["kind"] != kind:
                raise EngineLostError(f"there is no {kind}")
            return line

        for name, step in {} if record.is_complete else steps.items():
            try:
                peer = peer or running.enter_context(PeerProcess(name, make, timeout=_ANSWER_SECONDS))
                step(ask)
            except EngineLostError as error:
                record.write(**_lost(name, str(error)))
                if monotonic() < end:  # else the others only have to be written down, too
                    running.close()
                    peer = None
    show(record.lines)


def _versions() -> dict[str, str]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(PackageNotFoundError, OSError, subprocess.SubprocessError):
        driver = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        return {"Triton": version("triton"), "driver": driver}
    return {}


def _lost(name: str, reason: str) -> Line:
    return {"kind": "lost", "engine": name, "label": name, "reason": f"{name}: {' '.join(reason.split())[:400]}"}


def _exactness(ask: Callable[..., Line]) -> None:
    for dtype in ("float32", "bfloat16"):
        for family in IN_TRANSFORMERS:
            ask("exact", family=family, dtype=dtype)


def _speeds(shape: str, repeats: int, sizes: tuple[int, ...], ask: Callable[..., Line]) -> None:
    """Measure one text and several, engines in turn; without sizes, beside transformers. Repeat -1 is the first call."""
    where = {"shape": shape, "beside": "eager" if sizes else "transformers"}
    engines = ask("model", **where)["engines"]
    for repeat in range(-1, repeats):
        for engine in in_turn(engines, repeat + 1):
            ask("speed", **where, engine=engine, repeat=repeat)
        for texts in sizes:
            for engine in in_turn(engines[:3], repeat + 1):
                ask("texts", **where, engine=engine, repeat=repeat, texts=texts)


def _drawn(count: int, seed: int = 0) -> Tensor:
    return torch.randint(_SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


class _Measurer(TimedEngine):
    """What the process runs. Each engine of ours has a generator of its own, and shares no CUDA graphs with the others."""

    name = label = "gpu"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._prompt_tokens, self._new_tokens = (128, 128) if device.type == "cuda" else (12, 8)

    def measure(self, kind: str, key: dict[str, Any]) -> Line:
        """Return a line, or one that says why there is none. Raises if the device answers no more."""
        try:
            return {"kind": kind, **key, **getattr(self, f"_{kind}")(**key)}
        except Exception as error:
            synchronize(self._device)
            return _lost(" ".join([kind, *map(str, key.values())]), f"{type(error).__name__}: {error}")

    def _exact(self, family: str, dtype: str) -> Line:
        """Count texts of a tiny random model that differ: from transformers', by policy, three in each pass, and sampled."""
        torch.manual_seed(3)
        window = {"sliding_window": 9} if family == "mistral" else {}
        network = (
            IN_TRANSFORMERS[family].model(IN_TRANSFORMERS[family].config(**_SIZES, **window)).eval().to(self._device)
        )
        for parameter in network.parameters():  # frequencies of rotary embeddings stay in float32, as in loading
            parameter.data = parameter.data.to(getattr(torch, dtype))
        prompts, count = [_drawn(3 + 4 * seed, seed) for seed in range(3)], min(self._new_tokens, 48)
        theirs = TransformersEngine(network, "transformers", "transformers")
        expected = [theirs.run([prompt], count).tokens[0] for prompt in prompts]
        model = from_transformers(network)
        own, eager = (SelfSpecGenerator(model, runner=runner, prefix_cache=0) for runner in ("auto", "eager"))

        def texts(policy: str, engine: SelfSpecGenerator = own, **more: Any) -> list[list[int]]:
            options = {**GREEDY, "max_new_tokens": count, "policy": policy, **more}
            return [engine.generate(prompt, **options).new_tokens for prompt in prompts]

        sampled: dict[str, Any] = {"do_sample": True, "seed": 7}
        plain, drafting = texts("ar"), _POLICIES[0]
        batch = own.generate_batch(prompts, batch_size=3, max_new_tokens=count, policy=drafting, **GREEDY)
        pairs = {
            "plain decoding beside transformers": (plain, expected),
            **{f"{policy} beside plain decoding": (texts(policy), plain) for policy in _POLICIES},
            "three texts in each pass beside each alone": ([one.new_tokens for one in batch], plain),
            "samples beside the eager runner's": (texts(drafting, **sampled), texts(drafting, eager, **sampled)),
        }
        other = {what: sum(map(list.__ne__, *pair)) for what, pair in pairs.items()}
        parted = [*map(first_difference, expected, plain)]
        return {"runner": own.runner, "texts": len(prompts), "parted_at": parted, "other": other}

    def _model(self, shape: str, beside: str) -> Line:
        self._engines: dict[str, TimedEngine] = {}
        self._generators: dict[str, SelfSpecGenerator] = {}
        gc.collect()
        network = load_network(f"synthetic:{shape}", "auto", str(self._device))
        model = from_transformers(network, release=beside == "eager")
        self._weights, exit_layer = WeightBytes.of(model), model.num_layers // 4
        for policy in ("ar", f"ls:{exit_layer}-4", "auto", "ar, eager") if beside == "eager" else ("ar",):
            policy, comma, mark = policy.partition(", ")
            generator = SelfSpecGenerator(model, runner="eager" if mark else "auto", prefix_cache=0)
            engine = SelfSpecEngine(generator, policy)
            engine.name, engine.label = engine.name + comma + mark, engine.label + comma + mark
            self._engines[engine.name], self._generators[engine.name] = engine, generator
        if beside != "eager":
            others = [one for one in transformers_engines(network, (exit_layer, 4)) if "default" not in one.name]
            others.sort(key=lambda one: one.name == "transformers:static")  # it compiles: last
            self._engines |= {one.name: one for one in others}
        return {"engines": [*self._engines], "bandwidth": measure_bandwidth(self._device)}

    def _speed(self, engine: str, **_: Any) -> Line:
        made = self._engines[engine].generate(_drawn(self._prompt_tokens), self._new_tokens)
        first, stats = made.time_to_first_token or 0.0, made.stats or {}
        runners = self._generators[engine].bound.idle_runners if engine in self._generators else ()
        return {
            "label": self._engines[engine].label, "tokens": len(made.tokens) - 1, "seconds": made.seconds - first,
            "first_token_seconds": first, "bytes": self._weights.moved(stats) if stats else None,
            "captures": sum(len(getattr(runner, "_graphs", ())) for runner in runners), "output": output_digest(made.tokens),
            **{name: stats.get(name) for name in ("runner", "rounds", "acceptance_rate", "draft_seconds", "learn_seconds")},
        }  # fmt: skip

    def _texts(self, engine: str, texts: int, **_: Any) -> Line:
        prompts = [_drawn(self._prompt_tokens // 2, seed) for seed in range(texts)]
        return measured_texts(self._engines[engine], prompts, self._new_tokens // 2)
