"""The model hub: can it be reached, and where is it. Asked once before a download, because the hub's own client would
retry for half a minute on a machine without a network."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def endpoint() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def reachable(timeout: float = 3.0) -> bool:
    """One request, through the same session (proxies, certificates) that a download would use. Any answer counts."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=timeout)
    except Exception as error:  # the client's error classes changed with its HTTP library; none of them is fatal here
        logger.debug("hub %s not reachable: %s", constants.ENDPOINT, error)
        return False
    return True
