"""The Hugging Face hub where there may be none: found out once, in seconds, instead of by every file's retries.

huggingface_hub repeats a request that reaches nobody for about forty seconds, once for each of a model's files, before it looks into
the cache. On a machine without a network that is the whole start of a run.
"""

from __future__ import annotations

import functools
import logging
import socket
import urllib.parse
import urllib.request

log = logging.getLogger("harness")


@functools.lru_cache(maxsize=4)
def answers(endpoint: str, timeout_s: float = 5.0) -> bool:
    """Whether something listens where the hub is. Through a proxy it cannot be told, and counts as there."""
    if urllib.request.getproxies():
        return True
    parts = urllib.parse.urlsplit(endpoint)
    try:
        with socket.create_connection((parts.hostname or "", parts.port or (80 if parts.scheme == "http" else 443)), timeout_s):
            return True
    except OSError:
        return False


def stay_offline_without_hub() -> str | None:
    """Tells huggingface_hub to use the cache alone, in this process, where the hub does not answer.

    Returns:
        Why nothing can be downloaded, or None where it can.
    """
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    host = urllib.parse.urlsplit(constants.ENDPOINT).netloc
    if answers(constants.ENDPOINT):
        return None
    log.warning("%s does not answer: what is in the cache is used", host)
    constants.HF_HUB_OFFLINE = True
    return f"{host} does not answer"
