"""From the start of a process to its first token, in a process of its own: what each stage took, as one line of JSON.

Run by `selfspec-bench startup` as `python -m bench.machine.startup_child START JOB`: when the process was started, seconds
since the epoch, and what to do, as JSON. Imports are part of what is measured, so each is where its stage is.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

SYNTHETIC = "synthetic:"


class Stages:
    """Seconds by stage, on one clock. start: when the first began, seconds since the epoch."""

    def __init__(self, start: float) -> None:
        self.seconds: dict[str, float] = {}
        self._last = start

    def end(self, stage: str) -> None:
        """What was done since the last stage ended belongs to this one."""
        now = time.time()
        self.seconds[stage] = now - self._last
        self._last = now

    def begin(self) -> None:
        """What was done since the last stage ended belongs to none."""
        self._last = time.time()


class FirstToken:
    """A streamer that ends a stage when the first new token is there; the prompt is put before it."""

    def __init__(self, stages: Stages, stage: str) -> None:
        self._stages, self._stage, self._puts = stages, stage, 0

    def put(self, value: Any) -> None:
        """The prompt, then tokens."""
        self._puts += 1
        if self._puts == 2:
            self._stages.end(self._stage)

    def end(self) -> None:
        """Nothing is left to do."""


def start_selfspec(stages: Stages, job: dict[str, Any]) -> None:
    """The engine with its default policy."""
    import torch  # the larger part of it

    from layerskip_models import from_transformers, load_tokenizer
    from layerskip_models.checkpoints.loading import load_transformers
    from layerskip_models.checkpoints.synthetic import parse_synthetic, synthetic_llama
    from selfspec import SelfSpecGenerator

    stages.end("imports")
    name, options = job["model"], {"dtype": job["dtype"], "device": job["device"]}
    if name.startswith(SYNTHETIC):
        dtype = getattr(torch, job["dtype"])
        network, tokenizer = synthetic_llama(*parse_synthetic(name), dtype=dtype, device=job["device"]), None
    else:
        network, tokenizer = load_transformers(name, **options), load_tokenizer(name)
    stages.end("loading")
    generator = SelfSpecGenerator(from_transformers(network, release=True), tokenizer)
    stages.end("layout")
    _ = generator.policy  # times what the default policy's costs are made of
    stages.end("calibration")
    for stage in ("prefill", "second call"):
        streamer = FirstToken(stages, stage)
        generator.generate(job["prompt"], max_new_tokens=2, do_sample=False, eos_token_id=[], streamer=streamer)
        stages.begin()


def start_transformers(stages: Stages, job: dict[str, Any]) -> None:
    """transformers' own `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    stages.end("imports")
    dtype = getattr(torch, job["dtype"])
    if job["model"].startswith(SYNTHETIC):
        from layerskip_models.checkpoints.synthetic import parse_synthetic, synthetic_llama

        network: Any = synthetic_llama(*parse_synthetic(job["model"]), dtype=dtype, device=job["device"])
    else:
        network = AutoModelForCausalLM.from_pretrained(job["model"], dtype=dtype).to(job["device"])
        AutoTokenizer.from_pretrained(job["model"])
    stages.end("loading")
    network.generation_config = GenerationConfig(eos_token_id=None)
    ids = torch.tensor([job["prompt"]], device=job["device"])
    for stage in ("prefill", "second call"):
        with torch.inference_mode():
            network.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=2,
                streamer=FirstToken(stages, stage),
            )
        stages.begin()


def main() -> None:
    """Do one job and print its stages."""
    stages = Stages(float(sys.argv[1]))
    stages.end("interpreter")
    job = json.loads(sys.argv[2])
    {"selfspec": start_selfspec, "transformers": start_transformers}[job["engine"]](stages, job)
    print(json.dumps(stages.seconds))


if __name__ == "__main__":
    main()
