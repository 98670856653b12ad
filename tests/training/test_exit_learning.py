"""Exit adapters that learn from the texts a model writes: what replaces what, what is saved, and what is refused."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batched_runs import shared_model
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.exits.adapter import ExitAdapters
from layerskip_models.exits.folder import CONFIG_FILE, WEIGHTS_FILE, config_for, load_adapters, save_adapters
from random_adapters import random_adapters
from selfspec import SelfSpecGenerator
from selfspec.exits.learning import FIGURES_FILE, ExitLearner, LearnSettings, clearly_better
from tiny_llama import tiny_llama

QUICK = LearnSettings(
    num_bytes=1 << 20, batch_rows=64, passes=6.0, learning_rate=2e-2, judge_every=8, least_held_out=64, rows_per_text=64
)


def saved(adapters: ExitAdapters, folder: Path) -> Path:
    folder.mkdir()
    save_adapters(adapters, folder)
    return folder


def untrained(model: LayerSkipModel) -> ExitAdapters:
    return ExitAdapters(config_for(model, exit_layers=(1, 2), rank=5)).eval()


def learning(
    tmp_path: Path, adapters: ExitAdapters | None = None, **options: Any
) -> tuple[SelfSpecGenerator, ExitLearner]:
    """A tiny model that begins with these adapters, untrained ones by default, and learns into tmp_path / "learned"."""
    model = shared_model("native")
    start = tmp_path / "start"
    if not start.exists():
        torch.manual_seed(0)
        saved(adapters or untrained(model), start)
    generator = SelfSpecGenerator(model)
    return generator, generator.learn_exits(tmp_path / "learned", start=start, settings=replace(QUICK, **options))


def write(generator: SelfSpecGenerator, texts: int = 40, seed: int = 0) -> list[list[int]]:
    """Sampled texts, so that they do not loop."""
    prompts = [[number % 24, number // 24 % 24] for number in range(seed, seed + texts)]
    results = generator.generate_batch(
        prompts, max_new_tokens=30, policy="ar", do_sample=True, top_k=4, seed=[*range(seed, seed + texts)]
    )
    return [result.new_tokens for result in results]


def weights(adapters: ExitAdapters) -> list[torch.Tensor]:
    return [value.clone() for value in adapters.state_dict().values()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@dataclass(frozen=True)
class Taught:
    """folder: of `learning`. before: the weights that learning began with."""

    folder: Path
    generator: SelfSpecGenerator
    learner: ExitLearner
    before: list[torch.Tensor]


@pytest.fixture(scope="module")
def taught(tmp_path_factory: pytest.TempPathFactory) -> Taught:
    """Three times texts, and learning from them. Tests must not go on with it."""
    folder = tmp_path_factory.mktemp("taught")
    generator, learner = learning(folder)
    before = weights(learner.current)
    for turn in range(3):
        write(generator, seed=40 * turn)
        learner.learn()
    return Taught(folder, generator, learner, before)


def test_learned_adapters_replace_worse_ones_and_are_saved(taught: Taught) -> None:
    folder, generator, learner, before = taught.folder, taught.generator, taught.learner, taught.before
    report = learner.report
    assert not learner.has_work
    assert report.steps == -(-6 * report.rows // 64)
    assert 20 <= report.judged <= report.steps // 8  # the first ones come before there are rows to judge with
    assert report.replaced >= 1
    assert all(found.now >= found.start for found in report.agreement.values())
    assert max(found.now - found.start for found in report.agreement.values()) > 0.01
    assert not same(before, weights(learner.current))
    found = load_adapters(folder / "learned")
    assert same(weights(found), weights(learner.current))
    told = json.loads((folder / "learned" / FIGURES_FILE).read_text())
    assert told["replaced"] >= 1 and set(told["agreement"]) == {"1", "2"}
    assert {file.name for file in (folder / "learned").iterdir()} == {CONFIG_FILE, WEIGHTS_FILE, FIGURES_FILE}
    assert same(weights(load_adapters(folder / "start")), before)  # not written to
    # What drafts are made with is what was saved.
    generator.generate([5, 1], max_new_tokens=3)
    again = SelfSpecGenerator(shared_model("native"), exits=folder / "learned")
    hidden = torch.randn(6, generator.model.hidden_size)
    for layer in (1, 2):
        assert torch.equal(generator.model.at_exit(hidden, layer), again.model.at_exit(hidden, layer))


def test_a_worse_candidate_never_replaces(tmp_path: Path) -> None:
    generator, learner = learning(tmp_path, random_adapters(shared_model("native"), [1, 2], seed=3))
    write(generator, 60)
    before = weights(learner.current)

    def drafts() -> list[tuple[int, ...]]:
        result = generator.generate([5, 1, 7], max_new_tokens=30, policy="ls:2-3", trace=True)
        return [record.draft_tokens for record in result.trace or ()]

    drafted = drafts()
    with torch.no_grad():
        for parameter in learner._averaged.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 5)
    assert learner._judge(lambda: True)
    assert (learner.report.judged, learner.report.replaced) == (1, 0)
    assert same(before, weights(learner.current))
    assert not (tmp_path / "learned" / CONFIG_FILE).exists()
    assert drafts() == drafted
    # What was clearly worse is given up: learning goes on from what is in use.
    agreeing = learner.report.agreement
    assert all(found.now == found.start for found in agreeing.values())
    assert same(weights(learner._learned), before)


def test_nan_never_replaces(tmp_path: Path) -> None:
    generator, learner = learning(tmp_path)
    write(generator, 60)
    before = weights(learner.current)
    with torch.no_grad():
        for parameter in learner._averaged.parameters():
            parameter.fill_(torch.nan)
    assert learner._judge(lambda: True)
    assert learner.report.replaced == 0
    assert same(before, weights(learner.current))


def test_adapters_that_have_become_worse_than_the_first_ones_are_taken_back(tmp_path: Path) -> None:
    """The texts are of another kind than those that an earlier run learned from."""
    model = shared_model("native")
    worse = random_adapters(model, [1, 2], seed=3)
    with torch.no_grad():
        for layer in (1, 2):
            worse.at(layer).scale.mul_(8)  # so that what they add drowns what there was
        saved(worse, tmp_path / "learned")
        generator, learner = learning(tmp_path)  # begins with the untrained ones, which are better than random ones
    write(generator, 60)
    hidden = torch.randn(6, model.hidden_size)
    assert not torch.equal(generator.model.at_exit(hidden, 2), hidden)
    assert learner._judge(lambda: True)
    assert learner.report.returned >= 1
    generator.generate([5, 1], max_new_tokens=3)
    returned = [layer for layer in (1, 2) if torch.equal(generator.model.at_exit(hidden, layer), hidden)]
    assert len(returned) == learner.report.returned
    found = load_adapters(tmp_path / "learned")
    for layer in returned:
        assert not found.at(layer).down.weight.any()


def test_what_is_better_than_now_and_worse_than_the_first_ones_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 64 rows the first adapter is right on 60, the one in use on 30, the learned one on 50: the first comes back."""
    generator, learner = learning(tmp_path, sureness=2.0)
    write(generator, 60)
    rights = torch.stack([torch.arange(64) < count for count in (60, 30, 50)])
    monkeypatch.setattr(learner, "_right", lambda *args: rights[:, : len(args[-1])])
    before = weights(learner._start)
    assert learner._judge(lambda: True)
    assert (learner.report.replaced, learner.report.returned) == (0, 2)
    assert same(weights(learner.current), before)


