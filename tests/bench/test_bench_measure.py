import pytest
import torch

from bench.datasets import EncodedPrompt
from bench.engines.own import Generation, SelfSpecEngine
from bench.measure import Measurement, reference_of
from bench.record import Record

PROMPTS = [EncodedPrompt(id=name, task="t", ids=torch.tensor([1, 2])) for name in ("one", "two")]


class ScriptedEngine:
    """Returns given tokens; keeps the order of all calls in a shared list."""

    kept = False

    def __init__(self, name, calls, tokens, logits=(0.0, 1.0), weights=None, arithmetic=None):
        self.name = name
        self.label = name
        self.weights = weights
        self.arithmetic = arithmetic
        self.calls = calls
        self.tokens = tokens
        self.logits = torch.tensor(logits)
        self.asked = []

    def generate(self, prompt, max_new_tokens, repeat=0):
        self.calls.append(self.name)
        return Generation(tokens=tuple(self.tokens), seconds=1.0)

    def next_logits(self, ids):
        self.asked.append(ids.tolist())
        return self.logits


def run(engines, record=None):
    steps = []
    record = record or Record(None, {"kind": "run"})
    measurement = Measurement(
        engines=engines,
        prompts=PROMPTS,
        max_new_tokens=3,
        repeats=2,
        warmups=1,
        dtype=torch.float32,
        record=record,
        advance=steps.append,
    )
    measurement.run()
    assert len(steps) in (0, measurement.num_runs())
    return record.lines, steps


def test_engines_alternate_and_take_turns_at_going_first():
    calls = []
    engines = [ScriptedEngine(name, calls, [1, 2, 3]) for name in "abc"]
    lines, steps = run(engines)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab" + "abc"  # warm-up; then prompt one twice, prompt two twice
    assert len(steps) == 15
    samples = [line for line in lines if line["kind"] == "sample"]
    assert len(samples) == 12  # the warm-ups are not among them
    assert {(s["engine"], s["prompt"], s["repeat"]) for s in samples} == {
        (engine, prompt, repeat) for engine in "abc" for prompt in ("one", "two") for repeat in (0, 1)
    }


def test_outputs_are_compared_with_the_first_engines():
    calls = []
    # The reference's logits are 0.0005 apart: closer than float32 can be held to.
    reference = ScriptedEngine("reference", calls, [1, 2, 3], logits=(0.5, 0.5005, 0.1))
    lines, _ = run([reference, ScriptedEngine("same", calls, [1, 2, 3]), ScriptedEngine("tie", calls, [1, 9, 9])])
    outputs = {(line["engine"], line["prompt"]): line for line in lines if line["kind"] == "output"}
    assert outputs["same", "one"]["first_difference"] is None
    assert outputs["tie", "two"]["first_difference"] == 1
    assert outputs["tie", "two"]["reference_logit_gap"] == pytest.approx(0.0005, rel=1e-3)
    assert outputs["tie", "two"]["near_tie"] is True
    assert reference.asked == [[1, 2, 1], [1, 2, 1]]  # the prompt and what both agree on


def test_an_engine_is_judged_by_its_own_arithmetic():
    first = ScriptedEngine("first", [], [5, 6, 7], logits=(0.5, 0.6))
    lines, _ = run([first, ScriptedEngine("coarse", [], [5, 7, 7], arithmetic=torch.bfloat16)])
    assert [line["near_tie"] for line in lines if line["kind"] == "output"] == [None, True] * 2


def test_rounded_weights_are_compared_but_only_judged_among_themselves():
    first = ScriptedEngine("first", [], [5, 6, 7], logits=(0.0, 2.0))
    rounded = ScriptedEngine("int8", [], [5, 6, 8], logits=(0.0, 4.0), weights="int8")
    drafting = ScriptedEngine("int8:drafting", [], [5, 9, 9], weights="int8")
    engines = [first, rounded, drafting]
    assert [reference_of(engine, engines).name for engine in engines] == ["first", "first", "int8"]
    lines, _ = run(engines)
    outputs = {line["engine"]: line for line in lines if line["kind"] == "output"}
    fields = ("reference", "first_difference", "reference_logit_gap", "near_tie")
    assert [outputs["int8"][name] for name in fields] == ["first", 2, 2.0, None]
    assert [outputs["int8:drafting"][name] for name in fields] == ["int8", 1, 4.0, False]


def test_what_a_record_has_is_not_measured_again():
    calls = []
    engines = [ScriptedEngine(name, calls, [1, 2, 3]) for name in "ab"]
    lines, _ = run(engines)
    calls.clear()
    record = Record(None, lines[0])
    record.lines = [line for line in lines if line.get("repeat") != 1 or line["prompt"] == "one"]
    record.lines = [line for line in record.lines if (line["kind"], line.get("prompt")) != ("output", "two")]
    resumed, _ = run(engines, record)
    assert calls == ["a", "b", *"ba"]  # a warm-up; then the second repeat of the second prompt, which began with b

    def key(line):
        return str([line["kind"], *(line.get(name) for name in ("engine", "prompt", "repeat"))])

    assert sorted(map(key, resumed)) == sorted(map(key, lines))
    calls.clear()
    run(engines, record)
    assert calls == []


def test_an_engine_that_stops_early_is_an_error():
    with pytest.raises(RuntimeError, match="short returned 2 tokens for one, not 3"):
        run([ScriptedEngine("short", [], [1, 2])])


def test_an_unsteady_output_is_counted():
    class Unsteady(ScriptedEngine):
        def generate(self, prompt, max_new_tokens, repeat=0):
            self.tokens = [len(self.calls), 0, 0]
            return super().generate(prompt, max_new_tokens)

    lines, _ = run([Unsteady("unsteady", [], [])])
    assert [line["repeats_that_differ"] for line in lines if line["kind"] == "output"] == [1, 1]


def test_selfspec_never_stops_and_tells_its_counts(engine64):
    engine64.model.generation_config.eos_token_id = list(range(24))  # whatever comes would end the text
    plain, drafting = SelfSpecEngine(engine64, "ar"), SelfSpecEngine(engine64, "ls:2-3")
    prompt = torch.tensor([1, 2, 3])
    first, second = plain.generate(prompt, 20), drafting.generate(prompt, 20)
    assert first.tokens == second.tokens
    assert len(first.tokens) == 20
    assert first.stats["rounds"] == 19 > second.stats["rounds"]
    assert plain.next_logits(prompt).argmax() == first.tokens[0]


def test_a_kept_policy_begins_with_what_earlier_prompts_taught(engine64):
    kept, reset = SelfSpecEngine(engine64, "auto:cost=layers", kept=True), SelfSpecEngine(engine64, "auto:cost=layers")
    assert (kept.name, kept.label) == ("selfspec:auto:cost=layers:kept", "selfspec, auto:cost=layers, kept")
    first, second = torch.tensor([1, 2, 3]), torch.tensor([5, 6, 7])
    policy, known = engine64.resolve_policy("auto:cost=layers"), []
    original = policy.exit.plan

    def plan(context):
        if context.round_index == 0:
            known.append(policy.exit.learner.known)
        return original(context)

    policy.exit.plan = plan
    for engine, prompt in (
        (kept, first),
        (reset, first),
        (kept, first),
        (kept, second),
        (kept, second),
        (reset, second),
    ):
        engine.generate(prompt, 24)
    alone, again = known[1], known[5]
    assert known[0] == known[2] == alone  # repeats of a prompt do not teach each other
    assert known[3] == known[4] > again
    kept.forget()
    kept.generate(second, 24)
    assert known[6] == again
