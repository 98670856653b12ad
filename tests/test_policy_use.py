"""Calls at the same time share a policy's name, not its state."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from scripted_policies import ScriptedExit, StopBelow
from tiny_llama import reference_greedy, tiny_llama

from policies import DraftRow, Plan, Policy
from selfspec import SelfSpecGenerator

PROMPTS = [[5, 1, 7], [9, 2], [3, 3, 8, 1], [11]]
LENGTH = 40


class OneText(StopBelow):
    """Fails when another text's rows come between the start of a round and its end, as a stateful policy might."""

    def __init__(self) -> None:
        super().__init__(0.2)
        self.next_row = 0
        self.rounds = 0
        self.lock: Any = None

    def start_round(self, plan: Plan) -> None:
        self.next_row = 0
        self.rounds += 1

    def stop_before_draw(self, row: DraftRow) -> bool:
        assert row.num_drafted == self.next_row, "another text's round"
        self.next_row += 1
        return super().stop_before_draw(row)


@pytest.mark.parametrize("name", ["custom", "auto", "auto:cost=layers", "del", "ls:2-6+spide", "fs:2-3", "ls:2-8+dv"])
def test_threads_share_a_learning_policy(name: str) -> None:
    """Every text is exact, and no policy sees two texts at once."""
    llama = tiny_llama(dtype="float64" and __import__("torch").float64, seed=3)
    policy: str | Policy = Policy(ScriptedExit([(2, 6)]), OneText()) if name == "custom" else name
    engine = SelfSpecGenerator(llama, policy=policy)
    expected = [reference_greedy(llama, prompt, max_new_tokens=LENGTH) for prompt in PROMPTS]
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for _ in range(4):
                text = engine.generate(PROMPTS[index], max_new_tokens=LENGTH).new_tokens
                assert text == expected[index]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
