"""`selfspec export-hub`: a checkpoint folder whose `generate` is selfspec's when it is loaded with transformers.

`from_pretrained(FOLDER, trust_remote_code=True)` replaces `model.generate` by the function in `custom_generate/generate.py`.
Without `trust_remote_code` the folder is an ordinary checkpoint.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData, snapshot_download

from layerskip_models.checkpoints.checkpoint_files import FILE, INDEX, clear_errors, files_of, listed_files
from layerskip_models.checkpoints.loading import find_source
from layerskip_models.checkpoints.supported import quantisation_of
from layerskip_models.exits import FOLDER
from layerskip_models.exits import folder as exits
from layerskip_models.families import family_of
from policies import LayerCost, parse_policy
from selfspec import __version__
from selfspec.defaults import DEFAULT_POLICY, SETTINGS_FILE
from selfspec.pacer import network as pacer

FILES = (
    "config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*",
    "merges.txt", "chat_template*", "LICENSE*", "NOTICE*", SETTINGS_FILE,
)  # fmt: skip
"""Files of a checkpoint's folder besides its weights. Its README is read for the model card."""
IN_FOLDERS = (
    f"{FOLDER}/{exits.CONFIG_FILE}", f"{FOLDER}/{exits.WEIGHTS_FILE}", f"{FOLDER}/README.md",
    f"{pacer.FOLDER}/{pacer.CONFIG_FILE}", f"{pacer.FOLDER}/{pacer.WEIGHTS_FILE}", f"{pacer.FOLDER}/README.md",
    "additional_chat_templates/*.jinja",
)  # fmt: skip
"""Files in folders of their own: exit adapters, a pre-verifier, further templates."""

GENERATE = '''\
"""transformers runs this instead of `model.generate`: self-speculative decoding with selfspec."""

from selfspec.integrations.custom_generate import hub_generate

POLICY = {policy!r}


def generate(*arguments, model, **options):
    """Decode as transformers' `generate` does; `policy`, `exit_layer` and `num_speculations` may be given as well."""
    return hub_generate(model, arguments, options, policy=POLICY)
'''

_CARD = """\
# {title}, decoding with selfspec

The first layers draft a few tokens, and the rest verify them in one pass. The weights are unchanged. In float32, as below,
greedy text is the model's own, and samples follow its distribution. In bfloat16 or float16 transformers rounds after each
operation, and selfspec on a CPU does not, so texts may differ.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

name = "PATH_OR_NAME_OF_THIS_FOLDER"
tokenizer = AutoTokenizer.from_pretrained(name)
model = AutoModelForCausalLM.from_pretrained(name, dtype="float32", trust_remote_code=True)
inputs = tokenizer("def fibonacci(n):", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=64)[0]))
```

`trust_remote_code=True`, which `pipeline` takes too, runs `custom_generate/generate.py`: a few lines that call the installed
package `selfspec`. Without it this is an ordinary checkpoint. The policy is `{policy}`; a call may name another, as in
`model.generate(**inputs, policy="ls:3-4")`.
"""


def export_hub(
    name_or_path: str | Path, folder: str | Path, *, policy: str = DEFAULT_POLICY, link: bool = False
) -> Path:
    """Write a folder that transformers decodes from with selfspec, exit adapters and a pre-verifier included.

    policy: for calls that name none. link: link to the weights instead of copying them.
    Raises ValueError for a model or a policy that cannot be used, FileNotFoundError or OSError for a checkpoint that cannot
    be read, FileExistsError for a folder with something in it.
    """
    checkpoint = find_source(name_or_path, None, False)
    name, config = checkpoint.name, checkpoint.config
    if quantisation_of(config) is not None:
        raise ValueError(f"{name} is quantised: transformers would load it in a form that selfspec cannot decode with")
    if family_of(config).foreign:
        raise ValueError(
            f"{name} is a {config.model_type!r} model, which transformers does not load without remote code"
        )
    if "pacer" not in policy:  # which needs files of its own
        num_layers = config.num_hidden_layers
        parse_policy(policy, num_layers=num_layers, measure=lambda: LayerCost(num_layers))
    target = Path(folder)
    if target.is_dir() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty: give a new folder")
    with clear_errors(name):
        source = Path(name) if Path(name).is_dir() else _downloaded(name)
        files, listed = files_of(str(source), {})
    weights = [*([INDEX] if listed else []), *(file.name for file in files)]
    target.mkdir(parents=True, exist_ok=True)
    found = {path for pattern in (*FILES, *IN_FOLDERS) for path in source.glob(pattern) if path.is_file()}
    for path in sorted({*found, *(source / weight for weight in weights)}):
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if link and path.name in weights and path.suffix == ".safetensors" and path.parent == source:
            copy.symlink_to(path.resolve())
        else:
            shutil.copyfile(path, copy)
    code = target / "custom_generate"
    code.mkdir()
    (code / "generate.py").write_text(GENERATE.format(policy=policy), encoding="utf-8")
    (code / "requirements.txt").write_text(f"selfspec>={__version__}\n", encoding="utf-8")
    (target / "README.md").write_text(_card(name, source, policy), encoding="utf-8")
    return target


def _downloaded(name: str) -> Path:
    """Download the files of a checkpoint from the hub, and nothing else of its repository; returns the folder."""
    snapshot_download(name, allow_patterns=[*FILES, FILE, INDEX, "README.md"], ignore_patterns=["*/*"])
    folder = Path(snapshot_download(name, allow_patterns=[*IN_FOLDERS]))
    if (folder / INDEX).is_file():
        snapshot_download(name, allow_patterns=[*listed_files(folder / INDEX).values()], ignore_patterns=["*/*"])
    return folder


def _card(name: str, source: Path, policy: str) -> str:
    """Write the README: how to use the folder, then the checkpoint's card with its metadata, such as the licence."""
    original = source / "README.md"
    found = ModelCard.load(original, ignore_metadata_errors=True) if original.is_file() else None
    data = ModelCardData() if found is None else found.data
    data.tags = sorted({*(data.tags or []), "custom_generate", "layerskip", "selfspec"})
    data.library_name = data.library_name or "transformers"
    data.pipeline_tag = data.pipeline_tag or "text-generation"
    if not Path(name).is_dir():
        data.base_model = data.base_model or name
    text = _CARD.format(title=Path(name).name, policy=policy)
    if found is not None:
        text += f"\n---\n\n{found.text.strip()}\n"
    return f"---\n{data.to_yaml()}\n---\n\n{text}"
