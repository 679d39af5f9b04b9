"""Ray on the loopback address only: left alone it listens on every interface of the machine."""

from __future__ import annotations

import os
import sys
from typing import Any

LOOPBACK = "127.0.0.1"
HOOK = f"{__name__}.confine_process"  # called in every process that Ray starts, before anything of ours is


def confine_node() -> None:
    """Changes the environment of this process: a node started from here has the loopback address as its own.

    The setting is the one by which Ray stays away from firewalls on a Mac; its servers then listen there only.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if (
        constants := sys.modules.get("ray._private.ray_constants")
    ) is not None:  # read the setting when it was imported
        constants.ENABLE_RAY_CLUSTER = False  # type: ignore[attr-defined]


def confine_process() -> None:
    """Changes Ray in this process: the server between deployments, which has no setting, listens there as well."""
    from ray._common import tls_utils

    add = tls_utils.add_port_to_grpc_server
    if getattr(add, "by_outrider", False):
        return

    def add_port(server: Any, address: str) -> Any:
        return add(server, address.replace("[::]", LOOPBACK).replace("0.0.0.0", LOOPBACK))

    add_port.by_outrider = True  # type: ignore[attr-defined]
    tls_utils.add_port_to_grpc_server = add_port
