"""`selfspec export-draft` and `export-hub`: write a draft model, or a folder that decodes with selfspec.

A draft model is a checkpoint's first layers, or the whole of it in 4 bits.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerskip_models import load_tokenizer
from layerskip_models.checkpoints.checkpoint_files import resolve_checkpoint
from layerskip_models.checkpoints.four_bit_writing import write_in_four_bits
from layerskip_models.checkpoints.gguf_checkpoint import gguf_file
from layerskip_models.checkpoints.gguf_first_layers import write_first_layers
from layerskip_models.checkpoints.gguf_metadata import architecture_of
from layerskip_models.checkpoints.gguf_reader import GgufReader
from layerskip_models.checkpoints.loading import load_config, load_transformers
from layerskip_models.checkpoints.quantised import has_few_bits
from layerskip_models.exits.adapter import ExitAdapter, ExitAdapters
from layerskip_models.exits.folder import adapters_beside, check_fits, check_unsteered, load_adapters
from selfspec import SelfSpecGenerator
from selfspec.analysis.draft_agreement import DraftAgreement, draft_agreement, own_texts
from selfspec.analysis.draft_cost import best_drafts, best_exit, head_in_layers
from selfspec.analysis.replay import trace_agreement
from selfspec.cli.arguments import checked_output_folder, encoded_prompts, load_generator, progress
from selfspec.cli.notes import notes_console, one_line_errors
from selfspec.cli.option_groups import DeviceOption, ExitsOption, LoadOptions
from selfspec.cli.text_input import CODE_PROMPT, EXAMPLE_PROMPT, read_prompt
from selfspec.defaults import DEFAULT_POLICY
from selfspec.integrations.draft_checkpoint import draft_model
from selfspec.integrations.engine_lines import GGUF_NAME, engines_page
from selfspec.integrations.hub_folder import export_hub
from selfspec.options import POLICY_HELP

SHOWN_DRAFTS = (1, 2, 4, 8)
"""Drafts per round for which the acceptance rate is shown."""

_FIRST_LAYERS = """\
# The first {exit_layer} layers of {name}

A draft model for speculative decoding with {name}, written by selfspec: layers, norm and head are that model's own{adapter}.
It is useless without that model.
"""
_FOUR_BITS = """\
# {name} in 4 bits

A draft model for speculative decoding with {name}, written by selfspec: all layers in 4 bits (compressed-tensors, groups of
32), embedding, norms and head as they are.
"""
_CARD = """\
{about}
```python
model.generate(**inputs, assistant_model=AutoModelForCausalLM.from_pretrained("PATH_OR_NAME_OF_THIS_FOLDER"))
```

