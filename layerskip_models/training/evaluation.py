"""Loss and agreement with the last layer at every exit, on given text and on the model's own text.

Run as `python -m layerskip_models.training.evaluation MODEL --text FILE --prompts FILE.jsonl.gz`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
import typer
from einops import rearrange
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from layerskip_models.checkpoints.loading import load_tokenizer, load_transformers
from layerskip_models.training.documents import block, encode, is_held_out, num_blocks, read_documents
from layerskip_models.training.examples import read_examples
from layerskip_models.training.recipe import exit_hidden_states

CHUNK_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitCurve:
    """Per layer l = 0..L-1: mean cross-entropy in nats, and the share of rows whose argmax is the last layer's."""

    loss: list[float]
    agreement: list[float]
    num_rows: int


@torch.no_grad()
def exit_sums(model: LlamaForCausalLM, input_ids: Tensor, labels: Tensor, first_row: int = 0) -> Tensor:
    """Sum over rows, float64 [2, L]: cross-entropy against labels, and agreement with the last layer.

    input_ids, labels: int64 [batch, length]. Rows before position first_row are left out. Logits exist for
    CHUNK_ROWS rows of one layer at a time.
    """
    num_layers = len(model.model.layers)
    states = exit_hidden_states(model, input_ids, range(num_layers))
    flat_labels = rearrange(labels[:, first_row:], "batch length -> (batch length)")
    flat = {
        layer: rearrange(state[:, first_row:], "batch length hidden -> (batch length) hidden")
        for layer, state in states.items()
    }
    sums = torch.zeros(2, num_layers, dtype=torch.float64)
    for start in range(0, len(flat_labels), CHUNK_ROWS):
        chunk = slice(start, start + CHUNK_ROWS)
        chosen = None
        for layer in reversed(range(num_layers)):
            logits = model.lm_head(model.model.norm(flat[layer][chunk])).float()
            argmax = logits.argmax(-1)
            chosen = argmax if chosen is None else chosen
            sums[0, layer] += F.cross_entropy(logits, flat_labels[chunk], reduction="sum").item()
            sums[1, layer] += (argmax == chosen).sum().item()
    return sums


def exit_curve(model: LlamaForCausalLM, blocks: Tensor, batch_rows: int = 4) -> ExitCurve:
    """Teacher-forced curve on blocks, int64 [rows, length + 1], with the model in evaluation mode."""
    was_training = model.training
    model.eval()
    curve = _curve(model, ((rows, 0) for rows in blocks.split(batch_rows)))
    model.train(was_training)
    return curve


def _curve(model: LlamaForCausalLM, texts: Iterable[tuple[Tensor, int]]) -> ExitCurve:
    """Over the rows of all texts, int64 [batch, length + 1], from the row that is given with each."""
    sums, num_rows = torch.zeros(2, len(model.model.layers), dtype=torch.float64), 0
    for ids, first_row in texts:
        ids = ids.to(model.device)
        sums += exit_sums(model, ids[:, :-1], ids[:, 1:], first_row)
        num_rows += ids[:, first_row + 1 :].numel()
    loss, agreement = (sums / max(num_rows, 1)).tolist()
    return ExitCurve(loss=loss, agreement=agreement, num_rows=num_rows)


@torch.no_grad()
def greedy_continuations(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], num_tokens: int, batch_size: int = 16
) -> list[list[int]]:
    """num_tokens greedy tokens after each prompt, by transformers' generate; an EOS does not end them."""
    model.eval()
    results: list[list[int]] = []
    for start in range(0, len(prompts), batch_size):
        group = prompts[start : start + batch_size]
        width = max(map(len, group))
        ids = torch.zeros(len(group), width, dtype=torch.int64)
        mask = torch.zeros(len(group), width, dtype=torch.int64)
        for row, prompt in enumerate(group):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        output = model.generate(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=[],
            pad_token_id=0,
        )
        results += [row[width:].tolist() for row in output]
    return results


def own_text_curve(
    model: LlamaForCausalLM, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]
) -> ExitCurve:
    """Curve over the rows that predict the continuations' tokens, prompts and continuations teacher-forced."""
    model.eval()
    pairs = zip(prompts, continuations, strict=True)
    return _curve(model, ((torch.tensor([[*prompt, *text]]), len(prompt) - 1) for prompt, text in pairs))


