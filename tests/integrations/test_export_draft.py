"""`selfspec export-draft`: the folder is an ordinary checkpoint, its drafts are accepted as often as was predicted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from typer.testing import CliRunner

from gguf_models import metadata, tensors, write
from layerskip_models import from_transformers, load_model
from layerskip_models.checkpoints.fingerprint import fingerprint
from layerskip_models.checkpoints.four_bit_writing import write_in_four_bits
from layerskip_models.checkpoints.loading import load_transformers
from layerskip_models.exits.adapter import STEERED, AdapterConfig, ExitAdapters
from layerskip_models.exits.folder import save_adapters
from random_adapters import random_adapters
from selfspec import SelfSpecGenerator
from selfspec.analysis.draft_agreement import draft_agreement, own_texts
from selfspec.analysis.draft_cost import best_drafts, best_exit, head_in_layers
from selfspec.analysis.replay import AgreementTrace, trace_agreement
from selfspec.cli.main import app
from selfspec.integrations.draft_checkpoint import draft_model
from tiny_llama import reference_greedy, tiny_llama, tiny_tokenizer

PROMPTS = [[3, 1, 4, 1, 5], [9, 2]]
NEW = 30


def trained(config: AdapterConfig, seed: int = 7) -> ExitAdapters:
    """Adapters that change what an exit says."""
    adapters = ExitAdapters(config)
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapters.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    for layer in config.exit_layers:
        adapters.at(layer).scale.fill_(0.7)
    return adapters.double()


def exported(model: PreTrainedModel, folder: Path, *arguments: Any) -> PreTrainedModel:
    draft_model(model, *arguments).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_as_assistant_model_the_text_is_plain_and_acceptance_as_predicted(num_drafts: int, tmp_path: Path) -> None:
    """Exactly as predicted: the rounds of greedy drafts follow from where the draft agrees with the text."""
    llama = tiny_llama(num_layers=5, seed=3, late_scale=0.9, tie_word_embeddings=True).double()
    draft = exported(llama, tmp_path, 2)
    assert draft.config.num_hidden_layers == 2
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    texts = own_texts(SelfSpecGenerator(from_transformers(llama), policy="ls:2-3"), prompts, NEW)
    predicted = draft_agreement(draft, prompts, texts)
    counts = {llama: 0, draft: 0}
    for model in counts:
        model.register_forward_hook(lambda module, *_: counts.update({module: counts[module] + 1}))
    draft.generation_config = GenerationConfig(
        num_assistant_tokens=num_drafts, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0
    )
    for prompt, text in zip(PROMPTS, texts):
        assert reference_greedy(llama, prompt, max_new_tokens=NEW) == text.tolist()
    counts.update({llama: 0, draft: 0})
    for prompt, text in zip(prompts, texts):
        mask = torch.ones_like(prompt[None])
        options = {"max_new_tokens": NEW, "do_sample": False, "assistant_model": draft, "attention_mask": mask}
        out = llama.generate(prompt[None], **options)
        assert out[0, len(prompt) :].tolist() == text.tolist()
    rounds, drafted = counts[llama], counts[draft]
    new = len(PROMPTS) * NEW
    assert rounds < new  # some drafts are accepted
    assert predicted.rounds(num_drafts).acceptance_rate == (new - rounds) / drafted < 1
    assert predicted.rounds(num_drafts).tokens_per_round == new / rounds


def test_an_adapter_is_folded_in_exactly(tmp_path: Path) -> None:
    llama = tiny_llama(
        num_layers=4, heads=6, kv_heads=2, hidden_size=24, seed=5, attention_bias=True, rms_norm_eps=1e-5
    ).double()
    adapters = trained(AdapterConfig(hidden_size=24, exit_layers=(1, 3), rank=5, eps=1e-5))
    draft = exported(llama, tmp_path, 3, adapters.at(3))
    assert draft.config.num_hidden_layers == 4
    same_as_adapter(llama, draft, adapters)


def same_as_adapter(
    model: PreTrainedModel, draft: PreTrainedModel, adapters: ExitAdapters, exit_layer: int = 3
) -> None:
    text = torch.tensor([[(7 * i + 3) % 24 for i in range(20)]])
    with torch.no_grad():
        # The states behind each layer, without the final norm, which transformers applies to the last of them.
        hidden = model(text, output_hidden_states=True).hidden_states[exit_layer]
        adapted = adapters.at(exit_layer)(hidden)
        expected = model.lm_head(model.model.norm(adapted))
        bare = model.lm_head(model.model.norm(hidden))
        found = draft(text).logits
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # transformers' norms are computed in float32
    assert (expected - bare).abs().max() > 0.1


FAMILIES: dict[str, Any] = {
    "mistral": MistralConfig(sliding_window=8),
    "qwen2": Qwen2Config(),
    "qwen3": Qwen3Config(),
    "phi3": Phi3Config(pad_token_id=0),
}


def of_family(config: Any) -> PreTrainedModel:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 5, "num_attention_heads": 2}
    values = {**config.to_dict(), **shape, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 24, "eos_token_id": 1}
    if values.get("layer_types"):
        values["layer_types"] = ["full_attention"] * 5
    torch.manual_seed(2)
    return AutoModelForCausalLM.from_config(type(config).from_dict({**values, "initializer_range": 0.3})).double()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_draft_is_of_the_models_family(name: str, tmp_path: Path) -> None:
    model = of_family(FAMILIES[name])
    adapters = trained(AdapterConfig(hidden_size=16, exit_layers=(3,), rank=5, eps=model.config.rms_norm_eps))
    draft = exported(model, tmp_path, 3, adapters.at(3))
    assert type(draft) is type(model)
    same_as_adapter(model, draft, adapters)


def test_adapters_that_no_checkpoint_can_hold() -> None:
    llama = tiny_llama(num_layers=4)
    shape: dict[str, Any] = {"hidden_size": 16, "exit_layers": (2,), "rank": 4}
    with pytest.raises(ValueError, match=r"rank 25 does not fit into an MLP of width 24.*--exits none"):
        draft_model(llama, 2, trained(AdapterConfig(**{**shape, "rank": 25})).at(2))
    with pytest.raises(ValueError, match="layers of a 'olmo2' model cannot hold"):
        draft_model(of_family(Olmo2Config()), 2, trained(AdapterConfig(**shape)).at(2))
    assert draft_model(llama, 1).config.num_hidden_layers == 1
    for layer in (0, 4):
        with pytest.raises(ValueError, match=r"exit_layer must be in \[1, 3\]"):
            draft_model(llama, layer)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint with an adapter for exit 2 beside it."""
    tiny_llama(num_layers=4, seed=3, max_position_embeddings=256).save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    (tmp_path / "tiny" / "exits").mkdir()
    (tmp_path / "a.txt").write_text("abc abd abe", encoding="utf-8")
    model = load_model(tmp_path / "tiny")
    config = AdapterConfig(hidden_size=16, exit_layers=(2,), rank=4, base_model="tiny", fingerprint=fingerprint(model))
    save_adapters(trained(config).float(), tmp_path / "tiny" / "exits")
    return tmp_path


