"""A closed loop with a secret option of its own, which Locust would put into its page in clear."""

from __future__ import annotations

from typing import Any

from locust import events, task

from vllm_locust import ChatUser


class Chat(ChatUser):
    @task
    def ask_next(self) -> None:
        self.ask(self.next_prompt())


def _add_option(parser: Any, **_: Any) -> None:
    parser.add_argument("--own-secret", default="", is_secret=True)


_events: Any = events
_events.init_command_line_parser.add_listener(_add_option)
