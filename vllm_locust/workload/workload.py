"""A loaded workload: which prompts and sessions each worker sends, in which order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, takewhile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_locust.errors import WorkloadError
from vllm_locust.workload.prompt import Prompt, Session, Turn
from vllm_locust.workload.sampler import check_share, epoch_order, positions
from vllm_locust.workload.source import Source
from vllm_locust.workload.spec import SharedPrefixSpec, ShareGptSpec, WorkloadSpec
from vllm_locust.workload.table_metadata import TableMetadata, digest_of

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """How long prompt and answer together may become: ``max_model_len`` less room for the chat template."""

    max_model_len: int | None
    max_tokens: int | None
    """Given: every answer is that long instead of as long as the recorded one."""
    template_tokens: int

    def fits(self, prompt_tokens: Integers, output_tokens: Integers) -> npt.NDArray[np.bool_]:
        if self.max_model_len is None:
            return np.ones(prompt_tokens.size, np.bool_)
        answer = output_tokens if self.max_tokens is None else self.max_tokens
        return prompt_tokens + answer + self.template_tokens <= self.max_model_len

    def cut(self, session: Session) -> Session:
        """The session without the turns from the first one on whose history would not fit."""
        if self.max_model_len is None:
            return session
        answers = [turn.output_tokens if self.max_tokens is None else self.max_tokens for turn in session.turns]
        both = (turn.prompt_tokens + answer for turn, answer in zip(session.turns, answers, strict=True))
        totals = accumulate(both, initial=session.system_tokens + self.template_tokens)
        next(totals)
        limit = self.max_model_len
        fitting: list[Turn] = [
            turn for turn, _ in takewhile(lambda pair: pair[1] <= limit, zip(session.turns, totals, strict=True))
        ]
        return replace(session, turns=tuple(fitting), turns_too_long=len(session.turns) - len(fitting))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Conversations start with one of ``groups`` texts of ``tokens`` each."""

    groups: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """Immutable and without state of its own: loaded once, it may be used by any number of users and survive a fork."""

    name: str
    description: str
    token_count_method: str
    """``tokenizer:<name>`` or ``estimate:<what>``: how the ``prompt_tokens`` and ``output_tokens`` came about."""
    filters: Mapping[str, int]
    """Rows, or parts of rows, that were left out, by reason."""
    warnings: tuple[str, ...]
    content: str
    """SHA-256 over what the seed has no part in: the file, the settings. Equal for the same workload with any seed."""
    fingerprint: str
    """SHA-256 over content, lengths and settings: equal on two machines that would send the same requests."""
    source: Source
    selected: Integers
    """Conversations of ``source`` that passed the filters."""
    limit: ContextLimit
    reference: tuple[Integers, Integers]
    shared_prefix: SharedPrefix | None
    """None also where each conversation has a beginning of its own."""

    @property
    def rows(self) -> int:
        """Conversations, each of which gives one prompt, or one session."""
        return self.selected.size

    @property
    def replays_times(self) -> bool:
        """The prompts have an ``offset_ns``, come in order and end after one pass."""
        return self.source.offset_ns is not None

    @property
    def repeats(self) -> bool:
        """Whether a later pass sends the same texts again: a data set does, generated text is new each time."""
        row = int(self.selected[0])
        first, second = (self.source.prompt(row, epoch).messages for epoch in (0, 1))
        return first == second

    def offsets_ns(self) -> Integers | None:
        """When each prompt is due, in order, after the trace's start; None where the workload replays no times."""
        return None if self.source.offset_ns is None else self.source.offset_ns[self.selected]

    def prompts(self, *, seed: int, share: int, shares: int) -> Iterator[Prompt]:
        """First turns for worker ``share`` of ``shares``. Endless, except that a trace ends after one pass.

        The workers together send every row once per epoch, in an order that does not depend on their number: position
        k of the whole goes to worker k modulo ``shares``.
        """
        return (self.source.prompt(row, epoch) for epoch, row in self._positions(seed, share, shares))

    def sessions(self, *, seed: int, share: int, shares: int) -> Iterator[Session]:
        """Whole conversations, dealt out like ``prompts``. Each has at least one turn.

        The first call on a machine may take a while, to count the tokens of all turns of a data set with a tokenizer
        (5 MB/s on two cores): call it before there is load. What it returns then costs no more than ``prompts``.
        """
        self.source.prepare_sessions()
        return (self.limit.cut(self.source.session(row, epoch)) for epoch, row in self._positions(seed, share, shares))

    def prompt(self, position: int, *, seed: int) -> Prompt | None:
        """The one at this position of the whole, of which ``prompts`` gives a share; None after the end of a trace."""
        place = self._place(position, seed)
        return None if place is None else self.source.prompt(place[1], place[0])

    def session(self, position: int, *, seed: int) -> Session | None:
        """The conversation at this position of the whole, of which ``sessions`` gives a share."""
        place = self._place(position, seed)
        if place is None:
            return None
        self.source.prepare_sessions()
        return self.limit.cut(self.source.session(place[1], place[0]))

    def length_reference(self) -> tuple[Integers, Integers]:
        """Prompt and output lengths of the source distribution, before rows were left out for their length."""
        return self.reference

    def _place(self, position: int, seed: int) -> tuple[int, int] | None:
        """Epoch and row."""
        epoch, index = divmod(position, self.rows)
        if not self.replays_times:
            return epoch, int(self.selected[epoch_order(self.rows, seed, epoch)[index]])
        return (0, int(self.selected[index])) if epoch == 0 else None

    def _positions(self, seed: int, share: int, shares: int) -> Iterator[tuple[int, int]]:
        check_share(share, shares)
        if self.replays_times:
            return ((0, int(row)) for row in self.selected[share::shares])
        return (
            (epoch, int(self.selected[i])) for epoch, i in positions(self.rows, seed=seed, share=share, shares=shares)
        )


