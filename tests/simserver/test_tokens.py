from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_locust.simserver.tokens import (
    Output,
    block_keys,
    chat_tokens,
    count_prompt_tokens,
    count_tokens,
    generate,
    output_length,
    token_id,
    tokenize,
)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=80))
def test_a_token_is_six_characters_of_a_word(text: str) -> None:
    assert count_tokens(text) == sum(-(-len(word) // 6) for word in text.split())


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=30)), max_size=5))
def test_the_documented_count_is_the_length_of_the_prompt(messages: list[tuple[str, str]]) -> None:
    chat = [{"role": role, "content": content} for role, content in messages]
    assert count_prompt_tokens(chat) == len(chat_tokens(chat))


def test_content_parts_and_null_count() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "one two"}, {"type": "text", "text": " three"}]}
    assert count_prompt_tokens([parts, {"role": "assistant", "content": None}]) == 4 + 2 * 4 + 3


def test_generated_text_comes_back_as_the_same_tokens() -> None:
    output = generate(7, 200, "length", empty_text_share=0.0)
    assert tokenize("".join(output.texts)) == [text[1:] for text in output.texts]
    assert [token_id(piece) for piece in tokenize("".join(output.texts))] == output.token_ids


def test_the_next_turn_begins_with_the_blocks_of_this_one() -> None:
    question = [{"role": "user", "content": "word " * 20}]
    output = generate(1, 50, "length", empty_text_share=0.0)
    now = block_keys(chat_tokens(question), output, 8)
    answer = {"role": "assistant", "content": "".join(output.texts)}
    following = chat_tokens([*question, answer, {"role": "user", "content": "more"}])
    assert block_keys(following, Output([], [], "length"), 8)[: len(now)] == now


def test_empty_tokens_have_their_share() -> None:
    output = generate(3, 20_000, "length", empty_text_share=0.02)
    assert 0.016 < output.texts.count("") / 20_000 < 0.024
    assert generate(3, 20_000, "length", empty_text_share=0.02) == output
    assert "" not in generate(3, 5_000, "length", empty_text_share=0.0).texts


def test_a_stop_is_a_token_without_text() -> None:
    output = generate(3, 4, "stop", empty_text_share=0.0)
    assert (len(output.token_ids), output.token_ids[-1], output.texts[-1]) == (4, 2, "")


def test_lengths_are_exact_without_a_mean_and_exponential_with_one() -> None:
    assert output_length(1, 50, 0, None) == (50, "length")
    drawn = [output_length(seed, 10_000, 0, 100.0) for seed in range(4_000)]
    assert {reason for _, reason in drawn} == {"stop"}
    lengths = sorted(length for length, _ in drawn)
    assert math.isclose(sum(lengths) / 4_000, 100.5, rel_tol=0.05)
    assert math.isclose(lengths[2_000], 100 * math.log(2), rel_tol=0.08)
    assert {output_length(seed, 20, 5, 100.0)[1] for seed in range(200)} == {"stop", "length"}
    assert all(5 <= output_length(seed, 20, 5, 1.0)[0] <= 20 for seed in range(200))
