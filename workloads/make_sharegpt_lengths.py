"""Make ``sharegpt_lengths.csv``: the prompt and output lengths of ShareGPT, from the data set and a tokenizer.

    python workloads/make_sharegpt_lengths.py ShareGPT_V3_unfiltered_cleaned_split.json tokenizer.json "DeepSeek V4" \\
        > workloads/sharegpt_lengths.csv

The third argument is the tokenizer's name for the remark at the top.

The pairs are thinned by strata: sorted by prompt length into 64 groups of equal size, and in each group the output
lengths at 64 evenly spaced ranks. So 4,096 pairs keep both marginals and their relation closer than a random sample.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vllm_locust.workload.load import load_workload

GROUPS = 64

Lengths = npt.NDArray[np.int64]


def thin(prompt: Lengths, output: Lengths, groups: int = GROUPS) -> tuple[Lengths, Lengths]:
    """``groups`` times ``groups`` of the pairs, fewer where there are not as many, in the order of the strata."""
    # Ties are broken at random, or equal prompts would bring the order of the file into a group.
    ties = np.random.default_rng(0).random(prompt.size)
    picks = []
    for group in np.array_split(np.lexsort((ties, prompt)), min(groups, prompt.size)):
        by_output = group[np.lexsort((ties[group], output[group]))]
        ranks = (np.arange(groups) + 0.5) / groups * by_output.size
        picks.append(by_output[np.unique(ranks.astype(np.int64))])
    chosen = np.concatenate(picks)
    return prompt[chosen], output[chosen]


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    file, tokenizer, tokenizer_name = sys.argv[1:]
    with tempfile.TemporaryDirectory() as cache:
        workload = load_workload(
            file, tokenizer=tokenizer, max_model_len=None, max_tokens=None, seed=0, cache_dir=Path(cache)
        )
        prompt, output = workload.length_reference()
        pairs = sorted(zip(*(lengths.tolist() for lengths in thin(prompt, output)), strict=True))
    print(f"# Token lengths of {prompt.size:,} first messages and their answers in {Path(file).name},")
    print(f"# counted by the tokenizer of {tokenizer_name} without chat template, thinned to {len(pairs):,} pairs")
    print("# by make_sharegpt_lengths.py")
    print("prompt_tokens,output_tokens")
    for pair in pairs:
        print(*pair, sep=",")


if __name__ == "__main__":
    main()
