"""The table of records: how each one in the repository is made, in which order, and what that needs.

A command is written as the record's provenance has it, without the record's own file, which is added. Two words stand for
folders: FILES is where the user has what does not come with the package (prompts, texts, checkpoints), WORK is a folder
beside the record in which a study keeps what it trains.

A quick run has the same command with less work. What a user would have to bring is replaced by something that is here
(`STAND_INS`), and `quick` is appended: of an option that is given twice, the last one counts.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

DATA = "docs/data"
FILES, WORK = "FILES", "WORK"
QUICK_TEXT, QUICK_CHATS = f"{WORK}/inputs/texts.txt", f"{WORK}/inputs/chats.jsonl"
"""The shipped prompts as text to train on, and as chats; a quick run writes them."""
_DEMO = "layerskip_models/demo"
STAND_INS: Mapping[str, str | None] = {
    "FILES/humaneval.jsonl.gz": "code",
    "FILES/gsm8k.jsonl.gz": "math",
    "FILES/aqua_rat.jsonl.gz": "translation",
    "FILES/mbpp.jsonl.gz": "code",
    "FILES/mgsm.jsonl.gz": "math",
    "FILES/qa.jsonl.gz": "english",
    "FILES/rag.jsonl.gz": "copying",
    "FILES/mt_bench.jsonl.gz": "english",
    "FILES/summarization.jsonl.gz": "english",
    "FILES/translation.jsonl.gz": "translation",
    "FILES/mixed/prompts.jsonl": "copying",
    "FILES/demo-prompts.jsonl": "bench/prompts/code.jsonl",
    "FILES/chat.jsonl": "english",
    "FILES/unseen.jsonl": "english",
    "FILES/questions.jsonl": QUICK_CHATS,
    "FILES/held-out.jsonl": QUICK_CHATS,
    "FILES/chats.jsonl": QUICK_CHATS,
    "FILES/run/exits": None,
    "FILES/static": f"{WORK}/trained/exits",
    "FILES/maths.jsonl": QUICK_CHATS,
    "FILES/run/model": _DEMO,
    "FILES/run-further/model": _DEMO,
    "FILES/control": _DEMO,
    "FILES/ladder": _DEMO,
    "FILES/SmolLM2-135M-Instruct": f"{WORK}/converted",
    "FILES/int4": None,
    "FILES/int8": None,
    "FILES/fp16": None,
    "synthetic:medium": "synthetic:small",
    "synthetic:llama3.2-1B": "synthetic:small",
    "synthetic:llama2-7B": "synthetic:small",
    "medium": "small",
    "Q4_K_M": "Q4_1",  # the small shape's rows are too short for blocks of 256
    "Q6_K": None,
    "bits:8-4,layer=12": "bits:8-4,layer=6",
}
"""By a word of a command: the word of a quick run; None leaves it out, and the option before it. Files of training text all
become `QUICK_TEXT`."""
QUICK_MINUTES = 0.35
"""What a quick record takes, about."""
PACKAGES: Mapping[str, str] = {
    "llama_cpp": "llama-cpp-python",
    "ik_llama_cpp": "ik-llama-cpp-python",
    "openvino_genai": "openvino-genai",
    "onnxruntime_genai": "onnxruntime-genai",
    "ctranslate2": "ctranslate2",
    "gguf": "gguf",
}
"""The package of each module that a record may need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSource:
    """How one record is made.

    name: of its file, without the ending. command: see the module. minutes: about, on two cores. quick: arguments that a
    quick run has besides. folder: where the record is kept, below the root. modules: without which the command fails.
    peers: modules without which the record would lack engines; a quick run does without. before: a command that a quick run
    needs first.
    """

    name: str
    command: str
    minutes: float
    quick: str
    folder: str = DATA
    modules: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    before: str | None = None

    def words(self, *, quick: bool) -> list[str]:
        """The words of its command, FILES and WORK as they are; `bench` and `bench.experiments` are the two programs."""
        program, *words = program_words(self.command)
        return [program, *(_stand_ins(words) if quick else words), *(shlex.split(self.quick) if quick else ())]

    def files(self, *, quick: bool) -> list[str]:
        """What it reads in the folder FILES, by path below it; None of it comes with the package."""
        found = (word.partition(":")[0] for word in self.words(quick=quick) if word.startswith(f"{FILES}/"))
        return list(dict.fromkeys(word.removeprefix(f"{FILES}/") for word in found))

    @property
    def output_option(self) -> str:
        """How its command is told where to write: `shapes` takes a folder."""
        return "--output-dir" if self.words(quick=False)[1] == "shapes" else "--output"

    @property
    def resumes(self) -> bool:
        """Whether its command goes on with a record that broke off: only `run`, and not with policies that are kept."""
        words = self.words(quick=False)
        return words[:2] == ["bench", "run"] and "--kept" not in words


