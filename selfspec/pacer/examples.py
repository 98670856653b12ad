"""Data for Pacer's pre-verifier, made by the engine: greedy responses, and drafts from many positions of each.

A response with its drafts is a file. It exists whole or not at all, so an interrupted run goes on with the first missing one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from layerskip_models.kv_cache import KVCache
from layerskip_models.model import LayerSkipModel
from layerskip_models.prefill import prefill
from policies import DraftRow, FixedExit, NeverStop, ObservationSpec, Policy
from selfspec.engine.draft import Draft, make_drafts
from selfspec.engine.request import end_tokens, plain_request
from selfspec.engine.runners.eager import EagerRunner
from selfspec.engine.sequence import Sequence as EngineSequence
from selfspec.exits.training_texts import TextReader, digest, prompts_of
from selfspec.generator import SelfSpecGenerator
from selfspec.messages import template_of
from selfspec.pacer import PAPER
from selfspec.pacer.labels import DraftTrace
from selfspec.pacer.settings import DataPlan, PreVerifierTraining

_CACHE_BYTES = 1 << 30  # of the copies of a text's KV cache that exist at once
_PARTS = ("starts", "lengths", "accepted", "hidden", "features", "context")


def sample_prompts(config: PreVerifierTraining, generator: SelfSpecGenerator, *, held_out: bool) -> list[list[int]]:
    """Token ids of prompts: questions of conversations, prompts, and pieces of texts; each source gives its share.

    In a random order. A function of its arguments.
    """
    assert generator.tokenizer is not None
    length = min(config.prompt_tokens, generator.model.max_positions - 3)
    reader = TextReader(tokenizer=generator.tokenizer, template=template_of(config.model, None), length=length)
    count = config.num_held_out if held_out else config.num_prompts
    # Of more documents than would give as many prompts.
    enough = list(islice(prompts_of(config, reader, length, held_out=held_out), 4 * count))
    draw = np.random.default_rng([config.seed, held_out])
    return [enough[index] for index in draw.permutation(len(enough))[:count]]


def make_data(
    generator: SelfSpecGenerator,
    prompts: Sequence[Sequence[int]],
    plan: DataPlan,
    folder: Path,
    advance: Callable[[int], None] = lambda done: None,
) -> None:
    """Write the files that are missing. plan: names its exit layers. advance: called with the number of responses made.

    Raises ValueError when the folder has responses to other prompts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{index:05d}-{digest(prompt)}.safetensors" for index, prompt in enumerate(prompts)]
    if {*folder.glob("*.safetensors")} - {*paths}:
        raise ValueError(f"{folder} holds responses to other prompts: choose another output_dir")
    for index, (prompt, path) in enumerate(zip(prompts, paths)):
        if not path.exists():
            traces = draft_traces(generator, prompt, plan, seed=plan.seed + index)
            tensors = {
                f"{trace.exit_layer}/{part}": getattr(trace, part).contiguous().cpu()
                for trace in traces
                for part in _PARTS
            }
            temporary = path.with_suffix(".writing")
            save_file(tensors, temporary)
            temporary.replace(path)
        advance(index + 1)


class DraftRecorder(NeverStop):
    """Lets a draft go on for `behind` tokens after its first mismatch with the text, and keeps the features of its rows.

    text: the tokens that follow the draft's start.
    """

    observes = ObservationSpec(features=True)

    def __init__(self, text: Sequence[int], behind: int) -> None:
        self.text, self._left = text, behind
        self._mismatch = False
        self.features: list[Tensor] = []

    def stop_before_draw(self, row: DraftRow) -> bool:
        assert row.features is not None
        self.features.append(row.features)
        return False

    def stop_after_draw(self, row: DraftRow, token: int) -> bool:
        if self._mismatch:
            self._left -= 1
        self._mismatch = self._mismatch or token != self.text[row.num_drafted]
        return self._mismatch and self._left == 0

    def accepted(self, draft: Sequence[int]) -> int:
        """Count the draft's tokens before its first mismatch with the text."""
        pairs = zip(draft, self.text)
        return next((place for place, (drafted, token) in enumerate(pairs) if drafted != token), len(draft))


