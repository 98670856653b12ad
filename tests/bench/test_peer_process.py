"""Peers: transformers' modes; processes of their own, of which one that dies, hangs, raises or prints touches no other."""

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
from typer.testing import CliRunner

from bench.commands.bench_app import app
from bench.datasets import EncodedPrompt
from bench.engines.own import EngineLostError, Generation, TimedEngine
from bench.engines.peer_process import Peer, PeerProcess
from bench.engines.transformers_engine import TransformersEngine, transformers_engines
from bench.measure import Measurement
from bench.record import Line, Record, read_record
from tiny_llama import reference_greedy, tiny_llama

PROMPT = torch.tensor([3, 1, 2])


class Fake(TimedEngine):
    """Continues a prompt by its last id, until `end` is called in the call of number `at`, counted from 0."""

    def __init__(self, name: str, end: Callable[[], object] | None = None, at: int = 0) -> None:
        self.name, self.label = name, f"the {name}"
        self._end, self._left = end, at

    def generate(self, prompt: Tensor, max_new_tokens: int, repeat: int = 0) -> Generation:
        if self._end is not None and self._left == 0:
            self._end()
        self._left -= 1
        return Generation(tokens=(int(prompt[-1]),) * max_new_tokens, seconds=1.5, stats={"pid": os.getpid()})

    def next_logits(self, ids: Tensor) -> Tensor:
        return torch.nn.functional.one_hot(ids[-1], 8) / 3


def crash() -> None:
    faulthandler.disable()  # pytest's
    print("loading ...", file=sys.stderr)
    os.write(2, b"illegal instruction in tile_load\n")
    os.kill(os.getpid(), signal.SIGILL)


def fail() -> None:
    raise RuntimeError("no room\nfor the cache")


def leave() -> None:
    os._exit(3)


def hang() -> None:
    time.sleep(60)


def noise() -> None:
    print("llama_context: n_ctx = 512")
    os.write(1, b"\x80\x04 not a message\n" * 1000)


def made(*engines: Fake) -> Peer:
    return Peer(engines=[*engines], about={"version": 7})


def started(*engines: Fake, timeout: float = 20.0) -> PeerProcess:
    return PeerProcess("the peer", partial(made, *engines), timeout=timeout)


def test_an_engine_there_is_what_it_is_here() -> None:
    with started(Fake("one"), Fake("two")) as peer:
        one, two = peer.engines
        assert (one.name, two.label, one.weights, peer.about) == ("one", "the two", None, {"version": 7})
        generation = two.generate(PROMPT, 4)
        assert (generation.tokens, generation.seconds) == ((2, 2, 2, 2), 1.5)
        assert generation.stats is not None
        assert generation.stats["pid"] != os.getpid()
        assert torch.equal(one.next_logits(PROMPT).float(), Fake("one").next_logits(PROMPT))
        pid = generation.stats["pid"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_what_it_prints_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with started(Fake("loud", noise)) as peer:
        assert peer.engines[0].generate(PROMPT, 2).tokens == (2, 2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (crash, "the peer is lost: it was ended by SIGILL (illegal instruction in tile_load)"),
        (leave, "the peer is lost: it ended with status 3"),
        (fail, "the peer is lost: RuntimeError: no room for the cache"),
        (hang, "the peer is lost: it did not answer within 0.5 seconds"),
    ],
)
def test_how_a_peer_is_lost_is_said_at_every_call(end: Callable[[], None], message: str) -> None:
    with started(Fake("one", end, at=1), Fake("two"), timeout=0.5) as peer:
        one, two = peer.engines
        one.generate(PROMPT, 2)
        for engine in (one, two):
            with pytest.raises(EngineLostError) as raised:
                engine.generate(PROMPT, 2)
            assert str(raised.value) == message