def test_the_command(folder: Path) -> None:
    def run(exit_layer: int, output: str, *more: str) -> Any:
        fixed = ["--output-dir", str(folder / output), "--file", str(folder / "a.txt"), "--max-new-tokens", "16"]
        return CliRunner().invoke(app, ["export-draft", str(folder / "tiny"), str(exit_layer), *fixed, *more])

    for exit_layer, output, more, layers in ((2, "with", [], 3), (2, "bare", ["--exits", "none"], 2)):
        result = run(exit_layer, output, *more)
        assert result.exit_code == 0, result.output
        assert "4 drafts a round: 0." in result.stdout
        draft = AutoModelForCausalLM.from_pretrained(folder / output)
        assert isinstance(draft, LlamaForCausalLM) and draft.config.num_hidden_layers == layers
        assert (
            AutoTokenizer.from_pretrained(folder / output)("abc")["input_ids"] == tiny_tokenizer()("abc")["input_ids"]
        )
        assert "agreement with the full model" in (folder / output / "README.md").read_text(encoding="utf-8")
    assert "for exit layers 2 only" in run(3, "other", "--exits", str(folder / "tiny" / "exits")).output
    steered = folder / "steered"
    steered.mkdir()
    save_adapters(random_adapters(load_model(folder / "tiny", exits=None), [2], form=STEERED), steered)
    refused = run(2, "other", "--exits", str(steered))
    assert refused.exit_code == 2 and "works with low_rank ones only" in " ".join(refused.output.split())
    assert (run(2, "bare").exit_code, run(4, "new").exit_code) == (2, 2)
    assert "not empty" in run(2, "bare").output and "[1, 3]" in run(4, "new").output