def drafts_at(
    model: LayerSkipModel,
    cache: KVCache,
    text: Tensor,
    positions: Sequence[int],
    exit_layer: int,
    plan: DataPlan,
    eos: Collection[int],
) -> Iterator[tuple[Draft, DraftRecorder]]:
    """Draft greedily with the engine's own loop from positions of a text; yield each draft with what was recorded of it.

    Each position is a sequence of its own, whose KV cache begins with a copy of the text's. The drafts grow side by side.
    cache: holds the text's rows, of the first `exit_layer` layers at least. text: int64 [n]. Draft i starts when positions[i]
    tokens are committed, 1 <= positions[i] < n, and is valid until the next one is asked for. It never reaches past the
    text's end, and ends with a drafted token of `eos`.
    """
    tokens, runner = text.tolist(), EagerRunner(model)
    at_once = min(max(_CACHE_BYTES // cache.num_bytes, 1), len(positions))
    copies = [KVCache(model, text.numel()) for _ in range(at_once)]
    for first in range(0, len(positions), at_once):
        recorders, drafts = [], []
        for start, copy in zip(positions[first:], copies):
            copy.take(cache, start - 1)
            recorders.append(DraftRecorder(tokens[start:], plan.window if plan.design == PAPER else plan.behind))
            length = min(plan.window, len(tokens) - start)
            policy = Policy(FixedExit(exit_layer, length, num_layers=model.num_layers), recorders[-1])
            sequence = EngineSequence(
                model, copy, plain_request(text[:start].cpu(), length + 1, frozenset(eos)), policy
            )
            sequence.pending = tokens[start - 1]
            drafts.append(Draft(sequence, exit_layer, length))
        make_drafts(runner, drafts)
        for draft, recorder in zip(drafts, recorders):
            if draft.error is not None:
                raise draft.error
            yield draft, recorder


def draft_traces(
    generator: SelfSpecGenerator, prompt: Sequence[int], plan: DataPlan, *, seed: int
) -> Iterator[DraftTrace]:
    """Respond to one prompt, then draft from the response's positions at every exit layer; a trace per layer.

    A response too short to draft in (under 2 tokens) gives none. Hidden states come in 16 bits.
    """
    model = generator.model
    room = min(plan.response_tokens, model.max_positions - len(prompt))
    result = generator.generate(
        list(prompt),
        max_new_tokens=room,
        do_sample=False,
        repetition_penalty=1.0,
        eos_token_id=[] if plan.ignore_eos else None,
    )
    text = result.sequences[0].to(model.device)
    possible = np.arange(len(prompt) + 1, text.numel())  # the first new token comes from prefill, whatever the policy
    if len(possible) == 0:
        return
    if plan.positions and plan.positions < len(possible):
        possible = np.sort(np.random.default_rng(seed).choice(possible, plan.positions, replace=False))
    ids = [] if plan.ignore_eos else end_tokens(model.generation_config, generator.tokenizer)
    stored = model.dtype if model.dtype.itemsize == 2 else torch.float16  # rounded less than bfloat16
    contexts = {layer: torch.empty(text.numel(), model.hidden_size, dtype=stored) for layer in plan.exit_layers}

    def capture(first: int, layers_done: int, hidden: Tensor) -> None:
        if layers_done in contexts:
            contexts[layers_done][first : first + hidden.shape[0]] = hidden

    with torch.inference_mode():
        cache = KVCache(model, text.numel())
        prefill(model, text, cache, stop=max(plan.exit_layers), capture=capture)
        for layer in plan.exit_layers:
            lengths, accepted, hidden, features = [], [], [], []
            for draft, recorder in drafts_at(model, cache, text, possible.tolist(), layer, plan, ids):
                lengths.append(draft.first)
                accepted.append(recorder.accepted(draft.tokens))
                hidden.append(draft.sequence.hidden[: draft.first].to(stored))
                features += recorder.features
            yield DraftTrace(
                exit_layer=layer,
                context=contexts[layer],
                starts=torch.from_numpy(possible.copy()),
                lengths=torch.tensor(lengths),
                accepted=torch.tensor(accepted),
                hidden=torch.cat(hidden),
                features=torch.stack(features),
            )


def read_traces(folder: Path) -> Iterator[DraftTrace]:
    """All traces of a folder that `make_data` filled, response by response, layers ascending."""
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for layer in sorted({int(name.partition("/")[0]) for name in tensors}):
            yield DraftTrace(exit_layer=layer, **{part: tensors[f"{layer}/{part}"] for part in _PARTS})