def is_looping(tokens: Sequence[int]) -> bool:
    """Tell whether the last 32 tokens have a period of at most 16, or a 4-gram occurs 4 times.

    A period p means that each of these tokens equals the one p places before it.
    """
    tail = list(tokens[-32:])
    if len(tail) == 32 and any(tail[period:] == tail[:-period] for period in range(1, 17)):
        return True
    grams = Counter(tuple(tokens[start : start + 4]) for start in range(len(tokens) - 3))
    return max(grams.values(), default=0) >= 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Result of `evaluate`; None where the input for it was not given."""

    held_out_text: ExitCurve | None
    own_text: ExitCurve | None
    own_text_without_loops: ExitCurve | None
    loop_rate: float | None
    num_prompts: int
    samples: list[dict[str, str]]


def evaluate(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    documents: Sequence[str],
    prompts: Sequence[str],
    *,
    length: int = 256,
    max_text_tokens: int = 65536,
    max_prompt_tokens: int = 256,
    num_tokens: int = 100,
) -> Evaluation:
    """Curves on held-out documents (packed, teacher-forced) and on greedy continuations of prompts; loop rate.

    Prompts keep their last max_prompt_tokens tokens.
    """
    text_curve = own_curve = free_curve = loop_rate = None
    if documents:
        stream = np.concatenate(encode(documents, tokenizer))[: max_text_tokens + 1]
        rows = num_blocks(stream, length)
        text_curve = exit_curve(model, block(stream, range(rows), length)) if rows else None
    encoded = [tokenizer(text, add_special_tokens=False)["input_ids"][-max_prompt_tokens:] for text in prompts]
    continuations = greedy_continuations(model, encoded, num_tokens)
    loops = [is_looping(tokens) for tokens in continuations]
    if prompts:
        own_curve = own_text_curve(model, encoded, continuations)
        free = [index for index, loops_here in enumerate(loops) if not loops_here]
        if free:
            free_curve = own_text_curve(model, [encoded[i] for i in free], [continuations[i] for i in free])
        loop_rate = sum(loops) / len(loops)
    return Evaluation(
        held_out_text=text_curve,
        own_text=own_curve,
        own_text_without_loops=free_curve,
        loop_rate=loop_rate,
        num_prompts=len(prompts),
        samples=[
            {"prompt": tokenizer.decode(prompt), "continuation": tokenizer.decode(tokens), "loops": str(loop)}
            for prompt, tokens, loop in zip(encoded, continuations, loops, strict=True)
        ],
    )


def held_out_by_path(paths: Sequence[Path], exclude: Sequence[str], holdout_fraction: float) -> list[list[str]]:
    """Return the documents of each path that a training with this holdout_fraction leaves out."""
    return [
        [document for document in read_documents(path, exclude) if is_held_out(document, holdout_fraction)]
        for path in paths
    ]


def equal_shares(by_path: Sequence[Sequence[str]], tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> list[str]:
    """Take each path's first documents, an equal share of max_tokens from each, so that no large file hides others."""
    documents: list[str] = []
    for held in by_path:
        budget = max_tokens // len(by_path)
        for document in held:
            if budget <= 0:
                break
            ids = tokenizer(document, add_special_tokens=False, verbose=False)["input_ids"][:budget]
            budget -= len(ids)
            documents.append(tokenizer.decode(ids))
    return documents


def evaluation_command(
    model: Annotated[str, typer.Argument(help="Llama checkpoint: folder, GGUF file, short or hub name.")],
    text: Annotated[list[Path] | None, typer.Option(help="Text as for training; held-out documents are used.")] = None,
    prompts: Annotated[list[Path] | None, typer.Option(help='.jsonl[.gz] with a "prompt" a line.')] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="Names to leave out of folders.")] = None,
    holdout_fraction: Annotated[float, typer.Option(help="As in training; 1 takes every document.")] = 0.01,
    max_prompts: Annotated[int, typer.Option(help="Prompts taken from each file.")] = 8,
    length: Annotated[int, typer.Option(help="Tokens per teacher-forced sequence.")] = 256,
    max_text_tokens: Annotated[int, typer.Option(help="Held-out tokens in all, shared by the text paths.")] = 65536,
    num_tokens: Annotated[int, typer.Option(help="Greedy tokens per prompt.")] = 100,
    document_prompts: Annotated[int, typer.Option(help="Beginnings of held-out documents as prompts, per path.")] = 0,
    output: Annotated[Path | None, typer.Option(help="JSON file for the result; else printed.")] = None,
) -> None:
    """Loss and agreement with the last layer at every exit; share of greedy continuations that loop."""
    try:
        network = load_transformers(model, dtype=torch.float32, device="cpu")
        if not isinstance(network, LlamaForCausalLM):
            raise ValueError(f"{model} must be a Llama checkpoint, it is of type {network.config.model_type!r}")
        tokenizer = load_tokenizer(model)
        by_path = held_out_by_path(text or [], exclude or [], holdout_fraction)
        documents = equal_shares(by_path, tokenizer, max_text_tokens)
        asked = []
        for path in prompts or []:
            asked += [example.prompt for example in read_examples(path, ()) if example.prompt][:max_prompts]
        for held in by_path:
            asked += [document[: max(len(document) // 3, 40)][:800] for document in held[:document_prompts]]
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    result = evaluate(network, tokenizer, documents, asked, length=length, num_tokens=num_tokens)
    record = json.dumps(asdict(result), ensure_ascii=False, indent=1)
    if output is None:
        typer.echo(record)
    else:
        output.write_text(record + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(evaluation_command)