def program_words(command: str) -> list[str]:
    """A command's words, the first one the module that `python -m` runs."""
    program, *rest = shlex.split(command)
    if program in ("selfspec", "selfspec-bench"):
        return ["bench" if program == "selfspec-bench" else "selfspec", *rest]
    assert [program, *rest[:2]] == ["python", "-m", "bench.experiments"], command
    return rest[1:]


def _stand_ins(words: list[str]) -> Iterator[str]:
    kept: list[str] = []
    for word in words:
        name, colon, share = word.partition(":")
        if name.startswith(f"{FILES}/") and name.endswith((".txt", ".txt.gz")):
            kept.append(f"{QUICK_TEXT}{colon}{share}")
            continue
        other = STAND_INS.get(word, word)
        if other is None:
            kept.pop()
        else:
            kept.append(other)
    return iter(kept)


_FOUR = ("humaneval", "gsm8k", "summarization", "translation")
_TASKS = "".join(f" --prompts FILES/{name}.jsonl.gz" for name in _FOUR)
_ALL_TASKS = _TASKS + "".join(
    f" --prompts FILES/{name}.jsonl.gz" for name in ("mbpp", "aqua_rat", "mgsm", "qa", "rag", "mt_bench")
)
_PLAIN_TASKS = "".join(f" FILES/{name}.jsonl.gz" for name in _FOUR)
_CORPUS = "".join(
    f" --data FILES/corpus/{name}"
    for name in (
        "gsm8k_train.txt.gz:1.5",
        "mbpp_train.txt.gz:2",
        "aqua_rat_dev.txt.gz:2",
        "tatoeba_de_en.txt.gz:1",
        "gutenberg_books.txt.gz:1",
        "us_addresses.txt.gz:1",
    )
)
_LADDER_TEXT = "".join(
    f" --text FILES/corpus/{name}.txt.gz"
    for name in ("gsm8k_train", "mbpp_train", "tatoeba_de_en", "gutenberg_books", "us_addresses")
)
_LOSS_CORPUS = "".join(
    f" --data FILES/corpus/{name}"
    for name in (
        "gsm8k_train.txt.gz:0.015",
        "mbpp_train.txt.gz:0.1",
        "aqua_rat_dev.txt.gz:0.1",
        "tatoeba_de_en.txt.gz:0.01",
        "tinyshakespeare.txt.gz:0.05",
        "us_addresses.txt.gz:0.01",
    )
)
_STUDY = "python -m bench.experiments"
_ADAPTERS = f"{_STUDY} exit-adapters{_CORPUS}"
_TRAINED = "--max-tokens 50000 --epochs 2 --num-samples 4 --max-new-tokens 100"
_OWN = "--form low_rank --weighting uniform --seeds 3 --own-answers"
_WEIGHTINGS = "".join(
    f" --weighting {name}"
    for name in (
        "uniform",
        "cumulative",
        "continuation",
        "full",
        "full:0",
        "full:0.3",
        "full:0.7",
        "full:0.9",
        "top3",
        "target",
        "full:0.5:16",
    )
)
_LOSSES = f"{_STUDY} exit-losses{_LOSS_CORPUS}"
_POLICIES = (
    "--policy auto --policy auto:cost=layers --policy del --policy del:on_stop=keep --policy del:length=tpl "
    "--policy del+spide:tau=0.2 --policy del+spide:tau=0.3 --policy del+spide:tau=0.5 --policy spide:1,tau=0.2 "
    "--policy spide:1,tau=0.3 --policy dv:1,start=0.2 --policy fs:1-4 --policy adaedl:1,start=0.2 "
    "--policy svip:1,threshold=1.4 --kept auto"
)
_BITS = (
    "--dtype bfloat16 --no-peers --no-grid --num-samples 3 --task code --task english --prompt-tokens 96 "
    "--max-new-tokens 128 --repeats 1 --no-memory --policy auto --policy auto:bits=off --policy bits:8-3"
)
_SAMPLED = (
    f"selfspec-bench run{_TASKS} --policy auto --policy auto:cost=layers --policy del:on_stop=keep "
    "--policy del+spide:tau=0.3 --policy spide:1,tau=0.2 --policy dv:1,start=0.2 --policy fs:1-4 "
    "--policy adaedl:1,start=0.2 --policy svip:1,threshold=1.4 --kept auto --num-samples 20 --max-new-tokens 96 --repeats 1 "
    "--no-peers --no-memory --do-sample --temperature"
)
_ONE = "--num-samples 1 --max-new-tokens 8 --repeats 1"
_ONE_COLD = f"{_ONE} --warmups 0"
_TINY_TRAINING = f"--seeds 1 --max-tokens 500 --epochs 1 {_ONE}"
_TINY_STEERED = "--seeds 1 --max-tokens 500 --epochs 1 --num-samples 1 --max-new-tokens 8"
_TINY_LOSSES = (
    "--arm uniform --seeds 1 --steps 1 --batch-tokens 128 --sequence-length 32 --own-texts 2 --own-text-tokens 32"
)

