"""`selfspec verify`: does this engine, with this checkpoint, on this machine, give what the model itself gives?

transformers' own forward pass is the judge, in the dtype that was asked for. Where that is a 16-bit dtype on a CPU, the
engine computes with the same weights in float32, so it may differ by what transformers itself rounds. transformers is asked
first, for everything that will be compared; then its weights are handed to the engine, so that a large model is not in
memory twice.
"""

from __future__ import annotations

from collections import Counter, abc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import selfspec.engine.verification as rounds
from layerskip_models import LayerSkipModel, from_transformers
from layerskip_models.draft_weights import why_no_drafter
from layerskip_models.kernels.check import fault
from layerskip_models.kv_cache import KVCache
from layerskip_models.prefill import prefill
from layerskip_models.transformers_names import with_cache
from policies import Policy
from selfspec.analysis.comparison import NEAR_TIE_LOGIT_GAPS, first_difference
from selfspec.analysis.inspection import arithmetic_in_words
from selfspec.engine.engine import Engine
from selfspec.engine.policy_store import make_policy
from selfspec.engine.sequence import Sequence
from selfspec.generator import SelfSpecGenerator

LOGIT_TOLERANCES = {torch.float64: 1e-5, torch.float32: 2e-3, torch.float16: 0.15, torch.bfloat16: 1.0}
"""Largest difference of a logit (of size 10, say) that sums in another order may make."""
_CACHE_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.5}
"""Likewise of a cached key or value, relative to their root mean square."""
_TOP_K = 3  # tokens that sampling may draw from, so that all outcomes can be enumerated
_STEPS = 3  # sampled tokens: _TOP_K ** _STEPS outcomes
_RULE_ROWS = 16  # positions at which the acceptance rule is tried
_SUSPICIOUS = 1e-6  # a fit this bad happens by chance once in a million runs


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was verified. detail: what was measured, or what is wrong."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The answers of transformers to some prompts, int64 [n], computed in `dtype`.

    texts: the greedy continuation of each. logits: float32 [new, vocab], before each token of the text. sampled: probability
    of each sequence of sampled tokens after the first prompt, at temperature 1 with top-k.
    """

    dtype: torch.dtype
    prompts: tuple[Tensor, ...]
    texts: tuple[list[int], ...]
    logits: tuple[Tensor, ...]
    sampled: dict[tuple[int, ...], float]


def every_policy(num_layers: int) -> list[str]:
    """Name each way to decide, at an exit layer that the model has. Some models cannot draft in fewer bits."""
    exit_layer = max(num_layers // 4, 1)
    alone = [f"{name}:{exit_layer}" for name in ("dv", "svip", "adaedl", "spide")]
    return [
        "ar", f"ls:{exit_layer}-4", f"ls:{num_layers - 1}-2", "del", "del:as=printed", "del:length=tpl", "auto",
        "auto:cost=layers", f"fs:{exit_layer}-4", *alone, "del+spide", "del+dv", f"ls:{exit_layer}-8+del",
        "copy:6", "bits:8-3", f"bits:4-4,layer={exit_layer}",
    ]  # fmt: skip


def num_steps(num_layers: int, num_prompts: int, draws: int, num_policies: int | None = None) -> int:
    """Count the calls of `on_progress` by `verify_engine`."""
    policies = len(every_policy(num_layers)) if num_policies is None else num_policies
    return num_prompts + 2 + policies + 2 * draws


def verify_engine(
    llama: PreTrainedModel,
    prompts: abc.Sequence[Tensor],
    *,
    max_new_tokens: int = 48,
    draws: int = 400,
    policies: abc.Sequence[str] | None = None,
    besides: abc.Sequence[str] = (),
    on_progress: Callable[[str], None] = lambda label: None,
) -> Iterator[Check]:
    """Yield one check after the other. Takes over the weights of the model, which cannot be used afterwards.

    prompts: int64 [n] each. draws: samples per sampled policy; 0 leaves sampling out. policies: None for those of
        `every_policy` that the model can run, and `besides`. on_progress: called `num_steps` times.
    """
    reference = ask_reference(llama, prompts, max_new_tokens, on_progress)
    generator = SelfSpecGenerator(from_transformers(llama, release=True), runner="eager", prefix_cache=0)
    model = generator.model
    yield check_kernels(model)
    yield check_logits(model, reference)
    yield check_single_row(model, reference)
    yield check_acceptance(model, reference)
    on_progress("logits")
    for name in policies or [*every_policy(model.num_layers), *besides]:
        bits = int(name.removeprefix("bits:")[0]) if name.startswith("bits:") else None
        if policies or bits is None or why_no_drafter(model, bits) is None:
            yield check_greedy(generator, reference, name)
        on_progress(name)
    if draws:  # one policy that keeps every draft, one that stops by what it sees
        for name in (f"ls:{max(model.num_layers // 4, 1)}-2", "auto:cost=layers"):
            yield check_sampling(generator, reference, name, draws, on_progress)


@torch.no_grad()
def ask_reference(
    llama: PreTrainedModel, prompts: abc.Sequence[Tensor], max_new_tokens: int, on_progress: Callable[[str], None]
) -> Reference:
    """Get greedy texts, their logits and the distribution of samples from transformers, in prompts + 1 steps."""
    logits = []
    for prompt in prompts:
        cache, fed, rows = DynamicCache(config=llama.config), prompt.tolist(), []
        for _ in range(max_new_tokens):
            fed_ids = torch.tensor([fed], dtype=torch.long, device=llama.device)
            output = llama(fed_ids, use_cache=True, **with_cache(llama, cache))
            rows.append(output.logits[0, -1].float())
            fed = [int(rows[-1].argmax())]
        logits.append(torch.stack(rows))
        on_progress("asking transformers")
    outcomes: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(_STEPS):
        longer: dict[tuple[int, ...], float] = {}
        for outcome, probability in outcomes.items():
            text = torch.tensor([[*prompts[0].tolist(), *outcome]], dtype=torch.long, device=llama.device)
            scores = llama(text, use_cache=False).logits[0, -1].double()
            top = scores.topk(min(_TOP_K, scores.numel()))
            for token, share in zip(top.indices.tolist(), top.values.softmax(dim=-1).tolist()):
                longer |= {(*outcome, token): probability * share}
        outcomes = longer
    on_progress("asking transformers")
    texts = tuple(rows.argmax(dim=-1).tolist() for rows in logits)
    return Reference(dtype=llama.dtype, prompts=tuple(prompts), texts=texts, logits=tuple(logits), sampled=outcomes)


def check_kernels(model: LayerSkipModel) -> Check:
    """Check what the layers run on; our own kernels must compute a row the same, bit for bit, in any batch."""
    wrong = None if model.kernels is None else fault()
    return Check("kernels", wrong is None, wrong or arithmetic_in_words(model))


@torch.inference_mode()
def check_logits(model: LayerSkipModel, reference: Reference) -> Check:
    """Compare the engine's own forward pass over prompts and texts with transformers' logits."""
    differences = []
    for prompt, text, wanted in zip(reference.prompts, reference.texts, reference.logits):
        _, logits = _rows_of(model, [*prompt.tolist(), *text[:-1]])
        differences.append((logits[-len(text) :] - wanted.to(logits.device)).abs().max())
    worst, allowed = float(torch.stack(differences).max()), LOGIT_TOLERANCES[reference.dtype]  # NaN if any is
    return Check("logits equal transformers'", worst <= allowed, f"largest difference {worst:.2g}, allowed {allowed:g}")


@torch.inference_mode()
def check_single_row(model: LayerSkipModel, reference: Reference) -> Check:
    """Compare norm and head on one row alone, as in drafting, with the same row among others, as in verification."""
    hidden, together = _rows_of(model, reference.prompts[0].tolist())
    alone = torch.cat([model.logits(hidden[row : row + 1]) for row in range(len(hidden))])
    worst = float((alone - together).abs().max())
    gaps = together.topk(2).values.diff().abs()[:, 0]
    flipped = int(((alone.argmax(-1) != together.argmax(-1)) & (gaps > NEAR_TIE_LOGIT_GAPS[model.dtype])).sum())
    allowed = LOGIT_TOLERANCES[model.dtype]
    detail = f"largest difference {worst:.2g}, allowed {allowed:g}; other choices: {flipped} of {len(hidden)}"
    return Check("head on a single row", worst <= allowed and flipped == 0, detail)


def check_acceptance(model: LayerSkipModel, reference: Reference) -> Check:
    """Try rounds' acceptance on the model's p and q: accept below min(1, p/q), leave p - q where that is positive."""
    text = [*reference.prompts[0].tolist(), *reference.texts[0]][-_RULE_ROWS:]
    ids = torch.tensor(text, dtype=torch.long, device=model.device)
    exit_layer = max(model.num_layers // 4, 1)
    faults = tried = 0
    with torch.inference_mode():
        cache = KVCache(model, len(ids))
        early = prefill(model, ids, cache, stop=exit_layer)
        q = model.draft_logits(model.at_exit(early, exit_layer)).softmax(dim=-1)
        p = model.logits(model.run_layers(early, exit_layer, model.num_layers, cache)).softmax(dim=-1)
        for row in range(len(ids)):
            both, q_row = p[row].repeat(2, 1), q[row : row + 1]
            left = (p[row] - q[row]).clamp(min=0).double()
            for token in q[row].topk(min(4, model.vocab_size)).indices.tolist():
                drafts = torch.tensor([token], dtype=torch.long, device=model.device)
                bound = float(p[row, token] / q[row, token])
                for uniform in {min(bound * (1 - 1e-3), 1 - 1e-6), bound * (1 + 1e-3)}:
                    if uniform >= 1:
                        continue
                    reached = rounds.reach(both, q_row, drafts)
                    accepted, weights = rounds.accept_sampled(both, q_row, reached, [uniform])
                    right = bool(accepted) == (uniform < bound)
                    if right and not accepted:
                        off = weights.double() / weights.double().sum() - left / left.sum()
                        right = float(off.abs().max()) < 1e-5
                    faults += not right
                    tried += 1
    return Check("acceptance rule", faults == 0, f"{faults} of {tried} decisions on the model's own p and q wrong")


def check_greedy(generator: SelfSpecGenerator, reference: Reference, policy: str) -> Check:
    """Compare every text with the reference's, up to near-ties, and the KV cache afterwards with a fresh pass over it."""
    near_ties = rejected = 0
    errors = []
    for prompt, text, logits in zip(reference.prompts, reference.texts, reference.logits):
        chosen = make_policy(generator.bound, policy)
        decoding = _decode(generator, prompt, chosen, max_new_tokens=len(text), do_sample=False)
        new = decoding.tokens[0, prompt.numel() : decoding.length].tolist()
        rejected += decoding.stats.num_drafted - decoding.stats.num_accepted
        position = first_difference(text, new)
        if position is not None:
            gap = float(logits[position].topk(2).values.diff().abs()) if position < len(text) else float("inf")
            if not gap <= NEAR_TIE_LOGIT_GAPS[reference.dtype]:
                detail = f"differs at new token {position}, where the top two logits are {gap:.3g} apart"
                return Check(f"greedy, {policy}", False, detail)
            near_ties += 1
        errors.append(_cache_error(decoding))
    worst, allowed = float(torch.stack(errors).max()), _CACHE_TOLERANCES[generator.model.dtype]  # NaN if any is
    detail = f"{len(reference.texts)} texts equal, {near_ties} of them up to a near-tie; {rejected} drafts rejected; "
    detail += f"KV cache differs by {worst:.2g}, allowed {allowed:g}"
    return Check(f"greedy, {policy}", worst <= allowed, detail)


