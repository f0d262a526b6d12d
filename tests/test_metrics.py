from vllm_locust.metrics import CATALOGUE, DISTRIBUTIONS, Per, markdown_table


def test_every_metric_of_the_glossary_is_there() -> None:
    glossary = (
        "ttft ttft_from_schedule ttft_answer chunk_gap itl tpot e2e done schedule_lag receive_lag offered_rps "
        "achieved_rps dropped_arrivals goodput_rps good_fraction"
    )
    assert set(glossary.split()) <= set(CATALOGUE)


def test_names_are_unique_and_times_are_distributions() -> None:
    assert len({metric.title for metric in CATALOGUE.values()}) == len(CATALOGUE)
    assert all((metric.unit == "s") == (metric in DISTRIBUTIONS) for metric in CATALOGUE.values())
    assert [m.name for m in DISTRIBUTIONS if m.per is not Per.REQUEST] == ["itl", "chunk_gap"]


def test_the_table_has_a_row_for_each_metric_and_no_broken_cell() -> None:
    lines = markdown_table().split("\n")
    assert len(lines) == len(CATALOGUE) + 2
    assert {line.count("|") for line in lines} == {7}
    assert lines[2].startswith(
        "| `ttft_s`, `ttft_adjusted_s` | **TTFT**: first token-bearing chunk − sent | s | request |"
    )


def test_no_formula_breaks_a_table() -> None:
    assert not [m.name for m in CATALOGUE.values() if "|" in m.formula or "\n" in m.formula]
