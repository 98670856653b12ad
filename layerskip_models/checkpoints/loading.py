"""Checkpoints by name or folder: `find_source` reads what they are, `build_model` their weights.

transformers reads those files of weights in which names are older than ours.
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from layerskip_models.checkpoints.checkpoint_files import ask_hub, clear_errors, files_of, resolve_checkpoint
from layerskip_models.checkpoints.conversion import build_model, from_transformers
from layerskip_models.checkpoints.finite import is_finite, not_finite
from layerskip_models.checkpoints.gguf_checkpoint import GgufWeights, gguf_file, gguf_tokenizer, open_gguf
from layerskip_models.checkpoints.named_models import DEMO_PATH
from layerskip_models.checkpoints.parameters import HEAD, parameter_shapes
from layerskip_models.checkpoints.supported import DTYPES, MAX_LAYERS, check_config, quantisation_of
from layerskip_models.checkpoints.typed_fields import is_int
from layerskip_models.checkpoints.weights import SafetensorsWeights, Weights
from layerskip_models.exits.lean import ExitsChoice, with_exits
from layerskip_models.families import FAMILIES, family_of
from layerskip_models.families.plain_config import UnreadFieldError, known_config
from layerskip_models.lazy_imports import gc_paused
from layerskip_models.linear import Layout, check_layout
from layerskip_models.model import LayerSkipModel
from layerskip_models.text_files import in_a_line

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger("selfspec")
FEW_BITS: tuple[Layout, ...] = ("int8", "int4")
"""Names of dtypes that are layouts of the weights."""


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint whose configuration was read and checked, and whose weights were not.

    name: a folder, a .gguf file or a hub name. config: of a GGUF file with a `quantization_config` that says so. origin:
    revision and local_files_only, for transformers. gguf: the opened file, if it is one.
    """

    name: str
    config: Any
    origin: Mapping[str, Any]
    gguf: GgufWeights | None = None

    def float_config(self) -> PreTrainedConfig:
        """Return the configuration of the same model with float weights, under the checkpoint's name."""
        config = copy.deepcopy(self.config)
        config.name_or_path = self.name
        if quantisation_of(config) is not None:
            del config.quantization_config
        return config

    def weights(self) -> SafetensorsWeights | GgufWeights:
        """Open the files of the weights. Raises what is wrong with the files, and ValueError for tensors of another model."""
        with clear_errors(self.name):
            weights: SafetensorsWeights | GgufWeights
            if self.gguf is None:
                weights = SafetensorsWeights(self.name, *files_of(self.name, self.origin), self.float_config())
            else:
                weights, self.gguf.config = self.gguf, self.float_config()
            weights.generation_config = self.generation_config()
            return weights

    def generation_config(self) -> GenerationConfig:
        """Read the checkpoint's own, or make what follows from its configuration: of a GGUF file, its special tokens."""
        from transformers import GenerationConfig

        origin: Mapping[str, Any]
        place, origin = (self.name, self.origin) if self.gguf is None else (str(self.gguf.path.parent), {})
        try:
            return GenerationConfig.from_pretrained(place, **origin)
        except OSError:  # it has none
            tokens = ("bos_token_id", "eos_token_id", "pad_token_id")
            said = self.config if self.gguf is None else {name: getattr(self.config, name) for name in tokens}
            return GenerationConfig.from_model_config(said)


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Return the device to run on: "auto" takes CUDA when there is one. ValueError for one that this machine lacks."""
    if str(device) == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
        torch.empty(0, device=resolved)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device {str(device)!r} is not available here: use 'cpu' or 'auto' ({error})") from error
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device, checkpoint: torch.dtype | None) -> torch.dtype:
    """Return the dtype to run in: "auto" is float32 on a CPU (exact, fast there) and the checkpoint's own elsewhere."""
    if isinstance(dtype, torch.dtype):
        chosen = dtype
    elif dtype in FEW_BITS:
        raise ValueError(f"{dtype} weights are this engine's own, and transformers needs full ones: use float32")
    elif dtype == "auto":
        chosen = torch.float32 if device.type == "cpu" or checkpoint is None else checkpoint
    elif dtype in DTYPES:
        chosen = DTYPES[dtype]
    else:
        raise ValueError(f"dtype must be one of auto, {', '.join((*DTYPES, *FEW_BITS))}, got {dtype!r}")
    if chosen not in DTYPES.values():
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {chosen}")
    return chosen


