"""What the servers told of themselves in each stage, from ``server.parquet``: the block ``server`` of a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from vllm_locust.diagnosis.finding import THRESHOLDS
from vllm_locust.report.columns import Columns, Floats, Ints, Source, read_batches
from vllm_locust.report.counters import Counter, Series
from vllm_locust.report.run_facts import Interval
from vllm_locust.server_series import PROCESS_START, SCRAPE_DURATION, UP, split_label
from vllm_locust.steady_state import BATCHES, batch_means, trend

_REQUESTS: Final = "request_success_total"
_TIMES: Final = ("ttft", "queue", "prefill", "decode", "itl", "e2e")
_COUNTERS: Final = (
    *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total"),
    *("preemptions_total", _REQUESTS),
    *(f"{name}_seconds_{part}" for name in _TIMES for part in ("sum", "count")),
)
_COUNTED: Final = frozenset(name for name in _COUNTERS if not name.endswith("_sum"))
_GAUGES: Final = ("requests_running", "requests_waiting", "kv_cache_usage")
_OF_PAGE: Final = (UP, SCRAPE_DURATION, PROCESS_START)
_KNOWN: Final = frozenset((*_COUNTERS, *_GAUGES, *_OF_PAGE))
LONGEST_SILENCE_S: Final = 5.0
SHORTEST_WINDOW_S: Final = 2.0
_RESTARTED_S: Final = 0.5
"""Starts of a process further apart than this are two: some servers round the time."""
_Key = tuple[str, str | None, str]


class ServerMetrics:
    """All series of a run, apart from the buckets of histograms. Some 25 numbers a second and engine."""

    def __init__(self, source: Source, clock_uncertainty_ns: int | None = None) -> None:
        """``clock_uncertainty_ns`` is how far the times of its pages may be from the clients'."""
        self._clock_uncertainty_ns = clock_uncertainty_ns
        series = _read(source)
        self.targets = sorted({target for target, _, metric in series if metric == UP})
        looks = {target: _good_looks(series[target, None, UP]) for target in self.targets}
        restarts = {target: _restarts(target, series) for target in self.targets}
        self._up = {target: series[target, None, UP] for target in self.targets}
        self._durations = [one for (_, _, metric), one in series.items() if metric == SCRAPE_DURATION]
        self._restarts = np.sort(np.concatenate([np.empty(0, dtype=np.int64), *restarts.values()]))
        self.gauges: dict[str, list[Series]] = {name: [] for name in _GAUGES}
        self._counters: dict[str, list[tuple[str | None, Counter]]] = {name: [] for name in _COUNTERS}
        for (target, _, metric), one in series.items():
            name, label = split_label(metric)
            if target not in self._up:
                continue
            if name in self.gauges:
                self.gauges[name].append(one)
            elif name in self._counters:
                counter = Counter(one, looks[target], restarts[target])
                self._counters[name].append((label, counter))

    def numbers(self, interval: Interval | None, client_ttft: Mapping[str, Any]) -> dict[str, Any] | None:
        """Of one stage; None where no page was read in it. ``client_ttft``: ``n`` and ``mean`` (seconds) of its ok
        requests, from sent.
        """
        if interval is None:
            return None
        span = interval.start_unix_ns, interval.end_unix_ns
        up = np.concatenate([np.empty(0), *(one.between(*span) for one in self._up.values())])
        if not up.any():
            return None
        durations = np.concatenate([np.empty(0), *(one.between(*span) for one in self._durations)])
        return {
            "targets": self.targets,
            "pages_read": int(up.sum()),
            "pages_failed": int((up == 0).sum()),
            "page_duration_max_s": float(durations.max()) if len(durations) else None,
            "clock_uncertainty_s": None if self._clock_uncertainty_ns is None else self._clock_uncertainty_ns / 1e9,
            "restarts": int(np.diff(np.searchsorted(self._restarts, span))[0]),
            "requests_running": _requests_json(self.gauges["requests_running"], span),
            "requests_waiting": _requests_json(self.gauges["requests_waiting"], span),
            "kv_cache_usage": _share_json(self.gauges["kv_cache_usage"], span),
            "prompt_tokens_per_s": self.rate("prompt_tokens_total", span),
            "generation_tokens_per_s": self.rate("generation_tokens_total", span),
            "prefix_cache_queries": self._gain("prefix_cache_queries_total", span),
            "prefix_cache_hit_rate": self._ratio("prefix_cache_hits_total", "prefix_cache_queries_total", span),
            "preemptions": self._gain("preemptions_total", span),
            "requests_finished": self._by_label(_REQUESTS, span),
            "ttft_s": self._ttft_json(span, client_ttft),
            **{f"{name}_mean_s": self._mean(name, span) for name in ("decode", "itl", "e2e")},
        }

    def silence(self, target: str, window: Interval) -> float:
        """The share of the window that lies in stretches without a page of more than ``LONGEST_SILENCE_S``: all of it
        where a window of more than ``SHORTEST_WINDOW_S`` has none.
        """
        up = self._up.get(target)
        looks = np.empty(0, dtype=np.int64) if up is None else _good_looks(up)
        inside = looks[(looks > window.start_unix_ns) & (looks < window.end_unix_ns)]
        edges = np.concatenate(([window.start_unix_ns], inside, [window.end_unix_ns]))
        gaps_s = np.diff(edges) / 1e9
        silent_s = gaps_s[gaps_s > (LONGEST_SILENCE_S if len(inside) else SHORTEST_WINDOW_S)].sum()
        return float(silent_s / window.length_s) if silent_s else 0.0

    def _gain(self, name: str, span: tuple[int, int]) -> float | None:
        gains = [gain[0] for _, counter in self._counters[name] if (gain := counter.gain(*span)) is not None]
        return sum(gains) if gains else None

    def _by_label(self, name: str, span: tuple[int, int]) -> dict[str, float] | None:
        told: dict[str, float] = {}
        for label, counter in self._counters[name]:
            gain = counter.gain(*span)
            if gain is not None:
                word = "any" if label is None else label
                told[word] = told.get(word, 0.0) + gain[0]
        return told or None

    def rate(self, name: str, span: tuple[int, int]) -> float | None:
        """A second, of a counter: each engine's over the time in which it was watched, between two times."""
        gains = [gain for _, counter in self._counters[name] if (gain := counter.gain(*span)) is not None]
        return sum(gained / seconds for gained, seconds in gains) if gains else None

    def _ratio(self, part: str, whole: str, span: tuple[int, int]) -> float | None:
        parts, wholes = self._gain(part, span), self._gain(whole, span)
        return None if parts is None or not wholes else parts / wholes

    def _mean(self, name: str, span: tuple[int, int]) -> float | None:
        return self._ratio(f"{name}_seconds_sum", f"{name}_seconds_count", span)

    def _ttft_json(self, span: tuple[int, int], client: Mapping[str, Any]) -> dict[str, float | None]:
        """Means, and where the time went. Each is the mean over the requests that the server counted in the stage: the
        time to the first token when that was made, queue and prefill when the request ended. Where the clients counted
        much fewer or more, a queue grew or shrank: the two means are then of different requests, and no difference of
        theirs is the network's. So they are where the rest would be below nothing.
        """
        number = self._gain("ttft_seconds_count", span)
        same = number is not None and abs(number - client["n"]) <= THRESHOLDS.same_requests * client["n"]
        mean, queue, prefill = (self._mean(name, span) for name in ("ttft", "queue", "prefill"))
        return {
            "n": number,
            "mean": mean,
            "queue": queue,
            "prefill": prefill,
            "front_end": _rest(mean, queue, prefill),
            "network": _rest(client["mean"], mean) if same else None,
        }


