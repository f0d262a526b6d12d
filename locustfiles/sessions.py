"""Closed loop: every user holds one conversation of the workload after the other, with the server's own answers in it.

locust -f locustfiles/sessions.py --host http://HOST:8000 --headless -u 32 -r 32 -t 60s --think-time 1s-3s
"""

from __future__ import annotations

from locust import task

from vllm_locust import ChatUser


class Conversation(ChatUser):
    holds_sessions = True

    @task
    def hold_next(self) -> None:
        self.hold_session(self.next_session())
