"""Training documents and held-out prompts from a seed: the same ones wherever they are made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from bench.datasets import Prompt
from bench.experiments.copying.copying_tasks import TASKS, CopyingText
from bench.experiments.copying.repetition import repetition, vocabulary
from bench.experiments.copying.words import Material, is_for_held_out
from layerskip_models.training.documents import read_documents

PASSAGES_OF_A_FILE = 300
SHORTEST_PASSAGE = 160
"""Words that a passage must have, so that a piece of it fits."""


def read_passages(files: Sequence[Path], held_out: bool) -> list[str]:
    """Documents of the text files that serve as passages: up to 300 of each file, long enough, of one side.

    files: text as `selfspec train --data` reads it. Raises ValueError for a file with no passage that is long enough.
    """
    passages: list[str] = []
    for file in files:
        documents = [text for text in read_documents(file) if len(text.split()) >= SHORTEST_PASSAGE]
        if not documents:
            raise ValueError(f"{file} has no document of {SHORTEST_PASSAGE} words to take passages from")
        Random(0).shuffle(documents)
        passages += [text for text in documents[:PASSAGES_OF_A_FILE] if is_for_held_out(text) is held_out]
    return passages


def training_documents(
    num_documents: int, seed: int, passages: Sequence[str], repetitions: float, longest: int
) -> Iterator[str]:
    """Documents to train on: the tasks in turn, and among them a share of plain repetition.

    passages: of the training side. repetitions: the share of the documents that are plain repetition, in [0, 1].
    longest: words of a plain repetition.
    """
    words = vocabulary(passages)
    for index in range(num_documents):
        random = Random(f"train/{seed}/{index}")
        material = Material(random=random, held_out=False, passages=passages)
        if random.random() < repetitions:
            yield repetition(material, words, longest)
        else:
            text = _text(material, index)
            yield text.prompt + text.answer


def held_out_prompts(num_prompts: int, seed: int, passages: Sequence[str]) -> list[Prompt]:
    """Prompts of every task in turn, with names, words and passages that no training document has.

    passages: of the held-out side. A prompt's reference is the answer, copied with the change that was asked for.
    """
    prompts = []
    for index in range(num_prompts):
        material = Material(random=Random(f"held out/{seed}/{index}"), held_out=True, passages=passages)
        text = _text(material, index)
        prompts.append(
            Prompt(
                id=f"copying-{text.task.replace(' ', '-')}-{index}",
                task=f"copying {text.task}",
                prompt=text.prompt,
                reference=text.answer,
                source=f"python -m bench.experiments copying-texts, seed {seed}",
            )
        )
    return prompts


def _text(material: Material, index: int) -> CopyingText:
    names = list(TASKS)
    return TASKS[names[index % len(names)]](material)
