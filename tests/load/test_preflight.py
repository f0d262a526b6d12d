"""What a server says at preflight is taken for what it is, whatever it says."""

from __future__ import annotations

import pytest

from tests.load.scripted_server import Step, serving, whole
from vllm_locust.config import RunConfig, Target
from vllm_locust.errors import TargetError
from vllm_locust.load.preflight import ServerFacts, ask_server, reset_prefix_cache


def ask(models: Step, version: Step = b"") -> ServerFacts:
    with serving({"GET": (version,), "GET#1": (models,)}) as server:
        target = Target.parse(f"http://127.0.0.1:{server.listener.getsockname()[1]}")
        return ask_server(RunConfig(targets=(target,)), None)


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