@gc_paused()
def load_model(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    layout: Layout | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    exits: ExitsChoice = "auto",
    kv_dtype: str | torch.dtype = "auto",
    rows: int | None = None,
    num_loops: int | None = None,
) -> LayerSkipModel:
    """Load a checkpoint of a supported family (`layerskip_models.families`) by hub name, local folder or GGUF file.

    dtype: "auto" (float32 on a CPU, the checkpoint's own elsewhere) or a name or torch.dtype. On a CPU "bfloat16" and
        "float16" round the weights to that dtype; the arithmetic stays float32 (`arithmetic_dtype`). "int8" on a CPU:
        weights rounded to 8 bits, all else in float32 (another model, a little; `int8_linear` says how). "int4" on a CPU:
        matrices of layers rounded to 4 bits, the head to 8 (`int4_linear`). For a checkpoint that is quantised already
        (a GGUF file) "auto" on a CPU is "int8", except that 4-bit matrices are kept as they are where they fit
        our layout. "int4" keeps these, too.
    layout: of the weights; None for our own kernels wherever they run.
    exits: adapters to draft with: "auto" takes those in the folder `exits` beside a local checkpoint, if there is one; a path
        another folder's; None has bare exits. They change what is drafted and nothing else.
    kv_dtype: that keys and values are kept in, "auto" or "bfloat16" (`LayerSkipModel.with_kv_dtype`).
    rows: 8 or 16, the bits of rows that meet weights of 4 to 6 bits; None for 8 (`LayerSkipModel.with_rows`).
    num_loops: of a looped model, how many loops to run, its first ones; None for all. With fewer it is a model of its own,
        with other texts, which is run exactly.
    Only safetensors and GGUF files are read and no code of the checkpoint is run. Peak memory is the weights plus one layer.
    name_or_path: the output folder of `selfspec train` works as well as the `model/` folder in it.
    Raises ValueError for another architecture or NaN weights, FileNotFoundError or OSError when it cannot be found or read.
    """
    source = find_source(name_or_path, revision, local_files_only)
    if num_loops is not None:
        _set_loops(source.config, num_loops, source.name)
    dtype, layout, keep_bits = resolve_layout(source.config, dtype, layout, device)
    weights = source.weights()
    tied = {HEAD} if source.config.tie_word_embeddings else set()
    missing = sorted(parameter_shapes(source.config).keys() - tied - {*weights.names()})
    if missing and family_of(source.config).foreign:
        raise ValueError(f"{source.name} lacks weights, first {missing[0]}: it is incomplete, or another model")
    if not missing:
        target, chosen = _resolve(source, dtype, device)
        if quantisation_of(source.config) is None:
            weights.config.dtype = chosen  # as transformers says it of a model that it has loaded
        rounded: list[str] = []
        loaded = build_model(weights, dtype=chosen, layout=layout, device=target, keep_bits=keep_bits, rounded=rounded)
        if rounded and keep_bits == 8 and source.gguf is not None:  # which nobody asked for
            log.warning("%s", source.gguf.what_is_rounded(rounded))
    else:  # transformers knows older names, and says what is missing
        loaded = from_transformers(load_float(source, dtype, device), layout=layout, release=True)
    loaded = with_exits(loaded, exits).with_kv_dtype(kv_dtype)
    return loaded if rows is None else loaded.with_rows(rows)


def find_source(name_or_path: str | Path, revision: str | None, local_files_only: bool) -> Source:
    """Find a checkpoint with its checked configuration; arguments and errors as in `load_model`."""
    name = resolve_checkpoint(name_or_path)
    origin: dict[str, Any] = {"revision": revision, "local_files_only": local_files_only}
    file = gguf_file(name)
    if file is None:
        return Source(name, _folder_config(name, origin), origin)
    weights = open_gguf(file)
    return Source(name, check_config(weights.config, name), origin, weights)


