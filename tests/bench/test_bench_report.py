import gzip
import json
import re
from functools import cache
from pathlib import Path

import pytest

from bench.record import RecordWriter, read_record, record_name
from bench.report.glance import by_precision, engine_glance
from bench.report.markdown import BESIDE, fill_markers, markdown, page_tables, sections
from bench.report.prose_figures import FIGURE
from bench.report.source_tables import source_tables
from bench.report.summary import Samples, Spread

ROOT = Path(__file__).parents[2]
LABELS = {"transformers:generate": "generate", "selfspec:ar": "plain", "selfspec:ls:1-2": "drafting"}


def sample(engine, prompt, repeat, seconds, **fields):
    return {
        "kind": "sample",
        "engine": engine,
        "prompt": prompt,
        "task": prompt[0],
        "repeat": repeat,
        "num_prompt_tokens": 10,
        "num_new_tokens": 100,
        "seconds": seconds,
        "time_to_first_token": 0.5,
        "decode_seconds": None,
        "stats": None,
        **fields,
    }


def record():
    """Two prompts, three repeats. Medians: generate 10 s and 20 s; plain 5 s and 10 s; drafting 2 s and 4 s."""
    lines = [
        {
            "kind": "run",
            "command": "peers",
            "engines": LABELS,
            "configuration": {
                "model": "the demo model",
                "policy": "ls:1-2",
                "max_new_tokens": 100,
                "repeats": 3,
                "weights_digest": "ff",
                "prompts_digest": "ee",
            },
            "provenance": {
                "device": "cpu",
                "cpu": "A CPU",
                "cores": 2,
                "threads": 2,
                "ram_gib": 4.0,
                "dtype": "float32",
                "python": "3",
                "torch": "2",
                "transformers": "5",
                "os": "Linux",
                "commit": None,
                "load_average": 0.1,
                "time": "now",
                "command": "selfspec-bench peers",
            },
        }
    ]
    times = {
        "transformers:generate": {"a1": (10, 50, 8), "b1": (20, 25, 10)},
        "selfspec:ar": {"a1": (5, 5, 5), "b1": (10, 10, 10)},
        "selfspec:ls:1-2": {"a1": (2, 2.5, 1), "b1": (4, 5, 2)},
    }
    for engine, by_prompt in times.items():
        for prompt, seconds in by_prompt.items():
            lines += [sample(engine, prompt, repeat, value) for repeat, value in enumerate(seconds)]
            lines.append(
                {
                    "kind": "output",
                    "engine": engine,
                    "prompt": prompt,
                    "output": "",
                    "reference": "transformers:generate",
                    "first_difference": None,
                    "reference_logit_gap": None,
                    "near_tie": None,
                    "counted": None,
                }
            )
    return lines


def test_speeds_by_hand():
    samples = Samples(record())
    # generate: (100/10 + 100/20) / 2 = 7.5. Repeats alone: (10 + 5)/2, (2 + 4)/2, (12.5 + 10)/2.
    assert samples.speed("transformers:generate") == Spread(value=7.5, low=3.0, high=11.25)
    # drafting: (50 + 25) / 2 = 37.5, of repeats alone 37.5, 30, 75. Over plain, (20 + 10) / 2 = 15 each time.
    assert samples.speedup("selfspec:ls:1-2", "selfspec:ar") == Spread(value=2.5, low=2.0, high=5.0)
    # Pooled: 200 tokens in 10 + 20 seconds.
    assert samples.summary("transformers:generate").total_tokens_per_second == pytest.approx(200 / 30)
    assert samples.speed("selfspec:ar", ["b"]).value == 10


def test_counts_are_means_over_prompts_and_unknown_stays_unknown():
    lines = record()
    for line in lines:
        if line["kind"] == "sample" and line["engine"] == "selfspec:ls:1-2":
            first = line["prompt"] == "a1"
            line["stats"] = {"acceptance_rate": 0.5 if first else 0.7, "num_drafted": 3, "accepted_per_round": 1.0}
            line["decode_seconds"] = line["seconds"] / 2
    row = Samples(lines).summary("selfspec:ls:1-2")
    assert row.acceptance_rate == pytest.approx(0.6)
    assert row.decode_tokens_per_second == pytest.approx((99 / 1 + 99 / 2) / 2)
    assert row.etpl is None
    assert Samples(lines).summary("transformers:generate").acceptance_rate is None