def test_a_later_run_goes_on_from_what_was_saved(taught: Taught) -> None:
    assert taught.learner.report.replaced
    _, second = learning(taught.folder)
    assert same(weights(second.current), weights(taught.learner.current))
    assert same(weights(second._start), weights(load_adapters(taught.folder / "start")))


def test_learning_is_a_function_of_the_texts(tmp_path: Path) -> None:
    found = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        generator, learner = learning(tmp_path / name)
        write(generator, 20)
        learner.learn()
        found.append(weights(learner._learned))
    assert same(*found)


def test_learning_stops_when_it_is_told_to(tmp_path: Path) -> None:
    generator, learner = learning(tmp_path)
    write(generator)
    before = weights(learner._learned)
    assert learner.learn(go_on=lambda: False).steps == 0
    assert same(weights(learner._learned), before)
    assert learner.learn(seconds=1e-9).steps == 0
    assert learner.learn(go_on=iter([True, True, True, False]).__next__).steps <= 3
    assert learner.has_work
    learner.learn()
    assert not learner.has_work


def test_rows_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    generator, learner = learning(tmp_path)
    write(generator)
    ring = learner.online.learned
    size = generator.model.hidden_size
    ring.add([torch.full((20, size), torch.nan)] * 3, [0] * 20)
    learner.learn()
    assert all(bool(value.isfinite().all()) for value in learner._learned.state_dict().values())


