"""What an answered request leaves behind: nothing that only the garbage collector finds, since its search stops every
stream of the server for as long as it takes.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simserver.raw_client import Client, stream

SERVER = """
import collections, gc, json, sys
gc.disable()
from vllm_locust.simserver.command import main
try:
    main(sys.argv[1:])
finally:
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    names = (type(one).__qualname__ for one in gc.garbage if type(one).__module__.startswith("vllm_locust."))
    print(json.dumps(collections.Counter(names)))
"""


@pytest.mark.parametrize("flags", [(), ("--first-token-ms", "1", "--token-interval-ms", "1")], ids=["engine", "script"])
def test_requests_leave_nothing_to_the_garbage_collector(tmp_path: Path, flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", SERVER, "--port", "0", "--step-base-ms", "1", "--frontend-ms", "0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().split()[1].removesuffix("/v1").rpartition(":")[2])
        for _ in range(3):
            client = Client(socket.create_connection(("127.0.0.1", port)))
            for _ in range(4):
                assert client.ask("/v1/chat/completions", stream()).status == 200
            client.close()
        server.terminate()
        left = json.loads(server.stdout.read())
    # One per server, whose end does not matter.
    assert all(count < 3 for count in left.values()), left