def test_the_best_number_of_drafts_by_hand() -> None:
    """Ten tokens after the first. The draft is wrong at each third, so a round of 2 drafts keeps both and adds the model's.

    The draft has 2 of 8 layers, and the head is one layer: a round with k drafts reads 3k + 9.
    k = 1: T, then 1 + 1, 1 + 0 ...: tokens come as 2, 1, 2, 1, 2, 1 in 6 rounds: 9 x 9 / (6 x 12) = 1.125.
    k = 2: 3 rounds of 3 tokens: 9 x 9 / (3 x 15) = 1.8. Longer rounds keep no more and read more.
    """
    trace = AgreementTrace(tokens=(*range(10),), agrees={2: (1.0, 1.0, 0.0) * 3}, num_layers=8)
    best = best_drafts([trace], 2, 2, 8, 1.0)
    assert (best.num_drafts, best.tokens_per_round, best.speedup) == (2, 3.0, pytest.approx(1.8))
    slower = best_drafts([trace], 2, 7, 8, 1.0)  # the same drafts from 7 layers: a round of 2 reads 16 + 9
    assert (slower.num_drafts, slower.speedup) == (2, pytest.approx(9 * 9 / (3 * 25)))
    with pytest.raises(ValueError, match="too short to predict"):
        best_drafts([AgreementTrace(tokens=(1,), agrees={2: ()}, num_layers=8)], 2, 2, 8, 1.0)


def test_the_head_counts_in_layers() -> None:
    """A layer has 4 matrices of 16 x 16 (one head of 16), 3 of 16 x 24 and 2 norms of 16; the head is 24 x 16."""
    llama = tiny_llama(num_layers=4, heads=1, kv_heads=1, hidden_size=16, head_dim=16)
    layer = sum(parameter.numel() for parameter in llama.model.layers[0].parameters())
    assert layer == 4 * 256 + 3 * 384 + 32
    assert head_in_layers(llama) == 384 / layer


def test_the_best_exit_is_that_of_the_layer_that_agrees(folder: Path) -> None:
    """Every exit is judged with the layers that its draft would have; the adapter of exit 2 is one more."""
    generator = SelfSpecGenerator.from_pretrained(folder / "tiny", exits="auto")
    traces = [trace_agreement(generator, torch.tensor([3, 1, 4]), 24)]
    chosen = best_exit(generator, traces, (2,), 0.5)
    every = [best_drafts(traces, layer, layer + (layer == 2), 4, 0.5) for layer in (1, 2, 3)]
    assert chosen == max(every, key=lambda setting: setting.speedup)
    assert len({setting.speedup for setting in every}) > 1


def test_lines_for_other_engines_are_written(folder: Path) -> None:
    arguments = ["--output-dir", str(folder / "it's new"), "--file", str(folder / "a.txt"), "--max-new-tokens", "16"]
    result = CliRunner().invoke(app, ["export-draft", str(folder / "tiny"), *arguments])
    assert result.exit_code == 0, result.output
    found = re.search(r"exit (\d) gains most", result.stderr)
    best = re.search(r"best by what is read: (\d+) drafts a round", result.stdout)
    assert found is not None and best is not None
    drafts, path = int(best[1]), str((folder / "it's new").resolve())
    page = (folder / "it's new" / "ENGINES.md").read_text(encoding="utf-8")
    (shell,) = re.findall(r"--speculative-config (\'.*\')", page)
    assert json.loads(shell.replace("'\\''", "'")[1:-1]) == {
        "method": "draft_model", "model": path, "num_speculative_tokens": drafts
    }  # fmt: skip
    assert (
        f"--speculative-num-steps {drafts} --speculative-eagle-topk 1 --speculative-num-draft-tokens {drafts + 1}"
        in page
    )
    assert f"max_draft_len: {drafts}" in page and "convert_hf_to_gguf.py" in page
    assert not (folder / "it's new" / "draft.gguf").exists()


@pytest.mark.parametrize("adapted", [True, False])
def test_of_a_gguf_file_the_draft_is_one_too(adapted: bool, tmp_path: Path) -> None:
    """With the numbers of the file, and an adapter as one more layer; it says what the checkpoint beside it says."""
    llama = tiny_llama(num_layers=4, seed=3, max_position_embeddings=256)
    write(tmp_path / "tiny.gguf", "llama", metadata(llama.config), tensors(llama))
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "a.txt").write_text("abc abd abe", encoding="utf-8")
    (tmp_path / "exits").mkdir()
    model = load_model(tmp_path / "tiny.gguf")
    config = AdapterConfig(hidden_size=16, exit_layers=(2,), rank=4, base_model="tiny", fingerprint=fingerprint(model))
    save_adapters(trained(config).float(), tmp_path / "exits")
    exits = str(tmp_path / "exits") if adapted else "none"
    arguments = [
        "2",
        "--output-dir",
        str(tmp_path / "draft"),
        "--file",
        str(tmp_path / "a.txt"),
        "--max-new-tokens",
        "16",
    ]
    result = CliRunner().invoke(app, ["export-draft", str(tmp_path / "tiny.gguf"), *arguments, "--exits", exits])
    assert result.exit_code == 0, result.output
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.float32)
    cut = load_transformers(tmp_path / "draft" / "draft.gguf", dtype="float32", device="cpu")
    assert cut.config.num_hidden_layers == draft.config.num_hidden_layers == 2 + adapted
    text = torch.tensor([[(7 * i + 3) % 24 for i in range(20)]])
    with torch.no_grad():
        torch.testing.assert_close(cut(text).logits, draft(text).logits, rtol=1e-2, atol=1e-2)
    page = (tmp_path / "draft" / "ENGINES.md").read_text(encoding="utf-8")
    assert (
        f"llama-server -m {tmp_path / 'tiny.gguf'} -md {tmp_path / 'draft' / 'draft.gguf'} --spec-type draft-simple"
        in page
    )


