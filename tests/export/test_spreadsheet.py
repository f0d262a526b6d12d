import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_locust.export.spreadsheet import cell, table, with_row


def read(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline="")))


@pytest.mark.parametrize("text", ["=1+1", "+1", "-cmd", "@SUM(A1)", "  =1", "＝1"])
def test_no_text_is_a_formula(text: str) -> None:
    assert cell(text) == f"'{text}"


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("\t=1", "'\t'=1"),
        ("a;=cmd|1", "a;'=cmd|1"),
        ('a; "@x;b;-1', "a; \"'@x;b;'-1"),
        ("a;b=1", "a;b=1"),
        ("a\ud800", "a\ufffd"),
    ],
)
def test_nor_is_it_where_cells_are_parted_by_something_else(text: str, written: str) -> None:
    assert cell(text) == written


def test_a_break_cannot_begin_a_formula() -> None:
    assert cell("\r\n=1") == "'  =1"


def test_numbers_stay_numbers() -> None:
    assert [cell(value) for value in (-0.5, 3, None, True, "plain")] == ["-0.5", "3", "", "True", "plain"]


@given(st.text(st.characters(codec="utf-8")))
def test_every_text_comes_back_whole(text: str) -> None:
    (row,) = read(table(["a", "b"], [{"a": text, "b": 1}]))
    one_line = text.replace("\r", " ").replace("\n", " ").replace("\0", " ")
    assert row["a"].replace("'", "") == one_line.replace("'", "")
    assert row["b"] == "1"


def test_a_run_has_one_line() -> None:
    text = with_row("", {"run_id": "a", "x": 1}, ["run_id"])
    text = with_row(text, {"run_id": "b", "x": 2}, ["run_id"])
    text = with_row(text, {"run_id": "a", "x": 3}, ["run_id"])
    assert text == "run_id,x\na,3\nb,2\n"


def test_all_keys_must_agree() -> None:
    text = "run_id,run_dir,x\na,one,1\n"
    text = with_row(text, {"run_id": "a", "run_dir": "two", "x": None}, ["run_id", "run_dir"])
    assert text == "run_id,run_dir,x\na,one,1\na,two,\n"
    text = with_row(text, {"run_id": "a", "run_dir": "one", "x": 2}, ["run_id", "run_dir"])
    assert text == "run_id,run_dir,x\na,one,2\na,two,\n"


def test_columns_of_another_version_are_kept() -> None:
    text = with_row("run_id,old\na,1\n", {"run_id": "b", "new": "="}, ["run_id"])
    assert text == "run_id,old,new\na,1,\nb,,'=\n"
    # A line that is written again keeps its place, and has what this version knows.
    assert with_row(text, {"run_id": "a", "new": 5}, ["run_id"]) == "run_id,old,new\na,,5\nb,,'=\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [("run_id;x\na;1\n", "semicolons"), ('"x"\t"run_id"\n1\ta\n', "tabs"), ("x,y;run_id\n", "semicolons")],
)
def test_a_table_with_other_separators_is_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"parted by {said}, as a spreadsheet saved it; save it with commas"):
        with_row(text, {"run_id": "a"}, ["run_id"])


@pytest.mark.parametrize("text", ["name,x\na,1\n", "run_id,x\na,1,2\n"])
def test_another_table_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"no column run_id|more cells"):
        with_row(text, {"run_id": "a"}, ["run_id"])
