"""Load generator for LLM servers that speak the OpenAI API, built on Locust."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vllm_locust.run.locust_plugin import ChatUser

__all__ = ["ChatUser", "__version__"]


def __getattr__(name: str) -> Any:
    """Import Locust only when a locustfile asks for a user class: importing it monkey-patches the process."""
    if name == "ChatUser":
        from vllm_locust.run import locust_plugin

        return locust_plugin.ChatUser
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
