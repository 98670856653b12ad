"""Data for Pacer's pre-verifier, made by the engine: greedy responses, and drafts from many positions of each.

One shard holds a few responses; a shard exists whole or not at all, so an interrupted run goes on with the first missing one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from layerskip_models import LayerSkipModel
from layerskip_models.checkpoints.fingerprint import fingerprint, same_weights
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import prefill
from layerskip_models.text_files import write_text
from layerskip_models.training.documents import DataSource, is_held_out, read_documents
from layerskip_models.training.evaluation import read_prompts
from selfspec.generator import SelfSpecGenerator
from selfspec.pacer.batched_drafts import accepted_counts, draft_side_by_side
from selfspec.pacer.labels import DraftTrace

_PARTS = ("starts", "lengths", "accepted", "hidden", "features", "context")


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlan:
    """How drafts are made. positions: sampled per response, 0 for every one. window: tokens per draft, fewer at the end.
    behind: how far a draft goes on behind its first mismatch. ignore_eos: an EOS token ends neither responses nor drafts."""

    exit_layers: tuple[int, ...]
    response_tokens: int = 128
    window: int = 50
    behind: int = 4
    positions: int = 48
    ignore_eos: bool = False
    shard_responses: int = 16
    seed: int = 0


def sample_prompts(
    sources: Sequence[DataSource],
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int,
    max_tokens: int,
    held_out: bool,
    holdout_fraction: float,
    exclude: Sequence[str],
    seed: int,
) -> list[list[int]]:
    """Token ids of `count` prompts: pieces of max_tokens/8 to max_tokens tokens of the sources, each giving its share.

    A .jsonl[.gz] source gives its prompts whole, cut to their last max_tokens tokens. Of texts, documents that a hash keeps
    for evaluation are used only when held_out is true, the others only when it is false. In a random order; a function of
    its arguments.
    """
    rng = np.random.default_rng([seed, held_out])
    total = sum(source.weight for source in sources)
    chosen: list[list[int]] = []
    for number, source in enumerate(sources):
        share = sum(s.weight for s in sources[: number + 1]) / total
        wanted = round(count * share) - len(chosen)
        if wanted == 0:
            continue
        if ".jsonl" in source.path.name:
            texts = read_prompts(source.path, 10**9)
            picked = [texts[i] for i in rng.permutation(len(texts))[:wanted]]
            chosen += [tokenizer(text, verbose=False)["input_ids"][-max_tokens:] for text in picked]
            continue
        texts = [t for t in read_documents(source.path, exclude) if is_held_out(t, holdout_fraction) == held_out]
        if not texts:
            raise ValueError(f"no {'held-out ' if held_out else ''}document in {source.path.name}")
        # As many documents as are needed, in a random order, joined as a tokenizer's stream would be.
        stream: list[int] = []
        for index in rng.permutation(len(texts)):
            stream += [*tokenizer(texts[index], add_special_tokens=False, verbose=False)["input_ids"]]
            stream += [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
            if len(stream) > 4 * wanted * max_tokens:
                break
        for _ in range(wanted):
            length = min(int(rng.integers(max(max_tokens // 8, 1), max_tokens + 1)), len(stream))
            start = int(rng.integers(0, len(stream) - length + 1))
            chosen.append(stream[start : start + length])
    return [chosen[index] for index in rng.permutation(len(chosen))]


def make_data(
    generator: SelfSpecGenerator,
    prompts: Sequence[Sequence[int]],
    plan: DataPlan,
    folder: Path,
    advance: Callable[[int], None] = lambda done: None,
) -> None:
    """Write the shards that are missing. advance: called with the number of responses made.

    Raises ValueError when the folder's data were made by another plan, from other prompts or with another model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    mine = json.loads(json.dumps(_description(generator.model, prompts, plan)))
    recorded = folder / "data.json"
    if recorded.exists():
        theirs = json.loads(recorded.read_text(encoding="utf-8"))
        known = same_weights(theirs.pop("fingerprint", ()), mine["fingerprint"])
        if not known or theirs != {name: value for name, value in mine.items() if name != "fingerprint"}:
            raise ValueError(f"{folder} holds data made with other options: choose another folder, or delete it")
    else:
        write_text(recorded, json.dumps(mine, indent=1) + "\n")
    size = plan.shard_responses
    for number, first in enumerate(range(0, len(prompts), size)):
        path = folder / f"shard-{number:05d}.safetensors"
        if not path.exists():
            tensors: dict[str, Tensor] = {}
            for index, prompt in enumerate(prompts[first : first + size]):
                for trace in draft_traces(generator, prompt, plan, seed=plan.seed + first + index):
                    for part in _PARTS:
                        tensors[f"{index}/{trace.exit_layer}/{part}"] = getattr(trace, part).contiguous().cpu()
                advance(first + index + 1)
            temporary = path.with_suffix(".writing")
            save_file(tensors, temporary)
            temporary.replace(path)
        advance(min(first + size, len(prompts)))


