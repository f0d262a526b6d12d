"""A locustfile in whose process the wall clock that Python code, Locust's engine too, reads is set in mid-run: by
``STEP_S`` after ``STEP_AT_S`` seconds.
"""

from __future__ import annotations

import os
import time

from locust import task

from vllm_locust import OpenLoopChatUser

_wall_s, _begun_s = time.time, time.monotonic()
_step_s, _step_at_s = float(os.environ.get("STEP_S", "0")), float(os.environ.get("STEP_AT_S", "0"))


def _stepped_s() -> float:
    return _wall_s() + (_step_s if time.monotonic() - _begun_s > _step_at_s else 0.0)


time.time = _stepped_s


class OpenLoop(OpenLoopChatUser):
    @task
    def ask_next(self) -> None:
        self.ask(self.next_prompt())