{acceptance}
"""


def export_draft_command(
    model: Annotated[str, typer.Argument(help="Hub name, folder or GGUF file of the checkpoint.")],
    output_dir: Annotated[
        Path, typer.Option(help="Folder to write: a new one, or an empty one.", callback=checked_output_folder)
    ],
    exit_layer: Annotated[
        int | None, typer.Argument(help="Number of layers to keep (default: those that gain most, by what is read).")
    ] = None,
    draft_weights: Annotated[
        str,
        typer.Option(help="own: the model's first layers as they are. int4: all its layers, in 4 bits."),
    ] = "own",
    file: Annotated[
        list[Path] | None,
        typer.Option(help="UTF-8 file with a prompt to predict acceptance on; repeatable (default: two examples)."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="New tokens per prompt.")] = 128,
    exits: ExitsOption = "auto",
    device: DeviceOption = "auto",
) -> None:
    """Write the first layers of a model, its norm and head as a small checkpoint, for engines that take a draft model.

    With --draft-weights int4: the whole model in 4 bits.
    """
    notes = notes_console()
    with one_line_errors():
        if any(output_dir.iterdir()):
            raise FileExistsError(f"{output_dir} is not empty: give a new folder")
        name = resolve_checkpoint(model)
        config = load_config(name)
        in_four_bits = _checked_four_bits(draft_weights, exit_layer, exits, has_few_bits(config))
        generator = load_generator(model, LoadOptions(device=device, exits="none"), notes)
        llama = load_transformers(name, dtype=getattr(config, "dtype", None) or torch.float32, device=device)
        head_layers = head_in_layers(llama)
        texts = [read_prompt(None, path) for path in file] if file else [EXAMPLE_PROMPT, CODE_PROMPT]
        tokenizer = load_tokenizer(name)
        prompts = encoded_prompts(tokenizer, texts, generator.model.vocab_size)
        adapters = None if exits == "none" or in_four_bits else _adapters(generator, exits)
        if exit_layer is None and not in_four_bits:
            exit_layer = _chosen_exit(model, generator, prompts, max_new_tokens, adapters, exits, head_layers, notes)
        source = None if in_four_bits else gguf_file(name)
        if exit_layer is None:
            share = write_in_four_bits(llama, output_dir)
            about, what = _FOUR_BITS.format(name=model), "all layers in 4 bits"
        else:
            adapter = None if adapters is None else _adapter(adapters, exit_layer, exits)
            draft = draft_model(llama, exit_layer, adapter)
            draft.save_pretrained(output_dir)
            if source is not None:
                added = {} if adapter is None else _added_layer(source, draft, exit_layer)
                write_first_layers(source, output_dir / GGUF_NAME, exit_layer, added)
            folded = "" if adapter is None else "; the last layer is an exit adapter that was trained for this exit"
            about = _FIRST_LAYERS.format(exit_layer=exit_layer, name=model, adapter=folded)
            what = f"{exit_layer} layers" + ("" if adapter is None else " and the exit adapter as one")
            share = 1.0
        del llama  # what was written is read again, in float32
        tokenizer.save_pretrained(output_dir)
        with progress(2 * len(prompts), notes) as advance:
            own = own_texts(generator, prompts, max_new_tokens, advance)
            if in_four_bits:
                written = load_transformers(output_dir, dtype=torch.float32, device=generator.model.device)
            else:  # by transformers itself: selfspec does not run a model of one layer
                written = AutoModelForCausalLM.from_pretrained(output_dir, dtype=torch.float32)
                written.to(generator.model.device)
            found = draft_agreement(written, prompts, own, advance)
        layers = found.num_draft_layers
        best = best_drafts(found.traces, layers, share * layers, generator.model.num_layers, head_layers)
    engines = "vLLM and SGLang" if in_four_bits else "vLLM, SGLang, TensorRT-LLM and llama.cpp"
    lines = acceptance_lines(found)
    lines.append(
        f"best by what is read: {best.num_drafts} drafts a round, {best.speedup:.2f} times plain decoding "
        f"(ENGINES.md has the lines for {engines})"
    )
    page = engines_page(
        output_dir,
        source,
        num_drafts=best.num_drafts,
        tokens_per_round=best.tokens_per_round,
        speedup=best.speedup,
        in_four_bits=in_four_bits,
    )
    (output_dir / "ENGINES.md").write_text(page, encoding="utf-8")
    card = _CARD.format(about=about, acceptance="\n".join(lines))
    (output_dir / "README.md").write_text(card, encoding="utf-8")
    typer.echo("\n".join(lines))
    notes.print(f"wrote {output_dir}: {what}")


def _checked_four_bits(draft_weights: str, exit_layer: int | None, exits: str, few_already: bool) -> bool:
    """Whether the whole model is written in 4 bits. Raises ValueError for what does not go with that."""
    if draft_weights not in ("own", "int4"):
        raise ValueError(f"--draft-weights must be own or int4, got {draft_weights!r}")
    if draft_weights == "own":
        return False
    if exit_layer is not None:
        raise ValueError("--draft-weights int4 writes all layers: leave out the number of layers")
    if exits not in ("auto", "none"):
        raise ValueError("--draft-weights int4 writes the whole model, which has no exits: leave out --exits")
    if few_already:
        raise ValueError("this checkpoint has few bits already: give the one that it was made from")
    return True


def _adapters(generator: SelfSpecGenerator, exits: str) -> ExitAdapters | None:
    """Those of a folder, or with "auto" of the model's own folder; None if there are none."""
    folder = adapters_beside(generator.model.name) if exits == "auto" else Path(exits)
    if folder is None:
        return None
    adapters = load_adapters(folder)
    check_fits(adapters.config, generator.model, folder)
    check_unsteered(adapters.config, folder, "a draft model for other engines (--exits none leaves them out)")
    return adapters


def _adapter(adapters: ExitAdapters, exit_layer: int, exits: str) -> ExitAdapter | None:
    """The one of this exit; None if "auto" found none for it."""
    if exit_layer in adapters.exit_layers:
        return adapters.at(exit_layer)
    if exits != "auto":
        raise ValueError(f"{exits} has adapters for exit layers {', '.join(map(str, adapters.exit_layers))} only")
    return None


def _chosen_exit(
    model: str,
    generator: SelfSpecGenerator,
    prompts: list[torch.Tensor],
    max_new_tokens: int,
    adapters: ExitAdapters | None,
    exits: str,
    head_layers: float,
    notes: Console,
) -> int:
    """The exit that gains most on these prompts, with its adapter if it has one."""
    adapted = () if adapters is None else adapters.exit_layers
    if adapted:
        generator = load_generator(model, LoadOptions(device=str(generator.model.device), exits=exits), notes)
    with notes.status("Comparing all exits ..."):
        traces = [trace_agreement(generator, prompt, max_new_tokens) for prompt in prompts]
        best = best_exit(generator, traces, adapted, head_layers)
    notes.print(f"exit {best.exit_layer} gains most: {best.speedup:.2f} times plain decoding by what is read")
    return best.exit_layer


def _added_layer(source: Path, draft: PreTrainedModel, index: int) -> dict[str, np.ndarray]:
    """The last layer of a draft, an adapter's, by its names in a GGUF file; matrices in 16 bits."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = architecture_of(GgufReader(source))
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == architecture)
    names = get_tensor_name_map(kind, index + 1)
    found = {}
    for name, tensor in draft.state_dict().items():
        if name.startswith(f"model.layers.{index}."):
            stored = names.get_name(name, (".weight", ".bias"))
            assert stored is not None, name
            found[stored] = tensor.to(torch.float16 if tensor.dim() == 2 else torch.float32).cpu().numpy()
    return found


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
