"""The ``vllm-locust`` command: what comes before and after a load run. Flags and exit codes only."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path

from vllm_locust import __version__
from vllm_locust.errors import NoGpu, UsageError, VllmLocustError
from vllm_locust.standard_streams import READER_GONE, Output, OutputFailed, open_closed_streams


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    # A search becomes Locust, whose run needs no output.
    open_closed_streams(output_is_needed=arguments[:1] != ["capacity"])
    try:
        with redirect_stdout(Output(sys.stdout)) as output:
            try:
                return _run(arguments)
            finally:
                output.flush()
    except VllmLocustError as error:
        if isinstance(error, OutputFailed) and error.reader_gone:
            # Whoever read the output, such as head, has seen enough.
            return READER_GONE
        for problem in error.problems:
            sys.stderr.write(f"vllm-locust: {problem}\n")
        return error.exit_code


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["simserver"]:
        # It has a command line of its own, with vLLM's flag names.
        simserver: Callable[[Sequence[str]], int] = importlib.import_module("vllm_locust.simserver.command").main
        return simserver(arguments[1:])
    if arguments[:1] == ["capacity"]:
        # Most of its flags are Locust's.
        from vllm_locust.run.capacity.command import run_capacity

        run_capacity(arguments[1:])
    options = _parser().parse_args(arguments)
    return int(options.run(options))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-locust", description="Before and after a load run with Locust.")
    parser.add_argument("--version", action="version", version=f"vllm-locust {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="a distributed ShareGPT load test against the simulated server")
    demo.add_argument("--run-dir", help="directory for the results (default: runs/<run id>)")
    demo.add_argument("--duration", default="30s", help="length of the measurement window (default: 30s)")
    demo.add_argument("--users", type=int, default=24, help="simulated users (default: 24)")
    demo.set_defaults(run=_demo)

    merge = commands.add_parser("merge", help="write a run's tables and reports from its records")
    merge.add_argument("which", metavar="RUN", help="the run directory, or the id of a run")
    merge.add_argument(
        "--spool",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="spools copied from a worker's host; repeatable",
    )
    merge.add_argument("--redis-url", help="take in what is left of the run in this Redis or Valkey first")
    merge.add_argument("--redis-password-file", type=Path, help="file that holds the Redis password")
    merge.add_argument("--run-dir", type=Path, help="the directory of the run RUN (default: runs/<run id>)")
    merge.set_defaults(run=_merge)

    commands.add_parser(
        "capacity", help="search for the highest load within the SLOs (see vllm-locust capacity --help)"
    )
    _add_collect(commands)
    _add_doctor(commands)

    report = commands.add_parser("report", help="write a run's summary and reports anew, and print the table")
    report.add_argument("run_dir", type=Path, help="the run directory")
    report.add_argument(
        "--export",
        action="append",
        default=[],
        choices=["csv", "jsonl", "openmetrics", "wandb", "mlflow"],
        help="write the results in another form as well; repeatable",
    )
    report.set_defaults(run=_report)

    _add_compare(commands)

    path = commands.add_parser("path", help="print where a shipped locustfile, workload, load shape or ACL lies")
    path.add_argument("name", help="for example chat.py, sharegpt.yaml or redis.acl")
    path.set_defaults(run=_path)

    flags = commands.add_parser("flags", help="the flags that a locustfile of this package adds to locust's own")
    flags.set_defaults(run=_flags)

    commands.add_parser("simserver", help="the simulated vLLM server (see vllm-locust simserver --help)")
    return parser


def _add_collect(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    collect = commands.add_parser("collect", help="sample this host's GPUs into Redis, for all runs, until stopped")
    collect.add_argument("--redis-url", required=True, help="the Redis or Valkey that runs use: redis://HOST:PORT/DB")
    collect.add_argument("--redis-password-file", type=Path, help="file that holds the Redis password")
    collect.add_argument(
        "--interval", default="100ms", help="time between two samples, 10ms to 60s; slow fields once a second"
    )
    collect.add_argument(
        "--gpus", help="indices or UUIDs of GPUs or MIG instances, by commas (default: CUDA_VISIBLE_DEVICES, else all)"
    )
    collect.add_argument(
        "--dcgm-url",
        action="append",
        default=[],
        metavar="URL",
        help="read a DCGM exporter's page instead of this host's GPUs; repeatable (start it with --collect-interval "
        "1000: by itself it looks at the GPUs every 30 s)",
    )
    collect.add_argument("--host-only", action="store_true", help="this host's CPU, memory and network, and no GPU")
    collect.add_argument(
        "--host-name", metavar="NAME", help="what this host is called in the tables (default: its own name)"
    )
    collect.set_defaults(run=_collect)


def _add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    doctor = commands.add_parser("doctor", help="check this host, Redis, the server and the GPUs, and say what to do")
    doctor.add_argument("--role", choices=["master", "worker", "redis", "gpu"], help="default: one machine for all")
    doctor.add_argument("--users", type=int, default=100, help="users on this host (default: 100)")
    doctor.add_argument("--processes", type=int, default=1, help="worker processes on this host (default: 1)")
    doctor.add_argument("--host", help="address of the server: http://HOST:PORT")
    doctor.add_argument("--api-key-file", help="file that holds the API key (else OPENAI_API_KEY)")
    doctor.add_argument("--ca-file", help="PEM file with the CA of the server's certificate")
    doctor.add_argument("--cert-file", help="PEM file with the client's certificate")
    doctor.add_argument("--key-file", help="PEM file with the client's private key")
    doctor.add_argument("--insecure", action="store_true", help="do not check the server's certificate")
    doctor.add_argument("--redis-url", help="the Redis or Valkey that runs use: redis://HOST:PORT/DB")
    doctor.add_argument("--redis-password-file", help="file that holds the Redis password")
    doctor.add_argument("--master-host", help="of a worker: where its master runs")
    doctor.add_argument("--master-port", type=int, default=5557, help="the master's port (default: 5557)")
    doctor.add_argument("--run-dir", help="where results and spools will lie (default: runs)")
    doctor.add_argument("--json", action="store_true", help="print the checks with their figures as JSON")
    doctor.set_defaults(run=_doctor)


def _add_compare(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    compare = commands.add_parser("compare", help="hold runs against a base; exit 3 on a regression; scaling curves")
    compare.add_argument("runs", nargs="+", metavar="RUN", help="BASE NEW…: run directories; repeats as DIR,DIR,…")
    compare.add_argument(
        "--fail-if", action="append", default=[], metavar="LIMIT", help="such as 'p99(ttft) +5%%'; repeatable"
    )
    compare.add_argument(
        "--expect-different", default="", metavar="NAMES", help="settings that may differ, by commas: what is compared"
    )
    compare.add_argument("--allow-invalid", action="store_true", help="take runs whose measurement is invalid")
    compare.add_argument("--scaling", metavar="TAG", help="speed-up and efficiency over runs with --tag TAG=1, 2, …")
    compare.add_argument("--markdown", metavar="FILE", help="write a page for a pull request; - prints it")
    compare.add_argument("--junit", metavar="FILE", help="write the limits as JUnit XML; - prints it")
    compare.add_argument("--json", metavar="FILE", help="write everything as JSON; - prints it")
    compare.set_defaults(run=_compare)


def _demo(options: argparse.Namespace) -> int:
    from vllm_locust.run.demo import run_demo

    return run_demo(duration=options.duration, users=options.users, run_dir=options.run_dir)


def _merge(options: argparse.Namespace) -> int:
    from vllm_locust.run.results.merge import merge_run
    from vllm_locust.run.results.recovery import MergeOrder

    order = MergeOrder.parse(
        options.which,
        run_dir=options.run_dir,
        spool_dirs=options.spool,
        redis_url=options.redis_url,
        redis_password_file=options.redis_password_file,
    )
    merged = merge_run(order)
    print(merged.text)
    return merged.exit_code


def _collect(options: argparse.Namespace) -> int:
    from vllm_locust.run.telemetry.collect import CollectOrder, collect

    order = CollectOrder.parse(
        redis_url=options.redis_url,
        redis_password_file=options.redis_password_file,
        interval=options.interval,
        gpus=options.gpus,
        dcgm_urls=options.dcgm_url,
        host_only=options.host_only,
        host_name=options.host_name,
    )
    try:
        return collect(order)
    except NoGpu as error:
        raise UsageError(
            f"{error}; run it on the GPU host (in a container: with the NVIDIA runtime), give --dcgm-url, or "
            "--host-only for this host's load without a GPU"
        ) from None


def _doctor(options: argparse.Namespace) -> int:
    from vllm_locust.run.doctor.examine import DoctorOrder, run_doctor

    return run_doctor(DoctorOrder.parse(vars(options)), in_json=options.json)


def _report(options: argparse.Namespace) -> int:
    from vllm_locust.run.results.merge import report_run
    from vllm_locust.store.rundir import RunDirectory, read_json

    run_dir = RunDirectory(options.run_dir)
    merged = report_run(run_dir)
    print(merged.text)
    if options.export:
        from vllm_locust.run.results.exports import export_run

        export_run(run_dir, read_json(run_dir.run_json), merged.summary, options.export)
    return merged.exit_code


def _compare(options: argparse.Namespace) -> int:
    from vllm_locust.run.results.compare import CompareOrder, Outputs, compare_runs, scaling

    outputs = Outputs(options.markdown, options.junit, options.json)
    if options.scaling is not None:
        if options.fail_if or options.junit:
            raise UsageError("--scaling: a curve has no limits; leave out --fail-if and --junit")
        return scaling(
            options.runs,
            options.scaling,
            expect_different=options.expect_different,
            allow_invalid=options.allow_invalid,
            outputs=outputs,
        )
    base, *news = options.runs
    order = CompareOrder.parse(
        base,
        news,
        fail_if=options.fail_if,
        expect_different=options.expect_different,
        allow_invalid=options.allow_invalid,
    )
    return compare_runs(order, outputs)


def _flags(_: argparse.Namespace) -> int:
    """``locust --help`` is printed before Locust loads the locustfile, so it cannot show them."""
    import configargparse

    from vllm_locust.run.flags import add_flags

    parser = configargparse.ArgumentParser(prog="locust -f LOCUSTFILE", usage="%(prog)s [flags]", add_help=False)
    add_flags(parser)
    print(parser.format_help())
    return 0


def _path(options: argparse.Namespace) -> int:
    from vllm_locust.shipped import shipped_path

    print(shipped_path(options.name))
    return 0
