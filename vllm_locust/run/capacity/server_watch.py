"""Whether the server still answers, by how requests end while a probe runs."""

from __future__ import annotations

from typing import Final

from vllm_locust.aggregate import RunAggregate
from vllm_locust.outcome import Outcome

GONE_S: Final = 4.0
UNREACHABLE_REQUESTS: Final = 5
"""So many in so long a time that got no connection, and no other that ended, mean that the server is not there."""
FAILED_IN_A_ROW: Final = 20
"""So many failures in so long a time, none of them served between and the server without work meanwhile, mean that it
serves nothing. One that is only overloaded is at work.
"""
CANNOT_BE_REACHED: Final = "the server cannot be reached"
ANSWERS_NOTHING: Final = "the server answers no request any more"


class ServerWatch:
    """``look`` is fed about once a second with what is known of all requests so far."""

    def __init__(self) -> None:
        self.gone: str | None = None
        """Why nothing more can be learned from this server; it stays."""
        self.in_doubt = False
        """Whether the last requests failed in a row, which a little more time explains."""
        self._served_at_start: int | None = None
        self._served = 0
        self._connected = _LastGood(-1, 0.0, 0)
        self._ok = _LastGood(-1, 0.0, 0)
        self._idle = False

    def look(self, at_s: float, everything: RunAggregate) -> None:
        ended, ok = sum(everything.finished.values()), everything.finished.get(Outcome.OK, 0)
        refused = everything.finished.get(Outcome.CONNECT_ERROR, 0)
        self._served = ok
        if self._served_at_start is None:
            self._served_at_start = ok
        self._connected = self._connected.later(ended - refused, at_s, refused)
        before, self._ok = self._ok, self._ok.later(ok, at_s, ended - ok)
        self._idle = everything.in_flight == 0 or (self._idle and self._ok is before)
        refused_since, failed_since = refused - self._connected.bad, ended - ok - self._ok.bad
        self.in_doubt = max(refused_since, failed_since) >= UNREACHABLE_REQUESTS
        if refused_since >= UNREACHABLE_REQUESTS and at_s - self._connected.at_s >= GONE_S:
            self.gone = self.gone or CANNOT_BE_REACHED
        elif failed_since >= FAILED_IN_A_ROW and self._idle and at_s - self._ok.at_s >= GONE_S:
            self.gone = self.gone or ANSWERS_NOTHING

    def fault(self, stage: RunAggregate) -> str | None:
        """Why the probe whose requests ``stage`` has says nothing of what the server can take."""
        refused, ended = stage.finished.get(Outcome.CONNECT_ERROR, 0), sum(stage.finished.values())
        if self.gone == CANNOT_BE_REACHED or (refused and refused == ended):
            self.gone = CANNOT_BE_REACHED
            return f"the server could not be reached, and {refused} requests got no connection"
        unanswered = ended + stage.in_flight
        served_nothing = self._served == self._served_at_start and not stage.finished.get(Outcome.OK, 0)
        if self.gone is None and not (served_nothing and unanswered >= UNREACHABLE_REQUESTS):
            return None
        self.gone = self.gone or ANSWERS_NOTHING
        failed = {str(outcome): count for outcome, count in stage.finished.items() if outcome is not Outcome.OK}
        kinds = failed | ({"without an answer": stage.in_flight} if stage.in_flight else {})
        words = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items(), key=lambda item: -item[1]))
        return f"the server answered no request any more: of {unanswered} in the probe {words}"


class _LastGood:
    """The last time that a count of good ends rose, and how many bad ones there were by then."""

    def __init__(self, good: int, at_s: float, bad: int) -> None:
        self._good, self.at_s, self.bad = good, at_s, bad

    def later(self, good: int, at_s: float, bad: int) -> _LastGood:
        return _LastGood(good, at_s, bad) if good > self._good else self
