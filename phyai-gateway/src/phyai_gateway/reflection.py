"""gRPC server reflection, for grpcurl and the like: asked for, and only on loopback listeners."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from phyai_gateway.listeners import ConfigError

EXTRA = "reflection"


def check() -> None:
    """Raise ConfigError unless the package that reflection needs is installed."""
    try:
        import grpc_reflection.v1alpha.reflection  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--reflection needs the package grpcio-reflection; it is not installed. Run "
            f"`pip install 'phyai-gateway[{EXTRA}]'`."
        ) from None


def add(server: Any, services: Iterable[str]) -> None:
    """Let the server describe its services; those without a message definition here are left out.

    server: not started yet. Raises ConfigError as ``check``.
    """
    check()
    from google.protobuf import descriptor_pool
    from grpc_reflection.v1alpha import reflection

    pool = descriptor_pool.Default()
    known = []
    for name in services:
        try:
            pool.FindServiceByName(name)
        except KeyError:
            continue
        known.append(name)
    reflection.enable_server_reflection((*known, reflection.SERVICE_NAME), server, pool)