def _rest(whole: float | None, *parts: float | None) -> float | None:
    known = [part for part in parts if part is not None]
    if whole is None or len(known) < len(parts):
        return None
    rest = whole - sum(known)
    return rest if rest >= 0 else None


def _read(source: Source) -> dict[_Key, Series]:
    found: dict[_Key, list[tuple[int, float]]] = {}
    for batch in read_batches(source):
        columns = Columns(batch)
        rows = zip(
            *(columns.texts(name) for name in ("target", "engine", "metric")),
            columns.ints("time_unix_ns").tolist(),
            columns.floats("value").tolist(),
            strict=True,
        )
        for target, engine, metric, time_unix_ns, value in rows:
            if target is not None and metric is not None and split_label(metric)[0] in _KNOWN:
                found.setdefault((target, engine, metric), []).append((time_unix_ns, value))
    return {key: _series(sorted(pairs)) for key, pairs in found.items()}


def _series(pairs: list[tuple[int, float]]) -> Series:
    times, values = zip(*pairs, strict=True)
    return Series(np.array(times, dtype=np.int64), np.array(values, dtype=np.float64))


def _good_looks(up: Series) -> Ints:
    return up.times_unix_ns[up.values > 0]


def _restarts(target: str, series: Mapping[_Key, Series]) -> Ints:
    """The first looks at a server that was started anew: its process has another start, or something that it counts one
    by one went back. A sum of times may do so without, where a clock was set.
    """
    looks = [np.empty(0, dtype=np.int64)]
    for (whose, _, metric), one in series.items():
        if whose != target:
            continue
        gains = np.diff(one.values)
        if metric == PROCESS_START:
            looks.append(one.times_unix_ns[1:][np.abs(gains) > _RESTARTED_S])
        elif split_label(metric)[0] in _COUNTED:
            looks.append(one.times_unix_ns[1:][gains < 0])
    return np.unique(np.concatenate(looks))


def _requests_json(gauges: Sequence[Series], span: tuple[int, int]) -> dict[str, Any] | None:
    """All engines together, at each time when one of them was looked at. ``first`` and ``last`` are means of the first
    and the last tenth; ``grows`` says whether it rose by more than chance would have it, null in a short stage.
    """
    total = total_of_engines(gauges, span)[1]
    if not len(total):
        return None
    tenth = max(1, len(total) // 10)
    fitted = trend(batch_means(total)) if len(total) >= BATCHES else None
    return {
        "mean": float(total.mean()),
        "max": float(total.max()),
        "first": float(total[:tenth].mean()),
        "last": float(total[-tenth:].mean()),
        "grows": None if fitted is None else fitted.matters and fitted.change > 0,
    }


def total_of_engines(gauges: Sequence[Series], span: tuple[int, int]) -> tuple[Ints, Floats]:
    """When one of the engines was looked at, and what all of them told together."""
    times = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *(one.times_unix_ns for one in gauges)]))
    first, last = np.searchsorted(times, span)
    inside = times[first:last]
    return inside, np.sum([one.at(inside) for one in gauges], axis=0) if len(inside) else np.empty(0)


def _share_json(gauges: Sequence[Series], span: tuple[int, int]) -> dict[str, float] | None:
    """The fullest engine has the say: it is the first that must preempt."""
    told = [values for one in gauges if len(values := one.between(*span))]
    if not told:
        return None
    return {"mean": max(float(values.mean()) for values in told), "max": max(float(values.max()) for values in told)}
