"""What every kind of workload offers to ``Workload``: numbered conversations with their lengths and their text."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from vllm_locust.workload.prompt import Prompt, Session


class Source(Protocol):
    """Immutable. Index 0 to ``prompt_tokens.size - 1`` is a conversation; its first turn is the prompt."""

    @property
    def prompt_tokens(self) -> npt.NDArray[np.int64]:
        """Of the first turns, system message included."""
        ...

    @property
    def output_tokens(self) -> npt.NDArray[np.int64]:
        """Of the first turns."""
        ...

    @property
    def offset_ns(self) -> npt.NDArray[np.int64] | None:
        """When each conversation was recorded: they come once, in this order. None: they come shuffled, for ever."""
        ...

    def prompt(self, conversation: int, epoch: int) -> Prompt: ...

    def prepare_sessions(self) -> None:
        """Do now what sessions need beyond prompts and what takes time."""
        ...

    def session(self, conversation: int, epoch: int) -> Session: ...
