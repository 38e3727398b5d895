"""Which protocol listeners the command line asks for, long and short forms alike."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from phyai_gateway.listeners import ConfigError, Listen, parse_endpoint, parse_listen

STATE_FILE = "state_file"  # of listeners that know their robots again after a restart
KEEPS_STATE = ("lerobot",)


def listens_of(args: argparse.Namespace) -> list[Listen]:
    """Return the native listener and all others; raises ConfigError."""
    host, port = option_endpoint("--gateway", args.gateway)
    found = [Listen("native", host, port), *map(_listen, args.listen)]
    found += [*_lerobot(args), *_robot(args)]
    return found if args.state is None else _with_state(found, args.state)


def option_endpoint(option: str, text: str, *, any_port: bool = True) -> tuple[str, int]:
    """Return host and port of an option's HOST:PORT; raises ConfigError that names the option."""
    try:
        return parse_endpoint(text, any_port=any_port)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from None


def _listen(text: str) -> Listen:
    try:
        return parse_listen(text)
    except ConfigError as error:
        raise ConfigError(f"--listen {text!r:.80}: {error}") from None


def _lerobot(args: argparse.Namespace) -> list[Listen]:
    options = {"fps": args.lerobot_fps, "similarity_atol": args.lerobot_similarity_atol}
    given = {key: value for key, value in options.items() if value is not None}
    given |= dict(map(_alias, args.lerobot_alias))
    if args.lerobot is None:
        if given:
            raise ConfigError("--lerobot-... options need --lerobot; it is missing. Add it.")
        return []
    host, port = option_endpoint("--lerobot", args.lerobot)
    return [Listen("lerobot", host, port, _age(args) | given)]


def _robot(args: argparse.Namespace) -> list[Listen]:
    if args.robot is None and args.robot_model is None:
        return []
    host, port = ("127.0.0.1", None)
    if args.robot is not None:
        host, port = option_endpoint("--robot", args.robot)
    model = {} if args.robot_model is None else {"model": args.robot_model}
    return [Listen("robot", host, port, _age(args) | model)]


def _age(args: argparse.Namespace) -> dict[str, str]:
    return {"max_observation_age_s": str(args.max_observation_age)}


def _alias(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not name or not model:
        raise ConfigError(f"--lerobot-alias must be NAME=MODEL; got {text!r:.80}.")
    return f"alias.{name}", model


def _with_state(listens: Sequence[Listen], state: Path) -> list[Listen]:
    """Return them with a file beside that of ``--state`` for each one that keeps robots."""
    found: list[Listen] = []
    count = 0
    for listen in listens:
        if listen.protocol in KEEPS_STATE and STATE_FILE not in listen.options:
            count += 1
            number = "" if count == 1 else f"-{count}"
            file = state.absolute().with_name(f"{state.name}.{listen.protocol}{number}")
            listen = replace(listen, options={**listen.options, STATE_FILE: str(file)})
        found.append(listen)
    return found
