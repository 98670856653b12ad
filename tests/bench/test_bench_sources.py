"""A record is old once the code that decides its numbers is another; what only says something does not age it."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import bench.sources
from bench.experiments.__main__ import app
from bench.experiments.record_kinds import STUDIES
from bench.provenance import computed_in, host_kind, provenance
from bench.record import read_record
from bench.report.markdown import sections
from bench.report.record_kinds import KINDS
from bench.sources import DEPENDS, PARTS, ROOT, WEIGHTS, age, changed_parts, digests, parts_of, sources, substance
from tests.bench.test_bench_report import record

CODE = '''"""What it is."""

# Why.
def f(x):
    """What it gives."""
    return x + 1
'''
OLD = Path(ROOT, "docs", "data", "attention.jsonl.gz")


def measured_now(model="another model", weights_digest="ff"):
    """A record of `run` made by the code as it is."""
    lines = record()
    lines[0]["command"] = "run"
    lines[0]["configuration"] |= {"model": model, "weights_digest": weights_digest}
    lines[0]["provenance"]["sources"] = dict(sources())
    return lines


def test_what_a_file_does_counts_and_what_it_says_does_not():
    same = (
        CODE.replace("What it gives", "Its value").replace("# Why.", "#  Because.\n\n").replace("is.", "was.\n\nMore.")
    )
    assert substance("a.py", same) == substance("a.py", CODE) == "def f(x):\n    return x + 1"
    assert substance("a.py", CODE.replace("+ 1", "+ 2")) != substance("a.py", CODE)
    assert substance("a.c", "/* one\n   two */ int a;\n\n  // three\n int b; ") == "int a;\nint b;"


@pytest.mark.parametrize("name", ["layerskip_models/kernels/matrix.h", "policies/auto/cost.py"])
def test_a_change_ages_the_part_it_is_in(name):
    files = {"layerskip_models/kernels/matrix.h": b"int a;", "policies/auto/cost.py": b"a = 1\n"}
    before, after = digests(files), digests({**files, name: files[name].replace(b"a", b"b")})
    part = "kernels" if name.endswith("h") else "policies"
    assert [one for one in PARTS if before[one] != after[one]] == [part]


def test_every_part_has_files_and_every_kind_of_record_its_parts():
    empty = digests({})
    assert all(sources()[part] != empty[part] for part in PARTS)
    assert set(DEPENDS) == {*KINDS, *STUDIES}
    assert {part for parts in DEPENDS.values() for part in parts} <= PARTS.keys()


def test_a_record_is_old_when_a_part_that_it_depends_on_is_another():
    lines = measured_now()
    assert changed_parts(lines) == []
    assert age(lines) == "not changed since"
    lines[0]["provenance"]["sources"]["server"] = "0"  # decides nothing here
    assert changed_parts(lines) == []
    lines[0]["provenance"]["sources"] |= {"kernels": "0", "engine": "0"}
    assert age(lines) == "**old**: changed since in kernels, engine"
    assert "| code | **old**: changed since in kernels, engine |" in sections(lines)["machine"]
    assert sections(lines)["age"].endswith("Code: **old**: changed since in kernels, engine.")
    del lines[0]["provenance"]["sources"]
    assert age(lines) == "**old**: nothing says which code it measured"


def test_more_parts_count_where_more_ran():
    lines = measured_now()
    lines[0]["engines"] = {"selfspec:pacer:b=3": "pacer"}
    lines[0]["provenance"]["device"] = "a GPU"
    assert parts_of(lines)[-2:] == ("pre-verifier", "captured rounds")
    lines[0]["command"] = "another"
    with pytest.raises(ValueError, match="does not say what records of 'another' depend on"):
        parts_of(lines)


def test_other_weights_of_the_demo_age_a_record():
    assert changed_parts(measured_now(model="the demo model", weights_digest="0")) == [WEIGHTS]
    assert changed_parts(measured_now(model="the demo model", weights_digest=bench.sources._demo_weights())) == []


def test_a_new_record_keeps_what_its_code_is_and_where_it_ran():
    where = provenance(torch.device("cpu"), torch.float32)
    assert where["sources"] == sources()
    assert where["host"] == host_kind(bench.provenance.cpu_fields())
    assert host_kind({"flags": "fpu hypervisor"}, containers=()) == "virtual machine"
    assert host_kind({"flags": "fpu"}, containers=(str(ROOT),)) == "physical machine, in a container"
    assert host_kind({}) is None


def test_weights_in_16_bits_run_on_the_kernels_that_a_record_names():
    cpu = torch.device("cpu")
    assert computed_in(cpu, torch.bfloat16) == torch.float32
    assert computed_in(cpu, torch.float64) == torch.float64
    assert computed_in(torch.device("cuda"), torch.bfloat16) == torch.bfloat16
    assert provenance(cpu, torch.bfloat16)["kernels"] == provenance(cpu, torch.float32)["kernels"]


def test_without_a_checkout_a_record_says_nothing_of_its_code(monkeypatch, tmp_path):
    monkeypatch.setattr(bench.sources, "ROOT", tmp_path)
    sources.cache_clear()
    try:
        assert sources() is None
        assert bench.sources.sources_at("HEAD") is None
    finally:
        sources.cache_clear()


def test_digests_are_added_from_history_and_numbers_stay(monkeypatch, tmp_path):
    path = tmp_path / "attention.jsonl.gz"
    first, *rest = read_record(OLD)
    path.write_bytes(gzip.compress("".join(json.dumps(line) + "\n" for line in (first, *rest)).encode()))
    monkeypatch.setattr(bench.sources, "sources_at", lambda commit: {"kernels": commit})
    result = CliRunner().invoke(app, ["add-sources", str(path)])
    assert result.output == f"{path} now says what its code was at 10be79e606d5\n"
    found = read_record(path)
    assert found[0]["provenance"].pop("sources") == {"kernels": "10be79e606d5"}
    assert found == [first, *rest]
    path.write_bytes(OLD.read_bytes())
    monkeypatch.setattr(bench.sources, "sources_at", lambda commit: None)
    assert "names no commit that is here" in CliRunner().invoke(app, ["add-sources", str(path)]).output
