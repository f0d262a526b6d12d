"""The client's TLS settings."""

from __future__ import annotations

import ssl
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    insecure: bool = False


def tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Raises OSError or ssl.SSLError for files that cannot be used."""
    context = ssl.create_default_context(cafile=files.ca_file)
    if files.cert_file:
        context.load_cert_chain(files.cert_file, files.key_file)
    if files.insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["http/1.1"])
    return context
