"""`selfspec export-draft` and `export-hub`: write a checkpoint's first layers, or a folder that decodes with selfspec."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM

from layerskip_models import load_tokenizer
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.checkpoints.loading import load_config, load_transformers
from layerskip_models.exits.adapter import ExitAdapter
from layerskip_models.exits.folder import adapters_beside, check_fits, load_adapters
from selfspec import SelfSpecGenerator
from selfspec.analysis.draft_agreement import DraftAgreement, draft_agreement, own_texts
from selfspec.cli.arguments import checked_output_folder, encoded_prompts, load_generator, progress
from selfspec.cli.notes import notes_console, one_line_errors
from selfspec.cli.option_groups import DeviceOption, ExitsOption, LoadOptions
from selfspec.cli.text_input import CODE_PROMPT, EXAMPLE_PROMPT, read_prompt
from selfspec.defaults import DEFAULT_POLICY
from selfspec.integrations.draft_checkpoint import draft_model
from selfspec.integrations.hub_folder import export_hub
from selfspec.options import POLICY_HELP

SHOWN_DRAFTS = (1, 2, 4, 8)
"""Drafts per round for which the acceptance rate is shown."""

_CARD = """\
# The first {exit_layer} layers of {name}

A draft model for speculative decoding with {name}, written by selfspec: layers, norm and head are that model's own{adapter}.
It is useless without that model.

```python
model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained("PATH_OR_NAME_OF_THIS_FOLDER"))
```

{acceptance}
"""


def export_draft_command(
    model: Annotated[str, typer.Argument(help="Hub name, folder or GGUF file of the checkpoint.")],
    exit_layer: Annotated[int, typer.Argument(help="Number of layers to keep.")],
    output_dir: Annotated[
        Path, typer.Option(help="Folder to write: a new one, or an empty one.", callback=checked_output_folder)
    ],
    file: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 file with a prompt to predict acceptance on; repeatable (default: two examples)."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 128,
    exits: ExitsOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Write the first layers of a model, its norm and head as a small checkpoint, for engines that take a draft model."""
    notes = notes_console()
    with one_line_errors():
        if any(output_dir.iterdir()):
            raise FileExistsError(f"{output_dir} is not empty: give a new folder")
        name = resolve_checkpoint(model)
        config = load_config(name)
        generator = load_generator(model, LoadOptions(device=device, exits="none"), notes)
        adapter = None if exits == "none" else _adapter(generator, exit_layer, exits)
        llama = load_transformers(name, dtype=getattr(config, "dtype", None) or torch.float32, device=device)
        draft = draft_model(llama, exit_layer, adapter)
        texts = [read_prompt(None, path) for path in file] if file else [EXAMPLE_PROMPT, CODE_PROMPT]
        tokenizer = load_tokenizer(name)
        prompts = encoded_prompts(tokenizer, texts, generator.model.vocab_size)
        with progress(2 * len(prompts), notes) as advance:
            own = own_texts(generator, prompts, max_new_tokens, advance)
            draft.save_pretrained(output_dir)
            tokenizer.save_pretrained(output_dir)
            written = AutoModelForCausalLM.from_pretrained(output_dir, dtype=torch.float32).to(generator.model.device)
            found = draft_agreement(written, prompts, own, advance)
    lines = acceptance_lines(found)
    folded = "" if adapter is None else "; the last layer is an exit adapter that was trained for this exit"
    card = _CARD.format(exit_layer=exit_layer, name=model, adapter=folded, acceptance="\n".join(lines))
    (output_dir / "README.md").write_text(card, encoding="utf-8")
    typer.echo("\n".join(lines))
    notes.print(
        f"wrote {output_dir}: {exit_layer} layers" + ("" if adapter is None else " and the exit adapter as one")
    )


def _adapter(generator: SelfSpecGenerator, exit_layer: int, exits: str) -> ExitAdapter | None:
    """The adapter of this exit, from a folder, or with "auto" from the model's own folder; None if there is none."""
    folder = adapters_beside(generator.model.name) if exits == "auto" else Path(exits)
    if folder is None:
        return None
    adapters = load_adapters(folder)
    check_fits(adapters.config, generator.model, folder)
    if exit_layer in adapters.exit_layers:
        return adapters.at(exit_layer)
    if exits != "auto":
        raise ValueError(f"{exits} has adapters for exit layers {', '.join(map(str, adapters.exit_layers))} only")
    return None


def acceptance_lines(found: DraftAgreement) -> list[str]:
    lines = [f"agreement with the full model on its own greedy text: {found.agreement or 0.0:.3f}"]
    for drafts in SHOWN_DRAFTS:
        rounds = found.rounds(drafts)
        lines.append(
            f"{drafts} drafts a round: {rounds.acceptance_rate or 0.0:.3f} of them accepted, "
            f"{rounds.tokens_per_round or 0.0:.2f} tokens per pass of the full model"
        )
    return lines


def export_hub_command(
    model: Annotated[str, typer.Argument(help="Hub name or folder of a checkpoint.")],
    folder: Annotated[Path, typer.Argument(help="Folder to write: a new one, or an empty one.")],
    policy: Annotated[str, typer.Option(help=f"Policy for calls that name none. {POLICY_HELP}")] = DEFAULT_POLICY,
    link: Annotated[
        bool, typer.Option("--link", help="Link to the files with the weights instead of copying them.")
    ] = False,
) -> None:
    """Write a folder that transformers decodes from with selfspec (from_pretrained, pipeline, transformers serve)."""
    with one_line_errors():
        written = export_hub(model, folder, policy=policy, link=link)
    notes_console().print(
        f"wrote {written}; load it with AutoModelForCausalLM.from_pretrained({str(written)!r}, trust_remote_code=True)"
    )
