"""Closed loop: every user asks one prompt of the workload after the other.

locust -f locustfiles/chat.py --host http://HOST:8000 --headless -u 32 -r 32 -t 60s
"""

from __future__ import annotations

from locust import task

from vllm_locust import ChatUser


class Chat(ChatUser):
    @task
    def ask_next(self) -> None:
        self.ask(self.next_prompt())
