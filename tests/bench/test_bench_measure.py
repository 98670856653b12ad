"""Timing engines against each other: in this process, and each in its own, where one that is lost touches no other."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from bench.datasets import EncodedPrompt
from bench.engines.own import EngineLostError, Generation, SelfSpecEngine, TimedEngine
from bench.engines.peer_process import Peer, PeerProcess
from bench.engines.transformers_engine import TransformersEngine, transformers_engines
from bench.measure import Measurement, reference_of
from bench.record import Line, Record, matching, read_record
from tiny_llama import reference_greedy, tiny_llama

PROMPT = torch.tensor([3, 1, 2])


class Fake(TimedEngine):
    """Continues a prompt by these tokens, or by its last id. In the call of number `at`, from 0 on, `end` is called."""

    arithmetic = torch.float32
    end: Callable[[], object] | None = None
    at = 0

    def __init__(self, name: str, tokens: list[int] | None = None, logits: tuple[float, ...] = (0, 1), **about: Any):
        self.name, self.label, self.tokens, self.logits = name, f"the {name}", tokens, logits
        self.calls: list[str] = []
        self.asked: list[list[int]] = []
        vars(self).update(about)

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        if self.at == 0 and self.end is not None:
            self.end()
        self.at -= 1
        self.calls.append(self.name)
        tokens = [int(prompt[-1])] * max_new_tokens if self.tokens is None else self.tokens
        return Generation(tokens=tuple(tokens), seconds=1.5, stats={"pid": os.getpid(), "calls": len(self.calls)})

    def next_logits(self, ids: Tensor) -> Tensor:
        self.asked.append(ids.tolist())
        return torch.tensor(self.logits, dtype=torch.float32)


def measured(*engines: Any) -> tuple[list[Line], list[str]]:
    """The record of two prompts with two repeats each, and the labels that the bar showed."""
    record = Record(None, {"kind": "run", "configuration": {"max_new_tokens": 3, "repeats": 2, "warmups": 1}})
    prompts = [EncodedPrompt(id=name, task="a", ids=PROMPT + number) for number, name in enumerate("pq")]
    shown: list[str] = []
    measurement = Measurement(engines=engines, prompts=prompts, record=record, advance=shown.append)
    measurement.run()
    assert len(shown) == measurement.num_runs
    return record.lines, shown


def test_engines_alternate_and_take_turns_at_going_first() -> None:
    calls: list[str] = []
    lines, shown = measured(*(Fake(name, calls=calls) for name in "abc"))
    assert (
        "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"
    )  # warm-up; then the first prompt twice, and the second
    assert len(shown) == 15
    samples = [(line["engine"], line["prompt"], line["repeat"]) for line in matching(lines, "sample")]
    assert len(samples) == 12  # the warm-ups are not among them
    assert {*samples} == {(engine, prompt, repeat) for engine in "abc" for prompt in "pq" for repeat in (0, 1)}


def test_outputs_are_compared_with_the_first_engines_and_judged_by_its_own_arithmetic() -> None:
    # The reference's logits are 0.0005 apart: closer than float32 can be held to. 0.1 is so for bfloat16 alone.
    reference = Fake("reference", [1, 2, 3], (0.5, 0.5005, 0.1))
    lines, _ = measured(reference, Fake("same", [1, 2, 3]), Fake("tie", [1, 9, 9]))
    outputs = {(line["engine"], line["prompt"]): line for line in matching(lines, "output")}
    assert outputs["same", "p"]["first_difference"] is None
    assert outputs["tie", "q"]["first_difference"] == 1
    assert outputs["tie", "q"]["reference_logit_gap"] == pytest.approx(0.0005, rel=1e-3)
    assert outputs["tie", "q"]["near_tie"] is True
    assert reference.asked == [[3, 1, 2, 1], [4, 2, 3, 1]]  # the prompts and what both agree on
    first = Fake("first", [5, 6, 7], (0.5, 0.6))
    lines, _ = measured(first, Fake("coarse", [5, 7, 7], arithmetic=torch.bfloat16), Fake("fault", [5, 7, 7]))
    assert [line["near_tie"] for line in matching(lines, "output")] == [None, True, False] * 2


def test_rounded_weights_are_compared_but_only_judged_among_themselves() -> None:
    first = Fake("first", [5, 6, 7], (0.0, 2.0))
    rounded = Fake("int8", [5, 6, 8], (0.0, 4.0), weights="int8")
    drafting = Fake("int8:drafting", [5, 9, 9], weights="int8")
    engines = [first, rounded, drafting]
    assert [reference_of(engine, engines).name for engine in engines] == ["first", "first", "int8"]
    outputs = {line["engine"]: line for line in matching(measured(*engines)[0], "output")}
    fields = ("reference", "first_difference", "reference_logit_gap", "near_tie")
    assert [outputs["int8"][name] for name in fields] == ["first", 2, 2.0, None]
    assert [outputs["int8:drafting"][name] for name in fields] == ["int8", 1, 4.0, False]


def test_an_engine_that_stops_early_is_an_error_and_an_unsteady_one_is_counted() -> None:
    with pytest.raises(RuntimeError, match="the short returned 2 tokens for p, not 3"):
        measured(Fake("short", [1, 2]))
    tokens = [0, 0, 0]
    lines, _ = measured(Fake("unsteady", tokens, end=lambda: tokens.__setitem__(0, 1), at=2))
    assert [line["repeats_that_differ"] for line in matching(lines, "output")] == [1, 0]


def test_selfspec_never_stops_and_tells_its_counts(engine64):
    engine64.model.generation_config.eos_token_id = list(range(24))  # whatever comes would end the text
    plain, drafting = SelfSpecEngine(engine64, "ar"), SelfSpecEngine(engine64, "ls:2-3")
    first, second = plain.generate(PROMPT, 20), drafting.generate(PROMPT, 20)
    assert first.tokens == second.tokens and len(first.tokens) == 20
    assert first.stats["rounds"] == 19 > second.stats["rounds"]
    assert plain.next_logits(PROMPT).argmax() == first.tokens[0]


def test_a_warmed_up_policy_begins_with_what_earlier_prompts_taught(engine64):
    name = "auto:cost=layers"
    lasting, reset = SelfSpecEngine(engine64, name, warmed_up=True), SelfSpecEngine(engine64, name)
    assert (lasting.name, lasting.label) == (f"selfspec:{name}:warmed-up", f"selfspec, {name}, warmed up")
    first, second = torch.tensor([1, 2, 3]), torch.tensor([5, 6, 7])
    policy, known = engine64.resolve_policy(name), []
    original = policy.exit.plan

    def plan(context):
        if context.round_index == 0:
            known.append(sum(policy.exit.chances.rows))
        return original(context)

    policy.exit.plan = plan
    for engine in (lasting, reset, lasting):
        engine.generate(first, 24)
    for engine in (lasting, lasting, reset):
        engine.generate(second, 24)
    alone, again = known[1], known[5]
    assert known[0] == known[2] == alone  # repeats of a prompt do not teach each other
    assert known[3] == known[4] > again
    lasting.forget()
    lasting.generate(second, 24)
    assert known[6] == again


def crash() -> None:
    faulthandler.disable()  # pytest's
    print("loading ...", file=sys.stderr)
    os.write(2, b"illegal instruction in tile_load\n")
    os.kill(os.getpid(), signal.SIGILL)


def fail() -> None:
    raise RuntimeError("no room\nfor the cache")


def noise() -> None:
    print("llama_context: n_ctx = 512")
    os.write(1, b"\x80\x04 not a message\n" * 1000)


CRASHED = "is lost: it was ended by SIGILL (illegal instruction in tile_load)"


def started(*engines: Fake, timeout: float = 20.0) -> PeerProcess:
    return PeerProcess("the peer", partial(Peer, engines=engines, about={"version": 7}), timeout=timeout)


def test_an_engine_there_is_what_it_is_here_and_what_it_prints_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with started(Fake("one", end=noise), Fake("two", weights="int8")) as peer:
        one, two = peer.engines
        assert (one.name, two.label, two.weights, peer.about) == ("one", "the two", "int8", {"version": 7})
        assert one.generate(PROMPT, 2).tokens == (2, 2)
        generation = two.generate(PROMPT, 4)
        assert (generation.tokens, generation.seconds) == ((2, 2, 2, 2), 1.5)
        assert generation.stats is not None
        pid = generation.stats["pid"]
        assert pid != os.getpid()
        assert torch.equal(one.next_logits(PROMPT).float(), Fake("one").next_logits(PROMPT))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert capfd.readouterr() == ("", "")


def test_a_process_that_waited_for_another_runs_two_tokens_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.engines.peer_process._SETTLING_SECONDS", 0.0)
    with started(Fake("one"), Fake("two")) as peer, started(Fake("three")) as other:
        (one, two), (three,) = peer.engines, other.engines
        said = [engine.generate(PROMPT, 3).stats["calls"] for engine in (one, one, three, two, one)]
    assert said == [1, 2, 1, 1, 4]


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (crash, CRASHED),
        (lambda: os._exit(3), "is lost: it ended with status 3"),
        (fail, "is lost: RuntimeError: no room for the cache"),
        (lambda: time.sleep(60), "is lost: it did not answer within 0.5 seconds"),
    ],
)
def test_how_a_peer_is_lost_is_said_at_every_call(
    end: Callable[[], Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(Fake("one", end=end, at=1), Fake("two"), timeout=0.5) as peer:
        one, two = peer.engines
        one.generate(PROMPT, 2)
        for engine in (one, two):
            with pytest.raises(EngineLostError) as raised:
                engine.generate(PROMPT, 2)
            assert str(raised.value) == f"the peer {message}"
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(EngineLostError, match="the peer is lost: "):  # before it has any engine
        PeerProcess("the peer", end, timeout=0.5)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_the_others_go_on(at: int) -> None:
    """Whenever one crashes: in its warm-up, on the first prompt, on the second one."""
    with started(Fake("dies", end=crash, at=at)) as first, started(Fake("lives")) as second:
        lines, _ = measured(Fake("ours"), *first.engines, *second.engines)
    assert [(line["engine"], line["reason"]) for line in matching(lines, "lost")] == [("dies", f"the peer {CRASHED}")]
    for name in ("ours", "lives"):
        runs = [(line["prompt"], line["repeat"]) for line in matching(lines, "sample", engine=name)]
        assert runs == [("p", 0), ("p", 1), ("q", 0), ("q", 1)]
        outputs = matching(lines, "output", engine=name)
        assert [(line["reference"], line["first_difference"]) for line in outputs] == [("ours", None)] * 2
    with started(Fake("ours", end=crash, at=at)) as peer, pytest.raises(EngineLostError, match="SIGILL"):
        measured(*peer.engines, Fake("other"))  # all are compared with the first


SMALL = ["--prompt-tokens", 8, "--max-new-tokens", 6, "--repeats", 2]


def test_a_lost_peer_is_listed(invoke, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.engines.catalogue.transformers_peer", lambda work: crash())
    record = tmp_path / "peers.jsonl"
    command = ["peers", "--model", checkpoint, "--policy", "ls:2-3", "--output", record, "--num-samples", 2]
    result = invoke(*command, *SMALL)
    assert f"left out: transformers {CRASHED}" in result.stderr
    lines = read_record(record)
    names = ["selfspec:ar", "selfspec:ls:2-3"]
    assert [line["engine"] for line in matching(lines, "engine")] == names
    others = matching(lines, "sample") + matching(lines, "output")
    assert {line["engine"] for line in others} == {*names}
    assert len(others) == 2 * 2 * 3  # engines, prompts, two samples and an output
    assert "| left out |" in invoke("report", record).output
    monkeypatch.setattr("bench.engines.catalogue.open_model", lambda *_: crash())
    result = invoke(*command[:-4], *SMALL, status=1)  # without the first one there is nothing to compare with
    assert result.stderr == f"error: selfspec {CRASHED}\n"


@pytest.mark.parametrize("dies", [False, True])
def test_batches_of_a_peer(
    dies: bool, invoke, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`selfspec-bench batch` goes on without one that is lost, and compares the others' texts."""
    if dies:
        monkeypatch.setattr(TransformersEngine, "run", lambda *arguments: crash())
    record = tmp_path / "batch.jsonl"
    command = ["batch", "--model", checkpoint, "--policy", "ls:2-3", "--output", record, "--texts", "1,3"]
    result = invoke(*command, "--dtype", "float64", *SMALL)
    lines = read_record(record)
    names = ["selfspec:ls:2-3"] if dies else ["selfspec:ls:2-3", "transformers:generate"]
    batches = matching(lines, "batch")
    assert sorted((line["engine"], line["texts"]) for line in batches) == [(n, k) for n in names for k in (1, 1, 3, 3)]
    assert all(line["tokens"] == 6 * line["texts"] for line in batches)
    assert len({(line["texts"], line["output"]) for line in batches}) == 2
    assert [line["label"] for line in matching(lines, "lost")] == ["transformers generate"] * dies
    assert (f"left out: transformers {CRASHED}" in result.stderr) == dies
    text = invoke("report", record).output
    assert ("left out" in text) == dies and ("| transformers generate | equal | equal |" in text) != dies


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_every_mode_is_greedy_without_eos_and_leaves_the_model_as_it_was(number, llama64, monkeypatch):
    expected = reference_greedy(llama64, [1, 5, 9, 2, 2], max_new_tokens=17)  # the same weights, without EOS
    llama = tiny_llama(dtype=torch.float64, seed=3)
    config = GenerationConfig(  # would sample, and stop at once
        eos_token_id=list(range(24)), pad_token_id=0, do_sample=True, temperature=9.0, num_assistant_tokens=1
    )
    llama.generation_config, before = config, config.to_dict()
    with monkeypatch.context() as patch:
        patch.setattr(type(llama), "device", SimpleNamespace(type="cuda"))  # where there is one mode more
        engines = transformers_engines(llama, (2, 3))
    names = ["generate", "static", "early-exit:2-3", "early-exit:2-default"]
    assert [engine.name for engine in engines] == [f"transformers:{name}" for name in names]
    generation = engines[number].generate(torch.tensor([1, 5, 9, 2, 2]), 17)
    assert list(generation.tokens) == expected
    assert generation.seconds > 0 and generation.time_to_first_token > 0
    assert llama.generation_config is config and config.to_dict() == before
    assert llama.config.num_hidden_layers == 4
