"""Asks a model server or a gateway for actions, as a robot would:  python examples/ask_server.py

Start one first:  phyai serve examples/serve_pi05.yaml --preset tiny
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from phyai_gateway.client import Client, ServingError


def main() -> None:
    parser = argparse.ArgumentParser(description="Ask a model server or gateway for actions.")
    parser.add_argument("address", nargs="?", default="127.0.0.1:50063", metavar="HOST:PORT")
    parser.add_argument("--model", default="pi05", help="default %(default)s")
    parser.add_argument("--prompt", default="pick up the cup")
    parser.add_argument("--requests", type=int, default=1, help="default %(default)s")
    args = parser.parse_args()
    with Client(args.address, model=args.model, timeout_s=60) as client:
        contract = client.contract()
        print(f"{args.model}: cameras {', '.join(contract.cameras)}; state {contract.state_dim}")
        rng = np.random.default_rng(0)
        for number in range(args.requests):
            # A robot sends its cameras' pictures: uint8 [height, width, 3] RGB.
            images = {
                name: rng.integers(0, 256, (224, 224, 3), np.uint8) for name in contract.cameras
            }
            state = np.zeros(contract.state_dim or 0, np.float32)
            started = time.perf_counter()
            actions = client.infer(images, state, args.prompt, options={"seed": number})
            took = 1e3 * (time.perf_counter() - started)
            print(f"{number}: {actions.shape[0]} actions of {actions.shape[1]} in {took:.0f} ms")


if __name__ == "__main__":
    try:
        main()
    except ServingError as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
