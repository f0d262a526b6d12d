"""Load generator for LLM servers that speak the OpenAI API, built on Locust."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from vllm_locust.load.open_loop import OpenLoopChatUser
    from vllm_locust.load.users import ChatUser

__all__ = ["ChatUser", "OpenLoopChatUser", "__version__"]


def __getattr__(name: str) -> Any:
    """Import Locust only when a locustfile asks for a user class: importing it monkey-patches the process."""
    if name in ("ChatUser", "OpenLoopChatUser"):
        import vllm_locust.run.locust_plugin  # noqa: F401 - hooks the package to Locust
        from vllm_locust.load import open_loop

        return getattr(open_loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