def _description(model: LayerSkipModel, prompts: Sequence[Sequence[int]], plan: DataPlan) -> dict[str, Any]:
    text = json.dumps([list(map(int, prompt)) for prompt in prompts])
    return {
        **asdict(plan),
        "num_prompts": len(prompts),
        "prompts": sha256(text.encode()).hexdigest()[:12],
        "fingerprint": fingerprint(model),
    }


def draft_traces(
    generator: SelfSpecGenerator, prompt: Sequence[int], plan: DataPlan, *, seed: int
) -> Iterator[DraftTrace]:
    """Respond to one prompt, then draft from the response's positions at every exit layer; a trace per layer.

    A response too short to draft in (under 2 tokens) gives none. Hidden states come in float16 from a float32 model: half
    the disk, and rounded less than bfloat16 would.
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
    num_prompt, size = len(prompt), text.numel()
    possible = np.arange(num_prompt + 1, size)  # the first new token comes from prefill, whatever the policy
    if len(possible) == 0:
        return
    if plan.positions and plan.positions < len(possible):
        possible = np.sort(np.random.default_rng(seed).choice(possible, plan.positions, replace=False))
    eos: list[int] = []
    if not plan.ignore_eos:
        ids = model.generation_config.eos_token_id
        eos = ids if isinstance(ids, list) else [] if ids is None else [ids]
    with torch.inference_mode():
        cache, contexts = _run_text(model, text, plan.exit_layers)
        for layer in plan.exit_layers:
            drafts = draft_side_by_side(
                model,
                cache,
                text,
                possible.tolist(),
                exit_layer=layer,
                window=plan.window,
                behind=plan.behind,
                eos=eos,
            )
            stored = torch.float16 if model.dtype in (torch.float32, torch.float64) else model.dtype
            yield DraftTrace(
                exit_layer=layer,
                context=contexts[layer].to(stored),
                starts=torch.from_numpy(possible.copy()),
                lengths=drafts.lengths.cpu(),
                accepted=accepted_counts(drafts, text, possible.tolist()),
                hidden=drafts.hidden.to(stored),
                features=drafts.features,
            )


def _run_text(model: LayerSkipModel, text: Tensor, exit_layers: Sequence[int]) -> tuple[KVCache, dict[int, Tensor]]:
    """The KV cache of a text's first exit layers, and every row's hidden state at each of them."""
    cache = KVCache(model, text.numel())
    contexts = {
        layer: torch.empty(text.numel(), model.hidden_size, dtype=model.dtype, device=model.device)
        for layer in exit_layers
    }

    def capture(first: int, layers_done: int, hidden: Tensor) -> None:
        if layers_done in contexts:
            contexts[layers_done][first : first + hidden.shape[0]] = hidden

    prefill(model, text, cache, stop=max(exit_layers), capture=capture)
    return cache, contexts


def read_traces(folder: Path) -> Iterator[DraftTrace]:
    """All traces of a folder that `make_data` filled, response by response, layers ascending."""
    for path in sorted(folder.glob("shard-*.safetensors")):
        yield from read_shard(path)


def read_shard(path: Path) -> Iterator[DraftTrace]:
    """The traces of one shard."""
    with safe_open(path, "pt") as shard:
        names = sorted({tuple(map(int, name.split("/")[:2])) for name in shard.keys()})  # noqa: SIM118
        for index, layer in names:
            yield DraftTrace(exit_layer=layer, **{part: shard.get_tensor(f"{index}/{layer}/{part}") for part in _PARTS})