RECORDS: tuple[RecordSource, ...] = (
    # Policies, on the demo model.
    RecordSource(name="run", command="selfspec-bench run --kept auto --repeats 3", minutes=6, quick=_ONE_COLD),
    RecordSource(
        name="policies",
        command=f"selfspec-bench run{_TASKS} {_POLICIES} --num-samples 20 --max-new-tokens 96 --repeats 1 "
        "--no-peers --no-memory",
        minutes=8,
        quick=_ONE_COLD,
    ),
    RecordSource(name="policies-sampled-0.6", command=f"{_SAMPLED} 0.6", minutes=4, quick=_ONE_COLD),
    RecordSource(name="policies-sampled-1", command=f"{_SAMPLED} 1", minutes=4, quick=_ONE_COLD),
    RecordSource(
        name="sampled-smollm2",
        command="selfspec-bench run --model smollm2 --policy auto --do-sample --temperature 0.7 --top-p 0.9 --task english "
        "--task code --num-samples 2 --prompt-tokens 64 --max-new-tokens 48 --repeats 2 --no-grid --no-memory",
        minutes=5,
        quick=f"{_ONE_COLD} --no-peers",
    ),
    RecordSource(
        name="answers-sampled",
        command="selfspec-bench run --prompts FILES/aqua_rat.jsonl.gz --policy ar --policy auto --policy del "
        "--num-samples 40 --max-new-tokens 128 --do-sample --temperature 0.6 --repeats 10 --warmups 0 --no-peers "
        "--no-memory --no-grid",
        minutes=8,
        quick="--num-samples 1 --max-new-tokens 8 --repeats 2",
    ),
    RecordSource(
        name="segments",
        command=f"selfspec-bench run{_TASKS} --policy auto --num-samples 20 --max-new-tokens 512 --repeats 1 --no-peers "
        "--no-memory",
        minutes=8,
        quick=_ONE_COLD,
    ),
    RecordSource(
        name="speed",
        command=f"selfspec-bench run{_TASKS} --policy auto --policy auto:cost=layers --kept auto --num-samples 6 "
        "--max-new-tokens 96 --repeats 3 --no-peers --no-memory",
        minutes=4,
        quick=_ONE_COLD,
    ),
    RecordSource(
        name="del",
        command="selfspec-bench run --policy del --policy del:length=tpl --policy ls:2-18+del "
        "--policy del:layers=4/5/6/7/8/9/10/11/12/13/14/15 --policy del:omega=0.5 --policy del:omega=0.8 "
        "--policy del:omega=1 --no-peers --no-memory --no-grid --num-samples 3 --repeats 3",
        minutes=4,
        quick=_ONE_COLD,
    ),
    RecordSource(
        name="pacer",
        command=f"selfspec-bench run{_TASKS} --num-samples 20 --max-new-tokens 96 --repeats 1 --warmups 0 --no-peers "
        "--no-memory --policy pacer --policy pacer:b=3 --policy pacer:b=4 --policy pacer:b=4,t=0.5 --policy pacer:t=0.8 "
        "--policy pacer:rho=1.05 --policy pacer:b=4,t=0.7,rho=1.05 --policy ls:2-18+pacer --policy copy+ls:2-18+pacer "
        "--policy copy+pacer --policy dv:2 --policy dv:2,start=0.4",
        minutes=6,
        quick=_ONE_COLD,
    ),
    RecordSource(
        name="pacer-rules",
        command=f"selfspec-bench run{_TASKS} --num-samples 20 --max-new-tokens 96 --repeats 1 --warmups 0 --no-peers "
        "--no-memory --policy pacer --policy pacer:b=1 --policy pacer:criterion=any --policy pacer:criterion=last "
        "--policy pacer:b=4,criterion=any --policy pacer:b=4,criterion=last --policy pacer:b=3,t=0.5",
        minutes=4,
        quick=_ONE_COLD,
    ),
    RecordSource(
        # Not with --write: it would change the demo's files under later records.
        name="sweep",
        command="selfspec-bench sweep --exit-layers 1-6 --num-speculations 1-8 --repeats 3 --warmups 1",
        minutes=2,
        quick=f"{_ONE_COLD} --num-timed 1",
    ),
    RecordSource(
        name="spide",
        command=f"{_STUDY} spide{_PLAIN_TASKS}",
        minutes=15,
        quick="--tuning 1 --num-samples 1 --max-new-tokens 8",
        folder="bench/experiments/spide",
    ),
    RecordSource(
        name="settings",
        command=f"{_STUDY} settings{_PLAIN_TASKS} --tuning 3 --num-samples 20 --temperature 0",
        minutes=12,
        quick="--tuning 1 --num-samples 1 --max-new-tokens 8 --exit-layer 2",
        folder="bench/experiments/settings",
    ),
    RecordSource(
        name="settings-sampled",
        command=f"{_STUDY} settings{_PLAIN_TASKS} --tuning 3 --num-samples 20 --temperature 1",
        minutes=12,
        quick="--tuning 1 --num-samples 1 --max-new-tokens 8 --exit-layer 2",
        folder="bench/experiments/settings",
    ),
    RecordSource(
        name="bounded-exits",
        command=f"{_STUDY} bounded-exits{_PLAIN_TASKS} --tuning 3 --num-samples 20",
        minutes=3,
        quick="--tuning 1 --num-samples 1 --max-new-tokens 8",
        folder="bench/experiments/bounded_exits",
    ),
    RecordSource(
        name="ladder",
        command=f"{_STUDY} ladder FILES/ladder{_TASKS}{_LADDER_TEXT} --tuning 1",
        minutes=30,
        quick="--tuning 1 --num-samples 1 --max-new-tokens 8 --max-text-tokens 300 --exit-layer 2",
        folder="bench/experiments/ladder",
    ),
    RecordSource(
        name="predictions",
        command=f"{_STUDY} predictions",
        minutes=0.1,
        quick="",
        folder="bench/experiments/predictions",
    ),
    # Speed, beside other engines.
    RecordSource(
        name="chat-smollm2",
        command="selfspec-bench chat --model smollm2 --prompts FILES/chat.jsonl --openvino FILES/int4 --openvino FILES/int8 "
        "--openvino FILES/fp16 --num-samples 24 --prompt-tokens 768 --max-new-tokens 96 --repeats 2 --loads 2",
        minutes=15,
        quick=f"{_ONE_COLD} --loads 1",
        peers=("llama_cpp", "openvino_genai"),
    ),
    RecordSource(
        name="chat-smollm2-bf16",
        command="selfspec-bench chat --model smollm2 --dtype bfloat16 --prompts FILES/unseen.jsonl --num-samples 80 "
        "--prompt-tokens 768 --max-new-tokens 128 --repeats 2 --loads 1 --no-llama-cpp --no-openvino-file --policy bits:8-3 "
        "--policy auto:bits=off --kept auto",
        minutes=12,
        quick=_ONE_COLD,
    ),
    RecordSource(
        name="peers-smollm2",
        command="selfspec-bench peers --converted FILES/SmolLM2-135M-Instruct --num-samples 4 --prompt-tokens 192 "
        "--max-new-tokens 64 --repeats 2 --warmups 1 --loads 2 --peer-timeout 200",
        minutes=25,
        quick=f"{_ONE_COLD} --loads 1 --bits 16 --texts 2",
        modules=("gguf",),
        peers=("llama_cpp", "ik_llama_cpp", "openvino_genai", "onnxruntime_genai", "ctranslate2"),
        before=f"selfspec-bench convert --output-dir {WORK}/converted",
    ),
    RecordSource(
        name="peers-medium",
        command="selfspec-bench peers --model synthetic:medium --int8 --int4 --llama-cpp all --num-samples 2 --repeats 2 "
        "--warmups 1 --prompt-tokens 128 --max-new-tokens 64",
        minutes=10,
        quick=_ONE_COLD,
        peers=("llama_cpp", "gguf"),
    ),
    RecordSource(
        name="gguf-medium",
        command="selfspec-bench peers --model synthetic:medium --dtype bfloat16 --gguf Q4_K_M --gguf Q6_K --gguf Q8_0 "
        "--gguf Q4_0 --no-transformers --num-samples 2 --prompt-tokens 128 --max-new-tokens 64 --repeats 2 --warmups 1",
        minutes=8,
        quick=_ONE_COLD,
        modules=("gguf",),
        peers=("llama_cpp",),
    ),
    RecordSource(
        name="gguf-1B",
        command="selfspec-bench peers --model synthetic:llama3.2-1B --dtype bfloat16 --gguf Q4_K_M --no-transformers "
        "--num-samples 2 --prompt-tokens 96 --max-new-tokens 48 --repeats 2 --warmups 1",
        minutes=10,
        quick=_ONE_COLD,
        modules=("gguf",),
        peers=("llama_cpp",),
    ),
    RecordSource(
        name="bits-medium",
        command=f"selfspec-bench run --model synthetic:medium {_BITS} --policy bits:8-4,layer=12 --kept auto "
        "--kept auto:bits=off",
        minutes=5,
        quick=_ONE_COLD,
    ),
    RecordSource(
        name="bits-1B",
        command=f"selfspec-bench run --model synthetic:llama3.2-1B {_BITS} --kept auto --kept auto:bits=off",
        minutes=10,
        quick=_ONE_COLD,
    ),
    RecordSource(
        name="shapes-medium",
        command="selfspec-bench shapes --shape medium --policy ls:7-3 --policy auto --policy auto:cost=layers --kept auto "
        "--num-samples 2 --max-new-tokens 128 --prompt-tokens 128 --repeats 2",
        minutes=20,
        quick=_ONE_COLD,
    ),
    RecordSource(name="roofline", command="selfspec-bench roofline --model synthetic:medium", minutes=3, quick=_ONE),
    RecordSource(
        name="busy",
        command=f"{_STUDY} busy --seconds 3",
        minutes=4,
        quick="--num-samples 1 --max-new-tokens 8 --seconds 0.2 --repeats 1 --processes 1",
    ),
    RecordSource(
        name="busy-medium",
        command=f"{_STUDY} busy --model synthetic:medium --seconds 10 --repeats 2",
        minutes=8,
        quick="--num-samples 1 --max-new-tokens 8 --seconds 0.2 --repeats 1 --processes 1",
    ),
    RecordSource(
        name="cores",
        command=f"{_STUDY} cores --threads 1,2,4,8,16,32,64 --seconds 0.6",
        minutes=4,
        quick="--threads 1,2 --seconds 0.05 --max-new-tokens 8 --repeats 1",
        folder="bench/experiments/cores",
    ),
    # Many texts, and serving.
    RecordSource(
        name="batch-medium",
        command="selfspec-bench batch --model synthetic:medium --int8 --llama-cpp BF16 --llama-cpp Q8_0 --max-new-tokens 48 "
        "--repeats 2",
        minutes=10,
        quick="--max-new-tokens 8 --repeats 1 --texts 1,2 --joining-tokens 64",
        peers=("llama_cpp", "gguf"),
    ),
    RecordSource(
        name="serving",
        command="selfspec-bench serving --repeats 2",
        minutes=5,
        quick="--clients 1,2 --requests 1 --max-new-tokens 8 --repeats 1 --overhead-tokens 8 --overhead-repeats 1",
    ),
    RecordSource(
        name="serving-medium",
        command="selfspec-bench serving --model synthetic:medium --clients 1,4,8 --overhead-tokens 0 --repeats 3",
        minutes=25,
        quick="--clients 1,2 --requests 1 --max-new-tokens 8 --repeats 1 --no-peers",
    ),
    # Long contexts.
    RecordSource(
        name="context-medium",
        command="selfspec-bench context --model synthetic:medium --max-new-tokens 24 --repeats 9 --no-prefill --no-peers "
        "--no-memory",
        minutes=4,
        quick="--contexts 64,128 --max-new-tokens 8 --repeats 1",
    ),
    RecordSource(
        name="context-peers",
        command="selfspec-bench context --contexts 128,1024,4096 --model synthetic:medium --max-new-tokens 64",
        minutes=5,
        quick="--contexts 64,128 --max-new-tokens 8 --repeats 1",
    ),
    RecordSource(
        name="turns-medium",
        command="selfspec-bench context --model synthetic:medium --contexts 1500 --max-new-tokens 32 --repeats 4 --no-peers "
        "--no-memory",
        minutes=2,
        quick="--contexts 128 --max-new-tokens 8 --repeats 1",
    ),
    RecordSource(
        name="attention",
        command=f"{_STUDY} attention --repeats 7",
        minutes=3,
        quick="--context 256 --repeats 1",
    ),
    RecordSource(
        name="draws",
        command=f"{_STUDY} draws",
        minutes=1,
        quick="--vocabulary 64 --repeats 1",
        folder="bench/experiments/draws",
    ),
    RecordSource(
        name="row-parts-smollm2",
        command=f"{_STUDY} row-parts smollm2{_ALL_TASKS} --num-texts 24",
        minutes=12,
        quick="--num-texts 1 --max-new-tokens 4 --prompt-tokens 16",
        folder="bench/experiments/row_parts",
    ),
    # Studies.
    RecordSource(
        name="answer-store",
        command=f"{_STUDY} answers --model smollm2",
        minutes=6,
        quick="--lines 4 --edits 2 --max-new-tokens 8",
        folder="bench/experiments/answers",
    ),
    RecordSource(
        name="copying-gain",
        command=f"{_STUDY} copying-gain FILES/mixed/prompts.jsonl --model FILES/run-further/model --policy auto:copy=off "
        "--policy auto --policy copy:4 --policy copy:10",
        minutes=6,
        quick=f"{_ONE} --costs-of synthetic:small",
        folder="bench/experiments/copying",
    ),
    RecordSource(
        name="exit-adapters",
        command=f"{_ADAPTERS} --work {WORK} --model FILES/run/model --seeds 3 {_TRAINED} --repeats 3",
        minutes=60,
        quick=f"{_TINY_TRAINING} --form low_rank --weighting uniform",
        folder="bench/experiments/exit_adapters",
    ),
    RecordSource(
        name="exit-adapters-own",
        command=f"{_ADAPTERS} --work {WORK} --model FILES/run/model {_OWN} {_TRAINED} --repeats 3",
        minutes=30,
        quick=_TINY_TRAINING,
        folder="bench/experiments/exit_adapters",
    ),
    RecordSource(
        name="exit-adapters-demo",
        command=f"{_ADAPTERS} --work {WORK} --seeds 3 {_TRAINED} --repeats 3",
        minutes=60,
        quick=f"{_TINY_TRAINING} --form low_rank --weighting uniform",
        folder="bench/experiments/exit_adapters",
    ),
    RecordSource(
        name="exit-adapters-demo-own",
        command=f"{_ADAPTERS} --work {WORK} {_OWN} {_TRAINED} --repeats 1",
        minutes=30,
        quick=_TINY_TRAINING,
        folder="bench/experiments/exit_adapters",
    ),
    RecordSource(
        name="exit-weights",
        command=f"{_ADAPTERS} --work {WORK} --form low_rank{_WEIGHTINGS} --seeds 3 --max-tokens 100000 --epochs 0.6 "
        "--own-answers --num-samples 4 --max-new-tokens 100 --repeats 1",
        minutes=25,
        quick=_TINY_TRAINING,
        folder="bench/experiments/exit_adapters",
    ),
    RecordSource(
        name="judge-exits-smollm2",
        command=f"{_STUDY} judge-exits smollm2 --chats FILES/held-out.jsonl --training-chats FILES/chats.jsonl "
        "--exits FILES/run/exits --exit-layer 3 --exit-layer 6 --exit-layer 10 --exit-layer 15 --head-rows 2000 "
        "--head-rows 8000 --num-samples 16 --num-training 96 --max-new-tokens 128 --repeats 2",
        minutes=20,
        quick="--num-samples 1 --num-training 1 --max-new-tokens 8 --repeats 1",
        folder="bench/experiments/exit_adapters",
    ),
    RecordSource(
        name="steered-exits-smollm2",
        command=f"{_STUDY} steered-exits --model smollm2 --data FILES/chats.jsonl --chats FILES/held-out.jsonl --work {WORK} "
        "--exit-layer 1 --exit-layer 6 --max-tokens 16000 --epochs 1.5 --batch-tokens 512 --seeds 1 --num-samples 8 "
        "--max-new-tokens 64",
        minutes=25,
        quick=f"{_TINY_STEERED} --form low_rank --form steered",
        folder="bench/experiments/steered_exits",
    ),
    RecordSource(
        name="online-exits-smollm2",
        command=f"{_STUDY} online-exits smollm2 --chats FILES/maths.jsonl --exits FILES/static --work {WORK} --exit-layer 3 "
        "--num-answers 2000",
        minutes=60,
        quick="--num-answers 4 --max-new-tokens 8",
        folder="bench/experiments/online_exits",
        before=f"selfspec train-exit smollm2 --data {QUICK_CHATS} --evaluate-on {QUICK_CHATS} --exit-layers 3 --own-answers "
        f"--answer-tokens 8 --max-tokens 60 --held-out-tokens 30 --epochs 1 --output-dir {WORK}/trained",
    ),
    RecordSource(
        name="exit-losses",
        command=f"{_LOSSES} --work-dir {WORK} --seeds 3",
        minutes=60,
        quick=f"{_TINY_LOSSES} --prompts 2 --max-new-tokens 16",
        folder="bench/experiments/exit_losses",
    ),
    RecordSource(
        name="exit-losses-control",
        command=f"{_LOSSES} --init FILES/control --work-dir {WORK} --seeds 2",
        minutes=45,
        quick=f"{_TINY_LOSSES} --prompts 2 --max-new-tokens 16",
        folder="bench/experiments/exit_losses",
    ),
    RecordSource(
        name="draft-copies",
        command=f"{_STUDY} draft-copies smollm2 synthetic:medium synthetic:llama2-7B --dtype bfloat16 --repeats 3",
        minutes=6,
        quick="--repeats 1",
        folder="bench/experiments/fewer_bits",
    ),
    RecordSource(
        name="fine-tune-smollm2",
        command=f"{_STUDY} fine-tune smollm2 --text FILES/gsm8k_train.txt.gz --chats FILES/questions.jsonl --steps 100 "
        "--num-samples 12",
        minutes=15,
        quick="--steps 1 --length 16 --num-samples 1 --max-new-tokens 8",
        folder="bench/experiments/fewer_bits",
    ),
    RecordSource(
        name="roundings-demo",
        command=f"{_STUDY} roundings {_DEMO} --prompts FILES/demo-prompts.jsonl --num-samples 120 --no-chat "
        "--prompt-tokens 160",
        minutes=10,
        quick="--group 32 --num-samples 2 --max-new-tokens 8 --prompt-tokens 16",
        folder="bench/experiments/fewer_bits",
    ),
    RecordSource(
        name="loading",
        command=f"{_STUDY} loading --layers 12 --repeats 3 --folder {WORK}",
        minutes=10,
        quick="--layers 2 --repeats 1",
        folder="bench/experiments/loading",
    ),
)
"""All records, in the order in which they are made."""
