"""Generated conversations in groups that start with the same text, as the prefix cache of a server sees them.

As a system message the prefix is a system prompt. In the user's message it is a document that several questions are
asked about. With several turns the whole history is a shared prefix too.
"""

from __future__ import annotations

import numpy as np

from vllm_locust.workload.generated import Plan
from vllm_locust.workload.spec import SharedPrefixSpec
from vllm_locust.workload.synthetic import turn_numbers


def plan_shared_prefix(spec: SharedPrefixSpec, seed: int) -> Plan:
    rng = np.random.default_rng(np.random.SeedSequence([seed, 2]))
    turn = turn_numbers(spec.turns, spec.groups * spec.conversations_per_group, rng)
    prompt, output = spec.lengths.draw(turn.size, rng)
    if spec.prefix_role == "user":
        prompt = np.where(turn == 0, prompt + spec.prefix_tokens, prompt)
    conversation = np.cumsum(turn == 0) - 1
    return Plan(
        kind="shared_prefix",
        turn=turn,
        prompt_tokens=prompt,
        output_tokens=output,
        group=conversation % spec.groups,
        prefix_tokens=spec.prefix_tokens,
        prefix_role=spec.prefix_role,
    )
