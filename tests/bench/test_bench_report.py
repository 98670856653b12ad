import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.commands.bench_app import app
from bench.record import RecordWriter, read_record
from bench.report.compare_records import compare_records
from bench.report.markdown import markdown, tables
from bench.report.run_tables import source_tables
from bench.report.summary import Samples, Spread

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
                "kernels": "avx2",
                "host": None,
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


def table_of(lines, name):
    """A table of a record by its name, as Markdown."""
    return next(table.markdown() for table in tables(lines) if table.name == name)


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
    assert table_of(lines, "phases").endswith("| plain | 0.0 % | 60.0 % | 0.0 % | 0.0 % | 0.0 % | 0.0 % |")


def test_mismatches_are_shown_near_ties_apart():
    lines = record()
    outputs = [line for line in lines if line["kind"] == "output" and line["engine"] == "selfspec:ar"]
    outputs[0].update(first_difference=4, reference_logit_gap=1e-5, near_tie=True)
    # 4 of one prompt's 100 tokens are before the difference, and all of the other's: 52 %.
    assert "| plain | – | – | – | – | – | – | near-ties: 1 (52 % equal) |" in table_of(lines, "rounds")
    outputs[1].update(first_difference=4, reference_logit_gap=0.5, near_tie=False)
    assert "| plain | – | – | – | – | – | – | near-ties: 1, DIFFERENT: 1 (4 % equal) |" in table_of(lines, "rounds")


def test_outputs_of_other_weights_are_told_apart_from_faults():
    lines = record()
    outputs = {line["engine"]: line for line in lines if line["kind"] == "output" and line["prompt"] == "a1"}
    outputs["selfspec:ar"].update(first_difference=50, reference_logit_gap=3.0, near_tie=None)
    for line in lines:
        if line["kind"] == "output" and line["engine"] == "selfspec:ls:1-2":
            line["reference"] = "selfspec:ar"
    rounds = table_of(lines, "rounds")
    assert "| plain | – | – | – | – | – | – | other weights (75 % equal) |" in rounds
    assert "| drafting | – | – | – | – | – | – | equal to plain |" in rounds


def test_markdown_holds_every_part_and_the_right_numbers():
    lines = record()
    page = markdown(lines)
    # Repeats over transformers: 37.5/7.5, 30/3, 75/11.25.
    assert "| drafting | 37.5 (30.0–75.0) | 2.50× (2.00–5.00) | 5.00× (5.00–10.00) |" in page
    assert page.startswith("The demo model on A CPU, 2 threads, float32, greedy: 3 engines on 2 prompts of 2 tasks")
    assert "| command | `selfspec-bench peers` |\n| machine | A CPU, 2 cores, 2 threads, 4.0 GiB |" in page
    for title in ("Speed on the demo model", "Rounds, means over prompts", "Speed-up over plain decoding by task"):
        assert f"\n\n**{title}" in page


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


def test_a_packed_record_is_read_and_a_damaged_one_named(tmp_path: Path) -> None:
    whole = gzip.compress(b'{"kind": "run"}\n' + b'{"kind": "sample"}\n' * 50)
    path = tmp_path / "record.jsonl.gz"
    path.write_bytes(whole)
    assert len(read_record(path)) == 51
    path.write_bytes(whole[:-12])
    with pytest.raises(ValueError, match=r"cannot read the record .*cut off"):
        read_record(path)
    path.write_bytes(b"no archive at all")
    with pytest.raises(ValueError, match=r"cannot read the record .*: "):
        read_record(path)


def test_compare_says_what_changed(tmp_path):
    before = record()
    after = json.loads(json.dumps(before))
    after[0]["provenance"]["threads"] = 64
    for line in after:
        if line["kind"] == "sample" and line["engine"] == "selfspec:ar":
            line["seconds"] /= 2
        if line["kind"] == "output" and line["engine"] == "transformers:generate":
            line["output"] = "another"
    notes, table = compare_records(before, after)
    assert notes == ["threads: 2 -> 64"]
    rows = {row[0]: row for row in table.rows}
    assert rows["plain"][3] == "2.00×"
    assert rows["plain"][-1] == "equal"
    assert rows["generate"][3] == "1.00×"
    assert rows["generate"][-1] == "2 of 2 differ"
    paths = [write(tmp_path / f"{name}.jsonl", lines) for name, lines in (("a", before), ("b", after))]
    result = CliRunner().invoke(app, ["compare", *map(str, paths)])
    assert result.exit_code == 0
    assert "threads:" in result.output
    assert "2.00×" in result.output
    with pytest.raises(ValueError, match="no engine in common"):
        compare_records(before, [{**before[0], "engines": {"x": "x"}}])


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_a_record_of_another_version_is_one_line(tmp_path):
    lines = record()
    lines[0]["command"] = "spide"
    result = CliRunner().invoke(app, ["report", str(write(tmp_path / "x.jsonl", lines))])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "this version makes no tables of records of 'spide'" in result.stderr