def check_sampling(
    generator: SelfSpecGenerator, reference: Reference, policy: str, draws: int, on_progress: Callable[[str], None]
) -> Check:
    """Compare samples with their exact probabilities: Pearson's chi-squared over outcomes expected at least 5 times."""
    chosen, prompt = make_policy(generator.bound, policy), reference.prompts[0]
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        chosen.reset()
        sampled = {"max_new_tokens": _STEPS, "do_sample": True, "top_k": _TOP_K, "seed": seed}
        decoding = _decode(generator, prompt, chosen, **sampled)
        counts[tuple(decoding.tokens[0, prompt.numel() : decoding.length].tolist())] += 1
        on_progress(f"sampling, {policy}")
    cells = [(counts[outcome], draws * share) for outcome, share in reference.sampled.items()]
    large = [(seen, expected) for seen, expected in cells if expected >= 5]
    rest_seen, rest_expected = draws - sum(seen for seen, _ in large), draws - sum(expected for _, expected in large)
    if rest_expected >= 5:
        large.append((rest_seen, rest_expected))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in large)
    freedom, chance = len(large) - 1, 1.0
    if freedom > 0:
        halves = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
        chance = float(torch.special.gammaincc(*halves))
    outside = draws - sum(counts[outcome] for outcome in reference.sampled)
    # In half precision a third and a fourth token may nearly tie; few draws may then fall outside.
    stray = outside > (0 if reference.dtype in (torch.float32, torch.float64) else draws // 20)
    detail = f"{draws} draws over {len(large)} outcomes: chi-squared {statistic:.1f}, as bad by chance once in "
    detail += f"{1 / max(chance, 1e-300):.3g}; outside the top {_TOP_K}: {outside}"
    return Check(f"sampling, {policy}", chance > _SUSPICIOUS and not stray, detail)


def _rows_of(model: LayerSkipModel, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Return last hidden states and logits of a whole text, [n, hidden] and [n, vocab]."""
    tokens = torch.tensor(ids, dtype=torch.long, device=model.device)
    hidden = prefill(model, tokens, KVCache(model, len(ids)))
    return hidden, model.logits(hidden)


@torch.inference_mode()
def _cache_error(decoding: Sequence) -> Tensor:
    """Return the largest difference between the rows that decoding left and one pass's, over their root mean square."""
    length = decoding.length - 1  # the last token's row is in no cache yet
    cache, fresh = decoding.cache, KVCache(decoding.model, length)
    prefill(decoding.model, decoding.tokens[0, :length], fresh)
    pairs = (cache.keys[..., :length], fresh.keys), (cache.values[:, :, :length], fresh.values)
    errors = [(got - wanted).abs().max() / wanted.float().square().mean().sqrt() for got, wanted in pairs]
    return torch.stack(errors).max()


def _decode(generator: SelfSpecGenerator, prompt: Tensor, policy: Policy, **options: Any) -> Sequence:
    """Decode in a whole call, as a user makes it; the sequence still has its cache and its statistics."""
    call = generator.check(prompt, policy=policy, eos_token_id=[], temperature=1.0, top_p=1.0, **options)
    with Engine() as engine:
        ticket = engine.join(call)
        sequence = engine.sequences[ticket]
        while len(engine):
            for output in engine.step():
                if output.error is not None:
                    raise output.error
    return sequence
