"""Open loop: requests are sent when a schedule says so, whether or not earlier ones have been answered.

locust -f locustfiles/open_loop.py --host http://HOST:8000 --headless --rate 20 -t 60s
"""

from __future__ import annotations

from locust import task

from vllm_locust import OpenLoopChatUser


class OpenLoop(OpenLoopChatUser):
    @task
    def ask_next(self) -> None:
        self.ask(self.next_prompt())
