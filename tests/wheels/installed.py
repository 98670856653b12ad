"""Run by the Python of a clean environment, with nothing of this repository but the installed wheel: prints JSON."""

from __future__ import annotations

import json

import layerskip_models
from layerskip_models import DEMO_PATH
from layerskip_models.kernels.library import runnable_variants
from selfspec import SelfSpecGenerator

result = SelfSpecGenerator.from_pretrained(DEMO_PATH).generate("def fibonacci(n):\n", max_new_tokens=40)
print(
    json.dumps(
        {
            "package": layerskip_models.__file__,
            "kernels": result.stats.kernels,
            "variants": runnable_variants(),
            "text": result.text,
        }
    )
)
