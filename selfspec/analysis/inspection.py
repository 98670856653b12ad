"""`selfspec inspect`: what the default policy gains on a checkpoint, and where its drafts come from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from layerskip_models import LayerSkipModel
from layerskip_models.draft_weights import draft_bytes
from policies import CostModel
from policies.cost import cost_of_sweep
from selfspec.analysis.comparison import Generate, pairs_of_runs, summarise
from selfspec.analysis.replay import AgreementTrace, Setting, fixed_settings, trace_agreement, wave_sweeps
from selfspec.engine.expected_cost import expected_cost
from selfspec.engine.request import encode_prompt
from selfspec.engine.results import mean
from selfspec.generator import GenerationResult, SelfSpecGenerator
from selfspec.messages import encode_messages, has_template

WORTH = 1.1
SAMPLES = "Why is the sky blue?", "What should I look for when I buy a used bicycle?"
_EDIT = "Write your answer again with a title above it."
_MARGIN = 64  # tokens for the chat template and the request to edit


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """The default policy beside plain decoding, on texts of one kind.

    speedup: median over pairs of runs of tokens per second, prompts included; low, high: the smallest and largest pair.
    shares: of the new tokens, by what made them other than a plain step: "copied", "drafted by exits", "drafted in 8 bits".
    """

    speedup: float
    low: float
    high: float
    shares: Mapping[str, float]

    def __str__(self) -> str:
        made = ", ".join(f"{share:.0%} {source}" for source, share in self.shares.items() if share)
        spread = f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.speedup:.2f} times plain ({spread}); of the tokens {made or 'none came from drafts'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """The findings of `inspect_model`.

    free: greedy answers to the sample texts, or continuations of them where the model has no chat template. repeating: the
    same texts once more, each after its own prompt and text. agreement: by exit layer, 1 .. L-1, share of positions of the
    free texts where its argmax is the last layer's. best: the fixed setting with most tokens per second there, by
    replay; predicted: its speed-up over plain decoding. copies: bytes of the weights in fewer bits that there were in the
    end, by bits. arithmetic, loops: as `arithmetic_in_words` and `loops_in_words` say it.
    reason: what the default policy does at the end, and why, if it says so.
    """

    free: Gain
    repeating: Gain
    agreement: Mapping[int, float]
    best: Setting
    predicted: float
    copies: Mapping[int, int]
    arithmetic: str
    loops: str | None
    reason: str | None

    def verdict(self) -> str:
        """Say in a sentence what to do."""
        free, repeating = self.free.speedup, self.repeating.speedup
        measured = f"{free:.2f} times plain on free answers, {repeating:.2f} where answers repeat the prompt"
        if max(free, repeating) < WORTH:
            if min(free, repeating) < 2 - WORTH:
                return f"use plain decoding (--policy ar), the default policy runs {measured}"
            return f"nothing to gain: plain decoding is what the default policy will do ({measured})"
        if free < WORTH:
            measured = f"{repeating:.2f} times plain where answers repeat the prompt, nothing gained on free ones"
        return f"use the default policy: {measured}; no training needed"


def inspect_model(
    generator: SelfSpecGenerator,
    texts: Sequence[str] = SAMPLES,
    *,
    max_new_tokens: int = 64,
    repeats: int = 2,
    on_progress: Callable[[str], None] = lambda label: None,
) -> Inspection:
    """Run a generator's default policy and plain decoding in turn, on the model's own greedy texts.

    texts: messages to a model with a chat template, else prompts. repeats: pairs of runs on each.
    on_progress: called with a label after each of texts * (2 * repeats + 1) + 1 steps.
    Raises ValueError without a text of at least 4 tokens.
    """
    model, tokenizer = generator.model, generator.tokenizer
    assert tokenizer is not None
    chats = has_template(tokenizer)
    limit = (model.max_positions - 2 * max_new_tokens - (_MARGIN if chats else 0)) // 2
    samples = {text: encode_prompt(text, tokenizer, model.vocab_size).tolist() for text in texts if text}
    samples = {text: ids[: max(limit, 0)] for text, ids in samples.items() if min(len(ids), limit) >= 4}
    if not samples:
        raise ValueError("there must be a sample text of at least 4 tokens, and room for it in the model's context")
    generate = partial(generator.generate, max_new_tokens=max_new_tokens, do_sample=False)
    if not chats:
        generate = partial(generate, eos_token_id=[])
    free: list[list[int]] = []
    repeating: list[list[int]] = []
    traces = []
    for text, ids in samples.items():
        whole = len(ids) < limit
        asked = [{"role": "user", "content": text if whole else tokenizer.decode(ids, skip_special_tokens=True)}]
        prompt = encode_messages(asked, tokenizer) if chats else ids
        answer = generate(prompt, policy="ar")
        edit = [*asked, {"role": "assistant", "content": answer.text or ""}, {"role": "user", "content": _EDIT}]
        free.append(prompt)
        repeating.append(encode_messages(edit, tokenizer) if chats else [*prompt, *answer.new_tokens, *prompt])
        traces.append(trace_agreement(generator, torch.tensor(prompt), max(len(answer.new_tokens), 2)))
        on_progress("tracing every layer")
    for prompt in (free[0], repeating[0]):  # it learns, and may make a copy of the weights, once in a process
        generate(prompt)
    on_progress("warming up")
    cost = expected_cost(model)
    best, predicted = _best(traces, cost)  # which the default policy has corrected, if costs are kept
    agreement = {layer: mean(trace.agreement(layer) for trace in traces) or 0.0 for layer in range(1, model.num_layers)}
    return Inspection(
        free=_gain(generate, free, repeats, partial(on_progress, "free answers")),
        repeating=_gain(generate, repeating, repeats, partial(on_progress, "answers that repeat the prompt")),
        agreement=agreement,
        best=best,
        predicted=predicted,
        copies={bits: draft_bytes(model, bits) for bits in sorted(model.drafters)},
        arithmetic=arithmetic_in_words(model),
        loops=loops_in_words(model, agreement, traces, cost),
        reason=generator.policy.reason,
    )


def _gain(generate: Generate, prompts: Sequence[list[int]], repeats: int, on_pair: Callable[[], None]) -> Gain:
    """Run the default policy and plain decoding on each prompt, in turn."""
    pairs = []
    for prompt in prompts:
        for pair in pairs_of_runs(partial(generate, prompt, trace=True), repeats):
            pairs.append(pair)
            on_pair()
    found, ours = summarise(pairs, greedy=False), [pair[0] for pair in pairs]
    made, total = sum(map(_sources, ours), Counter[str]()), sum(result.stats.num_new_tokens for result in ours)
    shares = {source: count / total for source, count in made.most_common()}
    return Gain(speedup=found.speedup, low=found.speedup_min, high=found.speedup_max, shares=shares)


def _sources(result: GenerationResult) -> Counter[str]:
    """Count the accepted drafts of a run by what made them."""
    made = Counter[str]()
    for record in result.trace or ():
        drafter = "by exits" if record.bits is None else f"in {record.bits} bits"
        made["copied" if record.num_copied else f"drafted {drafter}"] += record.counted_drafts[1]
    return made


def _best(traces: Sequence[AgreementTrace], cost: CostModel) -> tuple[Setting, float]:
    """Find the setting with most tokens per cost over all traces, and that over plain decoding's."""
    by_policy: dict[str, list[Setting]] = {}
    for trace in traces:
        for setting in fixed_settings(trace, cost):
            by_policy.setdefault(setting.policy, []).append(setting)
    means = {name: mean(setting.tokens_per_cost for setting in found) or 0.0 for name, found in by_policy.items()}
    name = max(means, key=lambda key: means[key])
    return by_policy[name][0], means[name] * cost.autoregressive()


