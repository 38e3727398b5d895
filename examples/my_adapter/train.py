"""Trains the policy on its synthetic task and writes the checkpoint the package ships.

    python train.py [FOLDER]

About a minute on two CPU cores. The modules are the ones the runtime runs.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

# The package beside this script, whichever of this name is installed.
sys.path.insert(0, str(Path(__file__).parent / "src"))
from my_policy import checkpoint, inputs, task

STEPS, BATCH, POOL, RATE = 1000, 64, 150, 2e-3
SHIPPED = Path(__file__).parent / "src" / "my_policy" / "trained"


def batch(random: np.random.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """Return the inputs of a batch of scenes and the expert's normalised actions [B, H, A]."""
    rows, actions = [], []
    for _ in range(BATCH):
        scene, colour = task.draw_scene(random), str(random.choice(list(task.COLOURS)))
        rows.append(inputs.row_tensors(scene.observation(colour), task.CONFIG))
        actions.append(torch.from_numpy(scene.expert(colour)))
    mean, std = torch.tensor(task.CONFIG.action_mean), torch.tensor(task.CONFIG.action_std)
    tensors = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return tensors, (torch.stack(actions) - mean) / std


def main(folder: Path) -> None:
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    encoder, network = checkpoint.build(task.CONFIG, seed=0)
    model = nn.ModuleList([encoder, network]).requires_grad_(True)
    with torch.no_grad():  # start close to no modulation, with open gates
        network.time_out.weight.mul_(0.1)
        blocks = network.time_out.bias.view(network.rows, -1)[:-2].unflatten(0, (-1, 9))
        blocks[:, 6:9] = 1.0
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=STEPS, pct_start=0.1
    )
    began, running = time.perf_counter(), 0.0
    scenes = [batch(random) for _ in range(POOL)]
    for step in range(1, STEPS + 1):
        given, data = scenes[int(random.integers(POOL))]
        noise, sigma = torch.randn_like(data), torch.rand(BATCH).sqrt()  # more of the noisy end
        x = sigma[:, None, None] * noise + (1 - sigma[:, None, None]) * data
        patches, task_token = encoder(**given)
        modulation = network.modulation(sigma).transpose(0, 1)[:, :, None]
        velocity = network.velocity(x, task_token, network.image_keys(patches), modulation)
        loss = (velocity - (noise - data)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        running += float(loss.detach())
        if step % 100 == 0:
            seconds = time.perf_counter() - began
            print(f"step {step:5d}  loss {running / 100:.4f}  {seconds:5.1f} s", flush=True)
            running = 0.0
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint.write(folder, task.CONFIG, *model)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED)
