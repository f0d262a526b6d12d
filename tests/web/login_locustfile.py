"""A closed loop behind a login of its own, as Locust's manual says it is made."""

from __future__ import annotations

import os
from typing import Any

from flask import Blueprint, Response, redirect, request, session, url_for
from flask_login import UserMixin, login_user
from locust import events, task

from vllm_locust import ChatUser


class Chat(ChatUser):
    @task
    def ask_next(self) -> None:
        self.ask(self.next_prompt())


class Operator(UserMixin):  # type: ignore[misc]
    def get_id(self) -> str:
        return "operator"


def _add_login(environment: Any, **_: Any) -> None:
    web_ui = environment.web_ui
    if web_ui is None:
        return
    web_ui.login_manager.user_loader(lambda name: Operator() if name == "operator" else None)
    web_ui.app.secret_key = os.urandom(16)
    web_ui.auth_args = {"username_password_callback": "/login_submit"}
    login = Blueprint("auth", "web_ui_auth")

    @login.route("/login_submit", methods=["POST"])
    def login_submit() -> Any:
        if request.form.get("password") == "right":
            session["auth_error"] = None
            login_user(Operator())
            return redirect(url_for("locust.index"))
        session["auth_error"] = "Invalid username or password"
        answer: Response = redirect(url_for("locust.login"))  # type: ignore[assignment]
        return answer

    web_ui.app.register_blueprint(login)


_events: Any = events
_events.init.add_listener(_add_login)
