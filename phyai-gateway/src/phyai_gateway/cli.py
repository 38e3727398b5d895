"""``phyai-gateway``: many robots, one pool of model servers."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from phyai_gateway.listeners import ConfigError
from phyai_gateway.memory import keep_freed_memory
from phyai_gateway.version import VERSION

log = logging.getLogger("phyai_gateway")

EPILOG = """\
Everything binds 127.0.0.1. To open a listener to robots on the network, give it an address and
either --token-file, or --tls-cert and --tls-key, or --insecure-bind. Protocols that --listen knows:
`phyai-gateway --protocols`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway; returns the exit status: 2 for wrong settings."""
    args = parser().parse_args(argv)
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    from phyai_gateway import running

    try:
        if args.protocols:
            print("\n".join(sorted(running.protocols())) or "none")
            return 0
        plan = running.plan_of(args)
    except (ConfigError, ValueError) as error:
        print(f"phyai-gateway: {error}", file=sys.stderr)
        return 2
    keep_freed_memory()
    try:
        if plan.share.many and args.worker is None:
            words = sys.argv[1:] if argv is None else argv
            return asyncio.run(running.supervise(plan, words))
        return asyncio.run(running.run(plan))
    except (ConfigError, OSError) as error:
        print(f"phyai-gateway: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parser() -> argparse.ArgumentParser:
    """Return the command line's parser."""
    found = argparse.ArgumentParser(
        prog="phyai-gateway", epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--version", action="version", version=f"phyai-gateway {VERSION}")
    found.add_argument("--protocols", action="store_true", help="print the installed protocols")
    found.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    _backends(found.add_argument_group("model servers"))
    _listeners(found.add_argument_group("listeners"))
    _security(found.add_argument_group("security"))
    _behaviour(found.add_argument_group("behaviour"))
    return found


def _backends(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--backend",
        nargs=2,
        action="append",
        default=[],
        metavar=("MODEL", "HOST:PORT"),
        help="a model server; may be repeated, and added later by POST /v1/backends",
    )
    group.add_argument(
        "--state",
        type=Path,
        metavar="FILE",
        help="keep what is registered while it runs, for the next start",
    )
    group.add_argument(
        "--backends-file",
        type=Path,
        metavar="FILE",
        help="a JSON or YAML list of {model_name, endpoint, weight}, followed while it changes",
    )
    group.add_argument(
        "--allow-mixed",
        action="store_true",
        help="let backends with different contracts serve one name",
    )
    group.add_argument("--backend-ca", type=Path, metavar="PEM", help="speak TLS to backends")
    group.add_argument(
        "--backend-token-file", type=Path, metavar="FILE", help="token that backends ask for"
    )


def _listeners(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--gateway",
        default="127.0.0.1:50111",
        metavar="HOST:PORT",
        help="native gRPC (default %(default)s)",
    )
    group.add_argument(
        "--http-host", default="127.0.0.1", metavar="HOST", help="HTTP (default %(default)s)"
    )
    group.add_argument(
        "--http-port", type=int, default=30000, metavar="PORT", help="default %(default)s"
    )
    group.add_argument(
        "--admin",
        metavar="HOST:PORT",
        help="serve status page and /v1/backends here, and no longer on the HTTP port",
    )
    group.add_argument("--http-model", metavar="MODEL", help="for HTTP requests that name none")
    group.add_argument(
        "--rlinf-envelope",
        default="batched",
        choices=("batched", "per_env"),
        help="how envelope answers hold several environments (default %(default)s)",
    )
    group.add_argument(
        "--listen",
        action="append",
        default=[],
        metavar="PROTOCOL[=HOST:PORT][,model=MODEL][,key=value...]",
        help="another protocol, on a port of its own; may be repeated; model: for clients that "
        "name none",
    )
    group.add_argument(
        "--lerobot",
        nargs="?",
        const="127.0.0.1:8080",
        metavar="HOST:PORT",
        help="LeRobot's async clients (default address %(const)s)",
    )
    group.add_argument("--lerobot-fps", metavar="HZ", help="rate of chunks whose model says none")
    group.add_argument(
        "--lerobot-alias",
        action="append",
        default=[],
        metavar="NAME=MODEL",
        help="a policy name that clients send, and the model it means",
    )
    group.add_argument(
        "--lerobot-similarity-atol",
        metavar="DISTANCE",
        help="skip observations whose joints moved less than this",
    )
    group.add_argument(
        "--robot",
        metavar="HOST:PORT",
        help="robot.RobotInference/Communicate (default address 127.0.0.1:50112)",
    )
    group.add_argument(
        "--robot-model",
        metavar="MODEL",
        help="the model that robots on that stream ask for; opens it at its default address",
    )
    group.add_argument(
        "--reflection",
        action="store_true",
        help="gRPC reflection, as grpcurl needs it, on listeners that only this machine reaches",
    )
    group.add_argument(
        "--threads", type=int, metavar="N", help="accepted and not needed: one event loop"
    )


def _security(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--token-file", type=Path, metavar="JSON", help="who may use and manage it")
    group.add_argument("--tls-cert", type=Path, metavar="PEM", help="certificate of the listeners")
    group.add_argument("--tls-key", type=Path, metavar="PEM")
    group.add_argument(
        "--tls-client-ca", type=Path, metavar="PEM", help="clients need certificates"
    )
    group.add_argument(
        "--insecure-bind",
        action="store_true",
        help="let listeners without token and TLS bind other addresses than loopback",
    )
    group.add_argument(
        "--max-message-mib", type=int, default=64, metavar="MIB", help="default %(default)s"
    )


def _behaviour(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--timeout",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds, where none is asked (default 10)",
    )
    group.add_argument(
        "--queue",
        type=int,
        default=16,
        metavar="N",
        help="waiting requests per ready backend (default 16)",
    )
    group.add_argument(
        "--slots",
        type=int,
        default=32,
        metavar="N",
        help="requests in flight per backend that says no number (default 32)",
    )
    group.add_argument(
        "--max-observation-age", type=float, default=1.0, metavar="S", help="seconds (default 1)"
    )
    group.add_argument(
        "--probe-period",
        type=float,
        default=5.0,
        metavar="S",
        help="seconds between probes (default 5)",
    )
    group.add_argument(
        "--probe-timeout", type=float, default=2.0, metavar="S", help="seconds (default 2)"
    )
    group.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="processes that share the ports of native, openpi, rlinf and kserve; backends come "
        "from --backends-file and --backend alone, as management is one process's",
    )
    group.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    group.add_argument(
        "--grace",
        type=float,
        default=10.0,
        metavar="S",
        help="seconds to finish on SIGTERM (default 10)",
    )


if __name__ == "__main__":
    sys.exit(main())
