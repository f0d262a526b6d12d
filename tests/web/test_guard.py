"""Who may change the web UI's state, asked of Flask itself; no Locust is needed for it."""

from __future__ import annotations

from typing import Any

import pytest
from flask import Flask, Response, jsonify
from flask_cors import CORS

from vllm_locust.errors import UsageError
from vllm_locust.run.web.guard import guard, own_names

LOCAL = "127.0.0.1:8089"


def app(*, login: bool = False, names: str | None = None) -> Flask:
    """With the two things that Locust's has: CORS for all, and debug on."""
    made = Flask(__name__)
    CORS(made)
    made.debug = True

    @made.route("/", methods=["GET", "POST"])
    def index() -> Response:
        return jsonify({"done": True})

    guard(made, login=login, names=own_names(names))
    return made


def refusal(
    method: str, site: str | None, origin: str | None, host: str, *, login: bool = False, names: str | None = None
) -> str | None:
    given = {"Sec-Fetch-Site": site, "Origin": origin, "Host": host}
    headers = {name: value for name, value in given.items() if value is not None}
    answer = app(login=login, names=names).test_client().open("/", method=method, headers=headers)
    assert answer.status_code in (200, 403)
    return None if answer.status_code == 200 else str(answer.get_json()["message"])


@pytest.mark.parametrize(
    ("site", "origin", "host", "login"),
    [
        (None, None, LOCAL, False),  # curl
        ("same-origin", f"http://{LOCAL}", LOCAL, False),
        ("none", None, LOCAL, False),
        ("same-origin", "https://load.example.com", LOCAL, False),  # behind a proxy that keeps its own Host
        (None, "http://localhost:8089", "localhost:8089", False),
        (None, "http://[::1]:8089", "[::1]:8089", False),
        (None, "http://192.168.1.7:8089", "192.168.1.7:8089", False),
        (None, "http://locust-master:8089", "locust-master:8089", False),
        (None, "http://master.load.svc:8089", "master.load.svc:8089", False),
        (None, "http://load.example.com:8089", "load.example.com:8089", True),
    ],
)
def test_the_own_pages_and_programs_are_heard(site: str | None, origin: str | None, host: str, login: bool) -> None:
    assert refusal("POST", site, origin, host, login=login) is None


@pytest.mark.parametrize(
    ("site", "origin", "host", "login", "words"),
    [
        ("cross-site", "http://evil.example", LOCAL, True, "another site"),
        ("same-site", "http://127.0.0.1:9999", LOCAL, False, "another site"),
        (None, "http://evil.example", LOCAL, True, "evil.example"),
        (None, "null", LOCAL, False, "null"),
        (None, "http://127.0.0.1:9999", LOCAL, False, "127.0.0.1:9999"),
        (None, "http://evil.example:8089", "evil.example:8089", False, "--web-login"),  # DNS rebinding
    ],
)
def test_other_sites_are_not(site: str | None, origin: str | None, host: str, login: bool, words: str) -> None:
    told = refusal("POST", site, origin, host, login=login)
    assert told is not None
    assert words in told


def test_no_answer_is_for_pages_of_other_sites_and_nothing_is_debugged() -> None:
    made = app()
    assert made.debug is False
    for headers in ({"Origin": "http://evil.example"}, {}):
        answer = made.test_client().get("/", headers=headers)
        assert answer.status_code == 200
        assert not [name for name, _ in answer.headers if name.lower().startswith("access-control-")]
        assert answer.headers["X-Frame-Options"] == "DENY"
    preflight = made.test_client().options("/", headers={"Origin": "http://evil.example"})
    assert not [name for name, _ in preflight.headers if name.lower().startswith("access-control-")]


def test_a_post_of_another_site_does_not_reach_its_view() -> None:
    client = app().test_client()
    refused = client.post("/", headers={"Origin": "http://evil.example", "Host": LOCAL})
    assert refused.status_code == 403
    assert refused.get_json()["success"] is False
    assert client.post("/", headers={"Origin": f"http://{LOCAL}", "Host": LOCAL}).get_json() == {"done": True}


def test_a_name_that_leads_here_reads_nothing() -> None:
    """DNS rebinding: the page's own site, so that the browser lets it read what it gets."""
    for method in ("GET", "OPTIONS"):
        told = refusal(method, None, None, "evil.example:8089")
        assert told is not None
        assert "--web-names" in told
    assert refusal("GET", None, None, "[evil") is not None
    assert refusal("GET", None, None, "x.local.evil.example") is not None


@pytest.mark.parametrize(
    ("site", "host", "settings"),
    [
        (None, LOCAL, {}),  # curl, Prometheus
        (None, "[::1]:8089", {}),
        (None, "locust-master:8089", {}),
        (None, "locust-master.load.svc.cluster.local:8089", {}),
        (None, "load.example.com:8089", {"login": True}),
        (None, "load.example.com:8089", {"names": "other.example, Load.Example.com"}),
        ("none", "load.example.com", {}),  # through HTTPS
        ("same-origin", "load.example.com", {}),
    ],
)
def test_who_may_read(site: str | None, host: str, settings: dict[str, Any]) -> None:
    assert refusal("GET", site, None, host, **settings) is None


def test_what_is_no_name_is_refused() -> None:
    for text in ("http://load.example.com", "load.example.com:80", "*"):
        with pytest.raises(UsageError, match="--web-names"):
            own_names(text)
