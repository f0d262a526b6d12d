"""Certificates for tests, made anew by ``trustme``, so that no program outside Python is needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True)
class Certificate:
    """PEM files: the authority's certificate, and a certificate for localhost with its key."""

    ca: Path
    cert: Path
    key: Path


def make_certificate(directory: Path, name: str = "server") -> Certificate:
    authority = trustme.CA()
    issued = authority.issue_cert("localhost", "127.0.0.1")
    made = Certificate(directory / f"{name}.ca", directory / f"{name}.pem", directory / f"{name}.key")
    authority.cert_pem.write_to_path(made.ca)
    issued.private_key_pem.write_to_path(made.key)
    for index, blob in enumerate(issued.cert_chain_pems):
        blob.write_to_path(made.cert, append=index > 0)
    return made