def _set_loops(config: Any, num_loops: int, name: str) -> None:
    family = family_of(config)
    if family.set_loops is None:
        raise ValueError(f"num_loops is for looped models, and {name} is a {family.model_type!r} model")
    own = family.loops(config)
    if not (is_int(num_loops) and 1 <= num_loops <= own and num_loops * config.num_hidden_layers > 1):
        raise ValueError(
            f"num_loops must be in [1, {own}] for this model, and leave two layers to run, got {num_loops!r}"
        )
    for field, value in family.set_loops(num_loops).items():
        setattr(config, field, value)


def resolve_layout(
    config: PreTrainedConfig, dtype: str | torch.dtype, layout: Layout | None, device: str | torch.device
) -> tuple[str | torch.dtype, Layout | None, int]:
    """Return what weights are read in, their layout, and up to how many bits the checkpoint's numbers stay as is.

    Arguments as those of `load_model`. Raises ValueError for a dtype of few bits that does not run there.
    """
    keep_bits = 4 if dtype == "int4" else 0
    few_bits = (quantisation_of(config) or {}).get("few_bits", False)  # so that int8 is the natural layout
    if dtype in FEW_BITS:
        own = getattr(config, "dtype", None)
        layout = dtype
        # For half the memory, what came in 16 bits is loaded in them before it is rounded to fewer.
        dtype = own if own in (torch.bfloat16, torch.float16) and quantisation_of(config) is None else torch.float32
        check_layout(layout, torch.empty(0, dtype=torch.float32, device=resolve_device(device)))
    elif dtype == "auto" and layout is None and few_bits and resolve_device(device).type == "cpu":
        dtype, layout, keep_bits = torch.float32, "int8", 8
    return dtype, layout, keep_bits


def load_transformers(
    name_or_path: str | Path,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    revision: str | None = None,
    local_files_only: bool = False,
) -> PreTrainedModel:
    """Load the checkpoint as transformers' own model, in evaluation mode; arguments and errors as in `load_model`.

    Of one that is quantised: the float weights that its files stand for.
    """
    return load_float(find_source(name_or_path, revision, local_files_only), dtype, device)


def _resolve(source: Source, dtype: str | torch.dtype, device: str | torch.device) -> tuple[torch.device, torch.dtype]:
    target = resolve_device(device)
    return target, resolve_dtype(dtype, target, getattr(source.config, "dtype", None))


def load_float(source: Source, dtype: str | torch.dtype, device: str | torch.device) -> PreTrainedModel:
    """Do the same with a checkpoint that was found.

    Raises ValueError for weights that are missing or of another shape: transformers would make random ones.
    """
    target, chosen = _resolve(source, dtype, device)
    config, quantised = source.float_config(), quantisation_of(source.config) is not None
    weights = source.weights()  # which is checked before memory is taken for what the configuration says
    files: dict[str, Any] = {**source.origin, "use_safetensors": True, "trust_remote_code": False}
    if quantised:
        files = {"state_dict": {name: _whole(weights, name, target, chosen) for name in weights.names()}}
    with clear_errors(source.name):
        found: dict[str, Any]
        model, found = family_of(config).model.from_pretrained(
            None if quantised else source.name,
            config=config,
            dtype=chosen,
            device_map={"": target},
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # said below, in our words
            **files,
        )
    if wrong := sorted(found["missing_keys"]) or sorted(str(key[0]) for key in found["mismatched_keys"]):
        raise ValueError(f"{source.name} lacks weights, or they have another shape, first {wrong[0]}: copy it again")
    if quantised:
        model.config.name_or_path = model.name_or_path = source.name
        model.generation_config = source.generation_config()
    else:
        for parameter_name, parameter in model.named_parameters():
            if not is_finite(parameter.detach()):
                raise not_finite(source.name, parameter_name)
    return model