def make_workload(
    spec: WorkloadSpec,
    source: Source,
    metadata: TableMetadata,
    *,
    token_count_method: str,
    limit: ContextLimit,
    origin: str | None = None,
    reference: tuple[Integers, Integers] | None = None,
) -> Workload:
    """Filter the source's conversations and describe the result. ``origin``: the digest of the file that a source
    generated with a seed comes from, None where it comes from none. Raises WorkloadError when nothing is left."""
    keep, counts = _select(spec, source, limit)
    selected = np.flatnonzero(keep)
    filters = dict(metadata.filters) | {name: count for name, count in counts.items() if count}
    if selected.size == 0:
        reasons = ", ".join(f"{name} {count:,}" for name, count in filters.items())
        raise WorkloadError(
            f"workload {spec.name}: no row of {source.prompt_tokens.size:,} is left ({reasons}); raise the server's "
            "max_model_len, lower --max-tokens or template_tokens, or use a workload with shorter rows"
        )
    described = json.dumps(
        asdict(spec), sort_keys=True, default=lambda value: value.name if isinstance(value, Path) else str(value)
    )
    return Workload(
        name=spec.name,
        description=spec.description,
        token_count_method=token_count_method,
        filters=filters,
        warnings=metadata.warnings,
        content=digest_of(described, asdict(limit), origin, *(reference or ())),
        fingerprint=digest_of(
            metadata.digest, described, asdict(limit), selected, source.prompt_tokens, source.output_tokens
        ),
        source=source,
        selected=selected,
        limit=limit,
        reference=reference or (source.prompt_tokens, source.output_tokens),
        shared_prefix=_shared_prefix(spec),
    )


def _shared_prefix(spec: WorkloadSpec) -> SharedPrefix | None:
    if not isinstance(spec, SharedPrefixSpec) or spec.conversations_per_group < 2:
        return None
    return SharedPrefix(spec.groups, spec.prefix_tokens)


def _select(spec: WorkloadSpec, source: Source, limit: ContextLimit) -> tuple[npt.NDArray[np.bool_], Mapping[str, int]]:
    """Which conversations stay; each other one is counted under the first reason that applies."""
    prompt, output = source.prompt_tokens, source.output_tokens
    tests: list[tuple[str, npt.NDArray[np.bool_]]] = []
    if isinstance(spec, ShareGptSpec):
        tests = [
            ("prompt_too_short", prompt < spec.min_prompt_tokens),
            ("prompt_too_long", prompt > _or_endless(spec.max_prompt_tokens)),
            ("output_too_short", output < spec.min_output_tokens),
            ("output_too_long", output > _or_endless(spec.max_output_tokens)),
            ("total_too_long", prompt + output > _or_endless(spec.max_total_tokens)),
        ]
    tests.append(("too_long", ~limit.fits(prompt, output)))
    keep = np.ones(prompt.size, np.bool_)
    counts = {}
    for name, dropped in tests:
        counts[name] = int((keep & dropped).sum())
        keep &= ~dropped
    return keep, counts


def _or_endless(limit: int | None) -> int:
    return np.iinfo(np.int64).max if limit is None else limit
