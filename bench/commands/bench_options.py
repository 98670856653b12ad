"""The commands of `selfspec-bench` as dataclasses: a field for each option, and a docstring that is the help.

Types of options that several commands share come first. This module imports nothing heavy, so that help and mistakes show at
once; a command's work is a function of the same name in a module of its own.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Annotated

import typer

from bench.datasets import BY_NAME, shipped_names
from layerskip_models.checkpoints.named_models import DEMO, named_file
from layerskip_models.output_paths import output_file, output_folder
from selfspec.cli.console import one_line_errors
from selfspec.cli.option_groups import checked_model, option


def _record_path(path: Path | None) -> Path | None:
    """Fail before anything runs if the record could not be written."""
    with one_line_errors():
        return None if path is None else output_file(path, replaced=True)


def _checkpoint(name: str) -> str:
    """Return the path that a short name stands for (`checked_model`), and other names as they are."""
    return name if Path(name).exists() else str(named_file(checked_model(name) or name) or name)


def _record_folder(path: Path | None) -> Path | None:
    """Fail before anything runs if records could not be written."""
    with one_line_errors():
        return None if path is None else output_folder(path)


DEFAULT_POLICIES = ("auto", "auto:cost=layers", "del", "del:as=printed", "del+spide")
ModelOption = Annotated[
    str,
    typer.Option(
        help='Checkpoint: folder, GGUF file, short name, hub name, or "synthetic:SHAPE" (random weights of that shape).',
        callback=_checkpoint,
    ),
]
_SHIPPED = f"{', '.join(shipped_names())}. Default: all but {' and '.join(BY_NAME)}."
_PROMPTS = f'Prompts, .jsonl[.gz] with "id", "task", "prompt"; or shipped ones by name: {_SHIPPED}'
PromptsOption = Annotated[Path | None, typer.Option(help=_PROMPTS)]
PromptTokensOption = Annotated[int, typer.Option(min=1, help="Maximum prompt length; longer prompts keep their end.")]
NewTokensOption = Annotated[int, typer.Option(min=2, help="Tokens to generate for each prompt.")]
RepeatsOption = Annotated[int, typer.Option(min=1, help="Timed runs of each engine on each prompt.")]
WarmupsOption = Annotated[int, typer.Option(min=0, help="Untimed runs of each engine before the timed ones.")]
EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        help="Engine beside selfspec, repeatable: transformers; selfspec:KIND (int8, int4, or a type of GGUF file); "
        "llama.cpp:KIND or ik_llama.cpp:KIND (BF16, F16, Q8_0, Q4_K_M, Q4_0); openvino:FOLDER. Where --model is a GGUF file, "
        "the last three read it as it is without a KIND. A file of a KIND is written to the temporary folder (TMPDIR). "
        "Default: transformers, or of a GGUF file those that are installed; 'none' for none."
    ),
]
_TIMEOUT = "Seconds that a peer may take to load, or for one text, before it is left out."
PeerTimeoutOption = Annotated[float, typer.Option(min=1, help=_TIMEOUT)]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
_OUTPUT = "Write the record, JSON lines, to this file. If a run of the same command broke off there, it goes on."
_FOLDER = "Folder for the records. What a command has measured there already is not measured again."
OutputOption = Annotated[Path | None, typer.Option("--output", "-o", help=_OUTPUT, callback=_record_path)]


@dataclass(frozen=True, slots=True, kw_only=True)
class OnModel:
    model: ModelOption = DEMO
    dtype: str = option("auto", "auto (float32 on a CPU), float32, bfloat16, float16, float64, int8 or int4 (weights).")
    device: DeviceOption = "auto"
    rows: int | None = option(None, "Bits of rows beside weights of 4 to 6 bits: 8 (default) or 16.")
    output: OutputOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OnPrompts(OnModel):
    prompts: PromptsOption = None
    num_samples: int = option(4, "Number of prompts, taken from each task in turn.", min=1)
    prompt_tokens: PromptTokensOption = 320
    max_new_tokens: NewTokensOption = 128
    repeats: RepeatsOption = 3
    warmups: WarmupsOption = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCommand(OnModel):
    """Measure policies over tasks: speed and rounds, with plain decoding in the same run.

    Ends with status 1 if an output differs by more than a near-tie.
    """

    policy: list[str] | None = option(None, f"Policy to run; repeatable. Default: {', '.join(DEFAULT_POLICIES)}.")
    warmed_up: list[str] | None = option(
        None, "Policy to run again without forgetting between prompts; repeatable. 'all': every policy that learns."
    )
    prompts: list[Path] | None = option(None, f"{_PROMPTS} Repeatable.")
    task: list[str] | None = option(None, "Task of the prompts; repeatable. Default: all tasks.")
    num_samples: int = option(2, "Number of prompts of each task.", min=1)
    prompt_tokens: PromptTokensOption = 320
    max_new_tokens: NewTokensOption = 128
    repeats: RepeatsOption = 2
    do_sample: bool = option(False, "Sample; every repeat of a prompt has another seed.", None, "--do-sample")
    temperature: float | None = option(None, "Sampling temperature, with --do-sample (default 1).")
    top_p: float | None = option(None, "Top-p, with --do-sample (default 1: all tokens).")
    top_k: int | None = option(None, "Top-k, with --do-sample (default 0: all tokens).", min=0)
    seed: int | None = option(None, "Random seed of the first repeat, with --do-sample (default 0).")
    warmups: WarmupsOption = 1
    runner: str = option("auto", "eager, graphs (on CUDA), or auto: graphs on CUDA where they can be, else eager.")
    cold: bool = option(
        False, "Measure three prompts in fresh processes instead, without kept costs, and with them.", None, "--cold"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeersCommand(OnPrompts):
    """Measure selfspec beside transformers' generate and assistant_early_exit, llama.cpp, ik_llama.cpp and OpenVINO GenAI.

    All run the same model in turn, greedily, each in a process of its own that holds the weights itself, once more for each
    KIND. transformers' assistant_early_exit is measured at the setting of the first fixed policy (ls:E-G). One that crashes
    or hangs is left out with a message, and the others go on. Outputs are compared with those of selfspec without
    speculation. Ends with status 1 if one differs by more than a near-tie. Weights rounded to fewer bits are another model:
    their outputs are compared, but a difference is no fault.
    """

    policy: list[str] | None = option(None, "Policy, repeatable. Default: the best known fixed setting, and auto.")
    warmed_up: list[str] | None = option(None, "Policy to run without forgetting between prompts; repeatable.")
    engine: EngineOption = None
    chat: bool = option(
        False, "Prompts are messages to the model, without those too long; it ends its answers.", None, "--chat"
    )
    peer_timeout: PeerTimeoutOption = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepCommand(OnPrompts):
    """Find the best exit layer and length; greedy.

    Settings are ranked by replay of traced runs, and the most promising are timed. Ends with status 1 if an output differs
    from plain decoding by more than a near-tie.
    """

    exit_layers: str | None = option(None, 'As "1-8" or "2,4,6"; default: the first half.')
    num_speculations: str | None = option(None, 'Drafts a round, as "1-8" or "2,4,6"; default: 1-10.')
    num_samples: int = 8
    num_timed: int = option(6, "Number of settings to time, best predictions first.", min=1)
    repeats: int = 5
    warmups: int = 2
    write: bool = option(False, "Save the best setting beside the checkpoint's weights.", None, "--write")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCommand(OnModel):
    """Measure throughput over the number of texts that share the passes, greedy; engines in turn.

    Every engine runs in a process of its own and holds the weights itself. One that crashes or hangs is left out with a
    message, and the others go on. For OpenVINO GenAI all texts are cut to the length of the shortest.
    """

    prompts: PromptsOption = None
    prompt_tokens: PromptTokensOption = 64
    max_new_tokens: NewTokensOption = 64
    texts: str = option("1,2,4,8,16", "Texts decoded together, as in 1,2,4.")
    policy: list[str] | None = option(None, "Policies, repeatable. Default: ar and auto.")
    repeats: int = option(3, "Measurements of each engine at each number of texts.", min=1)
    engine: EngineOption = None
    peer_timeout: PeerTimeoutOption = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextCommand(OnModel):
    """Measure tokens/s and time to the first token at several lengths of the prompt; greedy.

    Contexts beyond the model's positions are left out. Each is read once, and then policies take turns.
    """

    contexts: str = option("128,1024,4096,16384", "Prompt lengths in tokens, as in 128,1024.")
    policy: list[str] | None = option(None, "Policy, repeatable. Default: the best known fixed setting, and auto.")
    agreement: list[float] | None = option(
        None, "Chance that a draft is right, set by hand: what policies would gain then; repeatable.", min=0, max=1
    )
    max_new_tokens: NewTokensOption = 64
    repeats: RepeatsOption = 3
    kv_dtype: str = option("auto", "What our engine keeps keys and values in: auto (the arithmetic's own) or bfloat16.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCommand:
    """Measure servers: throughput and time to first token over the number of clients; CPU, float32, greedy.

    EOS is ignored where the checkpoint has none. All servers run on one folder, and are measured in turn, as is
    generate_batch in this process. Ends with status 1 if our server's texts differ from generate_batch's.
    """

    model: ModelOption = DEMO
    clients: str = option("1,4,8", "Numbers of clients, as in 1,4,8.")
    requests: int = option(2, "Requests of each client in a measurement.", min=1)
    prompt_tokens: PromptTokensOption = 64
    max_new_tokens: NewTokensOption = 64
    repeats: RepeatsOption = 3
    peers: bool = option(True, "Also measure `transformers serve`, plain and continuous.", None, "--peers/--no-peers")
    output: OutputOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsCommand:
    """Measure single products: bytes of the weights per second, and microseconds, by kind of weights, rows and variant.

    Matrices are multiplied in turn, so that their weights come from memory. Each variant runs in a process of its own.
    """

    variant: list[str] | None = option(None, "Variant; repeatable. Default: all that this processor runs, best first.")
    weights: list[str] | None = option(None, "float32, bfloat16, int8, int4, Q4_K, Q5_K, Q6_K, IQ4_NL. Default: all.")
    rows: str = option("1,2,4,8,16,32,64,128", "Numbers of rows, as in 1,2,4.")
    seconds: float = option(0.2, "Seconds of each measurement.", min=0.001)
    repeats: int = option(3, "Processes of each variant, in turn.", min=1)
    output: OutputOption = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuCommand:
    """Measure on a GPU, with random weights: `run` and `batch` at each shape, and at the first what transformers gives, the
    eager runner, and first texts. On a CPU, a trial. Ends with status 1 if a command did not come to a good end.
    """

    shapes: str | None = option(None, "Shapes. Default: llama3.2-1B,llama3-8B,llama2-7B; on a CPU small.")
    minutes: float = option(10.0, "Minutes after which nothing more is measured.", min=0.0)
    device: DeviceOption = "auto"
    output: Annotated[Path | None, typer.Option("--output", "-o", help=_FOLDER, callback=_record_folder)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCommand(OnPrompts):
    """Measure the memory's bandwidth, the bytes that each phase must read, and how close the engine comes to that limit.

    Plain decoding, the best known fixed setting, and auto; greedy.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCommand(OnModel):
    """Run a paper's tasks and arms as its authors did, EOS on, and judge its claims: del, spide, pacer, sd2 or dpace.

    Whole prompts, plain decoding beside every arm. Ends with status 1 if a greedy output differs by more than a near-tie.
    """

    paper: str = option(MISSING, "del, spide, pacer, sd2 or dpace.", argument=True)
    table: list[str] | None = option(None, "Table or figure, as 1 or fig3; repeatable. Default: all of the paper.")
    prompts: str | None = option(
        None,
        "Folder with TASK.jsonl[.gz], rows of the data sets or ready prompts; hub; or shipped, which stand in. "
        "Default: hub where the package datasets is installed, else shipped.",
    )
    samples: int | None = option(None, "Maximum number of prompts of a task. Default: the paper's.", min=1)
    max_new_tokens: int | None = option(None, "Maximum number of new tokens. Default: the paper's.", min=2)
    repeats: int = option(1, "Runs of the arms whose claims are in seconds; such a verdict needs 3.", min=1)
    quick: bool = option(False, "Two prompts a task, 48 tokens, few arms, greedy.", None, "--quick")
    preverifier: Path | None = option(
        None, "Folder of a pre-verifier (train-pacer --design paper). Default: the model's own."
    )
    adapters: Path | None = option(None, "Folder for adapters by arm, trained where missing. Default: beside --output.")
    data: list[Path] | None = option(None, "Text to train adapters on; repeatable. Default: the shipped prompts.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCommand:
    """Print records as Markdown: what came out, tables, and where the numbers come from."""

    records: list[Path] | None = option(None, "Records of the other commands; with --update documents.", argument=True)
    in_documents: bool = option(
        False, "Fill the tables between marks in documents anew. Default: README.md and docs/.", None, "--update"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareCommand:
    """Show two records side by side: what changed in how they were made, speeds, and whether outputs are the same."""

    before: Path = option(MISSING, "A record.", argument=True, metavar="A")
    after: Path = option(MISSING, "Another of the same kind.", argument=True, metavar="B")


COMMANDS: dict[str, type] = {
    "run": RunCommand, "peers": PeersCommand, "sweep": SweepCommand, "batch": BatchCommand,
    "context": ContextCommand, "load": LoadCommand, "kernels": KernelsCommand,
    "gpu": GpuCommand, "roofline": RooflineCommand, "paper": PaperCommand, "report": ReportCommand, "compare": CompareCommand,
}  # fmt: skip
"""The commands by name, in the order of the list."""