def counted(num_new, rounds, drafted, accepted, copied=None, copied_accepted=None):
    """Statistics of one run; without counts of copies as records were made before there were any."""
    stats = {"num_new_tokens": num_new, "rounds": rounds, "num_drafted": drafted, "num_accepted": accepted}
    return stats if copied is None else {**stats, "num_copied": copied, "num_copied_accepted": copied_accepted}


def test_sources_of_tokens_by_hand():
    """Shares of a task's runs together; an engine that tells no rounds has no row."""
    lines = record()
    stats = {
        "selfspec:ar": {"a1": counted(100, 99, 0, 0, 0, 0), "b1": counted(100, 99, 0, 0)},
        # a: 99 tokens in 30 rounds, 60 of 66 copies accepted, 9 of 20 drafts. b: 99 in 60, nothing copied, 39 of 60 drafts.
        "selfspec:ls:1-2": {"a1": counted(100, 30, 86, 69, 66, 60), "b1": counted(100, 60, 60, 39, 0, 0)},
    }
    for line in lines:
        if line["kind"] == "sample":
            line["stats"] = stats.get(line["engine"], {}).get(line["prompt"])
    (table,) = source_tables(Samples(lines))
    rows = [row for row in table.rows if row[1]]
    assert [row[0] for row in table.rows if not row[1]] == ["**a**", "**b**", "**all**"]
    assert rows == [
        ("plain", "1.00×", "1.00", "0.0 %", "0.0 %", "100.0 %", "–", "–"),
        ("drafting", "2.50×", "3.30", "60.0 %", "9.0 %", "31.0 %", "90.9 %", "45.0 %"),
        ("plain", "1.00×", "1.00", "0.0 %", "0.0 %", "100.0 %", "–", "–"),
        ("drafting", "2.50×", "1.65", "0.0 %", "39.0 %", "61.0 %", "–", "65.0 %"),
        ("plain", "1.00×", "1.00", "0.0 %", "0.0 %", "100.0 %", "–", "–"),
        ("drafting", "2.50×", "2.20", "30.0 %", "24.0 %", "46.0 %", "90.9 %", "60.0 %"),
    ]
    # A copied token takes no draft pass: 20 and 60 of them, on average.
    assert Samples(lines).summary("selfspec:ls:1-2").draft_passes == 40


def test_where_nothing_was_copied_there_is_no_table_of_sources():
    lines = record()
    assert source_tables(Samples(lines)) == []
    for line in lines:
        if line["kind"] == "sample":
            line["stats"] = counted(100, 60, 60, 39, *((0, 0) if line["repeat"] else ()))
    assert source_tables(Samples(lines)) == []


def test_phases_are_shares_of_all_time():
    lines = record()
    assert Samples(lines).phase_shares("selfspec:ar") is None
    for line in lines:
        if line["kind"] == "sample" and line["engine"] == "selfspec:ar":  # 2 of 5 and 7 of 10 seconds: 27 of 45
            phases = dict.fromkeys(("prefill", "preverify", "verify", "accept", "learn", "other"), 0.0)
            drafting = 2.0 if line["prompt"] == "a1" else 7.0
            stats = {f"{name}_seconds": seconds for name, seconds in phases.items()}
            line["stats"] = {**stats, "draft_seconds": drafting, "seconds": line["seconds"]}
    assert Samples(lines).phase_shares("selfspec:ar")["draft"] == 27 / 45
    assert sections(lines)["phases"].endswith("| plain | 0.0 % | 60.0 % | 0.0 % | 0.0 % | 0.0 % | 0.0 % |")


def test_mismatches_are_shown_near_ties_apart():
    lines = record()
    outputs = [line for line in lines if line["kind"] == "output" and line["engine"] == "selfspec:ar"]
    outputs[0].update(first_difference=4, reference_logit_gap=1e-5, near_tie=True)
    # 4 of one prompt's 100 tokens are before the difference, and all of the other's: 52 %.
    assert "| plain | – | – | – | – | – | – | near-ties: 1 (52 % equal) |" in sections(lines)["rounds"]
    outputs[1].update(first_difference=4, reference_logit_gap=0.5, near_tie=False)
    assert "| plain | – | – | – | – | – | – | near-ties: 1, DIFFERENT: 1 (4 % equal) |" in sections(lines)["rounds"]


