"""A server's engine over several processes: the workers take the same steps, and every text is that of a single process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

from layerskip_models import DEMO_PATH, load_model, load_tokenizer
from layerskip_models.parallel.shard_loading import load_shard
from preverifiers import random_module
from rank_processes import results_of
from scripted_policies import made_up_cost
from selfspec import SelfSpecGenerator
from selfspec.cache.copy_index import CopyStore
from selfspec.distributed.rank0_engine import end_workers, rank0_engines, run_worker
from selfspec.engine.calibrate import use_cost
from selfspec.engine.engine import Engine
from selfspec.pacer.network import FOLDER, save_preverifier
from selfspec.serve.served_policies import ServedPolicies
from selfspec.serve.structured_output import GrammarProcessor, Vocabulary
from selfspec.serve.token_logprobs import LogprobRecorder
from tiny_llama import tiny_llama, tiny_tokenizer

OWN = "ls:1-3"
SCHEMA = {"type": "array", "items": {"type": "integer"}, "minItems": 30}  # longer than the texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served")
    llama = tiny_llama(heads=4, kv_heads=2, dtype=torch.float64, late_scale=0.4, seed=11, vocab_size=4096)
    llama.save_pretrained(path)
    (path / FOLDER).mkdir()
    save_preverifier(random_module(load_model(path, dtype="float64", device="cpu")), path / FOLDER)
    return path


class Unsendable(LogitsProcessor):
    """Holds what cannot be pickled."""

    def __init__(self) -> None:
        self.held = lambda: None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


def vocabulary() -> Vocabulary:
    """Each process its own."""
    return Vocabulary(load_tokenizer(DEMO_PATH), 4096, [0])


def copies(generator: SelfSpecGenerator) -> CopyStore:
    """Each process its own: something to copy after 5, 1, 7 and any token."""
    return generator.copy_store([[5, 1, 7, token, 2, 9] for token in range(4096)])


def _serve(generator: SelfSpecGenerator, engine: Engine, words: Vocabulary, policies: ServedPolicies) -> dict[str, Any]:
    """Texts that join in the middle of others, one that is cancelled, policies that learn and come back; one that follows a
    schema."""
    recorder = LogprobRecorder(2, 1)
    asked: list[dict[str, Any]] = [
        {"prompt": [5, 1, 7], "policy": policies.choose(None, repeats=False)},
        {"prompt": [9, 3], "policy": policies.choose("del", repeats=False), "do_sample": True, "seed": 4},
        {"prompt": [2], "policy": policies.choose("spide:2", repeats=False)},
        {"prompt": [5, 1, 7, 2], "policy": policies.choose("del", repeats=False), "do_sample": True, "seed": 5},
        {
            "prompt": [4, 4], "policy": policies.choose(None, repeats=True), "do_sample": True, "seed": 6,
            "logits_processor": LogitsProcessorList([recorder]),
        },
        {
            "prompt": [7], "policy": policies.choose("auto+pacer", repeats=False),
            "logits_processor": LogitsProcessorList([GrammarProcessor(words, SCHEMA, 1)]),
        },
        {"prompt": [3], "policy": policies.choose("pacer", repeats=True), "do_sample": True, "seed": 7},
        {"prompt": [5, 1, 7], "policy": policies.choose("copy:3", repeats=False), "copy_from": copies(generator)},
    ]  # fmt: skip
    texts: dict[int, list[int]] = {}
    logprobs: list[float] = []
    with engine:
        waiting = [generator.check(max_new_tokens=10, **one) for one in asked]
        cancelled = engine.join(generator.check([1, 1], max_new_tokens=40, policy=OWN))
        step = 0
        while len(engine) or waiting:
            if waiting and step % 2 == 0:
                engine.join(waiting.pop(0))
            if step == 3:
                engine.cancel(cancelled)
            for progress in engine.step():
                assert progress.error is None
                texts.setdefault(progress.ticket, []).extend(progress.tokens)
                if progress.ticket == 6:
                    logprobs += [one.logprob for one in recorder.committed(progress.tokens)]
            step += 1
    texts.pop(cancelled)
    return {"texts": texts, "logprobs": [round(value, 6) for value in logprobs]}


def _on_a_rank(path: Path) -> dict[str, Any] | None:
    generator = SelfSpecGenerator(load_shard(path, dtype="float64", device="cpu"), tiny_tokenizer())
    model: Any = generator.model
    words = vocabulary()
    use_cost(model, made_up_cost(4))  # to measure would take longer than all the rest
    if model.ranks.rank:
        ServedPolicies(generator, OWN)  # as a worker's translator makes them
        run_worker(generator, OWN, copies(generator), [words])
        return {"pass_seconds": generator.load_preverifier.pass_seconds}
    make = rank0_engines(generator, OWN, [words])
    policies = ServedPolicies(generator, OWN)
    found = [_serve(generator, make(), words, policies) for _ in range(2)]  # what policies learned stays
    engine = rank0_engines(generator, OWN)()
    try:
        engine.join(generator.check([5], max_new_tokens=2, logits_processor=LogitsProcessorList([Unsendable()])))
    except ValueError as error:
        refusal = str(error)
    engine.close()
    end_workers(generator)
    return {"found": found, "refusal": refusal, "pass_seconds": generator.load_preverifier.pass_seconds}


def test_clients_get_the_texts_of_one_process(folder: Path) -> None:
    generator = SelfSpecGenerator(load_model(folder, dtype="float64", device="cpu"), tiny_tokenizer())
    use_cost(generator.model, made_up_cost(4))
    words, policies = vocabulary(), ServedPolicies(generator, OWN)
    expected = [_serve(generator, Engine(), words, policies) for _ in range(2)]
    assert all(len(text) == 10 for text in expected[0]["texts"].values())
    assert len(expected[0]["logprobs"]) == 10
    rank0, *workers = _ranks(folder)
    assert workers == [{"pass_seconds": rank0["pass_seconds"]}] != [{"pass_seconds": {}}]
    assert words.bytes_of(expected[0]["texts"][7][0]) == b"["
    assert rank0["found"] == expected
    assert "cannot be sent to the other processes" in rank0["refusal"]


def _ranks(folder: Path) -> list[Any]:
    return [one["value"] for one in results_of(2, _told, folder)]


def _told(folder: Path) -> dict[str, Any]:
    return {"value": _on_a_rank(folder)}


def test_a_recorder_is_not_needed_elsewhere() -> None:
    """It would keep a row of logits for every token that nobody reads."""
    copy = pickle.loads(pickle.dumps(LogprobRecorder(3, 2)))
    scores = torch.ones(1, 4)
    assert copy(torch.zeros(1, 3, dtype=torch.long), scores) is scores
    assert not hasattr(copy, "_rows")
