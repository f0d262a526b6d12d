"""Who may change the web UI's state, asked of Flask itself; no Locust is needed for it."""

from __future__ import annotations

import pytest
from flask import Flask, Response, jsonify
from flask_cors import CORS

from vllm_locust.run.web.guard import foreign, guard

LOCAL = "127.0.0.1:8089"


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
    assert foreign(site, origin, host, login=login) is None


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
    told = foreign(site, origin, host, login=login)
    assert told is not None
    assert words in told


def app(*, login: bool = False) -> Flask:
    """With the two things that Locust's has: CORS for all, and debug on."""
    made = Flask(__name__)
    CORS(made)
    made.debug = True

    @made.route("/", methods=["GET", "POST"])
    def index() -> Response:
        return jsonify({"done": True})

    guard(made, login=login)
    return made


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
