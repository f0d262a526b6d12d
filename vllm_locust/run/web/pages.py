"""The dashboard at ``/llm`` with its data and downloads, and what Locust's own pages are given beside."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from io import BytesIO
from typing import IO, Any, Final

import gevent
import orjson
from flask import Blueprint, Response, abort, request, send_file
from locust import argument_parser

from vllm_locust import __version__
from vllm_locust.load.open_loop import OpenLoopChatUser
from vllm_locust.run.course.planned_load import OPEN_LOOP_SLOTS
from vllm_locust.run.web.exposition import exposition
from vllm_locust.run.web.finished_run import FinishedRun
from vllm_locust.run.web.guard import guard, own_names
from vllm_locust.run.web.live_run import LiveRun
from vllm_locust.run.web.locust_tab import add_tables, secret_names, template_keys, without_secrets
from vllm_locust.run.web.start_form import StartForm
from vllm_locust.run.web.swarm import Starter, guarded_stop, guarded_swarm
from vllm_locust.shipped import chart_library

_PAGE_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY: Final = "sandbox allow-scripts allow-downloads allow-popups"
"""Whatever may be in a report, it cannot act on this site."""
_ASSETS: Final = {"llm.css": "text/css", "llm.js": "text/javascript", "charts.js": "text/javascript"}
_METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def install(web_ui: Any, live: LiveRun, form: StartForm, starter: Starter) -> None:
    """Before the web server starts: pages, tab, guard."""
    shown = argument_parser.ui_extra_args_dict()
    names = own_names(web_ui.environment.parsed_options.web_names)
    guard(web_ui.app, login=bool(web_ui.web_login), names=names)
    _give_locust_its_tabs(web_ui)
    web_ui.app.after_request(add_tables(live.stats))
    swarm = guarded_swarm(web_ui.app.view_functions["locust.swarm"], starter, secret_names(shown))
    web_ui.app.view_functions["locust.swarm"] = web_ui.auth_required_if_enabled(swarm)
    stop = guarded_stop(web_ui.app.view_functions["locust.stop"], starter)
    web_ui.app.view_functions["locust.stop"] = web_ui.auth_required_if_enabled(stop)
    base = getattr(web_ui.environment.parsed_options, "web_base_path", None) or ""
    web_ui.app.register_blueprint(_blueprint(web_ui, live, form), url_prefix=base)


def fields_of_the_locustfile() -> frozenset[str]:
    """Options that Locust's start form shows; ours are among them."""
    return frozenset(argument_parser.ui_extra_args_dict())


def _give_locust_its_tabs(web_ui: Any) -> None:
    update = web_ui.update_template_args

    def update_template_args() -> None:
        update()
        web_ui.template_args["extra_options"] = without_secrets(web_ui.template_args["extra_options"])
        for key, value in template_keys().items():
            others = [one for one in web_ui.template_args.get(key, []) if one not in value]
            web_ui.template_args[key] = others + value

    web_ui.update_template_args = update_template_args


def _blueprint(web_ui: Any, live: LiveRun, form: StartForm) -> Blueprint:
    pages = Blueprint("llm", __name__)

    def route(path: str) -> Callable[[Callable[..., Any]], None]:
        return lambda view: pages.add_url_rule(
            path, view.__name__, web_ui.auth_required_if_enabled(view), methods=["GET"]
        )

    @route("/llm")
    def dashboard() -> Response:
        answer = Response(_asset("llm.html"), mimetype="text/html")
        answer.headers["Content-Security-Policy"] = _PAGE_POLICY
        answer.headers["Cache-Control"] = "no-store"
        return answer

    @route("/llm/assets/<name>")
    def asset(name: str) -> Response:
        if name == "echarts.js":
            return _sent(chart_library().encode(), "text/javascript")
        if name not in _ASSETS:
            abort(404)
        return _sent(_asset(name), _ASSETS[name])

    @route("/llm/stats.json")
    def stats() -> Response:
        known = request.args.get("run"), request.args.get("after", 0, int)
        return _json({**live.stats(), "history": live.history(*known)})

    @route("/llm/form.json")
    def start_form() -> Response:
        return _json(_form_facts(web_ui, form))

    @route("/llm/metrics")
    def metrics() -> Response:
        answer = Response(exposition(live.stats(), live.merged), content_type=_METRICS_TYPE)
        answer.headers["Cache-Control"] = "no-store"
        return answer

    @route("/llm/results.zip")
    def results() -> Response:
        run = _finished(live)
        archive: IO[bytes] = gevent.get_hub().threadpool.apply(run.archive)
        name = f"{run.result.get('run_id', 'run')}.zip"
        return send_file(archive, mimetype="application/zip", as_attachment=True, download_name=name)

    @route("/llm/results/<name>")
    def result(name: str) -> Response:
        run = _finished(live)
        if name not in run.files:
            abort(404)
        answer = send_file(run.files[name].absolute(), as_attachment=name != "report.html", max_age=0)
        answer.headers["Content-Security-Policy"] = _REPORT_POLICY
        return answer

    return pages


def _form_facts(web_ui: Any, form: StartForm) -> dict[str, Any]:
    environment, options = web_ui.environment, web_ui.environment.parsed_options
    classes = sorted(environment.available_user_classes or ()) if web_ui.userclass_picker_is_active else []
    return {
        "fields": form.fields(),
        "users": options.num_users or 1,
        "slots": OPEN_LOOP_SLOTS,
        "spawn_rate": options.spawn_rate or 1,
        "host": environment.host or next((cls.host for cls in environment.user_classes if cls.host), None) or "",
        "run_time_s": form.given_run_time_s,
        "user_classes": classes,
        "open_loop_classes": [
            name for name in classes if issubclass(environment.available_user_classes[name], OpenLoopChatUser)
        ],
        "login": bool(web_ui.web_login),
    }


def _finished(live: LiveRun) -> FinishedRun:
    if live.finished is None:
        abort(404)
    return live.finished


def _asset(name: str) -> bytes:
    return resources.files("vllm_locust").joinpath("run", "web", "assets", name).read_bytes()


def _json(value: object) -> Response:
    answer = Response(orjson.dumps(value), mimetype="application/json")
    answer.headers["Cache-Control"] = "no-store"
    return answer


def _sent(data: bytes, mimetype: str) -> Response:
    """The browser keeps it and asks each time whether it is still the same."""
    return send_file(BytesIO(data), mimetype=mimetype, max_age=0, etag=f"{__version__}-{len(data)}")