@pytest.mark.parametrize("end", [crash, fail, hang])
def test_a_peer_that_cannot_be_made(end: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(EngineLostError, match="the peer is lost: "):
        PeerProcess("the peer", end, timeout=0.5)
    assert not list(tmp_path.iterdir())


def _measured(*engines: Any) -> tuple[list[Line], dict[str, str]]:
    record = Record(None, {"kind": "run"})
    prompts = [EncodedPrompt(id=name, task="a", ids=PROMPT + number) for number, name in enumerate("pq")]
    Measurement(
        engines=engines,
        prompts=prompts,
        max_new_tokens=3,
        repeats=2,
        warmups=1,
        dtype=torch.float32,
        record=record,
    ).run()
    return record.lines[1:], {line["engine"]: line["reason"] for line in record.lines if line["kind"] == "lost"}


@pytest.mark.parametrize("at", [0, 1, 2, 4])
def test_the_others_go_on(at: int) -> None:
    """Whenever one crashes: in its warm-up, on the first prompt, on the second one."""
    with started(Fake("dies", crash, at=at)) as first, started(Fake("lives")) as second:
        lines, lost = _measured(Fake("ours"), *first.engines, *second.engines)
    assert lost == {"dies": "the peer is lost: it was ended by SIGILL (illegal instruction in tile_load)"}
    for name in ("ours", "lives"):
        runs = [
            (line["prompt"], line["repeat"]) for line in lines if (line["kind"], line["engine"]) == ("sample", name)
        ]
        assert runs == [("p", 0), ("p", 1), ("q", 0), ("q", 1)]
        outputs = [line for line in lines if (line["kind"], line["engine"]) == ("output", name)]
        assert [(line["reference"], line["first_difference"]) for line in outputs] == [("ours", None)] * 2


def test_without_the_one_that_all_are_compared_with_nothing_goes_on() -> None:
    with started(Fake("ours", crash, at=1)) as peer, pytest.raises(EngineLostError, match="SIGILL"):
        _measured(*peer.engines, Fake("other"))


SMALL = ["--prompt-tokens", "8", "--max-new-tokens", "6", "--repeats", "2"]


def test_a_lost_peer_is_listed(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.engines.catalogue.transformers_peer", lambda work: crash())
    record = tmp_path / "peers.jsonl"
    command = ["peers", "--model", str(checkpoint), "--policy", "ls:2-3", "--output", str(record), "--num-samples", "2"]
    result = CliRunner().invoke(app, [*command, *SMALL])
    assert result.exit_code == 0, result.output
    assert "left out: transformers is lost: it was ended by SIGILL (illegal instruction in tile_load)" in result.stderr
    lines = read_record(record)
    names = ["selfspec:ar", "selfspec:ls:2-3"]
    assert [line["engine"] for line in lines if line["kind"] == "engine"] == names
    others = [line for line in lines if line["kind"] in ("sample", "output")]
    assert {line["engine"] for line in others} == {*names}
    assert len(others) == 2 * 2 * 3  # engines, prompts, two samples and an output
    assert "| left out |" in CliRunner().invoke(app, ["report", str(record)]).output


@pytest.mark.parametrize("dies", [False, True])
def test_batches_of_a_peer(dies: bool, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`selfspec-bench batch` goes on without one that is lost, and compares the others' texts."""
    if dies:
        monkeypatch.setattr(TransformersEngine, "run", lambda *arguments: crash())
    record = tmp_path / "batch.jsonl"
    command = ["batch", "--model", str(checkpoint), "--policy", "ls:2-3", "--output", str(record), "--texts", "1,3"]
    result = CliRunner().invoke(app, [*command, "--dtype", "float64", *SMALL])
    assert result.exit_code == 0, result.output
    lines = read_record(record)
    names = ["selfspec:ls:2-3"] if dies else ["selfspec:ls:2-3", "transformers:generate"]
    batches = [line for line in lines if line["kind"] == "batch"]
    assert sorted((line["engine"], line["texts"]) for line in batches) == [(n, k) for n in names for k in (1, 1, 3, 3)]
    assert all(line["tokens"] == 6 * line["texts"] for line in batches)
    assert len({(line["texts"], line["output"]) for line in batches}) == 2
    lost = [line["label"] for line in lines if line["kind"] == "lost"]
    assert lost == (["transformers generate"] if dies else [])
    assert ("left out: transformers is lost: it was ended by SIGILL" in result.stderr) == dies
    text = CliRunner().invoke(app, ["report", str(record)]).output
    assert ("left out" in text) == dies and ("| transformers generate | equal | equal |" in text) != dies


IDS = [1, 5, 9, 2, 2]


@pytest.fixture
def llama():
    """A model whose own generation config would sample, and stop at once."""
    model = tiny_llama(dtype=torch.float64, seed=3)
    model.generation_config = GenerationConfig(
        eos_token_id=list(range(24)), pad_token_id=0, do_sample=True, temperature=9.0, num_assistant_tokens=1
    )
    return model


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_every_mode_is_greedy_without_eos_and_leaves_the_model_as_it_was(llama, number, llama64, monkeypatch):
    expected = reference_greedy(llama64, IDS, max_new_tokens=17)  # the same weights, without EOS
    config = llama.generation_config
    before = config.to_dict()
    with monkeypatch.context() as patch:
        patch.setattr(type(llama), "device", SimpleNamespace(type="cuda"))  # where there is one mode more
        engines = transformers_engines(llama, (2, 3))
    assert [engine.name for engine in engines] == [
        "transformers:generate", "transformers:static", "transformers:early-exit:2-3", "transformers:early-exit:2-default",
    ]  # fmt: skip
    generation = engines[number].generate(torch.tensor(IDS), 17)
    assert list(generation.tokens) == expected
    assert generation.seconds > 0
    assert generation.time_to_first_token > 0
    assert llama.generation_config is config
    assert config.to_dict() == before
    assert llama.config.num_hidden_layers == 4