def test_outputs_of_other_weights_are_told_apart_from_faults():
    lines = record()
    outputs = {line["engine"]: line for line in lines if line["kind"] == "output" and line["prompt"] == "a1"}
    outputs["selfspec:ar"].update(first_difference=50, reference_logit_gap=3.0, near_tie=None)
    for line in lines:
        if line["kind"] == "output" and line["engine"] == "selfspec:ls:1-2":
            line["reference"] = "selfspec:ar"
    rounds = sections(lines)["rounds"]
    assert "| plain | – | – | – | – | – | – | other weights (75 % equal) |" in rounds
    assert "| drafting | – | – | – | – | – | – | equal to plain |" in rounds


def test_markdown_holds_every_part_and_the_right_numbers():
    lines = record()
    page = markdown(lines)
    # Repeats over transformers: 37.5/7.5, 30/3, 75/11.25.
    assert "| drafting | 37.5 (30.0–75.0) | 2.50× (2.00–5.00) | 5.00× (5.00–10.00) |" in page
    assert page.startswith("The demo model on A CPU, 2 threads, float32, greedy: 3 engines on 2 prompts of 2 tasks")
    assert "| command | `selfspec-bench peers` |\n| machine | A CPU, 2 cores, 2 threads, 4.0 GiB |" in page
    headings = [line for line in page.splitlines() if line.startswith("## ")]
    assert headings[0] == "## At a glance"
    assert headings[-1] == "## Where the numbers come from"


def test_markers_are_filled_and_the_rest_is_kept():
    document = (
        "# Title\n<!-- report:peers:headline -->\nold\n<!-- /report:peers:headline -->\nkept\n"
        "<!-- report:peers:speed -->\n<!-- /report:peers:speed -->\n<!-- report:sweep -->\nx\n<!-- /report:sweep -->\n"
    )
    lines = record()
    parts = sections(lines)
    filled = fill_markers(document, {"peers": lines})
    assert filled == (
        f"# Title\n<!-- report:peers:headline -->\n{parts['headline']}\n<!-- /report:peers:headline -->\nkept\n"
        f"<!-- report:peers:speed -->\n{parts['speed']}\n<!-- /report:peers:speed -->\n"
        "<!-- report:sweep -->\nx\n<!-- /report:sweep -->\n"
    )
    assert fill_markers(filled, {"peers": lines}) == filled
    with pytest.raises(ValueError, match="no marker for any of report:other"):
        fill_markers(document, {"other": lines})
    with pytest.raises(ValueError, match="the parts of peers are headline, age, glance, speed"):
        fill_markers("<!-- report:peers:sped -->\n<!-- /report:peers:sped -->", {"peers": lines})


def test_a_run_that_breaks_off_leaves_the_old_record(tmp_path):
    path = tmp_path / "new" / "record.jsonl"
    with RecordWriter(path) as writer:
        writer.write({"kind": "run", "n": 1})
    with pytest.raises(KeyError), RecordWriter(path) as writer:
        writer.write({"kind": "run", "n": 2})
        raise KeyError
    assert read_record(path) == [{"kind": "run", "n": 1}]
    assert json.loads((tmp_path / "new" / "record.jsonl.part").read_text())["n"] == 2


@pytest.mark.parametrize("text", ["", "{}\n", "[1]\n", "not json\n", '{"kind": "sample"}\n'])
def test_other_files_are_no_records(tmp_path, text):
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a record of selfspec-bench"):
        read_record(path)


def test_a_glance_tells_kernels_from_speculation():
    rows = engine_glance(record())[0].rows
    # Plain over transformers: (100/5 + 100/10) / 2 = 15 over 7.5. Drafting over plain: 37.5 / 15.
    assert rows == (
        ("generate", "7.5", "1.00×", "–"),
        ("plain", "15.0", "2.00×", "1.00×"),
        ("drafting", "37.5", "5.00×", "2.50×"),
    )


def test_a_glance_at_many_engines_keeps_those_that_matter():
    lines = record()
    lines[0]["command"] = "run"
    labels = {"transformers:early-exit:1-2": "slow exit", "transformers:early-exit:1": "exit", "llama.cpp:q8": "other"}
    labels |= {"selfspec:auto": "auto", "selfspec:del": "del", "selfspec:best-fixed": "oracle"}
    labels |= {"selfspec:int8:ar": "plain8", "selfspec:int8:auto": "auto8"}
    lines[0]["engines"] = {**LABELS, **labels}
    seconds = {"slow exit": 9, "exit": 8, "other": 3, "auto": 2, "del": 6, "oracle": 1, "plain8": 2, "auto8": 1}
    lines += [sample(name, prompt, 0, seconds[label]) for name, label in labels.items() for prompt in ("a1", "b1")]
    rows = {row[0]: row for row in engine_glance(lines)[0].rows}
    assert list(rows) == ["generate", "other", "exit", "plain", "auto", "plain8", "auto8", "drafting", "oracle"]
    assert rows["auto8"][3] == "2.00×"  # over plain decoding on its own weights


