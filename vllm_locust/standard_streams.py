"""Standard input, output and error of a process, whatever it was started with: ``>&-``, ``> /dev/full``, ``| head``."""

from __future__ import annotations

import io
import os
import sys
from typing import Final, TextIO

from vllm_locust.errors import VllmLocustError

READER_GONE: Final = 141
"""What a shell says of a program that SIGPIPE ended."""


class OutputFailed(VllmLocustError):
    """Standard output takes nothing more. Make room where it goes, or send it elsewhere."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"standard output cannot be written: {error.strerror}; send it elsewhere, or make room there")
        self.reader_gone = isinstance(error, BrokenPipeError)


class Output(io.TextIOBase):
    """Standard output whose faults are told from those of files and sockets. ``write`` and ``flush`` raise
    ``OutputFailed``.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise self._failed(error) from None

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise self._failed(error) from None

    def isatty(self) -> bool:
        return self._stream.isatty()

    def _failed(self, error: OSError) -> OutputFailed:
        # What is still held back would be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        return OutputFailed(error)


def open_closed_streams(*, output_is_needed: bool) -> None:
    """Put /dev/null where one of the first three descriptors is closed: the next file or socket would get its number,
    and be taken for it by whoever is started later. Where ``output_is_needed``, writing to a closed standard output
    still fails.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is the one that is given.
            os.open(os.devnull, os.O_RDONLY if number == 1 and output_is_needed else os.O_RDWR)
            os.set_inheritable(number, True)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the process ends
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A run is no failure where a terminal cannot show a sign of its report.
        sys.stdout.reconfigure(errors="replace")
