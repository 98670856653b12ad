"""`selfspec-bench paper`: a paper's tasks and arms as its authors ran them, and what follows for its claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from bench.commands.bench_options import PaperCommand
from bench.commands.session import header, loaded, progress, recording, show
from bench.datasets import SHIPPED_PROMPTS, EncodedPrompt
from bench.engines.own import SelfSpecEngine
from bench.measure import compare_outputs, in_turn, output_digest
from bench.models import open_tokenizer
from bench.papers.calibration import best_setting
from bench.papers.preset import PLAIN, Preset, arms_in, arms_of, load_preset, policy_of
from bench.papers.prompts import HUB, SHIPPED, PaperPrompt, paper_prompts
from bench.papers.spide_overlap import best_length, play_arms, record_drafts
from bench.papers.verdicts import RUNS, TIMED, loops, rouge_2
from bench.provenance import provenance
from bench.record import Line, Record, matching
from layerskip_models.checkpoints.loading import resolve_device
from policies import fixed
from selfspec import GenerationResult, SelfSpecGenerator
from selfspec.analysis.replay import AgreementTrace, trace_agreements
from selfspec.cli.console import one_line_errors
from selfspec.engine.policy_store import make_policy
from selfspec.exits.settings import ExitTraining
from selfspec.exits.training import train_exit
from selfspec.messages import encode_messages

_CALIBRATION_TEXTS, _CALIBRATION_TOKENS = 10, 256  # of each task
_BATCH_BYTES = 1 << 31  # of the KV caches of texts that share passes
_QUICK_SAMPLES, _QUICK_TOKENS = 2, 48
_QUICK_TRAINING = {"max_tokens": 2000, "epochs": 1.0, "answer_tokens": 32, "held_out_tokens": 500}


def paper(options: PaperCommand) -> None:
    with one_line_errors():
        preset = load_preset(options.paper, options.table or ())
        if not preset["trained"] and (options.adapters or options.data):
            raise ValueError(f"{options.paper} trains nothing: leave out --adapters and --data")
        if options.preverifier is not None and options.paper != "pacer":
            raise ValueError(f"{options.paper} has no pre-verifier: leave out --preverifier")
        if preset["trained"] and options.adapters is None and options.output is None:
            raise ValueError(f"{options.paper} trains adapters: give --output, beside which they go, or --adapters")
        if options.quick:
            tokens = options.max_new_tokens or _QUICK_TOKENS
            options = replace(options, samples=options.samples or _QUICK_SAMPLES, max_new_tokens=tokens)
        source, most = options.prompts or (HUB if find_spec("datasets") else SHIPPED), options.samples
        found = paper_prompts(preset["tasks"], source, None if most is None else most + _CALIBRATION_TEXTS)
        if options.dtype == "auto" and resolve_device(options.device).type == "cuda":
            options = replace(options, dtype=preset["dtype"])
        tokenizer = open_tokenizer(options.model)
        exits = None if preset["trained"] else "auto"
        generator = SelfSpecGenerator(loaded(options), tokenizer, exits=exits)
        run = _Run(preset, options, generator, tokenizer)
        fitting = {task: [one for one in own if run.fits(run.text(one, 0))] for task, own in found.items()}
        chosen = {task: own[:most] for task, own in fitting.items()}
        prompts = [one for own in chosen.values() for one in own]
        if not prompts:
            raise ValueError("no prompt leaves room for its answer in this model's context")
        encoded = [EncodedPrompt(id=one.id, task=one.task, ids=run.text(one, 0).ids) for one in prompts]
        about = {
            "paper": options.paper, "tables": options.table or [], "quick": options.quick,
            "preset": output_digest([preset]), "num_layers": run.model.num_layers, "runner": run.generator.runner,
            "source": {HUB: "the data sets", SHIPPED: "shipped prompts stand in"}.get(source, "files at hand"),
            "missing": [task for task, own in found.items() if not own],
            "too_long": {task: found[task].index(own[-1]) + 1 - len(own) for task, own in chosen.items() if own},
        }  # fmt: skip
        where = provenance(run.model.device, run.model.dtype)
        longest = max(run.length(one.task) for one in prompts)
        first = header("paper", where, options.model, encoded, longest, options.repeats, **about)
    with recording(options.output, first) as record:
        run.calibrate(record, {task: own[most or 0 :] or own for task, own in fitting.items()})
        run.measure(record, prompts)
    show(record.lines)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Text:
    """A prompt up to one of its turns, to be continued. sampling: arguments of `generate`, none for greedy decoding."""

    prompt: PaperPrompt
    turn: int
    ids: Tensor  # [n]
    temperature: float
    sampling: Mapping[str, float]

    @property
    def key(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "prompt": self.prompt.id, "turn": self.turn}


class _Run:
    """A preset's arms on a model."""

    def __init__(
        self, preset: Preset, options: PaperCommand, generator: SelfSpecGenerator, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.options, self.generator, self.tokenizer = options, generator, tokenizer
        self.model = generator.model
        self.on_gpu = self.model.device.type == "cuda"
        self.together = self.model.kernels is not None and not self.on_gpu
        self.settings: dict[str, str] = {}
        self.adapted: dict[str, SelfSpecGenerator] = {}
        self.learned: dict[tuple[str, float], dict[tuple[str, int], dict[str, Any]]] = {}
        timed = [claim for claim in preset["claims"] if claim.get("metric") in TIMED]
        if options.repeats < RUNS:  # no verdict in seconds, so nothing is timed
            preset, timed = {**preset, "claims": [one for one in preset["claims"] if one not in timed]}, []
        self.preset = preset
        self.timed = {(arm, claim.get("temperature", 0)) for claim in timed for arm in (PLAIN, *arms_in(claim))}

    def length(self, task: str) -> int:
        """Return the maximum number of new tokens."""
        own = int(self.preset["tasks"][task].get("max_new_tokens", self.preset["max_new_tokens"]))
        return min(self.options.max_new_tokens or own, own)

    def text(self, prompt: PaperPrompt, turn: int, temperature: str = "0", answers: Sequence[str] = ()) -> _Text:
        """Encode a prompt's turns with the answers between them, whole; several by the chat template, if there is one."""
        said = [text for both in zip_longest(prompt.turns[: turn + 1], answers) for text in both if text is not None]
        if len(prompt.turns) > 1 and self.tokenizer.chat_template:
            roles = cycle(("user", "assistant"))
            ids = encode_messages([{"role": role, "content": text} for role, text in zip(roles, said)], self.tokenizer)
        else:
            ids = self.tokenizer("\n\n".join(said), verbose=False)["input_ids"]
        sampling = self.preset["sampling"][temperature]
        whole = torch.tensor(ids, dtype=torch.long)
        return _Text(prompt=prompt, turn=turn, ids=whole, temperature=float(temperature), sampling=sampling)

    def fits(self, text: _Text) -> bool:
        return text.ids.numel() + self.length(text.prompt.task) <= self.model.max_positions

    def calibrate(self, record: Record, texts: Mapping[str, Sequence[PaperPrompt]]) -> None:
        """Search the baselines' settings by replay, and train what is to be trained."""
        texts = {task: own[: 1 if self.options.quick else _CALIBRATION_TEXTS] for task, own in texts.items() if own}
        with one_line_errors():
            found = record.once("settings", partial(self._searched, texts))
            self.settings = {**found["found"], "assist": f"{Path(fixed.__file__).resolve()}:AssistLength"}
            folder = self.options.preverifier
            try:
                judge = self.generator.load_preverifier(None if folder is None else str(folder))
                judged = int(judge.defaults.get("exit_layer", judge.exit_layers[0]))
                self.settings |= {"judged": str(judged), "preverifier": "" if folder is None else f"{folder},"}
            except (ValueError, OSError):
                if folder is not None:
                    raise
            for arm, changes in self.preset["trained"].items():
                exits = str(self._trained(arm, changes))
                self.adapted[arm] = SelfSpecGenerator(self.model, exits=exits)

    def _searched(self, texts: Mapping[str, Sequence[PaperPrompt]]) -> Line:
        traces: dict[str, list[AgreementTrace]] = {}
        with progress(sum(map(len, texts.values()))) as advance:
            for task, own in texts.items():
                ids, length = [self.text(one, 0).ids for one in own], min(self.length(task), _CALIBRATION_TOKENS)
                size = self._batch_size(max(map(len, ids)) + length)
                traces[task] = trace_agreements(self.generator, ids, length, size, self.model.num_layers // 2)
                for _ in own:
                    advance("every layer's choices")
        together = [trace for own in traces.values() for trace in own]
        num_layers, best = self.model.num_layers, best_setting(together)
        name = Path(self.options.model).name
        layer, length = self.preset["published"].get(name, (max(1, round(7 * num_layers / 32)), 6))
        found = {
            "ls": best, "layer": best.partition("-")[0], "fs": best_setting(together, adapts=True),
            "published": f"{layer}-{length}", "published_layer": str(layer),
            **{f"ls_{task}": best_setting(own) for task, own in traces.items()},
        }  # fmt: skip
        return {"found": found, "texts": len(together)}

    def _trained(self, arm: str, changes: Mapping[str, Any]) -> Path:
        """Return the folder of an arm's adapter: a finished one, or trained now, going on where that stopped."""
        folder = (self.options.adapters or cast(Path, self.options.output).with_suffix(".adapters")) / arm
        if (folder / "exits").is_dir():
            return folder / "exits"
        wide = {"steering_size": self.model.hidden_size} if changes.get("steering_size") == "hidden" else {}
        data = tuple(map(str, self.options.data or sorted(SHIPPED_PROMPTS.glob("*.jsonl"))))
        options = {
            "model": self.options.model, "device": self.options.device, "output_dir": str(folder), "data": data,
            "evaluate_on": data, "exit_layers": (int(self.settings["layer"]),), **changes, **wide,
            **(_QUICK_TRAINING if self.options.quick else {}),
        }  # fmt: skip
        return train_exit(ExitTraining(**options))

    def measure(self, record: Record, prompts: Sequence[PaperPrompt]) -> None:
        """Measure every arm on every prompt, temperature by temperature."""
        runs = [
            (temperature, prompt, arms)
            for temperature in [*self.preset["sampling"]][: 1 if self.options.quick else None]
            for prompt in prompts
            if (arms := arms_of(self.preset, float(temperature), prompt.task, self.options.quick))
        ]
        if (self.on_gpu or self.timed) and not record.is_complete:  # a longer text later throws a GPU's captures away
            longest = max((self.text(prompt, 0) for prompt in prompts), key=lambda text: text.ids.numel())
            for arm in dict.fromkeys(arm for *_, arms in runs for arm in arms if self._policy(longest, arm)):
                self._decode(longest, [arm])
            self.learned.clear()
        with progress(len(runs)) as advance:
            for number, (temperature, prompt, arms) in enumerate(runs):
                answers: list[str] = []
                for turn in range(len(prompt.turns)):
                    text = self.text(prompt, turn, temperature, answers)
                    if self.fits(text):
                        answers.append(self._measure(record, text, [PLAIN, *in_turn(arms[1:], number)]))
                advance(prompt.task)
        needed = {arm for claim in self.preset["claims"] for arm in arms_in(claim)}
        if needed & {*self.preset.get("simulated", [])} and record.find("simulated") is None:
            self._simulate(record, prompts)
            record.write("simulated")

    def _simulate(self, record: Record, prompts: Sequence[PaperPrompt]) -> None:
        """Play SPIDE's overlapped half over drafts that are recorded now; its lines are like those of other arms."""
        own = matching(record.lines, "sample", engine=PLAIN, temperature=0.0, turn=0, repeat=0)
        plain = {line["prompt"]: line for line in own if line["tokens"] > 1}
        prompts = [prompt for prompt in prompts if prompt.id in plain]
        exit_layer, drafted = int(self.settings["layer"]), []
        with progress(len(prompts)) as advance:
            for prompt in prompts:
                ids, size = self.text(prompt, 0).ids.tolist(), len(plain[prompt.id]["token_ids"])
                drafted.append(record_drafts(self.generator, ids, size, [exit_layer])[exit_layer])
                advance("drafts from every position")
        played = play_arms(drafted, best_length(drafted))
        for arm, (name, layers) in self.preset["simulated"].items():
            for prompt, one in zip(prompts, played[name]):
                names = ("temperature", "prompt", "turn", "repeat", "task", "loops")
                known = {name: plain[prompt.id][name] for name in names}
                made = {"layers": getattr(one, layers), "rounds": one.calls, "accepted": one.accepted}
                record.once("sample", partial(dict, tokens=one.tokens, **made), engine=arm, **known)

    def _measure(self, record: Record, text: _Text, arms: Sequence[str]) -> str:
        """Measure arms on one text, timed ones alone, the others together; return what plain decoding answers."""
        arms = [arm for arm in arms if self._policy(text, arm) is not None]
        alone = [arm for arm in arms if (arm, text.temperature) in self.timed]
        for repeat in range(self.options.repeats if alone else 0):
            for arm in in_turn(alone, repeat):
                self._sample(record, text, [arm], repeat)
        others = [arm for arm in arms if arm not in alone]
        for group in [others] if self.together else [[arm] for arm in others]:
            self._sample(record, text, group)
        plain = cast(Line, record.find("sample", engine=PLAIN, repeat=0, **text.key))
        return str(self.tokenizer.decode(plain["token_ids"], skip_special_tokens=True))

    def _sample(self, record: Record, text: _Text, arms: Sequence[str], repeat: int = 0) -> None:
        """Write what the record lacks of these arms. Those that keep what they learned learn again from what it has."""
        keys = {arm: {"engine": arm, **text.key, "repeat": repeat} for arm in arms}
        missing = [arm for arm in arms if record.find("sample", **keys[arm]) is None]
        kept = [] if record.is_complete else self.preset.get("kept", [])
        needed = [arm for arm in arms if arm in missing or arm in kept]
        if self.on_gpu and missing:  # once before, so that nothing is captured while it is timed
            self._decode(text, needed, repeat)
            torch.cuda.reset_peak_memory_stats()
        found = self._decode(text, needed, repeat)
        for arm in missing:
            plain = record.find("sample", engine=PLAIN, repeat=0, **text.key)
            record.write("sample", **keys[arm], **self._line(text, arm, found[arm], plain))

    def _line(self, text: _Text, arm: str, result: GenerationResult, plain: Line | None) -> Line:
        """Count a text's rounds. plain: its line by plain decoding, None if this is it."""
        tokens, stats = [*result.new_tokens], result.stats
        line: Line = {
            "task": text.prompt.task, "tokens": len(tokens), "loops": loops(tokens), "rounds": stats.rounds,
            "accepted": stats.num_accepted,
            "layers": stats.loaded_layers + stats.preverifier_layers + self.model.num_layers,  # the prompt's pass
        }  # fmt: skip
        if (arm, text.temperature) in self.timed:
            names = ("seconds", *(f"{phase}_seconds" for phase in ("learn", "preverify", "verify")))
            line |= {name: round(getattr(stats, name), 5) for name in names}
        if self.on_gpu:
            line["memory"] = torch.cuda.max_memory_allocated()
        if text.prompt.reference and text.sampling:
            written = str(self.tokenizer.decode(tokens, skip_special_tokens=True))
            line["rouge2"] = rouge_2(written, text.prompt.reference)
        if plain is None:
            line |= {"token_ids": tokens, "prompt_tokens": text.ids.numel()}
        elif not text.sampling and tokens != plain["token_ids"]:
            judge = SelfSpecEngine(self.generator, PLAIN)
            found = compare_outputs(text.ids, plain["token_ids"], tokens, judge, self.model.weights_dtype)
            line |= {"reference": PLAIN, **found}
        return line

    def _decode(self, text: _Text, arms: Sequence[str], repeat: int = 0) -> dict[str, GenerationResult]:
        """Continue a text by each arm, up to its EOS; arms of one policy come out alike, and run once."""
        length = self.length(text.prompt.task)
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "seed": repeat, "max_new_tokens": length}
        if text.sampling:
            options |= {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, **text.sampling}
        runs: dict[SelfSpecGenerator, dict[str, list[str]]] = {}
        kept, found = self.preset.get("kept", []), dict[str, GenerationResult]()
        here = text.prompt.id, text.turn
        for arm in arms:
            alike = arm if arm in kept else str(self._policy(text, arm))
            runs.setdefault(self.adapted.get(arm, self.generator), {}).setdefault(alike, []).append(arm)
        for generator, groups in runs.items():
            if len(groups) > 1:  # all go on from the rows that this keeps of the prompt
                generator.generate(text.ids, max_new_tokens=1, policy=PLAIN, do_sample=False)
            else:
                generator.bound.pool.forget()  # a text that is timed reads its prompt
            known = [self.learned.setdefault((own[0], text.temperature), {}) for own in groups.values()]
            policies = [make_policy(generator.bound, str(self._policy(text, own[0]))) for own in groups.values()]
            for policy, states in zip(policies, known):
                states.pop(here, None)
                if states:
                    policy.restore([*states.values()][-1])
            size = self._batch_size(text.ids.numel() + length)
            results = generator.generate_batch([text.ids] * len(groups), batch_size=size, policy=policies, **options)
            for own, policy, states, result in zip(groups.values(), policies, known, results):
                found |= dict.fromkeys(own, result)
                if own[0] in kept:
                    states[here] = policy.state()
        return found

    def _batch_size(self, rows: int) -> int:
        """Return how many texts of this many rows share passes: as many as memory holds, or one if company could matter."""
        return max(_BATCH_BYTES // (rows * self.generator.bound.pool.row_bytes), 1) if self.together else 1

    def _policy(self, text: _Text, arm: str) -> str | None:
        return policy_of(self.preset, arm, text.prompt.task, self.settings)