def test_texts_are_the_same_while_a_thread_learns(tmp_path: Path) -> None:
    model = shared_model("native")
    prompts = [[number, 3] for number in range(24)]
    plain = SelfSpecGenerator(model, exits=None).generate_batch(prompts, max_new_tokens=16, policy="ar")
    generator, learner = learning(tmp_path, judge_every=2, sureness=0.0)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            learner.learn(go_on=lambda: not ended.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for policy in ("ls:2-3", "del", "auto:cost=layers"):
            results = generator.generate_batch(prompts, max_new_tokens=16, policy=policy)
            assert [one.new_tokens for one in results] == [one.new_tokens for one in plain]
    finally:
        ended.set()
        thread.join()
    assert learner.report.steps > 10


def test_clearly_better_by_hand() -> None:
    """9 rows where only the first is right, 1 where only the other is: 8 > 2 * sqrt(10) = 6.3. With 5 and 1: 4 < 4.9."""

    def rows(wins: int, losses: int, both: int) -> tuple[torch.Tensor, torch.Tensor]:
        one = torch.tensor([True] * wins + [False] * losses + [True] * both)
        return one, torch.tensor([False] * wins + [True] * losses + [True] * both)

    assert clearly_better(*rows(9, 1, 50), 2.0)
    assert not clearly_better(*rows(5, 1, 50), 2.0)
    assert clearly_better(*rows(5, 1, 50), 1.0)
    assert not clearly_better(*rows(1, 9, 50), 2.0)
    assert not clearly_better(*rows(0, 0, 50), 0.0)  # equally good: what there is stays


def test_what_cannot_learn_is_refused_in_one_line(tmp_path: Path) -> None:
    model = shared_model("plain")
    start = saved(untrained(model), tmp_path / "start")
    with pytest.raises(ValueError, match="has no exit adapters to begin with: train them with selfspec train-exit"):
        SelfSpecGenerator(model).learn_exits(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"cannot write .*file/learned: Not a directory; choose another path"):
        SelfSpecGenerator(model).learn_exits(tmp_path / "file" / "learned", start=start)
    with pytest.raises(ValueError, match="the weights of a transformers model may change"):
        SelfSpecGenerator(tiny_llama()).learn_exits(tmp_path / "x", start=start)
    with pytest.raises(ValueError, match="use runner='eager'"):
        SelfSpecGenerator(model, runner="captured").learn_exits(tmp_path / "x", start=start)
    with pytest.raises(ValueError, match="train-exit"):  # of another model
        SelfSpecGenerator(shared_model("native")).learn_exits(
            tmp_path / "x", start=saved(random_adapters(_other(), [1]), tmp_path / "other")
        )
    wide = saved(random_adapters(model, [1]), tmp_path / "wide")
    with pytest.raises(ValueError, match="holds adapters of other exits or another rank than"):
        SelfSpecGenerator(model).learn_exits(wide, start=start)
    with pytest.raises(ValueError, match="memory for rows to learn from must be at least"):
        SelfSpecGenerator(model).learn_exits(tmp_path / "x", start=start, settings=LearnSettings(num_bytes=10))


def _other() -> LayerSkipModel:
    return from_transformers(tiny_llama(seed=99))


@pytest.mark.parametrize(
    ("field", "value"),
    [("passes", 0.0), ("batch_rows", 0), ("learning_rate", -1.0), ("kl_weight", -0.1), ("sureness", -1.0)],
)
def test_settings_that_cannot_be_are_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        replace(QUICK, **{field: value})  # type: ignore[arg-type]


def test_a_step_over_some_tokens_is_one_over_all_if_they_are_all(tmp_path: Path) -> None:
    """24 tokens are drawn of 24: the same numbers as with the whole head, whatever the order of drawing."""
    found = []
    for others in (0, 24):
        (tmp_path / str(others)).mkdir()
        generator, learner = learning(tmp_path / str(others), other_tokens=others, batch_rows=10_000, passes=0.5)
        write(generator)
        ring = learner.online.learned
        rows = ring.at(np.arange(len(ring)))
        head, places = learner._head_for(rows.tokens)
        assert head.vocab_size == 24
        assert torch.equal(places, rows.tokens)
        assert learner._step(lambda: True)
        found.append(weights(learner._learned))
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_a_step_looks_at_the_tokens_that_have_followed(tmp_path: Path) -> None:
    generator, learner = learning(tmp_path, other_tokens=3)
    write(generator, 30)
    ring = learner.online.learned
    rows = ring.at(np.arange(len(ring)))
    for _ in range(5):
        head, places = learner._head_for(rows.tokens)
        assert head.vocab_size <= len({*rows.tokens.tolist()}) + 3
        states = rows.states[-1]
        whole, some = learner._head.logits(states), head.logits(states)
        at = torch.arange(len(rows))
        torch.testing.assert_close(some[at, places], whole[at, rows.tokens])