def test_the_whole_model_in_four_bits(tmp_path: Path) -> None:
    """Its acceptance is predicted from the numbers that were written, and its layers count by their bytes."""
    llama = tiny_llama(
        num_layers=3, seed=3, hidden_size=64, head_dim=32, intermediate_size=128, max_position_embeddings=256
    )
    llama.save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    (tmp_path / "a.txt").write_text("abc abd abe", encoding="utf-8")

    def run(model: str, *more: str) -> Any:
        fixed = ["--output-dir", str(tmp_path / "draft"), "--file", str(tmp_path / "a.txt"), "--max-new-tokens", "16"]
        return CliRunner().invoke(app, ["export-draft", str(tmp_path / model), *fixed, *more])

    result = run("tiny", "--draft-weights", "int4")
    assert result.exit_code == 0, result.output
    written = load_transformers(tmp_path / "draft", dtype="float32", device="cpu")
    assert written.config.num_hidden_layers == 3
    prompt = tiny_tokenizer()("abc abd abe")["input_ids"]
    own = reference_greedy(llama, prompt, max_new_tokens=16)
    with torch.no_grad():
        said = written(torch.tensor([[*prompt, *own[:-1]]])).logits[0, len(prompt) - 1 :].argmax(dim=-1).tolist()
    agreement = sum(a == b for a, b in zip(said, own)) / 16
    assert f"own greedy text: {agreement:.3f}" in result.stdout
    assert agreement > 0.3
    assert "lines for vLLM and SGLang)" in result.stdout
    assert "all layers in 4 bits" in (tmp_path / "draft" / "README.md").read_text(encoding="utf-8")
    page = (tmp_path / "draft" / "ENGINES.md").read_text(encoding="utf-8")
    assert "--speculative-draft-model-path" in page and "llama-quantize" in page
    assert "trtllm-serve" not in page and "{" not in page.replace('\'{"method"', "")


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["2", "--draft-weights", "int4"], "leave out the number of layers"),
        (["--draft-weights", "int4", "--exits", "some"], "leave out --exits"),
        (["--draft-weights", "int8"], "must be own or int4, got 'int8'"),
    ],
)
def test_what_does_not_go_with_four_bits(folder: Path, more: list[str], named: str) -> None:
    result = CliRunner().invoke(app, ["export-draft", str(folder / "tiny"), "--output-dir", str(folder / "new"), *more])
    assert result.exit_code == 2 and named in " ".join(result.output.split())


def test_few_bits_are_not_rounded_again(tmp_path: Path) -> None:
    llama = tiny_llama(num_layers=3, hidden_size=64, head_dim=32, intermediate_size=128, max_position_embeddings=256)
    write_in_four_bits(llama, tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    arguments = ["--output-dir", str(tmp_path / "draft"), "--draft-weights", "int4"]
    result = CliRunner().invoke(app, ["export-draft", str(tmp_path), *arguments])
    assert result.exit_code == 2 and "has few bits already" in " ".join(result.output.split())


def test_a_gguf_file_of_floats_in_four_bits(tmp_path: Path) -> None:
    llama = tiny_llama(
        num_layers=3, seed=3, hidden_size=64, head_dim=32, intermediate_size=128, max_position_embeddings=256
    )
    write(tmp_path / "tiny.gguf", "llama", metadata(llama.config), tensors(llama))
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "a.txt").write_text("abc abd abe", encoding="utf-8")
    arguments = ["--output-dir", str(tmp_path / "draft"), "--file", str(tmp_path / "a.txt"), "--max-new-tokens", "16"]
    result = CliRunner().invoke(
        app, ["export-draft", str(tmp_path / "tiny.gguf"), *arguments, "--draft-weights", "int4"]
    )
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "draft" / "draft.gguf").exists()
    assert load_transformers(tmp_path / "draft", dtype="float32", device="cpu").config.num_hidden_layers == 3
