from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from vllm_locust.workload.conversations import Exchange, parse_conversation


def said(*messages: tuple[str, str]) -> dict[str, Any]:
    return {"id": "c", "conversations": [{"from": speaker, "value": text} for speaker, text in messages]}


def parse(row: Any) -> tuple[tuple[Exchange, ...] | None, str | None, dict[str, int]]:
    filters: Counter[str] = Counter()
    found = parse_conversation(row, 5, filters)
    counts = {name: count for name, count in filters.items() if count}
    return (None, None, counts) if found is None else (found.exchanges, found.system, counts)


@pytest.mark.parametrize(
    ("user", "model"), [("human", "gpt"), ("user", "assistant"), ("Human", "chatgpt"), ("user", "bard")]
)
def test_speakers_by_any_of_their_names(user: str, model: str) -> None:
    exchanges, system, counts = parse(said((user, "q1"), (model, "a1"), (user, "q2"), (model, "a2")))
    assert exchanges == (Exchange("q1", "a1"), Exchange("q2", "a2"))
    assert (system, counts) == (None, {})


def test_the_openai_spelling() -> None:
    row = {
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "q"},
            {"role": "assistant", "content": "a"},
        ]
    }
    assert parse(row) == ((Exchange("q", "a"),), "s", {})


def test_answers_before_the_first_question_are_dropped_and_counted() -> None:
    exchanges, _, counts = parse(said(("gpt", "tail of an answer"), ("human", "q"), ("gpt", "a")))
    assert exchanges == (Exchange("q", "a"),)
    assert counts == {"leading_answers_dropped": 1}


def test_messages_of_one_speaker_in_a_row_are_one() -> None:
    exchanges, _, counts = parse(said(("human", "q"), ("human", "more"), ("gpt", "a"), ("gpt", " "), ("gpt", "b")))
    assert exchanges == (Exchange("q\n\nmore", "a\n\nb"),)
    assert counts == {}


def test_a_question_without_an_answer_at_the_end_is_dropped() -> None:
    exchanges, _, counts = parse(said(("human", "q"), ("gpt", "a"), ("human", "q2")))
    assert exchanges == (Exchange("q", "a"),)
    assert counts == {"later_turns_dropped": 1}


@pytest.mark.parametrize(
    ("row", "name"),
    [
        (said(), "no_human_turn"),
        (said(("gpt", "a")), "no_human_turn"),
        (said(("system", "s")), "no_human_turn"),
        (said(("human", "q")), "no_answer"),
        (said(("human", "  "), ("gpt", "a")), "empty_prompt"),
        (said(("human", "q"), ("gpt", "\n")), "empty_answer"),
        (said(("human", "q"), ("tool", "t"), ("gpt", "a")), "unexpected_speaker"),
        (said(("human", "q \ud83d"), ("gpt", "a")), "not_unicode"),
        ("text", "bad_row"),
        ({"id": 1}, "bad_row"),
        ({"id": 1, "conversations": [{"from": "human"}]}, "bad_row"),
        ({"id": 1, "conversations": ["q"]}, "bad_row"),
    ],
)
def test_each_unusable_row_is_counted_under_its_reason(row: Any, name: str) -> None:
    exchanges, _, counts = parse(row)
    assert exchanges is None
    assert counts == {name: 1}


@pytest.mark.parametrize("last", [("gpt", ""), ("tool", "t")])
def test_a_later_fault_ends_the_conversation_before_it(last: tuple[str, str]) -> None:
    exchanges, _, counts = parse(
        said(("human", "q"), ("gpt", "a"), ("human", "q2"), last, ("human", "q3"), ("gpt", "a3"))
    )
    assert exchanges == (Exchange("q", "a"),)
    assert counts == {"later_turns_dropped": 2}


def test_a_row_without_id_is_named_by_its_place() -> None:
    row = said(("human", "q"), ("gpt", "a"))
    del row["id"]
    found = parse_conversation(row, 5, Counter())
    assert found is not None
    assert found.conversation_id == "5"
