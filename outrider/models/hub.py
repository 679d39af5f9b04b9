"""The model hub: can it be reached, where is it, and files of a repository. Asked once before a download, because the
hub's own client would retry for half a minute on a machine without a network."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from outrider.core.errors import UnknownName
from outrider.models.quiet import first_line

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


def snapshot(name: str, patterns: Sequence[str], revision: str | None = None) -> Path:
    """The folder with these files of a repository: downloaded, or as the local cache has them without a network."""
    from huggingface_hub import snapshot_download

    offline = not reachable()
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns), local_files_only=offline))
    except Exception as error:  # of the client's own classes, of its HTTP library, or of the file system
        why = f"the hub {endpoint()} could not be reached and it is not in the local cache" if offline else None
        raise UnknownName(f"no {name!r} on the hub: {why or first_line(error)}; a local folder works too") from error
