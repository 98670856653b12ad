"""What a process imports before it does anything. The clock is left out: a package more is what makes a start slow."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.commands.bench_options import COMMANDS as BENCH_COMMANDS
from selfspec.cli.commands import COMMANDS

HEAVY = (
    "accelerate", "fastapi", "gguf", "llguidance", "matplotlib", "pandas", "scipy", "sklearn", "sympy", "tokenizers",
    "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "transformers",
)  # fmt: skip
MODELLING = ("transformers.modeling_utils", "transformers.generation.utils", "transformers.models.llama.modeling_llama")


def loaded(code: str, *names: str, then: str = "") -> set[str]:
    """Which of these modules are loaded in a process of its own that has run the code. then: run later; it says nothing."""
    show = f"import sys; sys.stderr.write('loaded:' + ' '.join(name for name in {names!r} if name in sys.modules))"
    command = [sys.executable, "-c", f"{code}\n{show}\n{then}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return {*done.stderr.rpartition("loaded:")[2].split()}


def called(*arguments: str, program: str = "selfspec", status: int = 0) -> str:
    """Code that runs the command `selfspec`, or the other program, to its end with this exit status."""
    module = "selfspec.cli.main" if program == "selfspec" else "bench.commands.bench_app"
    return (
        f"import sys\nfrom {module} import main\nsys.argv = [{program!r}, *{arguments!r}]\n"
        f"try:\n    main()\nexcept SystemExit as end:\n    assert (end.code or 0) == {status}, end.code"
    )


def test_the_package_is_its_names_until_one_is_used() -> None:
    assert not loaded("import layerskip_models, selfspec", "torch", "numpy", *HEAVY)


def test_the_generator_needs_torch_and_no_transformers_and_every_public_name_is_there() -> None:
    """And the other program can be imported; neither says anything."""
    names = (
        "import layerskip_models, selfspec\n"
        "for package in (layerskip_models, selfspec):\n"
        "    assert {*package.__all__} <= {*dir(package)}\n"
        "    for name in package.__all__:\n        getattr(package, name)\n"
        "    assert not hasattr(package, 'nothing')\n"
        "import bench.commands.bench_app"
    )
    found = loaded("from selfspec import SelfSpecGenerator", "torch", *HEAVY, *MODELLING, then=names)
    assert found == {"torch"}


SLOW = {*HEAVY, *MODELLING, "transformers.models.llama.configuration_llama"} - {"gguf", "tokenizers", "transformers"}
USUAL = """
from selfspec import SelfSpecGenerator
from layerskip_models.checkpoints.loading import DEMO_PATH
from layerskip_models.checkpoints.named_models import NAMED_MODELS
generator = SelfSpecGenerator.from_pretrained(DEMO_PATH)
generator.generate("def", max_new_tokens=4)
generator.generate("def", max_new_tokens=4, stop_strings=["Q"], eos_token_id=[3], policy="ls:2-3")
sampling = {"do_sample": True, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1}
generator.generate("def", max_new_tokens=4, seed=1, **sampling)
if NAMED_MODELS["smollm2"].find():
    chat = SelfSpecGenerator.from_pretrained("smollm2", policy="ar")
    chat.generate(messages=[{"role": "user", "content": "Hello"}], max_new_tokens=2)
"""


def test_loading_and_usual_calls_import_no_models_of_transformers_and_no_compiler() -> None:
    assert not loaded(USUAL, *SLOW)


MODEL_IS_THERE = (
    "from pathlib import Path\nimport layerskip_models.checkpoints.named_models as named\n"
    "named.NamedModel.find = lambda self: Path('there')\n"
)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["get", "smollm2"]], ids=" ".join)
def test_commands_that_run_no_model_import_none(arguments: list[str]) -> None:
    before = MODEL_IS_THERE if "smollm2" in arguments else ""
    assert not loaded(before + called(*arguments), "torch", "numpy", *HEAVY)


def test_help_and_mistakes_of_every_command_import_nothing_heavy() -> None:
    calls = [called(name, "--help") for name in COMMANDS]
    calls += [called(name, "--help", program="selfspec-bench") for name in BENCH_COMMANDS]
    for program, name in (("selfspec", "generate"), ("selfspec-bench", "run")):
        calls += [called("--help", program=program), called(name, "--maxtokens", program=program, status=2)]
    calls += [called("generate", "--json", "--show-drafts", status=2), called("chat", "smolm2", status=2)]
    assert not loaded("\n".join(calls), "torch", "numpy", *HEAVY)