def arithmetic_in_words(model: LayerSkipModel) -> str:
    """Say what a model runs on, and where its rows are rounded, for people."""
    words = "PyTorch's operators" if model.kernels is None else f"selfspec's own kernels for {model.kernels}"
    for bits, rows in model.row_bits.items():
        words += f", weights in {bits} bits with rows in {'float32' if rows == 32 else rows}"
    return words


def loops_in_words(
    model: LayerSkipModel, agreement: Mapping[int, float], traces: Sequence[AgreementTrace], cost: CostModel
) -> str | None:
    """Say how a looped model runs, how often each loop's end agrees, what waves gain, and what its gate is; else None."""
    if model.num_loops == 1:
        return None
    size, gate = model.loop_layers, model.gate
    ends = ", ".join(f"{layer}: {agreement[layer]:.0%}" for layer in range(size, model.num_layers, size))
    words = (
        f"A looped model: its {size} layers run {model.num_loops} times, and the ends of loops agree by exit {ends}; "
    )
    words += "exits within a loop are not what such models are trained for"
    sweeps = mean(count for trace in traces for count in wave_sweeps(trace, model.num_loops)) or 1.0
    gain = cost.autoregressive() / (sweeps * cost_of_sweep(cost, size, model.num_loops))
    words += f". A wave takes {sweeps:.2f} sweeps over them for a token, and would run {gain:.2f} times plain"
    if gate is not None:
        norm, bias = float(gate[:-1].norm()), float(gate[-1])
        words += f". Its gate ({len(gate) - 1} weights of norm {norm:.2f}, bias {bias:.2f}) is not used"
    return words


def inspection_lines(inspection: Inspection) -> list[str]:
    num_layers = len(inspection.agreement) + 1
    quarter = max(num_layers // 4, 1)
    shares = " ".join(f"{share:.0%}".removesuffix("%") for share in inspection.agreement.values())
    return [
        "The default policy beside plain decoding:",
        f"  free answers: {inspection.free}",
        f"  answers that repeat the prompt: {inspection.repeating}",
        *(
            f"  a copy of the weights in {bits} bits to draft with took {size / 1e6:,.0f} MB"
            for bits, size in inspection.copies.items()
        ),
        f"The exit at a quarter of the depth, after {quarter} of {num_layers} layers, agrees with the model on "
        f"{inspection.agreement[quarter]:.0%} of the tokens; exits 1 to {num_layers - 1}, in %: {shares}",
        f"By exits alone, the best fixed setting, {inspection.best.policy}, would run {inspection.predicted:.2f} times plain",
        f"Layers ran on {inspection.arithmetic}",
        *([] if inspection.loops is None else [inspection.loops]),
        *([] if inspection.reason is None else [f"At the end {inspection.reason}"]),
        inspection.verdict(),
    ]
