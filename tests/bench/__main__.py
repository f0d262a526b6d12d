"""``python -m tests.bench``: see ``--help``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import shlex
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.bench import cases, scale
from tests.bench.clients.aiperf import AIPerf
from tests.bench.clients.client import Client
from tests.bench.clients.epoll import EpollClient
from tests.bench.clients.guidellm import GuideLLM
from tests.bench.clients.ours import VllmLocust
from tests.bench.clients.vllm_bench import VllmBench
from tests.bench.placement import default_placement
from tests.bench.results import Results, as_json, doubling_lines, live_view_lines, machine, markdown, text_table

HERE = Path(__file__).resolve().parent
CLIENTS: dict[str, Client] = {
    "epoll": EpollClient(),
    "kernel": VllmLocust("kernel"),
    "sse": VllmLocust("sse"),
    "openai": VllmLocust("openai"),
    "vllm": VllmBench(),
    "aiperf": AIPerf(),
    "guidellm": GuideLLM(),
}
LOAD_CASES = ("matrix", "ceiling", "overload", "hog", "linearity")
CASES = (*LOAD_CASES, *scale.CASES, "live_view")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description="Measures clients of an LLM server against a server that tells the truth, one core each, and what "
        "a large run costs: snapshots of 1,000 workers, the recorder, the merge of 100 M tokens (1 GB of disk).",
        epilog="VLLM_BENCH_PYTHON, AIPERF_PYTHON and GUIDELLM_PYTHON name interpreters that have the peers; else they "
        "are installed into .bench-venvs/ from the package index. BENCH_TOKENIZER names a tokenizer directory.",
    )
    parser.add_argument(
        "--quick", action="store_true", help="about two minutes: own transports and the C client, two loads"
    )
    parser.add_argument("--clients", default=None, help=f"comma list of {','.join(CLIENTS)} (default: all)")
    parser.add_argument("--cases", default=None, help=f"comma list of {','.join(CASES)} (default: all)")
    parser.add_argument("--streams", default=None, help="comma list for the matrix (default: 100,500,1000,2000)")
    parser.add_argument("--window", type=float, default=None, help="seconds of each run that count (default: 8)")
    parser.add_argument(
        "--tries", type=int, default=None, help="runs at most where neighbours disturb them (default: 3)"
    )
    parser.add_argument(
        "--priority", action="store_true", help="the client goes before its neighbours: SCHED_FIFO or nice (needs root)"
    )
    parser.add_argument(
        "--limit", type=float, default=None, help="tokens/s for the overload case when ceiling is not run"
    )
    parser.add_argument("--work", type=Path, default=None, help="keep logs and reports of all runs here")
    parser.add_argument(
        "--output", type=Path, default=HERE / "RESULTS.md", help="the report; a .json is written beside it"
    )
    return parser


def _chosen(text: str | None, known: Sequence[str], default: Sequence[str], flag: str) -> list[str]:
    names = list(default) if text is None else [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise SystemExit(f"{flag} {text}: {', '.join(unknown) or 'nothing'} is not among {', '.join(known)}")
    return names


def _usable(names: Sequence[str], results: Results) -> list[Client]:
    """The clients that can run here. A peer that cannot be had is named, and the others go on."""
    usable = []
    for name in names:
        client = CLIENTS[name]
        try:
            client.prepare()
        except (RuntimeError, OSError) as error:
            print(f"{client.name} is left out: {error}", file=sys.stderr)
            results.versions[client.name] = f"left out: {error}"
            continue
        results.versions[client.name] = client.version()
        usable.append(client)
    return usable


def _run_cases(
    chosen: Sequence[str], bench: cases.Bench, clients: Sequence[Client], args: argparse.Namespace, results: Results
) -> None:
    """Rows are added as they come, so that a run that is cut short keeps what it has."""
    own = [client for client in clients if client.name.startswith("vllm-locust")]
    kernel = next((client for client in own if client.name.endswith("kernel")), None)
    if "matrix" in chosen:
        default = "100,1000" if args.quick else "100,500,1000,2000"
        for row in cases.matrix(bench, clients, [int(n) for n in (args.streams or default).split(",")]):
            results.add(row)
    if "ceiling" in chosen:
        for client in clients:
            if client is kernel or client.name == "epoll-c":
                for row in cases.ceiling(bench, client):
                    results.add(row)
                results.limits[client.name] = cases.highest_within(results.rows, client.name)
    if kernel is None:
        return
    limit = args.limit or results.limits.get(kernel.name)
    if "overload" in chosen and limit is not None:
        results.add(cases.overload(bench, kernel, limit))
    if "hog" in chosen:
        for row in cases.hog(bench, own):
            results.add(row)
    if "linearity" in chosen:
        results.doublings.extend(cases.linearity(bench, kernel))


def _run_scale(chosen: Sequence[str], work: Path, results: Results) -> None:
    for name in chosen:
        for claim in scale.CASES[name](work) if name in scale.CASES else ():
            results.claims.append(claim)
            print("    " + " · ".join(scale.cells(claim)), file=sys.stderr, flush=True)


def _command(args: argparse.Namespace) -> str:
    """What to type to measure the same again; where its files went is of no interest."""
    said = {k: v for k, v in vars(args).items() if k not in ("work", "output") and v not in (None, False)}
    flags = (f"--{k}" if v is True else f"--{k}={v}" for k, v in said.items())
    return shlex.join(["python", "-m", "tests.bench", *flags])


def _write(results: Results, output: Path) -> None:
    print(text_table(results.rows))
    for line in doubling_lines(results.doublings):
        print("  ".join(line))
    for claim in results.claims:
        print("  ".join(scale.cells(claim)))
    for line in live_view_lines(results.live_views):
        print("  ".join(line))
    output.write_text(markdown(results))
    output.with_suffix(".json").write_text(as_json(results))
    print(f"\nwritten: {output}")


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every context ends what it started
    clients = _chosen(
        args.clients, list(CLIENTS), ["epoll", "kernel", "openai"] if args.quick else list(CLIENTS), "--clients"
    )
    chosen = _chosen(args.cases, CASES, ["matrix"] if args.quick else CASES, "--cases")
    results = Results(
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        machine=machine(),
        versions={},
        command=_command(args),
    )
    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        stack.callback(_write, results, args.output)
        bench = cases.Bench(
            work=(args.work or Path(scratch)).resolve(),
            placement=default_placement(args.priority),
            window_s=args.window or (4.0 if args.quick else 8.0),
            tries=args.tries or (1 if args.quick else 3),
        )
        if set(chosen) & set(LOAD_CASES):
            _run_cases(chosen, bench, _usable(clients, results), args, results)
        _run_scale(chosen, bench.work, results)
        if "live_view" in chosen:
            results.live_views.extend(cases.live_views())
    loads = any(not isinstance(row.run, str) for row in results.rows)
    measured = loads or results.doublings or results.claims or results.live_views
    return 0 if measured and all(claim.holds for claim in results.claims) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
