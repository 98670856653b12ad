"""Policies greedy and sampled, side by side: each column by hand, from its own record and its own plain decoding."""

import copy

import pytest

from bench.report.decoding_tables import decoding_tables
from bench.report.markdown import fill_markers
from bench.report.run_tables import sampled_etpl_table
from bench.report.summary import Samples
from tests.bench.test_bench_intervals import counted_record

SAMPLED = {"do_sample": True, "temperature": 0.6, "top_p": 1.0, "top_k": 0}


def both():
    """Greedy: 2.4 times plain's tokens per layer, 2.5 times its speed. Sampled: twice the layers, a quarter of the time."""
    greedy, _ = counted_record()
    greedy[0]["configuration"]["num_layers"] = 10
    for line in greedy:
        if line["kind"] == "sample" and line["engine"] == "selfspec:ls:1-2":
            line["stats"]["acceptance_rate"] = {"a1": 0.5, "b1": 0.75}[line["prompt"]]
    sampled = copy.deepcopy(greedy)
    sampled[0]["configuration"] |= SAMPLED
    for line in sampled:
        if line["kind"] == "sample" and line["engine"] == "selfspec:ls:1-2":
            line["stats"]["loaded_layers"] *= 2
            line["stats"]["acceptance_rate"] = {"a1": None, "b1": 0.25}[line["prompt"]]
            line["seconds"] /= 4
    return greedy, sampled


def test_a_column_for_each_way_of_decoding():
    tables = {table.name: table for table in decoding_tables(both())}
    assert list(tables) == ["acceptance", "etpl", "speed", "speedup"]
    for table in tables.values():
        assert table.columns == ("policy", "greedy", "sampled at temperature 0.6")
        assert "95 % intervals over 2 prompts" in table.title
    # One prompt a task: every draw is the same. What drafted nothing has no acceptance rate.
    assert tables["acceptance"].rows == (("`ls:1-2`", "0.625 (0.625–0.625)", "0.250 (0.250–0.250)"),)
    assert tables["etpl"].rows == (("`ls:1-2`", "2.400 (2.400–2.400)", "1.200 (1.200–1.200)"),)
    # Plain: 20 and 10 tokens/s, drafting: 50 and 25, and four times as many.
    assert tables["speed"].rows == (("`ls:1-2`", "38 (38–38)", "150 (150–150)"), ("`ar`", "15 (15–15)", "15 (15–15)"))
    assert tables["speedup"].rows == (("`ls:1-2`", "2.500 (2.500–2.500)", "10.000 (10.000–10.000)"),)


def test_a_policy_that_a_record_lacks_is_left_out():
    greedy, sampled = both()
    greedy[0]["engines"] = {**greedy[0]["engines"], "selfspec:del": "del"}
    more = [{**line, "engine": "selfspec:del"} for line in greedy if line.get("engine") == "selfspec:ls:1-2"]
    tables = decoding_tables([[*greedy, *more], sampled])
    assert [row[0] for row in tables[0].rows] == ["`ls:1-2`"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"do_sample": False}, "must decode differently, these are greedy, greedy"),
        ({"prompts_digest": "0"}, "must have the same prompts digest"),
        ({"model": "another"}, "must have the same model"),
    ],
)
def test_records_that_do_not_compare_are_refused(change, message):
    greedy, sampled = both()
    sampled[0]["configuration"] |= change
    with pytest.raises(ValueError, match=message):
        decoding_tables([greedy, sampled])


def test_every_column_needs_its_own_plain_decoding():
    greedy, sampled = both()
    sampled = [line for line in sampled if line.get("engine") != "selfspec:ar"]
    with pytest.raises(ValueError, match="must have plain decoding each"):
        decoding_tables([greedy, sampled])


def test_a_page_shows_several_records_in_one_table_and_takes_numbers_from_it():
    records = dict(zip("gs", both()))
    page = (
        "<!-- report:g+s:speedup -->\n<!-- /report:g+s:speedup -->\n"
        "<!-- figure: g+s > etpl > ls:1-2 > sampled at temperature 0.6 -->9<!-- /figure --> times"
    )
    filled = fill_markers(page, records)
    assert "| `ls:1-2` | 2.500 (2.500–2.500) | 10.000 (10.000–10.000) |" in filled
    assert filled.endswith("-->1.200<!-- /figure --> times")
    other = "<!-- report:g+x:speedup -->\n<!-- /report:g+x:speedup -->"
    assert fill_markers(page + other, records) == filled + other  # a record is missing
    with pytest.raises(ValueError, match=r'"report:g\+s:age": the parts of g\+s are acceptance, etpl, speed, speedup'):
        fill_markers("<!-- report:g+s:age -->\n<!-- /report:g+s:age -->", records)


def test_a_sampled_record_has_tokens_per_layer_by_task_without_fixed_settings():
    """10 layers. Prompt a: 99 tokens in 990 layers, as plain decoding; b: 99 in 660."""
    _, sampled = both()
    (table,) = sampled_etpl_table(sampled, Samples(sampled))
    assert table.columns == ("policy", "a", "b", "all")
    assert table.rows == (("`ls:1-2`", "1.000", "1.500", "1.200"), ("`ar`", "1.000", "1.000", "1.000"))
    without_plain = [line for line in sampled if line.get("engine") != "selfspec:ar"]
    assert sampled_etpl_table(without_plain, Samples(without_plain)) == []
