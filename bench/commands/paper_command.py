"""`selfspec-bench paper`: a paper's tasks and arms as its authors ran them, and what follows for its claims."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import torch

from bench.calibration import calibrated
from bench.commands.bench_options import PaperCommand
from bench.commands.session import header, loaded, progress, recording, show
from bench.datasets import SHIPPED_PROMPTS, EncodedPrompt
from bench.engines.own import SelfSpecEngine
from bench.measure import compare_outputs, in_turn, output_digest
from bench.models import open_tokenizer
from bench.papers import assist
from bench.papers.calibration import best_setting, finite_state_etpl, fixed_etpl, packed
from bench.papers.preset import PLAIN, Preset
from bench.papers.prompts import PaperPrompt, paper_prompts
from bench.papers.verdicts import loops, rouge_2
from bench.provenance import provenance
from bench.record import Line, Record
from layerskip_models.checkpoints.loading import resolve_device
from selfspec import SelfSpecGenerator
from selfspec.analysis.replay import trace_agreement
from selfspec.cli.console import one_line_errors
from selfspec.exits.settings import ExitTraining
from selfspec.exits.training import train_exit
from selfspec.messages import encode_messages

_CALIBRATION_TEXTS, _CALIBRATION_TOKENS = 10, 256
_QUICK_SAMPLES, _QUICK_TOKENS = 2, 48


def paper(options: PaperCommand) -> None:
    with one_line_errors():
        preset = Preset.load(options.paper, options.table or ())
        if preset.trained and options.adapters is None and options.output is None:
            raise ValueError(
                f"{options.paper} trains adapters: give --output, beside which they are kept, or --adapters FOLDER"
            )
        most = _QUICK_SAMPLES if options.quick and options.samples is None else options.samples
        spare = 0 if most is None else -(-_CALIBRATION_TEXTS // len(preset.tasks))
        found, missing = paper_prompts(preset.tasks, options.prompts, None if most is None else most + spare)
        tokens = options.max_new_tokens or (_QUICK_TOKENS if options.quick else None)
        if options.dtype == "auto" and resolve_device(options.device).type == "cuda":
            options = replace(options, dtype=preset.dtype)
        generator = SelfSpecGenerator(loaded(options), open_tokenizer(options.model), prefix_cache=0, exits="auto")
        bench = _PaperRun(preset, options, generator, tokens)
        bench.choose(found, most)
        about = {
            "paper": options.paper, "preset": output_digest([asdict(preset)]), "quick": options.quick,
            "tables": options.table or [], "source": bench.source(options.prompts), "missing": missing,
            "too_long": bench.too_long, "num_layers": generator.model.num_layers, "runner": generator.runner,
        }  # fmt: skip
        where = provenance(generator.model.device, generator.model.dtype)
        longest = max(bench.length_of(prompt.task) for prompt in bench.prompts)
        first = header("paper", where, options.model, bench.encoded, longest, options.repeats, **about)
    with recording(options.output, first) as record:
        with one_line_errors():
            bench.run(record)
    show(record.lines)


@dataclass(eq=False)
class _PaperRun:
    """A preset on a model. tokens: new ones of every text, None for the preset's."""

    preset: Preset
    options: PaperCommand
    generator: SelfSpecGenerator
    tokens: int | None
    prompts: list[PaperPrompt] = field(default_factory=list)
    encoded: list[EncodedPrompt] = field(default_factory=list)
    too_long: dict[str, int] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    adapted: dict[str, SelfSpecGenerator] = field(default_factory=dict)

    def choose(self, found: Sequence[PaperPrompt], most: int | None) -> None:
        """Keep the prompts to measure, without those that leave no room for an answer, and others to calibrate on."""
        by_task: dict[str, list[tuple[PaperPrompt, EncodedPrompt]]] = {}
        for prompt in found:
            ids = self.ids_of([prompt.turns[0]])
            own = by_task.setdefault(prompt.task, [])
            if len(ids) + self.length_of(prompt.task) > self.generator.model.max_positions:
                self.too_long[prompt.task] = self.too_long.get(prompt.task, 0) + 1
            else:
                own.append((prompt, EncodedPrompt(id=prompt.id, task=prompt.task, ids=ids)))
        measured = [pair for own in by_task.values() for pair in own[:most]]
        if not measured:
            raise ValueError(f"no prompt leaves room for its answer in {self.generator.model.max_positions} positions")
        self.prompts, self.encoded = [prompt for prompt, _ in measured], [one for _, one in measured]
        spare = [own[most:] or own for own in by_task.values()] if most is not None else [*by_task.values()]
        turns = [pair[1] for turn in zip_longest(*spare) for pair in turn if pair is not None]
        self.calibration = turns[: 2 if self.options.quick else _CALIBRATION_TEXTS]

    def length_of(self, task: str) -> int:
        own = int(self.preset.tasks[task].get("max_new_tokens", self.preset.max_new_tokens))
        return own if self.tokens is None else min(self.tokens, own)

    def ids_of(self, said: Sequence[str]) -> torch.Tensor:
        """Encode what a user and the model said in turn, whole: with the chat template for a conversation, if there is one."""
        tokenizer = self.generator.tokenizer
        assert tokenizer is not None
        if len(said) > 1 and tokenizer.chat_template:
            roles = ("user", "assistant")
            messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(said)]
            return torch.tensor(encode_messages(messages, tokenizer), dtype=torch.long)
        return torch.tensor(tokenizer("\n\n".join(said), verbose=False)["input_ids"], dtype=torch.long)

    def source(self, prompts: str | None) -> str:
        """Name where prompts are from, without this machine's folders."""
        stand_in = not re.search(r"/\d+$", self.prompts[0].id)
        return (
            "shipped prompts stand in" if stand_in else "the data sets" if prompts in (None, "hub") else "files at hand"
        )

    def run(self, record: Record) -> None:
        """Calibrate, train what is to be trained, and measure every arm on every prompt."""
        line = record.once("settings", self._settings)
        self.settings = {**line["found"], **self._local()}
        metrics = {claim.get("metric") for claim in self.preset.claims}
        if "rows" in metrics:
            calibrated(self.generator, record)
        for name, changes in self.preset.trained.items():
            self.adapted[name] = SelfSpecGenerator(
                self.generator.model, exits=str(self._trained(name, changes)), prefix_cache=0
            )
        chosen = [(float(name), sampling) for name, sampling in self.preset.sampling.items()]
        chosen = chosen[:1] if self.options.quick else chosen
        runs = [
            (temperature, sampling, number, prompt, arms)
            for temperature, sampling in chosen
            for number, prompt in enumerate(self.prompts)
            if (arms := self.preset.arms_of(temperature, prompt.task, self.options.quick))
        ]
        with progress(sum(len(arms) * len(prompt.turns) for *_, prompt, arms in runs)) as advance:
            if self.generator.model.device.type == "cuda":  # a longer text later would throw captures away
                longest = max(self.encoded, key=lambda one: one.ids.numel())
                for arm in self.preset.arms_of(0, longest.task, self.options.quick):
                    self._generate(longest.ids, longest.task, arm, {}, 0)
            for temperature, sampling, number, prompt, arms in runs:
                said: list[str] = []
                for turn, text in enumerate(prompt.turns):
                    said.append(text)
                    ids = self.ids_of(said)
                    if len(ids) + self.length_of(prompt.task) > self.generator.model.max_positions:
                        break  # the answers before it left no room
                    plain = self._measure(
                        record, prompt, turn, ids, temperature, sampling, in_turn(arms[1:] or arms, number)
                    )
                    said.append(self.generator.tokenizer.decode(plain["token_ids"], skip_special_tokens=True))  # type: ignore[union-attr]
                    for arm in arms:
                        advance(arm)
        if "other_setting" in metrics or "overlapped" in metrics:
            for one in self.encoded:
                record.once("trace", partial(self._trace, one), prompt=one.id)

    def _measure(
        self,
        record: Record,
        prompt: PaperPrompt,
        turn: int,
        ids: torch.Tensor,
        temperature: float,
        sampling: Mapping[str, float],
        arms: Sequence[str],
    ) -> Line:
        """Measure the arms on one text, plain decoding first, whose line is returned."""
        plain: Line | None = None
        timed = self.preset.timed() | {PLAIN}
        for repeat in range(self.options.repeats):
            order = [PLAIN, *(arm for arm in arms if arm != PLAIN)]
            for arm in in_turn(order, repeat) if repeat else order:
                if repeat and arm not in timed:
                    continue
                key = {"engine": arm, "temperature": temperature, "prompt": prompt.id, "turn": turn, "repeat": repeat}
                make = partial(self._sample, prompt, ids, arm, sampling, repeat, plain)
                if self._policy(arm, prompt.task) is not None:
                    line = record.once("sample", make, **key)
                    plain = line if plain is None else plain
        assert plain is not None
        return plain

    def _sample(
        self,
        prompt: PaperPrompt,
        ids: torch.Tensor,
        arm: str,
        sampling: Mapping[str, float],
        repeat: int,
        plain: Line | None,
    ) -> Line:
        """Time one text and count its rounds. On a GPU it runs once before, so that no capture is made while it is timed."""
        on_gpu = self.generator.model.device.type == "cuda"
        if on_gpu:
            self._generate(ids, prompt.task, arm, sampling, repeat)
            torch.cuda.reset_peak_memory_stats()
        engine, generation = self._generate(ids, prompt.task, arm, sampling, repeat)
        stats, tokens = cast(Mapping[str, Any], generation.stats), [*generation.tokens]
        line: Line = {
            "task": prompt.task, "tokens": len(tokens), "seconds": round(generation.seconds, 5), "rounds": stats["rounds"],
            "drafted": stats["num_drafted"], "accepted": stats["num_accepted"],
            "layers": stats["loaded_layers"] + stats["preverifier_layers"], "loops": loops(tokens),
            "learning": round(stats["learn_seconds"], 5), "preverifying": round(stats["preverify_seconds"], 5),
        }  # fmt: skip
        if on_gpu:
            line["memory"] = torch.cuda.max_memory_allocated()
        if prompt.reference and sampling:
            line["rouge2"] = rouge_2(
                self.generator.tokenizer.decode(tokens, skip_special_tokens=True), prompt.reference
            )  # type: ignore[union-attr]
        if arm == PLAIN:
            line["token_ids"] = tokens
        elif not sampling and plain is not None and tokens != plain["token_ids"]:
            dtype = self.generator.model.weights_dtype
            difference = compare_outputs(ids, plain["token_ids"], tokens, engine, dtype)
            line |= {**difference, "reference": PLAIN}
        return line

    def _generate(self, ids: torch.Tensor, task: str, arm: str, sampling: Mapping[str, float], repeat: int) -> Any:
        """Continue a text by an arm, up to its EOS. Returns the engine, too."""
        policy = self._policy(arm, task)
        options: dict[str, Any] = {"do_sample": bool(sampling), "eos_token_id": None, "seed": 0}
        if sampling:
            options |= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **sampling}
        engine = SelfSpecEngine(self.adapted.get(arm, self.generator), policy or PLAIN, sampling=options)
        return engine, engine.generate(ids, self.length_of(task), repeat)

    def _policy(self, arm: str, task: str) -> str | None:
        return self.preset.policy(arm, task, self.settings)

    def _local(self) -> dict[str, str]:
        """Return what policies' names need of this machine, which no record has."""
        folder = self.options.preverifier
        named = {"assist": f"{Path(assist.__file__).resolve()}:Assist"}
        return named | ({} if folder is None else {"preverifier": f"{folder},"})

    def _settings(self) -> Line:
        """Search the baselines' settings by replay, and scale the published ones to the model's depth."""
        num_layers = self.generator.model.num_layers
        with progress(len(self.calibration)) as advance:
            traces = []
            for one in self.calibration:
                room = self.generator.model.max_positions - one.ids.numel()
                length = min(self.length_of(one.task), _CALIBRATION_TOKENS, room)
                traces.append(trace_agreement(self.generator, one.ids, length))
                advance("calibration")
        (layer, length), finite = best_setting(traces, fixed_etpl), best_setting(traces, finite_state_etpl)
        name = Path(self.options.model).name
        published, drafts = self.preset.published.get(name, (max(1, round(7 * num_layers / 32)), 6))
        late = range(min(3 * num_layers // 32 + 1, num_layers - 1), num_layers)
        found = {
            "ls": f"{layer}-{length}", "layer": str(layer), "fs": "-".join(map(str, finite)),
            "published": f"{published}-{drafts}", "published_layer": str(published), "late": "/".join(map(str, late)),
        }  # fmt: skip
        try:
            own = self.generator.load_preverifier(None)
            judged = int(own.defaults.get("exit_layer", own.exit_layers[0]))
            found |= {"own": "", "preverifier": "", "judged": str(judged)}
        except (ValueError, OSError):
            if self.options.preverifier is not None:
                judged = self.generator.load_preverifier(str(self.options.preverifier)).exit_layers[0]
                found["judged"] = str(judged)
        return {"found": found, "texts": [one.id for one in self.calibration]}

    def _trained(self, name: str, changes: Mapping[str, Any]) -> Path:
        """Return the folder of an adapter: a finished one of --adapters, or trained into it now, going on where it stopped."""
        folder = self.options.adapters or cast(Path, self.options.output).with_suffix(".adapters")
        quick = {"max_tokens": 2000, "epochs": 1.0, "answer_tokens": 32, "held_out_tokens": 500, "sequence_length": 64}
        options = {
            "model": self.options.model, "output_dir": str(folder / name), "exit_layers": (int(self.settings["layer"]),),
            "data": tuple(map(str, self.options.data or [SHIPPED_PROMPTS])), "device": self.options.device,
            **changes, **(quick if self.options.quick else {}),
        }  # fmt: skip
        if options.get("steering_size") == "hidden":
            options["steering_size"] = self.generator.model.hidden_size
        finished = folder / name / "exits"
        return finished if finished.is_dir() else train_exit(ExitTraining(**options))

    def _trace(self, one: EncodedPrompt) -> Line:
        """Record at which positions of the model's own text each layer would have said the same."""
        trace = trace_agreement(self.generator, one.ids, self.length_of(one.task))
        return {"task": one.task, "agrees": {str(layer): packed(row) for layer, row in trace.agrees.items()}}
