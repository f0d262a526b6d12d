"""What every address of a server on the command line has in common."""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit


def split_server_url(text: str, example: str) -> SplitResult:
    """Its parts: of ``http`` or ``https`` with a host, or of ``unix`` with a path. Raises ValueError with the fix,
    which is to write an address like ``example``.
    """
    # Looked for first, and in the text itself: no message may repeat what could be a password.
    if "@" in text and not text.strip().startswith("unix:///"):
        raise ValueError("a server address must not hold a user or password; use --api-key-file")
    parts = urlsplit(text.strip())
    if parts.scheme == "unix" and parts.path:
        return parts
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is not a server address; write {example}")
    try:
        parts.hostname.encode("idna")
    except UnicodeError:
        raise ValueError(f"{text!r} names no possible host; write {example}") from None
    return parts


def port_of(parts: SplitResult) -> int:
    """Raises ValueError, with the fix, for one that no server can have."""
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ValueError(f"{parts.netloc!r} names no possible port; write HOST:PORT with a port from 1 to 65535")
    return port if port is not None else (443 if parts.scheme == "https" else 80)


def authority(host: str, port: int, scheme: str) -> str:
    """What goes into the Host header."""
    bracketed = f"[{host}]" if ":" in host else host
    return bracketed if port == (443 if scheme == "https" else 80) else f"{bracketed}:{port}"