def _whole(weights: Weights, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Load a parameter as floats, in memory of its own. Raises ValueError for numbers that are not finite."""
    value = weights.load(name)
    assert isinstance(value, Tensor)
    value = value.to(device=device, dtype=dtype, copy=True).contiguous()
    if not is_finite(value):
        raise not_finite(str(weights.checkpoint), name)
    return value


def load_config(
    name_or_path: str | Path, *, revision: str | None = None, local_files_only: bool = False
) -> PreTrainedConfig:
    """Load the checked configuration of a checkpoint; errors as in `load_model`."""
    return find_source(name_or_path, revision, local_files_only).config


def _folder_config(name: str, origin: dict[str, Any]) -> PreTrainedConfig:
    from transformers import PreTrainedConfig

    if not (origin["local_files_only"] or Path(name).is_dir()):
        ask_hub(name, origin["revision"])
    with clear_errors(name):
        try:
            # transformers makes lists as long as a configuration says.
            said, _ = PreTrainedConfig.get_config_dict(name, **origin)
            if is_int(layers := said.get("num_hidden_layers")) and layers > MAX_LAYERS:
                raise OSError(f"{name} has num_hidden_layers={layers}, and at most {MAX_LAYERS} are meant: mend it")
            family = FAMILIES.get(str(said.get("model_type")))
            config = None if family is None else known_config(family, said, name)
            if config is None:
                from transformers import AutoConfig

                config = AutoConfig.from_pretrained(name, trust_remote_code=False, **origin)
        except OSError:
            raise
        except UnreadFieldError as error:
            raise ValueError(f"{name} {error}") from error
        except Exception as error:  # of any kind, from inside transformers
            if not isinstance(error, ValueError):
                raise ValueError(
                    f"transformers cannot read the config.json of {name}: mend it ({in_a_line(error)})"
                ) from error
            raise ValueError(
                f"{name} holds no model that transformers knows: give a checkpoint of a supported family, "
                f"a folder with config.json and *.safetensors ({in_a_line(error)})"
            ) from error
    return check_config(config, name)


@gc_paused()
def load_tokenizer(name_or_path: str | Path, **options: object) -> PreTrainedTokenizerBase:
    """Load the tokenizer that lies beside a checkpoint. Without one, raise OSError that names the remedy."""
    name = resolve_checkpoint(name_or_path)
    file = gguf_file(name)
    if file is not None:
        return gguf_tokenizer(file, **options)
    import transformers

    plain = _is_plain_tokenizer(Path(name))
    kind: Any = transformers.PreTrainedTokenizerFast if plain else transformers.AutoTokenizer
    with clear_errors(name):
        try:
            return kind.from_pretrained(name, trust_remote_code=False, **options)
        except (ValueError, TypeError) as error:
            # transformers tries every kind of tokenizer and reports the last one that failed.
            raise FileNotFoundError(
                f"{name} has no tokenizer that can be loaded: save one beside the model with "
                "tokenizer.save_pretrained(), or load the model alone with load_model() and give token ids"
            ) from error


def begin_tokenizer(name_or_path: str | Path, **options: object) -> Callable[[], PreTrainedTokenizerBase]:
    """Return what returns the result of `load_tokenizer`, which a thread begins at once for a GGUF file.

    It is Python's work, while the file's weights are C's, and its memory is free again before all weights are there.
    """
    if gguf_file(resolve_checkpoint(name_or_path)) is None:
        return partial(load_tokenizer, name_or_path, **options)
    import_module("transformers")  # here: a thread that comes upon its half may find the wrong module
    thread = ThreadPoolExecutor(1, "tokenizer")
    begun = thread.submit(load_tokenizer, name_or_path, **options)
    thread.shutdown(wait=False)
    return begun.result


def _is_plain_tokenizer(folder: Path) -> bool:
    """Return whether transformers has no class of its own for a tokenizer, for which it would read the configuration, too."""
    try:
        kind = json.loads((folder / "config.json").read_bytes())["model_type"]
        said = json.loads((folder / "tokenizer_config.json").read_bytes())
        named = said["tokenizer_class"] in ("TokenizersBackend", "PreTrainedTokenizerFast")
        plain = FAMILIES[kind].foreign or (named and kind == "llama")
        return plain and (folder / "tokenizer.json").is_file()
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        return False


def load_demo(
    *, dtype: str | torch.dtype = "auto", device: str | torch.device = "auto"
) -> tuple[LayerSkipModel, PreTrainedTokenizerBase]:
    """Load the demo checkpoint and its tokenizer, from the package, without a network."""
    return load_model(DEMO_PATH, dtype=dtype, device=device, local_files_only=True), load_tokenizer(DEMO_PATH)
