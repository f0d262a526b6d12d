"""Generated conversations without anything in common."""

from __future__ import annotations

import numpy as np

from vllm_locust.workload.generated import Integers, Plan
from vllm_locust.workload.lengths import Length
from vllm_locust.workload.spec import SyntheticSpec


def plan_synthetic(spec: SyntheticSpec, seed: int) -> Plan:
    rng = np.random.default_rng(np.random.SeedSequence([seed, 1]))
    turn = turn_numbers(spec.turns, spec.conversations, rng)
    prompt, output = spec.lengths.draw(turn.size, rng)
    return Plan(kind="synthetic", turn=turn, prompt_tokens=prompt, output_tokens=output)


def turn_numbers(turns: Length, conversations: int, rng: np.random.Generator) -> Integers:
    """0, 1, … for each conversation, one after the other."""
    counts = turns.draw(conversations, rng)
    starts = np.repeat(np.cumsum(counts) - counts, counts)
    return np.arange(int(counts.sum()), dtype=np.int64) - starts
