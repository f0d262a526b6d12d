"""``python -m vllm_locust``: the same as the ``vllm-locust`` command."""

from __future__ import annotations

import sys

from vllm_locust.cli import main

sys.exit(main())