RECORDS = {
    record_name(path): path for folder in ("docs", "bench") for path in sorted((ROOT / folder).rglob("*.jsonl.gz"))
}
_MARKED = re.compile(r"<!-- report:([^ ]+) -->\n.*?<!-- /report:\1 -->\n", re.S)
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    if _MARKED.search(path.read_text(encoding="utf-8")) or FIGURE.search(path.read_text(encoding="utf-8"))
]


@pytest.fixture(scope="module")
def read_once():
    """Reads a record by its name. Each is read once for all pages, and its tables are made once."""
    made = {}
    records = cache(lambda name: read_record(RECORDS[name]))

    def page_tables_once(lines):
        if id(lines) not in made:
            made[id(lines)] = lines, page_tables(lines)  # no other list can get the identity of one that is held
        return made[id(lines)][1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bench.report.markdown.page_tables", page_tables_once)
        yield records


@pytest.mark.usefixtures("with_studies")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_published_tables_are_those_of_the_records(page, read_once):
    """A number typed by hand, or a record changed without `make results`, fails here."""
    text = page.read_text(encoding="utf-8")
    names = {name.partition(":")[0] for name in _MARKED.findall(text)}
    names |= {match["place"].partition(" > ")[0] for match in FIGURE.finditer(text)}
    names = {one for name in names for one in name.split(BESIDE)}
    assert fill_markers(text, {name: read_once(name) for name in names}) == text


def test_every_table_of_the_results_is_made():
    for page in (ROOT / "docs" / "results").glob("*.md"):
        typed = _MARKED.sub("", page.read_text(encoding="utf-8"))
        assert not re.search(r"^\|", typed, re.M), f"{page.name} has a table that no record made"


def test_every_record_is_shown_and_says_where_it_comes_from():
    shown = {
        marker for page in (ROOT / "docs" / "results").glob("*.md") for marker in _MARKED.findall(page.read_text())
    }
    for path in (ROOT / "docs" / "data").iterdir():
        parts = {part for name, _, part in (marker.partition(":") for marker in shown) if name == record_name(path)}
        assert "machine" in parts and len(parts) > 1, f"{path.name} is not on a page of results"


def test_speeds_by_precision_keep_the_fastest_peer():
    lines = read_record(RECORDS["peers-medium"])
    (table,) = by_precision(lines)
    peers = [name for name in lines[0]["engines"] if name.startswith(("llama.cpp", "transformers"))]
    fastest = max(Samples(lines).speed(name).value for name in peers)
    assert any(f"{fastest:.1f}" in row for row in table.rows)
    assert by_precision(record()) == []


def test_a_packed_record_is_read_and_a_damaged_one_named(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"kind": "run"}\n' + b'{"kind": "sample"}\n' * 50)
    path = tmp_path / "record.jsonl.gz"
    path.write_bytes(whole)
    assert len(read_record(path)) == 51
    assert record_name(path) == record_name(tmp_path / "record.jsonl") == "record"
    path.write_bytes(whole[:-12])
    with pytest.raises(ValueError, match=r"cannot read the record .*cut off"):
        read_record(path)
    path.write_bytes(b"no archive at all")
    with pytest.raises(ValueError, match=r"cannot read the record .*: "):
        read_record(path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_says_of_each_record_whether_its_code_has_changed(page):
    shown: dict[str, set[str]] = {}
    for marker in _MARKED.findall(page.read_text(encoding="utf-8")):
        names, _, part = marker.partition(":")
        for name in names.split(BESIDE):
            shown.setdefault(name, set()).add(part)
    for name, parts in shown.items():
        assert parts & {"machine", "age"}, f"{page.name} shows {name} and does not say how old it is"


@pytest.mark.usefixtures("with_studies")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_of_policies_have_intervals_beside_them(page, read_once):
    shown = {tuple(marker.partition(":")[::2]) for marker in _MARKED.findall(page.read_text(encoding="utf-8"))}
    for name in {name for name, part in shown if part in ("speed", "speedups", "etpl") and BESIDE not in name}:
        parts = sections(read_once(name))
        for part in ("intervals", "loops"):
            assert part not in parts or (name, part) in shown, f"{page.name} shows {name} without its {part}"
