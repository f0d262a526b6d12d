from pathlib import Path

import pytest

from vllm_locust.errors import UsageError
from vllm_locust.shipped import shipped_path

ROOT = Path(__file__).parents[1]


def test_a_file_is_found_by_its_name_or_its_stem() -> None:
    assert shipped_path("chat.py") == shipped_path("chat") == ROOT / "locustfiles" / "chat.py"
    assert shipped_path("sharegpt.yaml") == shipped_path("sharegpt") == ROOT / "workloads" / "sharegpt.yaml"


def test_only_locustfiles_workloads_shapes_and_rights_are_offered() -> None:
    offered = {path.name for kind in ("locustfiles/*.py", "workloads/**/*.yaml") for path in ROOT.glob(kind)}
    offered.add("redis.acl")
    assert "make_sharegpt_lengths.py" not in offered
    with pytest.raises(UsageError, match=r"^path make_sharegpt_lengths\.py: nothing of that name is shipped") as error:
        shipped_path("make_sharegpt_lengths.py")
    assert set(str(error.value).partition("use one of ")[2].split(", ")) == offered
