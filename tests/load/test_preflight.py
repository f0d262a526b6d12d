"""What a server says at preflight is taken for what it is, whatever it says."""

from __future__ import annotations

import pytest

from tests.load.scripted_server import Step, serving, whole
from vllm_locust.config import RunConfig, Target
from vllm_locust.errors import TargetError
from vllm_locust.load.preflight import ServerFacts, ask_server, reset_prefix_cache


def ask(models: Step, version: Step = b"", api_key: str | None = None) -> ServerFacts:
    with serving({"GET": (version,), "GET#1": (models,)}) as server:
        target = Target.parse(f"http://127.0.0.1:{server.listener.getsockname()[1]}")
        return ask_server(RunConfig(targets=(target,)), api_key)


@pytest.mark.parametrize(
    ("said", "understood"),
    [("8192", 8192), ("-1", None), ("0", None), ("true", None), ("1e30", None), ("9" * 40, None), ('"x"', None)],
)
def test_a_context_length_that_is_none_is_unknown(said: str, understood: int | None) -> None:
    assert ask(whole(b'{"data":[{"id":"m","max_model_len":%b}]}' % said.encode())).max_model_len == understood


def test_a_number_that_nobody_can_read_is_no_list_of_models() -> None:
    with pytest.raises(TargetError, match="did not answer with a list of models"):
        ask(whole(b'{"data":[{"id":"m","max_model_len":%b}]}' % (b"9" * 5000)))


@pytest.mark.parametrize("said", [b'"0.9"', b"9" * 5000, b"[" * 100_000, b"nothing", b"{}"])
def test_a_version_that_cannot_be_read_is_unknown(said: bytes) -> None:
    facts = ask(whole(b'{"data":[{"id":"m","owned_by":"vllm"}]}'), whole(said))
    assert facts.is_vllm
    assert facts.version is None


def test_another_protocol_is_a_refusal() -> None:
    with pytest.raises(TargetError, match="answered 101"):
        ask(b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n")


def reset(answer: Step) -> list[str]:
    """The first lines of the requests that it took."""
    with serving({"POST": (answer,)}) as server:
        target = Target.parse(f"http://127.0.0.1:{server.listener.getsockname()[1]}")
        reset_prefix_cache(RunConfig(targets=(target,)), None)
        return [request.head.split(b"\r\n")[0].decode() for request in server.requests]


def test_the_prefix_cache_is_reset() -> None:
    assert reset(whole(b"")) == ["POST /reset_prefix_cache HTTP/1.1"]


def test_a_server_that_cannot_reset_its_prefix_cache_is_named_with_the_fix() -> None:
    with pytest.raises(
        TargetError, match=r"reset_prefix_cache answered 404 \(Not Found\); vLLM has it when .*DEV_MODE=1"
    ):
        reset(whole(b'{"detail":"Not Found"}', b"404 Not Found"))


KEY = "sk-told-to-the-server-alone"


@pytest.mark.parametrize(
    "answer",
    [
        whole(b'{"detail":"not known: Bearer %b"}' % KEY.encode(), b"500 Internal Server Error"),
        whole(b"x" * 480 + KEY.encode(), b"500 Internal Server Error"),  # cut inside the key
        whole(b'{"data":[{"id":"%b"}]}' % KEY.encode()),
    ],
)
def test_a_key_that_the_server_repeats_is_not_told(answer: Step) -> None:
    with pytest.raises(TargetError) as caught:
        ask(answer, api_key=KEY)
    assert KEY[:8] not in str(caught.value)


def test_a_version_is_told_without_the_key() -> None:
    models, version = whole(b'{"data":[{"id":"m","owned_by":"vllm"}]}'), whole(b'{"version":"1 %b"}' % KEY.encode())
    assert ask(models, version, api_key=KEY).version == "1 ***"


def test_a_short_stand_in_for_a_key_may_be_part_of_a_models_name() -> None:
    assert ask(whole(b'{"data":[{"id":"mixtral"}]}'), api_key="x").model == "mixtral"


def test_a_model_with_a_name_that_cannot_be_used_is_not_called_missing() -> None:
    with pytest.raises(TargetError, match="lists no model whose name can be used"):
        ask(whole(b'{"data":[{"id":"a\\u001bb"}]}'))
    with pytest.raises(TargetError, match="lists no model; load one"):
        ask(whole(b'{"data":[]}'))
