"""Token lengths drawn from a distribution. Seeded, and stratified: a few thousand draws already follow it closely."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from vllm_locust.errors import WorkloadError

Tokens: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fixed:
    tokens: int

    def draw(self, count: int, rng: np.random.Generator) -> Tokens:  # noqa: ARG002 - one signature for all
        return np.full(count, self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers from ``min`` to ``max``, both included."""

    min: int
    max: int

    def draw(self, count: int, rng: np.random.Generator) -> Tokens:
        drawn: Tokens = self.min + np.floor(_strata(count, rng) * (self.max - self.min + 1)).astype(np.int64)
        return drawn


@dataclass(frozen=True, slots=True)
class Lognormal:
    """The logarithm is normal with deviation ``sigma``; values outside ``min`` to ``max`` are moved to the limit."""

    median: int
    sigma: float
    min: int
    max: int

    def draw(self, count: int, rng: np.random.Generator) -> Tokens:
        normal = np.array([NormalDist().inv_cdf(share) for share in _strata(count, rng)])
        drawn = np.rint(self.median * np.exp(self.sigma * normal))
        tokens: Tokens = np.clip(drawn, self.min, self.max).astype(np.int64)
        return tokens


Length: TypeAlias = Fixed | Uniform | Lognormal


@dataclass(frozen=True, slots=True)
class Marginals:
    """Prompt and output lengths drawn apart from each other."""

    prompt: Length
    output: Length

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        return self.prompt.draw(count, rng), self.output.draw(count, rng)


@dataclass(frozen=True, slots=True)
class JointLengths:
    """Pairs from a file, so that the relation of prompt and output length stays: each pair equally often."""

    file: Path

    def draw(self, count: int, rng: np.random.Generator) -> tuple[Tokens, Tokens]:
        prompt, output = read_length_pairs(self.file)
        whole = -(-count // prompt.size)
        picks = np.concatenate([rng.permutation(prompt.size) for _ in range(whole)])[:count]
        return prompt[picks], output[picks]


Lengths: TypeAlias = Marginals | JointLengths


def _strata(count: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """One uniform draw from each of ``count`` equal parts of (0, 1), in random order."""
    draws = (np.arange(count) + rng.random(count)) / count
    return rng.permutation(np.clip(draws, 1e-12, 1 - 1e-12))


@cache
def read_length_pairs(path: Path) -> tuple[Tokens, Tokens]:
    """Prompt and output lengths of a ``prompt_tokens,output_tokens`` file; lines that start with ``#`` are remarks."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(
            f"joint_lengths: {path} cannot be read ({error}); name a CSV file of length pairs"
        ) from None
    rows = list(csv.reader(lines))
    if not rows or rows[0] != ["prompt_tokens", "output_tokens"]:
        raise WorkloadError(f"joint_lengths: the first line of {path} must be prompt_tokens,output_tokens")
    try:
        pairs = np.array([[int(prompt), int(output)] for prompt, output in rows[1:]], np.int64).reshape(-1, 2)
    except ValueError:
        raise WorkloadError(f"joint_lengths: {path} has a row that is not two whole numbers; correct it") from None
    if pairs.size == 0 or pairs.min() < 1:
        raise WorkloadError(f"joint_lengths: {path} must hold at least one pair, and no length below 1")
    # The cache hands the same arrays to every caller.
    pairs.flags.writeable = False
    return pairs[:, 0], pairs[:, 1]
