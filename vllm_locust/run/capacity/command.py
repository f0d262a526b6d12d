"""``vllm-locust capacity``: Locust with the search switched on, in this terminal."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from vllm_locust.capacity_options import CAPACITY_FLAGS, CAPACITY_SWITCHES, EXAMPLE
from vllm_locust.load_profile import Quantity
from vllm_locust.shipped import shipped_path

_METAVARS = {"--max-probes": "N", "--precision": "SHARE", "--resume": "RUN_DIR"}
_LOCUSTFILES = {Quantity.RATE: "open_loop.py", Quantity.USERS: "chat.py"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-locust capacity",
        usage="%(prog)s [--of rate|users] --host URL --slo SLO [flags]",
        description="Find the highest load at which every per-stage SLO is met, in one run of Locust, and report it "
        "with an interval. Flags of locust and of this package (vllm-locust flags) are passed on: --host, --slo, "
        "--workload, --master --expect-workers N, --processes N …",
        epilog=f"An SLO must be given: {EXAMPLE}. Exit code 3: it is missed even at the lowest load.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--of", choices=list(Quantity), default=Quantity.RATE, help="requests per second (default), or users"
    )
    parser.add_argument("-f", "--locustfile", help="default: open_loop.py, or chat.py for users, as shipped")
    for flag, default, text in CAPACITY_FLAGS[1:]:
        shown = text if default is None else f"{text} (default: {default})"
        metavar = _METAVARS.get(flag, "LOAD" if flag.endswith("-load") else "TIME")
        parser.add_argument(flag, metavar=metavar, help=shown.replace("%", "%%"))
    for flag, text in CAPACITY_SWITCHES:
        parser.add_argument(flag, action="store_true", help=text.replace("%", "%%"))
    return parser


def locust_arguments(arguments: Sequence[str]) -> list[str]:
    """What Locust is started with. ``--help`` and a wrong ``--of`` leave through argparse."""
    options, passed_on = _parser().parse_known_args(arguments)
    own = []
    for flag, _, _ in CAPACITY_FLAGS[1:]:
        value = getattr(options, flag[2:].replace("-", "_"))
        own += [] if value is None else [f"{flag}={value}"]
    own += [flag for flag, _ in CAPACITY_SWITCHES if getattr(options, flag[2:].replace("-", "_"))]
    locustfile = options.locustfile or str(shipped_path(_LOCUSTFILES[Quantity(options.of)]))
    return ["-f", locustfile, "--headless", "--only-summary", "--capacity", str(options.of), *own, *passed_on]


def run_capacity(arguments: Sequence[str]) -> NoReturn:
    """This process becomes Locust: signals and the exit code are its own."""
    command = [sys.executable, "-m", "locust", *locust_arguments(arguments)]
    sys.stdout.flush()
    os.execv(sys.executable, command)
